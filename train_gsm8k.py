"""Section 4 of the TOPR paper as a script: sample, grade, compose, train, evaluate, on GSM8K or problems like it.

    python train_gsm8k.py                                  # tiny problems, tiny model: 4 minutes on two cores
    python train_gsm8k.py --method reinforce               # the same with naive REINFORCE, which collapses
    python train_gsm8k.py --data GSM8K_DIR --shots 8 ...   # real problems, the paper's 8-shot prompt
    python train_gsm8k.py --samples FILE                   # no sampling: train on completions you already have
    torchrun --nproc-per-node 8 train_gsm8k.py paper       # the paper's run, on eight GPUs

Here is GSM8K: problems, prompt and grading. What any task goes through is in pipeline/run.py, the settings are in
pipeline/settings.py. It writes config.json, results.json, curve.png and a folder for each iteration into `--out`.
"""

import re
from decimal import Decimal
from pathlib import Path

from pydantic import BaseModel

import pipeline.stages
from pipeline import cli as command
from pipeline.problems import read_shots, read_split
from pipeline.records import InputError, Outcome, Problem, Task
from pipeline.settings import Settings, check

# ---- the task: GSM8K's problems, prompt and grading (Section 4.1) ------------------------------------------------

MARKER = "The answer is"
NUMBER = re.compile(r"-?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)")


def parse_answer(text: str) -> Decimal | None:
    """The first number on the line that follows the last "The answer is"; None if there is none.

    `$` and commas are dropped wherever they stand; a colon or a line break right after the marker does not count.

    >>> parse_answer("4 * 300 = 1200. The answer is $1,200.00.")
    Decimal('1200.00')
    """
    _, found, rest = text.rpartition(MARKER)
    line = rest.lstrip(" :\n\t").partition("\n")[0].replace("$", "").replace(",", "")
    number = NUMBER.search(line) if found else None
    return Decimal(number[0]) if number else None


def parse_gold(answer: str) -> Decimal:
    """The number after "####" in GSM8K's answer field; ValueError without one.

    >>> parse_gold("10 * 123 = 1230 eggs.\\n#### 1,230")
    Decimal('1230')
    """
    _, found, rest = answer.rpartition("####")
    number = rest.strip().replace(",", "").replace("$", "")
    if not found or not NUMBER.fullmatch(number):
        raise ValueError("no number after ####")
    return Decimal(number)


def grade(text: str, gold: Decimal) -> Outcome:
    """invalid without "The answer is", else correct if the number that follows equals gold (Section 4.1).

    >>> [grade(text, Decimal(7)) for text in ("The answer is 7.0", "The answer is 8.", "7")]
    ['correct', 'incorrect', 'invalid']
    """
    if MARKER not in text:
        return "invalid"
    return "correct" if parse_answer(text) == gold else "incorrect"


class Gsm8kRow(BaseModel):
    """A line of GSM8K's files."""

    question: str
    answer: str


def load_problems(data: str, split: str) -> list[Problem]:
    """The problems of a split, from DIR/SPLIT.jsonl or from the hub; InputError names the line that has no answer."""
    problems = []
    for line, (where, row) in enumerate(read_split(data, split, Gsm8kRow, configs=["main"]).items(), start=1):
        try:
            problems.append(Problem(f"{split}-{line}", row.question, parse_gold(row.answer)))
        except ValueError as error:
            raise InputError(f"{where}: field answer: {error}") from None
    return problems


def load_shots(count: int, file: Path | None) -> list[str]:
    """`count` worked examples as text: from `file`, or the 8-shot prompt of Wang et al. 2022 in the lm-eval package."""

    def parse(text: str) -> list[str]:
        import yaml

        examples = yaml.safe_load(text)["fewshot_config"]["samples"]
        return [f"Q: {example['question']}\nA: {example['target']}" for example in examples]

    return read_shots(count, file, "Q:", "tasks/gsm8k/gsm8k-cot.yaml", parse)


def gsm8k_task(settings: Settings) -> Task:
    """GSM8K's form of a task: `Q: ... A:` after the shots; with shots, the next `Q:` ends a completion."""
    shots = load_shots(settings.shots, settings.shots_file)
    train = load_problems(settings.data, "train") if settings.samples is None else []
    return Task(
        name="gsm8k",
        train=train[: settings.problems],
        test=load_problems(settings.test_data or settings.data, "test")[: settings.test_problems],
        prompt=lambda problem: "\n\n".join([*shots, f"Q: {problem.question}\nA:"]),
        parse=parse_answer,
        grade=grade,
        stop=("\nQ:",) if shots else (),
    )


# ---- the command -------------------------------------------------------------------------------------------------


def run(settings: Settings) -> dict:
    """Check the settings, load the problems, and run: returns what results.json holds."""
    check(settings)
    return pipeline.stages.run(settings, gsm8k_task(settings))


if __name__ == "__main__":
    command.main("train_gsm8k", __doc__, gsm8k_task)
