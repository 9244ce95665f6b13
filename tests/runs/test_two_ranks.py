"""Runs on two ranks that torchrun starts: they share the work, and a killed one loses nothing.

The ranks train with FSDP2 and exchange tensors through gloo.
"""

import psutil
import pytest
from helpers import TWO_ITERATIONS, Command, count_lines, read_rows, wait_until

CHANGES = TWO_ITERATIONS | {"iterations": 1}
SMALLER = {"problems": 3, "n": 4, "examples": 12, "batch_size": 4, "test_problems": 1}
SAMPLES = ("iteration-1/samples.jsonl.part-1", "iteration-1/samples.jsonl")  # the part is brief
METRICS = "iteration-1/metrics.jsonl"


@pytest.mark.slow
def test_bfloat16_starts_at_mu_and_is_near_float32_in_one_process(run, tmp_path):
    command = Command(tmp_path / "run", ranks=2, dtype="bfloat16", **CHANGES)
    command.finish()
    steps = read_rows(command.folder / METRICS)
    for name in ("log_ratio_neg_mean", "log_ratio_pos_mean"):
        assert steps[0][name] == 0
    expected = read_rows(run(**CHANGES) / METRICS)[0]
    assert steps[0]["grad_norm"] == pytest.approx(expected["grad_norm"], rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16", "gradient_checkpointing": True}])
def test_killed_rank_ends_the_other_and_the_run_ends_with_the_same_files(tmp_path, changes):
    changes = CHANGES | SMALLER | {"save_every": 1} | changes
    undisturbed = Command(tmp_path / "undisturbed", ranks=2, **changes).finish()
    command = Command(tmp_path / "run", ranks=2, **changes)
    for names in (SAMPLES, (METRICS,)):
        files = [command.folder / name for name in names]
        with command.start() as process:
            wait_until(lambda files=files: any(map(count_lines, files)), process)
            psutil.Process(process.pid).children()[-1].kill()
            process.join()
            assert process.exitcode != 0
        assert not (command.folder / "iteration-1" / "model").exists()
    assert command.finish() == undisturbed
