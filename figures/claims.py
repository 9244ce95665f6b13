"""The paper's claims one by one, each with a verdict that is computed from what the figures found.

A claim of results/claims.json names the number of a figure's file that tests it (`figure`, `key`),
and what the paper expects of it (`expected`): "> 0", "< 0" or "within 2". If a precondition may not
hold, `needs` has a list for each: [figure, key, what is expected of it, the precondition in words].
"""

import math
import posixpath
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from toprlib.plotting import Line, Panel, Style
from toprlib.report import Estimate, Table

REPRODUCED = "reproduced"
CONTRADICTED = "contradicted"
INCONCLUSIVE = "inconclusive"
NOT_MET = "precondition not met"
NOT_RUN = "not run"

# Markers distinguish verdicts without colour, too.
STYLES = {
    REPRODUCED: Style("#0072B2", "-", "o"),
    CONTRADICTED: Style("#D55E00", "--", "X"),
    INCONCLUSIVE: Style("#8A8A8A", ":", "s"),
    NOT_MET: Style("#9A7B00", "-.", "^"),
}
VERDICTS = (*STYLES, NOT_RUN)

Claim = Mapping[str, Any]
# The name of a file of results/ -> its content.
Load = Callable[[str], Mapping[str, Any]]


class ClaimResult(NamedTuple):
    """A claim, the number that tests it, in the claim's unit, and the verdict.

    estimate: None if the number is not there. missing: the first precondition that is not met, in
    words.
    """

    claim: Claim
    estimate: Estimate | None
    verdict: str
    missing: str = ""


def judge_interval(estimate: Estimate, expected: str) -> str:
    """The verdict on a number: whether its whole 95% interval is as expected.

    REPRODUCED if it is; CONTRADICTED if none of it is; INCONCLUSIVE otherwise, and for a number
    without an interval.

    >>> [judge_interval(Estimate(*each), "> 0") for each in ((1.0, 0.5), (-1.0, 0.5), (0.4, 0.5))]
    ['reproduced', 'contradicted', 'inconclusive']
    >>> [judge_interval(Estimate(mean, 0.5), "within 2") for mean in (-1.4, -3.0, 1.9)]
    ['reproduced', 'contradicted', 'inconclusive']
    """
    if estimate.half_width is None:
        return INCONCLUSIVE
    low, high = expected_range(expected)
    lower_end = estimate.mean - estimate.half_width
    upper_end = estimate.mean + estimate.half_width
    if low < lower_end and upper_end < high:
        return REPRODUCED
    if upper_end < low or high < lower_end:
        return CONTRADICTED
    return INCONCLUSIVE


def expected_range(expected: str) -> tuple[float, float]:
    """The open interval of values that are as expected.

    >>> expected_range("> 0"), expected_range("within 2")
    ((0.0, inf), (-2.0, 2.0))
    """
    sign, number = expected.split()
    bound = float(number)
    ranges = {">": (bound, math.inf), "<": (-math.inf, bound), "within": (-bound, bound)}
    return ranges[sign]


def find_number(load: Load, figure: str, key: str) -> Estimate | None:
    """A number of a figure's file; shares and their differences in percent. None if it has none.

    A number of a figure without runs is exact.
    """
    content = load(figure)
    for kind, scale in (("shares", 100), ("numbers", 1)):
        fields = content.get(kind, {}).get(key)
        if fields is None:
            continue
        half_width = 0.0 if content["runs"] == 0 else fields["half_width"]
        if half_width is not None:
            half_width *= scale
        each = tuple(scale * value for value in fields["each"])
        return Estimate(scale * fields["mean"], half_width, each)
    return None


def judge_claim(claim: Claim, load: Load) -> ClaimResult:
    """The verdict on a claim: NOT_RUN without its numbers, NOT_MET without a precondition."""
    claim = {"unit": "points", "needs": [], **claim}
    estimate = find_number(load, claim["figure"], claim["key"]) if claim["key"] else None
    if estimate is None:
        return ClaimResult(claim, None, NOT_RUN)
    unmet = []
    for figure, key, expected, words in claim["needs"]:
        needed = find_number(load, figure, key)
        if needed is None:
            return ClaimResult(claim, None, NOT_RUN)
        low, high = expected_range(expected)
        if not low < needed.mean < high:
            unmet.append(words)
    if unmet:
        return ClaimResult(claim, estimate, NOT_MET, unmet[0])
    return ClaimResult(claim, estimate, judge_interval(estimate, claim["expected"]))


