"""Files of a run: what is written is read back, errors name their place, a folder has one user."""

import json
import math

import pandas as pd
import pytest
from helpers import checksums
from hypothesis import given
from hypothesis import strategies as st

from toprlib.files import (
    append_to_file,
    atomic_folder,
    exists,
    load_rows,
    read_records,
    remove,
    run_folder,
    to_lines,
    write_file,
)
from toprlib.records import InputError, Sample

GOOD = {"prompt": "Q", "completion": " A", "reward": 1.0}
LINE = json.dumps(GOOD)


# ---- records -------------------------------------------------------------------------------------
texts = st.text(st.characters(codec="utf-8")) | st.just('\u2028 \x85\r\n\t\x00"\\\ufeff 𝟛')
numbers = st.floats(allow_nan=False, allow_infinity=False)
samples = st.builds(
    Sample,
    problem_id=st.none() | texts,
    prompt=texts,
    completion=texts,
    token_ids=st.none() | st.lists(st.integers(0, 2**31), min_size=1),
    token_logmu=st.none() | st.lists(st.floats(max_value=1e-3, allow_infinity=False)),
    token_logmu_engine=st.none() | st.lists(numbers),
    finish_reason=st.sampled_from(["stop", "length"]),
    reward=numbers,
    outcome=st.none() | texts,
)


windows = st.sampled_from([("\n", ""), ("\r\n", "\ufeff")])  # with a byte order mark


@given(st.lists(samples, min_size=1, max_size=3), windows)
def test_samples_are_read_as_they_were_written(tmp_path_factory, written, windows):
    file = tmp_path_factory.getbasetemp() / "written.jsonl"
    newline, mark = windows
    file.write_bytes(f"{mark}{to_lines(written)}".replace("\n", newline).encode())
    assert read_records(file, Sample) == written


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b"\xff\xfe", ":1:"),
        (f"{LINE}\n{{oops\n".encode(), ":2:"),
        (f"{LINE}\n\n{LINE}\n".encode(), ":2:"),
        (b"", ":1:"),
        (b"[1, 2]\n", ":1:"),
        (b'{"prompt": "Q", "completion": "A"}\n', ":1: reward"),
        ({"reward": True}, ":2: reward"),
        ({"reward": "1"}, ":2: reward"),
        ({"reward": math.inf}, ":2: reward"),
        ({"reward": None}, ":2: reward"),
        ({"token_logmu": [-1, math.nan]}, ":2: token_logmu.1"),
        ({"token_logmu": [0.5]}, ":2: token_logmu.0"),  # a probability above 1
        ({"token_ids": []}, ":2: token_ids"),
        ({"finish_reason": "eos"}, ":2: finish_reason"),
        ({"rewrad": 1}, ":2: rewrad"),
    ],
    ids=str,
)
def test_an_invalid_record_is_named_by_line_and_field(tmp_path, content, place):
    """content: of a file, or changes of its second line."""
    if isinstance(content, dict):
        content = f"{LINE}\n{json.dumps(GOOD | content)}\n".encode()
    file = tmp_path / "samples.jsonl"
    file.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_records(file, Sample)
    assert str(caught.value).startswith(f"{file}{place}")


def test_partial_records_end_with_the_last_complete_line(tmp_path):
    file = tmp_path / "part" / "samples.jsonl.part-0"
    append_to_file(file, f"{LINE}\n")
    append_to_file(file, f"{LINE}\n")
    with file.open("ab") as opened:
        opened.write('{"prompt": "𝟛'.encode()[:-1])  # a killed process may stop in a character
    assert read_records(file, Sample, is_partial=True) == [Sample(**GOOD)] * 2
    file.write_text(f"{LINE}\n{LINE[:-9]}\n")
    with pytest.raises(InputError, match=":2:"):
        read_records(file, Sample, is_partial=True)


