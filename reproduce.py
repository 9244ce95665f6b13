"""The paper's Figures 1 to 9 and Table 2, each by one command: its runs, a picture, and numbers with intervals.

    python reproduce.py fig1 fig3                # on a laptop; `all` for all of them
    python reproduce.py all --quick              # one seed, few problems: to see that it works
    python reproduce.py fig1 --redraw            # its picture anew, from its numbers
    python reproduce.py all --preset paper --dry-run                         # lists and checks its runs, makes none
    torchrun --nproc-per-node 8 reproduce.py fig1 fig4-math --preset paper   # fig4, fig6, fig8 have a panel on MATH

The figures are in paper/figures.py. Their runs are kept in `--runs`, and figures share them. A finished run is not made
again, so a figure can be given more seeds later. results/README.md says what came out.
"""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from pipeline.records import InputError, read_text, write_file
from pipeline.runtime.processes import command, process_group, rank, ranks
from pipeline.settings import intended_ranks

if TYPE_CHECKING:  # imported when figures are made: --help answers without torch
    from paper.experiments import Lab
    from paper.figures import Figure
    from paper.sweep import OverSeeds

FIGURES = (*(f"fig{number}" for number in range(1, 10)), "table2", "variants")  # functions of paper/figures.py
ON_MATH = ("fig4-math", "fig6-math", "fig8-math")


@dataclass(frozen=True)
class Options:
    """Every setting of the command; all ours but those of the presets."""

    figures: tyro.conf.Positional[tuple[Literal["all", *FIGURES, *ON_MATH, "map"], ...]]
    """which to make, or all that the preset has but the map; fig4-math, fig6-math, fig8-math: --preset paper only"""
    preset: Literal["laptop", "paper"] = "laptop"
    """laptop: the tiny model, two cores; paper: the paper's settings, on 8 GPUs under torchrun"""
    seeds: int = 3
    """how many seeds; intervals are over them"""
    quick: bool = False
    """one seed, few problems and one learning rate: shows that it works, its numbers mean nothing"""
    workers: int = 2
    """runs side by side on the laptop, each on one core"""
    dry_run: bool = False
    """list the runs and check their settings, for 8 processes with --preset paper, and do nothing"""
    runs: Path = Path("runs/reproduce")
    """folder that keeps the runs; remove it after changing code that makes them"""
    out: Path = Path("results")
    """folder for NAME.json and NAME.png"""
    seed: int = 0
    """the first of the seeds"""
    hours: float = math.inf
    """map: begin no run after so many hours, and draw what is there; what is made is kept in --out"""
    redraw: bool = False
    """make no run; draw NAME.png anew from the numbers of NAME.json in --out"""


def check(options: Options) -> None:
    """InputError for options that do not go together or are out of range."""
    if not options.figures:
        raise InputError(f"no figure named: choose from {', '.join(FIGURES)}, or all")
    for name in options.figures:
        if name in ON_MATH and options.preset != "paper":
            raise InputError(f"{name}: is for --preset paper only; the tiny model cannot do MATH")
    if "map" in options.figures and options.redraw:
        raise InputError("map --redraw: the map is drawn from its runs' lines; give --hours 0 in its place")
    if "map" in options.figures and options.preset != "laptop":
        raise InputError(f"map: is for the laptop, not for --preset {options.preset}")
    for name in ("seeds", "workers"):
        if getattr(options, name) < 1:
            raise InputError(f"--{name} {getattr(options, name)}: must be at least 1")
    if options.quick and options.preset != "laptop":
        raise InputError(f"--quick: is for the laptop, not for --preset {options.preset}")


