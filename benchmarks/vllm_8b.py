"""Tokens a second of vLLM at the shape of Llama 3 8B, on one GPU, with random weights.

    python benchmarks/vllm_8b.py

Requests are those of toprlib's worker: prompts of 1,100 tokens, of which 1,000 are the same in all,
and completions of 205 tokens. Prints lines of JSON.
"""

import json
import os
import random
import time

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
}

import vllm
from transformers import LlamaConfig

FOLDER = "/tmp/llama8b"
CONFIG = LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    architectures=["LlamaForCausalLM"],
    dtype="bfloat16",
    tie_word_embeddings=False,
)


def start() -> vllm.LLM:
    """The engine, with the options of toprlib/vllm_client.py and random weights."""
    return vllm.LLM(
        model=FOLDER,
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        max_model_len=1612,
        enable_prefix_caching=True,
        gpu_memory_utilization=0.85,
        compilation_config={"pass_config": {"fuse_allreduce_rms": False}},
        attention_config={"backend": "FLASH_ATTN"},
    )


def sample(llm: vllm.LLM, rng: random.Random, prompts: int, is_seeded: bool = True) -> None:
    """Sample 16 completions of each prompt, and print the speed."""
    shots = [rng.randrange(100_000) for _ in range(1000)]
    requests = []
    parameters = []
    for i in range(prompts):
        question = [rng.randrange(100_000) for _ in range(100)]
        requests.append({"prompt_token_ids": shots + question})
        parameters.append(
            vllm.SamplingParams(
                n=16,
                seed=1 + i * 16 if is_seeded else None,
                logprobs=0,
                temperature=1.0,
                top_p=1.0,
                top_k=500,
                max_tokens=205,
                ignore_eos=True,
                detokenize=False,
            )
        )
    begun = time.perf_counter()
    outputs = llm.generate(requests, parameters, use_tqdm=False)
    seconds = time.perf_counter() - begun
    tokens = 0
    for output in outputs:
        tokens += sum(len(completion.token_ids) for completion in output.outputs)
    line = {"prompts": prompts, "n": 16, "is_seeded": is_seeded, "seconds": seconds}
    print(json.dumps(line | {"tokens_per_second": tokens / seconds}), flush=True)


def main() -> None:
    """Start, warm up, and sample 1,024 completions with seeds and without."""
    CONFIG.save_pretrained(FOLDER)
    begun = time.perf_counter()
    llm = start()
    print(json.dumps({"start_seconds": time.perf_counter() - begun}), flush=True)
    rng = random.Random(0)
    sample(llm, rng, 4)
    sample(llm, rng, 64)
    sample(llm, rng, 64, is_seeded=False)


if __name__ == "__main__":
    main()
