"""Figure 2: the objectives of TOPR and PPO as functions of pi / mu. It needs no runs.

TOPR's has a+ = 1, b+ = 1 + eps, a- = 0, b- = 1. The two are compared where PPO does not clip: on
[1, 1 + eps] for positives, and on [1 - eps, 1] for negatives.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

import topr
from figures.common import Figure, Findings, Rates
from figures.runs import Job, Run
from figures.scales import Scale
from toprlib.methods import ppo_loss
from toprlib.plotting import Line, Panel
from toprlib.report import Estimate

EPS = 0.2  # of PPO (Section 4.3)
RATIOS = np.linspace(0.01, 2.5, 250)
# Name in the file -> reward.
SIGNS = {"R = +1": 1.0, "R = -1": -1.0}


def arms(scale: Scale, rates: Rates, seeds: range) -> list[Job]:
    """No runs."""
    return []


def read(runs: Sequence[Run], scale: Scale) -> Findings:
    """The objectives, and how they differ."""
    data = {"ratio": RATIOS.tolist()}
    numbers = {}
    for name, reward in SIGNS.items():
        ours = topr_objective(reward, EPS)
        ppo = ppo_objective(reward, EPS)
        data |= {f"TOPR, {name}": ours.tolist(), f"PPO, {name}": ppo.tolist()}
        for what, value in largest(ours, ppo, reward, EPS).items():
            numbers[f"{name}: largest {what}"] = Estimate.over_seeds([value])
    return Findings(data, numbers=numbers)


def topr_objective(reward: float, eps: float) -> np.ndarray:
    """TOPR's objective of one sequence at each of RATIOS."""
    log_ratio = torch.tensor(RATIOS).log()
    rewards = torch.full_like(log_ratio, reward)
    return topr.topr_objective(log_ratio, rewards, topr.Limits(1, 1 + eps, 0, 1)).numpy()


def ppo_objective(reward: float, eps: float) -> np.ndarray:
    """PPO's objective of one sequence at each of RATIOS: its loss with the other sign."""
    values = []
    for log_ratio in torch.tensor(RATIOS).log():
        token_logp = log_ratio.reshape(1, 1)  # a completion of one token
        inputs = (torch.zeros_like(token_logp), torch.full_like(log_ratio[None], reward))
        loss = ppo_loss(token_logp, *inputs, mask=torch.ones(1, 1), eps=eps)
        values.append(-loss.item())
    return np.array(values)


def largest(ours: np.ndarray, ppo: np.ndarray, reward: float, eps: float) -> dict[str, float]:
    """The largest difference where PPO does not clip, and the largest slopes where it does."""
    ratio = RATIOS
    if reward > 0:
        low = 1
        high = 1 + eps
        is_clipped = ratio > high
    else:
        low = 1 - eps
        high = 1
        is_clipped = ratio < low
    is_inside = (ratio >= low) & (ratio <= high)
    difference = np.abs(ours - ppo)[is_inside].max()
    found = {f"|TOPR - PPO| for {low:g} <= pi/mu <= {high:g}": difference}
    for name, objective in (("PPO", ppo), ("TOPR", ours)):
        slope = np.abs(np.gradient(objective, ratio))
        # At the ends of the range the slope would be one-sided, or across the kink.
        found[f"slope of {name} where PPO clips"] = slope[is_clipped][1:-1].max()
        found[f"slope of {name} for pi/mu <= 0.5"] = slope[ratio <= 0.5].max()
    return found


def panels(data: Mapping[str, Any]) -> list[Panel]:
    """A panel for each sign of the reward."""
    drawn = []
    for name in SIGNS:
        lines = []
        for label in ("TOPR", "PPO"):
            lines.append(Line(data["ratio"], data[f"{label}, {name}"], label, label.lower()))
        title = name.replace("-", "−")
        options = {"ylim": (-2.6, 2.6)}
        drawn.append(Panel(title, r"$\pi / \mu$", "objective of one sequence", lines, options))
    return drawn


FIGURE = Figure(arms, read, panels, tuned=lambda scale: ())
