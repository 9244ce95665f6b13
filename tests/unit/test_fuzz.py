"""Text that nobody meant: parsers and loaders return or raise what they document. `make fuzz` tries a million."""

import json
import os
import random
from decimal import Decimal

import pytest

import train_gsm8k as gsm8k
from pipeline.records import OUTCOMES, InputError, Sample, Task, read_records, to_lines
from tasks import math, verifier

INPUTS = int(os.environ.get("FUZZ_INPUTS", "4000"))

PIECES = [
    *(
        "The answer is",
        "####",
        "final answer is",
        "I hope",
        "Q:",
        "A:",
        "\nQ:",
        "\n\nQ:",
        "\nProblem:",
    ),
    *(
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
    ),
    *(
        "Verification: Is the answer correct (Yes/No)?",
        "Yes",
        "No",
        "{",
        "}",
        "$",
        "$$",
        "%",
        "\\",
        "\\\\",
        "^",
        "_",
    ),
    *(
        "1",
        "-1",
        "1,234",
        "3.5",
        ".",
        ",",
        ":",
        " ",
        "\n",
        "\r\n",
        "\t",
        "\x00",
        "\x1b",
        "\x7f",
        "\x85",
        "שלום",
    ),
    *"٣３²½∞𝟛\u200b\u2028\u2029\u00a0\ufeff\u202e\ud800\udfff",
    *(
        "9" * 400,
        "(" * 50,
        "{" * 50,
        "}" * 50,
        "e" * 50,
        "1e999",
        "nan",
        "inf",
        "--",
        "-$",
        '"',
        "'",
        "null",
        "true",
    ),
]
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
]


def texts():
    """Some pieces each, and any other character, in any order and number."""
    for seed in range(TEXTS):
        rng = random.Random(seed)
        some = [*rng.choices(PIECES, k=rng.randint(1, 8)), chr(rng.randrange(0x110000))]
        yield "".join(rng.choices(some, k=rng.randint(0, 12)))


def tried(fault, function, *arguments):
    """What a function returns, or the documented fault that it raises, in a line."""
    try:
        return function(*arguments)
    except fault as raised:
        assert len(str(raised).splitlines()) == 1  # noqa: PT017
        return raised


def parse(text):
    """Give a text to all parsers."""
    assert gsm8k.grade(text, Decimal(7)) in OUTCOMES
    answer = gsm8k.parse_answer(text)
    assert answer is None or answer == answer
    gold = tried(ValueError, gsm8k.parse_gold, text)
    assert isinstance(gold, Decimal) or str(gold) == "no number after ####"
    answer, box = math.extract_answer(text), math.extract_box(text)
    assert answer is None or (answer and answer == answer.strip())
    assert box is None or box in text
    assert verifier.parse_verdict(text) in (True, False, None)
    assert verifier.grade_verdict(text, True) in OUTCOMES
    shown = Task("t", [], [], grade=str, stop=("\nQ:", "\nProblem:")).visible(text)
    assert text.startswith(shown)
    assert "\nQ:" not in shown


GOOD = {  # rows that loaders read
    Sample: {"prompt": "Q", "completion": "A", "reward": 1},
    gsm8k.Gsm8kRow: {"question": "Q", "answer": "#### 1"},
    math.MathRow: {"problem": "Q", "solution": "\\boxed{1}"},
}
TEXTS = INPUTS // (len(GOOD) + 2)  # of each test but the last


def test_a_parser_returns_what_it_says():
    for text in texts():
        parse(text)


@pytest.mark.parametrize("kind", GOOD, ids=lambda kind: kind.__name__)
def test_a_file_of_anything_is_read_or_refused_in_a_line(kind, tmp_path):
    """Rows that are nearly right: values of all sorts under the names that are expected, and bytes that are changed."""
    file, form, read = tmp_path / "rows.jsonl", "whole" if kind is math.MathRow else "lines", []
    for seed in range(TEXTS):
        rng = random.Random(seed)
        changes = {
            name: rng.choice(VALUES)
            for name in rng.sample([*kind.model_fields, "other"], rng.randint(0, 2))
        }
        content = bytearray(json.dumps(GOOD[kind] | changes).encode())
        for _ in range(rng.randint(0, 2)):
            content[rng.randrange(len(content))] = rng.randrange(256)
        file.write_bytes(
            bytes(content) + rng.choice([b"", b"\n", b"\r\n", b"\n\n", b"\xef\xbb\xbf", b"\x00"])
        )
        found = tried(InputError, read_records, file, kind, form)
        read += found if isinstance(found, list) else []
    assert len(read) > TEXTS / 20
    if kind is Sample:  # what is read can be written, and read again
        file.write_text(to_lines(read), encoding="utf-8")
        assert read_records(file, kind) == read


MEGABYTE = [  # each is the worst case of one pattern or loop
    "The answer is " * 75_000,
    "The answer is " + "9" * 1_000_000,
    "The answer is " + "1," * 500_000,
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


def test_a_megabyte_is_no_trouble():
    """What is worse than linear would take minutes."""
    for text in MEGABYTE:
        parse(text)
