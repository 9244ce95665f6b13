"""A causal language model: loading it, sharding it, its optimiser, and its batches.

The weights that are trained are float32: at a learning rate of 5e-7 nearly every update of a bfloat16 weight, which has
8 bits of precision, would round to nothing. Forward and backward passes use temporary bfloat16 copies.
"""

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import transformers
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import DryRunError, GatedRepoError, LocalEntryNotFoundError
from safetensors import SafetensorError
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from toprlib.adafactor import Adafactor
from toprlib.chat import Chat, chat_of
from toprlib.lora import add_adapters
from toprlib.records import Encoded, Example, InputError, is_hub_name
from toprlib.distributed import device as own_device
from toprlib.distributed import from_all_ranks, on_all_ranks, rank, ranks
from toprlib.settings import Compute, OptimizerName, Settings
from topr import Batch


class LanguageModel(NamedTuple):
    """A causal language model and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    context: int  # the most tokens that prompt and completion may have together
    ends: frozenset[int]  # the token ids that end a sequence
    chat: Chat | None = (
        None  # how prompts are asked in its chat template; None for prompts of plain text
    )

    def prompt_ids(self, prompts: Sequence[str]) -> list[list[int]]:
        """The token ids of prompts. A chat template writes the special tokens itself: none are added to its text."""
        return self.tokenizer(list(prompts), add_special_tokens=self.chat is None)["input_ids"]

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of a completion's tokens, without the end of sequence."""
        size = len(token_ids) - (len(token_ids) > 0 and token_ids[-1] in self.ends)
        return self.tokenizer.decode(token_ids[:size], clean_up_tokenization_spaces=False)


META = torch.device("meta")  # where tensors have shapes and no values


def load_model(
    name: str, device: torch.device | None = None, settings: Settings | None = None
) -> LanguageModel:
    """The model in float32 and its tokenizer, on a device; default: this process's own GPU if there is one.

    name: a folder or the name of a model on the hub; safetensors only. settings: whether code of its own is trusted,
    and whether it is asked in its chat template (default: neither). device META: no weights are loaded; enough to
    encode samples, to count and to plan. InputError where the model cannot be loaded, or as `chat_of` raises it.
    """
    if not Path(name).is_dir() and not is_hub_name(name):
        raise InputError(
            f"--model {name}: is neither a folder nor the name of a model on the hub (owner/name)"
        )
    if Path(name).is_dir() and not (Path(name) / "config.json").exists():
        raise InputError(
            f"--model {name}: has no config.json, so transformers has saved no model there"
        )
    transformers.utils.logging.disable_progress_bar()  # of single files; the run has its own
    # cuDNN's attention, torch's first choice on an H100: with some masks gradients are NaN (pytorch#196678), scoring
    # and training can differ by a bfloat16 bit, and each new length costs 23 to 37 ms for a plan.
    torch.backends.cuda.enable_cudnn_sdp(False)
    trust = {"trust_remote_code": settings is not None and settings.trust_remote_code}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **trust)
        if device == META:
            with device:
                config = transformers.AutoConfig.from_pretrained(name, **trust)
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **trust)
            with suppress(
                OSError
            ):  # not every folder has one; where there is one, it knows what ends a sequence
                model.generation_config = transformers.GenerationConfig.from_pretrained(name)
        else:
            model = AutoModelForCausalLM.from_pretrained(
                name, use_safetensors=True, dtype=torch.float32, **trust
            )
            model = model.to(device or own_device())
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        if isinstance(error.__cause__, GatedRepoError):
            account = "`hf auth login` tells this machine the account that has accepted it"
            reason = (
                f"it has a licence to be accepted at https://huggingface.co/{name}; then {account}"
            )
        elif isinstance(error.__cause__, LocalEntryNotFoundError):
            copy = f"`hf download {name}` keeps a copy where it can, and --model takes a folder"
            reason = f"there is no such folder, and its hub cannot be reached; {copy}"
        raise InputError(f"--model {name}: cannot be loaded: {reason}") from error
    if not hasattr(model.config, "max_position_embeddings"):
        raise InputError(
            f"--model {name}: its config.json has no max_position_embeddings, the most tokens it can take"
        )
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise InputError(
                f"--model {name}: its tokenizer names no token that ends a sequence, and none that pads"
            )
        tokenizer.pad_token_id = (
            tokenizer.eos_token_id
        )  # padding is always masked: any token will do
    try:  # transformers loads what it would refuse to save; samples are drawn by the run's own settings
        model.generation_config.validate(strict=True)
    except ValueError:
        model.generation_config = transformers.GenerationConfig(
            eos_token_id=model.generation_config.eos_token_id
        )
    eos = model.generation_config.eos_token_id
    ends = frozenset(eos if isinstance(eos, list) else [eos]) - {None}
    chat = chat_of(tokenizer, settings.system_prompt) if settings and settings.chat else None
    ends |= {chat.end} if chat else set()
    return LanguageModel(model.eval(), tokenizer, model.config.max_position_embeddings, ends, chat)


