"""The paper's figures and Table 2, each by one command: runs, a picture, and its numbers.

    python -m figures.run fig1 fig3               # `all` for all of them
    python -m figures.run all --quick             # one seed, few problems: to see that it works
    python -m figures.run fig1 --redraw           # only its picture, from the numbers in its file

Each figure has a file in this folder: what is run, computed and drawn. Figures share runs, which
are kept in `--runs`. Finished runs are not made again: seeds can be added later. results/README.md
has the results.
"""

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import tyro
from pydantic.dataclasses import dataclass

from figures.common import interval
from figures.pictures import save
from figures.rates import rank_rates, rate_grid, rate_rows
from figures.runs import cost, make_runs, parallel_map, plan
from figures.scales import RATE_SEEDS, SCALES
from toprlib.files import write_file
from toprlib.records import InputError
from toprlib.settings import AtLeastZero, Count, command

# Figure 2 needs no runs: notebooks/01_taper.ipynb draws it.
FIGURES = ("fig1", *(f"fig{number}" for number in range(3, 10)), "table2", "rates")


@dataclass(frozen=True)
class Options:
    """All defaults are ours."""

    figures: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")]]
    """fig1, fig3 to fig9, table2, rates, or all"""
    seeds: Count = 3
    """least number of seeds; runs that decide a claim have 5 to 13"""
    seed: AtLeastZero = 0
    """the first of the seeds"""
    quick: bool = False
    """one seed, few problems, one learning rate: shows that it works; its numbers mean nothing"""
    workers: Count = 2
    """number of parallel runs, each on one core"""
    runs: Path = Path("runs/figures")
    """folder that keeps the runs; remove it after changing code that makes them"""
    out: Path = Path("results")
    """folder for NAME.json and NAME.png"""
    redraw: bool = False
    """make no run; draw NAME.png from the numbers in NAME.json"""


def figure_names(options: Options) -> tuple[str, ...]:
    """The names of the figures to make. Raises InputError for an unknown one."""
    for name in options.figures:
        if name not in ("all", *FIGURES):
            raise InputError(f"{name}: is no figure; choose from {', '.join(FIGURES)}, or all")
    return FIGURES if "all" in options.figures else options.figures


def make_figure(name: str, options: Options, map_runs: Callable[..., Any]) -> None:
    """Make the runs that are missing, read all of them, and write NAME.json and NAME.png.

    map_runs: that of `runs.parallel_map`.
    """
    figure = import_module(f"figures.{name}")
    size = "quick" if options.quick else "laptop"
    scale = SCALES[size]
    count = 1 if options.quick else options.seeds
    first = options.seed + getattr(figure, "FIRST_SEED", 0)
    seeds = range(first, first + count)
    folder = options.runs / size

    tuning = []
    tried = {}
    rates = {arm: rate_grid(scale, arm) for arm in figure.TUNED}
    if figure.TUNED and len(scale["rates"]) > 1:
        tuning_seeds = getattr(figure, "TUNING_SEEDS", RATE_SEEDS[:1])
        rows = rate_rows(scale, figure.TUNED)
        tuning = make_runs(plan(scale, "", rows, tuning_seeds), folder, map_runs)
        rates, tried = rank_rates(tuning)
    rows = figure.rows(scale, rates)
    runs = make_runs(plan(scale, name, rows, seeds), folder, map_runs)
    found = figure.read(runs, scale)
    for kind in ("shares", "numbers"):
        found[kind] = {what: interval(values) for what, values in found[kind].items()}
        for what, number in found[kind].items():
            print(what, number["mean"], "±", number["half_width"])
    command_line = f"python -m figures.run {name} --seeds {count}"
    content = {
        "figure": name,
        "command": f"{command_line} --seed {options.seed}{' --quick' if options.quick else ''}",
        "seeds": sorted({*seeds, *(run.settings.seed for run in runs)}),
        **cost([*tuning, *runs]),
        "learning_rates": tried,
        "learning_rate_seeds": sorted({run.settings.seed for run in tuning}),
        **found,
    }
    write_file(options.out / f"{name}.json", json.dumps(content, indent=1, allow_nan=False) + "\n")
    draw_figure(name, options.out)


def draw_figure(name: str, folder: Path) -> None:
    """Draw NAME.png from the numbers in NAME.json."""
    data = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))["data"]
    figure = import_module(f"figures.{name}")
    save(figure.draw(data), folder / f"{name}.png")


def main() -> None:
    """The command line."""
    with command("figures.run"):
        options = tyro.cli(Options, prog="python -m figures.run", description=__doc__)
        names = figure_names(options)
        with parallel_map(options.workers) as map_runs:
            for name in names:
                if options.redraw:
                    draw_figure(name, options.out)
                else:
                    make_figure(name, options, map_runs)


if __name__ == "__main__":
    main()
