"""The notebooks: their form, that they run, and that their exercises tell right from wrong."""

import ast
import re
from decimal import Decimal
from textwrap import indent

import nbformat
import pictures
import pytest
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook

from scripts.execute_notebooks import ANSWER, NOTEBOOKS, SOLUTIONS, execute, without_answers

NAMES = sorted(path.stem for path in SOLUTIONS.glob("*.ipynb"))
FIRST = "00_build_topr"  # needs torch alone
SAMPLING = {"03_baseline", "04_laptop_gsm8k"}  # whose numbers differ between processors

# The packages that run notebooks have warnings of their own.
pytestmark = pytest.mark.filterwarnings("default")


def read_notebook(name, folder=SOLUTIONS):
    return nbformat.read(folder / f"{name}.ipynb", as_version=4)


# ---- what is in a notebook -----------------------------------------------------------------------
def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def parse_cell(cell):
    """The Python of a cell, without lines for IPython."""
    return ast.parse(re.sub(r"^%.*$", "", cell.source, flags=re.MULTILINE))


def find_nodes(cells, *kinds):
    """The nodes of some kinds in the Python of some cells."""
    nodes = []
    for cell in cells:
        nodes += [node for node in ast.walk(parse_cell(cell)) if isinstance(node, kinds)]
    return nodes


def find_exercises(notebook):
    """For each exercise: the names to write, the code of its check, and that of its answer.

    The cell with the check follows that of the exercise, and the folded answer the check.
    """
    for index, cell in enumerate(notebook.cells):
        if "exercise" not in cell.metadata.get("tags", []):
            continue
        check = notebook.cells[index + 1]
        answer = notebook.cells[index + 2]
        assert check.metadata["tags"] == ["check"]
        assert answer.source.startswith(ANSWER)
        [code] = re.findall(r"```python\n(.*?)```", answer.source, re.DOTALL)
        names = []
        for node in parse_cell(cell).body:
            if isinstance(node, ast.FunctionDef):
                names.append(node.name)
            if isinstance(node, ast.Assign):
                names.append(node.targets[0].id)
        yield names, check.source, code


def texts_of(cell):
    """What a cell printed or returned, as text."""
    texts = []
    for output in cell.outputs:
        texts.append(output.get("text") or output.get("data", {}).get("text/plain"))
    return texts


# ---- outputs on another processor ----------------------------------------------------------------
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def last_place(number):
    """The value of 1 in the last place of a decimal; 0 for a whole number, which is a count."""
    if number == int(number):
        return 0
    return Decimal(1).scaleb(number.as_tuple().exponent)


def is_close(actual, expected):
    """Whether two outputs have the same words, and the same numbers up to rounding.

    A last digit may be rounded another way, so that a number may differ by one in its last place. A
    number printed in full is the result of a few hundred operations in float64 at most, each exact
    to 1.1e-16: 1e-12 is allowed.
    """
    actual_words = re.sub(r"[\s─━]+", "", NUMBER.sub("#", actual))
    expected_words = re.sub(r"[\s─━]+", "", NUMBER.sub("#", expected))
    if actual_words != expected_words:
        return False
    for one, other in zip(NUMBER.findall(actual), NUMBER.findall(expected), strict=True):
        one = Decimal(one)
        other = Decimal(other)
        tolerance = max(last_place(one), last_place(other), Decimal("1e-12") * abs(other))
        if abs(one - other) > tolerance:
            return False
    return True


@pytest.mark.parametrize(
    ("actual", "expected", "is_expected"),
    [
        ("loss 0.61", "loss 0.62", True),
        ("loss 0.61", "loss 0.63", False),
        ("52 steps", "53 steps", False),
        ("1.0000000000001", "1.0", True),
        ("a 1", "b 1", False),
        ("─── 1", "────── 1", True),
    ],
)
def test_outputs_are_compared_up_to_rounding(actual, expected, is_expected):
    assert is_close(actual, expected) == is_expected


# ---- pictures ------------------------------------------------------------------------------------
def test_tokens_below_zero_are_brown_and_those_above_it_green():
    strip = ("log-ratio", [" a", " b", " c"], [-0.25, 0.0, 0.25])
    [axes] = pictures.draw_tokens([strip], furthest=1).axes
    below, zero, above = [box.get_facecolor() for box in axes.patches]  # red, green, blue, alpha
    assert below[0] > below[1] > below[2]
    assert max(zero[:3]) - min(zero[:3]) < 0.05
    assert above[1] > max(above[0], above[2])


