"""Grading by a task's own function: what it sees, and what happens if it fails."""

import json
import math
import signal

import numpy as np
import pytest

from toprlib.command import command
from toprlib.grading import describe_errors, grade_samples
from toprlib.records import Grade, InputError, Problem, Sample, Task

PROBLEMS = [Problem("train-7", "?", gold="seven"), Problem("train-8", "?", gold="eight")]
LONG = "x" * 70 + "\n" + "y" * 70


def grades(task, completions, problems=PROBLEMS):
    samples = [Sample(prompt="?", completion=text) for text in completions]
    graded = grade_samples(task, samples, problems)
    return [(sample.reward, sample.outcome) for sample in graded]


def test_reward_is_called_with_the_text_before_the_stop_string():
    calls = []

    def reward(completion, problem):
        calls.append((completion, problem.id))
        return 1.0

    task = Task("own", PROBLEMS, [], reward=reward, stop=("END", "Q:"))
    grades(task, ["a END b", "b", "c Q: d END", "END"])
    assert calls == [("a ", "train-7"), ("b", "train-7"), ("c ", "train-8"), ("", "train-8")]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(0.5), (0.5, "good")),
        (-3, (-3.0, "bad")),
        (0, (0.0, "bad")),
        (True, (1.0, "good")),
        (Grade(-2, "ugly"), (-2.0, "ugly")),
    ],
)
@pytest.mark.parametrize("function", ["reward", "batch_reward"])
def test_a_reward_is_a_finite_number_or_a_grade(value, expected, function):
    functions = {
        "reward": lambda completion, problem: value,
        "batch_reward": lambda completions, problems: (value for _ in completions),
    }
    outcomes = ("good", "bad", "ugly")
    task = Task("own", PROBLEMS, [], outcomes=outcomes, **{function: functions[function]})
    assert grades(task, ["a", "b"]) == [expected, expected]


def test_grade_returns_the_outcome_and_sees_the_gold_answer():
    def grade(completion, gold):
        return "correct" if completion == gold else "incorrect"

    task = Task("own", PROBLEMS, [], grade=grade)
    actual = grades(task, ["seven", "eight", "eight", "seven"])
    assert actual == [
        (1.0, "correct"),
        (-1.0, "incorrect"),
        (1.0, "correct"),
        (-1.0, "incorrect"),
    ]


def test_batch_reward_is_called_once_with_all_completions_and_their_problems():
    calls = []

    def batch_reward(completions, problems):
        calls.append((completions, [problem.id for problem in problems]))
        return [len(text) for text in completions]

    task = Task("own", PROBLEMS, [], batch_reward=batch_reward)
    assert [reward for reward, _ in grades(task, ["a", "bb", "", "dddd"])] == [1, 2, 0, 4]
    assert calls == [(["a", "bb", "", "dddd"], ["train-7", "train-7", "train-8", "train-8"])]
    assert grades(task, [], []) == []
    assert len(calls) == 1


def test_a_new_grade_replaces_the_old_one_and_changes_nothing_else():
    sample = Sample(
        problem_id="train-7",
        prompt="?",
        completion="a",
        token_ids=[3, 1],
        token_logmu_engine=[-0.5, -0.25],
        finish_reason="length",
        reward=-1.0,
        outcome="incorrect",
    )
    task = Task("own", [], [], reward=lambda completion, problem: 0.75)
    [graded] = grade_samples(task, [sample], PROBLEMS[:1])
    assert graded.model_dump() == sample.model_dump() | {"reward": 0.75, "outcome": "correct"}
    assert sample.reward == -1.0


def raising(completion, problem):
    return json.loads(completion)


@pytest.mark.parametrize(
    "functions",
    [
        {"reward": raising},
        {"grade": raising},
        {"batch_reward": lambda texts, problems: list(map(raising, texts, problems))},
    ],
)
def test_an_exception_keeps_its_traceback_and_says_on_which_completion(functions):
    task = Task("own", PROBLEMS, [], **functions)
    with pytest.raises(json.JSONDecodeError) as raised:
        grades(task, [LONG, LONG])
    assert "raising" in [entry.name for entry in raised.traceback]
    [note] = raised.value.__notes__
    assert "train-7" in note
    assert repr(LONG[:80]) in note


@pytest.fixture
def restored_handler():
    """A command handles SIGTERM."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize("error", [ZeroDivisionError, FileNotFoundError, KeyError])
def test_a_command_ends_with_the_traceback_of_a_reward(error, restored_handler):
    def fail(completion, problem):
        raise error

    task = Task("own", PROBLEMS, [], reward=fail)
    with pytest.raises(error) as raised, command("own"):
        grades(task, [LONG, LONG])
    assert len(raised.value.__notes__) == 1


def test_a_command_ends_with_a_line_about_a_value_that_is_no_grade(restored_handler, capsys):
    task = Task("own", PROBLEMS, [], reward=lambda completion, problem: math.nan)
    with pytest.raises(SystemExit) as raised, command("own"):
        grades(task, [LONG, LONG])
    assert raised.value.code == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_only_exceptions_get_a_note():
    with pytest.raises(KeyboardInterrupt) as raised, describe_errors("train-7", "a"):
        raise KeyboardInterrupt
    assert not hasattr(raised.value, "__notes__")


@pytest.mark.parametrize(
    ("function", "value", "problem_id"),
    [
        ("reward", math.nan, "train-7"),
        ("reward", -math.inf, "train-7"),
        ("reward", "yes", "train-7"),
        ("reward", None, "train-7"),
        ("reward", Grade(math.nan, "correct"), "train-7"),
        ("reward", Grade(1.0, "brilliant"), "train-7"),
        ("grade", "invalid", "train-7"),
        ("grade", 1.0, "train-7"),
        ("batch_reward", [1.0], ""),
        ("batch_reward", [1.0, 2.0, 3.0], ""),
        ("batch_reward", [1.0, math.nan], "train-8"),
    ],
)
def test_a_value_that_is_no_grade_is_an_input_error(function, value, problem_id):
    task = Task("own", PROBLEMS, [], **{function: lambda *_: value})
    with pytest.raises(InputError) as raised:
        grades(task, [LONG, LONG])
    assert raised.value.field == function
    assert problem_id in str(raised.value)
    assert "\n" not in str(raised.value)
