"""The plan of a run: its counts by hand, its bytes and hours by closed forms; and what presets are."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pipeline.dataset import read_inputs
from pipeline.dry_run import activation_bytes, counts, hours, plan
from pipeline.models.language_model import load_model, make_optimizer
from pipeline.records import InputError, Sample, to_lines
from pipeline.settings import read_settings
from transformers import LlamaConfig

import train_gsm8k as gsm8k
from scripts.make_tables import llama_3_8b
from train_gsm8k import SETTINGS


def by_name(settings, processes=1):
    inputs = read_inputs(settings, gsm8k.gsm8k_task(settings))
    return {name: value for name, (value, *_) in plan(settings, inputs, processes).items()}


def test_the_counts_are_those_of_the_settings():
    settings = gsm8k.Settings(
        problems=100, n=8, iterations=3, examples=500, batch=16, test_problems=10
    )
    items = by_name(settings)
    assert items["training samples"] == 3 * 100 * 8
    assert items["samples trained on"] == 3 * 500
    assert items["optimiser steps"] == 3 * 32  # 500 / 16, rounded up
    assert (
        items["test samples"] == 10 * 16 * 4 + 10 * 4 * 4 * 3
    )  # in full 4 times; at 4 points of 3 epochs
    assert items["sampled tokens"] == 128 * (3 * 100 * 8 + items["test samples"])
    between = by_name(replace(settings, between_samples=8, curve_points=1))
    assert between["test samples"] == 10 * (2 * 16 + 2 * 8)
    karenina = by_name(replace(settings, composition="anna_karenina", examples=None))
    assert karenina["training samples"] == karenina["samples trained on"] == 3 * 100 * 64  # at most
    pairs = by_name(replace(settings, method="dpo", pairs=2, epochs=2))
    assert pairs["samples trained on"] == 3 * 2 * 100 * 2 * 2


def test_given_samples_are_counted_and_not_drawn(tmp_path):
    file, here = tmp_path / "given.jsonl", gsm8k.Settings().data
    given = [
        Sample(prompt=f"Q{i % 50}", completion="!", reward=(-1.0) ** (i % 20)) for i in range(1000)
    ]
    file.write_text(to_lines(given))
    items = by_name(
        gsm8k.Settings(samples=file, test_data=here, test_problems=1, curve_points=1, examples=900)
    )
    assert (items["samples trained on"], items["optimiser steps"]) == (900, 57)
    assert items["sampled tokens"] == 2 * 16 * 128
    held_out = by_name(gsm8k.Settings(samples=file, held_out=file, data="nowhere"))
    assert [held_out[name] for name in ("held-out samples", "test samples", "sampled tokens")] == [
        1000,
        0,
        0,
    ]


def test_the_plan_of_the_paper_s_run(tmp_path):
    """Of a folder with the shapes of Llama 3 8B, the tiny tokenizer, and no weights."""
    load_model(gsm8k.Settings().model).tokenizer.save_pretrained(tmp_path)
    llama_3_8b().save_pretrained(tmp_path)
    settings = replace(SETTINGS["paper"], model=str(tmp_path), data=gsm8k.Settings().data, shots=0)
    items, parameters = (
        by_name(settings, processes=8),
        8_030_261_248,
    )  # what the model is known to have
    assert items["parameters P"] == parameters
    held = [items[name] for name in ("weights", "gradients", "optimiser", "gathered weights")]
    assert held == [parameters / 2, parameters / 2, 0, 2 * parameters]
    assert items["training, per GPU"] == sum(held) + items["activations"]
    head = 2 * 2 * 128_256 * 4_096  # in bfloat16, and its gradient
    assert by_name(replace(settings, reshard=True), processes=8)["gathered weights"] == head


SHAPES = {  # billions of parameters, vocabulary, width, of the MLP, layers
    "Qwen2.5 0.5B": (0.494, 151_936, 896, 4_864, 24),
    "Llama 3.2 1B": (1.236, 128_256, 2_048, 8_192, 16),
    "Llama 3.2 3B": (3.213, 128_256, 3_072, 8_192, 28),
    "Llama 3 8B": (8.030, 128_256, 4_096, 14_336, 32),
}


def test_the_memory_of_a_gpu_is_near_what_was_counted_of_a_step():
    page = Path(__file__).parent.parent.joinpath("docs", "gpu.md").read_text()
    rows = re.findall(
        r"^\| (\w.+B) \| (\d) \| ([0-9.]+) \| ([0-9.]+) \| ([0-9.]+) \|$", page, re.MULTILINE
    )
    assert len(rows) == 7
    for model, gpus, *peaks in rows:
        billions, *sizes = SHAPES[model]
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
        config = LlamaConfig(**dict(zip(names, sizes, strict=True)))
        for i, peak in enumerate(map(float, peaks)):
            settings = replace(SETTINGS["paper"], reshard=i > 0, gradient_checkpointing=i > 1)
            head = 4 * sizes[0] * sizes[1] / 1e9
            held = 8 * billions / int(gpus) + (head if i else 2 * billions)
            assert held + activation_bytes(settings, config, 1_612) / 1e9 == pytest.approx(
                peak, rel=0.2
            )


def test_hours_are_shared_by_the_processes():
    """On one process all 8 sequences of a step; nothing is sent, and a card samples alone."""
    paper = SETTINGS["paper"]
    found = counts(paper, problems=7_473, tests=1_319)
    of_processes = (hours(paper, found, llama_3_8b(), 8 * 10**9, n, 1_100, 200) for n in (1, 8))
    one, eight = (
        {stage: 3600 * value for stage, (value, _) in told.items()} for told in of_processes
    )
    compute = 2 * 8e9 * 8 * 1_300 / (0.35 * 989e12)  # s of a forward pass of all sequences
    update = 100 * 8e9 / 1.675e12
    assert one["training"] == pytest.approx(5 * 6_250 * (3 * compute + update))
    sent = 7 / 8 * (2 + 4) * 8e9 / (0.6 * 450e9)
    assert eight["training"] == pytest.approx(5 * 6_250 * (3 * compute / 8 + sent + update / 8))
    # Of a chunk's 2,048 sequences 1,024 run until the last 1,024 run out: three times a mean sequence for all.
    a_token = (2 * 8e9 + 2048 / 3 * 4 * 32 * 8 * 128 * 1_300) / 1.675e12
    assert one["sampling"] == pytest.approx(found.sampled * 200 * a_token / (2048 / 3))
    for stage in ("scoring", "sampling"):
        assert eight[stage] == pytest.approx(one[stage] / 8)
    twice = replace(
        paper, batch=16
    )  # two micro-batches of a process, each of which sends gradients
    again = 3600 * hours(twice, found, llama_3_8b(), 8 * 10**9, 8, 1_100, 200)["training"][0]
    assert again == pytest.approx(5 * 6_250 * (2 * (3 * compute / 8 + sent) + update / 8))
    whole, checkpoints = 5 * 4 * 8e9, 5 * 2 * 4 * 8e9  # bytes
    assert one["saving"] == pytest.approx((whole + checkpoints) / 0.5e9)  # a process's own speed
    assert eight["saving"] == pytest.approx(whole / 0.5e9 + checkpoints / 2e9)  # the disk's


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_optimisers_memory_is_what_it_holds(lm, optimizer):
    made = make_optimizer(optimizer, lm.model, 0.0)
    for weight in lm.model.parameters():
        weight.grad = torch.zeros_like(weight)
    made.step()
    lm.model.zero_grad()
    held = sum(
        t.nbytes
        for state in made.state.values()
        for t in state.values()
        if torch.is_tensor(t) and t.ndim
    )
    assert by_name(gsm8k.Settings(optimizer=optimizer))["optimiser"] == held


def test_the_command_prints_the_plan_and_writes_nothing(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(
        "sys.argv", ["train_gsm8k.py", "laptop", "--dry-run", "--out", str(tmp_path / "run")]
    )
    gsm8k.main("train_gsm8k", gsm8k.__doc__, gsm8k.gsm8k_task)
    assert "training, per GPU" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_a_preset_that_does_not_come_first_is_refused():
    out = Path("runs/paper_seed=1")
    assert read_settings(["paper", "--seed", "1"], SETTINGS) == replace(
        SETTINGS["paper"], seed=1, out=out
    )
    with pytest.raises(
        InputError, match="single-gpu: is not among this script's presets, paper, laptop"
    ):
        read_settings(["single-gpu"], {"paper": SETTINGS["paper"], "laptop": SETTINGS["laptop"]})
    with pytest.raises(InputError, match="paper: a preset comes first"):
        read_settings(["--seed", "1", "paper"], SETTINGS)
