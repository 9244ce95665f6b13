"""The command `python -m figures.run`."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import figures.run
import figures.runs
from figures.run import Options, check
from figures.scales import PAPER, QUICK, SCALES
from toprlib.records import InputError

ROOT = Path(__file__).resolve().parents[2]
SMALLER = replace(QUICK, base=replace(QUICK.base, problems=4, n=4, test_problems=3))


@pytest.fixture
def run_command(monkeypatch):
    def run_command(*arguments):
        monkeypatch.setattr(sys, "argv", ["figures.run", *map(str, arguments)])
        figures.run.main()

    return run_command


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_a_figure_from_its_runs_to_its_picture(run_command, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SCALES, "quick", SMALLER)
    out = tmp_path / "out"
    runs = tmp_path / "runs"
    arguments = ["variants", "--quick", "--workers", "1", "--runs", runs, "--out", out]
    run_command(*arguments)
    assert "topr, lr 0.0001: invalid at the end" in capsys.readouterr().out

    content = json.loads((out / "variants.json").read_text())
    assert content["seeds"] == [0]
    assert content["runs"] == 5
    assert content["learning_rate_seeds"] == []  # there is only one rate
    assert content["start"] < content["end"]
    command = "python -m figures.run variants --preset laptop --seeds 1 --seed 0 --quick"
    assert content["command"] == command
    assert re.fullmatch(r"unknown|[0-9a-f]{7,}(-dirty)?", *content["commits"])
    assert all(json.loads(file.read_text())["seconds"] > 0 for file in runs.rglob("made.json"))
    for outcomes in content["data"]["one rate"].values():
        shares = [outcomes[name]["mean"] for name in ("correct", "incorrect", "invalid")]
        assert np.sum(shares, axis=0).tolist() == [1, 1]  # before and after the only step

    # All runs start at mu, where all weights are 1: only the mean over tokens differs there.
    files = list(runs.rglob("metrics.jsonl"))
    first_steps = [json.loads(file.read_text().splitlines()[0]) for file in files]
    assert len(first_steps) == 5
    assert all(abs(step["log_ratio_neg_q50"]) < 1e-4 for step in first_steps)
    assert len({round(step["grad_norm"], 5) for step in first_steps}) == 2

    made = contents(out)
    assert set(made) == {"variants.json", "variants.png"}
    monkeypatch.setattr(figures.runs, "make_run", lambda *_: pytest.fail("a run is made again"))
    run_command(*arguments)
    assert contents(out) == made
    (out / "variants.png").unlink()
    run_command("variants", "--redraw", "--out", out)
    assert contents(out) == made


def rows_of(output):
    """Label -> the other cells, of the tables that a dry run prints."""
    rows = {}
    for line in output.splitlines():
        if "│" in line:
            label, *others = re.split(r"\s*│\s*", line)[1:-1]
            rows[label] = others
    return rows


def test_a_dry_run_lists_seeds_settings_and_work(run_command, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("COLUMNS", "150")
    arguments = ["fig9", "fig1", "--preset", "paper", "--runs", tmp_path / "runs", "--dry-run"]
    run_command(*arguments, "--seeds", "2", "--seed", "3")
    rows = rows_of(capsys.readouterr().out)
    # 7,473 problems x 16 samples; 1,319 test problems x 64 before and after training, and a
    # quarter at four points in between.
    samples = 7_473 * 16 + 2 * 1_319 * 64 + 4 * 1_319 * 16
    assert rows["topr"] == ["3 4", "", f"{samples:,}", f"{7_473 * 16 // 8:,}"]
    # Of each problem at most 16 pairs, and 16 completions in a step.
    assert rows["dpo"] == [
        "3 4",
        "method=dpo batch_size=16",
        f"{samples:,}",
        f"{7_473 * 32 // 16:,}",
    ]
    assert not (tmp_path / "runs").exists()


def test_runs_that_eight_processes_cannot_make_are_refused_before_any_is_made(
    run_command, monkeypatch, tmp_path
):
    # A batch of 8 has half of a pair for each process.
    monkeypatch.setitem(SCALES, "paper", replace(PAPER, method_changes={}))
    arguments = ["fig9", "fig1", "--preset", "paper", "--runs", tmp_path / "runs"]
    with pytest.raises(SystemExit):
        run_command(*arguments, "--dry-run")
    monkeypatch.setenv("WORLD_SIZE", "8")
    # With several ranks an error ends the process, which is the one of the tests.
    monkeypatch.setattr("toprlib.command.ranks", lambda: 1)
    with pytest.raises(SystemExit):
        run_command(*arguments)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"figures": ()}, "NAME"),
        ({"seeds": 0}, "--seeds"),
        ({"workers": 0}, "--workers"),
        ({"quick": True, "preset": "paper"}, "--quick"),
        ({"figures": ("fig1", "fig10")}, "fig10"),
        ({"figures": ("share",)}, "share"),
        ({"figures": ("fig2", "fig8-math"), "quick": True}, "fig8-math"),
        ({"out": Path(__file__)}, "--out"),
    ],
)
def test_options_that_cannot_be(changes, option):
    options = replace(Options(figures=("fig1",)), **changes)
    with pytest.raises(InputError) as raised:
        check(options)
    assert raised.value.option == option


@pytest.mark.parametrize(
    ("module", "slow"),
    [
        ("toy_bandit", {"matplotlib.pyplot", "transformers"}),
    ],
)
def test_help_imports_nothing_slow(module, slow):
    code = f"import {module}, sys; print({slow} & set(sys.modules))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "set()\n", done.stderr
