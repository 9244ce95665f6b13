"""What figures compute from tables and files, against values found by hand."""

import json
import math

import pandas as pd
import pytest

from figures import fig1, fig4, fig5, fig6, fig8, fig9, rates
from figures.common import by_seed, curves, interval
from figures.runs import Run, in_training
from toprlib.settings import Settings


def make_table(columns, runs, metric="correct"):
    """A table of measurements; runs: labels -> for each seed the values along the run."""
    rows = []
    for labels, seeds in runs.items():
        of_run = dict(zip(columns.split(), labels, strict=True)) | {"metric": metric}
        for seed, values in enumerate(seeds):
            points = enumerate(values)
            rows += [{**of_run, "seed": seed, "point": at, "value": value} for at, value in points]
    return pd.DataFrame(rows)


def check(actual, expected):
    """The values in the seeds of some of the numbers."""
    for name, values in expected.items():
        assert list(actual[name]) == pytest.approx(values), name


# ---- intervals and tables ------------------------------------------------------------------------
def test_an_interval_is_student_s():
    assert interval([3.0]) == {"mean": 3.0, "half_width": None, "each": [3.0]}
    assert interval([math.nan])["mean"] is None
    # The standard error of 1, 2 and 6 is sqrt(7 / 3).
    of_three = interval([1.0, 2.0, math.nan, 6.0])
    assert of_three["mean"] == 3
    assert of_three["half_width"] == pytest.approx(4.303 * math.sqrt(7 / 3))
    many = interval(range(20))  # the quantile of 13
    assert many["half_width"] == pytest.approx(2.179 * math.sqrt(35 / 20))


def test_a_metric_is_read_by_seed_at_a_point_of_runs_of_different_lengths():
    runs = {("b", "z"): [[1.0, 2.0], [1.0, 6.0]], ("a", "y"): [[3.0, 4.0, 5.0]]}
    table = make_table("rate arm", runs).iloc[::-1]
    table = table.sort_values("point", kind="stable")
    ends = by_seed(table, "correct")
    assert interval(ends["z"] - ends["y"])["each"] == [2.0 - 5.0]  # seed 1 has no y
    assert sorted(interval(ends["z"])["each"]) == [2.0, 6.0]
    assert by_seed(table, "correct", at=1).loc[0].to_dict() == {"z": 2.0, "y": 4.0}
    assert set(by_seed(table, "correct", ["rate", "arm"])) == {("b", "z"), ("a", "y")}
    assert curves(table, "correct")["z"]["mean"] == [1.0, 4.0]
    assert curves(table, "correct")["z"]["half_width"] == [0.0, pytest.approx(12.706 * 2)]


# ---- single figures ------------------------------------------------------------------------------
def test_figure_1_measures_falls_from_the_highest_point():
    runs = {
        ("one rate", "topr"): [[0.5, 0.75, 0.7]],
        ("one rate", "dpo"): [[0.5, 0.6, 0.6]],
        ("one rate", "reinforce"): [[0.5, 0.9, 0.0]],
        ("own rate", "topr"): [[0.5, 0.75, 0.7]],
        ("own rate", "dpo"): [[0.5, 0.6, 0.65]],
    }
    actual = fig1.gains(make_table("rate arm", runs))
    expected = {
        "TOPR - DPO, own rates": [0.05],
        "TOPR - DPO, one rate": [0.1],
        "TOPR - naive REINFORCE, one rate": [0.7],
        "DPO - naive REINFORCE, one rate": [0.6],
        "DPO - TOPR, one rate: fall from the highest": [0 - 0.05],
        "naive REINFORCE - TOPR, one rate: fall from the highest": [0.9 - 0.05],
    }
    assert actual.keys() == expected.keys()
    check(actual, expected)


def write_samples(folder, step, counts):
    """Samples of problems with so many right answers of six; right texts are of two kinds."""
    lines = []
    for problem, right in enumerate(counts):
        for index in range(6):
            text = f" The answer is {7 if index < right else index}." + " " * (index % 2)
            sample = {"problem_id": str(problem), "prompt": f"Q{problem}", "completion": text}
            sample["reward"] = 1.0 if index < right else -1.0
            sample["outcome"] = "correct" if index < right else "incorrect"
            lines.append(json.dumps(sample) + "\n")
    (folder / "iteration-1" / f"test-{step}.jsonl").write_text("".join(lines))


def write_run(folder, curve, metrics=(), **settings):
    """A finished run whose accuracy is `curve`, and its Run."""
    entries = [{"correct": value, "pass@1": {"mean": value, "se": 0.01}} for value in curve]
    iteration = {"dataset": {"steps": len(metrics)}, "training": {"realised_share": 0.25}}
    iteration |= {"curve": entries, "after": entries[-1]}
    (folder / "iteration-1").mkdir(parents=True, exist_ok=True)
    results = {"before": entries[0], "iterations": [iteration]}
    (folder / "results.json").write_text(json.dumps(results))
    lines = [json.dumps(line) + "\n" for line in metrics]
    (folder / "iteration-1" / "metrics.jsonl").write_text("".join(lines))
    columns = {"arm": "topr", "lr": settings.get("lr"), "seed": settings.get("seed", 0)}
    return Run(columns, Settings(out=folder, **settings), rates.gsm8k_task, None)


