"""The law of the best share, p~* = E- / (E+ + E-), beside what was measured: the share study of paper/map.py.

docs/internals/share_predictions.md says how the law is judged; it was written before the runs.
"""

from collections.abc import Mapping
from math import log
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pandas import Series

from paper.map import ARMS, EACH, Lines, Map, Place
from pipeline.card import pace
from pipeline.plots import Line, Panel, draw, save_figure
from pipeline.report import Estimate, Table

SHARES = {arm: ARMS[arm].changes.get("effective_proportion", 1.0) for arm in EACH if arm not in ("topr", "card")}
FOUND_ON = ("mistaken", "slips")  # the bases on which the law was found; they do not count
GUESSES = {"the law": None, "always 80%": "topr-80", "always 20%": "topr-20"}
CLOSE = 0.02  # of accuracy; a prediction that is further behind the best share misses


class Judged(NamedTuple):
    """What the law says of a base, and what was measured there."""

    ratio: Estimate  # E-/E+
    predicted: Estimate  # p~*
    best: str  # the arm with the highest mean
    behind: Mapping[str, Estimate]  # of each guess: its arm minus the best one
    arm: str  # the predicted one
    rank: float  # rank correlation of predicted pace and accuracy over the shares

    def hits(self, guess: str) -> bool:
        """Whether the guessed arm is within CLOSE of the best, and the interval of the difference contains zero."""
        gain = self.behind[guess]
        return gain.mean >= -CLOSE and gain.mean + (gain.half_width or 0) >= 0


def nearest(share: float) -> str:
    """The arm whose share is nearest in log odds; positives only counts as 97%.

    >>> nearest(0.95), nearest(0.7), nearest(0.25)
    ('sft', 'topr-60', 'topr-20')
    """

    def log_odds(share: float) -> float:
        return log(share / (1 - share))

    return min(SHARES, key=lambda arm: abs(log_odds(min(SHARES[arm], 0.97)) - log_odds(share)))


def judge(table: Map, place: str) -> Judged:
    """The law at a place, by the card of its base."""
    card = {name: table.mean((place, "card"), name) for name in ("e_pos", "e_neg", "ratio", "best_share", "correct")}
    ends = {arm: table.mean((place, arm), "after.correct").mean for arm in SHARES}
    best, arm = max(ends, key=ends.__getitem__), nearest(card["best_share"].mean)
    behind = {guess: table.of(place, guessed or arm, best) for guess, guessed in GUESSES.items()}
    p, e_pos, e_neg = (card[name].mean for name in ("correct", "e_pos", "e_neg"))
    paces = Series([pace(p, share, e_pos, e_neg) for share in SHARES.values()])
    rank = paces.rank().corr(Series([*ends.values()]).rank())
    return Judged(card["ratio"], card["best_share"], best, behind, arm, float(rank))


def publish_share(lines: Lines, places: Mapping[str, Place], picture: Path) -> None:
    """Draw accuracy against nominal and realised share, and the law's prediction beside the best; print the table."""
    table = Map(lines)
    there = {name: place.name for name, place in places.items() if all(table.each((name, a), "steps") for a in SHARES)}
    save_figure(draw(panels(table, there)), picture)
    for of in tables(table, there).values():
        of.print()


def panels(table: Map, names: Mapping[str, str]) -> list[Panel]:
    """Accuracy below the base's best share, over the nominal and over the realised share; and the law."""
    of_nominal, of_realised, best = [], [], []
    for name, called in names.items():
        ends = np.array([table.mean((name, arm), "after.correct").mean for arm in SHARES])
        below, realised = 100 * (ends - ends.max()), [table.mean((name, arm), "realised").mean for arm in SHARES]
        order = np.argsort([*SHARES.values()])
        for drawn, x in ((of_nominal, [*SHARES.values()]), (of_realised, realised)):
            drawn.append(Line(100 * np.array(x)[order], below[order], called))
    x, y = "share of positives (%)", "accuracy below the best share (points)"
    options = {"ylim": (-30, 1.5), "xlim": (0, 102)}
    for name, called in names.items():
        if table.each((name, "card"), "ratio"):
            of = judge(table, name)
            half = [100 * (of.predicted.half_width or 0)]
            best.append(Line([100 * of.predicted.mean], [100 * SHARES[of.best]], called, "", "rows", half))
    law = Panel(
        "the law",
        "predicted best share p~* (%)",
        "measured best share (%)",
        [Line([0, 100], [0, 100], style="limit"), *best],
        {"xlim": (0, 102), "ylim": (0, 104)},
    )
    nominal = Panel("nominal share", f"effective {x}", y, of_nominal, options)
    return [nominal, Panel("realised share", f"realised {x}, mean over the epoch", y, of_realised, options), law]


def tables(table: Map, names: Mapping[str, str]) -> dict[str, Table]:
    """The law at each place with its score; and what each share reached."""
    called = {arm: f"{share:.0%}" for arm, share in SHARES.items()}
    rows, hits = [], dict.fromkeys(GUESSES, 0)
    judged = {name: judge(table, name) for name in names if table.each((name, "card"), "ratio")}
    for name, of in judged.items():
        for guess in GUESSES if name not in FOUND_ON else ():
            hits[guess] += of.hits(guess)
        ends = [f"{of.behind[guess].text(100)}{' hits' * of.hits(guess)}" for guess in GUESSES]
        share = of.predicted.text(100, 0, " %")
        rows.append([names[name], of.ratio.text(), share, called[of.arm], called[of.best], f"{of.rank:.2f}", *ends])
    counted = sum(name not in FOUND_ON for name in judged)
    rows.append([f"hits on the {counted} others", *[""] * 5, *map(str, hits.values())])
    head = ["base", "E-/E+", "p~*", "predicted", "best", "rank correlation", *(f"{guess} - best" for guess in GUESSES)]
    reached = []
    for name, base in names.items():
        for what, key in (("accuracy", "after.correct"), ("realised share", "realised")):
            found = [table.mean((name, arm), key).text(100) for arm in SHARES]
            reached.append([f"{base}: {what}", *found])
    return {"law": Table(head, rows), "shares": Table(["in %", *called.values()], reached)}
