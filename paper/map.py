"""Where do negatives pay? TOPR against training on positives alone and its neighbours, over what may decide it.

    python reproduce.py map --seeds 5             # five seeds at the centre, three elsewhere
    python reproduce.py map --seeds 5 --hours 2   # begins nothing after two hours, and draws what there is

The map is ours; the paper has none. A place is a base model, made by tiny/make.py, and settings of training. A place
differs from the centre in one factor, and its arms train on the same samples. The test problems are training problems
that no arm trains on, so that choices may be made by the map.

What is read off a finished run is a line of map_runs.jsonl beside the figure. A run that has its line is not made
again, wherever that line was made: a map can be stopped, carried elsewhere and gone on with.
"""

import json
import math
import os
import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from itertools import pairwise, product
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch

from paper.experiments import Arm, Figure, Scale, provenance
from paper.runs import Finished, Job, Measured, Sweep
from pipeline.plots import Line, Panel
from pipeline.records import Sample, Task, read_rows, write_file
from pipeline.report import STUDENT, Estimate, Table
from pipeline.settings import TINY, Settings
from tiny.problems import EXPRESSION, FAMILIES, OPERATIONS
from train_gsm8k import gsm8k_task

MAKE = Path(__file__).resolve().parent.parent / "tiny" / "make.py"

# ---- places and arms; every value is ours -----------------------------------------------------------------------

ARMS = {
    "topr": Arm("TOPR", "topr", {}),
    "sft": Arm("positives only, as many steps", "sft", {"method": "sft"}),  # negatives stay, with weight 0
    "topr-70": Arm("TOPR, p~ = 70%", "p4", {"effective_proportion": 0.7}),
    "tis": Arm("TIS", "tis", {"method": "tis"}),
    "off_policy": Arm("plain IS", "off_policy", {"method": "off_policy"}),
    "topr-50": Arm("TOPR, p~ = 50%", "p3", {"effective_proportion": 0.5}),
    "topr-85": Arm("TOPR, p~ = 85%", "p5", {"effective_proportion": 0.85}),
    "positives": Arm("positives only, the same samples", "p1", {"composition": "positives_only"}),  # fewer steps
}
FEW = ("topr", "sft", "topr-70", "tis")
SHARES = ("topr", "sft", "topr-70", "tis", "topr-50", "topr-85")

MISTAKEN = ("--base tiny/base --habit 1300",)  # the centre's base: its teacher is problems.MISTAKEN
FROM_SCRATCH = "--flawless 1 --verifications 0 --batch 32"


class Place(NamedTuple):
    """A point of the map: its name, how its base is made, what it changes in the settings, and its arms.

    base: options of tiny/make.py; the second base is the first one taught on, and so forth. () is tiny/base itself.
    """

    name: str
    base: tuple[str, ...] = MISTAKEN
    changes: Mapping[str, Any] = MappingProxyType({})
    arms: Sequence[str] = FEW


PLACES = {  # in the order of the picture
    "hard": Place("fewer right samples", (*MISTAKEN, "--habit 400 --teacher.plan 0.6 0.97"), arms=SHARES),
    "centre": Place("centre", arms=tuple(ARMS)),
    "middle": Place("more right samples", (*MISTAKEN, "--habit 400 --teacher.plan 0.05 0.9")),  # tiny/mistaken
    "easy": Place("most right samples", (*MISTAKEN, "--habit 400 --teacher.plan 0.05 0.6"), arms=SHARES),
    "unsure": Place("base less sure", ("--base tiny/base --habit 500",)),
    "mixed": Place("slips and wrong plans", (*MISTAKEN, "--habit 400 --teacher.plan 0.1 0.7 --teacher.result 0.15")),
    "slips": Place("slips, no wrong plans", ()),
    "0.2M": Place("0.2M parameters", (f"--size 0.2M {FROM_SCRATCH} --steps 3000 --lr 3e-3 --habit 1500",)),
    "3.6M": Place(
        "3.6M parameters",
        (f"--size 3.6M {FROM_SCRATCH} --steps 1200 --lr 1e-3 --habit 700 --habit-lr 7e-4",),
        arms=("topr", "sft", "topr-70"),  # a run takes four times as long
    ),
    "160": Place("160 problems, rate 1.2e-4", changes={"problems": 160, "lr": 1.2e-4}),
    "slow": Place("rate 1e-5", changes={"lr": 1e-5}),
    "fast": Place("rate 1e-4", changes={"lr": 1e-4}),
    "adafactor": Place("Adafactor", changes={"optimizer": "adafactor"}),
    "sgd": Place("SGD, rate 0.3", changes={"optimizer": "sgd", "lr": 0.3}),
}
PARAMETERS = {"0.2M": 209_344, "centre": 951_424, "3.6M": 3_606_784}
QUICK = {  # to see that it works
    "centre": Place("centre", ("--base tiny/base --habit 2", "--habit 1 --teacher.result 0"), arms=("topr", "sft")),
    "slips": Place("slips", (), arms=("topr", "sft")),
}
ELSEWHERE = 3  # seeds of places other than the centre, at most


