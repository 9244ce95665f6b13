"""The mathematics of topr.py against closed forms, autograd, finite differences and float64."""

import math

import pytest
import torch
from helpers import double
from hypothesis import given
from hypothesis import strategies as st

import topr
from topr import (
    TABLE_1,
    Limits,
    importance_weight,
    sequence_log_ratio,
    taper,
    topr_loss,
    topr_objective,
)

ALL_LIMITS = [*TABLE_1.values(), Limits(0.5, 2, 0.25, 4)]

log_ratios = st.floats(-30, 30) | st.sampled_from([-1000.0, 80.0])
rewards = st.sampled_from([-2.0, -1.0, -0.2, 0.0, 0.2, 1.0, 2.0])
lower_bounds = st.just(0.0) | st.floats(1e-3, 3)
upper_bounds = lower_bounds | st.just(math.inf)
bounds = st.tuples(lower_bounds, upper_bounds).filter(lambda pair: pair[0] <= pair[1])


# ---- the four bounds -----------------------------------------------------------------------------
@pytest.mark.parametrize(("a", "b"), [(-1, 1), (2, 1), (math.nan, 1), (0, math.nan)])
def test_bounds_out_of_order_are_refused(a, b):
    for limits in ((a, b, 0, 1), (0, 1, a, b)):
        with pytest.raises(ValueError, match="need 0 <= a <= b"):
            Limits(*limits)
    for function in (importance_weight, taper):
        with pytest.raises(ValueError, match="need 0 <= a <= b"):
            function(torch.ones(2), a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_sign_chooses_the_bounds_and_zero_is_positive(dtype):
    reward = torch.tensor([[2.0, 0.0, -0.0], [-1e-30, -2.0, 1e-30]], dtype=dtype)
    a, b = Limits(0.25, 2, 0.125, math.inf).bounds_for(reward)
    assert a.tolist() == [[0.25, 0.25, 0.25], [0.125, 0.125, 0.25]]
    assert b.tolist() == [[2, 2, 2], [math.inf, math.inf, 2]]
    assert a.dtype == b.dtype == torch.promote_types(dtype, torch.float32)


# ---- weight and taper ----------------------------------------------------------------------------
@given(log_ratios, bounds)
def test_weight_is_the_clipped_ratio(log_ratio, pair):
    a, b = pair
    weight = importance_weight(double(log_ratio, -1000, 1000), a, b)
    expected = min(max(math.exp(log_ratio), a), b)
    assert weight.tolist() == pytest.approx([expected, a, b], rel=1e-12)
    # exp(log(a)) may be below a by a rounding error; the weight is not.
    assert ((weight >= a) & (weight <= b)).all()


def rho(log_ratio, a, b):
    """The taper of Section 3.1 in Python numbers."""
    if a > 0 and log_ratio < math.log(a):
        return a * (1 + log_ratio - math.log(a))
    if math.exp(log_ratio) > b:
        return b * (1 + log_ratio - math.log(b)) if b > 0 else 0.0
    return math.exp(log_ratio)


@given(st.floats(1e-6, 1e6), bounds)
def test_taper_is_section_3_1(ratio, pair):
    """It is never above the ratio, and its slope in the logarithm is the weight."""
    log_ratio = double(math.log(ratio)).requires_grad_()
    value = taper(log_ratio.exp(), *pair)
    value.sum().backward()
    assert value.item() == pytest.approx(rho(math.log(ratio), *pair), rel=1e-9, abs=1e-9)
    assert value.item() <= ratio * (1 + 1e-12)
    a, b = pair
    expected_slope = min(max(ratio, a), b)
    assert log_ratio.grad.item() == pytest.approx(expected_slope, rel=1e-9, abs=1e-12)


# ---- the loss ------------------------------------------------------------------------------------
def ragged_batch(seed=0, tokens=7):
    """token_logp, token_logmu, reward, mask of 9 completions: padding anywhere, all signs."""
    reward = double(1, -1, 0, -0.2, 2, -2, -1, -1, 0.2)
    size = (len(reward), tokens)
    generator = torch.Generator().manual_seed(seed)
    token_logp = -4 * torch.rand(size, dtype=torch.float64, generator=generator)
    token_logmu = -4 * torch.rand(size, dtype=torch.float64, generator=generator)
    mask = torch.rand(size, generator=generator) < 0.6
    mask[:, 2] = True  # at least one token
    return token_logp.requires_grad_(), token_logmu, reward, mask.long()


def bounds_of(limits, reward):
    return (limits.a_pos, limits.b_pos) if reward >= 0 else (limits.a_neg, limits.b_neg)


def loss_by_loops(token_logp, token_logmu, reward, mask, limits):
    """Algorithm 1 in Python numbers: the loss, and its gradient in each token_logp."""
    loss = 0.0
    gradient = torch.zeros(mask.shape, dtype=torch.float64)
    for row in range(len(mask)):
        tokens = mask[row].nonzero().flatten().tolist()
        logp = sum(token_logp[row, token].item() for token in tokens)
        logmu = sum(token_logmu[row, token].item() for token in tokens)
        a, b = bounds_of(limits, reward[row])
        weight = min(max(math.exp(logp - logmu), a), b)
        factor = -weight * reward[row].item() / len(tokens) / len(mask)
        loss += factor * logp
        gradient[row, tokens] = factor
    return loss, gradient


@pytest.mark.parametrize("limits", ALL_LIMITS)
def test_loss_is_algorithm_1_by_loops(limits):
    batch = ragged_batch()
    loss = topr_loss(*batch, limits)
    loss.backward()
    expected, gradient = loss_by_loops(*batch, limits)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(batch[0].grad, gradient, rtol=1e-12, atol=1e-300)


cases = st.tuples(log_ratios, st.floats(-60, 0), rewards, st.integers(1, 4))


@given(st.lists(cases, min_size=1, max_size=5), st.sampled_from(ALL_LIMITS))
def test_gradient_of_loss_is_that_of_objective(rows, limits):
    log_ratio, logp, reward, length = double(*rows).T
    mask = torch.arange(4) < length[:, None]  # (B, 4)
    # log pi and log mu are spread evenly over the tokens of each completion.
    token_logp = (logp / length)[:, None].expand(mask.shape).clone().requires_grad_()
    token_logmu = ((logp - log_ratio) / length)[:, None].expand(mask.shape)
    loss = topr_loss(token_logp, token_logmu, reward, mask, limits)
    [of_loss] = torch.autograd.grad(loss, token_logp)
    objective = topr_objective(sequence_log_ratio(token_logp, token_logmu, mask), reward, limits)
    [of_objective] = torch.autograd.grad((objective / length).mean(), token_logp)
    expected = [rho(row[0], *bounds_of(limits, row[2])) * row[2] for row in rows]
    assert objective.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-300)
    torch.testing.assert_close(of_loss, -of_objective, rtol=1e-9, atol=1e-300)


