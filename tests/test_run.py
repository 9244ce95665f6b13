"""The script from end to end at a small size: what it writes, that it repeats itself, and what it refuses."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from runs import SMALL, experiment
from safetensors.torch import load_file

import topr
import train_gsm8k as gsm8k
from pipeline.dataset import compose
from pipeline.evaluation import print_table
from pipeline.methods import dpo_loss, ppo_loss
from pipeline.metrics import START_TOLERANCE
from pipeline.models.language_model import META, collate, load_model, token_logprobs
from pipeline.records import Example, InputError, Sample, read_rows, to_lines
from pipeline.stages import make_loss
from train_gsm8k import PRESETS

SCRIPT = Path(gsm8k.__file__)
SAMPLES, TRAIN, METRICS, MODEL = (
    f"iteration-1/{name}" for name in ("samples.jsonl", "train.jsonl", "metrics.jsonl", "model")
)


def run_on(folder, **changes):
    """A run of one's own; samples that are given are evaluated on the usual test problems."""
    return experiment(folder, **({"test_data": SMALL.data} if "samples" in changes else {}) | changes)


@pytest.fixture(scope="module")
def finished(run):
    """The small run as it is; its samples serve the tests that need no others."""
    return run()


def test_the_run_folder_holds_what_the_readme_says(finished):
    names = {file.name for file in finished.iterdir()}
    assert names == {".lock", "config.json", "iteration-1", "results.json", "curve.png"}
    names = {file.name for file in (finished / "iteration-1").iterdir()}
    tests = {"test-0.jsonl", "test-2.jsonl", "test-4.jsonl"}
    assert names == {"samples.jsonl", "train.jsonl", "dataset.json", "metrics.jsonl", "model", "SHA256SUMS", *tests}
    subprocess.run(["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=finished / "iteration-1", check=True)
    subprocess.run(["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=finished / "iteration-1" / "model", check=True)
    results = json.loads((finished / "results.json").read_text())
    [iteration] = results["iterations"]
    for entry in (results["before"], iteration["after"]):
        assert entry["correct"] + entry["incorrect"] + entry["invalid"] == pytest.approx(1)
        for name in ("pass@1", "maj@4", "pass@4"):
            assert 0 <= entry[name]["mean"] <= 1
            assert entry[name]["se"] >= 0
    assert [point["samples_seen"] for point in iteration["curve"]] == [0, 32, 64]
    assert iteration["dataset"]["trained"] == iteration["dataset"]["drawn"]
    assert iteration["dataset"]["drawn"]["samples"] == 64
    assert json.loads((finished / "config.json").read_text())["method"] == "topr"
    metrics = [json.loads(line) for line in (finished / "iteration-1" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    assert (finished / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_samples_are_graded_and_what_is_trained_on_has_its_log_mu(finished):
    samples = read_rows(finished / SAMPLES, Sample)
    assert len(samples) == 64
    assert all(sample.reward == (1.0 if sample.outcome == "correct" else -1.0) for sample in samples)
    examples = read_rows(finished / TRAIN, Example)
    assert sorted(example.sample for example in examples) == list(range(64))
    assert [example.row for example in examples] == list(range(64))
    for example in examples:
        sample = samples[example.sample]
        assert (example.completion_ids, example.reward) == (sample.token_ids, sample.reward)
        assert len(example.token_logmu) == len(example.completion_ids)
        assert all(logmu <= 0 for logmu in example.token_logmu)
        assert example.logmu == pytest.approx(sum(example.token_logmu))


def test_the_model_is_an_ordinary_folder_and_has_changed(finished):
    model = transformers.AutoModelForCausalLM.from_pretrained(finished / MODEL)
    base = transformers.AutoModelForCausalLM.from_pretrained(gsm8k.Settings().model)
    changes = [(new - old).abs().max() for new, old in zip(model.parameters(), base.parameters(), strict=True)]
    assert 0 < max(changes) < 0.1
    assert transformers.AutoTokenizer.from_pretrained(finished / MODEL)("1 + 1")["input_ids"]


def test_a_model_without_weights_knows_what_ends_a_sequence(lm, tmp_path):
    lm.model.save_pretrained(tmp_path)
    lm.tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "generation_config.json").read_text()) | {"eos_token_id": [1, 7]}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    meta = load_model(str(tmp_path), META)
    assert meta.ends == load_model(str(tmp_path)).ends == {1, 7}
    assert meta.text([300, 7]) == meta.text([300]) == meta.text([300, 1])
    assert {weight.device.type for weight in meta.model.parameters()} == {"meta"}
    assert meta.context == lm.context


@pytest.mark.slow
def test_same_seed_same_bits(finished, tmp_path):
    run_on(tmp_path / "again")
    for name in (SAMPLES, TRAIN, METRICS, f"{MODEL}/model.safetensors", "results.json"):
        assert (tmp_path / "again" / name).read_bytes() == (finished / name).read_bytes(), name


def test_a_finished_run_is_shown_and_not_made_again(finished, capsys):
    stamp = (finished / "results.json").stat().st_mtime_ns
    run_on(finished)
    assert "this run is finished" in capsys.readouterr().out
    assert (finished / "results.json").stat().st_mtime_ns == stamp


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        *(({"method": name}, partial(topr.topr_loss, limits=topr.PRESETS[name])) for name in topr.PRESETS),
        ({"limits": (0.5, 2.0, 0.1, 0.9)}, partial(topr.topr_loss, limits=topr.Limits(0.5, 2.0, 0.1, 0.9))),
        ({"method": "ppo", "eps": 0.4}, partial(ppo_loss, eps=0.4)),
        (
            {"method": "dpo", "beta": 0.3},
            lambda logp, logmu, *_, **__: dpo_loss(logp[::2], logp[1::2], logmu[::2], logmu[1::2], beta=0.3),
        ),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_every_setting_reaches_its_loss(settings, expected):
    logp = torch.tensor([-3.0, -2.0, -1.0, -4.0], requires_grad=True)
    batch = (torch.tensor([-1.0, -1.1, -3.0, -2.5]), torch.tensor([1.0, -1.0, 1.0, -1.0]), torch.arange(1, 5))
    loss = make_loss(replace(SMALL, **settings))
    found = torch.autograd.grad(loss(logp, *batch, denominator=4), logp)[0]
    torch.testing.assert_close(found, torch.autograd.grad(expected(logp, *batch), logp)[0])


@pytest.mark.parametrize(
    ("settings", "positive", "negative"),
    [
        ({}, 1, -1),
        ({"baseline": -0.5}, 1.5, -0.5),
        ({"effective_proportion": 0.5}, 1.5, -0.5),  # 4 positives of 16: c = (1/4 - 1/2) / (3/4 - 1/4) = -1/2
        ({"baseline_from": "group", "baseline": 0.5}, 1, -1),  # the mean is -1/2
    ],
)
def test_the_baseline_reaches_the_rewards(lm, settings, positive, negative):
    given = [Sample(prompt="Q", completion=f" {i}", reward=1.0 if i < 4 else -1.0) for i in range(16)]
    rows, _ = compose(replace(SMALL, **settings), given, lm, ())
    rewards = sorted(example.reward for row in rows for example in row)
    assert rewards == pytest.approx([negative] * 12 + [positive] * 4)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["tis", "sft", "reinforce", "off_policy", "ppo", "dpo"])
def test_every_method_trains_on_given_samples(finished, tmp_path, method):
    results = run_on(tmp_path / method, method=method, samples=finished / SAMPLES)
    assert results["iterations"][0]["after"]["samples_per_question"] == 6
    assert (tmp_path / method / SAMPLES).read_bytes() == (finished / SAMPLES).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"limits": (0.5, 2.0, 0.0, 1.0)},
        {"baseline": -0.5},
        {"effective_proportion": 0.5},
        {"completions_per_row": 8},
        {"micro_batch": 4, "completions_per_row": 2},
    ],
    ids=str,
)
def test_options_of_training(finished, tmp_path, changes):
    run_on(tmp_path / "run", samples=finished / SAMPLES, **changes)


@pytest.mark.slow
def test_text_alone_suffices_and_gets_an_end_of_sequence(finished, tmp_path):
    samples = read_rows(finished / SAMPLES, Sample)
    ends = {sample.completion: sample.token_ids[-1] for sample in samples}
    file = tmp_path / "text.jsonl"
    lines = [{"prompt": s.prompt, "completion": s.completion, "reward": s.reward} for s in samples]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run_on(tmp_path / "run", samples=file)
    texts = [sample.completion for sample in read_rows(tmp_path / "run" / SAMPLES, Sample)]
    for example in read_rows(tmp_path / "run" / TRAIN, Example):
        assert example.completion_ids[-1] == ends[texts[example.sample]]


def test_more_processes_than_rows_in_a_step_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "16")
    with pytest.raises(InputError, match="--batch 8: is less than a row for each of 16 processes"):
        gsm8k.check(PRESETS["paper"])
    gsm8k.check(replace(PRESETS["paper"], batch=16))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["topr", "dpo"])