def download(name: str) -> None:
    """Bring a hub's model onto this machine, where it is not there: its first process does, before all of them read it.

    InputError where the hub refuses or stops answering, or the disk has no room for it; what has come is kept.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    files = ["*.json", "*.jinja", "*.model", "*.safetensors", "*.txt"]
    # original/ has Llama's weights once more, in another form
    bring = partial(snapshot_download, name, allow_patterns=files, ignore_patterns=["original/*"])
    try:
        with suppress(DryRunError):  # the hub is out of reach, and the model may be here
            missing = sum(file.file_size or 0 for file in bring(dry_run=True) if file.will_download)
            cache = Path(
                constants.HF_HUB_CACHE
            )  # there, since a file of the model has come already
            free = shutil.disk_usage(cache).free + sum(
                part.stat().st_size for part in cache.rglob("*.incomplete")
            )
            if missing > free:
                fault = f"{missing / 1e9:,.1f} GB are to come, and the disk has {free / 1e9:,.1f} GB free"
                raise OSError(f"{fault} in {cache}: make room, or name another folder in HF_HOME")
        bring()
    except Exception as error:  # those of the libraries that the hub's own is made of, too
        fault = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(
            f"--model {name}: cannot be brought here: {fault[0]}; the same command goes on"
        ) from error


def shard(
    model: PreTrainedModel,
    compute: Compute,
    gradient_checkpointing: bool = False,
    reshard: bool = True,
) -> None:
    """Shard a model with FSDP2, layer by layer and its head: each rank keeps a part of the float32 weights.

    compute: the precision of forward and backward passes; gradients are summed over ranks in float32.
    gradient_checkpointing: a layer keeps its input alone and is recomputed in the backward pass. reshard: a layer's
    whole weights are gathered anew for its backward pass. Without a process group the model stays an ordinary one.
    """
    if not (gradient_checkpointing or dist.is_initialized()):
        return
    layers = getattr(
        model.get_decoder(), "layers", None
    )  # as Llama and most models since call them
    if layers is None:
        fault = f"{type(model).__name__} has no decoder.layers"
        raise InputError(f"--model: {fault}; it can be trained by one process only")
    if gradient_checkpointing:
        for layer in layers:
            layer.forward = partial(
                checkpoint, layer.forward, use_reentrant=False
            )  # in eval mode too: no dropout
    if dist.is_initialized():
        kept = {} if reshard else {"reshard_after_forward": False}
        if compute != "float32":
            kept["mp_policy"] = MixedPrecisionPolicy(
                getattr(torch, compute), reduce_dtype=torch.float32
            )
        groups, head = [[layer] for layer in layers], model.get_output_embeddings()
        if head.weight is not model.get_input_embeddings().weight and hasattr(
            model.get_decoder(), "norm"
        ):
            groups.append(
                [model.get_decoder().norm, head]
            )  # its gradients leave first, its weights come last
        for modules in (*groups, [model]):
            stays = (
                {"reshard_after_forward": False} if head in modules else {}
            )  # a backward pass begins with the head
            fully_shard(modules, **kept | stays)
            if dist.get_world_size() > 1:
                # The denominator of a step counts the sequences of all ranks: gradients are summed, not averaged.
                modules[0].set_gradient_divide_factor(1.0)
                modules[0].set_force_sum_reduction_for_comms(True)


def load_to_train(name: str, settings: Settings) -> LanguageModel:
    """The model on this process's device, sharded over the ranks as the settings say; every rank calls it.

    With --lora, for one process only, it has adapters. Rank zero alone reads the weights and sends each of them to the
    others, which is faster than another reading. InputError of all ranks where it cannot be loaded.
    """
    read = partial(load_model, name, torch.device("cpu"), settings)
    way = settings.compute, settings.gradient_checkpointing, settings.reshard
    if ranks() == 1:
        lm = read()
        if settings.lora is not None:
            lm = lm._replace(
                model=add_adapters(lm.model, settings.lora, settings.seed_of("adapters"))
            )
        shard(lm.model, *way)
        if not dist.is_initialized():
            lm.model.to(own_device())
        return lm
    lm = load_model(name, META, settings)
    whole = on_all_ranks(lambda: read().model if rank() == 0 else None)
    shard(lm.model, *way)
    lm.model.to_empty(device=own_device())
    weights = whole.state_dict() if whole else {}
    set_model_state_dict(
        lm.model, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )
    values, *_ = from_all_ranks(list(whole.buffers()) if whole else [])
    for buffer, value in zip(lm.model.buffers(), values, strict=True):
        buffer.copy_(
            value
        )  # a state dict may lack some, such as the frequencies of rotary positions
    return lm


def make_optimizer(name: OptimizerName, model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW, SGD, or Adafactor as HuggingFace's trainer sets it; constant rate, no weight decay (Section 4.2)."""
    kinds = {
        "adamw": partial(torch.optim.AdamW, weight_decay=0.0),
        "sgd": torch.optim.SGD,
        "adafactor": Adafactor,
    }
    return kinds[name](model.parameters(), lr=lr)


