"""Where do negatives pay? TOPR against training on positives alone and its neighbours, over what may decide it.

    python reproduce.py map --seeds 5             # five seeds at the centre, three elsewhere
    python reproduce.py map --seeds 5 --hours 2   # begins nothing after two hours, and draws what there is

The map is ours; the paper has none. A place differs from the centre in one factor: its base model or a setting. Its
arms train on the same samples. The test problems are training problems that no arm trains on, so that choices may be
made by the map. A run with a line in map_runs.jsonl, beside the figure, is not made again, wherever it was made: a map
can be stopped, carried elsewhere and gone on with.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from pandas import Series, json_normalize

from paper.experiments import Arm, Scale
from paper.runs import Finished, Job, Measured, Sweep, sharing_samples
from pipeline.card import CardSettings, card
from pipeline.records import Sample, Task, read_rows, write_file
from pipeline.report import Estimate
from pipeline.results import versions
from pipeline.settings import TINY, Settings
from tiny.problems import EXPRESSION, OPERATIONS, QUESTIONS
from train_gsm8k import gsm8k_task

MAKE = Path(__file__).resolve().parent.parent / "tiny" / "make.py"

ARMS = {
    "topr": Arm("TOPR", "topr", {}),
    "sft": Arm("positives only, as many steps", "sft", {"method": "sft"}),  # negatives stay, with weight 0
    "topr-70": Arm("TOPR, p~ = 70%", "p4", {"effective_proportion": 0.7}),
    "tis": Arm("TIS", "tis", {"method": "tis"}),
    "off_policy": Arm("plain IS", "off_policy", {"method": "off_policy"}),
    "topr-50": Arm("TOPR, p~ = 50%", "p3", {"effective_proportion": 0.5}),
    "topr-85": Arm("TOPR, p~ = 85%", "p5", {"effective_proportion": 0.85}),
    "positives": Arm("positives only, the same samples", "p1", {"composition": "positives_only"}),  # fewer steps
    "card": Arm("card of the base", ""),  # no training
    **{f"topr-{p}": Arm(f"TOPR, p~ = {p}%", "topr", {"effective_proportion": p / 100}) for p in (10, 20, 40, 60, 80)},
}
FEW = ("topr", "sft", "topr-70", "tis")
SHARES = ("topr", "sft", "topr-70", "tis", "topr-50", "topr-85")

MISTAKEN = ("--base tiny/base --habit 1300",)  # the centre's base: its teacher is problems.MISTAKEN
FROM_SCRATCH = "--flawless 1 --verifications 0 --batch 32"


class Place(NamedTuple):
    """A point of the map."""

    name: str
    base: tuple[str, ...] = MISTAKEN  # options of tiny/make.py; a second base is the first taught on; (): tiny/base
    changes: Mapping[str, Any] = MappingProxyType({})  # settings
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

EACH = ("topr", "sft", "topr-10", "topr-20", "topr-40", "topr-60", "topr-80", "card")
TEACH, WORST = "--base tiny/base --habit 1300", "--teacher.plan 0.05 0.9"
TWO_WAY = "--teacher.plan 0.7 0.7 --teacher.plans 1 --teacher.result 0"
PLANS_AND_SLIPS = f"{TEACH} --teacher.wordings 8 --teacher.plan 0 0.7 --teacher.result 0.1"
LONG, WORDED = {"max_new_tokens": 160}, (f"{TEACH} --teacher.wordings 8 {WORST}",)
SHARES = {  # where does the best share lie? Bases that differ in wordings, length and kind of error; other settings
    "mistaken": Place("1 wording", (*MISTAKEN, f"--habit 400 {WORST}"), arms=EACH),
    "slips": Place("1 wording, slips", (), arms=EACH),
    "two-way": Place("1 wording, one wrong plan", (f"{TEACH} {TWO_WAY} --teacher.endings 1",), arms=EACH),
    "ended": Place(
        "1 wording, one wrong plan, no ending missing",
        (f"{TEACH} {TWO_WAY} --teacher.endings 1", f"--habit 400 {TWO_WAY} --teacher.ending 0"),
        arms=EACH,
    ),
    "long": Place("1 wording, long", (f"{TEACH} --teacher.wordings 1 --teacher.sentences {WORST}",), LONG, EACH),
    "few": Place("3 wordings", (f"{TEACH} --teacher.wordings 3 {WORST}",), arms=EACH),
    "worded": Place("8 wordings", WORDED, arms=EACH),
    "worded-long": Place(
        "8 wordings, long", (f"{TEACH} --teacher.wordings 8 --teacher.sentences {WORST}",), LONG, EACH
    ),
    "worded-slips": Place(
        "8 wordings, slips", (f"{TEACH} --teacher.wordings 8 --teacher.plan 0 0 --teacher.result 0.25",), arms=EACH
    ),
    "more-slips": Place("8 wordings, plans and slips", (PLANS_AND_SLIPS,), arms=EACH),
    "default": Place(
        "the default base",
        (PLANS_AND_SLIPS, "--habit 300 --teacher.wordings 8 --teacher.plan 0 0.7 --teacher.result 0.03"),
        arms=EACH,
    ),
    "worded-slow": Place("8 wordings, rate 3e-5", WORDED, {"lr": 3e-5}, EACH),
    **{
        f"{base}-{times}x": Place(f"{base}, rate {times}e-4", of, {"lr": times * 1e-4}, ("sft",))
        for base, of in (("slips", ()), ("worded", WORDED))
        for times in (2, 3)
    },
    **{
        f"worded-{count}": Place(
            f"8 wordings, {count} problems",
            WORDED,
            {"problems": count, "n": 2560 // count},
            ("sft", "topr-20", "topr-60"),
        )
        for count in (40, 640)
    },
}
PARAMETERS = {"0.2M": 209_344, "centre": 951_424, "3.6M": 3_606_784}
MAPS = {"map": PLACES, "share": SHARES}
QUICK = {  # to see that it works
    "map": {
        "centre": Place("centre", ("--base tiny/base --habit 2", "--habit 1 --teacher.result 0"), arms=("topr", "sft")),
        "slips": Place("slips", (), arms=("topr", "sft")),
    },
    "share": {"slips": Place("1 wording, slips", (), arms=("topr-20", "sft"))},
}


def map_task(settings: Settings) -> Task:
    """The first training problems to train on, and the last ones as test problems."""
    task = gsm8k_task(replace(settings, problems=10**6))
    return replace(task, train=task.train[: settings.problems], test=task.train[-settings.test_problems :])


def make_base(job: Job, options: str, taught: Path | None = None) -> None:
    """Make a base model by tiny/make.py, with these options, in the job's folder; taught: the base to begin with."""
    out = job.settings.out.resolve()
    begin = ["--base", str(taught.resolve())] if taught else []
    command = [sys.executable, str(MAKE), "--out", str(out), "--checker-steps", "0", *begin, *options.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    subprocess.run(command, check=True, capture_output=True, env=environment, cwd=MAKE.parent.parent)
    write_file(out / "results.json", "{}\n")  # it is finished


def make_card(job: Job) -> None:
    """The card of a run's base, as its results.json."""
    of = {name: getattr(job.settings, name) for name in ("model", "seed", "max_new_tokens", "out")}
    found = card(CardSettings(**of), job.task(job.settings))
    write_file(job.settings.out / "results.json", json.dumps(found | {"versions": versions()}) + "\n")


def on_bases(sweep: Sweep, jobs: Mapping["Key", Job], places: Mapping[str, Place]) -> dict["Key", Job]:
    """The jobs, with the folders of their bases, which are made unless they are there."""
    folders: dict[tuple[str, ...], Path] = {}
    for length in (1, 2):  # those that are taught on the same one are made together
        lessons = {}
        for base in sorted({places[key.place].base[:length] for key in jobs} - {(), *folders}):
            teach = partial(make_base, options=base[-1], taught=folders.get(base[:-1]))
            lessons[base] = Job(f"base {' '.join(base)}", Settings(), map_task, run=teach)
        folders |= {base: run.settings.out / "base" for base, run in sweep.make(lessons).items()}
    models = {key: str(folders.get(places[key.place].base, TINY / "base")) for key in jobs}
    return {key: job._replace(settings=replace(job.settings, model=models[key])) for key, job in jobs.items()}


FAMILY_OF = [  # each question, with any words in it, and its family
    (re.compile(re.sub(r"\\\{\w+\\\}", r"\\w+", re.escape(question))), name)
    for name, questions in QUESTIONS.items()
    for question in questions
]


def kind_of(sample: Sample, task: Task) -> str:
    """right, whatever precedes the answer; none: no answer can be read; sum: a sum is wrong; plan: anything else.

    >>> task, texts = gsm8k_task(Settings()), [f" 2 + 3 = {x} figs. The answer is {x}." for x in (5, 6, 7, "x")]
    >>> samples = [Sample(prompt="", completion=text, reward=0, outcome=task.grade(text, 7)) for text in texts]
    >>> [kind_of(sample, task) for sample in samples]
    ['plan', 'sum', 'right', 'none']
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
    return next(name for pattern, name in FAMILY_OF if pattern.fullmatch(question))


def right_by_family(samples: Sequence[Sample]) -> dict[str, float]:
    """The share of right samples in each family."""
    right = Series([float(sample.reward > 0) for sample in samples], [family_of(sample.prompt) for sample in samples])
    return {name: round(share, 4) for name, share in right.groupby(level=0).mean().items()}


def measured(run: Finished, task: Task) -> dict[str, Any]:
    """What is kept of a run: shares of right samples in the data, and `before` and `after` it on the test problems."""
    [iteration], steps = run.results["iterations"], run.last_step

    def state(samples: Sequence[Sample], entry: Mapping[str, Any]) -> dict[str, Any]:
        kinds = Counter(kind_of(sample, task) for sample in samples)
        stated = [is_right for sample in samples for is_right in sums(sample.completion)]
        return {
            "correct": round(entry["correct"], 4),
            "maj": round(entry[f"maj@{run.settings.k}"]["mean"], 4),
            "pass": round(entry[f"pass@{run.settings.k}"]["mean"], 4),
            **{kind: round(kinds[kind] / len(samples), 4) for kind in ("plan", "sum", "none")},  # of the completions
            "wrong sums": round(stated.count(False) / max(len(stated), 1), 4),  # of the sums
            "families": right_by_family(samples),
        }

    drawn = read_rows(run.settings.out / "iteration-1" / "samples.jsonl", Sample)
    pulls = np.array([(step["pull"], step["realised_share"] * step["pull"]) for step in run.steps]).sum(0)
    return {
        "steps": steps,
        "realised": round(float(pulls[1] / pulls[0]), 4),  # share of positives, over the epoch
        "positive": round(sum(sample.reward > 0 for sample in drawn) / len(drawn), 4),
        "positive by family": right_by_family(drawn),
        "before": state(run.tested(0), run.results["before"]),
        "after": state(run.tested(steps), iteration["after"]),
    }


class Key(NamedTuple):
    """Which run of the map."""

    place: str
    arm: str
    seed: int


Lines = dict[Key, dict[str, Any]]


def read_lines(file: Path) -> Lines:
    """The lines that are there."""
    lines = map(json.loads, file.read_text(encoding="utf-8").splitlines() if file.exists() else ())
    return {Key(line["place"], line["arm"], line["seed"]): line for line in lines}


def wanted(name: str, scale: Scale, seeds: Sequence[int], places: Mapping[str, Place]) -> dict[Key, Job]:
    """All runs of a map, but for the folders of their bases. One seed everywhere comes first."""
    jobs = {}
    for number, seed in enumerate(seeds):
        for place in places if number < 3 else {"centre"} & {*places}:  # three seeds elsewhere, at most
            for arm in places[place].arms:
                changes = {"seed": seed, **scale.mapped[name], **places[place].changes, **ARMS[arm].changes}
                job = Job(f"{name}-{place}-{arm}", replace(scale.base, **changes), map_task)
                jobs[Key(place, arm, seed)] = job._replace(run=make_card if arm == "card" else None)
    return jobs


def complete(sweep: Sweep, jobs: Mapping[Key, Job], places: Mapping[str, Place], file: Path, hours: float) -> Lines:
    """The lines of the jobs: those in `file`, and those of the runs that can be begun before the hours are over."""
    end, kept = time.monotonic() + 3600 * hours, read_lines(file)
    usual, made_with = asdict(Settings()), {}
    named = ("model", "seed", "reuse", "out")  # the base is named by its options, and the seed by the key
    for key, job in jobs.items():
        changed = {k: v for k, v in asdict(job.settings).items() if v != usual[k] and k not in named}
        made_with[key] = {"base": list(places[key.place].base)} | changed
    there = {key: line for key, line in kept.items() if line["made with"] == made_with.get(key)}
    missing = [key for key in jobs if key not in there]
    print(f"map: {len(missing)} of {len(jobs)} runs to make", flush=True)
    visits = list(dict.fromkeys((key.place, key.seed) for key in missing))
    for i in range(0, len(visits), 2):
        if time.monotonic() >= end:
            break
        begun: dict[Key, Job] = {}
        for visit in visits[i : i + 2]:
            begun |= sharing_samples({key: jobs[key] for key in missing if (key.place, key.seed) == visit})
        for key, run in sweep.make(on_bases(sweep, begun, places)).items():
            taught = Path(run.settings.model).parent / "made.json"
            of_base = json.loads(taught.read_text(encoding="utf-8"))["seconds"] if taught.exists() else 0.0
            line = key._asdict() | {"made with": made_with[key], **run.cost, "seconds of base": of_base}
            there[key] = line | (run.results if key.arm == "card" else measured(run, map_task(run.settings)))
        kept |= there
        write_file(file, "".join(json.dumps(kept[key]) + "\n" for key in sorted(kept)))
    return {key: there[key] for key in jobs if key in there}


class Map(Measured):
    """The lines as a table: its arms are (place, arm), its names paths in a line, such as "after.correct"."""

    def __init__(self, lines: Lines):
        rows = ((key[:2], key.seed, json_normalize(lines[key]).to_dict("list")) for key in sorted(lines))
        super().__init__(rows)

    def of(self, place: str, arm: str, other: str = "sft", what: str = "correct") -> Estimate | None:
        """An arm minus another at a place after training, seed by seed; None where no seed has both."""
        return self.gain((place, arm), (place, other), f"after.{what}")

    def state(self, place: str, stage: str, what: str) -> Estimate:
        """What is measured at a place "before" training, or after it with an arm."""
        arm, when = ("topr", "before") if stage == "before" else (stage, "after")
        return self.mean((place, arm), f"{when}.{what}")
