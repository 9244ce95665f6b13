"""Write docs/index.html, "TOPR, explained": one page that needs no server.

It is made from docs/page/ and from the files in results/ and studies/.

    python docs/make_page.py

docs/page/template.html is Jinja's: {{ }} stands for a file of that folder, for the data, for what a file of results/
or studies/ has, or for a number of `numbers`. results/page.json, two default runs looked at closely,
is a record: its code is that of commit 82e5ae4, docs/make_page_data.py.
"""

import json
import re
import sys
from dataclasses import astuple
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from jinja2 import Environment, StrictUndefined

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from docs.make_tables import STUDIES, load  # noqa: E402
from paper.experiments import VARIANTS  # noqa: E402
from pipeline.plots import STYLES  # noqa: E402
from pipeline.report import Estimate  # noqa: E402
from topr import PRESETS, importance_weight  # noqa: E402

PAGE = ROOT / "docs" / "index.html"
SOURCES = ROOT / "docs" / "page"
DASHES = {
    "-": (),
    "--": (3.7, 1.6),
    ":": (1, 1.65),
    "-.": (6.4, 1.6, 1, 1.6),
}  # matplotlib's, in widths of the line
FILTERS = {  # of the template: how a number is written
    "count": "{:,}".format,
    "percent": lambda share, digits=1: f"{100 * share:.{digits}f}",
    "signed": lambda value: f"{value:+.1f}".replace("-", "−"),
    "small": lambda value: re.sub("e-0*(.+)", r" × 10<sup>−\1</sup>", f"{value:.1e}"),
    "estimate": lambda fields: Estimate(**fields).text(100),
}


def accuracy_by_share() -> dict[str, Any]:
    """The effective shares of Figure 5, and the accuracy that each set reaches with them, at TOPR's learning rate."""
    figure = load("fig5")["data"]
    return {"p_tilde": figure["p~"], "accuracy": figure[f"lr {figure['own rate']:g}"]}


def numbers() -> dict[str, Any]:
    """The numbers in the page's text that no file of results has as they are."""
    page, shown = load("page"), accuracy_by_share()
    log_ratios, limits = (
        page["completions"][1]["log_ratio"]["topr"][-1],
        astuple(PRESETS["topr"])[2:],
    )
    file = STUDIES / "share" / "share_runs.jsonl"
    runs = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    cards = [run for run in runs if run["arm"] == "card"]  # of the study's bases before training
    gains = [Estimate(**gain) for gain in load("map")["places"].values()]
    ahead = [100 * gain.mean for gain in gains if gain.mean > gain.half_width]
    return {
        "map": f"{len(ahead)} of {len(gains)} of these, by {min(ahead):.1f} to {max(ahead):.1f} points",
        "weight": float(importance_weight(sum(log_ratios), *limits)),
        "per_token_weight": importance_weight(torch.tensor(log_ratios), *limits).mean().item(),
        "geometric_weight": importance_weight(torch.tensor(log_ratios).mean(), *limits).item(),
        "tokens": {  # of a completion, on the bases with the shortest and with the longest
            base: round(
                fmean(
                    (of["length_right"] + of["length_wrong"]) / 2
                    for of in cards
                    if of["place"] == base
                )
            )
            for base in ("mistaken", "worded-long")
        },
        "lr": f"{page['settings']['lr']:g}".replace("e-0", "e-"),
        "best_share": {  # by % of positives in the set
            percent: max(
                zip(
                    shown["accuracy"][f"{percent}% positive"]["mean"], shown["p_tilde"], strict=True
                )
            )[1]
            for percent in (10, 50)
        },
    }


def made() -> str:
    """The page."""
    names = ("page", "laptop", "methods", "robustness", "fig5", "variants", "share", "curve")
    results = {name: load(name) for name in names} | numbers()
    files = {file.name: file.read_text(encoding="utf-8").strip() for file in SOURCES.iterdir()}
    methods, styles, made_by = (
        results["methods"],
        {},
        "python train_gsm8k.py --model tiny/worded --method",
    )
    content = {
        "page": {
            name: results["page"][name] for name in ("seen", "curves", "questions", "completions")
        },
        "fig5": accuracy_by_share(),
        "compared": {
            name: methods[f"{made_by} {name}"]["iterations"][0]["curve"] for name in ("sft", "tis")
        },
        "variants": results["variants"]["tables"]["weights"]["rows"],
    }
    for name, (colour, dashes, _) in (
        STYLES | {name: arm.style for name, arm in VARIANTS.items()}
    ).items():
        styles[name] = {
            "colour": colour,
            "dashes": DASHES[dashes] if dashes in DASHES else dashes[1],
        }
    as_script = json.dumps(content, ensure_ascii=False, separators=(",", ":")).replace(
        "<", "\\u003c"
    )
    script = f"const STYLES = {json.dumps(styles)};\nconst DATA = {as_script};"
    environment = Environment(undefined=StrictUndefined)
    environment.filters |= FILTERS
    template = environment.from_string(files["template.html"])
    return template.render(results, files=files, data=script, compared=content["compared"]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(made(), encoding="utf-8")