def map_task(settings: Settings) -> Task:
    """The first training problems to train on, and the last ones as test problems."""
    task = gsm8k_task(replace(settings, problems=10**6))
    return replace(task, train=task.train[: settings.problems], test=task.train[-settings.test_problems :])


def make_base(job: Job, options: str, taught: Path | None = None) -> None:
    """Make a base model by tiny/make.py, with these options, in the job's folder; taught: the base to begin with."""
    out, start = job.settings.out.resolve(), sum(os.times()[:4])  # of this process and its children
    begin = ["--base", str(taught.resolve())] if taught else []
    command = [sys.executable, str(MAKE), "--out", str(out), "--checker-steps", "0", *begin, *options.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    subprocess.run(command, check=True, capture_output=True, env=environment, cwd=MAKE.parent.parent)
    write_file(out / "results.json", json.dumps({"core seconds": round(sum(os.times()[:4]) - start, 1)}) + "\n")


def on_bases(sweep: Sweep, jobs: Mapping["Key", Job], places: Mapping[str, Place]) -> dict["Key", Job]:
    """The jobs, with the folders of their bases, which are made unless they are there."""
    chains = {key: places[key.place].base for key in jobs}
    folders: dict[tuple[str, ...], Path | None] = {(): None}  # tiny/make.py's options name the first base
    for length in range(1, max(map(len, chains.values())) + 1):
        parts = sorted({chain[:length] for chain in chains.values() if len(chain) >= length})
        lessons = {}
        for part in parts:
            teach = partial(make_base, options=part[-1], taught=folders[part[:-1]])
            lessons[part] = Job(f"base {' '.join(part)}", Settings(), map_task, run=teach)
        folders |= {part: run.folder / "base" for part, run in sweep.make(lessons).items()}
    models = {key: str(folders[chain] or TINY / "base") for key, chain in chains.items()}
    return {key: job._replace(settings=replace(job.settings, model=models[key])) for key, job in jobs.items()}


# ---- what is read off a run -------------------------------------------------------------------------------------

Kind = Literal["right", "plan", "sum", "none"]


def kind_of(sample: Sample, task: Task) -> Kind:
    """right; none: no answer can be read; sum: a sum in it is wrong; plan: anything else, its sums are right.

    >>> task = gsm8k_task(Settings())
    >>> texts = (" 2 + 3 = 6 figs. The answer is 6.", " 2 * 3 = 6 figs. The answer is 6.", " 2 + 3 = 5 figs.")
    >>> [kind_of(Sample(prompt="", completion=text, reward=-1, outcome="incorrect"), task) for text in texts]
    ['sum', 'plan', 'none']
    """
    if sample.outcome == "correct":
        return "right"
    if task.parse(task.visible(sample.completion)) is None:
        return "none"
    return "sum" if not all(sums(sample.completion)) else "plan"


def sums(completion: str) -> list[bool]:
    """Whether each sum of a completion is right, as the teacher reckons: no result is below zero.

    >>> sums(" 2 + 3 = 5 figs. 5 - 7 = 0 left. 4 / 0 = 1 each.")
    [True, True, False]
    """
    return [
        (sign != "/" or int(right) > 0) and max(OPERATIONS[sign](int(left), int(right)), 0) == int(result)
        for left, sign, right, result in EXPRESSION.findall(completion)
    ]


@cache
def family_of(prompt: str) -> str:
    """The name of the family of tiny/problems.py that a prompt's question is of.

    >>> family_of("Q: A basket holds 9 figs. Ada takes 2 of them. How many figs stay in the basket?" + chr(10) + "A:")
    'take'
    """
    question = prompt.removeprefix("Q: ").removesuffix("\nA:")
    return next(name for pattern, name in _questions() if pattern.fullmatch(question))


@cache
def _questions() -> list[tuple[re.Pattern[str], str]]:
    escaped = [(re.escape(question), family.name) for family in FAMILIES for question in family.questions]
    return [(re.compile(re.sub(r"\\\{\w+\\\}", r"\\w+", text)), name) for text, name in escaped]


def right_by_family(samples: Sequence[Sample]) -> dict[str, float]:
    """The share of right samples in each family."""
    right: dict[str, list[bool]] = defaultdict(list)
    for sample in samples:
        right[family_of(sample.prompt)].append(sample.reward > 0)
    return {name: round(float(np.mean(right[name])), 4) for name in sorted(right)}


def measured(run: Finished, task: Task) -> dict[str, Any]:
    """What is kept of a run: shares of right samples in the data, and the test problems before and after.

    positive: share of right samples among those drawn, and in each family. In `before` and `after` are correct, maj@K
    and pass@K, the kinds of error as shares of the completions, wrong sums as a share of the sums, and families.
    """
    [iteration] = run.results["iterations"]
    k = run.settings.k

    def state(samples: Sequence[Sample], entry: Mapping[str, Any]) -> dict[str, Any]:
        kinds = Counter(kind_of(sample, task) for sample in samples)
        stated = [is_right for sample in samples for is_right in sums(sample.completion)]
        return {
            "correct": round(entry["correct"], 4),
            "maj": round(entry[f"maj@{k}"]["mean"], 4),
            "pass": round(entry[f"pass@{k}"]["mean"], 4),
            **{kind: round(kinds[kind] / len(samples), 4) for kind in get_args(Kind)[1:]},
            "wrong sums": round(stated.count(False) / max(len(stated), 1), 4),
            "families": right_by_family(samples),
        }

    drawn = read_rows(run.folder / "iteration-1" / "samples.jsonl", Sample)
    return {
        "steps": iteration["dataset"]["steps"],
        "positive": round(sum(sample.reward > 0 for sample in drawn) / len(drawn), 4),
        "positive by family": right_by_family(drawn),
        "before": state(run.tested(0), run.results["before"]),
        "after": state(run.tested(iteration["dataset"]["steps"]), iteration["after"]),
    }


# ---- runs and their lines ---------------------------------------------------------------------------------------


class Key(NamedTuple):
    """Which run of the map: place, arm and seed."""

    place: str
    arm: str
    seed: int


Lines = dict[Key, dict[str, Any]]


def read_lines(file: Path) -> Lines:
    """The lines that are there."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    found = [json.loads(line) for line in lines]
    return {Key(line["place"], line["arm"], line["seed"]): line for line in found}


def wanted(scale: Scale, seeds: Sequence[int], places: Mapping[str, Place]) -> dict[Key, Job]:
    """All runs of the map, but for the folders of their bases. One seed everywhere comes first."""
    return {
        Key(name, arm, seed): Job(
            f"map-{name}-{arm}",
            replace(scale.base, seed=seed, **{**scale.mapped, **place.changes, **ARMS[arm].changes}),
            map_task,
        )
        for number, seed in enumerate(seeds)
        for name, place in places.items()
        if name == "centre" or number < ELSEWHERE
        for arm in place.arms
    }


def definition(place: Place, settings: Settings) -> dict[str, Any]:
    """What a run was made with, to be kept with it: options of its base, and settings other than the usual.

    >>> definition(Place("a place", ("--habit 2",)), Settings(lr=1e-3, seed=7, model="somewhere"))
    {'base': ['--habit 2'], 'lr': 0.001}
    """
    usual, here = asdict(Settings()), asdict(settings)
    named = ("model", "seed", "reuse", "out")  # the base is named by its options, and the seed by the key
    return {"base": list(place.base)} | {k: v for k, v in here.items() if v != usual[k] and k not in named}


def complete(sweep: Sweep, jobs: Mapping[Key, Job], places: Mapping[str, Place], file: Path, hours: float) -> Lines:
    """The lines of the jobs: those in `file`, and those of the runs that can be begun before the hours are over."""
    end, kept = time.monotonic() + 3600 * hours, read_lines(file)
    made_with = {key: definition(places[key.place], job.settings) for key, job in jobs.items()}

    def is_there(key: Key) -> bool:
        return kept.get(key, {}).get("made with") == made_with[key]

    missing = [key for key in jobs if not is_there(key)]
    print(f"map: {len(missing)} of {len(jobs)} runs to make{_expected(missing, kept)}", flush=True)
    visits = list(dict.fromkeys((key.place, key.seed) for key in missing))
    for i in range(0, len(visits), 2):
        if time.monotonic() >= end:
            break
        begun: dict[Key, Job] = {}
        for visit in visits[i : i + 2]:  # of each, one run draws the samples and the others copy them
            first, *others = (key for key in missing if (key.place, key.seed) == visit)
            begun |= {first: jobs[first]} | {key: jobs[key]._replace(copies=first) for key in others}
        for key, run in sweep.make(on_bases(sweep, begun, places)).items():
            line = key._asdict() | {"made with": made_with[key]} | _cost(run)
            kept[key] = line | measured(run, map_task(run.settings)) | {"versions": run.results["versions"]}
        write_file(file, "".join(json.dumps(kept[key]) + "\n" for key in sorted(kept)))
    return {key: kept[key] for key in jobs if is_there(key)}


def _expected(missing: Sequence[Key], kept: Mapping[Key, Mapping[str, Any]]) -> str:
    """How long the missing runs take, by those of the same place that were made, or else by all that were."""
    if not missing or not kept:
        return ""
    of_place: dict[str, list[float]] = defaultdict(list)
    for key, line in kept.items():
        of_place[key.place].append(line["seconds"])
    usual = float(np.mean([line["seconds"] for line in kept.values()]))
    hours = sum(float(np.mean(of_place.get(key.place, [usual]))) for key in missing) / 3600
    return f", about {hours:.1f} core-hours"


def _cost(run: Finished) -> dict[str, Any]:
    """Core seconds of a run and of the last lesson of its base, and the commit of the code."""
    taught = Path(run.settings.model).parent / "results.json"
    of_base = json.loads(taught.read_text(encoding="utf-8"))["core seconds"] if taught.exists() else 0.0
    return {"seconds": run.cost["seconds"], "seconds of base": of_base, "commit": run.cost["commit"]}


# ---- the figure -------------------------------------------------------------------------------------------------

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


class Map(Measured):
    """What was measured of the runs, in lines as `complete` has them; an arm is (place, arm).

    A name is the path in the line: "after.correct", "positive by family.take".
    """

    def __init__(self, lines: Lines):
        super().__init__(((key.place, key.arm), key.seed, numbers_of(lines[key])) for key in sorted(lines))
        self.places = list(dict.fromkeys(key.place for key in lines))

    def of(self, place: str, arm: str, other: str = "sft", what: str = "correct") -> Estimate | None:
        """An arm minus another at a place after training, seed by seed; None where no seed has both."""
        return self.gain((place, arm), (place, other), f"after.{what}")

    def state(self, place: str, stage: str, what: str) -> Estimate:
        """What is measured at a place "before" training, or after it with an arm."""
        before = stage == "before"
        return self.mean((place, "topr" if before else stage), f"{'before' if before else 'after'}.{what}")


def numbers_of(entry: Mapping[str, Any], path: str = "") -> dict[str, list[float]]:
    """The numbers of a line by their paths.

    >>> numbers_of({"commit": "a", "after": {"correct": 0.5, "families": {"take": 1.0}}})
    {'after.correct': [0.5], 'after.families.take': [1.0]}
    """
    found = {}
    for name, value in entry.items():
        if isinstance(value, dict):
            found |= numbers_of(value, f"{path}{name}.")
        elif isinstance(value, int | float):
            found[f"{path}{name}"] = [value]
    return found


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
    x = np.array([math.log10(size) for size, each in gains.items() for _ in each])
    y = 100 * np.array([gain for each in gains.values() for gain in each])
    if len(gains) < 2:
        return None
    x, y, df = x - x.mean(), y - y.mean(), len(x) - 2
    slope = float(x @ y / (x @ x))
    residuals = y - slope * x
    if df == 0:
        return Estimate(slope)
    return Estimate(slope, STUDENT[min(df + 1, 10)] * math.sqrt(float(residuals @ residuals) / df / float(x @ x)))


def by_family(table: Map, arm: str) -> list[tuple[float, float]]:
    """(share of right samples in the data, gain) of each family where the base alone was changed, over seeds."""
    found = []
    for place, family in product(("hard", "centre", "middle", "easy"), sorted(family.name for family in FAMILIES)):
        gain = table.of(place, arm, what=f"families.{family}")
        if gain:
            shares, both = table.each((place, arm), f"positive by family.{family}"), table.each((place, "sft"), "steps")
            found.append((float(np.mean([share for seed, share in shares.items() if seed in both])), gain.mean))
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
