"""A task whose rewards lie between 0 and 1: how many rules of a format an answer follows.

`python -m examples.strict_format --baseline 0.6`. Without a baseline no reward is negative. See
docs/in_your_trainer.md.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from toprlib.records import Grade, Problem, Task
from toprlib.settings import Settings
from train_gsm8k import gsm8k_task, main

RULES = (
    re.compile(r".* The answer is [0-9]+\.", re.DOTALL),  # it ends with the answer,
    re.compile(r".*\b([0-9]+)[^0-9=]* The answer is \1\.", re.DOTALL),  # which is the last result,
    re.compile(r".{,60}", re.DOTALL),  # in 60 characters
    re.compile(r"[^=]*=[^=]*"),  # and one step
)


def grade(completions: Sequence[str], problems: Sequence[Problem]) -> list[Grade]:
    """The share of the rules that each completion follows, and the name of the outcome."""
    grades = []
    for completion in completions:
        followed = sum(rule.fullmatch(completion) is not None for rule in RULES)
        outcome = {len(RULES): "all", 0: "none"}.get(followed, "some")
        grades.append(Grade(followed / len(RULES), outcome))
    return grades


def strict_format_task(settings: Settings) -> Task:
    """GSM8K's problems, or those of --data; without maj@k, because no answer is parsed."""
    outcomes = ("all", "some", "none")
    task = gsm8k_task(settings)
    return replace(task, name="strict_format", grade=grade, parse=None, outcomes=outcomes)


if __name__ == "__main__":
    main("strict_format", __doc__, strict_format_task)
