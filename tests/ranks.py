"""`topr.train` on two gloo ranks with a model given to fully_shard, in processes of their own."""

import os

import torch
import torch.distributed as dist
from helpers import plain_batch, tiny_model
from torch.distributed.fsdp import fully_shard

import topr


def steps_of(examples, share, step_size):
    """Two steps of `step_size` examples; of each the slice `share`, in two micro-batches of unequal size."""
    first, last = share
    steps = []
    for start in (0, step_size):
        mine = examples[start:][first:last]
        steps.append([plain_batch(mine[:1]), plain_batch(mine[1:])])
    return steps


def train_on_two_ranks(examples, shares, folder):
    """Train with rank 0 taking shares[0] and rank 1 shares[1] of each step; the metrics and the gathered weights."""
    torch.multiprocessing.spawn(_worker, (examples, shares, folder), nprocs=2)
    return torch.load(folder / "found.pt", weights_only=True)


def _worker(rank, examples, shares, folder):
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=2)
    try:
        model = tiny_model()
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        share = (0, shares[0]) if rank == 0 else (shares[0], sum(shares))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        metrics = topr.train(model, optimizer, steps_of(examples, share, sum(shares)))
        weights = torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])
        if rank == 0:
            torch.save((metrics, weights), folder / "found.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()
