"""What rank zero does for all ranks."""

import pytest
from distributed_helpers import on_two_ranks

from toprlib.distributed import gather, rank, rank_zero_only
from toprlib.records import InputError


@rank_zero_only
def inner(calls):
    calls.append("inner")
    return rank()


@rank_zero_only
def outer(calls):
    calls.append("outer")
    return 10 + inner(calls)


@rank_zero_only
def fail():
    raise InputError("is missing", option="--model")


def call_nested():
    calls = []
    result = outer(calls)
    return gather((result, calls))


def test_nested_work_of_rank_zero_meets_no_other_rank(tmp_path):
    """A collective that rank zero alone calls would hang, or meet another one of the other rank."""
    results = on_two_ranks(call_nested, tmp_path)
    assert results == [(10, ["outer", "inner"]), (10, [])]


def call_failing():
    try:
        fail()
    except InputError as error:
        return gather(error.option)


def test_an_error_of_rank_zero_is_raised_on_all_ranks(tmp_path):
    assert on_two_ranks(call_failing, tmp_path) == ["--model", "--model"]


def test_one_process_needs_no_group():
    with pytest.raises(InputError):
        fail()
    assert inner([]) == 0
