"""The paper's claims one by one, and a verdict for each that is computed from what the figures measured.

A row of results/claims.json names the Estimate of a figure's file that is about it (`key`, of `shares` or `numbers`),
and which values are as the paper says: `expected`, "> 0", "< 0" or "within 2". Where a precondition may be missing,
`needs` has the numbers that tell, a list for each: [file, key, what is expected of it, the precondition in words].
`study` is the folder of studies/ that explains a number, where no figure does.
"""

import math
import posixpath
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pipeline.plots import Line, Panel, Style
from pipeline.report import Estimate, Table

VERDICTS = {  # how they are drawn; without colour their markers tell them apart
    "agrees": Style("#0072B2", "-", "o"),
    "contradicts": Style("#D55E00", "--", "X"),
    "not told": Style("#8A8A8A", ":", "s"),
    "other setting": Style("#9A7B00", "-.", "^"),
}
NOT_YET = "not measured yet"
Load = Callable[[str], Mapping[str, Any]]  # a name -> the content of its file


class Judged(NamedTuple):
    """A claim (its row), its estimate in the row's unit (None if it is not measured), and the verdict."""

    row: Mapping[str, Any]
    estimate: Estimate | None
    verdict: str
    missing: str = ""  # the first precondition that is not met, in words

    def ours(self, load: Load) -> str:
        """The number with its unit and, where one decides, the learning rate."""
        if self.estimate is None:
            return NOT_YET if self.row["key"] else "needs GPUs"
        digits, unit = (1, f" {self.row['unit']}") if self.row["unit"] else (2, "")
        text = self.estimate.text(
            digits=digits, unit=unit, within=self.row.get("within", (-math.inf, math.inf))
        )
        tried = (
            load(self.row["figure"])["learning_rates"][self.row["rate"]]
            if "rate" in self.row
            else {}
        )
        return f"{text} at {best_rate(tried)}" if tried else text


def best_rate(tried: Mapping[str, float]) -> str:
    """The learning rate with the highest accuracy.

    >>> best_rate({"3e-06": 0.4, "0.0001": 0.9}), best_rate({"1.8e-05": 0.9})
    ('1e-4', '1.8e-5')
    """
    return f"{float(max(tried, key=tried.__getitem__)):.1e}".replace("e-0", "e-").replace(
        ".0e", "e"
    )


def verdict(estimate: Estimate, expected: str) -> str:
    """Whether the 95% interval is where the paper says (agrees), elsewhere (contradicts), or neither (not told).

    >>> [verdict(Estimate(*each), "> 0") for each in ((1.0, 0.5), (-1.0, 0.5), (0.4, 0.5), (5.0,))]
    ['agrees', 'contradicts', 'not told', 'not told']
    >>> [verdict(Estimate(mean, 0.5), "within 2") for mean in (-1.4, -3.0, 1.9)]
    ['agrees', 'contradicts', 'not told']
    """
    if estimate.half_width is None:
        return "not told"
    sign, bound = expected.split()[0], float(expected.split()[1])
    low, high = {">": (bound, math.inf), "<": (-math.inf, bound), "within": (-bound, bound)}[sign]
    ends = estimate.mean - estimate.half_width, estimate.mean + estimate.half_width
    if low < ends[0] and ends[1] < high:
        return "agrees"
    return "contradicts" if ends[1] < low or high < ends[0] else "not told"


def judged(rows: Sequence[Mapping[str, Any]], load: Load) -> list[Judged]:
    """The claims with their verdicts; a number that needed no run is exact."""

    def number(name: str, key: str) -> Estimate | None:
        content = load(name) if key else {}
        for kind, scale in (("shares", 100), ("numbers", 1)):
            if key in content.get(kind, {}):
                mean, half, each = content[kind][key].values()
                half = 0.0 if content["runs"] == 0 else half
                return Estimate(
                    scale * mean,
                    None if half is None else scale * half,
                    tuple(scale * x for x in each),
                )
        return None

    claims = []
    for row in ({"unit": "points", **row} for row in rows):
        estimate, decision, missing = (
            number(row["figure"], row["key"]),
            NOT_YET if row["key"] else "not measured",
            "",
        )
        if estimate:
            decision = verdict(estimate, row["expected"])
            for name, key, expected, words in reversed(row.get("needs", [])):
                there = number(name, key)
                if not there:
                    estimate, decision, missing = None, NOT_YET, ""
                elif verdict(there._replace(half_width=0.0), expected) != "agrees":
                    decision, missing = "other setting", words
        claims.append(Judged(row, estimate, decision, missing))
    return claims


