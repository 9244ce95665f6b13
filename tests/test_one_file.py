"""The method on one screen: its batches are what was sampled, and it learns."""

import re
import runpy
from pathlib import Path

import pytest
import torch

import one_file
from topr import sequence_logprobs


def test_a_batch_has_the_tokens_that_were_sampled(lm):
    """Each row again, alone and without padding: its log-probability, and the text up to its end."""
    torch.manual_seed(0)
    sums = [(3, 4), (55, 46)]  # prompts of two lengths
    texts, batch = one_file.sample(lm.model, lm.tokenizer, sums)
    with torch.no_grad():
        logp = sequence_logprobs(lm.model, batch)
    ends = 0
    for i, text in enumerate(texts):
        prompt = lm.tokenizer(one_file.QUESTION.format(*sums[i // one_file.N]))["input_ids"]
        row = batch.input_ids[i][batch.attention_mask[i].bool()]
        completion = row[len(prompt) :]
        assert row[: len(prompt)].tolist() == prompt
        assert lm.tokenizer.decode(completion, skip_special_tokens=True) == text
        assert batch.length[i] == len(completion) <= 32
        assert lm.tokenizer.eos_token_id not in completion[:-1]
        ends += completion[-1] == lm.tokenizer.eos_token_id
        with torch.no_grad():
            logits = lm.model(row[None]).logits[0].double().log_softmax(-1)
        alone = logits[len(prompt) - 1 : -1].gather(-1, completion[:, None]).sum()
        assert logp[i].item() == pytest.approx(alone.item(), abs=1e-3)
    assert ends > 4


def test_the_last_number_of_a_text_is_its_answer():
    texts = ["3 + 4 = 7 apples. The answer is 7.", "The answer is 8.", "none", *[""] * 5, "1 and 3"]
    assert one_file.is_right(texts, [(3, 4), (1, 2)]).tolist() == [True, *[False] * 7, True]


def test_it_learns_and_lets_go_of_wrong_answers(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(Path(one_file.__file__).parent)
    monkeypatch.setattr("sys.argv", ["one_file.py", "--out", str(tmp_path / "model")])
    runpy.run_path("one_file.py", run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    accuracy = [int(line.split()[-1][:-1]) for line in lines if line.startswith("right on")]
    assert accuracy[-1] > 80
    steps = [[float(x) for x in re.findall(r"[0-9.]+(?=;|$| )", line)] for line in lines if "weight" in line]
    assert {step[1] for step in steps} == {1.0}
    assert steps[0][3] == 1.0  # pi = mu
    assert steps[7][3] < 0.5
    assert (tmp_path / "model" / "model.safetensors").exists()
