"""The README: its Python runs, its commands are understood, its numbers are those of the results beside it."""

import dataclasses
import json
import re
import shlex
import shutil
import statistics
from dataclasses import replace
from pathlib import Path

import page
import pytest
import tyro

import reproduce
import train_gsm8k as gsm8k
from conformance import identify as conformance
from paper import claims as toy_bandit
from paper.sweep import OverSeeds
from pipeline.cli import read_settings
from pipeline.settings import check
from tasks import math as train_math
from tasks import verifier as train_verifier
from tasks.judge import Judge

ROOT = Path(gsm8k.__file__).parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^(?:python|torchrun .*?) train_gsm8k.py(?! --help).*?(?=\s*#|$)", README, re.MULTILINE)
COMMANDS = sorted(set(COMMANDS))


def test_the_python_in_the_readme_runs():
    [block] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names = {}
    exec(block, names)
    assert names["logp"].grad.tolist() == pytest.approx([-1 / 40, 2.718281828**-2 / 60])


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_in_the_readme_are_understood(command):
    settings = read_settings(re.split(r"train_gsm8k.py ?", command)[1].split())
    gsm8k.check(settings)
    assert replace(settings, out=None) != gsm8k.Settings()


OTHERS = {
    "train_math.py": (train_math.PRESETS, check),
    "train_verifier.py": (train_verifier.PRESETS, train_verifier.check_verifier),
}
OTHER_COMMANDS = re.findall(
    r"^(?:python|torchrun .*?) (train_(?:math|verifier)\.py)(.*?)(?=\s*#|$)", README, re.MULTILINE
)


@pytest.mark.parametrize(("script", "arguments"), sorted(set(OTHER_COMMANDS)))
def test_the_commands_of_mathematics_and_of_the_verifier_are_understood(script, arguments):
    presets, check_settings = OTHERS[script]
    check_settings(read_settings(arguments.split(), presets))


BANDIT_COMMANDS = re.findall(r"^python toy_bandit.py.*?(?=\s*#|$)", README, re.MULTILINE)


@pytest.mark.parametrize("command", BANDIT_COMMANDS)
def test_the_bandit_s_commands_are_understood(command):
    tyro.cli(toy_bandit.Settings, args=shlex.split(command)[2:])


CONFORMANCE_COMMANDS = re.findall(r"^python conformance.py.*?(?=\s*#|$)", README, re.MULTILINE)


@pytest.mark.parametrize("command", CONFORMANCE_COMMANDS)
def test_the_checker_s_commands_are_understood(command):
    settings = tyro.cli(conformance.Settings, args=shlex.split(command)[2:])
    if settings.loss not in (None, "package.module:function"):
        assert callable(conformance.load(settings.loss))


RESULTS = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
FIGURE_COMMANDS = re.findall(r"^(?:torchrun .*? |python )reproduce.py(.*?)(?=\s*#|$)", README + RESULTS, re.MULTILINE)


@pytest.mark.parametrize("arguments", sorted(set(FIGURE_COMMANDS)))
def test_the_figures_commands_are_understood(arguments):
    reproduce.check(tyro.cli(reproduce.Options, args=shlex.split(arguments)))


@pytest.mark.parametrize("name", reproduce.FIGURES)
def test_what_is_said_of_a_figure_is_in_its_results(name):
    [section] = re.findall(rf"^## {name}\b.*?(?=^## |\Z)", RESULTS, re.MULTILINE | re.DOTALL)
    content = json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))
    assert (ROOT / "results" / f"{name}.png").exists()
    assert f"]({name}.png)" in section
    assert content["command"].split(" --preset")[0] in section
    assert re.search(r"\*\*Verdict: (agrees|agrees in part|does not agree)", section) or name == "variants"
    values = {what: OverSeeds(**v) for what, v in content["shares"].items()}
    known = {what: reproduce.to_text(value, 100) + " %" for what, value in values.items()}
    known |= {what: reproduce.to_text(OverSeeds(**value)) for what, value in content["numbers"].items()}
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", section.replace("\\|", "‖"), re.MULTILINE)[2:]
    assert rows
    for what, value in rows:
        assert known[what.replace("‖", "|")] == value, what


