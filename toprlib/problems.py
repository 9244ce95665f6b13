"""Problems and worked examples of tasks, from files, folders, the hub and a package."""

import importlib.util
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from toprlib.files import Record, first_validation_error, read_records, read_text
from toprlib.records import InputError

ROW_SUFFIXES = {".arrow", ".csv", ".json", ".jsonl", ".parquet"}
# Files that the library `datasets` writes next to its data.
FILES_ABOUT_DATA = {"dataset_dict.json", "dataset_info.json", "dataset_infos.json", "state.json"}


class QuestionRow(BaseModel, strict=True):
    """A row of a data set of questions; other columns are ignored."""

    question: str
    answer: str


def read_split(
    data: str, split: str, kind: type[Record], configs: Sequence[str] | None = None
) -> list[Record]:
    """The rows of a split: DIR/SPLIT.jsonl, DIR/SPLIT/**/*.json (one row each), or the hub's.

    kind: a pydantic model or a dataclass. configs: as of `load_rows`. Raises InputError for a
    source that cannot be read, and for the first row that does not fit `kind`.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> _ = Path(folder, "test.jsonl").write_text('{"question": "1 + 1?"}')
    >>> read_split(folder, "test", dict[str, str])
    [{'question': '1 + 1?'}]
    """
    folder = Path(data)
    if folder.is_dir():
        files = sorted((folder / split).glob("**/*.json"))
        if not files:
            return read_records(folder / f"{split}.jsonl", kind)
        rows = []
        for file in files:
            rows += read_records(file, kind, is_one_record=True)
        return rows
    if not is_hub_name(data):
        message = f"{data}: is neither a folder nor a data set on the hub (owner/name)"
        raise InputError(f"{message}; check the path", option="--data")
    adapter = TypeAdapter(kind)
    rows = []
    for line, row in enumerate(load_rows(data, split, configs), start=1):
        try:
            rows.append(adapter.validate_python(row))
        except ValidationError as error:
            message, field = first_validation_error(error)
            raise InputError(message, file=f"{data} {split}", line=line, field=field) from None
    return rows


def load_rows(
    source: str,
    split: str,
    configs: Sequence[str | None] | None = (None,),
    reader: str | None = None,
    **options: Any,
) -> Iterator[dict[str, Any]]:
    """The rows of a split as the library `datasets` reads them, from files or from the hub.

    configs: names of the parts of the data set; default: its usual one; None: all parts.
    reader, options: those of `datasets.load_dataset`. Raises InputError if it cannot be read.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp(), "rows.csv")
    >>> _ = file.write_text("question,gold\\n1 + 1?,2")
    >>> options = {"reader": "csv", "data_files": str(file), "streaming": True}
    >>> list(load_rows(str(file), "train", **options))
    [{'question': '1 + 1?', 'gold': 2}]
    """
    import datasets

    try:
        for config in configs or datasets.get_dataset_config_names(source):
            yield from datasets.load_dataset(reader or source, config, split=split, **options)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise _loading_error(source, error) from error


def list_split_files(folder: Path, split: str) -> list[Path]:
    """The files of a split of a folder as the library `datasets` finds them, in its order.

    It finds files of one type, and if some are named after splits, only these. Raises InputError if
    the folder has others.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name in ("train.jsonl", "test.jsonl"):
    ...     _ = (folder / name).write_text('{"question": "1 + 1?"}')
    >>> [file.name for file in list_split_files(folder, "train")]
    ['train.jsonl']
    """
    import datasets

    try:
        builder = datasets.load_dataset_builder(str(folder))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise _loading_error(str(folder), error) from error
    files_of_split = builder.config.data_files
    found = {Path(file).resolve() for file in chain.from_iterable(files_of_split.values())}
    for file in sorted(folder.rglob("*")):
        if _holds_rows(file.relative_to(folder)) and file.resolve() not in found:
            message = f"{file.relative_to(folder)} would be left out"
            fix = "move it: a folder may hold files of one type, and all or none named after splits"
            raise InputError(f"{message}; {fix}", file=folder)
    if split not in files_of_split:
        raise InputError(f"has no split {split}; name its file {split}.jsonl", file=folder)
    return [Path(file) for file in files_of_split[split]]


def _holds_rows(file: Path) -> bool:
    """Whether the library `datasets` would read rows from such a file alone."""
    is_hidden = any(part.startswith((".", "__")) for part in file.parts)
    return file.suffix in ROW_SUFFIXES and file.name not in FILES_ABOUT_DATA and not is_hidden


def _loading_error(source: str, error: Exception) -> InputError:
    reason = " ".join(str(error).split())[:300]
    message = f"cannot be loaded from the hub: {reason}; without a network, name a folder"
    if Path(source).exists():
        message = f"cannot be read: {reason}"
    return InputError(message, file=source)


def read_shots(
    count: int, start: str, packaged_file: str, parse: Callable[[str], list[str]]
) -> list[str]:
    """The first `count` worked examples as text.

    They are in a file of the lm-eval package, whose text `parse` turns into examples. start: what
    each of them begins with. Raises InputError without the package, or if it has fewer.

    >>> read_shots(0, start="Q:", packaged_file="", parse=str.splitlines)
    []
    """
    if count == 0:
        return []  # needs no package
    package = importlib.util.find_spec("lm_eval")
    if package is None:
        fix = "pip install --no-deps lm-eval==0.4.13"
        raise InputError(f"{count}: the lm-eval package is missing; {fix}", option="--shots")
    file = Path(package.submodule_search_locations[0]) / packaged_file
    shots = parse(read_text(file))
    if not 0 <= count <= len(shots):
        raise InputError(f"{count}: must be between 0 and {len(shots)}", option="--shots")
    if not all(shot.startswith(start) for shot in shots):
        message = f"an example does not begin with {start}; install lm-eval 0.4.13"
        raise InputError(message, option="--shots", file=file)
    return shots[:count]


def is_hub_name(name: str) -> bool:
    """Whether `name` has the form of a model or data set on the hub, owner/name.

    >>> is_hub_name("openai/gsm8k"), is_hub_name("./gsm8k"), is_hub_name("gsm8k")
    (True, False, False)
    """
    return re.fullmatch(r"\w[\w-]*/[\w.-]+", name) is not None
