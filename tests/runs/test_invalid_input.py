"""What is refused in one line, before anything is written: settings, samples, models, commands."""

import contextlib
import json
import math
import pickle
import re
import shutil
import sys
from copy import deepcopy
from dataclasses import fields, replace
from pathlib import Path

import pytest
from run_helpers import ROOT, SMALL, input_error, run_small
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import train_gsm8k as gsm8k
from toprlib.language_model import load_without_weights
from toprlib.settings import TINY, Settings, read_settings

# ---- settings ------------------------------------------------------------------------------------
RANGES = {  # names of settings, values just inside, values just outside
    "at least 1": (
        "problems n examples epochs engine_gpus max_new_tokens batch_size micro_batch_size lora "
        "save_every k evals_per_epoch",
        [1],
        [0, -1],
    ),
    "at least 2": ("eval_samples", [2], [1]),
    "at least 0": ("iterations seed shots test_problems", [0], [-1]),
    "at least -1": ("top_k", [0, -1], [-2]),
    "positive": ("temperature lr max_grad_norm", [1e-9], [0.0, -1.0, math.inf, math.nan]),
    "above 0, at most 1": ("top_p effective_proportion", [1.0, 1e-9], [0.0, 1.5, math.nan]),
    "between 0 and 1": ("proportion", [0.5], [0.0, 1.0, math.nan]),
    "finite": ("baseline", [-1.0], [math.inf, math.nan]),
}


@pytest.mark.parametrize(("names", "inside", "outside"), RANGES.values(), ids=RANGES)
def test_numbers_out_of_range(names, inside, outside):
    for name in names.split():
        settings = replace(SMALL, k=1)
        if name == "proportion":
            settings = replace(settings, composition="proportion")
        for value in inside:
            gsm8k.check(replace(settings, **{name: value}))
        for value in outside:
            error = input_error(gsm8k.check, replace(settings, **{name: value}))
            assert error.option == f"--{name.replace('_', '-')}"


def test_every_number_has_a_range():
    numbers = {field.name for field in fields(Settings) if type(field.default) in (int, float)}
    in_ranges = {name for names, _, _ in RANGES.values() for name in names.split()}
    assert numbers <= in_ranges


INVALID_SETTINGS = {
    "unknown method": ({"method": "grpo"}, "--method"),
    "a+ above b+": ({"limits": (2.0, 1.0, 0.0, 1.0)}, "--limits"),
    "limits of PPO": ({"limits": (1.0, 1.0, 0.0, 1.0), "method": "ppo"}, "--limits"),
    "NaN limit": ({"limits": (math.nan, 1.0, 0.0, 1.0)}, "--limits"),
    "two baselines": ({"effective_proportion": 0.5, "baseline": 0.1}, "--effective-proportion"),
    "baseline of DPO": ({"baseline": 0.0, "method": "dpo"}, "--baseline"),
    "k above eval_samples": ({"eval_samples": 3, "k": 4}, "--k"),
    "odd batch of DPO": ({"batch_size": 7, "method": "dpo"}, "--batch-size"),
    "engine_gpus of hf": ({"engine_gpus": 2, "engine": "hf"}, "--engine-gpus"),
    "no such data": ({"data": "nowhere"}, "--data"),
    "no such model": ({"model": "nowhere"}, "--model"),
    "folder without a model": ({"model": "/"}, "--model"),
    "two iterations of samples": ({"samples": "s", "iterations": 2}, "--samples"),
    "evaluation of samples": ({"samples": "s", "iterations": 0}, "--samples"),
    "columns without samples": ({"columns": ("reward=score",)}, "--columns"),
    "columns that are no mapping": ({"samples": "s", "columns": ("a",)}, "--columns"),
    "log mu without samples": ({"trust_logmu": True}, "--trust-logmu"),
    "system without chat": ({"system": Path("system.txt")}, "--system"),
    "composition without a share": ({"composition": "proportion"}, "--proportion"),
    "share without composition": ({"proportion": 0.5}, "--proportion"),
    "prompt above the context": ({"max_new_tokens": 5000}, "--max-new-tokens"),
    "too many shots": ({"shots": 100}, "--shots"),
    "chat without a template": ({"chat": True}, "--chat"),
    "rank of LoRA above the width": ({"lora": 10000}, "--lora"),
}


@pytest.mark.parametrize(("changes", "option"), INVALID_SETTINGS.values(), ids=INVALID_SETTINGS)
def test_settings_that_cannot_be_run(tmp_path, changes, option):
    if "samples" in changes:
        changes = {"test_problems": 0} | changes
    error = input_error(run_small, tmp_path / "run", **changes)
    assert error.option == option
    assert not (tmp_path / "run").exists()


