"""What experiments run, how the runs are made, and what they measure, as one table.

A run trains a base model by one method, and evaluates it. Runs of a stage and seed share the base
model's samples and its evaluation. A finished run is not made again; an interrupted one resumes.
"""

import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import pydantic
import torch
import tyro

from examples import compare
from toprlib import files
from toprlib.distributed import progress_bar
from toprlib.language_model import load_tokenizer
from toprlib.records import InputError, Sample, Task
from toprlib.sampling import make_prompts
from toprlib.settings import TINY, AtLeastTwo, AtLeastZero, Count, Positive, Settings
from train_gsm8k import PRESETS, experiment, gsm8k_task, sample, sampling_engine

# ---- what can be run -----------------------------------------------------------------------------
SMALL = Settings(problems=160, max_new_tokens=96, micro_batch_size=16)
STAGES = {  # name -> task, and settings of the base model
    "base": (gsm8k_task, SMALL),
    "weaker": (gsm8k_task, replace(SMALL, model=str(TINY / "worded"))),
    "books": (compare.books_task, replace(compare.PRESETS["compare"], lr=SMALL.lr)),
}
HELD_OUT = 100  # training problems, which nothing trains on: learning rates are chosen by them
# What decides the numbers of a run besides its settings.
PRODUCT = ("topr.py", "train_gsm8k.py", "toprlib/*.py", "examples/*.py", "tiny/*/*.safetensors")
FEW = {"problems": 16, "n": 8, "test_problems": 10, "eval_samples": 4, "k": 4}
CONTROL = "TOPR, 50 %, wrong answers moved"  # each to another prompt
METHODS: dict[str, dict[str, Any]] = {  # name -> its changes to the settings of a stage
    "none": {"iterations": 0},
    "SFT, once": {"method": "sft"},  # wrong answers stay in the batches, with weight 0
    "SFT, repeated": {"method": "sft", "composition": "positives_only"},
    "TOPR": {},
    "TOPR, 50 %": {"effective_proportion": 0.5},
    CONTROL: {"effective_proportion": 0.5},
    "wrong answers alone, tapered": {"limits": (0.0, 0.0, 0.0, 1.0)},
    "wrong answers alone": {"limits": (0.0, 0.0, 1.0, 1.0)},
    "naive REINFORCE": {"method": "reinforce"},
    "PPO": {"method": "ppo"},
    "DPO": {"method": "dpo"},
    "TIS": {"method": "tis"},
    "plain IS": {"method": "off_policy"},
    "TOPR, Adafactor": {"optimizer": "adafactor"},
    "plain IS, Adafactor": {"method": "off_policy", "optimizer": "adafactor"},
}


METRICS = ("pass@1", "greedy", "vote", "pass@k")  # greedy: T = 0; vote and pass@k: of k answers


@pydantic.dataclasses.dataclass(frozen=True)
class Options:
    """What both experiments let a user choose. No default is from the paper."""

    preset: Literal[*PRESETS] = "laptop"
    """settings of train_gsm8k.py; laptop has the tiny models"""
    quick: bool = False
    """few problems, one learning rate, two seeds: to see that it works; its numbers mean nothing"""
    passes: tuple[Positive, ...] = (0.5, 1, 2, 3, 5, 10)
    """passes over the samples to choose from (paper: 1)"""
    seeds: AtLeastTwo = 6
    """number of test seeds"""
    seed: AtLeastZero = 0
    """the first test seed"""
    workers: Count = 2
    """processes that make runs, with one thread each; take 1 on a GPU"""
    runs: Path = Path("runs/experiments")
    """folder that keeps the runs"""
    out: Path = Path("results")
    """folder for the table and the picture"""

    @property
    def test_seeds(self) -> range:
        """The seeds of runs that are compared."""
        return range(self.seed, self.seed + self.seeds)


@dataclass(frozen=True)
class Stage:
    """A base model and its problems. folder: of its runs."""

    name: str
    make_task: Callable[[Settings], Task]
    settings: Settings
    held_out: int
    folder: Path


