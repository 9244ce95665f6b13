"""A causal language model: its tokenizer, its weights, and how texts become token ids."""

from __future__ import annotations  # for types of transformers, which take seconds to import

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

from toprlib.distributed import device as own_device
from toprlib.records import InputError

TAIL = 100  # the last characters of a prompt, on which tokens after it may depend
NO_LIMIT = 1 << 30  # tokens of a context, for models without positions, such as Mamba


class LanguageModel(NamedTuple):
    """A causal language model and its tokenizer."""

    model: transformers.PreTrainedModel | None  # None: only texts and token ids are needed yet
    tokenizer: transformers.PreTrainedTokenizerBase
    ends: Sequence[int]  # the token ids that end a completion; text gets the first one
    context: int  # the most tokens that prompt and completion may have together
    chat: bool = False  # whether prompts are in the tokenizer's chat template

    def prompt_ids(self, prompts: Sequence[str]) -> list[list[int]]:
        """The token ids of prompts. A chat template has written all special tokens already.

        The begin of text occurs once, whether a prompt has it or the tokenizer adds it.
        """
        encoded = self.tokenizer(list(prompts), add_special_tokens=not self.chat)
        begin = self.tokenizer.bos_token_id
        for ids in encoded["input_ids"]:
            if ids[:2] == [begin, begin]:
                del ids[0]
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


def load_tokenizer(name: str, uses_chat: bool = False) -> LanguageModel:
    """The tokenizer of a folder or hub name, without the model's weights.

    A completion ends with the end of a turn (with `uses_chat`), or with the end of sequence of the
    tokenizer or of the generation config. Raises InputError if none of them has an end, if
    prompts would end with one, or for a model that cannot be trained.
    """
    if Path(name, "adapter_config.json").exists():  # transformers would load the adapter's base
        raise InputError(f"--model {name}: has an adapter next to a model; merge the adapter first")
    try:
        config = transformers.AutoConfig.from_pretrained(name)
        _check_config(config)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    except ValueError as error:  # a folder without a model, or without its tokenizer
        raise InputError(f"--model {name}: {error}") from None
    ends = [tokenizer.eos_token_id]
    if uses_chat and not tokenizer.chat_template:
        raise InputError("--chat: the tokenizer has no chat template; remove --chat")
    if uses_chat:
        ends.insert(0, _end_of_turn(tokenizer))  # None for GLM, whose generation config has ends
    try:
        stated = transformers.GenerationConfig.from_pretrained(name).eos_token_id
    except OSError:
        stated = None  # a model need not have the file
    ends += stated if isinstance(stated, list) else [stated]
    ends = [end for end in dict.fromkeys(ends) if end is not None]
    if not ends:
        message = "neither tokenizer nor generation config has an end of sequence; set eos_token"
        raise InputError(f"--model {name}: {message}")
    if tokenizer("?")["input_ids"][-1] in ends:
        message = "the tokenizer ends prompts; save it with add_eos_token=False"
        raise InputError(f"--model {name}: {message}")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = ends[0]  # padding is masked: any token will do
    context = _find_context(config.get_text_config())
    return LanguageModel(None, tokenizer, ends, context, uses_chat)


def _check_config(config: transformers.PretrainedConfig) -> None:
    if getattr(config, "quantization_config", None):
        raise ValueError("its weights are quantized, which cannot be trained; choose the original")
    is_causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if config.is_encoder_decoder or not is_causal:
        raise ValueError(f"{config.model_type} is no causal language model; choose another model")


def _find_context(config: transformers.PretrainedConfig) -> int:
    """The most tokens of a text; with LongRoPE, of the original context.

    A longer text would change the position factors of all rows of its batch.
    """
    context = getattr(config, "max_position_embeddings", NO_LIMIT)
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *rope.values()):  # some models have a part for each kind of layer
        if isinstance(part, dict) and part.get("rope_type") == "longrope":
            context = min(context, part["original_max_position_embeddings"])
    return context


def _end_of_turn(tokenizer: transformers.PreTrainedTokenizerBase) -> int | None:
    """The first added token after an answer in the chat template, as <|im_end|>; None without."""
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "ANSWER"}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False)
    after = tokenizer(chat.rpartition("ANSWER")[2], add_special_tokens=False)["input_ids"]
    for token in after:
        if token in tokenizer.added_tokens_decoder and tokenizer.decode([token]).strip():
            return token
    return None


def check_architecture(name: str) -> None:
    """Raises InputError for a model that `hf_sampler` cannot sample from. Nothing is computed."""
    config = transformers.AutoConfig.from_pretrained(name)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    cache = transformers.DynamicCache(config=config)
    kinds = {type(layer) for layer in cache.layers}
    copied = {transformers.DynamicLayer, transformers.cache_utils.DynamicSlidingWindowLayer}
    if model._is_stateful or kinds - copied:
        message = "has a state besides keys and values, which --engine hf cannot copy"
        raise InputError(f"--model {name}: {message}; use --engine vllm")


def load_model(name: str, device: torch.device | None = None) -> transformers.PreTrainedModel:
    """The model of a folder or hub name in float32, by default on this process's device.

    Raises InputError unless its files have all weights of the model, no others, and finite values,
    and weights that its config ties are one.
    """
    # cuDNN's attention is torch's first choice on an H100: with some masks its gradients are NaN
    # (pytorch#196678), and each new length costs 23 to 37 ms for a plan.
    torch.backends.cuda.enable_cudnn_sdp(False)
    transformers.utils.logging.disable_progress_bar()  # of single files; a run has its own
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        name, dtype=torch.float32, use_safetensors=True, output_loading_info=True
    )
    for key in ("missing_keys", "unexpected_keys"):  # transformers draws missing ones at random
        if report[key]:
            names = sorted(report[key])[:3]
            message = f"its files do not fit its config: {key} {names}; save the whole model again"
            raise InputError(f"--model {name}: {message}")
    # `all_tied_weights_keys` no longer has weights that transformers found to differ.
    for tied, source in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if model.get_parameter(tied) is not model.get_parameter(source):
            message = f"its config ties {tied} to {source}, and its files have both"
            raise InputError(f"--model {name}: {message}; set tie_word_embeddings to false")
    for weight_name, weight in model.named_parameters():
        if not weight.detach().sum().isfinite():
            message = f"{weight_name} has NaN or infinite values; save the model again"
            raise InputError(f"--model {name}: {message}")
    return model.to(device or own_device()).eval()


def free_gpu() -> None:
    """Return the memory of models that nothing refers to any more to the GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
