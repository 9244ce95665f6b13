"""Figure 2: the objectives of TOPR and PPO as functions of pi / mu. It needs no runs.

TOPR's has a+ = 1, b+ = 1 + eps, a- = 0, b- = 1. The two are compared where PPO does not clip: on
[1, 1 + eps] for positives, and on [1 - eps, 1] for negatives.
"""

import numpy as np
import torch
from matplotlib.figure import Figure

import topr
from figures.pictures import LABELS, LOOKS, new_figure, plot
from figures.runs import Rates, Row, Run
from figures.scales import Scale
from toprlib.methods import ppo_loss

TUNED = ()
EPS = 0.2  # of PPO (Section 4.3)
RATIOS = np.linspace(0.01, 2.5, 250)
SIGNS = {"R = +1": 1.0, "R = -1": -1.0}


def rows(scale: Scale, rates: Rates) -> list[Row]:
    """No runs."""
    return []


def read(runs: list[Run], scale: Scale) -> dict:
    """The objectives, their largest difference where PPO does not clip, and largest slopes."""
    data = {"ratio": RATIOS.tolist()}
    numbers = {}
    for sign, reward in SIGNS.items():
        of_sign = objectives(reward)
        low = 1 if reward > 0 else 1 - EPS
        high = low + EPS
        is_inside = (low <= RATIOS) & (high >= RATIOS)
        is_clipped = ~is_inside & (RATIOS * reward > reward)
        difference = np.abs(of_sign["TOPR"] - of_sign["PPO"])[is_inside].max()
        numbers[f"{sign}: largest |TOPR - PPO| for {low:g} <= pi/mu <= {high:g}"] = [difference]
        for name, values in of_sign.items():
            data[f"{name}, {sign}"] = values.tolist()
            slope = np.abs(np.gradient(values, RATIOS))
            name = f"{sign}: largest slope of {name}"
            # At the ends of the range the slope would be one-sided, or across the kink.
            numbers[f"{name} where PPO clips"] = [slope[is_clipped][1:-1].max()]
            numbers[f"{name} for pi/mu <= 0.5"] = [slope[RATIOS <= 0.5].max()]
    return {"shares": {}, "numbers": numbers, "data": data}


def objectives(reward: float) -> dict[str, np.ndarray]:
    """TOPR's and PPO's objective of one sequence of one token at each of RATIOS."""
    log_ratio = torch.tensor(RATIOS).log()
    limits = topr.Limits(1, 1 + EPS, 0, 1)
    ours = topr.topr_objective(log_ratio, torch.full_like(log_ratio, reward), limits)
    ppo = []
    for token_logp in log_ratio.reshape(-1, 1, 1):
        inputs = (torch.zeros_like(token_logp), torch.full_like(token_logp[0], reward))
        loss = ppo_loss(token_logp, *inputs, mask=torch.ones(1, 1), eps=EPS)
        ppo.append(-loss.item())
    return {"TOPR": ours.numpy(), "PPO": np.array(ppo)}


def draw(data: dict) -> Figure:
    """A panel for each sign of the reward."""
    figure, panels = new_figure(2)
    for axes, sign in zip(panels, SIGNS, strict=True):
        for arm in ("topr", "ppo"):
            values = data[f"{LABELS[arm]}, {sign}"]
            line = {"mean": values, "half_width": [None] * len(values)}
            plot(axes, line, LOOKS[arm], data["ratio"], scale=1)
        axes.set(title=sign.replace("-", "−"), xlabel=r"$\pi / \mu$", ylim=(-2.6, 2.6))
        axes.set(ylabel="objective of one sequence")
    return figure
