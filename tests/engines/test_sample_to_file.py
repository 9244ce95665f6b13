"""Sampling to a file: prompts, shares of ranks, seeds, grades, and resuming at every point."""

import json
import re
from itertools import chain

import pytest
from distributed_helpers import on_two_ranks
from engine_helpers import count_to, fake_task, make_fake_engine, sample_shares

from toprlib import sampling
from toprlib.distributed import progress_bar
from toprlib.records import InputError, Problem, Prompt, Task
from toprlib.sampling import Engine, make_prompts, sample_to_file, shard_prompts

N = 3
SEED = 1000


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(sampling, "CHUNK", 2)


def read(file):
    """The rows of a JSON-lines file."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def expected_rows(num_prompts, n=N, seed=SEED):
    """What a file holds that the fake engine has sampled, counted out prompt by prompt."""
    rows = []
    for i in range(num_prompts):
        for j in range(n):
            number = seed + n * i + j
            row = {"problem_id": f"train-{i}", "prompt": f"Q{i}", "completion": f"{number}"}
            row |= {"token_ids": [number], "finish_reason": "stop"}
            row |= {"reward": float(number % 2), "outcome": ["even", "odd"][number % 2]}
            rows.append(row)
    return rows


# ---- one rank ------------------------------------------------------------------------------------
@pytest.mark.parametrize("num_prompts", [1, 2, 5])
def test_the_file_has_n_graded_samples_of_each_prompt_in_order(tmp_path, num_prompts):
    file = tmp_path / "iteration-1" / "samples.jsonl"
    calls = []
    engine = make_fake_engine(calls)
    sample_to_file(file, engine, count_to(num_prompts), N, SEED, fake_task())
    assert read(file) == expected_rows(num_prompts)
    assert list(file.parent.iterdir()) == [file]
    chunks = [count_to(num_prompts)[start : start + 2] for start in range(0, num_prompts, 2)]
    assert [prompts for prompts, _, _ in calls] == chunks


def test_a_file_that_exists_is_left_as_it_is(tmp_path):
    """Its parts were not removed yet when the run was killed."""
    file = tmp_path / "samples.jsonl"
    file.write_text("complete\n")
    file.with_name("samples.jsonl.part-0").write_text("a part")
    calls = []
    sample_to_file(file, make_fake_engine(calls), count_to(5), N, SEED, fake_task())
    assert calls == []
    assert file.read_text() == "complete\n"
    assert list(tmp_path.iterdir()) == [file]


class Killed(BaseException):
    """Ends a call as a kill would: nothing handles it."""


def interrupt_at(monkeypatch, point):
    """The next write that the point (function, number of the call) names raises, after half of it.

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
    ("write_file", 2),  # before the grades
    ("write_file", 3),  # before the file
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
    assert read(file) == expected_rows(5)
    assert list(tmp_path.iterdir()) == [file]
    seeds = [seed for _, _, seed in calls]
    name, number = point
    if name == "append_to_file":  # that chunk alone was sampled twice
        assert sorted(seeds) == sorted([SEED, SEED + 2 * N, SEED + 4 * N, seeds[number]])
        assert seeds[number] == SEED + 2 * N * (number - 1)
    else:
        assert seeds == [SEED, SEED + 2 * N, SEED + 4 * N]


@pytest.mark.parametrize("size", [0, 1, 100, 700, -200, -1])
def test_a_part_may_end_anywhere(tmp_path, size):
    """Bytes of a complete part; negative ones are counted from its end."""
    file = tmp_path / "samples.jsonl"
    part = tmp_path / "samples.jsonl.part-0"
    rows = expected_rows(5)
    for row in rows:
        del row["reward"], row["outcome"]
    content = "".join(json.dumps(row) + "\n" for row in rows)
    part.write_text(content[:size])
    sample_to_file(file, make_fake_engine([]), count_to(5), N, SEED, fake_task())
    assert read(file) == expected_rows(5)


