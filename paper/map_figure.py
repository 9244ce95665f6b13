"""The picture and the tables of the map, from its lines. paper/map.py makes these."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np

from paper.experiments import provenance
from paper.map import ARMS, PARAMETERS, PLACES, Lines, Map, Place, read_lines
from pipeline.plots import Line, Panel, draw, save_figure
from pipeline.report import Estimate, Table
from tiny.problems import PLANS

MEASURES = {  # what the map measures of a run -> its name
    "correct": "correct",
    "maj": "maj@16",
    "pass": "pass@16",
    "plan": "wrong plan",
    "sum": "wrong sum",
    "none": "no answer",
    "wrong sums": "sums that are wrong",
}
GAIN = "gain (points), 95% interval"  # on training on positives only


def publish_map(lines: Lines, places: Mapping[str, Place], picture: Path) -> None:
    """Draw what TOPR and its neighbours gain over positives only, and print it by place."""
    table = Map(lines)
    save_figure(
        draw(panels(table, {place: places[place].name for place in places if table.of(place, "topr")})), picture
    )
    tables(table)["places"].print()


def record(file: Path) -> dict[str, Any]:
    """What the pages say of the map: how it was made, and its tables; file: its lines."""
    lines = read_lines(file)
    seeds = sorted({key.seed for key in lines})
    made_by = f"python reproduce.py map --preset laptop --seeds {len(seeds)} --seed {seeds[0]}"
    table = Map(lines)
    of_map = {"tables": {name: found._asdict() for name, found in tables(table).items()}, "shares": {}}
    for arm in ("topr", "topr-70"):  # with SGD steps are unequal
        gains = [table.of(place, arm) for place in PLACES if place != "sgd"]
        over = Estimate.over_seeds(gain.mean for gain in gains if gain)
        of_map["shares"][f"{ARMS[arm].name} - positives only, over places"] = over._asdict()
    return provenance(made_by, seeds, list(lines.values())) | of_map


def by_family(table: Map, arm: str) -> list[tuple[float, float]]:
    """(share of right samples in the data, gain) of each family where the base alone was changed, over seeds."""
    found = []
    for place, family in product(("hard", "centre", "middle", "easy"), sorted(PLANS)):
        gain = table.of(place, arm, what=f"families.{family}")
        both, of_seeds = table.each((place, "sft"), "steps"), table.each((place, arm), f"positive by family.{family}")
        shares = [share for seed, share in of_seeds.items() if seed in both]
        if gain and shares:  # of few problems, none of those to train on may be of this family
            found.append((float(np.mean(shares)), gain.mean))
    return found


def _panel(title: str, xlabel: str, limit: list[float], gains: Mapping, kind: Any = "line", **options: Any) -> Panel:
    """gains: of an arm's name and style, at x, where there is one; limit: the x of a line at zero."""
    drawn = [Line(limit, [0, 0], style="limit")]
    for (name, style), of_line in gains.items():
        there = {x: gain for x, gain in of_line.items() if gain}
        means, half_width = ([100 * (gain[i] or 0) for gain in there.values()] for i in (0, 1))  # one seed has none
        each = [[100 * value for value in gain.each] for gain in there.values()]
        drawn.append(Line(list(there), means, name if there else "", style, kind, half_width, each))
    return Panel(title, xlabel, GAIN, drawn, options)


