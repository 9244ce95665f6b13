"""The project stays small: lines of Python, and how much of it a small run enters before its first loss.

To raise a budget, raise its number here, in a commit that does nothing else and says what the project gains for it.
Try first whether something else can go.
"""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pipeline

BUDGETS = {
    "lines of product": 10_300,
    "lines of tests": 7_300,
    "functions to the loss": 90,  # with nested functions and lambdas
    "files to the loss": 12,
    "nested functions and lambdas in pipeline/": 42,
}
LONGEST = 400  # lines of a module
ROOT = Path(__file__).resolve().parent.parent
COUNT = """
import inspect, json, os, sys, threading
import topr, train_gsm8k, pipeline.stages  # what importing calls is not on the way

NAMELESS = ("<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>")
entered = {}  # functions of the project by file and line, nested functions and lambdas among them

def enter(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_flags & inspect.CO_OPTIMIZED and code.co_name not in NAMELESS:
        file = os.path.relpath(code.co_filename)
        if not file.startswith((".", "<")):
            entered[code.co_qualname, code.co_firstlineno, file] = None
    if event == "call" and code is topr.topr_loss.__code__:
        sys.setprofile(None)
        print(json.dumps(list(entered)), flush=True)
        os._exit(0)

sys.setprofile(enter)
threading.setprofile(enter)
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
        "files to the loss": len({file for *_, file in entered}),
        "nested functions and lambdas in pipeline/": sum(nested(path) for path in (ROOT / "pipeline").rglob("*.py")),
    }


def nested(path):
    """How many functions of a file stand inside another one, and lambdas."""
    tree = ast.parse(path.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inside = {id(inner) for outer in functions for inner in ast.walk(outer) if inner is not outer}
    lambdas = sum(isinstance(node, ast.Lambda) for node in ast.walk(tree))
    return lambdas + sum(id(function) in inside for function in functions)


@pytest.mark.parametrize("what", BUDGETS)
def test_the_project_keeps_to_its_budget(counted, what):
    assert counted[what] <= BUDGETS[what]


def test_the_way_to_the_loss_is_seen(counted):
    """A count that sees too little would pass any budget."""
    assert counted["functions to the loss"] > 50


def test_no_module_takes_more_than_a_reading():
    assert not [n for n, lines in python_files().items() if lines > LONGEST and not n.startswith("tests/")]


def imported(path):
    """The files of pipeline/ that a file imports from: for types and inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            file = ROOT.joinpath(*name.split(".")).with_suffix(".py")
            if name.startswith("pipeline.") and file.exists():
                yield str(file.relative_to(ROOT / "pipeline"))


def test_files_of_the_pipeline_import_from_the_rooms_below_them():
    rooms = re.findall(r"^    (\S+\.py) ", pipeline.__doc__, re.MULTILINE)
    paths = {str(p.relative_to(ROOT / "pipeline")): p for p in (ROOT / "pipeline").rglob("*.py")}
    assert sorted(rooms) == sorted(name for name in paths if not name.endswith("__init__.py"))
    arrows = [(name, below) for name in rooms for below in imported(paths[name])]
    assert len(arrows) > 50
    assert [(name, other) for name, other in arrows if rooms.index(other) >= rooms.index(name)] == []
