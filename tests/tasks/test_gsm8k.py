"""The task GSM8K: answers, gold answers, grades and prompts; see test_audit.py, too."""

import os
import sys
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from helpers import read_rows, write_rows
from hypothesis import given
from hypothesis import strategies as st

import train_gsm8k as gsm8k
from toprlib.records import Problem
from toprlib.settings import Settings

NUMBERS = st.integers(-(10**9), 10**9)


# ---- answers -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The answer is 18.", "18"),
        ("The answer is: 18 dollars", "18"),
        ("The answer is 3 or 4.", None),  # several answers
        ("The answer is 3, 4 or 5.", None),
        ("The answer is 3 eggs (or maybe 4).", None),
        ("The answer is 3 eggs or 4 eggs.", None),
        ("The answer is between 3 and 4.", None),
        ("The answer is 120 minutes or 2 hours.", "120"),  # one answer
        ("The answer is 120 minutes (or 2 hours).", "120"),
        ("The answer is 18 or 18.0.", "18"),
        ("The answer is:\n\\[\n\\boxed{18}\n\\]", "18"),
        ("The answer is $$\n18\n$$", "18"),
        ("The answer is 3. Wait. The answer is 4.", "4"),
        ("The answer is:\n18", "18"),
        ("The answer is:\n\n- 18", "18"),  # an item of a list
        ("The answer is unknown.\n18", None),
        ("The answer is ٣.", None),  # digits of other scripts are not read
        ("the answer is 18", None),
        # remarks after the answer
        ("The answer is 18. Let me verify: 9*2=18, so The answer is correct.", "18"),
        ("The answer is 18.\nThe answer is correct because we checked.", "18"),
        ("The answer is 3. The answer is unknown", "3"),
        ("The answer is 3. The answer is 4. The answer is right.\n5", "4"),
        ("The answer is 3. The answer is 4,5", None),  # no remark
    ],
)
def test_the_answer_is_the_first_number_after_the_last_marker_with_one(text, expected):
    assert gsm8k.parse_answer(text) == (None if expected is None else Decimal(expected))


