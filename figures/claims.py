"""The paper's claims and their verdicts, computed from the numbers of the figures.

A claim of results/claims.json names the number that tests it (`figure`, `key`) and the range that
the paper expects (`expected`): "> 0", "< 0" or "within 2". `needs` lists its preconditions, each as
[figure, key, expected range, the precondition in words]. `paper` is the paper's own number. `over`
says what the values are if not seeds.
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

# Tables name the number of seeds where it is another.
USUAL_SEEDS = 5

Claim = Mapping[str, Any]
# The name of a file of results/ -> its content.
Load = Callable[[str], Mapping[str, Any]]


class ClaimResult(NamedTuple):
    """A claim, the number that tests it, in the claim's unit, and the verdict.

    estimate: None if the file lacks the number. missing: the first precondition that is not met,
    in words.
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
    """A number of a figure's file, or None; shares and their differences are in per cent.

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


def number_text(result: ClaimResult) -> str:
    """Our number, with its unit if it is not points."""
    claim = result.claim
    if result.estimate is None:
        return "not run yet" if claim["key"] else "needs GPUs"
    digits = 1 if claim["unit"] else 2
    unit = f" {claim['unit']}" if claim["unit"] not in ("", "points") else ""
    within = claim.get("within", (-math.inf, math.inf))
    return result.estimate.text(digits=digits, unit=unit, within=within)


def details_text(result: ClaimResult, load: Load) -> str:
    """The learning rate if the claim depends on one, and the number of seeds if it is unusual."""
    if result.estimate is None:
        return ""
    claim = result.claim
    details = []
    tried = load(claim["figure"]).get("learning_rates", {}).get(claim.get("rate"))
    if tried:
        details.append(best_rate(tried))
    count = len(result.estimate.each)
    if count not in (0, 1, USUAL_SEEDS):
        details.append(f"{count} {claim.get('over', 'seeds')}")
    return f" ({', '.join(details)})" if details else ""


def margin(result: ClaimResult) -> float:
    """The distance from the interval's nearer end to the nearest bound of what is expected.

    >>> claim = {"expected": "> 0"}
    >>> margin(ClaimResult(claim, Estimate(1.5, 1.25), REPRODUCED))
    0.25
    """
    mean, half_width, _ = result.estimate
    bounds = [each for each in expected_range(result.claim["expected"]) if math.isfinite(each)]
    ends = (mean - half_width, mean + half_width)
    return min(abs(end - bound) for end in ends for bound in bounds)


def narrow_verdicts(results: Sequence[ClaimResult], limit: float) -> list[ClaimResult]:
    """The reproduced and contradicted claims whose margin is at most `limit` points."""
    definite = [one for one in results if one.verdict in (REPRODUCED, CONTRADICTED)]
    in_points = [one for one in definite if one.claim["unit"] == "points"]
    return [one for one in in_points if margin(one) <= limit]


def best_rate(tried: Mapping[str, float]) -> str:
    """The learning rate with the highest accuracy.

    >>> best_rate({"3e-06": 0.4, "0.0001": 0.9}), best_rate({"1.8e-05": 0.9})
    ('1e-4', '1.8e-5')
    """
    best = float(max(tried, key=tried.__getitem__))
    return f"{best:.1e}".replace("e-0", "e-").replace(".0e", "e")


def claims_table(results: Sequence[ClaimResult], load: Load, page: str) -> Table:
    """The claims with the paper's numbers, our numbers and the verdicts.

    A figure is named in its first row only. page: the path of results/README.md, for links.
    """
    rows = []
    last_link = ""
    for result in results:
        claim = result.claim
        link = claim_link(claim, page)
        paper = f" (paper: {claim['paper']})" if "paper" in claim else ""
        missing = f" (missing: {result.missing})" if result.missing else ""
        rows.append(
            [
                "" if link == last_link else link,
                f"{claim['claim']}{paper}",
                f"{number_text(result)}{details_text(result, load)}",
                f"**{result.verdict}**{missing}",
            ]
        )
        last_link = link
    return Table(["", "the paper's claim", f"ours (points, {USUAL_SEEDS} seeds)", "verdict"], rows)


def claim_link(claim: Claim, page: str) -> str:
    """A link to the figure's part of results/README.md, or to the page of the claim's study.

    page: the path of results/README.md from the page that has the link.

    >>> claim_link({"figure": "fig1"}, "results/README.md")
    '[Figure 1](results/README.md#figure-1)'
    >>> claim_link({"figure": "real-llm", "study": "real_model"}, "README.md")
    '[real model](../studies/real_model/README.md)'
    """
    if "study" in claim:
        study = posixpath.join(page, "../../studies", claim["study"], "README.md")
        return f"[{claim['study'].replace('_', ' ')}]({posixpath.normpath(study)})"
    name = claim["figure"].replace("fig", "Figure ").replace("table", "Table ")
    heading = name.lower().replace(" ", "-")
    return f"[{name}]({page}#{heading})"


def forest(results: Sequence[ClaimResult]) -> list[Panel]:
    """All effects in percentage points, with the paper's values; it expects them right of zero."""
    plotted = [one for one in results if one.estimate and one.claim["unit"] == "points"]
    heights = {one.claim["id"]: -i for i, one in enumerate(plotted)}
    bottom = 0.5 - len(plotted)
    lines = [Line([0, 0], [0.5, bottom], style="limit")]
    for verdict, style in STYLES.items():
        chosen = [one for one in plotted if one.verdict == verdict]
        if chosen:
            lines.append(effects(chosen, heights, verdict, style))
    with_number = [one.claim for one in plotted if "paper" in one.claim]
    paper = [claim["paper"] for claim in with_number]
    at = [heights[claim["id"]] for claim in with_number]
    lines.append(Line(paper, at, "the paper's", Style("#000000", "", "|"), "points"))
    options = {
        "xscale": "symlog",
        "yticks": list(heights.values()),
        "yticklabels": [one.claim["short"] for one in plotted],
        "ylim": (bottom, 0.5),
    }
    label = "percentage points, 95% interval; dots are seeds or places"
    return [Panel("the paper's claims", label, "", lines, options)]


def effects(
    results: Sequence[ClaimResult], heights: Mapping[str, float], verdict: str, style: Style
) -> Line:
    """The effects with a verdict, mirrored if the paper expects them below zero."""
    means = []
    seeds = []
    for result in results:
        sign = -1 if result.claim["expected"].startswith("<") else 1
        means.append(sign * result.estimate.mean)
        seeds.append([sign * value for value in result.estimate.each])
    at = [heights[result.claim["id"]] for result in results]
    half_widths = [result.estimate.half_width or 0 for result in results]
    return Line(means, at, verdict, style, "rows", half_widths, seeds)
