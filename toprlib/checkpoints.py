"""Models and checkpoints on the disk.

A model is an ordinary `transformers` folder. A checkpoint has a file of each rank: its shards of weights and optimiser.
Every rank calls these functions. A folder appears under its name when it is whole.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from toprlib.language_model import LanguageModel
from toprlib.lora import merged
from toprlib.distributed import by_rank_zero, device, on_all_ranks, rank
from toprlib.files import appearing, remove


def save_model(lm: LanguageModel, folder: Path) -> None:
    """Write a `transformers` folder, gathered from all ranks.

    Of a model with adapters, the folder has the merged weights and, in adapter/, the adapters.
    """
    weights = get_model_state_dict(
        lm.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    with appearing(folder) as unfinished:
        _write_model(lm, weights, unfinished)


@by_rank_zero
def _write_model(lm: LanguageModel, weights: dict[str, Tensor], unfinished: Path) -> None:
    model = lm.model
    try:
        if hasattr(model, "peft_config"):
            model.save_pretrained(
                unfinished / "adapter", state_dict=weights, save_embedding_layers=False
            )
            model, weights = model.get_base_model(), merged(model, weights)
        model.save_pretrained(
            unfinished, state_dict=weights, max_shard_size="4GB"
        )  # hashed side by side
    except SafetensorError as error:  # which does not name its file
        raise OSError(f"{unfinished}: {error}") from error
    lm.tokenizer.save_pretrained(unfinished)


def save_checkpoint(here: Path, done: int, optimizer: torch.optim.Optimizer) -> None:
    """Write here/checkpoint-DONE; the checkpoints before it are then removed.

    Each rank writes its own: its shards of the weights that `optimizer` trains, the optimiser's and the random state.
    """
    older = list(here.glob("checkpoint-*"))
    with appearing(here / f"checkpoint-{done}") as unfinished:
        on_all_ranks(partial(_write_state, optimizer, unfinished))
    remove(*older)


def _write_state(optimizer: torch.optim.Optimizer, unfinished: Path) -> None:
    state: dict[str, Any] = {
        "weights": _local_shards(optimizer),
        "optimizer": optimizer.state_dict(),
    }
    try:
        with (unfinished / f"rank-{rank()}.pt").open("wb") as file:
            torch.save(state | {"random": torch.get_rng_state()}, file)
    except (
        RuntimeError
    ) as error:  # torch's, in place of the disk's, which does not name its file either
        raise OSError(f"{unfinished}: {error.__context__ or error}") from error


def load_checkpoint(folder: Path, optimizer: torch.optim.Optimizer) -> None:
    """Put back what `save_checkpoint` wrote, into a model as it was loaded, before a forward pass gathers weights."""
    state = torch.load(folder / f"rank-{rank()}.pt", map_location=device(), weights_only=True)
    for shard, saved in zip(_local_shards(optimizer), state["weights"], strict=True):
        shard.copy_(saved)
    for values in state["optimizer"]["state"].values():
        if torch.is_tensor(values["step"]):
            values["step"] = values[
                "step"
            ].cpu()  # where AdamW keeps it: on a GPU, each step would wait for it
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"].cpu())


def _local_shards(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """This rank's part of each weight that is trained; all of it where nothing is sharded."""
    shards = []
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if weight.requires_grad:
                shards.append(
                    (weight.to_local() if hasattr(weight, "to_local") else weight).detach()
                )
    return shards
