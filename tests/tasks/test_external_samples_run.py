"""Runs on samples that a user brings: what is trained on, what is scored, what is refused."""

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

import train_gsm8k as gsm8k
from topr import topr_loss
from toprlib.files import read_records
from toprlib.language_model import load_model
from toprlib.records import Example, InputError
from toprlib.results import print_results
from toprlib.settings import Settings, check

SMALL = Settings(
    test_problems=0,
    lr=1e-3,
    batch_size=8,
    micro_batch_size=4,
    max_new_tokens=32,
    eval_samples=2,
    k=2,
    evals_per_epoch=2,
)


def sum_rows():
    """Right and wrong answers in the form of the tiny problems: a positive, then two negatives."""
    rows = []
    for number in range(1, 9):
        for added, right in ((3, 1.0), (4, 0.0), (5, 0.0)):
            total = number + added
            rows.append(
                {
                    "question": f"Q: What is {number} + 3?\nA:",
                    "completion": f" {number} + 3 = {total}. The answer is {total}.",
                    "right": right,
                    "form": -0.5,
                }
            )
    return rows


COLUMNS = ("prompt=question", "reward=right+form")


@pytest.fixture(scope="module")
def samples_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("samples") / "own.parquet"
    pd.DataFrame(sum_rows()).to_parquet(file)
    return str(file)


def run(out, loss=None, **changes):
    settings = replace(SMALL, columns=COLUMNS, out=out, **changes)
    check(settings)
    return gsm8k.experiment(settings, gsm8k.gsm8k_task(settings), loss=loss)


