"""A task of one's own: sums of two numbers, in words. docs/own_task.md explains it.

`python -m examples.sums`, or with a chat model, which gets the question alone, `... --model DIR --chat`.
"""

import random
import re

from pipeline.records import Problem, Task
from pipeline.settings import Settings
from train_gsm8k import main

LEAST, LARGEST = 3, 60
QUESTION = "Ada has {} apples and finds {} more. How many apples does Ada have now?"


def answer(completion: str) -> int | None:
    """The last number, which maj@k votes on."""
    numbers = re.findall(r"[0-9]+", completion)
    return int(numbers[-1]) if numbers else None


def reward(completion: str, problem: Problem) -> float:
    """+1 for the right answer, -1 for another and for none."""
    return 1.0 if answer(completion) == problem.gold else -1.0


def sums(settings: Settings) -> Task:
    """All sums in random order: the first to train on, the last to test."""
    numbers = range(LEAST, LARGEST + 1)
    problems = [
        Problem(f"{a}+{b}", QUESTION.format(a, b), gold=a + b) for a in numbers for b in numbers
    ]
    random.Random(0).shuffle(problems)
    form = "{0.question}" if settings.chat else "Q: {0.question}\nA:"
    train, test = problems[: settings.problems], problems[-settings.test_problems :]
    return Task("sums", train, test, prompt=form.format, reward=reward, parse=answer)


if __name__ == "__main__":
    main("sums", __doc__, sums)
