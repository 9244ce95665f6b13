"""Tasks of one's own: the three examples of docs/own_task.md, rewards of any range, and rewards that are faulty."""

import contextlib
import functools
import json
import math
import re
import runpy
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pipeline import sampling
from pipeline.records import Drawn, Grade, InputError, Problem, Sample, Task, read_records
from pipeline.sampling import graded
from pipeline.settings import Settings
from pipeline.stages import signs_note
from runs import contents, experiment

import train_gsm8k as gsm8k
from examples import judged, strict_format, sums
from examples.questions import LINES, grade, questions, words

ROOT = Path(gsm8k.__file__).parent
OPTIONS = "--problems 4 --n 6 --test-problems 3 --test-samples 4 --k 2 --curve-points 1 --max-new-tokens 48 --batch 8"
OPTIONS += f" --model {ROOT / 'tiny' / 'base'}"  # which makes slips, too


def page_s_file(folder):
    """The file that docs/own_task.md shows."""
    [code] = re.findall(
        "```python\n(.*?)```", (ROOT / "docs" / "own_task.md").read_text(), re.DOTALL
    )
    (folder / "my_task.py").write_text(code)
    return folder / "my_task.py"


def graded_sum(sample, pattern="[0-9]+"):
    a, b = map(int, sample.problem_id.split("+"))
    is_right = re.findall(pattern, sample.completion)[-1:] == [str(a + b)]
    return (1, "correct") if is_right else (-1, "incorrect")


@pytest.mark.parametrize(
    ("name", "grade", "votes"),
    [
        ("sums", graded_sum, True),
        ("strict_format", lambda sample: strict_format.reward(sample.completion, None), False),
        ("judged", lambda sample: judged.judge(sample.completion), False),
        (page_s_file, lambda sample: graded_sum(sample, r"The answer is (\d+)\."), False),
    ],
)
def test_an_example_of_at_most_40_lines_runs_with_its_rewards(
    name, grade, votes, tmp_path, monkeypatch, capsys
):
    file = ROOT / "examples" / f"{name}.py" if isinstance(name, str) else name(tmp_path)
    assert len(file.read_text().splitlines()) <= 40
    monkeypatch.setattr(sys, "argv", [file.stem, *OPTIONS.split(), "--chunk", "2"])
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(file), run_name="__main__")
    [folder] = (tmp_path / "runs").iterdir()
    assert folder.name.startswith(f"{file.stem}-laptop")
    samples, tested = (
        read_records(folder / f"iteration-1/{of}.jsonl", Sample) for of in ("samples", "test-0")
    )
    assert [(sample.reward, sample.outcome) for sample in samples] == [
        grade(sample) for sample in samples
    ]
    assert len({sample.outcome for sample in samples}) > 1
    before, printed = (
        json.loads((folder / "results.json").read_text())["before"],
        capsys.readouterr().out,
    )
    assert before["reward"]["mean"] == pytest.approx(np.mean([sample.reward for sample in tested]))
    assert ("maj@2" in before, "pass@2" in before, "mean reward" in printed) == (votes, True, True)
    # Rewards between 0 and 1 are told to be supervised training.
    assert ("after the baseline" in printed) == (name == "strict_format")


@pytest.mark.parametrize(
    ("function", "completion", "expected"),
    [
        (strict_format.reward, " 2 * 3 = 6 figs. The answer is 6.", (1, "all")),
        (
            strict_format.reward,
            " 2 * 3 = 6 figs. 6 + 1 = 7 left. The answer is 7.",
            (0.75, "some"),
        ),  # two steps
        (
            strict_format.reward,
            " 2 * 3 = 6 figs. The answer is 7.",
            (0.75, "some"),
        ),  # not the last result
        (strict_format.reward, "6" * 61, (0, "none")),
        (judged.judge, "7 * 8 = 56 eggs. 56 + 4 = 60. The answer is 61.", (1, "right")),
        (judged.judge, "7 * 8 = 56 eggs. 56 + 4 = 61.", (-1, "wrong")),
        (judged.judge, "The answer is 61.", (-1, "wrong")),
        (judged.judge, "__import__('os').abort() = 3", (-1, "wrong")),  # sums alone are read
        pytest.param(judged.judge, "9**9**9**9 = 3", (-1, "too long"), marks=pytest.mark.slow),
    ],
)
def test_rewards_of_the_examples(function, completion, expected):
    assert function(*(completion, Problem("1", "?"))[: function.__code__.co_argcount]) == expected