def link_of(row: Mapping[str, Any], pages: str) -> str:
    """The name of a claim's figure, with a link to its part of results/README.md or to its study.

    >>> link_of({"figure": "fig1"}, "results/README.md")
    '[Figure 1](results/README.md#figure-1)'
    >>> link_of({"figure": "map", "study": "map"}, "results/README.md")
    '[map](studies/map/README.md)'
    >>> link_of({"figure": "map", "study": "map"}, "README.md")
    '[map](../studies/map/README.md)'
    """
    name = row["figure"].replace("fig", "Figure ").replace("table", "Table ")
    if "study" in row:
        page = posixpath.join(pages, "../../studies", row["study"], "README.md")
        return f"[{name}]({posixpath.normpath(page)})"
    heading = name.lower().replace(" ", "-")
    return f"[{name}]({pages}#{heading})"


def table(claims: Sequence[Judged], load: Load, pages: str) -> Table:
    """The claims, the paper's numbers and ours, each with a link to the page that explains it.

    pages: the path of results/README.md, from the page that has the table.
    """
    rows = []
    for claim in claims:
        row, each = claim.row, claim.estimate.each if claim.estimate else ()
        link = link_of(row, pages)
        missing = f" (missing: {claim.missing})" if claim.missing else ""
        paper, seeds = str(row.get("paper", "")), str(len(each) or "")
        rows.append(
            [link, row["claim"], paper, claim.ours(load), seeds, f"**{claim.verdict}**{missing}"]
        )
    return Table(["", "the paper's claim", "its number", "ours", "seeds", "verdict"], rows)


def forest(claims: Sequence[Judged]) -> list[Panel]:
    """All effects in percentage points with the paper's values, where it has them; right of zero agrees with it."""
    drawn = [claim for claim in claims if claim.estimate and claim.row["unit"] == "points"]
    y = {claim.row["id"]: -i for i, claim in enumerate(drawn)}
    lines = [Line([0, 0], [0.5, 0.5 - len(drawn)], style="limit")]
    for name, style in (VERDICTS | {NOT_YET: Style("#BBBBBB", ":", "d")}).items():
        chosen = [claim for claim in drawn if claim.verdict == name]
        signs = [-1 if claim.row["expected"].startswith("<") else 1 for claim in chosen]
        x = [sign * claim.estimate.mean for sign, claim in zip(signs, chosen, strict=True)]
        each = [
            [sign * value for value in claim.estimate.each]
            for sign, claim in zip(signs, chosen, strict=True)
        ]
        at, half = (
            [y[claim.row["id"]] for claim in chosen],
            [claim.estimate.half_width or 0 for claim in chosen],
        )
        if chosen:
            lines.append(Line(x, at, name, style, "rows", half, each))
    paper = {
        y[claim.row["id"]]: claim.row["paper"]
        for claim in drawn
        if isinstance(claim.row.get("paper"), float)
    }
    lines.append(
        Line([*paper.values()], [*paper], "the paper's", Style("#000000", "", "|"), "points")
    )
    options = {
        "xscale": "symlog",
        "yticks": [*y.values()],
        "yticklabels": [claim.row["short"] for claim in drawn],
    }
    options |= {"ylim": (0.5 - len(drawn), 0.5)}
    points = "percentage points, 95% interval; dots are seeds or places"
    return [Panel("the paper's claims", points, "", lines, options)]
