"""Weights that rank zero reads for all ranks, and what a saved model keeps."""

import gc
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from helpers import flat_weights, on_two_ranks, whole
from safetensors.torch import load_file, save_file
from torch.multiprocessing import ProcessRaisedException
from transformers import LlamaConfig, LlamaForCausalLM

from toprlib import training
from toprlib.distributed import gather, process_group
from toprlib.language_model import load_model, load_tokenizer
from toprlib.settings import Settings

MODEL = Settings().model
SGD = Settings(optimizer="sgd")


# ---- one process ---------------------------------------------------------------------------------
def test_saved_model_is_the_same_whatever_its_sampling_defaults(lm, tmp_path):
    """transformers loads temperature without do_sample, and refuses to save it."""
    folder = Path(shutil.copytree(MODEL, tmp_path / "model"))
    file = folder / "generation_config.json"
    stated = {"temperature": 0.6, "top_p": 0.9, "eos_token_id": [1, 7]}
    file.write_text(json.dumps(json.loads(file.read_text()) | stated))
    loaded = load_tokenizer(str(folder))
    policy, _ = training.load_for_training(loaded, str(folder), SGD)
    training.save_model(policy, tmp_path / "saved")
    assert torch.equal(flat_weights(load_model(str(tmp_path / "saved"))), flat_weights(lm.model))
    again = load_tokenizer(str(tmp_path / "saved"))
    assert again.ends == loaded.ends == [1, 7]
    assert again.prompt_ids(["1 + 1"]) == lm.prompt_ids(["1 + 1"])
    assert {path.name for path in tmp_path.iterdir()} == {"model", "saved"}


# ---- two ranks -----------------------------------------------------------------------------------
def open_group_in_a_group():
    with process_group():
        pass
    return torch.distributed.is_initialized()


def test_a_group_in_a_group_is_the_outer_one(tmp_path):
    """The verifier opens one for all of its runs."""
    assert on_two_ranks(open_group_in_a_group, tmp_path)


def load_on_ranks(folder):
    """How often each rank reads the weights; whether each has those of the folder."""
    calls = []

    def counting(*inputs):
        calls.append(inputs)
        return load_model(*inputs)

    training.load_model = counting
    policy, _ = training.load_for_training(load_tokenizer(MODEL), folder, SGD)
    loaded = policy.model
    expected = load_model(folder, torch.device("cpu"))
    is_same = torch.equal(whole(loaded.parameters()), whole(expected.parameters()))
    for value, other in zip(loaded.buffers(), expected.buffers(), strict=True):
        is_same = is_same and torch.equal(value, other)
    is_tied = loaded.lm_head.weight is loaded.model.embed_tokens.weight
    return gather(len(calls)), gather(is_same), is_tied, loaded.training


@pytest.mark.parametrize("is_tied", [True, False])
def test_rank_zero_reads_the_weights_for_both(is_tied, lm, tmp_path):
    config = LlamaConfig(**lm.model.config.to_dict() | {"tie_word_embeddings": is_tied})
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    result = on_two_ranks(load_on_ranks, tmp_path, str(tmp_path / "model"))
    assert result == ([1, 0], [True, True], is_tied, False)


def load_weights_of(folder):
    training.load_for_training(load_tokenizer(MODEL), folder, SGD)


def test_model_without_a_weight_ends_both_ranks(tmp_path):
    folder = Path(shutil.copytree(MODEL, tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ProcessRaisedException, match=r"model\.norm\.weight"):
        on_two_ranks(load_weights_of, tmp_path, str(folder))


def read_peak():
    """The most bytes that this process has had; Linux."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s*(\d+)", status)[1])


def measure_on_ranks(folder):
    """How many bytes more each rank needs to load the model."""
    lm = load_tokenizer(MODEL)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = read_peak()
    policy = training.load_for_training(lm, folder, SGD)
    return gather(read_peak() - before), len(policy)


@pytest.mark.slow
def test_second_rank_needs_the_memory_of_its_shard(tmp_path):
    """250 million weights: a gigabyte in float32, as they are trained."""
    sizes = {"vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 4096}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=11, tie_word_embeddings=True))
    model.bfloat16().save_pretrained(tmp_path / "model")
    size = 4 * model.num_parameters()
    largest = 4 * model.lm_head.weight.numel()
    assert size > 800e6
    (first, second), _ = on_two_ranks(measure_on_ranks, tmp_path, str(tmp_path / "model"))
    assert size < first < size + 1.5 * size / 2
    assert size / 2 < second < 1.5 * size / 2 + largest
