"""Sampling to a file: prompts, shares of ranks, seeds, grades, and resuming at every point."""

import json

import pytest
from helpers import on_two_ranks, read_rows

from toprlib import sampling
from toprlib.distributed import gather
from toprlib.records import Engine, Grade, InputError, Problem, Prompt, Task
from toprlib.sampling import make_prompts, sample_to_file
from toprlib.settings import Settings

N = 3
SEED = 1000


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(sampling, "CHUNK", 2)


def expected_rows(num_prompts):
    """What a file has that the fake engine has sampled, counted out prompt by prompt."""
    rows = []
    for i in range(num_prompts):
        for j in range(N):
            number = SEED + N * i + j
            row = {"problem_id": f"train-{i}", "prompt": f"Q{i}", "completion": f"{number}|0"}
            row |= {"token_ids": [number], "finish_reason": "stop"}
            row |= {"reward": number - i / 10, "outcome": ["even", "odd"][number % 2]}
            rows.append(row)
    return rows


def to_content(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


# ---- a fake engine -------------------------------------------------------------------------------
def count_to(size):
    """Prompts Q0, Q1, ..."""
    return [Prompt(Problem(f"Q{i}", i, f"train-{i}"), f"Q{i}", [i]) for i in range(size)]


def fake_task():
    """The reward is the number less that of the problem / 10; it is odd or even.

    What follows the stop string "|" is not graded.
    """

    def grade(completions, problems):
        grades = []
        for completion, problem in zip(completions, problems, strict=True):
            outcome = ["even", "odd"][int(completion) % 2]
            grades.append(Grade(int(completion) - problem.gold / 10, outcome))
        return grades

    return Task("parity", [], [], grade, outcomes=("odd", "even"), stop=("&", "|"))


def make_fake_engine(calls, gpus=1):
    """A completion is the number seed + i * n + j, and "|0"; the last prompts are finished first.

    calls: a list that gets the arguments of each call.
    """

    def sample_numbers(prompts, n, seed):
        calls.append((prompts, n, seed))
        for j in range(n):
            finished = []
            for i in reversed(range(len(prompts))):
                number = seed + i * n + j
                fields = {"completion": f"{number}|0", "token_ids": [number]}
                finished.append((i, fields | {"finish_reason": "stop"}))
            yield finished

    return Engine(sample_numbers, gpus)


def sample_shares(folder, cases, n, seed):
    """Sample five prompts to a file in each folder, in chunks of two, as one of several ranks.

    Returns the seeds of each rank's calls of its engine.
    """
    sampling.CHUNK = 2
    seeds = {}
    for case in cases:
        calls = []
        engine = make_fake_engine(calls, gpus=2 if case == "one engine" else 1)
        file = folder / case / "samples.jsonl"
        sampling.sample_to_file(file, engine, count_to(5), n, seed, fake_task())
        seeds[case] = [first_seed for _, _, first_seed in calls]
    return gather(seeds)


# ---- one rank ------------------------------------------------------------------------------------
@pytest.mark.parametrize("num_prompts", [1, 2, 5])
def test_the_file_has_n_graded_samples_of_each_prompt_in_order(tmp_path, num_prompts):
    file = tmp_path / "iteration-1" / "samples.jsonl"
    calls = []
    engine = make_fake_engine(calls)
    sample_to_file(file, engine, count_to(num_prompts), N, SEED, fake_task())
    assert read_rows(file) == expected_rows(num_prompts)
    assert list(file.parent.iterdir()) == [file]
    chunks = [count_to(num_prompts)[start : start + 2] for start in range(0, num_prompts, 2)]
    assert [prompts for prompts, _, _ in calls] == chunks
    sample_to_file(file, engine, count_to(9), N, SEED, fake_task())  # the file exists
    assert read_rows(file) == expected_rows(num_prompts)
    assert len(calls) == len(chunks)


class Killed(BaseException):
    """Ends a call as a kill would: nothing handles it."""


def interrupt_at(monkeypatch, point):
    """The write that the point (function, number of the call) names raises, after half of it.

    Returns a function that undoes it.
    """
    name, number = point
    write = getattr(sampling, name)
    calls = []

    def interrupted(path, content):
        calls.append(path)
        if len(calls) == number:
            if name == "append_to_file":
                write(path, content[: len(content) // 2])
            raise Killed
        write(path, content)

    monkeypatch.setattr(sampling, name, interrupted)
    return lambda: monkeypatch.setattr(sampling, name, write)


POINTS = [
    ("write_file", 1),  # before the first chunk
    ("append_to_file", 1),  # within a chunk, and within a line
    ("append_to_file", 2),
    ("append_to_file", 3),  # within the last chunk, of one prompt
    ("write_file", 2),  # before the file
]


@pytest.mark.parametrize("point", POINTS)
def test_a_killed_call_resumes_after_its_last_complete_chunk(tmp_path, monkeypatch, point):
    file = tmp_path / "samples.jsonl"
    calls = []
    engine = make_fake_engine(calls)
    undo = interrupt_at(monkeypatch, point)
    with pytest.raises(Killed):
        sample_to_file(file, engine, count_to(5), N, SEED, fake_task())
    assert not file.exists()
    undo()
    sample_to_file(file, engine, count_to(5), N, SEED, fake_task())
    assert read_rows(file) == expected_rows(5)
    assert list(tmp_path.iterdir()) == [file]
    seeds = [seed for _, _, seed in calls]
    name, number = point
    if name == "append_to_file":  # that chunk alone was sampled twice
        assert seeds.pop(number) == SEED + 2 * N * (number - 1)
    assert seeds == [SEED, SEED + 2 * N, SEED + 4 * N]


# ---- several ranks -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("ranks", "gpus", "expected"),
    [
        (1, 1, [("abcdefg", 0)]),
        (3, 1, [("ab", 0), ("cd", 2), ("efg", 4)]),
        (4, 2, [("abc", 0), ("", None), ("defg", 3), ("", None)]),
        (4, 4, [("abcdefg", 0), ("", None), ("", None), ("", None)]),
        (8, 1, [("", None), *[(letter, i) for i, letter in enumerate("abcdefg")]]),
    ],
)
def test_engines_have_consecutive_shares_of_the_prompts(monkeypatch, ranks, gpus, expected):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    for rank, (share, start) in enumerate(expected):
        monkeypatch.setenv("RANK", str(rank))
        actual_start, actual = sampling._own_share("abcdefg", gpus)
        assert list(actual) == list(share)
        assert not share or actual_start == start


def test_two_ranks_sample_what_one_rank_samples(tmp_path):
    """Of five prompts, the ranks have two and three; with gpus=2, rank zero has all of them.

    In each case both ranks return, so they have made the same collective calls.
    """
    zero = SEED
    one = SEED + 2 * N
    cases = {  # lines of the parts of an earlier command; seeds of the calls of both ranks
        "new": ({}, [zero], [one, one + 2 * N]),
        "within their shares": ({0: 0, 1: N * 2 + 1}, [zero], [one + 2 * N]),
        "rank zero complete": ({0: N * 2, 1: N * 1}, [], [one, one + 2 * N]),
        "rank one complete": ({1: N * 3}, [zero], []),
        "one engine": ({}, [zero, zero + 2 * N, zero + 4 * N], []),
    }
    for name, (lines, _, _) in cases.items():
        (tmp_path / name).mkdir()
        for rank, num_lines in lines.items():
            part = tmp_path / name / f"samples.jsonl.part-{rank}"
            part.write_text(to_content(expected_rows(5)[N * 2 * rank :][:num_lines]))
    seeds = on_two_ranks(sample_shares, tmp_path, tmp_path, list(cases), N, SEED)
    for name, (_, *expected) in cases.items():
        assert read_rows(tmp_path / name / "samples.jsonl") == expected_rows(5)
        assert len(list((tmp_path / name).iterdir())) == 1
        assert [of_rank[name] for of_rank in seeds] == expected


# ---- prompts -------------------------------------------------------------------------------------


def test_the_longest_prompt_may_just_fill_the_context(lm):
    problems = [Problem("Q"), Problem("Q" * 50), Problem("Q" * 20)]
    task = Task("own", problems, [], grade=zip)
    settings = Settings(max_new_tokens=8)
    length = len(lm.tokenizer("Q" * 50)["input_ids"])
    assert make_prompts(task, problems, lm._replace(context=length + 8), settings)
    with pytest.raises(InputError, match=r"QQQ.*--max-new-tokens"):
        make_prompts(task, problems, lm._replace(context=length + 7), settings)
