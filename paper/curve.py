"""The paper's claims over p, the share of right samples of the base model: a study of ours.

By `paper.base.pace`, a law about the first steps, three claims change their sign between p = 50 and 66%.
docs/internals/curve_predictions.md has predictions, which were written before the runs.
"""

import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from paper.base import Base, describe_base, pace
from paper.experiments import COMPOSITION_ARMS, Figure, Study
from paper.methods import POSITIVES
from paper.panels import P_TILDE, Data, line
from paper.runs import Jobs, Measured, Sweep, series, sharing_samples
from pipeline.models.language_model import load_model
from pipeline.plots import Line, Panel, Style
from pipeline.records import Example, Sample, read_records
from pipeline.report import Estimate, Table
from pipeline.settings import TINY

BASES = TINY.parent / "runs" / "bases"  # where bases are made
TAUGHT = "--base tiny/worded --checker-steps 0 --habit 150 --teacher.wordings 8 --teacher.result 0"
CHOSEN = [name for name in COMPOSITION_ARMS if name != "control"]
SHARES = (0.05, 0.1, 0.2, 0.4, 0.7, 1.0)  # p~ on the set with 10% positives
GRADIENTS = 512  # samples whose gradients give E+ and E-
COMPARED = {  # two arms of a set, and each one's share of positives and p~ by the law; None: p itself
    "TOPR - positives, as many steps": ("natural", ("topr", "sft"), ((None, None), (None, 1.0))),
    "Anna Karenina - uniform": ("chosen", ("anna_karenina", "uniform"), ((0.15, 0.15), (None, None))),
    "uniform - as many positives": ("chosen", ("uniform", "positives_only"), ((None, None), (1.0, 1.0))),
}
ENDS = {name: (kind, arms) for name, (kind, arms, _) in COMPARED.items()} | {
    "TOPR - positives only, fewer steps": ("natural", ("topr", "positives_only")),
    "10% positive: p~ = 20% - 100%": ("chosen", (0.2, 1.0)),
}
EARLY = {"natural": 1, "chosen": -1}  # the point along the curve at which pace is measured: a fifth of 160 steps, or 40


