"""log pi of a completion's tokens: by one unpadded pass for each, whatever is in the batch."""

import pytest
import torch
from unit_helpers import (
    VOCABULARY,
    flat_gradients,
    plain_batch,
    random_examples,
    tiny_gpt2,
    tiny_llama,
    unpadded_logprobs,
)

import topr
from toprlib.dataset import collate

MODELS = [tiny_llama, tiny_gpt2]  # with relative and with absolute positions


def expected_logprobs(model, examples, width):
    expected = torch.zeros(len(examples), width, dtype=torch.float64)
    for row, example in enumerate(examples):
        values = unpadded_logprobs(model, example)
        expected[row, : len(values)] = values.detach()
    return expected


@pytest.mark.parametrize("make_model", MODELS)
@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize("filler", [0, VOCABULARY - 1])
def test_padded_rows_equal_unpadded_ones(make_model, extra, filler):
    model = make_model()
    examples = random_examples(prompts=4, per_prompt=2)
    batch = plain_batch(examples, filler, extra)
    actual = topr.token_logprobs(model, batch)
    expected = expected_logprobs(model, examples, batch.mask.shape[1])
    # Llama's RMSNorm computes in float32, whatever the weights are.
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    assert (actual[batch.mask == 0] == 0).all()


@pytest.mark.parametrize("make_model", MODELS)
def test_gradients_of_collated_rows_equal_unpadded_ones(make_model):
    examples = random_examples(prompts=3, per_prompt=5)
    factors = torch.linspace(-1, 1, len(examples), dtype=torch.float64)

    model = make_model()
    for factor, example in zip(factors, examples, strict=True):
        (factor * unpadded_logprobs(model, example).sum()).backward()
    expected = flat_gradients(model)

    model = make_model()
    logp = topr.token_logprobs(model, collate(examples)).sum(1)
    (factors * logp).sum().backward()
    actual = flat_gradients(model)
    assert (actual - expected).norm() < 2e-6 * expected.norm()


def test_logits_of_the_prompt_are_not_computed():
    """Only the prompt's last token predicts a token of the completion."""
    model = tiny_llama()
    widths = []
    model.lm_head.register_forward_hook(lambda _, inputs, logits: widths.append(logits.shape[1]))
    examples = random_examples(prompts=3, per_prompt=2)
    token_logp = topr.token_logprobs(model, collate(examples))
    longest = max(len(example.completion_ids) for example in examples)
    assert token_logp.shape == (6, longest)
    assert widths == [longest + 1]


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
