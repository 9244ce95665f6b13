"""The benchmarks run, at a size that says nothing; what they measure is not for tests."""

import json
import os

import gpu_step
import measuring
import numpy
import overhead
import page
import pytest
import sampling
import scaling

from pipeline.records import Example


def test_the_gpu_step_runs_on_a_processor_too(tmp_path, capsys):
    settings = gpu_step.Settings(
        model="small", compute="float32", batches=(1, 3), steps=2, prompt=20, completion=(3, 9), out=tmp_path
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


def check_page(tmp_path, capsys, name, count):
    """What a benchmark wrote is on the page of results, and what it printed too."""
    printed = capsys.readouterr().out
    page.main(tmp_path)
    text = (tmp_path / "README.md").read_text()
    found = record(tmp_path, name)["comparisons"]
    assert len(found) == count
    for comparison in found:
        assert all(len(values) == 2 for values in comparison["values"].values())
        assert f"| {comparison['what']} | {comparison['unit']}, median |" in text
        alone = measuring.Comparison(comparison["what"], comparison["unit"], comparison["values"])
        for goal in comparison["goals"]:
            line = measuring.verdict(alone, measuring.Goal(**goal))
            assert line in text
            assert line in printed
    return text


def test_overhead_runs(tmp_path, capsys):
    overhead.main(overhead.Settings(completions=2, steps=2, rounds=2, scale=0.1, out=tmp_path))
    check_page(tmp_path, capsys, "overhead", 2)


def test_sampling_runs(tmp_path, capsys):
    sampling.main(sampling.Settings(problems=2, n=2, tokens_at_once=(500, 40_000), rounds=2, out=tmp_path))
    check_page(tmp_path, capsys, "sampling", 1)


@pytest.mark.slow
def test_scaling_runs(tmp_path, capsys):
    scaling.main(scaling.Settings(problems=1, n=1, prompt=16, rounds=2, new_tokens=4, processes=(1,), out=tmp_path))
    assert "training, completions per prompt" in check_page(tmp_path, capsys, "scaling", 3)


def test_a_goal_is_judged_by_the_median_of_the_rounds_ratios():
    found = measuring.Comparison("", "", {"a": [1.0, 2.0, 9.0], "b": [1.0, 1.0, 1.0]})
    assert measuring.verdict(found, measuring.Goal("a", "b", 2.0)).endswith("goal at least 2: met")
    assert measuring.verdict(found, measuring.Goal("a", "b", 2.1)).endswith("goal at least 2.1: missed")
    assert measuring.verdict(found, measuring.Goal("a", "b", 2.0, is_least=False)).endswith("goal at most 2: met")
    assert measuring.verdict(found, measuring.Goal("a", "b", 1.9, is_least=False)).endswith("goal at most 1.9: missed")


def test_the_peak_of_memory_is_that_of_what_was_held_at_once():
    """Up to what Linux counts late: each processor adds its pages to the process's three counters (of memory, files
    and shared memory) when it has max(32, 2 * processors) of them, which may be before and after. So it stays on one.
    """
    size, processors = 2**26, os.sched_getaffinity(0)

    def hold_twice():
        for _ in range(2):
            numpy.ones(size // 8)  # 64 MiB, dropped before the next

    late = 2 * 3 * max(32, 2 * os.cpu_count()) * os.sysconf("SC_PAGE_SIZE")
    os.sched_setaffinity(0, {min(processors)})
    try:
        peak = measuring.peak_above(hold_twice)
    finally:
        os.sched_setaffinity(0, processors)
    assert size - late <= peak < 1.5 * size


def test_operations_are_those_of_the_matrices():
    class Config:
        num_hidden_layers, hidden_size, vocab_size = 2, 8, 10

    example = Example([1, 2], [3, 4, 5], 0.0, 1.0)
    # weights 6 x 100 x 5, head 6 x 8 x 10 x 3; attention of a layer: scores and values, 2 x 2 x 8 x 5 x 5 / 2 (causal),
    # and backward twice that
    expected = 3000 + 1440 + 3 * 2 * (2 * 2 * 8 * 25 / 2)
    assert gpu_step.operations(Config, 100, [example]) == pytest.approx(expected)
