"""Samples from elsewhere: who wrote the files, what their columns are called, and what is measured without problems."""

import hashlib
import json
import math
import sys
from unittest.mock import Mock

import datasets
import numpy as np
import pandas as pd
import pytest
from helpers import plain_batch
from killing import arguments
from runs import SMALL, contents, experiment

import topr
import train_gsm8k as gsm8k
from pipeline.dataset import encode, rows_held_out, to_examples
from pipeline.evaluation import evaluate_held_out, to_scored, to_table
from pipeline.models.language_model import load_model
from pipeline.own_samples import digest_of, read_samples
from pipeline.records import InputError, Sample
from pipeline.settings import Settings

ROWS = [
    {
        "prompt": "Q: 1 + 1?\nA:",
        "completion": " The answer is 2.",
        "reward": 1.0,
        "finish_reason": "stop",
    },
    {
        "prompt": "Q: 1 + 1?\nA:",
        "completion": ' "3", \u2028 it is.',
        "reward": -0.5,
        "finish_reason": "length",
    },
]
SAMPLES = [Sample(**row) for row in ROWS]
NEEDED = ("prompt", "completion", "reward")
USER = [{"role": "user", "content": ROWS[0]["prompt"]}]


def as_lines(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def as_folder(folder, rows):
    folder.mkdir()
    for number, row in enumerate(rows):
        pd.DataFrame([row]).to_parquet(folder / f"completions_{number:05d}.parquet")


WRITERS = {
    "samples.jsonl": as_lines,
    "samples.parquet": lambda file, rows: pd.DataFrame(rows).to_parquet(file),
    "samples.csv": lambda file, rows: pd.DataFrame(rows).to_csv(file, index=False),
    "saved": lambda folder, rows: datasets.Dataset.from_list(rows).save_to_disk(folder),
    "folder": as_folder,
}


@pytest.mark.parametrize("name", WRITERS)
def test_the_same_samples_come_from_every_format(tmp_path, capsys, name):
    WRITERS[name](tmp_path / name, ROWS)
    capsys.readouterr()
    assert read_samples(tmp_path / name) == SAMPLES
    assert capsys.readouterr().out == ""  # no column is ignored, none has another name
    digest = digest_of(
        tmp_path / name, SAMPLES
    )  # a run knows a file by its bytes, all others by the samples
    if (tmp_path / name).is_file():
        assert digest == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
    else:
        assert (
            digest == digest_of("owner/name", SAMPLES) != digest_of(tmp_path / name, SAMPLES[::-1])
        )
    if name.endswith("parquet"):  # lists and numbers keep their types
        row = {**ROWS[0], "reward": 1, "token_ids": [5, 6], "token_logmu": [-0.5, -1.0]}
        WRITERS[name](tmp_path / name, [row])
        assert read_samples(tmp_path / name) == [Sample(**row)]


def test_a_split_of_the_hub_is_read_and_a_hub_out_of_reach_told_in_a_line(monkeypatch):
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *_, split: datasets.Dataset.from_list(ROWS)
    )
    assert read_samples("owner/name") == SAMPLES
    unreachable = ConnectionError(
        "Couldn't reach 'owner/name' on the Hub\n(LocalEntryNotFoundError)"
    )
    monkeypatch.setattr(datasets, "load_dataset", Mock(side_effect=unreachable))
    with pytest.raises(
        InputError, match=r"owner/name: .*Couldn't reach 'owner/name' on the Hub \(Local"
    ):
        read_samples("owner/name")


def under(*names, **others):
    """The rows with prompt, completion and reward under other names, and other columns behind them."""
    return [
        {name: row[field] for name, field in zip(names, NEEDED, strict=True)} | others
        for row in ROWS
    ]


def of_trl(*completions):
    """TRL's log with messages and two rewards, which add up to those of the rows."""
    answers = [[{"role": "assistant", "content": text}] for text in completions]
    rewards = [{"accuracy": row["reward"] - 0.25, "form": 0.25} for row in ROWS]
    pairs = zip(answers, rewards, strict=True)
    return [
        {"step": 7, "prompt": USER, "completion": answer, **some, "advantage": 1}
        for answer, some in pairs
    ]