def test_lora_on_several_processes():
    assert input_error(gsm8k.check, replace(SMALL, lora=4), processes=2).option == "--lora"


def test_fewer_completions_per_step_than_processes():
    error = input_error(gsm8k.check, replace(SMALL, batch_size=7), processes=8)
    assert error.option == "--batch-size"


def test_preset_for_eight_processes_may_run_with_one(tmp_path, monkeypatch):
    """Without torchrun, a smaller batch than its eight need; its dry run is about the eight."""
    batch_sizes = []

    def record(settings, task):
        batch_sizes.append(settings.batch_size)
        return {"iterations": []}

    monkeypatch.setattr(gsm8k, "experiment", record)
    monkeypatch.setenv("TOPR_ON_CPU", "1")
    arguments = ["paper", "--batch-size", "4", "--data", SMALL.data, "--shots", "0"]
    arguments += ["--engine", "hf", "--out", str(tmp_path / "run")]
    for changes in ([], ["--dry-run"]):
        monkeypatch.setattr(sys, "argv", ["train_gsm8k.py", *arguments, *changes])
        with contextlib.suppress(SystemExit):
            gsm8k.main("train_gsm8k", "", gsm8k.gsm8k_task)
    assert batch_sizes == [4]


def test_lora_without_peft(tmp_path, monkeypatch):
    monkeypatch.setattr("toprlib.preflight.find_spec", lambda name: None)
    error = input_error(run_small, tmp_path / "run", lora=4)
    assert error.option == "--lora"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("split", ["train", "test"])
def test_task_without_problems(tmp_path, split):
    def make_task(settings):
        return replace(gsm8k.gsm8k_task(settings), **{split: []})

    error = input_error(run_small, tmp_path / "run", make_task)
    assert error.option == {"train": "--problems", "test": "--test-problems"}[split]
    assert not (tmp_path / "run").exists()


# ---- samples of the user -------------------------------------------------------------------------
INVALID_SAMPLES = {  # rows, changes, line, field, option
    "no samples": ([], {}, None, None, None),
    "too long": ([{}, {"completion": " A" * 5000}], {}, 2, "completion", None),
    "foreign token ids": ([{"token_ids": [5, 6]}], {}, 1, "token_ids", None),
    "token ids out of range": ([{"token_ids": [5, 10**6]}], {}, 1, "token_ids", None),
    "empty prompt": ([{"prompt": ""}], {}, 1, "prompt", None),
    "empty completion": ([{"completion": ""}], {}, 1, "completion", None),
    "NaN reward": ([{}, {"reward": math.nan}], {}, 2, "reward", None),
    "boolean reward": ([{"reward": True}], {}, 1, "reward", None),
    "reward is missing": ([{}, {"reward": None}], {}, 2, "reward", None),
    "log mu of too few tokens": (
        [{"token_logmu": [-1]}],
        {"trust_logmu": True},
        1,
        "token_logmu",
        None,
    ),
    "no log mu to trust": (
        [{"token_logmu": [-1, -1]}, {}],
        {"trust_logmu": True},
        2,
        "token_logmu",
        "--trust-logmu",
    ),
    "no such column": ([{}], {"columns": ("reward=score",)}, 1, "reward", "--columns"),
    "no positives": ([{}, {}], {"composition": "positives_only"}, None, None, "--composition"),
    "no positives of SFT": (
        [{"reward": 0.5}, {}],
        {"method": "sft", "baseline": 0.5},  # one reward is 0, the other below
        None,
        None,
        "--method",
    ),
    "no pair": ([{}, {"prompt": "P", "reward": 1}], {"method": "dpo"}, None, None, "--method"),
    "share of other rewards": (
        [{"reward": 0.5}, {}],
        {"effective_proportion": 0.5},
        None,
        None,
        "--effective-proportion",
    ),
}


@pytest.mark.parametrize("case", INVALID_SAMPLES)
def test_samples_that_cannot_be_trained_on(tmp_path, case):
    rows, changes, line, field, option = INVALID_SAMPLES[case]
    file = tmp_path / "samples.jsonl"
    defaults = {"prompt": "Q", "completion": " A", "reward": -1}
    file.write_text("".join(json.dumps(defaults | row) + "\n" for row in rows))
    options = {"samples": str(file), "test_problems": 0} | changes
    error = input_error(run_small, tmp_path / "run", **options)
    assert (error.line, error.field, error.option) == (line, field, option)
    if line is not None:
        assert error.file == str(file)
    assert not (tmp_path / "run").exists()


