"""Where does the best share lie, and does the law p~* = E- / (E+ + E-) of pipeline/card.py say so beforehand?

    python reproduce.py share             # three seeds
    python reproduce.py share --redraw    # draws what there is

The study is ours. A place is a base model, which tiny/make.py makes, or a setting; its arms train on the same samples.
The test problems are training problems that no arm trains on. A run with a line in share_runs.jsonl, beside the figure,
is not made again, wherever it was made: the study can be stopped, carried elsewhere and gone on with.
docs/internals/share_predictions.md says how the law is judged; it was written before the runs.
"""

import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from math import log
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from pandas import Series, json_normalize
from torch import Tensor
from transformers import AutoTokenizer

from paper.experiments import LAPTOP, OF_MAJORITIES, QUICK, provenance
from paper.runs import Finished, Job, Measured, Sweep, sharing_samples
from pipeline.card import CardSettings, card, pace
from pipeline.metrics import mean_over
from pipeline.models.language_model import SharedRows, token_logprobs
from pipeline.plots import Line, Panel, draw, save_figure
from pipeline.records import Sample, Task, read_rows, read_split, write_file
from pipeline.report import Estimate, Table
from pipeline.results import versions
from pipeline.settings import TINY, Settings
from tiny.problems import right_part, sums
from topr import topr_loss
from train_gsm8k import experiment, gsm8k_task

MAKE = Path(__file__).resolve().parent.parent / "tiny" / "make.py"

# arm -> its p~; sft: positives only, as many steps, for negatives stay with weight 0
SHARES = {**{f"topr-{p}": p / 100 for p in (10, 20, 40, 60, 80)}, "sft": 1.0}
ARMS: dict[str, dict[str, Any]] = {  # in the order of their runs -> what they change
    "topr": {},
    "sft": {"method": "sft"},
    **{arm: {"effective_proportion": p} for arm, p in SHARES.items() if arm != "sft"},
    "card": {},  # of the base, without training
}
FOUND_ON = ("mistaken", "slips")  # the bases on which the law was found; they do not count
GUESSES = {"the law": None, "always 80%": "topr-80", "always 20%": "topr-20"}
CLOSE = 0.02  # of accuracy; a prediction that is further behind the best share misses


class Place(NamedTuple):
    """A base model and settings."""

    name: str
    base: tuple[str, ...] = ()  # options of tiny/make.py; a second base is the first taught on; (): tiny/base
    changes: Mapping[str, Any] = MappingProxyType({})  # settings
    arms: Sequence[str] = tuple(ARMS)
    is_masked: bool = False  # negatives are learnt from their first wrong sum on


TEACH, WORST = "--base tiny/base --habit 1300", "--teacher.plan 0.05 0.9"
TWO_WAY = "--teacher.plan 0.7 0.7 --teacher.plans 1 --teacher.result 0"
WORDS = f"{TEACH} --teacher.wordings 8"
LONG, WORDED, ENDINGS = {"max_new_tokens": 160}, (f"{WORDS} {WORST}",), f"{TEACH} {TWO_WAY} --teacher.endings 1"
MIXED = (f"{WORDS} --teacher.plan 0 0.7 --teacher.result 0.1",)
DEFAULT = (*MIXED, "--habit 300 --teacher.wordings 8 --teacher.plan 0 0.7 --teacher.result 0.03")
PLACES = {  # bases that differ in wordings, length and kind of error; other settings
    "mistaken": Place("1 wording", (TEACH, f"--habit 400 {WORST}")),
    "slips": Place("1 wording, slips"),
    "sure": Place("1 wording, no slips taught", (f"--base tiny/base --habit 3000 {WORST} --teacher.result 0",)),
    "two-way": Place("1 wording, one wrong plan", (ENDINGS,)),
    "ended": Place(
        "1 wording, one wrong plan, no ending missing", (ENDINGS, f"--habit 400 {TWO_WAY} --teacher.ending 0")
    ),
    "long": Place("1 wording, long", (f"{TEACH} --teacher.wordings 1 --teacher.sentences {WORST}",), LONG),
    "few": Place("3 wordings", (f"{TEACH} --teacher.wordings 3 {WORST}",)),
    "worded": Place("8 wordings", WORDED),
    "worded-long": Place("8 wordings, long", (f"{WORDS} --teacher.sentences {WORST}",), LONG),
    "worded-slips": Place("8 wordings, slips", (f"{WORDS} --teacher.plan 0 0 --teacher.result 0.25",)),
    "more-slips": Place("8 wordings, plans and slips", MIXED),
    "default": Place("the default base", DEFAULT),
    "worded-slow": Place("8 wordings, rate 3e-5", WORDED, {"lr": 3e-5}),
}
for base, times in (("slips", 2), ("slips", 3), ("worded", 2), ("worded", 3)):
    faster = Place(f"{base}, rate {times}e-4", PLACES[base].base, {"lr": times * 1e-4}, ("sft",))
    PLACES[f"{base}-{times}x"] = faster
