"""Training: a model spread over the ranks, its optimiser, and checkpoints that an epoch goes on from.

The weights that are trained are float32. bfloat16 keeps 8 bits of a number, so that at a learning rate of 5e-7 nearly
every update of a weight would round to nothing: it is for computing with, in copies that are made as they are needed.
"""

import hashlib
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import Adafactor

from pipeline.models.loading import decoder_layers

OptimizerName = Literal["adamw", "adafactor"]
Compute = Literal["float32", "bfloat16"]


def fingerprint(model: torch.nn.Module) -> str:
    """A hash of a model's weights, whatever folder or file they came from; before the model is spread.

    >>> fingerprint(torch.nn.Linear(1, 1)) == fingerprint(torch.nn.Linear(1, 1))
    False
    """
    digest = hashlib.sha256()
    for name, weight in model.state_dict().items():
        digest.update(name.encode())
        digest.update(weight.detach().cpu().contiguous().numpy())
    return digest.hexdigest()[:16]


def shard(model: torch.nn.Module, compute: Compute, recompute: bool = False) -> None:
    """Give a `transformers` model to FSDP2, layer by layer: each rank keeps a part of the float32 weights.

    compute: what forward and backward passes are done in; gradients are added up in float32. recompute: gradient
    checkpointing, which keeps a layer's input and computes the layer again for its backward pass. One process that
    computes in float32 needs no process group, and keeps an ordinary model.
    """
    layers = decoder_layers(model) if recompute or dist.is_initialized() else ()
    for layer in layers if recompute else ():
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)  # in eval mode too: no dropout
    if dist.is_initialized():
        policy = MixedPrecisionPolicy(getattr(torch, compute), reduce_dtype=torch.float32)
        kept = {} if compute == "float32" else {"mp_policy": policy}
        for layer in layers:
            fully_shard(layer, **kept)
        fully_shard(model, **kept)


def make_optimizer(name: OptimizerName, model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW, or Adafactor as HuggingFace's trainer sets it; a constant learning rate, no weight decay (Section 4.2).

    >>> type(make_optimizer("adafactor", torch.nn.Linear(2, 2), lr=5e-7)).__name__
    'Adafactor'
    """
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    optimizer = Adafactor(model.parameters(), lr=lr, scale_parameter=False, relative_step=False)
    for weight in model.parameters():
        # Adafactor makes its state at the first step, as plain tensors; a spread model wants it spread like itself.
        zero = torch.zeros_like(weight.detach())
        means = {"exp_avg_sq_row": zero.mean(-1), "exp_avg_sq_col": zero.mean(-2)} if zero.ndim > 1 else {}
        optimizer.state[weight] = {"step": 0, "RMS": 0} | (means or {"exp_avg_sq": zero})
    return optimizer
