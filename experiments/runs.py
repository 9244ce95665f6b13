"""What experiments run, how runs are made, and what they measure, as one table.

A run trains a base model by one method, and evaluates it. Runs of a stage and seed share the base
model's samples and its evaluation. A finished run is not made again; an interrupted one resumes.
"""

import io
import json
import re
import sys
import zlib
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import pandas as pd
import pydantic
import torch
import tyro
from annotated_types import MinLen

from examples import compare
from toprlib import files
from toprlib.distributed import progress_bar
from toprlib.language_model import load_tokenizer
from toprlib.records import InputError, Sample, Task
from toprlib.sampling import make_prompts
from toprlib.settings import TINY, AtLeastZero, Count, Positive, Settings
from train_gsm8k import PRESETS, experiment, gsm8k_task, sample, sampling_engine


# ---- what can be run -----------------------------------------------------------------------------
class Stage(NamedTuple):
    """A base model with its problems. settings.out: the folder of its runs, named like it."""

    make_task: Callable[[Settings], Task]
    settings: Settings


SMALL = Settings(problems=160, n=8, max_new_tokens=96)
STAGES = {
    "base": Stage(gsm8k_task, SMALL),
    "weaker": Stage(gsm8k_task, replace(SMALL, model=str(TINY / "weaker"))),
    "books": Stage(compare.books_task, compare.SETTINGS),
}
QUICK = {"problems": 8, "n": 8, "test_problems": 8, "eval_samples": 4, "k": 4}
CONTROL = "TOPR, 50 %, wrong answers moved"  # each to another prompt
METHOD_SETTINGS: dict[str, dict[str, Any]] = {  # name -> changes to the settings of a stage
    "none": {"iterations": 0},
    "SFT, once": {"method": "sft"},  # wrong answers stay in the batches, with weight 0
    "TOPR, 50 %": {"effective_proportion": 0.5},
    CONTROL: {"effective_proportion": 0.5},
    **compare.METHOD_SETTINGS,
    "PPO": {"method": "ppo"},
    "DPO": {"method": "dpo"},
    "TIS": {"method": "tis"},
    "W-REINFORCE": {"method": "reinforce", "baseline": 0.818},  # rewards of 0.182 and -1.818
    "group-mean REINFORCE": {"method": "reinforce", "baseline_from": "group"},
    "AsymRE": {"method": "reinforce", "baseline_from": "mean", "baseline": -0.1},
    "CISPO's cap on sequences": {"limits": (0.0, 1.28, 0.0, 1.28), "baseline_from": "group"},
    "plain IS": {"method": "off_policy"},
    "TOPR, Adafactor": {"optimizer": "adafactor"},
    "plain IS, Adafactor": {"method": "off_policy", "optimizer": "adafactor"},
}
# Finished runs are of no use after a change of these.
CODE = ("topr.py", "train_gsm8k.py", "toprlib/*.py", "examples/*.py", "experiments/*.py")
DATA = ("tiny/*.jsonl", "tiny/*/*")
DIVERGED = "diverged.txt"  # in place of results.json: the loss was not finite
METRICS = ("pass@1", "greedy", "vote", "pass@k")  # greedy: at T = 0; vote, pass@k: of k answers


@dataclass(frozen=True)
class Run:
    """One method on one stage with one seed."""

    stage: Stage
    method: str  # of METHOD_SETTINGS
    lr: float
    passes: float  # over all samples, also for a method that trains on the right ones only
    seed: int
    part: Literal["held-out", "test"] = "test"  # the problems to evaluate on
    temperature: float = 1.0
    evaluate_after: tuple[float, ...] = ()  # passes, besides before training and after the last
    changes: dict[str, Any] = field(default_factory=dict)  # to settings, besides the method's

    @property
    def folder(self) -> Path:
        """Where the run is. Runs that differ in anything have different folders."""
        settings = self.stage.settings.to_config() | METHOD_SETTINGS[self.method] | self.changes
        checksum = zlib.crc32(f"{settings} {self.evaluate_after}".encode())
        cell = f"lr={self.lr:g} passes={self.passes:g} T={self.temperature:g}"
        name = re.sub("[^A-Za-z0-9.=-]+", "_", f"{self.method} {cell} {checksum:08x}")
        return self.stage.settings.out / f"{self.part}-{self.seed}" / name

    @property
    def base(self) -> "Run":
        """The run that evaluates the base model; make_base adds its samples."""
        n = {name: value for name, value in self.changes.items() if name == "n"}
        return Run(self.stage, "none", self.stage.settings.lr, 0, self.seed, self.part, changes=n)