for count in (40, 640):
    changes = {"problems": count, "n": 2560 // count}
    PLACES[f"worded-{count}"] = Place(f"8 wordings, {count} problems", WORDED, changes, ("sft", "topr-20", "topr-60"))
for base in ("worded", "default"):
    name = f"{PLACES[base].name}, negatives from their first wrong sum on"
    PLACES[f"{base}-masked"] = Place(name, PLACES[base].base, {}, ("topr", "topr-20", "topr-60"), is_masked=True)
TAUGHT = Place("two lessons", ("--base tiny/base --habit 2", "--habit 1 --teacher.result 0"), arms=("sft",))
STUDIED = {  # scale -> the settings of all its runs, and its places
    "laptop": (replace(LAPTOP.base, **OF_MAJORITIES, lr=1e-4, curve_points=1), PLACES),
    "quick": (replace(QUICK.base, curve_points=1), {"taught": TAUGHT, "slips": PLACES["slips"]}),  # shows that it works
}


def held_out_task(settings: Settings) -> Task:
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
    found = card(CardSettings(**of), job.task(job.settings)) | {"versions": versions()}
    del found["model"]  # a folder of this machine; the base is known by its options
    write_file(job.settings.out / "results.json", json.dumps(found) + "\n")


def on_bases(sweep: Sweep, jobs: Mapping["Key", Job], places: Mapping[str, Place]) -> dict["Key", Job]:
    """The jobs, with the folders of their bases, which are made unless they are there."""
    folders: dict[tuple[str, ...], Path] = {}
    for length in (1, 2):  # those that are taught on the same one are made together
        lessons = {}
        for base in sorted({places[key.place].base[:length] for key in jobs} - {(), *folders}):
            teach = partial(make_base, options=base[-1], taught=folders.get(base[:-1]))
            lessons[base] = Job(f"base {' '.join(base)}", Settings(), held_out_task, run=teach)
        folders |= {base: run.settings.out / "base" for base, run in sweep.make(lessons).items()}
    models = {key: str(folders.get(places[key.place].base, TINY / "base")) for key in jobs}
    return {key: job._replace(settings=replace(job.settings, model=models[key])) for key, job in jobs.items()}


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


def train_masked(job: Job) -> None:
    """A run in which a negative has no gradient before its first wrong sum; its weight is that of all its tokens."""
    tokenizer, task = AutoTokenizer.from_pretrained(job.settings.model), job.task(job.settings)
    answers = {row["question"]: row["answer"] for row in read_split(job.settings.data, "train", dict[str, str])}
    solutions = {task.prompt(problem): answers[problem.question] for problem in task.train}

    def logprobs(model: torch.nn.Module, batch: SharedRows) -> Tensor:
        token_logp = token_logprobs(model, batch)  # (B, T), 0 on padding
        is_learnt = torch.ones_like(token_logp, dtype=torch.bool)
        for i in (batch.reward < 0).nonzero().flatten():
            prompt = tokenizer.decode(batch.prompt_ids[batch.prompt_of[i]], skip_special_tokens=True)
            texts = [tokenizer.decode(token) for token in batch.completion_ids[i]]
            is_learnt[i] = torch.tensor([*map(len, texts)]).cumsum(0) > right_part("".join(texts), solutions[prompt])
        return torch.where(is_learnt, token_logp, token_logp.detach()).sum(1)

    experiment(job.settings, task, (topr_loss, logprobs))


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
        }

    drawn = read_rows(run.settings.out / "iteration-1" / "samples.jsonl", Sample)
    return {
        "steps": steps,
        "realised": mean_over(run.steps, "realised_share", 4),  # share of positives, over the epoch
        "positive": round(sum(sample.reward > 0 for sample in drawn) / len(drawn), 4),
        "before": state(run.tested(0), run.results["before"]),
        "after": state(run.tested(steps), iteration["after"]),
    }


class Key(NamedTuple):
    """Which run of the study."""

    place: str
    arm: str
    seed: int


Lines = dict[Key, dict[str, Any]]


def read_lines(file: Path) -> Lines:
    """The lines that are there."""
    lines = map(json.loads, file.read_text(encoding="utf-8").splitlines() if file.exists() else ())
    return {Key(line["place"], line["arm"], line["seed"]): line for line in lines}


