"""The examples in other trainers, each with that trainer's own code, in its own environment."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest
import torch
from helpers import ROOT

from examples.topr_in_trl import ToprLoss, loss_of
from topr_conformance import LossInputs, compare, identify, neg_grad


def run_in(trainer, *arguments):
    """What the last line of a command's output says, in the environment of another trainer."""
    python = os.environ.get(f"{trainer.upper()}_PYTHON")
    if not python:
        pytest.skip(f"{trainer.upper()}_PYTHON is not set: make test-all sets it")
    path = f"{ROOT}{os.pathsep}{ROOT / 'conformance'}"
    done = subprocess.run(
        [Path(python).absolute(), *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_in_verl_the_checker_calls_it_the_paper_s():
    """It exits with another status for any other loss."""
    run_in("verl", "-m", "topr_conformance", "examples.topr_in_verl:loss")


@pytest.mark.slow
def test_verl_s_ppo_loss_has_the_gradient_of_topr_over_micro_batches():
    results = json.loads(run_in("verl", "tests/tasks/verl_steps.py"))
    assert len(results["steps"]) == 4
    for number, step in enumerate(results["steps"]):
        assert step["difference"] < 1e-5
        positives, negatives = step["weights"]  # of the two micro-batches
        assert positives == pytest.approx(1, abs=1e-4)
        if number == 0:
            assert negatives == pytest.approx(1, abs=1e-4)
        else:
            assert 0 < negatives < 0.99
    assert results["refusals"] == [True, True, False]


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["trl", "verl"])
def test_the_patch_of_docs_patches_applies_to_the_release(tmp_path, trainer):
    program = f"import os, {trainer}; print(os.path.dirname({trainer}.__path__[0]))"
    where = f"--directory={run_in(trainer, '-c', program)}"
    patch = ROOT / f"docs/patches/{trainer}.patch"
    subprocess.run(
        ["git", "apply", "--check", "--unsafe-paths", where, patch], cwd=tmp_path, check=True
    )


@pytest.mark.slow
def test_trl_trains_with_the_gradient_of_topr_and_its_own_other_terms(tmp_path):
    """It refuses settings that contradict TOPR, and warns if every weight is 1."""
    results = json.loads(run_in("trl", "tests/tasks/trl_steps.py", tmp_path))
    assert results["verdict"] == "paper"
    assert results["differences"].keys() == {"TOPR", "KL", "entropy", "experts"}
    assert max(results["differences"].values()) < 1e-3
    assert results["has_images"]
    assert results["not_refused"] == ["learning_rate"]
    first, *later = results["weights"]
    assert first == pytest.approx(1)
    assert all(0.5 < weight < 0.999 for weight in later)
    assert results["weights_without_logmu"] == [1, 1]
    assert results["warnings"] == [False, True]
    assert {"entropy", "grad_norm", "reward"} <= set(results["metrics"])
    # The model card, by its names of the method and the paper:
    assert "trained with TOPR" in results["card"]
    assert "2503.14286" in results["card"]
    assert "GRPO" not in results["card"]


class GRPOTrainer:
    """In place of TRL's, which is not installed: the loss "grpo", without clipping."""

    model = SimpleNamespace(training=False)
    accelerator = SimpleNamespace(gather=lambda weight: weight)

    def _get_per_token_logps_and_entropies(self, model):
        return model().log_probs, None, None

    def _compute_loss(self, model, inputs):
        token_logp, _, _ = self._get_per_token_logps_and_entropies(model)
        token_logmu = inputs.get("old_per_token_logps", token_logp.detach())
        token_loss = -(token_logp - token_logmu).exp() * inputs["advantages"][:, None]
        mask = inputs["completion_mask"]
        return ((token_loss * mask).sum(1) / mask.sum(1)).mean()


class ToprTrainer(ToprLoss, GRPOTrainer):
    """As docs/in_your_trainer.md defines it."""


trainer = object.__new__(ToprTrainer)  # its settings would be TRL's
trainer._metrics = defaultdict(lambda: defaultdict(list))
loss_in_trl = loss_of(trainer)


class ActorConfig(SimpleNamespace):
    """In place of verl's, which is not installed; for one process and without sizes."""

    global_batch_info = MappingProxyType({})


@pytest.fixture
def topr_in_verl(monkeypatch):
    registry = {}

    def register_policy_loss(name):
        return lambda loss: registry.setdefault(name, loss)

    def agg_loss(token_loss, mask, loss_agg_mode):
        assert loss_agg_mode == "seq-mean-token-mean"
        return ((token_loss * mask).sum(1) / mask.sum(1)).mean()

    names = {"agg_loss": agg_loss, "get_policy_loss_fn": registry.get}
    names["register_policy_loss"] = register_policy_loss
    for package in ("verl", "verl.trainer", "verl.trainer.ppo", "verl.workers"):
        monkeypatch.setitem(sys.modules, package, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "verl.trainer.ppo.core_algos", SimpleNamespace(**names))
    config = SimpleNamespace(ActorConfig=ActorConfig)
    monkeypatch.setitem(sys.modules, "verl.workers.config", config)
    yield import_module("examples.topr_in_verl")
    del sys.modules["examples.topr_in_verl"]


def test_the_losses_are_the_paper_s(topr_in_verl):
    for loss in (loss_in_trl, topr_in_verl.loss):
        assert identify(loss).variant == "paper"
        assert compare(loss, 200) is None


def test_a_share_multiplies_the_gradients_of_each_sign(monkeypatch, topr_in_verl):
    ones = torch.ones(2, 1)
    inputs = LossInputs(-ones, -ones, torch.tensor([0.5, -0.25]), ones)
    losses = (
        (loss_in_trl, ToprLoss, "effective_proportion"),
        (topr_in_verl.loss, topr_in_verl, "EFFECTIVE_PROPORTION"),
    )
    for loss, owner, name in losses:
        before = neg_grad(loss, inputs)
        monkeypatch.setattr(owner, name, 0.75)
        assert (neg_grad(loss, inputs) / before).tolist() == [[1.5], [0.5]]


def test_the_checker_names_the_proportion_of_a_subclass_and_of_a_copy(monkeypatch, topr_in_verl):
    class Subclass(ToprTrainer):
        effective_proportion = 0.7

    subclass = object.__new__(Subclass)
    subclass._metrics = trainer._metrics
    monkeypatch.setattr(topr_in_verl, "EFFECTIVE_PROPORTION", 0.7)
    for loss in (loss_of(subclass), topr_in_verl.loss):
        report = identify(loss)
        assert "70 %" in report.variant
        assert not report.changes
