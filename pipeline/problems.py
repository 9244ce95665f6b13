"""Problems and worked examples, from files, from the hub, or from an installed package: what every task begins with."""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from pipeline.models.loading import is_hub_name
from pipeline.records import InputError, read_row, read_rows, read_text

Row = TypeVar("Row", bound=BaseModel)


def read_split(data: str, split: str, kind: type[Row], configs: Sequence[str] | None = None) -> dict[str, Row]:
    """Where each row of a split is to be found -> the row, from DIR/SPLIT.jsonl, DIR/SPLIT/**/*.json or the hub.

    A .json file holds one row. configs: the parts of a data set on the hub, None for all it has. InputError names what
    cannot be read.

    >>> class Row(BaseModel):
    ...     question: str
    >>> list(read_split("tiny", "train", Row))[0]
    'tiny/train.jsonl:1'
    """
    folder = Path(data)
    if folder.is_dir():
        files = sorted((folder / split).glob("**/*.json"))
        if files:
            return {str(file): read_row(file, kind) for file in files}
        file = folder / f"{split}.jsonl"
        return {f"{file}:{line}": row for line, row in enumerate(read_rows(file, kind), start=1)}
    if not is_hub_name(data):
        raise InputError(f"--data {data}: is neither a folder nor the name of a data set on the hub (owner/name)")
    rows = _from_hub(data, split, kind, configs)
    return {f"{data} {split}:{line}": row for line, row in enumerate(rows, start=1)}


def _from_hub(name: str, split: str, kind: type[Row], configs: Sequence[str] | None) -> list[Row]:
    import datasets

    try:
        parts = configs or datasets.get_dataset_config_names(name)
        return [kind(**row) for part in parts for row in datasets.load_dataset(name, part, split=split)]
    except (OSError, ValueError) as error:  # ConnectionError is an OSError, ValidationError a ValueError
        raise InputError(f"--data {name}: cannot be loaded: {str(error).splitlines()[0]}") from error


def read_shots(
    count: int, file: Path | None, first: str, packaged: str, parse: Callable[[str], list[str]]
) -> list[str]:
    """The first `count` worked examples as text: those of `file`, or of the lm-eval package.

    first: what an example begins with; in a file, a blank line precedes it. packaged: a file of lm-eval, whose text
    `parse` turns into examples.

    >>> read_shots(0, None, "Q:", "tasks/gsm8k/gsm8k-cot.yaml", str.split)
    []
    """
    if file is not None:
        source = str(file)
        head, *rest = read_text(file).strip().split(f"\n\n{first}")
        shots = [head, *(first + shot for shot in rest)]
    elif count == 0:
        return []
    else:
        package = importlib.util.find_spec("lm_eval")
        if package is None:
            raise InputError("--shots: needs `pip install --no-deps lm-eval==0.4.13`, or a --shots-file")
        source = str(Path(package.submodule_search_locations[0]) / packaged)
        shots = parse(read_text(Path(source)))
    if not 1 <= count <= len(shots):
        raise InputError(f"--shots {count}: {source} has {len(shots)}")
    return shots[:count]