def test_tokens_that_do_not_fit_begin_a_row():
    strip = ("log-ratio", [" twenty-two"] * 12, [0.5] * 12)
    [axes] = pictures.draw_tokens([strip], furthest=1).axes
    lefts = [box.get_xy()[:, 0].min() for box in axes.patches]
    rights = [box.get_xy()[:, 0].max() for box in axes.patches]
    assert max(rights) <= axes.get_xlim()[1]
    assert 1 < lefts.count(0.0) < len(lefts)


# ---- notebooks with answers ----------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_one_clean_run(name):
    cells = code_cells(read_notebook(name))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        for output in cell.outputs:
            assert output.output_type != "error"
            assert output.get("name") != "stderr"


@pytest.mark.parametrize("name", NAMES)
def test_what_readers_write_is_named_my(name):
    for names, _, _ in find_exercises(read_notebook(name)):
        assert names
        for exercise in names:
            assert exercise.startswith("my_")


def test_the_first_notebook_needs_torch_alone_up_to_its_last_cell():
    *cells, last = code_cells(read_notebook(FIRST))
    imports = find_nodes(cells, ast.Import, ast.ImportFrom)
    assert [ast.unparse(node) for node in imports] == ["import torch"]
    assert "topr" in [node.module for node in find_nodes([last], ast.ImportFrom)]


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in NAMES if name != FIRST]


@pytest.mark.parametrize("name", [FIRST, *SLOW])
def test_a_notebook_runs_and_its_exercises_tell_right_from_wrong(name):
    committed = read_notebook(name)
    notebook = read_notebook(name)
    exercises = list(find_exercises(committed))
    assert len(exercises) >= 2
    for names, check, answer in exercises:
        # A wrong answer must be refused; a right one that is refused ends the run.
        wrong = "\n".join(f"{name} = lambda *_: 0.0" for name in names)
        refused = f"try:\n{indent(check, '    ')}\nexcept Exception:\n    print('refused')"
        notebook.cells.append(new_code_cell(f"{answer}\n{check}"))
        notebook.cells.append(new_code_cell(f"{wrong}\n{refused}"))
    execute(notebook)
    added = notebook.cells[len(committed.cells) :]
    for cell in added[1::2]:
        assert texts_of(cell)[-1] == "refused\n"
    if name not in SAMPLING:
        check_outputs(notebook, committed)


def check_outputs(notebook, committed):
    """The outputs are those that are committed, up to rounding."""
    for actual, expected in zip(code_cells(notebook), code_cells(committed), strict=False):
        if "show_sliders" in expected.source:  # whose text has a number of the widget's
            continue
        for text, committed_text in zip(texts_of(actual), texts_of(expected), strict=True):
            is_same = text == committed_text or is_close(text, committed_text)
            assert is_same, f"{text}\nis not the committed\n{committed_text}"


def test_a_warning_fails_a_notebook():
    cell = new_code_cell("import warnings\nwarnings.warn('careful')")
    with pytest.raises(RuntimeError):
        execute(new_notebook(cells=[cell]))


# ---- notebooks without answers -------------------------------------------------------------------
def test_each_notebook_has_one_without_answers():
    assert sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_without_answers_is_that_with_answers_less_these(name):
    asking = read_notebook(name, NOTEBOOKS)
    answered = read_notebook(name)
    command = f"python scripts/execute_notebooks.py notebooks/solutions/{name}.ipynb"
    assert asking == without_answers(answered), command
    for cell in asking.cells:
        assert "<details>" not in cell.source
        assert not cell.get("outputs")
    answers = [cell for cell in answered.cells if cell.source.startswith(ANSWER)]
    assert answers
    assert len(asking.cells) == len(answered.cells) - len(answers)


def test_a_notebook_without_answers_stops_at_a_missing_guess():
    with pytest.raises(CellExecutionError) as caught:
        execute(read_notebook(FIRST, NOTEBOOKS), NOTEBOOKS)
    assert "my_guess" in str(caught.value)
