"""From problems to a trained model: the default run's wall time, and samples generated and trained per second.

    make .venv-trl/ready
    .venv-trl/bin/python benchmarks/end_to_end.py

The second against TRL's GRPO trainer on tiny/base and its problems, 16 completions of a problem a step, the same AdamW.
Ours includes grading and scoring log mu. TRL is measured as it comes (but in float32), generating for each step and
with gradient checkpointing, and as fast as it can be set: without that, generating for 8 steps at once.
"""

import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import trl_sides
from measuring import Comparison, Goal, in_turn, report, seconds
from shapes import adamw, shared_logprobs

import topr
import train_gsm8k
from pipeline import dataset
from pipeline.metrics import step_metrics
from pipeline.models.language_model import load_model, token_logprobs
from pipeline.sampling import draw_samples, transformers_engine
from pipeline.settings import TINY
from pipeline.settings import Settings as RunSettings
from pipeline.stages import sampling_parameters

ROOT = Path(__file__).resolve().parent.parent
OURS, TRL, TRL_SET = "topr", "TRL as it comes", "TRL, set to be fast"
AS_IT_COMES = {"steps_per_generation": 1, "gradient_checkpointing": True}
DEFAULT_RUN, TWO_MINUTES = "python train_gsm8k.py", "goal"


@dataclass(frozen=True)
class Settings:
    """What is measured; every default is ours."""

    problems: int = 32
    """to generate from and train on, against TRL; a multiple of 8"""
    n: int = 16
    """completions of each (paper, Section 4.1)"""
    rounds: int = 5
    """times that each side is measured"""
    runs: int = 5
    """times that the default run is measured"""
    seed: int = 0
    """seed of what is drawn"""
    out: Path = Path("runs/bench")
    """folder to write end_to_end.json into"""


def samples_per_second(settings: Settings) -> Comparison:
    """Ours and TRL's."""
    usual = RunSettings(model=str(TINY / "base"), problems=settings.problems, n=settings.n)
    task, base = train_gsm8k.gsm8k_task(usual), load_model(usual.model)
    sampling, count = sampling_parameters(usual, task), settings.problems * settings.n
    took = {"sampling": 0.0, "scoring": 0.0, "training": 0.0}  # seconds in all rounds
    engine = transformers_engine(base, usual.tokens_at_once)

    def ours() -> float:
        lm = base._replace(model=deepcopy(base.model))

        def steps(rows: list[dataset.Row]) -> list[dataset.EpochStep]:
            return dataset.epoch_steps(rows, settings.n, settings.n)

        times = [time.perf_counter()]
        samples = draw_samples(task, task.train, settings.n, engine, sampling, settings.seed)
        times.append(time.perf_counter())
        rows = dataset.rows_of_prompt(dataset.encode(samples, lm), settings.n, random.Random(settings.seed))
        scored = dataset.lay_out(steps(dataset.score(rows, steps(rows), lm, token_logprobs)), "cpu")
        times.append(time.perf_counter())
        for stats in topr.train(lm.model, adamw(lm.model), scored, logprobs=shared_logprobs):
            step_metrics(stats.log_ratio, stats.reward, stats.weight)
        times.append(time.perf_counter())
        for name, start, end in zip(took, times, times[1:], strict=False):
            took[name] += end - start
        return count / (times[-1] - times[0])

    def trl(**others: object) -> float:
        prompts = [{"prompt": task.prompt(problem), "gold": str(problem.gold)} for problem in task.train]
        lm = base._replace(model=deepcopy(base.model))
        reward = trl_sides.reward_of(lambda text, gold: train_gsm8k.grade(text, train_gsm8k.Decimal(gold)) == "correct")
        train = trl_sides.prepare(lm, reward, prompts, settings.n, usual.max_new_tokens, **others)
        return count / seconds(train)

    sides = {OURS: ours, TRL: lambda: trl(**AS_IT_COMES), TRL_SET: lambda: trl(steps_per_generation=8)}
    values = in_turn(sides, settings.rounds)
    what = f"generated and trained: tiny/base, {settings.problems} problems, {settings.n} completions each"
    goals = [Goal(OURS, TRL, 5.0), Goal(OURS, TRL_SET, 5.0)]
    shares = [f"{name} {100 * spent / sum(took.values()):.0f} %" for name, spent in took.items()]
    sampling_alone = count * settings.rounds / took["sampling"]
    notes = [
        f"ours, in shares of its time: {', '.join(shares)}",
        f"were all but sampling free, ours would be {sampling_alone:.0f} samples/s",
        where_time_goes(lambda: draw_samples(task, task.train, settings.n, engine, sampling, settings.seed)),
    ]
    return Comparison(what, "samples/s", values, goals, notes)


def where_time_goes(work: Callable[[], object]) -> str:
    """The operations that sampling spends most of its time in, by torch's profiler."""
    start = time.perf_counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        work()
        in_all = time.perf_counter() - start
    spent = {one.key.removeprefix("aten::"): one.self_cpu_time_total / 1e6 for one in found.key_averages()}
    inside = sum(spent.values())
    most = sorted(spent, key=lambda name: -spent[name])[:5]
    shares = ", ".join(f"{name} {100 * spent[name] / inside:.0f} %" for name in most)
    return f"sampling, of the time in operations: {shares}; between them, profiled: {100 * (1 - inside / in_all):.0f} %"


def default_run(settings: Settings) -> Comparison:
    """The wall time of the script without arguments, start of Python included."""
    phases: Counter[str] = Counter()

    def run() -> float:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            command = [sys.executable, str(ROOT / "train_gsm8k.py"), "--out", str(out)]
            start = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            took = time.perf_counter() - start
            phases.update(seconds_of_stages(out))
            return took

    times = [run() for _ in range(settings.runs)]
    parts = [f"{name} {spent / settings.runs:.0f} s" for name, spent in phases.items()]
    notes = [
        f"by the times of its files, on average: {', '.join(parts)}; "
        f"imports and start, {(sum(times) - sum(phases.values())) / settings.runs:.0f} s"
    ]
    values = {DEFAULT_RUN: times, TWO_MINUTES: [120.0] * settings.runs}
    return Comparison("the default run", "s", values, [Goal(DEFAULT_RUN, TWO_MINUTES, 1.0, is_least=False)], notes)


def seconds_of_stages(run: Path) -> Counter[str]:
    """What the stages of a run took, from one stage's last file to the next one's."""
    here = run / "iteration-1"
    stages = {
        run / "config.json": "start",
        here / "test-0.jsonl": "evaluating",
        here / "samples.jsonl": "sampling",
        here / "train.jsonl": "scoring",
        here / "metrics.jsonl": "training",
        run / "results.json": "evaluating",
    }
    ends = [file.stat().st_mtime for file in stages]
    found: Counter[str] = Counter()
    for name, start, end in zip(list(stages.values())[1:], ends, ends[1:], strict=False):
        found[name] += end - start
    return found


def main(settings: Settings) -> None:
    """Measure, print, write."""
    comparisons = [samples_per_second(settings)] + ([default_run(settings)] if settings.runs else [])
    report(settings.out, "end_to_end", "python benchmarks/end_to_end.py", comparisons, trl=trl_sides.trl.__version__)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
