"""Language models and their tokenizers."""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from pipeline.records import InputError
from pipeline.runtime.checksums import check_folder
from pipeline.runtime.processes import device as own_device


class LanguageModel(NamedTuple):
    """A causal language model and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def context(self) -> int:
        """The most tokens that prompt and completion may have together."""
        return self.model.config.max_position_embeddings

    @property
    def ends(self) -> set[int]:
        """The token ids that end a sequence."""
        eos = self.model.generation_config.eos_token_id
        return set(eos) if isinstance(eos, list) else {eos}

    def text(self, token_ids: Sequence[int]) -> str:
        """What the tokens of a completion spell, without the end of sequence."""
        size = len(token_ids) - (len(token_ids) > 0 and token_ids[-1] in self.ends)
        return self.tokenizer.decode(token_ids[:size], clean_up_tokenization_spaces=False)


def load_model(name: str, device: torch.device | None = None, trust_remote_code: bool = False) -> LanguageModel:
    """The model in float32, on this process's own GPU if there is one, or on another device.

    name: a folder or the name of a model on the hub; safetensors only, and code of its own is run only if it is
    trusted. InputError where it cannot be loaded, or a run has written it and it has changed since.
    """
    check_folder(Path(name))
    options = {"dtype": torch.float32, "use_safetensors": True, "trust_remote_code": trust_remote_code}
    tokenizer, model = _load(name, lambda: AutoModelForCausalLM.from_pretrained(name, **options), trust_remote_code)
    return LanguageModel(model.to(device or own_device()).eval(), tokenizer)


def load_meta(name: str, trust_remote_code: bool = False) -> LanguageModel:
    """The tokenizer, and the model without its weights: enough to encode samples, to count and to plan."""

    def build() -> PreTrainedModel:
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
        with suppress(OSError):  # not every folder has one; where there is one, it knows what ends a sequence
            model.generation_config = GenerationConfig.from_pretrained(name)
        return model

    tokenizer, model = _load(name, build, trust_remote_code)
    return LanguageModel(model.eval(), tokenizer)


def _load(
    name: str, build: Callable[[], PreTrainedModel], trust_remote_code: bool
) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    if not Path(name).is_dir() and not is_hub_name(name):
        raise InputError(f"--model {name}: is neither a folder nor the name of a model on the hub (owner/name)")
    try:
        tokenizer, model = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code), build()
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"--model {name}: cannot be loaded: {str(error).splitlines()[0]}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = tokenizer.eos_token_id  # padding is always masked: any token will do
    return tokenizer, model


def decoder_layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    """The layers of a decoder, as Llama and most models since call them; InputError where there are none so called."""
    layers = getattr(model.get_decoder(), "layers", None)
    if layers is None:
        raise InputError(
            f"--model: {type(model).__name__} has no decoder.layers; it can be trained by one process only"
        )
    return layers


def is_hub_name(name: str) -> bool:
    """Whether `name` has the form of a model or data set on the hub, owner/name.

    >>> is_hub_name("openai/gsm8k"), is_hub_name("./gsm8k"), is_hub_name("gsm8k")
    (True, False, False)
    """
    return re.fullmatch(r"\w[\w-]*/[\w.-]+", name) is not None
