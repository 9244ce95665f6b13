"""Ours: seven methods at their best learning rates, at three times these, and in a hard setting.

Hard is that of Figure 7: 60% negatives and late clipping, at each method's best rate. Besides, how
many steps a method takes in a bandit to recover a correct answer.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import torch

from figures.common import (
    METHODS,
    PAPER_METHODS,
    RATE_SEEDS,
    TRAINING,
    Figure,
    Findings,
    Rates,
    accuracy_panel,
    by_seed,
    curves,
    make_job,
    over_seeds,
)
from figures.runs import Job, Run, in_seeds, measurements, with_shared_samples
from figures.scales import Scale
from toprlib.methods import METHODS as METHOD_LOSSES
from toprlib.plotting import Panel
from toprlib.report import Estimate, Table

COMPARED = ("topr", "sft", "tis", "off_policy", "ppo", "dpo", "reinforce")
SETTINGS = {
    "best": "best rate",
    "three": "three times the rate",
    "late": "60% negative, late clipping",
}
STEPS = "steps until a forgotten right answer is back"
MOST_STEPS = 10_000


def arms(scale: Scale, rates: Rates, seeds: range) -> list[Job]:
    """Each method in the three settings.

    In the hard setting `seeds` suffice: its four passes take long, and differences are large.
    """
    hard = {
        "composition": "proportion",
        "proportion": 0.4,
        "epochs": scale.passes,
        "max_grad_norm": scale.clips[1],
        **scale.sets,
    }
    jobs = {"best": [], "three": [], "late": []}
    for method in COMPARED:
        lr = rates[method][0]
        arm = METHODS[method]
        for setting, label, changes in (
            ("best", method, {"lr": lr}),
            ("three", f"{method}-3", {"lr": 3 * lr}),
            ("late", f"{method}-late", {"lr": lr, **hard}),
        ):
            columns = {"setting": setting, "method": method, "best_lr": lr}
            jobs[setting].append(make_job(scale, columns, label, arm, **changes))
    one_epoch = with_shared_samples([*jobs["best"], *jobs["three"]])
    late = with_shared_samples(jobs["late"])
    return in_seeds(one_epoch, scale.seeds_for("robustness", seeds)) + in_seeds(late, seeds)


def read(runs: Sequence[Run], scale: Scale) -> Findings:
    """Accuracy at the end in each setting, and steps in the bandit."""
    table = measurements(runs)
    correct = by_seed(table, "correct", ["method", "setting"])
    best_lr = table.groupby("method")["best_lr"].first()
    steps = {method: steps_to_recover(method) for method in COMPARED}
    shares = {}
    numbers = {}
    rows = []
    for method in COMPARED:
        name = METHODS[method].name
        shares |= compare(correct, method)
        cells = [over_seeds(correct[method, setting]) for setting in SETTINGS]
        texts = [cell.text(100, unit=" %", within=(0, 1)) for cell in cells]
        if steps[method] is None:
            recovery = f"more than {MOST_STEPS:,}"
        else:
            recovery = str(steps[method])
            numbers[f"{name}: {STEPS}"] = Estimate.over_seeds([steps[method]])
        rows.append([name, *texts, recovery, f"{best_lr[method]:g}"])
    data = {}
    for method, of_method in table.query("metric == 'correct'").groupby("method", sort=False):
        data[method] = curves(of_method, "setting")
    head = ["", *SETTINGS.values(), STEPS, "best rate is"]
    return Findings(data, shares, numbers, {"robustness": Table(head, rows)})


def compare(correct: pd.DataFrame, method: str) -> dict[str, Estimate]:
    """A method in each setting, and against TOPR; correct: columns (method, setting)."""
    name = METHODS[method].name
    found = {}
    for setting, text in SETTINGS.items():
        values = correct[method, setting]
        found[f"{name}, {text}: correct at the end"] = over_seeds(values)
        if method != "topr":
            found[f"TOPR - {name}, {text}"] = over_seeds(correct["topr", setting] - values)
    loss = correct[method, "three"] - correct[method, "best"]
    found[f"{name}: three times the rate - best rate"] = over_seeds(loss)
    return found


def steps_to_recover(method: str, most: int = MOST_STEPS) -> int | None:
    """Gradient steps until pi of the correct arm rises from 1e-6 to 1/2 (Section 3.1).

    A bandit of five arms, one of which is correct; mu is 1/5 for each. Each step is exact, with
    learning rate 1 in the logits. None if `most` steps do not suffice.

    >>> steps_to_recover("topr"), steps_to_recover("tis", most=100)
    (52, None)
    """
    # Each arm is a completion of one token. DPO compares the correct one with each other one.
    arms = torch.tensor([0, 1, 0, 2, 0, 3, 0, 4] if method == "dpo" else [0, 1, 2, 3, 4])
    reward = torch.tensor([1.0, -1.0, -1.0, -1.0, -1.0])[arms]
    logmu = torch.full((5,), 0.2).log()[arms]
    mask = torch.ones(len(arms), 1)
    start = torch.tensor([1e-6] + [(1 - 1e-6) / 4] * 4, dtype=torch.float64)
    logits = start.log().requires_grad_()
    for step in range(most):
        logp = logits.log_softmax(-1)
        if logp[0].exp() >= 0.5:
            return step
        # The expectation over mu: each arm counts alike.
        token_logp = logp[arms][:, None]
        loss = METHOD_LOSSES[method].loss(token_logp, logmu[:, None], reward, mask)
        [gradient] = torch.autograd.grad(loss, logits)
        logits = (logits - gradient).detach().requires_grad_()
    return None


def panels(data: Mapping[str, Any]) -> list[Panel]:
    """The paper's methods and SFT on positives along the training in the two harder settings."""
    titles = {
        "three": "three times the best learning rate",
        "late": "60% negative, late clipping, best rate",
    }
    drawn = []
    for setting, title in titles.items():
        lines = {method: data[method][setting] for method in (*PAPER_METHODS, "sft")}
        drawn.append(accuracy_panel(title, lines, METHODS, TRAINING))
    return drawn


FIGURE = Figure(arms, read, panels, tuned=lambda scale: COMPARED, rate_seeds=RATE_SEEDS)
