"""The verifier: verdicts, solutions as problems, the weighted vote, and a run from end to end."""

import json
from collections import Counter
from dataclasses import replace
from statistics import fmean

import numpy as np
import pytest

import train_gsm8k as gsm8k
from examples import math_task as math
from examples import verifier
from toprlib.evaluation import Answers, to_answers
from toprlib.files import read_records
from toprlib.records import Problem, Sample
from toprlib.settings import TINY, Settings

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
    grades = verifier.grade([text, text], [Problem("", gold) for gold in (True, False)])
    true = (1.0, "correct")
    false = (-1.0, "incorrect")
    none = (-1.0, "invalid")
    assert grades == {True: [true, false], False: [false, true], None: [none, none]}[expected]


# ---- solutions as problems -----------------------------------------------------------------------
def make_sample(completion, outcome):
    """A graded sample of a task whose rewards are +1 and -1."""
    reward = 1.0 if outcome == "correct" else -1.0
    return Sample(prompt="?", completion=completion, reward=reward, outcome=outcome)


def test_a_problem_is_a_solution_whose_gold_answer_is_whether_it_is_correct():
    """A solution ends before the generator's stop string."""
    solutions = [
        make_sample(" 1 + 1 = 2.", "correct"),
        make_sample(" 7.", "incorrect"),
        make_sample(" 3.STOP 2", "incorrect"),
        make_sample("c", "invalid"),
    ]
    task = replace(gsm8k.gsm8k_task(Settings()), stop=("STOP",))
    problems = [Problem("1 + 1?"), Problem("2 + 2?")]
    verifications = verifier.to_problems(task, problems, solutions, "Look! ")
    assert [problem.question for problem in verifications] == [
        "Look! Q: 1 + 1?\nA: 1 + 1 = 2.\nCheck:",
        "Look! Q: 1 + 1?\nA: 7.\nCheck:",
        "Look! Q: 2 + 2?\nA: 3.\nCheck:",
        "Look! Q: 2 + 2?\nA:c\nCheck:",
    ]
    assert [problem.gold for problem in verifications] == [True, False, False, False]


# ---- the vote ------------------------------------------------------------------------------------
def make_verifications(words, is_correct):
    """Verifications, by words such as Yes; is_correct: of the solution that each is about."""
    texts = [f"{QUESTION} {word}" for word in words.split()]
    grades = verifier.grade(texts, [Problem("", gold) for gold in is_correct])
    return [make_sample(text, grade.outcome) for text, grade in zip(texts, grades, strict=True)]


def test_results_of_two_problems_by_hand():
    """Each has answers 8, 8 and 7, of which 7 is correct, and two verdicts on each."""
    wrong = make_sample(" The answer is 8.", "incorrect")
    right = make_sample(" The answer is 7.", "correct")
    solutions = [wrong, wrong, right] * 2
    answers = to_answers(solutions, 2, gsm8k.gsm8k_task(Settings()))
    # Scores are 1/2, 0, 1; then 0, 1/2, 0, because a verdict that cannot be read counts 0.
    words = "Yes No No No Yes Yes No ? No Yes ? No"
    is_correct = [False, False, False, False, True, True] * 2
    actual = verifier.verify(make_verifications(words, is_correct), answers)
    # The standard error of two values is half their distance.
    assert actual["verifier accuracy"] == pytest.approx({"mean": 7 / 12, "se": 3 / 12})
    assert actual["invalid rate"] == pytest.approx({"mean": 2 / 12, "se": 2 / 12})
    assert actual["weighted self-consistency"] == pytest.approx({"mean": 0.5, "se": 0.5})


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
    answers = Answers(np.array([[True, False, False]] * 2), [[7, 8, 8]] * 2)
    is_correct = [True, True, False, False, False, False] * 2
    actual = verifier.verify(make_verifications(f"{words} {words}", is_correct), answers)
    assert actual["weighted self-consistency"] == {"mean": expected, "se": 0}


def test_solutions_without_an_answer_do_not_vote():
    assert not verifier.vote_is_correct([None, None], [False, False], [1, 1])
    assert verifier.vote_is_correct([None, 7, None], [False, True, False], [3, 1, 3])
    assert verifier.vote_is_correct([7, 8], [True, False], [1, 1])  # of equals, the first


# ---- a run ---------------------------------------------------------------------------------------
SMALL = replace(
    verifier.PRESETS["laptop"],
    problems=2,
    train_solutions=3,
    n=2,
    iterations=2,
    test_problems=3,
    test_solutions=4,
    eval_samples=2,
    max_new_tokens=56,
)


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


def test_a_run_verifies_each_solution_as_often_as_its_settings_say(finished_run, solutions):
    folder, results = finished_run
    samples = read_records(folder / "verifier" / "iteration-1" / "samples.jsonl", Sample)
    assert len(samples) == 2 * 3 * 2
    assert len(solutions) == 3 * 4
    assert [len(file) for file in read_verifications(folder)] == [3 * 4 * 2] * 3
    assert results["test"] == {"problems": 3, "solutions": 4, "verifications": 2}
    assert json.loads((folder / "results.json").read_text()) == results
    for split in ("train", "test"):
        config = json.loads((folder / f"solutions-{split}" / "config.json").read_text())
        assert config["model"].endswith("tiny/base")
    for index, verification in enumerate(read_verifications(folder)[-1]):
        solution = solutions[index // 2]
        assert f"\nA:{solution.completion}\nCheck:" in verification.prompt
        verdict = verifier.parse_verdict(verification.completion)
        is_true = verdict is (solution.outcome == "correct")
        assert verification.reward == (1.0 if is_true else -1.0)


def test_table_2_recomputed_from_the_files(finished_run, solutions):
    folder, results = finished_run
    for verifications, entry in zip(read_verifications(folder), results["iterations"], strict=True):
        counts = Counter(verification.outcome for verification in verifications)
        assert entry["verifier accuracy"]["mean"] == pytest.approx(counts["correct"] / 24)
        assert entry["invalid rate"]["mean"] == pytest.approx(counts["invalid"] / 24)
    rows = results["table2"]
    assert (rows["base"], rows["topr"]) == (results["iterations"][0], results["iterations"][-1])
    wins = []
    for start in range(0, 12, 4):
        of_problem = solutions[start : start + 4]
        answers = [gsm8k.parse_answer(solution.completion) for solution in of_problem]
        counts = Counter(answer for answer in answers if answer is not None)
        winner = max(counts, key=counts.get)  # of equals, the first
        wins.append(of_problem[answers.index(winner)].outcome == "correct")
    actual = rows["no verifier"]["weighted self-consistency"]
    assert actual["mean"] == pytest.approx(fmean(wins))
    assert actual["se"] == pytest.approx(np.std(wins, ddof=1) / 3**0.5)
    share = fmean(solution.outcome == "correct" for solution in solutions)
    constant = rows[verifier.CONSTANT]["verifier accuracy"]["mean"]
    assert constant == pytest.approx(max(share, 1 - share))  # of always Yes and always No


def test_a_verifier_of_mathematics_without_training(tmp_path, monkeypatch):
    monkeypatch.setattr(math, "are_equal", lambda pairs: [True] * len(pairs))
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
    "arguments",
    ["--train-solutions 1", "--test-verifications 1", "--k 5", "--model /", "--dry-run"],
)
def test_invalid_settings_are_refused_before_anything_is_written(arguments, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    command = ["examples.verifier", *arguments.split(), "--out", str(folder)]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit) as raised:
        verifier.main()
    assert raised.value.code not in (0, None)
    assert not folder.exists()
