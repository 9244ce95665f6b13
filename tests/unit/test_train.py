"""The training loop: its gradient, what it logs, and where it stops."""

import math
from functools import partial

import pytest
import torch
from unit_helpers import (
    flat_gradients,
    flat_weights,
    plain_batch,
    random_examples,
    tiny_llama,
    unpadded_logprobs,
    with_logmu_of,
)

import topr

LR = 1e-2
NO_CLIPPING = 1e9


def sgd(model, lr=LR):
    return torch.optim.SGD(model.parameters(), lr=lr)


def train(model, *micro_batches, steps=1, lr=LR, **options):
    """StepStats of `steps` equal steps of one process."""
    completions = sum(len(batch.reward) for batch in micro_batches)
    return list(
        topr.train(model, sgd(model, lr), [(micro_batches, completions)] * steps, **options)
    )


def clipped_ratio(log_ratio, reward):
    """TOPR's weight in Python numbers."""
    return 1.0 if reward >= 0 else min(math.exp(log_ratio), 1.0)


# ---- the step ------------------------------------------------------------------------------------
def test_step_is_that_of_the_closed_form():
    """The loss from unpadded passes and its gradient by autograd, then w - lr * gradient."""
    examples = random_examples(prompts=3, per_prompt=3)
    model = tiny_llama()
    loss = 0.0
    log_ratios = []
    for example in examples:
        logp = unpadded_logprobs(model, example).sum()
        log_ratios.append(logp.item() - sum(example.token_logmu))
        weight = clipped_ratio(log_ratios[-1], example.reward)
        loss = loss - weight * example.reward * logp / len(example.completion_ids) / len(examples)
    loss.backward()
    gradient = flat_gradients(model)
    expected = flat_weights(model) - LR * gradient

    model = tiny_llama()
    [stats] = train(model, plain_batch(examples), max_grad_norm=NO_CLIPPING)
    assert stats.log_ratio.tolist() == pytest.approx(log_ratios, rel=1e-5, abs=1e-5)
    assert stats.loss == pytest.approx(loss.item(), rel=1e-6)
    assert stats.grad_norm == pytest.approx(gradient.norm().item(), rel=1e-6)
    torch.testing.assert_close(flat_weights(model), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("size", [1, 4])
def test_micro_batches_leave_the_step_alone(size):
    examples = random_examples(prompts=3, per_prompt=3)
    model = tiny_llama()
    [expected] = train(model, plain_batch(examples))
    parts = [plain_batch(examples[i : i + size]) for i in range(0, len(examples), size)]
    other = tiny_llama()
    [actual] = train(other, *parts)
    assert actual.loss == pytest.approx(expected.loss, rel=1e-6)
    assert actual.grad_norm == pytest.approx(expected.grad_norm, rel=1e-6)
    for name in ("log_ratio", "reward", "weight"):
        torch.testing.assert_close(
            getattr(actual, name), getattr(expected, name), rtol=0, atol=1e-5
        )
    torch.testing.assert_close(flat_weights(other), flat_weights(model), rtol=1e-6, atol=1e-7)


def test_gradient_is_clipped_to_its_norm():
    model = tiny_llama()
    before = flat_weights(model)
    batch = plain_batch(random_examples(prompts=3, per_prompt=3))
    [stats] = train(model, batch, max_grad_norm=1e-3)
    assert stats.grad_norm > 1e-2
    step = (flat_weights(model) - before).norm().item()
    assert step == pytest.approx(LR * 1e-3, rel=1e-4)


def test_a_step_begins_without_the_gradients_of_the_step_before():
    """The memory of the longest micro-batch is counted without them."""
    model = tiny_llama()
    has_gradient = []
    weight = model.get_output_embeddings().weight
    model.register_forward_pre_hook(lambda *_: has_gradient.append(weight.grad is not None))
    batch = plain_batch(random_examples(prompts=1, per_prompt=2))
    train(model, batch, batch, steps=2)
    assert has_gradient == [False, True, False, True]


def test_reward_of_zero_teaches_nothing():
    model = tiny_llama()
    before = flat_weights(model)
    batch = plain_batch(random_examples(prompts=2, per_prompt=2))
    [stats] = train(model, batch._replace(reward=torch.zeros(4)))
    assert (stats.loss, stats.grad_norm) == (0, 0)
    assert torch.equal(flat_weights(model), before)


# ---- what it yields ------------------------------------------------------------------------------
def test_steps_are_made_one_by_one():
    model = tiny_llama()
    batch = plain_batch(random_examples(prompts=2, per_prompt=2))
    seen = []

    def steps():
        for number in range(2):
            seen.append(number)
            yield [batch], 4

    training = topr.train(model, sgd(model), steps())
    start = flat_weights(model)
    assert seen == []
    next(training)
    after_first = flat_weights(model)
    assert seen == [0]
    assert not torch.equal(after_first, start)
    next(training)
    assert seen == [0, 1]
    assert not torch.equal(flat_weights(model), after_first)
    with pytest.raises(StopIteration):
        next(training)


@pytest.mark.parametrize("limits", [topr.PRESETS["topr"], topr.Limits(0.9, 1.1, 0.8, 1.2)])
def test_logged_weights_are_the_loss_s_own(limits):
    """The gradient of a loss in log pi is -weight * reward / length / completions."""
    examples = random_examples(prompts=3, per_prompt=3)
    batch = plain_batch(examples)
    model = tiny_llama()
    gradients = []

    def loss(token_logp, *others, denominator):
        token_logp.register_hook(gradients.append)
        return topr.topr_loss(token_logp, *others, limits, denominator)

    [stats] = train(model, batch, loss=loss, limits=limits)
    of_first_token = gradients[0][:, 0]
    expected = -of_first_token * batch.mask.sum(1) * len(examples) / batch.reward
    torch.testing.assert_close(stats.weight, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(stats.reward, batch.reward)


def test_first_step_is_at_mu_and_the_next_ones_are_not():
    model = tiny_llama()
    batch = with_logmu_of(model, plain_batch(random_examples(prompts=3, per_prompt=3)))
    first, second = train(model, batch, steps=2, lr=0.1)
    assert first.log_ratio.tolist() == [0.0] * 9
    assert first.weight.tolist() == [1.0] * 9
    assert (second.log_ratio != 0).all()
    assert (second.weight[batch.reward < 0] < 1).any()


# ---- what is not finite --------------------------------------------------------------------------
def infinite_loss(token_logp, *_, denominator):
    return token_logp.sum() + math.inf  # its gradient is finite


def infinite_gradient(token_logp, *_, denominator):
    return (token_logp - token_logp.detach()).abs().sqrt().sum()  # the loss is 0


@pytest.mark.parametrize("loss", [infinite_loss, infinite_gradient])
def test_training_stops_before_a_bad_update(loss):
    model = tiny_llama()
    before = flat_weights(model)
    batch = plain_batch(random_examples(prompts=2, per_prompt=2))
    with pytest.raises(FloatingPointError):
        train(model, batch, loss=loss)
    assert torch.equal(flat_weights(model), before)


def test_training_stops_for_the_second_micro_batch():
    model = tiny_llama()
    before = flat_weights(model)
    good = plain_batch(random_examples(prompts=2, per_prompt=2))
    bad = good._replace(token_logmu=torch.full_like(good.token_logmu, math.nan))
    with pytest.raises(FloatingPointError):
        train(model, good, bad, loss=partial(topr.topr_loss, limits=topr.PRESETS["tis"]))
    assert torch.equal(flat_weights(model), before)
