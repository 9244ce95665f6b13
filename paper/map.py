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
import operator
import os
import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial, reduce
from itertools import pairwise, product
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch

from paper.experiments import Arm, Lab
from paper.figures import Figure
from paper.sweep import Finished, Job, OverSeeds, over_seeds
from pipeline.plots import Line, Panel
from pipeline.records import Sample, Task, read_rows, write_file
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


def bases(lab: Lab, chains: Collection[tuple[str, ...]]) -> dict[tuple[str, ...], Path]:
    """The folder of the base at the end of each chain of options, made unless it is there."""
    folders: dict[tuple[str, ...], Path | None] = {(): None}  # tiny/make.py's options name the first base
    for length in range(1, max(map(len, chains), default=0) + 1):
        wanted = sorted({chain[:length] for chain in chains if len(chain) >= length})
        jobs = [
            Job(
                f"base {' '.join(part)}",
                lab.base,
                map_task,
                partial(make_base, options=part[-1], taught=folders[part[:-1]]),
            )
            for part in wanted
        ]
        folders |= {part: run.folder / "base" for part, run in zip(wanted, lab.make(jobs), strict=True)}
    return {chain: folders[chain] or TINY / "base" for chain in chains}


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


def by_family(samples: Sequence[Sample]) -> dict[str, float]:
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
            "families": by_family(samples),
        }

    drawn = read_rows(run.folder / "iteration-1" / "samples.jsonl", Sample)
    return {
        "steps": iteration["dataset"]["steps"],
        "positive": round(sum(sample.reward > 0 for sample in drawn) / len(drawn), 4),
        "positive by family": by_family(drawn),
        "before": state(run.tested(0), run.results["before"]),
        "after": state(run.tested(iteration["dataset"]["steps"]), iteration["after"]),
    }


# ---- runs and their lines ---------------------------------------------------------------------------------------


class Key(NamedTuple):
    """Which run of the map: place, arm and seed."""

    place: str
    arm: str
    seed: int


@dataclass(frozen=True)
class Kept(Finished):
    """A run as its line has it, without its files: `results` is the line."""

    @property
    def made(self) -> dict[str, Any]:
        """Seconds and commit."""
        return {name: self.results[name] for name in ("seconds", "commit")}


