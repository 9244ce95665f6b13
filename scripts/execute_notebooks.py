"""Run the notebooks with answers, and write the ones without from them.

    python scripts/execute_notebooks.py                       # all of notebooks/solutions/
    python scripts/execute_notebooks.py notebooks/solutions/02_bandit.ipynb

A notebook without answers is one folder higher. It has no outputs, no solutions of exercises, and
`...` in place of each guess. Progress bars that a notebook prints are left out of its outputs; any
other output on the error stream is an error.
"""

import re
import sys
from copy import deepcopy
from pathlib import Path

import nbformat
import tyro
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
SOLUTIONS = NOTEBOOKS / "solutions"
PROGRESS = re.compile(r"\s*|\w[\w ]*: .*\[\d\d:.*\]")  # a line of tqdm's
SOLUTION = "solution"  # the tag of a cell that only the notebook with answers has


def execute(notebook: nbformat.NotebookNode, folder: Path = SOLUTIONS) -> None:
    """Run all cells in a new kernel, in a folder, and put their outputs into the notebook.

    Raises nbclient's CellExecutionError if a cell fails, RuntimeError if one warns.
    """
    client = NotebookClient(
        notebook,
        timeout=900,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        coalesce_streams=True,
    )
    client.execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if not is_progress(output)]
            cell.metadata.pop("execution", None)  # the times at which it ran


def is_progress(output: nbformat.NotebookNode) -> bool:
    """Whether an output is a progress bar; RuntimeError if it is a warning."""
    if output.get("name") != "stderr":
        return False
    for line in output.text.splitlines():
        if not PROGRESS.fullmatch(line):
            raise RuntimeError(f"a cell warns: {output.text}")
    return True


def has_tag(cell: nbformat.NotebookNode, tag: str) -> bool:
    """Whether a cell has a tag."""
    return tag in cell.metadata.get("tags", [])


def without_answers(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook that asks what this one answers; it is one folder higher."""
    asking = deepcopy(notebook)
    asking.cells = [cell for cell in asking.cells if not has_tag(cell, SOLUTION)]
    for cell in asking.cells:
        cell.source = cell.source.replace("../..", "..")
        if cell.cell_type == "code":
            cell.outputs = []
            cell.execution_count = None
            cell.source = re.sub(r"^my_guess = \S+", "my_guess = ...", cell.source)
    asking.metadata.pop("widgets", None)
    return asking


def main(paths: tyro.conf.Positional[tuple[Path, ...]] = ()) -> None:
    """The command; paths: notebooks with answers, by default all."""
    for path in paths:
        if path.resolve().parent != SOLUTIONS or not path.is_file():
            sys.exit(f"execute_notebooks: {path} is not a notebook; give one of {SOLUTIONS}")
    for path in paths or sorted(SOLUTIONS.glob("*.ipynb")):
        print(path)
        notebook = nbformat.read(path, as_version=4)
        execute(notebook)
        nbformat.write(notebook, path)
        nbformat.write(without_answers(notebook), NOTEBOOKS / path.name)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
