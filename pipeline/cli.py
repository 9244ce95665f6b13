"""What the commands have in common: settings from a command line, a table of results, and errors of one line."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar, get_args

import transformers
import tyro
from rich.console import Console
from rich.table import Table

import pipeline.stages
from pipeline.dry_run import print_plan
from pipeline.records import InputError, Outcome, Task
from pipeline.runtime.processes import is_first_process
from pipeline.runtime.signals import interrupt, requests_go_to
from pipeline.settings import PRESETS, Preset, Settings, check

AnySettings = TypeVar("AnySettings", bound=Settings)


def read_settings(
    arguments: Sequence[str],
    presets: Mapping[str, AnySettings] = PRESETS,
    description: str | None = None,
    runs: str = "runs/",
) -> AnySettings:
    """The settings of a command line: the preset that it begins with, if it does, and changes to it.

    runs: what the name of the folder begins with where no --out is given; there is always one in what is returned.

    >>> read_settings(["--seed", "1"]).out.as_posix()
    'runs/laptop_seed=1'
    """
    preset = arguments[0] if arguments and arguments[0] in get_args(Preset) else "laptop"
    if preset not in presets:
        raise InputError(f"{preset}: is not among this script's presets, {', '.join(presets)}")
    usual = presets[preset]
    settings = tyro.cli(type(usual), description=description, default=usual, args=list(arguments))
    if settings.preset != preset:
        raise InputError(f"{settings.preset}: a preset comes first, before the settings that change it")
    return replace(settings, out=settings.out or settings.default_out(usual, runs))


@contextmanager
def one_line_errors(name: str) -> Iterator[None]:
    """Inside it, what the user can mend ends the program with one line that begins with its name; so does Ctrl-C.

    With --debug among the arguments it ends with a traceback.
    """
    transformers.utils.logging.disable_progress_bar()  # of single files; the run has its own
    is_first_here = os.environ.get("LOCAL_RANK", "0") == "0"  # another machine may lack what this one has
    try:
        with requests_go_to(interrupt):
            yield
    except (InputError, ArithmeticError, KeyboardInterrupt) as error:
        if "--debug" in sys.argv:
            raise
        stopped = "stopped; what is done is kept, and the same command goes on"
        sys.exit(f"{name}: {str(error) or stopped}" if is_first_here else 1)
    except OSError as error:  # the disk: full, or not to be written to
        if "--debug" in sys.argv:
            raise
        sys.exit(f"{name}: {error}; what is done is kept, and the same command goes on")


def main(
    name: str,
    description: str,
    task: Callable[[Settings], Task],
    presets: Mapping[str, Settings] = PRESETS,
    runs: str = "runs/",
) -> None:
    """The command line of a task: settings in, a table out; one line and a non-zero exit status on bad input."""
    started = time.monotonic()
    with one_line_errors(name):
        settings = read_settings(sys.argv[1:], presets, description, runs)
        check(settings)
        if not settings.dry_run:
            results = pipeline.stages.run(settings, task(settings))
            if is_first_process():
                print_table(results)
                print(f"{settings.out}: {time.monotonic() - started:.0f} s")
        elif is_first_process():
            print_plan(settings, task(settings))


def print_table(results: dict) -> None:
    """Before and after each iteration: the outcomes, and pass@k and maj@k with +- 2 standard errors, in percent."""
    after = [entry["after"] for entry in results["iterations"]]
    names = ["after"] if len(after) == 1 else [f"after iteration {i}" for i in range(1, len(after) + 1)]
    table = Table("", "before", *names)
    for name, value in results["before"].items():
        entries = [entry[name] for entry in (results["before"], *after)]
        if isinstance(value, dict):
            table.add_row(name, *(f"{100 * e['mean']:.1f} ± {200 * e['se']:.1f} %" for e in entries))
        elif name in get_args(Outcome):
            table.add_row(name, *(f"{100 * e:.1f} %" for e in entries))
    Console().print(table)
