"""Methods that train on the same answers, a tenth of which are right: two minutes.

    python -m examples.compare                                                   # one seed
    python -m examples.compare --rates 1e-5 3e-5 1e-4 3e-4 --seeds 0 1 2 3 4     # half an hour

The base model misunderstands these problems. Each method makes one pass over 768 answers, in
equally many optimizer steps. SFT repeats the right answers to full batches. --out gets a row for
each run, compare.csv, and a picture, compare.png. One seed cannot rank methods that are some points
apart.
"""

import random
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import pydantic
import tyro
from matplotlib.figure import Figure

from toprlib.files import write_file
from toprlib.records import Problem, Task
from toprlib.settings import AtLeastZero, Positive, Settings, command
from train_gsm8k import experiment, grade_all, parse_answer

QUESTION = "Q: Kim owns {} books and sells {} of them. How many books are left?\nA:"
SETTINGS = Settings(
    problems=96, n=8, max_new_tokens=96, test_problems=96, eval_samples=8, k=4, evaluate_after=()
)
METHOD_SETTINGS: dict[str, dict[str, Any]] = {
    "naive REINFORCE": {"method": "reinforce"},
    "wrong answers alone": {"limits": (0.0, 0.0, 1.0, 1.0)},
    "wrong answers alone, tapered": {"limits": (0.0, 0.0, 0.0, 1.0)},
    "SFT, repeated": {"method": "sft", "composition": "positives_only"},
    "TOPR": {},
}
BASE_FILES = ("samples.jsonl", "test-0.jsonl", "test-0-greedy.jsonl")  # of every run of a seed
METRICS = {"T = 1": "pass@1", "T = 0": "greedy", "vote of 4": "maj@4"}


@pydantic.dataclasses.dataclass(frozen=True)
class Options:
    """What a user of the comparison chooses. No default is from the paper."""

    rates: tuple[Positive, ...] = (3e-5, 1e-4)  # learning rates
    seeds: tuple[AtLeastZero, ...] = (0,)
    out: Path = Path("runs/compare")  # folder to write into; finished runs are not made again


def books_task(settings: Settings) -> Task:
    """Differences of two numbers; the first half of them to train on, the second half to test."""
    problems = []
    for a in range(5, 80):
        for b in range(3, a):
            problems.append(Problem(QUESTION.format(a, b), gold=a - b))
    random.Random(0).shuffle(problems)
    half = len(problems) // 2
    train = problems[:half][: settings.problems]
    test = problems[half:][: settings.test_problems]
    return Task("books", train, test, grade_all, parse=parse_answer)


def compare(options: Options, settings: Settings = SETTINGS) -> pd.DataFrame:
    """Train with each method, rate and seed; returns a row for each run and for no training."""
    task = books_task(settings)
    rows = []
    for seed in options.seeds:
        base = None  # the first run's folder
        for (method, changes), lr in product(METHOD_SETTINGS.items(), options.rates):
            out = options.out / f"{method} lr={lr:g} seed={seed}".replace(" ", "_")
            run = replace(settings, lr=lr, seed=seed, out=out, **changes)
            folder = run.iteration_folder(1)
            if base:
                link_base_files(base, folder)
            results = experiment(run, task)
            if not base:
                base = folder
                rows.append(make_row(seed, "none", 0.0, results["before"]))
            rows.append(make_row(seed, method, lr, results["iterations"][0]["after"]))
    return pd.DataFrame(rows)


def link_base_files(base: Path, folder: Path) -> None:
    """Give a run the base model's samples and test answers, which it then does not sample again."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in BASE_FILES:
        if not (folder / name).exists():
            (folder / name).hardlink_to(base / name)


def make_row(seed: int, method: str, lr: float, evaluation: dict[str, Any]) -> dict[str, Any]:
    """The accuracies of a model, in percent."""
    accuracies = {name: 100 * evaluation[key]["mean"] for name, key in METRICS.items()}
    return {"seed": seed, "method": method, "lr": lr, **accuracies}


def to_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Means over seeds as texts, T = 1 / T = 0 / vote: rows are methods, columns are rates."""
    means = rows.groupby(["method", "lr"], sort=False)[list(METRICS)].mean()
    texts = means.map("{:.1f}".format).agg(" / ".join, axis="columns")
    table = texts.unstack("lr", fill_value="").loc[rows["method"].unique()]
    return table.rename(columns="{:g}".format)


def draw(rows: pd.DataFrame) -> Figure:
    """Right answers at T = 1 over learning rates: means as lines, seeds as points."""
    figure = Figure(figsize=(5, 4.5), layout="constrained", dpi=200)
    axes = figure.subplots()
    styles = {  # color, line, marker, width
        "TOPR": ("C0", "-", "o", 3),
        "SFT, repeated": ("C2", ":", "s", 3),
        "naive REINFORCE": ("black", "--", "x", 3),
        "wrong answers alone, tapered": ("C1", "-", ".", 1),
        "wrong answers alone": ("0.6", "--", ".", 1),
    }
    for method, (color, line, marker, width) in styles.items():
        runs = rows[rows["method"] == method]
        means = runs.groupby("lr")["T = 1"].mean()
        axes.plot(means.index, means, line, color=color, lw=width, marker=marker, label=method)
        axes.plot(runs["lr"], runs["T = 1"], marker, color=color, ms=4, alpha=0.5)
    before = rows.loc[rows["method"] == "none", "T = 1"].mean()
    axes.axhline(before, color="0.6", lw=1, ls=":", label="before training")
    axes.set(xlabel="learning rate", xscale="log", ylabel="right answers at T = 1 (%)")
    names = [f"{lr:.0e}".replace("e-0", "e-") for lr in means.index]
    axes.set_xticks(means.index, names)
    axes.minorticks_off()
    figure.legend(ncols=2, loc="outside lower center", frameon=False)
    return figure


def main() -> None:
    """The command line."""
    with command("examples.compare"):
        options = tyro.cli(Options, description=__doc__)
        rows = compare(options)
        write_file(options.out / "compare.csv", rows.to_csv(index=False, float_format="%.6g"))
        draw(rows).savefig(options.out / "compare.png")
        print("\nRight answers in percent, T = 1 / T = 0 / vote of 4, after training at each rate:")
        print(to_table(rows).rename(columns={"0": "before"}).to_string())


if __name__ == "__main__":
    main()
