"""The script from end to end at a small size: what it writes, that it repeats itself, and what it refuses."""

import json
import math
import re
import shutil
import subprocess
from copy import deepcopy
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import get_args

import pytest
import torch
from pipeline import settings
from pipeline.dataset import epoch_steps, longest
from pipeline.epoch import try_longest
from pipeline.held import ENGINES
from pipeline.methods import dpo_loss, ppo_loss
from pipeline.models.language_model import META, load_model
from pipeline.records import Example, InputError, Sample, read_records, to_lines
from pipeline.settings import INSTEAD, EngineName, Settings
from pipeline.stages import open_run
from runs import SMALL, experiment, json_lines
from safetensors.torch import load_file

import topr
import train_gsm8k as gsm8k

SAMPLES, TRAIN, METRICS, MODEL = (
    f"iteration-1/{name}" for name in ("samples.jsonl", "train.jsonl", "metrics.jsonl", "model")
)


@pytest.fixture(scope="module")
def finished(run):
    return run()


def on_samples(folder, file, learn=None, **changes):
    """A run on the samples of a file, without an evaluation."""
    settings = replace(SMALL, out=folder, samples=str(file), evaluation=False, **changes)
    gsm8k.experiment(settings, gsm8k.gsm8k_task(settings), learn)
    return folder


def test_the_run_folder_holds_what_the_readme_says(finished):
    here = finished / "iteration-1"
    names = {file.name for folder in (finished, here) for file in folder.iterdir()}
    expected = ".lock config.json iteration-1 results.json times.json curve.png samples.jsonl train.jsonl dataset.json"
    assert names == {
        *f"{expected} metrics.jsonl model SHA256SUMS test-0.jsonl test-2.jsonl test-4.jsonl".split()
    }
    for folder in (here, here / "model"):
        subprocess.run(["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=folder, check=True)
    [iteration] = json.loads((finished / "results.json").read_text())["iterations"]
    assert [point["samples_seen"] for point in iteration["curve"]] == [0, 32, 64]
    assert iteration["dataset"]["trained"] == iteration["dataset"]["drawn"]
    assert iteration["dataset"]["drawn"]["samples"] == 64
    assert json.loads((finished / "config.json").read_text())["method"] == "topr"
    steps = json_lines(finished / METRICS)
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert iteration["training"]["log_ratio_neg_mean"] == pytest.approx(
        steps[-1]["log_ratio_neg_mean"], abs=5e-4
    )
    assert (finished / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_model_without_weights_knows_what_ends_a_sequence(lm, tmp_path):
    lm.model.save_pretrained(tmp_path)
    lm.tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "generation_config.json").read_text()) | {
        "eos_token_id": [1, 7]
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    meta = load_model(str(tmp_path), META)
    assert meta.ends == load_model(str(tmp_path)).ends == {1, 7}
    assert meta.text([300, 7]) == meta.text([300]) == meta.text([300, 1])
    assert {weight.device.type for weight in meta.model.parameters()} == {"meta"}
    assert meta.context == lm.context


def test_a_tokenizer_without_an_end_is_refused(lm, tmp_path):
    lm.model.save_pretrained(tmp_path)
    tokenizer = deepcopy(lm.tokenizer)
    tokenizer.eos_token = tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="its tokenizer names no token that ends a sequence"):
        load_model(str(tmp_path), META)


def test_a_copy_of_the_project_goes_on(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "TINY", shutil.copytree(settings.TINY, tmp_path / "tiny"))
    given = {"model": str(settings.TINY / "two_thirds"), "data": str(settings.TINY)}
    experiment(
        shutil.copytree(finished, tmp_path / "run"), **given
    )  # it is finished there, and not refused
    experiment(tmp_path / "other", reuse=finished, iterations=0, **given)
    assert not json.loads((tmp_path / "other" / "times.json").read_text())["seconds"].get(
        "sampling"
    )


def test_samples_of_one_sign_keep_their_rewards_and_the_run_says_so(tmp_path, capsys):
    folder = on_samples(tmp_path / "run", given(tmp_path, {}, {}), effective_proportion=0.7)
    assert (
        "iteration 1: 2 examples of 2 samples, 0.0 % positive\niteration 1: --eff"
        in capsys.readouterr().out
    )
    assert [line["reward"] for line in json_lines(folder / TRAIN)] == [-1, -1]


def test_a_finished_run_is_shown_and_not_made_again_and_refuses_other_settings(finished, capsys):
    experiment(finished)
    assert "this run is finished" in capsys.readouterr().out
    with pytest.raises(InputError, match="holds a run with other settings"):
        experiment(finished, seed=1)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"method": "tis"}, partial(topr.topr_loss, limits=topr.PRESETS["tis"])),
        (
            {"limits": (0.5, 2.0, 0.1, 0.9)},
            partial(topr.topr_loss, limits=topr.Limits(0.5, 2.0, 0.1, 0.9)),
        ),
        ({"method": "ppo", "eps": 0.4}, partial(ppo_loss, eps=0.4)),
        ({"method": "dpo", "beta": 0.3}, partial(dpo_loss, beta=0.3)),
    ],
)
def test_every_setting_reaches_its_loss(changes, expected, tmp_path):
    # ratios 0.14, 0.41, 7.4, 0.22, and two that PPO clips with eps = 0.2 and not with 0.4: 1.28, 0.67
    logp = torch.tensor([-3.0, -2.0, -1.0, -4.0, -1.0, -1.4])
    logmu = torch.tensor([-1.0, -1.1, -3.0, -2.5, -1.25, -1.0])
    batch = (logmu, torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0]), torch.arange(1, 7))
    settings = replace(SMALL, out=tmp_path / "run", **changes)
    with open_run(settings, gsm8k.gsm8k_task(settings)) as run:
        found, known = (
            torch.func.grad(loss)(logp, *batch)
            for loss in (partial(run.loss, denominator=6), expected)
        )
    torch.testing.assert_close(found, known)