READ = {  # who has written them: rows, --columns, what is told of the columns
    "verl 0.9.1, _write_generations": (
        under("input", "output", "score", gts="2", step=1),
        (),
        "input is the prompt, output is the completion, score is the reward; ignored: gts, step",
    ),
    "trl 1.16, GRPOTrainer.log; solution is a column of the data": (
        under("prompt", "completion", "accuracy_reward", solution="2", advantage=1, step=7),
        (),
        "accuracy_reward is the reward; ignored: advantage, solution, step",
    ),
    "trl, chat": (
        of_trl(*(row["completion"] for row in ROWS)),
        ("reward=accuracy+form",),
        "accuracy+form is the reward; ignored: advantage, step",
    ),
    "any other": (
        under("question", "answer", "grade 1+2", prompt="?"),  # a name, no sum
        ("prompt=question", "completion=answer", "reward=grade 1+2"),
        "question is the prompt, answer is the completion, grade 1+2 is the reward; ignored: prompt",
    ),
    "two": (
        [under(*NEEDED, id=3)[0], under("input", "output", "reward")[1]],
        (),
        "input is the prompt, output is the completion; ignored: id",
    ),
}


@pytest.mark.parametrize("who", READ)
def test_columns_of_other_names_are_taken_and_the_others_told(tmp_path, capsys, who):
    rows, columns, told = READ[who]
    as_lines(tmp_path / "own.jsonl", rows)
    found = read_samples(
        tmp_path / "own.jsonl", columns, ask=lambda messages: messages[-1]["content"]
    )
    assert [{name: getattr(sample, name) for name in NEEDED} for sample in found] == under(*NEEDED)
    assert capsys.readouterr().out == f"{tmp_path / 'own.jsonl'}: {told}\n"


def second(**changes):
    return [ROWS[0], ROWS[1] | changes]


def both(**changes):  # a column of a table has one type
    return [row | changes for row in ROWS]


@pytest.mark.parametrize(
    ("rows", "columns", "message"),
    [
        (second(reward=None), (), r":2: column reward: is empty"),
        (
            second(reward=math.nan),
            (),
            r":2: (field reward: .*finite|column reward: is empty)",
        ),  # parquet has none
        (
            [ROWS[0], {"prompt": "Q", "completion": "A"}],
            (),
            r":2: (no reward among .*|column reward: is empty)",
        ),
        (
            [{"text": "Q"}],
            (),
            r":1: no prompt among the columns text; name it with --columns prompt=NAME",
        ),
        (
            ROWS,
            ["reward=score"],
            r":1: --columns reward=score: no score among the columns prompt, completion",
        ),
        (ROWS, ["reward"], r"^--columns reward: must be FIELD=COLUMN"),
        (
            ROWS,
            ["reward=a", "reward=b"],
            r"^--columns reward=b: must be FIELD=COLUMN, each field once",
        ),
        (of_trl("2", "3"), (), r":1: no reward .* --columns reward=accuracy\+form$"),
        (
            of_trl("2", "3"),
            ["reward=form"],
            r":1: field prompt: is a list of messages, .* give --chat",
        ),
        (both(reward=True), (), r":1: field reward: .*number"),
        (both(prompt=[{"role": "user"}]), (), r":1: field prompt: a list must be one of messages"),
        (both(completion=USER), (), r":1: field completion: .* the assistant's"),
        (both(a="x", b=1), ["reward=a+b"], r":1: column a: 'x' is no number, and a\+b is a sum"),
    ],
)
def test_a_fault_is_named_by_file_row_and_column(tmp_path, rows, columns, message):
    for name in ("samples.jsonl", "samples.parquet"):
        WRITERS[name](tmp_path / name, rows)
        with pytest.raises(InputError, match=message) as caught:
            read_samples(tmp_path / name, columns)
        assert "\n" not in str(caught.value)


