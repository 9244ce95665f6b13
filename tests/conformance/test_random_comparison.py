"""Random batches show that a loss differs from Equation 7, and the smallest batch that does."""

import json

import pytest
import torch

from topr_conformance import LossInputs, compare, neg_grad, paper_neg_grad, variants
from topr_conformance.random_batches import random_batch
from topr_conformance.variants import paper


def test_batches_are_ragged_and_padded_on_either_side():
    generator = torch.Generator().manual_seed(0)
    masks = [random_batch(generator).mask for _ in range(30)]
    sides = {(bool(mask[:, 0].all()), bool(mask[:, -1].all())) for mask in masks}
    assert sides == {(False, True), (True, False), (True, True)}


def test_the_smallest_batch_that_differs_is_shown():
    shown = compare(variants.token_mean, 100)
    columns = {}
    for line in shown.splitlines()[1:]:
        name, values = line.split(" ", 1)
        columns[name] = torch.tensor(json.loads(values), dtype=torch.float64)
    inputs = LossInputs(*[columns.pop(name) for name in LossInputs._fields])
    assert inputs.mask.numel() <= 8  # of 1 to 40
    by_loss = neg_grad(variants.token_mean, inputs)
    by_hand = torch.tensor(paper_neg_grad(inputs)) / len(inputs.reward)
    assert columns["neg_grad"] == pytest.approx(by_loss, abs=1e-6)
    assert columns["paper"] == pytest.approx(by_hand, abs=1e-6)
    assert not torch.allclose(by_loss, by_hand.double(), rtol=1e-3)


def test_the_seed_chooses_the_batches():
    shown = compare(variants.token_mean, 100)
    assert compare(variants.token_mean, 100, seed=0) == shown
    assert compare(variants.token_mean, 100, seed=1) != shown


def times_100(logp, logmu, reward, mask):
    return 100 * paper(logp, logmu, reward, mask)


def sum_over_completions(logp, logmu, reward, mask):
    return len(reward) * paper(logp, logmu, reward, mask)


@pytest.mark.parametrize("loss", [paper, times_100, sum_over_completions])
def test_a_constant_factor_and_a_sum_make_no_difference(loss):
    assert compare(loss, 100) is None


def without_gradient(logp, logmu, reward, mask):
    return 0.0 * paper(logp, logmu, reward, mask)


def times_batch_size_squared(logp, logmu, reward, mask):
    return len(reward) ** 2 * paper(logp, logmu, reward, mask)


def negated(logp, logmu, reward, mask):
    return -paper(logp, logmu, reward, mask)


@pytest.mark.parametrize("loss", [without_gradient, times_batch_size_squared, negated])
def test_the_gradient_of_a_positive_must_be_positive_and_that_of_a_mean_or_a_sum(loss):
    assert compare(loss, 100) is not None


def two_arguments(logp, logmu):
    return logp.sum()


def broken_for_three(logp, logmu, reward, mask):
    return paper(logp, logmu, reward, mask) if len(reward) < 3 else logp.no_such_name


@pytest.mark.parametrize(
    ("loss", "error"), [(two_arguments, "TypeError"), (broken_for_three, "AttributeError")]
)
def test_what_a_loss_raises_is_shown(loss, error):
    assert error in compare(loss, 100)