def test_no_question_is_for_training_and_for_tests_and_each_set_has_all_kinds():
    task, kinds = (
        questions(Settings(problems=1000)),
        {question: kind for kind, question, _ in LINES},
    )
    train, test = ({problem.question for problem in part} for part in (task.train, task.test))
    assert (len(train), len(test), train & test) == (144, 96, set())
    assert all(
        {kinds[question] for question in part} == set(kinds.values()) for part in (train, test)
    )
    task = sums.sums(Settings())
    assert not {problem.id for problem in task.train} & {problem.id for problem in task.test}


RIGHT = ("{}", "The answer is {}.", "It's {}, I", "{} (or Foo", '"{}" is it.', "Is\n{}\nFoo")
WRONG = ("Foo, {}", "Foo or {}", "{} or Foo", "{} Foo", "not {}", "Foo. {}.", "un{}")


def test_an_accepted_answer_is_right_alone_or_in_a_sentence_and_not_second_in_a_list():
    for _, question, gold in LINES:
        accepted = frozenset(" ".join(words(answer)) for answer in gold.split("/"))
        for answer in gold.split("/"):
            told = (*RIGHT, f"{question[:-1]} is {{}}, I", question + " {}")
            assert {grade(text.format(answer.upper()), accepted) for text in told} == {"correct"}, (
                answer
            )
            assert {grade(text.format(answer), accepted) for text in WRONG} == {"incorrect"}, answer
        assert grade(question, accepted) == grade("", accepted) == "invalid"


def grades(task, completions, problems, **limit):
    drawn = [Drawn(prompt="?", completion=text) for text in completions]
    return [
        Grade(sample.reward, sample.outcome) for sample in graded(task, drawn, problems, **limit)
    ]


def raising(completion, problem):
    return json.loads(completion)


def hanging(completion, problem):
    for _ in range(30):
        with contextlib.suppress(Exception):
            time.sleep(0.1)
    return 1.0


COMPLETION = "x" * 70 + "\n" + "y" * 70
PROBLEMS = [Problem("train-7", "?"), Problem("train-8", "?")]
RAISES = raising.__code__.co_firstlineno + 1
HANGS = hanging.__code__.co_firstlineno + 3


@pytest.mark.parametrize(
    ("functions", "line", "fault"),
    [
        ({"reward": raising}, RAISES, "json.decoder.JSONDecodeError: Exp"),
        ({"reward": functools.partial(raising)}, RAISES, "json.decoder"),
        (
            {"reward": type("Strict", (), {"__call__": lambda _, *given: raising(*given)})()},
            RAISES,
            "json.decoder",
        ),
        ({"reward": hanging}, HANGS, "took more than 0.2 s, see REWARD_SECONDS in"),
        (
            {"reward": lambda *_: math.nan},
            "[0-9]+",
            "returned nan, where a finite number or a Grade should be",
        ),
        ({"reward": lambda *_: "yes"}, "[0-9]+", "returned 'yes'"),
        ({"grade": lambda *_: "invalid"}, "[0-9]+", "returned the outcome 'invalid'"),
        ({"batch_reward": lambda texts, _: [1.0]}, "[0-9]+", "returned 1 grades for 2 completions"),
        (
            {"batch_reward": lambda texts, _: [1.0, math.nan]},
            "[0-9]+",
            "returned nan",
        ),  # for the second
        ({"batch_reward": hanging}, HANGS, "took more than 0.4 s"),
    ],
)
def test_a_reward_that_is_faulty_is_named_with_problem_completion_and_line(functions, line, fault):
    task = Task("own", PROBLEMS, [], **functions)
    with pytest.raises(InputError) as told:
        grades(task, [COMPLETION, COMPLETION], PROBLEMS, seconds=0.2)
    message = str(told.value)
    assert "\n" not in message
    second = "batch_reward" in functions and fault == "returned nan"
    assert f"problem {PROBLEMS[second].id}, completion {COMPLETION[:80]!r}: " in message
    assert re.search(f": {re.escape(__file__)}:{line}: {re.escape(fault)}", message)


