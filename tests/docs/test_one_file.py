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


def test_rows_are_the_tokens_that_were_sampled():
    """The oracle computes each row alone, without padding, in float64."""
    model = AutoModelForCausalLM.from_pretrained(ROOT / "tiny" / "base", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny" / "base")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    torch.manual_seed(0)
    questions = [one_file.QUESTIONS[0], f"Well: {one_file.QUESTIONS[1]}"]  # of two lengths
    texts, (ids, attention, mask) = one_file.sample(model, tokenizer, questions)
    assert len(texts) == len(ids) == 2 * one_file.N
    with torch.no_grad():
        token_logp = one_file.token_logprobs(model, ids, attention, mask)
    ended = 0
    for index, text in enumerate(texts):
        prompt = tokenizer(questions[index // one_file.N])["input_ids"]
        row = ids[index][attention[index].bool()]
        completion = row[len(prompt) :]
        assert row[: len(prompt)].tolist() == prompt
        assert tokenizer.decode(completion, skip_special_tokens=True) == text
        assert mask[index].sum() == len(completion) <= 32
        assert tokenizer.eos_token_id not in completion[:-1]
        ended += completion[-1] == tokenizer.eos_token_id
        with torch.no_grad():
            logits = model(row[None]).logits[0].double().log_softmax(-1)
        expected = logits[len(prompt) - 1 : -1].gather(-1, completion[:, None])[:, 0]
        actual = token_logp[index]
        assert torch.allclose(actual[: len(completion)].double(), expected, atol=1e-4)
        assert (actual[len(completion) :] == 0).all()
    assert ended > 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [(" 3 + 4 = {}.", True), (" The answer is {}0.", False), (" {} - 1 = 5.", False), ("", False)],
)
def test_the_last_number_is_the_answer(text, expected):
    assert one_file.is_right(text.format(sum(one_file.SUMS[2])), 2) == expected


def test_loss_is_that_of_the_reference():
    generator = torch.Generator().manual_seed(0)
    token_logp, token_logmu = -3 * torch.rand(2, 1000, 20, generator=generator)
    reward = torch.randn(1000, generator=generator)
    reward[::10] = 0
    length = torch.randint(1, 21, (1000, 1), generator=generator)
    mask = (torch.arange(20) < length).long()
    values = []
    gradients = []
    for loss in (one_file.topr_loss, topr.topr_loss):
        leaf = token_logp.clone().requires_grad_()
        value = loss(leaf, token_logmu, reward, mask)
        values.append(value.item())
        gradients.append(torch.autograd.grad(value, leaf)[0])
    # Tokens are added up in another order.
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=0)
    assert values[0] == pytest.approx(values[1], rel=1e-6)


def test_it_learns_and_the_weights_of_wrong_answers_fall(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["one_file.py", "--out", str(tmp_path / "model")])
    backward = torch.Tensor.backward
    losses = []

    def check_loss(loss):
        """The loop gives the loss log mu as it was before the first step of the round."""
        names = sys._getframe(1).f_globals  # of the program
        batch = names["batch"]
        inputs = (names["token_logmu"][batch], names["reward"][batch], names["rows"][2][batch])
        expected = topr.topr_loss(names["token_logp"].detach(), *inputs)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
        losses.append(loss.item())
        backward(loss)

    monkeypatch.setattr(torch.Tensor, "backward", check_loss)
    variables = runpy.run_path("one_file.py", run_name="__main__")
    assert len(losses) == 12
    # The loss divides by the tokens of completions, without their prompts.
    assert variables["mask"].sum(1).max() <= 32 < variables["attention"].sum(1).max()
    lines = capsys.readouterr().out.splitlines()
    shares = []
    weights = []
    for line in lines:
        if line.endswith("%"):
            shares.append([int(share) for share in re.findall(r"(\d+)%", line)])
        if "weight" in line:
            weights.append([float(weight) for weight in re.findall(r" ([01]\.\d\d)\b", line)])
    trained, others = zip(*shares, strict=True)
    assert others[0] < 75 < 85 < others[-1]
    assert trained != others
    assert [len(steps) for steps in weights] == [4, 4, 4]
    for steps in weights:
        assert all(0 <= weight <= 1 for weight in steps)
    assert weights[0][-1] < 0.5 < max(max(steps) for steps in weights)
    assert (tmp_path / "model" / "model.safetensors").exists()