class Curve(Study):
    """Arms (base, set, arm): all samples, as in Figure 4; compositions, as in Figure 8; a set with 10% positives.

    AdamW at 3e-5. Bases that are not there are made first, each in two core-minutes.
    """

    rated = ()

    def arms(self) -> Jobs:
        sizes, jobs = (
            {k: v for k, v in self.scale.iterated.items() if k in ("problems", "n", "candidates", "examples")},
            {},
        )
        for base, made in self.scale.bases.items():
            model = str(made if isinstance(made, Path) else BASES / base / "base")
            here = replace(self.scale.base, model=model, lr=3e-5, micro_batch=8, test_problems=self.scale.curve_tests)
            along, brief = replace(here, curve_points=5, curve_samples=4), replace(here, curve_points=1, **sizes)
            ten = replace(brief, composition="proportion", proportion=0.1, **self.scale.sets)
            chosen = {name: self.job(f"curve-{base}-chosen-{name}", brief, COMPOSITION_ARMS[name]) for name in CHOSEN}
            chosen |= {p: self.job(f"curve-{base}-chosen-{p:g}", ten, effective_proportion=p) for p in SHARES}
            every = {name: self.job(f"curve-{base}-natural-{name}", along, arm) for name, arm in POSITIVES.items()}
            for name, arms in (("natural", every), ("chosen", chosen)):
                jobs |= sharing_samples({(base, name, arm): job for arm, job in arms.items()})
        return jobs

    def decides(self, arm: Sequence[Any]) -> bool:
        return arm[1] == "natural"

    def make(self, sweep: Sweep) -> None:
        for base, made in self.scale.bases.items():
            if not isinstance(made, Path) and not (BASES / base / "base").exists():
                options = [*TAUGHT.split(), *made.split(), "--out", BASES / base]
                subprocess.run([sys.executable, "tiny/make.py", *options], cwd=TINY.parent, check=True)
        super().make(sweep)

    def read(self) -> Figure:
        table, bases, shares, numbers, rows = self.table(), [*self.scale.bases], {}, {}, {}

        def keep(place: dict[str, Estimate], kind: str, what: str, each: Sequence[Estimate], **text: Any) -> None:
            """Estimates of all bases: as numbers of the figure, and as a row of one of its tables."""
            kept = {f"{base}: {what}": x for base, x in zip(bases, each, strict=True) if not math.isnan(x.mean)}
            place |= kept
            rows.setdefault(kind, []).append([what, *(x.text(**text) for x in each)])

        cards = {base: [self.card(base, seed) for seed in self.seeds] for base in bases}
        of_cards = {
            what: [Estimate.over_seeds(getattr(card, what) for card in cards[base]) for base in bases]
            for what in ("right", "e_ratio", "logmu", "texts")
        }
        keep(shares, "bases", "p, right samples of training problems", of_cards["right"], scale=100, unit=" %")
        keep(numbers, "bases", "E-/E+", of_cards["e_ratio"], digits=2)
        keep(numbers, "bases", "log mu of right samples (nats)", of_cards["logmu"])
        keep(numbers, "bases", "different texts among eight right ones", of_cards["texts"])
        p, ratios = ([each.mean for each in of_cards[what]] for what in ("right", "e_ratio"))
        data: dict[str, Any] = {"p": p, "E-/E+": float(np.mean(ratios))}
        for name, (kind, arms, sets) in COMPARED.items():
            paces = [jackknife(pace_ratio, log_odds(table, base, kind, arms, EARLY[kind])) for base in bases]
            keep(numbers, "pace", f"pace, {name.replace(' - ', ' / ')}", paces, digits=2)
            of_law = [
                np.divide(*(pace(q or x, p_tilde or x, x, e) for q, p_tilde in sets))
                for x, e in zip(p, ratios, strict=True)
            ]
            rows["pace"].append(["by the law", *(f"{x:.2f}" for x in of_law)])
            data[f"pace: {name}"] = series(paces)
        best = [jackknife(best_share, log_odds(table, base, "chosen", SHARES)[..., 1]) for base in bases]
        keep(numbers, "pace", "best p~, 10% positive", best, digits=2)
        odds = [e / 9 * (1 - x) / x for x, e in zip(p, ratios, strict=True)]
        rows["pace"].append(["by the law", *(f"{x / (1 + x):.2f}" for x in odds)])
        data["best share"] = series(best)
        for name, (kind, arms) in ENDS.items():
            gains = [table.gain(*((base, kind, arm) for arm in arms)) for base in bases]
            keep(shares, "ends", name, gains, scale=100)
            data[name] = series(gains)
            if len(bases) > 1:  # for 10 points of p, in the seeds that all bases have
                slopes = np.polyfit(p, [gain.each for gain in gains], 1)[0] / 10
                shares[f"slope for 10 points of p: {name}"] = Estimate.over_seeds(slopes)
        vote = f"maj@{self.scale.base.k}"
        votes = [table.gain((base, "natural", "topr"), (base, "natural", "sft"), vote) for base in bases]
        keep(shares, "ends", f"{vote}: TOPR - positives, as many steps", votes, scale=100)
        for kind, names in (("natural", POSITIVES), ("chosen", (*CHOSEN, *SHARES))):
            for arm in names:
                ends = [table.mean((base, kind, arm)) for base in bases]
                keep(shares, "correct", f"{arm:.0%}" if isinstance(arm, float) else f"{kind}, {arm}", ends, scale=100)
        head = [f"base of {base}%" for base in bases]
        return Figure(data, shares, numbers, {name: Table(["", *head], each) for name, each in rows.items()})

    def card(self, base: str, seed: int) -> Base:
        """What the law needs of a base, by the samples of a seed."""
        settings = self.runs[(base, "natural", "topr"), seed].settings
        files = (settings.out / "iteration-1" / name for name in ("samples.jsonl", "train.jsonl"))
        samples, examples = map(read_records, files, (Sample, Example))
        return describe_base(load_model(settings.model).model, samples, examples[:GRADIENTS])

    @staticmethod
    def panels(data: Data) -> list[Panel]:
        """The pace of each comparison beside the law's curve, and its end in points; then the set with 10%."""
        p, grid, ratio = [100 * p for p in data["p"]], np.linspace(0.3, 0.85, 56), data["E-/E+"]

        def over_p(title: str, unit: str, *lines: Line) -> Panel:
            return Panel(title, "p: right samples of the base model (%)", f"{unit}, 95% interval", lines)

        def law(y: np.ndarray) -> Line:
            return Line(100 * grid, y, "law", Style("#000000", "-", ""))

        def level(y: float) -> Line:
            return Line([30, 85], [y, y], style="limit")

        def points(name: str, scale: float = 100) -> Line:
            return line(p, data[name], "measured", "topr", scale)._replace(kind="points")

        panels = []
        for name, (_, _, sets) in COMPARED.items():
            one, other = ([pace(q or x, p_tilde or x, x, ratio) for x in grid] for q, p_tilde in sets)
            measured, title = points(f"pace: {name}", 1), name.replace(" - ", " / ")
            panels.append(over_p(f"pace: {title}", "ratio", level(1), law(np.divide(one, other)), measured))
            panels.append(over_p(f"at the end: {name}", "points", level(0), points(name)))
        odds = ratio / 9 / (grid / (1 - grid))
        measured = points("best share")
        panels.append(over_p(f"10% positive: best {P_TILDE}", "%", law(100 * odds / (1 + odds)), measured))
        for name in reversed([name for name in ENDS if name not in COMPARED]):
            panels.append(over_p(f"at the end: {name}", "points", level(0), points(name)))
        return panels


