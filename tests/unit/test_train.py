"""log pi of a completion's tokens, and the training loop: its gradient, and where it stops."""

import math

import pytest
import torch
from helpers import (
    VOCABULARY,
    flat_gradients,
    flat_weights,
    plain_batch,
    random_examples,
    tiny_llama,
    unpadded_logprobs,
)
from transformers import GPT2Config, GPT2LMHeadModel

import topr
from toprlib.dataset import collate

LR = 1e-2
NO_CLIPPING = 1e9


def train(model, *micro_batches, **options):
    """StepStats of one step of one process."""
    sgd = torch.optim.SGD(model.parameters(), lr=LR)
    completions = sum(len(batch.reward) for batch in micro_batches)
    [stats] = topr.train(model, sgd, [(micro_batches, completions)], **options)
    return stats


# ---- log pi --------------------------------------------------------------------------------------
def tiny_gpt2(seed=0):
    """An untrained GPT-2: its positions are absolute, so a shift of a row changes its logits."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=16, n_layer=2, n_head=2, initializer_range=0.5
    )
    return GPT2LMHeadModel(config).double().eval()


MODELS = [tiny_llama, tiny_gpt2]  # with relative and with absolute positions


@pytest.mark.parametrize("make_model", MODELS)
@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize("filler", [0, VOCABULARY - 1])
def test_padded_rows_equal_unpadded_ones(make_model, extra, filler):
    model = make_model()
    examples = random_examples(prompts=4, per_prompt=2)
    batch = plain_batch(examples, filler, extra)
    actual = topr.token_logprobs(model, batch)
    expected = torch.cat([unpadded_logprobs(model, example) for example in examples])
    # Llama's RMSNorm computes in float32, whatever the weights are.
    torch.testing.assert_close(actual[batch.mask > 0], expected, rtol=1e-6, atol=1e-6)
    assert (actual[batch.mask == 0] == 0).all()


def test_logits_of_the_prompt_are_not_computed():
    """Only the last token of the shortest prompt, and what comes after it, predicts completions."""
    model = tiny_llama()
    widths = []
    model.lm_head.register_forward_hook(lambda _, inputs, logits: widths.append(logits.shape[1]))
    examples = random_examples(prompts=3, per_prompt=2)
    token_logp = topr.token_logprobs(model, collate(examples))
    longest = max(len(example.prompt_ids + example.completion_ids) for example in examples)
    width = longest - min(len(example.prompt_ids) for example in examples)
    assert token_logp.shape == (6, width)
    assert widths == [width + 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logprobs_are_at_least_float32(dtype):
    """bfloat16 logits are exact numbers: their log-softmax is that of float32."""
    model = tiny_llama(dtype=dtype)
    logits = []
    model.lm_head.register_forward_hook(lambda _, inputs, output: logits.append(output))
    batch = plain_batch(random_examples(prompts=2, per_prompt=2))
    actual = topr.token_logprobs(model, batch)
    assert actual.dtype == torch.float32
    tokens = batch.input_ids[:, -batch.mask.shape[1] :, None]
    exact = logits[0][:, :-1].double().log_softmax(-1).gather(-1, tokens).squeeze(-1)
    exact = torch.where(batch.mask > 0, exact, 0.0)
    torch.testing.assert_close(actual.double(), exact, rtol=1e-6, atol=1e-5)


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
        weight = 1.0 if example.reward >= 0 else min(math.exp(log_ratios[-1]), 1.0)
        loss = loss - weight * example.reward * logp / len(example.completion_ids) / len(examples)
    loss.backward()
    gradient = flat_gradients(model)
    expected = flat_weights(model) - LR * gradient

    model = tiny_llama()
    stats = train(model, plain_batch(examples), max_grad_norm=NO_CLIPPING)
    assert stats.log_ratio.tolist() == pytest.approx(log_ratios, rel=1e-5, abs=1e-5)
    assert stats.loss == pytest.approx(loss.item(), rel=1e-6)
    assert stats.grad_norm == pytest.approx(gradient.norm().item(), rel=1e-6)
    torch.testing.assert_close(flat_weights(model), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("size", [1, 4])
def test_micro_batches_leave_the_step_alone(size):
    examples = random_examples(prompts=3, per_prompt=3)
    model = tiny_llama()
    expected = train(model, plain_batch(examples))
    parts = [plain_batch(examples[i : i + size]) for i in range(0, len(examples), size)]
    other = tiny_llama()
    actual = train(other, *parts)
    assert actual.loss == pytest.approx(expected.loss, rel=1e-6)
    assert actual.grad_norm == pytest.approx(expected.grad_norm, rel=1e-6)
    for name in ("log_ratio", "reward"):
        torch.testing.assert_close(
            getattr(actual, name), getattr(expected, name), rtol=0, atol=1e-5
        )
    torch.testing.assert_close(flat_weights(other), flat_weights(model), rtol=1e-6, atol=1e-7)


def test_gradient_is_clipped_to_its_norm():
    model = tiny_llama()
    before = flat_weights(model)
    batch = plain_batch(random_examples(prompts=3, per_prompt=3))
    stats = train(model, batch, max_grad_norm=1e-3)
    assert stats.grad_norm > 1e-2
    step = (flat_weights(model) - before).norm().item()
    assert step == pytest.approx(LR * 1e-3, rel=1e-4)


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
