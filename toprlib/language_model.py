"""A causal language model: loading it, sharding it over ranks, and its optimizer.

The weights that are trained are float32: at a learning rate of 5e-7 almost every update of a
bfloat16 weight, which has 8 bits of precision, would round to nothing. Forward and backward passes
may use temporary bfloat16 copies.
"""

import gc
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import transformers
from huggingface_hub import constants, get_local_safetensors_metadata, snapshot_download
from huggingface_hub.errors import DryRunError, GatedRepoError, LocalEntryNotFoundError
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedTokenizerBase

from toprlib.adafactor import Adafactor
from toprlib.chat import Chat, load_chat
from toprlib.distributed import device as own_device
from toprlib.distributed import gather, rank, ranks
from toprlib.lora import add_adapters
from toprlib.problems import is_hub_name
from toprlib.records import InputError, first_line

if TYPE_CHECKING:  # an import that takes seconds, and that --help does not need
    from transformers import PreTrainedModel

Dtype = Literal["float32", "bfloat16"]
OptimizerName = Literal["adamw", "adafactor", "sgd"]
META = torch.device("meta")  # where tensors have shapes and no values
TAIL = 100  # the last characters of a prompt, on which tokens after it may depend; ours
LOADING = {  # a report says what does not fit; the library would fill it with random numbers
    "dtype": torch.float32,
    "output_loading_info": True,
    "ignore_mismatched_sizes": True,
}


class LanguageModel(NamedTuple):
    """A causal language model and its tokenizer."""

    model: "PreTrainedModel"
    tokenizer: PreTrainedTokenizerBase
    context: int  # the most tokens that prompt and completion may have together
    ends: frozenset[int]  # the token ids that end a completion
    chat: Chat | None = None  # the chat template of prompts; None for prompts of plain text

    @property
    def vocabulary(self) -> int:
        """The number of token ids that the model has embeddings for."""
        return self.model.get_input_embeddings().num_embeddings

    def prompt_ids(self, prompts: Sequence[str]) -> list[list[int]]:
        """The token ids of prompts. Raises InputError if the model lacks one of them.

        The begin of text occurs once, whether a prompt has it or the tokenizer adds it. A chat
        template has written all special tokens already.
        """
        encoded = self.tokenizer(list(prompts), add_special_tokens=self.chat is None)
        begin = self.tokenizer.bos_token_id
        vocabulary = self.vocabulary
        for ids in encoded["input_ids"]:
            if ids[:2] == [begin, begin]:
                del ids[0]
            largest = max(ids, default=0)
            if largest >= vocabulary:
                token = self.tokenizer.convert_ids_to_tokens(largest)
                message = f"its tokenizer has the token {token!r} with the id {largest}, and its "
                message += f"model has {vocabulary} tokens; resize the model's embeddings"
                name = self.tokenizer.name_or_path
                raise InputError(message, option="--model", file=name)
        return encoded["input_ids"]

    def completion_ids(self, prompt: str, completion: str) -> list[int]:
        """The token ids that the text of a completion has after its prompt.

        A SentencePiece tokenizer adds a space at the start of a text. To avoid this space, the
        completion is tokenized after the prompt. If that would change the prompt's last token, as
        "7" does after "A: ", a line break replaces the prompt.
        """
        for start in (prompt[-TAIL:], "\n"):
            start_ids, ids = self.prompt_ids([start, start + completion])
            if ids[: len(start_ids)] == start_ids:
                return ids[len(start_ids) :]
        return self.tokenizer(completion, add_special_tokens=False)["input_ids"]

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of a completion's tokens, without the end of sequence."""
        if token_ids and token_ids[-1] in self.ends:
            token_ids = token_ids[:-1]
        return self.tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)


# ---- loading -------------------------------------------------------------------------------------
def load_model(
    name: str, uses_chat: bool = False, system_prompt: str | None = None
) -> LanguageModel:
    """The model in float32 on this process's device, and its tokenizer.

    name: a folder, or the name of a model on the hub; safetensors only. uses_chat, system_prompt:
    see `load_chat`. Raises InputError if the model cannot be used.
    """
    return load_weights(load_without_weights(name, uses_chat, system_prompt), name)


