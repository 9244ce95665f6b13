"""A task of your own: sums of two numbers, in words. docs/own_task.md explains tasks.

`python -m examples.sums`. A chat model gets the question alone: `... --model DIR --chat`.
"""

import random
import re
from collections.abc import Sequence

from toprlib.records import Grade, Problem, Task
from toprlib.settings import Settings
from train_gsm8k import main

SMALLEST = 3
LARGEST = 60
QUESTION = "Ada has {} apples and finds {} more. How many apples does Ada have now?"


def parse_answer(completion: str) -> int | None:
    """The last number, which maj@k votes on."""
    numbers = re.findall(r"[0-9]+", completion)
    return int(numbers[-1]) if numbers else None


def grade(completions: Sequence[str], problems: Sequence[Problem]) -> list[Grade]:
    """+1 for the right answer, -1 for another one and for none."""
    grades = []
    for completion, problem in zip(completions, problems, strict=True):
        is_right = parse_answer(completion) == problem.gold
        grades.append(Grade(1.0, "correct") if is_right else Grade(-1.0, "incorrect"))
    return grades


def sums_task(settings: Settings) -> Task:
    """All sums in random order: the first half to train on, the second half to test."""
    problems = []
    for a in range(SMALLEST, LARGEST + 1):
        for b in range(SMALLEST, LARGEST + 1):
            problems.append(Problem(f"{a}+{b}", QUESTION.format(a, b), gold=a + b))
    random.Random(0).shuffle(problems)
    half = len(problems) // 2
    prompt = "{0.question}" if settings.chat else "Q: {0.question}\nA:"
    return Task(
        name="sums",
        train=problems[:half][: settings.problems],
        test=problems[half:][: settings.test_problems],
        prompt=prompt.format,
        grade=grade,
        parse=parse_answer,
        outcomes=("correct", "incorrect"),
    )


if __name__ == "__main__":
    main("sums", __doc__, sums_task)
