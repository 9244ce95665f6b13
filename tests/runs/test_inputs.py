"""Inputs and their right outcome: a short refusal, with nothing half-written, or the right value.

Each row was once a wrong result without a word, or a long traceback. Grades of single answers are
in tests/tasks.
"""

import io
import json
import math
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import SMALL, TWO_ITERATIONS, checksums, read_rows, run_small, write_rows
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, BartConfig, ViTConfig

import train_gsm8k as gsm8k
from toprlib.records import InputError
from toprlib.settings import TINY, Settings, command, read_settings

ROW = {"prompt": "Q", "completion": " A", "reward": -1}


def run_command(monkeypatch, *arguments):
    """The exit status of the command, or what it says instead."""
    monkeypatch.setattr(sys, "argv", ["train_gsm8k.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as raised:
        gsm8k.main("train_gsm8k", gsm8k.__doc__, gsm8k.gsm8k_task)
    return raised.value.code


# ---- options -------------------------------------------------------------------------------------
OPTIONS = [
    *("--dtype bf16", "--lr 1e-5,", "--n 1.5", "--limits 1", "--lrr 1", "nosuchpreset"),
    *("--k 0", "--lr -1", "--lr nan", "--lr inf", "--temperature 0", "--baseline inf"),
    *("--eval-samples 1", "--top-k -2", "--proportion 1", "--save-every 0", "--seed -1"),
    *("--limits 2 1 0 1", "--limits nan 1 0 1", "--method ppo --limits 1 1 0 1"),
    *("--method dpo --baseline 1", "--effective-proportion 0.5 --baseline 0.1"),
    *("--eval-samples 3 --k 4", "--engine-gpus 2", "--trust-logmu"),
    *("--composition proportion", "--proportion 0.5"),
    "--samples s --test-problems 0 --iterations 2",
    "--samples s",  # with the default test problems, which are of another kind
    *("--data no/such/place", "--model no/such/place", "--model /"),
    "--samples no/such/place.jsonl --test-problems 0",
    "--max-new-tokens 5000",  # above the context with any prompt
    "--chat",  # of a tokenizer without a template
]


@pytest.mark.parametrize("arguments", OPTIONS)
def test_options_that_cannot_be_run(arguments, monkeypatch, tmp_path, capsys):
    folder = tmp_path / "run"
    status = run_command(monkeypatch, *arguments.split(), "--out", folder)
    assert status not in (0, None)
    assert not folder.exists()
    message = str(status) + capsys.readouterr().err
    assert "Traceback" not in message
    assert len(message.splitlines()) < 20


def test_preset_comes_first_and_the_default_folder_has_what_differs():
    presets = {"laptop": Settings(), "paper": gsm8k.PAPER}
    expected = replace(gsm8k.PAPER, seed=1, out=Path("runs/paper_seed=1"))
    assert read_settings(["paper", "--seed", "1"], presets) == expected
    folders = set()
    for arguments in ([], ["--seed", "1"], ["--lr", "1e-3"], ["--lr", "1.5e-3"]):
        folders.add(read_settings(arguments, presets).out)
    assert len(folders) == 4
    assert read_settings(["--dry-run", "--out", "x"], presets).out == Path("x")
    # for a task with test problems of its own
    assert read_settings(["--samples", "own.jsonl"], presets).test_problems > 0


def test_output_that_a_terminal_cannot_show_does_not_end_a_run(monkeypatch):
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, "ascii"))
    with command("train_gsm8k"):
        print("7 ± 2", flush=True)
    assert shown.getvalue() == b"7 ? 2\n"


# ---- own samples ---------------------------------------------------------------------------------
SAMPLES = {  # lines, changes of settings, what the message has to name
    "messages": ([ROW, ROW | {"prompt": [{"role": "user", "content": "Q"}]}], {}, ":2: prompt"),
    "no log mu to trust": ([ROW], {"trust_logmu": True}, "sample 1: token_logmu"),
    "text after the end": ([ROW, ROW | {"completion": " 7.<eos>\n"}], {}, "sample 2: text after"),
    "nothing selected": ([ROW], {"composition": "positives_only"}, "--composition"),
    "no pair": ([ROW, ROW | {"prompt": "P", "reward": 1}], {"method": "dpo"}, "--method dpo"),
}


@pytest.mark.parametrize("case", SAMPLES)
def test_samples_that_cannot_be_trained_on(tmp_path, case):
    rows, changes, named = SAMPLES[case]
    file = write_rows(tmp_path / "own.jsonl", rows)
    with pytest.raises(InputError) as caught:
        run_small(tmp_path / "run", samples=file, test_problems=0, **changes)
    assert named in str(caught.value)
    assert (file in str(caught.value)) == (named[0] == ":")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_trained_test_problems_are_a_warning(tmp_path, capsys):
    """Three of four test problems are training problems; two of them are in the samples."""
    first, second, third, *_ = read_rows(TINY / "train.jsonl")
    write_rows(tmp_path / "train.jsonl", [first, second])
    write_rows(tmp_path / "test.jsonl", [second, first, third, second])
    run_small(tmp_path / "run", data=str(tmp_path), iterations=0)
    assert re.findall("[0-9]+", capsys.readouterr().out) == ["3"]
    own = [ROW | {"prompt": f"Q: {second['question']}\nA:"}] * 3
    samples = write_rows(tmp_path / "own.jsonl", own)
    run_small(tmp_path / "own", data=str(tmp_path), samples=samples)
    [warning, *_] = capsys.readouterr().out.splitlines()
    assert re.findall("[0-9]+", warning) == ["2"]
    run_small(tmp_path / "other", iterations=0)
    assert "warning" not in capsys.readouterr().out


