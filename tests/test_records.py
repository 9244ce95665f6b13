"""Files: what is written comes back; what is wrong is named by file, line and field."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import train_gsm8k as gsm8k
from pipeline.records import InputError, Sample, read_rows, to_lines, write_file
from pipeline.runtime.run_folder import held_folder, read_json

texts = st.text(st.characters(exclude_categories=["Cs"]))
samples = st.builds(
    Sample,
    problem_id=st.none() | texts,
    prompt=texts,
    completion=texts,
    token_ids=st.lists(st.integers(0, 999), min_size=1),
    token_logmu=st.none() | st.lists(st.floats(-100, 0)),
    finish_reason=st.sampled_from(["stop", "length"]),
    reward=st.floats(-1, 1),
    outcome=st.none() | st.sampled_from(["correct", "incorrect", "invalid"]),
)


@given(rows=st.lists(samples, min_size=1, max_size=4))
def test_samples_come_back_as_they_were_written(tmp_path_factory, rows):
    file = tmp_path_factory.mktemp("rows") / "samples.jsonl"
    write_file(file, to_lines(rows))
    assert read_rows(file, Sample) == rows


GOOD = '{"prompt": "Q", "completion": " A", "reward": 1}'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"samples.jsonl: is empty"),
        (b"\n\n", r"samples.jsonl: is empty"),
        (b"\xff\xfe", r"samples.jsonl: not UTF-8 at byte 0"),
        (f"{GOOD}\n{{oops\n".encode(), r"samples.jsonl:2: Invalid JSON"),
        (f"{GOOD}\n\n{GOOD}\n".encode(), r"samples.jsonl:2: Invalid JSON"),
        (b"[1, 2]\n", r"samples.jsonl:1: "),
        (b'{"prompt": "Q", "completion": " A"}\n', r"samples.jsonl:1: field reward: Field required"),
        (b'{"prompt": "Q", "completion": " A", "reward": NaN}\n', r"samples.jsonl:1: field reward: .*finite"),
        (b'{"prompt": "Q", "completion": " A", "reward": "1"}\n', r"samples.jsonl:1: field reward: .*number"),
        (b'{"prompt": "Q", "completion": "A", "token_ids": [], "reward": 1}\n', r"samples.jsonl:1: field token_ids: "),
        (
            b'{"prompt": "Q", "completion": "A", "reward": 1, "token_logmu": [-1, NaN]}\n',
            r"samples.jsonl:1: field token_logmu.1: ",
        ),
        (b'{"prompt": "Q", "completion": "A", "rewrad": 1, "reward": 1}\n', r"samples.jsonl:1: field rewrad: "),
    ],
)
def test_a_bad_file_is_named_by_file_line_and_field(tmp_path, content, message):
    file = tmp_path / "samples.jsonl"
    file.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        read_rows(file, Sample)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        read_rows(tmp_path / "nothing.jsonl", Sample)
    with pytest.raises(InputError, match="is a folder"):
        read_rows(tmp_path, Sample)


def test_a_byte_order_mark_windows_line_ends_and_u2028_are_read(tmp_path):
    file = tmp_path / "samples.jsonl"
    text = GOOD.replace(" A", " A\u2028B")
    file.write_bytes(f"\ufeff{text}\r\n{text}\r\n".encode())
    assert [row.completion for row in read_rows(file, Sample)] == [" A\u2028B"] * 2


def test_a_problem_without_an_answer_is_named(tmp_path):
    (tmp_path / "test.jsonl").write_text('{"question": "1 + 1?", "answer": "two"}\n', encoding="utf-8")
    with pytest.raises(InputError, match=r"test.jsonl:1: field answer: no number after ####"):
        gsm8k.load_problems(str(tmp_path), "test")
    with pytest.raises(InputError, match=r"train.jsonl: no such file"):
        gsm8k.load_problems(str(tmp_path), "train")
    with pytest.raises(InputError, match="neither a folder nor"):
        gsm8k.load_problems("nowhere", "test")


def test_a_file_that_cannot_be_finished_leaves_the_old_one(tmp_path):
    file = tmp_path / "results.json"
    write_file(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_file(file, "new \ud800")
    assert file.read_text() == "old"


def refused(path, config, message):
    with pytest.raises(InputError, match=message), held_folder(path, config):
        pytest.fail("it is taken")


def test_a_run_folder_takes_the_same_settings_again_and_refuses_others(tmp_path):
    out = tmp_path / "run"
    with held_folder(out, {"lr": 0.1, "seed": 0}):
        before = (out / "config.json").read_text()
    with held_folder(out, {"lr": 0.1, "seed": 0}):
        pass
    refused(out, {"lr": 0.2, "seed": 0}, r"run: holds a run with other settings \(lr = 0.1 there and 0.2 here\)")
    assert (out / "config.json").read_text() == before


def test_a_run_folder_of_a_former_version_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"seed": 0}))
    refused(tmp_path, {"seed": 0}, "another version of this project.*choose another --out")


def test_a_second_process_is_kept_out_of_a_folder(tmp_path):
    """The lock is on a file that is open: a second opening is refused, in the same process or another."""
    with held_folder(tmp_path / "run", {"seed": 0}):
        refused(tmp_path / "run", {"seed": 0}, "run: another process is at work there")
    with held_folder(tmp_path / "run", {"seed": 0}):
        pass


@pytest.mark.parametrize("name", [".lock", "config.json.unfinished"])
def test_a_run_that_was_ended_as_it_began_can_begin_again(tmp_path, name):
    (tmp_path / name).write_text("{")
    with held_folder(tmp_path, {"seed": 0}):
        assert (tmp_path / "config.json").exists()


def test_a_folder_with_something_else_in_it_is_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    refused(tmp_path, {}, "not empty and no run")
    refused(tmp_path / "thesis.tex", {}, "is a file")
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_results_that_were_damaged_are_named(tmp_path):
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(InputError, match=r"results.json: .*remove it"):
        read_json(tmp_path / "results.json")
