"""vLLM's code for a GPU, Model Runner V2 and its kernels, run on a processor by Triton's interpreter."""

from pathlib import Path

import pytest
from engines import PROMPT, START, deviating, drawn, logps_after

import train_gsm8k as gsm8k
from pipeline.sampling import SamplingParameters
from pipeline.vllm.client import vllm_engine

VARIABLES = f"TRITON_INTERPRET=1 VLLM_USE_V2_MODEL_RUNNER=1 PYTHONPATH='{Path(__file__).parent / 'interpreted'}'"


@pytest.mark.slow
def test_requests_as_ours_are_answered_with_the_models_own_distribution(python, lm, tmp_path):
    interpreting = (
        tmp_path / "python"
    )  # the interpreter that has vLLM, which runs its code for a GPU
    interpreting.write_text(f'#!/bin/sh\n{VARIABLES} exec "{python}" "$@"\n')
    interpreting.chmod(0o755)
    log = tmp_path / "vllm.log"
    settings = gsm8k.Settings(engine="vllm", vllm_python=interpreting)
    with vllm_engine(settings.model, lm, 200, settings, log) as engine:

        def draw(prompt, n, seed, **sampling):
            return drawn(engine, SamplingParameters(**sampling), [prompt], n, seed)[0]

        assert "Using V2 Model Runner" in log.read_text()
        whole = draw(PROMPT, 3, 5, max_new_tokens=8, top_k=500)
        assert (
            draw(PROMPT, 2, 6, max_new_tokens=8, top_k=500) == whole[1:]
        )  # completion k has its prompt's seed + k
        for completion in whole:
            assert completion.token_logmu_engine == pytest.approx(
                logps_after(lm, PROMPT, completion.token_ids)[0], abs=1e-4
            )

        # With top-k 3 three tokens alone are drawn, with the log-probabilities that they have among all.
        free = draw(START, 150, 0, max_new_tokens=1, top_k=lm.model.config.vocab_size)
        known = logps_after(lm, START, free[0].token_ids)[1][0]
        assert (
            deviating([completion.token_ids[0] for completion in free], known.exp().tolist()) == []
        )
        kept = set(known.topk(3).indices.tolist())
        for one, other in zip(
            free[:15], draw(START, 15, 0, max_new_tokens=1, top_k=3), strict=True
        ):
            assert other.token_ids[0] in kept
            assert other.token_logmu_engine == pytest.approx(
                [known[other.token_ids[0]].item()], abs=1e-4
            )
            assert (
                one.token_ids == other.token_ids or one.token_ids[0] not in kept
            )  # the same noise
