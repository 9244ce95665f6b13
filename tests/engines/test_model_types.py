"""Model types of transformers: log pi of a row alone, in a batch, and with a cache is one number.

Or the model is refused, before anything is computed.
"""

import shutil
from pathlib import Path

import pytest
import torch
from helpers import MODEL, exact_logprobs, generate, make_prompts, token_logprobs
from transformers import AutoConfig, AutoModelForCausalLM

import topr
from toprlib.dataset import collate
from toprlib.hf_sampler import hf_engine
from toprlib.language_model import check_architecture, load_model, load_tokenizer
from toprlib.records import Example, InputError
from toprlib.settings import Settings

SIZES = {
    "vocab_size": 768,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 96,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "factor": 8.0}
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
YARN["original_max_position_embeddings"] = 24
WINDOWS = {"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 8}
RIGHT = {  # type -> what its config adds
    "llama": {"rope_parameters": DYNAMIC},
    "phi3": {"rope_parameters": LONG_ROPE | FACTORS, "original_max_position_embeddings": 64},
    "gemma3_text": WINDOWS,
    "gpt2": {},  # which counts positions from the start
    "mistral": {"sliding_window": 8},
    "mixtral": {"num_local_experts": 4},
}
MORE = {
    **{name: {} for name in ("bloom", "cohere", "gemma2", "glm", "gpt_neox", "granite")},
    **{name: {} for name in ("olmo2", "opt", "phi", "qwen3", "stablelm", "starcoder2")},
    "qwen2": {"rope_parameters": YARN},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt_oss": {"num_local_experts": 4, "rope_parameters": YARN, **WINDOWS},
}
REFUSED = {
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba": {},
    "minimax": {"num_local_experts": 4},
}
MORE_REFUSED = {
    **{name: {} for name in ("bamba", "falcon_h1", "recurrent_gemma")},
    "qwen3_next": {"num_experts": 4},
}


def save_model(folder: Path, kind: str, more: dict) -> str:
    """A model with random weights that are large enough for a rotation to matter."""
    config = AutoConfig.for_model(kind, **SIZES, **more)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, std=0.15)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(MODEL, name), folder)
    return str(folder)


def slow(kinds: dict) -> list:
    return [pytest.param(*item, marks=pytest.mark.slow) for item in kinds.items()]


@pytest.mark.parametrize(("kind", "more"), [*RIGHT.items(), *slow(MORE)])
def test_log_pi_of_a_row_is_one_number(kind, more, tmp_path):
    """The sampler's likeliest tokens are those without a cache, up to rounding."""
    name = save_model(tmp_path, kind, more)
    check_architecture(name)
    lm = load_tokenizer(name)
    assert lm.context == (64 if kind == "phi3" else 96)
    lm = lm._replace(model=load_model(name))
    prompts = make_prompts(lm, ["Q: 3 + 4?\nA:", "Q: 1?"])
    longest = max(len(prompt.ids) for prompt in prompts)
    settings = Settings(max_new_tokens=lm.context - longest, top_k=1)
    with hf_engine(lm, name, settings, ()) as engine:
        completions = generate(engine, prompts, n=1)
    examples = []
    for prompt, [fields] in zip(prompts, completions, strict=True):
        logprobs = exact_logprobs(lm, prompt.text, fields["token_ids"])  # (T, V)
        actual = token_logprobs(logprobs, fields["token_ids"])
        assert (logprobs.amax(-1) - actual).max() < 1e-4
        for length in (len(fields["token_ids"]), 5):
            ids = fields["token_ids"][:length]
            examples.append(Example(prompt.ids, ids, 1.0, len(examples)))
    with torch.no_grad():
        batch = collate(examples)
        in_a_batch = topr.token_logprobs(lm.model, batch)
    for example, row, mask in zip(examples, in_a_batch, batch.mask, strict=True):
        with torch.no_grad():
            [alone] = topr.token_logprobs(lm.model, collate([example]))
        torch.testing.assert_close(row[mask > 0], alone, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("kind", "more"), [*REFUSED.items(), *slow(MORE_REFUSED)])
def test_a_model_with_another_state_is_refused(kind, more, tmp_path):
    AutoConfig.for_model(kind, **SIZES, **more).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="--engine vllm"):
        check_architecture(str(tmp_path))
