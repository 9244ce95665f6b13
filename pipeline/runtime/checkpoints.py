"""Models as ordinary `transformers` folders, and checkpoints: such folders with the optimiser's state beside them."""

import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from pipeline.models.language_model import LanguageModel
from pipeline.models.lora import has_adapters, merged, save_adapters
from pipeline.runtime.processes import device, on_all_ranks, on_rank_zero, rank
from pipeline.runtime.run_folder import checkpoints, seal_folder


def save_model(lm: LanguageModel, folder: Path, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Write a `transformers` folder, gathered from all ranks; with the optimiser's and the random state of each rank.

    Of a model with adapters, the folder has the merged weights and, in adapter/, the adapters; with an optimiser these
    alone. Every rank calls it. The folder appears under its name when it is whole, its checksums inside.
    """
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    on_rank_zero(lambda: shutil.rmtree(unfinished, ignore_errors=True))
    weights = get_model_state_dict(lm.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))

    def write() -> None:
        model, own = lm.model, weights
        try:
            if has_adapters(model):
                save_adapters(model, unfinished if optimizer else unfinished / "adapter", weights)
                model, own = model.get_base_model(), merged(model, weights)
            if model is lm.model or optimizer is None:
                model.save_pretrained(unfinished, state_dict=own, max_shard_size="4GB")  # hashed side by side
        except SafetensorError as error:  # which does not name its file
            raise OSError(f"{unfinished}: {error}") from error
        lm.tokenizer.save_pretrained(unfinished)

    def publish() -> None:
        seal_folder(unfinished)
        unfinished.rename(folder)

    on_rank_zero(write)
    if optimizer is not None:
        state = {"optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
        on_all_ranks(lambda: torch.save(state, unfinished / f"rank-{rank()}.pt"))
    on_rank_zero(publish)


def save_checkpoint(folder: Path, done: int, lm: LanguageModel, optimizer: torch.optim.Optimizer) -> None:
    """Write folder/checkpoint-DONE; the checkpoints before it are then removed."""
    older = on_rank_zero(lambda: checkpoints(folder))
    save_model(lm, folder / f"checkpoint-{done}", optimizer)
    on_rank_zero(lambda: [shutil.rmtree(folder / f"checkpoint-{step}") for step in older])


def load_optimizer(folder: Path, done: int, optimizer: torch.optim.Optimizer) -> None:
    """Put back this rank's optimiser and random state from folder/checkpoint-DONE; its model is loaded like others."""
    state = torch.load(folder / f"checkpoint-{done}" / f"rank-{rank()}.pt", map_location=device(), weights_only=True)
    for of_weight in state["optimizer"]["state"].values():
        if torch.is_tensor(of_weight["step"]):
            of_weight["step"] = of_weight["step"].cpu()  # where AdamW keeps it: on a GPU, each step would wait for it
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"].cpu())