def wanted(scale: str, seeds: Sequence[int]) -> dict[Key, Job]:
    """All runs of the study at a scale, but for the folders of their bases. One seed everywhere comes first."""
    (base, places), jobs = STUDIED[scale], {}
    for key in (Key(place, arm, seed) for seed in seeds for place, of in places.items() for arm in of.arms):
        settings = replace(base, **{"seed": key.seed, **places[key.place].changes, **ARMS[key.arm]})
        make = make_card if key.arm == "card" else train_masked if places[key.place].is_masked else None
        jobs[key] = Job(f"share-{key.place}-{key.arm}", settings, held_out_task, run=make)
    return jobs


def complete(sweep: Sweep, jobs: Mapping[Key, Job], places: Mapping[str, Place], file: Path, redraw: bool) -> Lines:
    """The lines of the jobs: those in `file`, and unless it is only drawn anew those of the runs that are missing."""
    kept, made_with = read_lines(file), {}
    usual, named = asdict(Settings()) | {"masked": False}, ("model", "seed", "reuse", "out")  # base and key name these
    there: Lines = {}
    for key, job in jobs.items():
        place = places[key.place]
        every = asdict(job.settings) | {"base": list(place.base), "masked": place.is_masked}
        made_with[key] = {
            name: value for name, value in every.items() if value != usual.get(name) and name not in named
        }
        known = kept[key]["made with"] if key in kept else {}
        # A setting that is in the line alone has become the default since.
        if made_with[key].keys() <= known.keys() and known.items() <= every.items():
            there[key] = kept[key]
    missing = [key for key in jobs if key not in there]
    print(f"share: {len(missing)} of {len(jobs)} runs to make", flush=True)
    visits = list(dict.fromkeys((key.place, key.seed) for key in missing if not redraw))
    for i in range(0, len(visits), 2):
        begun: dict[Key, Job] = {}
        for visit in visits[i : i + 2]:
            begun |= sharing_samples({key: jobs[key] for key in missing if (key.place, key.seed) == visit})
        for key, run in sweep.make(on_bases(sweep, begun, places)).items():
            taught = Path(run.settings.model).parent / "made.json"
            of_base = json.loads(taught.read_text(encoding="utf-8"))["seconds"] if taught.exists() else 0.0
            line = key._asdict() | {"made with": made_with[key], **run.cost, "seconds of base": of_base}
            there[key] = line | (run.results if key.arm == "card" else measured(run, held_out_task(run.settings)))
        kept |= there
        write_file(file, "".join(json.dumps(kept[key]) + "\n" for key in sorted(kept)))
    return {key: there[key] for key in jobs if key in there}


def measured_of(lines: Lines) -> Measured:
    """The lines as a table: its arms are (place, arm), its names paths in a line, such as "after.correct"."""
    return Measured((key[:2], key.seed, json_normalize(lines[key]).to_dict("list")) for key in sorted(lines))


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
    odds = {arm: min(of, 0.97) / (1 - min(of, 0.97)) for arm, of in SHARES.items()}
    return min(SHARES, key=lambda arm: abs(log(odds[arm] * (1 - share) / share)))


def judge(table: Measured, place: str) -> Judged:
    """The law at a place, by the card of its base."""
    card = {name: table.mean((place, "card"), name) for name in ("e_pos", "e_neg", "ratio", "best_share", "correct")}
    ends = {arm: table.mean((place, arm), "after.correct").mean for arm in SHARES}
    best, arm = max(ends, key=ends.__getitem__), nearest(card["best_share"].mean)
    behind = {of: table.gain((place, it or arm), (place, best), "after.correct") for of, it in GUESSES.items()}
    p, e_pos, e_neg = (card[name].mean for name in ("correct", "e_pos", "e_neg"))
    paces = Series([pace(p, share, e_pos, e_neg) for share in SHARES.values()])
    rank = paces.rank().corr(Series([*ends.values()]).rank())
    return Judged(card["ratio"], card["best_share"], best, behind, arm, float(rank))


def spread(table: Measured, places: Iterable[str], x: Callable[[str, str], float]) -> float:
    """Points of accuracy by which the shares below 100% of all places lie about one curve over the log odds of x.

    The curve of accuracy below a place's best share is a parabola, fitted by least squares; the spread is the root of
    the mean squared residual.
    """
    of_x, below = [], []
    for place in places:
        ends = [table.mean((place, arm), "after.correct").mean for arm in SHARES]
        of_x += [log(x(place, arm) / (1 - x(place, arm))) for arm in [*SHARES][:-1]]
        below += [100 * (end - max(ends)) for end in ends[:-1]]
    residuals = np.array(below) - np.polyval(np.polyfit(of_x, below, 2), of_x)
    return float(np.sqrt(np.mean(residuals**2)))


