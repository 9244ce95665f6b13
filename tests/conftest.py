"""Settings and data that all tests share."""

import gc
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings

import train_gsm8k as gsm8k
from toprlib.language_model import load_model

# Deterministic, so that a failure is one for everybody; no deadline, because no test is about time.
settings.register_profile("topr", derandomize=True, deadline=None, database=None)
settings.load_profile("topr")

# Tests are about processors: what they compare with, they compute there. `make test-gpu` is for GPUs.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

# A shell that starts tests in the background has them ignore SIGINT, and so would the runs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def real():
    """Where GSM8K's own files are; CI sets the variable, `GSM8K_DIR=... make test` hands it on."""
    if not os.environ.get("GSM8K_DIR"):
        pytest.skip("GSM8K_DIR is not set: the tests on GSM8K's own files did not run")
    return Path(os.environ["GSM8K_DIR"])


@pytest.fixture(scope="session")
def lm():
    """The model that ships with the project; whoever changes something in it puts it back."""
    return load_model(gsm8k.Settings().model)


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """run(**changes): the folder of a finished run of SMALL with changes, to be read only.

    Tests share it: it is made once in this process.
    """
    from run_helpers import SMALL, checksums, run_small

    folders = {}
    checksums_of = {}

    def finished_run(**changes):
        settings = replace(SMALL, **changes)
        if settings not in folders:
            folder = tmp_path_factory.mktemp("shared") / "run"
            run_small(folder, **changes)
            folders[settings] = folder
            checksums_of[folder] = checksums(folder)
        return folders[settings]

    yield finished_run
    changed = [folder for folder, sums in checksums_of.items() if checksums(folder) != sums]
    assert changed == []


@pytest.fixture(scope="session")
def python():
    """The interpreter that has vLLM: `make test-all` and `make test-vllm` make one and say where it is."""
    if not os.environ.get("VLLM_PYTHON"):
        pytest.skip("VLLM_PYTHON is not set: make test-vllm sets it")
    return Path(os.environ["VLLM_PYTHON"]).absolute()


@pytest.fixture(scope="session")
def vllm(python, lm, tmp_path_factory):
    """One engine of vLLM for all tests that can share it."""
    from toprlib.vllm_client import vllm_engine

    settings = gsm8k.Settings(engine="vllm", vllm_python=python)
    with vllm_engine(
        settings.model, lm, 200, settings, tmp_path_factory.mktemp("vllm") / "vllm.log"
    ) as engine:
        yield engine


# Run under other interpreters, with packages that this one lacks.
collect_ignore = ["interpreted", "verl_steps.py"]

LONGEST = "rehearsal restart vllm notebooks faults vllm_gpu run tiny figures_command verdicts training".split()


def pytest_collection_modifyitems(items):
    """The files that take longest come first, so that no process is left with one of them when the other has done."""
    names = [f"test_{name}" for name in LONGEST]
    items.sort(
        key=lambda item: names.index(item.path.stem) if item.path.stem in names else len(names)
    )


def pytest_collection_finish():
    """A run collects garbage whenever it closes a model; it need not look through all modules each time."""
    gc.freeze()
