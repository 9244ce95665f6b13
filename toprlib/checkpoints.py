"""Models and checkpoints on the disk.

A model is an ordinary `transformers` folder. A checkpoint has one file per rank: its shards of the
weights and of the optimizer. Every rank calls these functions; a folder appears under its name
once it is complete.
"""

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from toprlib.distributed import device, rank, rank_zero_only
from toprlib.files import atomic_folder, read_text, remove, write_file
from toprlib.language_model import LanguageModel
from toprlib.lora import merge_adapters
from toprlib.records import InputError


def save_model(lm: LanguageModel, folder: Path) -> None:
    """Write a `transformers` folder, gathered from all ranks.

    A model with adapters is saved with merged weights, and its adapters in adapter/.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(lm.model, options=options)
    with atomic_folder(folder) as unfinished:
        _write_model(lm, weights, unfinished)


@rank_zero_only
def _write_model(lm: LanguageModel, weights: dict[str, Tensor], folder: Path) -> None:
    model = lm.model
    try:
        if hasattr(model, "peft_config"):
            model.save_pretrained(
                folder / "adapter", state_dict=weights, save_embedding_layers=False
            )
            weights = merge_adapters(model, weights)
            model = model.get_base_model()
        model.save_pretrained(folder, state_dict=weights, max_shard_size="4GB")
    except SafetensorError as error:  # it does not name its file
        raise OSError(f"{folder}: {error}") from error
    lm.tokenizer.save_pretrained(folder)


def save_checkpoint(folder: Path, step: int, optimizer: torch.optim.Optimizer) -> None:
    """Write folder/checkpoint-STEP, then remove older checkpoints.

    Each rank writes its shards of the weights that `optimizer` trains, the optimizer's state and
    the random state.
    """
    older = list(folder.glob("checkpoint-*"))
    with atomic_folder(folder / f"checkpoint-{step}") as unfinished:
        state: dict[str, Any] = {
            "weights": _local_shards(optimizer),
            "optimizer": optimizer.state_dict(),
            "random": torch.get_rng_state(),
        }
        try:
            with (unfinished / f"rank-{rank()}.pt").open("wb") as file:
                torch.save(state, file)
        except (OSError, RuntimeError) as error:  # torch's error hides the disk's; neither names it
            raise OSError(f"{unfinished}: {error.__context__ or error}") from error
    remove(*older)


def load_checkpoint(folder: Path, optimizer: torch.optim.Optimizer) -> None:
    """Restore what `save_checkpoint` wrote, into a model that was just loaded.

    Call it before a forward pass: after one, FSDP2 keeps gathered copies of some weights.
    """
    file = folder / f"rank-{rank()}.pt"
    try:
        state = torch.load(file, map_location=device(), weights_only=True)
    except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        message = f"cannot be read ({reason}); remove {folder} to train from an earlier step"
        raise InputError(message, file=file) from error
    for shard, saved in zip(_local_shards(optimizer), state["weights"], strict=True):
        shard.copy_(saved)
    for values in state["optimizer"]["state"].values():
        if torch.is_tensor(values["step"]):
            # AdamW keeps its step count on the CPU; on a GPU every step would wait for it.
            values["step"] = values["step"].cpu()
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"].cpu())


@rank_zero_only
def last_checkpoint(folder: Path, missing_step: int | None = None) -> int:
    """The step of the checkpoint to resume from, or 0.

    missing_step: the step of the first model that training has to save; the checkpoint is before
    it. Lines of metrics.jsonl after the checkpoint are removed: training writes them again.
    """
    steps = [0]
    for path in folder.glob("checkpoint-*"):
        number = path.name.removeprefix("checkpoint-")
        if not number.isdecimal():
            continue  # checkpoint-256.unfinished, of a run that was killed while it wrote
        if missing_step is None or int(number) < missing_step:
            steps.append(int(number))
    step = max(steps)
    log = folder / "metrics.jsonl"
    if log.exists():
        lines = read_text(log).splitlines(keepends=True)
        write_file(log, "".join(lines[:step]))
    return step


def remove_checkpoints(folder: Path) -> None:
    """Remove the checkpoints of an iteration. Every rank calls this."""
    remove(*folder.glob("checkpoint-*"), *folder.glob("model*.unfinished"))


def _local_shards(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """This rank's part of each trained weight: all of it where nothing is sharded."""
    shards = []
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if weight.requires_grad:
                local = weight.to_local() if hasattr(weight, "to_local") else weight
                shards.append(local.detach())
    return shards
