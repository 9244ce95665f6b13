"""The paper's Figures 1 to 9 and Table 2, each by one command: runs, a picture, and its numbers.

    python -m figures.run fig1 fig3               # on a laptop; `all` for all of them
    python -m figures.run all --quick             # one seed, few problems: to see that it works
    python -m figures.run fig1 --redraw           # only its picture, from the numbers in its file
    python -m figures.run all --preset paper --dry-run    # list and check the runs, make none
    torchrun --nproc-per-node 8 -m figures.run fig1 fig4-math --preset paper

Each figure has a file in this folder: what is run, computed and drawn. Figures share
runs, which are kept in `--runs`. Finished runs are not made again: seeds can be added later.
results/README.md has the results.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from toprlib.command import command
from toprlib.distributed import process_group, rank, ranks
from toprlib.files import read_text, write_file
from toprlib.records import InputError
from toprlib.settings import intended_ranks

if TYPE_CHECKING:  # --help needs no torch
    from figures.common import Figure, Findings
    from figures.rates import Tried
    from figures.runs import Run
    from figures.scales import Scale

OURS = ("robustness", "variants")
FIGURES = (*(f"fig{number}" for number in range(1, 10)), "table2", *OURS)
ON_MATH = ("fig4-math", "fig6-math", "fig8-math")

# Finished studies, and the commits that have their code.
STUDIES = {"map": "ca5c231", "share": "82e5ae4", "curve": "ca7b604"}


@dataclass(frozen=True)
class Options:
    """Every setting of the command. All defaults are ours, except the paper's in the presets."""

    figures: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")]]
    """fig1 to fig9, table2, robustness, variants, or all; with --preset paper also fig4-math,
    fig6-math and fig8-math"""
    preset: Literal["laptop", "paper"] = "laptop"
    """laptop: the tiny model, two cores; paper: the paper's settings, on 8 GPUs under torchrun"""
    seeds: int = 3
    """least number of seeds; on the laptop, runs that decide a claim have 5 to 13"""
    quick: bool = False
    """one seed, few problems, one learning rate: shows that it works; its numbers mean nothing"""
    workers: int = 2
    """number of parallel runs on the laptop, each on one core"""
    dry_run: bool = False
    """list the runs and check their settings, for 8 processes with --preset paper; make none"""
    runs: Path = Path("runs/figures")
    """folder that keeps the runs; remove it after changing code that makes them"""
    out: Path = Path("results")
    """folder for NAME.json and NAME.png"""
    seed: int = 0
    """the first of the seeds"""
    redraw: bool = False
    """make no run; draw NAME.png from the numbers in NAME.json"""


def check(options: Options) -> None:
    """InputError for options that are out of range or do not go together."""
    if options.out.is_file():
        raise InputError("is a file; choose another folder", option="--out", file=options.out)
    if not options.figures:
        raise InputError(f"name a figure: {', '.join(FIGURES)}, or all", option="NAME")
    for name in options.figures:
        check_name(name, options.preset)
    for option, value in (("seeds", options.seeds), ("workers", options.workers)):
        if value < 1:
            raise InputError(f"{value}: must be at least 1", option=f"--{option}")
    if options.quick and options.preset != "laptop":
        raise InputError(f"is not for --preset {options.preset}; leave it out", option="--quick")


def check_name(name: str, preset: str) -> None:
    """InputError for a name that no figure has, or that the preset does not have."""
    if name in STUDIES:
        record = f"studies/README.md has its page, and commit {STUDIES[name]} its code"
        raise InputError(f"is a finished study; {record}", option=name)
    if name not in ("all", *FIGURES, *ON_MATH):
        message = f"is not a figure; choose from {', '.join(FIGURES)}, or all"
        raise InputError(message, option=name)
    if name in ON_MATH and preset != "paper":
        raise InputError("requires --preset paper: the tiny model cannot do MATH", option=name)


def wanted_figures(options: Options) -> dict[str, str]:
    """Name of a figure -> name of its scale."""
    every = FIGURES + (ON_MATH if options.preset == "paper" else ())
    names = every if "all" in options.figures else options.figures
    scale = scale_name(options)
    return {name: f"{scale}-math" if name in ON_MATH else scale for name in names}


def load_figure(name: str) -> "Figure":
    """The functions of a figure; a figure on MATH has the same ones."""
    return import_module(f"figures.{name.removesuffix('-math')}").FIGURE


def make(options: Options) -> None:
    """Make the figures: for each NAME.json, NAME.png, and a table of numbers on the terminal.

    The runs of all figures are checked first: an InputError comes before any run is made.
    """
    from figures.runs import parallel_map
    from figures.scales import SCALES
    from toprlib.preflight import check_gpu

    scales = {name: SCALES[scale] for name, scale in wanted_figures(options).items()}
    for name, scale in scales.items():
        check_runs(name, scale, options)
    if options.dry_run:
        return
    check_gpu(SCALES[scale_name(options)].base)
    is_laptop = scale_name(options) == "laptop" and "RANK" not in os.environ
    workers = options.workers if is_laptop else 1
    with process_group(), parallel_map(workers) as map_jobs:
        for name, scale in scales.items():
            make_figure(name, scale, options, map_jobs)