def test_bfloat16_with_recomputed_activations(finished, tmp_path, method):
    precise = {
        "compute": "bfloat16",
        "gradient_checkpointing": True,
        "optimizer": "adafactor",
        "sliced_head": method == "topr",
    }
    run_on(tmp_path, samples=finished / SAMPLES, method=method, **precise)
    assert {weight.dtype for weight in load_file(tmp_path / MODEL / "model.safetensors").values()} == {torch.float32}


@pytest.mark.slow
def test_iterations_sample_from_the_model_that_the_one_before_has_made(tmp_path, capsys):
    results = run_on(
        tmp_path, iterations=2, composition="anna_karenina", candidates=8, examples=54, curve_points=1, lr=1e-3
    )
    print_table(results)
    assert "after iteration 2" in capsys.readouterr().out
    first, second = results["iterations"]
    assert {"samples_seen": 0, **first["after"]} == second["curve"][0]
    assert [point["samples_seen"] for point in first["curve"]] == [0, first["dataset"]["trained"]["samples"]]
    assert first["dataset"]["seed"] != second["dataset"]["seed"]
    samples = read_rows(tmp_path / "iteration-2" / "samples.jsonl", Sample)
    trained = read_rows(tmp_path / "iteration-2" / "train.jsonl", Example)
    assert len(trained) == second["dataset"]["trained"]["samples"] < 64 == second["dataset"]["drawn"]["samples"]
    assert sum(example.reward > 0 for example in trained) == second["dataset"]["trained"]["positive"]
    lm = load_model(str(tmp_path / MODEL))  # log mu of iteration 2 is that of the model after iteration 1
    batch = collate([[trained[0]]])
    assert token_logprobs(lm.model, batch).sum().item() == pytest.approx(trained[0].logmu, abs=1e-4)
    assert samples[trained[0].sample].token_ids == trained[0].completion_ids


