"""The endpoints of rate_and_share: from runs.jsonl to rate_and_share.json and rate_and_share.png.

python -m studies.rate_and_share.analysis
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tyro

from figures.runs import commit
from studies.rate_and_share.study import BASES, RATES, SEEDS, family_of, held_out_families
from toprlib.plotting import Line, Panel, Style, draw, save_figure
from toprlib.report import Estimate, Table

FOLDER = Path(__file__).parent
PROJECT = FOLDER.parent.parent
NUM_TEST = 300
SAMPLES = 16
# Number of problems or families -> 97.5 % quantile of Student's t.
QUANTILES = {300: 1.968, 16: 2.131}
NAMES = {"two_thirds": "66 %", "worded": "46 %"}
SFT_NATURAL = ("sft", "positives only")
TOPR_NATURAL = ("topr", "70 %", "80 %", "90 %")
SFT_TEN = ("100 %",)
TOPR_TEN = ("10 %", "20 %", "50 %", "80 %")
# Set -> the arms of TOPR, and those of SFT.
METHODS = {
    "natural": (TOPR_NATURAL, SFT_NATURAL),
    "10 % positive": (TOPR_TEN, SFT_TEN),
}
STYLES = {
    "topr": Style("#0072B2", "-", "o"),
    "70 %": Style("#56B4E9", "--", "s"),
    "80 %": Style("#009E73", "-.", "^"),
    "90 %": Style("#CC79A7", (0, (5, 1)), "v"),
    "sft": Style("#000000", ":", "D"),
    "positives only": Style("#7F7F7F", (0, (1, 1)), "x"),
    "10 %": Style("#0072B2", "-", "o"),
    "20 %": Style("#56B4E9", "--", "s"),
    "50 %": Style("#D55E00", (0, (5, 1)), "v"),
    "100 %": Style("#000000", ":", "D"),
}
LABELS = {
    "topr": "TOPR, no baseline",
    "sft": "SFT, as many steps",
    "positives only": "SFT, fewer steps",
}

# (arm, learning rate) -> (seeds, problems), shares or 0 and 1.
Values = dict[tuple[str, float], np.ndarray]


def read_values(lines: Sequence[dict], base: str, name: str, metric: str) -> Values:
    """A metric of all runs of a base and a set, from the seeds that all of them have."""
    rows: dict[tuple[str, float], dict[int, np.ndarray]] = {}
    scale = SAMPLES if metric == "right" else 1
    for line in lines:
        if (line["base"], line["set"]) == (base, name):
            values = np.array(line[metric]) / scale
            rows.setdefault((line["arm"], line["lr"]), {})[line["seed"]] = values
    seeds = [seed for seed in SEEDS if all(seed in of_arm for of_arm in rows.values())]
    return {arm: np.array([of_arm[seed] for seed in seeds]) for arm, of_arm in rows.items()}


def choose(right: Values, arms: Sequence[str], seed: int, half: int) -> tuple[str, float]:
    """The (arm, rate) with the most right samples in the other seeds, on the other half."""
    means = {}
    for key, values in right.items():
        if key[0] in arms:
            others = np.delete(values, seed, axis=0)
            means[key] = others[:, 1 - half :: 2].mean()
    return max(means, key=means.__getitem__)


def tuned(right: Values, metric: Values, arms: Sequence[str]) -> np.ndarray:
    """A method at its chosen rate and share, (seeds, problems).

    In each seed and half, the choice is by the other seeds, on the other half of the problems.
    """
    seeds = len(next(iter(right.values())))
    result = np.empty((seeds, NUM_TEST))
    for seed in range(seeds):
        for half in (0, 1):
            chosen = choose(right, arms, seed, half)
            result[seed, half::2] = metric[chosen][seed, half::2]
    return result


def choices(right: Values, arms: Sequence[str]) -> dict[str, int]:
    """How often each (arm, rate) is chosen, in two halves of each seed."""
    seeds = len(next(iter(right.values())))
    counts: dict[str, int] = {}
    for seed in range(seeds):
        for half in (0, 1):
            arm, lr = choose(right, arms, seed, half)
            name = f"{arm}, {lr:g}"
            counts[name] = counts.get(name, 0) + 1
    return counts


def over_groups(values: Sequence[float]) -> Estimate:
    """The mean and Student's t interval over problems or families."""
    quantile = QUANTILES[len(values)]
    half_width = quantile * np.std(values, ddof=1) / len(values) ** 0.5
    return Estimate(float(np.mean(values)), float(half_width))


def endpoint(difference: np.ndarray, families: np.ndarray) -> dict[str, Estimate]:
    """A difference of two methods over seeds, problems and families; (seeds, problems)."""
    by_problem = difference.mean(axis=0)
    names = sorted(set(families))
    by_family = [by_problem[families == name].mean() for name in names]
    left_out = []
    for seed, values in enumerate(difference):
        is_left_out = np.isin(families, list(held_out_families(seed)))
        left_out.append(values[is_left_out].mean())
    return {
        "over seeds": Estimate.over_seeds(difference.mean(axis=1)),
        "over problems": over_groups(by_problem),
        "over families": over_groups(by_family),
        "families left out": Estimate.over_seeds(left_out),
    }


