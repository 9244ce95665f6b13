"""The model in training: sharded over ranks, with its optimizer; models and checkpoints on disk.

The weights that are trained are float32: at a learning rate of 5e-7 almost every update of a
bfloat16 weight, which has 8 bits of precision, would round to nothing. Forward and backward passes
may use temporary bfloat16 copies.
"""

import warnings
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from toprlib.adafactor import Adafactor
from toprlib.distributed import device, gather, rank, ranks
from toprlib.files import atomic_folder, remove, write_file
from toprlib.language_model import LanguageModel, load_model
from toprlib.settings import Settings

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # by dcp, in a single process


def load_for_training(
    lm: LanguageModel, name: str, settings: Settings
) -> tuple[LanguageModel, torch.optim.Optimizer]:
    """The model `name`, sharded over several ranks, and its optimizer. Every rank calls this."""
    # On every rank, as in `load_model`: cuDNN's attention has NaN gradients (pytorch#196678).
    torch.backends.cuda.enable_cudnn_sdp(False)
    whole = load_model(name, torch.device("cpu")) if rank() == 0 else None
    if ranks() > 1:
        model = _spread(whole, name, settings)
    else:
        model = whole
        _set_up_passes(model.to(device()), settings)
    optimizers = {
        "adamw": partial(torch.optim.AdamW, weight_decay=0.0),
        "sgd": torch.optim.SGD,
        "adafactor": Adafactor,
    }
    optimizer = optimizers[settings.optimizer](model.parameters(), lr=settings.lr)
    return lm._replace(model=model), optimizer


def _spread(whole: PreTrainedModel | None, name: str, settings: Settings) -> PreTrainedModel:
    """The model that rank zero has read, sharded: eight copies of 8B would need 256 GB of memory.

    whole: None on the other ranks.
    """
    config = transformers.AutoConfig.from_pretrained(name)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    _set_up_passes(model, settings)
    model.to_empty(device=device())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole.state_dict() if whole else {}, options=options)
    # A state dict lacks some buffers, such as the frequencies of rotary positions.
    [buffers, *_] = gather(list(whole.buffers()) if whole else [])
    for buffer, value in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(value)
    return model


def _set_up_passes(model: torch.nn.Module, settings: Settings) -> None:
    """Set the precision of the forward and backward passes, and shard a model over several ranks.

    FSDP2 shards it by layer: each rank keeps a part of the float32 weights.
    """
    if settings.gradient_checkpointing:
        for layer in _find_layers(model):  # transformers recomputes in train mode only
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    dtype = getattr(torch, settings.dtype)
    if ranks() == 1:
        if dtype != torch.float32:
            model.forward = torch.autocast(device().type, dtype)(model.forward)
        return
    policy = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32)
    for module in (*_find_layers(model), model):
        # To gather the weights again for the backward pass saves memory, as recomputing does.
        fully_shard(module, mp_policy=policy, reshard_after_forward=settings.gradient_checkpointing)
        # A step's denominator counts the completions of all ranks: sum gradients, no average.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _find_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The model's layers, whatever their list is called: `layers`, or `h` in GPT-2."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


# ---- models and checkpoints on the disk ----------------------------------------------------------
def save_model(lm: LanguageModel, folder: Path) -> None:
    """Write a `transformers` folder. Every rank calls this."""
    model = lm.model
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    with atomic_folder(folder) as unfinished:
        if rank() == 0:
            model.generation_config.eos_token_id = list(lm.ends)  # on ranks, the config's alone
            model.generation_config.do_sample = True  # else a temperature could not be saved
            model.save_pretrained(unfinished, state_dict=weights)
            lm.tokenizer.save_pretrained(unfinished)


def save_checkpoint(
    folder: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Write folder/checkpoint-STEP, then remove older checkpoints. Every rank calls this."""
    older = list(folder.glob("checkpoint-*"))
    weights, state = get_state_dict(model, optimizer)
    with atomic_folder(folder / f"checkpoint-{step}") as unfinished:
        dcp.save({"weights": weights, "optimizer": state}, checkpoint_id=unfinished)
    remove(*older)


def load_checkpoint(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Restore what `save_checkpoint` wrote. Every rank calls this, before a forward pass."""
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"weights": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


def last_checkpoint(folder: Path) -> int:
    """The step of the last checkpoint, or 0.

    Lines of metrics.jsonl after the checkpoint are removed: training writes them again.
    """
    paths = folder.glob("checkpoint-*[0-9]")
    step = max((int(path.name.removeprefix("checkpoint-")) for path in paths), default=0)
    log = folder / "metrics.jsonl"
    if log.exists():
        write_file(log, "".join(log.read_text().splitlines(keepends=True)[:step]))
    return step
