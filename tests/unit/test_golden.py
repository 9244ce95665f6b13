"""A run of three steps against the numbers of golden.py, which has no code of this project."""

import json
from pathlib import Path

import pytest
from golden import LR, MAX_GRAD_NORM, STEPS, make_samples
from safetensors.torch import load_file

import train_gsm8k as gsm8k
from toprlib.settings import Settings

EXPECTED = json.loads(Path(__file__).with_name("golden.json").read_text())


@pytest.fixture(scope="module")
def iteration(tmp_path_factory):
    """The folder of the run's only iteration: its six samples are one step of an epoch."""
    folder = tmp_path_factory.mktemp("golden")
    samples = folder / "samples.jsonl"
    lines = [json.dumps(sample) + "\n" for sample in make_samples()]
    samples.write_text("".join(lines))
    settings = Settings(
        samples=str(samples),
        test_problems=0,
        epochs=STEPS,
        batch_size=6,
        micro_batch_size=2,
        lr=LR,
        max_grad_norm=MAX_GRAD_NORM,
        out=folder / "run",
    )
    gsm8k.experiment(settings, gsm8k.gsm8k_task(settings))
    return folder / "run" / "iteration-1"


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_metrics_are_golden(iteration, name):
    lines = (iteration / "metrics.jsonl").read_text().splitlines()
    actual = [json.loads(line)[name] for line in lines]
    # Rounding in float32 changes them by up to 1.6e-6, which depends on the processor.
    assert actual == pytest.approx(EXPECTED[name], rel=5e-6, abs=5e-6)


def test_weights_are_golden(iteration):
    weights = load_file(iteration / "model" / "model.safetensors")
    assert weights.keys() == EXPECTED["weights"].keys()
    for name, expected in EXPECTED["weights"].items():
        weight = weights[name].flatten()
        actual = {place: weight[int(place)].item() for place in expected}
        assert actual == pytest.approx(expected, rel=0, abs=1e-6), name