def load_without_weights(
    name: str, uses_chat: bool = False, system_prompt: str | None = None
) -> LanguageModel:
    """The tokenizer, and the model on META: enough to tokenize and to count. See `load_model`.

    Weights that a folder has are compared with the model by name and shape; they are not read.
    """
    _check_name(name)
    with _explain_errors(name, "its tokenizer "):
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    model = _load_architecture(name)
    if any(Path(name).glob("*.safetensors")):
        check_weights(name, model)
    context = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(context, int):
        message = "its config.json lacks max_position_embeddings; add the length of its context"
        raise InputError(message, option="--model", file=name)
    ends = _set_special_tokens(name, tokenizer, model)
    chat = load_chat(tokenizer, system_prompt) if uses_chat else None
    if chat is not None:
        ends = ends | {chat.end}
    return LanguageModel(model, tokenizer, context, ends, chat)


def _check_name(name: str) -> None:
    if not Path(name).is_dir() and not is_hub_name(name):
        message = "is neither a folder nor the name of a model on the hub (owner/name)"
        raise InputError(f"{message}; check the path", option="--model", file=name)
    if Path(name).is_dir() and not (Path(name) / "config.json").exists():
        message = "has no config.json; save a model of transformers there"
        raise InputError(message, option="--model", file=name)
    if (Path(name) / "adapter_config.json").exists():  # transformers would load another model
        message = "has an adapter next to a model; merge it into the model, or remove it"
        raise InputError(message, option="--model", file=name)


def _set_special_tokens(
    name: str, tokenizer: PreTrainedTokenizerBase, model: "PreTrainedModel"
) -> frozenset[int]:
    """The token ids that end a text, by the tokenizer and by the generation config.

    If the tokenizer lacks an end or padding token that the model knows, it gets one.
    """
    vocabulary = model.get_input_embeddings().num_embeddings
    if tokenizer.vocab_size > vocabulary:
        message = f"its tokenizer has {tokenizer.vocab_size} tokens, its model {vocabulary}"
        fix = "save the tokenizer of this model there"
        raise InputError(f"{message}; {fix}", option="--model", file=name)
    stated = model.generation_config.eos_token_id
    ids = [tokenizer.eos_token_id, *(stated if isinstance(stated, list) else [stated])]
    known = range(vocabulary)
    ends = [end for end in ids if end in known and tokenizer.convert_ids_to_tokens(end)]
    if not ends:
        message = "neither its tokenizer nor its generation config has an end of sequence"
        raise InputError(f"{message}; set the tokenizer's eos_token", option="--model", file=name)
    prompt_ids = tokenizer("?")["input_ids"]
    if prompt_ids and prompt_ids[-1] in ends:
        message = "its tokenizer adds an end of sequence to prompts"
        fix = "save it with add_eos_token=False"
        raise InputError(f"{message}; {fix}", option="--model", file=name)
    if tokenizer.eos_token_id not in ends:
        tokenizer.eos_token_id = ends[0]
    if tokenizer.pad_token_id not in known:
        tokenizer.pad_token_id = tokenizer.eos_token_id  # padding is masked: any token will do
    return frozenset(ends)


def load_weights(lm: LanguageModel, name: str) -> LanguageModel:
    """The language model with the weights of a folder or hub name, on this process's device."""
    return lm._replace(model=_load_weights(name, own_device()))


def _load_weights(name: str, device: torch.device) -> "PreTrainedModel":
    # cuDNN's attention is torch's first choice on an H100: with some masks its gradients are NaN
    # (pytorch#196678), and each new length costs 23 to 37 ms for a plan.
    torch.backends.cuda.enable_cudnn_sdp(False)
    with _explain_errors(name), _silence():
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            name, use_safetensors=True, **LOADING
        )
    _check_report(name, report)
    for weight_name, weight in model.named_parameters():
        if not weight.detach().sum().isfinite():
            message = f"its weight {weight_name} has NaN or infinite values; save the model again"
            raise InputError(message, option="--model", file=name)
    return _with_valid_generation_config(model.to(device)).eval()


