"""Ours: TOPR against SFT that repeats its right answers, in as many optimizer steps.

    python -m figures.fair a                          # experiment A, 5 core-hours
    python -m figures.fair a --seed 60 --seeds 2      # two further seeds, at the same rates
    python -m figures.fair b                          # experiment B: share or step size

Each seed samples once, and all arms train on these samples. Experiment A chooses each arm's
learning rate on other seeds and on training problems that are not trained on. Experiment B has
fixed rates, each with so many passes that small steps go as far. A finished run is not made again.
"""

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import tyro
from matplotlib.figure import Figure

from figures.common import curve, interval
from figures.pictures import CORRECT, new_figure, plot_rows, save
from figures.rates import held_out_task
from figures.runs import parallel_map
from figures.scales import RATE_SEEDS
from toprlib import dataset, files, sampling
from toprlib.distributed import progress_bar
from toprlib.language_model import load_tokenizer
from toprlib.records import Sample, Task
from toprlib.settings import TINY, AtLeastZero, Count, Settings, command
from train_gsm8k import PRESETS, experiment, gsm8k_task, sample, sampling_engine

SETTINGS = replace(
    PRESETS["laptop"],
    problems=160,
    n=24,
    max_new_tokens=96,
    micro_batch_size=16,
)
SIZES = {"rare": 1_024, "natural": 2_560}  # of training sets; rare: a tenth of them are right
TITLES = {"rare": "a tenth right", "natural": "all answers"}
# Base model -> training set -> the share of the weight on right answers that we recommend.
SHARES = {"worded": {"rare": 0.5, "natural": 0.7}, "two_thirds": {"rare": 0.5, "natural": 0.9}}
RATES = (3e-5, 1e-4, 3e-4)
PASSES = {1e-5: 10, 1e-4: 1}  # of experiment B
TITLES_OF_B = {1e-5: "ten passes at 1e-5", 1e-4: "one pass at 1e-4"}
SHARES_OF_B = (0.2, 0.5, 0.8)
METRICS = ("pass@1", "maj@16", "pass@16", "greedy")
PAIRS = (  # of arms; "TOPR, share" has the share of SHARES
    ("TOPR, share", "SFT, repeated"),
    ("SFT, repeated", "SFT"),
    ("TOPR, repeated", "SFT, repeated"),
    ("TOPR, share", "TOPR"),
)
Row = dict[str, Any]


@dataclass(frozen=True)
class Arm:
    """What trains on a set. form: once, repeated or mixed, of `write_sets`."""

    set: str
    name: str
    form: str
    changes: dict[str, Any]


@dataclass(frozen=True)
class Options:
    """All defaults are ours."""

    experiment: tyro.conf.Positional[Literal["a", "b"]]
    """a: fair baselines; b: share or step size"""
    seeds: Count = 10
    """number of test seeds"""
    seed: AtLeastZero = 0
    """the first of them"""
    workers: Count = 2
    """number of parallel runs, each on one core"""
    runs: Path = Path("runs/fair")
    """folder that keeps the runs"""
    out: Path = Path("results")
    """folder for fair_a.csv or fair_b.csv"""
    quick: bool = False
    """few problems, to see that it works; the numbers mean nothing"""


def arms_of_a(base: str) -> list[Arm]:
    """The arms of experiment A, of which each has its own learning rate."""
    sft = {"method": "sft"}
    arms = []
    for name, share in SHARES[base].items():
        arms += [
            Arm(name, "TOPR", "once", {}),
            Arm(name, f"TOPR, share {share:.0%}", "once", {"effective_proportion": share}),
            Arm(name, "SFT", "once", sft),
            Arm(name, "SFT, repeated", "repeated", sft),
        ]
    return [*arms, Arm("rare", "TOPR, repeated", "mixed", {})]


def arms_of_b() -> list[Arm]:
    """The arms of experiment B; all have all PASSES."""
    arms = [Arm("rare", "SFT, repeated", "repeated", {"method": "sft"})]
    for share in SHARES_OF_B:
        name = f"TOPR, share {share:.0%}"
        arms.append(Arm("rare", name, "once", {"effective_proportion": share}))
    return arms