def publish(lines: Lines, places: Mapping[str, Place], command: str, out: Path) -> None:
    """Write share.json and share.png into `out`, and print the law beside what was measured."""
    table = measured_of(lines)
    there = {name: place.name for name, place in places.items() if all(table.each((name, a), "steps") for a in SHARES)}
    of = {"nominal": lambda _, arm: SHARES[arm], "realised": lambda *at: table.mean(at, "realised").mean}
    spreads = {f"spread, {what} share (points)": spread(table, there, x) for what, x in of.items() if there}
    content = {
        **provenance(command, (key.seed for key in lines), [*lines.values()]),
        "shares": {},
        "numbers": {what: Estimate(value)._asdict() for what, value in spreads.items()},
        "tables": {name: of._asdict() for name, of in tables(table, there, places).items()},
    }
    write_file(out / "share.json", json.dumps(content, indent=1) + "\n")
    if there:
        save_figure(draw(panels(table, there)), out / "share.png")
    Table(**content["tables"]["law"]).print()


def panels(table: Measured, names: Iterable[str]) -> list[Panel]:
    """Accuracy below the base's best share over the nominal and the realised share; these two; and the law."""
    drawn, law = defaultdict(list), [Line([0, 100], [0, 100], style="limit")]
    for name in names:
        ends, realised = (
            100 * np.array([table.mean((name, arm), what).mean for arm in SHARES])
            for what in ("after.correct", "realised")
        )
        nominal, below = 100 * np.array([*SHARES.values()]), ends - ends.max()
        for what, x, y in (("nominal", nominal, below), ("realised", realised, below), ("both", nominal, realised)):
            drawn[what].append(Line(x, y, name))
        if table.each((name, "card"), "ratio"):
            of = judge(table, name)
            half = [100 * (of.predicted.half_width or 0)]
            law.append(Line([100 * of.predicted.mean], [100 * SHARES[of.best]], name, "", "rows", half))
    below, whole = "accuracy below the best share (points)", {"xlim": (0, 102)}
    nominal, realised = "effective (nominal) share of positives (%)", "realised share of positives (%)"
    return [
        Panel("accuracy, nominal share", nominal, below, drawn["nominal"], {"ylim": (-30, 1.5), **whole}),
        Panel("accuracy, realised share", realised, below, drawn["realised"], {"ylim": (-30, 1.5), **whole}),
        Panel("what the taper makes of a share", nominal, realised, drawn["both"], {"ylim": (0, 102), **whole}),
        Panel("the law", "predicted best share p~* (%)", "measured best share (%)", law, {"ylim": (0, 104), **whole}),
    ]


def tables(table: Measured, names: Mapping[str, str], places: Mapping[str, Place]) -> dict[str, Table]:
    """The law at each place with its score; what each share reached; and the places with a few arms."""
    called = {arm: f"{share:.0%}" for arm, share in SHARES.items()}
    rows, hits = [], dict.fromkeys(GUESSES, 0)
    judged = {name: judge(table, name) for name in names if table.each((name, "card"), "ratio")}
    counted = [name for name in judged if name not in FOUND_ON]
    for name, of in judged.items():
        for guess in GUESSES if name in counted else ():
            hits[guess] += of.hits(guess)
        ends = [f"{of.behind[guess].text(100)}{', hits' * of.hits(guess)}" for guess in GUESSES]
        share = of.predicted.text(100, 0, " %", within=(0, 1))
        gain = table.gain((name, "topr-60"), (name, "sft"), "after.correct").text(100)
        row = [f"{name}: {names[name]}", of.ratio.text(), share, called[of.arm], called[of.best], f"{of.rank:.2f}"]
        rows.append([*row, *ends, gain])
    rows.append([f"hits on the {len(counted)} others", *[""] * 5, *map(str, hits.values()), ""])
    head = ["base", "E-/E+", "p~*", "predicted", "best", "rank", *(f"{g} - best" for g in GUESSES), "60% - 100%"]
    reached, realised = (
        [[name, *(table.mean((name, arm), what).text(100, within=(0, 1)) for arm in SHARES)] for name in names]
        for what in ("after.correct", "realised")
    )
    few = []
    for name, place in places.items():
        for arm in place.arms if name not in names else ():
            if table.each((name, arm), "steps"):
                ends = [table.mean((name, arm), f"after.{what}").text(100) for what in ("correct", "wrong sums")]
                few.append([place.name, arm, *ends])
    return {
        "law": Table(head, rows),
        "accuracy": Table(["correct (%)", *called.values()], reached),
        "realised": Table(["realised share (%)", *called.values()], realised),
        "few": Table(["place", "arm", "correct (%)", "wrong sums (%)"], few),
    }
