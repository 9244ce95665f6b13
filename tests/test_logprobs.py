"""log pi of completions: by hand from the model's own log-softmax, plain rows, rows that share a prompt."""

import pytest
import torch
from helpers import VOCABULARY, plain_batch, random_examples, shared_logprobs, tiny_model

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
    torch.testing.assert_close(found, torch.stack([by_hand(model, e) for e in examples]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("per_row", "laid_out"), [(1, None), (1, True), (2, None), (3, None), (5, None)])
def test_shared_rows_equal_plain_rows_in_values_and_gradients(per_row, laid_out):
    model, examples = tiny_model(), random_examples(prompts=3, per_prompt=5)
    grouped = [examples[p : p + 5][i : i + per_row] for p in (0, 5, 10) for i in range(0, 5, per_row)]
    weights = torch.linspace(-1, 1, len(examples), dtype=torch.float64)

    def values_and_gradients(logp):
        gradients = torch.autograd.grad((weights * logp).sum(), list(model.parameters()))
        return logp.detach(), torch.cat([gradient.flatten() for gradient in gradients])

    plain = values_and_gradients(topr.sequence_logprobs(model, plain_batch(examples)))
    batch = collate(grouped, shares=laid_out)
    shared = values_and_gradients(shared_logprobs(model, batch))
    # The model's own RMSNorm computes in float32, whatever the parameters are.
    torch.testing.assert_close(shared[0], plain[0], rtol=1e-6, atol=1e-6)
    assert (shared[1] - plain[1]).norm() < 2e-6 * plain[1].norm()
    assert batch.shares == (laid_out or per_row > 1)


def test_shared_rows_do_not_depend_on_the_attention_kernel():
    model, examples = tiny_model(), random_examples(prompts=1, per_prompt=4)
    model.set_attn_implementation("eager")
    expected = torch.stack([by_hand(model, e) for e in examples])
    torch.testing.assert_close(shared_logprobs(model, collate([examples])), expected, rtol=1e-6, atol=1e-6)


def test_v11_what_padding_holds_changes_no_bit():
    model, examples = tiny_model(), random_examples(prompts=4, per_prompt=1)
    found = [topr.sequence_logprobs(model, plain_batch(examples, filler=filler)) for filler in (0, VOCABULARY - 1)]
    assert torch.equal(*found)
