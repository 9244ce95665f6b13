"""The notebooks as a student gets them: without answers, outputs and the numbers that stand for a guess.

make student                              # into student/
python notebooks/student.py --out DIR     # another folder beside this one: they import from the one above
"""

import re
import sys
from pathlib import Path

import nbformat
import tyro

HERE = Path(__file__).resolve().parent
ANSWER = "<details><summary>"


def main(out: Path = HERE.parent / "student") -> None:
    """Write every notebook of this folder; one line and a non-zero exit status where they would not run.

    Args:
        out: folder to write into, inside the project's folder
    """
    if out.resolve().parent != HERE.parent or out.resolve() == HERE:
        sys.exit(f"student: --out {out}: choose a new folder inside {HERE.parent}")
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(HERE.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        notebook.cells = [cell for cell in notebook.cells if not cell.source.startswith(ANSWER)]
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
                cell.source = re.sub(r"^my_guess = \S+", "my_guess = ...", cell.source)
        notebook.metadata.pop("widgets", None)
        nbformat.write(notebook, out / path.name)
    print(out)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