def check_weights(folder: str, model: "PreTrainedModel") -> None:
    """Raises InputError unless a folder has all weights of a model, in their shapes, and no others.

    Only the headers of the files are read.
    """
    stored = {}
    with _explain_errors(folder), _silence():
        for file in get_local_safetensors_metadata(folder).files_metadata.values():
            for name, tensor in file.tensors.items():
                stored[name] = torch.empty(tensor.shape, device=META)
        _, report = type(model).from_pretrained(
            None, config=model.config, state_dict=stored, device_map=META, **LOADING
        )
    _check_report(folder, report)


def _check_report(name: str, report: dict[str, Any]) -> None:
    """Raises InputError if a report of LOADING says that weights and model do not fit."""
    shapes = []
    for weight, stored, expected in report["mismatched_keys"]:
        shapes.append(f"{weight} {tuple(stored)} in place of {tuple(expected)}")
    problems = {
        "its files lack weights of the model": report["missing_keys"],
        "its files have weights of another shape than config.json says": shapes,
        "its files have weights that config.json does not describe": report["unexpected_keys"],
    }
    for problem, weights in problems.items():
        if weights:
            some = ", ".join(sorted(weights)[:3]) + (", ..." if len(weights) > 3 else "")
            message = f"{problem} ({len(weights)}: {some}); save the whole model again"
            raise InputError(message, option="--model", file=name)


@contextmanager
def _silence() -> Iterator[None]:
    """In the block, transformers prints neither tables of weights nor a progress bar."""
    logging = transformers.utils.logging
    verbosity = logging.get_verbosity()
    logging.disable_progress_bar()  # of single files; a run has its own
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _load_architecture(name: str) -> "PreTrainedModel":
    """The model on META: the shapes of its weights."""
    with _explain_errors(name):
        with META:
            config = transformers.AutoConfig.from_pretrained(name)
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        try:
            model.generation_config = transformers.GenerationConfig.from_pretrained(name)
        except OSError as error:  # optional; if there is one, it says what ends a sequence
            if isinstance(error.__context__, json.JSONDecodeError | UnicodeDecodeError):
                raise
    return _with_valid_generation_config(model).eval()


@contextmanager
def _explain_errors(name: str, part: str = "") -> Iterator[None]:
    """In the block, an error of the libraries becomes an InputError with a fix."""
    try:
        yield
    except Exception as error:  # a damaged file may raise anything
        reason = first_line(error)
        if isinstance(error.__cause__, GatedRepoError):
            account = "then log in with `hf auth login`"
            reason = f"accept its licence at https://huggingface.co/{name}, {account}"
        elif isinstance(error.__cause__, LocalEntryNotFoundError):
            fix = f"run `hf download {name}` on a machine that can, and give --model the folder"
            reason = f"no such folder, and the hub cannot be reached; {fix}"
        message = f"{part}cannot be loaded: {reason}"
        raise InputError(message, option="--model", file=name) from error


def _with_valid_generation_config(model: "PreTrainedModel") -> "PreTrainedModel":
    """Keep only the end tokens of a generation config that transformers would refuse to save."""
    try:
        model.generation_config.validate(strict=True)
    except ValueError:
        ends = model.generation_config.eos_token_id
        model.generation_config = transformers.GenerationConfig(eos_token_id=ends)
    return model


def download_model(name: str) -> None:
    """This machine's first process downloads a model of the hub before all ranks read it.

    Raises InputError if the hub refuses, the disk is too small, or the weights are not those of the
    model; files that have arrived are kept.
    """
    if Path(name).is_dir() or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    files = ["*.json", "*.jinja", "*.model", "*.safetensors", "*.txt"]
    # original/ has Llama's weights a second time, in another format.
    fetch = partial(snapshot_download, name, allow_patterns=files, ignore_patterns=["original/*"])
    try:
        with suppress(DryRunError):  # the hub cannot be reached, but the model may be here
            _check_disk_for(fetch(dry_run=True))
        folder = fetch()
    except Exception as error:  # also those of the libraries that the hub's library is made of
        message = f"cannot be downloaded: {first_line(error)}; repeat the command to resume"
        raise InputError(message, option="--model", file=name) from error
    check_weights(folder, _load_architecture(folder))