@dataclass(frozen=True)
class Run:
    """One method on one stage with one seed."""

    stage: Stage
    method: str  # of METHODS
    lr: float
    passes: float  # over all samples, also for a method that trains on the right ones only
    seed: int
    part: Literal["held-out", "test"] = "test"  # the problems to evaluate on
    temperature: float = 1.0
    evaluate_after: tuple[float, ...] = ()  # passes; always before the first and after the last one
    changes: Mapping[str, Any] = field(default_factory=dict)  # to settings, besides the method's

    @property
    def name(self) -> str:
        """What tells the run from others of its stage, part and seed."""
        cell = f"lr={self.lr:g} passes={self.passes:g} T={self.temperature:g}"
        changes = [f"{name}={value}" for name, value in self.changes.items()]
        return " ".join([self.method, cell, *changes])

    @property
    def folder(self) -> Path:
        """Where the run is, or will be."""
        name = re.sub("[^A-Za-z0-9.=-]+", "_", self.name)
        return self.stage.folder / f"{self.part}-{self.seed}" / name

    @property
    def base(self) -> "Run":
        """The run that evaluates the model before training, and has its samples."""
        changes = {name: value for name, value in self.changes.items() if name == "n"}
        lr = self.stage.settings.lr  # without meaning here
        return Run(self.stage, "none", lr, 0, self.seed, self.part, changes=changes)


def read_options(kind: type[Options], module: str, description: str) -> Options:
    """The options of a command. Raises InputError if the folder of runs is of other code."""
    options = tyro.cli(kind, prog=f"python -m {module}", description=description)
    if options.quick:
        options = replace(options, passes=(1, 2), seeds=2, runs=options.runs / "quick")
    check_code(options.runs)
    return options


def check_code(folder: Path) -> None:
    """Write a checksum of the code and the tiny models into a folder of runs.

    Raises InputError if the folder has another one: other code has made its runs.
    """
    checksum = 0
    for pattern in PRODUCT:
        for path in sorted(TINY.parent.glob(pattern)):
            checksum = zlib.crc32(path.read_bytes(), checksum)
    file = folder / "code.txt"
    if not file.exists():
        files.write_file(file, str(checksum))
    if file.read_text() != str(checksum):
        raise InputError(f"--runs {folder}: other code has made its runs; choose another folder")


def make_stages(options: Options) -> list[Stage]:
    """The stages of the tiny models, or the one of another preset."""
    chosen = STAGES
    if options.preset != "laptop":
        chosen = {options.preset: (gsm8k_task, replace(PRESETS[options.preset], iterations=1))}
    stages = []
    for name, (make_task, settings) in chosen.items():
        held_out = HELD_OUT
        if options.quick:
            settings = replace(settings, **FEW)
            held_out = 10
        stages.append(Stage(name, make_task, settings, held_out, options.runs / name))
    return stages


# ---- making runs ---------------------------------------------------------------------------------
def make_runs(runs: Sequence[Run], workers: int) -> pd.DataFrame:
    """Make the runs that are missing; returns the rows of all, as `read_run` has them."""
    missing = {run.folder: run for run in runs if not (run.folder / "results.json").exists()}
    bases = {run.base.folder: run.base for run in missing.values()}
    map_parallel(make_base, bases.values(), workers)
    map_parallel(make_run, missing.values(), workers)
    rows = []
    for run in runs:
        rows += read_run(run)
    return pd.DataFrame(rows)


def map_parallel(work: Callable[[Any], None], items: Collection[Any], workers: int) -> None:
    """Call `work` on each item: here, or in several processes with one thread each."""
    pool = None
    if workers > 1:
        pool = ProcessPoolExecutor(workers, get_context("spawn"), start_worker)
    made = pool.map(work, items) if pool else map(work, items)
    try:
        for _ in progress_bar(made, work.__name__, "run", len(items)):
            pass
    finally:
        if pool:
            pool.shutdown(cancel_futures=True)


def start_worker() -> None:
    """Use one thread, and print nothing."""
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = open(os.devnull, "w")


def make_base(run: Run) -> None:
    """Evaluate a base model, and sample from it."""
    settings = make_settings(run)
    task = make_task(run)
    experiment(settings, task)
    sample_training_problems(settings, task)


def sample_training_problems(settings: Settings, task: Task) -> None:
    """Write the samples of the training problems."""
    lm = load_tokenizer(settings.model, settings.chat)
    prompts = make_prompts(task, task.train, lm, settings)
    with sampling_engine(lm, task, prompts, settings, settings.model) as engine:
        sample(1, engine, prompts, task, settings)


def make_run(run: Run) -> None:
    """Train and evaluate a model. The base's files are linked, so the run does not make them."""
    settings = make_settings(run)
    if run.method != "none":
        base = run.base.folder / "iteration-1"
        samples = files.read_records(base / "samples.jsonl", Sample)
        settings = replace(settings, **training_length(run, samples))
        folder = settings.iteration_folder(1)
        folder.mkdir(parents=True, exist_ok=True)
        if run.method == CONTROL:
            moved = move_wrong_answers(samples)
            files.write_file(folder / "samples.jsonl", files.to_lines(moved))
        for file in base.glob("*.jsonl"):
            if not (folder / file.name).exists():
                (folder / file.name).hardlink_to(file)
    experiment(settings, make_task(run))
    files.remove(*run.folder.glob("iteration-*/model"))  # large, and evaluated


