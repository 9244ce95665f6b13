"""Weights that one rank reads for all: what each rank then has, and how much memory it takes."""

import ctypes
import gc
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from ranks import on_two_ranks
from transformers import LlamaConfig, LlamaForCausalLM

import train_gsm8k as gsm8k
from pipeline.models.checkpoints import save_model
from pipeline.models.language_model import load_model, load_to_train
from pipeline.records import InputError
from pipeline.runtime.processes import from_all_ranks


def peak_above(work):
    """Bytes that `work` needs at most, above what there is before it; on Linux, with glibc."""

    def peak():
        return 1024 * int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1])

    gc.collect()
    ctypes.CDLL(None).malloc_trim(
        0
    )  # or what was freed before, and kept for later, would hide what is needed now
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now on
    before = peak()
    work()
    return peak() - before


def load_here(folder, without_weights):
    """Bytes that each rank took at most, above what it had; and whether the weights are those of the file."""
    with pytest.raises(InputError, match="no file named model"):  # on both ranks; one alone reads
        load_to_train(without_weights, gsm8k.Settings())
    loaded = []
    peaks = from_all_ranks(
        peak_above(lambda: loaded.append(load_to_train(folder, gsm8k.Settings()).model))
    )
    [found] = loaded
    expected = load_model(folder, torch.device("cpu")).model
    assert found.lm_head.weight is found.model.embed_tokens.weight
    pairs = [*zip(found.buffers(), expected.buffers(), strict=True)]
    pairs += [
        (w.full_tensor(), e) for w, e in zip(found.parameters(), expected.parameters(), strict=True)
    ]
    return peaks, all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.slow
def test_one_rank_reads_the_weights_and_the_other_takes_the_memory_of_its_shard(lm, tmp_path):
    """250 million weights, in bfloat16 as models come: in float32, as they are trained, they take a gigabyte."""
    sizes = {
        "vocab_size": 32_000,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 13,
    }
    model = LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=16, tie_word_embeddings=True)
    ).bfloat16()
    model.save_pretrained(tmp_path / "model")
    model.config.save_pretrained(tmp_path / "empty")
    for name in ("model", "empty"):
        lm.tokenizer.save_pretrained(tmp_path / name)
    largest, whole = (4 * n for n in (model.lm_head.weight.numel(), model.num_parameters()))
    assert whole > 900e6
    folders = (str(tmp_path / name) for name in ("model", "empty"))
    (first, second), is_same = on_two_ranks(load_here, tmp_path, *folders)
    assert is_same
    assert whole < first < whole + 1.5 * whole / 2
    assert whole / 2 < second < 1.5 * whole / 2 + largest


def test_cudnn_s_attention_is_off_where_a_model_is_trained():
    torch.backends.cuda.enable_cudnn_sdp(True)
    load_to_train(gsm8k.Settings().model, gsm8k.Settings())
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_a_model_whose_sampling_habits_transformers_would_not_save_is_saved(lm, tmp_path):
    folder = shutil.copytree(gsm8k.Settings().model, tmp_path / "model")
    habits = json.loads((folder / "generation_config.json").read_text()) | {
        "temperature": 0.6,
        "top_p": 0.9,
    }
    (folder / "generation_config.json").write_text(json.dumps(habits))
    loaded = load_model(str(folder))
    save_model(loaded, tmp_path / "saved")
    assert load_model(str(tmp_path / "saved")).ends == loaded.ends == lm.ends
