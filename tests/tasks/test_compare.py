"""The comparison of methods on the same answers."""

from dataclasses import replace
from itertools import product

import pandas as pd
import pytest
from helpers import read_rows

from examples import compare
from toprlib.settings import Settings

RATES = (2e-5, 1e-4)


def test_no_problem_is_both_for_training_and_for_tests():
    task = compare.books_task(Settings(problems=10_000, test_problems=10_000))
    train, test = ({problem.question for problem in part} for part in (task.train, task.test))
    assert not train & test


def test_table_and_picture_have_means_over_seeds():
    rows = [[0, "none", 0, 10, 2, 12], [1, "none", 0, 12, 0, 12]]
    for seed, (place, method) in product((0, 1), enumerate(compare.METHOD_SETTINGS)):
        rows += [[seed, method, lr, place + seed, 10 * place, 90 * seed] for lr in RATES]
    rows = pd.DataFrame(rows, columns=["seed", "method", "lr", *compare.METRICS])
    table = compare.to_table(rows)
    assert list(table.index) == ["none", *compare.METHOD_SETTINGS]
    assert list(table.columns) == ["0", "2e-05", "0.0001"]
    assert table.loc["none", "0"] == "11.0 / 1.0 / 12.0"
    assert table.loc["TOPR", "2e-05"] == "4.5 / 40.0 / 45.0"
    assert table.loc["TOPR", "0"] == table.loc["none", "2e-05"] == ""
    [axes] = compare.draw(rows).axes
    lines = {line.get_label(): line for line in axes.lines}
    assert list(lines["TOPR"].get_xdata()) == list(RATES)
    assert list(lines["TOPR"].get_ydata()) == [4.5, 4.5]
    assert list(lines["naive REINFORCE"].get_ydata()) == [0.5, 0.5]
    assert list(lines["before training"].get_ydata()) == [11, 11]


@pytest.mark.slow
def test_all_methods_train_on_the_same_answers_in_as_many_steps(tmp_path):
    few = {"problems": 12, "n": 6, "test_problems": 6, "eval_samples": 4, "k": 4}
    options = compare.Options(rates=RATES, seeds=(1, 2), out=tmp_path)
    rows = compare.compare(options, replace(compare.SETTINGS, **few)).set_index("method")
    assert len(rows) == 2 * (1 + 2 * len(compare.METHOD_SETTINGS))
    for seed in options.seeds:
        texts = set()
        trained = {}
        for method in compare.METHOD_SETTINGS:
            for lr in RATES:
                name = f"{method} lr={lr:g} seed={seed}".replace(" ", "_")
                folder = tmp_path / name / "iteration-1"
                assert len(read_rows(folder / "metrics.jsonl")) == 5  # 72 samples in steps of 16
                tests = [row["reward"] for row in read_rows(folder / "test-5.jsonl")]
                found = rows.loc[method].query("seed == @seed and lr == @lr")
                assert found["T = 1"].item() == pytest.approx(100 * tests.count(1) / 24)
                tests = [row["reward"] for row in read_rows(folder / "test-5-greedy.jsonl")]
                assert found["T = 0"].item() == pytest.approx(100 * tests.count(1) / 6)
                texts.add((folder / "samples.jsonl").read_text(encoding="utf-8"))
                examples = read_rows(folder / "train.jsonl")
                trained[method, lr] = [row["sample"] for row in examples]
        assert len(texts) == 1  # all runs have the same samples
        samples = read_rows(folder / "samples.jsonl")
        rights = {place for place, sample in enumerate(samples) if sample["reward"] > 0}
        for (method, _), numbers in trained.items():
            assert len(numbers) == 72
            assert set(numbers) == (rights if method == "SFT, repeated" else set(range(72)))