def write_split(folder, ending):
    """Rows 0 and 1 as a training split, 2 as a test split, with this ending of their files."""
    rows = [GOOD | {"completion": str(number)} for number in range(3)]
    for split, of_split in {"train": rows[:2], "test": rows[2:]}.items():
        file = folder / f"{split}{ending}"
        if ending == ".jsonl":
            file.write_text("".join(json.dumps(row) + "\n" for row in of_split))
        else:
            pd.DataFrame(of_split).to_parquet(file)


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("source", ["folder", "file"])
@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_rows_of_a_split_are_those_of_its_file(tmp_path, ending, source, split):
    place = tmp_path / "data[1]"
    place.mkdir()
    write_split(place, ending)
    if source == "file":
        place = place / f"{split}{ending}"
    rows = load_rows(str(place), split, Sample)
    assert [row.completion for row in rows] == {"train": ["0", "1"], "test": ["2"]}[split]
    with pytest.raises(InputError, match=":1: prompt"):
        load_rows(str(place), split, dict[str, float])


@pytest.mark.parametrize("content", [b"", b"PAR1 and what is no Parquet"])
def test_a_file_that_is_no_parquet_is_refused(tmp_path, content):
    (tmp_path / "own.parquet").write_bytes(content)
    with pytest.raises(InputError, match=r"own\.parquet"):
        load_rows(str(tmp_path / "own.parquet"), "train", Sample)


# ---- atomic writes -------------------------------------------------------------------------------
def test_reader_sees_the_whole_old_file_or_the_whole_new_one(tmp_path):
    file = tmp_path / "new" / "results.json"
    write_file(file, "old")
    with file.open() as reader:
        write_file(file, "new")
        assert reader.read() == "old"
    with pytest.raises(UnicodeEncodeError):
        write_file(file, "newest \ud800")
    assert file.read_text() == "new"


def write_half(folder):
    with atomic_folder(folder) as unfinished:
        unfinished.mkdir(parents=True)
        (unfinished / "half").touch()
        raise ZeroDivisionError


def test_a_folder_gets_its_name_when_it_is_complete(tmp_path):
    folder = tmp_path / "run" / "model"
    for _ in range(2):  # the second call finds what the first has left
        with pytest.raises(ZeroDivisionError):
            write_half(folder)
        assert not exists(folder)
    with atomic_folder(folder) as unfinished:
        unfinished.mkdir()
        (unfinished / "weights").touch()
        assert not exists(folder)
    assert [path.name for path in folder.iterdir()] == ["weights"]
    assert list(folder.parent.iterdir()) == [folder]
    remove(folder, tmp_path / "missing")
    assert not exists(folder)


# ---- the folder of a run -------------------------------------------------------------------------
@pytest.mark.parametrize(
    "files",
    [{}, {".lock": ""}, {"config.json.unfinished": "{"}, {"config.json": '{"lr": 0.1}'}],
    ids=str,
)
def test_a_run_may_use_a_folder_of_the_same_run(tmp_path, files):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with run_folder(tmp_path, {"lr": 0.1}):
        assert json.loads((tmp_path / "config.json").read_text()) == {"lr": 0.1}


@pytest.mark.parametrize("stored", [{"lr": 0.2}, {}, {"lr": None}, {"lr": "0.1"}], ids=str)
def test_the_folder_of_another_run_is_refused_and_not_changed(tmp_path, stored):
    (tmp_path / "config.json").write_text(json.dumps({"seed": 1} | stored))
    before = checksums(tmp_path)
    with pytest.raises(InputError, match=r"--out.* lr "), run_folder(tmp_path, {"lr": 0.1}):
        pytest.fail("the block must not begin")
    after = checksums(tmp_path)
    del after[".lock"]
    assert after == before


def test_a_folder_has_one_user_at_a_time(tmp_path):
    """The lock belongs to the open file, so this process is refused like any other."""
    for _ in range(2):  # the end of the block releases it
        with (
            run_folder(tmp_path / "run", {}),
            pytest.raises(InputError, match="--out"),
            run_folder(tmp_path / "run", {}),
        ):
            pytest.fail("the block must not begin")
