"""Samples that a user brings: file formats, columns, messages, and what is said of wrong ones."""

import gc
import hashlib
import json
import math
from unittest.mock import Mock

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from toprlib.external_samples import fingerprint, parse_columns, read_samples
from toprlib.records import InputError, Sample

ROWS = [
    {
        "prompt": "Q: 1 + 1?\nA:",
        "completion": " The answer is 2.",
        "reward": 1.0,
        "finish_reason": "stop",
    },
    {
        "prompt": "Q: 1 + 1?\nA:",
        "completion": ' "3", \u2028 it is.',
        "reward": -0.5,
        "finish_reason": "length",
    },
]
SAMPLES = [Sample(**row) for row in ROWS]


# ---- formats -------------------------------------------------------------------------------------
def write_lines(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_parquet(file, rows):
    pd.DataFrame(rows).to_parquet(file)


def write_csv(file, rows):
    pd.DataFrame(rows).to_csv(file, index=False)


def write_saved_dataset(folder, rows):
    datasets.Dataset.from_list(rows).save_to_disk(folder)


def write_arrow(file, rows):
    folder = file.with_suffix("")
    write_saved_dataset(folder, rows)
    [written] = folder.glob("*.arrow")
    written.rename(file)


def write_saved_splits(folder, rows):
    others = [row | {"completion": "of another split"} for row in rows]
    splits = {"train": rows, "test": others}
    tables = {name: datasets.Dataset.from_list(split) for name, split in splits.items()}
    datasets.DatasetDict(tables).save_to_disk(folder)


def write_folder(folder, rows):
    """A file for each row, as TRL writes one for each step."""
    folder.mkdir()
    for number, row in enumerate(rows):
        write_parquet(folder / f"completions_{number:05d}.parquet", [row])


WRITERS = {
    "samples.jsonl": write_lines,
    "samples.json": write_lines,
    "samples.txt": write_lines,
    "samples.parquet": write_parquet,
    "samples.csv": write_csv,
    "samples.arrow": write_arrow,
    "saved": write_saved_dataset,
    "splits": write_saved_splits,
    "folder": write_folder,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_samples(tmp_path, capsys, name):
    source = tmp_path / name
    WRITERS[name](source, ROWS)
    capsys.readouterr()
    assert read_samples(source) == SAMPLES
    assert capsys.readouterr().out == ""  # no column is renamed or ignored


@pytest.mark.parametrize("name", ["samples.jsonl", "samples.parquet"])
def test_lists_and_numbers_keep_their_types(tmp_path, name):
    # A rounded log-probability may be a little above 0.
    row = {**ROWS[0], "reward": 1, "token_ids": [5, 6], "token_logmu": [-0.5, 1e-6]}
    WRITERS[name](tmp_path / name, [row])
    assert read_samples(tmp_path / name) == [Sample(**row)]


def test_parquet_file_that_begins_without_rows(tmp_path):
    table = pa.Table.from_pylist(ROWS)
    with pq.ParquetWriter(tmp_path / "own.parquet", table.schema) as writer:
        writer.write_table(table[:0])
        writer.write_table(table)
    assert read_samples(tmp_path / "own.parquet") == SAMPLES


def test_files_of_a_folder_may_differ_in_types(tmp_path):
    """Whole rewards in the first file, fractions in the second one."""
    write_lines(tmp_path / "0.jsonl", [ROWS[0] | {"reward": 1}])
    write_lines(tmp_path / "1.jsonl", [ROWS[1]])
    assert read_samples(tmp_path) == SAMPLES


@pytest.mark.parametrize(
    ("name", "is_left_out"),
    [("b.csv", True), ("deep/b.parquet", True), (".cache/b.csv", False), ("notes.txt", False)],
)
def test_folder_of_which_a_part_would_be_left_out_is_refused(tmp_path, name, is_left_out):
    write_lines(tmp_path / "a.jsonl", ROWS)
    write_lines(tmp_path / "c.json", ROWS[:1])
    other = tmp_path / name
    other.parent.mkdir(exist_ok=True)
    WRITERS[f"samples{other.suffix}"](other, ROWS)
    if is_left_out:
        with pytest.raises(InputError) as caught:
            read_samples(tmp_path)
        assert caught.value.file == str(tmp_path)
    else:
        assert read_samples(tmp_path) == [*SAMPLES, SAMPLES[0]]


def test_of_a_folder_with_splits_train_is_read(tmp_path):
    write_csv(tmp_path / "train.csv", ROWS)
    write_csv(tmp_path / "test.csv", ROWS[:1])
    assert read_samples(tmp_path) == SAMPLES
    write_csv(tmp_path / "more.csv", ROWS)  # of no split
    with pytest.raises(InputError) as caught:
        read_samples(tmp_path)
    assert caught.value.file == str(tmp_path)


def test_samples_that_do_not_fit_into_memory_are_refused_while_they_are_read(tmp_path, monkeypatch):
    write_parquet(tmp_path / "short.parquet", ROWS[:1] * 1000)
    write_parquet(tmp_path / "long.parquet", [ROWS[0] | {"completion": "A" * 1000}] * 1000)

    def rows_within(free_memory, name="short.parquet"):
        with pytest.raises(InputError) as caught:
            read_samples(tmp_path / name, free_memory=free_memory)
        assert caught.value.file == str(tmp_path / name)
        return caught.value.line - 1

    few = rows_within(1e6)
    assert rows_within(3e6) == pytest.approx(3 * few, abs=3)
    assert rows_within(1e6, "long.parquet") < few
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert rows_within(2e6) == few
    monkeypatch.undo()
    assert len(read_samples(tmp_path / "short.parquet", free_memory=1e9)) == 1000


def test_hub_name_reads_split_train(monkeypatch):
    table = datasets.Dataset.from_list(ROWS)
    load_dataset = Mock(return_value=table)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read_samples("owner/name") == SAMPLES
    assert load_dataset.call_args.args[0] == "owner/name"
    assert load_dataset.call_args.kwargs["split"] == "train"


def test_unreachable_hub_is_one_line(monkeypatch):
    unreachable = ConnectionError("Couldn't reach 'owner/name'\n(LocalEntryNotFoundError)")
    monkeypatch.setattr(datasets, "load_dataset", Mock(side_effect=unreachable))
    with pytest.raises(InputError) as caught:
        read_samples("owner/name")
    assert caught.value.file == "owner/name"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", WRITERS)
def test_fingerprint_of_a_file_is_of_its_bytes_and_otherwise_of_the_samples(tmp_path, name):
    source = tmp_path / name
    WRITERS[name](source, ROWS)
    actual = fingerprint(source, SAMPLES)
    if source.is_file():
        assert actual == hashlib.sha256(source.read_bytes()).hexdigest()
    else:
        assert actual == fingerprint("owner/name", SAMPLES)
        assert actual != fingerprint(source, SAMPLES[::-1])


# ---- columns -------------------------------------------------------------------------------------
def with_columns(names, **others):
    """The rows with other names for prompt, completion and reward, and with more columns."""
    rows = []
    for row in ROWS:
        values = [row["prompt"], row["completion"], row["reward"]]
        rows.append(dict(zip(names, values, strict=True)) | others)
    return rows


def trl_rows():
    """Rows as TRL logs them, with messages and two rewards, whose sum is the reward of ROWS."""
    rows = []
    for row in ROWS:
        rows.append(
            {
                "step": 7,
                "prompt": [{"role": "user", "content": row["prompt"]}],
                "completion": [{"role": "assistant", "content": row["completion"]}],
                "accuracy": row["reward"] - 0.25,
                "format": 0.25,
                "advantage": 1.0,
            }
        )
    return rows


TRAINERS = {  # rows, --columns, names of the ignored columns; docs/own_task.md has the same options
    "trl": (trl_rows(), ["reward=accuracy+format"], ["step", "advantage"]),
    "verl": (
        with_columns(["input", "output", "score"], gts="2", step=1),
        ["prompt=input", "completion=output", "reward=score"],
        ["gts", "step"],
    ),
    "openrlhf": (
        with_columns(["input", "output", "reward"]),
        ["prompt=input", "completion=output"],
        [],
    ),
    "plus in a name": (
        with_columns(["question", "answer", "grade 1+2"], prompt="?", grade=0.0),
        ["prompt=question", "completion=answer", "reward=grade 1+2"],
        ["prompt", "grade"],
    ),
    "columns of one row only": (
        [ROWS[0] | {"id": 3}, ROWS[1] | {"two\nlines": "second"}],
        [],
        ["id", "two lines"],
    ),
}


def last_content(messages):
    return messages[-1]["content"]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_columns_are_mapped_and_one_line_names_them(tmp_path, capsys, trainer):
    rows, columns, ignored = TRAINERS[trainer]
    file = tmp_path / "own.jsonl"
    write_lines(file, rows)
    samples = read_samples(file, columns, ask=last_content)
    for sample, expected in zip(samples, ROWS, strict=True):
        assert sample.prompt == expected["prompt"]
        assert sample.completion == expected["completion"]
        assert sample.reward == expected["reward"]
    [line] = capsys.readouterr().out.splitlines()
    for name in [str(file), *ignored, *(column.partition("=")[2] for column in columns)]:
        assert name in line


def test_columns_are_named_on_rank_zero_only(tmp_path, capsys, monkeypatch):
    write_lines(tmp_path / "own.jsonl", [ROWS[0] | {"id": 3}])
    monkeypatch.setenv("RANK", "1")
    read_samples(tmp_path / "own.jsonl")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("columns", "field"),
    [
        (["reward"], None),
        (["reward="], None),
        (["rewrad=score"], None),
        (["=score"], None),
        (["reward=a", "reward=b"], "reward"),
    ],
)
def test_columns_that_are_no_mapping(columns, field):
    with pytest.raises(InputError) as caught:
        parse_columns(columns)
    assert caught.value.option == "--columns"
    assert caught.value.field == field


# ---- messages ------------------------------------------------------------------------------------
def test_messages_reach_the_chat_template_without_empty_keys(tmp_path):
    """A table gives each message the keys of all: None where it has none."""
    system = {"role": "system", "content": "Be brief.", "name": None}
    user = {"role": "user", "content": "1 + 1?", "name": "Ada"}
    row = {"prompt": [system, user], "completion": " 2", "reward": 1.0}
    write_parquet(tmp_path / "chat.parquet", [row])
    ask = Mock(return_value="the prompt")
    [sample] = read_samples(tmp_path / "chat.parquet", ask=ask)
    assert sample.prompt == "the prompt"
    ask.assert_called_once_with([{"role": "system", "content": "Be brief."}, user])


def test_empty_fields_of_a_completion_s_message_are_ignored(tmp_path):
    empty = {"tool_calls": [], "refusal": None, "reasoning_content": ""}
    write_lines(tmp_path / "own.jsonl", changed_second_row(completion=[ASSISTANT | empty]))
    assert read_samples(tmp_path / "own.jsonl")[1].completion == ASSISTANT["content"]


def test_prompt_without_messages_does_not_reach_the_chat_template(tmp_path):
    write_lines(tmp_path / "own.jsonl", changed_second_row(prompt=[]))
    ask = Mock()
    with pytest.raises(InputError) as caught:
        read_samples(tmp_path / "own.jsonl", ask=ask)
    assert (caught.value.line, caught.value.field) == (2, "prompt")
    ask.assert_not_called()


def test_error_of_the_chat_template_names_the_row(tmp_path):
    ask = Mock(side_effect=InputError("the template fails", option="--chat"))
    write_lines(tmp_path / "own.jsonl", changed_second_row(prompt=[USER]))
    with pytest.raises(InputError) as caught:
        read_samples(tmp_path / "own.jsonl", ask=ask)
    assert (caught.value.line, caught.value.field) == (2, "prompt")
    assert caught.value.file == str(tmp_path / "own.jsonl")


# ---- invalid input -------------------------------------------------------------------------------
def changed_second_row(**changes):
    return [ROWS[0], ROWS[1] | changes]


def changed_rows(**changes):
    """Every row changed: a column of a table has one type."""
    return [row | changes for row in ROWS]


ASSISTANT = {"role": "assistant", "content": "2"}
USER = {"role": "user", "content": "1 + 1?"}
INVALID = {  # rows, --columns, line, field, option
    "no reward": (changed_second_row(reward=None), [], 2, "reward", None),
    "NaN reward": (changed_second_row(reward=math.nan), [], 2, "reward", None),
    "missing reward": ([ROWS[0], {"prompt": "Q", "completion": "A"}], [], 2, "reward", None),
    "no prompt column": ([{"text": "Q"}], [], 1, "prompt", None),
    "no completion": (changed_second_row(completion=None), [], 2, "completion", None),
    "no such column": (ROWS, ["reward=score"], 1, "reward", "--columns"),
    "no such column for an optional field": (ROWS, ["outcome=o"], 1, "outcome", "--columns"),
    "sum without a column": (ROWS, ["reward=reward+format"], 1, "reward", "--columns"),
    "sum of text": (changed_rows(a="x", b=1.0), ["reward=a+b"], 1, "reward", None),
    "sum of booleans": (changed_rows(a=True, b=1.0), ["reward=a+b"], 1, "reward", None),
    "sum too large": (changed_rows(a=1e308, b=1e308), ["reward=a+b"], 1, "reward", None),
    "plus in a prompt's column": (changed_rows(a="x"), ["prompt=a+a"], 1, "prompt", "--columns"),
    "boolean reward": (changed_rows(reward=True), [], 1, "reward", None),
    "reward as text": (changed_rows(reward="1"), [], 1, "reward", None),
    "messages without a template": (trl_rows(), ["reward=format"], 1, "prompt", None),
    "message without content": (changed_rows(prompt=[{"role": "user"}]), [], 1, "prompt", None),
    "list of numbers": (changed_rows(prompt=[1, 2]), [], 1, "prompt", None),
    "no messages": (changed_rows(completion=[]), [], 1, "completion", None),
    "completion of the user": (changed_rows(completion=[USER]), [], 1, "completion", None),
    "two turns": (changed_rows(completion=[ASSISTANT, ASSISTANT]), [], 1, "completion", None),
    "message with more than its text": (
        changed_rows(completion=[ASSISTANT | {"reasoning_content": "1 + 1"}]),
        [],
        1,
        "completion",
        None,
    ),
    "several completions": (changed_rows(completion=["2", "3"]), [], 1, "completion", None),
    "pair": ([{"prompt": "Q", "chosen": "2", "rejected": "3"}], [], 1, "completion", None),
    "pair with its columns": (
        [{"prompt": "Q", "chosen": "2", "rejected": "3"}],
        ["completion=chosen"],
        1,
        "reward",
        None,
    ),
    "probabilities as log mu": (
        changed_rows(token_ids=[5, 6], token_logmu=[-0.5, 0.9]),
        [],
        1,
        "token_logmu",
        None,
    ),
    "prompt is a number": (changed_rows(prompt=3), [], 1, "prompt", None),
    "unknown reason": (changed_rows(finish_reason="eos"), [], 1, "finish_reason", None),
}


@pytest.mark.parametrize("name", ["samples.jsonl", "samples.parquet"])
@pytest.mark.parametrize("case", INVALID)
def test_invalid_row_is_named_by_file_line_and_field(tmp_path, case, name):
    rows, columns, line, field, option = INVALID[case]
    WRITERS[name](tmp_path / name, rows)
    with pytest.raises(InputError) as caught:
        read_samples(tmp_path / name, columns)
    assert caught.value.file == str(tmp_path / name)
    assert (caught.value.line, caught.value.field) == (line, field)
    assert caught.value.option == option
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize(("completions", "line"), [("A ", 2), ("A NA", 2), ("1 2", 1)])
def test_csv_file_whose_completions_are_no_text(tmp_path, completions, line):
    """Nothing, NA and digits are read as other values."""
    rows = [f"Q,{completion},1\n" for completion in completions.split(" ")]
    (tmp_path / "own.csv").write_text("prompt,completion,reward\n" + "".join(rows))
    with pytest.raises(InputError) as caught:
        read_samples(tmp_path / "own.csv")
    assert (caught.value.line, caught.value.field) == (line, "completion")
    del caught
    gc.collect()  # here: `datasets` leaves the file open, which warns when the reader is collected


def test_lines_of_a_folder_are_counted_through_its_files(tmp_path):
    folder = tmp_path / "two"
    folder.mkdir()
    write_lines(folder / "a.jsonl", ROWS)
    write_lines(folder / "b.jsonl", changed_second_row(completion=None))
    with pytest.raises(InputError) as caught:
        read_samples(folder)
    assert caught.value.file == str(folder)
    assert (caught.value.line, caught.value.field) == (4, "completion")


def make_unreadable(folder):
    (folder / "bad.parquet").write_text("no")
    (folder / "bad.csv").write_text('a,b\n"1,2\n3')
    (folder / "bad.jsonl").write_text("[1]\n")
    (folder / "blank.jsonl").write_text("\n")
    pd.DataFrame({"prompt": []}).to_parquet(folder / "empty.parquet")
    (folder / "empty").mkdir()
    (folder / "text").mkdir()
    (folder / "text" / "a.jsonl").write_text("oops\n")


@pytest.mark.parametrize(
    "name",
    [
        "bad.parquet",
        "bad.csv",
        "bad.jsonl",
        "blank.jsonl",
        "empty.parquet",
        "empty",
        "text",
        "missing.parquet",
        "missing.jsonl",
        "missing",
    ],
)
def test_source_without_samples_is_named_in_one_line(tmp_path, name):
    make_unreadable(tmp_path)
    with pytest.raises(InputError) as caught:
        read_samples(tmp_path / name)
    file = "text/a.jsonl" if name == "text" else name  # the file of the folder
    assert caught.value.file == str(tmp_path / file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["folder/missing.jsonl", "folder/missing.parquet"])
def test_file_name_with_one_folder_is_not_looked_up_on_the_hub(monkeypatch, name):
    load_dataset = Mock()
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(InputError):
        read_samples(name)
    load_dataset.assert_not_called()