def log_odds(table: Measured, base: str, kind: str, arms: Sequence[Any], at: int = -1) -> np.ndarray:
    """The log odds of accuracy before training and at a point of it, for the seeds of all arms: (seeds, arms, 2)."""
    each = [[table.each((base, kind, arm), at=when) for when in (0, at)] for arm in arms]
    shares = np.array([[[when[seed] for when in arm] for arm in each] for seed in each[0][0]])
    shares = np.clip(shares, 0.002, 0.998)  # the log odds of all right would be infinite
    return np.log(shares / (1 - shares))


def pace_ratio(odds: np.ndarray) -> float:
    """The gain of the first arm over that of the second, each summed over seeds; odds: (seeds, 2, 2) of `log_odds`."""
    one, other = (odds[..., 1] - odds[..., 0]).sum(0)
    return float(one / other) if other else math.nan


def best_share(odds: np.ndarray) -> float:
    """The p~ where the parabola through the means over log odds of SHARES is highest; 100% counts as 97%."""
    shares = np.minimum(SHARES, 0.97)
    x = np.log(shares / (1 - shares))
    a, b, _ = np.polyfit(x, odds.mean(0), 2)
    top = np.clip(-b / (2 * a), x[0], x[-1]) if a < 0 else x[odds.mean(0).argmax()]
    return float(1 / (1 + np.exp(-top)))


def jackknife(statistic: Callable[[np.ndarray], float], seeds: np.ndarray) -> Estimate:
    """A statistic of the rows of an array, one for each seed, with the 95% interval of the jackknife.

    >>> jackknife(lambda rows: float(rows.mean()), np.array([1.0, 2.0, 3.0])).text(digits=2)  # that of the mean
    '2.00 ± 2.48'
    """
    n, whole = len(seeds), statistic(seeds)
    each = [n * whole - (n - 1) * statistic(np.delete(seeds, i, axis=0)) for i in range(n)] if n > 1 else [whole]
    return Estimate.over_seeds(each)._replace(mean=whole)