def collate(
    completions: Sequence[Encoded | Example], is_learnt: bool = True, device: str | None = None
) -> Batch:
    """A micro-batch in tensors: [ padding | prompt | completion | padding ] in each row.

    is_learnt: whether it has log mu, reward and length, which are (0,) otherwise. device: of the tensors; by default
    where this process computes.

    >>> batch = collate([Example([5, 6], [7, 1], -1.0, 1.0, 0, 0, []), Example([5], [8, 9, 1], -2.0, -1.0, 1, 1, [])])
    >>> batch.input_ids.tolist(), batch.completion_mask.tolist()
    ([[5, 6, 7, 1, 0], [0, 5, 8, 9, 1]], [[0, 0, 1, 1, 0], [0, 0, 1, 1, 1]])
    """
    left = max(len(one.prompt_ids) for one in completions)
    right = max(len(one.completion_ids) for one in completions)
    ids, attention_mask, completion_mask = [], [], []  # (B, left + right)
    for one in completions:
        before, after = left - len(one.prompt_ids), right - len(one.completion_ids)
        ids.append([0] * before + one.prompt_ids + one.completion_ids + [0] * after)
        attention_mask.append([0] * before + [1] * (left - before + right - after) + [0] * after)
        completion_mask.append([0] * left + [1] * (right - after) + [0] * after)
    learnt = completions if is_learnt else []
    columns = (
        [e.logmu for e in learnt],
        [e.reward for e in learnt],
        [len(e.completion_ids) for e in learnt],
    )
    tensors = map(torch.tensor, (ids, attention_mask, completion_mask, *columns))
    return Batch(*(tensor.to(device or own_device()) for tensor in tensors))
