"""Engines that tests share."""

from contextlib import ExitStack

import pytest
from helpers import MODEL

from toprlib import hf_sampler, vllm_client
from toprlib.records import Engine
from toprlib.settings import Settings

collect_ignore = ["fake_vllm"]  # a module of another interpreter


@pytest.fixture
def make_hf_engine(lm):
    """make_hf_engine(lm=lm, stop=(), **changes): an engine in this process."""

    def make(lm=lm, stop=(), **changes):
        settings = Settings(**changes)

        def generate(prompts, n, seed):
            seeds = range(seed, seed + n * len(prompts))
            temperature = settings.temperature
            return hf_sampler.sample_completions(lm, settings, stop, prompts, seeds, temperature)

        return Engine(generate)

    return make


@pytest.fixture
def make_vllm_engine(lm, tmp_path):
    """make_vllm_engine(python, stop=(), **changes): an engine of vLLM until the test ends."""
    with ExitStack() as stack:

        def make(python, stop=(), model=MODEL, **changes):
            settings = Settings(engine="vllm", vllm_python=python, out=tmp_path, **changes)
            engine = vllm_client.vllm_engine(lm, model, settings, stop, max_tokens=200)
            return stack.enter_context(engine)

        yield make
