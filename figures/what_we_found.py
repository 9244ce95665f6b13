"""Ours: the picture of results/README.md, TOPR minus SFT in percentage points.

python -m figures.what_we_found    # from results/fair_a.csv and results/fair_b.csv
"""

from itertools import product
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.common import interval
from figures.fair import SHARES, TITLES, base_accuracy, find_leads, join_shares
from figures.pictures import save

RESULTS = Path(__file__).resolve().parent.parent / "results"
METRICS = {  # label, color, marker, its face, and shift in the row
    "pass@1": ("one answer", "#0072B2", "o", "#0072B2", -0.13),
    "maj@16": ("vote of 16", "#D55E00", "s", "white", 0.13),
}
BASES = {"worded": "weaker base", "two_thirds": "stronger base"}
ROWS = list(product(TITLES, SHARES))  # sets and bases
PANELS = (  # title; experiment; arms
    ("TOPR with baseline\n− SFT, repeated", "a", "TOPR, share", "SFT, repeated"),
    ("the same, with ten\npasses at 1e-5", "b", "TOPR, share 50%", "SFT, repeated"),
    ("TOPR with baseline\n− SFT, once", "a", "TOPR, share", "SFT"),
    ("TOPR, no baseline\n− SFT, once", "a", "TOPR", "SFT"),
)
TITLE = "difference in points, 95% interval\n← SFT is better    TOPR is better →"


def read_tables() -> dict[str, pd.DataFrame]:
    """The test seeds of experiment A, and experiment B's runs with small steps."""
    runs_of_a = pd.read_csv(RESULTS / "fair_a.csv").query("seed < 10")
    runs_of_b = pd.read_csv(RESULTS / "fair_b.csv").query("rate == 1e-5")
    return {"a": join_shares(runs_of_a), "b": runs_of_b}


def draw(tables: dict[str, pd.DataFrame]) -> Figure:
    """A panel for each of PANELS, a row for each of ROWS; prints the numbers."""
    figure = Figure(figsize=(10, 3), layout="constrained", dpi=150)
    figure.suptitle(TITLE, fontsize="medium")
    panels = figure.subplots(1, len(PANELS), sharex=True, sharey=True)
    for axes, (title, experiment, *arms) in zip(panels, PANELS, strict=True):
        axes.set_title(title)
        axes.axvline(0, color="black", lw=1)
        sets = dict(list(tables[experiment].groupby(["set", "base"])))
        for height, row in enumerate(ROWS):
            if row in sets:
                print(title.replace("\n", " "), *row)
                draw_leads(axes, height, find_leads(sets[row], *arms, METRICS))
            else:
                axes.text(0.5, height, "not run", va="center")
    labels = []
    for name, base in ROWS:
        before = base_accuracy(tables["a"], base)
        labels.append(f"{TITLES[name]}, {BASES[base]} ({before:.0f} %)")
    axes.set(yticks=range(len(ROWS)), yticklabels=labels, ylim=(len(ROWS) - 0.4, -0.6))
    return figure


def draw_leads(axes: Axes, height: float, leads: pd.DataFrame) -> None:
    """Both metrics of a row, with their intervals; prints them."""
    for metric, (label, color, marker, face, shift) in METRICS.items():
        lead = interval(leads[metric])
        print("    {}: {mean:.2f} ± {half_width:.2f}".format(metric, **lead))
        style = {"color": color, "marker": marker, "mfc": face, "ls": "none", "capsize": 3}
        y = height + shift
        axes.errorbar(lead["mean"], y, xerr=lead["half_width"], label=label, **style)


def main() -> None:
    """Draw the picture, and print its numbers."""
    save(draw(read_tables()), RESULTS / "what_we_found.png")


if __name__ == "__main__":
    main()
