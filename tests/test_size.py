"""The project stays small: lines of Python, and how much of it a small run enters before its first loss.

To raise a budget, raise its number here, in a commit that does nothing else and says what the project gains for it.
Try first whether something else can go.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BUDGETS = {"lines of product": 12_000, "lines of tests": 7_700, "functions to the loss": 72, "files to the loss": 10}
LONGEST = 400  # lines of a module; data may be longer
ROOT = Path(__file__).resolve().parent.parent
COUNT = """
import inspect, json, os, sys
import topr, train_gsm8k

entered = {}  # functions and methods of the project; no nested functions, lambdas, comprehensions or bodies of classes

def enter(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_flags & inspect.CO_OPTIMIZED and "<" not in code.co_qualname:
        file = os.path.relpath(code.co_filename)
        if not file.startswith((".", "<")):
            entered[code.co_qualname, file] = None
    if event == "call" and code is topr.topr_loss.__code__:
        sys.setprofile(None)
        print(json.dumps(list(entered)), flush=True)
        os._exit(0)

sys.setprofile(enter)
train_gsm8k.main("train_gsm8k", "", train_gsm8k.gsm8k_task)
"""


def python_files():
    """The lines of each file of Python that git tracks."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    return {name: len((ROOT / name).read_text().splitlines()) for name in listed.stdout.split()}


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """What the budgets limit, counted here and in a process of its own."""
    files = python_files()
    tests = sum(lines for name, lines in files.items() if name.startswith("tests/"))
    options = "--problems 2 --n 8 --test-problems 2 --test-samples 2 --k 2".split()
    command = [sys.executable, "-c", COUNT, *options, "--out", str(tmp_path_factory.mktemp("way") / "run")]
    found = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    entered = json.loads(found.stdout.splitlines()[-1])
    return {
        "lines of product": sum(files.values()) - tests,
        "lines of tests": tests,
        "functions to the loss": len(entered),
        "files to the loss": len({file for _, file in entered}),
    }


@pytest.mark.parametrize("what", BUDGETS)
def test_the_project_keeps_to_its_budget(counted, what):
    assert counted[what] <= BUDGETS[what]


def test_the_way_to_the_loss_is_seen(counted):
    """A count that sees too little would pass any budget."""
    assert counted["functions to the loss"] > 50


def test_no_module_takes_more_than_a_reading():
    assert not {name: lines for name, lines in python_files().items() if lines > LONGEST and "tests/" not in name}