@pytest.mark.parametrize("is_trusted", [False, True])
def test_log_mu_of_given_samples_is_used_only_if_it_is_trusted(finished, tmp_path, is_trusted):
    """The finished run's samples, with log mu lower by 0.1 a token."""
    samples = read_records(finished / SAMPLES, Sample)
    logmu = {
        example.sample: [x - 0.1 for x in example.token_logmu]
        for example in read_records(finished / TRAIN, Example)
    }
    others = [
        sample.model_copy(update={"token_logmu": logmu[i]}) for i, sample in enumerate(samples)
    ]
    file = tmp_path / "other.jsonl"
    file.write_text(to_lines(others))
    folder = on_samples(tmp_path / "run", file, trust_logmu=is_trusted)
    if is_trusted:
        lengths = [len(sample.token_ids) for sample in samples]
        first = json_lines(folder / METRICS)[0]["log_ratio_pos_q50"]
        assert 0.1 * min(lengths) - 0.01 <= first <= 0.1 * max(lengths) + 0.01
    else:
        assert (folder / TRAIN).read_bytes() == (finished / TRAIN).read_bytes()
    file.write_text(to_lines(others[:16]))
    with pytest.raises(InputError, match="holds a run with other settings"):
        on_samples(folder, file, trust_logmu=is_trusted)


def test_the_gradient_is_clipped_to_the_norm_that_is_set(finished, tmp_path):
    """A step of plain gradient descent at rate 1 is then no longer than that."""
    here = on_samples(tmp_path / "run", finished / SAMPLES, optimizer="sgd", lr=1.0, max_norm=1e-3)
    metrics, weights = json_lines(here / METRICS), load_file(here / MODEL / "model.safetensors")
    moved = [
        weights[name] - old
        for name, old in load_file(Path(SMALL.model) / "model.safetensors").items()
    ]
    assert min(step["grad_norm"] for step in metrics) > 1e-3
    assert 0 < torch.cat([change.flatten() for change in moved]).norm() <= 1.01e-3 * len(metrics)


def too_large(model, batch):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nSee the manual.")


def far_from_mu(model, batch):
    return model.lm_head.weight[0, : len(batch.reward)] + batch.logmu + 1


@pytest.mark.parametrize(
    ("logprobs", "fault", "message"),
    [
        (
            too_large,
            InputError,
            r"step 1: .*allocate 2 GiB\.; give --gradient-checkpointing, --reshard",
        ),
        (far_from_mu, ArithmeticError, r"step 1: \|log pi - log mu\| reaches"),
    ],
)
def test_a_step_that_fails_ends_the_run_before_anything_is_saved(
    finished, tmp_path, logprobs, fault, message
):
    with pytest.raises(fault, match=message):
        on_samples(tmp_path, finished / SAMPLES, (topr.topr_loss, logprobs))
    assert not (tmp_path / MODEL).exists()
    assert not (tmp_path / METRICS).exists()