def test_an_error_of_the_reward_loses_no_completion(tmp_path):
    file = tmp_path / "samples.jsonl"
    calls = []
    engine = make_fake_engine(calls)

    def fail_at_the_end(completion, problem):
        if completion == str(SEED + 5 * N - 1):
            raise ZeroDivisionError
        return 1.0

    failing = Task("failing", [], [], reward=fail_at_the_end)
    with pytest.raises(ZeroDivisionError):
        sample_to_file(file, engine, count_to(5), N, SEED, failing)
    assert len(calls) == 3
    assert not file.exists()
    sample_to_file(file, engine, count_to(5), N, SEED, fake_task())
    assert len(calls) == 3
    assert read(file) == expected_rows(5)


def test_a_part_of_other_prompts_is_refused_before_sampling(tmp_path, monkeypatch):
    """As after a change of the prompt, or of the number of ranks."""
    file = tmp_path / "samples.jsonl"
    calls = []
    undo = interrupt_at(monkeypatch, ("append_to_file", 2))
    with pytest.raises(Killed):
        sample_to_file(file, make_fake_engine([]), count_to(5), N, SEED, fake_task())
    undo()
    other_prompts = [prompt._replace(text="other") for prompt in count_to(5)]
    for prompts in (other_prompts, count_to(6)[1:], count_to(1)):
        with pytest.raises(InputError) as raised:
            sample_to_file(file, make_fake_engine(calls), prompts, N, SEED, fake_task())
        assert raised.value.file == str(tmp_path / "samples.jsonl.part-0")
    assert calls == []


def test_a_missing_part_is_noticed_when_the_parts_are_joined(tmp_path, monkeypatch):
    """As where two nodes do not share a file system."""
    file = tmp_path / "samples.jsonl"
    part = tmp_path / "samples.jsonl.part-0"
    monkeypatch.setattr(sampling, "gather", lambda value: part.unlink())
    with pytest.raises(InputError) as raised:
        sample_to_file(file, make_fake_engine([]), count_to(5), N, SEED, fake_task())
    assert raised.value.file == str(file)
    assert not file.exists()


@pytest.mark.parametrize("ended", [None, 0, 14])
def test_a_line_says_that_no_completion_has_ended(tmp_path, capsys, ended):
    """One line for all of them, and none if one has ended."""
    file = tmp_path / "samples.jsonl"

    def generate(prompts, n, seed):
        for finished in make_fake_engine([]).generate(prompts, n, seed):
            marked = []
            for index, sample in finished:
                number = int(sample.completion) - SEED
                reason = "stop" if number == ended else "length"
                marked.append((index, sample.model_copy(update={"finish_reason": reason})))
            yield marked

    for _ in range(2):  # the second call finds the file
        sample_to_file(file, Engine(generate), count_to(5), N, SEED, fake_task())
    lines = capsys.readouterr().out.splitlines()
    assert [str(file) in line for line in lines] == ([True] if ended is None else [])


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
        actual, actual_start = shard_prompts("abcdefg", gpus)
        assert list(actual) == list(share)
        assert not share or actual_start == start


def test_two_ranks_sample_what_one_rank_samples(tmp_path):
    """Of five prompts, the ranks have two and three; with gpus=2, rank zero has all of them.

    In each case both ranks return, so they have made the same collective calls.
    """
    cases = {
        "new": {},
        "both within their shares": {0: 0, 1: N * 2 + 1},
        "rank zero complete": {0: N * 2, 1: N * 1},
        "rank one complete": {1: N * 3},
        "both complete": {0: N * 2, 1: N * 3},
        "one engine": {},
    }
    for name, lines in cases.items():
        (tmp_path / name).mkdir()
        for rank, num_lines in lines.items():
            rows = expected_rows(5)[N * 2 * rank :][:num_lines]
            for row in rows:
                del row["reward"], row["outcome"]
            part = tmp_path / name / f"samples.jsonl.part-{rank}"
            part.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = (tmp_path, list(cases), N, SEED)
    seeds_of_rank_zero, seeds_of_rank_one = on_two_ranks(sample_shares, tmp_path, *arguments)
    for name in cases:
        assert read(tmp_path / name / "samples.jsonl") == expected_rows(5)
        assert len(list((tmp_path / name).iterdir())) == 1
    first_of_rank_one = SEED + 2 * N
    assert seeds_of_rank_zero == {
        "new": [SEED],
        "both within their shares": [SEED],
        "rank zero complete": [],
        "rank one complete": [SEED],
        "both complete": [],
        "one engine": [SEED, SEED + 2 * N, SEED + 4 * N],
    }
    assert seeds_of_rank_one == {
        "new": [first_of_rank_one, first_of_rank_one + 2 * N],
        "both within their shares": [first_of_rank_one + 2 * N],
        "rank zero complete": [first_of_rank_one, first_of_rank_one + 2 * N],
        "rank one complete": [],
        "both complete": [],
        "one engine": [],
    }