@pytest.fixture(scope="module")
def trained(samples_file, tmp_path_factory):
    """A run without evaluation: its folder, and the rewards that its loss was called with."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    rewards = []

    def recording_loss(token_logp, token_logmu, reward, mask, denominator):
        rewards.extend(reward.tolist())
        return topr_loss(token_logp, token_logmu, reward, mask, denominator=denominator)

    run(folder, samples=samples_file, loss=recording_loss)
    return folder, rewards


def read_examples(folder):
    return read_records(folder / "iteration-1" / "train.jsonl", Example)


def read_log(folder):
    lines = (folder / "iteration-1" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


# ---- what is trained on --------------------------------------------------------------------------
def test_every_sample_is_trained_on_once_with_the_sum_of_its_columns(trained):
    folder, rewards = trained
    rows = sum_rows()
    examples = read_examples(folder)
    assert sorted(example.sample for example in examples) == list(range(len(rows)))
    for example in examples:
        row = rows[example.sample]
        assert example.reward == row["right"] + row["form"]
    assert sorted(rewards) == sorted(row["right"] + row["form"] for row in rows)
    assert len(read_log(folder)) == len(rows) / SMALL.batch_size


def test_texts_are_tokenized_with_an_end_of_sequence(trained):
    folder, _ = trained
    tokenizer = load_model(SMALL.model).tokenizer
    for example in read_examples(folder):
        row = sum_rows()[example.sample]
        assert example.prompt_ids == tokenizer(row["question"])["input_ids"]
        assert example.completion_ids[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(example.completion_ids[:-1]) == row["completion"]


def test_log_mu_is_that_of_the_first_model(trained):
    """The oracle computes each completion alone, without padding, in float64."""
    folder, _ = trained
    model = load_model(SMALL.model).model.double()
    for example in read_examples(folder)[:6]:
        ids = torch.tensor([example.prompt_ids + example.completion_ids])
        with torch.no_grad():
            logits = model(ids).logits[0].log_softmax(-1)
        start = len(example.prompt_ids)
        completion = torch.tensor(example.completion_ids)
        expected = logits[start - 1 : -1].gather(-1, completion[:, None])[:, 0]
        assert example.token_logmu == pytest.approx(expected.tolist(), abs=1e-3)
    assert read_log(folder)[0]["log_ratio_pos_mean"] == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("shift", [1e-3, 0.5])  # of each token, as top-p shifts it
def test_trust_logmu_takes_that_of_the_file(trained, tmp_path, shift):
    rows = []
    expected = {}
    for example in read_examples(trained[0]):
        shifts = [min(shift, -value) for value in example.token_logmu]  # up to 0
        values = [v + s for v, s in zip(example.token_logmu, shifts, strict=True)]
        expected[example.sample] = values
    for index, row in enumerate(sum_rows()):
        rows.append(row | {"token_logmu": expected[index]})
    pd.DataFrame(rows).to_parquet(tmp_path / "own.parquet")
    is_far = pytest.warns(UserWarning, match="log mu") if shift == 0.5 else nullcontext()
    with is_far:
        run(tmp_path / "run", samples=str(tmp_path / "own.parquet"), trust_logmu=True)
    for example in read_examples(tmp_path / "run"):
        assert example.token_logmu == expected[example.sample]


# ---- samples written by hand ---------------------------------------------------------------------
SIX_SAMPLES = str(Path(gsm8k.__file__).parent / "examples" / "six_samples.jsonl")


def run_six(out, **changes):
    settings = Settings(samples=SIX_SAMPLES, test_problems=0, out=out, **changes)
    results = gsm8k.experiment(settings, gsm8k.gsm8k_task(settings))
    return results["iterations"][0]


def test_six_samples_in_the_default_batch_make_one_step_that_shows_nothing(tmp_path, capsys):
    iteration = run_six(tmp_path)
    assert iteration["dataset"]["steps"] == 1
    assert [line for line in capsys.readouterr().out.splitlines() if "--batch-size" in line]
    assert iteration["training"]["weight_neg_mean"] == 1
    assert iteration["training"]["log_ratio_pos_mean"] == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("seed", [0, 1])
def test_six_samples_in_twelve_steps_move_each_sign_in_its_direction(tmp_path, capsys, seed):
    iteration = run_six(tmp_path, batch_size=2, epochs=4, seed=seed)
    assert iteration["dataset"]["steps"] == 12
    assert "--batch-size" not in capsys.readouterr().out
    assert iteration["training"]["log_ratio_neg_mean"] < -0.5
    assert iteration["training"]["log_ratio_pos_mean"] > 0.3


def test_a_run_without_evaluation_ends_with_the_change_of_each_sign(capsys):
    iteration = {"training": {"log_ratio_pos_mean": 0.25, "log_ratio_neg_mean": None}}
    print_results({"iterations": [iteration, iteration]})
    lines = capsys.readouterr().out.splitlines()
    [positives] = [line for line in lines if "positives" in line]
    [negatives] = [line for line in lines if "negatives" in line]
    assert re.findall(r"-?[0-9]+\.[0-9]+", positives) == ["0.250", "0.250"]
    assert re.findall(r"-?[0-9]+\.[0-9]+", negatives) == []


# ---- evaluation ----------------------------------------------------------------------------------
def test_evaluation_changes_nothing_but_its_own_files(trained, samples_file, tmp_path):
    folder, _ = trained
    results = run(tmp_path / "run", samples=samples_file, test_problems=2)
    steps = len(read_log(folder))
    expected_files = [f"test-{step}.jsonl" for step in (0, steps // 2, steps)]
    evaluated = tmp_path / "run" / "iteration-1"
    assert sorted(path.name for path in evaluated.glob("test-*")) == sorted(expected_files)
    assert "before" in results
    assert list((folder / "iteration-1").glob("test-*")) == []
    assert "before" not in json.loads((folder / "results.json").read_text())
    for name in ("train.jsonl", "model/model.safetensors"):
        assert (evaluated / name).read_bytes() == (folder / "iteration-1" / name).read_bytes()
    for actual, expected in zip(read_log(tmp_path / "run"), read_log(folder), strict=True):
        assert actual["loss"] == expected["loss"]


# ---- what is refused -----------------------------------------------------------------------------
def changed_file(folder, line, **changes):
    rows = sum_rows()
    rows[line - 1] |= changes
    file = folder / "changed.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"right": None}, "reward"),
        ({"completion": ""}, "completion"),
        ({"question": ""}, "prompt"),
        ({"token_ids": [5]}, "token_ids"),
        ({"completion": " 1" * 20_000}, "completion"),
    ],
    ids=["no reward", "no completion", "no prompt", "other tokens", "too long"],
)
def test_invalid_sample_ends_the_run_before_it_writes(tmp_path, changes, field):
    file = changed_file(tmp_path, line=5, **changes)
    with pytest.raises(InputError) as caught:
        run(tmp_path / "run", samples=file)
    assert (caught.value.file, caught.value.line) == (file, 5)
    assert caught.value.field == field
    assert not (tmp_path / "run").exists()


def test_trust_logmu_needs_a_value_for_each_token(tmp_path):
    file = changed_file(tmp_path, line=1, token_logmu=[-1.0])
    with pytest.raises(InputError) as caught:
        run(tmp_path / "run", samples=file, trust_logmu=True)
    assert caught.value.file == file
    assert caught.value.field == "token_logmu"
    assert not (tmp_path / "run").exists()


def test_a_folder_belongs_to_one_content_of_the_samples(tmp_path):
    file = changed_file(tmp_path, line=1)
    run(tmp_path / "run", samples=file)
    changed_file(tmp_path, line=1, right=0.75)
    with pytest.raises(InputError) as caught:
        run(tmp_path / "run", samples=file)
    assert (caught.value.option, caught.value.file) == ("--out", str(tmp_path / "run"))


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"columns": COLUMNS}, "--columns"),
        ({"trust_logmu": True}, "--trust-logmu"),
        ({"samples": "own.jsonl", "iterations": 2}, "--samples"),
        ({"samples": "own.jsonl", "columns": ("reward",)}, "--columns"),
    ],
)
def test_options_that_do_not_go_together(changes, option):
    with pytest.raises(InputError) as caught:
        check(replace(SMALL, **changes))
    assert caught.value.option == option