def test_samples_that_are_not_there(tmp_path):
    error = input_error(run_small, tmp_path / "run", samples="nowhere.jsonl", test_problems=0)
    assert error.file == "nowhere.jsonl"
    assert not (tmp_path / "run").exists()


# ---- models --------------------------------------------------------------------------------------
@pytest.fixture
def model_copy(tmp_path):
    """A copy of the default model, for a test to change."""
    return shutil.copytree(SMALL.model, tmp_path / "model")


def replace_weights_by_pickle(folder, mark):
    class Harmful:
        def __reduce__(self):
            return (Path.touch, (mark,))

    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Harmful()))


def change_json(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def add_code(folder, mark):
    change_json(folder / "config.json", model_type="own", auto_map={"AutoConfig": "own.OwnConfig"})
    (folder / "own.py").write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n")


def cut_weights(folder, mark):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])


def damage_config(folder, mark):
    (folder / "config.json").write_text("{")


def mistype_context(folder, mark):
    change_json(folder / "config.json", max_position_embeddings="many")


def halve_width(folder, mark):
    change_json(folder / "config.json", hidden_size=64)


def damage_tokenizer(folder, mark):
    (folder / "tokenizer.json").write_text('{"model": ')


def empty_tokenizer(folder, mark):
    (folder / "tokenizer.json").write_text("{}")


def damage_generation_config(folder, mark):
    (folder / "generation_config.json").write_text("{")


def end_every_prompt(folder, mark):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", tokenizer.eos_token_id)]
    )
    tokenizer.save_pretrained(folder)


