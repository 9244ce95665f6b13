"""Figure 3: shares of correct, incorrect and invalid completions over the epoch.

All methods of the paper at TOPR's learning rate, and each at its own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from figures.common import (
    ALL_SHARES,
    EPOCH,
    METHODS,
    PAPER_METHODS,
    Figure,
    Findings,
    Rates,
    arms_at_both_rates,
    by_seed,
    change,
    curves,
    ends,
    evenly,
    line,
    over_seeds,
)
from figures.runs import Job, Run, in_seeds, measurements
from figures.scales import Scale
from toprlib.plotting import Panel
from toprlib.records import OUTCOMES


def arms(scale: Scale, rates: Rates, seeds: range) -> list[Job]:
    """The paper's methods at TOPR's learning rate and at their own."""
    jobs = arms_at_both_rates(scale, rates, PAPER_METHODS)
    return in_seeds(jobs, scale.seeds_for("fig3", seeds))


def read(runs: Sequence[Run], scale: Scale) -> Findings:
    """Shares of outcomes along the epoch at TOPR's rate; invalid completions at the end."""
    table = measurements(runs)
    base = by_seed(table, "invalid", ["rate", "method"], at=0)
    shares = {"base: invalid": over_seeds(base["one rate", "topr"])}
    shares |= ends(table, "invalid")
    at_one_rate = table[table["rate"] == "one rate"]
    for method, values in change(at_one_rate, "invalid", "method").items():
        shares[f"{METHODS[method].name} - base, one rate: invalid"] = over_seeds(values)
    data = {}
    outcomes = at_one_rate[at_one_rate["metric"].isin(OUTCOMES)]
    for method, rows in outcomes.groupby("method", sort=False):
        data[method] = curves(rows, "metric")
    return Findings(data, shares)


def panels(data: Mapping[str, Any]) -> list[Panel]:
    """A panel for each method."""
    drawn = []
    for method, lines in data.items():
        outcomes = [line(evenly(y), y, outcome) for outcome, y in lines.items()]
        title = METHODS[method].name
        drawn.append(Panel(title, EPOCH, "share (%), 95% interval", outcomes, ALL_SHARES))
    return drawn


FIGURE = Figure(arms, read, panels, tuned=lambda scale: PAPER_METHODS)
