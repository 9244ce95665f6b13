"""The comparison of methods on the same answers."""

import json

import pytest

from examples import compare
from toprlib.settings import read_settings


@pytest.mark.slow
def test_all_methods_train_on_the_same_answers_in_as_many_steps(tmp_path):
    options = "--problems 12 --n 6 --test-problems 6 --eval-samples 4 --k 2 --seed 1 --out"
    settings = read_settings([*options.split(), str(tmp_path)], compare.PRESETS)
    table = compare.compare(settings, compare.books_task(settings))
    names, accuracy, _ = [list(column.cells) for column in table.columns]
    assert names == ["before training", *compare.METHODS]
    steps = {}
    trained = {}
    for name, cell in zip(names[1:], accuracy[1:], strict=True):
        folder = tmp_path / name.replace(" ", "_") / "iteration-1"
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        steps[name] = len(lines)
        rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
        trained[name] = sorted((row["prompt_ids"], row["completion_ids"]) for row in rows)
        tests = (folder / f"test-{len(lines)}.jsonl").read_text().splitlines()
        rewards = [json.loads(line)["reward"] for line in tests]
        assert cell.startswith(f"{100 * rewards.count(1) / len(rewards):.1f} ±")
    repeated = trained.pop("SFT, repeated")
    assert len({str(rows) for rows in trained.values()}) == 1
    assert 0 < len({str(row) for row in repeated}) < len(repeated)
    assert abs(steps.pop("SFT, repeated") - 5) <= 1
    assert set(steps.values()) == {5}  # 72 samples in steps of 16
