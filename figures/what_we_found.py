"""Ours: the picture of results/README.md, TOPR minus SFT in percentage points.

python -m figures.what_we_found    # from results/fair_a.csv
"""

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from figures.common import interval
from figures.fair import SHARES, TITLES, base_accuracy, find_leads, join_shares
from figures.pictures import save

RESULTS = Path(__file__).resolve().parent.parent / "results"
METRICS = {"pass@1": ("one answer", "#0072B2", "o"), "maj@16": ("vote of 16", "#D55E00", "s")}
COMPARISONS = {  # arms of experiment A
    "TOPR with a baseline minus SFT, repeated": ("TOPR, share", "SFT, repeated"),
    "TOPR with a baseline minus SFT, once": ("TOPR, share", "SFT"),
    "TOPR without a baseline minus SFT, once": ("TOPR", "SFT"),
}


def list_rows() -> list[tuple[str, pd.DataFrame]]:
    """Label and leads of each row of the picture; a comparison's name has no leads."""
    table = join_shares(pd.read_csv(RESULTS / "fair_a.csv").query("seed < 10"))
    rows = []
    for comparison, arms in COMPARISONS.items():
        rows.append((comparison, pd.DataFrame()))
        for name, title in TITLES.items():
            for base in SHARES:
                of_set = table[(table["base"] == base) & (table["set"] == name)]
                leads = find_leads(of_set, *arms, METRICS)
                rows.append((f"{title}, base of {base_accuracy(table, base):.0f} %", leads))
    return rows


def draw(rows: list[tuple[str, pd.DataFrame]]) -> Figure:
    """A row for each label, with both metrics."""
    figure = Figure(figsize=(8, 0.36 * len(rows) + 1), layout="constrained", dpi=150)
    axes = figure.add_subplot()
    axes.axvline(0, color="black", lw=1)
    for height, (_, leads) in enumerate(rows):
        for shift, (metric, (label, color, marker)) in enumerate(METRICS.items()):
            if len(leads):
                lead = interval(leads[metric])
                style = {"color": color, "marker": marker, "ls": "none", "capsize": 3}
                style["mfc"] = "white" if shift else color
                y = height + 0.26 * shift - 0.13
                axes.errorbar(lead["mean"], y, xerr=lead["half_width"], label=label, **style)
    label = "← SFT is better    points, 95% interval    TOPR is better →"
    axes.set(xlabel=label, yticks=range(len(rows)), ylim=(len(rows) - 0.4, -0.6), xlim=(-6, 6))
    axes.set_yticklabels([label for label, _ in rows])
    for text, (_, leads) in zip(axes.get_yticklabels(), rows, strict=True):
        text.set_fontweight("normal" if len(leads) else "bold")
    axes.tick_params(axis="y", length=0)
    return figure


def main() -> None:
    """Draw the picture, and print its numbers."""
    rows = list_rows()
    for label, leads in rows:
        print(label)
        for metric in leads:
            print("    {}: {mean:.2f} ± {half_width:.2f}".format(metric, **interval(leads[metric])))
    save(draw(rows), RESULTS / "what_we_found.png")


if __name__ == "__main__":
    main()
