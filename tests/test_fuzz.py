"""Text that nobody meant: parsers and loaders return or raise what they document. `make fuzz` tries a million."""

import json
import os
import random
from decimal import Decimal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import train_gsm8k as gsm8k
from pipeline.records import InputError, Sample, Task, read_rows, read_shots, to_lines
from tasks import math, verifier

INPUTS = int(os.environ.get("FUZZ_INPUTS", "4000"))
PER_EXAMPLE = 50  # texts made of the pieces that hypothesis draws

PIECES = [
    *("The answer is", "the answer is", "####", "final answer is", "I hope", "Q:", "A:", "\nQ:", "\nProblem:"),
    *("\\boxed{", "\\boxed ", "\\fbox{", "\\frac{1}{2}", "\\text{", "\\left(", "\\right.", "\\[", "\\]", "\\(", "\\)"),
    *("Verification: Is the answer correct (Yes/No)?", "Yes", "No", "{", "}", "$", "$$", "%", "\\", "\\\\", "^", "_"),
    *("1", "-1", "1,234", "3.5", ".", ",", ":", " ", "\n", "\r\n", "\t", "\x00", "\x1b", "\x7f", "\x85", "שלום"),
    *"٣３²½∞𝟛\u200b\u2028\u2029\u00a0\ufeff\u202e\ud800\udfff",
    *("9" * 400, "(" * 50, "{" * 50, "}" * 50, "e" * 50, "1e999", "nan", "inf", "--", "-$", '"', "'", "null", "true"),
]
text = st.text(st.characters(exclude_categories=()), max_size=20)
pieces = st.lists(st.sampled_from(PIECES) | text, min_size=1, max_size=8)


def texts(drawn, seed):
    """PER_EXAMPLE texts of the pieces, in any order and number."""
    rng = random.Random(seed)
    return ["".join(rng.choices([*drawn, rng.choice(PIECES)], k=rng.randint(1, 12))) for _ in range(PER_EXAMPLE)]


def outcome_of_gsm8k(text):
    assert gsm8k.grade(text, Decimal(7)) in ("correct", "incorrect", "invalid")
    answer = gsm8k.parse_answer(text)
    assert answer is None or answer == answer


def gold_of_gsm8k(text):
    try:
        assert isinstance(gsm8k.parse_gold(text), Decimal)
    except ValueError as raised:
        assert str(raised) == "no number after ####"  # noqa: PT017


def answer_of_math(text):
    answer, box = math.extract_answer(text), math.extract_box(text)
    assert answer is None or (answer and answer == answer.strip())
    assert box is None or box in text


def verdict(text):
    assert verifier.parse_verdict(text) in (True, False, None)
    assert verifier.grade_verdict(text, True) in ("correct", "incorrect", "invalid")


def visible(text):
    shown = Task("t", [], [], grade=str, stop=("\nQ:", "\nProblem:")).visible(text)
    assert text.startswith(shown)
    assert "\nQ:" not in shown


PARSERS = [outcome_of_gsm8k, gold_of_gsm8k, answer_of_math, verdict, visible]
EXAMPLES = max(INPUTS // PER_EXAMPLE // (len(PARSERS) + 3), 1)  # three loaders
fuzzed = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("parse", PARSERS, ids=lambda parse: parse.__name__)
@given(drawn=pieces, seed=st.integers(0, 2**32))
@fuzzed
def test_a_parser_returns_what_it_says(parse, drawn, seed):
    for text in texts(drawn, seed):
        parse(text)


def read_or_refuse(read, *arguments):
    try:
        return read(*arguments)
    except InputError as raised:
        assert len(str(raised).splitlines()) == 1  # noqa: PT017


value = text | st.integers() | st.floats() | st.none() | st.lists(st.floats(), max_size=3) | st.booleans()


@pytest.mark.parametrize("kind", [Sample, gsm8k.Gsm8kRow], ids=lambda kind: kind.__name__)
@given(data=st.data(), seed=st.integers(0, 2**32))
@fuzzed
def test_a_file_of_anything_is_read_or_refused_in_a_line(kind, tmp_path, data, seed):
    """Rows that are nearly right: values of all sorts under the names that are expected, and bytes that are changed."""
    row = data.draw(st.dictionaries(st.sampled_from([*kind.model_fields, "other"]), value, max_size=8))
    rng, file, good = random.Random(seed), tmp_path / "rows.jsonl", json.dumps(row).encode()
    for _ in range(PER_EXAMPLE):
        content = bytearray(good)
        for _ in range(rng.randint(0, 3)):
            content[rng.randrange(len(content))] = rng.randrange(256)
        file.write_bytes(bytes(content) + rng.choice([b"", b"\n", b"\r\n", b"\n\n", b"\xef\xbb\xbf", b"\x00"]))
        for found in read_or_refuse(read_rows, file, kind) or []:
            if kind is Sample:  # what is read can be written, and read again
                file.write_text(to_lines([found]), encoding="utf-8")
                assert read_rows(file, kind) == [found]
        read_or_refuse(read_rows, file, math.MathRow, "whole")


@given(drawn=pieces, seed=st.integers(0, 2**32))
@fuzzed
def test_shots_of_anything_are_read_or_refused_in_a_line(tmp_path, drawn, seed):
    file = tmp_path / "shots.txt"
    for text in texts(drawn, seed):
        file.write_bytes(text.encode("utf-8", "surrogatepass"))
        shots = read_or_refuse(read_shots, 2, file, "Q:", "", str.split)
        assert shots is None or len(shots) == 2


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


@pytest.mark.parametrize("parse", PARSERS, ids=lambda parse: parse.__name__)
def test_a_megabyte_is_no_trouble(parse):
    """What is worse than linear would take minutes."""
    for text in MEGABYTE:
        parse(text)