def take_the_model_from_elsewhere(folder, mark):
    """With half as many tokens as the tokenizer has."""
    config = AutoConfig.from_pretrained(folder, vocab_size=384)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def add_adapter(folder, mark):
    """transformers would load the model that the adapter names, in place of this one."""
    adapter = {"base_model_name_or_path": str(TINY / "base"), "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))


@pytest.mark.parametrize(
    "change",
    [
        replace_weights_by_pickle,
        add_code,
        cut_weights,
        damage_config,
        mistype_context,
        halve_width,
        damage_tokenizer,
        empty_tokenizer,
        end_every_prompt,
        damage_generation_config,
        take_the_model_from_elsewhere,
        add_adapter,
    ],
)
def test_model_that_is_damaged_or_not_to_be_trusted(model_copy, tmp_path, change):
    mark = tmp_path / "harm"
    change(model_copy, mark)
    error = input_error(run_small, tmp_path / "run", model=str(model_copy))
    assert (error.option, error.file) == ("--model", str(model_copy))
    assert not mark.exists()  # none of the folder's code has run


ONE_LAYER = {"num_hidden_layers": 3}  # of four


@pytest.mark.parametrize(
    ("removed", "config", "named"),
    [
        ("model.norm.weight", {}, "model.norm.weight"),
        ("model.layers.1.self_attn.k_proj.weight", {}, "model.layers.1.self_attn.k_proj.weight"),
        (None, ONE_LAYER, "model.layers.3.input_layernorm.weight"),
        (None, {"tie_word_embeddings": False}, "lm_head.weight"),
        (None, {"attention_bias": True}, "model.layers.0.self_attn.k_proj.bias"),
        (None, {"num_key_value_heads": 2}, "model.layers.0.self_attn.k_proj.weight"),
    ],
)
@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_weights_that_do_not_fit_the_model_are_named(
    model_copy, tmp_path, removed, config, named, engine
):
    """Before anything is written, whatever would sample first."""
    weights = load_file(model_copy / "model.safetensors")
    weights.pop(removed, None)
    save_file(weights, model_copy / "model.safetensors", metadata={"format": "pt"})
    change_json(model_copy / "config.json", **config)
    options = {"model": str(model_copy), "engine": engine, "iterations": 0}
    error = input_error(run_small, tmp_path / "run", **options)
    assert (error.option, error.file) == ("--model", str(model_copy))
    assert named in str(error)
    assert not (tmp_path / "run").exists()


def test_prompt_with_a_token_that_the_model_lacks(lm, model_copy, tmp_path):
    tokenizer = deepcopy(lm.tokenizer)
    tokenizer.add_tokens(["A:"])
    tokenizer.save_pretrained(model_copy)
    error = input_error(run_small, tmp_path / "run", model=str(model_copy))
    assert (error.option, error.file) == ("--model", str(model_copy))
    assert not (tmp_path / "run").exists()


def test_model_without_an_end(lm, model_copy):
    tokenizer = deepcopy(lm.tokenizer)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(model_copy)
    change_json(model_copy / "generation_config.json", eos_token_id=None)
    change_json(model_copy / "config.json", eos_token_id=None)
    error = input_error(load_without_weights, str(model_copy))
    assert (error.option, error.file) == ("--model", str(model_copy))


def test_model_without_a_context_length(model_copy):
    config = {"model_type": "bloom", "hidden_size": 8, "n_layer": 1, "n_head": 1, "vocab_size": 600}
    (model_copy / "config.json").write_text(json.dumps(config))
    error = input_error(load_without_weights, str(model_copy))
    assert (error.option, error.file) == ("--model", str(model_copy))


# ---- the command line ----------------------------------------------------------------------------
def exit_status(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["train_gsm8k.py", *arguments])
    with pytest.raises(SystemExit) as raised:
        gsm8k.main("train_gsm8k", gsm8k.__doc__, gsm8k.gsm8k_task)
    return raised.value.code


def test_help_names_every_option_and_at_most_45(monkeypatch, capsys):
    assert exit_status(monkeypatch, "--help") == 0
    _, _, options_part = capsys.readouterr().out.partition(" options ")
    shown = set(re.findall(r"^. (--[a-z-]+)", options_part, re.MULTILINE))
    shown = {option.replace("--no-", "--") for option in shown}
    names = {field.name for field in fields(Settings)} - {"preset"}
    expected = {f"--{name.replace('_', '-')}" for name in names}
    assert shown == expected
    assert len(shown) <= 45


@pytest.mark.parametrize(
    "arguments",
    [
        ("--dtype", "bf16"),
        ("--lr", "1e-5,"),
        ("--n", "1.5"),
        ("--limits", "1"),
        ("--lrr", "1"),
        ("nosuchpreset",),
        ("--held-out", "FILE"),  # an option of earlier versions
    ],
)
def test_argument_that_cannot_be_parsed_is_status_2(monkeypatch, capsys, arguments):
    assert exit_status(monkeypatch, *arguments) == 2
    captured = capsys.readouterr()
    assert arguments[0] in captured.out + captured.err


@pytest.mark.parametrize(("arguments", "option"), [(("--k", "0"), "--k"), (("--lr", "-1"), "--lr")])
def test_invalid_setting_is_status_1_and_one_line(monkeypatch, capsys, arguments, option):
    assert exit_status(monkeypatch, *arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    [line] = captured.err.splitlines()
    assert line.startswith(f"train_gsm8k: {option}: ")


def test_preset_comes_first():
    presets = {"paper": gsm8k.PRESETS["paper"], "laptop": Settings()}
    expected = replace(presets["paper"], seed=1, out=Path("runs/paper_seed=1"))
    assert read_settings(["paper", "--seed", "1"], presets) == expected
    assert input_error(read_settings, ["--seed", "1", "paper"], presets).option == "preset"
    assert input_error(read_settings, ["single-gpu"], presets).option == "preset"


# ---- the folder ----------------------------------------------------------------------------------
def test_folder_that_is_a_file(tmp_path):
    (tmp_path / "run").write_text("something")
    error = input_error(run_small, tmp_path / "run")
    assert (error.option, error.file) == ("--out", str(tmp_path / "run"))
    assert (tmp_path / "run").read_text() == "something"


def test_folder_of_something_else(tmp_path):
    (tmp_path / "notes.txt").touch()
    error = input_error(run_small, tmp_path)
    assert (error.option, error.file) == ("--out", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def with_changed_question(part):
    """Small word problems, the last one of which has one word more."""

    def make_task(settings):
        task = gsm8k.gsm8k_task(settings)
        problems = list(getattr(task, part))
        problems[-1] = replace(problems[-1], question=f"{problems[-1].question} Now")
        return replace(task, **{part: problems})

    return make_task


@pytest.mark.parametrize("part", ["train", "test"])
def test_finished_run_of_other_problems_is_refused(tmp_path, part):
    run = tmp_path / "run"
    run_small(run)
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    error = input_error(run_small, run, with_changed_question(part))
    assert (error.option, error.file) == ("--out", str(run))
    assert "problems_crc32" in error.message
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == files


def test_project_is_not_a_folder_for_a_run():
    assert input_error(run_small, ROOT).option == "--out"
