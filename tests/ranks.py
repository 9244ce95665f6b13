"""Training on two gloo ranks with a model given to FSDP2, in processes of their own."""

import os
from contextlib import contextmanager

import torch
import torch.distributed as dist
from helpers import plain_batch, tiny_model
from torch.distributed.fsdp import fully_shard

import topr
from pipeline import dataset
from pipeline.models import rows
from pipeline.models.sharding import make_optimizer, shard
from pipeline.runtime.checkpoints import load_checkpoint, save_checkpoint


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


def epoch_on_two_ranks(folder, *arguments):
    """What `epoch` finds on two ranks."""
    torch.multiprocessing.spawn(_epoch_worker, (folder, arguments), nprocs=2)
    return torch.load(folder / "found.pt", weights_only=True)


def epoch(grouped, batch, micro_batch, optimizer, cut=None, logprobs=rows.sequence_logprobs, rank=0, ranks=1):
    """The pipeline's own training of rows of examples: metrics, last (clipped) gradients, weights.

    cut: (folder, lm) to write a checkpoint into after two steps, from which another model goes on.
    """
    steps = dataset.Steps(grouped, batch, micro_batch, "cpu", rank, ranks)

    def train(model, optimizer, done, until):
        part = steps[done:until]
        return topr.train(model, optimizer, part, logprobs=logprobs, start_at_mu=None, done=done, max_norm=0.5)

    def begin(model):
        shard(model, "float32")
        return model, make_optimizer(optimizer, model, 1e-2)

    trained = begin(tiny_model())
    metrics = train(*trained, 0, 2 if cut else len(steps))
    if cut:
        folder, lm = cut
        save_checkpoint(folder, 2, lm._replace(model=trained[0]), trained[1])
        model = type(tiny_model()).from_pretrained(folder / "checkpoint-2").double().eval()
        trained = begin(model)
        load_checkpoint(folder, 2, trained[1])
        metrics += train(*trained, 2, len(steps))
    weights = list(trained[0].parameters())
    return metrics, _whole([weight.grad for weight in weights]), _whole(weights)


def _whole(tensors):
    whole = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]
    return torch.cat([t.detach().flatten() for t in whole])


def _epoch_worker(rank, folder, arguments):
    with _joined(rank, folder):
        found = epoch(*arguments, rank=rank, ranks=2)
        if rank == 0:
            torch.save(found, folder / "found.pt")
        dist.barrier()


def _worker(rank, examples, shares, folder):
    with _joined(rank, folder):
        model = tiny_model()
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        share = (0, shares[0]) if rank == 0 else (shares[0], sum(shares))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        metrics = topr.train(model, optimizer, steps_of(examples, share, sum(shares)))
        weights = _whole(model.parameters())
        if rank == 0:
            torch.save((metrics, weights), folder / "found.pt")
        dist.barrier()


@contextmanager
def _joined(rank, folder):
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=2)
    try:
        yield
    finally:
        dist.destroy_process_group()
