"""The head by slices of the vocabulary against log-softmax of whole logits: values, gradients, training, two ranks."""

import pytest
import ranks
import torch
from helpers import VOCABULARY, random_examples, tiny_model
from transformers import GemmaConfig, GemmaForCausalLM

from pipeline.models import chunked_head as head
from pipeline.models import language_model
from pipeline.records import InputError


def whole(hidden, weight, tokens):
    return (hidden @ weight.T).log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)


@pytest.mark.parametrize("size", [1, 7, 31, 32, 100])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_slices_of_any_size_equal_the_whole(size, dtype, tolerance, monkeypatch):
    monkeypatch.setattr(head, "SLICE", size)
    torch.manual_seed(0)
    hidden, weight = (3 * torch.randn(n, 5, dtype=torch.float64) for n in (9, 32))
    tokens, factors = torch.randint(32, (9,)), torch.randn(9, dtype=torch.float64)

    def found(function, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight)]
        logp = function(*leaves, tokens)
        return [logp.detach(), *torch.autograd.grad((factors.to(dtype) * logp).sum(), leaves)]

    for sliced, exact in zip(found(head.selected_logprobs, dtype), found(whole, torch.float64), strict=True):
        assert sliced.dtype == dtype
        assert (sliced - exact).norm() < tolerance * exact.norm()


def test_in_bfloat16_logits_and_their_sum_are_float32(monkeypatch):
    monkeypatch.setattr(head, "SLICE", 100)
    torch.manual_seed(0)
    hidden, weight = torch.randn(4, 8).bfloat16(), torch.randn(1000, 8).bfloat16()
    tokens = torch.tensor([0, 99, 100, 999])
    exact = whole(hidden.double(), weight.double(), tokens)
    found = head.selected_logprobs(hidden, weight, tokens)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("per_row", [1, 3])
def test_a_model_s_log_probabilities_are_those_of_its_own_head(per_row, monkeypatch):
    monkeypatch.setattr(head, "SLICE", VOCABULARY // 3)
    model, examples = tiny_model(), random_examples(prompts=2, per_prompt=3)
    batch = language_model.collate([examples[i : i + per_row] for i in range(0, 6, per_row)])
    factors = torch.linspace(-1, 1, 6, dtype=torch.float64)
    found = []
    for logprobs in (language_model.token_logprobs, head.token_logprobs):
        logp = logprobs(model, batch).sum(-1)
        gradients = torch.autograd.grad((factors * logp).sum(), list(model.parameters()))
        found.append((logp.detach(), torch.cat([gradient.flatten() for gradient in gradients])))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-9, atol=1e-9)
    assert (found[1][1] - found[0][1]).norm() < 1e-6 * found[0][1].norm()
    ids = torch.tensor([[1, 2]])
    of_tokens = [module.token_logprobs(model, batch) for module in (language_model, head)]
    torch.testing.assert_close(*of_tokens, rtol=1e-9, atol=1e-9)
    assert model(ids).logits.shape == (1, 2, VOCABULARY), "the head is back"


def sliced_logprobs(model, batch):
    return head.token_logprobs(model, batch).sum(-1)


@pytest.mark.slow
@pytest.mark.parametrize("per_row", [1, 2])
def test_two_ranks_train_as_one_process_with_the_whole_head(per_row, tmp_path):
    grouped = list(zip(*[iter(random_examples(5, 2))] * per_row, strict=True))
    expected = ranks.epoch(grouped, 4, 2, "adamw")
    found = ranks.on_two_ranks(ranks.epoch, tmp_path, grouped, 4, 2, "adamw", None, sliced_logprobs)
    for (one, other), name in zip(zip(found[1:], expected[1:], strict=True), ("gradients", "weights"), strict=True):
        assert (one - other).norm() < 1e-6 * other.norm(), name


def test_a_model_that_does_more_with_its_logits_is_refused():
    config = GemmaConfig(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=8
    )
    batch = language_model.collate([random_examples(1, 1)])
    with pytest.raises(InputError, match=r"--sliced-head: is for llama.*this model is a gemma"):
        head.token_logprobs(GemmaForCausalLM(config), batch)
