"""MATH: the answer of a completion, which answers are equal, votes, problems, worked examples."""

import json
import re
from dataclasses import replace
from unittest.mock import Mock

import pytest
from helpers import write_rows

from examples import math_task as math
from toprlib.records import InputError, Problem
from toprlib.settings import TINY, Settings

ROW = {
    "problem": "1 + 1?",
    "level": "Level 1",
    "type": "Prealgebra",
    "solution": r"It is $\boxed{2}$.",
}


# ---- answers -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{x + \boxed{3}}", "3"),
        (r"\boxed{\left\{1\right.}", r"\left\{1\right."),
        (r"\boxed{\{a_{b_{c_{d}}}\}}", r"\{a_{b_{c_{d}}}\}"),
        (r"\fbox{4}", "4"),
        (r"it is $\boxed 5$.", "5"),
        (r"\boxed{5} and \boxed{}", "5"),
        (r"\boxed{5} and \boxed{4", "5"),
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
        ("The final answer is even. No, the final answer is odd.", "odd"),
        # no remarks
        (r"So \boxed{4}. The final answer is 5.", "5"),
        (r"So \boxed{4}. The final answer is $y$.", "y"),
        (r"So \boxed{4}. The final answer is C.", "C"),
        (r"So \boxed{4}. The final answer is \pi", r"\pi"),
        (r"So \boxed{4}. The final answer is x + y.", "x + y"),
        # unusual text, in linear time
        (r"\boxed{" * 5_000 + "4" + "}" * 5_000, "4"),
        (r"\boxed{" * 150_000, None),
        (r"\boxed{" + "{" * 1_000_000, None),
        ("final answer is " * 70_000, None),
        (r"\boxed{" + "$" * 400 + "}", None),
    ],
)
def test_answer_of_a_completion(text, expected):
    assert math.extract_answer(text) == expected


# ---- grades --------------------------------------------------------------------------------------
LONG = "0+" * (math.LONGEST // 2) + "1"
EQUAL = [  # gold, and answers that a person would accept
    (r"\frac{1}{2}", r"½ | 1/2 | 0.5 | \dfrac12 | .50 | \frac{1}{2} | \frac{2}{4}"),
    ("17/5", r"3\frac{2}{5} | 3.4 | 3⅖"),
    (r"\sqrt{2}", r"√2 | √(2) | \sqrt 2 | \frac{2}{\sqrt{2}}"),
    ("x^2", r"x² | x^{2} | x \cdot x"),
    ("x^{12}", "x¹²"),
    ("1000", "1e3 | 1.0E3"),
    ("7,8", r"7 \text{ or } 8 | 8} or \boxed{7 | 7}$, $\boxed{8"),
    ("90^\\circ", "90° | 90"),
    (r"(-\infty, 3)", r"(-∞, 3) | x<3"),
    ("-14", r"-１４ | **-14** | \textcolor{blue}{-14} | {\color{red}-14} | −14 | \mathbf{-14}"),
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
    ("1,2", r"2,1 | \{1,2\} | x=1,2"),
    (r"25\text{ cm}", r"25 | \text{25 cm}"),
    (r"\text{(A)}", "A"),
    *((r"\text{June 20}", "June 20"), (r"\text{Row 6}", "Row 6"), (r"\text{true}", "true")),
    ("1011_2", "1011 | 1011_{2}"),
    (r"7\text{ a.m.}", "7 am | 7"),
    ("1,500,000", r"1.5 million | \$1.5\text{ million dollars}"),
    (LONG, LONG),
]
DIFFERENT = [
    ("x", "y | 5 | x^2"),
    ("x=5", "y=5 | x=-5 | x=6"),
    ("x^2", "y^2 | x^3 | 2x"),
    ("x+y", "x+z | x-y"),
    ("3", r"-3 | −3 | 33 | 3.1 | 1/3 | 30 | 3x | ? | \infty^{\infty}"),
    ("509", r"9 500 | 9\,500"),
    ("(2,5)", r"2,5 | \{2,5\} | (5,2) | [2,5] | 25"),
    ("1,2", r"1 | 1<x<2 | x \in (1,2) | (1,2)"),
    ("7", r"7, 8 | 7 \text{ or } 8 | 8 or 7 | 7} or \boxed{8 | 8} and $\boxed{7"),
    (r"[0,1)\cup(1,2]", "[0,2]"),
    (r"\{1,2\}", r"\{1,3\} | \{1\}"),
    ("7", "8=7 | 7=8 | 6+2=7"),
    ("0.0001", "0.00010001 | 0.0002 | 0"),
    (r"\frac{1}{2006!}", r"\frac{1}{2004!} | 0"),
    (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}} | 0"),
    (r"\frac{1}{3\cdot2^{2006}}", r"\frac{2^{2005}+1}{3\cdot2^{2006}}"),
    (r"\frac{10^6}{10^{30}}", r"\frac{10^6+1}{10^{30}}"),
    (r"\sqrt{2}\cdot10^{-20}", r"\sqrt{3}\cdot10^{-20}"),
    (r"\frac{1}{2}", r"⅓ | 2 | -½"),
    ("1011_2", "1011_3"),
    (r"\frac13", r"0.\overline{4} | 0.3\overline{03} | 0.0\overline{3} | 3.\overline{3}"),
    (r"7\text{ a.m.}", r"7\text{ p.m.}"),
    (r"\$1.5\text{ million}", "1.5"),
    (LONG, "1"),
    ("1", LONG),
    # computed as any other
    ("3", "\ud800 | __import__('os').getcwd() | " + r"\frac{" * 6 + "}" * 6),
]
ENDLESS = [("3", "9^{9^{9^9}}")]


