"""Tasks of one's own: the examples as commands, their rewards, and warnings about the dataset."""

import json
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from subprocess import TimeoutExpired
from unittest.mock import Mock

import pytest
from task_helpers import ROOT, input_error, read_rows

import train_gsm8k as gsm8k
from examples import judged, strict_format, sums
from tiny.problems import QUESTIONS
from toprlib import sampling
from toprlib.files import read_records
from toprlib.records import Example, Problem, Sample
from toprlib.results import dataset_warnings
from toprlib.settings import TINY, Settings

SMALL = Settings(
    model=str(TINY / "base"),  # which makes mistakes in sums
    problems=3,
    n=4,
    max_new_tokens=48,
    batch_size=6,
    test_problems=2,
    eval_samples=4,
    k=2,
    evals_per_epoch=1,
)
OPTIONS = """--problems 3 --n 4 --max-new-tokens 48 --batch-size 6 --test-problems 2
    --eval-samples 4 --k 2 --evals-per-epoch 1"""


# ---- the examples as commands --------------------------------------------------------------------
def grade_sum(row):
    a, b = row["problem_id"].split("+")
    is_correct = re.findall("[0-9]+", row["completion"])[-1:] == [str(int(a) + int(b))]
    return (1.0, "correct") if is_correct else (-1.0, "incorrect")


def grade_format(row):
    return strict_format.reward(row["completion"], Problem("1", "?"))


def grade_steps(row):
    """The judge's grade, without its program."""
    steps = re.findall(r"[-+*/0-9 ]*[0-9] *= *[0-9]+", row["completion"])
    is_right = bool(steps)
    for step in steps:
        left, _, result = step.partition("=")
        try:
            is_right = is_right and eval(left) == int(result)
        except (SyntaxError, ZeroDivisionError):
            is_right = False
    return (1.0, "right") if is_right else (-1.0, "wrong")


@pytest.mark.parametrize(
    ("name", "grade", "votes"),
    [
        ("sums", grade_sum, True),
        ("strict_format", grade_format, False),
        ("judged", grade_steps, False),
    ],
)
def test_an_example_is_a_command_that_trains_on_its_rewards(
    name, grade, votes, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", [name, *OPTIONS.split(), "--model", str(TINY / "base")])
    monkeypatch.chdir(tmp_path)
    # The judge's time limit would let a busy machine change grades.
    call = subprocess.call
    monkeypatch.setattr(
        subprocess, "call", lambda command, timeout, **options: call(command, **options)
    )
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
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
    expected = sum(row["reward"] for row in tested) / len(tested)
    assert before["reward"]["mean"] == pytest.approx(expected)
    assert ("maj@2" in before) == votes
    assert "mean reward" in capsys.readouterr().out


def test_the_program_on_the_page_is_a_command(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "own_task.md").read_text(encoding="utf-8")
    [program] = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "my_task.py").write_text(program, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["my_task.py", *OPTIONS.split()])
    monkeypatch.chdir(tmp_path)
    module = runpy.run_path(str(tmp_path / "my_task.py"), run_name="__main__")
    [folder] = (tmp_path / "runs").iterdir()
    samples = read_rows(folder / "iteration-1" / "samples.jsonl")
    assert len(samples) == 3 * 4
    for row in samples:
        a, b = row["problem_id"].split(", ")
        is_right = f"The answer is {int(a) + int(b)}." in row["completion"]
        assert row["reward"] == (1 if is_right else -1)
    known = QUESTIONS["find"][0].format(name="Ada", thing="apples", a="{}", b="{}")
    assert module["QUESTION"] == f"Q: {known}\nA:"


# ---- rewards of the examples ---------------------------------------------------------------------
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
    assert strict_format.reward(completion, Problem("1", "?")) == expected


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("7 * 8 = 56 eggs. 56 + 4 = 60. The answer is 61.", (1, "right")),
        ("7 * 8 = 56 eggs. 56 + 4 = 61.", (-1, "wrong")),
        ("The answer is 61.", (-1, "wrong")),
        ("4 / 0 = 1", (-1, "wrong")),
        ("__import__('os').abort() = 3", (-1, "wrong")),  # only sums reach the program
    ],
)
def test_the_judge_checks_every_step(completion, expected, monkeypatch):
    monkeypatch.setattr(judged, "SECONDS", None)  # no limit: a busy machine changes no grade
    assert judged.judge(completion) == expected
    assert judged.batch_reward([completion] * 2, []) == [expected] * 2


