"""How time and memory grow with problems, completions per prompt, length of the prompt, and processes.

    python -m benchmarks scaling

Each stage of an iteration on tiny/base, at sizes 1, 2, 4 and 8: an exponent is the slope of the logarithm of the
median time (or of the peak of memory above what there was before) against the logarithm of the size. 1 is linear.
"""

import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import topr
import train_gsm8k
from benchmarks.measuring import Comparison, Settings, peak_above, record, seconds
from benchmarks.shapes import adamw, shared_logprobs
from pipeline import dataset
from pipeline.models.language_model import LanguageModel, load_model, token_logprobs
from pipeline.records import Problem, Sample
from pipeline.sampling import SamplingParameters, draw_samples, transformers_engine
from pipeline.settings import TINY

SIZES = (1, 2, 4, 8)
NAMES = {"problems": "problems", "n": "completions per prompt", "prompt": "tokens of the prompt"}
Measured = dict[str, dict[int, list[float]]]  # stage and what grows -> size -> a number for each round


def stages(seed: int, lm: LanguageModel, problems: int, n: int, prompt: int) -> dict[str, Callable[[], object]]:
    """The stages of an iteration, each with what it takes already made."""
    rng = random.Random(seed)
    numbers = [f" {number}" for number in range(10)]  # of about two tokens each

    def text() -> str:
        return "Q:" + "".join(rng.choice(numbers) for _ in range(prompt // 2 - 4)) + "?\nA:"

    usual = train_gsm8k.Settings(problems=1, test_problems=1)
    task = replace(train_gsm8k.gsm8k_task(usual), prompt=lambda problem: problem.question)
    given = [Problem(f"train-{i}", text(), train_gsm8k.Decimal(0)) for i in range(problems)]
    engine = transformers_engine(lm, usual.tokens_at_once)

    def draw() -> list[Sample]:
        return draw_samples(task, given, n, engine, SamplingParameters(max_new_tokens=24), seed)

    def to_steps() -> list[dataset.EpochStep]:
        rows = dataset.rows_of_prompt(dataset.encode(samples, lm), n, random.Random(seed))
        return dataset.epoch_steps(rows, 16, 16)

    def score() -> list[dataset.Row]:
        return dataset.score(rows, dataset.epoch_steps(rows, 16, 16), lm, token_logprobs)

    def train() -> list[topr.StepStats]:
        laid_out = dataset.lay_out(scored, "cpu")
        return list(topr.train(lm.model, adamw(lm.model, lr=1e-9), laid_out, logprobs=shared_logprobs))

    samples = draw()
    rows = dataset.rows_of_prompt(dataset.encode(samples, lm), n, random.Random(seed))
    scored = dataset.epoch_steps(score(), 16, 16)
    layouts = {"dataset": lambda: list(dataset.lay_out(to_steps(), "cpu")), "scoring": score, "training": train}
    return {"sampling, grading": draw} | layouts


def exponent(sizes: Sequence[int], values: Sequence[float]) -> float:
    """The slope of log value against log size, by least squares.

    >>> round(exponent([1, 2, 4], [3.0, 12.0, 48.0]), 6)
    2.0
    """
    x, y = ([math.log(number) for number in numbers] for numbers in (sizes, values))
    return statistics.linear_regression(x, y).slope


def fitted(what: str, unit: str, measured: Measured, least: float) -> Comparison:
    """Each round's exponents, and the medians behind them; none where the smallest is below `least` of the unit."""
    exponents, notes = {}, []
    for name, of_size in measured.items():
        medians = [statistics.median(of_size[size]) for size in SIZES]
        text = f"{name}: {', '.join(f'{median:.3g}' for median in medians)} {unit}"
        if min(medians) >= least:
            rounds = zip(*(of_size[size] for size in SIZES), strict=True)
            exponents[name] = [exponent(SIZES, [max(value, 1e-9) for value in values]) for values in rounds]
            text += f"; exponent of the last doubling {math.log2(medians[-1] / medians[-2]):.2f}"
        notes.append(text)
    return Comparison(what, "exponent", exponents, notes=notes, has_ratios=False)


def by_processes(settings: Settings) -> Comparison:
    """Tokens trained per second by processes of one thread each, equally many completions for each process."""
    counts = (1,) if settings.small else (1, 2)
    values: dict[str, list[float]] = {f"{count} ranks": [] for count in counts}
    step = ["-m", "benchmarks", "gpu_step", "--small", "--batches", "8", "--seed", str(settings.seed)]
    for _ in range(settings.rounds):
        for count in counts:
            with tempfile.TemporaryDirectory() as folder:
                torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)]
                environment = os.environ | {"OMP_NUM_THREADS": "1"}
                subprocess.run([*torchrun, *step, "--out", folder], check=True, env=environment, capture_output=True)
                [row] = json.loads((Path(folder) / "gpu_step.json").read_text())["measured"]
                values[f"{count} ranks"].append(row["tokens_per_second"])
    what = "training, 8 completions a process and step: 4 layers of 256, FSDP2 over gloo, one thread a process"
    return Comparison(what, "tokens/s", values)


def measure(settings: Settings) -> dict[str, Any]:
    """Exponents of time and of memory, and training by several processes."""
    lm = load_model(str(TINY / "base"))
    usual = dict(zip(NAMES, (1, 1, 16) if settings.small else (16, 4, 64), strict=True))  # of the smallest size
    time: Measured = {}
    memory: Measured = {}
    for grows, called in NAMES.items():
        at = {size: stages(settings.seed, lm, **usual | {grows: size * usual[grows]}) for size in SIZES}
        for _, size in ((i, size) for i in range(settings.rounds) for size in SIZES):
            for name, stage in at[size].items():
                spent: list[float] = []
                peak = peak_above(lambda stage=stage, spent=spent: spent.append(seconds(stage)))
                time.setdefault(f"{name}, {called}", {}).setdefault(size, []).append(spent[0])
                memory.setdefault(f"{name}, {called}", {}).setdefault(size, []).append(peak / 1e6)
    sizes = "{problems} problems, {n} completions each, prompts of {prompt} tokens".format(**usual)
    comparisons = [
        fitted(f"time as one of the sizes grows 1, 2, 4, 8 times: {sizes}", "s", time, least=0.0),
        fitted("memory above what there was before, of those that begin with 2 MB", "MB", memory, least=2.0),
        by_processes(settings),
    ]
    return record(comparisons)
