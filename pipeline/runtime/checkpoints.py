"""Checkpoints that an epoch goes on from, and models as ordinary `transformers` folders."""

import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from pipeline.models.loading import LanguageModel
from pipeline.runtime.checksums import seal_folder, unseal_files
from pipeline.runtime.processes import device, on_all_ranks, on_rank_zero, rank


def save_model(lm: LanguageModel, folder: Path) -> None:
    """Write an ordinary `transformers` folder, gathered from all ranks; every rank calls it."""
    weights = get_model_state_dict(lm.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))

    def write() -> None:
        try:
            lm.model.save_pretrained(folder, state_dict=weights)
        except SafetensorError as error:  # which does not name its file
            raise OSError(f"{folder}: {error}") from error
        lm.tokenizer.save_pretrained(folder)

    on_rank_zero(write)


def save_checkpoint(folder: Path, done: int, lm: LanguageModel, optimizer: torch.optim.Optimizer) -> None:
    """Write folder/checkpoint-DONE, a `transformers` folder with each rank's optimiser and random state beside it.

    It appears under its name when it is whole; the checkpoints before it are then removed.
    """
    unfinished = folder / "checkpoint.unfinished"
    on_rank_zero(lambda: shutil.rmtree(unfinished, ignore_errors=True))
    save_model(lm, unfinished)
    state = {"optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
    on_all_ranks(lambda: torch.save(state, unfinished / f"rank-{rank()}.pt"))

    def publish() -> None:
        older = checkpoints(folder)
        seal_folder(unfinished)
        unfinished.rename(folder / f"checkpoint-{done}")
        for step in older:
            shutil.rmtree(folder / f"checkpoint-{step}")

    on_rank_zero(publish)


def load_checkpoint(folder: Path, done: int, optimizer: torch.optim.Optimizer) -> None:
    """Put this rank's optimiser and random state back; the model is loaded from the same folder like any other."""
    state = torch.load(folder / f"checkpoint-{done}" / f"rank-{rank()}.pt", map_location=device(), weights_only=True)
    for of_weight in state["optimizer"]["state"].values():
        if torch.is_tensor(of_weight["step"]):
            of_weight["step"] = of_weight["step"].cpu()  # where AdamW keeps it: on a GPU, each step would wait for it
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"].cpu())


def checkpoints(folder: Path) -> list[int]:
    """The steps after which there are checkpoints, in order.

    >>> checkpoints(Path("nowhere"))
    []
    """
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in folder.glob("checkpoint-*"))


def publish_model(folder: Path, done: int) -> None:
    """Turn the last checkpoint into folder/model: the optimiser's files go, the model stays."""

    def rename() -> None:
        last = folder / f"checkpoint-{done}"
        unseal_files(last, "rank-*.pt")
        for file in last.glob("rank-*.pt"):
            file.unlink()
        last.rename(folder / "model")
        for step in checkpoints(folder):  # of a run that was ended while it removed them
            shutil.rmtree(folder / f"checkpoint-{step}")

    on_rank_zero(rename)
