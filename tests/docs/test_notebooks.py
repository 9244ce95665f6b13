"""The notebooks: their form, that they run, and that their exercises tell right from wrong."""

import ast
import base64
import io
import math
import re
import subprocess
import sys
from decimal import Decimal
from functools import partial
from textwrap import indent

import nbformat
import pytest
import torch
from matplotlib.image import imread
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook

from notebooks import checks, pictures
from scripts.execute_notebooks import (
    NOTEBOOKS,
    SOLUTION,
    SOLUTIONS,
    execute,
    has_tag,
    without_answers,
)

NAMES = sorted(path.stem for path in SOLUTIONS.glob("*.ipynb"))
FIRST = "00_build_topr"  # needs torch alone
TAPER = "01_taper"
FOLD = re.compile(r"<details><summary>[^<]+</summary>\n\n.*\n\n</details>", re.DOTALL)
CELL_WIDTH = 1090  # pixels for an output in JupyterLab, in a window of 1,280
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
        if not has_tag(cell, "exercise"):
            continue
        check = notebook.cells[index + 1]
        answer = notebook.cells[index + 2]
        assert has_tag(check, "check")
        assert has_tag(answer, SOLUTION)
        [code] = re.findall(r"```python\n(.*?)```", answer.source, re.DOTALL)
        names = []
        for node in parse_cell(cell).body:
            if isinstance(node, ast.FunctionDef):
                names.append(node.name)
            if isinstance(node, ast.Assign):
                names.append(node.targets[0].id)
        yield names, check.source, code


def run_cells(cells, names):
    """Run some cells in this process, without lines for IPython. names: the global ones."""
    for cell in cells:
        exec(compile(parse_cell(cell), cell.id, "exec"), names)


def find_cell(notebook, text):
    """The first cell with some text in its source."""
    return next(cell for cell in notebook.cells if text in cell.source)


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


def test_the_notebook_about_the_taper_does_not_import_transformers():
    cell = find_cell(read_notebook(TAPER), "import torch")
    code = ast.unparse(parse_cell(cell))
    report = "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    command = [sys.executable, "-c", f"{code}\n{report}"]
    done = subprocess.run(command, cwd=SOLUTIONS, capture_output=True, text=True, check=True)
    assert done.stdout == "['torch']\n"


# ---- questions and answers -----------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_the_text_after_a_question_is_folded(name):
    cells = read_notebook(name).cells
    texts = [cell for cell in cells if cell.cell_type == "markdown" and not has_tag(cell, SOLUTION)]
    questions = [index for index, cell in enumerate(texts) if "**Guess first**" in cell.source]
    assert len(questions) >= len([cell for cell in cells if has_tag(cell, "guess")]) > 0
    for index in questions:
        assert has_tag(texts[index + 1], "explanation"), texts[index].source
    for cell in cells:
        is_answer = has_tag(cell, "explanation") or has_tag(cell, SOLUTION)
        assert bool(FOLD.fullmatch(cell.source)) == is_answer, cell.source


@pytest.mark.parametrize("name", NAMES)
def test_pictures_are_shown_in_their_own_size(name):
    for cell in code_cells(read_notebook(name)):
        for output in cell.outputs:
            png = output.get("data", {}).get("image/png")
            if png:
                image = imread(io.BytesIO(base64.b64decode(png)), format="png")
                assert image.shape[1] <= CELL_WIDTH, cell.source


def test_all_text_of_a_picture_can_be_read_from_afar():
    figure = pictures.plot("x", "y", [0, 1], {"a": {"b": [0, 1]}, "c": {"d": [0, 1]}})
    figure.canvas.draw()
    for axes in figure.axes:
        texts = [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.get_legend().texts]
        texts += axes.get_xticklabels() + axes.get_yticklabels()
        sizes = {text.get_fontsize() * figure.dpi / 72 for text in texts}
        assert min(sizes) >= 16  # pixels


@pytest.mark.parametrize("guess", [..., (1, 0)])
def test_a_missing_guess_is_an_error_without_a_traceback(guess):
    with pytest.raises(checks.NotebookError) as caught:
        pictures.reveal(guess, 1)
    assert caught.value._render_traceback_() == [str(caught.value)]


