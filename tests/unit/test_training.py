"""Adafactor against that of transformers."""

import pytest
import torch
import torch.distributed as dist
import transformers
from helpers import on_two_ranks, whole
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from toprlib.adafactor import Adafactor

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
