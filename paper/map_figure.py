"""The picture and the tables of the map, from its lines. paper/map.py makes these."""

import math
from collections.abc import Mapping
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np

from paper.experiments import Figure, provenance
from paper.map import ARMS, PARAMETERS, PLACES, Lines, Map, Place, read_lines
from pipeline.plots import Line, Panel, draw, save_figure
from pipeline.report import STUDENT, Estimate, Table
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
EDGES = (0.0, 0.08, 0.15, 0.25, 0.4, 1.0)  # of the shares by which families are put together
COMPARED = (*product(("topr", "topr-70"), ("sft", "positives", "tis", "off_policy")), ("tis", "sft"))
GAIN = "gain (points), 95% interval"  # on training on positives only


def figure(lines: Lines, places: Mapping[str, Place]) -> tuple[Figure, list[Panel]]:
    """Where negatives pay: TOPR, without a baseline and at p~ = 70%, and TIS minus positives only.

    The panels: by the share of right samples of a family, at each place, by p~ and by the number of parameters.
    """
    table = Map(lines)
    there = {place: places[place].name for place in places if table.of(place, "topr")}
    shares = {
        f"{name}: {ARMS[arm].name} - {ARMS[other].name}": gain
        for place, name in there.items()
        for arm, other in COMPARED
        if (gain := table.of(place, arm, other))
    }
    slopes = {arm: slope_over_sizes(table, arm) for arm in ("topr", "topr-70")}
    numbers = {f"{ARMS[arm].name} - positives only, points per tenfold size": s for arm, s in slopes.items() if s}
    taught = {tuple(line["made with"]["base"]): line["seconds of base"] for line in lines.values()}
    numbers["core-minutes of teaching the bases"] = Estimate.over_seeds([sum(taught.values()) / 60])
    panels = [_by_share(table), _by_place(table, there), _by_p_tilde(table), _by_size(table)]
    return Figure({}, shares, numbers, tables(table, there)), panels


def publish_map(lines: Lines, places: Mapping[str, Place], picture: Path) -> None:
    """Draw the picture, and print the numbers worth a sentence."""
    drawn, panels = figure(lines, places)
    save_figure(draw(panels), picture)
    drawn.table("map").print()


def record(file: Path) -> dict[str, Any]:
    """What the pages say of the map: how it was made, and its tables; file: its lines."""
    lines = read_lines(file)
    seeds = sorted({key.seed for key in lines})
    made_by = f"python reproduce.py map --preset laptop --seeds {len(seeds)} --seed {seeds[0]}"
    drawn, _ = figure(lines, PLACES)
    tables = {name: table._asdict() for name, table in drawn.tables.items()}
    return provenance(made_by, seeds, list(lines.values())) | {"tables": tables}


def slope_over_sizes(table: Map, arm: str) -> Estimate | None:
    """The slope of the gain in accuracy over log10(parameters), in points, by least squares over places and seeds.

    Its interval is that of the residuals, which also hold what does not lie on a line; `each` has no seeds.
    """
    gains = {size: gain.each for place, size in PARAMETERS.items() if (gain := table.of(place, arm))}
    x = [math.log10(size) for size, each in gains.items() for _ in each]
    if len(gains) < 2 or len(x) < 3:
        return None
    line, covariance = np.polyfit(x, [100 * gain for each in gains.values() for gain in each], 1, cov=True)
    return Estimate(float(line[0]), STUDENT[min(len(x) - 1, 10)] * math.sqrt(covariance[0, 0]))


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


def _by_share(table: Map) -> Panel:
    """The mean gain of families with a similar share of right samples, with its interval over these families.

    The base alone differs from the centre.
    """
    drawn = []
    for arm, shift in (("topr", 0.94), ("topr-70", 1.0), ("tis", 1.06)):
        points, gains = by_family(table, arm), {}
        for low, high in pairwise(EDGES):
            inside = [point for point in points if low <= point[0] < high]
            if inside:
                middle = 100 * shift * float(np.mean([share for share, _ in inside]))
                gains[middle] = Estimate.over_seeds(gain for _, gain in inside)
        drawn.append(_line(gains, *ARMS[arm][:2], "points"))
    ticks = [3, 5, 10, 20, 50, 80]
    options = {"xscale": "log", "xticks": ticks, "xticklabels": ticks}
    x = "right training samples of a family (%)"
    return Panel("families of problems", x, GAIN, [Line([2, 90], [0, 0], style="limit"), *drawn], options)


