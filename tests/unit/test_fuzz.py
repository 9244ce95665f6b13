"""Random text for parsers and loaders, which return or raise what they document.

FUZZ_INPUTS is the number of texts; `make fuzz` tries a million.
"""

import json
import os
import random
from decimal import Decimal

import pytest

import train_gsm8k as gsm8k
from tasks import math, verifier
from toprlib.external_samples import read_samples
from toprlib.files import read_records, to_lines
from toprlib.records import OUTCOMES, InputError, Sample, Task

INPUTS = int(os.environ.get("FUZZ_INPUTS", "4000"))

MARKERS = [
    "The answer is",
    "####",
    "final answer is",
    "I hope",
    "Q:",
    "A:",
    "\nQ:",
    "\n\nQ:",
    "\nProblem:",
    "Verification: Is the answer correct (Yes/No)?",
    "Yes",
    "No",
]
LATEX = [
    "\\boxed{",
    "\\boxed ",
    "\\fbox{",
    "\\frac{1}{2}",
    "\\text{",
    "\\left(",
    "\\right.",
    "\\[",
    "\\]",
    "\\(",
    "\\)",
    *"{}$%\\^_",
    "$$",
    "\\\\",
]
NUMBERS = ["1", "-1", "1,234", "3.5", "9" * 400, "1e999", "nan", "inf", "--", "-$"]
NUMBERS += [
    "1/2",
    "1/0",
    " 500",
    "{,}500",
    "e9",
    " = ",
    " - ",
    "\u22123",
    "\u2013",
    " million",
    "minus ",
]
CHARACTERS = [
    *".,:\"' \n\t\x00\x1b\x7f\x85",
    "\r\n",
    "שלום",
    *"٣３²½∞𝟛\u200b\u2028\u2029\u00a0\ufeff\u202e\ud800\udfff",
    "(" * 50,
    "{" * 50,
    "}" * 50,
    "e" * 50,
    "null",
    "true",
]
PIECES = [*MARKERS, *LATEX, *NUMBERS, *CHARACTERS]


def random_texts(count):
    """Up to 12 pieces of at most eight kinds, and any other character, in random order."""
    for seed in range(count):
        rng = random.Random(seed)
        kinds = [*rng.choices(PIECES, k=rng.randint(1, 8)), chr(rng.randrange(0x110000))]
        yield "".join(rng.choices(kinds, k=rng.randint(0, 12)))


def result_or_error(function, *arguments):
    """What a function returns, or the InputError that it raises, which must be one line."""
    try:
        return function(*arguments)
    except InputError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017
        return error


# ---- parsers -------------------------------------------------------------------------------------
TASK = Task("t", [], [], grade=str, stop=("\nQ:", "\nProblem:"))


def check_parsers(text):
    assert gsm8k.grade(text, Decimal(7)) in OUTCOMES
    answer = gsm8k.parse_answer(text)
    assert answer is None or answer.is_finite()
    answer = math.extract_answer(text)
    assert answer is None or (answer and answer == answer.strip())
    box = math.extract_box(text)
    assert box is None or box in text
    assert verifier.parse_verdict(text) in (True, False, None)
    assert verifier.grade_verdict(text, True) in OUTCOMES
    graded = TASK.graded_text(text)
    assert text.startswith(graded)
    assert "\nQ:" not in graded
    assert "\nProblem:" not in graded


def test_parsers_return_what_they_document():
    for text in random_texts(INPUTS // 5):
        check_parsers(text)


LONG_TEXTS = [  # a megabyte; each is the worst case of one pattern or loop
    "The answer is " * 75_000,
    "The answer is " + "9" * 1_000_000,
    "The answer is " + "1," * 500_000,
    *("The answer is " + piece * 250_000 for piece in ("111,", "111 ", "1/2 ", "1 - ", "1=", "-$")),
    *("The answer is " + piece * 100_000 for piece in ("\\frac{", "=- ", "-\\a {", "1 million ")),
    *(
        f"The answer is {start}{' ' * 1_000_000}x"
        for start in ("1", "-", "= -", "minus", "-\\a", "\n")
    ),
    "\\boxed{" * 150_000,
    "\\boxed{" * 125_000 + "}" * 125_000,
    "\\boxed{." * 110_000 + "}" * 110_000,
    "final answer is " + "$ " * 500_000,
    "final answer is $" + " " * 1_000_000 + "x",
    "final answer is $" + "x$ y" * 250_000,
    "Verification: Is the answer correct (Yes/No)?" * 22_000 + "*" * 1_000_000,
    "\nQ:" * 330_000,
    "####" * 250_000,
]


def test_parsers_take_linear_time():
    """Anything slower than linear would take minutes here."""
    for text in LONG_TEXTS:
        check_parsers(text)


# ---- loaders -------------------------------------------------------------------------------------
VALUES = [
    *PIECES,
    "",
    0,
    1,
    -7,
    0.5,
    -1e300,
    1e-320,
    10**400,
    None,
    True,
    False,
    [],
    [0],
    [-0.5, -1.0],
    [float("nan")],
    {},
    [{"role": "user", "content": "Q"}],
    [{"role": "assistant", "content": "A"}],
    [{"role": None}],
]


def read_sample_records(file):
    return read_records(file, Sample)


def read_user_samples(file):
    return read_samples(file, ["reward=reward+format"], ask=str)


def read_gsm8k(file):
    return gsm8k.load_problems(str(file.parent), file.stem)


def read_math(file):
    return read_records(file, math.MathRow, is_one_record=True)


SAMPLE = {"prompt": "Q", "completion": "A", "reward": 1}
LOADERS = {  # a row that each reads, and other fields that it knows
    read_sample_records: (SAMPLE, sorted(Sample.model_fields)),
    read_user_samples: (SAMPLE | {"format": 0.5}, sorted(Sample.model_fields)),
    read_gsm8k: ({"question": "Q", "answer": "#### 1"}, []),
    read_math: ({"problem": "Q", "solution": "\\boxed{1}"}, ["answer"]),
}
LINE_ENDS = [b"", b"\n", b"\r\n", b"\n\n", b"\xef\xbb\xbf", b"\x00"]


def random_file(good_row, fields, rng):
    """A row that is almost right: random values in known fields, then random bytes."""
    names = sorted({*good_row, *fields, "other"})
    changes = {name: rng.choice(VALUES) for name in rng.sample(names, rng.randint(0, 2))}
    content = bytearray(json.dumps(good_row | changes).encode())
    for _ in range(rng.randint(0, 2)):
        content[rng.randrange(len(content))] = rng.randrange(256)
    return bytes(content) + rng.choice(LINE_ENDS)


@pytest.mark.parametrize("load", LOADERS)
def test_loaders_return_records_or_one_line(load, tmp_path, capsys):
    good_row, fields = LOADERS[load]
    file = tmp_path / "rows.jsonl"
    tried = INPUTS // 5
    records = []
    for seed in range(tried):
        file.write_bytes(random_file(good_row, fields, random.Random(seed)))
        result = result_or_error(load, file)
        if isinstance(result, list):
            records += result
    assert len(records) > tried / 20
    if isinstance(records[0], Sample):  # what was read can be written and read again
        file.write_text(to_lines(records), encoding="utf-8")
        assert read_sample_records(file) == records
