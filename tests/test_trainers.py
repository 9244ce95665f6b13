"""The examples in other trainers, each with that trainer's own code, in an environment of its own."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from test_readme import FENCED, PAGES

from examples.topr_in_trl import loss as loss_in_trl
from topr_conformance import LossInputs, compare, identify, neg_grad

ROOT = Path(__file__).resolve().parent.parent


def run(trainer, *arguments):
    """What a command prints, and what it warns of, in the environment that `make test-trainers` makes and names."""
    python = os.environ.get(f"{trainer.upper()}_PYTHON")
    if not python:
        pytest.skip(f"{trainer.upper()}_PYTHON is not set: make test-trainers sets it")
    command = [Path(python).absolute(), *map(str, arguments)]
    ours = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'conformance'}"}
    done = subprocess.run(command, cwd=ROOT, env=ours, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["trl", "verl"])
def test_the_example_is_the_paper_s_loss(trainer):
    printed, _ = run(
        trainer, "-m", "topr_conformance", f"examples.topr_in_{trainer}:loss", "--random", 100
    )
    assert printed.endswith(
        f"examples.topr_in_{trainer}:loss: paper\n100 random batches agree with Eq. 7\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "a_generation", "is_warned"), [(4, 4, False), (2, 1, True)])
def test_trl_trains_with_it_and_warns_where_no_generation_outlives_a_step(
    tmp_path, steps, a_generation, is_warned
):
    options = [
        "--steps",
        steps,
        "--steps-per-generation",
        a_generation,
        "--test-problems",
        1,
        "--out",
        tmp_path,
    ]
    printed, warned = run("trl", "examples/train_with_trl.py", *options)
    assert ("every weight is 1" in warned) == is_warned
    weight = float(re.search(r"^mean weight: (.*)$", printed, re.MULTILINE)[1])
    assert weight == 1 if is_warned else 0.5 < weight < 1


@pytest.mark.slow
def test_verl_s_own_loss_function_has_the_gradient_of_topr_over_micro_batches():
    found = json.loads(run("verl", "tests/verl_steps.py")[0])
    assert all(step["difference"] < 1e-5 for step in found["steps"])
    assert found["steps"][0]["weights"] == pytest.approx([1, 1], abs=1e-4)
    assert all(
        0 < step["weights"][1] < 0.99 for step in found["steps"][1:]
    )  # of the micro-batch with the negatives
    messages = [
        "advantages differ within a sequence",
        "loss_agg_mode=seq-mean-token-mean",
        "rollout_is=null",
    ]
    assert all(message in said for message, said in zip(messages, found["refusals"], strict=True))


def test_the_loss_in_trl_is_the_paper_s_without_trl_too():
    assert identify(loss_in_trl).variant == "paper"
    assert compare(loss_in_trl, 200) is None


def test_a_completion_that_trl_masks_whole_counts_in_the_mean_without_a_gradient():
    ones = torch.ones(2, 3)
    reward = torch.tensor([1.0, -1.0])
    mask = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    actual = neg_grad(loss_in_trl, LossInputs(-ones, -ones, reward, mask))
    # 4 micro-batches of two completions; the first completion has two tokens
    assert torch.equal(4 * actual, torch.tensor([[0.25, 0.25, 0.0], [0.0, 0.0, 0.0]]))


def test_the_lines_of_the_page_are_the_paper_s_loss():
    [lines] = [
        block
        for language, block in FENCED.findall(PAGES["docs/in_your_trainer.md"])
        if language == "python"
    ]

    def loss(token_logp, token_logmu, reward, mask):
        names = {"torch": torch, **locals()}
        exec(lines, names)
        return names["loss"]

    assert identify(loss).variant == "paper"
    assert len(lines.splitlines()) == 4
