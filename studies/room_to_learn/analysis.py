"""The endpoints of room_to_learn: from runs.jsonl to room_to_learn.json and room_to_learn.png.

python -m studies.room_to_learn.analysis
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import tyro

from studies.room_to_learn.study import ARMS
from toprlib.plotting import STYLES, Line, Panel, Style, draw, save_figure
from toprlib.report import Estimate, Table

FOLDER = Path(__file__).parent
SAMPLES = 16
SAMPLES_BETWEEN = 4
LABELS = {
    "topr": "TOPR",
    "70 %": "TOPR, share of 70 %",
    "sft": "SFT, as many steps",
    "reinforce": "naive REINFORCE",
}
LINE_STYLES = {
    "topr": STYLES["topr"],
    "70 %": Style("#56B4E9", "--", "s"),
    "sft": STYLES["sft"],
    "reinforce": STYLES["reinforce"],
}

# Arms whose difference is an endpoint, and what is compared.
PAIRS = (("topr", "sft"), ("70 %", "sft"), ("reinforce", "topr"))
COMPARED = ("pass@1", "maj@16", "T = 0", "area under the curve")

# Runs of one arm and rate, by seed.
BySeed = dict[int, dict]


def accuracy(run: Mapping) -> float:
    """pass@1 at the end."""
    return float(np.mean(run["right"][-1])) / SAMPLES


def curve(run: Mapping) -> list[float]:
    """pass@1 before training and after each third of the epoch."""
    first, *between, last = run["right"]
    counts = [(first, SAMPLES), *((part, SAMPLES_BETWEEN) for part in between), (last, SAMPLES)]
    return [float(np.mean(right)) / samples for right, samples in counts]


def at_tuned_rate(runs: Mapping[float, BySeed]) -> BySeed:
    """The runs of an arm, in each seed at the rate that is best in the other seeds."""
    seeds = sorted(next(iter(runs.values())))
    tuned = {}
    for seed in seeds:
        means = {}
        for lr, of_rate in runs.items():
            means[lr] = np.mean([accuracy(of_rate[other]) for other in seeds if other != seed])
        tuned[seed] = runs[max(means, key=means.__getitem__)][seed]
    return tuned


def measure(run: Mapping) -> dict[str, float]:
    """The numbers of a run that endpoints compare."""
    return {
        "pass@1": accuracy(run),
        "maj@16": float(np.mean(run["majority"])),
        "T = 0": float(np.mean(run["greedy"])),
        "area under the curve": float(np.mean(curve(run)[1:])),
        "T = 0, after - before": float(np.mean(run["greedy"]) - np.mean(run["greedy before"])),
        "pass@1 - T = 0 before": accuracy(run) - float(np.mean(run["greedy before"])),
        "pass@1, after - before": accuracy(run) - float(np.mean(run["right"][0])) / SAMPLES,
        "maj@16, after - before": float(np.mean(run["majority"]) - np.mean(run["majority before"])),
    }


def over_questions(values: Mapping[int, list[float]]) -> Estimate:
    """The mean over questions of their means over the seeds that tested them, and its interval."""
    means = [np.mean(of_question) for of_question in values.values()]
    n = len(means)
    # Student's t for 111 degrees of freedom; fewer questions have a slightly larger one.
    half_width = 1.982 * np.std(means, ddof=1) / n**0.5
    return Estimate(float(np.mean(means)), float(half_width))


def greedy_gains(runs: BySeed, others: BySeed | None = None) -> Estimate:
    """T = 0 of each question, after less before; or less that of other runs."""
    gains: dict[int, list[float]] = {}
    for seed, run in runs.items():
        rival = run["greedy before"] if others is None else others[seed]["greedy"]
        for question, one, other in zip(run["questions"], run["greedy"], rival, strict=True):
            gains.setdefault(question, []).append(one - other)
    return over_questions(gains)


def read_lines() -> list[dict]:
    """The lines of runs.jsonl, each a run."""
    text = (FOLDER / "runs.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def endpoints(tuned: Mapping[str, BySeed]) -> dict[str, Estimate]:
    """What predictions are about: each arm, differences of arms, and gains over questions."""
    measured = {}
    for arm, runs in tuned.items():
        measured[arm] = {seed: measure(run) for seed, run in runs.items()}
    found = {}
    for arm, of_seed in measured.items():
        for what in of_seed[0]:
            each = [values[what] for values in of_seed.values()]
            found[f"{LABELS[arm]}: {what}"] = Estimate.over_seeds(each)
    for arm, other in PAIRS:
        for what in COMPARED:
            each = [measured[arm][s][what] - measured[other][s][what] for s in measured[arm]]
            found[f"{LABELS[arm]} - {LABELS[other]}: {what}"] = Estimate.over_seeds(each)
    for arm, runs in tuned.items():
        found[f"{LABELS[arm]}: T = 0, after - before, over questions"] = greedy_gains(runs)
    difference = greedy_gains(tuned["topr"], tuned["sft"])
    found[f"TOPR - {LABELS['sft']}: T = 0, over questions"] = difference
    before = [np.mean(run["right"][0]) / SAMPLES for run in tuned["topr"].values()]
    found["before: pass@1"] = Estimate.over_seeds(before)
    greedy_before = [np.mean(run["greedy before"]) for run in tuned["topr"].values()]
    found["before: T = 0"] = Estimate.over_seeds(greedy_before)
    return found


def at_each_rate(runs: Mapping[str, Mapping[float, BySeed]]) -> dict[str, Estimate]:
    """pass@1 at the end of each arm and rate."""
    found = {}
    for arm, of_arm in runs.items():
        for lr, of_rate in of_arm.items():
            ends = [accuracy(of_rate[seed]) for seed in sorted(of_rate)]
            found[f"{LABELS[arm]}, {lr:g}"] = Estimate.over_seeds(ends)
    return found


def main(out: Path = FOLDER) -> None:
    """Write room_to_learn.json and room_to_learn.png."""
    lines = read_lines()
    runs: dict[str, dict[float, BySeed]] = {}
    for line in lines:
        runs.setdefault(line["arm"], {}).setdefault(line["lr"], {})[line["seed"]] = line
    tuned = {arm: at_tuned_rate(of_arm) for arm, of_arm in runs.items()}
    shares = endpoints(tuned)
    rows = [[what, value.text(100)] for what, value in shares.items()]
    content = {
        "command": "python -m studies.room_to_learn.study MODEL, then .analysis",
        "seeds": sorted({line["seed"] for line in lines}),
        "runs": len(lines),
        "core_minutes": round(sum(line["seconds"] for line in lines) / 60, 1),
        "start": min(line["start"] for line in lines),
        "end": max(line["end"] for line in lines),
        "commits": sorted({line["commit"] for line in lines}),
        "chosen": {LABELS[arm]: [run["lr"] for run in of.values()] for arm, of in tuned.items()},
        "shares": {what: value._asdict() for what, value in shares.items()},
        "at each rate": {what: value._asdict() for what, value in at_each_rate(runs).items()},
        "tables": {"endpoints": Table(["", "%, or points"], rows)._asdict()},
    }
    file = out / "room_to_learn.json"
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    save_figure(draw([draw_curves(tuned)]), out / "room_to_learn.png")
    print(Table(["", "%, or points"], rows).markdown(), content["chosen"])


def draw_curves(tuned: Mapping[str, BySeed]) -> Panel:
    """pass@1 along the epoch, each arm at its tuned rate."""
    drawn = []
    for arm in ARMS:
        curves = np.array([curve(run) for run in tuned[arm].values()])
        steps = next(iter(tuned[arm].values()))["steps"]
        values = [Estimate.over_seeds(column) for column in curves.T]
        means = [100 * value.mean for value in values]
        widths = [100 * (value.half_width or 0) for value in values]
        drawn.append(Line(steps, means, LABELS[arm], LINE_STYLES[arm], half_width=widths))
    title = "SmolLM2-135M-Instruct, tuned rates"
    return Panel(title, "optimizer steps", "correct (%), 95% interval", drawn)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