def test_a_judge_without_an_answer_in_time_has_an_outcome_of_its_own(monkeypatch):
    call = Mock(side_effect=TimeoutExpired("python", judged.SECONDS))
    monkeypatch.setattr(judged, "call", call)
    assert judged.judge("9**9**9**9 = 3") == (-1, "too long")
    assert call.call_args.kwargs["timeout"] == judged.SECONDS


@pytest.mark.parametrize("sizes", [{}, {"problems": 10_000, "test_problems": 10_000}])
def test_no_sum_is_for_training_and_for_tests(sizes):
    task = sums.sums_task(Settings(**sizes))
    train = {problem.id for problem in task.train}
    test = {problem.id for problem in task.test}
    assert not train & test
    for problem in (*task.train, *task.test):
        a, b = problem.id.split("+")
        assert problem.gold == int(a) + int(b)
        assert sums.reward(f"It is {problem.gold}", problem) == 1
        assert sums.reward(f"It is {problem.gold + 1}", problem) == -1


def test_a_chat_model_gets_the_question_alone():
    settings = replace(SMALL, chat=True)
    task = sums.sums_task(settings)
    assert task.prompt(task.train[0]) == task.train[0].question
    task = sums.sums_task(SMALL)
    assert task.prompt(task.train[0]) == f"Q: {task.train[0].question}\nA:"


# ---- runs of an own task -------------------------------------------------------------------------
def run_sums(folder, iterations=1, **changes):
    settings = replace(SMALL, out=folder, iterations=iterations)
    task = replace(sums.sums_task(settings), **changes)
    return gsm8k.experiment(settings, task)


def test_after_an_error_of_the_reward_the_completions_are_kept(tmp_path, monkeypatch):
    calls = []

    def failing_reward(completion, problem):
        calls.append(completion)
        if len(calls) == 7:
            raise KeyError
        return sums.reward(completion, problem)

    with pytest.raises(KeyError) as raised:
        run_sums(tmp_path / "run", iterations=0, reward=failing_reward)
    assert len(raised.value.__notes__) == 1
    monkeypatch.setattr(sampling, "sample_completions", Mock(side_effect=AssertionError))
    run_sums(tmp_path / "run", iterations=0)
    rows = read_rows(tmp_path / "run" / "iteration-1" / "test-0.jsonl")
    assert [row["completion"] for row in rows[:7]] == calls
    for row in rows:
        assert (row["reward"], row["outcome"]) == grade_sum(row)


def test_after_an_error_of_parse_the_run_resumes(tmp_path):
    def parse(completion):
        return [completion]  # lists have no hash, so they cannot be counted

    with pytest.raises(TypeError) as raised:
        run_sums(tmp_path / "run", iterations=0, parse=parse)
    assert len(raised.value.__notes__) == 1
    results = run_sums(tmp_path / "run", iterations=0)
    assert "maj@2" in results["before"]


@pytest.mark.parametrize(
    ("split", "option"), [("train", "--problems"), ("test", "--test-problems")]
)
def test_a_task_without_problems_is_refused_before_anything_is_written(tmp_path, split, option):
    error = input_error(lambda: run_sums(tmp_path / "run", **{split: []}))
    assert error.option == option
    assert not (tmp_path / "run").exists()


# ---- warnings about the dataset ------------------------------------------------------------------
def find_warnings(settings, rewards, baseline=0.0, steps=2):
    """The warnings for samples with these rewards, all trained on, each less the baseline."""
    samples = []
    examples = []
    for index, reward in enumerate(rewards):
        samples.append(Sample(prompt="?", completion="!", reward=reward))
        examples.append(Example([1], [2], reward - baseline, index))
    return dataset_warnings(samples, examples, steps, settings)


def rewards_of(positive, negative, zero=0):
    return [1.0] * positive + [-1.0] * negative + [0.0] * zero


