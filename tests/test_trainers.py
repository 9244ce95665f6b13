"""The examples in other trainers, each with that trainer's own code, in an environment of its own."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from test_readme import FENCED, PAGES

from conformance import identify

ROOT = Path(__file__).resolve().parent.parent


def run(trainer, *arguments):
    """A command in the trainer's environment: `make test-trainers` makes them and says where they are."""
    python = os.environ.get(f"{trainer.upper()}_PYTHON")
    if not python:
        pytest.skip(f"{trainer.upper()}_PYTHON is not set: make test-trainers sets it")
    command = [Path(python).absolute(), *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["trl", "verl"])
def test_the_example_is_the_paper_s_loss(trainer):
    done = run(trainer, "-m", "conformance", f"examples.topr_in_{trainer}:loss", "--random", 100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"examples.topr_in_{trainer}:loss: paper\n100 random batches agree with Eq. 7\n")


@pytest.mark.parametrize("trainer", ["trl", "verl", "openrlhf"])
def test_an_example_is_short(trainer):
    assert len((ROOT / "examples" / f"topr_in_{trainer}.py").read_text(encoding="utf-8").splitlines()) <= 60


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "a_generation", "is_warned"), [(4, 4, False), (2, 1, True)])
def test_trl_trains_with_it_and_warns_where_no_generation_outlives_a_step(tmp_path, steps, a_generation, is_warned):
    options = ["--steps", steps, "--steps-per-generation", a_generation, "--test-problems", 1, "--out", tmp_path]
    done = run("trl", "examples/train_with_trl.py", *options)
    assert done.returncode == 0, done.stderr
    assert ("every weight is 1" in done.stderr) == is_warned
    weight = float(re.search(r"^mean weight: (.*)$", done.stdout, re.MULTILINE)[1])
    assert weight == 1 if is_warned else 0.5 < weight < 1


@pytest.mark.slow
def test_verl_s_own_loss_function_has_the_gradient_of_topr_over_micro_batches():
    done = run("verl", "tests/verl_steps.py")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    first, *later = found["steps"]
    assert first["weights"] == pytest.approx([1, 1], abs=1e-4)
    assert all(step["difference"] < 1e-5 for step in [first, *later])
    assert all(0 < step["weights"][1] < 0.99 for step in later)  # of the micro-batch with the negatives
    messages = ["advantages differ within a sequence", "loss_agg_mode=seq-mean-token-mean", "rollout_is=null"]
    assert all(message in said for message, said in zip(messages, found["refusals"], strict=True))


def test_the_lines_of_the_page_are_the_paper_s_loss():
    [lines] = [block for language, block in FENCED.findall(PAGES["docs/in_your_trainer.md"]) if language == "python"]

    def loss(token_logp, token_logmu, reward, mask):
        names = {"torch": torch, **locals()}
        exec(lines, names)
        return names["loss"]

    assert identify(loss).variant == "paper"
    assert len(lines.splitlines()) == 4
