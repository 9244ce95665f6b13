"""Run the answered notebooks of answers/, and derive from each the one in this folder, which asks.

    python notebooks/execute.py                                   # all of them
    python notebooks/execute.py notebooks/answers/02_bandit.ipynb

An asking notebook has no answers, no outputs, and `...` where a guess is to be written. Of what is printed while a
notebook runs, lines of progress are left out; anything else on the error stream is an error.
"""

import re
import sys
from copy import deepcopy
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
ANSWERS = HERE / "answers"
PROGRESS = re.compile(r"\s*|\w[\w ]*: .*\[\d\d:.*\]")  # a line of tqdm's
ANSWER = "<details><summary>"  # how a cell with an answer begins


def execute(notebook: nbformat.NotebookNode, folder: Path = ANSWERS) -> None:
    """Run all cells in a fresh kernel, in a folder, and put their outputs into the notebook.

    Raises nbclient's CellExecutionError where a cell fails, RuntimeError where one warns.
    """
    where = {"metadata": {"path": str(folder)}}
    NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources=where, coalesce_streams=True
    ).execute()
    for cell in [cell for cell in notebook.cells if cell.cell_type == "code"]:
        for output in [output for output in cell.outputs if output.get("name") == "stderr"]:
            if not all(PROGRESS.fullmatch(line) for line in output.text.splitlines()):
                raise RuntimeError(f"cell {cell.execution_count}: {output.text}")
            cell.outputs.remove(output)
        cell.metadata.pop("execution", None)  # the times at which it ran


def asking(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook that asks what this one answers; it lies one folder higher."""
    asks = deepcopy(notebook)
    asks.cells = [cell for cell in asks.cells if not cell.source.startswith(ANSWER)]
    for cell in asks.cells:
        cell.source = cell.source.replace("../..", "..")
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
            cell.source = re.sub(r"^my_guess = \S+", "my_guess = ...", cell.source)
    asks.metadata.pop("widgets", None)
    return asks


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:] or sorted(ANSWERS.glob("*.ipynb"))):
        print(path)
        answered = nbformat.read(path, as_version=4)
        execute(answered)
        nbformat.write(answered, path)
        nbformat.write(asking(answered), HERE / path.name)
