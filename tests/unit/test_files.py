"""Files of a run: what is written is read back, errors name their place, a folder has one user."""

import json
import math
import pickle
import resource
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toprlib.files import (
    FORMAT,
    append_to_file,
    atomic_folder,
    exists,
    locked_run_folder,
    read_json,
    read_partial_records,
    read_records,
    remove,
    to_lines,
    write_file,
    write_json,
    write_records,
)
from toprlib.records import InputError, Sample

GOOD = {"prompt": "Q", "completion": " A", "reward": 1}
LINE = json.dumps(GOOD)


# ---- InputError ----------------------------------------------------------------------------------
def test_input_error_has_the_places_that_it_was_given():
    error = InputError("is wrong", option="--k", file=Path("a.jsonl"), line=3, field="reward")
    assert (error.option, error.file, error.line, error.field) == ("--k", "a.jsonl", 3, "reward")
    for part in ("is wrong", "--k", "a.jsonl:3", "reward"):
        assert part in str(error)
    error = InputError("is wrong")
    assert (error.option, error.file, error.line, error.field) == (None, None, None, None)
    assert str(error) == "is wrong"


def test_input_error_is_one_line_and_can_be_sent_to_other_ranks():
    error = InputError("is\nwrong", file="a.jsonl", field="a\u2028b")
    assert len(str(error).splitlines()) == 1
    assert str(InputError("\x1b]0;title\x07é", field="\x9b2J\u202e")).isprintable()
    received = pickle.loads(pickle.dumps(error))
    assert str(received) == str(error)
    assert (received.file, received.field) == ("a.jsonl", "a\u2028b")


# ---- records -------------------------------------------------------------------------------------
texts = st.text(st.characters(codec="utf-8")) | st.just('\u2028 \x85\r\n\t\x00"\\\ufeff 𝟛')
numbers = st.floats(allow_nan=False, allow_infinity=False)
samples = st.builds(
    Sample,
    problem_id=st.none() | texts,
    prompt=texts,
    completion=texts,
    token_ids=st.none() | st.lists(st.integers(0, 2**31), min_size=1),
    token_logmu=st.none() | st.lists(numbers),
    token_logmu_engine=st.none() | st.lists(numbers),
    finish_reason=st.sampled_from(["stop", "length"]),
    reward=st.none() | numbers,
    outcome=st.none() | texts,
)


@given(
    st.lists(samples, min_size=1, max_size=3),
    st.sampled_from(["", "\ufeff"]),
    st.sampled_from(["\n", "\r\n"]),
)
def test_samples_are_read_as_they_were_written(tmp_path_factory, written, start, newline):
    """Also after an editor has put a byte-order mark before them, and ends of lines of Windows."""
    file = tmp_path_factory.getbasetemp() / "written.jsonl"
    content = start + to_lines(written).replace("\n", newline)
    file.write_bytes(content.encode())
    assert read_records(file, Sample) == written


def test_write_records_and_write_json(tmp_path):
    samples = [Sample(prompt="Q", completion="A")]
    write_records(tmp_path / "new" / "samples.jsonl", samples)
    assert read_records(tmp_path / "new" / "samples.jsonl", Sample) == samples
    write_records(tmp_path / "none.jsonl", [])
    assert (tmp_path / "none.jsonl").read_bytes() == b""
    write_json(tmp_path / "results.json", {"file": tmp_path, "mean": 0.5})
    assert read_json(tmp_path / "results.json") == {"file": str(tmp_path), "mean": 0.5}