def test_grades():
    """All at once: each call of `grade` starts a process that imports math-verify."""
    rows = []
    folder = str(TINY / "math")
    for problem in math.load_problems(folder, "train") + math.load_problems(folder, "test"):
        rows.append((problem.gold, rf"\displaystyle {problem.gold}", "correct"))
    assert len(rows) == 32
    for expected, table in (("abandoned", ENDLESS), ("correct", EQUAL), ("incorrect", DIFFERENT)):
        for gold, answers in table:
            rows += [(gold, answer, expected) for answer in answers.split(" | ")]
    texts = [rf"\boxed{{{answer}}}" for _, answer, _ in rows]
    grades = math.grade(texts, [Problem("", gold) for gold, _, _ in rows])
    wrong = []
    for (gold, answer, expected), grade in zip(rows, grades, strict=True):
        if grade != (1.0 if expected == "correct" else -1.0, expected):
            wrong.append((gold, answer, grade))
    assert wrong == []


def test_the_limit_of_cpu_time_is_of_a_pair(monkeypatch):
    """Together these pairs take longer than the limit, each of them much less."""
    monkeypatch.setattr(math, "CPU_SECONDS", 0.2)
    pairs = [(rf"\frac{{{i}}}{{7}}", rf"\frac{{{2 * i}}}{{14}}") for i in range(1, 200)]
    assert math.are_equal(pairs) == [True] * 199


def test_a_worker_that_cannot_work_is_no_grade(monkeypatch, tmp_path):
    monkeypatch.setattr(math, "WORKER", tmp_path / "missing.py")
    with pytest.raises(math.subprocess.CalledProcessError):
        math.grade([r"\boxed{4}"], [Problem("", "3")])
    assert math.grade(["4", r"\boxed{3}"], [Problem("", "3")] * 2) == [
        (-1.0, "invalid"),
        (1.0, "correct"),
    ]


