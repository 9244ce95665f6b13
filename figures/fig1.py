"""Figure 1: test accuracy over one epoch, at TOPR's learning rate and at each method's own.

Ours: TIS, plain importance sampling, SFT on positives, and a group baseline, each at its own rate.
On the laptop DPO takes about twice as many steps as the others.
"""

import pandas as pd
from matplotlib.figure import Figure

from figures.common import Values, by_seed, curves, minus, named, rate_text, rates_of_arms
from figures.pictures import CORRECT, LABELS, LOOKS, new_figure, plot_arms, plot_rows
from figures.runs import Rates, Row, Run, at_rates, measure
from figures.scales import METHODS, PAPER_METHODS, Scale

TUNED = METHODS
OTHERS = ("group", "sft", "off_policy", "tis", "topr")  # of the last panel, the lowest row first


def rows(scale: Scale, rates: Rates) -> list[Row]:
    """The paper's methods at TOPR's learning rate, and all tuned methods at their own."""
    own = {arm: each[0] for arm, each in rates.items()}
    return at_rates({"one rate": own["topr"]}, PAPER_METHODS, own)


def read(runs: list[Run], scale: Scale) -> dict:
    """Accuracy along the training, and differences at its end."""
    table = measure(runs)
    data = {rate: curves(rows, "correct") for rate, rows in table.groupby("rate", sort=False)}
    shares = ends(table, "correct") | gains(table)
    papers = table[table["arm"].isin(PAPER_METHODS)]
    vote = f"maj@{scale['base'].k}"
    before = by_seed(papers, vote, ["rate", "arm"], at=0)
    shares[f"base: {vote}"] = before["own rate", "topr"]
    for rate in data:
        at_rate = papers[papers["rate"] == rate]
        shares |= named(by_seed(at_rate, vote), f"{{}}, {rate}: {vote} at the end")
    # Samples that PPO clips have no gradient.
    ppo = table[table["arm"] == "ppo"]
    for tenth, at in (("first", 0), ("last", -1)):
        values = by_seed(ppo, "clipped", "rate", at)
        shares |= named(values, f"PPO, {{}}: clipped samples, {tenth} tenth")
    own = rates_of_arms(table)
    names = {arm: f"{LABELS[arm]}: own rate / TOPR's" for arm in own if arm != "topr"}
    numbers = {name: [own[arm] / own["topr"]] for arm, name in names.items()}
    return {"shares": shares, "numbers": numbers, "data": data}


def ends(table: pd.DataFrame, metric: str) -> Values:
    """A metric at the end of each arm at each of its learning rates."""
    found = {}
    for lr, rows in table.groupby("lr"):
        # An arm whose own rate is TOPR's is in the table twice.
        once = rows.drop_duplicates(["arm", "seed", "metric", "point"])
        found |= named(by_seed(once, metric), f"{{}}, {rate_text(lr)}: {metric} at the end")
    return found


def gains(table: pd.DataFrame) -> Values:
    """Accuracy of one method minus another's; and how much further a method falls than TOPR."""
    # Differences are between runs of a seed, which share their samples.
    correct = by_seed(table, "correct", ["rate", "arm"])
    one = correct["one rate"]
    along = table[table["metric"] == "correct"].groupby(["rate", "arm", "seed"])["value"]
    rise = (along.last() - along.max()).unstack(["rate", "arm"])["one rate"]
    return {
        **minus(correct["own rate"], "topr", "TOPR - {}, own rates"),
        **minus(one, "topr", "TOPR - {}, one rate"),
        # The paper also ranks DPO above the other two.
        **minus(one.drop(columns="topr"), "dpo", "DPO - {}, one rate"),
        **minus(rise, "topr", "{} - TOPR, one rate: fall from the highest"),
    }


def draw(data: dict) -> Figure:
    """The paper's methods along the epoch; the ends of the others, which lie close together."""
    figure, (one, own, others) = new_figure(3)
    plot_arms(one, data["one rate"], "TOPR's learning rate for all")
    papers = {arm: data["own rate"][arm] for arm in PAPER_METHODS}
    plot_arms(own, papers, "each at its own learning rate")
    own.sharey(one)
    for height, arm in enumerate(OTHERS):
        end = {part: values[-1:] for part, values in data["own rate"][arm].items()}
        plot_rows(others, [height], end, LOOKS[arm])
    others.set(title="own rate, at the end", xlabel=CORRECT, yticks=[])
    return figure
