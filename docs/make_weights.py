"""Make results/weights.json, what a healthy and a sick run log, from metrics.jsonl of two runs on the same samples.

python train_gsm8k.py --out runs/topr
python train_gsm8k.py --method reinforce --out runs/reinforce
python docs/make_weights.py runs/topr runs/reinforce    # then python docs/make_tables.py, which draws it
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from paper.runs import commit  # noqa: E402
from pipeline.plots import Panel, lines  # noqa: E402
from pipeline.records import write_file  # noqa: E402
from pipeline.report import Table  # noqa: E402

AT = (1, 2, 3, 5, 10, 20, 30, 50, 100, 200, 300, 500)  # optimiser steps
SHOWN = {
    "weight_neg_q95": "weight of negatives, 95 % quantile",
    "weight_neg_q50": "weight of negatives, median",
    "weight_neg_q05": "weight of negatives, 5 % quantile",
    "log_ratio_neg_q50": "log-ratio of negatives, median",
    "log_ratio_pos_q05": "log-ratio of positives, 5 % quantile",
    "grad_norm": "gradient norm before clipping",
}


def around(steps: Sequence[Mapping[str, float]], metric: str) -> list[float]:
    """A metric at each step s of AT: its mean over the steps from 0.8 s to 1.25 s, for a step has few negatives.

    >>> around([{"step": n, "loss": n} for n in range(1, 513)], "loss")[:6]
    [1.0, 2.0, 3.0, 5.0, 10.0, 20.5]
    """
    near = [[step[metric] for step in steps if 0.8 * s <= step["step"] <= 1.25 * s and metric in step] for s in AT]
    return [float(f"{np.mean(values):.3g}") for values in near]


def table(runs: Mapping[str, Mapping[str, Sequence[float]]]) -> Table:
    """Both runs after 10 and after 100 steps."""
    cells = [(AT.index(step), method) for step in (10, 100) for method in runs]
    rows = [[text, *(f"{runs[method][metric][i]:.3g}" for i, method in cells)] for metric, text in SHOWN.items()]
    return Table(["metric", *(f"step {AT[i]}: {method}" for i, method in cells)], rows)


def panels(runs: Mapping[str, Mapping[str, Sequence[float]]]) -> list[Panel]:
    """The weight of negatives, the log-ratios and the gradient norm along both runs."""
    topr, naive = runs.values()
    quantiles = {"95 %": "q95", "median": "q50", "5 %": "q05"}
    weights = {f"TOPR, {label}": topr[f"weight_neg_{q}"] for label, q in quantiles.items()}
    drawn = [lines(AT, weights | {"naive REINFORCE, all": naive["weight_neg_q50"]}, "topr topr topr reinforce")]
    others = [name for name in SHOWN if "weight" not in name]
    drawn += [lines(AT, {"TOPR": topr[name], "naive REINFORCE": naive[name]}, "topr reinforce") for name in others]
    scales: list[dict[str, Any]] = [{}, {"yscale": "symlog"}, {"yscale": "symlog"}, {"yscale": "log"}]
    titles = ["Weight of negatives", *(SHOWN[name].capitalize() for name in others)]
    labels = ["weight", "nats", "nats", "norm"]
    each = zip(titles, labels, drawn, scales, strict=True)
    return [Panel(title, "optimiser step", y, of, {"xscale": "log"} | scale) for title, y, of, scale in each]


def main(folders: Sequence[str]) -> None:
    """The command: results/weights.json from the run folders of TOPR and of naive REINFORCE."""
    runs = {}
    for name, folder in zip(("TOPR", "naive REINFORCE"), folders, strict=True):
        text = (Path(folder) / "iteration-1" / "metrics.jsonl").read_text(encoding="utf-8")
        steps = [json.loads(line) for line in text.splitlines()]
        runs[name] = {metric: around(steps, metric) for metric in SHOWN}
    made = {"command": "python docs/make_weights.py runs/topr runs/reinforce", "commit": commit(), "steps": AT}
    write_file(ROOT / "results" / "weights.json", json.dumps(made | {"runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