# Golds, and answers that are votes of their own though they are equal.
SEPARATE_VOTES = {
    *(r"\frac{2}{\sqrt{2}}", r"x \cdot x", "x<3", r"\mathbf{-14}", "3i+2", "0.333333", "5+2=7"),
    *(r"\sqrt{5+2\sqrt{6}}", "2^{-99}", r"\frac{2}{2^{100}}", "0.5", "2,1", r"\{1,2\}"),
    *("1e3", "1.0E3", r"7 \text{ or } 8", r"8} or \boxed{7", r"\text{25 cm}", "A", "1011"),
    *("7 am", "7", "1.5 million", r"\$1.5\text{ million dollars}"),
}


def vote(answer):
    return math.parse_vote(rf"\boxed{{{answer}}}")


def test_equal_answers_vote_together_and_different_ones_do_not():
    for gold, answers in EQUAL:
        separate = {answer for answer in answers.split(" | ") if vote(answer) != vote(gold)}
        assert separate <= SEPARATE_VOTES
    for gold, answers in DIFFERENT:
        assert vote(gold) not in [vote(answer) for answer in answers.split(" | ")]
    assert vote("3,-3") != vote("3")


# ---- problems and worked examples ----------------------------------------------------------------
def write_folders(folder, rows):
    """MATH's own layout: a file for each problem."""
    for number, row in enumerate(rows):
        file = folder / "train" / "prealgebra" / f"{number}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(row, indent=4))


def write_lines(folder, rows):
    write_rows(folder / "train.jsonl", rows)


FOLDERS = pytest.param(write_folders, marks=pytest.mark.slow)  # imports `datasets`


@pytest.mark.parametrize("write", [write_lines, FOLDERS])
def test_problems_are_in_a_mixed_order(tmp_path, write):
    write(tmp_path, [ROW | {"problem": f"{number}?"} for number in range(12)])
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


@pytest.mark.parametrize("solution", [r"It is \boxed{2", ""])
def test_a_problem_without_an_answer_is_named(tmp_path, solution):
    write_rows(tmp_path / "train.jsonl", [ROW, ROW | {"solution": solution}])
    with pytest.raises(InputError, match="train:2:"):
        math.load_problems(str(tmp_path), "train")


def test_the_paper_trains_on_all_subjects_and_tests_on_math_500(monkeypatch):
    load_rows = Mock(side_effect=lambda *_: [math.MathRow(problem="1?", answer="1")])
    monkeypatch.setattr(math, "load_rows", load_rows)
    math.math_task(math.PRESETS["paper"])
    calls = {call.args[:2] + call.args[3:] for call in load_rows.call_args_list}
    expected = {("EleutherAI/hendrycks_math", "train", subject) for subject in math.SUBJECTS}
    assert calls == expected | {("HuggingFaceH4/MATH-500", "test", None)}
    assert len(math.SUBJECTS) == 7


def test_worked_examples_precede_the_problem_and_are_not_trained_on(tmp_path):
    """They are training problems of MATH, there with other spaces and punctuation."""
    task = math.math_task(Settings(data=str(TINY / "math"), shots=4))
    *shots, question = re.split("\n\n(?=Problem:\n)", task.prompt(task.train[0]))
    assert question == f"Problem:\n{task.train[0].question}\n\nSolution:"
    assert task.stop == ("\nProblem:",)
    rows = [ROW]
    for shot, ending in zip(shots, (".}", "", " ", "\n"), strict=True):
        problem, _, solution = shot.removeprefix("Problem:\n").partition("\n\nSolution: ")
        assert math.extract_answer(solution) is not None
        rows.append(ROW | {"problem": problem.replace("  ", " ") + ending})
    write_rows(tmp_path / "train.jsonl", rows)
    write_rows(tmp_path / "test.jsonl", rows)
    settings = Settings(data=str(tmp_path), shots=4)
    task = math.math_task(settings)
    assert [problem.question for problem in task.train] == ["1 + 1?"]
    assert len(task.test) == 5
    assert math.math_task(replace(settings, problems=1)).train == task.train
    assert len(math.math_task(replace(settings, shots=0)).train) == 5
