"""Adapters: what a step learns, against full weights and a closed form; what is saved of them."""

import pytest
import torch
from peft import PeftModel
from unit_helpers import plain_batch, random_examples, tiny_llama

import topr
from toprlib.batches import collate
from toprlib.checkpoints import save_checkpoint, save_model
from toprlib.distributed import process_group
from toprlib.language_model import Sharding, load_for_training, load_model, make_optimizer
from toprlib.lora import add_adapters, merge_adapters
from toprlib.settings import Settings

MODEL = Settings().model


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
    model = add_adapters(tiny_llama(), rank, seed=0)
    matrices = adapter_matrices(model, "lora_A")
    assert len(matrices) == 2 * 7
    for matrix in matrices.values():
        if matrix.shape[0] == matrix.shape[1]:
            torch.nn.init.orthogonal_(matrix)
    matrices = {name: matrix.detach().clone() for name, matrix in matrices.items()}
    actual = merge_adapters(model, weights_after_a_step(model))
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
    base = tiny_llama()
    random_state = torch.get_rng_state()
    model = add_adapters(base, 4, seed=0)
    assert torch.equal(torch.get_rng_state(), random_state)
    actual = topr.token_logprobs(model, batch)  # float64; old processors round it differently
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert all(".lora_" in name for name in trained)
    assert not any("lm_head" in name for name in trained)


def test_seed_chooses_a():
    first = adapter_matrices(add_adapters(tiny_llama(), 4, seed=0), "lora_A")
    same = adapter_matrices(add_adapters(tiny_llama(), 4, seed=0), "lora_A")
    other = adapter_matrices(add_adapters(tiny_llama(), 4, seed=1), "lora_A")
    for name, matrix in first.items():
        assert torch.equal(matrix, same[name])
        assert not torch.equal(matrix, other[name])


def take_steps(trained, optimizer, steps=2):
    batch = collate(random_examples(prompts=3, per_prompt=2))
    list(topr.train(trained.model, optimizer, [([batch], 6)] * steps))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_model_is_merged_as_peft_merges(dtype, lm, tmp_path):
    """In bfloat16 the weights are sharded over a group of one process."""
    with process_group(is_needed=dtype == "bfloat16"):
        trained = load_for_training(lm, MODEL, Sharding(dtype), lora_rank=4, lora_seed=0)
        take_steps(trained, make_optimizer("adamw", trained.model, 1e-3))
        save_model(trained, tmp_path / "model")
    before = load_model(MODEL).model.state_dict()
    actual = load_model(str(tmp_path / "model")).model.state_dict()
    peft = PeftModel.from_pretrained(load_model(MODEL).model, tmp_path / "model" / "adapter")
    assert peft.peft_config["default"].base_model_name_or_path == MODEL
    expected = peft.merge_and_unload().state_dict()
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)
    changed = {name for name in actual if not torch.equal(actual[name], before[name])}
    assert changed == {name for name in actual if name.endswith("_proj.weight")}


def test_checkpoint_has_the_adapters_only(lm, tmp_path):
    trained = load_for_training(lm, MODEL, Sharding(), lora_rank=4)
    optimizer = make_optimizer("adamw", trained.model, 1e-3)
    take_steps(trained, optimizer, steps=1)
    save_checkpoint(tmp_path, 1, optimizer)
    state = torch.load(tmp_path / "checkpoint-1" / "rank-0.pt", weights_only=True)
    assert {min(weight.shape) for weight in state["weights"]} == {4}
    assert len(state["weights"]) == len(state["optimizer"]["state"])
