"""The variants as training losses: against topr.py's method, Equation 7 by hand, and Table 1."""

from dataclasses import astuple

import pytest
import torch
from loss_builders import method_loss

import topr
from topr_conformance import VARIANTS, Limits, LossInputs, neg_grad, paper_neg_grad, variants
from topr_conformance.limits import TABLE_1
from topr_conformance.random_batches import random_batch
from topr_conformance.variants import FrozenWeight

ROWS = {  # of Table 1: the name of the verdict -> that of topr.py
    "paper": "topr",
    "tis": "tis",
    "plain is": "off_policy",
    "naive reinforce": "reinforce",
    "sft": "sft",
}


def batches(count=40):
    """Random batches in float64, in which padding holds numbers between -50 and 50."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(count):
        yield LossInputs(*[column.double() for column in random_batch(generator)])


def value_and_gradient(loss, batch, **options):
    token_logp = batch.token_logp.clone().requires_grad_()
    value = loss(token_logp, *batch[1:], **options)
    [gradient] = torch.autograd.grad(value, token_logp)
    return value.detach(), gradient


def test_limits_are_those_of_table_1():
    assert set(ROWS) == set(TABLE_1)
    for name, row in ROWS.items():
        assert TABLE_1[name] == astuple(topr.PRESETS[row])


def test_a_clipped_ratio_has_the_gradient_of_the_ratio_within_the_bounds_and_none_elsewhere():
    log_ratio = torch.tensor([[-2.0], [-1.0], [0.0], [0.1], [0.0]], requires_grad=True)
    reward = torch.tensor([[-1.0], [-1.0], [1.0], [-1.0], [1.0]])
    weight = Limits(1, 1, 0.2, 1).weight(log_ratio, reward)
    [gradient] = torch.autograd.grad(weight.sum(), log_ratio)
    inside = torch.tensor(-1.0).exp().item()  # e^-2 is below 0.2
    assert weight.flatten().tolist() == pytest.approx([0.2, inside, 1, 1, 1])
    assert gradient.flatten().tolist() == pytest.approx([0, inside, 0, 0, 0])


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_table_1_equal_the_method(name):
    loss = variants.paper if name == "paper" else VARIANTS[name]
    for batch in batches():
        actual = value_and_gradient(loss, batch, denominator=9)
        limits = topr.PRESETS[ROWS[name]]
        expected = value_and_gradient(method_loss, batch, limits=limits, denominator=9)
        torch.testing.assert_close(actual, expected)


def test_objective_is_equation_11_and_has_the_gradient_of_the_loss():
    for batch in batches():
        value, gradient = value_and_gradient(variants.objective, batch)
        log_ratio = torch.where(batch.mask > 0, batch.token_logp - batch.token_logmu, 0.0).sum(1)
        integrand = topr.topr_objective(log_ratio, batch.reward, topr.PRESETS["topr"])
        torch.testing.assert_close(value, -(integrand / batch.mask.sum(1)).mean())
        torch.testing.assert_close(gradient, value_and_gradient(variants.paper, batch)[1])


def test_paper_has_the_gradient_by_hand():
    for batch in batches():
        by_hand = torch.tensor(paper_neg_grad(batch), dtype=torch.float64) / len(batch.reward)
        torch.testing.assert_close(neg_grad(variants.paper, batch), by_hand)


def test_token_means_divide_by_the_number_of_tokens():
    for batch in batches():
        num_tokens = batch.mask.sum()
        sums = len(batch.reward) * neg_grad(variants.sequence_sum, batch)
        torch.testing.assert_close(neg_grad(variants.token_mean, batch), sums / num_tokens)
        per_token = neg_grad(variants.per_token, batch)
        sums = len(batch.reward) * per_token * batch.mask.sum(1, keepdim=True)
        actual = neg_grad(variants.per_token_and_token_mean, batch)
        torch.testing.assert_close(actual, sums / num_tokens)


@pytest.mark.parametrize("name", [*VARIANTS, "frozen weight"])
def test_denominator_takes_the_place_of_the_number_of_completions(name):
    for batch in batches(10):
        loss = FrozenWeight() if name == "frozen weight" else VARIANTS[name]
        mean = value_and_gradient(loss, batch)
        over_7 = value_and_gradient(loss, batch, denominator=7)
        for whole, part in zip(mean, over_7, strict=True):
            torch.testing.assert_close(part * 7, whole * len(batch.reward))


def test_micro_batches_add_up_to_the_gradient_of_the_step():
    """As in training: the parts of a step, each with the number of completions of the step."""
    for name, loss in VARIANTS.items():
        if name in ("per-token + token mean", "token mean", "branch by raw score"):
            continue  # they depend on the mean length, or the mean reward, of the micro-batch
        for batch in batches(10):
            size = len(batch.reward)
            whole = neg_grad(loss, batch)
            for start in range(size):
                rows = slice(start, start + 1)
                part = LossInputs(*[column[rows] for column in batch])
                _, gradient = value_and_gradient(loss, part, denominator=size)
                torch.testing.assert_close(-gradient, whole[rows], msg=name)


def test_variants_have_different_gradients():
    batch = LossInputs(
        token_logp=torch.tensor([[-0.5, -2.0, -1.0], [-2.0, -1.0, -7.0], [-3.0, -9.0, -9.0]]),
        token_logmu=torch.tensor([[-0.2, -1.5, -1.4], [-0.5, -1.5, -9.0], [-4.0, -5.0, -5.0]]),
        reward=torch.tensor([-1.0, 1.0, 0.5]),
        mask=torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]),
    )
    gradients = [neg_grad(variants.paper, batch)]
    for name, loss in VARIANTS.items():
        gradient = neg_grad(loss, batch)
        assert not any(torch.allclose(gradient, other, rtol=1e-3) for other in gradients), name
        gradients.append(gradient)
