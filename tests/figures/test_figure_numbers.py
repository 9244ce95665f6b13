"""What figures compute from a table of measurements, against values found by hand."""

import math
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from figures import fig1, fig4, fig5, fig6, fig7, fig8, fig9, robustness, table2, variants
from figures.common import Findings, by_seed, change, curve, curves, numbers_table, over_seeds
from toprlib.evaluation import Answers
from toprlib.records import Sample
from toprlib.report import Estimate
from toprlib.settings import Settings


def make_table(columns, rows, metric="correct"):
    """A table of measurements; rows: arm -> for each seed the values along the run."""
    lines = []
    for arm, seeds in rows.items():
        labels = dict(zip(columns, arm, strict=True))
        for seed, values in enumerate(seeds):
            for point, value in enumerate(values):
                line = {"seed": seed, "metric": metric, "point": point, "value": value}
                lines.append({**labels, **line})
    return pd.DataFrame(lines)


def means(estimates):
    """Name -> mean, for comparison with pytest.approx."""
    return {name: estimate.mean for name, estimate in estimates.items()}


# ---- the table ----


def test_differences_are_over_the_seeds_that_both_arms_have():
    rows = [("a", 1, 5.0), ("a", 0, 1.0), ("b", 1, 2.0), ("b", 2, 9.0), ("b", 0, 0.5)]
    table = pd.DataFrame(rows, columns=["arm", "seed", "value"]).assign(metric="correct", point=0)
    values = by_seed(table, "correct", "arm")
    assert over_seeds(values["a"] - values["b"]).mean == (5.0 - 2.0 + 1.0 - 0.5) / 2
    assert over_seeds(values["b"]).mean == (2.0 + 9.0 + 0.5) / 3


def test_a_metric_is_read_at_a_point_of_runs_of_different_lengths():
    table = make_table(["arm"], {("short",): [[1.0, 2.0]], ("long",): [[3.0, 4.0, 5.0]]})
    assert by_seed(table, "correct", "arm").loc[0].to_dict() == {"short": 2.0, "long": 5.0}
    assert by_seed(table, "correct", "arm", at=1).loc[0].to_dict() == {"short": 2.0, "long": 4.0}
    assert change(table, "correct", "arm").loc[0].to_dict() == {"short": 1.0, "long": 2.0}


def test_arms_stay_in_the_order_of_their_runs():
    table = make_table(
        ["rate", "arm"], {("b", "z"): [[0.0]], ("b", "a"): [[0.0]], ("a", "z"): [[0.0]]}
    )
    assert list(by_seed(table, "correct", ["rate", "arm"])) == [("b", "z"), ("b", "a"), ("a", "z")]


def test_a_line_has_the_interval_of_student_s_t_at_each_point():
    table = make_table(["arm"], {("topr",): [[0.0, 1.0], [0.0, 3.0]]})
    # Two values: half of the interval is 12.706 standard errors, and the standard error of 1 and 3
    # is 1.
    expected = {"mean": [0.0, 2.0], "half_width": [0.0, 12.706], "each": [[0.0, 0.0], [1.0, 3.0]]}
    assert curves(table, "arm") == {"topr": expected}


def test_a_point_without_values_is_none():
    empty = curve(pd.DataFrame({"a": [math.nan, math.nan], "b": [1.0, math.nan]}))
    assert empty == {"mean": [None, 1.0], "half_width": [None, None], "each": [[], [1.0]]}


def test_numbers_are_shown_in_their_units_and_seeds_where_an_interval_is_impossible():
    shares = {"correct": Estimate(0.5, 0.1), "a - b": Estimate.over_seeds([0.0, 0.25])}
    numbers = {"largest gradient norm": Estimate.over_seeds([2.0, 90.0, 5.0])}
    table = numbers_table(Findings({}, shares, numbers))
    assert table.rows == [
        ["correct", "50.0 ± 10.0 %"],
        ["a - b", "0.0, 25.0 points"],  # ± 159 points reaches beyond 100
        ["largest gradient norm", "5.0 (2.0 to 90.0)"],
    ]


