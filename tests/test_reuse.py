"""Runs that take the samples of another run (--reuse)."""

import json
from dataclasses import replace

import pytest
from runs import SMALL, experiment

import pipeline.sampling
import train_gsm8k as gsm8k
from pipeline.records import Example, InputError, read_records
from pipeline.stages import open_run

DRAWING = (
    "model engine temperature top_p top_k max_new_tokens tokens_at_once chunk seed compute "
    "samples_sha256 chat system"
)


@pytest.fixture
def shown(monkeypatch):
    """What runs sample and score, in order, by the text of their progress."""
    draw = pipeline.sampling.draw
    score = pipeline.dataset.score
    shown = []

    def noted_draw(*arguments):
        shown.append(arguments[5].desc.removesuffix(": "))
        return draw(*arguments)

    def noted_score(*arguments):
        shown.append("scoring")
        return score(*arguments)

    monkeypatch.setattr(pipeline.sampling, "draw", noted_draw)
    monkeypatch.setattr(pipeline.dataset, "score", noted_score)
    return shown


@pytest.mark.parametrize("name", DRAWING.split())
def test_samples_that_were_drawn_otherwise_are_refused(run, tmp_path, name):
    other = json.loads((run() / "config.json").read_text()) | {name: "other"}
    (tmp_path / "config.json").write_text(json.dumps(other))
    with pytest.raises(InputError, match=rf"has drawn otherwise \({name} = .*give a --reuse that"):
        experiment(tmp_path / "run", reuse=tmp_path)


def test_log_mu_of_another_run_is_taken_if_its_batches_are_the_same_and_its_rewards_are_not(
    run, tmp_path, shown
):
    made = run()
    for changes in ({"micro_batch": SMALL.micro_batch // 2}, {"composition": "positives_only"}, {}):
        out = tmp_path / f"run{''.join(changes)}"
        settings = replace(SMALL, reuse=made, baseline=-0.5, out=out, **changes)
        shown.clear()
        with open_run(settings, gsm8k.gsm8k_task(settings)) as one:
            one.score(1, one.compose(1, one.sample(1, settings.model)), settings.model)
        assert shown == ["scoring"] * len(changes)  # in other batches it is rounded otherwise
    there = read_records(made / "iteration-1" / "train.jsonl", Example)
    here = read_records(settings.out / "iteration-1" / "train.jsonl", Example)
    assert here == [replace(example, reward=example.reward + 0.5) for example in there]


def test_samples_of_no_run_are_refused_and_those_of_other_problems_not_taken(run, tmp_path):
    with pytest.raises(InputError, match="no such"):
        experiment(tmp_path / "run", reuse=tmp_path)
    assert not (tmp_path / "run").exists()
    fewer = experiment(tmp_path / "run", reuse=run(), problems=3, test_problems=2)
    assert fewer["before"]["questions"] == 2
    assert fewer["iterations"][0]["dataset"]["drawn"]["problems"] == 3