@pytest.mark.parametrize(
    ("changes", "rewards", "baseline"),
    [
        ({}, [1, -1], 0),
        ({}, [1, 1, 1, -1], 0),
        ({"baseline": 0.6}, [1, 0.5, 0.5, 0.5], 0.6),  # rewards that had one sign get both
        ({"baseline": -0.5}, [-1, -0.2, -0.2, 1], -0.5),  # half of the signs, not most
        ({"method": "dpo"}, [1, -1], 0),  # which compares rewards
        ({"method": "sft"}, [1, 0], 0),  # which is for positives
        ({"composition": "positives_only"}, [1, 1], 0),
        ({"effective_proportion": 1.0}, [1, -1], -1),
    ],
)
def test_no_warning_where_signs_are_as_they_should_be(changes, rewards, baseline):
    assert find_warnings(Settings(**changes), rewards, baseline) == {}


@pytest.mark.parametrize(
    ("changes", "rewards", "baseline", "kind"),
    [
        ({}, [1, 0, 0, 0], 0, "no negatives"),
        ({"method": "tis"}, [1, 0.5], 0, "no negatives"),
        ({"baseline": 3.0}, [2, 1], 3, "no positives"),
        ({"baseline": -0.5}, [-1, -0.2, -0.2, -0.2, 2], -0.5, "changed signs"),  # most of them
        ({"baseline": 0.9, "baseline_from": "mean"}, [1, 0], 1.4, "no positives"),
        ({"baseline": 0.9}, [1.0, *[0.1] * 15, *[0.2] * 15], 0.9, "few positives"),
    ],
)
def test_a_warning_names_a_baseline_that_gives_both_signs(changes, rewards, baseline, kind):
    settings = Settings(**changes)
    [(actual, warning)] = find_warnings(settings, rewards, baseline).items()
    assert actual == kind
    [value] = re.findall(r"--baseline ([-0-9.]+)", warning)
    assert ("--baseline-from zero" in warning) == (settings.baseline_from != "zero")
    after = [reward - float(value) for reward in rewards]
    assert min(after) < 0 < max(after)
    fixed = replace(settings, baseline=float(value), baseline_from="zero")
    assert kind not in find_warnings(fixed, rewards, float(value)) or kind == "few positives"


@pytest.mark.parametrize(
    ("changes", "rewards", "baseline", "kind"),
    [
        ({}, [-1, -1], 0, "no positives"),
        ({}, [1, 1], 0, "no negatives"),
        ({"baseline_from": "group"}, [1, 1], 1, "no reward"),
        ({"effective_proportion": 0.7}, [1, 1], 0, "ignored share"),
        ({}, [1.0, *[-0.1] * 15, *[-0.2] * 15], 0, "few positives"),  # whose signs are as meant
        ({"baseline": 0.5}, [1.0] * 2 + [0.0] * 98, 0.5, "few positives"),
    ],
)
def test_a_warning_that_no_baseline_can_help_names_none(changes, rewards, baseline, kind):
    [(actual, warning)] = find_warnings(Settings(**changes), rewards, baseline).items()
    assert actual == kind
    assert "--baseline " not in warning


ANY = {"method": "topr"}
OF_POSITIVES = {"method": "sft"}
ONLY_POSITIVES = {"composition": "positives_only"}
PAIRS = {"method": "dpo"}
MIXED = {"composition": "proportion", "proportion": 0.5}


@pytest.mark.parametrize(
    ("changes", "rewards", "kind"),
    [
        (ANY, rewards_of(4, 96), "few positives"),
        (ANY, rewards_of(5, 95), None),
        (ANY, rewards_of(7, 133), None),  # 5 % again, where 0.05 * 140 is above 7
        (ANY, rewards_of(95, 5), None),
        (ANY, rewards_of(96, 4), "few negatives"),
        (ANY, rewards_of(4, 76, zero=20), None),  # a reward of 0 has no sign
        (ANY, rewards_of(3, 77, zero=20), "few positives"),
        (OF_POSITIVES, rewards_of(4, 96), "few positives"),
        (OF_POSITIVES, rewards_of(96, 4), None),
        (ONLY_POSITIVES, rewards_of(4, 96), "few positives"),
        (ONLY_POSITIVES, rewards_of(96, 4), None),
        ({"effective_proportion": 1.0}, rewards_of(96, 4), None),
        ({"effective_proportion": 0.7}, rewards_of(96, 4), "few negatives"),
        (PAIRS, rewards_of(4, 96), "few positives"),
        (PAIRS, rewards_of(96, 4), "few negatives"),
        (MIXED, rewards_of(96, 4), "few negatives"),
    ],
)
def test_a_warning_about_a_sign_that_less_than_5_percent_have(changes, rewards, kind):
    expected = [] if kind is None else [kind]
    assert list(find_warnings(Settings(**changes), rewards)) == expected