INVALID = {  # content of a file, or changes of its second line; the line and field of the error
    "empty": (b"", None, None),
    "not UTF-8": (b"\xff\xfe", None, None),
    "not JSON": (f"{LINE}\n{{oops\n".encode(), 2, None),
    "blank line": (f"{LINE}\n\n{LINE}\n".encode(), 2, None),
    "boolean": ({"reward": True}, 2, "reward"),
    "not an object": (b"[1, 2]\n", 1, None),
    "an array over several lines": (f"[\n{LINE},\n{LINE}\n]\n".encode(), 1, None),
    "missing field": (b'{"prompt": "Q"}\n', 1, "completion"),
    "NaN in a list": ({"token_logmu": [-1, math.nan]}, 2, "token_logmu.1"),
    "unknown field": ({"rewrad": 1}, 2, "rewrad"),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_record_is_named_by_file_line_and_field(tmp_path, case):
    content, line, field = INVALID[case]
    if isinstance(content, dict):
        content = f"{LINE}\n{json.dumps(GOOD | content)}\n".encode()
    file = tmp_path / "samples.jsonl"
    file.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_records(file, Sample)
    assert (caught.value.file, caught.value.line) == (str(file), line)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


def test_a_file_of_one_record_has_no_line_numbers(tmp_path):
    file = tmp_path / "row.json"
    file.write_text(json.dumps(GOOD, indent=4))
    assert read_records(file, Sample, is_one_record=True) == [Sample(**GOOD)]
    file.write_text(json.dumps({"prompt": "Q"}, indent=4))
    with pytest.raises(InputError) as caught:
        read_records(file, Sample, is_one_record=True)
    assert (caught.value.line, caught.value.field) == (None, "completion")


@pytest.mark.parametrize("name", ["missing.jsonl", "folder"])
def test_what_is_no_file_is_named(tmp_path, name):
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError) as caught:
        read_records(tmp_path / name, Sample)
    assert caught.value.file == str(tmp_path / name)


def test_partial_records_end_with_the_last_complete_line(tmp_path):
    file = tmp_path / "part" / "samples.jsonl.part-0"
    assert read_partial_records(file, Sample) == []
    append_to_file(file, f"{LINE}\n")
    append_to_file(file, f"{LINE}\n")
    with file.open("ab") as opened:
        opened.write('{"prompt": "𝟛'.encode()[:-1])  # a killed process may stop in a character
    assert read_partial_records(file, Sample) == [Sample(**GOOD)] * 2
    file.write_text(f"{LINE}\n{LINE}\n{LINE[:-9]}")
    append_to_file(file, "\n")
    with pytest.raises(InputError) as caught:
        read_partial_records(file, Sample)
    assert (caught.value.file, caught.value.line) == (str(file), 3)


# ---- JSON ----------------------------------------------------------------------------------------
def test_damaged_json_is_named(tmp_path):
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(InputError) as caught:
        read_json(tmp_path / "results.json")
    assert caught.value.file == str(tmp_path / "results.json")
    for content in ("{}", "[]", '["before"]', '"before"', "null"):
        (tmp_path / "results.json").write_text(content)
        with pytest.raises(InputError) as caught:
            read_json(tmp_path / "results.json", keys=["before"])
        assert (caught.value.file, caught.value.field) == (
            str(tmp_path / "results.json"),
            "before",
        )


# ---- atomic writes -------------------------------------------------------------------------------
def test_reader_sees_the_whole_old_file_or_the_whole_new_one(tmp_path):
    file = tmp_path / "results.json"
    write_file(file, "old")
    with file.open() as reader:
        write_file(file, "new")
        assert reader.read() == "old"
    assert file.read_text() == "new"
    assert list(tmp_path.iterdir()) == [file]


