"""Tasks of one's own: the page's program as a command, rewards, and what grading sees."""

import json
import re
import runpy
import sys
from dataclasses import replace

import pytest
from helpers import ROOT, read_rows

import train_gsm8k as gsm8k
from toprlib.records import Grade, InputError
from toprlib.settings import TINY, Settings, read_settings

OPTIONS = """--problems 3 --n 4 --max-new-tokens 48 --batch-size 6 --test-problems 2
    --eval-samples 4 --k 2 --evaluate-after --model""".split()
OPTIONS.append(str(TINY / "base"))  # which makes mistakes in sums
SMALL = read_settings(OPTIONS, {"laptop": Settings()})
EVALUATION = replace(SMALL, iterations=0)


# ---- the program on the page, as a command -------------------------------------------------------
PAGE = (ROOT / "docs" / "own_task.md").read_text(encoding="utf-8")
PROGRAM = re.search(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[1]
SUMS = {"__name__": "my_task"}  # the names of the program on the page
exec(PROGRAM, SUMS)


def grade_sum(row):
    a, b = re.findall("[0-9]+", row["prompt"])
    is_right = f"The answer is {int(a) + int(b)}." in row["completion"]
    return (1.0, "right") if is_right else (-1.0, "wrong")


def test_a_task_is_a_command_that_trains_on_its_rewards(tmp_path, monkeypatch):
    file = tmp_path / "my_task.py"
    file.write_text(PROGRAM, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["my_task", *OPTIONS])
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(file), run_name="__main__")
    [folder] = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("my_task-laptop")
    samples = read_rows(folder / "iteration-1" / "samples.jsonl")
    tested = read_rows(folder / "iteration-1" / "test-0.jsonl")
    assert (len(samples), len(tested)) == (3 * 4, 2 * 4)
    for row in samples + tested:
        assert (row["reward"], row["outcome"]) == grade_sum(row)
    learned = {}
    for row in read_rows(folder / "iteration-1" / "train.jsonl"):
        learned[row["sample"]] = row["reward"]
    assert learned == {index: row["reward"] for index, row in enumerate(samples)}
    before = json.loads((folder / "results.json").read_text())["before"]
    assert "maj@2" not in before  # no answer is parsed


def test_no_sum_is_for_training_and_for_tests():
    task = SUMS["my_task"](replace(SMALL, problems=10_000, test_problems=10_000))
    train, test = ({problem.question for problem in part} for part in (task.train, task.test))
    assert not train & test
    for problem in (*task.train, *task.test):
        a, b = re.findall("[0-9]+", problem.question)
        assert problem.gold == int(a) + int(b)


# ---- grading -------------------------------------------------------------------------------------
def run_graded(folder, grade, settings=EVALUATION, **changes):
    """A run on sums, by default an evaluation."""
    settings = replace(settings, out=folder)
    task = replace(SUMS["my_task"](settings), grade=grade, **changes)
    return gsm8k.experiment(settings, task)


def test_grading_sees_each_completion_before_the_stop_string_with_its_problem(tmp_path):
    calls = []

    def grade(completions, problems):
        calls.append((completions, problems))
        return [Grade(len(text) / 7, "right") for text in completions]

    stop = (" =", " and")
    results = run_graded(tmp_path / "run", grade, stop=stop)
    [(completions, problems), _] = calls  # the second time with greedy answers
    rows = read_rows(tmp_path / "run" / "iteration-1" / "test-0.jsonl")
    assert len(rows) == 8
    for row, text, problem in zip(rows, completions, problems, strict=True):
        assert (row["prompt"], row["reward"]) == (problem.question, len(text) / 7)
        assert text == re.split(" =| and", row["completion"])[0]
    assert any(text != row["completion"] for row, text in zip(rows, completions, strict=True))
    mean = sum(row["reward"] for row in rows) / 8
    assert results["before"]["reward"]["mean"] == pytest.approx(mean)


def test_a_baseline_is_subtracted_from_rewards_between_0_and_1(tmp_path):
    def grade(completions, problems):
        return [Grade(len(text) % 5 / 4, "right") for text in completions]

    run_graded(tmp_path / "run", grade, replace(SMALL, baseline=0.5))
    samples = read_rows(tmp_path / "run" / "iteration-1" / "samples.jsonl")
    trained = read_rows(tmp_path / "run" / "iteration-1" / "train.jsonl")
    assert len({row["reward"] for row in trained}) > 2
    assert {row["reward"] > 0 for row in trained} == {True, False}
    for row in trained:
        assert row["reward"] == samples[row["sample"]]["reward"] - 0.5


GRADES = {  # what a wrong function returns for 8 completions, and what a run does
    "too few": ([Grade(1.0, "right")] * 7, ValueError),
    "too many": ([Grade(1.0, "right")] * 9, ValueError),
    "NaN": ([Grade(float("nan"), "right")] * 8, ValueError),
    "text": ([Grade("1", "right")] * 8, ValueError),
    "unknown outcome": ([Grade(1.0, "brilliant")] * 8, InputError),
}


@pytest.mark.parametrize("case", GRADES)
def test_what_is_no_grade_ends_the_run(tmp_path, case):
    grades, error = GRADES[case]
    with pytest.raises(error):
        run_graded(tmp_path / "run", lambda *_: grades)
    assert not (tmp_path / "run" / "iteration-1" / "test-0.jsonl").exists()


def test_after_an_error_of_parse_the_run_resumes(tmp_path, monkeypatch):
    """Lists have no hash, so they cannot be counted."""
    with pytest.raises(TypeError):
        run_graded(tmp_path / "run", SUMS["grade"], parse=lambda completion: [completion])
    monkeypatch.setattr(gsm8k.sampling, "sample_prompts", None)
    results = run_graded(tmp_path / "run", SUMS["grade"], parse=str)
    assert "maj@2" in results["before"]
