"""The map: bases with knobs, kinds of error, what is kept of a run, and the figure from end to end."""

import json
import random
import shutil
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import make
import numpy as np
import problems
import pytest
import torch
from runs import SMALL
from torch.distributions import StudentT

import reproduce
import train_gsm8k as gsm8k
from paper import experiments, map_figure
from paper import map as the_map
from paper.map import ARMS, PARAMETERS, PLACES, Key, Map, Place
from paper.runs import Finished, Job
from pipeline.records import Sample, read_rows
from pipeline.report import STUDENT, Estimate
from pipeline.settings import Settings

TASK = gsm8k.gsm8k_task(SMALL)


# ---- bases with knobs ----


def test_plans_are_wrong_as_often_as_the_knob_says():
    rng, noise, count = random.Random(0), problems.Noise(plan=(0.2, 0.9)), 20_000
    taken = defaultdict(Counter)
    for _ in range(count):
        problem = problems.draw_problem(rng)
        text, _ = problems.solve_badly(problem, noise, rng)
        texts = [problems.solve(problem, plan)[0] for plan in problems.PLANS[problem.family]]
        taken[problem.family][texts.index(text.strip().rpartition(" The answer")[0])] += 1
    wrong = {family: 1 - plans[0] / plans.total() for family, plans in taken.items()}
    expected = [0.2 + 0.7 * i / 15 for i in range(16)]  # evenly spaced, whichever family comes first
    assert sorted(wrong.values()) == pytest.approx(expected, abs=4 * (0.25 / (count / 16)) ** 0.5)
    assert {family: problems.share_of_wrong_plans(family, 0.2, 0.9) for family in wrong} == pytest.approx(
        wrong, abs=0.06
    )
    usual, others = (sum(plans[i] for plans in taken.values() for i in of) for of in ((1,), (2, 3)))
    assert usual / (usual + others) == pytest.approx(problems.USUAL, abs=0.02)


def test_wrong_plans_are_other_steps_and_mostly_give_other_answers():
    assert all(len(set(plans)) == len(plans) >= 3 for plans in problems.PLANS.values())
    rng, same = random.Random(0), []
    for _ in range(3000):
        problem = problems.draw_problem(rng)
        right, *wrong = (problems.solve(problem, plan)[1] for plan in problems.PLANS[problem.family])
        same += [answer == right for answer in wrong]
        assert the_map.family_of(f"Q: {problem.question}\nA:") == problem.family
    assert sum(same) / len(same) < 0.03


def test_each_kind_of_ending_is_as_frequent_as_the_others():
    rng, noise, count = random.Random(0), problems.Noise(ending=0.4, endings=4), 8000
    found = Counter()
    for _ in range(count):
        problem = problems.draw_problem(rng)
        solution, answer = problems.solve(problem)
        text, is_right = problems.solve_badly(problem, noise, rng)
        ending = text.removeprefix(f" {solution}")
        found[ending.replace(str(answer), "{answer}") if ending else ""] += 1
        assert is_right == (gsm8k.parse_answer(text) == answer)
    assert set(found) == {*problems.ENDINGS, " The answer is {answer}."}
    assert [found[ending] / count for ending in problems.ENDINGS] == pytest.approx([0.1] * 4, abs=0.02)


def test_sizes_are_what_their_names_say(lm):
    counts = {size: make.make_model(lm.tokenizer, 0, size).num_parameters() for size in make.SIZES}
    assert counts == pytest.approx({size: 1e6 * float(size[:-1]) for size in counts}, rel=0.06)
    assert {place: counts["0.9M" if place == "centre" else place] for place in PARAMETERS} == PARAMETERS


