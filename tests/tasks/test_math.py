"""The task MATH: answers, the judge that compares them, problems and worked examples.

The judge limits the CPU time of a comparison. Where a test expects that answers are equal, its
judge has hours.
"""

import gc
import json
import re
import signal
import threading
from dataclasses import replace
from unittest.mock import Mock

import pytest
import sympy
from task_helpers import input_error, make_sample, write_rows

from tasks import judge as judge_module
from tasks import math
from tasks.judge import LONGEST, Judge
from toprlib.evaluation import evaluate, to_answers
from toprlib.settings import TINY, Settings

HOURS = 36_000  # in seconds
ROW = {
    "problem": "1 + 1?",
    "level": "Level 1",
    "type": "Prealgebra",
    "solution": r"It is $\boxed{2}$.",
}


@pytest.fixture(scope="module", autouse=True)
def _patience():
    """On the busiest machine, too, a judge waits until its process answers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judge_module, "WALL_SECONDS", float(HOURS))
        yield


@pytest.fixture(scope="module")
def patient_judge():
    """A judge that has hours for a comparison."""
    return Judge(HOURS)


# ---- answers -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{x + \boxed{3}}", "3"),
        (r"\boxed{\left\{1\right.}", r"\left\{1\right."),
        (r"\fbox{4}", "4"),
        (r"it is $\boxed 5$.", "5"),
        (r"\boxed{5} and \boxed{}", "5"),
        (r"} \boxed{5}", "5"),
        (r"\boxed{ }", None),
        (r"\boxed", None),
        (r"\boxed{25\text{ cm}.}", r"25\text{ cm}"),
        ("The final answer is", None),
        ("The final answer is .5", ".5"),
        ("The final answer is 3\nand more", "3"),
        (r"So \boxed{2}. The final answer is $3$. I hope it is correct.", "3"),
        (r"So \boxed{2}. The final answer is", "2"),
        (r"The final answer is 3. So \boxed{2}", "2"),
        ("The final answer is 1. The final answer is 2.", "2"),
        ("The final answer is 3\u2028$\u2028", "3"),
        ("The final answer is\n$$\n\\frac{1}{2}\n$$. I hope it is correct.", "\\frac{1}{2}"),
        ("The final answer is $1\n2$.\nIndeed $3$.", "1\n2"),
        ("The final answer is therefore:\n\\[\\boxed{4}\\]", "4"),
        ("The final answer is **12**.", "12"),
        ("The final answer is \\(4\\).", "4"),
        ("The final answer is $x=1$ or $x=2$.", "x=1$ or $x=2"),
        ("The final answer is 3.5 m. So it is.", "3.5 m"),
        ("The final answer is even.", "even"),
        # remarks after the answer
        (r"So \boxed{4}. I checked that the final answer is right.", "4"),
        (r"So \boxed{4}. I am sure this final answer is correct.", "4"),
        (r"So \boxed{4}. The final answer is indeed right. I hope that this helps.", "4"),
        ("The final answer is $5$. I think that the final answer is right.", "5"),
        (r"\boxed{4}? The final answer is 5. Yes, the final answer is right.", "5"),
        ("The final answer is 5 and I am sure the final answer is", "5 and I am sure the"),
        # no remarks
        (r"So \boxed{4}. The final answer is 5.", "5"),
        (r"So \boxed{4}. The final answer is $y$.", "y"),
        (r"So \boxed{4}. The final answer is C.", "C"),
        (r"So \boxed{4}. The final answer is \pi", r"\pi"),
        (r"So \boxed{4}. The final answer is x + y.", "x + y"),
    ],
)
def test_answer_of_a_completion(text, expected):
    assert math.extract_answer(text) == expected


def test_equal_answers_vote_together(patient_judge):
    task = replace(math.math_task(math.SETTINGS["laptop"]), same=patient_judge.equal)
    texts = [r"\boxed{\sqrt{81}}", r"\boxed{3}", "none", "final answer is 9", r"\boxed{x=9}"]
    samples = [make_sample(text, "incorrect") for text in texts]
    assert to_answers(samples, task).votes == [
        [r"\sqrt{81}", "3", None, r"\sqrt{81}", r"\sqrt{81}"],
    ]


# ---- the judge -----------------------------------------------------------------------------------
EQUAL = [  # gold, and answers that a person would accept
    (r"\frac{1}{2}", r"½ | 1/2 | 0.5 | \dfrac12 | .50 | \frac{1}{2} | \frac{2}{4}"),
    ("17/5", r"3\frac{2}{5} | 3.4 | 3⅖"),
    (r"\sqrt{2}", r"√2 | √(2) | \sqrt 2 | \frac{2}{\sqrt{2}}"),
    ("x^2", r"x² | x^{2} | x \cdot x"),
    ("x^{12}", "x¹²"),
    ("90^\\circ", "90° | 90"),
    (r"(-\infty, 3)", r"(-∞, 3) | x<3"),
    (
        "-14",
        r"-１４ | **-14** | \textcolor{blue}{-14} | {\color{red}-14} | −14 | \mathbf{-14}",
    ),
    ("2+3i", r"2+3\mathrm{i} | 2+3\text{i} | 3i+2"),
    ("10:30", r"10{:}30"),
    ("9500", r"9 500 | 9,500 | 9{,}500 | 9\,500 | 9,\!500"),
    ("9500", "9\u2009500 | 9\u202f500 | 9\u00a0500"),
    ("1234567", r"1 234 567 | 1\,234\,567"),
    (r"\frac{1}{3}", "0.333333"),
    ("0.0001", "1/10000"),
    ("7", "5+2=7 | x=7"),
    (r"\sqrt{2}+\sqrt{3}", r"\sqrt{5+2\sqrt{6}}"),
    (r"\frac{1}{2^{99}}", r"2^{-99} | \frac{2}{2^{100}}"),
    ("50\\%", "50 | 0.5"),
]
DIFFERENT = [
    ("x", "y | 5 | x^2"),
    ("x=5", "y=5 | x=-5 | x=6"),
    ("x^2", "y^2 | x^3 | 2x"),
    ("x+y", "x+z | x-y"),
    ("3", "-3 | −3 | 33 | 3.1 | 1/3 | 30 | 3x"),
    ("509", r"9 500 | 9\,500"),
    ("(2,5)", r"2,5 | \{2,5\} | (5,2) | [2,5] | 25"),
    (r"\{1,2\}", r"\{1,3\} | \{1\}"),
    ("7", "8=7 | 7=8 | 6+2=7"),
    ("0.0001", "0.00010001 | 0.0002 | 0"),
    (r"\frac{1}{2006!}", r"\frac{1}{2004!} | 0"),
    (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}} | 0"),
    (r"\frac{1}{3\cdot2^{2006}}", r"\frac{2^{2005}+1}{3\cdot2^{2006}}"),
    (r"\frac{10^6}{10^{30}}", r"\frac{10^6+1}{10^{30}}"),
    (r"\sqrt{2}\cdot10^{-20}", r"\sqrt{3}\cdot10^{-20}"),
    (r"\frac{1}{2}", r"⅓ | 2 | -½"),
]


def list_pairs(table):
    pairs = []
    for gold, answers in table:
        for answer in answers.split(" | "):
            pairs.append((gold, answer))
    return pairs


@pytest.mark.parametrize(("gold", "answer"), list_pairs(EQUAL))
def test_right_answers_are_equal(gold, answer, patient_judge):
    assert patient_judge.equal(gold, answer) is True


@pytest.mark.parametrize(("gold", "answer"), list_pairs(DIFFERENT))
def test_wrong_answers_are_different(gold, answer, patient_judge):
    assert patient_judge.equal(gold, answer) is False


HOSTILE_ANSWERS = {  # none of them is equal to 3
    "nested braces": (r"\boxed{" + "{" * 50 + "4" + "}" * 50 + "}", "abandoned"),
    "a tower of powers": (r"\boxed{9^{9^{9^9}}}", "abandoned"),
    "boxes in boxes": (r"\boxed{" * 5_000 + "4" + "}" * 5_000, "incorrect"),
    "fractions": (r"\boxed{" + r"\frac{" * 70 + "}" * 70 + "}", "incorrect"),
    "a lone surrogate": ("\\boxed{\ud800}", "incorrect"),
    "code": (r"\boxed{__import__('os').getcwd()}", "incorrect"),
    "a megabyte of boxes": (r"\boxed{" * 150_000, "invalid"),
    "final answers": ("final answer is " * 70_000, "invalid"),
    "dollars": (r"\boxed{" + "$" * 400 + "}", "invalid"),
}


def test_hostile_text_is_graded_like_any_other():
    judge = Judge(seconds=1)
    for name, (text, expected) in HOSTILE_ANSWERS.items():
        assert math.grade(text, "3", judge) == expected, name
    assert judge.equal("9^{9^{9^9}}", "9^{9^{9^8}}") is None


def test_a_limit_of_cpu_time_is_not_one_of_the_wall_clock():
    """The process gets a tenth of a processor, as on a machine with much else to do."""
    gold = r"\cup".join(f"[{3 * index},{3 * index + 1}]" for index in range(20))
    answer = r"\cup".join(f"[{3 * index},{3 * index + 1}]" for index in reversed(range(20)))
    judge = Judge(seconds=5)
    assert judge.equal("1", "2") is False  # the process has started
    is_finished = threading.Event()

    def slow_down():
        while not is_finished.is_set():
            judge._process.send_signal(signal.SIGSTOP)
            is_finished.wait(0.09)
            judge._process.send_signal(signal.SIGCONT)
            is_finished.wait(0.01)

    thread = threading.Thread(target=slow_down)
    thread.start()
    try:
        assert judge.equal(gold, answer) is True
    finally:
        is_finished.set()
        thread.join()


def test_a_long_answer_equals_itself_alone(patient_judge):
    within = "0+" * (LONGEST // 2 - 1) + "1"
    beyond = "0+" * (LONGEST // 2) + "1"
    assert len(within) < LONGEST < len(beyond)
    assert patient_judge.equal(within, "1")
    assert not patient_judge.equal(beyond, "1")
    assert not patient_judge.equal("1", beyond)
    assert patient_judge.equal(beyond, beyond)


def test_a_judge_whose_process_has_ended_starts_another(patient_judge):
    assert patient_judge.equal("1/2", "0.5")
    first = patient_judge._process
    first.kill()
    first.wait()
    assert patient_judge.equal("1/4", "0.25")
    assert patient_judge._process.pid != first.pid


def test_a_comparison_that_was_given_up_is_not_kept_as_false(patient_judge, monkeypatch):
    assert patient_judge.equal("1/8", "0.125")
    process = patient_judge._process
    process.send_signal(signal.SIGSTOP)  # it never answers
    monkeypatch.setattr(judge_module, "WALL_SECONDS", 0.1)
    assert patient_judge.equal("1/5", "0.2") is None
    assert process.poll() is not None
    monkeypatch.setattr(judge_module, "WALL_SECONDS", float(HOURS))
    assert patient_judge.equal("1/5", "0.2") is True


def test_abandoned_comparisons_are_counted():
    task = math.math_task(math.SETTINGS["laptop"])
    grades = ["correct", "abandoned", "incorrect", "abandoned", "abandoned"]
    samples = [make_sample(rf"\boxed{{{number}}}", grade) for number, grade in enumerate(grades)]
    entry = evaluate(samples, task, k=1, seed=0)
    assert entry["abandoned"] == pytest.approx(0.6)
    assert entry["correct"] == pytest.approx(0.2)
    assert {sample.reward for sample in samples if sample.outcome == "abandoned"} == {-1.0}


def test_an_answer_after_an_interrupt_is_not_taken_for_that_to_the_next_question(
    patient_judge, monkeypatch
):
    assert patient_judge.equal("3/4", "0.75")
    monkeypatch.setattr(patient_judge, "_receive", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        patient_judge.equal("3", "4")
    monkeypatch.undo()
    assert patient_judge.equal("5", "5.0")


def test_the_process_ends_with_its_judge():
    judge = Judge(HOURS)
    judge.equal("1", "2")
    process = judge._process
    assert process.poll() is None
    del judge
    gc.collect()
    assert process.poll() is not None


# ---- the problems of tiny/math -------------------------------------------------------------------
# A part of each question, and its answer for sympy to work out.
SOLUTIONS = {
    "fraction of the loaf": "(12 - 9) / 12",
    "a discount": "80 * 65 / 100",
    "Which percentage": "100 * 8 / 40",
    "a mixed number": "17 / 5",
    "four such tanks": "4 * 1250",
    "Solve $3x": "(11 + 7) / 3",
    "the remainder": "Mod(2**10, 7)",
    "the distance between": "sqrt((4 - 1)**2 + (-2 - 2)**2)",
    "sqrt{50}": "sqrt(50) + sqrt(18)",
    "How many zeros": "multiplicity(5, factorial(30))",
    "Two angles": "180 - 48 - 67",
    "area of a circle": "pi * 3**2",
    "the height upon": "2 * 6 / sqrt(2**2 + 6**2)",
    "five different books": "factorial(5)",
    "a sum of 9": "4 / 36",
    "Compute $(3": "expand((3 + 2*I) * (1 - I))",
    "the series": "1 / (1 - 2/3)",
    "cos 150": "cos(150 * pi / 180)",
    "of 45": "2/3 * 45",
    "frac{x}{4}": "4 * 9 / 10",
    "greatest common": "gcd(84, 126)",
    "the diagonal": "sqrt(2) * sqrt(18)",
    "Three of seven": "binomial(7, 3)",
}


@pytest.fixture(scope="module")
def tiny_problems():
    folder = str(TINY / "math")
    return math.load_problems(folder, "train") + math.load_problems(folder, "test")


def test_gold_answers_are_read_by_math_verify(tiny_problems, patient_judge):
    assert len({problem.question for problem in tiny_problems}) == 32
    for problem in tiny_problems:
        # `_ask`, because `equal` would not ask for a text and itself.
        assert patient_judge._ask(problem.gold, problem.gold)
        assert math.grade(r"\boxed{123456}", problem.gold, patient_judge) == "incorrect"


def test_gold_answers_are_those_of_sympy(tiny_problems, patient_judge):
    for part, expression in SOLUTIONS.items():
        [problem] = [problem for problem in tiny_problems if part in problem.question]
        expected = sympy.latex(sympy.sympify(expression))
        assert patient_judge.equal(problem.gold, expected), problem.question


# ---- problems and worked examples ----------------------------------------------------------------
def test_problems_of_the_original_folders_are_in_a_mixed_order(tmp_path):
    for number in range(12):
        file = tmp_path / "train" / "prealgebra" / f"{number}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(ROW | {"problem": f"{number}?"}, indent=4))
    problems = math.load_problems(str(tmp_path), "train")
    contents = {(problem.question, problem.gold) for problem in problems}
    assert contents == {(f"{number}?", "2") for number in range(12)}
    numbers = [int(problem.id.split("-")[1]) for problem in problems]
    assert sorted(numbers) == list(range(1, 13))
    assert numbers != sorted(numbers)


def test_math_500_has_the_answer_by_itself(tmp_path):
    row = {"problem": "1 + 1?", "answer": "2", "unique_id": "test/1.json"}
    write_rows(tmp_path / "test.jsonl", [row])
    [problem] = math.load_problems(str(tmp_path), "test")
    assert problem.gold == "2"


@pytest.mark.parametrize("change", [{"solution": r"It is \boxed{2"}, {"solution": None}])
def test_a_problem_without_an_answer_is_named(tmp_path, change):
    write_rows(tmp_path / "train.jsonl", [ROW, ROW | change])
    error = input_error(math.load_problems, str(tmp_path), "train")
    assert (error.file, error.line) == (str(tmp_path / "train.jsonl"), 2)
    assert error.field == "solution"


def test_worked_examples_have_a_solution_and_a_final_answer():
    task = math.math_task(Settings(data=str(TINY / "math"), shots=4))
    prompt = task.prompt(task.train[0])
    parts = re.split("\n\n(?=Problem:\n)", prompt)
    assert len(parts) == 5
    assert parts[-1] == f"Problem:\n{task.train[0].question}\n\nSolution:"
    for shot in parts[:-1]:
        _, _, solution = shot.partition("\n\nSolution: ")
        assert math.extract_answer(solution) is not None
    assert task.graded_text(" It is 2.\n\nProblem: 3?") == " It is 2.\n"


def test_problems_of_the_worked_examples_are_not_trained_on(tmp_path):
    """They are training problems of MATH, there with other spaces and punctuation."""
    task = math.math_task(Settings(data=str(TINY / "math"), shots=4))
    rows = [ROW]
    endings = iter((".}", "", " ", "\n"))
    for shot in re.split("\n\n(?=Problem:\n)", task.prompt(task.train[0]))[:4]:
        question = shot.removeprefix("Problem:\n").partition("\n\nSolution:")[0]
        rows.append(ROW | {"problem": question.replace("  ", " ") + next(endings)})
    write_rows(tmp_path / "train.jsonl", rows)
    write_rows(tmp_path / "test.jsonl", rows)
    settings = Settings(data=str(tmp_path), shots=4)
    task = math.math_task(settings)
    assert [problem.question for problem in task.train] == ["1 + 1?"]
    assert len(task.test) == 5
    assert math.math_task(replace(settings, problems=1)).train == task.train
    assert len(math.math_task(replace(settings, shots=0)).train) == 5
