"""Ours: what variants of the loss cost that public code calls TOPR (topr_conformance.variants)."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from figures.common import (
    ALL_SHARES,
    EPOCH,
    TUNED,
    VARIANTS,
    Figure,
    Findings,
    Rates,
    arm_line,
    arms_at_both_rates,
    by_seed,
    curves,
    evenly,
    over_seeds,
)
from figures.runs import Job, Run, in_seeds, measurements
from figures.scales import Scale
from toprlib.plotting import Panel
from toprlib.records import OUTCOMES
from toprlib.report import Estimate, Table


def tuned(scale: Scale) -> Sequence[str]:
    """The paper's weight, and the variants that the scale's micro-batches allow."""
    names = ["topr", *VARIANTS]
    if scale.base.micro_batch_size < scale.base.batch_size:
        # Its mean is over the tokens of a whole step.
        names.remove("per-token + token mean")
    return names


def arms(scale: Scale, rates: Rates, seeds: range) -> list[Job]:
    """Each variant at TOPR's learning rate and at its own."""
    return in_seeds(arms_at_both_rates(scale, rates, list(rates)), seeds)


def read(runs: Sequence[Run], scale: Scale) -> Findings:
    """Outcomes of each variant at both learning rates, and the cost of the variant."""
    table = measurements(runs)
    data = {}
    shares = {}
    outcomes = table[table["metric"].isin(OUTCOMES)]
    for rate, rows in outcomes.groupby("rate", sort=False):
        data[rate] = {}
        for name, of_variant in rows.groupby("method", sort=False):
            data[rate][name] = curves(of_variant, "metric")
        shares |= compare(rows)
    return Findings(data, shares, tables={"weights": weights_table(table)})


def compare(rows: pd.DataFrame) -> dict[str, Estimate]:
    """Variants at the end, and their difference to TOPR; rows: of one learning rate for each."""
    lr = rows.groupby("method")["lr"].first()
    correct = by_seed(rows, "correct", "method")
    invalid = by_seed(rows, "invalid", "method")
    found = {}
    for name in correct:
        label = f"{name}, lr {lr[name]:g}"
        found[f"{label}: correct at the end"] = over_seeds(correct[name])
        found[f"{label}: invalid at the end"] = over_seeds(invalid[name])
        if name != "topr":
            found[f"{label} - topr"] = over_seeds(correct[name] - correct["topr"])
    return found


def weights_table(table: pd.DataFrame) -> Table:
    """Each variant at TOPR's learning rate, and at its own."""
    correct = by_seed(table, "correct", ["rate", "method"])
    invalid = by_seed(table, "invalid", ["rate", "method"])
    own_lr = table[table["rate"] == "own rate"].groupby("method", sort=False)["lr"].first()
    rows = []
    for name, lr in own_lr.items():
        at_one_rate = over_seeds(correct["one rate", name]).text(100, unit=" %")
        invalid_there = over_seeds(invalid["one rate", name]).text(100, unit=" %")
        at_own_rate = over_seeds(correct["own rate", name]).text(100, unit=" %")
        rows.append([f"`{name}`", at_one_rate, invalid_there, f"{lr:g}", at_own_rate])
    head = ["weight", "correct at the end", "invalid at the end", "own learning rate"]
    return Table([*head, "correct with that"], rows)


def panels(data: Mapping[str, Any]) -> list[Panel]:
    """Correct and invalid completions at TOPR's learning rate; at its own too, if these differ."""
    titles = {"one rate": "TOPR's learning rate", "own rate": "its own learning rate"}
    if data["own rate"] == data["one rate"]:
        del titles["own rate"]
    drawn = []
    for rate, title in titles.items():
        for outcome in ("correct", "invalid"):
            lines = []
            for name, of_variant in data[rate].items():
                y = of_variant[outcome]
                lines.append(arm_line(evenly(y), y, TUNED[name]))
            ylabel = f"{outcome} (%), 95% interval"
            drawn.append(Panel(f"{outcome}, {title}", EPOCH, ylabel, lines, ALL_SHARES))
    return drawn


FIGURE = Figure(arms, read, panels, tuned)