def test_the_figures_numbers_in_the_readme_are_measured():
    section = README.partition("## The paper's figures")[2].partition("\n## ")[0]
    known = set()
    for name in ("fig1", "fig3", "table2", "variants"):
        content = json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))
        known |= {reproduce.to_text(OverSeeds(**value), 100) for value in content["shares"].values()}
    for outcome in content["data"]["topr"].values():  # before training
        known.add(reproduce.to_text(OverSeeds(outcome["mean"][0], outcome["se"][0], []), 100))
    quoted = re.findall(r"\d+\.\d ± \d+\.\d(?=%)", section)
    assert len(quoted) >= 10
    assert set(quoted) <= known


def test_the_verifier_s_table_is_that_of_the_results():
    results = json.loads((ROOT / "results" / "verifier.json").read_text(encoding="utf-8"))
    for name, row in results["table2"].items():
        cells = [f"{100 * e['mean']:.1f} ± {200 * e['se']:.1f}%" for e in row.values()]
        assert f"| {name} | {' | '.join(['- | -'] * (len(cells) == 1) + cells)} |" in README
    gained = [f"{100 * abs(e['mean']):.1f} ± {200 * e['se']:.1f}" for e in results["paired differences"].values()]
    assert f"gains {gained[1]} points over maj@8,\nand the base verifier loses {gained[2]}" in README
    assert results["paired differences"]["weighted self-consistency, base - maj@8"]["mean"] < 0


def test_what_is_said_of_a_verifier_that_checks_badly_is_in_its_results():
    results = json.loads((ROOT / "results" / "verifier_base.json").read_text(encoding="utf-8"))
    before, after = (results["table2"][row]["verifier accuracy"] for row in ("base", "topr"))
    lost = results["paired differences"]["weighted self-consistency, topr - maj@8"]
    for text in (before, after, {"mean": -lost["mean"], "se": lost["se"]}):
        assert f"{100 * text['mean']:.1f} ± {200 * text['se']:.1f}" in README


def test_what_is_said_of_grading_is_what_is_graded():
    judge = Judge()
    rows = re.findall(r"^\| `([^|]+)` \| (`.*?`) \| (correct|incorrect)\b", README, re.MULTILINE)
    assert len(rows) >= 8
    for gold, answers, outcome in rows:
        for answer in re.findall("`(.*?)`", answers):
            assert judge.equal(gold, answer) == (outcome == "correct"), (gold, answer)


def test_every_fault_that_is_listed_names_tests_that_are_there():
    text = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and "| fault |" not in line]
    code = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").glob("test_*.py"))
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row)
        assert named, row
        for name in named:
            assert f"def {name}(" in code, name


SPEED = {  # a row of the README's table -> file, comparison, side, against
    "training, 0-shot, against TRL": ("train_step", 0, "topr, shared rows", "TRL"),
    "training, 8 short shots, against TRL": ("train_step", 1, "topr, shared rows", "TRL"),
    "training, 8 shots, against TRL": ("train_step", 2, "topr, shared rows", "TRL"),
    "training, 8 shots, against padded rows": ("train_step", 2, "topr, shared rows", "topr, padded rows"),
    "memory of the head, against TRL's": (
        "loss_memory",
        0,
        "pipeline.head, slices of words",
        "TRL's selective log-softmax",
    ),
    "TOPR against cross-entropy": ("overhead", 0, "topr.train", "cross-entropy"),
    "sampling, against plain `generate`": (
        "sampling",
        0,
        "the engine, 40,000 tokens at once",
        "generate, prompts as they come",
    ),
    "sampling, against vLLM on the processor": (
        "sampling",
        0,
        "the engine, 40,000 tokens at once",
        "vLLM on the processor",
    ),
    "generating and training, against TRL": ("end_to_end", 0, "topr", "TRL as it comes"),
    "the default run, against two minutes": ("end_to_end", 1, "python train_gsm8k.py", "goal"),
}


