"""Samples that a user brings: six samples written by hand, and samples with tokens of their own.

tests/runs/test_inputs.py has the samples that are refused, tests/unit/test_dataset.py their tokens.
"""

import pytest
from helpers import ROOT, read_rows, write_rows

import train_gsm8k as gsm8k
from toprlib.settings import Settings

SIX_SAMPLES = ROOT / "examples" / "six_samples.jsonl"


def run(out, file=SIX_SAMPLES, **changes):
    settings = Settings(samples=str(file), test_problems=0, out=out, **changes)
    results = gsm8k.experiment(settings, gsm8k.gsm8k_task(settings))
    return results["iterations"][0]


def test_six_samples_in_the_default_batch_make_one_step_that_shows_nothing(tmp_path):
    iteration = run(tmp_path)
    assert iteration["dataset"]["steps"] == 1
    assert iteration["training"]["weight_neg_mean"] == 1
    assert iteration["training"]["log_ratio_pos_mean"] == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("seed", [0, 1])
def test_six_samples_in_twelve_steps_move_each_sign_in_its_direction(tmp_path, seed):
    iteration = run(tmp_path, batch_size=2, epochs=4, seed=seed)
    assert iteration["dataset"]["steps"] == 12
    assert iteration["training"]["log_ratio_neg_mean"] < -0.5
    assert iteration["training"]["log_ratio_pos_mean"] > 0.3


def test_token_ids_and_log_mu_are_those_of_the_file_and_text_gets_its_end(lm, tmp_path):
    """The third sample was cut off; the fourth has tokens that its text would not have."""
    [end] = lm.ends
    texts = [row["completion"] for row in read_rows(SIX_SAMPLES)]
    expected = [[*ids, end] for ids in lm.tokenizer(texts)["input_ids"]]
    expected[2].pop()
    expected[3] = lm.tokenizer(" 7")["input_ids"] + expected[3]
    rows = []
    for index, row in enumerate(read_rows(SIX_SAMPLES)):
        reason = "length" if index == 2 else "stop"
        logmu = [-1 - index - place / 64 for place in range(len(expected[index]))]
        rows.append(row | {"finish_reason": reason, "token_logmu": logmu, "outcome": "mine"})
    rows[3]["token_ids"] = expected[3]
    file = write_rows(tmp_path / "own.jsonl", rows)
    run(tmp_path / "run", file, batch_size=2, trust_logmu=True)
    examples = read_rows(tmp_path / "run" / "iteration-1" / "train.jsonl")
    assert sorted(example["sample"] for example in examples) == list(range(6))
    for example in examples:
        row = rows[example["sample"]]
        assert example["completion_ids"] == expected[example["sample"]]
        assert example["token_logmu"] == row["token_logmu"]
        assert example["reward"] == row["reward"]
        assert lm.tokenizer.decode(example["prompt_ids"]) == row["prompt"]
