"""The map: bases with knobs, kinds of error, what is kept of a run, and the figure from end to end."""

import json
import math
import random
import re
import shutil
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import product
from pathlib import Path

import make
import numpy as np
import problems
import pytest
from runs import SMALL

import reproduce
import train_gsm8k as gsm8k
from paper import experiments, map_figure
from paper import map as the_map
from paper.map import ARMS, PARAMETERS, PLACES, SHARES, Key, Map, Place, read_lines
from paper.runs import Finished
from pipeline.records import Sample, read_rows
from pipeline.report import STUDENT, Estimate
from pipeline.settings import Settings

TASK = gsm8k.gsm8k_task(SMALL)


# ---- bases with knobs ----


def test_plans_and_endings_are_wrong_as_often_as_the_knobs_say():
    rng, noise, count = random.Random(0), problems.Noise(plan=(0.2, 0.9), ending=0.4, endings=4), 20_000
    taken, found, same = defaultdict(Counter), Counter(), []
    for _ in range(count):
        problem = problems.draw_problem(rng)
        assert the_map.family_of(f"Q: {problem.question}\nA:") == problem.family
        text, is_right = problems.solve_badly(problem, noise, rng)
        solved = [problems.solve(problem, plan) for plan in problems.PLANS[problem.family]]
        plan = max((i for i, (s, _) in enumerate(solved) if text.startswith(f" {s}")), key=lambda i: len(solved[i][0]))
        ending = text.removeprefix(f" {solved[plan][0]}").replace(str(solved[plan][1]), "{answer}")
        taken[problem.family][plan] += 1
        found[ending] += 1
        assert is_right == (gsm8k.parse_answer(text) == solved[0][1])
        same += [answer == solved[0][1] for _, answer in solved[1:]]
    wrong = sorted(1 - plans[0] / plans.total() for plans in taken.values())
    expected = [0.2 + 0.7 * i / 15 for i in range(16)]  # evenly spaced, whichever family comes first
    assert wrong == pytest.approx(expected, abs=4 * (0.25 / (count / 16)) ** 0.5)
    usual, others = (sum(plans[i] for plans in taken.values() for i in of) for of in ((1,), (2, 3)))
    assert usual / (usual + others) == pytest.approx(problems.USUAL, abs=0.02)
    expected = dict.fromkeys(problems.ENDINGS, 0.1) | {" The answer is {answer}.": 0.6}
    assert {ending: n / count for ending, n in found.items()} == pytest.approx(expected, abs=0.02)
    assert sum(same) / len(same) < 0.03  # a wrong plan mostly gives another answer
    assert all(len(set(plans)) == len(plans) >= 3 for plans in problems.PLANS.values())


@pytest.mark.parametrize(("wordings", "sentences"), [(1, True), (3, False), (8, True)])
def test_a_worded_solution_keeps_the_numbers_of_its_plan(wordings, sentences):
    rng, noise = random.Random(0), problems.Noise(wordings=wordings, sentences=sentences)
    per_problem = []
    for _ in range(300):
        problem = problems.draw_problem(rng)
        solution, answer = problems.solve(problem)
        texts = [problems.solve_badly(problem, noise, rng)[0] for _ in range(8)]
        for text in texts:
            found, plain = (problems.EXPRESSION.findall(of) for of in (text, solution))
            assert [(*sorted((x, y)), sign, z) for x, sign, y, z in found] == [
                (*sorted((x, y)), sign, z) for x, sign, y, z in plain
            ]
            assert gsm8k.parse_answer(text) == answer
            assert len(re.findall(r"[.?]", text)) >= len(plain) * (3 if sentences else 1) + 1
        per_problem.append(len(set(texts)))
    assert np.mean(per_problem) == pytest.approx({1: 1, 3: 7.8, 8: 8}[wordings], abs=0.2)


def test_sizes_are_what_their_names_say(lm):
    counts = {size: make.make_model(lm.tokenizer, 0, size).num_parameters() for size in make.SIZES}
    assert counts == pytest.approx({size: 1e6 * float(size[:-1]) for size in counts}, rel=0.06)
    assert {place: counts["0.9M" if place == "centre" else place] for place in PARAMETERS} == PARAMETERS


# ---- what is read off a run ----


def test_trained_and_tested_problems_differ_and_none_is_of_the_test_set():
    task = the_map.map_task(replace(experiments.LAPTOP.base, **experiments.LAPTOP.mapped["map"]))
    trained, tested = ({problem.question for problem in part} for part in (task.train, task.test))
    assert (len(trained), len(tested)) == (640, 100)
    assert not trained & tested
    assert not (trained | tested) & {problem.question for problem in gsm8k.load_problems(Settings().data, "test")}


def test_places_differ_and_have_the_arms_that_are_drawn():
    assert all({"topr", "sft", "topr-70"} <= set(place.arms) <= set(ARMS) for place in PLACES.values())
    for places in the_map.MAPS.values():
        assert len({(place.base, *place.changes.items()) for place in places.values()}) == len(places)
    assert all(set(place.arms) <= set(ARMS) for place in SHARES.values())


