"""A small run against numbers that a script without any of the project's code has found (tests/golden.py)."""

import json
from pathlib import Path

import pytest
from golden import LR, MAX_NORM, ROWS, STEPS
from runs import experiment, json_lines
from safetensors.torch import load_file


def test_three_steps_are_those_of_the_golden_numbers(tmp_path):
    expected = json.loads(Path(__file__).with_name("golden.json").read_text())
    names = ("prompt", "completion", "reward")
    rows = [dict(zip(names, row, strict=True)) | {"finish_reason": "stop"} for row in ROWS]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {
        "samples": str(tmp_path / "samples.jsonl"),
        "evaluation": False,
        "epochs": STEPS,
        "lr": LR,
    }
    experiment(tmp_path / "run", **given, batch=len(ROWS), micro_batch=2, max_norm=MAX_NORM)
    here = tmp_path / "run" / "iteration-1"
    steps = json_lines(here / "metrics.jsonl")
    for name in (
        "loss",
        "grad_norm",
    ):  # rounding in float32 moves them by up to 1.6e-6, by the processor
        assert [step[name] for step in steps] == pytest.approx(expected[name], rel=5e-6, abs=5e-6)
    assert [step["weight_pos_mean"] for step in steps] == pytest.approx([1.0] * STEPS)
    weights = load_file(here / "model" / "model.safetensors")
    assert weights.keys() == expected["weights"].keys()
    for name, weight in weights.items():
        found = {place: weight.flatten()[int(place)].item() for place in expected["weights"][name]}
        assert found == pytest.approx(expected["weights"][name], rel=0, abs=1e-6), name
