"""one_file.py: its rows are what was sampled, its loss is that of topr.py, and it learns."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import one_file
import topr

ROOT = Path(one_file.__file__).parent


def test_log_probabilities_are_those_of_each_row_alone():
    """The oracle computes each row without padding, in float64."""
    model = AutoModelForCausalLM.from_pretrained(ROOT / "tiny" / "base", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny" / "base")
    torch.manual_seed(0)
    questions = [one_file.QUESTIONS[0], f"Well: {one_file.QUESTIONS[1]}"]  # of two lengths
    texts, (ids, attention, mask) = one_file.sample(model, tokenizer, questions)
    with torch.no_grad():
        token_logp = one_file.token_logprobs(model, ids, attention, mask)
    for index, text in enumerate(texts):
        prompt = tokenizer(questions[index // one_file.N])["input_ids"]
        row = ids[index][attention[index].bool()]
        completion = row[len(prompt) :]
        assert row[: len(prompt)].tolist() == prompt
        assert tokenizer.decode(completion, skip_special_tokens=True) == text
        assert tokenizer.eos_token_id not in completion[:-1]
        assert completion[-1] == tokenizer.eos_token_id or len(completion) == 32
        with torch.no_grad():
            logp = model(row[None]).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
        expected = logp.gather(-1, completion[:, None])[:, 0]
        actual = token_logp[index, : len(completion)].double()
        assert torch.allclose(actual, expected, atol=1e-4)
        assert (token_logp[index, len(completion) :] == 0).all()


def test_loss_has_the_gradient_of_the_reference():
    generator = torch.Generator().manual_seed(0)
    token_logp, token_logmu = -torch.rand(2, 50, 6, generator=generator)
    reward = torch.randn(50, generator=generator)
    mask = (torch.arange(6) < torch.randint(1, 7, (50, 1), generator=generator)).long()
    gradients = []
    for loss in (one_file.topr_loss, topr.topr_loss):
        leaf = token_logp.clone().requires_grad_()
        gradients += torch.autograd.grad(loss(leaf, token_logmu, reward, mask), leaf)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=0)


@pytest.mark.slow
def test_it_learns_with_the_loss_of_topr(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["one_file.py", "--out", str(tmp_path / "model")])
    backward = torch.Tensor.backward
    losses = []

    def check_loss(loss):
        names = sys._getframe(1).f_globals  # of the program
        batch = names["batch"]
        token_logp = names["token_logp"]
        inputs = (names["token_logmu"][batch], names["reward"][batch], names["rows"][2][batch])
        if len(losses) % 4 == 0:  # the first step of a round: pi = mu
            torch.testing.assert_close(inputs[0], token_logp.detach(), rtol=0, atol=1e-4)
        expected = topr.topr_loss(token_logp, *inputs)
        actual = torch.autograd.grad(loss, token_logp, retain_graph=True)
        gradient = torch.autograd.grad(expected, token_logp)
        torch.testing.assert_close(actual, gradient, rtol=1e-5, atol=1e-9)
        losses.append(loss.item())
        assert losses[-1] == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
        backward(loss)

    monkeypatch.setattr(torch.Tensor, "backward", check_loss)
    runpy.run_path("one_file.py", run_name="__main__")
    assert len(losses) == 12
    assert len(set(losses)) == 12
    shares = re.findall(r"on other questions (\d+)%", capsys.readouterr().out)
    assert int(shares[0]) < 75 < 85 < int(shares[-1])
    assert (tmp_path / "model" / "model.safetensors").exists()
