"""README and docs: tables are those of the results, commands and code are understood."""

import re
import shlex
import subprocess
from importlib import import_module
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
import tyro

import figures.run
import toy_bandit
from scripts.make_tables import update_tables
from paper.verdicts import NOT_YET, judged
from toprlib.records import InputError
from toprlib.settings import check, read_settings
from topr_conformance.__main__ import parse_arguments
from train_gsm8k import SETTINGS

ROOT = Path(__file__).resolve().parent.parent
LISTED = subprocess.run(
    ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
)
PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in LISTED.stdout.split()}
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_tables_are_those_of_the_results():
    for name, page in PAGES.items():
        assert update_tables(page) == page, f"{name}: run python scripts/make_tables.py"
    page = PAGES["README.md"]
    assert update_tables(page.replace("| correct |", "| wrong |")) == page


# ---- commands and code ------------------------------------------------------------------------------------------


def commands():
    """Each command of each page: the lines of blocks without a language, and what stands in backticks in the text."""
    found = set()
    for page in PAGES.values():
        for language, block in FENCED.findall(page):
            found |= set(block.splitlines()) if not language else set()
        found |= set(
            re.findall(
                r"`((?:python|torchrun|make|topr-conformance) [^`\n]+)`", FENCED.sub("", page)
            )
        )
    return sorted({re.split(r"\s+#", line)[0].strip() for line in found} - {""})


PROGRAMS = (
    ".",
    "cd",
    "export",
    "git",
    "hf",
    "nvidia-smi",
    "pip",
    "pipx",
    "sudo",
    "uv",
)  # of others


def understand(command):
    """Read a command's options as it would itself: SystemExit, InputError or AssertionError where it does not."""
    words, processes = shlex.split(command.replace(" NAME", " fig1")), 1
    if words[0] == "torchrun":
        processes = int(words[words.index("--nproc-per-node") + 1])
        first = next(i for i, word in enumerate(words) if word == "-m" or word.endswith(".py"))
        words = ["python", *words[first:]]
    if words[:2] == ["python", "-m"]:
        words = ["python", words[2].replace(".", "/"), *words[3:]]
        words[1] += "" if (ROOT / words[1]).is_dir() else ".py"
    match words:
        case ["make", *targets]:
            known = re.findall(
                r"^([\w./-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
            )
            assert {target for target in targets if "=" not in target} <= set(known)
        case ["topr-conformance", *arguments] | ["python", "topr_conformance.py", *arguments]:
            parse_arguments(arguments)
        case ["python", "reproduce.py", *arguments]:
            reproduce.check(tyro.cli(reproduce.Options, args=arguments))
        case ["python", "toy_bandit.py", *arguments]:
            with (
                patch.multiple(Path, mkdir=Mock(), open=Mock()),
                patch("toy_bandit.Figure"),
                patch("torch.set_num_threads"),
            ):
                toy_bandit.main(arguments)  # likewise
        case ["python", script, *arguments] if is_task(script):
            module = import_module(script.removesuffix(".py").replace("/", "."))
            settings = read_settings(arguments, getattr(module, "SETTINGS", SETTINGS))
            getattr(module, "check_verifier", check)(settings, processes)
        case ["python", script, *_]:
            assert (ROOT / script).is_file()
            assert (
                Path(script).parent.name in ("docs", "notebooks", "tiny", "examples")
                or script == "one_file.py"
            )
        case _:
            assert words[0] in PROGRAMS, command


def is_task(script):
    text = (ROOT / script).read_text(encoding="utf-8") if (ROOT / script).is_file() else ""
    uses_main = re.search("(?m)^from train_gsm8k import .*main$", text)
    return script in ("train_gsm8k.py", "tasks/verifier.py") or uses_main


def test_documented_commands_are_understood_and_others_not():
    for command in commands():
        if "--help" not in command:
            understand(command)
    for command in (
        "python train_gsm8k.py --no-such",
        "make no-such",
        "python no_such.py",
        "rm FILE",
    ):
        with pytest.raises((InputError, SystemExit, AssertionError)):
            understand(command)


def test_the_python_of_the_readme_runs():
    names = {}
    for language, block in FENCED.findall(PAGES["README.md"]):
        if language == "python":
            exec(block, names)
    names["loss"].backward()
    weight = 2.718281828**-2
    assert names["weight"].tolist() == pytest.approx([1, weight])
    expected = torch.tensor(
        [[-1 / 4, -1 / 4], [weight / 4, weight / 4]]
    )  # a mean over two tokens and two completions
    assert torch.allclose(names["token_logp"].grad, expected)


# ---- what is said of other files --------------------------------------------------------------------------------


def test_grading_of_mathematics_is_as_described():
    from tasks.judge import Judge

    judge, page = Judge(), PAGES["docs/internals/run_details.md"]
    rows = re.findall(r"^\| `([^|]+)` \| (`.*?`) \| (correct|incorrect)\b", page, re.MULTILINE)
    assert len(rows) >= 8
    for gold, answers, outcome in rows:
        for answer in re.findall("`(.*?)`", answers):
            assert judge.equal(gold, answer) == (outcome == "correct"), (gold, answer)


def test_a_claim_without_its_precondition_is_of_another_setting():
    numbers = {"gain": {"mean": 0.5, "half_width": 0.1, "each": []}}
    numbers["rate"] = {"mean": 0.3, "half_width": None, "each": []}
    row = {"figure": "fig1", "key": "gain", "expected": "> 0"}
    needs = [
        ("fig1", *of, "in words") for of in (("rate", "> 20"), ("rate", "> 40"), ("none", "> 0"))
    ]
    rows = [row, *(row | {"needs": [needs[0], of]} for of in needs), row | {"key": "none"}]
    found = judged(rows, lambda _: {"runs": 3, "shares": numbers})
    assert [claim.verdict for claim in found] == [
        "agrees",
        "agrees",
        "other setting",
        NOT_YET,
        NOT_YET,
    ]
    assert [claim.missing for claim in found] == ["", "", "in words", "", ""]
    assert found[0].estimate.mean == 50  # percentage points