# ---- the runs of a seed --------------------------------------------------------------------------
def write_sets(samples: Sequence[Sample], size: int, share: float | None, folder: Path) -> None:
    """Write a training set of `size` samples in three forms, each of as many rows.

    once: each sample once. repeated: its right ones, repeated. mixed: one half its right ones,
    repeated; the other half wrong ones, each once.
    """
    rng = random.Random(size)
    composition = "uniform" if share is None else "proportion"
    indices = dataset.choose_samples(composition, samples, size, rng, share)
    chosen = [samples[index] for index in indices]
    rng.shuffle(chosen)
    right = [each for each in chosen if each.reward > 0]
    wrong = [each for each in chosen if each.reward < 0]
    repeated = list(islice(cycle(right), len(chosen)))
    half = len(chosen) // 2
    forms = {"once": chosen, "repeated": repeated, "mixed": repeated[:half] + wrong[:half]}
    for form, rows in forms.items():
        files.write_file(folder / f"{form}.jsonl", files.to_lines(rows))


def sample_base(settings: Settings, task: Task) -> list[Sample]:
    """The samples of all arms of a seed, by the base model."""
    lm = load_tokenizer(settings.model, settings.chat)
    prompts = sampling.make_prompts(task, task.train, lm, settings)
    with sampling_engine(lm, task, prompts, settings, settings.model) as engine:
        return sample(1, engine, prompts, task, settings)


def evaluate_model(settings: Settings, task: Task, out: Path) -> dict[str, float]:
    """METRICS of a model."""
    settings = replace(settings, iterations=0, samples=None)
    sampled = experiment(replace(settings, out=out / "sampled"), task)["before"]
    greedy = replace(settings, top_k=1, eval_samples=2, k=1, out=out / "greedy")
    found = {"greedy": experiment(greedy, task)["before"]["pass@1"]["mean"]}
    for metric in METRICS[:-1]:
        found[metric] = sampled[metric.replace("16", str(settings.k))]["mean"]
    return found


def make_run(settings: Settings, task: Task) -> dict[str, float]:
    """METRICS of the model that training leaves."""
    experiment(replace(settings, test_problems=0), replace(task, test=[]))
    model = settings.out / "iteration-1" / "model"
    found = evaluate_model(replace(settings, model=str(model)), task, settings.out)
    files.remove(model)
    return found


def make_runs(
    base_and_seed: tuple[str, int], options: Options, rates: dict[str, Sequence[float]]
) -> list[Row]:
    """A row for each run of a base and seed, and one for the base itself; rates: of arms."""
    base, seed = base_and_seed
    folder = options.runs / ("quick" if options.quick else "full") / base / str(seed)
    settings = replace(SETTINGS, model=str(TINY / base), seed=seed, out=folder)
    if options.quick:
        settings = replace(settings, problems=16, test_problems=8, eval_samples=4, k=4)
    task = (held_out_task if seed in RATE_SEEDS else gsm8k_task)(settings)
    samples = sample_base(settings, task)
    for name, size in SIZES.items():
        write_sets(samples, size, 0.1 if name == "rare" else None, folder / name)
    shared = {"base": base, "seed": seed}
    found = keep(folder / "found.json", partial(evaluate_model, settings, task, folder))
    rows = [{**shared, "set": "", "arm": "base", "rate": 0.0, **found}]
    is_a = options.experiment == "a"
    for arm in arms_of_a(base) if is_a else arms_of_b():
        for rate in rates.get(f"{base}, {arm.set}, {arm.name}", RATES if is_a else PASSES):
            epochs = 1 if is_a else PASSES[rate]
            changes = {**arm.changes, "lr": rate, "epochs": epochs}
            out = folder / arm.set / f"{arm.name} {rate:g} {epochs}".replace(" ", "_")
            data = str(folder / arm.set / f"{arm.form}.jsonl")
            of_arm = replace(settings, samples=data, out=out, **changes)
            found = keep(out / "found.json", partial(make_run, of_arm, task))
            rows.append({**shared, "set": arm.set, "arm": arm.name, "rate": rate, **found})
    return rows


def keep(file: Path, make: Callable[[], dict[str, float]]) -> dict[str, float]:
    """What a file has, or what `make` returns and the file has from now on."""
    if not file.exists():
        files.write_file(file, json.dumps(make()))
    return json.loads(file.read_text())


# ---- the table -----------------------------------------------------------------------------------
def choose_rates(rows: Sequence[Row]) -> dict[str, list[float]]:
    """The rate of each arm with the highest mean pass@1 of the rows."""
    table = pd.DataFrame(rows).query("set != ''")
    means = table.groupby(["base", "set", "arm", "rate"])["pass@1"].mean()
    best = means.groupby(level=[0, 1, 2]).idxmax()
    return {", ".join(arm): [rate] for *arm, rate in best}