# ---- progress ------------------------------------------------------------------------------------
@pytest.fixture
def clock(monkeypatch):
    """[seconds], what a progress bar takes for the time."""
    clock = [1000.0]
    monkeypatch.setattr("tqdm.std.time", lambda: clock[0])
    return clock


def states(log):
    """(done, total, elapsed, remaining) of each line of a log, all of which are whole."""
    assert "\r" not in log
    assert log.endswith("\n")
    lines = log.splitlines()
    assert "" not in lines
    return [re.search(r"(\d+)/(\d+) \[([0-9:]+)<([0-9:]+),", line).groups() for line in lines]


def test_progress_in_a_log_counts_chunks_and_leaves_the_engine_s_start_out(tmp_path, capsys, clock):
    """An engine that starts for five minutes, then answers each chunk at once after 40 seconds."""
    starts = []

    def start():
        if not starts:
            clock[0] += 300
            starts.append(clock[0])

    def generate(prompts, n, seed):
        start()
        clock[0] += 40
        yield list(chain.from_iterable(make_fake_engine([]).generate(prompts, n, seed)))

    file = tmp_path / "samples.jsonl"
    sample_to_file(file, Engine(generate, start=start), count_to(5), N, SEED, fake_task())
    assert read(file) == expected_rows(5)
    assert states(capsys.readouterr().err) == [
        ("6", "15", "00:40", "01:00"),
        ("12", "15", "01:20", "00:20"),
        ("15", "15", "02:00", "00:00"),
    ]


def test_progress_in_a_log_is_a_line_in_ten_seconds_and_counts_what_an_earlier_command_did(
    capsys, clock
):
    for _ in progress_bar(range(8), "training", "step", total=20, done=12):
        clock[0] += 4
    resumed, *lines = capsys.readouterr().err.splitlines(keepends=True)
    assert re.findall(r"\d+", resumed) == ["12", "20"]
    done = [(state[0], state[1]) for state in states("".join(lines))]
    assert done == [("15", "20"), ("18", "20"), ("20", "20")]


# ---- prompts -------------------------------------------------------------------------------------
def test_prompts_have_the_text_and_the_tokens_of_their_problems(lm):
    problems = [Problem("train-1", "How many?"), Problem("train-2", "How many figs are left?")]
    task = Task("own", problems, [], prompt=lambda p: f"Q: {p.question}", grade=str)
    prompts = make_prompts(task, problems, lm, max_new_tokens=8)
    texts = ["Q: How many?", "Q: How many figs are left?"]
    assert prompts == [
        Prompt(problem, text, lm.tokenizer(text)["input_ids"])
        for problem, text in zip(problems, texts, strict=True)
    ]
    assert make_prompts(task, [], lm, max_new_tokens=8) == []


def test_the_longest_prompt_may_just_fill_the_context(lm):
    problems = [Problem("short", "Q"), Problem("long", "Q" * 50), Problem("middle", "Q" * 20)]
    task = Task("own", problems, [], grade=str)
    length = len(lm.tokenizer("Q" * 50)["input_ids"])
    assert make_prompts(task, problems, lm._replace(context=length + 8), max_new_tokens=8)
    with pytest.raises(InputError) as raised:
        make_prompts(task, problems, lm._replace(context=length + 7), max_new_tokens=8)
    assert raised.value.option == "--max-new-tokens"
    assert "long" in str(raised.value)
