"""Loading models: weights that rank zero reads for all ranks, saving, downloading."""

import ctypes
import gc
import json
import math
import re
import shutil
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from distributed_helpers import on_two_ranks
from safetensors.torch import load_file, save_file
from torch.multiprocessing import ProcessRaisedException
from transformers import LlamaConfig, LlamaForCausalLM
from unit_helpers import flat_weights

from toprlib import language_model
from toprlib.checkpoints import save_model
from toprlib.distributed import gather
from toprlib.language_model import (
    Sharding,
    download_model,
    load_for_training,
    load_model,
    load_weights,
    load_without_weights,
)
from toprlib.records import InputError
from toprlib.settings import Settings

MODEL = Settings().model


# ---- without the weights, and with them ----------------------------------------------------------
def test_model_without_weights_has_shapes_and_ends(lm):
    empty = load_without_weights(MODEL)
    assert {weight.device.type for weight in empty.model.parameters()} == {"meta"}
    expected = {name: weight.shape for name, weight in lm.model.named_parameters()}
    assert {name: weight.shape for name, weight in empty.model.named_parameters()} == expected
    assert (empty.context, empty.ends) == (lm.context, lm.ends)
    assert not empty.model.training


def test_weights_are_float32_whatever_the_file_has(lm, tmp_path):
    lm.model.save_pretrained(tmp_path / "float32")
    half = LlamaForCausalLM.from_pretrained(tmp_path / "float32", dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "bfloat16")
    lm.tokenizer.save_pretrained(tmp_path / "bfloat16")
    loaded = load_model(str(tmp_path / "bfloat16")).model
    assert {weight.dtype for weight in loaded.parameters()} == {torch.float32}
    assert torch.equal(flat_weights(loaded), flat_weights(half).float())


def test_training_has_the_weights_of_the_named_model(lm, tmp_path):
    """In the second iteration, a folder of the run; the tokenizer and all else stay."""
    model = LlamaForCausalLM(lm.model.config)
    model.save_pretrained(tmp_path / "other")
    trained = load_for_training(lm, str(tmp_path / "other"), Sharding())
    assert torch.equal(flat_weights(trained.model), flat_weights(model))
    assert trained.tokenizer is lm.tokenizer
    assert not trained.model.training  # without dropout


def test_cudnn_attention_is_off_in_training(lm):
    torch.backends.cuda.enable_cudnn_sdp(True)
    load_for_training(lm, MODEL, Sharding())
    assert not torch.backends.cuda.cudnn_sdp_enabled()


BAD_MODELS = {
    "no such folder": {},
    "no config": {"model.safetensors": "?"},
    "no weights": {"config.json": None, "tokenizer.json": None, "tokenizer_config.json": None},
    "damaged config": {"config.json": "{"},
}


@pytest.mark.parametrize("case", BAD_MODELS)
def test_unusable_model_is_named(case, tmp_path):
    folder = tmp_path / "model"
    for name, content in BAD_MODELS[case].items():
        folder.mkdir(exist_ok=True)
        text = Path(MODEL, name).read_text() if content is None else content
        (folder / name).write_text(text)
    with pytest.raises(InputError) as caught:
        load_model(str(folder))
    assert (caught.value.option, caught.value.file) == ("--model", str(folder))


DAMAGED = {
    "missing": {"model.layers.2.mlp.up_proj.weight": None},
    "NaN": {"model.layers.3.mlp.down_proj.weight": math.nan},
    "infinite": {"model.norm.weight": -math.inf},
}


def damage_weights(folder, case):
    """A copy of the default model without a weight, or with a number of it replaced."""
    shutil.copytree(MODEL, folder)
    weights = load_file(folder / "model.safetensors")
    for name, value in DAMAGED[case].items():
        if value is None:
            del weights[name]
        else:
            weights[name].view(-1)[-1] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def ways_to_load(folder):
    """By each function that loads weights; only the first looks at their headers before."""
    lm = load_without_weights(MODEL)
    yield lambda: load_model(folder)
    yield lambda: load_weights(lm, folder)
    yield lambda: load_for_training(lm, folder, Sharding())
    yield lambda: load_for_training(lm, folder, Sharding(), lora_rank=2)


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_weights_are_named_wherever_they_are_loaded(case, tmp_path, capfd):
    folder = damage_weights(tmp_path / "model", case)
    for load in ways_to_load(folder):
        with pytest.raises(InputError) as caught:
            load()
        assert (caught.value.option, caught.value.file) == ("--model", folder)
        assert next(iter(DAMAGED[case])) in str(caught.value)
    assert capfd.readouterr() == ("", "")  # transformers' own tables are not printed