def panels(table: Map, names: Mapping[str, str]) -> list[Panel]:
    """The gains by the share of right samples of a family, at each of the places (names), by p~ and by size."""

    gains = {}  # the mean over families with a similar share, with its interval over these families
    for arm, shift in (("topr", 0.94), ("topr-70", 1.0), ("tis", 1.06)):
        points, edges = by_family(table, arm), (0.0, 0.08, 0.15, 0.25, 0.4, 1.0)
        groups = ([point for point in points if low <= point[0] < high] for low, high in pairwise(edges))
        columns = (zip(*group, strict=True) for group in groups if group)
        gains[ARMS[arm][:2]] = {100 * shift * float(np.mean(x)): Estimate.over_seeds(y) for x, y in columns}
    x, at = "right training samples of a family (%)", [3, 5, 10, 20, 50, 80]
    families = _panel("families of problems", x, [2, 90], gains, "points", xscale="log", xticks=at, xticklabels=at)

    gains = {
        ARMS[arm][:2]: {i + shift: table.of(place, arm) for i, place in enumerate(reversed(names))}
        for arm, shift in (("topr", 0.17), ("topr-70", -0.17))
    }
    drawn = _panel("", "", [-0.5, len(names) - 0.5], gains, "rows").lines
    turned = [line._replace(x=line.y, y=line.x) for line in drawn]  # one place below the other
    means = [mean for line in turned for mean in line.x]
    limits = (min(means) - 3, max(means) + 3)  # where one interval is much wider than the others, it is cut off
    options = {"yticks": range(len(names)), "yticklabels": list(reversed(names.values())), "xlim": limits}
    places = Panel("places of the map", GAIN, "", turned, options)

    arms = {"topr": "none", "topr-50": "50%", "topr-70": "70%", "topr-85": "85%"}
    gains = {
        (PLACES[place].name, style): {i + shift: table.of(place, arm) for i, arm in enumerate(arms)}
        for place, style, shift in (("hard", "p1", -0.1), ("centre", "p3", 0.0), ("easy", "p5", 0.1))
    }
    x, at, texts = "effective share of positives p~ that it gives", range(len(arms)), list(arms.values())
    baselines = _panel("baseline", x, [-0.3, 3.3], gains, "points", xticks=at, xticklabels=texts)

    log = {place: math.log10(count) for place, count in PARAMETERS.items()}
    gains = {ARMS[arm][:2]: {x: table.of(place, arm) for place, x in log.items()} for arm in ("topr", "topr-70")}
    at, texts = [*log.values()], ["0.2M", "0.9M", "3.6M"]
    limit = [min(at) - 0.1, max(at) + 0.1]
    sizes = _panel("size of the model", "parameters", limit, gains, xticks=at, xticklabels=texts)
    return [families, places, baselines, sizes]


def of_kinds(table: Map) -> list[Panel]:
    """What TOPR changes against positives alone (as many steps), in everything that is measured, at each place."""
    names, found = {name: place.name for name, place in PLACES.items() if table.of(name, "topr")}, []
    at = {"xticks": range(len(MEASURES)), "yticks": range(len(names)), "yticklabels": [*names.values()]}
    for arm in ("topr", "topr-70"):
        gains = [[100 * table.of(place, arm, what=what).mean for what in MEASURES] for place in names]
        columns = [called.replace(" ", "\n") for called in MEASURES.values()]
        heat = [Line([], gains, kind="heat")]
        found.append(Panel(f"{ARMS[arm].name} - positives only (points)", "", "", heat, at | {"xticklabels": columns}))
    return found


def tables(table: Map) -> dict[str, Table]:
    """What results/map.md shows of the map, in points or in percent."""
    names = {name: place.name for name, place in PLACES.items() if table.of(name, "topr")}
    compared = ("topr", "topr-70", "tis")

    def gains(place: str, arms: Sequence[str], measures: Iterable[str]) -> list[str]:
        found = (table.of(place, arm, what=what) for arm, what in product(arms, measures))
        return [gain.text(100) if gain else "" for gain in found]

    def shares(place: str, stages: Iterable[str], measures: Iterable[str]) -> list[str]:
        return [f"{100 * table.state(place, *of).mean:.1f}" for of in product(stages, measures)]

    rows = []
    for place, name in names.items():
        seeds = str(len(table.each((place, "sft"), "steps")))
        columns = [*shares(place, ("before", "sft"), ["correct"]), *gains(place, compared, ["correct"])]
        rows.append([name, *columns, seeds])
    head = ["place", "right at the start (%)", "positives only (%)"]
    found = {"places": Table([*head, *(f"{ARMS[arm].name} (points)" for arm in compared), "seeds"], rows)}
    for place in {"hard", "slips", "centre"} & {*names}:
        stages = {"before": "before"} | {arm: ARMS[arm].name for arm in ARMS if table.each((place, arm), "steps")}
        rows = [[called, *shares(place, [stage], MEASURES)] for stage, called in stages.items()]
        found[f"kinds-{place}"] = Table(["in %", *MEASURES.values()], rows)
    return found
