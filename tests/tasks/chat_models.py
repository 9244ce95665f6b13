"""Small chat models: chat templates of two families, the tiny tokenizer, untrained weights."""

from pathlib import Path

import torch
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

from toprlib.settings import TINY

# As the families' public tokenizers write prompts, without tools.
LLAMA = """{%- for message in messages -%}
    {{- bos_token if loop.first else '' -}}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' -}}
    {{- message['content'] | trim -}}{{- '<|eot_id|>' -}}
{%- endfor -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' if add_generation_prompt else '' -}}"""
CHATML = """{%- if messages[0]['role'] != 'system' -%}
    {{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. ' -}}
    {{- 'You are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' if add_generation_prompt else '' -}}"""
TEMPLATES = {"llama3": LLAMA, "qwen2.5": CHATML}
MARKS = {  # the first begins a text, the second ends one; neither ends a turn
    "llama3": [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ],
    "qwen2.5": ["<|im_start|>", "<|endoftext|>", "<|im_end|>"],
}


def chat_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tiny tokenizer with the family's own tokens; Llama's puts the begin of text first."""
    begin, end = MARKS[name][:2]
    tokenizer = AutoTokenizer.from_pretrained(TINY / "base")
    tokenizer.add_special_tokens(
        {"eos_token": end, "pad_token": end, "extra_special_tokens": MARKS[name]}
    )
    if name == "llama3":
        tokenizer.bos_token = begin
        marks = [(begin, tokenizer.bos_token_id)]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{begin} $A", special_tokens=marks
        )
    tokenizer.chat_template = TEMPLATES[name]
    return tokenizer


def save_chat_model(folder: Path, name: str) -> Path:
    """The folder of a model that writes random ASCII; every tenth token ends the turn.

    Neither the tokenizer nor the generation config names the end of a turn.
    """
    tokenizer = chat_tokenizer(name)
    torch.manual_seed(0)
    marks = {mark: getattr(tokenizer, mark) for mark in ("eos_token_id", "pad_token_id")}
    # A single head of 32: vLLM has no smaller one for a processor.
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    sizes["vocab_size"] = len(tokenizer)
    config = LlamaConfig(max_position_embeddings=1024, bos_token_id=None, **sizes, **marks)
    model = LlamaForCausalLM(config)
    printable = [tokenizer.convert_tokens_to_ids(chr(letter)) for letter in range(33, 127)]
    # After the last norm the first coordinate is about 5.7: it decides which tokens may follow.
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 1.0
        head = model.get_output_embeddings().weight
        head[:, 0] = -5.0
        head[printable, 0] = 0.0
        head[tokenizer.convert_tokens_to_ids(MARKS[name][-1]), 0] = 0.4
    model.generation_config = GenerationConfig(**marks)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
