"""Files: what is written comes back; what is wrong is named by file, line and field. The folder of a run."""

import json
import math

import pytest
from runs import contents

import train_gsm8k as gsm8k
from pipeline.records import (
    InputError,
    Sample,
    from_datasets,
    read_records,
    to_lines,
    write,
    write_file,
)
from pipeline.runtime.run_folder import Point, held_folder, read_json, resume_step


def test_samples_come_back_as_they_were_written_or_as_windows_saves_them(tmp_path):
    text = '\u2028 \x85\r\n\t\x00"\\\ufeff 𝟛'
    whole = {
        "problem_id": text,
        "token_ids": [0, 999],
        "token_logmu": [-0.1, -1e-300],
        "outcome": text,
    }
    rows = [
        Sample(prompt=text, completion=text, reward=0.1),
        Sample(prompt="", completion="", reward=-1, **whole),
    ]
    for content in (to_lines(rows), "\ufeff" + to_lines(rows).replace("\n", "\r\n")):
        write_file(tmp_path / "samples.jsonl", content)
        assert read_records(tmp_path / "samples.jsonl", Sample) == rows


GOOD = {"prompt": "Q", "completion": " A", "reward": 1}
LINE = json.dumps(GOOD)
FAULTS = [  # what a file holds, or what is changed in its second line; what is said of it
    ("", ": is empty"),
    (b"\xff\xfe", ": not UTF-8 at byte 0"),
    (f"{LINE}\n{{oops\n", ":2: Invalid JSON"),
    (f"{LINE}\n\n{LINE}\n", ":2: is a blank line"),
    ({"reward": True}, ":2: field reward: .*number, not True: write 1 and -1$"),
    ("[1, 2]\n", ":1: "),
    ('{"prompt": "Q", "completion": " A"}\n', ":1: field reward: Field required"),
    ({"token_logmu": [-1, math.nan]}, r":2: field token_logmu.1: .*finite"),
    ({"rewrad": 1}, ":2: field rewrad: "),
]


@pytest.mark.parametrize(("content", "message"), FAULTS)
def test_a_bad_file_is_named_by_file_line_and_field(tmp_path, content, message):
    file = tmp_path / "samples.jsonl"
    content = f"{LINE}\n{json.dumps(GOOD | content)}\n" if isinstance(content, dict) else content
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError, match=f"samples.jsonl{message}") as caught:
        read_records(file, Sample)
    assert "\n" not in str(caught.value)


def test_a_file_that_grows_is_read_up_to_its_last_whole_line(tmp_path):
    file = tmp_path / "samples.jsonl"
    assert read_records(file, Sample, "growing") == []
    file.write_text(f"{LINE}\n{LINE}\n{LINE[:-9]}")
    assert len(read_records(file, Sample, "growing")) == 2
    with pytest.raises(InputError, match="is a folder"):
        read_records(tmp_path, Sample)


def test_a_problem_without_an_answer_is_named(tmp_path):
    (tmp_path / "test.jsonl").write_text(
        '{"question": "1 + 1?", "answer": "two"}\n', encoding="utf-8"
    )
    for split, message in (
        ("test", "test.jsonl:1: field answer: no number after ####"),
        ("train", "no such file"),
    ):
        with pytest.raises(InputError, match=message):
            gsm8k.load_problems(str(tmp_path), split)


def test_parts_of_a_data_set_of_the_hub_are_loaded_or_all(tmp_path):
    """The hub's own layout, in a folder made here: the same call that fetches openai/gsm8k, or all subjects of MATH."""
    configs = ""
    for part in ("algebra", "main"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "test.jsonl").write_text(
            json.dumps({"question": part, "answer": "2\n#### 2"}) + "\n"
        )
        configs += (
            f"\n- config_name: {part}\n  data_files:\n  - split: test\n    path: {part}/test.jsonl"
        )
    (tmp_path / "README.md").write_text(f"---\nconfigs:{configs}\n---\n")
    for asked, found in ((["main"], ["main"]), (None, ["algebra", "main"])):
        assert [row["question"] for row in from_datasets(str(tmp_path), "test", asked)] == found


def test_a_file_that_cannot_be_finished_leaves_the_old_one(tmp_path):
    file = tmp_path / "results.json"
    write_file(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_file(file, "new \ud800")
    assert file.read_text() == "old"


def test_a_full_disk_names_the_file(tmp_path):
    for name in ("samples.jsonl.unfinished", "samples.jsonl.part-0"):
        (tmp_path / name).symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '.*samples.jsonl.unfinished'"):
        write_file(tmp_path / "samples.jsonl", "new")
    with pytest.raises(OSError, match="part-0"):
        write(tmp_path / "samples.jsonl.part-0", "ab", "new")


OTHERS = {"lr": 0.2, "format": 4}
FOLDERS = [  # the files in it; what is said of it, nothing where a run may begin there
    ({".lock": ""}, None),
    ({"config.json.unfinished": "{"}, None),
    ({"config.json": OTHERS | {"lr": 0.1}}, None),
    (
        {"config.json": OTHERS},
        r"run: holds a run with other settings \(lr = 0.2 there and 0.1 here\); choose another",
    ),
    (
        {"config.json": {"lr": 0.1}},
        "run: holds a run of another version of this project.*choose another --out",
    ),
    ({"config.json": "{"}, r"config.json: .*; choose another --out"),
    ({"thesis.tex": ""}, "run: is not empty and no run of this script; choose another --out"),
]


@pytest.mark.parametrize(("files", "message"), FOLDERS)
def test_what_is_in_a_folder_decides_whether_a_run_may_begin_there(tmp_path, files, message):
    (tmp_path / "run").mkdir()
    for name, content in files.items():
        (tmp_path / "run" / name).write_text(
            content if isinstance(content, str) else json.dumps(content)
        )
    if message is None:
        with held_folder(tmp_path / "run", {"lr": 0.1}):
            assert read_json(tmp_path / "run" / "config.json")["lr"] == 0.1
        return
    before = contents(tmp_path)
    with pytest.raises(InputError, match=message), held_folder(tmp_path / "run", {"lr": 0.1}):
        pytest.fail("it is taken")
    assert contents(tmp_path) == before


def test_a_second_process_is_kept_out_of_a_folder(tmp_path):
    """The lock is on a file that is open: a second opening is refused, in the same process or another."""
    for _ in range(2):
        with (
            held_folder(tmp_path / "run", {}),
            pytest.raises(InputError, match="run: another process is at work there"),
            held_folder(tmp_path / "run", {}),
        ):
            pytest.fail("it is taken")
    file = tmp_path / "run" / "config.json"
    with pytest.raises(InputError, match="is a file; choose another --out"), held_folder(file, {}):
        pytest.fail("it is taken")


def test_an_epoch_goes_on_from_its_last_checkpoint_and_forgets_the_steps_behind_it(tmp_path):
    log, points = tmp_path / "metrics.jsonl", [Point(4, 8, str(tmp_path / "model"))]
    (tmp_path / "checkpoint-2").mkdir()
    log.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    assert read_records(log, dict[str, int], "growing") == [{"step": 1}, {"step": 2}, {"step": 3}]
    assert (resume_step(tmp_path, points), log.read_text()) == (2, '{"step": 1}\n{"step": 2}\n')
    assert (
        resume_step(tmp_path, [Point(2, 4, "none"), *points]) == 0
    )  # the model of step 2 is to be made again