def test_a_reward_sees_the_text_before_the_stop_string_and_any_kind_of_number_will_do():
    shown = []

    def reward(completion, problem):
        shown.append((completion, problem.id))
        return {"train-7": np.float32(0.5), "train-8": -3}[problem.id]

    task = Task("own", PROBLEMS, [], reward=reward, stop=("END",), outcomes=("good", "bad", "ugly"))
    assert grades(task, ["a END b", "c"], PROBLEMS) == [(0.5, "good"), (-3.0, "bad")]
    assert shown == [("a ", "train-7"), ("c", "train-8")]
    in_a_batch = Task(
        "own", [], [], batch_reward=lambda texts, problems: (len(text) for text in texts)
    )
    assert grades(in_a_batch, ["a", ""], PROBLEMS) == [(1.0, "correct"), (0.0, "incorrect")]
    assert grades(in_a_batch, [], []) == []


def test_the_time_limit_leaves_other_alarms_alone_and_works_in_threads():
    task = Task("own", PROBLEMS, [], reward=lambda *_: 1.0)
    before = signal.signal(signal.SIGALRM, print)
    signal.setitimer(signal.ITIMER_REAL, 500)
    try:
        grades(task, ["a", "b"], PROBLEMS, seconds=100)
        with ThreadPoolExecutor() as threads:
            assert threads.submit(grades, task, ["a", "b"], PROBLEMS, seconds=100).result()
        assert (
            signal.getitimer(signal.ITIMER_REAL)[0] > 100,
            signal.getsignal(signal.SIGALRM),
        ) == (True, print)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_task_that_does_not_fit_together_is_refused():
    for changes, fault in (
        ({}, "give one of reward, batch_reward and grade"),
        ({"reward": raising, "batch_reward": raising}, "give one of"),
        ({"reward": raising, "outcomes": ("good", "good")}, "two different names"),
        ({"reward": raising, "test": PROBLEMS * 3}, "3 problems have the id 'train-7'"),
    ):
        with pytest.raises(InputError, match=fault):
            Task(**{"name": "own", "train": PROBLEMS, "test": [], **changes})


def own_run(folder, reward, iterations=1, reuse=None, **changes):
    """A run whose problems are sampled two at a time."""
    sizes = {
        "problems": 4,
        "n": 2,
        "chunk": 2,
        "batch": 4,
        "curve_points": 1,
        "iterations": iterations,
        "reuse": reuse,
    }
    return experiment(
        folder, lambda settings: replace(sums.sums(settings), reward=reward, **changes), **sizes
    )


def test_what_was_drawn_is_graded_once_the_reward_is_mended(tmp_path, monkeypatch):
    """The reward fails in the second chunk of training problems, once; the runs' files are the same to the byte."""
    drawn, left = [], {"calls": 4 * 6 + 2 * 2 + 1}
    draw = sampling.draw
    monkeypatch.setattr(
        sampling,
        "draw",
        lambda *a: drawn.append([prompt.problem.id for prompt in a[0]]) or draw(*a),
    )

    def failing(completion, problem):
        left["calls"] -= 1
        if left["calls"] == -1:
            raise KeyError
        return sums.reward(completion, problem)

    with pytest.raises(
        InputError, match="mend it, and the same command goes on with what was drawn"
    ):
        own_run(tmp_path / "torn", failing)
    parts = [
        tmp_path / "torn" / "iteration-1" / f"samples.jsonl.part-0{end}" for end in ("", ".drawn")
    ]
    assert [len(part.read_text().splitlines()) for part in parts] == [4, 4]
    torn = own_run(tmp_path / "torn", failing)
    chunks, drawn[:] = list(drawn), []
    assert torn == own_run(tmp_path / "whole", sums.reward)
    assert chunks == drawn  # the engine was asked as often as without the fault
    assert contents(tmp_path / "torn") == contents(tmp_path / "whole")