def test_figure_4_measures_answers_before_and_after_training(tmp_path):
    run = write_run(tmp_path, [0.5, 0.5], [{"grad_norm": 1.0}], eval_samples=6, k=2)
    write_samples(tmp_path, 0, [2, 3, 1, 6])
    write_samples(tmp_path, 1, [3, 5, 6, 2])
    actual = fig4.measure_answers(run)
    assert list(actual["cardinality"]) == [0, 0.5, 0.5]
    assert actual[fig4.FEW] == [2 / 4]  # 3 and 2 of 6 are right
    assert actual[fig4.STILL_FEW] == [1 / 3]  # of the first three problems
    assert actual["base maj@n"][0] == pytest.approx(12 / 24)
    assert actual["maj@n"][0] == pytest.approx(16 / 24)
    assert actual["ahead"] == [pytest.approx(16 / 24 - actual["base maj@n"][-1])]
    assert actual["vote"] == [pytest.approx(actual["base maj@n"][-1] - 12 / 24)]
    assert actual["distinct"] == [7 / 12]


def test_figure_4_compares_arms_at_the_end():
    metrics = {
        fig4.FEW: {"topr": [0.02, 0.01], "positives_only": [0.05, 0.03], "sft": [0.04, 0.04]},
        fig4.STILL_FEW: {"topr": [0.5, 0.0], "positives_only": [0.25, 0.5], "sft": [1.0, 1.0]},
        "correct": {"topr": [0.75, 0.5], "positives_only": [0.5, 0.5], "sft": [0.875, 0.25]},
        "maj@n": {"topr": [0.5, 0.5], "positives_only": [0.75, 1.0], "sft": [0.5, 0.625]},
        "ahead": {"topr": [0.25, 0.5]},
    }
    rows = []
    for metric, of_arms in metrics.items():
        table = pd.DataFrame(of_arms).rename_axis("seed").melt(ignore_index=False, var_name="arm")
        rows.append(table.reset_index().assign(metric=metric))
    actual = fig4.compare(pd.concat(rows), "maj@16", ", x")
    expected = {
        "positives only - TOPR: problems with at most 4 correct, x": [0.03, 0.02],
        "positives only - TOPR: few correct before, and still, x": [-0.25, 0.5],
        "TOPR - positives only, x": [0.25, 0.0],
        "TOPR - positives only: maj@16, x": [-0.25, -0.5],
        "TOPR - positives, as many steps, x": [-0.125, 0.25],
        "positives, as many steps: maj@16, x": [0.5, 0.625],
        "TOPR: pass@1 - maj@16 of the base, x": [0.25, 0.5],
    }
    check(actual, expected)


def test_figure_4_finds_the_smallest_vote_that_suffices():
    # The largest vote of positives only is right on 60 % in seed 0, and on 95 % in seed 1.
    votes = {
        ("topr",): [[0.5, 0.55, 0.6], [0.5, 0.7, 0.8]],
        ("positives_only",): [[0.2, 0.4, 0.6], [0.9, 0.9, 0.95]],
    }
    needed = fig4.samples_needed(make_table("arm", votes, "maj@n"), [1, 2, 4])
    assert list(needed) == [4, 8]  # 8: twice the largest, none suffices


def test_figure_5_compares_shares_within_sets_and_between_them():
    shares = (0.1, 0.2, 0.5, 1.0)
    ten = ([[0.50], [0.60]], [[0.70], [0.60]], [[0.40], [0.50]], [[0.30], [0.40]])
    fifty = ([[0.45], [0.45]], [[0.50], [0.50]], [[0.60], [0.60]], [[0.65], [0.75]])
    runs = {("10% positive", p): values for p, values in zip(shares, ten, strict=True)}
    runs |= {("50% positive", p): values for p, values in zip(shares, fifty, strict=True)}
    table = make_table("set p_tilde", runs)
    actual = fig5.compare(by_seed(table, "correct", ["set", "p_tilde"]))
    expected = {
        "10% positive, p~ = 20%": [0.70, 0.60],
        "10% positive: p~ = 20% - p~ = 100%": [0.4, 0.2],
        # On seed 1 p~ = 10 and 20 % are equally good, and the first one is taken for seed 0; on
        # seed 0 20 % is best.
        "10% positive: best p~ on other seeds - p~ = 50%": [0.50 - 0.40, 0.60 - 0.50],
        "p~ = 10% by sampling - by a baseline": [0.05, 0.15],
        "p~ = 50% by sampling - by a baseline": [0.20, 0.10],
    }
    check(actual, expected)
    assert "10% positive: p~ = 20% - p~ = 1%" not in actual  # no such runs