def test_sliders_without_the_cell_before_them_name_what_is_missing(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which the notebook adds
    notebook = read_notebook(TAPER)
    cells = [find_cell(notebook, "import torch"), find_cell(notebook, "show_sliders(\n")]
    with pytest.raises(checks.NotebookError) as caught:
        run_cells(cells, {})
    assert str(caught.value).startswith("ratio ")


# ---- wrong solutions -----------------------------------------------------------------------------
def mistakes_in(check, solution):
    """The names of the mistakes that a check finds in a solution."""
    with pytest.raises(checks.WrongSolution) as caught:
        check(solution)
    for mistake in caught.value.mistakes:
        assert mistake in str(caught.value)
    return caught.value.mistakes


def readme_loss(logp, logmu, reward, length):
    weight = torch.where(reward < 0, (logp - logmu).clamp(max=0).exp(), 1.0).detach()
    return -(weight * reward * logp / length)


def branching_loss(logp, logmu, reward, length):
    weight = 1.0
    if reward < 0:
        weight = min((logp - logmu).exp().item(), 1.0)
    return -weight * reward * logp / length


@pytest.mark.parametrize("loss", [readme_loss, branching_loss, partial(checks.loss_with, ())])
def test_the_loss_may_be_written_in_several_ways(loss, capsys):
    checks.check_loss(loss)
    assert "right" in capsys.readouterr().out


@pytest.mark.parametrize("mistake", checks.LOSS_MISTAKES)
def test_each_mistake_in_the_loss_is_named(mistake):
    assert mistakes_in(checks.check_loss, partial(checks.loss_with, [mistake])) == (mistake,)


def test_two_mistakes_in_the_loss_are_both_named():
    mistakes = ("missing detach", "missing length")
    assert mistakes_in(checks.check_loss, partial(checks.loss_with, mistakes)) == mistakes


def test_a_loss_with_another_mistake_is_wrong():
    assert mistakes_in(checks.check_loss, lambda logp, *_: 3 * logp) == ()


def clip(x, a, b):
    return min(max(x, a), b)


def safe_exp(x):
    return math.exp(min(x, 700))


WRONG_WEIGHTS = {  # the name of a mistake -> a solution that makes it
    "overflow": lambda x, a, b: clip(math.exp(x), a, b),
    "logarithm of 0": lambda x, a, b: max(math.exp(min(x, math.log(b))), a),
    "missing exp": clip,
    "missing lower bound": lambda x, a, b: min(safe_exp(x), b),
    "missing upper bound": lambda x, a, b: max(safe_exp(x), a),
}


@pytest.mark.parametrize("mistake", checks.WEIGHT_MISTAKES)
def test_each_mistake_in_the_weight_is_named(mistake):
    assert mistakes_in(checks.check_weight, WRONG_WEIGHTS[mistake]) == (mistake,)


def logarithm(r, a, b):
    """log(r / bound), where the bound is the one that r is outside of."""
    return math.log(r / clip(r, a, b))


WRONG_TAPERS = {
    "division by 0": lambda r, a, b: clip(r, a, b) * (1 + logarithm(r, a, b)),
    "the weight": clip,
    "missing factor": lambda r, a, b: r if a <= r <= b else 1 + logarithm(r, a, b),
    "missing 1": lambda r, a, b: r if a <= r <= b else clip(r, a, b) * logarithm(r, a, b),
}


@pytest.mark.parametrize("mistake", checks.TAPER_MISTAKES)
def test_each_mistake_in_the_taper_is_named(mistake):
    assert mistakes_in(checks.check_taper, WRONG_TAPERS[mistake]) == (mistake,)


# Of the first notebook, whose checks need no import: the name of a mistake -> a wrong solution.
WRONG_TRUNCATED = {
    "wrong sign": "(clipped.detach() * reward * logp).mean()",
    "missing mean": "-(clipped.detach() * reward * logp).sum()",
    "missing clamp": "-(log_ratio.exp().detach() * reward * logp).mean()",
    "missing detach": "-(clipped * reward * logp).mean()",
    "missing weight": "-(reward * logp).mean()",
    "another mistake": "-(clipped.detach() ** 2 * reward * logp).mean()",
}
WRONG_STEP_4 = {
    "same bounds": "clipped",
    "missing clamp": "torch.where(reward >= 0, 1.0, log_ratio.exp())",
    "signs exchanged": "torch.where(reward >= 0, clipped, 1.0)",
    "zero reward": "torch.where(reward > 0, 1.0, clipped)",
    "missing exp": "torch.where(reward >= 0, 1.0, log_ratio.clamp(max=0))",
    "missing ratio": "torch.ones_like(reward)",
    "another mistake": "torch.where(reward >= 0, 1.0, clipped**2)",
}
TRUNCATED = """
def my_truncated(logp):
    log_ratio = logp - logmu
    clipped = log_ratio.clamp(max=0).exp()
    return {}
"""
STEP_4 = """
def my_weights(log_ratio, reward):
    clipped = log_ratio.clamp(max=0).exp()
    return {}
"""
WRONG_IN_FIRST = [
    ("my_truncated", TRUNCATED.format(x), name) for name, x in WRONG_TRUNCATED.items()
]
WRONG_IN_FIRST += [("my_weights", STEP_4.format(x), name) for name, x in WRONG_STEP_4.items()]


@pytest.mark.parametrize(("exercise", "solution", "mistake"), WRONG_IN_FIRST)
def test_each_mistake_in_the_first_notebook_is_named(exercise, solution, mistake):
    notebook = read_notebook(FIRST)
    names = {}
    try:
        run_cells([find_cell(notebook, "import torch")], names)
        exec(solution, names)
        with pytest.raises(AssertionError) as caught:
            run_cells([find_cell(notebook, f"Check of {exercise}")], names)
    finally:
        torch.set_default_dtype(torch.float32)
    assert str(caught.value).startswith(f"{mistake}:")


# ---- notebooks that are run ----------------------------------------------------------------------
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
        assert not has_tag(cell, SOLUTION)
        assert not cell.get("outputs")
    solutions = [cell for cell in answered.cells if has_tag(cell, SOLUTION)]
    assert len(solutions) >= 2
    assert len(asking.cells) == len(answered.cells) - len(solutions)


def test_a_notebook_without_answers_stops_at_a_missing_guess():
    with pytest.raises(CellExecutionError) as caught:
        execute(read_notebook(FIRST, NOTEBOOKS), NOTEBOOKS)
    assert "my_guess" in str(caught.value)
