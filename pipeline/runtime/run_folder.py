"""The folder of a run: what is done, what an interrupted run goes on from, and what is published.

A stage leaves one file, which appears under its name when it is whole and which no later stage changes. A stage whose
file is there is not run again, so the same command, given after whatever ended a run, goes on where it was. SHA256SUMS
beside the files has their checksums, in the form that `sha256sum -c SHA256SUMS` checks; a damaged file is never read.
Models are ordinary `transformers` folders. A checkpoint has a file of each rank: its shards of weights and optimiser.

Every rank calls `stage`, `held_folder`, `remove`, `resume_step` and what saves or loads; rank zero looks and writes.
"""

import fcntl
import hashlib
import json
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.records import InputError, Record, read_rows, to_lines, write_file
from pipeline.runtime.processes import device, on_all_ranks, on_rank_zero, rank, ranks

if TYPE_CHECKING:
    import torch

    from pipeline.models.language_model import LanguageModel

FORMAT = 3  # of a run's files; 1 had log mu in samples.jsonl, 2 more options in config.json
BEFORE_CONFIG = (".lock", "config.json.unfinished")  # what a run that ended before it wrote config.json has left
SUMS = "SHA256SUMS"


def stage(file: Path, make: Callable[[], Iterable[Any]]) -> None:
    """Write the rows that `make` returns on rank zero to `file`, and note its checksum, unless the file is there.

    Crash-safe: a file that is there always matches a checksum that is noted.
    """
    if on_rank_zero(file.exists):
        return
    rows = make()

    def write() -> None:
        content, sums = to_lines(rows).encode(), file.with_name(SUMS)
        line = f"{hashlib.sha256(content).hexdigest()}  {file.name}\n"
        known = sums.read_text(encoding="utf-8").splitlines(keepends=True) if sums.exists() else []
        write_file(sums, "".join([*known, line]))  # the file as it is, and as it will be
        write_file(file, content)
        kept = [old for old in known if old[66:] != line[66:]]
        write_file(sums, "".join(sorted([*kept, line], key=lambda line: line[66:])))  # whatever the order of the stages

    on_rank_zero(write)


def remove(*paths: Path) -> None:
    """Remove files, and folders with all that is in them; those that are not there are left out."""
    on_rank_zero(lambda: [shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True) for path in paths])


@contextmanager
def held_folder(path: Path, config: dict[str, Any]) -> Iterator[None]:
    """Make the folder of a run, and keep other processes out until the block ends: InputError if one is at work there.

    config: the run's settings, for config.json. InputError, with nothing changed, where the folder holds anything but a
    run with these settings. The system releases the lock when the process ends, however it ends.
    """
    with ExitStack() as stack:

        def hold() -> None:
            for is_locked in (False, True):  # another process may have written config.json since the first look
                if path.exists() and not path.is_dir():
                    raise InputError(f"{path}: is a file; choose another --out")
                if (path / "config.json").exists():
                    refuse_others(path, config, "holds a run with other settings", "choose another --out")
                elif path.is_dir() and any(file.name not in BEFORE_CONFIG for file in path.iterdir()):
                    raise InputError(f"{path}: is not empty and no run of this script; choose another --out")
                if not is_locked:
                    path.mkdir(parents=True, exist_ok=True)
                    lock = stack.enter_context((path / ".lock").open("w"))
                    try:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        raise InputError(f"{path}: another process is at work there; let it end") from None
                    except OSError as error:
                        fault = f"its file system takes no locks ({error.strerror}), which keep two runs apart"
                        raise InputError(f"{path}: {fault}: choose an --out on one that does") from None
            if not (path / "config.json").exists():
                write_file(path / "config.json", json.dumps(config | {"format": FORMAT}, indent=2, default=str) + "\n")

        on_rank_zero(hold)
        if ranks() > 1:
            on_all_ranks(lambda: _check_shared(path))
        yield


def _check_shared(path: Path) -> None:
    """InputError where this rank does not see what rank zero has written into the run's folder."""
    if not (path / "config.json").exists():
        raise InputError(f"{path}: {socket.gethostname()} sees another one; choose an --out that all nodes share")


def refuse_others(folder: Path, config: dict[str, Any], fault: str, advice: str) -> None:
    """InputError unless folder/config.json has the settings of `config` and the present form of files."""
    known, config = read_json(folder / "config.json", advice), json.loads(json.dumps(config, default=str))
    if known.get("format") != FORMAT:
        raise InputError(f"{folder}: holds a run of another version of this project, with other files; {advice}")
    differing = [name for name in config if known.get(name) != config[name]]
    if differing:
        told = ", ".join(f"{name} = {known.get(name)!r} there and {config[name]!r} here" for name in differing)
        raise InputError(f"{folder}: {fault} ({told}); {advice}")


def read_json(file: Path, advice: str = "remove it to make it anew") -> Any:
    """The content of a JSON file; InputError, with the advice, where it cannot be read.

    >>> read_json(Path("nowhere.json"))
    Traceback (most recent call last):
    pipeline.records.InputError: nowhere.json: no such file
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{file}: no such file") from None
    except ValueError as error:
        raise InputError(f"{file}: {error}; {advice}") from None


def read_checked(file: Path, kind: type[Record]) -> list[Record]:
    """The rows of a file that `stage` wrote; InputError if it has changed, or as `read_rows` raises it."""
    sums = file.with_name(SUMS)
    known = sums.read_text(encoding="utf-8").splitlines() if sums.exists() else []
    if file.exists() and f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}" not in known:
        advice = "remove it, and the same command makes it anew"
        raise InputError(f"{file}: is damaged, it is not what was written there; {advice}")
    return read_rows(file, kind)


def check_folder(folder: Path) -> None:
    """InputError if a file of a folder with checksums is missing or has changed."""
    found = digests(folder)
    for line in (folder / SUMS).read_text(encoding="utf-8").splitlines():
        name = line[66:]
        if found.get(name) != line[:64]:
            fault = "is damaged" if name in found else "is missing"
            raise InputError(f"{folder / name}: {fault}; remove {folder}, and the same command goes on before it")


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of the files in `folder` and below it, by name; several at a time: 32 GB would take half a minute."""
    names = sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file() and f != folder / SUMS)

    def digest(name: str) -> str:
        with (folder / name).open("rb") as content:  # read piece by piece
            return hashlib.file_digest(content, "sha256").hexdigest()

    with ThreadPoolExecutor() as threads:
        return dict(zip(names, threads.map(digest, names), strict=True))


