"""Around the steps of an epoch: a warning, their log, what is saved, requests to stop, and faults in plain words."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.dataset import EpochStep, lay_out, longest
from pipeline.methods import METHODS
from pipeline.metrics import check_ratio, step_metrics
from pipeline.models.checkpoints import save_checkpoint, save_model
from pipeline.models.language_model import LanguageModel
from pipeline.records import Example, InputError, write
from pipeline.runtime.processes import SharedStop, Times, from_all_ranks, rank
from pipeline.runtime.run_folder import Point, is_there
from pipeline.settings import Settings
from topr import StepStats


def signs_note(settings: Settings, rewards: Sequence[float], learnt: Sequence[float]) -> str | None:
    """A warning if all rewards have one sign after the baseline where both are needed, or most changed sign; else None.

    rewards, learnt: before and after the baseline. The note has the share of each sign and the setting that mends it.
    """
    limits = settings.bounds
    is_of_positives = settings.composition == "positives_only" or settings.effective_proportion == 1
    if METHODS[settings.method].of_pairs or is_of_positives or (limits and limits.b_neg == 0):
        return None
    size, low, high = len(learnt), min(rewards), max(rewards)
    positive, negative = sum(reward > 0 for reward in learnt), sum(reward < 0 for reward in learnt)
    turned = (
        100 * sum(before * after < 0 for before, after in zip(rewards, learnt, strict=True)) / size
    )
    if not (positive or negative):
        fault = f"nothing is left for {settings.method} to learn from"
    elif not negative:
        learns = (
            "is supervised training on"
            if limits and limits.a_pos == limits.b_pos
            else "learns from"
        )
        fault = f"without negatives {settings.method} {learns} the positives"
    elif not positive:
        fault = f"without positives {settings.method} only makes less probable what was drawn"
    elif low < 0 < high and turned > 50:
        fault = f"the baseline gave {turned:.1f} % the other sign, of which {settings.method} learns the contrary"
    else:
        return None
    if low == high:
        mend = f"all rewards are {low:g}, which no baseline can tell apart: take other problems or draw more"
    else:
        c, origin = 0.0 if low < 0 < high else (low + high) / 2, "--baseline-from zero "
        option = f"{origin if settings.baseline_from != 'zero' else ''}--baseline {c:g}"
        mend = f"{option}, between the smallest reward, {low:g}, and the largest, {high:g}, gives both signs"
    counts = {"positive": positive, "zero": size - positive - negative, "negative": negative}
    shares = ", ".join(f"{100 * count / size:.1f} % {name}" for name, count in counts.items())
    return f"after the baseline the rewards are {shares}: {fault}; {mend}"


def log_step(
    file: Path, step: int, stats: StepStats, tolerance: float | None, is_asked: bool
) -> bool:
    """Append what a step saw, of all ranks, to metrics.jsonl. Returns whether a rank was asked to end.

    tolerance: as of `check_ratio`; None where log mu is trusted.
    """
    columns = torch.stack(
        [stats.log_ratio, stats.reward, stats.weight]
    ).cpu()  # (3, n) of this rank
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
    points: Sequence[
        Point
    ]  # the models to evaluate, in order, of which the last is the iteration's
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
        raise FloatingPointError(
            f"step {step}: {error}; the weights are of step {step - 1}"
        ) from None
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