# ---- single figures ----


def test_figure_1_measures_falls_from_the_highest_point():
    columns = ["rate", "method"]
    runs = {
        ("one rate", "topr"): [[0.5, 0.75, 0.7]],
        ("one rate", "dpo"): [[0.5, 0.6, 0.6]],
        ("one rate", "ppo"): [[0.5, 0.7, 0.3]],
        ("one rate", "reinforce"): [[0.5, 0.9, 0.0]],
        ("own rate", "topr"): [[0.5, 0.75, 0.7]],
        ("own rate", "ppo"): [[0.5, 0.6, 0.65]],
    }
    actual = means(fig1.gains(make_table(columns, runs)))
    assert actual == pytest.approx(
        {
            "TOPR - PPO, own rates": 0.05,
            "TOPR - DPO, one rate": 0.1,
            "DPO - TOPR, one rate: fall from the highest": 0 - 0.05,
            "TOPR - PPO, one rate": 0.4,
            "DPO - PPO, one rate": 0.3,
            "PPO - TOPR, one rate: fall from the highest": 0.4 - 0.05,
            "TOPR - naive REINFORCE, one rate": 0.7,
            "DPO - naive REINFORCE, one rate": 0.6,
            "naive REINFORCE - TOPR, one rate: fall from the highest": 0.9 - 0.05,
        }
    )


def test_figure_4_counts_problems_in_fours_of_correct_completions():
    correct = np.zeros((6, 8), dtype=bool)
    for problem, count in enumerate([0, 1, 4, 5, 8, 8]):
        correct[problem, :count] = True
    assert fig4.by_cardinality(correct) == pytest.approx([1 / 6, 2 / 6, 3 / 6])


def test_figure_4_measures_answers_before_and_after_training():
    def answers(counts):
        """Four problems with so many correct completions of six."""
        correct = np.arange(6) < np.array(counts)[:, None]
        return Answers(correct, correct.tolist())

    before = answers([2, 3, 1, 6])
    after = answers([3, 5, 6, 2])
    votes = {1: 0.25, 2: 0.375, 4: 0.5}  # before training
    texts = [("Q0", "a", 1.0), ("Q0", "a", 1.0), ("Q1", "a", 1.0), ("Q1", "b", -1.0)]
    samples = [Sample(prompt=q, completion=text, reward=reward) for q, text, reward in texts]
    run = SimpleNamespace(
        settings=Settings(eval_samples=6),
        last_step=20,
        answers={0: before, 20: after}.get,
        majority_accuracy=lambda of, n: votes[n] if of is before else votes[n] + 0.125,
        test_samples={0: samples}.get,
    )
    actual = fig4.measure_answers(run)
    expected = {
        "maj@n": [0.375, 0.5, 0.625],
        "base maj@n": [0.25, 0.375, 0.5],
        "cardinality": [0, 0.5, 0.5],
        "few": [2 / 4],  # 3 and 2 of 6 are right
        "still few": [1 / 3],  # of the first three problems
        "ahead": [16 / 24 - 0.5],
        "vote": [0.25],
        "distinct": [2 / 3],  # right texts
    }
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        assert actual[name] == pytest.approx(values), name


