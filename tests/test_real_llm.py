"""The comparison on a model that was made elsewhere: its task, and its runs from end to end on a small chat model."""

import json
from dataclasses import replace

import pytest
from chats import save_chat_model

from examples.capitals import capitals
from paper import real_llm
from pipeline.records import Drawn
from pipeline.sampling import graded


def test_a_capital_is_right_where_it_is_named_and_the_question_does_not_name_it():
    task = capitals(real_llm.SETTINGS)
    problems = [*task.train, *task.test]
    for reward, texts in ((-1.0, [p.question for p in problems]), (1.0, [f"It is {p.gold}." for p in problems])):
        samples = graded(task, [Drawn(prompt="?", completion=text) for text in texts], problems)
        assert {sample.reward for sample in samples} == {reward}
    assert (len(task.train), len(task.test)) == (real_llm.SETTINGS.problems, real_llm.SETTINGS.test_problems)


@pytest.mark.slow
def test_the_arms_train_on_the_same_samples(tmp_path, monkeypatch):
    small = replace(real_llm.SETTINGS, problems=2, n=4, completions_per_row=2, batch=4, test_problems=2)
    monkeypatch.setattr(real_llm, "SETTINGS", small)
    task = replace(capitals(small), reward=lambda text, _: (-1.0) ** len(text))  # for a model that writes at random
    monkeypatch.setattr(real_llm, "capitals", lambda _: task)
    model = save_chat_model(tmp_path / "model", "qwen2.5")
    real_llm.main(model, seeds=2, workers=1, runs=tmp_path / "runs", out=tmp_path / "out")
    content = json.loads((tmp_path / "out" / "real-llm.json").read_text())
    assert (content["runs"], content["seeds"]) == (6, [0, 1])
    assert len({curve["mean"][0] for curve in content["data"].values()}) == 1
    assert (tmp_path / "out" / "real-llm.png").exists()
    runs = {seed: [*(tmp_path / "runs").glob(f"*_{seed}_*")] for seed in (0, 1)}
    for folders in runs.values():
        methods = {json.loads((folder / "config.json").read_text())["method"] for folder in folders}
        assert methods == set(content["data"]) == {"topr", "sft", "reinforce"}
        assert len({(folder / "iteration-1" / "samples.jsonl").read_bytes() for folder in folders}) == 1
