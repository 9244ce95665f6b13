"""The comparison of methods on the same answers."""

import json
from dataclasses import replace

import pytest

from examples import compare
from toprlib.settings import Settings, read_settings


def test_no_problem_is_both_for_training_and_for_tests():
    task = compare.books_task(Settings(problems=10_000, test_problems=10_000))
    assert not {problem.id for problem in task.train} & {problem.id for problem in task.test}


def accuracy(mean):
    value = {"mean": mean, "se": 0.01}
    return {"pass@1": value, "greedy": value, "maj@4": value}


def test_all_methods_train_on_the_first_one_s_samples(tmp_path, monkeypatch):
    """The runs end with 10 %, 20 % and so on."""
    calls = []

    def train(settings, task):
        calls.append(settings)
        return {"before": accuracy(0.05), "iterations": [{"after": accuracy(len(calls) / 10)}]}

    monkeypatch.setattr(compare, "experiment", train)
    table = compare.compare(replace(compare.PRESETS["compare"], out=tmp_path), task=None)
    file = str(calls[0].out / "iteration-1" / "samples.jsonl")
    assert [settings.samples for settings in calls] == [None, *[file] * 4]
    cells = [cell.split()[0] for cell in table.columns[1].cells]
    assert cells == ["5.0", "10.0", "20.0", "30.0", "40.0", "50.0"]


@pytest.mark.slow
def test_all_methods_train_on_the_same_answers_in_as_many_steps(tmp_path):
    options = "--problems 12 --n 6 --test-problems 6 --eval-samples 4 --k 2 --seed 1 --out"
    settings = read_settings([*options.split(), str(tmp_path)], compare.PRESETS)
    table = compare.compare(settings, compare.books_task(settings))
    names, accuracy, *_ = [list(column.cells) for column in table.columns]
    assert names == ["before training", *compare.METHOD_SETTINGS]
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
