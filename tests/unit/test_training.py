"""Optimizers against other implementations; adapters against full weights and a closed form."""

import pytest
import torch
import torch.distributed as dist
import transformers
from helpers import on_two_ranks, plain_batch, random_examples, tiny_llama, whole
from peft import PeftModel
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import topr
from toprlib import training
from toprlib.adafactor import Adafactor
from toprlib.dataset import collate
from toprlib.language_model import load_model
from toprlib.settings import Settings

MODEL = Settings().model


# ---- Adafactor -----------------------------------------------------------------------------------
# On two ranks: even, ragged, and none on the second.
SHAPES = [(6, 4), (3, 5), (1, 4), (7,), (1,), (3, 2, 4)]


def make_weights():
    torch.manual_seed(0)
    return torch.nn.ParameterList([torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES])


def take_steps(weights, optimizer):
    """With gradients of sizes for which the update's clip acts or not; returns all elements."""
    for step in range(4):
        for weight, shape in zip(weights, SHAPES, strict=True):
            gradient = torch.randn(shape) * 3.0 ** (step % 3)
            if dist.is_initialized():
                gradient = distribute_tensor(gradient, weight.device_mesh, weight.placements)
            weight.grad = gradient
        optimizer.step()
    return whole(weights)


def take_own_steps():
    weights = make_weights()
    if dist.is_initialized():
        fully_shard(weights)
    return take_steps(weights, Adafactor(weights.parameters(), lr=1e-2))


@pytest.mark.parametrize("ranks", [1, 2])
def test_adafactor_is_that_of_transformers(tmp_path, ranks):
    """As the trainer of transformers sets its own, on whole weights."""
    weights = make_weights()
    options = {"lr": 1e-2, "scale_parameter": False, "relative_step": False}
    optimizer = transformers.Adafactor(weights.parameters(), **options)
    expected = take_steps(weights, optimizer)
    actual = take_own_steps() if ranks == 1 else on_two_ranks(take_own_steps, tmp_path)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


# ---- LoRA ----------------------------------------------------------------------------------------
def adapter_matrices(model, part):
    """Name of an adapted weight -> its A or B."""
    matrices = {}
    for name, layer in model.get_base_model().named_modules():
        if hasattr(layer, "lora_A"):
            matrices[f"{name}.weight"] = getattr(layer, part)["default"].weight
    return matrices


def weights_after_a_step(model, lr=0.1):
    """Of plain gradient descent, without clipping."""
    batch = plain_batch(random_examples(prompts=6, per_prompt=1))
    sgd = torch.optim.SGD(model.parameters(), lr)
    list(topr.train(model, sgd, [([batch], 6)], max_grad_norm=1e9))
    return model.state_dict()


@pytest.mark.parametrize("rank", [3, 16])
def test_step_is_that_of_full_weights_times_a(rank):
    """B = 0 at the start: d loss / d B = G A^T, and a step gives W + B A = W - lr G A^T A.

    At full rank with an orthogonal A, that is the step of full weights.
    """
    model = training._add_adapters(tiny_llama(), rank, seed=0)
    matrices = adapter_matrices(model, "lora_A")
    assert len(matrices) == 2 * 7  # all linear layers but the head
    for matrix in matrices.values():
        if matrix.shape[0] == matrix.shape[1]:
            torch.nn.init.orthogonal_(matrix)
    matrices = {name: matrix.detach().clone() for name, matrix in matrices.items()}
    actual = training._merge_adapters(model, weights_after_a_step(model))
    start = tiny_llama().state_dict()
    full = weights_after_a_step(tiny_llama())
    assert actual.keys() == start.keys()
    for name, weight in start.items():
        expected = weight
        if name in matrices:
            a = matrices[name]
            expected = weight + (full[name] - weight) @ a.T @ a
            if a.shape == (16, 16):
                torch.testing.assert_close(actual[name], full[name], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(actual[name], expected, rtol=1e-12, atol=1e-12)


def test_adapters_leave_the_model_and_the_random_state_alone():
    batch = collate(random_examples(prompts=2, per_prompt=2))
    expected = topr.token_logprobs(tiny_llama(), batch)
    matrices = []
    for seed in (1, 1, 2):
        base = tiny_llama()
        random_state = torch.get_rng_state()
        model = training._add_adapters(base, 4, seed)
        assert torch.equal(torch.get_rng_state(), random_state)
        actual = topr.token_logprobs(model, batch)  # float64; old processors round it differently
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
        matrices.append(
            torch.cat([a.flatten() for a in adapter_matrices(model, "lora_A").values()])
        )
    assert torch.equal(matrices[0], matrices[1])
    assert not torch.equal(matrices[0], matrices[2])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_model_is_merged_as_peft_merges(dtype, lm, tmp_path):
    settings = Settings(dtype=dtype, lora=4, lr=1e-3)
    batch = collate(random_examples(prompts=3, per_prompt=2))
    trained, optimizer = training.load_for_training(lm, MODEL, settings)
    list(topr.train(trained.model, optimizer, [([batch], 6)] * 2))
    training.save_model(trained, tmp_path / "model")
    before = load_model(MODEL).state_dict()
    actual = load_model(str(tmp_path / "model")).state_dict()
    peft = PeftModel.from_pretrained(load_model(MODEL), tmp_path / "model" / "adapter")
    expected = peft.merge_and_unload().state_dict()
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)
    changed = {name for name in actual if not torch.equal(actual[name], before[name])}
    assert changed == {name for name in actual if name.endswith("_proj.weight")}
