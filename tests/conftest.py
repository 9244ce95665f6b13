"""Settings and data that all tests share."""

import gc
import os
import signal
from dataclasses import replace

import pytest
from helpers import SMALL, checksums, run_small
from hypothesis import settings

import train_gsm8k as gsm8k
from toprlib.language_model import load_model, load_tokenizer

# Deterministic, so that a failure is one for everybody; no deadline, because no test is about time.
settings.register_profile("same", derandomize=True, deadline=None, database=None)
settings.register_profile("random", max_examples=1000, deadline=None, database=None)
settings.load_profile(os.environ.get("FUZZ_EXAMPLES", "same"))

# Tests are about CPUs: what they compare with is computed there. `make smoke` is for GPUs.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

# A shell that starts tests in the background has them ignore SIGINT, and runs would inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def lm():
    """The default model; a test that changes something in it puts it back."""
    name = gsm8k.Settings().model
    return load_tokenizer(name)._replace(model=load_model(name))


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """run(**changes): the folder of a finished run of SMALL with changes, to be read only.

    Tests share it: it is made once in this process.
    """
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


def pytest_collection_finish():
    """A run collects garbage when it closes a model; it need not look through all modules."""
    gc.freeze()
