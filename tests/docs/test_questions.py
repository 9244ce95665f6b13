"""The Python of docs/questions.md, on a run with two iterations."""

import json

from docs_helpers import code_blocks, read_page
from run_helpers import read_lines

from toprlib.external_samples import read_samples

[REPLAY, COUNT] = code_blocks(read_page("docs/questions.md"), "python")


def test_replay_has_the_samples_of_all_rounds_with_the_log_mu_of_each(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = run(iterations=2, composition="positives_only")
    exec(REPLAY.replace("runs/laptop_iterations=2", str(folder)))
    actual = read_samples("replay.jsonl")
    expected = []
    for iteration in (1, 2):
        for example in read_lines(folder / f"iteration-{iteration}" / "train.jsonl"):
            row = (example["completion_ids"], example["token_logmu"])
            expected.append((*row, example["reward"]))
    assert [(s.token_ids, s.token_logmu, s.reward) for s in actual] == expected
    assert len({row[1][0] for row in expected}) > 2


def test_prompts_with_one_outcome_are_counted(run, tmp_path, monkeypatch, capsys):
    samples = tmp_path / "runs" / "laptop" / "iteration-1" / "samples.jsonl"
    samples.parent.mkdir(parents=True)
    rewards = {"a": [1.0, 1.0], "b": [-1.0, -1.0], "c": [1.0, -1.0], "d": [-1.0, -0.5]}
    lines = []
    for problem, values in rewards.items():
        lines += [
            json.dumps({"prompt": problem, "completion": "", "reward": value}) for value in values
        ]
    samples.write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    exec(COUNT)
    assert capsys.readouterr().out.split() == ["1", "2"]