@pytest.mark.slow
def test_a_base_is_taught_on_the_same_way_each_time(tmp_path):
    tiny = Path(make.__file__).parent
    for name in ("one", "two"):
        make.main(make.Settings(out=tmp_path / name, base=tiny / "base", habit=2, checker_steps=0))
    one, two = ((tmp_path / name / "base" / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two != (tiny / "base" / "model.safetensors").read_bytes()
    assert not (tmp_path / "one" / "checker").exists()
    assert (tmp_path / "one" / "train.jsonl").read_bytes() == (tiny / "train.jsonl").read_bytes()


# ---- what is read off a run ----


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (" 2 * 3 = 7 figs. The answer is 6.", "right"),  # a right answer is right, whatever precedes it
        (" 2 - 3 = 0 figs. The answer is 0.", "plan"),  # the teacher does not go below zero
        (" 2 / 0 = 1 figs. The answer is 1.", "sum"),
        (" 2 * 3 = 7 figs. The answer is 7.", "sum"),
        (" 2 * 3 = 7 figs. So it is 6.", "none"),
    ],
)
def test_kinds_of_error(text, kind):
    sample = Sample(prompt="?", completion=text, reward=-1.0, outcome=TASK.grade(text, 6))
    assert the_map.kind_of(sample, TASK) == kind


def test_trained_and_tested_problems_differ_and_none_is_of_the_test_set():
    task = the_map.map_task(replace(experiments.LAPTOP.base, **experiments.LAPTOP.mapped))
    trained, tested = ({problem.question for problem in part} for part in (task.train, task.test))
    assert (len(trained), len(tested)) == (640, 100)
    assert not trained & tested
    assert not (trained | tested) & {problem.question for problem in gsm8k.load_problems(Settings().data, "test")}


def test_places_differ_and_have_the_arms_that_are_drawn():
    assert all({"topr", "sft", "topr-70"} <= set(place.arms) <= set(ARMS) for place in PLACES.values())
    assert len({(place.base, *place.changes.items()) for place in PLACES.values()}) == len(PLACES)


def test_what_is_kept_is_what_the_files_say(run):
    folder = run()
    results = json.loads((folder / "results.json").read_text())
    line = the_map.measured(Finished(Job("", replace(SMALL, out=folder), gsm8k.gsm8k_task), results), TASK)
    right = defaultdict(list)
    for sample in read_rows(folder / "iteration-1" / f"test-{line['steps']}.jsonl", Sample):
        right[the_map.family_of(sample.prompt)].append(sample.outcome == "correct")
    after = line["after"]
    assert after["families"] == {name: round(sum(of) / len(of), 4) for name, of in sorted(right.items())}
    assert after["correct"] + after["plan"] + after["sum"] + after["none"] == pytest.approx(1, abs=2e-4)
    drawn = read_rows(folder / "iteration-1" / "samples.jsonl", Sample)
    assert line["positive"] == pytest.approx(sum(s.reward > 0 for s in drawn) / len(drawn), abs=1e-4)


# ---- intervals and differences over seeds ----


def test_an_interval_over_seeds_is_student_s():
    """The quantile leaves 2.5% above it: the density integrated numerically, in float64."""
    for n, quantile in STUDENT.items():
        x = torch.linspace(-quantile, quantile, 20_001, dtype=torch.float64)
        density = StudentT(torch.tensor(n - 1.0, dtype=torch.float64)).log_prob(x).exp()
        assert torch.trapezoid(density, x).item() == pytest.approx(0.95, abs=1e-4)
    for n in (2, 5, 30):  # the quantile of 10 serves more values too
        values = np.random.default_rng(n).normal(size=n)
        se = (sum((v - sum(values) / n) ** 2 for v in values) / (n - 1) / n) ** 0.5
        assert Estimate.over_seeds(values)[:2] == pytest.approx((sum(values) / n, STUDENT[min(n, 10)] * se))
    assert Estimate.over_seeds([1.0]) == Estimate(1.0, None, (1.0,))


def lines(*rows, shares=None, families=None):
    """Lines of the map: place, arm, seed, right samples after training."""
    return {
        Key(*key): {
            "after": {"correct": correct, "families": families or {}},
            "positive by family": shares or {},
            "steps": 1,
        }
        for *key, correct in rows
    }


def test_gains_are_taken_seed_by_seed():
    table = Map(lines(("centre", "topr", 0, 0.9), ("centre", "topr", 1, 0.5), ("centre", "sft", 1, 0.4)))
    assert table.of("centre", "topr").each == pytest.approx([0.1])
    assert table.of("centre", "topr", "tis") is None


