"""vLLM's code for a GPU, Model Runner V2 and its kernels, run on a CPU by Triton's interpreter."""

from pathlib import Path

import pytest
from engine_helpers import (
    MODEL,
    PROMPT,
    START,
    deviating_tokens,
    exact_logprobs,
    exact_token_logprobs,
    generate,
    make_prompts,
)

from toprlib.sampling import Engine, SamplingParameters
from toprlib.vllm_client import VllmOptions, VllmProcess, sample_completions

INTERPRETED = Path(__file__).parent / "interpreted"
VARIABLES = f"TRITON_INTERPRET=1 VLLM_USE_V2_MODEL_RUNNER=1 PYTHONPATH='{INTERPRETED}'"


@pytest.fixture
def sample(python, lm, tmp_path):
    """sample(prompt, n, seed, max_new_tokens, top_k) -> samples, by vLLM's code for a GPU."""
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\n{VARIABLES} exec "{python}" "$@"\n')
    interpreter.chmod(0o755)
    log = tmp_path / "vllm.log"
    process = VllmProcess(MODEL, VllmOptions(interpreter, 1, "float32", 200, log))

    def sample(prompt, n, seed, max_new_tokens, top_k):
        parameters = SamplingParameters(max_new_tokens=max_new_tokens, top_k=top_k)

        def generate_samples(*arguments):
            return sample_completions(process, lm, parameters, *arguments)

        [samples] = generate(Engine(generate_samples), make_prompts(lm, [prompt]), n, seed)
        assert "Using V2 Model Runner" in log.read_text()
        return samples

    yield sample
    process.close()


@pytest.mark.slow
def test_samples_have_the_models_distribution(sample, lm):
    samples = sample(PROMPT, n=3, seed=5, max_new_tokens=8, top_k=500)
    # Completion j has the seed of its prompt plus j.
    assert sample(PROMPT, n=2, seed=6, max_new_tokens=8, top_k=500) == samples[1:]
    for one in samples:
        expected = exact_token_logprobs(lm, PROMPT, one.token_ids)
        assert one.token_logmu_engine == pytest.approx(expected, abs=1e-4)

    of_all = sample(START, n=150, seed=0, max_new_tokens=1, top_k=lm.model.config.vocab_size)
    tokens = [one.token_ids[0] for one in of_all]
    logprobs = exact_logprobs(lm, START, tokens[:1])[0]  # (V,)
    assert deviating_tokens(tokens, logprobs.exp().tolist()) == []

    # With top-k 3, only three tokens occur, with their log-probabilities among all tokens.
    top_3 = set(logprobs.topk(3).indices.tolist())
    of_top_3 = sample(START, n=15, seed=0, max_new_tokens=1, top_k=3)
    for one, token_of_all in zip(of_top_3, tokens, strict=False):
        [token] = one.token_ids
        assert token in top_3
        assert one.token_logmu_engine == pytest.approx([logprobs[token].item()], abs=1e-4)
        assert token == token_of_all or token_of_all not in top_3  # the same random number
