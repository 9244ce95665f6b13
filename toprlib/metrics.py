"""Metrics of the optimizer's steps (a line of metrics.jsonl each), and checks of log mu.

A completion with reward 0 has no gradient, so no metric counts it. Such completions also fill up
the micro-batches of a rank that has fewer completions than the others.
"""

import warnings
from itertools import pairwise
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

START_TOLERANCE = {  # nats that |log pi - log mu| may reach at the first step; ours
    "float32": 0.01,  # a sum over 100,000 tokens differs by 0.008
    # A bfloat16 logit from 16 to 32 is a multiple of 0.125. Two ways to compute it (another
    # attention kernel, other padding) differ by 0.05, the standard deviation of two roundings, and
    # sums over 512 tokens by 1.2. Measured with SmolLM2-135M, whose logits reach 44: 1.6, and at
    # most 3.1 in 8 sequences.
    "bfloat16": 5.0,
}
# Nats that the first step's mean log-ratio may be away from 0 with --trust-logmu; ours. At -0.5
# the weight of wrong completions is about 0.6. Rounding in bfloat16 moves the mean of 8 by 0.5.
GIVEN_TOLERANCE = {"float32": 0.5, "bfloat16": 1.5}
QUANTILES = (0.05, 0.5, 0.95)
NEGLIGIBLE_WEIGHT = 1e-6
SUMMARIZED = ("realised_share", "weight_neg_mean", "log_ratio_pos_mean", "log_ratio_neg_mean")


# ---- one step ------------------------------------------------------------------------------------
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
    levels = torch.tensor(QUANTILES, dtype=values.dtype, device=values.device)
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
    realised_share: the positives' share of gradient_mass, absent if that is 0. It is the effective
    proportion of Equation 12 after the weights.

    >>> totals = weight_totals(torch.tensor([1.0, -1.0, -1.0]), torch.tensor([1.0, 0.5, 0.0]))
    >>> [round(value, 2) for value in totals.values()]
    [0.33, 1.8, 1.5, 0.67]
    """
    negligible = (weight < NEGLIGIBLE_WEIGHT).sum().item()
    sum_of_squares = weight.square().sum().clamp_min(1e-30)  # all weights may be 0
    mass = weight * reward.abs()  # (B,)
    metrics = {
        "weights_below_1e-6": negligible / max(len(weight), 1),
        "ess": (weight.sum() ** 2 / sum_of_squares).item(),
        "gradient_mass": mass.sum().item(),
    }
    if metrics["gradient_mass"] > 0:
        metrics["realised_share"] = (mass[reward > 0].sum() / mass.sum()).item()
    return metrics


# ---- one epoch -----------------------------------------------------------------------------------
def summarize_epoch(steps: list[dict[str, float]]) -> dict:
    """The metrics SUMMARIZED of an epoch for results.json, from its lines of metrics.jsonl.

    Each is a mean over all steps, except that the log-ratios are means over the last tenth: their
    values at the end matter. `tenths`: the means over each tenth of the epoch. Rounded to three
    decimals; None where no step has the metric. An epoch of fewer than ten steps has fewer parts.

    >>> steps = [{"weight_neg_mean": 1.0}, {"weight_neg_mean": 0.5}]
    >>> summary = summarize_epoch(steps)
    >>> summary["weight_neg_mean"], summary["tenths"]["weight_neg_mean"]
    (0.75, [1.0, 0.5])
    """
    ends = [len(steps) * i // 10 for i in range(11)]
    parts = [steps[begin:end] for begin, end in pairwise(ends) if begin < end]
    summary = {}
    tenths = {}
    for name in SUMMARIZED:
        tenths[name] = [_average(part, name) for part in parts]
        is_log_ratio = name.startswith("log_ratio")
        summary[name] = tenths[name][-1] if is_log_ratio else _average(steps, name)
    summary["tenths"] = tenths
    return summary


def _average(steps: list[dict[str, float]], name: str) -> float | None:
    """The mean of a metric over the steps that have it; None if no step has it."""
    steps = [step for step in steps if name in step]
    if not steps:
        return None
    weights = None
    if name == "realised_share":  # then the mean is the share in the epoch's whole gradient mass
        weights = [step["gradient_mass"] for step in steps]
    return round(fmean([step[name] for step in steps], weights), 3)


# ---- checks of log mu ----------------------------------------------------------------------------
def check_start_ratio(step: int, log_ratio: Tensor, dtype: str) -> None:
    """Check that training starts at pi = mu and then leaves it. Other steps than 1 and 2 pass.

    log_ratio: (B,), before the step's update. dtype: that of the model, a key of START_TOLERANCE.
    Raises ArithmeticError in step 1 if a log-ratio is not 0 within the tolerance. Warns in step 2
    if every log-ratio is still exactly 0.

    >>> check_start_ratio(1, torch.tensor([0.0, -1e-6]), "float32")  # pi = mu up to rounding
    """
    largest = log_ratio.abs().max().item()
    tolerance = START_TOLERANCE[dtype]
    if step == 1 and not largest <= tolerance:  # NaN fails every comparison
        message = f"|log pi - log mu| reaches {largest:.3g} nats, above {tolerance:g}"
        fix = "compute log mu with the model that training starts from, without dropout"
        raise ArithmeticError(f"step 1: {message}; {fix}")
    if step == 2 and largest == 0:
        message = "every log-ratio is still 0 after an update"
        fix = "raise the learning rate, and do not recompute log mu within an epoch"
        warnings.warn(f"step 2: {message}; {fix}", stacklevel=2)


def check_given_logmu(step: int, log_ratio: Tensor, reward: Tensor, dtype: str) -> None:
    """Warn if step 1 does not start near pi = mu with the log mu of --trust-logmu.

    log_ratio, reward: (B,), before the step's update. dtype: that of the model, a key of
    GIVEN_TOLERANCE.

    >>> check_given_logmu(1, torch.tensor([0.3, -0.5]), torch.tensor([1.0, -1.0]), "float32")
    """
    learned = log_ratio[reward != 0]  # the others may be fillers
    if step != 1 or len(learned) == 0:
        return
    mean = learned.mean().item()
    if not abs(mean) <= GIVEN_TOLERANCE[dtype]:
        message = f"the mean of log pi - log mu is {mean:.3g} nats, though nothing is trained yet"
        reasons = "of another model or temperature, or renormalised by top-k or top-p"
        fix = "leave --trust-logmu out, so that the run computes it"
        warnings.warn(f"step 1: {message}: the file's log mu is {reasons}; {fix}", stacklevel=2)


def engine_mismatch(engine: dict[int, float], trainer: dict[int, float]) -> dict[str, float]:
    """log mu(y|x) by the sampling engine minus that by the trainer, over samples, in nats.

    engine, trainer: index of a sample -> log mu of its completion, for the same samples.

    >>> engine_mismatch({7: -2.0, 9: -3.0}, {7: -2.5, 9: -3.0})
    {'mean': 0.25, 'largest': 0.5, 'q05': 0.025, 'q50': 0.25, 'q95': 0.475}
    """
    differences = np.array([engine[sample] - trainer[sample] for sample in sorted(engine)])
    mismatch = {
        "mean": float(differences.mean()),
        "largest": float(np.abs(differences).max()),
    }
    for level in QUANTILES:
        mismatch[f"q{round(100 * level):02}"] = float(np.quantile(differences, level))
    return mismatch
