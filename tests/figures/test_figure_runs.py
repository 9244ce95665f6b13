"""What figures run, one of them from runs to picture, and what was published."""

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from run_helpers import SMALL

import figures.run
from figures import fig1, fig3, rates, runs
from figures.run import FIGURES, Options, figure_names
from figures.scales import LAPTOP, QUICK, SCALES
from toprlib.records import InputError
from train_gsm8k import gsm8k_task, load_problems

RESULTS = Path(__file__).parents[2] / "results"


def load(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def planned(name, scale, seeds=range(2)):
    """The runs of a figure if no rate was tried."""
    figure = import_module(f"figures.{name}")
    grids = {arm: rates.rate_grid(scale, arm) for arm in figure.TUNED}
    return runs.plan(scale, name, figure.rows(scale, grids), seeds)


@pytest.mark.parametrize("name", FIGURES)
def test_samples_are_those_of_a_run_of_the_same_seed_and_figure(name, tmp_path):
    order = []

    def collect(make, group):
        order.extend(run.settings.out for run in group)
        return group

    made = runs.make_runs(planned(name, LAPTOP), tmp_path, collect)
    by_file = {str(run.settings.out / "iteration-1" / "samples.jsonl"): run for run in made}
    for run in made:
        if run.settings.samples:
            first = by_file[run.settings.samples]
            assert first.settings.samples is None
            assert order.index(first.settings.out) < order.index(run.settings.out)
            for setting in ("seed", "model", "n", "problems", "max_new_tokens"):
                assert getattr(first.settings, setting) == getattr(run.settings, setting)


def test_a_finished_run_on_another_s_samples_shares_none(tmp_path):
    first, second, *_ = runs.make_runs(planned("fig7", LAPTOP, range(1)), tmp_path, lambda *_: [])
    first.settings.out.mkdir()
    (first.settings.out / "results.json").touch()
    again = runs.make_runs(planned("fig7", LAPTOP, range(1)), tmp_path, lambda *_: [])
    assert second.settings.samples.startswith(str(first.settings.out))
    assert again[1].settings.samples is None
    assert again[2].settings.samples.startswith(str(second.settings.out))


def test_runs_that_decide_a_claim_have_more_seeds():
    counts = {}
    for run in planned("fig6", LAPTOP, range(1, 4)):
        counts.setdefault(run.columns["p_tilde"], set()).add(run.settings.seed)
    more = {0.01: set(range(1, 14)), 0.1: set(range(1, 9))}
    assert counts == {p: {1, 2, 3} for p in LAPTOP["shares"]} | more


@pytest.mark.parametrize(("name", "sft"), [("fig4", "sft"), ("fig8", "its_positives")])
def test_arms_have_runs_at_topr_s_two_best_rates_and_at_their_own(name, sft):
    tuned = {"topr": [3e-5, 1e-4, 1e-5], "sft": [1e-4, 3e-5], "positives_only": [3e-4, 1e-4]}
    rows = import_module(f"figures.{name}").rows(LAPTOP, tuned)
    lr = {(row["rate"], row["arm"]): row["lr"] for row in rows}
    of_positives = [lr[rate, "positives_only"] for rate in dict.fromkeys(rate for rate, _ in lr)]
    assert of_positives == [3e-5, 1e-4, 3e-4]
    assert lr["own rate", sft] == 1e-4


@pytest.mark.parametrize("samples", [None, "samples.jsonl"])
def test_rates_are_chosen_on_problems_that_no_run_trains_or_tests_on(samples):
    task = rates.held_out_task(replace(SMALL, samples=samples))
    usual = gsm8k_task(SMALL)
    assert [problem.id for problem in task.train] == [problem.id for problem in usual.train]
    held_out = {problem.question for problem in task.test}
    assert len(held_out) == rates.HELD_OUT
    assert not held_out & {problem.question for problem in [*usual.train, *usual.test]}
    # So that this is true of the laptop's figures, too.
    assert LAPTOP["base"].problems + rates.HELD_OUT <= len(load_problems(SMALL.data, "train"))
    assert rates.rate_grid(LAPTOP, "sgd") == pytest.approx([0.03, 0.1, 0.3, 1, 3])
    assert rates.rate_grid(LAPTOP, "dpo") == [3e-6, 1e-5, 1.8e-5, 3e-5, 5.5e-5, 1e-4, 3e-4]


def test_an_unknown_figure_is_refused():
    with pytest.raises(InputError, match="fig10"):
        figure_names(Options(figures=("fig1", "fig10")))


def test_a_figure_from_its_runs_to_its_picture(tmp_path, monkeypatch):
    smaller = {"problems": 4, "n": 4, "test_problems": 3, "max_new_tokens": 48}
    scale = {**QUICK, "base": replace(QUICK["base"], **smaller)}
    for module, name in ((fig1, "PAPER_METHODS"), (fig3, "PAPER_METHODS"), (fig3, "TUNED")):
        monkeypatch.setattr(module, name, ("topr", "reinforce"))
    monkeypatch.setitem(SCALES, "quick", scale)
    arguments = f"fig3 --quick --seed 7 --workers 1 --runs {tmp_path}/runs --out {tmp_path}/out"
    monkeypatch.setattr("sys.argv", ["figures.run", *arguments.split()])
    figures.run.main()
    content = json.loads((tmp_path / "out" / "fig3.json").read_text())
    assert content["seeds"] == [7]
    assert content["runs"] == 2
    assert content["start"] <= content["end"]
    for folder in (tmp_path / "runs" / "quick").iterdir():
        config = json.loads((folder / "config.json").read_text())
        shares = {}
        for file in (folder / "iteration-1").glob("test-*.jsonl"):
            outcomes = [json.loads(line)["outcome"] for line in file.read_text().splitlines()]
            shares[int(file.stem[5:])] = outcomes.count("invalid") / len(outcomes)
        along = [shares[step] for step in sorted(shares)]
        assert content["data"][config["method"]]["invalid"]["mean"] == pytest.approx(along)
        assert not list(folder.rglob("model.safetensors"))  # large, and already evaluated
    monkeypatch.setattr(runs, "make_run", lambda run: pytest.fail("a run is made again"))
    before = (tmp_path / "out" / "fig3.png").read_bytes()
    figures.run.main()
    assert (tmp_path / "out" / "fig3.png").read_bytes() == before


# ---- published numbers and pictures --------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "panel", "label", "path"),
    [
        ("fig1", 1, "PPO", ["own rate", "ppo"]),
        ("fig4", 2, "positives only", ["lr 3e-05", "maj@n", "positives_only"]),
        ("fig6", 1, "TIS", ["p~ = 1%", "correct", "tis"]),
        ("fig8", 3, "Anna Karenina", ["maj@16, own rate", "anna_karenina"]),
        ("rates", 2, "geometric mean", ["geometric mean"]),
    ],
)
def test_a_line_shows_its_data(name, panel, label, path):
    data = load(name)["data"]
    axes = import_module(f"figures.{name}").draw(data).axes[panel]
    [line] = [line for line in axes.lines if line.get_label() == label]
    for key in path:
        data = data[key]
    assert line.get_ydata() == pytest.approx(100 * np.array(data["mean"]))


@pytest.mark.parametrize("name", ["fig3", "fig5", "fig7", "fig9", "table2"])
def test_other_pictures_can_be_drawn(name):
    figure = import_module(f"figures.{name}")
    assert all(axes.has_data() for axes in figure.draw(load(name)["data"]).axes)