def _check_disk_for(files: Sequence) -> None:
    missing = sum(file.file_size or 0 for file in files if file.will_download)
    cache = Path(constants.HF_HUB_CACHE)  # exists, because a file of the model has arrived already
    partly_there = sum(part.stat().st_size for part in cache.rglob("*.incomplete"))
    free = shutil.disk_usage(cache).free + partly_there
    if missing > free:
        needs = f"{missing / 1e9:,.1f} GB are missing, and {cache} has {free / 1e9:,.1f} GB free"
        raise OSError(f"{needs}; make room, or set HF_HOME to another folder")


def free_memory() -> None:
    """Return the memory of models that nothing refers to any more to the GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- training: shards and optimizer --------------------------------------------------------------
class Sharding(NamedTuple):
    """How forward and backward passes are computed; it does not change the float32 gradient."""

    dtype: Dtype = "float32"  # of forward and backward passes; gradients are summed in float32
    gradient_checkpointing: bool = False  # a layer keeps its input and is recomputed
    reshard_after_forward: bool = True  # a layer's weights are gathered again for its backward


def load_for_training(
    lm: LanguageModel,
    name: str,
    sharding: Sharding,
    lora_rank: int | None = None,
    lora_seed: int = 0,
) -> LanguageModel:
    """The model `name` on this process's device, sharded over the ranks. Every rank calls this.

    lora_rank: adds adapters of this rank to the model; for one process. Rank zero alone reads the
    weights and sends them to the others, which is faster than reading them several times.
    """
    cpu = torch.device("cpu")
    if ranks() == 1:
        model = _load_weights(name, cpu)
        if lora_rank is not None:
            model = add_adapters(model, lora_rank, lora_seed)
        shard(model, sharding)
        if not dist.is_initialized():
            model.to(own_device())
        return lm._replace(model=model)

    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    whole = _load_weights(name, cpu) if rank() == 0 else None
    model = _load_architecture(name)
    shard(model, sharding)
    model.to_empty(device=own_device())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole.state_dict() if whole else {}, options=options)
    # A state dict lacks some buffers, such as the frequencies of rotary positions.
    [buffers, *_] = gather(list(whole.buffers()) if whole else [])
    for buffer, value in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(value)
    return lm._replace(model=model)


def shard(model: "PreTrainedModel", sharding: Sharding) -> None:
    """Shard a model with FSDP2 by layer: each rank keeps a part of the float32 weights.

    Without a process group the model stays an ordinary one.
    """
    if not (sharding.gradient_checkpointing or dist.is_initialized()):
        return
    layers = getattr(model.get_decoder(), "layers", None)  # so named by Llama and most since
    if layers is None:
        message = f"{type(model).__name__} has no decoder.layers; train it with one process"
        raise InputError(message, option="--model")
    if sharding.gradient_checkpointing:
        for layer in layers:  # patched, because transformers recomputes in train mode only
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    if dist.is_initialized():
        _shard_layers(model, layers, sharding)


def _shard_layers(model: "PreTrainedModel", layers: Sequence, sharding: Sharding) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options = {}
    if not sharding.reshard_after_forward:
        options["reshard_after_forward"] = False
    if sharding.dtype != "float32":
        dtype = getattr(torch, sharding.dtype)
        options["mp_policy"] = MixedPrecisionPolicy(dtype, reduce_dtype=torch.float32)
    groups = [[layer] for layer in layers]
    head = model.get_output_embeddings()
    is_tied = head.weight is model.get_input_embeddings().weight
    if not is_tied and hasattr(model.get_decoder(), "norm"):
        groups.append([model.get_decoder().norm, head])
    groups.append([model])
    for modules in groups:
        # The backward pass begins with the head: its weights need not be gathered a second time.
        keeps = {"reshard_after_forward": False} if head in modules else {}
        fully_shard(modules, **options | keeps)
        if dist.get_world_size() > 1:
            # A step's denominator counts the completions of all ranks: sum gradients, no average.
            modules[0].set_gradient_divide_factor(1.0)
            modules[0].set_force_sum_reduction_for_comms(True)


def make_optimizer(name: OptimizerName, model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW, SGD, or Adafactor as HuggingFace's trainer has it; constant rate, no weight decay.

    The paper uses Adafactor (Section 4.2).
    """
    optimizers = {
        "adamw": partial(torch.optim.AdamW, weight_decay=0.0),
        "sgd": torch.optim.SGD,
        "adafactor": Adafactor,
    }
    return optimizers[name](model.parameters(), lr=lr)