def make_task(run: Run) -> Task:
    """The problems of a run: the last training problems are held out, also from the test."""
    stage = run.stage
    more = replace(stage.settings, problems=stage.settings.problems + stage.held_out)
    task = stage.make_task(more)
    held_out = task.train[-stage.held_out :]
    test = held_out if run.part == "held-out" else task.test
    return replace(task, train=task.train[: -stage.held_out], test=test)


def make_settings(run: Run) -> Settings:
    """The settings of a run, for one pass."""
    settings = run.stage.settings
    changes = {**METHODS[run.method], **run.changes}
    if run.part == "held-out":
        # A model during training is evaluated with a quarter of the samples.
        changes["eval_samples"] = 2 * settings.eval_samples
    return replace(
        settings,
        **changes,
        lr=run.lr,
        temperature=run.temperature,
        seed=run.seed,
        evaluate_after=(),
        out=run.folder,
    )


def training_length(run: Run, samples: Sequence[Sample]) -> dict[str, Any]:
    """The settings that make a run's passes, counted in optimizer steps over all samples.

    With fewer right samples, SFT repeats each of them more often.
    """
    settings = make_settings(run)
    one_pass = min(settings.examples or len(samples), len(samples))
    usable = one_pass
    if settings.composition == "positives_only":
        right = sum(sample.reward > 0 for sample in samples)
        usable = min(one_pass, max(right, 1))
    wanted = round(run.passes * one_pass)
    epochs = max(round(wanted / usable), 1)
    epochs_per_pass = epochs / run.passes
    return {
        "examples": min(usable, wanted),
        "epochs": epochs,
        "evaluate_after": tuple(passes * epochs_per_pass for passes in run.evaluate_after),
    }


def move_wrong_answers(samples: Sequence[Sample]) -> list[Sample]:
    """The samples, with each wrong one under the prompt of the next problem.

    >>> samples = [
    ...     Sample(prompt="1?", completion="1", reward=1.0),
    ...     Sample(prompt="1?", completion="2", reward=-1.0),
    ...     Sample(prompt="3?", completion="4", reward=-1.0),
    ... ]
    >>> [sample.prompt for sample in move_wrong_answers(samples)]
    ['1?', '3?', '1?']
    """
    problems = list(dict.fromkeys((sample.prompt, sample.problem_id) for sample in samples))
    following = dict(zip(problems, problems[1:] + problems[:1], strict=True))
    moved = []
    for sample in samples:
        if sample.reward < 0:
            prompt, problem_id = following[sample.prompt, sample.problem_id]
            sample = sample.model_copy(update={"prompt": prompt, "problem_id": problem_id})
        moved.append(sample)
    return moved


# ---- what was measured ---------------------------------------------------------------------------
def read_run(run: Run) -> list[dict[str, Any]]:
    """The rows of a finished run: one for each evaluation.

    iteration: rounds of sampling and training before the evaluation. passes: those of the last one.
    Log-ratios are means over the last tenth of an iteration.
    """
    results = json.loads((run.folder / "results.json").read_text())
    labels = {
        "stage": run.stage.name,
        "part": run.part,
        "method": run.method,
        "lr": run.lr,
        "temperature": run.temperature,
        "seed": run.seed,
    }
    k = run.stage.settings.k
    rows = [{**labels, "iteration": 0, "passes": 0.0, **read_evaluation(results["before"], k)}]
    for iteration, entry in enumerate(results["iterations"], start=1):
        all_passes = (*run.evaluate_after, run.passes)
        for passes, evaluation in zip(all_passes, entry["curve"][1:], strict=True):
            row = {**labels, "iteration": iteration, "passes": passes}
            rows.append({**row, **read_evaluation(evaluation, k)})
        training = entry["training"]
        rows[-1]["log-ratio of positives"] = training["log_ratio_pos_mean"]
        rows[-1]["log-ratio of negatives"] = training["log_ratio_neg_mean"]
    return rows


def read_evaluation(evaluation: dict[str, Any], k: int) -> dict[str, float]:
    """METRICS and invalid answers, from an entry of results.json.

    The vote and pass@k are missing where there are fewer than k answers.
    """
    names = dict(zip(METRICS, ("pass@1", "greedy", f"maj@{k}", f"pass@{k}"), strict=True))
    measured = {name: evaluation[key]["mean"] for name, key in names.items() if key in evaluation}
    return {**measured, "invalid": evaluation["invalid"]}
