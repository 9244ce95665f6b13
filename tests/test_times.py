"""What a run measures of itself."""

import json
from collections import Counter
from dataclasses import replace

from runs import SMALL

import train_gsm8k as gsm8k
from pipeline import stages
from pipeline.held import Held
from pipeline.records import Sample, read_records
from pipeline.runtime.processes import Times
from pipeline.times import table_of


def test_a_run_counts_what_it_does_and_has_seconds_of_every_stage(run):
    folder = run()
    found = json.loads((folder / "times.json").read_text())
    files = [folder / "iteration-1" / "samples.jsonl", *folder.glob("iteration-1/test-*.jsonl")]
    tokens = sum(len(sample.token_ids) for file in files for sample in read_records(file, Sample))
    steps = len((folder / "iteration-1" / "metrics.jsonl").read_text().splitlines())
    assert found["counts"] == {"sampled tokens": tokens, "steps": steps}
    assert set(found["seconds"]) == {
        "starting",
        "sampling",
        "scoring",
        "training",
        "saving",
        "other",
    }
    assert min(found["seconds"].values()) > 0
    assert found["peak bytes"] > 10**8  # torch alone takes more


def test_a_stage_that_is_done_is_noted_before_the_next_one_begins(tmp_path):
    settings = replace(SMALL, out=tmp_path / "run")
    with stages.open_run(settings, gsm8k.gsm8k_task(settings)) as run:
        run.evaluate(1, run.start)
        run.held.make_room("learner", settings.model)
        found = json.loads((tmp_path / "run" / "times.json").read_text())
    assert found["counts"]["sampled tokens"] > 0
    assert json.loads((tmp_path / "run" / "times.json").read_text())["counts"] == found["counts"]


def test_calls_that_go_on_add_to_what_was_noted(tmp_path):
    times = Times(
        seconds=Counter(training=6.5, saving=2.0),
        counts=Counter({"steps": 3, "sampled tokens": 500}),
    )
    later = Times(seconds=Counter(training=3.5, sampling=2.0), counts=Counter(steps=2))
    for one in (times, times, later):  # what was noted once counts once
        Held(replace(SMALL, out=tmp_path), None, one).note_times()
    found = json.loads((tmp_path / "times.json").read_text())
    del found["seconds"]["other"]
    assert found["seconds"] == {"training": 10.0, "saving": 2.0, "sampling": 2.0}
    assert found["counts"] == {"steps": 5, "sampled tokens": 500}
    rows = {row[0]: row[1:] for row in table_of(found).rows}
    assert rows["training"] == ["10 s", "-", "2 s a step"]
    assert rows["sampling"] == ["2 s", "-", "250 tokens/s"]