def test_figure_4_compares_the_shares_of_problems_with_few_right_answers():
    metrics = {
        "few": {"topr": [0.02, 0.01], "positives_only": [0.05, 0.03], "sft": [0.04, 0.04]},
        "still few": {"topr": [0.5, 0.0], "positives_only": [0.25, 0.5], "sft": [1.0, 1.0]},
        "correct": {"topr": [0.75, 0.5], "positives_only": [0.5, 0.5], "sft": [0.875, 0.25]},
        "maj@n": {"topr": [0.5, 0.5], "positives_only": [0.75, 1.0], "sft": [0.5, 0.625]},
        "ahead": {"topr": [0.0, 0.0], "positives_only": [0.0, 0.0], "sft": [0.0, 0.0]},
    }
    tables = []
    for metric, of_arms in metrics.items():
        rows = {(name,): [[value] for value in values] for name, values in of_arms.items()}
        tables.append(make_table(["arm"], rows, metric))
    actual = fig4.compare(pd.concat(tables), "maj@16")
    expected = {
        "TOPR: problems with at most 4 correct": (0.02, 0.01),
        "positives only - TOPR: problems with at most 4 correct": (0.03, 0.02),
        "positives only - TOPR: few correct before, and still": (-0.25, 0.5),
        "TOPR - positives only": (0.25, 0.0),
        "TOPR - positives only: maj@16": (-0.25, -0.5),
        "TOPR - positives, as many steps": (-0.125, 0.25),
        "TOPR - positives, as many steps: maj@16": (0.0, -0.125),
    }
    for name, each in expected.items():
        assert actual[name].each == pytest.approx(each), name


def test_figure_4_finds_the_smallest_vote_that_suffices():
    # The largest vote of positives only is right on 60 % in seed 0, and on 95 % in seed 1.
    votes = {
        ("topr",): [[0.5, 0.55, 0.6], [0.5, 0.7, 0.8]],
        ("positives_only",): [[0.2, 0.4, 0.6], [0.9, 0.9, 0.95]],
    }
    needed = fig4.samples_needed(make_table(["arm"], votes, "maj@n"), [1, 2, 4])
    assert needed.each == (4, 8)  # 8: twice the largest, none suffices


def test_figure_5_compares_shares_within_sets_and_between_them():
    columns = ["set", "p_tilde"]
    runs = {
        ("10% positive", 0.1): [[0.50], [0.60]],
        ("10% positive", 0.2): [[0.70], [0.60]],
        ("10% positive", 0.5): [[0.40], [0.50]],
        ("10% positive", 1.0): [[0.30], [0.40]],
        ("50% positive", 0.1): [[0.45], [0.45]],
        ("50% positive", 0.2): [[0.50], [0.50]],
        ("50% positive", 0.5): [[0.60], [0.60]],
        ("50% positive", 1.0): [[0.65], [0.75]],
    }
    correct = by_seed(make_table(columns, runs), "correct", columns)
    actual = fig5.compare(correct)
    assert actual["10% positive, p~ = 20%"].each == (0.70, 0.60)
    assert actual["10% positive: p~ = 20% - p~ = 100%"].each == pytest.approx((0.4, 0.2))
    # On seed 1 p~ = 10 and 20 % are equally good, and the first one is taken for seed 0; on seed 0
    # 20 % is best.
    best = actual["10% positive: best p~ on other seeds - p~ = 50%"]
    assert best.each == pytest.approx((0.50 - 0.40, 0.60 - 0.50))
    assert actual["p~ = 10% by sampling - by a baseline"].each == pytest.approx((0.05, 0.15))
    assert actual["p~ = 50% by sampling - by a baseline"].each == pytest.approx((0.20, 0.10))
    assert "10% positive: p~ = 20% - p~ = 1%" not in actual  # no such runs


def test_figure_6_compares_the_highest_of_all_shares_in_seeds_that_all_have():
    columns = ["method", "p_tilde"]
    runs = {
        ("topr", 0.1): [[0.1], [0.2], [0.9]],
        ("topr", 1.0): [[0.3], [0.1]],
        ("tis", 0.1): [[0.5], [0.2], [0.0]],
        ("tis", 1.0): [[0.4], [0.6]],
    }
    correct = by_seed(make_table(columns, runs), "correct", columns)
    assert fig6.highest_of_all(correct).each == pytest.approx((0.5 - 0.3, 0.6 - 0.2))
    assert fig6.gains(correct, "")["TOPR - TIS, p~ = 10%"].each == pytest.approx((-0.4, 0, 0.9))


