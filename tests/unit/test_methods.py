"""PPO and DPO against their formulas, finite differences and autograd; METHODS against Table 1."""

import math

import pytest
import torch

from topr import PRESETS
from toprlib.methods import METHODS, dpo_loss, ppo_loss

LENGTHS = (3, 1, 4, 2)
LOG_RATIOS = (0.5, -0.1, -0.6, 0.1)  # of whole completions
PPO_REWARDS = (1.0, -0.5, -2.0, 0.25)
DPO_REWARDS = (1.0, -0.5, 2.0, 2.0)  # the rewards of a pair may be equal
# Equation 6 by hand, eps = 0.2: R > 0 is clipped above 1.2, R < 0 below 0.8; over the length
PPO_TERMS = (
    1.2 * 1.0 / 3,
    math.exp(-0.1) * -0.5 / 1,
    0.8 * -2.0 / 4,
    math.exp(0.1) * 0.25 / 2,
)


def inputs(rewards, log_ratios=LOG_RATIOS, lengths=LENGTHS):
    """token_logp, token_logmu, reward, mask of completions with these log-ratios, in float64.

    Each log-ratio is spread unevenly over the tokens, log mu is random, and padding is NaN.
    """
    generator = torch.Generator().manual_seed(0)
    size = (len(lengths), max(lengths))
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]  # (B, T)
    token_logmu = -torch.rand(size, generator=generator, dtype=torch.float64)
    parts = torch.rand(size, generator=generator, dtype=torch.float64) * mask
    parts = parts / parts.sum(1, keepdim=True)  # sums to 1 over the tokens
    token_logp = token_logmu + parts * torch.tensor(log_ratios, dtype=torch.float64)[:, None]
    token_logp = torch.where(mask, token_logp, math.nan).requires_grad_()
    token_logmu = torch.where(mask, token_logmu, math.nan)
    return token_logp, token_logmu, torch.tensor(rewards, dtype=torch.float64), mask.double()


def with_fillers(arguments, count):
    """The same completions and, after them, the first ones again with reward 0."""
    token_logp, token_logmu, reward, mask = arguments
    token_logp = torch.cat([token_logp, token_logp[:count]]).detach().requires_grad_()
    token_logmu = torch.cat([token_logmu, token_logmu[:count]])
    reward = torch.cat([reward, torch.zeros(count, dtype=reward.dtype)])
    return token_logp, token_logmu, reward, torch.cat([mask, mask[:count]])


def gradient(loss, arguments, **options):
    """The gradient of a loss on token_logp, (B, T), 0 on padding."""
    [grad] = torch.autograd.grad(loss(*arguments, **options), arguments[0])
    return grad


def finite_differences(loss, arguments, step=1e-6, **options):
    token_logp, *others = arguments
    token_logp = token_logp.detach()
    grad = torch.zeros_like(token_logp)
    for row, column in others[-1].nonzero().tolist():
        values = []
        for sign in (1, -1):
            moved = token_logp.clone()
            moved[row, column] += sign * step
            values.append(loss(moved, *others, **options))
        grad[row, column] = (values[0] - values[1]) / (2 * step)
    return grad


# ---- PPO -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("denominator", [None, 10])
def test_ppo_is_equation_6(denominator):
    actual = ppo_loss(*inputs(PPO_REWARDS), denominator=denominator)
    assert actual.item() == pytest.approx(-sum(PPO_TERMS) / (denominator or 4))


@pytest.mark.parametrize("eps", [0.0, 0.3, 1.0])
def test_ppo_is_the_smaller_of_two_objectives(eps):
    """Over ratios from exp(-3) to exp(3), in the form in which PPO is usually written."""
    log_ratios = torch.linspace(-3, 3, 31).tolist()
    for reward in (-1.5, 0.0, 0.5):
        expected = 0
        for log_ratio in log_ratios:
            ratio = math.exp(log_ratio)
            clipped = min(max(ratio, 1 - eps), 1 + eps)
            expected -= min(ratio * reward, clipped * reward) / 31
        arguments = inputs([reward] * 31, log_ratios, [1] * 31)
        assert ppo_loss(*arguments, eps=eps).item() == pytest.approx(expected)


def test_the_gradient_of_ppo_is_that_of_finite_differences():
    arguments = inputs(PPO_REWARDS)
    actual = gradient(ppo_loss, arguments, denominator=3)
    expected = finite_differences(ppo_loss, arguments, denominator=3)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-9)


def test_ppo_has_no_gradient_beyond_the_clip_on_the_improving_side():
    actual = gradient(ppo_loss, inputs([1.0, 1.0, -1.0, -1.0], [0.3, -0.3, -0.3, 0.3], [1] * 4))
    expected = [0, -math.exp(-0.3) / 4, 0, math.exp(0.3) / 4]
    assert actual[:, 0].tolist() == pytest.approx(expected)


def test_ppo_is_finite_where_the_ratio_overflows():
    arguments = inputs([1.0, 0.0, -1.0], [2000.0, 2000.0, -2000.0], [1, 2, 1])
    assert ppo_loss(*arguments).item() == pytest.approx(-(1.2 - 0.8) / 3)
    assert gradient(ppo_loss, arguments).eq(0).all()


