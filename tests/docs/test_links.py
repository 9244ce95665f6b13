"""Every relative link of a tracked Markdown page or notebook leads to a file and its heading."""

import json
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"""(?:\]\(|(?:src|href)=")(?!\w+:)([^)"\s]+)""")
HEADING = re.compile(r"^#+ (.*)", re.MULTILINE)
TRACKED = subprocess.run(
    ["git", "ls-files", "*.md", "*.ipynb"], cwd=ROOT, capture_output=True, text=True, check=True
)
PAGES = [name for name in TRACKED.stdout.splitlines() if (ROOT / name).exists()]


def read_markdown(page):
    """The text of a page; of a notebook, that of its Markdown cells."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells)
    return text


def find_links(page):
    """The (file, anchor) that each relative link of a page leads to; "" is no anchor."""
    for link in LINK.findall(CODE.sub("", read_markdown(page))):
        path, _, anchor = link.partition("#")
        yield (page.parent / path).resolve() if path else page, anchor


def list_anchors(page):
    """The anchors that GitHub gives the headings of a page."""
    for heading in HEADING.findall(read_markdown(page)):
        yield re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_files_and_headings(name):
    broken = []
    for file, anchor in find_links(ROOT / name):
        if not file.exists() or (anchor and anchor not in list_anchors(file)):
            broken.append((str(file), anchor))
    assert broken == []