def judge_claims(claims: Sequence[Claim], load: Load) -> list[ClaimResult]:
    """The verdicts on all claims."""
    return [judge_claim(claim, load) for claim in claims]


def number_text(result: ClaimResult, load: Load) -> str:
    """Our number with its unit and, if the claim depends on one, the learning rate."""
    claim = result.claim
    if result.estimate is None:
        return "not run yet" if claim["key"] else "needs GPUs"
    digits = 1 if claim["unit"] else 2
    unit = f" {claim['unit']}" if claim["unit"] else ""
    within = claim.get("within", (-math.inf, math.inf))
    text = result.estimate.text(digits=digits, unit=unit, within=within)
    if "rate" not in claim:
        return text
    tried = load(claim["figure"])["learning_rates"][claim["rate"]]
    return f"{text} at {best_rate(tried)}" if tried else text


def best_rate(tried: Mapping[str, float]) -> str:
    """The learning rate with the highest accuracy.

    >>> best_rate({"3e-06": 0.4, "0.0001": 0.9}), best_rate({"1.8e-05": 0.9})
    ('1e-4', '1.8e-5')
    """
    best = float(max(tried, key=tried.__getitem__))
    return f"{best:.1e}".replace("e-0", "e-").replace(".0e", "e")


def claims_table(results: Sequence[ClaimResult], load: Load, page: str) -> Table:
    """The claims, the paper's numbers, ours, and the verdicts.

    page: the path of results/README.md, for links.
    """
    rows = []
    for result in results:
        claim = result.claim
        seeds = len(result.estimate.each) if result.estimate else 0
        missing = f" (missing: {result.missing})" if result.missing else ""
        rows.append(
            [
                claim_link(claim, page),
                claim["claim"],
                str(claim.get("paper", "")),
                number_text(result, load),
                str(seeds or ""),
                f"**{result.verdict}**{missing}",
            ]
        )
    return Table(["", "the paper's claim", "its number", "ours", "seeds", "verdict"], rows)


def claim_link(claim: Claim, page: str) -> str:
    """A link to the figure's part of results/README.md, or to the page of the claim's study.

    page: the path of results/README.md from the page that has the link.

    >>> claim_link({"figure": "fig1"}, "results/README.md")
    '[Figure 1](results/README.md#figure-1)'
    >>> claim_link({"figure": "map", "study": "map"}, "README.md")
    '[map](../studies/map/README.md)'
    """
    name = claim["figure"].replace("fig", "Figure ").replace("table", "Table ")
    if "study" in claim:
        study = posixpath.join(page, "../../studies", claim["study"], "README.md")
        return f"[{name}]({posixpath.normpath(study)})"
    heading = name.lower().replace(" ", "-")
    return f"[{name}]({page}#{heading})"


def forest(results: Sequence[ClaimResult]) -> list[Panel]:
    """All effects in percentage points, with the paper's values; right of zero is as it claims."""
    drawn = [one for one in results if one.estimate and one.claim["unit"] == "points"]
    heights = {one.claim["id"]: -i for i, one in enumerate(drawn)}
    bottom = 0.5 - len(drawn)
    lines = [Line([0, 0], [0.5, bottom], style="limit")]
    for verdict, style in STYLES.items():
        chosen = [one for one in drawn if one.verdict == verdict]
        if chosen:
            lines.append(effects(chosen, heights, verdict, style))
    with_number = [one.claim for one in drawn if isinstance(one.claim.get("paper"), float)]
    paper = [claim["paper"] for claim in with_number]
    at = [heights[claim["id"]] for claim in with_number]
    lines.append(Line(paper, at, "the paper's", Style("#000000", "", "|"), "points"))
    options = {
        "xscale": "symlog",
        "yticks": list(heights.values()),
        "yticklabels": [one.claim["short"] for one in drawn],
        "ylim": (bottom, 0.5),
    }
    label = "percentage points, 95% interval; dots are seeds or places"
    return [Panel("the paper's claims", label, "", lines, options)]


def effects(
    results: Sequence[ClaimResult], heights: Mapping[str, float], verdict: str, style: Style
) -> Line:
    """The effects with a verdict; one that the paper expects below zero is drawn mirrored."""
    means = []
    seeds = []
    for result in results:
        sign = -1 if result.claim["expected"].startswith("<") else 1
        means.append(sign * result.estimate.mean)
        seeds.append([sign * value for value in result.estimate.each])
    at = [heights[result.claim["id"]] for result in results]
    half_widths = [result.estimate.half_width or 0 for result in results]
    return Line(means, at, verdict, style, "rows", half_widths, seeds)
