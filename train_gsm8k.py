"""Section 4 of the TOPR paper as a script: sample, grade, compose, train, evaluate, on GSM8K or problems like it.

    python train_gsm8k.py                                  # tiny problems, tiny model: 4 minutes on two cores
    python train_gsm8k.py --method reinforce               # the same with naive REINFORCE, which collapses
    python train_gsm8k.py --data GSM8K_DIR --shots 8 ...   # real problems, the paper's 8-shot prompt
    python train_gsm8k.py --samples FILE                   # no sampling: train on completions you already have
    torchrun --nproc-per-node 8 train_gsm8k.py paper       # the paper's run, on eight GPUs

Here is GSM8K: problems, prompt and grading. What any task goes through is in pipeline/run.py, the settings are in
pipeline/settings.py. It writes config.json, results.json, curve.png and a folder for each iteration into `--out`.
"""

import importlib.util
import os
import re
import sys
import time
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import get_args

import transformers
import tyro
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

import pipeline.run
from pipeline.models import is_hub_name
from pipeline.parallel import is_first_process
from pipeline.plan import print_plan
from pipeline.records import InputError, Outcome, Problem, Task, read_rows
from pipeline.settings import PRESETS, Settings, check

# ---- the task: GSM8K's problems, prompt and grading (Section 4.1) ------------------------------------------------

MARKER = "The answer is"
NUMBER = re.compile(r"-?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)")


def parse_answer(text: str) -> Decimal | None:
    """The first number on the line that follows the last "The answer is"; None if there is none.

    `$` and commas are dropped wherever they stand; a colon or a line break right after the marker does not count.

    >>> parse_answer("4 * 300 = 1200. The answer is $1,200.00.")
    Decimal('1200.00')
    """
    _, found, rest = text.rpartition(MARKER)
    line = rest.lstrip(" :\n\t").partition("\n")[0].replace("$", "").replace(",", "")
    number = NUMBER.search(line) if found else None
    return Decimal(number[0]) if number else None


def parse_gold(answer: str) -> Decimal:
    """The number after "####" in GSM8K's answer field; ValueError without one.

    >>> parse_gold("10 * 123 = 1230 eggs.\\n#### 1,230")
    Decimal('1230')
    """
    _, found, rest = answer.rpartition("####")
    number = rest.strip().replace(",", "").replace("$", "")
    if not found or not NUMBER.fullmatch(number):
        raise ValueError("no number after ####")
    return Decimal(number)


def grade(text: str, gold: Decimal) -> Outcome:
    """invalid without "The answer is", else correct if the number that follows equals gold (Section 4.1).

    >>> [grade(text, Decimal(7)) for text in ("The answer is 7.0", "The answer is 8.", "7")]
    ['correct', 'incorrect', 'invalid']
    """
    if MARKER not in text:
        return "invalid"
    return "correct" if parse_answer(text) == gold else "incorrect"


class Gsm8kRow(BaseModel):
    """A line of GSM8K's files."""

    question: str
    answer: str


def load_problems(data: str, split: str) -> list[Problem]:
    """The problems of a split, from DIR/SPLIT.jsonl or from the hub; InputError names the line that has no answer."""
    if Path(data).is_dir():
        source = f"{Path(data) / split}.jsonl"
        found = read_rows(Path(source), Gsm8kRow)
    elif is_hub_name(data):
        source = f"{data} {split}"
        found = _load_from_hub(data, split)
    else:
        raise InputError(f"--data {data}: is neither a folder nor the name of a data set on the hub (owner/name)")
    problems = []
    for line, row in enumerate(found, start=1):
        try:
            problems.append(Problem(f"{split}-{line}", row.question, parse_gold(row.answer)))
        except ValueError as error:
            raise InputError(f"{source}:{line}: field answer: {error}") from None
    return problems


def _load_from_hub(name: str, split: str) -> list[Gsm8kRow]:
    import datasets

    try:
        return [Gsm8kRow(**row) for row in datasets.load_dataset(name, "main", split=split)]
    except (OSError, ValueError) as error:  # ConnectionError is an OSError
        raise InputError(f"--data {name}: cannot be loaded: {str(error).splitlines()[0]}") from error


def load_shots(count: int, file: Path | None) -> list[str]:
    """`count` worked examples as text: from `file`, or the 8-shot prompt of Wang et al. 2022 in the lm-eval package."""
    if file is not None:
        if not file.is_file():
            raise InputError(f"--shots-file {file}: no such file")
        source, shots = str(file), file.read_text(encoding="utf-8").strip().split("\n\n")
    elif count == 0:
        return []
    else:
        import yaml

        package = importlib.util.find_spec("lm_eval")
        if package is None:
            raise InputError("--shots: needs `pip install --no-deps lm-eval==0.4.13`, or a --shots-file")
        source = str(Path(package.submodule_search_locations[0]) / "tasks" / "gsm8k" / "gsm8k-cot.yaml")
        examples = yaml.safe_load(Path(source).read_text(encoding="utf-8"))["fewshot_config"]["samples"]
        shots = [f"Q: {example['question']}\nA: {example['target']}" for example in examples]
    if not 1 <= count <= len(shots):
        raise InputError(f"--shots {count}: {source} has {len(shots)}")
    return shots[:count]


def gsm8k_task(settings: Settings) -> Task:
    """GSM8K's form of a task: `Q: ... A:` after the shots; with shots, the next `Q:` ends a completion."""
    shots = load_shots(settings.shots, settings.shots_file)
    train = load_problems(settings.data, "train") if settings.samples is None else []
    return Task(
        name="gsm8k",
        train=train[: settings.problems],
        test=load_problems(settings.data, "test")[: settings.test_problems],
        prompt=lambda problem: "\n\n".join([*shots, f"Q: {problem.question}\nA:"]),
        parse=parse_answer,
        grade=grade,
        stop=("\nQ:",) if shots else (),
    )


# ---- the command -------------------------------------------------------------------------------------------------


def run(settings: Settings) -> dict:
    """Check the settings, load the problems, and run: returns what results.json holds."""
    check(settings)
    return pipeline.run.run(settings, gsm8k_task(settings))


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


def read_settings(arguments: Sequence[str]) -> Settings:
    """The settings of a command line: the preset that it begins with, if it does, and changes to it."""
    preset = arguments[0] if arguments and arguments[0] in PRESETS else "laptop"
    settings = tyro.cli(Settings, description=__doc__, default=PRESETS[preset], args=list(arguments))
    if settings.preset != preset:
        raise InputError(f"{settings.preset}: a preset comes first, before the settings that change it")
    return settings


def main() -> None:
    """The command line: settings in, a table out; one line and a non-zero exit status on bad input."""
    transformers.utils.logging.disable_progress_bar()  # of single files; the run has its own
    is_first = is_first_process()
    is_first_here = os.environ.get("LOCAL_RANK", "0") == "0"  # another machine may lack what this one has
    started = time.monotonic()
    try:
        settings = read_settings(sys.argv[1:])
        if settings.dry_run:
            check(settings)
            if is_first:
                print_plan(settings, gsm8k_task(settings))
            return
        results = run(settings)
    except (InputError, ArithmeticError) as error:
        sys.exit(f"train_gsm8k: {error}" if is_first_here else 1)
    if is_first:
        print_table(results)
        print(f"{settings.out or settings.default_out()}: {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