def read_kept(file: Path) -> dict[Key, dict[str, Any]]:
    """The lines that are there."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    found = [json.loads(line) for line in lines]
    return {Key(line["place"], line["arm"], line["seed"]): line for line in found}


def definition(place: Place, settings: Settings) -> dict[str, Any]:
    """What a run was made with, to be kept with it: options of its base, and settings other than the usual.

    >>> definition(Place("a place", ("--habit 2",)), Settings(lr=1e-3, seed=7, model="somewhere"))
    {'base': ['--habit 2'], 'lr': 0.001}
    """
    usual, here = asdict(Settings()), asdict(settings)
    named = ("model", "seed", "reuse", "out")  # the base is named by its options, and the seed by the key
    return {"base": list(place.base)} | {k: v for k, v in here.items() if v != usual[k] and k not in named}


def settings_of(lab: Lab, place: Place, arm: str, seed: int) -> Settings:
    """The settings of a run, but for the folder of its base."""
    return replace(lab.base, seed=seed, **{**lab.scale.mapped, **place.changes, **ARMS[arm].changes})


def complete(lab: Lab, places: Mapping[str, Place], file: Path, hours: float) -> dict[Key, Kept]:
    """The map's runs: those that have a line in `file`, and those that can be made before the hours are over.

    One seed everywhere comes first.
    """
    end, kept = time.monotonic() + 3600 * hours, read_kept(file)
    visits = [
        (name, seed)
        for number, seed in enumerate(lab.seeds)
        for name in places
        if name == "centre" or number < ELSEWHERE
    ]
    wanted = {
        Key(name, arm, seed): definition(places[name], settings_of(lab, places[name], arm, seed))
        for name, seed in visits
        for arm in places[name].arms
    }
    missing = [key for key, made_with in wanted.items() if kept.get(key, {}).get("made with") != made_with]
    print(f"map: {len(missing)} of {len(wanted)} runs to make{_expected(missing, kept)}", flush=True)
    todo = list(dict.fromkeys((key.place, key.seed) for key in missing))
    for i in range(0, len(todo), 2):
        if time.monotonic() >= end:
            break
        keys = [key for key in missing if (key.place, key.seed) in todo[i : i + 2]]
        for key, run in _made(lab, places, keys).items():
            found = measured(run, map_task(run.settings)) | {"versions": run.results["versions"]}
            kept[key] = key._asdict() | {"made with": wanted[key]} | _cost(run) | found
        write_file(file, "".join(json.dumps(kept[key]) + "\n" for key in sorted(kept)))
    there = {key: kept[key] for key in wanted if kept.get(key, {}).get("made with") == wanted[key]}
    runs = {key: Kept(settings_of(lab, places[key.place], key.arm, key.seed), line) for key, line in there.items()}
    lab.used = list(runs.values())
    return runs


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
    return {"seconds": run.made["seconds"], "seconds of base": of_base, "commit": run.made["commit"]}


def _made(lab: Lab, places: Mapping[str, Place], keys: Sequence[Key]) -> dict[Key, Finished]:
    """Runs of a few places and seeds: of each, one run draws the samples and the others copy them."""
    models = bases(lab, {places[key.place].base for key in keys})

    def job(key: Key) -> Job:
        place = places[key.place]
        settings = replace(settings_of(lab, place, key.arm, key.seed), model=str(models[place.base]))
        return Job(f"map-{key.place}-{key.arm}", settings, map_task)

    firsts = {(key.place, key.seed): key for key in reversed(keys)}
    sources = dict(zip(firsts, lab.make([job(key) for key in firsts.values()]), strict=True))
    others = [key for key in keys if key not in firsts.values()]
    jobs = [(job(key), sources[key.place, key.seed].folder) for key in others]
    made = lab.make([j._replace(settings=replace(j.settings, reuse=folder)) for j, folder in jobs])
    return dict(zip([*firsts.values(), *others], [*sources.values(), *made], strict=True))


# ---- the figure -------------------------------------------------------------------------------------------------

MEASURES = ("correct", "maj", "pass", "plan", "sum", "none", "wrong sums")
EDGES = (0.0, 0.08, 0.15, 0.25, 0.4, 1.0)  # of the shares by which families are put together
COMPARED = (*product(("topr", "topr-70"), ("sft", "positives", "tis", "off_policy")), ("tis", "sft"))
GAIN = "gain (points), 95% interval"  # on training on positives only


class Runs(dict[Key, Kept]):
    """The runs that are there, and what is read off several of them."""

    def each(self, place: str, arm: str, *path: str) -> dict[int, Any]:
        """Seed -> what a run's line has under the names of `path`."""
        of_arm = {key.seed: run.results for key, run in self.items() if (key.place, key.arm) == (place, arm)}
        return {seed: reduce(operator.getitem, path, line) for seed, line in sorted(of_arm.items())}

    def gains(self, place: str, arm: str, other: str, *path: str) -> list[float]:
        """An arm minus another after training, for each seed that has both."""
        one, two = self.each(place, arm, "after", *path), self.each(place, other, "after", *path)
        return [one[seed] - two[seed] for seed in one if seed in two]

    def gain(self, place: str, arm: str, other: str, *path: str) -> OverSeeds | None:
        """The mean of these with its interval; None where there are none."""
        each = self.gains(place, arm, other, *path)
        return over_seeds(each) if each else None

    def by_share(self, arm: str, other: str) -> list[tuple[float, float]]:
        """(share of right samples in the data, gain) of each family where the base alone was changed, over seeds."""
        found: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        for place in ("hard", "centre", "middle", "easy"):
            without = self.each(place, other, "after", "families")
            for seed, line in self.each(place, arm, "after", "families").items():
                for family, share in self.each(place, arm, "positive by family")[seed].items():
                    if seed in without and family in line:
                        found[place, family].append((share, line[family] - without[seed][family]))
        return [tuple(map(float, np.mean(of_seeds, axis=0))) for of_seeds in found.values()]


def negatives(lab: Lab, places: Mapping[str, Place], file: Path, hours: float) -> Figure:
    """Where negatives pay: TOPR, without a baseline and at p~ = 70%, and TIS minus positives only.

    By the share of right samples of a family, at each place, by p~ and by the number of parameters.
    """
    runs = Runs(complete(lab, places, file, hours))
    there = [place for place in places if runs.gain(place, "topr", "sft", "correct")]
    panels = [_by_share(runs), _by_place(runs, {place: places[place].name for place in there})]
    panels += [_by_p_tilde(runs), _by_size(runs)]
    gains = {
        place: {
            (arm, other): {measure: runs.gain(place, arm, other, measure) for measure in MEASURES}
            for arm, other in COMPARED
            if runs.gains(place, arm, other, "correct")
        }
        for place in there
    }
    shares = {
        f"{places[place].name}: {ARMS[arm].name} - {ARMS[other].name}": of_pair["correct"]
        for place, of_place in gains.items()
        for (arm, other), of_pair in of_place.items()
    }
    slopes = {arm: slope_over_sizes(runs, arm) for arm in ("topr", "topr-70")}
    numbers = {f"{ARMS[arm].name} - positives only, points per tenfold size": s for arm, s in slopes.items() if s}
    taught = {tuple(run.results["made with"]["base"]): run.results["seconds of base"] for run in runs.values()}
    numbers["core-minutes of teaching the bases"] = over_seeds([sum(taught.values()) / 60])
    data = {
        "states": {place: _states(runs, place, places[place].arms) for place in there},
        "gains": {
            place: {
                f"{arm} - {other}": {measure: gain.record() for measure, gain in of_pair.items()}
                for (arm, other), of_pair in of_place.items()
            }
            for place, of_place in gains.items()
        },
    }
    return Figure(panels, data, shares, numbers)


