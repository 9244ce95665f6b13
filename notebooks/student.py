"""The notebooks as a student gets them: without the answers of the exercises, and without outputs.

make student                              # into student/
python notebooks/student.py --out DIR     # another folder beside this one: they import from the one above
"""

import copy
import sys
from pathlib import Path

import nbformat
import tyro

HERE = Path(__file__).resolve().parent
ANSWER = "<details><summary>Answer</summary>"


def without_answers(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """A copy without the folded answers and without outputs.

    >>> from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
    >>> lesson = new_notebook(cells=[new_code_cell("1 + 1"), new_markdown_cell(ANSWER + " 2 </details>")])
    >>> [cell.source for cell in without_answers(lesson).cells]
    ['1 + 1']
    """
    student = copy.deepcopy(notebook)
    student.cells = [cell for cell in student.cells if not cell.source.startswith(ANSWER)]
    for cell in student.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    student.metadata.pop("widgets", None)
    return student


def main(out: Path = HERE.parent / "student") -> None:
    """Write every notebook of this folder; one line and a non-zero exit status where they would not run.

    Args:
        out: folder to write into, inside the project's folder
    """
    if out.resolve().parent != HERE.parent or out.resolve() == HERE:
        sys.exit(f"student: --out {out}: choose a new folder inside {HERE.parent}")
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(HERE.glob("*.ipynb")):
        nbformat.write(without_answers(nbformat.read(path, as_version=4)), out / path.name)
    print(out)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
