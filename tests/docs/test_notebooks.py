"""The notebooks: their form, that they run from top to bottom, and that their exercises know right from wrong."""

import ast
import re
from decimal import Decimal
from textwrap import indent

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook

from scripts.execute_notebooks import ANSWER, ANSWERS, NOTEBOOKS, execute, without_answers

ALONE = "00_build_topr"
NAMES = sorted(path.stem for path in ANSWERS.glob("*.ipynb"))

# What the notebook tools themselves warn of is not ours to mend.
pytestmark = pytest.mark.filterwarnings("default")


def read(name):
    return nbformat.read(ANSWERS / f"{name}.ipynb", as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def python_of(cell):
    return ast.parse(re.sub(r"^%.*$", "", cell.source, flags=re.MULTILINE))


def exercises(notebook):
    """For each exercise: the names to write, the source of its check, and that of the folded answer."""
    for here, check, answer in zip(
        notebook.cells, notebook.cells[1:], notebook.cells[2:], strict=False
    ):
        if "exercise" in here.metadata.get("tags", []):
            assert check.metadata["tags"] == ["check"]
            assert answer.source.startswith(ANSWER)
            [block] = re.findall(r"```python\n(.*?)```", answer.source, re.DOTALL)
            body = python_of(here).body
            names = [node.name for node in body if isinstance(node, ast.FunctionDef)]
            names += [node.targets[0].id for node in body if isinstance(node, ast.Assign)]
            yield names, check.source, block


def shown(cell):
    """What a cell printed or returned as text."""
    return [
        output.get("text") or output.get("data", {}).get("text/plain") for output in cell.outputs
    ]


NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def is_alike(one, other):
    """Whether two outputs are the same on any processor: the words, and every number up to rounding.

    A last digit may round another way, so that a number may be off by one in its last place. One printed in full is of
    a few hundred operations in float64 at most, each exact to 1.1e-16: 1e-12 is left. Counts are the same.
    """
    words = [re.sub(r"[\s─━]+", "", NUMBER.sub("#", text)) for text in (one, other)]

    def is_near(a, b):
        places = [Decimal(1).scaleb(x.as_tuple().exponent) for x in (a, b) if x != int(x)]
        return abs(a - b) <= max([*places, Decimal("1e-12") * abs(a)])

    numbers = (map(Decimal, NUMBER.findall(text)) for text in (one, other))
    return words[0] == words[1] and all(map(is_near, *numbers))


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_notebook_is_one_clean_run_of_cells_that_define_only_what_readers_write(name):
    notebook = read(name)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [
        output
        for output in outputs
        if output.output_type == "error" or output.get("name") == "stderr"
    ]
    nodes = [node for cell in cells for node in ast.walk(python_of(cell))]
    defined = [node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert {function[:3] for function in defined} == {"my_"}


SAME_EVERYWNOTEBOOKS = (ALONE, "01_taper", "02_bandit", "05_check_your_framework")  # others sample


@pytest.mark.parametrize(
    "name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])]
)
def test_it_runs_and_its_exercises_tell_right_from_wrong(name):
    notebook, committed = read(name), read(name)
    for names, check, answer in exercises(notebook):
        wrong = "\n".join(f"{exercise} = lambda *_: 0.0" for exercise in names)
        refused = f"{wrong}\ntry:\n{indent(check, '    ')}\nexcept Exception:\n    print('refused')"
        notebook.cells += [new_code_cell(f"{answer}\n{check}"), new_code_cell(refused)]
    execute(notebook)
    added = notebook.cells[len(committed.cells) :]
    assert len(added) >= 4
    for right, wrong in zip(added[::2], added[1::2], strict=True):
        assert re.search("(is|are) right", shown(right)[0])
        assert shown(wrong)[-1] == "refused\n"
    if name in SAME_EVERYWNOTEBOOKS:
        for before, after in zip(code_cells(committed), code_cells(notebook), strict=False):
            if "show_sliders" not in before.source:  # whose text has a number of the widget's
                for one, other in zip(shown(before), shown(after), strict=True):
                    assert one == other or is_alike(one, other), (
                        f"{one}\nis committed, and now it is\n{other}"
                    )


def test_the_first_lesson_needs_nothing_but_torch_up_to_its_last_cell():
    *cells, last = code_cells(read(ALONE))
    nodes = [node for cell in cells for node in ast.walk(python_of(cell))]
    imported = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [ast.unparse(node) for node in imported] == ["import torch"]
    assert "from topr import" in last.source


def test_a_notebook_that_warns_is_not_passed():
    with pytest.raises(RuntimeError, match="beware"):
        execute(new_notebook(cells=[new_code_cell("import warnings\nwarnings.warn('beware')")]))


def test_those_that_ask_are_the_answered_ones_without_their_answers():
    assert sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")) == NAMES
    for name in NAMES:
        asks, whole = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4), read(name)
        assert asks == without_answers(whole), (
            f"python scripts/execute_notebooks.py notebooks/answers/{name}.ipynb"
        )
        assert not any("<details>" in cell.source or cell.get("outputs") for cell in asks.cells)
        assert len(asks.cells) == len(whole.cells) - sum(
            cell.source.startswith(ANSWER) for cell in whole.cells
        )


def test_a_notebook_that_asks_ends_where_a_guess_is_missing():
    with pytest.raises(CellExecutionError, match="my_guess"):
        execute(nbformat.read(NOTEBOOKS / f"{ALONE}.ipynb", as_version=4), NOTEBOOKS)
