"""The built losses and the comparison on random batches, against topr.py and Equation 7 by hand."""

import json
from dataclasses import astuple, replace

import pytest
import torch
from public_losses import but, times_mask, with_tool_output

import topr
from topr_conformance import VARIANTS, LossInputs, compare, neg_grad, paper
from topr_conformance.combinations import TABLE_1, Bounds, Combination
from topr_conformance.random_batches import paper_neg_grad, random_batch

ROWS = {"": "topr", "tis": "tis", "plain is": "off_policy"}  # of Table 1: its name in topr.py
ROWS |= {"naive reinforce": "reinforce", "sft": "sft"}


def batches(count=20):
    generator = torch.Generator().manual_seed(7)
    for _ in range(count):
        yield LossInputs(*[column.double() for column in random_batch(generator)])


def value_and_gradient(loss, batch, **options):
    token_logp = batch.token_logp.clone().requires_grad_()
    value = loss(token_logp, *batch[1:], **options)
    [gradient] = torch.autograd.grad(value, token_logp)
    return value.detach(), gradient


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_table_1_equal_the_method(name):
    limits = topr.TABLE_1[ROWS[name]]
    assert TABLE_1[name] == astuple(limits)
    for batch in batches():
        actual = value_and_gradient(Combination(TABLE_1[name]).loss, batch)
        expected = value_and_gradient(topr.topr_loss, batch, limits=limits)
        torch.testing.assert_close(actual, expected)


def test_the_oracle_by_hand():
    """Two tokens of a negative: -e^-1 / 2 each; padding of any size; a positive has weight 1."""
    batch = LossInputs(
        token_logp=torch.tensor([[-2.0, -2.0, 50.0], [-9.0, 0.0, 0.0]]),
        token_logmu=torch.tensor([[-1.5, -1.5, 7.0], [-1.0, 0.0, 0.0]]),
        reward=torch.tensor([-1.0, 0.5]),
        mask=torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]),
    )
    expected = [[-0.1839397, -0.1839397, 0], [0.5, 0, 0]]
    torch.testing.assert_close(torch.tensor(paper_neg_grad(batch)), torch.tensor(expected))
    torch.testing.assert_close(neg_grad(paper, batch), torch.tensor(expected) / 2)


def test_a_weight_without_stop_gradient_and_with_a_window_by_hand():
    """d/dlogp of w logp is w (1 + logp) within the bounds, and 0 outside of the window."""
    logp = torch.tensor([[-2.0], [-2.0], [-2.0], [-0.5]])
    log_ratio = torch.tensor([[-0.5], [-3.0], [0.5], [-0.1]])
    ones = torch.ones(4)
    batch = LossInputs(logp, logp - log_ratio, -ones, ones[:, None])
    combination = Combination(Bounds(1, 1, 0.2, 1), Bounds(0, 9, 0.1, 9))
    detached = 4 * neg_grad(combination.loss, batch)[:, 0]
    differentiated = 4 * neg_grad(replace(combination, gradient="no stop-gradient").loss, batch)
    assert detached.tolist() == pytest.approx([-0.606531, 0, -1, -0.904837], abs=1e-6)
    assert differentiated.flatten().tolist() == pytest.approx([0.606531, 0, -1, -0.452419], 1e-5)


def test_a_token_mean_is_the_mean_over_all_tokens():
    logp = -torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(4) < torch.tensor([[1], [4], [2]])).float()
    value = VARIANTS["token mean"](logp, logp, torch.ones(3), mask)
    torch.testing.assert_close(value, -(logp * mask).sum() / 7)


# ---- random batches ------------------------------------------------------------------------------
def test_the_smallest_batch_that_differs_is_shown():
    shown = compare(VARIANTS["token mean"], 100)
    columns = {}
    for line in shown.splitlines()[1:]:
        name, values = line.replace("nan", "NaN").replace("inf", "Infinity").split(" ", 1)
        columns[name] = torch.tensor(json.loads(values), dtype=torch.float64)
    inputs = LossInputs(*[columns.pop(name) for name in LossInputs._fields])
    assert inputs.mask.numel() <= 8  # of 1 to 40
    by_loss = neg_grad(VARIANTS["token mean"], inputs)
    by_hand = torch.tensor(paper_neg_grad(inputs)) / len(inputs.reward)
    assert columns["neg_grad"] == pytest.approx(by_loss, abs=1e-6)
    assert columns["paper"] == pytest.approx(by_hand, abs=1e-6)
    assert compare(VARIANTS["token mean"], 100, seed=1) != shown


def broken_for_three(logp, logmu, reward, mask):
    return paper(logp, logmu, reward, mask) if len(reward) < 3 else logp.no_such_name


@pytest.mark.parametrize(
    ("loss", "shown"),
    [
        (but(), None),
        (but(with_tool_output), "paper"),
        (but(times_mask), "paper"),
        (lambda *inputs: 100 * paper(*inputs), None),
        (lambda *inputs: len(inputs[2]) * paper(*inputs), None),  # a sum
        (lambda *inputs: -paper(*inputs), "paper"),
        (lambda *inputs: 0 * paper(*inputs), "paper"),
        (lambda *inputs: len(inputs[2]) ** 2 * paper(*inputs), "paper"),
        (lambda *inputs: 1.001 ** len(inputs[2]) * paper(*inputs), "paper"),
        (broken_for_three, "AttributeError"),
    ],
)
def test_a_constant_factor_and_a_sum_make_no_difference_and_others_do(loss, shown):
    difference = compare(loss, 100)
    assert difference is None if shown is None else shown in difference