def test_the_step_that_is_tried_for_its_memory_is_the_longest(finished, tmp_path):
    seen = []

    def logprobs(model, batch):
        seen.append(batch)
        return model.lm_head.weight[0, : len(batch.reward)]  # whatever can be learnt from

    settings = replace(
        SMALL,
        out=tmp_path / "run",
        samples=str(finished / SAMPLES),
        evaluation=False,
        micro_batch=2,
    )
    with open_run(settings, gsm8k.gsm8k_task(settings), (topr.topr_loss, logprobs)) as run:
        composed = run.compose(1, run.sample(1, run.start.model))
        rows = run.score(1, composed, run.start.model)
        steps = epoch_steps(rows, settings.batch, settings.micro_batch)
        try_longest(rows, steps, load_model(SMALL.model).model, run.loss, run.logprobs)
    widths = {
        sum(longest([rows[i] for i in numbers])) for step in steps for numbers in step.micro_batches
    }
    tried = [batch.input_ids.shape[1] for batch in seen]
    assert len(tried) == settings.batch / settings.micro_batch  # one step
    assert max(tried) == max(widths) > min(widths)


COUNTS = "problems n candidates examples epochs engine_gpus max_new_tokens tokens_at_once chunk pairs batch micro_batch"
COUNTS += " lora save_every test_problems k curve_points"
RANGES = {  # what must hold -> settings, values that lie just inside and outside
    "must be at least 1": (COUNTS, [1], [0, -1]),
    "must be at least 2": ("test_samples curve_samples", [2], [1]),
    "must be at least 0": ("iterations seed", [0], [-1]),
    "must be at least -1": ("top_k", [0, -1], [-2]),
    "must be positive and finite": (
        "temperature beta lr max_norm",
        [1e-9],
        [0.0, -1.0, math.inf, math.nan],
    ),
    "must lie in (0, 1]": ("top_p effective_proportion", [1.0, 1e-9], [0.0, 1.5, math.nan]),
    "must lie in (0, 1)": ("proportion", [0.5], [0.0, 1.0, math.nan]),
    "must lie in [0, 1]": ("eps", [0.0, 1.0], [-0.1, 1.5, math.nan]),
    "must be finite": ("baseline", [-1.0], [math.inf, math.nan]),
}


def fault_of(name, value):
    """What is said of a value of a setting."""
    try:
        gsm8k.check(replace(SMALL, **{name: value}))
    except InputError as error:
        return str(error)
    return ""


def test_numbers_out_of_range_are_refused():
    for rule, (names, inside, outside) in RANGES.items():
        for name in names.split():
            option = f"--{name.replace('_', '-')}"
            assert [fault_of(name, x) for x in outside] == [
                f"{option} {x}: {rule}" for x in outside
            ]
            assert not any(rule in fault_of(name, x) for x in inside), name
    numbers = {field.name for field in fields(Settings) if type(field.default) in (int, float)}
    ranged = {name for names, _, _ in RANGES.values() for name in names.split()}
    assert numbers - ranged == {"shots"}


