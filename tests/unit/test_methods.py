"""PPO and DPO against their formulas and finite differences; all losses at their limits."""

import math

import pytest
import torch
from helpers import double, flat_weights, plain_batch, random_examples, tiny_llama

import topr
from toprlib.methods import METHODS, dpo_loss, ppo_loss

LENGTHS = (3, 1, 4, 2)
LOG_RATIOS = (0.5, -0.1, -0.6, 0.1)  # of whole completions
PPO_REWARDS = (1.0, -0.5, -2.0, 0.25)
DPO_REWARDS = (1.0, -0.5, 2.0, 2.0)  # the rewards of a pair may be equal


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


@pytest.mark.parametrize(("loss", "rewards"), [(ppo_loss, PPO_REWARDS), (dpo_loss, DPO_REWARDS)])
def test_a_gradient_is_that_of_finite_differences(loss, rewards):
    """Padding is NaN, and has the gradient 0."""
    arguments = inputs(rewards)
    actual = gradient(loss, arguments, denominator=6)
    expected = finite_differences(loss, arguments, denominator=6)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("loss", "rewards"), [(ppo_loss, PPO_REWARDS), (dpo_loss, DPO_REWARDS)])
def test_completions_with_reward_0_change_nothing(loss, rewards):
    """After the others, the first two again with reward 0, for DPO a pair."""
    arguments = inputs(rewards)
    token_logp, token_logmu, reward, mask = arguments
    filled = (
        torch.cat([token_logp, token_logp[:2]]).detach().requires_grad_(),
        torch.cat([token_logmu, token_logmu[:2]]),
        torch.cat([reward, torch.zeros(2)]),
        torch.cat([mask, mask[:2]]),
    )
    assert loss(*filled, denominator=4) == loss(*arguments, denominator=4)
    actual = gradient(loss, filled, denominator=4)
    assert actual[4:].eq(0).all()
    assert actual[:4].equal(gradient(loss, arguments, denominator=4))


# ---- PPO -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("denominator", [None, 10])
def test_ppo_is_equation_6(denominator):
    """By hand, eps = 0.2: R > 0 is clipped above 1.2, R < 0 below 0.8; over the length."""
    terms = [1.2 * 1 / 3, math.exp(-0.1) * -0.5 / 1, 0.8 * -2 / 4, math.exp(0.1) * 0.25 / 2]
    actual = ppo_loss(*inputs(PPO_REWARDS), denominator=denominator)
    assert actual.item() == pytest.approx(-sum(terms) / (denominator or 4))


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


# ---- DPO -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("beta", [0.1, 2.0])
@pytest.mark.parametrize(("denominator", "pairs"), [(None, 2), (10, 5)])
def test_dpo_is_its_formula(beta, denominator, pairs):
    """- log sigmoid(x) = log(1 + exp(-x)); a denominator counts completions, two for a pair."""
    margins = [beta * (0.5 - -0.1), beta * (-0.6 - 0.1)]
    expected = sum(math.log1p(math.exp(-margin)) for margin in margins) / pairs
    actual = dpo_loss(*inputs(DPO_REWARDS), beta=beta, denominator=denominator)
    assert actual.item() == pytest.approx(expected)


@pytest.mark.parametrize("rewards", [(0.0, -1.0), (1.0, 0.0)])
def test_a_pair_with_one_reward_of_0_is_no_filler(rewards):
    actual = dpo_loss(*inputs(rewards, [0.5, -0.5], [1, 2]), beta=1.0)
    assert actual.item() == pytest.approx(math.log1p(math.exp(-1.0)))


@pytest.mark.parametrize("rewards", [(-1.0, 1.0, 1.0, -1.0), (1.0, -1.0, 0.0, 0.5)])
def test_pairs_in_the_wrong_order_are_refused(rewards):
    with pytest.raises(ValueError, match="pair"):
        dpo_loss(*inputs(rewards, LOG_RATIOS, LENGTHS))


# ---- the table of methods ------------------------------------------------------------------------
def test_ppo_and_dpo_have_no_importance_weights_and_only_dpo_needs_pairs():
    assert [name for name, method in METHODS.items() if method.limits is None] == ["ppo", "dpo"]
    assert [name for name, method in METHODS.items() if method.uses_pairs] == ["dpo"]


# ---- at their limits -----------------------------------------------------------------------------
# In a negative that has become probable, both take the ratio as it is (Equation 6, Table 1).
UNBOUNDED = ("off_policy", "ppo")


def four_completions(log_ratio=(0.0, 0.0, 0.0, 0.0)):
    """token_logp, token_logmu, reward, mask: positives at 0 and 2, two tokens each."""
    token_logmu = double([-7.0, -1.0], [-9.0, -2.0], [-4.0, -0.5], [-11.0, -3.0])
    token_logp = (token_logmu + double(log_ratio).T / 2).requires_grad_()
    return token_logp, token_logmu, double(1, -1, 1, -1), torch.ones(4, 2)


@pytest.mark.parametrize("size", [1e4, -1e4])
@pytest.mark.parametrize("name", METHODS)
def test_an_enormous_ratio_gives_no_nan(name, size):
    is_bounded = name not in UNBOUNDED
    arguments = four_completions([size, -size, -size, size] if is_bounded else [0, size, 0, 0])
    loss = METHODS[name].loss(*arguments)
    loss.backward()
    assert not loss.isnan()
    assert not arguments[0].grad.isnan().any()
    if is_bounded:
        assert loss.isfinite()
        assert arguments[0].grad.abs().max() <= 1


@pytest.mark.parametrize("name", METHODS)
def test_training_stops_before_a_weight_is_spoiled(name):
    """By a reward, a logit or log mu that is not finite."""
    batch = plain_batch(random_examples(prompts=2, per_prompt=2))
    good = batch._replace(reward=double(1, -1, 1, -1))
    for value in (math.nan, math.inf, -math.inf):
        cases = [(good, value), (good._replace(token_logmu=good.token_logmu * math.nan), 1.0)]
        if name != "dpo" or math.isnan(value):  # its rewards only say which one is preferred
            cases.append((good._replace(reward=double(value, -1, 1, -1)), 1.0))
        for case, weight in cases:
            model = tiny_llama()
            model.lm_head.weight.data[3, 3] = weight
            before = flat_weights(model)
            sgd = torch.optim.SGD(model.parameters(), lr=1.0)
            with pytest.raises((FloatingPointError, ValueError)):
                next(topr.train(model, sgd, [([case], 4)], METHODS[name].loss))
            after = flat_weights(model)
            torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("name", METHODS)
def test_a_wrong_shape_is_refused(name, place):
    for shape in ((), (2,), (4, 1), (4, 3, 1), (0, 3), (4, 0)):
        arguments = [torch.ones(4, 3), torch.ones(4, 3), torch.ones(4), torch.ones(4, 3)]
        arguments[place] = torch.ones(shape)
        with pytest.raises(ValueError, match="shapes"):
            METHODS[name].loss(*arguments)


@pytest.mark.parametrize("name", METHODS)
def test_an_empty_completion_and_a_reward_of_nan_are_refused(name):
    token_logp, token_logmu, reward, mask = four_completions()
    empty = mask.clone()
    empty[2] = 0
    with pytest.raises(ValueError, match="mask"):
        METHODS[name].loss(token_logp, token_logmu, reward, empty)
    with pytest.raises(ValueError, match="reward"):
        METHODS[name].loss(token_logp, token_logmu, reward * math.nan, mask)
    values = torch.ones(4, 0)
    with pytest.raises(ValueError, match="shapes"):
        METHODS[name].loss(values, values, torch.ones(4), values)