def test_completions_with_reward_0_do_not_change_ppo():
    arguments = inputs(PPO_REWARDS)
    filled = with_fillers(arguments, count=3)
    assert ppo_loss(*filled, denominator=4) == ppo_loss(*arguments, denominator=4)
    actual = gradient(ppo_loss, filled, denominator=4)
    assert actual[4:].eq(0).all()
    assert actual[:4].equal(gradient(ppo_loss, arguments, denominator=4))


@pytest.mark.parametrize("eps", [-0.1, 1.5, math.nan])
def test_an_eps_out_of_range_is_refused(eps):
    with pytest.raises(ValueError, match="eps"):
        ppo_loss(*inputs(PPO_REWARDS), eps=eps)


# ---- DPO -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("beta", [0.1, 2.0])
@pytest.mark.parametrize(("denominator", "pairs"), [(None, 2), (10, 5)])
def test_dpo_is_its_formula(beta, denominator, pairs):
    """- log sigmoid(x) = log(1 + exp(-x)); a denominator counts completions, two for a pair."""
    margins = [beta * (0.5 - -0.1), beta * (-0.6 - 0.1)]
    expected = sum(math.log1p(math.exp(-margin)) for margin in margins) / pairs
    actual = dpo_loss(*inputs(DPO_REWARDS), beta=beta, denominator=denominator)
    assert actual.item() == pytest.approx(expected)


def test_the_gradient_of_dpo_is_its_closed_form():
    """beta sigmoid(-margin) on each token of the preferred one, the opposite on the other's."""
    arguments = inputs(DPO_REWARDS)
    actual = gradient(dpo_loss, arguments, beta=0.4)
    mask = arguments[-1]
    for pair, margin in enumerate([0.4 * 0.6, 0.4 * -0.7]):
        push = 0.4 / (1 + math.exp(margin)) / 2
        torch.testing.assert_close(actual[2 * pair], -push * mask[2 * pair])
        torch.testing.assert_close(actual[2 * pair + 1], push * mask[2 * pair + 1])


def test_the_gradient_of_dpo_is_that_of_finite_differences():
    arguments = inputs(DPO_REWARDS)
    expected = finite_differences(dpo_loss, arguments, denominator=6)
    actual = gradient(dpo_loss, arguments, denominator=6)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-9)


def test_a_pair_with_rewards_0_does_not_change_dpo():
    arguments = inputs(DPO_REWARDS)
    filled = with_fillers(arguments, count=2)
    assert dpo_loss(*filled, denominator=4) == dpo_loss(*arguments, denominator=4)
    actual = gradient(dpo_loss, filled, denominator=4)
    assert actual[4:].eq(0).all()
    assert actual[:4].equal(gradient(dpo_loss, arguments, denominator=4))


@pytest.mark.parametrize("rewards", [(0.0, -1.0), (1.0, 0.0)])
def test_a_pair_with_one_reward_of_0_is_no_filler(rewards):
    actual = dpo_loss(*inputs(rewards, [0.5, -0.5], [1, 2]), beta=1.0)
    assert actual.item() == pytest.approx(math.log1p(math.exp(-1.0)))


@pytest.mark.parametrize("rewards", [(-1.0, 1.0, 1.0, -1.0), (1.0, -1.0, 0.0, 0.5)])
def test_a_pair_in_the_wrong_order_is_refused(rewards):
    with pytest.raises(ValueError, match="reward"):
        dpo_loss(*inputs(rewards))


def test_half_a_pair_is_refused():
    with pytest.raises(ValueError, match="3"):
        dpo_loss(*inputs((1.0, -1.0, 1.0), LOG_RATIOS[:3], LENGTHS[:3]))


# ---- the table of methods ------------------------------------------------------------------------
# Table 1: the bounds a+, b+, a-, b- of the importance ratio
TABLE_1 = {
    "topr": (1, 1, 0, 1),
    "tis": (0, 1, 0, 1),
    "sft": (1, 1, 0, 0),
    "reinforce": (1, 1, 1, 1),
    "off_policy": (0, math.inf, 0, math.inf),
}


@pytest.mark.parametrize("name", TABLE_1)
def test_the_loss_of_a_method_has_the_bounds_of_table_1(name):
    arguments = inputs(PPO_REWARDS)
    expected = torch.zeros_like(arguments[0])
    for row, reward in enumerate(PPO_REWARDS):
        a, b = TABLE_1[name][:2] if reward >= 0 else TABLE_1[name][2:]
        weight = min(max(math.exp(LOG_RATIOS[row]), a), b)
        expected[row] = -weight * reward / LENGTHS[row] / 7 * arguments[-1][row]
    actual = gradient(METHODS[name].loss, arguments, denominator=7)
    torch.testing.assert_close(actual, expected)
    assert METHODS[name].limits == PRESETS[name]


def test_ppo_and_dpo_have_no_importance_weights_and_only_dpo_needs_pairs():
    assert [name for name, method in METHODS.items() if method.limits is None] == ["ppo", "dpo"]
    assert [name for name, method in METHODS.items() if method.uses_pairs] == ["dpo"]
