"""A causal language model: loading it, sharding it, its optimiser, and log pi of a batch's completions.

Completions of a prompt may share its computation, with the same values and gradients; long prompts are faster so.

    prompts      [ padding | x ]        R rows, computed once; their keys and values are kept
    completions  [ y | padding ]        B rows, each of which attends to its own prompt's keys and values, and itself

Where no prompt has several completions, both are one ordinary batch, [ padding | x | y | padding ].

The weights that are trained are float32: at a learning rate of 5e-7 nearly every update of a bfloat16 weight, which has
8 bits of precision, would round to nothing. Forward and backward passes use temporary bfloat16 copies.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache, DynamicLayer

from pipeline.models.adafactor import Adafactor
from pipeline.models.chat import Chat, in_chat
from pipeline.records import Example, InputError, is_hub_name
from pipeline.runtime.processes import device as own_device
from pipeline.runtime.processes import on_all_ranks, on_rank_zero, rank, ranks
from pipeline.settings import Compute, OptimizerName, Settings
from topr import select_logprobs


class LanguageModel(NamedTuple):
    """A causal language model and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    context: int  # the most tokens that prompt and completion may have together
    ends: frozenset[int]  # the token ids that end a sequence
    chat: Chat | None = None  # how prompts are asked in its chat template; None for prompts of plain text

    def prompt_ids(self, prompts: Sequence[str]) -> list[list[int]]:
        """The token ids of prompts. A chat template writes the special tokens itself: none are added to its text."""
        return self.tokenizer(list(prompts), add_special_tokens=self.chat is None)["input_ids"]

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of a completion's tokens, without the end of sequence."""
        size = len(token_ids) - (len(token_ids) > 0 and token_ids[-1] in self.ends)
        return self.tokenizer.decode(token_ids[:size], clean_up_tokenization_spaces=False)


META = torch.device("meta")  # where tensors have shapes and no values