def test_a_task_without_test_problems_is_refused(tmp_path):
    def make_task(settings):
        return replace(gsm8k.gsm8k_task(settings), test=[])

    with pytest.raises(InputError, match="--test-problems 0"):
        run_small(tmp_path / "run", make_task)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("shift", "is_warned"), [(0.0, False), (0.5, True)])
def test_log_mu_of_another_distribution_is_a_warning(run, tmp_path, capsys, shift, is_warned):
    """As top-p renormalises it: each token 0.5 nats higher, up to 0."""
    folder = run(**TWO_ITERATIONS) / "iteration-1"
    samples = read_rows(folder / "samples.jsonl")
    rows = []
    for example in read_rows(folder / "train.jsonl")[:4]:
        values = [min(value + shift, 0.0) for value in example["token_logmu"]]
        rows.append(samples[example["sample"]] | {"token_logmu": values})
    file = write_rows(tmp_path / "own.jsonl", rows)
    run_small(tmp_path / "run", samples=file, test_problems=0, trust_logmu=True)
    assert ("warning: step 1" in capsys.readouterr().out) == is_warned


# ---- models --------------------------------------------------------------------------------------
def change_json(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def add_own_head(weights):
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 0.01


def make_mamba(folder):
    sizes = {"vocab_size": 768, "hidden_size": 8, "num_hidden_layers": 1, "eos_token_id": 1}
    config = AutoConfig.for_model("mamba", **sizes, max_position_embeddings=512)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def add_adapter(folder):
    """transformers would load the model that the adapter names, in place of this one."""
    adapter = {"base_model_name_or_path": str(TINY / "base"), "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))


NORM = "model.norm.weight"
MODELS = {  # change of a model's folder -> what the message names
    "missing": (lambda f: change_weights(f, lambda weights: weights.pop(NORM)), NORM),
    "missing bias": (lambda f: change_json(f / "config.json", attention_bias=True), "k_proj.bias"),
    "unexpected": (lambda f: change_json(f / "config.json", num_hidden_layers=3), "layers.3"),
    "NaN": (lambda f: change_weights(f, lambda weights: weights[NORM][3:4].fill_(math.nan)), NORM),
    "infinite": (lambda f: change_weights(f, lambda w: w[NORM][3:4].fill_(-math.inf)), NORM),
    "tied, and has a head": (lambda f: change_weights(f, add_own_head), "lm_head.weight"),
    "adapter": (add_adapter, "adapter"),
    "FP8": (lambda f: change_json(f / "config.json", quantization_config={"bits": 8}), "quantized"),
    "encoder and decoder": (lambda f: BartConfig().save_pretrained(f), "bart"),
    "no language model": (lambda f: ViTConfig().save_pretrained(f), "vit"),
    "recurrent": (make_mamba, "--engine vllm"),
}


@pytest.fixture
def model(tmp_path):
    """A copy of the default model, for a test to change."""
    return shutil.copytree(SMALL.model, tmp_path / "model")


@pytest.mark.parametrize("case", MODELS)
def test_model_that_cannot_be_used(model, tmp_path, case):
    change, named = MODELS[case]
    change(model)
    with pytest.raises(InputError) as caught:
        run_small(tmp_path / "run", model=str(model), iterations=0)
    assert named in str(caught.value)
    assert str(model) in str(caught.value)
    assert not (tmp_path / "run" / "iteration-1" / "test-0.jsonl").exists()


# ---- problems and folders ------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("row", "named"),
    [("}{", "train.jsonl:3: "), ({"question": "?", "answer": "seven"}, "train:3: ")],
)
def test_problem_that_cannot_be_read(tmp_path, row, named):
    data = shutil.copytree(TINY, tmp_path / "data", ignore=shutil.ignore_patterns("*.safetensors"))
    lines = (data / "train.jsonl").read_text().splitlines()
    lines[2] = json.dumps(row) if isinstance(row, dict) else row
    (data / "train.jsonl").write_text("\n".join(lines))
    with pytest.raises(InputError, match=named):
        run_small(tmp_path / "run", data=str(data))
    assert not (tmp_path / "run").exists()


def change_problem(part, **changes):
    """A task whose last problem has changed."""

    def make_task(settings):
        task = gsm8k.gsm8k_task(settings)
        problems = list(getattr(task, part))
        problems[-1] = replace(problems[-1], **changes)
        return replace(task, **{part: problems})

    return {"make_task": make_task}


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"limits": (1.0, 1.0, 0.0, 0.5)},
        change_problem("train", question="What is 1 + 1?"),
        change_problem("test", question="What is 1 + 1?"),
        change_problem("train", gold=123456),
        change_problem("test", gold=123456),
    ],
)
def test_folder_of_a_run_with_other_input_is_refused(run, changes):
    folder = run(**TWO_ITERATIONS)
    before = checksums(folder)
    with pytest.raises(InputError) as caught:
        run_small(folder, **TWO_ITERATIONS | changes)
    assert str(folder) in str(caught.value)
    assert checksums(folder) == before


def test_folder_of_other_samples_is_refused(tmp_path):
    options = {"samples": write_rows(tmp_path / "own.jsonl", [ROW]), "test_problems": 0}
    run_small(tmp_path / "run", **options)
    write_rows(tmp_path / "own.jsonl", [ROW | {"reward": -0.5}])
    with pytest.raises(InputError, match="inputs_crc32"):
        run_small(tmp_path / "run", **options)


def test_number_of_ranks_belongs_to_a_run(run, tmp_path, monkeypatch):
    folder = shutil.copytree(run(**TWO_ITERATIONS), tmp_path / "run")
    change_json(folder / "config.json", ranks=2)
    with pytest.raises(InputError, match=r"ranks 2 \(now 1\)"):
        run_small(folder, **TWO_ITERATIONS)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert Settings().to_config()["ranks"] == 2
