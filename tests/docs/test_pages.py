"""Pages: links lead to files, commands are understood, the loss in four lines is topr.py's."""

import json
import re
import runpy
import shlex
import subprocess
from argparse import ArgumentParser

import pytest
import torch
import tyro
from helpers import ROOT

import topr

CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"""(?:\]\(|(?:src|href)=")(?!\w+:)([^)"\s]+)""")
HEADING = re.compile(r"^#+ (.*)", re.MULTILINE)
TRACKED = subprocess.run(
    ["git", "ls-files", "*.md", "*.ipynb"], cwd=ROOT, capture_output=True, text=True, check=True
)
PAGES = [name for name in TRACKED.stdout.splitlines() if (ROOT / name).exists()]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TARGETS = re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)


# ---- links ---------------------------------------------------------------------------------------
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


# ---- commands and code ---------------------------------------------------------------------------
def code_blocks(name, language):
    """The blocks of code of a page in some language; "" for none."""
    blocks = BLOCK.findall((ROOT / name).read_text(encoding="utf-8"))
    return [code for word, code in blocks if word == language]


def list_commands():
    """The commands of the pages: lines of blocks without a language, and code within a line."""
    related = (ROOT / "docs/related.md").read_text(encoding="utf-8")
    for options in re.findall(r"`(--[^`\n]+)`", related):
        yield f"python train_gsm8k.py {options}"
    programs = "python3?|torchrun|make|topr-conformance"
    for name in PAGES:
        if name.endswith(".md"):
            text = (ROOT / name).read_text(encoding="utf-8")
            for code in code_blocks(name, "") + code_blocks(name, "bash"):
                yield from re.findall(rf"^(?:{programs}) .*?(?=  #|$)", code, re.MULTILINE)
            yield from re.findall(rf"`((?:{programs}) [^`\n]+)`", BLOCK.sub("", text))


@pytest.mark.parametrize("command", sorted(set(list_commands())))
def test_documented_commands_are_understood(command, monkeypatch):
    words = shlex.split(command)
    if words[0] == "make":
        assert {word for word in words[1:] if "=" not in word} <= set(TARGETS)
        return
    for owner, name in ((tyro, "cli"), (ArgumentParser, "parse_args")):
        monkeypatch.setattr(owner, name, exit_after(getattr(owner, name)))
    files = {
        "topr-conformance": "conformance/topr_conformance/__main__.py",
        "my_task.py": "train_gsm8k.py",  # of docs/own_task.md
    }
    for start, word in enumerate(words):
        path = word.replace(".", "/") + ".py" if words[start - 1] == "-m" else word
        path = ROOT / files.get(path, path)
        if path.is_file():
            break
    monkeypatch.setattr("sys.argv", words[start:])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(path), run_name="__main__")
    assert not stop.value.code


def exit_after(parse):
    """`parse`, after which the program goes no further; a wrong option ends it with an error."""

    def parse_then_exit(*args, **kwargs):
        parse(*args, **kwargs)
        raise SystemExit

    return parse_then_exit


@pytest.mark.parametrize("name", ["README.md", "docs/in_your_trainer.md"])
def test_the_four_lines_compute_topr_loss(name):
    generator = torch.Generator().manual_seed(0)
    token_logp, token_logmu = -torch.rand(2, 50, 6, generator=generator)
    mask = (torch.arange(6) < torch.randint(1, 7, (50, 1), generator=generator)).float()
    inputs = {"token_logmu": token_logmu, "reward": torch.randn(50, generator=generator)}
    inputs["mask"] = mask
    names = {"torch": torch, "token_logp": token_logp.requires_grad_(), **inputs}
    exec(code_blocks(name, "python")[0].split("\n\n")[-1], names)
    expected = topr.topr_loss(token_logp, **inputs)
    [gradient] = torch.autograd.grad(names["loss"], token_logp)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, token_logp)[0])
