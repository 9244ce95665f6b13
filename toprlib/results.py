"""What a run writes about its training and evaluation: metrics.jsonl, results.json, curve.png.

A completion with reward 0 has no gradient, so no metric counts it. Such completions also fill up
the micro-batches of a rank that has fewer completions than the others.
"""

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import transformers
from torch import Tensor

from topr import Limits, StepStats, importance_weight
from toprlib.dataset import engine_mismatch
from toprlib.distributed import gather, rank
from toprlib.evaluation import evaluate
from toprlib.files import append_to_file, load_rows, read_records, write_file
from toprlib.records import EvalPoint, Example, Sample, Task
from toprlib.settings import Settings

START_TOLERANCE = {  # nats that |log pi - log mu| may reach at the first step
    "float32": 0.01,  # a sum over 100,000 tokens differs by 0.008
    # A bfloat16 logit from 16 to 32 is a multiple of 0.125. Two ways to compute it (another
    # attention kernel, other padding) differ by 0.05, the standard deviation of two roundings, and
    # sums over 512 tokens by 1.2. Measured with SmolLM2-135M, whose logits reach 44: 1.6, and at
    # most 3.1 in 8 sequences.
    "bfloat16": 5.0,
}
QUANTILES = (0.05, 0.5, 0.95)


# ---- one step ------------------------------------------------------------------------------------
def log_step(
    file: Path, step: int, stats: StepStats, limits: Limits | None, settings: Settings
) -> None:
    """Append what a step saw, on all ranks, to metrics.jsonl. Every rank calls this.

    limits: the loss's, for the weights; None for a loss without importance weights.
    Raises FloatingPointError if the first step does not start at pi = mu; with --trust-logmu, rank
    zero prints a warning instead.
    """
    own_columns = torch.stack([stats.log_ratio, stats.reward]).cpu()  # (2, n) of this rank
    losses, parts = zip(*gather((stats.loss, own_columns)), strict=True)
    log_ratio, reward = torch.cat(parts, dim=1)
    weight = importance_weight(log_ratio, *limits.bounds_for(reward)) if limits else None
    largest = log_ratio.abs().max().item()
    if step == 1 and not largest <= START_TOLERANCE[settings.dtype]:
        message = f"step 1: |log pi - log mu| is {largest:.3g} nats, not 0"
        if not settings.trust_logmu:
            raise FloatingPointError(f"{message}; remove {file.parent} and repeat the command")
        if rank() == 0:
            cause = "token_logmu may be of another model or temperature, or without some tokens"
            print(f"warning: {message}; {cause}", flush=True)
    if rank() == 0:
        metrics = {"step": step, "loss": sum(losses), "grad_norm": stats.grad_norm}
        metrics |= step_metrics(log_ratio, reward, weight)
        append_to_file(file, json.dumps(metrics) + "\n")


def step_metrics(log_ratio: Tensor, reward: Tensor, weight: Tensor | None) -> dict[str, float]:
    """The metrics of a step from its completions' log-ratios, rewards and weights, (B,) each.

    log_ratio_pos_q05, _q50, _q95, _mean: quantiles and mean where reward > 0; log_ratio_neg_*:
    where reward < 0. A sign without completions has no metrics. With weights there are also
    weight_pos_*, weight_neg_* and what `weight_totals` returns.
    weight: None for a loss without importance weights.

    >>> metrics = step_metrics(torch.tensor([0.5, -1.0]), torch.tensor([1.0, 0.0]), weight=None)
    >>> metrics["log_ratio_pos_mean"], [name for name in metrics if "neg" in name]
    (0.5, [])
    """
    metrics = {}
    for sign, is_of_sign in (("pos", reward > 0), ("neg", reward < 0)):
        if is_of_sign.any():
            metrics |= _distribution(f"log_ratio_{sign}", log_ratio[is_of_sign])
            if weight is not None:
                metrics |= _distribution(f"weight_{sign}", weight[is_of_sign])
    if weight is not None:
        # The rows are dropped, not multiplied by 0: an unbounded weight may be infinite.
        is_learned = reward != 0
        metrics |= weight_totals(reward[is_learned], weight[is_learned])
    return metrics


def _distribution(name: str, values: Tensor) -> dict[str, float]:
    levels = torch.tensor(QUANTILES, dtype=values.dtype)
    metrics = {}
    for level, quantile in zip(QUANTILES, values.quantile(levels).tolist(), strict=True):
        metrics[f"{name}_q{round(100 * level):02}"] = quantile
    metrics[f"{name}_mean"] = values.mean().item()
    return metrics


def weight_totals(reward: Tensor, weight: Tensor) -> dict[str, float]:
    """Totals of a step's weights; reward, weight: (B,), no reward is 0.

    weights_below_1e-6: a share of the completions.
    ess: the effective sample size (sum w)^2 / sum w^2, in completions.
    gradient_mass: the sum of weight |reward|.
    realised_proportion: the positives' part of gradient_mass, absent if that is 0. It is the
    effective proportion of Equation 12 after the weights.

    >>> totals = weight_totals(torch.tensor([1.0, -1.0, -1.0]), torch.tensor([1.0, 0.5, 0.0]))
    >>> [round(value, 2) for value in totals.values()]
    [0.33, 1.8, 1.5, 0.67]
    """
    negligible = (weight < 1e-6).sum().item()
    sum_of_squares = weight.square().sum().clamp_min(1e-30)  # all weights may be 0
    mass = weight * reward.abs()  # (B,)
    metrics = {
        "weights_below_1e-6": negligible / max(len(weight), 1),
        "ess": (weight.sum() ** 2 / sum_of_squares).item(),
        "gradient_mass": mass.sum().item(),
    }
    if metrics["gradient_mass"] > 0:
        metrics["realised_proportion"] = (mass[reward > 0].sum() / mass.sum()).item()
    return metrics