class Point(NamedTuple):
    """A model to be evaluated: after how many steps of the epoch and samples trained on, and its folder or hub name."""

    step: int
    seen: int
    model: str


def steps_before(folder: Path, iteration: int) -> int:
    """The optimiser steps of the iterations before this one."""
    logs = [folder / f"iteration-{number}" / "metrics.jsonl" for number in range(1, iteration)]
    return sum(log.read_bytes().count(b"\n") for log in logs if log.exists())


def resume_step(here: Path, points: Sequence[Point]) -> int | None:
    """The step of the checkpoint that training goes on from, 0 to begin anew; None where all its models are there.

    points: the models that training leaves, in order, of which the last is the iteration's. A model along the epoch is
    removed once it is evaluated, and its evaluation stands for it. Models behind the step are made again.
    """

    def find() -> int | None:
        *along, last = points
        is_done = [Path(p.model).exists() or (here / f"test-{p.step}.jsonl").exists() for p in along]
        missing = [point.step for point, done in zip(along, is_done, strict=True) if not done]
        if not missing and Path(last.model).exists():
            return None
        names = (path.name.removeprefix("checkpoint-") for path in here.glob("checkpoint-*"))
        whole = (int(name) for name in names if name.isdecimal())  # not checkpoint-256.unfinished
        found = max((step for step in whole if not missing or step < missing[0]), default=0)
        for point in along:
            if point.step > found:
                shutil.rmtree(point.model, ignore_errors=True)
        return found

    return on_rank_zero(find)


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """A folder to write into that has another name until the block ends, and its checksums inside from then on."""
    unfinished = folder.with_name(f"{folder.name}.unfinished")

    def publish() -> None:
        write_file(unfinished / SUMS, "".join(f"{digest}  {name}\n" for name, digest in digests(unfinished).items()))
        unfinished.rename(folder)

    remove(unfinished)
    on_rank_zero(lambda: unfinished.mkdir(parents=True))
    yield unfinished
    on_rank_zero(publish)


def save_model(lm: "LanguageModel", folder: Path) -> None:
    """Write a `transformers` folder, gathered from all ranks.

    Of a model with adapters, the folder has the merged weights and, in adapter/, the adapters.
    """
    from safetensors import SafetensorError
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    weights = get_model_state_dict(lm.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))

    def write() -> None:
        model, own = lm.model, weights
        try:
            if hasattr(model, "peft_config"):
                from pipeline.models.lora import merged

                model.save_pretrained(unfinished / "adapter", state_dict=weights, save_embedding_layers=False)
                model, own = model.get_base_model(), merged(model, weights)
            model.save_pretrained(unfinished, state_dict=own, max_shard_size="4GB")  # hashed side by side
        except SafetensorError as error:  # which does not name its file
            raise OSError(f"{unfinished}: {error}") from error
        lm.tokenizer.save_pretrained(unfinished)

    with _appearing(folder) as unfinished:
        on_rank_zero(write)


def save_checkpoint(here: Path, done: int, optimizer: "torch.optim.Optimizer") -> None:
    """Write here/checkpoint-DONE; the checkpoints before it are then removed.

    Each rank writes its own: its shards of the weights that `optimizer` trains, the optimiser's and the random state.
    """
    import torch

    def write() -> None:
        state = {"weights": _own_shards(optimizer), "optimizer": optimizer.state_dict()}
        try:
            with (unfinished / f"rank-{rank()}.pt").open("wb") as file:
                torch.save(state | {"random": torch.get_rng_state()}, file)
        except RuntimeError as error:  # torch's, in place of the disk's, which does not name its file either
            raise OSError(f"{unfinished}: {error.__context__ or error}") from error

    older = list(here.glob("checkpoint-*"))
    with _appearing(here / f"checkpoint-{done}") as unfinished:
        on_all_ranks(write)
    remove(*older)


def load_checkpoint(folder: Path, optimizer: "torch.optim.Optimizer") -> None:
    """Put back what `save_checkpoint` wrote, into a model as it was loaded, before a forward pass gathers weights."""
    import torch

    state = torch.load(folder / f"rank-{rank()}.pt", map_location=device(), weights_only=True)
    for shard, saved in zip(_own_shards(optimizer), state["weights"], strict=True):
        shard.copy_(saved)
    for of_weight in state["optimizer"]["state"].values():
        if torch.is_tensor(of_weight["step"]):
            of_weight["step"] = of_weight["step"].cpu()  # where AdamW keeps it: on a GPU, each step would wait for it
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"].cpu())


def _own_shards(optimizer: "torch.optim.Optimizer") -> list["torch.Tensor"]:
    """This rank's part of each weight that is trained; all of it where nothing is sharded."""
    trained = [weight for group in optimizer.param_groups for weight in group["params"] if weight.requires_grad]
    return [getattr(weight, "to_local", lambda weight=weight: weight)().detach() for weight in trained]