def load_model(name: str, device: torch.device | None = None, settings: Settings | None = None) -> LanguageModel:
    """The model in float32 and its tokenizer, on a device; default: this process's own GPU if there is one.

    name: a folder or the name of a model on the hub; safetensors only. settings: whether code of its own is trusted,
    and whether it is asked in its chat template (default: neither). device META: no weights are loaded; enough to
    encode samples, to count and to plan. InputError where the model cannot be loaded, or as `in_chat` raises it.
    """
    if not Path(name).is_dir() and not is_hub_name(name):
        raise InputError(f"--model {name}: is neither a folder nor the name of a model on the hub (owner/name)")
    if Path(name).is_dir() and not (Path(name) / "config.json").exists():
        raise InputError(
            f"--model {name}: has no config.json, so it is no folder that transformers has saved a model in"
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
            with suppress(OSError):  # not every folder has one; where there is one, it knows what ends a sequence
                model.generation_config = transformers.GenerationConfig.from_pretrained(name)
        else:
            model = AutoModelForCausalLM.from_pretrained(name, use_safetensors=True, dtype=torch.float32, **trust)
            model = model.to(device or own_device())
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        if isinstance(error.__cause__, GatedRepoError):
            account = "`hf auth login` tells this machine the account that has accepted it"
            reason = f"it has a licence to be accepted at https://huggingface.co/{name}; then {account}"
        elif isinstance(error.__cause__, LocalEntryNotFoundError):
            copy = f"`hf download {name}` keeps a copy where it can, and --model takes a folder"
            reason = f"there is no such folder, and its hub cannot be reached; {copy}"
        raise InputError(f"--model {name}: cannot be loaded: {reason}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = tokenizer.eos_token_id  # padding is always masked: any token will do
    eos = model.generation_config.eos_token_id
    ends = frozenset(eos if isinstance(eos, list) else [eos]) - {None}
    lm = LanguageModel(model.eval(), tokenizer, model.config.max_position_embeddings, ends)
    return in_chat(lm, settings.system_prompt) if settings and settings.chat else lm


def download(name: str) -> None:
    """Bring a hub's model onto this machine, where it is not there: its first process does, before all of them read it.

    InputError where the hub refuses or stops answering, or the disk is full; what has come is kept.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    files = ["*.json", "*.jinja", "*.model", "*.safetensors", "*.txt"]
    try:  # original/ has Llama's weights once more, in another form
        snapshot_download(name, allow_patterns=files, ignore_patterns=["original/*"])
    except Exception as error:  # those of the libraries that the hub's own is made of, too
        fault = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(f"--model {name}: cannot be brought here: {fault[0]}; the same command goes on") from error


def shard(model: PreTrainedModel, compute: Compute, gradient_checkpointing: bool = False, reshard: bool = True) -> None:
    """Shard a model with FSDP2, layer by layer: each rank keeps a part of the float32 weights.

    compute: the precision of forward and backward passes; gradients are summed over ranks in float32.
    gradient_checkpointing: a layer keeps its input alone and is recomputed in the backward pass. reshard: a layer's
    whole weights are gathered anew for its backward pass. Without a process group the model stays an ordinary one.
    """
    if not (gradient_checkpointing or dist.is_initialized()):
        return
    layers = getattr(model.get_decoder(), "layers", None)  # as Llama and most models since call them
    if layers is None:
        fault = f"{type(model).__name__} has no decoder.layers"
        raise InputError(f"--model: {fault}; it can be trained by one process only")
    if gradient_checkpointing:
        for layer in layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)  # in eval mode too: no dropout
    if dist.is_initialized():
        kept = {} if reshard else {"reshard_after_forward": False}
        if compute != "float32":
            kept["mp_policy"] = MixedPrecisionPolicy(getattr(torch, compute), reduce_dtype=torch.float32)
        for module in (*layers, model):
            fully_shard(module, **kept)
            if dist.get_world_size() > 1:
                # The denominator of a step counts the sequences of all ranks: gradients are summed, not averaged.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)


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
            from pipeline.models.lora import add_adapters

            lm = add_adapters(lm, settings.lora, settings.seed_of("adapters"))
        shard(lm.model, *way)
        if not dist.is_initialized():
            lm.model.to(own_device())
        return lm
    lm = load_model(name, META, settings)
    whole = on_all_ranks(lambda: read().model if rank() == 0 else None)
    shard(lm.model, *way)
    lm.model.to_empty(device=own_device())
    weights = whole.state_dict() if whole else {}
    set_model_state_dict(lm.model, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    for own, value in zip(lm.model.buffers(), on_rank_zero(lambda: list(whole.buffers())), strict=True):
        own.copy_(value)  # a state dict may lack some, such as the frequencies of rotary positions
    return lm


def make_optimizer(name: OptimizerName, model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW, SGD, or Adafactor as HuggingFace's trainer sets it; constant rate, no weight decay (Section 4.2)."""
    kinds = {"adamw": partial(torch.optim.AdamW, weight_decay=0.0), "sgd": torch.optim.SGD, "adafactor": Adafactor}
    return kinds[name](model.parameters(), lr=lr)


class SharedRows(NamedTuple):
    """A micro-batch: R prompts of at most P tokens, B completions of at most C, in the order of their prompts.

    The first len(reward) completions are learnt from: all of them, or none in an empty batch.
    """

    shares: bool  # whether prompts are computed apart; otherwise R = B, and prompt i and completion i are one row
    prompt_ids: Tensor  # (R, P), padded on the left
    prompt_mask: Tensor  # (R, P) 1 on tokens, 0 on padding
    completion_ids: Tensor  # (B, C), padded on the right
    completion_mask: Tensor  # (B, C)
    prompt_of: Tensor  # (B,) index of each completion's prompt
    token_logmu: Tensor  # (B, C) log mu of each token; 0 on padding, NaN where only the sum is known
    logmu: Tensor  # (B,)
    reward: Tensor  # (B,)
    length: Tensor  # (B,)


def collate(
    rows: Sequence[Sequence[Example]],
    device: torch.device | str = "cpu",
    shares: bool | None = None,
    is_empty: bool = False,
) -> SharedRows:
    """Lay out rows of examples; the examples of a row have the same prompt.

    shares: whether prompts are computed apart (default: whether a row has several examples); the same on all ranks,
    since it decides how often the model is called. is_empty: the rows are computed and not learnt from.

    >>> row = [Example([5, 6], [7, 1], -1.0, 1.0), Example([5, 6], [8, 9, 1], -2.0, -1.0)]
    >>> batch = collate([row])
    >>> batch.prompt_ids.tolist(), batch.completion_ids.tolist(), batch.prompt_of.tolist()
    ([[5, 6]], [[7, 1, 0], [8, 9, 1]], [0, 0])
    >>> collate([row], is_empty=True).reward.shape
    torch.Size([0])
    """

    def pad(some: Sequence[list[int]], side: str) -> tuple[Tensor, Tensor]:
        ids = [torch.tensor(row, dtype=torch.long) for row in some]
        mask = [torch.ones_like(row) for row in ids]
        return pad_sequence(ids, True, padding_side=side), pad_sequence(mask, True, padding_side=side)

    examples = [example for row in rows for example in row]
    prompt_ids, prompt_mask = pad([row[0].prompt_ids for row in rows], "left")
    completion_ids, completion_mask = pad([example.completion_ids for example in examples], "right")
    prompt_of = torch.tensor([r for r, row in enumerate(rows) for _ in row])
    shares = len(examples) > len(rows) if shares is None else shares
    learnt = [] if is_empty else examples
    known = [torch.tensor(e.token_logmu or [torch.nan] * len(e.completion_ids)) for e in examples]
    token_logmu = pad_sequence(known, True)[: len(learnt)]  # (B, C)
    columns = [[e.logmu for e in learnt], [e.reward for e in learnt], [len(e.completion_ids) for e in learnt]]
    tensors = [prompt_ids, prompt_mask, completion_ids, completion_mask, prompt_of, token_logmu]
    return SharedRows(shares, *(tensor.to(device) for tensor in [*tensors, *map(torch.tensor, columns)]))


def token_logprobs(model: PreTrainedModel, batch: SharedRows) -> Tensor:
    """log pi of every completion token over the full vocabulary, in at least float32: (B, C), 0 on padding."""
    token_logp = select_logprobs(predictions(model, batch), batch.completion_ids)
    return torch.where(batch.completion_mask.bool(), token_logp, 0.0)[: len(batch.reward)]


def predictions(model: PreTrainedModel, batch: SharedRows) -> Tensor:
    """The logits that each completion token is predicted by: (B, C, V), in the model's precision."""
    if batch.shares:
        return _behind_prompts(model, batch)
    mask = torch.cat([batch.prompt_mask, batch.completion_mask], dim=1)  # (B, P + C)
    logits = model(
        input_ids=torch.cat([batch.prompt_ids, batch.completion_ids], dim=1),
        attention_mask=mask,
        position_ids=_positions(mask),
        logits_to_keep=batch.completion_ids.shape[1] + 1,
        use_cache=False,
    ).logits
    return logits[:, :-1]  # the last column would predict the token after the end


def _behind_prompts(model: PreTrainedModel, batch: SharedRows) -> Tensor:
    """Each prompt computed once; the logits at its last token predict the first token of all its completions.

    The first pass leaves each layer's keys and values, (R, heads, P, size); in the second they stand, repeated to
    (B, heads, P, size), before those of the completions. Gradients flow back through them into the prompts.
    """
    prompts = Cache(layer_class_to_replicate=KeptLayer)
    first = model(
        input_ids=batch.prompt_ids,
        attention_mask=batch.prompt_mask,
        position_ids=_positions(batch.prompt_mask),
        logits_to_keep=1,
        past_key_values=prompts,
        use_cache=True,
    ).logits
    mask = torch.cat([batch.prompt_mask[batch.prompt_of], batch.completion_mask], dim=1)
    others = model(
        input_ids=batch.completion_ids,
        attention_mask=mask,
        position_ids=_positions(mask)[:, batch.prompt_ids.shape[1] :],
        past_key_values=Cache(layers=[BehindPrompt(layer, batch.prompt_of) for layer in prompts.layers]),
        use_cache=True,
    ).logits
    # (B, 1, V) for the first token, (B, C - 1, V) for the others; the last logits predict what is after the end
    return torch.cat([first[batch.prompt_of], others[:, :-1]], dim=1)


def _positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(-1) - 1).clamp_min(0)


class KeptLayer(DynamicLayer):
    """A layer's keys and values, (R, heads, P, size); gradient checkpointing recomputes and overwrites them."""

    def update(self, keys: Tensor, values: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Keep them attached to the graph, so that gradients reach the prompt."""
        self.keys, self.values, self.is_initialized = keys, values, True
        return keys, values


class BehindPrompt(DynamicLayer):
    """The keys and values that completions attend to: their prompt's, then their own, which are not kept."""

    def __init__(self, prompts: KeptLayer, prompt_of: Tensor):
        super().__init__()
        self.keys, self.values, self.is_initialized = prompts.keys, prompts.values, True
        self.prompt_of = prompt_of

    def update(self, keys: Tensor, values: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Prepend the prompt's keys and values: (B, heads, C, size) -> (B, heads, P + C, size)."""
        pairs = (self.keys, keys), (self.values, values)
        return tuple(torch.cat([prompts.index_select(0, self.prompt_of), own], dim=-2) for prompts, own in pairs)
