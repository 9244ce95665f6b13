"""The training loop: what it computes, what it refuses, and that micro-batches leave the gradient alone."""

import math
from dataclasses import replace

import pytest
import torch
from helpers import fit, plain_batch, random_examples, tiny_model

import topr


def at_mu(model, examples):
    """The examples with log mu as the model has it."""
    logmu = topr.sequence_logprobs(model, plain_batch(examples)).detach().tolist()
    return [replace(example, logmu=value) for example, value in zip(examples, logmu, strict=True)]


def sgd(model, lr=1e-2):
    return torch.optim.SGD(model.parameters(), lr=lr)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


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