def test_figure_6_compares_methods_at_each_share():
    runs = {
        ("topr", 0.1): [[0.1], [0.2], [0.9]],
        ("topr", 1.0): [[0.3], [0.1]],
        ("tis", 0.1): [[0.5], [0.2], [0.0]],
        ("tis", 1.0): [[0.4], [0.6]],
    }
    correct = by_seed(make_table("arm p_tilde", runs), "correct", ["arm", "p_tilde"])
    check(fig6.gains(correct, "!"), {"TOPR - TIS, p~ = 10%!": [-0.4, 0, 0.9]})
    assert list(fig6.highest_of_all(correct)) == pytest.approx([0.5 - 0.3, 0.6 - 0.2])


def test_steps_are_measured_in_tenths_and_before_clipping(tmp_path):
    steps = [{"grad_norm": float(step), "log_ratio_pos_q50": -1.0} for step in range(20)]
    del steps[3]["log_ratio_pos_q50"]
    steps[2]["log_ratio_pos_q50"] = 5.0
    run = write_run(tmp_path, [0.5], steps, max_grad_norm=15.0)
    measured = in_training(run)
    assert measured["gradient norm"] == [2 * tenth + 0.5 for tenth in range(10)]
    assert measured["log-ratio of positives"] == [-1.0, 5.0, *[-1.0] * 8]
    assert measured["largest gradient norm"] == [19.0]
    assert measured["steps clipped"] == [4 / 20]  # norms 16 to 19
    assert measured["realised share"] == [0.25]


def test_figure_8_takes_the_mean_over_the_first_three_of_more_iterations():
    runs = {(arm,): [[0.5] * 5] for arm in fig8.ARMS}
    runs["anna_karenina",] = [[0.5, 0.6, 0.7, 0.8, 1.0]]
    actual = fig8.compare(make_table("arm", runs, "pass@1"), "pass@1", "")
    name = "Anna Karenina - uniform: pass@1"
    expected = {
        f"{name} after iteration 2": [0.2],
        f"{name}, mean of iterations 1 to 3": [(0.1 + 0.2 + 0.3) / 3],
        f"{name}, last iteration": [0.5],
        f"{name}, last iteration - first": [0.4],
        "Anna Karenina: pass@1 after iteration 4": [1.0],
    }
    check(actual, expected)
    assert f"{name} after iteration 0" not in actual


def test_figure_9_weighs_questions_by_the_distance_of_rewards_from_the_baseline():
    # 12 of 40 samples are right. p~ = p = 0.3 takes no baseline, and all questions weigh 10. With
    # baseline c the effective share is 12 (1 - c) / (12 (1 - c) + 28 (1 + c)); c = 0.4 makes it
    # 7.2 / (7.2 + 39.2).
    index = pd.MultiIndex.from_product([[0], range(4)], names=["seed", "question"])
    rows = [(0, 10), (1, 10), (1, 10), (10, 10)]
    counts = pd.DataFrame(rows, index, ["right", "samples"])
    plain = fig9.relative_weights(counts, p_tilde=0.3).loc[0].dropna()
    assert plain.to_dict() == pytest.approx({0: 1 / 3, 1: 1 / 3, 9: 1 / 3})
    weighted = fig9.relative_weights(counts, p_tilde=7.2 / 46.4).loc[0].dropna()
    weights = {0: 10 * 1.4, 1: 1 * 0.6 + 9 * 1.4, 9: 10 * 0.6}
    expected = {bucket: weight / sum(weights.values()) for bucket, weight in weights.items()}
    assert weighted.to_dict() == pytest.approx(expected)


def test_figure_9_counts_right_answers_in_files(tmp_path):
    run = write_run(tmp_path, [0.5, 0.5], [{"grad_norm": 1.0}])
    write_samples(tmp_path, 0, [0, 1, 1, 6])
    shares = fig9.read([run], {})["shares"]
    # With p~ = 1 only right samples weigh: 1 for a hard question, 6 for the easy one.
    check(shares, {"p~ = 100%: weight of the three hardest buckets": [1 / (1 + 6)]})


def test_rates_are_ranked_by_the_mean_over_seeds_of_accuracy_at_the_end(tmp_path):
    # The seeds choose 1e-5, 3e-5 and 1e-4. The means are 0.5, 0.625 and 0.625.
    correct = {1e-5: [0.75, 0.5, 0.25], 3e-5: [0.625, 0.75, 0.5], 1e-4: [0.6875, 0.5, 0.6875]}
    runs = []
    for lr, values in correct.items():
        for seed, value in enumerate(values):
            folder = tmp_path / f"{lr}-{seed}"
            runs.append(write_run(folder, [0.9, value], [{"grad_norm": 1.0}], lr=lr, seed=seed))
    ranked, tried = rates.rank_rates(runs)
    assert tried == {"TOPR": {"1e-05": 0.5, "3e-05": 0.625, "0.0001": 0.625}}
    assert ranked == {"topr": [3e-5, 1e-4, 1e-5]}  # the smaller one of equally good rates first
