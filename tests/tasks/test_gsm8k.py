"""The task GSM8K: answers, gold answers, grades and prompts."""

from dataclasses import replace
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from task_helpers import input_error, write_rows

import train_gsm8k as gsm8k
from toprlib.settings import TINY, Settings

NUMBERS = st.integers(-(10**9), 10**9)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The answer is 18.", "18"),
        ("The answer is: 18 dollars", "18"),
        ("The answer is 3 or 4.", "3"),
        ("The answer is 2.50.", "2.5"),
        ("The answer is -$5", "-5"),
        ("The answer is .5", "0.5"),
        ("The answer is 3. Wait. The answer is 4.", "4"),
        ("The answer is 3. The answer is unknown", None),
        ("The answer is:\n18", "18"),
        ("The answer is unknown.\n18", None),
        ("The answer is ٣.", None),  # digits of other scripts are not read
        ("the answer is 18", None),
    ],
)
def test_the_answer_is_the_first_number_after_the_last_marker(text, expected):
    assert gsm8k.parse_answer(text) == (None if expected is None else Decimal(expected))


@given(gold=NUMBERS, other=NUMBERS)
def test_the_gold_number_is_correct_and_any_other_is_not(gold, other):
    assert gsm8k.grade(f" So. The answer is {gold:,}.", Decimal(gold)) == "correct"
    expected = "correct" if other == gold else "incorrect"
    assert gsm8k.grade(f" So. The answer is ${other}.00", Decimal(gold)) == expected


def test_only_an_answer_without_the_marker_is_invalid():
    assert gsm8k.grade("The answer is x", Decimal(1)) == "incorrect"
    assert gsm8k.grade("1", Decimal(1)) == "invalid"


# ---- problems ------------------------------------------------------------------------------------
def test_the_gold_answer_is_the_number_after_the_last_mark(tmp_path):
    answers = ["so\n#### 18", "#### 1,080", "#### -3", "#### 2.5", "#### 1\n#### $2"]
    rows = [{"question": f"{number}?", "answer": text} for number, text in enumerate(answers)]
    write_rows(tmp_path / "train.jsonl", rows)
    problems = gsm8k.load_problems(str(tmp_path), "train")
    expected = [Decimal(gold) for gold in ("18", "1080", "-3", "2.5", "2")]
    assert [problem.gold for problem in problems] == expected
    assert [problem.question for problem in problems] == ["0?", "1?", "2?", "3?", "4?"]
    assert len({problem.id for problem in problems}) == 5


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"question": "?", "answer": "18"}, "answer"),
        ({"question": "?", "answer": "####"}, "answer"),
        ({"question": "?", "answer": "#### 18 apples"}, "answer"),
        ({"question": "?"}, "answer"),
        ({"answer": "#### 18"}, "question"),
    ],
)
def test_a_row_without_a_question_or_a_gold_number_is_named(tmp_path, row, field):
    write_rows(tmp_path / "test.jsonl", [{"question": "?", "answer": "#### 1"}, row])
    error = input_error(gsm8k.load_problems, str(tmp_path), "test")
    assert (error.line, error.field) == (2, field)
    assert str(tmp_path) in error.file


def test_other_columns_of_a_row_are_ignored(tmp_path):
    row = {"id": 7, "question": "1 + 1?", "answer": "#### 2", "tags": None}
    write_rows(tmp_path / "test.jsonl", [row])
    [problem] = gsm8k.load_problems(str(tmp_path), "test")
    assert (problem.question, problem.gold) == ("1 + 1?", Decimal(2))


def test_all_gold_answers_of_gsm8k_are_read_and_grade_as_correct(real):
    """Some of its lines contain U+2028 and the like, which split no line."""
    train = gsm8k.load_problems(str(real), "train")
    test = gsm8k.load_problems(str(real), "test")
    assert (len(train), len(test)) == (7473, 1319)
    for problem in train + test:
        assert problem.gold == int(problem.gold)
        assert gsm8k.grade(f"The answer is {problem.gold:,}.", problem.gold) == "correct"
        assert gsm8k.grade("The answer is 123456789.", problem.gold) == "incorrect"


# ---- the task ------------------------------------------------------------------------------------
def test_the_task_has_the_first_problems_of_each_split():
    settings = Settings(problems=3, test_problems=2)
    task = gsm8k.gsm8k_task(settings)
    assert task.train == gsm8k.load_problems(str(TINY), "train")[:3]
    assert task.test == gsm8k.load_problems(str(TINY), "test")[:2]


def test_problems_that_a_run_does_not_use_are_not_loaded(tmp_path):
    write_rows(tmp_path / "train.jsonl", [{"question": "?", "answer": "#### 1"}])
    settings = Settings(data=str(tmp_path), test_problems=0)
    assert gsm8k.gsm8k_task(settings).test == []
    write_rows(tmp_path / "test.jsonl", [{"question": "?", "answer": "#### 1"}])
    (tmp_path / "train.jsonl").unlink()
    settings = Settings(data=str(tmp_path), samples="samples.jsonl")
    assert gsm8k.gsm8k_task(settings).train == []


def test_worked_examples_precede_the_question_and_the_next_question_ends_a_completion():
    task = gsm8k.gsm8k_task(Settings(shots=2))
    problem = task.test[0]
    first, second, question = task.prompt(problem).split("\n\n")
    assert question == f"Q: {problem.question}\nA:"
    for shot in (first, second):
        asked, _, answer = shot.partition("\nA: ")
        assert asked.startswith("Q: ")
        assert gsm8k.parse_answer(answer) is not None
    assert task.graded_text(" The answer is 7.\n\nQ: The answer is 8.") == " The answer is 7.\n"


def test_without_worked_examples_the_prompt_is_the_question():
    task = gsm8k.gsm8k_task(Settings())
    problem = replace(task.test[0], question="1 + 1?")
    assert task.prompt(problem) == "Q: 1 + 1?\nA:"
    assert task.stop == ()