def with_other_logmu(finished, folder):
    """The finished run's samples, with log mu lower by 0.1 a token."""
    file = folder / "other.jsonl"
    samples, logmu = read_rows(finished / SAMPLES, Sample), {}
    for example in read_rows(finished / TRAIN, Example):
        logmu[example.sample] = [x - 0.1 for x in example.token_logmu]
    file.write_text(to_lines([s.model_copy(update={"token_logmu": logmu[i]}) for i, s in enumerate(samples)]))
    return file


@pytest.mark.slow
def test_log_mu_of_given_samples_is_scored_again(finished, tmp_path):
    run_on(tmp_path / "run", samples=with_other_logmu(finished, tmp_path))
    assert (tmp_path / "run" / TRAIN).read_bytes() == (finished / TRAIN).read_bytes()


@pytest.mark.slow
def test_log_mu_that_is_trusted_is_used(finished, tmp_path):
    run_on(tmp_path / "run", samples=with_other_logmu(finished, tmp_path), trust_logmu=True)
    first = json.loads((tmp_path / "run" / METRICS).read_text().splitlines()[0])
    lengths = [len(sample.token_ids) for sample in read_rows(finished / SAMPLES, Sample)]
    assert 0.1 * min(lengths) - 0.01 <= first["log_ratio_pos_q50"] <= 0.1 * max(lengths) + 0.01


