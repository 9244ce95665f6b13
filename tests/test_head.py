"""The head by slices of the vocabulary against log-softmax of whole logits: values and gradients."""

import pytest
import torch
from helpers import VOCABULARY, random_examples, tiny_model
from transformers import GemmaConfig, GemmaForCausalLM

from pipeline.models import chunked_head as head
from pipeline.models import language_model
from pipeline.records import InputError


def whole(hidden, weight, tokens):
    return (hidden @ weight.T).log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)


@pytest.mark.parametrize("size", [7, 32, 100])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-6)]
)
def test_slices_of_any_size_equal_the_whole(size, dtype, tolerance, monkeypatch):
    """In bfloat16 logits and their sum are float32, and the gradients are rounded."""
    monkeypatch.setattr(head, "SLICE", size)
    torch.manual_seed(0)
    hidden, weight = (3 * torch.randn(n, 5).to(dtype) for n in (9, 32))
    tokens, factors = torch.randint(32, (9,)), torch.randn(9)

    def found(function, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight)]
        logp = function(*leaves, tokens)
        return [logp.detach(), *torch.autograd.grad((factors.to(logp.dtype) * logp).sum(), leaves)]

    (logp, *gradients), (exact, *others) = found(head.selected_logprobs, dtype), found(whole, torch.float64)
    assert logp.dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)
    assert (logp - exact).norm() < tolerance * exact.norm()
    for gradient, other in zip(gradients, others, strict=True):
        assert gradient.dtype == dtype
        assert (gradient - other).norm() < max(tolerance, torch.finfo(dtype).eps) * other.norm()


@pytest.mark.parametrize("per_row", [1, 3])
def test_a_model_s_log_probabilities_are_those_of_its_own_head(per_row, monkeypatch):
    monkeypatch.setattr(head, "SLICE", VOCABULARY // 3)
    model, examples = tiny_model(), random_examples(prompts=2, per_prompt=3)
    batch = language_model.collate([examples[i : i + per_row] for i in range(0, 6, per_row)])
    factors = torch.linspace(-1, 1, 6, dtype=torch.float64)
    found = []
    for module in (language_model, head):
        token_logp = module.token_logprobs(model, batch)
        gradients = torch.autograd.grad((factors * token_logp.sum(-1)).sum(), list(model.parameters()))
        found.append((token_logp.detach(), torch.cat([gradient.flatten() for gradient in gradients])))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-9, atol=1e-9)
    assert (found[1][1] - found[0][1]).norm() < 1e-6 * found[0][1].norm()
    assert model(torch.tensor([[1, 2]])).logits.shape == (1, 2, VOCABULARY), "the head is back"


def test_a_model_that_does_more_with_its_logits_is_refused():
    config = GemmaConfig(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=8
    )
    batch = language_model.collate([random_examples(1, 1)])
    with pytest.raises(InputError, match=r"--sliced-head: is for llama.*this model is a gemma"):
        head.token_logprobs(GemmaForCausalLM(config), batch)