def test_half_precision_is_summed_in_float32():
    token_logp, token_logmu, reward, mask = ragged_batch()
    halves = [column.detach().bfloat16() for column in (token_logp, token_logmu)]
    actual = topr_loss(*halves, reward.float(), mask)
    exact = topr_loss(*[column.double() for column in halves], reward, mask)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), exact, rtol=1e-5, atol=1e-6)


def test_log_ratio_is_zero_where_pi_is_mu():
    """Exactly, over many tokens, whatever is in the padding."""
    generator = torch.Generator().manual_seed(0)
    token_logp = -9 * torch.rand(3, 2000, generator=generator)
    mask = torch.rand(3, 2000, generator=generator) < 0.9
    token_logmu = torch.where(mask, token_logp, math.nan)
    assert sequence_log_ratio(token_logp, token_logmu, mask).tolist() == [0, 0, 0]


# ---- baseline and effective share ----------------------------------------------------------------
@given(st.floats(0.01, 0.99), st.floats(-1, 1))
def test_effective_proportion_is_a_share_and_has_an_inverse(p, c):
    right = p * (1 - c)
    wrong = (1 - p) * (1 + c)
    p_tilde = topr.effective_proportion(p, c)
    assert p_tilde == pytest.approx(right / (right + wrong))
    assert topr.baseline_for_proportion(p, p_tilde) == pytest.approx(c, abs=1e-9)


@pytest.mark.parametrize(
    ("function", "p", "other", "named"),
    [
        *[(topr.effective_proportion, p, 0, "p") for p in (0, 1.0, math.nan, double(0.5, 2))],
        *[(topr.baseline_for_proportion, p, 0.5, "p") for p in (0, 1.0, math.nan, double(0.5, 2))],
        *[(topr.effective_proportion, 0.5, c, "c") for c in (1.1, -1.1, math.nan)],
        *[(topr.baseline_for_proportion, 0.5, p, "p_tilde") for p in (1.1, -0.1, math.nan)],
    ],
)
def test_a_value_outside_its_range_is_named(function, p, other, named):
    with pytest.raises(ValueError, match=f"^{named} = "):
        function(p, other)
