"""Run notebooks from top to bottom and save them with their outputs, as the committed ones were made.

    python notebooks/execute.py                        # all of them
    python notebooks/execute.py notebooks/02_bandit.ipynb

Lines of progress are left out of what is saved; anything else on the error stream is an error.
"""

import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
PROGRESS = re.compile(r"\s*|\w[\w ]*: .*\[\d\d:.*\]")  # a line of tqdm's


def execute(notebook: nbformat.NotebookNode) -> None:
    """Run all cells in a fresh kernel, in this folder, and put their outputs into the notebook.

    Raises nbclient's CellExecutionError where a cell fails, RuntimeError where one warns.
    """
    where = {"metadata": {"path": str(HERE)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where, coalesce_streams=True).execute()
    for cell in [cell for cell in notebook.cells if cell.cell_type == "code"]:
        for output in [output for output in cell.outputs if output.get("name") == "stderr"]:
            if not all(PROGRESS.fullmatch(line) for line in output.text.splitlines()):
                raise RuntimeError(f"cell {cell.execution_count}: {output.text}")
            cell.outputs.remove(output)
        cell.metadata.pop("execution", None)  # the times at which it ran


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:] or sorted(HERE.glob("*.ipynb"))):
        print(path)
        content = nbformat.read(path, as_version=4)
        execute(content)
        nbformat.write(content, path)