def _states(runs: Runs, place: str, arms: Sequence[str]) -> dict[str, dict[str, dict]]:
    """Each measure before and after training with each arm, over seeds."""
    stages = {"before": ("topr", "before")} | {arm: (arm, "after") for arm in arms if runs.each(place, arm)}
    return {
        stage: {measure: over_seeds(runs.each(place, *path, measure).values()).record() for measure in MEASURES}
        for stage, path in stages.items()
    }


def slope_over_sizes(runs: Runs, arm: str) -> OverSeeds | None:
    """The slope of the gain in accuracy over log10(parameters), in points, by least squares over places and seeds.

    Its standard error is that of the residuals, which also hold what does not lie on a line; `each` has no seeds.
    """
    found = {place: runs.gains(place, arm, "sft", "correct") for place in PARAMETERS}
    x = np.array([math.log10(PARAMETERS[place]) for place, gains in found.items() for _ in gains])
    y = 100 * np.array([gain for gains in found.values() for gain in gains])
    if len(set(x)) < 2:
        return None
    x, y, df = x - x.mean(), y - y.mean(), len(x) - 2
    slope = float(x @ y / (x @ x))
    residuals = y - slope * x
    se = math.sqrt(float(residuals @ residuals) / df / float(x @ x)) if df else None
    return OverSeeds(slope, se, [], df)


def _by_share(runs: Runs) -> Panel:
    """The mean gain of families with a similar share of right samples, with its interval over these families.

    The base alone differs from the centre.
    """
    drawn = []
    for arm, shift in (("topr", 0.94), ("topr-70", 1.0), ("tis", 1.06)):
        points, middles, gains = runs.by_share(arm, "sft"), [], []
        for low, high in pairwise(EDGES):
            inside = [point for point in points if low <= point[0] < high]
            if inside:
                middles.append(100 * shift * float(np.mean([share for share, _ in inside])))
                gains.append(over_seeds(gain for _, gain in inside))
        drawn.append(_line(middles, gains, *ARMS[arm][:2], "points"))
    ticks = [3, 5, 10, 20, 50, 80]
    options = {"xscale": "log", "xticks": ticks, "xticklabels": ticks}
    x = "right training samples of a family (%)"
    return Panel("families of problems", x, GAIN, [Line([2, 90], [0, 0], style="limit"), *drawn], options)


def _by_place(runs: Runs, names: Mapping[str, str]) -> Panel:
    """The gains in accuracy at each place, one below the other."""
    drawn = [Line([0, 0], [-0.5, len(names) - 0.5], style="limit")]
    for arm, shift in (("topr", 0.17), ("topr-70", -0.17)):
        gains = {
            i: gain for i, place in enumerate(reversed(names)) if (gain := runs.gain(place, arm, "sft", "correct"))
        }
        upright = _line([i + shift for i in gains], list(gains.values()), *ARMS[arm][:2])
        drawn.append(upright._replace(x=upright.y, y=upright.x, kind="rows"))
    means = [mean for line in drawn for mean in line.x]
    options = {
        "yticks": list(range(len(names))),
        "yticklabels": list(reversed(names.values())),
        "xlim": (min(means) - 3, max(means) + 3),  # where one interval is much wider than the others, it is cut off
    }
    return Panel("places of the map", GAIN, "", drawn, options)


def _by_p_tilde(runs: Runs) -> Panel:
    arms = {"topr": "none", "topr-50": "50%", "topr-70": "70%", "topr-85": "85%"}
    drawn = [Line([-0.3, 3.3], [0, 0], style="limit")]
    named = (("hard", "p1"), ("centre", "p3"), ("easy", "p5"))
    for number, (place, style) in enumerate(named):
        gains = {i: gain for i, arm in enumerate(arms) if (gain := runs.gain(place, arm, "sft", "correct"))}
        drawn.append(
            _line([i + 0.1 * (number - 1) for i in gains], list(gains.values()), PLACES[place].name, style, "points")
        )
    options = {"xticks": list(range(len(arms))), "xticklabels": list(arms.values())}
    return Panel("baseline", "effective share of positives p~ that it gives", GAIN, drawn, options)


def _by_size(runs: Runs) -> Panel:
    sizes = {place: math.log10(count) for place, count in PARAMETERS.items()}
    drawn = [Line([min(sizes.values()) - 0.1, max(sizes.values()) + 0.1], [0, 0], style="limit")]
    for arm in ("topr", "topr-70"):
        gains = {x: gain for place, x in sizes.items() if (gain := runs.gain(place, arm, "sft", "correct"))}
        drawn.append(_line(list(gains), list(gains.values()), *ARMS[arm][:2]))
    options = {"xticks": list(sizes.values()), "xticklabels": ["0.2M", "0.9M", "3.6M"]}
    return Panel("size of the model", "parameters", GAIN, drawn, options)


def _line(x: Sequence[float], gains: Sequence[OverSeeds], name: str, style: str, kind: str = "line") -> Line:
    half_width = [100 * (gain.half_width or 0) for gain in gains]  # one seed has no interval
    return Line(x, [100 * gain.mean for gain in gains], name if gains else "", style, kind, half_width)