READ_AS = {  # forms between bars
    "-3": r"-3 | - 3 | -$3 | - $3 | -\$3 | $-3$ | **-3** | x = -3 | x = - 3 | (-3) | $$- 3$$ | "
    "\u22123 | \u2212 3 | \u20133 | \u2013$3 | \uff0d\uff13 | minus 3 | negative $3 | -US$3 | "
    r"- **3** | - \boxed{3} | minus \(3\) | –**3** | -**3** | is negative $\mathbf{3}$ | "
    r"{-}3 | -$ 3 | - \$ 3 | -\left(3\right) | "
    "\u20103 | \u20113 | \u20123 | "
    r"-3/1 | is $- 3$ | so: - 3 | \boxed{- 3} | \boxed{-3} | -\mathbf{3} | \mathbf{-3} | "
    "a loss: -3 | 5 - 8 = -3 | 1 -4 = -3 | (- 3)",
    "3": r"3 100-page books | 6/$2 = 3 | 6/2.0 = 3 | 1.5 X 2 = 3 | 3 - 0 = 3 times. | "
    r"COVID-3 | A-3 | (A)-3 | \text{A}-3 | 3 million-dollar houses | 19/6 ≈ 3 | "
    r"**3** (6/2) | 10 - 7 = \boxed{3} | 10 - 7 = **3** | **10** - **7** = **3** | "
    r"10 - 7 = 3\text{ eggs} | **10 - 7 = 3** | 19/6 \approx 3 | so - 3 | "
    r"18 - 15 = 3 | $18 - $15 = $3 | 6 \div 2 = 3 | 3 = 1 + 2 | 3. So 2 * 3 = 6 | "
    "6/2=3 | 6 x 0.5 = 3 eggs. So | +3 | 3 - the rest | 3-year-old | a \u2013 3 | ...3 | \u20263",
    "40": "4 * 10 = 40 in all | 50 apples - 10 apples = 40 apples. | <<4*10=40>>40 | "
    "4 apples/day * 10 days = 40 apples | 4 * 10 = 40 in step 1",
    "12": "3(4) = 12 | 4 per week x 3 weeks = 12 | 12, as 4 have 3, so 4 * 3 = 12",
    "20": "1/4 of 80 = 20 | 25% of 80 = 20 | 2(6 + 4) = 20 | 10 ft. * 2 = 20",
    "5": "5 500 ml bottles | 5 250 g bags of rice | 5 100 dollar bills",
    "5500": "5 500 ml | 5 500 m across | 5 500 apples | 5.5k | 5.5K dollars",
    "19": r"19th | $19 per day | \$19 | 19% | \boxed{19} | \(19\) | 19</s> | 19^\circ | "
    "\uff11\uff19 | \U0001d7cf\U0001d7d7",
    "9500": r"9,500 | 9500.00 | 9{,}500 | 9,\!500 | 9\,500 | 9~500 | 9 500 | $9{,}500$ | "
    r"9.5 thousand | 9.5e3 | 9.5\text{ thousand} | "
    "9\u00a0500 | 9\u2009500 | 9\u202f500",
    "1234567.5": r"1,234,567.5 | 1 234 567.50 | 12,34,567.5 | \$1{,}234{,}567.5 | 1,234,567 1/2",
    "1000.5": "1 000 1/2 | 1 000½ | 1,000 1/2",  # read as 1 by Python 3.11.2 once
    "0.5": r"1/2 | .5 | ½ | \frac{1}{2} | $\dfrac12$ | 0.50 | 1 / 2 cup | 2/4 | "
    "1,000/2,000 | .5 100 times",
    "-3.5": r"-3 1/2 | -3½ | -3\frac{1}{2} | -3 \tfrac12 | −7/2 | \frac{-7}{2}",
    "12345678901234567890123456789012.5": "12345678901234567890123456789012.5",
    "2000000000": "2 billion | 2 Billion | .002 trillion | 2\\ billions",
    "1500": "15 hundred | 1.5 thousand",
    "1000000": "1'000'000 | 1_000_000",
    "1500000": "1.5 million | 1.5 Million dollars | 1.5M | $1,500,000 | 1 500 000 | 1500 thousand",
    None: "(1,2) | 1,2 | 12,5 | 1,2345 | 1.2.3 | 10:30 | 10-15 | 10\u201315 | 2 + 3 | 10 minus 5 | "
    "3/4/5 | 1/0 | 2**3 | 3² | 20 times 2 | 30/1.5 | 2 - 1 = 1,5 | five | x | "
    r"3 X 2 | 6 ÷ 2 | 6 · 2 | 6 \div 2 | 6 \cdot 2 | 3 to 4 | 3, maybe 4 | x = 5 and y = 2 | "
    "4 each so 4 x 3 = 12 | 10 because x = 2 | 10 since x = 2 | 10 (For x = 2) | 5, x = 2 | "
    "5 sq. ft. * 2 = 10",
}
FORMS = []
for value, forms in READ_AS.items():
    for form in forms.split(" | "):
        FORMS.append((form, value))


@pytest.mark.parametrize(("form", "value"), FORMS)
def test_forms_of_a_number(form, value):
    for text in (
        f"The answer is {form}",
        f"So, The answer is {form} .",
        f"The answer is: {form}\n7",
    ):
        assert gsm8k.parse_answer(text) == (None if value is None else Decimal(value))


SEPARATORS = [",", "{,}", r",\!", r"\,", r"\;", " ", "~", "\u00a0", "\u2009", "\u202f", ""]
MINUS = ["-", "- ", "\u2212", "\u2212 ", "\u2013", "\u2011", "{-}", "minus ", "negative "]
CURRENCY = ["", "$", "$ ", "**", r"\text{", r"\$", "€", "£"]
ENDINGS = {".": 0, ".0": 0, " million": 6, " thousand": 3, "e2": 2}  # and the power of ten
HALVES = [" 1/2", "½", r"\frac{1}{2}", r" \dfrac12", ".5", ".50"]
AROUND = [
    ("", "."),
    ("$", "$"),
    ("**", "**"),
    (r"\boxed{", "}"),
    ("x = ", ""),
    ("7 - 2 = ", " eggs."),
    (": ", " dollars per day"),
    (":\n$", "$%"),
    ("", " eggs (or so)"),
    ("", " I think The answer is right."),
]


@st.composite
def written_numbers(draw):
    """What follows "The answer is", and the number that it says."""
    size = draw(st.integers(1, 10**9))
    value = Decimal(size)
    end = draw(st.sampled_from([*ENDINGS, *HALVES]))
    if end in HALVES:
        value += Decimal("0.5")
    else:
        value *= 10 ** ENDINGS[end]
    sign = draw(st.sampled_from(["", *MINUS]))
    currency = draw(st.sampled_from(CURRENCY))
    digits = f"{size:,}".replace(",", draw(st.sampled_from(SEPARATORS)))
    before, after = draw(st.sampled_from(AROUND))
    return f"{before}{sign}{currency}{digits}{end}{after}", -value if sign else value


