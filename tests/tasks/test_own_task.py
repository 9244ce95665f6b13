"""Tasks of one's own: the examples and the page's program as commands, and what grading sees."""

import json
import re
import runpy
import sys
from dataclasses import replace

import pytest
from helpers import ROOT, read_rows

import train_gsm8k as gsm8k
from examples import strict_format
from toprlib.records import Grade, InputError, Problem
from toprlib.settings import TINY, Settings, read_settings

OPTIONS = """--problems 3 --n 4 --max-new-tokens 48 --batch-size 6 --test-problems 2
    --eval-samples 4 --k 2 --evaluate-after --model""".split()
OPTIONS.append(str(TINY / "base"))  # which makes mistakes in sums
SMALL = read_settings(OPTIONS, {"laptop": Settings()})


# ---- the program on the page and the example, as commands ----------------------------------------
PAGE = (ROOT / "docs" / "own_task.md").read_text(encoding="utf-8")
PROGRAM = re.search(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[1]
SUMS = {"__name__": "my_task"}  # the names of the program on the page
exec(PROGRAM, SUMS)


def grade_sum(row):
    a, b = re.findall("[0-9]+", row["prompt"])
    is_right = f"The answer is {int(a) + int(b)}." in row["completion"]
    return (1.0, "right") if is_right else (-1.0, "wrong")


def grade_format(row):
    text = row["completion"]
    ends = re.search(r" The answer is ([0-9]+)\.$", text)
    last = re.findall("[0-9]+", text)[-2:]
    is_last = ends is not None and last == [ends[1]] * 2 and "=" not in text.rsplit(last[0], 2)[1]
    count = sum([ends is not None, is_last, len(text) <= 60, text.count("=") == 1])
    return count / 4, {0: "none", 4: "all"}.get(count, "some")


@pytest.mark.parametrize(
    ("name", "grade"), [("my_task", grade_sum), ("strict_format", grade_format)]
)
def test_a_task_is_a_command_that_trains_on_its_rewards(name, grade, tmp_path, monkeypatch):
    (tmp_path / "my_task.py").write_text(PROGRAM, encoding="utf-8")
    file = tmp_path / "my_task.py" if name == "my_task" else ROOT / "examples" / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [name, *OPTIONS])
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(file), run_name="__main__")
    [folder] = (tmp_path / "runs").iterdir()
    assert folder.name.startswith(f"{name}-laptop")
    samples = read_rows(folder / "iteration-1" / "samples.jsonl")
    tested = read_rows(folder / "iteration-1" / "test-0.jsonl")
    assert (len(samples), len(tested)) == (3 * 4, 2 * 4)
    for row in samples + tested:
        assert (row["reward"], row["outcome"]) == grade(row)
    learned = {}
    for row in read_rows(folder / "iteration-1" / "train.jsonl"):
        learned[row["sample"]] = row["reward"]
    assert learned == {index: row["reward"] for index, row in enumerate(samples)}
    before = json.loads((folder / "results.json").read_text())["before"]
    assert "maj@2" not in before  # no answer is parsed
    if "reward" in before:
        expected = sum(row["reward"] for row in tested) / len(tested)
        assert before["reward"]["mean"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (" 2 * 3 = 6 figs. The answer is 6.", (1, "all")),
        (" 2 * 3 = 6 figs. 6 + 1 = 7 left. The answer is 7.", (0.75, "some")),  # two steps
        (" 2 * 3 = 6 figs. The answer is 7.", (0.75, "some")),  # which is not the last result
        ("6" * 61, (0, "none")),
    ],
)
def test_the_reward_of_strict_format_is_the_share_of_its_rules(completion, expected):
    assert strict_format.grade([completion], [Problem("?")]) == [expected]
    assert grade_format({"completion": completion}) == expected


def test_no_sum_is_for_training_and_for_tests():
    task = SUMS["my_task"](replace(SMALL, problems=10_000, test_problems=10_000))
    train, test = ({problem.question for problem in part} for part in (task.train, task.test))
    assert not train & test
    for problem in (*task.train, *task.test):
        a, b = re.findall("[0-9]+", problem.question)
        assert problem.gold == int(a) + int(b)


# ---- grading -------------------------------------------------------------------------------------
def run_graded(folder, grade, **changes):
    """An evaluation of the model on sums."""
    settings = replace(SMALL, out=folder, iterations=0)
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