def test_files_that_are_none_are_told_in_a_line(tmp_path):
    (tmp_path / "bad.parquet").write_text("no")
    pd.DataFrame({"prompt": []}).to_parquet(tmp_path / "empty.parquet")
    (tmp_path / "empty").mkdir()
    told = {
        "bad.parquet": "cannot be read: ",
        "empty.parquet": "is empty",
        "empty": "cannot be read: ",
    }
    for name, message in (
        told | {"none.parquet": "no such file", "none.jsonl": "no such file"}
    ).items():
        with pytest.raises(InputError, match=f"{name}: {message}"):
            read_samples(tmp_path / name)
    (tmp_path / "two").mkdir()
    for name, columns in {
        "a": ROWS[0],
        "b": {"prompt": "Q", "completion": None, "reward": 1.0},
    }.items():
        (tmp_path / "two" / f"{name}.jsonl").write_text(json.dumps(columns) + "\n")
    with pytest.raises(
        InputError, match=r"two, a\.jsonl and then b\.jsonl:2: column completion: is empty"
    ):
        read_samples(tmp_path / "two")


OPTIONS = {"data": "nowhere", "lr": 1e-3, "batch": 8, "micro_batch": 4, "curve_points": 2}


def sums(first, last):
    """Right and wrong answers to sums in the form of the tiny problems."""
    return [
        {
            "prompt": f"Q: What is {a} + 3?\nA:",
            "completion": f" {a} + 3 = {a + b}. The answer is {a + b}.",
            "reward": r,
        }
        for a in range(first, last)
        for b, r in ((3, 1.0), (4, -1.0), (5, -1.0))
    ]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The settings that name samples to train on and samples held out."""
    folder = tmp_path_factory.mktemp("files")
    as_lines(folder / "train.jsonl", sums(1, 9))
    pd.DataFrame(sums(11, 16)).rename(columns={"reward": "score"}).to_parquet(
        folder / "held.parquet"
    )
    return {
        "samples": str(folder / "train.jsonl"),
        "held_out": str(folder / "held.parquet"),
        **OPTIONS,
    }


def logp_and_length(model, rows):
    """log pi of the completions by topr.py alone, and their lengths in tokens."""
    lm = load_model(str(model))
    rows = [[encoded] for encoded in encode([Sample(**row) for row in rows], range(len(rows)), lm)]
    batch = plain_batch([example for [example] in to_examples(rows, [[[0.0]]] * len(rows))])
    return topr.sequence_logprobs(
        lm.model, batch
    ).detach().double().numpy(), batch.length.double().numpy()


def test_held_out_numbers_are_those_of_a_direct_computation(files, run):
    folder, rows = run(**files), sums(11, 16)
    reward = np.array([row["reward"] for row in rows])
    results = json.loads((folder / "results.json").read_text())
    before, after = (
        logp_and_length(model, rows) for model in (SMALL.model, folder / "iteration-1" / "model")
    )
    for entry, (logp, length) in (
        (results["before"], before),
        (results["iterations"][0]["after"], after),
    ):
        log_ratio, per_token = logp - before[0], logp / length
        expected = {
            "log_ratio": log_ratio,
            "log_ratio_per_token": log_ratio / length,
            "logp_per_token": per_token,
        }
        for name, is_of_sign in (("positive", reward > 0), ("negative", reward < 0)):
            assert entry[name]["samples"] == is_of_sign.sum()
            for key, values in expected.items():
                some = values[is_of_sign]
                se = some.std(ddof=1) / math.sqrt(len(some))
                assert entry[name][key] == pytest.approx(
                    {"mean": some.mean(), "se": se}, abs=2e-4
                ), (name, key)
        positive, *negatives = per_token.reshape(-1, 3).T
        assert entry["ranked"]["mean"] == pytest.approx(
            np.mean([positive > negative for negative in negatives])
        )
    assert (after[0] != before[0]).all()


def test_a_run_without_evaluation_trains_the_same_model_and_leaves_no_more(
    files, run, tmp_path, capsys, monkeypatch
):
    changes = files | {"held_out": None}
    monkeypatch.setattr(sys, "argv", ["", *arguments(tmp_path / "run", changes), "--no-evaluation"])
    gsm8k.main("train_gsm8k", "", gsm8k.gsm8k_task)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (*results, *results["iterations"][0]) == (
        "iterations",
        "versions",
        "dataset",
        "training",
    )
    evaluated, plain = contents(run(**files)), contents(tmp_path / "run")
    measured = {"curve.png", *(f"iteration-1/test-{step}.jsonl" for step in (0, 1, 3))}
    assert (evaluated.keys() - plain.keys(), plain.keys() - evaluated.keys()) == (measured, set())
    for name in ("metrics.jsonl", "model/model.safetensors"):
        assert evaluated[f"iteration-1/{name}"] == plain[f"iteration-1/{name}"]
    results = json.loads((run(**files) / "results.json").read_text())
    [found] = results["iterations"]
    assert [point["samples_seen"] for point in found["curve"]] == [0, 8, 24]
    monkeypatch.setenv("COLUMNS", "120")
    to_table(results).print()
    [line, _] = [
        line
        for line in capsys.readouterr().out.splitlines()
        if "negatives: log pi - log mu, nats" in line
    ]
    found = found["after"]["negative"]["log_ratio"]
    assert f"{found['mean']:.3f} ± {2 * found['se']:.3f}" in line


def test_samples_that_were_held_out_are_signed_as_trained_ones_are(lm):
    samples = [
        Sample(prompt="Q", completion=" A", reward=float(i == 0), token_logmu=[-1.0, -2.0])
        for i in range(4)
    ]
    signs = {}
    for changes in ({}, {"baseline": 0.5}, {"baseline_from": "mean"}, {"trust_logmu": True}):
        rows = rows_held_out(Settings(samples="s", held_out="h", **changes), samples, lm, ())
        signs[str(changes)] = [row[0].reward >= 0 for row in rows]
        assert [row[0].token_logmu == [-1.0, -2.0] for row in rows] == [
            "trust_logmu" in changes
        ] * 4
    assert list(signs.values()) == [
        [True] * 4,
        [True] + [False] * 3,
        [True] + [False] * 3,
        [True] * 4,
    ]
    settings = Settings(
        samples="s", held_out="h", effective_proportion=1.0
    )  # of rewards -1 and +1, of one sign too
    both = [Sample(prompt="Q", completion=" A", reward=reward) for reward in (1.0, -1.0, -1.0)]
    for some in (both, both[:1]):
        found = rows_held_out(settings, some, lm, ())
        assert [row[0].reward for row in found] == [s.reward for s in some]
    examples = to_examples(rows, [[[-1.5, -2.5]]] * 4)
    scored = to_scored(rows, examples, None)
    assert [(one.logp, one.logmu, one.prompt) for one in scored] == [(-4.0, -3.0, 0)] * 4
    found = evaluate_held_out(scored)  # without a negative
    assert found["negative"] == {
        "samples": 0,
        "log_ratio": None,
        "log_ratio_per_token": None,
        "logp_per_token": None,
    }
    assert found["ranked"] is None


def test_held_out_samples_are_part_of_what_a_run_is_and_checked_before_it_begins(
    files, run, tmp_path, capsys
):
    given, others = files, tmp_path / "others.jsonl"
    as_lines(others, sums(7, 12))
    with pytest.raises(InputError, match="holds a run with other settings"):
        experiment(run(**given), **given | {"held_out": str(others)})
    assert "others.jsonl: 2 of 5 prompts are trained on too" in capsys.readouterr().out
    as_lines(others, both(completion=""))
    with pytest.raises(InputError, match=r"others.jsonl:1: field completion: is empty"):
        experiment(tmp_path / "refused", **given | {"held_out": str(others)})
    assert not (tmp_path / "refused").exists()
