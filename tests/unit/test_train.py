"""The training loop: what it computes, what it refuses, and that micro-batches leave the gradient alone."""

import math
from dataclasses import replace

import pytest
import torch
from helpers import fit, plain_batch, random_examples, tiny_model

import topr
from pipeline.metrics import check_ratio, over_epoch, step_metrics


def at_mu(model, examples):
    """The examples with log mu as the model has it."""
    logmu = topr.sequence_logprobs(model, plain_batch(examples)).detach().tolist()
    return [replace(example, logmu=value) for example, value in zip(examples, logmu, strict=True)]


def sgd(model, lr=1e-2):
    return torch.optim.SGD(model.parameters(), lr=lr)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_metrics_by_hand():
    log_ratio, reward = torch.tensor([-1.0, 0.0, 2.0, -50.0]), torch.tensor([1.0, 1.0, -1.0, -1.0])
    metrics = step_metrics(log_ratio, reward, torch.tensor([1.0, 1.0, 1.0, math.exp(-50)]))
    names = (
        "ess",
        "weights_below_1e-6",
        "log_ratio_pos_q50",
        "log_ratio_pos_q95",
        "weight_neg_q50",
    )
    assert [metrics[name] for name in names] == pytest.approx([3, 0.25, -0.5, -0.05, 0.5])
    assert (
        step_metrics(log_ratio, reward, torch.tensor([2e-6, 9e-7, 2e-6, 9e-7]))[
            "weights_below_1e-6"
        ]
        == 0.5
    )
    metrics = step_metrics(
        log_ratio, torch.tensor([1.5, 0.5, -3.0, -1.0]), torch.tensor([1.0, 0.5, 0.25, 0.75])
    )
    means = [
        metrics[f"{name}_{sign}_mean"]
        for name in ("log_ratio", "weight")
        for sign in ("pos", "neg")
    ]
    assert means == pytest.approx([-0.5, -24, 0.75, 0.5])
    found = (metrics["pull"], metrics["realised_share"])
    assert found == pytest.approx(
        (3.25, 1.75 / 3.25)
    )  # 1.5 + 0.25 of positives, 0.75 + 0.75 of negatives
    reward = torch.tensor([1.0, 0.0, 0.0, 0.0])  # nothing is learnt from a reward of 0
    metrics = step_metrics(torch.zeros(4), reward, reward)
    assert (metrics["weight_pos_q50"], metrics["weights_below_1e-6"], metrics["ess"]) == (1, 0, 1)
    assert "weight_neg_q50" not in metrics
    assert step_metrics(torch.zeros(2), torch.zeros(2), torch.zeros(2)) == {
        "weights_below_1e-6": 0,
        "ess": 0,
        "pull": 0,
    }


def test_an_epoch_is_summed_up_whole_and_in_tenths():
    steps = [
        {"pull": n, "realised_share": 1 / n, "log_ratio_neg_mean": -n} for n in range(1, 21)
    ]  # positives pull 1
    steps = [step | ({"weight_neg_mean": n} if n % 2 else {}) for n, step in enumerate(steps)]
    found = over_epoch([*steps, {"pull": 0.0}])  # 21 steps: tenths of two, and the last of three
    shares = [round(2 / (2 * n + 1), 3) for n in range(1, 20, 2)]
    assert found["tenths"]["realised_share"] == shares
    assert found["tenths"]["weight_neg_mean"] == [*range(1, 20, 2)]
    whole = (found["realised_share"], found["weight_neg_mean"], found["log_ratio_neg_mean"])
    assert whole == (round(20 / 210, 3), 10, -19.5)
    assert found["log_ratio_pos_mean"] is None
    assert len(over_epoch(steps[:3])["tenths"]["weight_neg_mean"]) == 3


def test_training_away_from_mu_is_refused_and_a_ratio_that_never_moves_warned_about():
    for number, told in (
        (-0.5, "0.5, above 0.4"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-math.inf, "inf"),
    ):
        with pytest.raises(
            ArithmeticError, match=rf"step 1: \|log pi - log mu\| reaches {told}.*--trust-logmu"
        ):
            check_ratio(1, torch.tensor([0.0, number]), tolerance=0.4)
    with pytest.warns(UserWarning, match="every log-ratio is 0"):
        check_ratio(2, torch.zeros(3), tolerance=0.01)
    allowed = [(1, [0.5, -0.5], 0.6), (2, [0.0, -0.5], 0.4), (2, [0, 1e-9], 0.01), (3, [0], 0.01)]
    for step, log_ratio, tolerance in allowed:
        check_ratio(step, torch.tensor(log_ratio), tolerance)


@pytest.mark.parametrize(
    ("loss", "found"),
    [(lambda x: x.sum() + math.inf, "inf"), (lambda x: (x - x.detach()).abs().sqrt().sum(), "0")],
)
def test_a_loss_or_a_gradient_that_is_not_finite_stops_all_processes(loss, found):
    """Where one of them is finite: the gradient's norm, which all processes share, must tell of the loss."""
    model = tiny_model()
    batch, before = plain_batch(at_mu(model, random_examples(2, 2))), weights(model)
    with pytest.raises(FloatingPointError, match=f"loss is {found}, grad_norm is nan"):
        fit(model, sgd(model), [[batch]], loss=lambda logp, *_, **__: loss(logp))
    assert torch.equal(weights(model), before)


def test_v16_a_step_is_made_for_each_next_and_its_weight_follows_the_model():
    model = tiny_model()
    examples = [
        replace(e, logmu=e.logmu + 2) for e in at_mu(model, random_examples(6, 2)) if e.reward < 0
    ]
    batch, before = plain_batch([*examples, replace(examples[0], reward=0.0)]), weights(model)
    training = topr.train(model, sgd(model), [topr.Step([batch], len(batch.reward))] * 2)
    assert torch.equal(weights(model), before)
    first = next(training).weight
    assert first.tolist() == pytest.approx([math.exp(-2)] * len(examples) + [0.0])
    assert not torch.equal(weights(model), before)
    assert (next(training).weight < 0.99 * first).any()
    with pytest.raises(StopIteration):
        next(training)
