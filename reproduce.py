"""The paper's Figures 1 to 9 and Table 2, each by one command: its runs, a picture, and numbers with intervals.

    python reproduce.py fig1 fig3                # on a laptop; `all` for all of them
    python reproduce.py all --quick              # one seed, few problems: to see that it works
    python reproduce.py fig1 --redraw            # its picture anew, from its numbers
    python reproduce.py all --preset paper --dry-run                         # lists and checks its runs, makes none
    torchrun --nproc-per-node 8 reproduce.py fig1 fig4-math --preset paper   # fig4, fig6, fig8 have a panel on MATH

The figures are in paper/figures.py. Their runs are kept in `--runs`, and figures share them. A finished run is not made
again, so a figure can be given more seeds later. results/README.md says what came out.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from pipeline.records import InputError
from pipeline.runtime.processes import command, process_group, rank, ranks
from pipeline.settings import intended_ranks, parsed

OURS = ("robustness", "variants")
FIGURES = (
    *(f"fig{number}" for number in range(1, 10)),
    "table2",
    *OURS,
)  # STUDIES of paper/figures.py
ON_MATH = ("fig4-math", "fig6-math", "fig8-math")
RECORDS = {
    "map": "ca5c231",
    "share": "82e5ae4",
    "curve": "ca7b604",
}  # finished studies: the commits with their code


@dataclass(frozen=True)
class Options:
    """Every setting of the command; all ours but those of the presets."""

    figures: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")]]
    """fig1 to fig9, table2, robustness, variants, or all; with --preset paper fig4-math, fig6-math, fig8-math"""
    preset: Literal["laptop", "paper"] = "laptop"
    """laptop: the tiny model, two cores; paper: the paper's settings, on 8 GPUs under torchrun"""
    seeds: int = 3
    """how many seeds at least; five or eight where a verdict hangs on an arm, on the laptop; intervals are over them"""
    quick: bool = False  # one seed, few problems and one learning rate: shows that it works, its numbers mean nothing
    workers: int = 2  # runs side by side on the laptop, each on one core
    dry_run: bool = False  # list the runs and check their settings, for 8 processes with --preset paper, and do nothing
    runs: Path = Path(
        "runs/reproduce"
    )  # folder that keeps the runs; remove it after changing code that makes them
    out: Path = Path("results")  # folder for NAME.json and NAME.png
    seed: int = 0  # the first of the seeds
    redraw: bool = False  # make no run; draw NAME.png anew from the numbers of NAME.json


def check(options: Options) -> None:
    """InputError for options that do not go together or are out of range."""
    if options.out.is_file():
        raise InputError(f"--out {options.out}: is a file; choose another folder")
    if not options.figures:
        raise InputError(f"no figure named: choose from {', '.join(FIGURES)}, or all")
    for name in options.figures:
        if name in RECORDS:
            where = f"studies/README.md has its page, and commit {RECORDS[name]} its code"
            raise InputError(f"{name}: is a finished study; {where}")
        if name not in ("all", *FIGURES, *ON_MATH):
            raise InputError(f"{name}: is no figure; choose from {', '.join(FIGURES)}, or all")
        if name in ON_MATH and options.preset != "paper":
            raise InputError(f"{name}: is for --preset paper only; the tiny model cannot do MATH")
    for name in ("seeds", "workers"):
        if getattr(options, name) < 1:
            raise InputError(f"--{name} {getattr(options, name)}: must be at least 1")
    if options.quick and options.preset != "laptop":
        raise InputError(f"--quick: is for the laptop, not for --preset {options.preset}")


def make(options: Options) -> None:
    """Make the figures, and for each a picture, its numbers, and a table of those worth a sentence.

    The runs of all figures are checked first: InputError, with nothing made, where one of them cannot be.
    """
    from paper.experiments import SCALES
    from paper.figures import STUDIES
    from paper.runs import Sweep, print_jobs
    from pipeline.runtime.preflight import check_machine

    every = FIGURES + (ON_MATH if options.preset == "paper" else ())
    names = every if "all" in options.figures else tuple(dict.fromkeys(options.figures))
    scale = "quick" if options.quick else options.preset
    workers = options.workers if scale == "laptop" and "RANK" not in os.environ else 1
    count = 1 if options.quick else options.seeds
    seeds = range(options.seed, options.seed + count)
    sizes = {name: SCALES[f"{scale}-math" if name in ON_MATH else scale] for name in names}
    studies = {n: STUDIES[n.removesuffix("-math")](sizes[n], seeds) for n in names}
    if options.redraw:
        for name, study in studies.items():
            study.redraw(options.out / f"{name}.json")
        return
    jobs = {name: study.planned() for name, study in studies.items()}
    for name in names:
        for job in jobs[name].values():
            job.check(intended_ranks(options.preset) if options.dry_run else ranks(), f"{name}, ")
        if options.dry_run and rank() == 0:
            print_jobs(name, jobs[name], (sizes[name].base, sizes[name].verifier))
    if options.dry_run:
        return
    check_machine(SCALES[scale].base)
    with process_group(), Sweep(options.runs / scale, workers) as sweep:
        for name in names:
            made_by = f"python reproduce.py {name} --preset {options.preset} --seeds {count} --seed {options.seed}"
            made_by += " --quick" * options.quick
            studies[name].make(sweep)
            if rank() == 0:
                studies[name].publish(name, made_by, options.out)


def main() -> None:
    """The command line; one line and a non-zero exit status on bad input."""
    with command("reproduce"):
        options = parsed(Options, prog="reproduce.py", description=__doc__)
        check(options)
        make(options)


if __name__ == "__main__":
    main()