def difference_rows(table: pd.DataFrame) -> list[Row]:
    """PAIRS in points: the mean over seeds, and half the width of its 95 % interval.

    >>> columns = {"base": "worded", "set": "rare", "arm": ["TOPR, share 50%", "TOPR"] * 2}
    >>> columns |= {"seed": [0, 0, 1, 1], **dict.fromkeys(METRICS, [0.5, 0.4, 0.6, 0.5])}
    >>> difference_rows(pd.DataFrame(columns))[0]["pass@1"]
    '10.0 ± 0.0'
    """
    table = join_shares(table)
    rows = []
    for name, (first, second) in product(SIZES, PAIRS):
        for base in SHARES:
            of_base = table[(table["set"] == name) & (table["base"] == base)]
            row = {"set": name, "base": base, "difference": f"{first} - {second}"}
            if {first, second} <= set(of_base["arm"]):
                leads = find_leads(of_base, first, second, METRICS)
                for metric in METRICS:
                    row[metric] = "{mean:.1f} ± {half_width:.1f}".format(**interval(leads[metric]))
                rows.append(row)
    return rows


def join_shares(table: pd.DataFrame) -> pd.DataFrame:
    """The table, in which TOPR at the base's share of SHARES is the arm "TOPR, share"."""
    return table.assign(arm=table["arm"].str.replace(" [0-9]+%", "", regex=True))


def find_leads(
    table: pd.DataFrame, first: str, second: str, metrics: Iterable[str]
) -> pd.DataFrame:
    """Metrics of an arm minus those of another, in points: a row for each seed."""
    values = table.pivot(index="seed", columns="arm", values=list(metrics))
    leads = {metric: values[metric][first] - values[metric][second] for metric in metrics}
    return 100 * pd.DataFrame(leads)


def base_accuracy(table: pd.DataFrame, base: str) -> float:
    """Mean pass@1 of a base model, in percent."""
    return 100 * table[(table["base"] == base) & (table["arm"] == "base")]["pass@1"].mean()


def draw_arms(table: pd.DataFrame, column: str, titles: Mapping[Any, str]) -> Figure:
    """pass@1 of each arm, in a panel for each base and each value of a column that has a title."""
    figure, panels = new_figure(len(titles) * len(SHARES))
    for above, below in zip(panels, panels[len(SHARES) :], strict=False):  # of one base
        below.sharex(above)
    for axes, (value, base) in zip(panels, product(titles, SHARES), strict=True):
        before = base_accuracy(table, base)
        rows = table[(table["base"] == base) & (table[column] == value)]
        order = list(dict.fromkeys(rows["arm"]))
        values = rows.pivot(index="seed", columns="arm", values="pass@1")[order]
        heights = range(len(order))[::-1]
        plot_rows(axes, heights, curve(values), ("mean and seeds", "#0072B2", "-", "o"))
        axes.axvline(before, color="#6E6E6E", ls="--", label="base model")
        title = f"{titles[value]}, base of {before:.0f} %"
        axes.set(title=title, xlabel=CORRECT, yticks=heights, yticklabels=order)
    return figure


def main() -> None:
    """The command line."""
    with command("figures.fair"):
        options = tyro.cli(Options, prog="python -m figures.fair", description=__doc__)
        test_seeds = range(options.seed, options.seed + options.seeds)
        is_a = options.experiment == "a"
        parts = [RATE_SEEDS, test_seeds] if is_a else [test_seeds]
        rates = {}
        rows = []
        with parallel_map(options.workers) as map_runs:
            for seeds in parts:
                jobs = list(product(SHARES, seeds))
                made = map_runs(partial(make_runs, options=options, rates=rates), jobs)
                for of_job in progress_bar(made, "bases and seeds", "seed", len(jobs)):
                    rows += of_job
                if seeds == RATE_SEEDS:
                    rates = choose_rates(rows)
        table = pd.DataFrame(rows)
        name = f"fair_{options.experiment}"
        csv = table.to_csv(index=False, float_format="%.6g")
        files.write_file(options.out / f"{name}.csv", csv)
        tested = table[table["seed"].isin(test_seeds)]
        panels = ("set", TITLES) if is_a else ("rate", TITLES_OF_B)
        save(draw_arms(tested, *panels), options.out / f"{name}.png")
        if is_a:
            print(pd.DataFrame(difference_rows(tested)).to_string(index=False))


if __name__ == "__main__":
    main()
