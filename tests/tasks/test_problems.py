"""Where tasks get problems and worked examples from: folders, the hub, the lm-eval package."""

import importlib.util
import json
import sys
from unittest.mock import Mock

import datasets
import pytest
import yaml
from pydantic import BaseModel

from toprlib.problems import is_hub_name, load_rows, read_shots, read_split
from toprlib.records import InputError

GSM8K_SHOTS = "tasks/gsm8k/gsm8k-cot.yaml"


class Row(BaseModel):
    question: str
    answer: int


# ---- read_split ----------------------------------------------------------------------------------
def test_split_is_a_file_of_lines(tmp_path):
    (tmp_path / "test.jsonl").write_text('{"question": "a\u2028b", "answer": 1}\n')
    assert read_split(str(tmp_path), "test", Row) == [Row(question="a\u2028b", answer=1)]


def test_split_is_a_folder_with_a_file_for_each_row(tmp_path):
    """MATH's own layout; the rows come in the order of the files' names."""
    for number in (11, 2, 10):
        folder = tmp_path / "train" / f"subject_{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        row = {"question": str(number), "answer": number}
        (folder / f"{number}.json").write_text(json.dumps(row, indent=4))
    rows = read_split(str(tmp_path), "train", Row)
    assert [row.answer for row in rows] == [10, 2, 11]


def test_invalid_row_of_a_folder_is_named(tmp_path):
    (tmp_path / "test.jsonl").write_text(
        '{"question": "1 + 1?", "answer": 2}\n{"question": "1 + 1?", "answer": "two"}\n'
    )
    with pytest.raises(InputError) as caught:
        read_split(str(tmp_path), "test", Row)
    assert caught.value.file == str(tmp_path / "test.jsonl")
    assert (caught.value.line, caught.value.field) == (2, "answer")
    (tmp_path / "train" / "algebra").mkdir(parents=True)
    file = tmp_path / "train" / "algebra" / "1.json"
    file.write_text('{"question": "1 + 1?"}')
    with pytest.raises(InputError) as caught:
        read_split(str(tmp_path), "train", Row)
    assert (caught.value.file, caught.value.field) == (str(file), "answer")


def test_missing_split_is_named(tmp_path):
    with pytest.raises(InputError) as caught:
        read_split(str(tmp_path), "train", Row)
    assert caught.value.file == str(tmp_path / "train.jsonl")


def test_data_that_is_no_folder_and_no_hub_name(tmp_path):
    with pytest.raises(InputError) as caught:
        read_split(str(tmp_path / "missing"), "train", Row)
    assert caught.value.option == "--data"


def test_split_of_the_hub(monkeypatch):
    table = datasets.Dataset.from_list(
        [{"question": "1 + 1?", "answer": 2}, {"question": "1 + 2?", "answer": 3}]
    )
    load_dataset = Mock(return_value=table)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows = read_split("openai/gsm8k", "train", Row, configs=["main"])
    assert [row.answer for row in rows] == [2, 3]
    load_dataset.assert_called_once_with("openai/gsm8k", "main", split="train")


def test_invalid_row_of_the_hub_is_named(monkeypatch):
    table = [{"question": "1 + 1?", "answer": 2}, {"question": "1 + 2?", "answer": "three"}]
    monkeypatch.setattr(datasets, "load_dataset", Mock(return_value=table))
    with pytest.raises(InputError) as caught:
        read_split("openai/gsm8k", "train", Row, configs=["main"])
    assert "openai/gsm8k" in caught.value.file
    assert (caught.value.line, caught.value.field) == (2, "answer")


# ---- load_rows -----------------------------------------------------------------------------------
@pytest.fixture
def repository(tmp_path):
    """A folder in the hub's own layout, which `datasets` reads by the same call."""
    configs = ""
    for part in ("algebra", "main"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "test.jsonl").write_text(json.dumps({"question": part}) + "\n")
        split = f"  data_files:\n  - split: test\n    path: {part}/test.jsonl"
        configs += f"\n- config_name: {part}\n{split}"
    (tmp_path / "README.md").write_text(f"---\nconfigs:{configs}\n---\n")
    return str(tmp_path)


@pytest.mark.parametrize(
    ("configs", "expected"),
    [
        (["main"], ["main"]),
        (["main", "algebra"], ["main", "algebra"]),
        (None, ["algebra", "main"]),
    ],
)
def test_parts_of_a_data_set(repository, configs, expected):
    rows = load_rows(repository, "test", configs)
    assert [row["question"] for row in rows] == expected


@pytest.mark.parametrize(
    ("split", "configs"), [("train", ["main"]), ("test", ["geometry"]), ("test", (None,))]
)
def test_missing_split_or_part_is_one_line(repository, split, configs):
    with pytest.raises(InputError) as caught:
        list(load_rows(repository, split, configs))
    assert caught.value.file == repository
    assert "\n" not in str(caught.value)


def test_unreachable_hub_is_one_line(monkeypatch):
    unreachable = ConnectionError("Couldn't reach 'owner/name'\n(LocalEntryNotFoundError)")
    monkeypatch.setattr(datasets, "load_dataset", Mock(side_effect=unreachable))
    with pytest.raises(InputError) as caught:
        list(load_rows("owner/name", "train"))
    assert caught.value.file == "owner/name"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["gsm8k", "./gsm8k", "/data/gsm8k", "a/b/c", "owner/", "/name", "owner/na me", ""]
)
def test_what_is_no_hub_name(name):
    assert not is_hub_name(name)


@pytest.mark.parametrize("name", ["openai/gsm8k", "meta-llama/Llama-3.1-8B", "a_b/c.d-e_f"])
def test_what_is_a_hub_name(name):
    assert is_hub_name(name)


# ---- read_shots ----------------------------------------------------------------------------------
def parse_yaml(text):
    examples = yaml.safe_load(text)["fewshot_config"]["samples"]
    return [f"Q: {example['question']}" for example in examples]


def test_shots_are_the_first_ones_of_the_package():
    every = read_shots(8, "Q:", GSM8K_SHOTS, parse_yaml)
    assert len(every) == 8
    assert read_shots(3, "Q:", GSM8K_SHOTS, parse_yaml) == every[:3]


@pytest.mark.parametrize("count", [-1, 9])
def test_number_of_shots_that_the_package_does_not_have(count):
    with pytest.raises(InputError) as caught:
        read_shots(count, "Q:", GSM8K_SHOTS, parse_yaml)
    assert caught.value.option == "--shots"


def test_shot_that_begins_otherwise():
    with pytest.raises(InputError) as caught:
        read_shots(2, "Problem:", GSM8K_SHOTS, parse_yaml)
    assert caught.value.option == "--shots"
    assert caught.value.file.endswith(GSM8K_SHOTS)


def test_shots_without_the_package(monkeypatch):
    monkeypatch.delitem(sys.modules, "lm_eval", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", Mock(return_value=None))
    with pytest.raises(InputError) as caught:
        read_shots(8, "Q:", GSM8K_SHOTS, parse_yaml)
    assert caught.value.option == "--shots"
    assert read_shots(0, "Q:", GSM8K_SHOTS, parse_yaml) == []
