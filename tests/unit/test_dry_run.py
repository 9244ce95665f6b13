"""The plan of a run: its counts by hand, its bytes by closed forms."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig

import train_gsm8k
from toprlib.dry_run import activation_bytes, plan
from toprlib.files import to_lines
from toprlib.language_model import make_optimizer
from toprlib.records import Problem, Sample, Task
from toprlib.settings import Settings

PAPER = train_gsm8k.PRESETS["paper"]
LLAMA_8B = 8_030_261_248  # parameters
GPU_PAGE = Path(train_gsm8k.__file__).parent / "docs" / "gpu.md"


def values_of_plan(settings):
    table = plan(settings, train_gsm8k.gsm8k_task(settings))
    return {name: value for name, (value, _, _) in table.items()}


def llama_3_8b():
    return LlamaConfig(
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        vocab_size=128_256,
        num_attention_heads=32,
        num_key_value_heads=8,
    )


def test_counts_are_those_of_the_settings():
    settings = Settings(problems=100, n=8, iterations=3, examples=500, test_problems=10)
    values = values_of_plan(settings)
    assert values["training samples"] == 3 * 100 * 8
    assert values["samples trained on"] == 3 * 500
    assert values["optimizer steps"] == 3 * 32  # 500 / 16, rounded up
    # In full 4 times; a quarter at 4 points of 3 epochs.
    assert values["test samples"] == 10 * 16 * 4 + 10 * 4 * 4 * 3
    assert values["sampled tokens"] == 128 * (3 * 100 * 8 + values["test samples"])


def test_pairs_are_counted_as_two_completions():
    settings = Settings(problems=100, method="dpo", epochs=2, test_problems=10)
    assert values_of_plan(settings)["samples trained on"] == 2 * 100 * 16 * 2


def test_provided_samples_are_counted_and_not_sampled(tmp_path):
    samples = []
    for number in range(1000):
        samples.append(
            Sample(prompt=f"Q{number % 50}", completion="!", reward=(-1.0) ** (number % 20))
        )
    file = tmp_path / "provided.jsonl"
    file.write_text(to_lines(samples))
    settings = Settings(samples=str(file), test_problems=1, evals_per_epoch=1, examples=900)
    values = values_of_plan(settings)
    assert values["samples trained on"] == 900
    assert values["optimizer steps"] == 57
    assert values["sampled tokens"] == 2 * 16 * 128


@pytest.mark.parametrize("is_test_longer", [False, True])
def test_the_longest_prompt_is_of_training_or_of_test_problems(is_test_longer):
    short, long = [Problem("short", " 7" * 3)], [Problem("long", " 7" * 9)]
    train, test = (short, long) if is_test_longer else (long, short)
    task = Task("sevens", train, test, grade=lambda text, gold: "correct")
    longest, _, _ = plan(Settings(), task)["longest prompt"]
    tokenizer = AutoTokenizer.from_pretrained(Settings().model)
    assert longest == len(tokenizer(" 7" * 9)["input_ids"])


def test_the_plan_of_the_paper_s_run(tmp_path):
    """Of a folder with the shapes of Llama 3 8B, the tiny tokenizer, and no weights."""
    AutoTokenizer.from_pretrained(Settings().model).save_pretrained(tmp_path)
    llama_3_8b().save_pretrained(tmp_path)
    settings = replace(PAPER, model=str(tmp_path), data=Settings().data, shots=0)
    values = values_of_plan(settings)
    assert values["processes"] == 8
    assert values["parameters P"] == LLAMA_8B
    parts = [values[name] for name in ("weights", "gradients", "optimizer", "gathered weights")]
    assert parts == [LLAMA_8B / 2, LLAMA_8B / 2, 0, 2 * LLAMA_8B]
    assert values["training, per GPU"] == sum(parts) + values["activations"]
    head = 2 * 2 * 128_256 * 4_096  # in bfloat16, and its gradient
    resharded = values_of_plan(replace(settings, reshard_after_forward=True))
    assert resharded["gathered weights"] == head


SHAPES = {  # billions of parameters, vocabulary, width, width of the MLP, layers
    "Qwen2.5 0.5B": (0.494, 151_936, 896, 4_864, 24),
    "Llama 3.2 1B": (1.236, 128_256, 2_048, 8_192, 16),
    "Llama 3.2 3B": (3.213, 128_256, 3_072, 8_192, 28),
    "Llama 3 8B": (8.030, 128_256, 4_096, 14_336, 32),
}


def test_the_memory_of_a_gpu_is_near_what_was_counted():
    """docs/gpu.md has counts of real steps: gathered, resharded, and with checkpointing."""
    row = r"^\| (\w.+B) \| (\d) \| ([0-9.]+) \| ([0-9.]+) \| ([0-9.]+) \|$"
    rows = re.findall(row, GPU_PAGE.read_text(), re.MULTILINE)
    assert len(rows) == 7
    for model, gpus, *peaks in rows:
        billions, vocabulary, width, mlp, layers = SHAPES[model]
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=mlp,
            num_hidden_layers=layers,
        )
        head = 4 * vocabulary * width / 1e9
        for number, peak in enumerate(peaks):
            settings = replace(
                PAPER, reshard_after_forward=number > 0, gradient_checkpointing=number > 1
            )
            gathered = head if number else 2 * billions
            activations = activation_bytes(settings, config, 1_612) / 1e9
            estimate = 8 * billions / int(gpus) + gathered + activations
            assert estimate == pytest.approx(float(peak), rel=0.2)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_the_optimizer_s_memory_is_that_of_its_state(lm, name):
    optimizer = make_optimizer(name, lm.model, 0.0)
    for weight in lm.model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    lm.model.zero_grad()
    size = 0
    for state in optimizer.state.values():
        for value in state.values():
            if torch.is_tensor(value) and value.ndim > 0:
                size += value.nbytes
    settings = Settings(preset="single-gpu", optimizer=name)
    assert values_of_plan(settings)["optimizer"] == size


def test_the_plan_of_a_run_without_a_gpu_has_none_of_its_rows(monkeypatch):
    def names(rows):
        return " ".join([*rows, *[explanation for _, _, explanation in rows.values()]])

    settings = Settings()
    task = train_gsm8k.gsm8k_task(settings)
    without = plan(settings, task)
    assert re.findall("GPU|vLLM|NCCL|gathered", names(without)) == []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with_gpu = plan(settings, task)
    assert list(without) == [name for name in with_gpu if name in without]
    assert "training, per GPU" in with_gpu


def test_a_dry_run_prints_the_plan_and_writes_nothing(monkeypatch, capsys, tmp_path):
    arguments = ["train_gsm8k.py", "laptop", "--dry-run", "--out", str(tmp_path / "run")]
    monkeypatch.setattr("sys.argv", arguments)
    train_gsm8k.main("train_gsm8k", train_gsm8k.__doc__, train_gsm8k.gsm8k_task)
    assert "parameters P" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()
