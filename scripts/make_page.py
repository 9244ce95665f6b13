"""Write docs/index.html, "TOPR, explained", from docs/page/ and the files in results/.

    python scripts/make_page.py

The page is one file that needs no server. docs/page/template.html is Jinja's: {{ }} stands for a
file of that folder, for the data, for the content of a file of results/, or for one of `numbers`.
results/page.json, two runs examined closely, is a record: its file names the commit of its code.
"""

import json
import math
import re
import sys
from dataclasses import astuple
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import tyro
from jinja2 import Environment, StrictUndefined
from matplotlib.colors import to_hex, to_rgb

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from figures.common import VARIANTS  # noqa: E402
from scripts.make_tables import STUDIES, load  # noqa: E402
from topr import PRESETS, importance_weight  # noqa: E402
from toprlib.plotting import STYLES  # noqa: E402
from toprlib.report import Estimate  # noqa: E402

PAGE = ROOT / "docs" / "index.html"
SOURCES = ROOT / "docs" / "page"

# Files of results/ that the template names.
SHOWN = ("page", "robustness", "fig5", "variants", "share", "curve")

# Settings of results/robustness.json, and what the page calls them.
ROBUSTNESS = [
    ("best rate", "a third, one pass, best rate"),
    ("60% negative, late clipping", "60 %, four passes, best rate"),
    ("three times the rate", "a third, one pass, three times the best rate"),
]

# Backgrounds, --paper in style.css; the least contrast of a line with them (WCAG AA).
LIGHT = "#ffffff"
DARK = "#15171a"
LEAST_CONTRAST = 4.5

# matplotlib's dashes, in widths of the line.
DASHES = {"-": (), "--": (3.7, 1.6), ":": (1, 1.65), "-.": (6.4, 1.6, 1, 1.6)}


