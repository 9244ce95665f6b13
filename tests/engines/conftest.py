"""Engines that tests share."""

from functools import partial

import pytest
from engine_helpers import MODEL

from toprlib import hf_sampler, vllm_client
from toprlib.sampling import Engine
from toprlib.vllm_client import VllmOptions, VllmProcess

collect_ignore = ["fake_vllm", "interpreted"]  # modules of other interpreters


@pytest.fixture(scope="session")
def vllm_process(python, tmp_path_factory):
    """One process of vLLM with the tiny model; a start takes a minute."""
    log = tmp_path_factory.mktemp("vllm") / "vllm.log"
    process = VllmProcess(MODEL, VllmOptions(python, 1, "float32", 200, log))
    yield process
    process.close()


@pytest.fixture
def make_hf_engine(lm):
    """parameters -> an engine in this process."""
    return lambda parameters: Engine(partial(hf_sampler.sample_completions, lm, parameters))


@pytest.fixture
def make_vllm_engine(vllm_process, lm):
    """parameters -> an engine of the shared process of vLLM."""
    sample = vllm_client.sample_completions
    return lambda parameters: Engine(partial(sample, vllm_process, lm, parameters))


@pytest.fixture(params=["hf", "vllm"])
def make_engine(request):
    """parameters -> each of the engines: what every engine does is tested with all of them."""
    return request.getfixturevalue(f"make_{request.param}_engine")