# ---- one epoch -----------------------------------------------------------------------------------
def summarize_epoch(steps: list[dict[str, float]]) -> dict[str, float | None]:
    """What results.json says of an epoch, from its lines of metrics.jsonl.

    Means over all steps, except that the log-ratios are means over the last tenth: their values at
    the end matter. Rounded to three decimals; None where no step has the metric.

    >>> summarize_epoch([{"weight_neg_mean": 1.0}, {"weight_neg_mean": 0.5}])["weight_neg_mean"]
    0.75
    """
    last_steps = steps[len(steps) * 9 // 10 :]
    summary = {name: _average(steps, name) for name in ("realised_proportion", "weight_neg_mean")}
    for name in ("log_ratio_pos_mean", "log_ratio_neg_mean"):
        summary[name] = _average(last_steps, name)
    return summary


def _average(steps: list[dict[str, float]], name: str) -> float | None:
    """The mean of a metric over the steps that have it; None if no step has it."""
    steps = [step for step in steps if name in step]
    if not steps:
        return None
    weights = None
    if name == "realised_proportion":  # then the mean is that of the epoch's whole gradient mass
        weights = [step["gradient_mass"] for step in steps]
    return round(fmean([step[name] for step in steps], weights), 3)


# ---- the results ---------------------------------------------------------------------------------
def write_results(points: Sequence[EvalPoint], task: Task, settings: Settings) -> dict[str, Any]:
    """results.json and curve.png from the files of the run; returns the content of the former.

    points: the EvalPoint of every model of the run, the first model first.
    """
    results: dict[str, Any] = {}
    last = None
    if settings.test_problems:
        last = results["before"] = _evaluate_point(points[0], task, settings)
    results["iterations"] = []
    for iteration in range(1, settings.iterations + 1):
        file = settings.iteration_folder(iteration) / "metrics.jsonl"
        steps = read_records(file, dict[str, float])
        entry = {
            "dataset": describe_dataset(iteration, settings) | {"steps": len(steps)},
            "training": summarize_epoch(steps),
        }
        if settings.test_problems:
            curve = [{"samples_seen": 0, **last}]
            for point in points[1:]:
                if point.iteration == iteration:
                    last = _evaluate_point(point, task, settings)
                    curve.append({"samples_seen": point.samples_seen, **last})
            entry |= {"curve": curve, "after": last}
        results["iterations"].append(entry)
    results["versions"] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if torch.cuda.is_available():
        results["device"] = torch.cuda.get_device_name()
    if results["iterations"] and settings.test_problems:
        draw_curve(results["iterations"], task, settings.out / "curve.png")
    write_file(settings.out / "results.json", json.dumps(results, indent=2) + "\n")
    return results


def _evaluate_point(point: EvalPoint, task: Task, settings: Settings) -> dict[str, Any]:
    samples = read_records(point.file, Sample)
    greedy = read_records(point.greedy_file, Sample)
    return evaluate(samples, greedy, task, settings.k, settings.seed)


def describe_dataset(iteration: int, settings: Settings) -> dict[str, Any]:
    """How many samples an iteration has drawn and trained on, and the mean of their baselines."""
    folder = settings.iteration_folder(iteration)
    samples = load_rows(settings.samples or str(folder / "samples.jsonl"), "train", Sample)
    examples = {}
    for example in read_records(folder / "train.jsonl", Example):
        examples[example.sample] = example
    chosen = [samples[index] for index in examples]
    baseline = fmean(samples[index].reward - examples[index].reward for index in examples)
    mismatch = engine_mismatch(examples.values())
    return {
        "composition": settings.composition,
        "seed": settings.seed_of(f"composition {iteration}"),
        "drawn": _count(samples),
        "trained": _count(chosen),
        "baseline": round(baseline, 12),
        **({} if mismatch is None else {"engine_mismatch": mismatch}),
    }


def _count(samples: Sequence[Sample]) -> dict[str, int]:
    return {
        "samples": len(samples),
        "positive": sum(sample.reward >= 0 for sample in samples),
        "problems": len({sample.prompt for sample in samples}),
    }


def draw_curve(iterations: Sequence[dict[str, Any]], task: Task, file: Path) -> None:
    """The shares of outcomes over training as a picture."""
    from matplotlib.figure import Figure

    seen = [0]
    shares: dict[str, list[float]] = {}
    for iteration in iterations:
        before = seen[-1]
        seen += [before + entry["samples_seen"] for entry in iteration["curve"]]
        for outcome in task.outcomes:
            values = shares.setdefault(outcome, [])
            values += [100 * entry[outcome] for entry in iteration["curve"]]
    figure = Figure(figsize=(5, 3.5), layout="constrained")
    axes = figure.add_subplot(xlabel="samples trained on", ylabel="share of test samples, %")
    for outcome, values in shares.items():
        axes.plot(seen[1:], values, marker="o", label=outcome)
    axes.legend()
    figure.savefig(file, dpi=150)