def test_another_run_s_samples_are_taken_as_they_are(finished, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.stages.draw", lambda *_: pytest.fail("drawn again"))
    before = replace(SMALL, iterations=0, reuse=finished, out=tmp_path / "run", lr=1.0)
    results = gsm8k.experiment(before, gsm8k.gsm8k_task(before))
    assert results["before"] == json.loads((finished / "results.json").read_text())["before"]
    assert (tmp_path / "run" / "iteration-1" / "test-0.jsonl").read_bytes() == (
        finished / "iteration-1" / "test-0.jsonl"
    ).read_bytes()


def test_log_mu_that_is_wrong_ends_the_run_before_anything_is_trained(finished, tmp_path, monkeypatch):
    def wrong(rows, *_):
        return [[replace(example, token_logmu=[-1.0], logmu=-1.0) for example in row] for row in rows]

    monkeypatch.setattr("pipeline.stages.dataset.score", wrong)
    with pytest.raises(ArithmeticError, match=r"step 1: \|log pi - log mu\| reaches"):
        run_on(tmp_path / "run", samples=finished / SAMPLES)
    assert not (tmp_path / "run" / MODEL).exists()
    assert not (tmp_path / "run" / METRICS).exists()
    monkeypatch.setitem(START_TOLERANCE, "float32", 1000.0)
    run_on(tmp_path / "run", samples=finished / SAMPLES)  # the same run goes on
    assert (tmp_path / "run" / MODEL).exists()


def test_a_model_s_files_are_hashed_once(finished, tmp_path, monkeypatch):
    hashed = []
    monkeypatch.setattr("pipeline.stages.check_folder", hashed.append)
    run_on(tmp_path / "run", samples=finished / SAMPLES)  # the base model samples, scores and begins training
    here = tmp_path / "run" / "iteration-1"
    assert hashed == [Path(SMALL.model), here / "model-2", here / "model"]


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["test-2.jsonl", "model"])
def test_what_was_removed_is_made_again_with_the_same_bits(finished, tmp_path, lost):
    """A point of the curve needs its model, which training must then save again."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    (folder / "results.json").unlink()
    if lost == "model":
        shutil.rmtree(folder / MODEL)
    else:
        (folder / "iteration-1" / lost).unlink()
    run_on(folder)
    for name in ("results.json", METRICS, f"{MODEL}/model.safetensors", "iteration-1/test-2.jsonl"):
        assert (folder / name).read_bytes() == (finished / name).read_bytes(), name
    assert not list((folder / "iteration-1").glob("model-*"))


# ---- bad input: one clear line, nothing written ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "grpo"}, "--method grpo: choose from topr, tis"),
        ({"limits": (2.0, 1.0, 0.0, 1.0)}, r"--limits: limits a_pos = 2, b_pos = 1: need 0 <= a <= b"),
        ({"limits": (1.0, 1.0, 0.0, 1.0), "method": "ppo"}, "--limits: have no meaning"),
        ({"eps": 1.5}, r"--eps 1.5: must lie in \[0, 1\]"),
        ({"lr": -1.0}, "--lr -1.0: must be positive"),
        ({"temperature": 0.0}, "--temperature 0.0: must be positive"),
        ({"max_new_tokens": 0}, "--max-new-tokens 0: must be at least 1"),
        ({"pairs": 0}, "--pairs 0: must be at least 1"),
        ({"shots_file": Path("shots.txt")}, "--shots-file: say with --shots"),
        ({"effective_proportion": 0.0}, r"--effective-proportion 0.0: must lie in \(0, 1\]"),
        ({"effective_proportion": 1.5}, r"--effective-proportion 1.5: must lie in \(0, 1\]"),
        ({"effective_proportion": 0.5, "baseline": 0.1}, "sets the baseline; give no other"),
        ({"baseline": float("nan")}, "--baseline nan: must be finite"),
        ({"baseline": 0.0, "method": "dpo"}, "has no baseline"),
        ({"test_samples": 3}, "--test-samples 3: must be at least --k 4; with more, maj@4 has an interval"),
        ({"curve_samples": 1}, "--curve-samples 1: must be at least 2"),
        ({"problems": 0}, "--problems 0: must be at least 1"),
        ({"batch": 6}, "--batch 6: must be a multiple"),
        ({"data": "nowhere"}, "--data or --test-data nowhere"),
        ({"model": "nowhere"}, "--model nowhere: is neither a folder nor"),
        ({"samples": Path("nothing.jsonl")}, "nothing.jsonl: no such file"),
        ({"samples": Path("nothing.jsonl"), "iterations": 2}, "--samples: serve one iteration"),
        ({"trust_logmu": True}, "--trust-logmu: is for --samples"),
        ({"composition": "proportion"}, "--composition proportion and --proportion P: give both or neither"),
        ({"proportion": 0.5}, "--composition proportion and --proportion P: give both or neither"),
        ({"composition": "proportion", "proportion": 1.0}, r"--proportion 1.0: must lie in \(0, 1\)"),
        ({"iterations": -1}, "--iterations -1: must be at least 0"),
        ({"examples": 0}, "--examples 0: must be at least 1"),
        ({"max_new_tokens": 5000}, r"problem t\w+-\d+: its prompt has \d+ tokens; with 5000 new ones it exceeds"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_before_anything_is_written(tmp_path, changes, message):
    with pytest.raises(InputError, match=message) as caught:
        run_on(tmp_path / "run", **({"completions_per_row": 4} | changes))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def sample_file(tmp_path, *rows):
    file = tmp_path / "given.jsonl"
    file.write_text("".join(json.dumps({"prompt": "Q", "completion": " A", "reward": -1} | row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        ([{}, {"completion": " A" * 5000}], {}, r"given.jsonl:2: field completion: \d+ tokens with its prompt"),
        ([{"token_ids": [9999]}], {}, "given.jsonl:1: field token_ids: outside the model's vocabulary"),
        ([{"token_ids": [5, 6]}], {}, "given.jsonl:1: field token_ids: are not the completion's in this model's"),
        ([{"token_logmu": [-1]}], {}, "given.jsonl:1: field token_logmu: 1 of them, 2 tokens"),
        ([{"prompt": ""}], {}, "given.jsonl:1: field prompt: is empty"),
        ([{"completion": ""}], {}, "given.jsonl:1: field completion: is empty"),
        ([{"token_logmu": [-1, -1]}, {}], {"trust_logmu": True}, "given.jsonl:2: field token_logmu: is missing"),
        ([{}, {}], {"composition": "positives_only"}, "--composition positives_only: none of the 2 samples fits"),
        ([{}, {}], {"method": "sft"}, "--method sft: no positive sample"),
        ([{"reward": 0.5}, {}], {"method": "sft", "baseline": 0.8}, "--method sft: no positive sample"),
        ([{}, {}], {"limits": (1.0, 1.0, 0.0, 0.0)}, "no positive sample"),
        ([{}, {"prompt": "P", "reward": 1}], {"method": "dpo"}, "no problem has both"),
        ([{}, {}], {"effective_proportion": 0.5}, "samples of both signs"),
    ],
    ids=str,
)
def test_samples_that_cannot_be_trained_on_are_named(tmp_path, rows, changes, message):
    with pytest.raises(InputError, match=message):
        run_on(tmp_path / "run", samples=sample_file(tmp_path, *rows), **changes)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_other_samples_under_the_same_name_are_another_run(finished, tmp_path):
    file = tmp_path / "given.jsonl"
    lines = (finished / SAMPLES).read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:16]))
    run_on(tmp_path / "run", samples=file)
    file.write_text("".join(lines[16:32]))
    with pytest.raises(InputError, match="holds a run with other settings"):
        run_on(tmp_path / "run", samples=file)


def test_a_folder_of_another_run_is_refused_and_left_as_it_is(finished):
    before = {file: file.stat().st_mtime_ns for file in finished.iterdir()}
    with pytest.raises(InputError, match="holds a run with other settings"):
        run_on(finished, seed=1)
    assert {file: file.stat().st_mtime_ns for file in finished.iterdir()} == before


def test_a_folder_of_the_former_layout_is_refused_by_name(finished, tmp_path):
    (tmp_path / "run").mkdir()
    config = json.loads((finished / "config.json").read_text())
    del config["format"]
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"run: holds a run of another version of this project.* choose another --out"):
        run_on(tmp_path / "run")
    with pytest.raises(InputError, match=r"run: holds a run of another version of this project.* give a --reuse"):
        run_on(tmp_path / "new", reuse=tmp_path / "run")
    assert {file.name for file in tmp_path.iterdir()} == {"run"}


# ---- the command line --------------------------------------------------------------------------------------------


def command(*arguments):
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=False)


def test_the_command_line_prints_one_line_for_bad_input(tmp_path):
    done = command("--test-samples", "4", "--out", str(tmp_path / "run"))
    assert done.returncode == 1
    told = "train_gsm8k: --test-samples 4: must be at least --k 16; with more, maj@16 has an interval"
    assert done.stderr.strip() == told


def test_the_command_line_names_an_unknown_method(tmp_path):
    done = command("--method", "grpo", "--out", str(tmp_path / "run"))
    assert done.returncode != 0
    assert "grpo" in done.stderr


def test_the_command_line_shows_every_setting_with_its_origin():
    done = command("--help")
    assert done.returncode == 0
    for name in ("--method", "--limits", "--effective-proportion", "--completions-per-row", "--seed", "--out"):
        assert name in done.stdout


def test_the_folder_is_named_after_what_differs():
    usual = gsm8k.Settings()
    assert usual.default_out(usual) == Path("runs/laptop")
    assert replace(usual, method="reinforce", seed=3).default_out(usual) == Path("runs/laptop_method=reinforce_seed=3")
    long = {replace(usual, model="/long" * 40, seed=seed).default_out(usual).name for seed in range(3)}
    assert {len(name) for name in long} == {120}  # what is cut off still tells them apart
    assert len(long) == 3
    signs = {replace(usual, baseline=c).default_out(usual) for c in (-0.5, 0.5)}
    assert len(signs) == 2


@pytest.mark.slow
def test_eight_shots_on_real_problems_run_end_to_end(real, tmp_path):
    results = run_on(
        tmp_path / "run",
        data=str(real),
        shots=8,
        problems=2,
        n=4,
        test_problems=2,
        completions_per_row=4,
        batch=4,
    )
    assert results["before"]["questions"] == 2