# ---- the command line ----------------------------------------------------------------------------
@pydantic.dataclasses.dataclass(frozen=True)
class Options:
    """What a user of either experiment chooses. No default is from the paper."""

    preset: Literal[*PRESETS] = "laptop"  # of train_gsm8k.py; laptop has the tiny models
    quick: bool = False  # few problems and seeds, into RUNS/quick: to see that it works
    passes: tuple[Positive, ...] = (0.5, 1, 2, 3, 5, 10)  # to choose from (paper: 1)
    seeds: Annotated[tuple[AtLeastZero, ...], MinLen(2)] = (0, 1, 2, 3, 4, 5)  # of the test
    workers: Count = 2  # processes that make runs, with one thread each; take 1 on a GPU
    runs: Path = Path("runs/experiments")  # folder that keeps the runs
    out: Path = Path("results")  # folder for the table and the picture


def read_options(kind: type[Options], module: str, description: str) -> Options:
    """The options of a command. Raises InputError if other code has made the runs of its folder."""
    options = tyro.cli(kind, prog=f"python -m {module}", description=description)
    if any(passes > 1 and passes != int(passes) for passes in options.passes):
        raise InputError("--passes: use numbers below 1 and whole ones")
    if options.quick:
        folder = options.runs / "quick"
        options = replace(options, passes=(1, 2), seeds=(0, 1), runs=folder, out=folder)
    checksum = 0
    for pattern in CODE + DATA:
        for path in sorted(TINY.parent.glob(pattern)):
            checksum = zlib.crc32(path.read_bytes(), checksum)
    file = options.runs / "code.txt"
    if not file.exists():
        files.write_file(file, str(checksum))
    if file.read_text() != str(checksum):
        raise InputError(f"--runs {options.runs}: has runs of other code; choose another")
    return options


def make_stages(names: Sequence[str], options: Options) -> dict[str, Stage]:
    """The named stages of the tiny models, or the one of another preset."""
    chosen = {name: STAGES[name] for name in names}
    if options.preset != "laptop":
        settings = replace(PRESETS[options.preset], iterations=1)
        chosen = {options.preset: Stage(gsm8k_task, settings)}
    stages = {}
    for name, (make_task, settings) in chosen.items():
        changes = QUICK if options.quick else {}
        stages[name] = Stage(make_task, replace(settings, **changes, out=options.runs / name))
    return stages


# ---- making runs ---------------------------------------------------------------------------------
def make_runs(runs: Sequence[Run], workers: int) -> pd.DataFrame:
    """Make the runs that are missing; returns the rows of all, as `read_run` has them."""
    missing = {}
    for run in runs:
        ends = [run.folder / name for name in ("results.json", DIVERGED)]
        if not any(end.exists() for end in ends):
            missing[run.folder] = run
    bases = {}
    for run in missing.values():
        if not (run.base.folder / "iteration-1" / "samples.jsonl").exists():
            bases[run.base.folder] = run.base
    map_parallel(make_base, bases.values(), workers)
    trained = [run for folder, run in missing.items() if folder not in bases]
    map_parallel(make_run, trained, workers)
    rows = []
    for run in runs:
        rows += read_run(run)
    return pd.DataFrame(rows)


def map_parallel(work: Callable[[Any], Any], items: Collection[Any], workers: int) -> None:
    """Call `work` on each item: in this process, or in several with one thread each."""
    pools = ProcessPoolExecutor(workers, get_context("spawn"), start_worker)
    with pools if workers > 1 else nullcontext() as pool:
        made = pool.map(work, items) if pool else map(work, items)
        for _ in progress_bar(made, work.__name__, "run", len(items)):
            pass


def start_worker() -> None:
    """Use one thread, and print nothing."""
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = io.StringIO()


def make_base(run: Run) -> None:
    """Evaluate a base model, and sample from it."""
    settings = make_settings(run)
    task = make_task(run)
    experiment(settings, task)
    lm = load_tokenizer(settings.model, settings.chat)
    prompts = make_prompts(task, task.train, lm, settings)
    with sampling_engine(lm, task, prompts, settings, settings.model) as engine:
        sample(1, engine, prompts, task, settings)


