"""The optimizers: Adafactor on sharded weights against that of transformers on whole ones."""

from typing import get_args

import pytest
import torch
import torch.distributed as dist
from distributed_helpers import on_two_ranks, whole
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from transformers import Adafactor

from toprlib.language_model import OptimizerName, make_optimizer

# On two ranks: even, ragged, and none on the second.
SHAPES = [(6, 4), (3, 5), (1, 4), (7,), (1,), (3, 2, 4)]
LR = 1e-2


def make_weights():
    torch.manual_seed(0)
    return torch.nn.ParameterList([torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES])


def take_ten_steps(weights, optimizer):
    """With gradients of sizes for which the update's clip acts or not; returns all elements."""
    for step in range(10):
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
    return take_ten_steps(weights, make_optimizer("adafactor", weights, LR))


@pytest.fixture(scope="module")
def expected():
    """As the trainer of transformers sets its own."""
    weights = make_weights()
    options = {"scale_parameter": False, "relative_step": False}
    return take_ten_steps(weights, Adafactor(weights.parameters(), lr=LR, **options))


def test_adafactor_is_that_of_transformers(expected):
    torch.testing.assert_close(take_own_steps(), expected, rtol=0, atol=1e-6)


def test_adafactor_on_two_ranks(expected, tmp_path):
    actual = on_two_ranks(take_own_steps, tmp_path)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_weights_do_not_decay(name):
    weight = torch.nn.Parameter(torch.ones(3, 2))
    weight.grad = torch.zeros(3, 2)
    make_optimizer(name, torch.nn.ParameterList([weight]), LR).step()
    assert torch.equal(weight, torch.ones(3, 2))
