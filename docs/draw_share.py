"""Draw results/share.png from the tables of results/share.json: python docs/draw_share.py."""

import json
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pipeline.plots import Line, Panel, Style, draw, save_figure  # noqa: E402

GROUPS = {
    "one wording of a right solution": ("mistaken", "slips", "sure", "two-way", "ended", "long"),
    "several wordings": ("few", "worded", "worded-long", "worded-slow"),
    "several wordings, and slips": ("worded-slips", "more-slips", "default"),
}
STYLES = [Style("#440154", "-", "o"), Style("#3B528B", "--", "s"), Style("#21918C", "-.", "^")]
STYLES += [
    Style("#5EC962", (0, (6, 1, 1, 1, 1, 1)), "D"),
    Style("#C2A800", ":", "v"),
    Style("#000000", (0, (1, 2)), "X"),
]


def number(cell: str) -> tuple[float, float]:
    """Mean and half width of a cell such as '89 ± 9 %'."""
    mean, _, half = cell.removesuffix("%").partition("±")
    return float(mean.removesuffix("% ")), float(half or 0)


def panels() -> list[Panel]:
    """Accuracy below the best share for three groups of bases, and the predicted beside the measured best share."""
    tables = {
        name: table["rows"] for name, table in json.loads((ROOT / "results/share.json").read_text())["tables"].items()
    }
    accuracy = {row[0]: np.array([number(cell)[0] for cell in row[1:]]) for row in tables["accuracy"]}
    law = {row[0].partition(":")[0]: (number(row[2]), float(row[4].rstrip("%"))) for row in tables["law"][:-1]}
    share, drawn, points = [10, 20, 40, 60, 80, 100], [], [Line([0, 100], [0, 100], style="limit")]
    for number_of_group, (title, names) in enumerate(GROUPS.items()):
        lines = [Line(share, accuracy[n] - accuracy[n].max(), n, s) for n, s in zip(names, STYLES, strict=False)]
        options = {"ylim": (-40, 2), "xlim": (0, 102)}
        drawn.append(
            Panel(title, "effective share of positives (%)", "accuracy below the best share (points)", lines, options)
        )
        x, y = zip(*(law[name] for name in names), strict=True)
        means, halves = zip(*x, strict=True)
        apart = np.array(y) + 1.5 * (number_of_group - 1)  # groups beside one another where they are equal
        points.append(Line(means, apart, title, STYLES[number_of_group], "rows", halves))
    options = {"xlim": (0, 102), "ylim": (0, 106)}
    return [*drawn, Panel("the law", "predicted best share p~* (%)", "measured best share (%)", points, options)]


if __name__ == "__main__":
    save_figure(draw(panels()), ROOT / "results" / "share.png")
