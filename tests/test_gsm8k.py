"""The GSM8K task: answers, golds, grades, prompts; on the real files where GSM8K_DIR says where they are."""

import re
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

import train_gsm8k as gsm8k
from pipeline.records import InputError

ANSWERS = {
    "The answer is 18.": 18,
    "The answer is: 18 dollars": 18,
    "The answer is 3 or 4.": 3,
    "The answer is 2.50.": "2.5",
    "The answer is -$5": -5,
    "The answer is .5": "0.5",
    "The answer is 3. Wait. The answer is 4.": 4,
    "The answer is 3. The answer is unknown": None,
    "The answer is:\n18": 18,
    "The answer is unknown.\n18": None,
    "The answer is ٣.": None,  # digits of other scripts are not read
    "the answer is 18": None,
}
GOLDS = {"so\n#### 18": 18, "#### 1,080": 1080, "#### -3": -3, "#### 2.5": "2.5"}


def test_parse_answer_and_gold():
    for parse, table in ((gsm8k.parse_answer, ANSWERS), (gsm8k.parse_gold, GOLDS)):
        expected = {
            text: None if number is None else Decimal(number) for text, number in table.items()
        }
        assert {text: parse(text) for text in table} == expected
    for answer in ("18", "####", "#### 18 apples"):
        with pytest.raises(ValueError, match="no number after ####"):
            gsm8k.parse_gold(answer)


@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9))
def test_a_right_number_is_correct_and_any_other_is_not(gold, other):
    assert gsm8k.grade(f" So. The answer is {gold:,}.", Decimal(gold)) == "correct"
    outcome = "correct" if other == gold else "incorrect"
    assert gsm8k.grade(f" So. The answer is ${other}.00", Decimal(gold)) == outcome
    assert (
        gsm8k.grade("The answer is x", Decimal(gold)) == "incorrect"
    )  # only without the marker is it invalid


def test_all_real_golds_parse_and_grade(real):
    """Some of their lines hold U+2028 and its like, which split no line."""
    problems = [
        problem for split in ("train", "test") for problem in gsm8k.load_problems(str(real), split)
    ]
    assert len(problems) == 7473 + 1319
    outcomes = {gsm8k.grade(f"The answer is {p.gold:,}.", p.gold) for p in problems}
    wrong = {gsm8k.grade("The answer is 123456789.", p.gold) for p in problems}
    assert (outcomes, wrong) == ({"correct"}, {"incorrect"})
    assert all(p.gold == int(p.gold) for p in problems)


def test_shots_of_the_package_or_a_file_precede_the_question(tmp_path):
    assert [
        bool(re.match("Q: .*\nA: .*The answer is", shot)) for shot in gsm8k.load_shots(8, None)
    ] == [True] * 8
    file = tmp_path / "shots.txt"
    file.write_text(
        "Q: 1 + 1?\nA: The answer is 2.\n\nQ: 2 + 2?\nA: The answer is 4.\n", encoding="utf-8"
    )
    without, task = (
        gsm8k.gsm8k_task(gsm8k.Settings(**shots))
        for shots in ({}, {"shots": 1, "shots_file": file})
    )
    question = task.test[0].question
    assert question == gsm8k.load_problems(gsm8k.Settings().data, "test")[0].question
    assert task.prompt(task.test[0]) == f"Q: 1 + 1?\nA: The answer is 2.\n\nQ: {question}\nA:"
    assert task.visible(" The answer is 7.\n\nQ: The answer is 8.") == " The answer is 7.\n"
    assert without.stop == ()


def test_shots_that_are_not_there(tmp_path):
    (tmp_path / "one.txt").write_text("Q: a\nA: b", encoding="utf-8")
    for count, name, message in (
        (3, "one.txt", "has 1"),
        (0, "one.txt", "has 1"),
        (1, "none.txt", "no such file"),
    ):
        with pytest.raises(InputError, match=message):
            gsm8k.load_shots(count, tmp_path / name)
