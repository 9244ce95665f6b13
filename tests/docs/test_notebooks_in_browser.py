"""The notebooks in JupyterLab: no answer is on the screen of its question.

A screen is 1,280 x 720 pixels, with the sidebar closed.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time

import nbformat
import pytest

from scripts.execute_notebooks import NOTEBOOKS, SOLUTION, SOLUTIONS, has_tag

NAMES = sorted(path.stem for path in SOLUTIONS.glob("*.ipynb"))
MEASURED = re.compile(r"measured: (.*)")
LINE_OF_CODE = re.compile(r"^ {4}(.*\S)", re.MULTILINE)  # in the body of a solution
TRACKER = "@jupyterlab/notebook-extension/tracker.jupyterlab-settings"

# JupyterLab with its sidebar closed, all cells of a notebook drawn at once, and no news.
SETTINGS = {
    TRACKER: {"windowingMode": "none"},
    "@jupyterlab/apputils-extension/notification.jupyterlab-settings": {"fetchNews": "false"},
}

pytestmark = [
    pytest.mark.slow,
    # The packages that run notebooks have warnings of their own.
    pytest.mark.filterwarnings("default"),
]


# ---- JupyterLab and the browser ------------------------------------------------------------------
@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The address of a JupyterLab with copies of the notebooks, all its files in a folder."""
    folder = tmp_path_factory.mktemp("lab")
    notebooks = folder / "notebooks"
    notebooks.mkdir()
    for path in NOTEBOOKS.glob("*.ipynb"):
        shutil.copy(path, notebooks)
    for name, values in SETTINGS.items():
        path = folder / "settings" / name
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(values), encoding="utf-8")
    environment = os.environ | {
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
    }
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--port=0"]
    command += ["--ip=127.0.0.1", f"--ServerApp.root_dir={notebooks}"]
    with open(folder / "log", "w", encoding="utf-8") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder)
    try:
        yield wait_for_address(folder, server)
    finally:
        server.terminate()
        server.wait(timeout=30)


def wait_for_address(folder, server):
    """The address to open a notebook at, up to its name; {name} and the token are in it."""
    for _ in range(240):
        assert server.poll() is None, (folder / "log").read_text(encoding="utf-8")
        for path in (folder / "runtime").glob("jpserver-*.json"):
            text = path.read_text(encoding="utf-8")
            if text:
                entry = json.loads(text)
                return f"{entry['url']}lab/tree/{{name}}?reset&token={entry['token']}"
        time.sleep(0.25)
    pytest.fail("JupyterLab did not start within a minute")


COUNT_RENDERED = """count => {
  const texts = [...document.querySelectorAll(".jp-Notebook .jp-MarkdownCell")];
  return texts.length === count && texts.every(
    cell => cell.querySelector(".jp-RenderedHTMLCommon")?.textContent.trim());
}"""

# What can be read, even partly, if a cell is at the top of the screen.
READ_SCREEN = """async index => {
  const cells = [...document.querySelectorAll(".jp-Notebook .jp-Cell")];
  cells[index].scrollIntoView({block: "start"});
  await new Promise(requestAnimationFrame);
  const panel = document.querySelector(".jp-NotebookPanel").getBoundingClientRect();
  const texts = [];
  for (const cell of cells) {
    const box = cell.getBoundingClientRect();
    if (box.bottom <= panel.top || box.top >= panel.bottom) continue;
    const walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const node = walker.currentNode;
      if (node.parentElement.checkVisibility({visibilityProperty: true})) texts.push(node.data);
      if (node.parentElement.closest(".cm-line")?.lastChild?.contains(node)) texts.push("\\n");
    }
    texts.push("\\n");
  }
  return texts.join("");
}"""

COUNT_VISIBLE = """() => [...document.querySelectorAll(".jp-Notebook details p")].filter(
  text => text.checkVisibility()).length"""


@pytest.fixture
def open_notebook(browser, lab):
    """open_notebook(name): a page with the notebook, all of whose cells are drawn."""
    pages = []

    def open_one(name, texts):
        page = browser.new_page(viewport={"width": 1280, "height": 720})
        pages.append(page)
        page.goto(lab.format(name=f"{name}.ipynb"))
        page.wait_for_function(COUNT_RENDERED, arg=texts, timeout=60_000)
        if page.locator(".jp-FileBrowser").is_visible():
            page.keyboard.press("Control+b")
            page.locator(".jp-FileBrowser").wait_for(state="hidden")
        return page

    yield open_one
    for page in pages:
        page.close()


# ---- the tests -----------------------------------------------------------------------------------
def measured_after(cells, index):
    """The numbers that the first `reveal` after a cell printed; without those of one digit."""
    for cell in cells[index:]:
        for output in cell.get("outputs", []):
            found = MEASURED.search(output.get("text", ""))
            if found:
                return [number for number in found[1].split(" or ") if len(number) > 1]
    return []


@pytest.mark.parametrize("name", NAMES)
def test_no_answer_is_on_the_screen_of_its_question(name, open_notebook):
    answered = nbformat.read(SOLUTIONS / f"{name}.ipynb", as_version=4).cells
    asking = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4).cells
    position = {cell.id: index for index, cell in enumerate(asking)}
    texts = [cell for cell in asking if cell.cell_type == "markdown"]
    page = open_notebook(name, len(texts))

    question = ""
    for index, cell in enumerate(answered):
        if "**Guess first**" in cell.source:
            question = cell.source
        if "**Guess first**" in cell.source or has_tag(cell, "guess"):
            screen = page.evaluate(READ_SCREEN, position[cell.id])
            assert "Guess first" in screen or "my_guess" in screen
            for number in measured_after(answered, index):
                pattern = rf"(?<![\d.,]){re.escape(number)}(?![\d]|[.,]\d)"
                # A factor of 100 is no answer; neither is a ratio that the question names.
                screen = screen.replace("100 * ", "")
                is_given = re.search(pattern, question)
                assert is_given or not re.search(pattern, screen), f"{number} is in\n{screen}"
        if has_tag(cell, "exercise"):
            screen = page.evaluate(READ_SCREEN, position[cell.id] - 1)
            assert "# yours" in screen
            lines = LINE_OF_CODE.findall(answered[index + 2].source)
            assert lines
            assert not all(line in screen for line in lines), screen

    folds = [cell for cell in texts if has_tag(cell, "explanation")]
    assert page.locator(".jp-Notebook details").count() == len(folds) > 0
    assert page.evaluate(COUNT_VISIBLE) == 0
    for fold in page.locator(".jp-Notebook summary").all():
        fold.click()
    assert page.evaluate(COUNT_VISIBLE) >= len(folds)
    assert not [cell for cell in asking if has_tag(cell, SOLUTION)]
