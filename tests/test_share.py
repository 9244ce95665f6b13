"""The share study: bases with knobs, kinds of error, what is kept of a run, hits of the law, and the whole study."""

import json
import math
import random
import re
import shutil
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import product

import make
import numpy as np
import problems
import pytest
import torch
from runs import SMALL

import reproduce
import train_gsm8k as gsm8k
from paper import share
from paper.runs import Finished, Job
from paper.share import ARMS, PLACES, SHARES, Key, measured_of
from pipeline.card import pace
from pipeline.models.language_model import collate, token_logprobs
from pipeline.records import Example, Sample, read_rows
from pipeline.report import STUDENT, Estimate
from pipeline.settings import TINY, Settings

TASK = gsm8k.gsm8k_task(SMALL)


# ---- bases with knobs ----


def test_plans_and_endings_are_wrong_as_often_as_the_knobs_say():
    rng, noise, count = random.Random(0), problems.Noise(plan=(0.2, 0.9), ending=0.4, endings=4), 20_000
    taken, found, same = defaultdict(Counter), Counter(), []
    for _ in range(count):
        problem = problems.draw_problem(rng)
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


# ---- what is read off a run ----


def test_trained_and_tested_problems_differ_and_none_is_of_the_test_set():
    task = share.held_out_task(share.STUDIED["laptop"][0])
    trained, tested = ({problem.question for problem in part} for part in (task.train, task.test))
    assert (len(trained), len(tested)) == (160, 100)
    assert not trained & tested
    assert not (trained | tested) & {problem.question for problem in gsm8k.load_problems(Settings().data, "test")}


def test_places_differ_and_have_arms_that_there_are():
    assert len({(place.base, place.is_masked, *place.changes.items()) for place in PLACES.values()}) == len(PLACES)
    assert all(set(place.arms) <= set(ARMS) for place in PLACES.values())


def test_what_is_kept_is_what_the_files_say(run):
    folder = run()
    results = json.loads((folder / "results.json").read_text())
    line = share.measured(Finished(replace(SMALL, out=folder), results), TASK)
    drawn, after = read_rows(folder / "iteration-1" / "samples.jsonl", Sample), line["after"]
    assert after["correct"] + after["plan"] + after["sum"] + after["none"] == pytest.approx(1, abs=2e-4)
    assert line["positive"] == pytest.approx(sum(s.reward > 0 for s in drawn) / len(drawn), abs=1e-4)
    steps = [json.loads(text) for text in (folder / "iteration-1" / "metrics.jsonl").read_text().splitlines()]
    of_positives = sum(step["pull"] * step["realised_share"] for step in steps)
    assert line["realised"] == pytest.approx(of_positives / sum(step["pull"] for step in steps), abs=1e-4)


def test_a_step_without_any_weight_counts_for_nothing(run):
    """One of negatives alone, under a method that gives them weight 0."""
    finished = Finished(replace(SMALL, out=(folder := run())), json.loads((folder / "results.json").read_text()))
    before = share.measured(finished, TASK)["realised"]
    finished.steps.append({"pull": 0.0})
    assert share.measured(finished, TASK)["realised"] == before


def test_an_interval_over_seeds_is_student_s():
    """The quantile leaves 2.5% above it: the density integrated numerically."""
    for n, quantile in STUDENT.items():
        x = np.linspace(-quantile, quantile, 20_001)
        scale = math.gamma(n / 2) / math.gamma((n - 1) / 2) / math.sqrt(math.pi * (n - 1))
        assert np.trapezoid(scale * (1 + x**2 / (n - 1)) ** (-n / 2), x) == pytest.approx(0.95, abs=1e-4)
    assert Estimate.over_seeds([0, 1] * 8)[:2] == pytest.approx((0.5, STUDENT[10] * (0.25 / 15) ** 0.5))  # more than 10
    assert Estimate.over_seeds([1.0]) == Estimate(1.0, None, (1.0,))


# ---- the law ----


E_POS, E_NEG, P = 1.0, 4.0, 0.4  # p~* = 80%


def study(accuracy, places=("worded",), ratio=E_NEG):
    """A table of one card and three seeds an arm at each place; accuracy: of a share."""
    lines = {}
    for place in places:
        card = {"e_pos": E_POS, "e_neg": ratio, "ratio": ratio, "best_share": ratio / (1 + ratio), "correct": P}
        for seed in range(3):
            lines[Key(place, "card", seed)] = card | {"steps": 0}
            for arm, p_tilde in SHARES.items():
                after = {"correct": accuracy(p_tilde) + 0.001 * seed}
                lines[Key(place, arm, seed)] = {"after": after, "realised": p_tilde, "steps": 1}
    return measured_of(lines)


def test_the_law_hits_where_accuracy_follows_the_pace():
    judged = share.judge(study(lambda p_tilde: 0.2 * pace(P, p_tilde, E_POS, E_NEG)), "worded")
    assert (judged.arm, judged.best, judged.hits("the law"), judged.hits("always 20%")) == ("topr-80",) * 2 + (
        True,
        False,
    )
    assert judged.rank == pytest.approx(1.0)
    assert judged.predicted[0] == pytest.approx(0.8)


