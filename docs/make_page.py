"""Write docs/index.html, "TOPR, explained": one page that needs no server, from docs/page/ and the files in results/.

    python docs/make_page.py

In docs/page/template.html, {{name}} stands for a file of that folder, for the data, or for a number of `numbers`.
What results/page.json holds is made by docs/make_page_data.py.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from docs.make_tables import RESULTS, load  # noqa: E402
from paper.experiments import VARIANTS  # noqa: E402
from paper.map import PLACES, Map, read_lines  # noqa: E402
from pipeline.plots import STYLES  # noqa: E402
from pipeline.report import Estimate  # noqa: E402
from topr import PRESETS, importance_weight  # noqa: E402

PAGE = ROOT / "docs" / "index.html"
SOURCES = ROOT / "docs" / "page"
DASHES = {"-": (), "--": (3.7, 1.6), ":": (1, 1.65), "-.": (6.4, 1.6, 1, 1.6)}  # matplotlib's, in widths of the line


def data() -> dict[str, Any]:
    """What the page's script reads: results, and the colours and dashes that all pictures have."""
    page, styles = load("page"), {}
    for name, (colour, dashes, _) in (STYLES | {name: arm.style for name, arm in VARIANTS.items()}).items():
        styles[name] = {"colour": colour, "dashes": DASHES[dashes] if dashes in DASHES else dashes[1]}
    return {
        "page": {name: page[name] for name in ("seen", "curves", "questions", "completions")},
        "fig5": of_shares(),
        "compared": {
            method: load("methods")[f"python train_gsm8k.py --method {method}"]["iterations"][0]["curve"]
            for method in ("sft", "tis")
        },
        "variants": load("variants")["tables"]["weights"]["rows"],
        "styles": styles,
    }


def of_shares() -> dict[str, Any]:
    """The effective shares of Figure 5, and the accuracy that each set reaches with them, at TOPR's learning rate."""
    found = load("fig5")["data"]
    return {"p_tilde": found["p~"], "accuracy": found[f"lr {found['own rate']:g}"]}


def numbers() -> dict[str, str]:
    """The numbers in the page's text, under the names that the template has for them."""
    page, laptop, fig1, fig5, variants = (load(name) for name in ("page", "laptop", "fig1", "fig5", "variants"))
    curve = {method: [100 * share for share in page["curves"][method]["correct"]] for method in ("topr", "reinforce")}
    right, wrong = (example["log_ratio"] for example in page["completions"])
    ends = {f"{method}_correct": sum(points[-1]) for method, points in right.items()}
    ends |= {f"{method}_incorrect": sum(points[-1]) for method, points in wrong.items()}
    of_negatives = PRESETS["topr"].a_neg, PRESETS["topr"].b_neg
    of_tokens, shown = torch.tensor(wrong["topr"][-1]), of_shares()
    best = {
        f"best_share_{of}": max(zip(shown["accuracy"][f"{of}% positive"]["mean"], shown["p_tilde"], strict=True))[1]
        for of in (10, 50)  # % of positives in the set
    }
    drawn = laptop["iterations"][0]["dataset"]["drawn"]
    of_map = Map(read_lines(RESULTS / "map_runs.jsonl"))
    gains = [gain for place in PLACES if (gain := of_map.of(place, "topr-70"))]
    ahead = [100 * gain.mean for gain in gains if gain.mean > gain.half_width]
    return {
        "samples": f"{drawn['samples']:,}",
        "problems": f"{drawn['problems']:,}",
        "negative_share": f"{100 - 100 * drawn['positive'] / drawn['samples']:.0f}",
        "test_problems": f"{laptop['before']['questions']:,}",
        "before": f"{curve['topr'][0]:.1f}",
        "topr_end": f"{curve['topr'][-1]:.1f}",
        **{f"{name}_end": f"{100 * curve[-1]['correct']:.1f}" for name, curve in data()["compared"].items()},
        **{f"fig1 {what}": Estimate(**of).text(100) for what, of in fig1["shares"].items()},
        "map": f"{len(ahead)} of {len(gains)} of these, by {min(ahead):.1f} to {max(ahead):.1f} points",
        "reinforce_peak": f"{max(curve['reinforce']):.1f}",
        "reinforce_end": f"{curve['reinforce'][-1]:.1f}",
        "reinforce_invalid": f"{100 * page['curves']['reinforce']['invalid'][-1]:.0f}",
        "ratio_of_200": scientific(0.95**200),
        "topr_negative_weight": scientific(float(importance_weight(ends["topr_incorrect"], *of_negatives))),
        "per_token_weight": f"{importance_weight(of_tokens, *of_negatives).mean().item():.2f}",
        "geometric_weight": f"{importance_weight(of_tokens.mean(), *of_negatives).item():.2f}",
        **{name: f"{value:+.1f}".replace("-", "−") for name, value in ends.items()},
        **{name: f"{100 * share:.0f}" for name, share in best.items()},
        "by_sampling": Estimate(**fig5["shares"]["p~ = 10% by sampling - by a baseline"]).text(100),
        "share_seeds": str(len(fig5["seeds"])),
        "variant_seeds": str(len(variants["seeds"])),
        **{f"{name}_command": load(name)["command"] for name in ("page", "fig5", "variants")},
        **{name: f"{value:g}".replace("e-0", "e-") for name, value in page["settings"].items() if name != "problems"},
        **page["versions"],
    }


def scientific(value: float) -> str:
    """A number far below 1, with its power of ten.

    >>> scientific(3.5e-5)
    '3.5 × 10<sup>−5</sup>'
    """
    factor, exponent = f"{value:.1e}".split("e")
    return f"{factor} × 10<sup>−{-int(exponent)}</sup>"


def made() -> str:
    """The page.

    >>> made().count("{{")
    0
    """
    content = data()
    styles = json.dumps(content.pop("styles"))
    parts = numbers() | {file.name: file.read_text(encoding="utf-8").strip() for file in SOURCES.iterdir()}
    as_script = json.dumps(content, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    parts["data"] = f"const STYLES = {styles};\nconst DATA = {as_script};"
    template = parts.pop("template.html")
    return re.sub(r"\{\{(.+?)\}\}", lambda match: parts[match[1]], template) + "\n"


if __name__ == "__main__":
    PAGE.write_text(made(), encoding="utf-8")