def _by_place(table: Map, names: Mapping[str, str]) -> Panel:
    """The gains in accuracy at each place, one below the other."""
    drawn = [Line([0, 0], [-0.5, len(names) - 0.5], style="limit")]
    for arm, shift in (("topr", 0.17), ("topr-70", -0.17)):
        upright = _line({i + shift: table.of(place, arm) for i, place in enumerate(reversed(names))}, *ARMS[arm][:2])
        drawn.append(upright._replace(x=upright.y, y=upright.x, kind="rows"))
    means = [mean for line in drawn for mean in line.x]
    options = {
        "yticks": list(range(len(names))),
        "yticklabels": list(reversed(names.values())),
        "xlim": (min(means) - 3, max(means) + 3),  # where one interval is much wider than the others, it is cut off
    }
    return Panel("places of the map", GAIN, "", drawn, options)


def _by_p_tilde(table: Map) -> Panel:
    arms = {"topr": "none", "topr-50": "50%", "topr-70": "70%", "topr-85": "85%"}
    drawn = [Line([-0.3, 3.3], [0, 0], style="limit")]
    for shift, (place, style) in zip((-0.1, 0.0, 0.1), (("hard", "p1"), ("centre", "p3"), ("easy", "p5")), strict=True):
        gains = {i + shift: table.of(place, arm) for i, arm in enumerate(arms)}
        drawn.append(_line(gains, PLACES[place].name, style, "points"))
    options = {"xticks": list(range(len(arms))), "xticklabels": list(arms.values())}
    return Panel("baseline", "effective share of positives p~ that it gives", GAIN, drawn, options)


def _by_size(table: Map) -> Panel:
    sizes = {place: math.log10(count) for place, count in PARAMETERS.items()}
    drawn = [Line([min(sizes.values()) - 0.1, max(sizes.values()) + 0.1], [0, 0], style="limit")]
    for arm in ("topr", "topr-70"):
        drawn.append(_line({x: table.of(place, arm) for place, x in sizes.items()}, *ARMS[arm][:2]))
    options = {"xticks": list(sizes.values()), "xticklabels": ["0.2M", "0.9M", "3.6M"]}
    return Panel("size of the model", "parameters", GAIN, drawn, options)


def _line(gains: Mapping[float, Estimate | None], name: str, style: str, kind: str = "line") -> Line:
    """x -> gain, where there is one; one seed has no interval."""
    there = {x: gain for x, gain in gains.items() if gain}
    half_width = [100 * (gain.half_width or 0) for gain in there.values()]
    return Line(
        list(there), [100 * gain.mean for gain in there.values()], name if there else "", style, kind, half_width
    )


def tables(table: Map, names: Mapping[str, str]) -> dict[str, Table]:
    """What results/README.md shows of the map; names: those of the places, in points or in percent."""

    def text(gain: Estimate | None) -> str:
        return gain.text(100) if gain else ""

    head = ["place", "right at the start (%)", "positives only (%)"]
    places = Table(
        [*head, *(f"{ARMS[arm].name} (points)" for arm in ("topr", "topr-70", "tis")), "seeds"],
        [
            [
                name,
                *(f"{100 * table.state(place, stage, 'correct').mean:.1f}" for stage in ("before", "sft")),
                *(text(table.of(place, arm)) for arm in ("topr", "topr-70", "tis")),
                str(len(table.each((place, "sft"), "steps"))),
            ]
            for place, name in names.items()
        ],
    )
    found = {"places": places}
    for arm in ("topr", "topr-70"):
        rows = [[name, *(text(table.of(place, arm, what=what)) for what in MEASURES)] for place, name in names.items()]
        found[f"gains-{arm}"] = Table(["in points", *MEASURES.values()], rows)
    for place in names:
        stages = {"before": "before"} | {arm: ARMS[arm].name for arm in ARMS if table.each((place, arm), "steps")}
        rows = [
            [called, *(f"{100 * table.state(place, stage, what).mean:.1f}" for what in MEASURES)]
            for stage, called in stages.items()
        ]
        found[f"kinds-{place}"] = Table(["in %", *MEASURES.values()], rows)
    return found