@given(written=written_numbers())
def test_a_number_in_any_form_is_read_back_and_no_other(written):
    text, gold = written
    text = f"So The answer is {text}"
    assert gsm8k.parse_answer(text) == gold
    assert gsm8k.grade(text, gold) == "correct"
    others = {-gold, gold + 1, gold // 1, gold // 1000, gold % 1000, gold * 1000}
    for other in others - {gold}:
        assert gsm8k.grade(text, other) == "incorrect"


@given(numerator=NUMBERS, denominator=st.integers(1, 10**6), factor=st.integers(1, 10**4))
def test_equal_numbers_are_equal_votes(numerator, denominator, factor):
    one = gsm8k.parse_answer(f"The answer is {numerator}/{denominator}.")
    other = gsm8k.parse_answer(
        rf"The answer is \frac{{{numerator * factor}}}{{{denominator * factor}}}"
    )
    assert (one, hash(one)) == (other, hash(other))
    assert Fraction(one).limit_denominator(10**6) == Fraction(numerator, denominator)


def test_only_an_answer_without_the_marker_is_invalid():
    assert gsm8k.grade("The answer is x", Decimal(1)) == "incorrect"
    assert gsm8k.grade("1", Decimal(1)) == "invalid"
    texts = ["The answer is x", "The answer is 2", "1"]
    grades = gsm8k.grade_all(texts, [Problem("", Decimal(gold)) for gold in (1, 2, 1)])
    assert grades == [(-1, "incorrect"), (1, "correct"), (-1, "invalid")]


def test_long_text_takes_no_long_time():
    """Quadratic in a megabyte would take hours, and exponential in a hundred characters, too."""
    for text in ("The answer is " * 70_000, "The answer is " + "1 000 " * 200_000):
        gsm8k.parse_answer(text)
    for part in ("1 1/1 ", "- (", "1=1-", "\\frac{", "1 + (", "**", "1,000", "9"):
        gsm8k.parse_answer("The answer is " + part * 500)


# ---- problems ------------------------------------------------------------------------------------
def test_the_gold_answer_is_the_number_after_the_last_mark(tmp_path):
    answers = ["so\n#### 18", "#### 1,080", "#### -3", "#### 2.5", "#### 1\n#### $2"]
    rows = [{"question": f"{number}?", "answer": text} for number, text in enumerate(answers)]
    rows[2] |= {"id": 7, "tags": None}  # other columns are ignored
    write_rows(tmp_path / "train.jsonl", rows)
    problems = gsm8k.load_problems(str(tmp_path), "train")
    expected = [Decimal(gold) for gold in ("18", "1080", "-3", "2.5", "2")]
    assert [problem.gold for problem in problems] == expected
    assert [problem.question for problem in problems] == ["0?", "1?", "2?", "3?", "4?"]
    assert len({problem.id for problem in problems}) == 5


def test_the_hub_has_the_same_problems(monkeypatch):
    rows = [{"question": "1 + 1?", "answer": "#### 2"}]
    load_dataset = Mock(return_value=rows)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    [problem] = gsm8k.load_problems("openai/gsm8k", "train")
    assert (problem.question, problem.gold) == ("1 + 1?", 2)
    load_dataset.assert_called_once_with("openai/gsm8k", "main", split="train")


@pytest.fixture
def real():
    """The folder of GSM8K's own files, from the environment variable GSM8K_DIR."""
    if not os.environ.get("GSM8K_DIR"):
        pytest.skip("GSM8K_DIR is not set: the tests on GSM8K's own files did not run")
    return Path(os.environ["GSM8K_DIR"])


def test_all_gold_answers_of_gsm8k_are_read_and_grade_as_correct(real):
    """Some of its lines contain U+2028 and the like, which split no line."""
    problems = []
    last_lines = []
    for split, count in (("train", 7473), ("test", 1319)):
        loaded = gsm8k.load_problems(str(real), split)
        assert len(loaded) == count
        problems += loaded
        last_lines += [row["answer"].splitlines()[-1] for row in read_rows(real / f"{split}.jsonl")]
    for problem, last_line in zip(problems, last_lines, strict=True):
        assert problem.gold == int(last_line.removeprefix("#### ").replace(",", ""))
        for answer in (last_line.removeprefix("####"), f"${int(problem.gold):,}."):
            assert gsm8k.grade(f"The answer is {answer}", problem.gold) == "correct"
        other = -problem.gold if problem.gold else 1
        assert gsm8k.grade(f"The answer is {other}.", problem.gold) == "incorrect"


# ---- the task ------------------------------------------------------------------------------------


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
    assert task.stop == ("\nQ:",)