def test_failed_write_leaves_the_old_file(tmp_path):
    file = tmp_path / "results.json"
    write_file(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_file(file, "new \ud800")
    assert file.read_text() == "old"


@contextmanager
def files_of_at_most(size):
    """A write beyond so many bytes fails, as on a full disk."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))


@pytest.mark.parametrize(
    ("write", "name"),
    [(write_file, "samples.jsonl.unfinished"), (append_to_file, "samples.jsonl")],
)
def test_full_disk_names_the_file(tmp_path, write, name):
    with files_of_at_most(1000), pytest.raises(OSError, match="large") as caught:
        write(tmp_path / "samples.jsonl", "new" * 1000)
    assert caught.value.filename == str(tmp_path / name)


def test_planted_links_are_not_followed(tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("all of it")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json.unfinished").symlink_to(precious / "thesis.tex")
    (run / "model.unfinished").symlink_to(precious)
    write_file(run / "config.json", "{}")
    with atomic_folder(run / "model") as unfinished:
        (unfinished / "weights").touch()
    assert (run / "config.json").read_text() == "{}"
    assert not (run / "config.json").is_symlink()
    assert not (run / "model").is_symlink()
    (run / ".lock").symlink_to(precious / "thesis.tex")
    with pytest.raises(InputError) as caught, locked_run_folder(run, {}):
        pytest.fail("the block must not begin")
    assert (caught.value.option, caught.value.file) == ("--out", str(run))
    assert contents(precious).keys() == {"thesis.tex"}
    assert (precious / "thesis.tex").read_text() == "all of it"


def write_half(folder):
    with atomic_folder(folder) as unfinished:
        (unfinished / "half").touch()
        raise ZeroDivisionError


def test_a_folder_gets_its_name_when_it_is_complete(tmp_path):
    folder = tmp_path / "run" / "model"
    leftover = tmp_path / "run" / "model.unfinished"
    leftover.mkdir(parents=True)
    (leftover / "of a killed run").touch()
    with pytest.raises(ZeroDivisionError):
        write_half(folder)
    assert not exists(folder)
    with atomic_folder(folder) as unfinished:
        (unfinished / "weights").touch()
        assert not exists(folder)
    assert [path.name for path in folder.iterdir()] == ["weights"]
    assert not leftover.exists()
    remove(folder, tmp_path / "missing")
    assert not exists(folder)


# ---- the folder of a run -------------------------------------------------------------------------
def contents(folder):
    """Name and SHA-256 of every file in a folder."""
    hashes = {}
    for path in folder.rglob("*"):
        if path.is_file():
            hashes[str(path.relative_to(folder))] = sha256(path.read_bytes()).hexdigest()
    return hashes


@pytest.mark.parametrize(
    "files",
    [
        {".lock": ""},
        {"config.json.unfinished": "{"},
        {"config.json": {"lr": 0.1, "format": FORMAT}, "thesis.tex": ""},
    ],
    ids=["killed before its config", "killed in its config", "same config"],
)
def test_run_may_use_a_folder_of_the_same_run(tmp_path, files):
    fill(tmp_path / "run", files)
    with locked_run_folder(tmp_path / "run", {"lr": 0.1}):
        assert read_json(tmp_path / "run" / "config.json") == {"lr": 0.1, "format": FORMAT}


@pytest.mark.parametrize(
    ("files", "name"),
    [
        ({"config.json": {"lr": 0.2, "format": FORMAT}}, "run"),
        ({"config.json": {"format": FORMAT}}, "run"),
        ({"config.json": {"lr": 0.1, "format": FORMAT - 1}}, "run"),
        ({"config.json": {"lr": 0.1}}, "run"),
        ({"config.json": [1]}, "run"),
        ({"config.json": "{"}, "run/config.json"),
        ({"thesis.tex": ""}, "run"),
    ],
    ids=["value", "no value", "format", "no format", "no object", "damaged", "no run"],
)
def test_folder_of_something_else_is_refused_and_not_changed(tmp_path, files, name):
    fill(tmp_path / "run", files)
    before = contents(tmp_path)
    with pytest.raises(InputError) as caught, locked_run_folder(tmp_path / "run", {"lr": 0.1}):
        pytest.fail("the block must not begin")
    assert caught.value.file == str(tmp_path / name)
    assert contents(tmp_path) == before


def fill(folder, files):
    folder.mkdir()
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text)


def test_a_folder_has_one_user_at_a_time(tmp_path):
    """The lock belongs to the open file, so this process is refused like any other."""
    for _ in range(2):  # the end of the block releases it
        with (
            locked_run_folder(tmp_path / "run", {}),
            pytest.raises(InputError) as caught,
            locked_run_folder(tmp_path / "run", {}),
        ):
            pytest.fail("the block must not begin")
        assert (caught.value.option, caught.value.file) == ("--out", str(tmp_path / "run"))


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "run").touch()
    with pytest.raises(InputError) as caught, locked_run_folder(tmp_path / "run", {}):
        pytest.fail("the block must not begin")
    assert (caught.value.option, caught.value.file) == ("--out", str(tmp_path / "run"))
