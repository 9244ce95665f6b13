"""vLLM's code for a GPU, Model Runner V2 and its kernels, run on a processor by Triton's interpreter."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from engines import PROMPT, START, deviating, drawn, logps_after

import train_gsm8k as gsm8k
from pipeline.sampling import SamplingParameters
from pipeline.vllm.client import vllm_engine

HERE = Path(__file__).parent
VARIABLES = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1", "PYTHONPATH": str(HERE / "interpreted")}


@pytest.fixture(scope="module")
def interpreting(python, tmp_path_factory):
    """The interpreter that has vLLM, with the variables that make it run its code for a GPU."""
    script = tmp_path_factory.mktemp("interpreting") / "python"
    variables = " ".join(f"{name}='{value}'" for name, value in VARIABLES.items())
    script.write_text(f'#!/bin/sh\n{variables} exec "{python}" "$@"\n')
    script.chmod(0o755)
    return script


@pytest.mark.slow
def test_requests_as_ours_are_answered_with_the_models_own_distribution(interpreting, lm, tmp_path):
    log = tmp_path / "vllm.log"
    settings = gsm8k.Settings(engine="vllm", vllm_python=interpreting)
    with vllm_engine(settings.model, lm, 200, settings, log) as engine:

        def draw(prompt, n, seed, **sampling):
            return drawn(engine, SamplingParameters(**sampling), [prompt], n, seed)[0]

        assert "Using V2 Model Runner" in log.read_text()
        whole = draw(PROMPT, 3, 5, max_new_tokens=8, top_k=500)
        assert draw(PROMPT, 2, 6, max_new_tokens=8, top_k=500) == whole[1:]  # completion k has its prompt's seed + k
        for completion in whole:
            assert completion.token_logmu_engine == pytest.approx(
                logps_after(lm, PROMPT, completion.token_ids)[0], abs=1e-4
            )

        # With top-k 3 three tokens alone are drawn, with the log-probabilities that they have among all.
        free = draw(START, 150, 0, max_new_tokens=1, top_k=lm.model.config.vocab_size)
        known = logps_after(lm, START, free[0].token_ids)[1][0]
        assert deviating([completion.token_ids[0] for completion in free], known.exp().tolist()) == []
        kept = set(known.topk(3).indices.tolist())
        for one, other in zip(free[:15], draw(START, 15, 0, max_new_tokens=1, top_k=3), strict=True):
            assert other.token_ids[0] in kept
            assert other.token_logmu_engine == pytest.approx([known[other.token_ids[0]].item()], abs=1e-4)
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
    first, second = found["drawn"]
    assert deviating(first, found["p"]) == deviating(second, found["p"]) == []
    pairs = [i * j for i in found["p"] for j in found["p"]]
    for one, other in ((first, second), (first[:-1], first[1:])):  # positions, and seeds, that follow each other
        assert deviating([4 * i + j for i, j in zip(one, other, strict=True)], pairs) == []