def test_figure_7_measures_norms_before_clipping():
    norms = [0.5, 5.0, 30.0, 20.0, 10.0]
    run = SimpleNamespace(
        settings=Settings(max_grad_norm=10.0),
        steps=lambda: pd.DataFrame({"grad_norm": norms, "loss": [9.0] * 5}),
        tenths={"grad_norm": [1.0, 2.0]}.get,
    )
    expected = {
        "largest gradient norm": [30.0],
        "steps clipped": [0.4],  # above 10
        "gradient norm": [1.0, 2.0],
    }
    assert fig7.gradient_norms(run) == expected


def test_figure_7_compares_largest_norms_in_powers_of_ten():
    norms = {("topr",): [[1.0], [10.0]], ("off_policy",): [[1000.0], [10.0]]}
    table = make_table(["method"], norms, "largest gradient norm")
    numbers = fig7.norms_in_setting(table, "mild")
    ratio = numbers["mild: log10 of largest gradient norm, plain IS / TOPR"]
    assert ratio.each == pytest.approx((3, 0))


def test_figure_8_takes_the_mean_over_the_first_three_of_more_iterations():
    level = {name: [0.5] * 5 for name in fig8.ARMS}
    level["anna_karenina"] = [0.5, 0.6, 0.7, 0.8, 1.0]
    runs = {(name,): [values] for name, values in level.items()}
    rows = make_table(["arm"], runs, "pass@1")
    actual = means(fig8.differences(rows))
    name = "Anna Karenina - uniform: pass@1"
    assert actual[f"{name} after iteration 2"] == pytest.approx(0.2)
    assert actual[f"{name}, mean of iterations 1 to 3"] == pytest.approx((0.1 + 0.2 + 0.3) / 3)
    assert actual[f"{name}, last iteration"] == pytest.approx(0.5)
    assert actual[f"{name}, last iteration - first"] == pytest.approx(0.4)
    assert f"{name} after iteration 0" not in actual


def questions(counts):
    """`fig9.questions_of` for one seed; counts: (right, samples) of each question."""
    index = pd.MultiIndex.from_product([[0], range(len(counts))], names=["seed", "question"])
    return pd.DataFrame(counts, index, columns=["right", "samples"])


def test_figure_9_weighs_questions_by_the_distance_of_rewards_from_the_baseline():
    # 12 of 40 samples are right. p~ = p = 0.3 takes no baseline, and all questions weigh 10. With
    # baseline c the effective share is 12 (1 - c) / (12 (1 - c) + 28 (1 + c)); c = 0.4 makes it
    # 7.2 / (7.2 + 39.2).
    counts = questions([(0, 10), (1, 10), (1, 10), (10, 10)])
    plain = fig9.relative_weights(counts, p_tilde=0.3).loc[0].dropna()
    assert plain.to_dict() == pytest.approx({0: 1 / 3, 1: 1 / 3, 9: 1 / 3})
    weighted = fig9.relative_weights(counts, p_tilde=7.2 / 46.4).loc[0].dropna()
    weights = {0: 10 * 1.4, 1: 1 * 0.6 + 9 * 1.4, 9: 10 * 0.6}
    expected = {bucket: weight / sum(weights.values()) for bucket, weight in weights.items()}
    assert weighted.to_dict() == pytest.approx(expected)


def test_figure_9_takes_thirds_by_the_base_s_accuracy():
    index = pd.MultiIndex.from_product([[0, 1], range(6)], names=["seed", "question"])
    before = pd.Series([0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4], index)
    after = [1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0]
    thirds = fig9.accuracy_by_third(before, pd.DataFrame({0.2: after}, index))
    actual = {name: values[0.2].tolist() for name, values in thirds.items()}
    # Seed 0: questions 0 and 1, then 3 and 2, then 4 and 5, as equal ones stay in order.
    # Seed 1: questions 5 and 4, then 3 and 2, then 1 and 0.
    expected = {
        "hardest third": [1.0, 1.0],
        "middle third": [0.0, 0.5],
        "easiest third": [0.5, 0.0],
    }
    assert actual == expected


