"""one_file.py: its rows are what was sampled, its loss is that of topr.py, and it learns."""

import re
import runpy
import sys

import pytest
import torch
from helpers import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationMixin

import one_file
import topr


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
        assert completion[-1] == tokenizer.eos_token_id or len(completion) == 48
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


class Stop(Exception):
    pass


def test_it_trains_with_the_gradient_of_topr_from_mu(monkeypatch):
    """In each of the four steps of a round and the first of the next; completions are short."""
    generate = GenerationMixin.generate
    backward = torch.Tensor.backward
    steps = []

    def generate_few(model, **options):
        return generate(model, **options | {"max_new_tokens": 3})

    def check_step(loss):
        names = sys._getframe(1).f_globals  # of the program
        assert all(weight.grad is None for weight in names["model"].parameters())
        batch = names["batch"]
        token_logp = names["token_logp"]
        inputs = (names["token_logmu"][batch], names["reward"][batch], names["rows"][2][batch])
        if len(steps) in (0, 4):  # the first of a round: pi = mu
            torch.testing.assert_close(inputs[0], token_logp.detach(), rtol=0, atol=1e-4)
        expected = topr.topr_loss(token_logp, *inputs)
        actual = torch.autograd.grad(loss, token_logp, retain_graph=True)
        gradient = torch.autograd.grad(expected, token_logp)
        torch.testing.assert_close(actual, gradient, rtol=1e-5, atol=1e-9)
        steps.append(loss)
        if len(steps) == 5:
            raise Stop
        backward(loss)

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["one_file.py"])
    monkeypatch.setattr(GenerationMixin, "generate", generate_few)
    monkeypatch.setattr(torch.Tensor, "backward", check_step)
    with pytest.raises(Stop):
        runpy.run_path("one_file.py", run_name="__main__")


@pytest.mark.slow
def test_it_learns(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["one_file.py", "--out", str(tmp_path / "model")])
    runpy.run_path("one_file.py", run_name="__main__")
    shares = re.findall(r"on other questions (\d+)%", capsys.readouterr().out)
    assert int(shares[0]) < 25 < 65 < int(shares[-1])
    assert (tmp_path / "model" / "model.safetensors").exists()
