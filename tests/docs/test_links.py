"""Every relative link of a tracked Markdown page or notebook leads to a file and its heading."""

import json
import re

import pytest
from docs_helpers import FENCED_CODE, ROOT, list_tracked

INLINE_CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"""(?:\]\(|(?:src|href)=")([^)"\s]+)""")
HEADING = re.compile(r"^#+ (.*)", re.MULTILINE)


def read_markdown(page):
    """The text of a page without blocks of code; of a notebook, that of its Markdown cells."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
        text = "\n\n".join(texts)
    return FENCED_CODE.sub("", text)


def find_links(page):
    """The (file, anchor) that each relative link of a page leads to; "" is no anchor."""
    for link in LINK.findall(INLINE_CODE.sub("", read_markdown(page))):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        file = (page.parent / path).resolve() if path else page
        yield file, anchor


def list_anchors(page):
    """The anchors that GitHub gives the headings of a page; a repeated heading gets a number."""
    anchors = []
    for heading in HEADING.findall(read_markdown(page)):
        words = re.sub(r"[^\w\- ]", "", heading.strip().lower())
        anchor = words.replace(" ", "-")
        repeats = [other for other in anchors if re.fullmatch(rf"{anchor}(-\d+)?", other)]
        anchors.append(f"{anchor}-{len(repeats)}" if repeats else anchor)
    return anchors


def find_broken_links(page):
    broken = []
    for file, anchor in find_links(page):
        if not file.exists() or (anchor and anchor not in list_anchors(file)):
            broken.append((str(file), anchor))
    return broken


@pytest.mark.parametrize(
    "page", list_tracked("*.md", "*.ipynb"), ids=lambda page: str(page.relative_to(ROOT))
)
def test_links_lead_to_files_and_headings(page):
    assert find_broken_links(page) == []


def test_every_page_is_reached_from_the_readme():
    pages = set(list_tracked("*.md"))
    reached = set()
    waiting = {ROOT / "README.md"}
    while waiting:
        page = waiting.pop()
        reached.add(page)
        linked = {file for file, _ in find_links(page) if file.suffix == ".md"}
        waiting |= linked - reached
    assert reached == pages


def test_broken_links_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A page\n\n## p~\\* = 20 %: `why`?\n\n## Twice\n\n## Twice\n\n"
        "[file](page.md) [a](#p--20--why) [b](page.md#twice-1) [site](https://example.org/none)\n"
        "`[code](none.md)`\n\n```\n[code](none.md)\n# No heading\n```\n\n"
        '[lost](none.md) [gone](#no-heading) [third](page.md#twice-2) <img src="none.png">\n',
        encoding="utf-8",
    )
    assert find_broken_links(page) == [
        (str(tmp_path / "none.md"), ""),
        (str(page), "no-heading"),
        (str(page), "twice-2"),
        (str(tmp_path / "none.png"), ""),
    ]


def test_links_of_notebooks_are_those_of_their_markdown_cells(tmp_path):
    page = tmp_path / "lesson.ipynb"
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "[lost](none.md)"]},
        {"cell_type": "code", "source": ["text = '[code](other.md)'"]},
    ]
    page.write_text(json.dumps({"cells": cells}), encoding="utf-8")
    assert find_broken_links(page) == [(str(tmp_path / "none.md"), "")]