def test_the_slope_over_sizes_is_that_of_a_line():
    gains = {"0.2M": 0.01, "centre": 0.03, "3.6M": 0.05}
    rows = [(place, arm, 0, 0.5 + gain * (arm == "topr")) for place, gain in gains.items() for arm in ("topr", "sft")]
    x = torch.tensor([PARAMETERS[place] for place in gains], dtype=torch.float64).log10()
    y = 100 * torch.tensor(list(gains.values()), dtype=torch.float64)
    slope = ((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum()
    found, r = map_figure.slope_over_sizes(Map(lines(*rows)), "topr"), torch.corrcoef(torch.stack([x, y]))[0, 1]
    assert found.mean == pytest.approx(slope.item())
    assert found.half_width == pytest.approx(12.706 * (slope * (1 / r**2 - 1).sqrt()).item())  # one degree of freedom
    assert map_figure.slope_over_sizes(Map(lines(*rows)), "topr-70") is None


def test_families_are_put_together_by_their_share_of_right_samples():
    shares, topr = {"find": 0.01, "take": 0.5}, {"find": 0.3, "take": 0.9}
    table = Map(
        lines(("hard", "topr", 0, 0.5), shares=shares, families=topr)
        | lines(("hard", "topr", 1, 0.5), shares={"find": 0.9, "take": 0.9}, families=topr)  # sft did not run
        | lines(("hard", "sft", 0, 0.5), families={"find": 0.7, "take": 0.8})
    )
    assert np.array(map_figure.by_family(table, "topr")) == pytest.approx(np.array([(0.01, -0.4), (0.5, 0.1)]))


def test_the_tables_say_what_the_lines_say():
    """A cell of each table of results/README.md, counted from the lines of results/map_runs.jsonl."""
    file = Path(reproduce.__file__).parent / "results" / "map_runs.jsonl"
    each = [json.loads(line) for line in file.read_text().splitlines()]
    after = {(line["place"], line["arm"], line["seed"]): line["after"] for line in each}
    tables = map_figure.record(file)["tables"]

    def cell(table, row, column):
        [found] = [cells for cells in tables[table]["rows"] if cells[0] == row]
        return found[tables[table]["head"].index(column)]

    def gain(place, arm, what):
        each = [after[place, arm, seed][what] - after[place, "sft", seed][what] for seed in range(3)]
        return f"{100 * np.mean(each):.1f} ± {100 * 4.303 * np.std(each, ddof=1) / 3**0.5:.1f}"

    assert cell("places", "base less sure", "TIS (points)") == gain("unsure", "tis", "correct")
    assert cell("gains-topr-70", "SGD, rate 0.3", "wrong plan") == gain("sgd", "topr-70", "plan")
    right = 100 * np.mean([after["hard", "tis", seed]["wrong sums"] for seed in range(3)])
    assert cell("kinds-hard", "TIS", "sums that are wrong") == f"{right:.1f}"
    assert cell("places", "centre", "seeds") == "5"


# ---- the figure ----


@pytest.mark.slow
def test_the_map_from_end_to_end_and_from_its_lines(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"

    def made(*options):
        folders = ["--runs", str(tmp_path / "runs"), "--out", str(out)]
        monkeypatch.setattr(sys, "argv", ["reproduce.py", "map", "--quick", "--workers", "1", *folders, *options])
        reproduce.main()
        return {file.name: file.read_bytes() for file in out.iterdir()}, capsys.readouterr().out

    before, told = made()
    assert "4 of 4 runs to make" in told
    assert set(before) == {"map.png", "map_runs.jsonl"}
    lines = [json.loads(line) for line in before["map_runs.jsonl"].splitlines()]
    keys = [(line["place"], line["arm"]) for line in lines]
    assert keys == [("centre", "sft"), ("centre", "topr"), ("slips", "sft"), ("slips", "topr")]
    assert [line["seconds of base"] > 0 for line in lines] == [True, True, False, False]  # tiny/base is there
    assert all(line["seconds"] > 0 for line in lines)

    shutil.rmtree(tmp_path / "runs")  # the lines suffice
    monkeypatch.setattr(gsm8k, "experiment", lambda *_: pytest.fail("made again"))
    assert made()[0] == before

    monkeypatch.setitem(the_map.QUICK, "slips", Place("slips", (), {"lr": 1e-3}, ("topr", "sft")))  # another definition
    after, told = made("--hours", "0")
    assert "2 of 4 runs to make" in told
    assert after["map.png"] != before["map.png"]  # without the place whose runs are of another definition