def test_downloaded_weights_are_compared_with_the_model(tmp_path, monkeypatch):
    """Before an engine reads them: vLLM takes q, k and v for one weight."""
    folder = damage_weights(tmp_path / "snapshot", "missing")
    monkeypatch.setattr(language_model, "_check_disk_for", lambda files: None)
    monkeypatch.setattr(language_model, "snapshot_download", lambda *_, **__: folder)
    with pytest.raises(InputError) as caught:
        download_model("owner/name")
    assert caught.value.option == "--model"
    assert "model.layers.2.mlp.up_proj.weight" in str(caught.value)


# ---- ends ----------------------------------------------------------------------------------------
SPECIAL_TOKENS = {  # the tokenizer's end and padding, the generation config's ends -> all ends
    "the same": (("<eos>", "<pad>"), 1, {1}),
    "different": (("<eos>", "<pad>"), 7, {1, 7}),
    "several": (("<eos>", "<pad>"), [9, 7], {1, 7, 9}),
    "tokenizer alone": (("<eos>", None), None, {1}),
    "generation config alone": ((None, "<pad>"), [7, 1], {1, 7}),
    "generation config alone, no padding": ((None, None), 7, {7}),
    "padding that the model lacks": (("<eos>", "<padding>"), 1, {1}),
    "end that the model lacks": (("<end>", "<pad>"), 7, {7}),
    "end that nothing has": (("<eos>", "<pad>"), [1, 5000], {1}),
}


@pytest.mark.parametrize("case", SPECIAL_TOKENS)
def test_a_text_ends_at_the_tokenizer_s_end_and_at_the_generation_config_s(lm, case, tmp_path):
    (end, padding), stated, expected = SPECIAL_TOKENS[case]
    folder = Path(shutil.copytree(MODEL, tmp_path / "model"))
    tokenizer = deepcopy(lm.tokenizer)
    tokenizer.eos_token = None
    tokenizer.pad_token = None
    tokens = {"eos_token": end, "pad_token": padding}
    tokenizer.add_special_tokens({name: token for name, token in tokens.items() if token})
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stated}))
    loaded = load_without_weights(str(folder))
    assert loaded.ends == expected
    known = tokenizer.convert_tokens_to_ids(end) if end else None
    if known in expected:
        assert loaded.tokenizer.eos_token_id == known
    assert loaded.tokenizer.eos_token_id in expected
    assert loaded.tokenizer.pad_token_id < lm.vocabulary
    assert loaded.vocabulary == 768


# ---- saving --------------------------------------------------------------------------------------
def test_saved_model_is_the_same(lm, tmp_path):
    save_model(lm, tmp_path / "saved")
    loaded = load_model(str(tmp_path / "saved"))
    assert torch.equal(flat_weights(loaded.model), flat_weights(lm.model))
    assert loaded.prompt_ids(["1 + 1"]) == lm.prompt_ids(["1 + 1"])
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_sampling_defaults_that_transformers_would_not_save(lm, tmp_path):
    """It loads temperature without do_sample, and refuses to save it. The ends are kept."""
    folder = Path(shutil.copytree(MODEL, tmp_path / "model"))
    file = folder / "generation_config.json"
    defaults = json.loads(file.read_text()) | {"temperature": 0.6, "top_p": 0.9}
    defaults["eos_token_id"] = [lm.tokenizer.eos_token_id, 7]
    file.write_text(json.dumps(defaults))
    loaded = load_model(str(folder))
    assert loaded.ends == {lm.tokenizer.eos_token_id, 7}
    save_model(loaded, tmp_path / "saved")
    assert load_model(str(tmp_path / "saved")).ends == loaded.ends


