"""The verifier: verdicts, solutions as problems, the weighted vote, and a run from end to end."""

import json
from collections import Counter
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest
from task_helpers import input_error, make_sample, write_rows

import train_gsm8k as gsm8k
from tasks import math, verifier
from toprlib.evaluation import Answers, to_answers
from toprlib.files import read_records
from toprlib.records import Problem, Sample
from toprlib.settings import TINY, Settings, check, intended_ranks

QUESTION = verifier.QUESTION


# ---- verdicts ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f" 1 + 1 = 2, right. {QUESTION} Yes", True),
        (f"{QUESTION} No", False),
        (f"{QUESTION}\n\n**Yes**", True),
        (f"{QUESTION} No. {QUESTION} Yes", True),
        (f"{QUESTION} Yes. {QUESTION}", None),
        (f"{QUESTION} Yesterday", None),
        (f"{QUESTION} Yes/No", None),
        (f"{QUESTION} Yes or No?", None),
        (f"{QUESTION} yes", None),
        ("Yes", None),
    ],
)
def test_the_verdict_is_the_word_after_the_last_question(text, expected):
    assert verifier.parse_verdict(text) is expected
    outcome_of_correct = {True: "correct", False: "incorrect", None: "invalid"}
    outcome_of_wrong = {True: "incorrect", False: "correct", None: "invalid"}
    assert verifier.grade_verdict(text, True) == outcome_of_correct[expected]
    assert verifier.grade_verdict(text, False) == outcome_of_wrong[expected]


# ---- solutions as problems -----------------------------------------------------------------------
SOLUTION = " 1 + 1 = 2. The answer is 2."
PLAIN = f"Q: 1 + 1?\nA:{SOLUTION}\nCheck:"


def make_task(stop=(), **changes):
    """Verification of three solutions of one problem."""
    solutions = [
        make_sample(SOLUTION, "correct"),
        make_sample("b", "incorrect"),
        make_sample("c", "invalid"),
    ]
    task = gsm8k.gsm8k_task(Settings())
    task = replace(task, train=[Problem("p", "1 + 1?", 0)], stop=stop)
    return verifier.verifier_task(replace(SMALL, **changes), task, solutions, [])


def test_a_problem_is_a_solution_whose_gold_answer_is_whether_it_is_correct():
    problems = make_task().train
    assert [problem.gold for problem in problems] == [True, False, False]
    assert [problem.question.splitlines()[1] for problem in problems] == [
        f"A:{SOLUTION}",
        "A:b",
        "A:c",
    ]
    assert len({problem.id for problem in problems}) == 3


def test_a_solution_ends_before_the_generators_stop_string():
    problem = make_task(stop=(" The answer",)).train[0]
    assert problem.question == "Q: 1 + 1?\nA: 1 + 1 = 2.\nCheck:"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ""),
        ({"model": str(TINY / "base")}, ""),
        ({"model": "owner/name"}, verifier.INSTRUCTION),
        ({"model": "owner/name", "instruction": ""}, ""),
        ({"instruction": "Look! "}, "Look! "),
    ],
)
def test_an_instruction_precedes_the_question_unless_the_model_is_of_tiny(changes, expected):
    task = make_task(**changes)
    assert task.train[0].question == f"{expected}{PLAIN}"
    assert task.stop == (("\nQ:",) if expected else ())


def test_the_instruction_contains_the_question():
    assert QUESTION in verifier.INSTRUCTION


# ---- the vote ------------------------------------------------------------------------------------
def make_verifications(words, is_correct):
    """Verifications, by words such as Yes; is_correct: of the solution that each is about."""
    verifications = []
    for word, solution_is_correct in zip(words.split(), is_correct, strict=True):
        text = f"{QUESTION} {word}"
        outcome = verifier.grade_verdict(text, solution_is_correct)
        verifications.append(make_sample(text, outcome))
    return verifications


