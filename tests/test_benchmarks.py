"""The benchmarks run, at a size that says nothing; what they measure is not for tests."""

import json

import gpu_step
import measuring
import numpy
import overhead
import page
import pytest
import sampling
import scaling

from pipeline.models.rows import Example


def test_the_gpu_step_runs_on_a_processor_too(tmp_path, capsys):
    settings = gpu_step.Settings(
        size="small", compute="float32", batches=(1, 3), steps=2, prompt=20, completion=(3, 9), out=tmp_path
    )
    gpu_step.main(settings)
    assert "of the peak" in capsys.readouterr().out
    record = json.loads((tmp_path / "gpu_step.json").read_text())
    assert [row["batch"] for row in record["measured"]] == [1, 3]
    for row in record["measured"]:
        assert row["tokens_per_second"] > 0
        assert row["operations_per_second"] > 0
    assert record["processes"] == 1


def record(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


def test_what_needs_no_other_environment_runs_and_makes_a_page(tmp_path, capsys):
    overhead.main(overhead.Settings(completions=2, steps=2, rounds=2, scale=0.1, out=tmp_path))
    sampling.main(sampling.Settings(problems=2, n=2, tokens_at_once=(500, 40_000), rounds=2, out=tmp_path))
    scaling.main(scaling.Settings(problems=1, n=1, prompt=16, rounds=2, new_tokens=4, processes=(1,), out=tmp_path))
    printed = capsys.readouterr().out
    page.main(tmp_path)
    text = (tmp_path / "README.md").read_text()
    for name, count in (("overhead", 2), ("sampling", 1), ("scaling", 3)):
        found = record(tmp_path, name)["comparisons"]
        assert len(found) == count
        for comparison in found:
            assert all(len(values) == 2 for values in comparison["values"].values())
            assert f"| {comparison['what']} | {comparison['unit']}, median |" in text
            for goal in comparison["goals"]:
                line = measuring.verdict(
                    measuring.Comparison(comparison["what"], comparison["unit"], comparison["values"]),
                    measuring.Goal(**goal),
                )
                assert line in text
                assert line in printed
    assert "training, completions per prompt" in text


def test_a_goal_is_judged_by_the_median_of_the_rounds_ratios():
    found = measuring.Comparison("", "", {"a": [1.0, 2.0, 9.0], "b": [1.0, 1.0, 1.0]})
    assert measuring.verdict(found, measuring.Goal("a", "b", 2.0)).endswith("goal at least 2: met")
    assert measuring.verdict(found, measuring.Goal("a", "b", 2.1)).endswith("goal at least 2.1: missed")
    assert measuring.verdict(found, measuring.Goal("a", "b", 2.0, is_least=False)).endswith("goal at most 2: met")
    assert measuring.verdict(found, measuring.Goal("a", "b", 1.9, is_least=False)).endswith("goal at most 1.9: missed")


def test_the_peak_of_memory_is_that_of_what_was_held_at_once():
    def hold_twice():
        for _ in range(2):
            numpy.ones(2**23)  # 64 MiB, dropped before the next

    assert 2**26 <= measuring.peak_above(hold_twice) < 1.5 * 2**26


def test_operations_are_those_of_the_matrices():
    class Config:
        num_hidden_layers, hidden_size, vocab_size = 2, 8, 10

    example = Example([1, 2], [3, 4, 5], 0.0, 1.0)
    # weights 6 x 100 x 5, head 6 x 8 x 10 x 3; attention of a layer: scores and values, 2 x 2 x 8 x 5 x 5 / 2 (causal),
    # and backward twice that
    expected = 3000 + 1440 + 3 * 2 * (2 * 2 * 8 * 25 / 2)
    assert gpu_step.operations(Config, 100, [example]) == pytest.approx(expected)
