"""Training on two gloo ranks with a model given to FSDP2, in processes of their own."""

import os

import torch
import torch.distributed as dist
from helpers import fit, steps_of, tiny_model
from killing import server

from pipeline.models.checkpoints import load_checkpoint, save_checkpoint
from pipeline.models.language_model import make_optimizer, shard
from pipeline.runtime.processes import from_all_ranks, rank, ranks


def on_two_ranks(work, folder, *arguments, timeout=None):
    """What work(*arguments) returns on rank 0 of two, both of which do it. timeout: of collectives."""
    server()  # which has imported everything
    given = (work, folder, arguments, timeout)
    torch.multiprocessing.start_processes(_worker, given, nprocs=2, start_method="forkserver")
    return torch.load(folder / "found.pt", weights_only=True)


def _worker(number, work, folder, arguments, timeout):
    os.environ |= {"RANK": str(number), "WORLD_SIZE": "2"}  # as torchrun sets them
    where = f"file://{folder / 'meet'}"
    dist.init_process_group("gloo", init_method=where, rank=number, world_size=2, timeout=timeout)
    try:
        found = work(*arguments)
        if number == 0:
            torch.save(found, folder / "found.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()
    os._exit(
        0
    )  # a thread of gloo's that is still ending would now and then abort the exit of the interpreter


def epoch(rows, batch, micro_batch, optimizer, cut=None):
    """The pipeline's own training of rows of examples: losses and norms, last (clipped) gradients, weights.

    cut: folder to write a checkpoint into after two steps, from which another model goes on.
    """
    steps = steps_of(rows, batch, micro_batch, rank(), ranks())

    def train(model, optimizer, part):
        found = fit(model, optimizer, part, max_norm=0.5)
        return [
            {"loss": sum(from_all_ranks(m["loss"])), "grad_norm": m["grad_norm"]} for m in found
        ]

    def begin(model):
        shard(model, "float32")
        return model, make_optimizer(optimizer, model, 1e-2)

    trained = begin(tiny_model())
    metrics = train(*trained, steps[:2] if cut else steps)
    if cut:
        for step in (1, 2):
            save_checkpoint(cut, step, trained[1])
        assert [*cut.glob("checkpoint-*")] == [cut / "checkpoint-2"]
        trained = begin(tiny_model())
        load_checkpoint(cut / "checkpoint-2", trained[1])
        metrics += train(*trained, steps[2:])
    weights = list(trained[0].parameters())
    return metrics, whole([weight.grad for weight in weights]), whole(weights)


def whole(tensors):
    """All elements of ordinary or sharded tensors, in one vector."""
    gathered = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]
    return torch.cat([t.detach().flatten() for t in gathered])