def make_run(run: Run) -> None:
    """Train and evaluate, with the base's samples and evaluation, which `experiment` then skips."""
    settings = make_settings(run)
    if run.method != "none":
        base = run.base.folder / "iteration-1"
        samples = files.read_records(base / "samples.jsonl", Sample)
        one_pass = min(settings.examples or len(samples), len(samples))
        part = min(run.passes, 1)  # of a pass
        settings = replace(settings, examples=round(part * one_pass))
        folder = settings.iteration_folder(1)
        folder.mkdir(parents=True, exist_ok=True)
        if run.method == CONTROL:
            moved = move_wrong_answers(samples)
            files.write_file(folder / "samples.jsonl", files.to_lines(moved))
        compare.link_base_files(base, folder)
    try:
        experiment(settings, make_task(run))
    except FloatingPointError as error:
        files.write_file(run.folder / DIVERGED, str(error))
    files.remove(*run.folder.glob("iteration-*/model"))  # large, and evaluated


def make_task(run: Run) -> Task:
    """The problems of a run. No run trains on the held-out ones: the last training problems."""
    make_stage_task, settings = run.stage
    held_out = min(100, settings.test_problems)
    task = make_stage_task(replace(settings, problems=settings.problems + held_out))
    test = task.train[-held_out:] if run.part == "held-out" else task.test
    return replace(task, train=task.train[:-held_out], test=test)


def make_settings(run: Run) -> Settings:
    """The settings of a run. DPO's pairs make up to twice as many steps as other methods."""
    settings = run.stage.settings
    changes = {**METHOD_SETTINGS[run.method], **run.changes}
    changes |= {"lr": run.lr, "temperature": run.temperature, "seed": run.seed}
    changes |= {"epochs": max(int(run.passes), 1), "evaluate_after": run.evaluate_after}
    return replace(settings, **changes, out=run.folder)


def move_wrong_answers(samples: Sequence[Sample]) -> list[Sample]:
    """The samples, with each wrong one under the next problem's prompt.

    >>> samples = [Sample(prompt=prompt, completion="5", reward=-1.0) for prompt in "abc"]
    >>> [sample.prompt for sample in move_wrong_answers(samples)]
    ['b', 'c', 'a']
    """
    problems = list(dict.fromkeys((one.prompt, one.problem_id) for one in samples))
    following = dict(zip(problems, problems[1:] + problems[:1], strict=True))
    moved = []
    for one in samples:
        if one.reward < 0:
            prompt, problem_id = following[one.prompt, one.problem_id]
            one = one.model_copy(update={"prompt": prompt, "problem_id": problem_id})
        moved.append(one)
    return moved


# ---- what was measured ---------------------------------------------------------------------------
def read_run(run: Run) -> list[dict[str, Any]]:
    """A row for each evaluation of a finished run; none if its loss was not finite.

    iteration: of sampling and training; 0: before the first. passes: of this iteration. The vote
    and pass@k need k answers. The last row has the realised proportion.
    """
    if (run.folder / DIVERGED).exists():
        return []
    results = json.loads((run.folder / "results.json").read_text())
    points = [(0, 0.0, results["before"])]
    for iteration, entry in enumerate(results["iterations"], start=1):
        after = (*run.evaluate_after, run.passes)
        for passes, evaluation in zip(after, entry["curve"][1:], strict=True):
            points.append((iteration, passes, evaluation))
    labels = {"stage": run.stage.settings.out.name, "part": run.part, "method": run.method}
    labels |= {"lr": run.lr, "temperature": run.temperature, "seed": run.seed}
    k = run.stage.settings.k
    keys = dict(zip(METRICS, ("pass@1", "greedy", f"maj@{k}", f"pass@{k}"), strict=True))
    rows = []
    for iteration, passes, evaluation in points:
        row = {**labels, "iteration": iteration, "passes": passes, "invalid": evaluation["invalid"]}
        row |= {name: evaluation[key]["mean"] for name, key in keys.items() if key in evaluation}
        rows.append(row)
    if results["iterations"]:
        training = results["iterations"][-1]["training"]
        rows[-1]["realised proportion"] = training["realised_proportion"]
    return rows
