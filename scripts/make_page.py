"""Write docs/index.html, "TOPR, explained", from docs/page/ and the files in results/.

    python scripts/make_page.py

The page is one file that needs no server. docs/page/template.html is Jinja's: {{ }} stands for a
file of that folder, for the data, for the content of a file of results/, or for one of `numbers`.
results/page.json, two default runs examined closely, is a record: its code is that of commit
82e5ae4, docs/make_page_data.py.
"""

import json
import re
import sys
from dataclasses import astuple
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import tyro
from jinja2 import Environment, StrictUndefined

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
SHOWN = ("page", "laptop", "methods", "robustness", "fig5", "variants", "share", "curve")

# matplotlib's dashes, in widths of the line.
DASHES = {"-": (), "--": (3.7, 1.6), ":": (1, 1.65), "-.": (6.4, 1.6, 1, 1.6)}

# How the template writes a number.
FILTERS = {
    "count": "{:,}".format,
    "percent": lambda share, digits=1: f"{100 * share:.{digits}f}",
    "signed": lambda value: f"{value:+.1f}".replace("-", "−"),
    "small": lambda value: re.sub("e-0*(.+)", r" × 10<sup>−\1</sup>", f"{value:.1e}"),
    "estimate": lambda fields: Estimate(**fields).text(100),
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

    return {
        "map": places_where_negatives_help(),
        "weight": float(weight(sum(log_ratios))),
        "per_token_weight": weight(torch.tensor(log_ratios)).mean().item(),
        "geometric_weight": weight(torch.tensor(log_ratios).mean()).item(),
        "tokens": {base: tokens_of_a_completion(base) for base in ("mistaken", "worded-long")},
        "lr": f"{page['settings']['lr']:g}".replace("e-0", "e-"),
        "best_share": {percent: best_share(percent) for percent in (10, 50)},
    }


def places_where_negatives_help() -> str:
    """How many gains of the study `map` have an interval above zero, and how large these are."""
    gains = [Estimate(**gain) for gain in load("map")["places"].values()]
    ahead = [100 * gain.mean for gain in gains if gain.mean > gain.half_width]
    sizes = f"{min(ahead):.1f} to {max(ahead):.1f} points"
    return f"{len(ahead)} of {len(gains)} of these, by {sizes}"


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


def best_share(percent: int) -> float:
    """The effective share with the highest accuracy, on the set with so many % of positives."""
    figure = accuracy_by_share()
    means = figure["accuracy"][f"{percent}% positive"]["mean"]
    _, share = max(zip(means, figure["p_tilde"], strict=True))
    return share


def chart_data() -> dict[str, Any]:
    """The numbers that the page's charts draw."""
    page = load("page")
    methods = load("methods")
    compared = {}
    for name in ("sft", "tis"):
        run = methods[f"python train_gsm8k.py --model tiny/worded --method {name}"]
        compared[name] = run["iterations"][0]["curve"]
    return {
        "page": {name: page[name] for name in ("seen", "curves", "questions", "completions")},
        "fig5": accuracy_by_share(),
        "compared": compared,
        "variants": load("variants")["tables"]["weights"]["rows"],
    }


def chart_styles() -> dict[str, Any]:
    """The colour and the dashes of each line."""
    every = STYLES | {name: arm.style for name, arm in VARIANTS.items()}
    styles = {}
    for name, (colour, dashes, _) in every.items():
        widths = DASHES[dashes] if dashes in DASHES else dashes[1]
        styles[name] = {"colour": colour, "dashes": widths}
    return styles


def make_page() -> str:
    """The page."""
    data = chart_data()
    as_json = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    script = f"const STYLES = {json.dumps(chart_styles())};\n"
    # "<" could end the script.
    script += "const DATA = " + as_json.replace("<", "\\u003c") + ";"
    files = {file.name: file.read_text(encoding="utf-8").strip() for file in SOURCES.iterdir()}
    results = {name: load(name) for name in SHOWN} | numbers()
    environment = Environment(undefined=StrictUndefined)
    environment.filters |= FILTERS
    template = environment.from_string(files["template.html"])
    return template.render(results, files=files, data=script, compared=data["compared"]) + "\n"


def main() -> None:
    """The command: write the page."""
    PAGE.write_text(make_page(), encoding="utf-8")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)  # which refuses arguments