def test_robustness_compares_settings_and_methods():
    columns = ["method", "setting"]
    runs = {
        ("topr", "best"): [[0.80]],
        ("topr", "three"): [[0.75]],
        ("topr", "late"): [[0.70]],
        ("ppo", "best"): [[0.70]],
        ("ppo", "three"): [[0.40]],
        ("ppo", "late"): [[0.65]],
    }
    correct = by_seed(make_table(columns, runs), "correct", columns)
    assert means(robustness.compare(correct, "ppo")) == pytest.approx(
        {
            "PPO, best rate: correct at the end": 0.70,
            "TOPR - PPO, best rate": 0.10,
            "PPO, three times the rate: correct at the end": 0.40,
            "TOPR - PPO, three times the rate": 0.35,
            "PPO, 60% negative, late clipping: correct at the end": 0.65,
            "TOPR - PPO, 60% negative, late clipping": 0.05,
            "PPO: three times the rate - best rate": -0.30,
        }
    )


def test_dpo_recovers_an_answer_as_fast_as_its_gradient_by_hand():
    """The correct arm against each of four others, which stay alike; beta = 0.1."""
    correct = math.log(1e-6)
    other = math.log((1 - 1e-6) / 4)
    steps = 0
    while math.exp(correct - other) < 4:  # pi of the correct arm is below 1/2
        # The gradient of one pair's loss in its margin, of the mean over four pairs.
        gradient = 0.1 / (1 + math.exp(correct - other) ** 0.1) / 4
        correct += 4 * gradient
        other -= gradient
        steps += 1
    assert robustness.steps_to_recover("dpo") == steps


def test_table_2_subtracts_rows_of_the_same_runs():
    def cells(accuracy_before, accuracy_after):
        return {
            "base": {table2.ACCURACY: {"mean": accuracy_before}, table2.INVALID: {"mean": 0.5}},
            "topr": {table2.ACCURACY: {"mean": accuracy_after}, table2.INVALID: {"mean": 0.25}},
            "no verifier": {table2.WEIGHTED: {"mean": 0.5}},
            table2.CONSTANT: {table2.ACCURACY: {"mean": 0.6}},
        }

    results = [{"table2": cells(0.4, 0.9)}, {"table2": cells(0.5, 0.7)}]
    for run in results:
        run["table2"]["base"][table2.WEIGHTED] = {"mean": 0.4}
        run["table2"]["topr"][table2.WEIGHTED] = {"mean": 0.7}
    actual = table2.differences(table2.cells_of(results))
    assert actual[f"TOPR - base: {table2.ACCURACY}"].each == pytest.approx((0.5, 0.2))
    assert actual[f"TOPR - constant verdict: {table2.ACCURACY}"].each == pytest.approx((0.3, 0.1))
    assert actual[f"base - no verifier: {table2.WEIGHTED}"].each == pytest.approx((-0.1, -0.1))
    assert actual[f"base - TOPR: {table2.INVALID}"].each == pytest.approx((0.25, 0.25))


def test_variants_are_compared_with_topr_at_the_same_kind_of_rate():
    columns = ["method", "lr"]
    correct = make_table(columns, {("topr", 3e-5): [[0.8]], ("per-token", 1e-5): [[0.5]]})
    invalid = make_table(
        columns, {("topr", 3e-5): [[0.1]], ("per-token", 1e-5): [[0.2]]}, "invalid"
    )
    actual = means(variants.compare(pd.concat([correct, invalid])))
    assert actual["per-token, lr 1e-05 - topr"] == pytest.approx(-0.3)
    assert actual["per-token, lr 1e-05: invalid at the end"] == 0.2