def test_an_answer_that_cannot_be_read_is_named_and_nothing_is_lost(tmp_path):
    with pytest.raises(InputError, match=r"problem .*TypeError: unhashable type: 'list'"):
        own_run(tmp_path / "run", sums.reward, 0, parse=lambda completion: [completion])
    own_run(tmp_path / "run", sums.reward, 0)


def test_completions_of_another_run_are_graded_by_this_run_s_reward(tmp_path, monkeypatch):
    own_run(tmp_path / "drawn", sums.reward, 0)
    monkeypatch.setattr(sampling, "draw", lambda *_: pytest.fail("drawn again"))
    results = own_run(tmp_path / "run", lambda *_: 0.5, 0, reuse=tmp_path / "drawn")
    assert results["before"]["reward"] == {"mean": 0.5, "se": 0.0}
    drawn, graded = (
        read_records(tmp_path / run / "iteration-1" / "test-0.jsonl", Sample)
        for run in ("drawn", "run")
    )
    assert [sample.token_ids for sample in drawn] == [sample.token_ids for sample in graded]


def test_a_task_without_problems_is_refused_before_anything_is_written(tmp_path):
    for split in ("train", "test"):
        with pytest.raises(InputError, match=r"task sums: has no \w+ problems"):
            own_run(tmp_path / "run", sums.reward, **{split: []})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "rewards", "learnt", "expected"),
    [
        ({"baseline": 0.6}, [1, 0.5, 0.5, 0.5], [0.4, -0.1, -0.1, -0.1], None),  # most changed sign, as they must
        ({"method": "dpo"}, [1, 0], [1, 0], None),
        ({"method": "sft"}, [1, 0], [1, 0], None),
        ({"composition": "positives_only"}, [1, 1], [1, 1], None),
        ({"baseline": -0.5}, [-1, -0.2, -0.2, 1], [-0.5, 0.3, 0.3, 1.5], None),  # half of them, not most
        ({"effective_proportion": 1.0}, [1, -1], [2, 0], None),
        ({}, [1, 0, 0, 0], [1, 0, 0, 0],
         "25.0 % positive, 75.0 % zero, 0.0 % negative: without negatives topr is supervised training on the positives;"
         " --baseline 0.5, between the smallest reward, 0, and the largest, 1, gives both signs"),
        ({"method": "tis"}, [1, 0.5], [1, 0.5], "without negatives tis learns from the positives; --baseline 0.75,"),
        ({"baseline": 3.0}, [2, 1], [-1, -2],
         "0.0 % positive, 0.0 % zero, 100.0 % negative: without positives topr only makes less probable what was drawn;"
         " --baseline 1.5,"),
        ({}, [-1, -1], [-1, -1], "all rewards are -1, which no baseline can tell apart"),
        ({"baseline_from": "group"}, [1, 0], [0, 0], "to learn from; --baseline-from zero --baseline 0.5,"),
        ({"baseline": -0.5}, [-1, -0.2, -0.2, -0.2, 2], [-0.5, 0.3, 0.3, 0.3, 2.5],
         "the baseline gave 60.0 % the other sign, of which topr learns the contrary; --baseline 0,"),
    ],
)  # fmt: skip
def test_signs_that_are_wrong_are_told_with_what_mends_them(settings, rewards, learnt, expected):
    note = signs_note(Settings(**settings), rewards, learnt)
    assert note is None if expected is None else expected in note
    if note and (mend := re.search("--baseline ([0-9.]+)", note)):
        c = float(mend[1])
        mended = replace(Settings(**settings), baseline=c, baseline_from="zero")
        assert signs_note(mended, rewards, [reward - c for reward in rewards]) is None
