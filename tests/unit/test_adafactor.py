"""Adafactor on sharded weights against HuggingFace's on whole ones; test_training.py counts its collectives."""

from typing import get_args

import pytest
import ranks
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from transformers import Adafactor

from pipeline.models.language_model import make_optimizer
from pipeline.settings import OptimizerName

SHAPES = [
    (6, 4),
    (3, 5),
    (1, 4),
    (7,),
    (1,),
    (3, 2, 4),
]  # on two ranks: even, ragged, and none on the second
LR = 1e-2


def after_ten_steps(of_transformers=False):
    """Weights of all shapes, by gradients of sizes that make the update's clip bind or not."""
    torch.manual_seed(0)
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES])
    if dist.is_initialized():
        fully_shard(model)
    optimizer = make_optimizer("adafactor", model, LR)
    if of_transformers:
        optimizer = Adafactor(model.parameters(), lr=LR, scale_parameter=False, relative_step=False)
    for t in range(10):
        for weight, shape in zip(model, SHAPES, strict=True):
            gradient = torch.randn(shape) * 3.0 ** (t % 3)
            is_sharded = dist.is_initialized()
            weight.grad = (
                distribute_tensor(gradient, weight.device_mesh, weight.placements)
                if is_sharded
                else gradient
            )
        optimizer.step()
    return ranks.whole(model)


@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_no_optimiser_decays_weights(name):
    weight = torch.nn.Parameter(torch.ones(3, 2))
    weight.grad = torch.zeros(3, 2)
    make_optimizer(name, torch.nn.ParameterList([weight]), LR).step()
    assert torch.equal(weight, torch.ones(3, 2))


@pytest.mark.parametrize("processes", [1, 2])
def test_it_is_that_of_transformers_as_its_trainer_sets_it(processes, tmp_path):
    found = after_ten_steps() if processes == 1 else ranks.on_two_ranks(after_ten_steps, tmp_path)
    torch.testing.assert_close(found, after_ten_steps(of_transformers=True), rtol=0, atol=1e-6)
