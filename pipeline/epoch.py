"""What happens around an optimiser's steps: their log, what is saved, requests to stop, and faults in plain words."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.dataset import EpochStep, lay_out, longest
from pipeline.metrics import check_ratio, step_metrics
from pipeline.models.checkpoints import save_checkpoint, save_model
from pipeline.models.language_model import LanguageModel
from pipeline.records import Example, InputError, write
from pipeline.runtime.processes import SharedStop, Times, from_all_ranks, rank
from pipeline.runtime.run_folder import Point, is_there
from topr import StepStats


def log_step(file: Path, step: int, stats: StepStats, tolerance: float | None, is_asked: bool) -> bool:
    """Append what a step saw, of all ranks, to metrics.jsonl. Returns whether a rank was asked to end.

    tolerance: as of `check_ratio`; None where log mu is trusted.
    """
    columns = torch.stack([stats.log_ratio, stats.reward, stats.weight]).cpu()  # (3, n) of this rank
    losses, parts, asked = zip(*from_all_ranks((stats.loss, columns, is_asked)), strict=True)
    log_ratio, reward, weight = torch.cat(parts, dim=1)
    if tolerance is not None:
        check_ratio(step, log_ratio, tolerance)
    if rank() == 0:
        metrics = {"step": step, "loss": sum(losses), "grad_norm": stats.grad_norm}
        write(file, "ab", json.dumps(metrics | step_metrics(log_ratio, reward, weight)) + "\n")
    return any(asked)


class Saver(NamedTuple):
    """What is saved along an epoch: the models to evaluate, and checkpoints to go on from."""

    here: Path  # the folder of the iteration
    lm: LanguageModel
    optimizer: torch.optim.Optimizer
    points: Sequence[Point]  # the models to evaluate, in order, of which the last is the iteration's
    every: int  # steps between two checkpoints
    times: Times

    def after(self, step: int, is_asked: bool) -> None:
        """Save what is due after a step; SharedStop of all ranks where one was asked to end before the last step."""
        is_last = step == self.points[-1].step
        with self.times("saving"):
            for point in self.points:
                # A later iteration may have begun with the last model, which stays then.
                if point.step == step and not (is_last and is_there(Path(point.model))):
                    save_model(self.lm, Path(point.model))
            if not is_last and (is_asked or step % self.every == 0):
                save_checkpoint(self.here, step, self.optimizer)
        if is_asked and not is_last:
            raise SharedStop


@contextmanager
def explained(step: int) -> Iterator[None]:
    """Inside it, a fault of a step says which step it was and what to do."""
    try:
        yield
    except FloatingPointError as error:
        raise FloatingPointError(f"step {step}: {error}; the weights are of step {step - 1}") from None
    except torch.OutOfMemoryError as error:
        [fault, *_] = str(error).splitlines()
        advice = "give --gradient-checkpointing, --reshard, or a smaller --micro-batch"
        raise InputError(f"step {step}: it does not fit the GPU: {fault}; {advice}") from None


def try_longest(
    rows: Sequence[Sequence[Example]],
    steps: Sequence[EpochStep],
    model: torch.nn.Module,
    loss: Callable[..., Tensor],
    logprobs: Callable[..., Tensor],
) -> None:
    """Compute the gradients of the longest step and drop them: what does not fit fails in the first minute."""
    sizes = []  # tokens of this rank's largest micro-batch in each step, padding included
    for step in steps:
        batches = [[rows[number] for number in numbers] for numbers in step.micro_batches]
        sizes.append(max(sum(map(len, batch)) * sum(longest(batch)) for batch in batches))
    largest = [max(sizes_of_step) for sizes_of_step in zip(*from_all_ranks(sizes), strict=True)]
    [step] = lay_out(rows, [steps[largest.index(max(largest))]])
    for batch in step.micro_batches:
        logp = logprobs(model, batch)[: len(batch.reward)]
        loss(logp, batch.logmu, batch.reward, batch.length, denominator=step.sequences).backward()