@pytest.mark.parametrize(("behind", "hits"), [(-0.03, False), (-0.01, False), (0.0, True)])
def test_a_prediction_must_be_close_and_not_told_from_the_best(behind, hits):
    """All seeds agree here, so that any difference is told from zero."""
    judged = share.judge(study(lambda p_tilde: 0.5 + behind * (p_tilde == 0.8)), "worded")
    assert judged.hits("the law") == hits
    noisy = judged._replace(behind={"the law": Estimate(behind, 0.02)})
    assert noisy.hits("the law") == (behind > -0.02)


def test_the_score_leaves_out_the_bases_on_which_the_law_was_found():
    table = study(lambda p_tilde: 0.9 * p_tilde, ("mistaken", "slips", "worded", "long"))
    tables = share.tables(table, {name: name for name in ("mistaken", "slips", "worded", "long")}, {})
    assert tables["law"].rows[-1] == ["hits on the 2 others", *[""] * 5, "0", "0", "0", ""]
    assert [row[4] for row in tables["law"].rows[:-1]] == ["100%"] * 4
    assert tables["accuracy"].rows[0][1:] == [
        Estimate.over_seeds(0.9 * p + 0.001 * np.arange(3)).text(100) for p in SHARES.values()
    ]
    assert len(share.panels(table, ["worded"])) == 4


def test_the_spread_is_that_about_one_curve_over_the_log_odds():
    """None where all places lie on one parabola; where two are a constant apart, half of that."""
    places, rows = ("worded", "long"), {}
    for place, slope in zip(places, (1.0, 1.0 + 1e-9), strict=True):
        rows |= {Key(place, arm, 0): {"after": {"correct": slope * p}, "steps": 1} for arm, p in SHARES.items()}
    table, odds = share.measured_of(rows), {arm: 1 / (1 + math.exp(-p)) for arm, p in SHARES.items()}
    assert share.spread(table, places, lambda _, arm: odds[arm]) == pytest.approx(0, abs=1e-4)  # below is linear in x
    moved = {"worded": 0.0, "long": 1.0}
    apart = share.spread(table, places, lambda place, arm: 1 / (1 + math.exp(-SHARES[arm] - moved[place])))
    assert apart > 1


def test_a_masked_negative_learns_from_its_first_wrong_sum_on(monkeypatch, lm):
    """Its gradient is the completion's less that of its right part. Its value, and a positive, are as they were."""
    learnt = []
    monkeypatch.setattr(share, "experiment", lambda _, __, learn: learnt.append(learn[1]))
    share.train_masked(Job("", replace(SMALL, model=str(TINY / "base")), lambda _: TASK))
    texts = f"Q: {TASK.train[2].question}\nA:", " 84 - 46 = 38", " 84 - 46 = 38 pears. 38 + 1 = 39."
    prompt, part, whole = lm.tokenizer(texts)["input_ids"]

    def of(ids, reward, logprobs):
        logp = logprobs(lm.model, collate([[Example(prompt, ids, 0.0, reward)] * 2]))[0]
        return torch.cat([logp[None].detach(), *map(torch.ravel, torch.autograd.grad(logp, lm.model.parameters()))])

    usual, found = of(whole, 1.0, lambda *of: token_logprobs(*of).sum(1)), of(whole, -1.0, learnt[0])
    assert found[0] == usual[0]
    expected = usual - of(part, 1.0, learnt[0])
    assert torch.allclose(found[1:], expected[1:], atol=1e-4)
    assert torch.equal(of(whole, 1.0, learnt[0]), usual)


# ---- the command ----


@pytest.mark.slow
def test_the_study_from_end_to_end_and_from_its_lines(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"

    def made(*options):
        folders = ["--runs", str(tmp_path / "runs"), "--out", str(out)]
        monkeypatch.setattr(sys, "argv", ["reproduce.py", "share", "--quick", "--workers", "1", *folders, *options])
        reproduce.main()
        return {file.name: file.read_bytes() for file in out.iterdir()}, capsys.readouterr().out

    before, told = made()
    assert "9 of 9 runs to make" in told
    assert set(before) == {"share.json", "share.png", "share_runs.jsonl"}
    lines = [json.loads(line) for line in before["share_runs.jsonl"].splitlines()]
    assert [(line["place"], line["arm"]) for line in lines] == [*product(["slips"], sorted(ARMS)), ("taught", "sft")]
    assert [line["seconds of base"] > 0 for line in lines] == [False] * 8 + [True]  # tiny/base is there
    assert all(line["seconds"] > 0 for line in lines)

    shutil.rmtree(tmp_path / "runs")  # the lines suffice
    monkeypatch.setattr(gsm8k, "experiment", lambda *_: pytest.fail("made again"))
    assert made()[0] == before

    changed = PLACES["slips"]._replace(changes={"lr": 1e-3})  # another definition
    monkeypatch.setitem(share.STUDIED["quick"][1], "slips", changed)
    after, told = made("--redraw")
    assert "8 of 9 runs to make" in told
    places = [[row[0] for row in json.loads(of["share.json"])["tables"]["accuracy"]["rows"]] for of in (before, after)]
    assert places == [["slips"], []]  # without the place whose runs are of another definition