def make(options: Options) -> None:
    """Make the figures, and for each a picture, its numbers, and a table of those worth a sentence.

    The runs of all figures are checked first: InputError, with nothing made, where one of them cannot be.
    """
    from paper import figures
    from paper.experiments import SCALES, Lab
    from paper.map import PLACES, QUICK, negatives
    from paper.plan import check_jobs, planned, print_jobs
    from paper.sweep import Sweep
    from pipeline.runtime.preflight import check_machine

    every = FIGURES + (ON_MATH if options.preset == "paper" else ())
    names = every if "all" in options.figures else tuple(dict.fromkeys(options.figures))
    if options.redraw:
        redraw(names, options.out)
        return
    scale = "quick" if options.quick else options.preset
    workers = options.workers if scale == "laptop" and "RANK" not in os.environ else 1
    count = 1 if options.quick else options.seeds
    seeds = range(options.seed, options.seed + count)
    sizes = {name: SCALES[f"{scale}-math" if name in ON_MATH else scale] for name in names}
    the_map = partial(
        negatives, places=QUICK if options.quick else PLACES, file=options.out / "map_runs.jsonl", hours=options.hours
    )
    functions = {name: the_map if name == "map" else getattr(figures, name.removesuffix("-math")) for name in names}
    jobs = {name: planned(functions[name], sizes[name], seeds) for name in names}
    for name in names:
        check_jobs(name, jobs[name], intended_ranks(options.preset) if options.dry_run else ranks())
        if options.dry_run and rank() == 0:
            print_jobs(name, jobs[name], sizes[name])
    if options.dry_run:
        return
    check_machine(SCALES[scale].base)
    with process_group(), Sweep(options.runs / scale, workers) as sweep:
        for name in names:
            lab = Lab(sweep, sizes[name], seeds)
            figure = functions[name](lab)
            if rank() == 0:
                made_by = f"--preset {options.preset} --seeds {count} --seed {options.seed}"
                quick = " --quick" if options.quick else ""
                publish(name, figure, lab, f"python reproduce.py {name} {made_by}{quick}", options.out)


def redraw(names: Sequence[str], out: Path) -> None:
    """Draw NAME.png of each name from the numbers of NAME.json."""
    from paper import figures
    from pipeline.plots import draw, save_figure

    for name in names:
        content = json.loads(read_text(out / f"{name}.json"))
        panels = getattr(figures, f"{name.removesuffix('-math')}_panels")
        save_figure(draw(panels(content["data"])), out / f"{name}.png")


def publish(name: str, figure: "Figure", lab: "Lab", made_by: str, out: Path) -> None:
    """Write NAME.json and NAME.png into `out`, and print the numbers worth a sentence. made_by: the command."""
    from pipeline.plots import draw, save_figure

    content = record(name, figure, lab, made_by)
    write_file(out / f"{name}.json", json.dumps(_no_nan(content), indent=1) + "\n")
    save_figure(draw(figure.panels), out / f"{name}.png")
    print_summary(name, figure)


def record(name: str, figure: "Figure", lab: "Lab", made_by: str) -> dict[str, Any]:
    """The content of NAME.json: how it was made, the numbers worth a sentence, and every line of the picture."""
    from paper.experiments import METHODS

    made = [run.made for run in lab.used]
    return {
        "figure": name,
        "command": made_by,
        "seeds": list(lab.seeds),
        "runs": len(made),
        "core_minutes": round(sum(m["seconds"] for m in made) / 60, 1),
        "commits": sorted({m["commit"] for m in made}),
        "versions": lab.used[0].results["versions"] if lab.used else {},
        "learning_rates": {
            METHODS[n].name if n in METHODS else n: {f"{lr:g}": share for lr, share in tried.items()}
            for n, tried in lab.tried.items()
        },
        "shares": {what: value.record() for what, value in figure.shares.items()},
        "numbers": {what: value.record() for what, value in figure.numbers.items()},
        "data": figure.data,
    }


def print_summary(name: str, figure: "Figure") -> None:
    """The numbers worth a sentence, as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(name, "95% interval over seeds")
    for what, value in figure.shares.items():
        table.add_row(what, to_text(value, 100) + " %")
    for what, value in figure.numbers.items():
        table.add_row(what, to_text(value))
    Console().print(table)


def to_text(value: "OverSeeds", scale: float = 1) -> str:
    """The mean times `scale` ± half of its 95% interval, as the tables have it.

    >>> from paper.sweep import over_seeds
    >>> to_text(over_seeds([0.49, 0.50, 0.51]), 100)
    '50.0 ± 2.5'
    """
    return f"{scale * value.mean:.1f}" + ("" if value.half_width is None else f" ± {scale * value.half_width:.1f}")


def _no_nan(value: Any) -> Any:
    """JSON has no NaN: null stands for it."""
    match value:
        case dict():
            return {name: _no_nan(item) for name, item in value.items()}
        case list() | tuple():
            return [_no_nan(item) for item in value]
        case float() if math.isnan(value):
            return None
    return value


def main() -> None:
    """The command line; one line and a non-zero exit status on bad input."""
    options = tyro.cli(Options, prog="reproduce.py", description=__doc__)
    with command("reproduce"):
        check(options)
        make(options)


if __name__ == "__main__":
    main()