def test_results_of_two_problems_by_hand():
    """Each has answers 8, 8 and 7, of which 7 is correct, and two verdicts on each."""
    solutions = []
    for problem_id in "ab":
        solutions.append(make_sample(" The answer is 8.", "incorrect", problem_id))
        solutions.append(make_sample(" The answer is 8.", "incorrect", problem_id))
        solutions.append(make_sample(" The answer is 7.", "correct", problem_id))
    answers = to_answers(solutions, gsm8k.gsm8k_task(Settings()))
    # Scores are 1/2, 0, 1; then 0, 0, 1/2, because a verdict that cannot be read counts 0.
    words = "Yes No No No Yes Yes No ? ? ? No Yes"
    is_correct = [False, False, False, False, True, True] * 2
    actual = verifier.verify(make_verifications(words, is_correct), answers)
    assert actual["verifier accuracy"].tolist() == pytest.approx([5 / 6, 2 / 6])
    assert actual["invalid rate"].tolist() == pytest.approx([0, 3 / 6])
    assert actual["weighted self-consistency"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("No No No No No No", 0),  # no Yes at all: the majority decides
        ("Yes No Yes No No No", 0),  # equal sums: the majority decides
        ("Yes Yes Yes No No No", 1),  # one more Yes outweighs one more solution
    ],
)
def test_the_number_of_solutions_decides_between_equal_sums_of_scores(words, expected):
    """The first of three solutions is correct; the others agree on another answer."""
    answers = Answers(np.array([[True, False, False]]), [[7, 8, 8]])
    verifications = make_verifications(words, [True, True, False, False, False, False])
    actual = verifier.verify(verifications, answers)
    assert actual["weighted self-consistency"].tolist() == [expected]


# ---- a run ---------------------------------------------------------------------------------------
SIZES = {
    "problems": 4,
    "train_solutions": 3,
    "n": 2,
    "iterations": 2,
    "test_problems": 3,
    "test_solutions": 4,
    "eval_samples": 2,
}
SMALL = replace(verifier.SETTINGS["laptop"], **SIZES)
OPTION_NAMES = {"n": "verifications", "eval_samples": "test-verifications"}


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """The folder of a run of SMALL, and its results."""
    folder = tmp_path_factory.mktemp("verifier") / "run"
    return folder, verifier.run(replace(SMALL, out=folder))


@pytest.fixture(scope="module")
def solutions(finished_run):
    """The generator's solutions of the test problems."""
    return read_records(finished_run[0] / "solutions-test/iteration-1/test-0.jsonl", Sample)


def read_verifications(folder):
    """Those of the test solutions, by the base verifier and after each iteration."""
    results = json.loads((folder / "verifier" / "results.json").read_text())
    files = ["iteration-1/test-0.jsonl"]
    for number, iteration in enumerate(results["iterations"], start=1):
        files.append(f"iteration-{number}/test-{iteration['dataset']['steps']}.jsonl")
    return [read_records(folder / "verifier" / file, Sample) for file in files]


def test_a_run_has_as_many_samples_as_its_settings_say(finished_run, solutions):
    folder, results = finished_run
    samples = read_records(folder / "verifier" / "iteration-1" / "samples.jsonl", Sample)
    assert len(samples) == 4 * 3 * 2
    assert len(solutions) == 3 * 4
    assert [len(file) for file in read_verifications(folder)] == [3 * 4 * 2] * 3
    assert results["test"] == {"problems": 3, "solutions": 4, "verifications": 2}
    assert (folder / "table2.png").exists()
    assert json.loads((folder / "results.json").read_text()) == results


def test_solutions_are_of_the_generator(finished_run):
    folder, _ = finished_run
    for split in ("train", "test"):
        config = json.loads((folder / f"solutions-{split}" / "config.json").read_text())
        assert config["model"] == "tiny/base"


