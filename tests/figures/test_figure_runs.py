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
from figures.common import STUDENT_T
from figures.run import FIGURES, Options, figure_names
from figures.scales import LAPTOP, PAPER, QUICK, SCALES
from toprlib.records import InputError
from train_gsm8k import gsm8k_task, load_problems

RESULTS = Path(__file__).parents[2] / "results"
LAPTOPS = FIGURES["laptop"]


def load(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def planned(name, scale, seeds=range(2)):
    """The runs of a figure if no rate was tried."""
    figure = import_module(f"figures.{name}")
    grids = {arm: rates.rate_grid(scale, arm) for arm in figure.TUNED}
    return runs.plan(scale, name, figure.rows(scale, grids), seeds)


# Runs of a seed at the paper's scale, counted from the docstrings: Figure 1 has eight methods, and
# one learning rate for all; Figures 5 and 6 eight p~ on two sets or of two methods; Figure 9
# measures difficulty twice.
RUNS_OF_THE_PAPER = {"fig1": 8, "fig2": 0, "fig3": 4, "fig4": 3, "fig5": 16, "fig6": 16, "fig7": 4}
RUNS_OF_THE_PAPER |= {"fig8": 4 + 2, "fig9": 8 + 2, "table2": 1}


@pytest.mark.parametrize("name", RUNS_OF_THE_PAPER)
def test_the_paper_s_figures_have_all_runs(name, tmp_path):
    folders = [[], []]
    made = runs.make_runs(planned(name, PAPER), tmp_path, lambda make, group: group)
    for run in made:
        folders[run.settings.seed].append(run.settings.out)
    assert [len(set(each)) for each in folders] == [RUNS_OF_THE_PAPER[name]] * 2


@pytest.mark.parametrize("name", LAPTOPS)
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


def test_runs_that_decide_a_claim_have_more_seeds():
    counts = {}
    for run in planned("fig6", LAPTOP, range(1, 4)):
        counts.setdefault(run.columns["p_tilde"], set()).add(run.settings.seed)
    seeds = {p: sorted(each) for p, each in counts.items()}
    assert seeds == {p: [1, 2, 3] for p in LAPTOP["shares"]} | {
        0.01: list(range(1, 14)),
        0.1: list(range(1, 9)),
    }
    assert {run.settings.seed for run in planned("rates", LAPTOP, range(100, 102))} == {100, 101}


def test_each_arm_has_a_run_at_topr_s_two_best_rates_and_at_its_own():
    tuned = {"topr": [3e-5, 1e-4, 1e-5], "sft": [1e-4, 3e-5], "positives_only": [3e-4, 1e-4]}
    for name in ("fig4", "fig8"):
        rows = import_module(f"figures.{name}").rows(LAPTOP, tuned)
        lr = {(row["rate"], row["arm"]): row["lr"] for row in rows}
        assert lr["best rate", "positives_only"] == 3e-5
        assert lr["second best rate", "positives_only"] == 1e-4
        assert lr["own rate", "positives_only"] == 3e-4
        assert lr["own rate", "sft" if name == "fig4" else "its_positives"] == 1e-4


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
    grid = rates.rate_grid(LAPTOP, "sgd")
    assert grid == pytest.approx([0.03, 0.1, 0.3, 1, 3])
    assert rates.rate_grid(LAPTOP, "dpo") == [3e-6, 1e-5, 1.8e-5, 3e-5, 5.5e-5, 1e-4, 3e-4]


@pytest.mark.parametrize(("names", "preset"), [(["fig10"], "laptop"), (["fig4-math"], "laptop")])
def test_a_preset_has_its_own_figures(names, preset):
    with pytest.raises(InputError, match=names[0]):
        figure_names(Options(figures=tuple(names), preset=preset))


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
    assert content["core_minutes"] >= 0
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
@pytest.mark.parametrize("name", LAPTOPS)
def test_means_and_intervals_follow_from_the_seeds(name):
    content = load(name)
    for number in [*content["shares"].values(), *content["numbers"].values()]:
        each = np.array(number["each"])
        assert number["mean"] == pytest.approx(each.mean(), abs=1e-12)
        if len(each) > 1:
            error = each.std(ddof=1) / len(each) ** 0.5
            assert number["half_width"] == pytest.approx(STUDENT_T[len(each) - 2] * error)


# File, panel, line there, what it shows.
DRAWN = [
    ("fig1", 1, "PPO", lambda data: data["own rate"]["ppo"]),
    ("fig3", 3, "invalid", lambda data: data["reinforce"]["invalid"]),
    ("fig4", 2, "positives only", lambda data: data["lr 3e-05"]["maj@n"]["positives_only"]),
    ("fig5", 1, "50% positive", lambda data: data["lr 0.0001"]["50% positive"]),
    ("fig6", 1, "TIS", lambda data: data["p~ = 1%"]["correct"]["tis"]),
    ("fig8", 3, "Anna Karenina", lambda data: data["maj@16, own rate"]["anna_karenina"]),
    ("fig9", 1, "easiest third", lambda data: data["easiest third"]),
    ("rates", 2, "geometric mean", lambda data: data["geometric mean"]),
]


@pytest.mark.parametrize(("name", "panel", "label", "from_data"), DRAWN)
def test_a_line_shows_its_data(name, panel, label, from_data):
    data = load(name)["data"]
    axes = import_module(f"figures.{name}").draw(data).axes[panel]
    [line] = [line for line in axes.lines if line.get_label() == label]
    assert line.get_ydata() == pytest.approx(100 * np.array(from_data(data)["mean"]))


@pytest.mark.parametrize("name", ["fig2", "fig7", "table2"])
def test_other_pictures_can_be_drawn(name):
    figure = import_module(f"figures.{name}")
    content = load(name)
    assert all(axes.has_data() for axes in figure.draw(content["data"]).axes)
    if name == "fig2":  # it needs no runs, and is the same whenever it is made
        for key, values in figure.read([], LAPTOP)["data"].items():
            assert content["data"][key] == pytest.approx(values, rel=1e-6, abs=1e-6)
