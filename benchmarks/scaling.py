"""How time and memory grow with problems, completions per prompt, length of the prompt, and processes.

    python benchmarks/scaling.py

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
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from measuring import Comparison, peak_above, report, seconds
from shapes import adamw, shared_logprobs

import topr
import train_gsm8k
from pipeline import dataset
from pipeline.models.language_model import LanguageModel, load_model, token_logprobs
from pipeline.records import Problem, Sample
from pipeline.sampling import SamplingParameters, draw_samples, transformers_engine
from pipeline.settings import TINY
from pipeline.settings import Settings as RunSettings

ROOT = Path(__file__).resolve().parent.parent
SIZES = (1, 2, 4, 8)
NAMES = {"problems": "problems", "n": "completions per prompt", "prompt": "tokens of the prompt"}
Measured = dict[str, dict[int, list[float]]]  # stage and what grows -> size -> a number for each round


@dataclass(frozen=True)
class Settings:
    """What is measured; every default is ours. A size multiplies one of the first three."""

    problems: int = 16
    """of the smallest size"""
    n: int = 4
    """completions per prompt, of the smallest size"""
    prompt: int = 64
    """tokens of a prompt, of the smallest size"""
    new_tokens: int = 24
    """tokens of a completion, at most"""
    rounds: int = 5
    """times that each size is measured"""
    processes: tuple[int, ...] = (1, 2)
    """numbers of ranks"""
    seed: int = 0
    """seed of what is drawn"""
    out: Path = Path("runs/bench")
    """folder to write scaling.json into"""


def stages(
    settings: Settings, lm: LanguageModel, problems: int, n: int, prompt: int
) -> dict[str, Callable[[], object]]:
    """The stages of an iteration, each with what it takes already made."""
    rng = random.Random(settings.seed)
    usual = RunSettings(problems=1, test_problems=1)
    numbers = [f" {number}" for number in range(10)]  # of about two tokens each

    def text() -> str:
        return "Q:" + "".join(rng.choice(numbers) for _ in range(prompt // 2 - 4)) + "?\nA:"

    task = replace(train_gsm8k.gsm8k_task(usual), prompt=lambda problem: problem.question)
    given = [Problem(f"train-{i}", text(), train_gsm8k.Decimal(0)) for i in range(problems)]
    sampling, engine = (
        SamplingParameters(max_new_tokens=settings.new_tokens),
        transformers_engine(lm, usual.tokens_at_once),
    )

    def draw() -> list[Sample]:
        return draw_samples(task, given, n, engine, sampling, settings.seed)

    def to_rows() -> list[dataset.Row]:
        return dataset.rows_of_prompt(dataset.encode(samples, lm), n, random.Random(settings.seed))

    samples = draw()
    rows = to_rows()
    steps = dataset.epoch_steps(rows, 16, 16)

    def score() -> list[dataset.Row]:
        return dataset.score(rows, steps, lm, token_logprobs)

    scored = dataset.epoch_steps(score(), 16, 16)

    def train() -> list[topr.StepStats]:
        laid_out = dataset.lay_out(scored, "cpu")
        return list(topr.train(lm.model, adamw(lm.model, lr=1e-9), laid_out, logprobs=shared_logprobs))

    return {
        "sampling, grading": draw,
        "dataset": lambda: list(dataset.lay_out(dataset.epoch_steps(to_rows(), 16, 16), "cpu")),
        "scoring": score,
        "training": train,
    }


def exponent(sizes: Sequence[int], values: Sequence[float]) -> float:
    """The slope of log value against log size, by least squares.

    >>> round(exponent([1, 2, 4], [3.0, 12.0, 48.0]), 6)
    2.0
    """
    x, y = ([math.log(number) for number in numbers] for numbers in (sizes, values))
    return statistics.linear_regression(x, y).slope


def grow(settings: Settings, lm: LanguageModel, axis: str, time: Measured, memory: Measured) -> None:
    """Seconds and megabytes of each stage while one of the sizes grows."""
    usual = {"problems": settings.problems, "n": settings.n, "prompt": settings.prompt}
    at = {size: stages(settings, lm, **usual | {axis: size * usual[axis]}) for size in SIZES}
    for _ in range(settings.rounds):
        for size, of_size in at.items():
            for name, stage in of_size.items():
                spent: list[float] = []
                peak = peak_above(lambda stage=stage, spent=spent: spent.append(seconds(stage)))
                time.setdefault(f"{name}, {NAMES[axis]}", {}).setdefault(size, []).append(spent[0])
                memory.setdefault(f"{name}, {NAMES[axis]}", {}).setdefault(size, []).append(peak / 1e6)


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


def ranks(settings: Settings) -> Comparison:
    """Tokens trained per second by processes of one thread each, equally many completions for each process."""
    values: dict[str, list[float]] = {f"{count} ranks": [] for count in settings.processes}
    script = [str(ROOT / "benchmarks" / "gpu_step.py"), "--model", "small", "--compute", "float32", "--batches", "8"]
    script += ["--prompt", "64", "--completion", "20", "30", "--steps", "5", "--seed", str(settings.seed)]
    for _ in range(settings.rounds):
        for count in settings.processes:
            with tempfile.TemporaryDirectory() as folder:
                torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count), "--"]
                environment = os.environ | {"OMP_NUM_THREADS": "1"}
                command = [*torchrun, *script, "--out", folder]
                subprocess.run(command, check=True, env=environment, capture_output=True)
                [row] = json.loads((Path(folder) / "gpu_step.json").read_text())["measured"]
                values[f"{count} ranks"].append(row["tokens_per_second"])
    what = "training, 8 completions a process and step: 4 layers of 256, FSDP2 over gloo, one thread a process"
    return Comparison(what, "tokens/s", values)


def main(settings: Settings) -> None:
    """Measure, print, write."""
    lm = load_model(str(TINY / "base"))
    time, memory = {}, {}
    for axis in NAMES:
        grow(settings, lm, axis, time, memory)
    sizes = f"{settings.problems} problems, {settings.n} completions each, prompts of {settings.prompt} tokens"
    comparisons = [
        fitted(f"time as one of the sizes grows 1, 2, 4, 8 times: {sizes}", "s", time, least=0.0),
        fitted("memory above what there was before, of those that begin with 2 MB", "MB", memory, least=2.0),
        ranks(settings),
    ]
    report(settings.out, "scaling", "python benchmarks/scaling.py", comparisons)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
