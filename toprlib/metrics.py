"""What a step of the optimiser saw, in numbers: a line of metrics.jsonl; and checks of log-probabilities."""

import warnings
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

START_TOLERANCE = {  # nats that |log pi - log mu| may reach at the first step; ours
    "float32": 0.01,  # a sum over 100,000 tokens differs by 0.008
    # A bfloat16 logit from 16 to 32 is a multiple of 0.125, so that two ways to compute it (another attention kernel,
    # other padding) differ by 0.05, the standard deviation of two roundings, and sums over 512 tokens by 1.2. Measured
    # with SmolLM2-135M, whose logits reach 44: 1.6, and at most 3.1 in 8 sequences.
    "bfloat16": 5.0,
}


def step_metrics(log_ratio: Tensor, reward: Tensor, weight: Tensor) -> dict[str, float]:
    """The metrics of a step from its sequences' (B,) log-ratios, rewards and weights.

    Quantiles (5, 50, 95%) and means of log-ratio and weight, where reward > 0 (pos) and < 0 (neg); weights_below_1e-6:
    a share; ess: effective sample size (sum w)^2 / sum w^2, in sequences; pull: the sum of weight |reward|;
    realised_share: what positives have of it. Reward 0 has no gradient, hence no weight to count.
    """
    metrics, means, pull = {}, {}, weight * reward.abs()
    levels = torch.tensor([0.05, 0.5, 0.95], dtype=weight.dtype)
    for sign, chosen in (("pos", reward > 0), ("neg", reward < 0)):
        if chosen.any():
            quantiles = (
                torch.stack([log_ratio, weight])[:, chosen].quantile(levels, dim=1).T.tolist()
            )
            for name, values in zip(("log_ratio", "weight"), quantiles, strict=True):
                metrics |= {
                    f"{name}_{sign}_q{100 * q:02.0f}": v
                    for q, v in zip(levels, values, strict=True)
                }
            means |= {f"log_ratio_{sign}_mean": log_ratio[chosen].mean().item()}
            means |= {f"weight_{sign}_mean": weight[chosen].mean().item()}
    weight = weight[reward != 0]
    metrics["weights_below_1e-6"] = (weight < 1e-6).sum().item() / max(len(weight), 1)
    metrics["ess"] = (weight.sum() ** 2 / weight.square().sum().clamp_min(1e-30)).item()
    metrics["pull"] = pull.sum().item()
    if metrics["pull"] > 0:
        metrics["realised_share"] = (pull[reward > 0].sum() / pull.sum()).item()
    return metrics | means


def over_epoch(steps: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """An epoch's lines of metrics.jsonl as results.json has them: four means over all steps, and over each tenth.

    The realised share is a mean weighted by `pull`, the others are plain. Of the log-ratios, whose end counts, the mean
    is that of the last tenth. Three decimals; None where no step has the metric.
    """
    names = ("realised_share", "weight_neg_mean", "log_ratio_pos_mean", "log_ratio_neg_mean")
    parts = [steps[len(steps) * i // 10 : len(steps) * (i + 1) // 10] for i in range(10)]
    tenths = {name: [mean_over(part, name) for part in parts if part] for name in names}
    return {name: mean_over(parts[-1] if "ratio" in name else steps, name) for name in names} | {
        "tenths": tenths
    }


def mean_over(steps: Sequence[Mapping[str, float]], name: str) -> float | None:
    """The mean of a metric over the steps that have it, None without any; that of the realised share is by `pull`."""
    measured = [step for step in steps if name in step]
    pulls = [step["pull"] for step in measured] if name == "realised_share" else None
    return round(fmean((step[name] for step in measured), pulls), 3) if measured else None


def check_ratio(step: int, log_ratio: Tensor, tolerance: float) -> None:
    """ArithmeticError if step 1 does not start at pi = mu; a warning if pi has not left mu by step 2.

    log_ratio: (B,), before the step's update. tolerance: nats that its elements may be away from 0.
    """
    furthest = log_ratio.abs().max().item()
    if step == 1 and not furthest <= tolerance:
        fault = (
            f"|log pi - log mu| reaches {furthest:.3g}, above {tolerance:g}, where pi should be mu"
        )
        raise ArithmeticError(f"step 1: {fault}; see --trust-logmu")
    if step == 2 and furthest == 0:
        warnings.warn(
            "every log-ratio is 0 after an update: is log mu recomputed, or lr too small?",
            stacklevel=2,
        )


def engine_mismatch(engine: Mapping[int, float], trainer: Mapping[int, float]) -> dict[str, float]:
    """log mu(y|x) by the sampling engine less that by the trainer, of each sample, in nats.

    >>> engine_mismatch({7: -2.0, 9: -3.0}, {7: -2.5, 9: -3.0})
    {'mean': 0.25, 'largest': 0.5, 'q05': 0.025, 'q50': 0.25, 'q95': 0.475}
    """
    difference = np.array([engine[sample] - trainer[sample] for sample in sorted(engine)])
    quantiles = {f"q{q:02}": float(np.quantile(difference, q / 100)) for q in (5, 50, 95)}
    return {
        "mean": float(difference.mean()),
        "largest": float(np.abs(difference).max()),
        **quantiles,
    }
