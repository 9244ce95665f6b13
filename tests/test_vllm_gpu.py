"""vLLM's code for a GPU, Model Runner V2 and its kernels, run on a processor by Triton's interpreter."""

import json
import math
import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch

import train_gsm8k as gsm8k
from pipeline.sampling import SamplingParameters
from pipeline.vllm.client import vllm_engine

HERE = Path(__file__).parent
VARIABLES = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1", "PYTHONPATH": str(HERE / "interpreted")}
PROMPT = "Q: Ada has 31 apples and finds 45 more. How many apples does Ada have now?\nA:"


@pytest.fixture(scope="module")
def interpreting(python, tmp_path_factory):
    """The interpreter that has vLLM, with the variables that make it run its code for a GPU."""
    script = tmp_path_factory.mktemp("interpreting") / "python"
    variables = " ".join(f"{name}='{value}'" for name, value in VARIABLES.items())
    script.write_text(f'#!/bin/sh\n{variables} exec "{python}" "$@"\n')
    script.chmod(0o755)
    return script


def logps_of(lm, prompt, token_ids):
    """log pi of the tokens behind the prompt, and of all tokens at the first of these places, in float64."""
    prompt_ids = lm.tokenizer(prompt)["input_ids"]
    ids = torch.tensor([prompt_ids + token_ids])
    with torch.no_grad():
        known = lm.model(ids).logits[0, len(prompt_ids) - 1 : -1].double().log_softmax(-1)
    return known.gather(1, ids[0, len(prompt_ids) :, None])[:, 0], known[0]


def deviates(count, n, p):
    """Whether a count is further from n p than chance makes it once in two million times."""
    return abs(count - n * p) > 5 * math.sqrt(n * p * (1 - p)) + 1


@pytest.mark.slow
def test_requests_as_ours_are_answered_with_the_models_own_distribution(interpreting, lm, tmp_path):
    log = tmp_path / "vllm.log"
    settings = gsm8k.Settings(engine="vllm", vllm_python=interpreting)
    with vllm_engine(settings.model, lm, 200, settings, log) as engine:

        def draw(prompt, n, seed, **sampling):
            return [c for _, c in engine([prompt], n, SamplingParameters(**sampling), seed)]

        assert "Using V2 Model Runner" in log.read_text()
        whole = draw(PROMPT, 3, 5, max_new_tokens=8, top_k=500)
        assert draw(PROMPT, 2, 6, max_new_tokens=8, top_k=500) == whole[1:]  # completion k has its prompt's seed + k
        for completion in whole:
            logps, _ = logps_of(lm, PROMPT, completion.token_ids)
            assert completion.token_logmu == pytest.approx(logps.tolist(), abs=1e-4)

        # Where many tokens are likely: with top-k 3 three alone are drawn, with the log-probabilities they have in all.
        start, n = "Q: Ada has", 150
        free = draw(start, n, 0, max_new_tokens=1, top_k=lm.model.config.vocab_size)
        known = logps_of(lm, start, free[0].token_ids)[1]
        found = Counter(c.token_ids[0] for c in free)
        likely = [token for token in range(len(known)) if known[token].exp() > 0.02]
        assert len(likely) > 5
        assert [(t, found[t]) for t in likely if deviates(found[t], n, known[t].exp().item())] == []
        kept = set(known.topk(3).indices.tolist())
        for one, other in zip(free[:15], draw(start, 15, 0, max_new_tokens=1, top_k=3), strict=True):
            assert other.token_ids[0] in kept
            assert other.token_logmu == pytest.approx([known[other.token_ids[0]].item()], abs=1e-4)
            assert one.token_ids == other.token_ids or one.token_ids[0] not in kept  # the same noise


@pytest.mark.slow
def test_the_kernels_are_right_where_the_vocabulary_takes_several_blocks(interpreting):
    script = [str(interpreting), str(HERE / "gpu_kernels.py")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(script, capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["top_k_is_right"]
    assert found["error_torch.float32"] < 1e-5  # of numbers near 10
    assert found["error_torch.bfloat16"] < 1e-5
    p, n = found["p"], len(found["drawn"][0])
    for drawn in found["drawn"]:
        assert [i for i in range(4) if deviates(drawn.count(i), n, p[i])] == []
    first, second = found["drawn"]
    for one, other in ((first, second), (first[:-1], first[1:])):  # positions, and seeds, that follow each other
        pairs = Counter(zip(one, other, strict=True))
        assert [(i, j) for i in range(4) for j in range(4) if deviates(pairs[i, j], len(one), p[i] * p[j])] == []