def percent(share: float, digits: int = 1) -> str:
    """A share in per cent, rounded as toFixed of JavaScript does: a tie goes up.

    >>> percent(0.4425)
    '44.3'
    """
    return str(Decimal(100 * share).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


def with_minus(text: str) -> str:
    """A number as text, with a minus sign in place of a hyphen."""
    return text.replace("-", "−")


# How the template writes a number.
FILTERS = {
    "count": "{:,}".format,
    "percent": percent,
    "signed": lambda value: with_minus(f"{value:+.1f}"),
    "with_minus": with_minus,
    "small": lambda value: re.sub("e-0*(.+)", r" × 10<sup>−\1</sup>", f"{value:.2e}"),
    "estimate": lambda fields: with_minus(Estimate(**fields).text(100)),
    "share": lambda fields: Estimate(**fields).text(100, within=(0, 1)),
}


def accuracy_by_share() -> dict[str, Any]:
    """The effective shares of Figure 5, and each set's accuracy at TOPR's best learning rate."""
    figure = load("fig5")["data"]
    return {"p_tilde": figure["p~"], "accuracy": figure[f"lr {figure['own rate']:g}"]}


def numbers() -> dict[str, Any]:
    """The numbers in the page's text that are computed from files of results/."""
    page = load("page")
    log_ratios = page["completions"][1]["log_ratio"]["topr"][-1]
    _, _, lowest, highest = astuple(PRESETS["topr"])  # the limits of negatives

    def weight(log_ratio: Any) -> torch.Tensor:
        return importance_weight(log_ratio, lowest, highest)

    rates = page["settings"]["lr"]
    return {
        "wrong_share": 1 - page["settings"]["proportion"],
        "settings_of_robustness": ROBUSTNESS,
        "map": settings_where_negatives_help(),
        "weight": float(weight(sum(log_ratios))),
        "per_token_weight": weight(torch.tensor(log_ratios)).mean().item(),
        "geometric_weight": weight(torch.tensor(log_ratios).mean()).item(),
        "tokens": {base: tokens_of_a_completion(base) for base in ("mistaken", "worded-long")},
        "lr": {method: f"{rate:g}".replace("e-0", "e-") for method, rate in rates.items()},
        "drift": realised_shares_at_three_nats(),
        "best_shares": {percent: best_shares(percent) for percent in (10, 50)},
    }


def realised_shares_at_three_nats() -> dict[str, float]:
    """The mean weight of negatives whose log-ratios spread by 3 nats, and the realised shares.

    low, high: of the nominal 10 and 20 % that the paper finds best.
    """
    weight = math.erfc(3 / 2 / math.sqrt(2))  # 2 Phi(-3/2), as mean_weight of topr.js
    low, high = [share / (share + (1 - share) * weight) for share in (0.1, 0.2)]
    return {"weight": weight, "low": low, "high": high}


def settings_where_negatives_help() -> dict[str, int | str]:
    """How many gains of the study `map` have an interval above zero, of how many; their range."""
    gains = [Estimate(**gain) for gain in load("map")["places"].values()]
    ahead = [100 * gain.mean for gain in gains if gain.mean > gain.half_width]
    return {
        "ahead": len(ahead),
        "all": len(gains),
        "least": f"{min(ahead):.1f}",
        "most": f"{max(ahead):.1f}",
    }


def tokens_of_a_completion(base: str) -> int:
    """The mean length of a base model's completions, in the study `share`.

    Correct and incorrect ones count alike.
    """
    lengths = []
    for text in (STUDIES / "share" / "share_runs.jsonl").read_text(encoding="utf-8").splitlines():
        run = json.loads(text)
        if run["arm"] == "card" and run["place"] == base:  # measured before training
            lengths.append((run["length_right"] + run["length_wrong"]) / 2)
    return round(fmean(lengths))


def best_shares(percent: int) -> str:
    """The effective shares with the highest accuracy, on the set with so many % of positives."""
    figure = accuracy_by_share()
    means = figure["accuracy"][f"{percent}% positive"]["mean"]
    shares = []
    for mean, share in zip(means, figure["p_tilde"], strict=True):
        if math.isclose(mean, max(means)):
            shares.append(f"{share:.0%}".replace("%", " %"))
    return " and ".join(shares)


def chart_data() -> dict[str, Any]:
    """The numbers that the page's charts draw."""
    page = load("page")
    names = ("seen", "curves", "questions", "completions")
    return {
        "page": {name: page[name] for name in names},
        "fig5": accuracy_by_share(),
        "variants": load("variants")["tables"]["weights"]["rows"],
    }


def line_styles() -> dict[str, tuple[str, Any]]:
    """The colour and the dashes of each line."""
    every = STYLES | {name: arm.style for name, arm in VARIANTS.items()}
    styles = {}
    for name, (colour, dashes, _) in every.items():
        widths = DASHES[dashes] if dashes in DASHES else dashes[1]
        styles[name] = (to_hex(colour), widths)
    return styles


def line_colours() -> str:
    """CSS: a variable for the colour of each line, in light and in dark mode."""
    light, dark = [colour_rule(paper) for paper in (LIGHT, DARK)]
    return f"{light}\n@media screen and (prefers-color-scheme: dark) {{ {dark} }}"


def colour_rule(paper: str) -> str:
    """The CSS rule with the colours of the lines on one background."""
    variables = []
    for name, (colour, _) in line_styles().items():
        word = re.sub(r"\W+", "-", name)
        variables.append(f"--line-{word}: {visible(colour, paper)};")
    return ":root { " + " ".join(variables) + " }"


def visible(colour: str, paper: str) -> str:
    """The colour, or the nearest one towards black or white that has enough contrast with paper.

    >>> visible("#000000", "#15171a"), visible("#0072b2", "#ffffff")
    ('#8c8c8c', '#0072b2')
    """
    target = 0.0 if luminance(paper) > 0.5 else 1.0
    found = colour
    part = 0.0
    while contrast(found, paper) < LEAST_CONTRAST:
        part += 0.05
        mixed = [(1 - part) * channel + part * target for channel in to_rgb(colour)]
        found = to_hex(mixed)
    return found


def contrast(one: str, other: str) -> float:
    """WCAG's ratio of contrast of two colours.

    >>> round(contrast("#000000", "#ffffff"))
    21
    """
    low, high = sorted([luminance(one), luminance(other)])
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    """WCAG's relative luminance."""
    linear = []
    for value in to_rgb(colour):
        linear.append(value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4)
    red, green, blue = linear
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def make_page() -> str:
    """The page."""
    data = chart_data()
    as_json = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    dashes = {name: widths for name, (_, widths) in line_styles().items()}
    script = f"const STYLES = {json.dumps(dashes)}; // dashes\n"
    # "<" could end the script.
    script += "const DATA = " + as_json.replace("<", "\\u003c") + ";"
    files = {file.name: file.read_text(encoding="utf-8").strip() for file in SOURCES.iterdir()}
    results = {name: load(name) for name in SHOWN} | numbers()
    environment = Environment(undefined=StrictUndefined)
    environment.filters |= FILTERS
    template = environment.from_string(files["template.html"])
    page = template.render(results, files=files, data=script, line_colours=line_colours())
    return page + "\n"


def main() -> None:
    """The command: write the page."""
    PAGE.write_text(make_page(), encoding="utf-8")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)  # which refuses arguments