def test_each_verification_is_of_the_solution_that_it_counts_for(finished_run, solutions):
    folder, _ = finished_run
    for index, verification in enumerate(read_verifications(folder)[-1]):
        solution = solutions[index // 2]
        assert f"\nA:{solution.completion}\nCheck:" in verification.prompt
        verdict = verifier.parse_verdict(verification.completion)
        is_true = verdict is (solution.outcome == "correct")
        assert (verification.outcome == "correct") == is_true
        assert verification.reward == (1.0 if is_true else -1.0)


def test_accuracy_and_invalid_rate_are_those_of_the_verifications(finished_run):
    folder, results = finished_run
    entries = results["iterations"]
    for verifications, entry in zip(read_verifications(folder), entries, strict=True):
        counts = Counter(verification.outcome for verification in verifications)
        assert entry["verifier accuracy"]["mean"] == pytest.approx(counts["correct"] / 24)
        assert entry["invalid rate"]["mean"] == pytest.approx(counts["invalid"] / 24)
    assert results["table2"]["base"] == entries[0]
    assert results["table2"]["topr"] == entries[-1]


def test_the_rows_without_a_verifier_are_those_of_the_solutions(finished_run, solutions):
    _, results = finished_run
    wins = []
    for start in range(0, 12, 4):
        of_problem = solutions[start : start + 4]
        answers = [gsm8k.parse_answer(solution.completion) for solution in of_problem]
        counts = Counter(answer for answer in answers if answer is not None)
        winner = max(counts, key=counts.get)  # of equals, the first
        wins.append(of_problem[answers.index(winner)].outcome == "correct")
    actual = results["table2"]["no verifier"]["weighted self-consistency"]["mean"]
    assert actual == pytest.approx(fmean(wins))
    share = fmean(solution.outcome == "correct" for solution in solutions)
    constant = results["table2"][verifier.CONSTANT]["verifier accuracy"]["mean"]
    assert constant == pytest.approx(max(share, 1 - share))  # of always Yes and always No


def test_a_paired_difference_is_that_of_its_means(finished_run):
    _, results = finished_run
    before = results["table2"]["base"]["verifier accuracy"]["mean"]
    after = results["table2"]["topr"]["verifier accuracy"]["mean"]
    difference = results["paired differences"]["verifier accuracy, topr - base"]["mean"]
    assert difference == pytest.approx(after - before)


def test_repeating_a_finished_run_prints_it_and_changes_nothing(finished_run, monkeypatch, capsys):
    folder, results = finished_run
    times = {file: file.stat().st_mtime_ns for file in folder.rglob("*.jsonl")}
    arguments = ["--out", str(folder)]
    for name, value in SIZES.items():
        arguments.append(f"--{OPTION_NAMES.get(name, name.replace('_', '-'))}={value}")
    monkeypatch.setattr("sys.argv", ["tasks.verifier", *arguments])
    verifier.main()
    printed = capsys.readouterr().out
    for name in ("no verifier", "base", "topr", str(folder)):
        assert name in printed
    assert json.loads((folder / "results.json").read_text()) == results
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*.jsonl")} == times


def test_the_folder_of_another_run_is_refused(finished_run):
    folder, _ = finished_run
    error = input_error(verifier.run, replace(SMALL, out=folder, seed=1))
    assert error.option == "--out"


def test_a_verifier_of_mathematics_without_training(tmp_path):
    changes = {"task": "math", "data": str(TINY / "math"), "instruction": "Look! "}
    folder = tmp_path / "run"
    settings = replace(SMALL, **changes, iterations=0, max_new_tokens=8, out=folder)
    results = verifier.run(settings)
    assert results["table2"]["topr"] == results["table2"]["base"]
    [verifications] = read_verifications(folder)
    solutions = read_records(folder / "solutions-test/iteration-1/test-0.jsonl", Sample)
    problems = math.load_problems(str(TINY / "math"), "test")
    assert len(verifications) == 3 * 4 * 2
    for index, verification in enumerate(verifications):
        question = problems[index // 8].question
        solution = solutions[index // 2].completion
        assert verification.prompt == f"Look! Q: {question}\nA:{solution}\nCheck:"


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"train_solutions": 1}, "--train-solutions"),
        ({"n": 0}, "--verifications"),
        ({"eval_samples": 1}, "--test-verifications"),
        ({"k": 5}, "--k"),
        ({"generator": "nowhere"}, "--generator"),
        ({"model": "nowhere"}, "--model"),
        ({"chat": True}, "--chat"),
        ({"dry_run": True}, "--dry-run"),
        ({"samples": "file"}, "--samples"),
        ({"engine": "hf", "generator_gpus": 2}, "--generator-gpus"),
        ({"data": "one_problem"}, "--test-problems"),
    ],
)
def test_invalid_settings_are_refused_before_anything_is_written(
    changes, option, tmp_path, monkeypatch
):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.chdir(tmp_path)
    for split in ("train", "test"):
        row = {"question": "1 + 1?", "answer": "#### 2"}
        write_rows(tmp_path / "one_problem" / f"{split}.jsonl", [row])
    error = input_error(verifier.run, replace(SMALL, out=tmp_path / "run", **changes))
    assert error.option == option
    assert not (tmp_path / "run").exists()


# ---- presets -------------------------------------------------------------------------------------
@pytest.mark.parametrize("presets", [gsm8k.PRESETS, math.SETTINGS, verifier.SETTINGS])
def test_presets_are_valid_and_know_their_names(presets):
    for name, settings in presets.items():
        validate = verifier.check_verifier if presets is verifier.SETTINGS else check
        validate(settings, intended_ranks(name))
        assert settings.preset == name


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            verifier.SETTINGS["paper"],
            {
                "task": "math",
                "train_solutions": 16,
                "n": 4,
                "test_solutions": 32,
                "eval_samples": 4,
                "examples": 480_000,
                "generator_gpus": 4,
                "engine_gpus": 1,
            },
        ),
        (
            math.SETTINGS["paper"],
            {"n": 32, "shots": 4, "test_problems": 500, "eval_samples": 16, "lr": 5e-7},
        ),
    ],
    ids=["verifier", "math"],
)
def test_presets_have_the_paper_s_values(settings, expected):
    assert {name: getattr(settings, name) for name in expected} == expected