def test_what_is_kept_is_what_the_files_say(run):
    folder = run()
    results = json.loads((folder / "results.json").read_text())
    line = the_map.measured(Finished(replace(SMALL, out=folder), results), TASK)
    files = ("samples.jsonl", f"test-{line['steps']}.jsonl")
    drawn, tested = (read_rows(folder / "iteration-1" / name, Sample) for name in files)
    right = defaultdict(list)
    for sample in tested:
        right[the_map.family_of(sample.prompt)].append(sample.outcome == "correct")
    after = line["after"]
    assert after["families"] == {name: round(sum(of) / len(of), 4) for name, of in sorted(right.items())}
    assert after["correct"] + after["plan"] + after["sum"] + after["none"] == pytest.approx(1, abs=2e-4)
    assert line["positive"] == pytest.approx(sum(s.reward > 0 for s in drawn) / len(drawn), abs=1e-4)
    steps = [json.loads(text) for text in (folder / "iteration-1" / "metrics.jsonl").read_text().splitlines()]
    of_positives = sum(step["pull"] * step["realised_share"] for step in steps)
    assert line["realised"] == pytest.approx(of_positives / sum(step["pull"] for step in steps), abs=1e-4)


# ---- intervals and differences over seeds ----


def test_an_interval_over_seeds_is_student_s():
    """The quantile leaves 2.5% above it: the density integrated numerically."""
    for n, quantile in STUDENT.items():
        x = np.linspace(-quantile, quantile, 20_001)
        scale = math.gamma(n / 2) / math.gamma((n - 1) / 2) / math.sqrt(math.pi * (n - 1))
        assert np.trapezoid(scale * (1 + x**2 / (n - 1)) ** (-n / 2), x) == pytest.approx(0.95, abs=1e-4)
    assert Estimate.over_seeds([0, 1] * 8)[:2] == pytest.approx((0.5, STUDENT[10] * (0.25 / 15) ** 0.5))  # more than 10
    assert Estimate.over_seeds([1.0]) == Estimate(1.0, None, (1.0,))


def table(*rows):
    """A map of (place, arm, seed, right samples after training, and those of families in the data and after it)."""
    lines = {
        Key(*key): {"after": {"correct": correct, "families": after}, "positive by family": drawn, "steps": 1}
        for *key, correct, drawn, after in rows
    }
    return Map(lines)


def test_families_are_put_together_by_their_share_of_right_samples():
    found = table(
        ("hard", "topr", 0, 0.5, {"find": 0.01, "take": 0.5}, {"find": 0.3, "take": 0.9}),
        ("hard", "topr", 1, 0.5, {"find": 0.9, "take": 0.9}, {"find": 0.9}),  # sft did not run
        ("hard", "sft", 0, 0.5, {}, {"find": 0.7, "take": 0.8}),
    )
    assert np.array(map_figure.by_family(found, "topr")) == pytest.approx(np.array([(0.01, -0.4), (0.5, 0.1)]))


def test_the_tables_say_what_the_lines_say():
    """A cell of each table and of the picture of results/map.md, counted from the lines of results/map_runs.jsonl."""
    file = Path(reproduce.__file__).parent / "results" / "map_runs.jsonl"
    each = [json.loads(line) for line in file.read_text().splitlines()]
    after = {(line["place"], line["arm"], line["seed"]): line["after"] for line in each}
    tables = map_figure.record(file)["tables"]

    def cell(table, row, column):
        [found] = [cells for cells in tables[table]["rows"] if cells[0] == row]
        return found[tables[table]["head"].index(column)]

    gains = [100 * (after["sgd", "topr-70", seed]["sum"] - after["sgd", "sft", seed]["sum"]) for seed in range(3)]
    [_, panel] = map_figure.of_kinds(Map(read_lines(file)))
    drawn = dict(zip(panel.options["yticklabels"], panel.lines[0].y, strict=True))["SGD, rate 0.3"]
    assert drawn[panel.options["xticklabels"].index("wrong\nsum")] == pytest.approx(np.mean(gains))
    wrong = 100 * np.mean([after["hard", "tis", seed]["wrong sums"] for seed in range(3)])
    assert cell("kinds-hard", "TIS", "sums that are wrong") == f"{wrong:.1f}"
    right = 100 * np.mean([after["centre", "sft", seed]["correct"] for seed in range(5)])
    assert [cell("places", "centre", name) for name in ("positives only (%)", "seeds")] == [f"{right:.1f}", "5"]


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
    assert [(line["place"], line["arm"]) for line in lines] == [*product(("centre", "slips"), ("sft", "topr"))]
    assert [line["seconds of base"] > 0 for line in lines] == [True, True, False, False]  # tiny/base is there
    assert all(line["seconds"] > 0 for line in lines)

    shutil.rmtree(tmp_path / "runs")  # the lines suffice
    monkeypatch.setattr(gsm8k, "experiment", lambda *_: pytest.fail("made again"))
    assert made()[0] == before

    monkeypatch.setitem(
        the_map.QUICK["map"], "slips", Place("slips", (), {"lr": 1e-3}, ("topr", "sft"))
    )  # another definition
    after, told = made("--hours", "0")
    assert "2 of 4 runs to make" in told
    assert after["map.png"] != before["map.png"]  # without the place whose runs are of another definition
