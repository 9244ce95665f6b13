"""The benchmarks run, at a size that says nothing; what they measure is not for tests."""

import json

import gpu_step
import pytest

from pipeline.rows import Example


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


def test_operations_are_those_of_the_matrices():
    class Config:
        num_hidden_layers, hidden_size, vocab_size = 2, 8, 10

    example = Example([1, 2], [3, 4, 5], 0.0, 1.0)
    # weights 6 x 100 x 5, head 6 x 8 x 10 x 3; attention of a layer: scores and values, 2 x 2 x 8 x 5 x 5 / 2 (causal),
    # and backward twice that
    expected = 3000 + 1440 + 3 * 2 * (2 * 2 * 8 * 25 / 2)
    assert gpu_step.operations(Config, 100, [example]) == pytest.approx(expected)
