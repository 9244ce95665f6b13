"""The notebooks: each runs, and its exercises accept the answer and refuse wrong ones."""

import re
from pathlib import Path
from textwrap import indent

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell

from notebooks.lesson import reveal

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
SOLUTIONS = NOTEBOOKS / "solutions"
NAMES = sorted(path.stem for path in SOLUTIONS.glob("*.ipynb"))
FIRST = "00_build_topr"  # needs torch alone

# The packages that run notebooks have warnings of their own.
pytestmark = pytest.mark.filterwarnings("default")


def read_notebook(name, folder=SOLUTIONS):
    return nbformat.read(folder / f"{name}.ipynb", as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def has_tag(cell, tag):
    return tag in cell.metadata.get("tags", [])


def find_exercises(notebook):
    """The names to write, the check and the answer of each exercise, in successive cells."""
    for exercise, check, answer in zip(*[notebook.cells[i:] for i in range(3)], strict=False):
        if has_tag(exercise, "exercise"):
            assert has_tag(check, "check")
            names = re.findall(r"^(?:def )?(my_\w+)", exercise.source, re.MULTILINE)
            [code] = re.findall(r"```python\n(.*?)```", answer.source, re.DOTALL)
            yield names, check.source, code


# ---- notebooks as they are stored ----------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_of_one_clean_run(name):
    cells = code_cells(read_notebook(name))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for output in [output for cell in cells for output in cell.outputs]:
        assert output.output_type != "error"
        assert output.get("name") != "stderr"


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_without_answers_asks_what_the_other_answers(name):
    answered = [cell for cell in read_notebook(name).cells if not has_tag(cell, "solution")]
    asking = read_notebook(name, NOTEBOOKS).cells
    assert [cell.id for cell in asking] == [cell.id for cell in answered]
    for ask, answer in zip(asking, answered, strict=True):
        expected = answer.source.replace("../..", "..")
        assert ask.source == re.sub(r"^my_guess = \S+", "my_guess = ...", expected)
        assert not ask.get("outputs")


# ---- wrong answers that a check names ------------------------------------------------------------
TRUNCATED = {
    "wrong sign": "(clipped.detach() * reward * logp).mean()",
    "missing mean": "-(clipped.detach() * reward * logp).sum()",
    "missing clamp": "-(ratio.detach() * reward * logp).mean()",
    "missing detach": "-(clipped * reward * logp).mean()",
    "missing weight": "-(reward * logp).mean()",
    "another mistake": "-(clipped.detach() ** 2 * reward * logp).mean()",
}
WEIGHTS = {
    "same bounds": "clipped",
    "missing clamp": "torch.where(reward >= 0, 1.0, ratio)",
    "signs exchanged": "torch.where(reward >= 0, clipped, 1.0)",
    "zero reward": "torch.where(reward > 0, 1.0, clipped)",
    "missing exp": "torch.where(reward >= 0, 1.0, log_ratio.clamp(max=0))",
    "missing ratio": "torch.ones_like(reward)",
    "another mistake": "torch.where(reward >= 0, 1.0, clipped**2)",
}
LOSS = {
    "missing detach": "-weight * reward * logp / length",
    "missing clamp": "-torch.where(reward < 0, ratio, 1.0).detach() * reward * logp / length",
    "missing length": "-weight.detach() * reward * logp",
    "wrong sign": "weight.detach() * reward * logp / length",
    "same bounds": "-clipped.detach() * reward * logp / length",
    "mean ratio": "-torch.where(reward < 0, clipped ** (1 / length), 1.0).detach()"
    " * reward * logp / length",
    "missing weight": "-reward * logp / length",
    "another mistake": "3 * logp",
}
EXERCISES = [  # notebook, function, its parameters, log-ratio, wrong results
    (FIRST, "my_truncated", "logp", "logp - logmu", TRUNCATED),
    (FIRST, "my_weights", "log_ratio, reward", "log_ratio", WEIGHTS),
    ("01_taper", "my_loss", "logp, logmu, reward, length", "logp - logmu", LOSS),
]


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise[1])
def test_each_mistake_is_named(exercise):
    notebook, name, parameters, log_ratio, results = exercise
    cells = code_cells(read_notebook(notebook))
    [check] = [cell.source for cell in cells if f"# Check of {name}:" in cell.source]
    for mistake, result in results.items():
        names = {"torch": torch}
        lines = [
            cells[0].source if notebook == FIRST else "",
            f"def {name}({parameters}):",
            f"    log_ratio = {log_ratio}",
            "    ratio = log_ratio.exp()",
            "    clipped = ratio.clamp(max=1)",
            "    weight = torch.where(reward < 0, clipped, 1.0)",
            f"    return {result}",
        ]
        try:
            exec("\n".join(lines), names)
            with pytest.raises(AssertionError, match=f"^{mistake}:"):
                exec(check, names)
        finally:
            torch.set_default_dtype(torch.float32)  # the first notebook sets another


# ---- notebooks that are run ----------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_and_its_exercises_refuse_wrong_answers(name, monkeypatch):
    monkeypatch.setenv("TQDM_MINITERS", "1e9")  # no progress bars
    monkeypatch.setenv("TQDM_MAXINTERVAL", "1e9")
    notebook = read_notebook(name)
    count = len(notebook.cells)
    for names, check, answer in list(find_exercises(notebook)):
        wrong = "\n".join(f"{name} = lambda *_: 0.0" for name in names)
        refused = f"try:\n{indent(check, '    ')}\nexcept Exception:\n    print('refused')"
        notebook.cells.append(new_code_cell(f"{answer}\n{check}"))
        notebook.cells.append(new_code_cell(f"{wrong}\n{refused}"))
    folder = {"metadata": {"path": str(SOLUTIONS)}}
    limits = {"timeout": 900, "startup_timeout": 300}  # seconds
    NotebookClient(notebook, kernel_name="python3", resources=folder, **limits).execute()
    for cell in code_cells(notebook):
        assert not [output for output in cell.outputs if output.get("name") == "stderr"]
    assert len(notebook.cells) >= count + 4  # two exercises
    for right, wrong in zip(notebook.cells[count::2], notebook.cells[count + 1 :: 2], strict=True):
        assert "right" in "".join(output.text for output in right.outputs)
        assert "".join(output.text for output in wrong.outputs).endswith("refused\n")


@pytest.mark.parametrize("guess", [..., (1, 0)])
def test_a_missing_guess_is_an_error(guess):
    with pytest.raises(ValueError, match="my_guess"):
        reveal(guess, 1)
