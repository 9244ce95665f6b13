"""Runs on two ranks that torchrun starts: they share the work, and a killed one loses nothing.

The ranks train with FSDP2 and exchange tensors through gloo.
"""

import psutil
import pytest
from helpers import TWO_ITERATIONS, Command, count_lines, read_rows, wait_until

CHANGES = TWO_ITERATIONS | {"iterations": 1}
SMALLER = {"problems": 3, "n": 4, "examples": 12, "batch_size": 4, "test_problems": 1}
PART = "iteration-1/samples.jsonl.part-1"
METRICS = "iteration-1/metrics.jsonl"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run that was not interrupted."""
    command = Command(tmp_path_factory.mktemp("finished") / "run", ranks=2, **CHANGES)
    command.finish()
    return command.folder


@pytest.mark.slow
def test_samples_and_steps_are_those_of_one_process(run, finished):
    """Samples bit for bit; sums over ranks to rounding."""
    alone = run(**CHANGES)
    for name in ("samples.jsonl", "test-0.jsonl", "test-0-greedy.jsonl"):
        actual = (finished / "iteration-1" / name).read_bytes()
        assert actual == (alone / "iteration-1" / name).read_bytes()
    steps = read_rows(finished / METRICS)
    for actual, expected in zip(steps, read_rows(alone / METRICS), strict=True):
        assert actual == pytest.approx(expected, rel=1e-3, abs=1e-4)


@pytest.mark.slow
def test_bfloat16_starts_at_mu_and_is_near_float32(finished, tmp_path):
    command = Command(tmp_path / "run", ranks=2, dtype="bfloat16", **CHANGES)
    command.finish()
    steps = read_rows(command.folder / METRICS)
    for name in ("log_ratio_neg_mean", "log_ratio_pos_mean"):
        assert steps[0][name] == 0
    expected = read_rows(finished / METRICS)[0]
    assert steps[0]["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)


@pytest.mark.slow
def test_rank_without_a_problem_waits_for_the_other(tmp_path):
    changes = CHANGES | {"problems": 1, "test_problems": 1, "examples": 8}
    command = Command(tmp_path / "run", ranks=2, **changes)
    command.finish()
    assert count_lines(command.folder / "iteration-1" / "samples.jsonl") == 8


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16", "gradient_checkpointing": True}])
def test_killed_rank_ends_the_other_and_the_run_ends_with_the_same_files(tmp_path, changes):
    changes = CHANGES | SMALLER | {"save_every": 1} | changes
    undisturbed = Command(tmp_path / "undisturbed", ranks=2, **changes).finish()
    command = Command(tmp_path / "run", ranks=2, **changes)
    for file in (PART, METRICS):
        with command.start() as process:
            wait_until(lambda file=command.folder / file: count_lines(file) >= 1, process)
            psutil.Process(process.pid).children()[-1].kill()
            process.join()
            assert process.exitcode != 0
        assert not (command.folder / "iteration-1" / "model").exists()
    assert command.finish() == undisturbed