@pytest.mark.parametrize("row", SPEED)
def test_the_speeds_in_the_readme_are_measured(row):
    name, number, side, against = SPEED[row]
    content = json.loads((ROOT / "results" / "benchmarks" / f"{name}.json").read_text(encoding="utf-8"))
    comparison = content["comparisons"][number]
    [goal] = [g for g in comparison["goals"] if (g["side"], g["against"]) == (side, against)]
    ours, theirs = (comparison["values"][one] for one in (side, against))
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    cells = f"{statistics.median(ours):,.4g} | {statistics.median(theirs):,.4g}"
    cells += f" | {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    hoped = f"{'>=' if goal['is_least'] else '<='} {goal['bound']:g}"
    assert f"| {row}, {comparison['unit']} | {cells} | {hoped} |" in README


def test_the_page_of_benchmarks_is_made_of_its_files(tmp_path):
    there = ROOT / "results" / "benchmarks"
    for file in there.glob("*.json"):
        shutil.copy(file, tmp_path)
    page.main(tmp_path)
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == (there / "README.md").read_text(encoding="utf-8")
    assert len(list(there.glob("*.json"))) == len(page.TITLES)


def test_there_are_commands_to_test():
    assert len(set(OTHER_COMMANDS)) >= 7
    assert len(set(FIGURE_COMMANDS)) >= 4
    assert len(CONFORMANCE_COMMANDS) == 5
    assert len(COMMANDS) >= 7
    assert len(BANDIT_COMMANDS) == 3


def test_what_is_said_of_the_bandit_is_in_its_results():
    claims = json.loads((ROOT / "results" / "bandit" / "claims.json").read_text(encoding="utf-8"))["claims"]
    rows = [row for rows in claims.values() for row in rows]
    assert f"all {len(rows)} hold" in README
    assert all(row["holds"] for row in rows)
    assert re.findall(r"^\| `(\w+)` \| (?:App|Prop|Sec|Table)", README, re.MULTILINE) == list(claims)
    measured = " ".join(row["measured"] for row in rows)
    for found in ("19.3% ± 1.5%", "52, 59, 51 steps", "> 10,000, > 10,000 steps", "in 384 of 400", "in 236 of 400"):
        assert found in measured


def test_every_setting_says_where_its_default_is_from():
    text = (ROOT / "pipeline" / "settings.py").read_text(encoding="utf-8")
    fields = re.findall(r"^    (\w+): .* = .*\n    \"\"\"(.*)\"\"\"", text, re.MULTILINE)
    silent = {
        "method",
        "limits",
        "effective_proportion",
        "seed",
        "out",
        "shots_file",
        "dry_run",
        "debug",
    }  # no number to cite
    assert {name for name, _ in fields} == {field.name for field in dataclasses.fields(gsm8k.Settings)}
    assert all("paper" in help or "ours" in help for name, help in fields if name not in silent)


def test_the_table_in_the_readme_is_that_of_the_results():
    results = json.loads((ROOT / "results" / "laptop.json").read_text(encoding="utf-8"))
    shown = re.search(r"│ correct +│ ([\d.]+) % +│ ([\d.]+) % +│", README)
    after = results["iterations"][0]["after"]
    assert shown.groups() == tuple(f"{100 * entry['correct']:.1f}" for entry in (results["before"], after))


def test_the_table_of_iterations_is_that_of_the_results():
    results = json.loads((ROOT / "results" / "iterations.json").read_text(encoding="utf-8"))
    entries = [results["before"], *(iteration["after"] for iteration in results["iterations"])]
    for name in ("correct", "incorrect", "invalid"):
        cells = " +│ ".join(f"{100 * entry[name]:.1f} %" for entry in entries)
        assert re.search(f"│ {name} +│ {cells} +│", README), name
    for name in ("pass@1", "maj@16", "pass@16"):
        cells = " +│ ".join(f"{100 * e[name]['mean']:.1f} ± {200 * e[name]['se']:.1f} %" for e in entries)
        assert re.search(f"│ {name} +│ {cells} +│", README), name
