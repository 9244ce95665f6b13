"""PPO and DPO against their formulas."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.methods import dpo_loss, ppo_loss


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


@given(st.floats(-3, 3), st.sampled_from([-2.0, -0.2, 0.0, 0.2, 1.0]), st.integers(1, 9))
def test_ppo_is_equation_6(log_ratio, reward, length):
    ratio = math.exp(log_ratio)
    expected = -min(ratio * reward, min(max(ratio, 0.8), 1.2) * reward) / length
    found = ppo_loss(double(log_ratio), double(0), double(reward), double(length), eps=0.2)
    assert found.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_ppo_has_no_gradient_beyond_the_clip_on_the_improving_side():
    ratio, reward = double(1.3, 0.7, 0.7, 1.3), double(1, 1, -1, -1)
    logp = ratio.log().requires_grad_()
    ppo_loss(logp, torch.zeros(4), reward, torch.ones(4), denominator=1).backward()
    torch.testing.assert_close(logp.grad, double(0, -0.7, 0, 1.3))


@given(st.floats(-30, 30), st.floats(-30, 30), st.floats(0.01, 2))
def test_dpo_is_its_formula_whatever_the_order_of_a_pair(pos, neg, beta):
    """The denominator counts completions, two for each pair."""
    margin = beta * ((pos + 1) - (neg + 2))
    expected = math.log1p(math.exp(-margin))
    for order, reward in (([0, 1], 1), ([1, 0], 0)):
        columns = (double(*column)[order] for column in ((pos, neg), (-1, -2), (reward, -1)))
        found = dpo_loss(
            *(column.repeat(3) for column in columns), torch.ones(6), denominator=10, beta=beta
        )
        assert found.item() == pytest.approx(3 / 5 * expected, rel=1e-9)


def test_an_eps_out_of_range_is_refused():
    for eps in (-0.1, 1.5, math.nan):
        with pytest.raises(ValueError, match="eps = "):
            ppo_loss(*torch.ones(4, 1), eps=eps)
