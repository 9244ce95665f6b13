"""log pi of completions: by hand from the model's own log-softmax, whatever surrounds them in a batch."""

import pytest
import torch
from helpers import plain_batch, random_examples, tiny_model

import topr
from pipeline.models.language_model import collate


def by_hand(model, example):
    """One unpadded forward pass; the log-softmax of each completion token at the position before it."""
    ids = torch.tensor([example.prompt_ids + example.completion_ids])
    token_logp = model(ids).logits[0].log_softmax(-1)
    start = len(example.prompt_ids)
    return sum(token_logp[start + i - 1, token] for i, token in enumerate(example.completion_ids))


@pytest.mark.parametrize("padding_side", ["left", "right"])
def test_plain_rows_equal_one_pass_per_completion(padding_side):
    model, examples = tiny_model(), random_examples(prompts=4, per_prompt=2)
    found = topr.sequence_logprobs(model, plain_batch(examples, padding_side))
    torch.testing.assert_close(
        found, torch.stack([by_hand(model, e) for e in examples]), rtol=1e-12, atol=1e-12
    )


def test_batches_of_the_pipeline_equal_plain_rows_in_values_and_gradients():
    model, examples = tiny_model(), random_examples(prompts=3, per_prompt=5)
    weights = torch.linspace(-1, 1, len(examples), dtype=torch.float64)

    def values_and_gradients(batch):
        logp = topr.sequence_logprobs(model, batch)
        gradients = torch.autograd.grad((weights * logp).sum(), list(model.parameters()))
        return logp.detach(), torch.cat([gradient.flatten() for gradient in gradients])

    plain, laid_out = (
        values_and_gradients(plain_batch(examples)),
        values_and_gradients(collate(examples)),
    )
    # The model's own RMSNorm computes in float32, whatever the parameters are.
    torch.testing.assert_close(laid_out[0], plain[0], rtol=1e-6, atol=1e-6)
    assert (laid_out[1] - plain[1]).norm() < 2e-6 * plain[1].norm()


def test_no_logits_of_the_prompt_are_computed_but_the_last():
    model, examples, widths = tiny_model(), random_examples(prompts=3, per_prompt=2), []
    model.lm_head.register_forward_hook(lambda _, inputs, logits: widths.append(logits.shape[1]))
    token_logp = topr.token_logprobs(model, collate(examples))
    longest = max(len(example.completion_ids) for example in examples)
    assert (token_logp.shape, widths) == ((6, longest), [longest + 1])
    for example, row in zip(examples, token_logp, strict=True):
        torch.testing.assert_close(
            row[: len(example.completion_ids)].sum(), by_hand(model, example)
        )
        assert (row[len(example.completion_ids) :] == 0).all()


def test_rows_that_nothing_is_learnt_from_are_computed():
    batch = collate(random_examples(prompts=2, per_prompt=1), is_learnt=False)
    assert {len(column) for column in (batch.logmu, batch.reward, batch.length)} == {0}
    assert topr.sequence_logprobs(tiny_model(), batch).shape == (2,)
