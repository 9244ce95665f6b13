"""Work on two gloo ranks, in processes of their own; training of examples on each."""

import multiprocessing
import os
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from unit_helpers import tiny_llama

import topr
from toprlib import training
from toprlib.adafactor import Adafactor
from toprlib.dataset import plan_steps, to_tensors
from toprlib.distributed import gather, ranks
from toprlib.settings import Settings
from toprlib.training import load_checkpoint, save_checkpoint

TESTS = Path(__file__).resolve().parents[1]
FOLDERS = [TESTS.parent, TESTS, TESTS / "unit", TESTS / "distributed"]
OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "adafactor": Adafactor}


def on_two_ranks(work, folder, *arguments):
    """What work(*arguments) returns on rank zero of two, both of which do it.

    folder: for files of the processes.
    """
    modules = ["distributed_helpers", "toprlib.results"]  # imported once; processes are forked
    multiprocessing.get_context("forkserver").set_forkserver_preload(modules)
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, FOLDERS))):
        forkserver.ensure_running()
    inputs = (work, folder, arguments)
    torch.multiprocessing.start_processes(_worker, inputs, nprocs=2, start_method="forkserver")
    return torch.load(folder / "result.pt", weights_only=True)


def _worker(rank, work, folder, arguments):
    # as torchrun does
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    where = f"file://{folder / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2)
    result = work(*arguments)
    if rank == 0:
        torch.save(result, folder / "result.pt")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # a thread of gloo that still ends may abort an ordinary exit of the interpreter


def train_examples(examples, optimizer_name, loss=topr.topr_loss, sizes=(3, 1)):
    """An epoch on this process's rank: losses of all ranks, gradient norms, last gradient, weights.

    sizes: the other arguments of `plan_steps`.
    The gradient is clipped, and so are the last ones that it returns.
    """
    model, optimizer = sharded_model(optimizer_name)
    steps = plan_steps(examples, *sizes)
    metrics = run_steps(model, optimizer, steps, loss)
    return metrics, *gradients_and_weights(model)


def train_with_checkpoint(examples, optimizer_name, folder, sizes=(3, 1)):
    """The same, but a second model resumes from a checkpoint after two steps."""
    steps = plan_steps(examples, *sizes)
    model, optimizer = sharded_model(optimizer_name)
    metrics = run_steps(model, optimizer, steps[:2])
    save_checkpoint(folder, 2, model, optimizer)
    resumed, optimizer = sharded_model(optimizer_name, seed=1)
    load_checkpoint(folder / "checkpoint-2", resumed, optimizer)
    metrics += run_steps(resumed, optimizer, steps[2:])
    return metrics, *gradients_and_weights(resumed)


def sharded_model(optimizer_name, seed=0, **changes):
    """A model in float64, which FSDP2 would round to float32, and its optimizer."""
    model = tiny_llama(seed)
    with mock.patch.object(training, "MixedPrecisionPolicy", return_value=MixedPrecisionPolicy()):
        training._set_up_passes(model, Settings(**changes))
    return model, OPTIMIZERS[optimizer_name](model.parameters(), lr=1e-2)


def run_steps(model, optimizer, steps, loss=topr.topr_loss):
    """Loss, a sum over ranks, and gradient norm of each step."""
    metrics = []
    tensors = to_tensors(steps, model if ranks() > 1 else None)
    for stats in topr.train(model, optimizer, tensors, loss, max_grad_norm=0.5):
        metrics.append((sum(gather(stats.loss)), stats.grad_norm))
    return metrics


def gradients_and_weights(model):
    weights = list(model.parameters())
    return whole([weight.grad for weight in weights]), whole(weights)


def whole(tensors):
    """All elements of ordinary or sharded tensors, in one vector."""
    parts = []
    for tensor in tensors:
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        parts.append(full.detach().flatten())
    return torch.cat(parts)