def compare_tuned(key: str, name: str, right: Values, majority: Values) -> dict[str, Estimate]:
    """The endpoints of a base and a set, by name."""
    families = families_of_tests()
    topr, sft = METHODS[name]
    pairs = {"TOPR, tuned - SFT, tuned": topr}
    no_baseline = "topr" if name == "natural" else "10 %"
    pairs["TOPR without a baseline, tuned - SFT, tuned"] = (no_baseline,)
    found = {}
    for what, arms in pairs.items():
        for metric, values in (("pass@1", right), ("maj@16", majority)):
            difference = tuned(right, values, arms) - tuned(right, values, sft)
            for over, value in endpoint(difference, families).items():
                found[f"{key}: {what}, {metric}, {over}"] = value
    return found


def measure_each(key: str, name: str, right: Values, majority: Values) -> dict[str, Estimate]:
    """Each (arm, rate) of a base and a set, in pass@1 and maj@16."""
    found = {}
    for (arm, lr), values in right.items():
        label = f"{key}: {arm}, {lr:g}"
        found[label] = Estimate.over_seeds(values.mean(axis=1))
        votes = majority[arm, lr].mean(axis=1)
        found[f"{label}, maj@16"] = Estimate.over_seeds(votes)
    if name == "natural":
        gain = right["70 %", 1e-4] - right["topr", 1e-4]
        at_same = Estimate.over_seeds(gain.mean(axis=1))
        found[f"{key}: 70 % - no baseline, at 1e-4"] = at_same
    return found


def families_of_tests() -> np.ndarray:
    """The family of each test problem."""
    tests = (PROJECT / "tiny" / "test.jsonl").read_text(encoding="utf-8").splitlines()[:NUM_TEST]
    return np.array([family_of(json.loads(line)["question"]) for line in tests])


def endpoint_rows(key: str, found: dict[str, Estimate]) -> list[list[str]]:
    """A row for each difference: pass@1 over seeds, problems and families; maj@16 over seeds."""
    rows: dict[str, list[str]] = {}
    for label, value in found.items():
        what, metric, over = label.removeprefix(f"{key}: ").rsplit(", ", 2)
        base_and_set = key.removeprefix("base of ")
        methods = what.replace(", tuned", "")
        row = rows.setdefault(what, [base_and_set, methods])
        if metric == "pass@1" or over == "over seeds":
            row.append(value.text(100, digits=2))
    return list(rows.values())


def main(out: Path = FOLDER) -> None:
    """Write rate_and_share.json and rate_and_share.png."""
    text = (FOLDER / "runs.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    shares: dict[str, Estimate] = {}
    chosen: dict[str, dict[str, int]] = {}
    rows = []
    panels = []
    for name, (topr, sft) in METHODS.items():
        for base in BASES:
            right = read_values(lines, base, name, "right")
            if not right:
                continue
            majority = read_values(lines, base, name, "majority")
            key = f"base of {NAMES[base]}, {name}"
            chosen[f"{key}: TOPR"] = choices(right, topr)
            chosen[f"{key}: SFT"] = choices(right, sft)
            found = compare_tuned(key, name, right, majority)
            rows += endpoint_rows(key, found)
            shares |= found | measure_each(key, name, right, majority)
            panels.append(panel(key, right))
    head = ["base, set", "tuned methods, in points", "pass@1, over seeds", "over problems"]
    head += ["over families", "families left out, over seeds", "maj@16, over seeds"]
    content = {
        "command": "python -m studies.rate_and_share.study, then .analysis",
        "seeds": sorted({line["seed"] for line in lines}),
        "runs": len(lines),
        "core_minutes": round(sum(line["seconds"] for line in lines) / 60, 1),
        "start": min(line["start"] for line in lines),
        "end": max(line["end"] for line in lines),
        "commits": sorted({line["commit"] for line in lines}),
        "chosen": chosen,
        "shares": {what: value._asdict() for what, value in shares.items()},
        "tables": {"endpoints": Table(head, rows)._asdict()},
    }
    file = out / "rate_and_share.json"
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    save_figure(draw(panels), out / "rate_and_share.png")
    print(Table(head, rows).markdown())
    print(json.dumps(chosen, indent=1), commit())


def panel(title: str, right: Values) -> Panel:
    """Accuracy of each arm over learning rates."""
    drawn = []
    for arm in dict.fromkeys(arm for arm, _ in right):
        estimates = [Estimate.over_seeds(right[arm, lr].mean(axis=1)) for lr in RATES]
        means = [100 * value.mean for value in estimates]
        widths = [100 * (value.half_width or 0) for value in estimates]
        label = LABELS.get(arm, f"share of {arm}")
        drawn.append(Line(RATES, means, label, STYLES[arm], half_width=widths))
    axis = {"xscale": "log"}
    return Panel(title, "learning rate", "correct (%), 95% interval", drawn, axis)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