def scale_name(options: Options) -> str:
    """The name of the scale of figures that are not on MATH, and of the folder of their runs."""
    return "quick" if options.quick else options.preset


def seeds_of(options: Options) -> range:
    """The seeds of the command line."""
    return range(options.seed, options.seed + (1 if options.quick else options.seeds))


def check_runs(name: str, scale: "Scale", options: Options) -> None:
    """InputError for a run that cannot be made; with --dry-run also prints the runs.

    If learning rates have to be chosen, these are only the runs that choose them: all other runs
    depend on the choice.
    """
    from figures.rates import best_rates, rate_arms
    from figures.runs import check_job, job_table

    figure = load_figure(name)
    names = figure.tuned(scale)
    jobs = rate_arms(scale, names, figure.rate_seeds)
    if not jobs:
        jobs = figure.arms(scale, best_rates(scale, names, {}), seeds_of(options))
    processes = intended_ranks(options.preset) if options.dry_run else ranks()
    for job in jobs:
        check_job(job, processes, f"{name}, {job.label}")
    if options.dry_run and rank() == 0:
        job_table(name, jobs, [scale.base, scale.verifier]).print()


def make_figure(name: str, scale: "Scale", options: Options, map_jobs: Any) -> None:
    """Make the runs that are missing, read all of them, and write what they show.

    map_jobs: that of `runs.parallel_map`.
    """
    from figures.common import numbers_table
    from figures.rates import best_rates, rate_arms, tried_rates
    from figures.runs import make_runs

    figure = load_figure(name)
    names = figure.tuned(scale)
    folder = options.runs / scale_name(options)
    rate_runs = make_runs(rate_arms(scale, names, figure.rate_seeds), folder, map_jobs)
    tried = tried_rates(names, rate_runs)
    jobs = figure.arms(scale, best_rates(scale, names, tried), seeds_of(options))
    runs = make_runs(jobs, folder, map_jobs)
    if rank() == 0:
        findings = figure.read(runs, scale)
        content = {
            "figure": name,
            "command": command_line(name, options),
            "seeds": sorted({*seeds_of(options), *(run.settings.seed for run in runs)}),
            **total_cost([*rate_runs, *runs]),
            "learning_rates": with_legend_names(tried),
            "learning_rate_seeds": sorted({run.settings.seed for run in rate_runs}),
            **to_json(findings),
        }
        options.out.mkdir(parents=True, exist_ok=True)
        file = options.out / f"{name}.json"
        write_file(file, json.dumps(content, indent=1, allow_nan=False) + "\n")
        draw_figure(name, options.out)
        numbers_table(findings, name).print()


def command_line(name: str, options: Options) -> str:
    """The command that makes a figure again.

    >>> command_line("fig1", Options(figures=("fig1",), quick=True))
    'python -m figures.run fig1 --preset laptop --seeds 1 --seed 0 --quick'
    """
    count = len(seeds_of(options))
    words = f"python -m figures.run {name} --preset {options.preset} --seeds {count}"
    return f"{words} --seed {options.seed}{' --quick' if options.quick else ''}"


def total_cost(runs: Sequence["Run"]) -> dict[str, Any]:
    """How many different runs there are, what they cost, when and with which code they were made.

    start, end: of the first and of the last of them; None if one of them has no time.
    """
    by_folder = {run.folder: run.cost() for run in runs}
    costs = list(by_folder.values())
    starts = [cost["start"] for cost in costs]
    ends = [cost["end"] for cost in costs]
    return {
        "runs": len(costs),
        "core_minutes": round(sum(cost["seconds"] for cost in costs) / 60, 1),
        "start": None if None in starts else min(starts, default=None),
        "end": None if None in ends else max(ends, default=None),
        "commits": sorted({cost["commit"] for cost in costs}),
        "versions": costs[0]["versions"] if costs else {},
    }


def with_legend_names(tried: "Tried") -> dict[str, dict[str, float]]:
    """Accuracies by learning rate, by the names in legends."""
    from figures.common import TUNED

    named = {}
    for name, accuracies in tried.items():
        named[TUNED[name].name] = {f"{lr:g}": share for lr, share in accuracies.items()}
    return named


def to_json(findings: "Findings") -> dict[str, Any]:
    """What a figure found, for its file."""
    return {
        "shares": {what: value._asdict() for what, value in findings.shares.items()},
        "numbers": {what: value._asdict() for what, value in findings.numbers.items()},
        "tables": {name: table._asdict() for name, table in findings.tables.items()},
        "data": findings.data,
    }


def draw_figure(name: str, folder: Path) -> None:
    """Draw NAME.png from the numbers in NAME.json."""
    from toprlib.plotting import draw, save_figure

    data = json.loads(read_text(folder / f"{name}.json"))["data"]
    save_figure(draw(load_figure(name).panels(data)), folder / f"{name}.png")


def main() -> None:
    """The command line; one line and a non-zero exit status on bad input."""
    with command("figures.run"):
        options = tyro.cli(Options, prog="python -m figures.run", description=__doc__)
        check(options)
        if options.redraw:
            for name in wanted_figures(options):
                draw_figure(name, options.out)
        else:
            make(options)


if __name__ == "__main__":
    main()