def test_warnings_judge_all_samples_where_some_are_chosen_by_sign():
    """4 of 100 samples are positive; 4 positives and 4 negatives are trained on."""
    samples = [Sample(prompt="?", completion="!", reward=r) for r in rewards_of(4, 96)]
    examples = [Example([1], [2], samples[index].reward, index) for index in range(8)]
    for changes, kinds in ((MIXED, ["few positives"]), (PAIRS, ["few positives"]), (ANY, [])):
        assert list(dataset_warnings(samples, examples, 2, Settings(**changes))) == kinds


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"tiny/train.jsonl", "--model", "docs/own_task.md"}),
        ({"model": "elsewhere"}, {"--model", "--n"}),
        ({"samples": "own.jsonl"}, set()),  # no model has sampled them
    ],
)
def test_a_warning_about_few_positives_names_what_can_change_them(changes, expected):
    warning = find_warnings(Settings(**changes), rewards_of(1, 99))["few positives"]
    words = set(re.findall(r"--[a-z]+|tiny/[a-z.]+|docs/[a-z_.]+", warning))
    assert words == expected


@pytest.mark.parametrize(
    ("changes", "steps", "kinds"),
    [
        ({}, 1, ["one step"]),
        ({}, 2, []),
        ({"method": "tis"}, 1, ["one step"]),
        ({"method": "ppo"}, 1, ["one step"]),
        ({"method": "reinforce"}, 1, []),  # whose weights are always 1
        ({"method": "sft"}, 1, []),
        ({"method": "dpo"}, 1, []),  # which has no weights
        ({"method": "sft", "limits": (0.5, 2.0, 0.0, 0.0)}, 1, ["one step"]),
    ],
)
def test_a_warning_about_a_single_step_of_a_method_with_weights(changes, steps, kinds):
    assert list(find_warnings(Settings(**changes), [1, -1], steps=steps)) == kinds


def test_a_warning_about_a_single_step_names_a_batch_size_that_makes_more():
    warning = find_warnings(Settings(), [1.0, -1.0, -1.0], steps=1)["one step"]
    [size] = re.findall(r"--batch-size below (\d+)", warning)
    assert int(size) == 3  # samples


def test_warnings_about_signs_and_steps_come_together():
    assert list(find_warnings(Settings(), rewards_of(1, 99), steps=1)) == [
        "one step",
        "few positives",
    ]


@pytest.mark.parametrize(
    ("reward", "batch_size", "printed"),
    [
        (lambda completion, problem: -1.0, 6, "no positives"),
        (sums.reward, 12, "one step"),
        (sums.reward, 6, None),
    ],
)
def test_a_run_prints_its_steps_and_its_warnings(reward, batch_size, printed, tmp_path, capsys):
    """3 problems with 4 samples each; the warning is on a line of its own, before training."""
    settings = replace(SMALL, out=tmp_path / "run", test_problems=0, batch_size=batch_size)
    task = replace(sums.sums_task(settings), reward=reward)
    gsm8k.experiment(settings, task)
    first, *others = capsys.readouterr().out.splitlines()
    [steps] = re.findall(r"([0-9]+) optimizer step", first)
    assert int(steps) == 12 // batch_size
    samples = read_records(settings.iteration_folder(1) / "samples.jsonl", Sample)
    examples = read_records(settings.iteration_folder(1) / "train.jsonl", Example)
    warnings = dataset_warnings(samples, examples, int(steps), settings)
    assert list(warnings) == ([] if printed is None else [printed])
    assert others == [f"iteration 1: warning: {text}" for text in warnings.values()]