def given(folder, *rows):
    """A file of samples, which have what is not said here."""
    file = folder / "given.jsonl"
    file.write_text(
        "".join(
            json.dumps({"prompt": "Q", "completion": " A", "reward": -1} | row) + "\n"
            for row in rows
        )
    )
    return str(file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "grpo"}, "--method grpo: choose from topr, tis"),
        (
            {"limits": (2.0, 1.0, 0.0, 1.0)},
            r"--limits: limits a_pos = 2, b_pos = 1: need 0 <= a <= b",
        ),
        ({"limits": (1.0, 1.0, 0.0, 1.0), "method": "ppo"}, "--limits: have no meaning"),
        ({"shots_file": Path("shots.txt")}, "--shots-file: say with --shots"),
        ({"effective_proportion": 0.5, "baseline": 0.1}, "sets the baseline; give no other"),
        ({"baseline": 0.0, "method": "dpo"}, "--method dpo: has no baseline"),
        (
            {"test_samples": 3},
            "--test-samples 3: must be at least --k 4; with more, maj@4 has an interval",
        ),
        ({"batch": 7, "method": "dpo"}, "--batch 7: must be a multiple"),
        ({"data": "nowhere"}, "--data or --test-data nowhere"),
        ({"model": "nowhere"}, "--model nowhere: is neither a folder nor"),
        ({"lora": 10000}, "--lora 10000: must be at most 128, the model's width"),
        ({"model": "/"}, "--model /: has no config.json"),
        ({"samples": "nothing.jsonl", "iterations": 2}, "--samples: serve one iteration"),
        (
            {"samples": "s", "evaluation": True},
            "--samples: say how to evaluate, by one of --test-data DIR",
        ),
        ({"evaluation": False}, "--no-evaluation: is for --samples"),
        ({"columns": ("reward=score",)}, "--columns: is for --samples"),
        (
            {"composition": "proportion"},
            "--composition proportion and --proportion P: give both or neither",
        ),
        (
            {"max_new_tokens": 5000},
            r"problem train-5: its prompt has \d+ tokens; with 5000 new ones it exceeds",
        ),
        # rows of samples
        (
            {"samples": [{}, {"completion": " A" * 5000}]},
            r"given.jsonl:2: field completion: \d+ tokens with its",
        ),
        (
            {"samples": [{"token_ids": [5, 6]}]},
            "given.jsonl:1: field token_ids: are not the completion's",
        ),
        (
            {"samples": [{"token_logmu": [-1]}]},
            "given.jsonl:1: field token_logmu: 1 of them, 2 tokens",
        ),
        ({"samples": [{"completion": ""}]}, "given.jsonl:1: field completion: is empty"),
        (
            {"samples": [{"token_logmu": [-1, -1]}, {}], "trust_logmu": True},
            "given.jsonl:2: .*token_logmu: is missing",
        ),
        (
            {"samples": [{}, {}], "composition": "positives_only"},
            "positives_only: none of the 2 samples fits",
        ),
        (
            {"samples": [{"reward": 0.5}, {}], "method": "sft", "baseline": 0.8},
            "--method sft: no positive sample",
        ),
        ({"samples": [{}, {"prompt": "P", "reward": 1}], "method": "dpo"}, "no problem has both"),
        (
            {"samples": [{"reward": 0.5}, {}], "effective_proportion": 0.5},
            "needs rewards -1 and \\+1, not 0.5",
        ),
    ],
    ids=lambda value: str(value)[:80],
)
def test_what_cannot_be_run_is_refused_in_a_line_before_anything_is_written(
    tmp_path, changes, message
):
    if isinstance(rows := changes.get("samples"), list):
        changes = changes | {"samples": given(tmp_path, *rows)}
    with pytest.raises(InputError, match=message) as caught:
        experiment(tmp_path / "run", **{"evaluation": "samples" not in changes} | changes)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_the_command_line_shows_all_settings_and_where_in_the_code_a_fault_is_if_asked(
    monkeypatch, capsys
):
    def ending(*arguments):
        monkeypatch.setattr("sys.argv", ["train_gsm8k.py", *arguments])
        with pytest.raises(SystemExit) as ended:
            gsm8k.main("train_gsm8k", gsm8k.__doc__, gsm8k.gsm8k_task)
        return ended.value.code

    assert ending("--help") == 0
    options = {f"--{field.name.replace('_', '-')}" for field in fields(Settings)} - {"--preset"}
    assert options <= set(re.findall("--[a-z-]+", capsys.readouterr().out.replace("--no-", "--")))
    assert ending("--lr", "-1") == "train_gsm8k: --lr -1.0: must be positive and finite"
    with pytest.raises(InputError):
        ending("--lr", "-1", "--debug")
    for option, value in {
        "--compute": "bf16",
        "--lr": "1e-5,",
        "--n": "1.5",
        "--limits": "1",
        "--lrr": "1",
    }.items():
        assert ending(option, value) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert re.match(f"train_gsm8k: .*{option}", line)
    for option in INSTEAD:
        for argument in (
            f"{option}=8",
            f"--no-{option[2:]}",
            option.replace("-", "_").replace("__", "--"),
        ):
            assert ending("paper", argument).startswith(f"train_gsm8k: {option}: is no option; ")


def test_the_engines_are_those_of_the_setting():
    assert set(get_args(EngineName)) == ENGINES.keys()


def test_a_rank_s_share_of_the_problems_is_drawn_as_one_process_draws_it(
    run, tmp_path, monkeypatch
):
    whole = read_records(run() / "iteration-1" / "samples.jsonl", Sample)
    monkeypatch.setattr("pipeline.stages.share_of", lambda prompts, gpus: (prompts[3:], 3))
    settings = replace(SMALL, out=tmp_path / "run")
    with open_run(settings, gsm8k.gsm8k_task(settings)) as other:
        found = other.sample(1, settings.model)
    assert [one.token_ids for one in found] == [one.token_ids for one in whole[3 * 8 :]]
