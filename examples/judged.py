"""A task with a judge: a program that checks the steps of an answer, within a time limit.

`python -m examples.judged`. The problems are those of sums.py; whether the answer is right does not
count.
"""

import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from subprocess import DEVNULL, TimeoutExpired, call

from examples.sums import sums_task
from toprlib.records import Grade, Problem, Task
from toprlib.settings import Settings
from train_gsm8k import main

SECONDS = 5  # for the steps of one completion
STEP = re.compile(r"[-+*/0-9 ]*[0-9] *= *[0-9]+")  # only digits and signs reach the program
PROGRAM = "import sys; sys.exit(not all(eval(step.replace('=', '==')) for step in sys.argv[1:]))"


def judge(completion: str) -> Grade:
    """+1 if there are steps and all are right, else -1."""
    steps = STEP.findall(completion)
    command = [sys.executable, "-I", "-c", PROGRAM, *steps]
    try:
        status = call(command, timeout=SECONDS, stderr=DEVNULL)
    except TimeoutExpired:  # 9**9**9**9, for instance
        return Grade(-1.0, "too long")
    return Grade(1.0, "right") if steps and status == 0 else Grade(-1.0, "wrong")


def batch_reward(completions: Sequence[str], problems: Sequence[Problem]) -> list[Grade]:
    """The grades of many completions, several at a time."""
    with ThreadPoolExecutor() as threads:
        return list(threads.map(judge, completions))


def judged_task(settings: Settings) -> Task:
    """The problems of sums.py with this judge."""
    return replace(
        sums_task(settings),
        name="judged",
        parse=None,
        reward=None,
        batch_reward=batch_reward,
        outcomes=("right", "wrong", "too long"),
    )


if __name__ == "__main__":
    main("judged", __doc__, judged_task)
