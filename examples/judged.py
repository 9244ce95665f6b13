"""A task with a judge: a program that checks the steps of an answer, within a time limit.

`python -m examples.judged`. The problems are those of sums.py; whether the answer is right does not count.
docs/own_task.md has more on judges.
"""

import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from subprocess import DEVNULL, TimeoutExpired, call

from examples.sums import sums
from pipeline.records import Grade, Problem
from train_gsm8k import main

STEP = re.compile(
    r"[-+*/0-9 ]*[0-9] *= *[0-9]+"
)  # digits and signs: nothing else reaches the program
PROGRAM = "import sys; sys.exit(not all(eval(step.replace('=', '==')) for step in sys.argv[1:]))"


def judge(completion: str) -> Grade:
    """+1 if every step is right, else -1; so it is without a step, and after five seconds: 9**9**9**9 takes ages."""
    steps = STEP.findall(completion)
    try:
        status = call([sys.executable, "-I", "-c", PROGRAM, *steps], timeout=5, stderr=DEVNULL)
    except TimeoutExpired:
        return Grade(-1.0, "too long")
    return Grade(1.0, "right") if steps and status == 0 else Grade(-1.0, "wrong")


def rewards(completions: Sequence[str], problems: Sequence[Problem]) -> list[Grade]:
    """The grades of all completions of a chunk, several at a time."""
    with ThreadPoolExecutor() as threads:
        return list(threads.map(judge, completions))


if __name__ == "__main__":
    changes = {
        "name": "judged",
        "reward": None,
        "batch_reward": rewards,
        "outcomes": ("right", "wrong", "too long"),
    }
    main("judged", __doc__, lambda settings: replace(sums(settings), parse=None, **changes))