# ---- downloading ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("rank", "local_rank", "is_called"), [(0, 0, True), (1, 1, False), (8, 0, True), (9, 1, False)]
)
def test_first_process_of_each_machine_downloads(rank, local_rank, is_called, monkeypatch):
    calls = []

    def snapshot_download(name, dry_run=False, **_):
        calls.append((name, dry_run))
        return [] if dry_run else MODEL

    monkeypatch.setattr(language_model, "snapshot_download", snapshot_download)
    monkeypatch.setattr(language_model, "_check_disk_for", lambda files: None)
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setenv("WORLD_SIZE", "16")
    download_model("owner/name")
    assert calls == ([("owner/name", True), ("owner/name", False)] if is_called else [])


def test_folder_is_not_downloaded(monkeypatch):
    monkeypatch.delattr(language_model, "snapshot_download")
    download_model(MODEL)


@pytest.mark.parametrize("error", [OSError("disk"), RuntimeError(""), ValueError("two\nlines")])
def test_failed_download_is_one_line(error, monkeypatch):
    def snapshot_download(*_, **__):
        raise error

    monkeypatch.setattr(language_model, "snapshot_download", snapshot_download)
    with pytest.raises(InputError) as caught:
        download_model("owner/name")
    assert (caught.value.option, caught.value.file) == ("--model", "owner/name")
    assert "\n" not in str(caught.value)


# ---- two ranks -----------------------------------------------------------------------------------
def load_on_ranks(folder):
    """How often each rank reads the weights; whether each has those of the folder."""
    lm = load_without_weights(folder)
    read_weights = language_model._load_weights
    calls = []

    def counting(*inputs):
        calls.append(inputs)
        return read_weights(*inputs)

    language_model._load_weights = counting
    loaded = load_for_training(lm, folder, Sharding()).model
    expected = read_weights(folder, torch.device("cpu"))
    is_same = []
    for value, other in zip(loaded.buffers(), expected.buffers(), strict=True):
        is_same.append(torch.equal(value, other))
    for weight, other in zip(loaded.parameters(), expected.parameters(), strict=True):
        is_same.append(torch.equal(weight.full_tensor(), other))
    is_tied = loaded.lm_head.weight is loaded.model.embed_tokens.weight
    return gather(len(calls)), gather(all(is_same)), is_tied


@pytest.mark.parametrize("is_tied", [True, False])
def test_rank_zero_reads_the_weights_for_both(is_tied, lm, tmp_path):
    config = LlamaConfig(**lm.model.config.to_dict() | {"tie_word_embeddings": is_tied})
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    lm.tokenizer.save_pretrained(tmp_path / "model")
    reads, is_same, is_still_tied = on_two_ranks(load_on_ranks, tmp_path, str(tmp_path / "model"))
    assert reads == [1, 0]
    assert is_same == [True, True]
    assert is_still_tied == is_tied


def load_other_weights(folder):
    load_for_training(load_without_weights(MODEL), folder, Sharding())


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_weights_end_both_ranks(case, tmp_path):
    folder = damage_weights(tmp_path / "model", case)
    with pytest.raises(ProcessRaisedException, match=re.escape(next(iter(DAMAGED[case])))):
        on_two_ranks(load_other_weights, tmp_path, folder)


def peak_memory(work):
    """Bytes that `work` needs at most, above what the process has before; Linux with glibc."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that was freed before would hide what is needed
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = read_peak()
    work()
    return read_peak() - before


def read_peak():
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s*(\d+)", status)[1])


def measure_on_ranks(folder):
    lm = load_without_weights(folder)
    loaded = []
    peak = peak_memory(lambda: loaded.append(load_for_training(lm, folder, Sharding())))
    return gather(peak)


@pytest.mark.slow
def test_second_rank_needs_the_memory_of_its_shard(lm, tmp_path):
    """250 million weights: a gigabyte in float32, as they are trained."""
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=13,
        num_attention_heads=16,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(tmp_path / "model")
    lm.tokenizer.save_pretrained(tmp_path / "model")
    size = 4 * model.num_parameters()
    largest = 4 * model.lm_head.weight.numel()
    assert size > 900e6
    first, second = on_two_ranks(measure_on_ranks, tmp_path, str(tmp_path / "model"))
    assert size < first < size + 1.5 * size / 2
    assert size / 2 < second < 1.5 * size / 2 + largest
