"""Language models and their tokenizers."""

import re
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from pipeline.records import InputError


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


def load_model(name: str) -> LanguageModel:
    """The model in float32, on the GPU if there is one.

    name: a folder or the name of a model on the hub; safetensors only, no code of its own is run.
    InputError where it cannot be loaded.
    """
    if not Path(name).is_dir() and not is_hub_name(name):
        raise InputError(f"--model {name}: is neither a folder nor the name of a model on the hub (owner/name)")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, use_safetensors=True)
    except (OSError, ValueError) as error:
        raise InputError(f"--model {name}: cannot be loaded: {str(error).splitlines()[0]}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token_id = tokenizer.eos_token_id  # padding is always masked: any token will do
    return LanguageModel(model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer)


def is_hub_name(name: str) -> bool:
    """Whether `name` has the form of a model or data set on the hub, owner/name.

    >>> is_hub_name("openai/gsm8k"), is_hub_name("./gsm8k"), is_hub_name("gsm8k")
    (True, False, False)
    """
    return re.fullmatch(r"\w[\w-]*/[\w.-]+", name) is not None


def save_model(lm: LanguageModel, folder: Path) -> None:
    """Write an ordinary `transformers` folder."""
    lm.model.save_pretrained(folder)
    lm.tokenizer.save_pretrained(folder)
