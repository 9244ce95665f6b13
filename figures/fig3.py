"""Figure 3: shares of correct, incorrect and invalid completions over the epoch.

All methods of the paper at TOPR's learning rate, and each at its own.
"""

from matplotlib.figure import Figure

from figures import fig1
from figures.common import by_seed, curves, named
from figures.pictures import LABELS, LOOKS, TRAINING, new_figure, plot
from figures.runs import Run, measure
from figures.scales import PAPER_METHODS, Scale
from toprlib.records import OUTCOMES

TUNED = PAPER_METHODS
rows = fig1.rows


def read(runs: list[Run], scale: Scale) -> dict:
    """Shares of outcomes along the epoch at TOPR's rate; invalid completions at the end."""
    table = measure(runs)
    one_rate = table[table["rate"] == "one rate"]
    before = by_seed(one_rate, "invalid", at=0)
    shares = {"base: invalid": before["topr"], **fig1.ends(table, "invalid")}
    gain = by_seed(one_rate, "invalid") - before
    shares |= named(gain, "{} - base, one rate: invalid")
    data = {arm: {} for arm in PAPER_METHODS}
    for outcome in OUTCOMES:
        for arm, line in curves(one_rate, outcome).items():
            data[arm][outcome] = line
    return {"shares": shares, "numbers": {}, "data": data}


def draw(data: dict) -> Figure:
    """A panel for each method."""
    figure, panels = new_figure(len(data))
    for axes, (arm, lines) in zip(panels, data.items(), strict=True):
        for outcome, line in lines.items():
            plot(axes, line, LOOKS[outcome])
        axes.set(title=LABELS[arm], xlabel=TRAINING, ylabel="share (%), 95% interval")
    return figure
