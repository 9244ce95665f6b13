"""A task whose rewards are not +1 and -1: how much of a form an answer keeps, 0 to 1. See docs/in_your_trainer.md.

`python -m examples.strict_format --baseline 0.6`. Without a baseline no reward is negative.
"""

import re
from dataclasses import replace

from pipeline.records import Grade, Problem, Task
from pipeline.settings import Settings
from train_gsm8k import gsm8k_task, main

RULES = (
    re.compile(r".* The answer is [0-9]+\.", re.DOTALL),  # it ends with the answer,
    re.compile(r".*\b([0-9]+)[^0-9=]* The answer is \1\.", re.DOTALL),  # which is the last result,
    re.compile(r".{,60}", re.DOTALL),  # in 60 characters
    re.compile(r"[^=]*=[^=]*"),  # and one step
)


def reward(completion: str, problem: Problem) -> Grade:
    """The share of the rules that the completion keeps, and the outcome's name in results.json."""
    kept = sum(rule.fullmatch(completion) is not None for rule in RULES)
    return Grade(kept / len(RULES), "all" if kept == len(RULES) else "some" if kept else "none")


def strict_format(settings: Settings) -> Task:
    """GSM8K's problems, or those of --data; without `parse`, which maj@k would need: there is nothing to vote on."""
    task = gsm8k_task(settings)
    return replace(
        task,
        name="strict_format",
        grade=None,
        parse=None,
        reward=reward,
        outcomes=("all", "some", "none"),
    )


if __name__ == "__main__":
    main("strict_format", __doc__, strict_format)
