"""The method on one screen: its rows are what was sampled, its loss is topr.py's to the bit, and it learns."""

import re
import runpy
from pathlib import Path

import pytest
import torch

import one_file
import topr


def test_rows_are_the_tokens_that_were_sampled(lm):
    """Each row again, alone and without padding: its log-probability, and the text up to its end."""
    torch.manual_seed(0)
    questions = [one_file.QUESTIONS[0], f"Well: {one_file.QUESTIONS[1]}"]  # prompts of two lengths
    texts, rows = one_file.sample(lm.model, lm.tokenizer, questions)
    with torch.no_grad():
        logp, ends = one_file.log_pi(lm.model, *rows), 0
    for i, text in enumerate(texts):
        prompt = lm.tokenizer(questions[i // one_file.N])["input_ids"]
        row = rows[0][i][rows[1][i].bool()]
        completion = row[len(prompt) :]
        assert row[: len(prompt)].tolist() == prompt
        assert lm.tokenizer.decode(completion, skip_special_tokens=True) == text
        assert rows[2][i].sum() == len(completion) <= 32
        assert lm.tokenizer.eos_token_id not in completion[:-1]
        ends += completion[-1] == lm.tokenizer.eos_token_id
        with torch.no_grad():
            logits = lm.model(row[None]).logits[0].double().log_softmax(-1)
        alone = logits[len(prompt) - 1 : -1].gather(-1, completion[:, None]).sum()
        assert logp[i].item() == pytest.approx(alone.item(), abs=1e-3)
    assert ends > 4


def test_its_loss_is_that_of_the_reference_to_the_bit():
    draw = torch.Generator().manual_seed(0)
    logp, logmu = -30 * torch.rand(2, 1000, generator=draw)
    reward, length = (
        torch.randn(1000, generator=draw),
        torch.randint(1, 50, (1000,), generator=draw),
    )
    reward[::10], values = 0, []
    for loss in (one_file.topr_loss, topr.topr_loss):
        leaf = logp.clone().requires_grad_()
        value = loss(leaf, logmu, reward, length)
        values.append((value, *torch.autograd.grad(value, leaf)))
    assert torch.equal(values[0][1], values[1][1])
    assert values[0][0].item() == pytest.approx(
        values[1][0].item(), rel=1e-6
    )  # a mean, and a sum over B


def test_it_learns_and_lets_go_of_a_wrong_answer(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(Path(one_file.__file__).parent)
    monkeypatch.setattr("sys.argv", ["one_file.py", "--out", str(tmp_path / "model")])
    end = runpy.run_path("one_file.py", run_name="__main__")
    assert (
        end["length"].max() <= 32 < end["rows"][1].sum(1).max()
    )  # tokens of completions, without their prompts
    lines = capsys.readouterr().out.splitlines()
    shares = [tuple(map(int, re.findall(r"(\d+)%", line))) for line in lines if line.endswith("%")]
    assert shares[0][1] < 75 < 85 < shares[-1][1]
    assert any(trained != others for trained, others in shares)
    weights = [
        [float(x) for x in re.findall(r" ([01]\.\d\d)\b", line)]
        for line in lines
        if "weight" in line
    ]
    assert [len(each) for each in weights] == [4, 4, 4]
    assert all(0 <= x <= 1 for each in weights for x in each)
    assert weights[0][-1] < 0.5 < max(map(max, weights))
    assert (tmp_path / "model" / "model.safetensors").exists()
