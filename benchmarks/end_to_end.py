"""From problems to a trained model: the default run's wall time, and samples generated and trained per second.

    make .venv-trl/ready
    .venv-trl/bin/python -m benchmarks end_to_end

The second against TRL's GRPO trainer on tiny/base and its problems, 16 completions of a problem a step, the same AdamW.
Ours includes grading and scoring log mu. TRL is measured as it comes (but in float32), generating for each step and
with gradient checkpointing, and as fast as it can be set: without that, generating for 8 steps at once.
"""

import random
import subprocess
import sys
import tempfile
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import topr
import train_gsm8k
from benchmarks import trl_sides
from benchmarks.measuring import Comparison, Goal, Settings, in_turn, record, seconds
from benchmarks.shapes import adamw, shared_logprobs
from pipeline import dataset
from pipeline.metrics import step_metrics
from pipeline.models.language_model import load_model, token_logprobs
from pipeline.sampling import SamplingParameters, draw_samples, transformers_engine
from pipeline.settings import TINY

OURS, TRL, TRL_SET = "topr", "TRL as it comes", "TRL, set to be fast"
AS_IT_COMES = {"steps_per_generation": 1, "gradient_checkpointing": True}
DEFAULT_RUN, TWO_MINUTES = "python train_gsm8k.py", "goal"


def samples_per_second(settings: Settings) -> Comparison:
    """Ours and TRL's."""
    problems, n = (8, 2) if settings.small else (32, 16)
    usual = train_gsm8k.Settings(model=str(TINY / "base"), problems=problems, n=n)
    task, base = train_gsm8k.gsm8k_task(usual), load_model(usual.model)
    sampling, count = SamplingParameters(max_new_tokens=usual.max_new_tokens), problems * n
    took = {"sampling": 0.0, "scoring": 0.0, "training": 0.0}  # seconds in all rounds
    engine = transformers_engine(base, usual.tokens_at_once)

    def ours() -> float:
        lm = base._replace(model=deepcopy(base.model))

        def steps(rows: list[dataset.Row]) -> list[dataset.EpochStep]:
            return dataset.epoch_steps(rows, n, n)

        times = [time.perf_counter()]
        samples = draw_samples(task, task.train, n, engine, sampling, settings.seed)
        times.append(time.perf_counter())
        rows = dataset.rows_of_prompt(dataset.encode(samples, lm), n, random.Random(settings.seed))
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
        train = trl_sides.prepare(lm, reward, prompts, n, usual.max_new_tokens, **others)
        return count / seconds(train)

    sides = {OURS: ours, TRL: lambda: trl(**AS_IT_COMES), TRL_SET: lambda: trl(steps_per_generation=8)}
    values = in_turn(sides, settings.rounds)
    what = f"generated and trained: tiny/base, {problems} problems, {n} completions each"
    goals = [Goal(OURS, TRL, 5.0), Goal(OURS, TRL_SET, 5.0)]
    shares = [f"{name} {100 * spent / sum(took.values()):.0f} %" for name, spent in took.items()]
    sampling_alone = count * settings.rounds / took["sampling"]
    notes = [
        f"ours, in shares of its time: {', '.join(shares)}",
        f"were all but sampling free, ours would be {sampling_alone:.0f} samples/s",
    ]
    return Comparison(what, "samples/s", values, goals, notes)


def default_run(settings: Settings) -> Comparison:
    """The wall time of the script without arguments, start of Python included."""

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, train_gsm8k.__file__, "--out", str(Path(folder) / "run")]
            subprocess.run(command, check=True, capture_output=True)

    values = {DEFAULT_RUN: [seconds(run) for _ in range(settings.rounds)], TWO_MINUTES: [120.0] * settings.rounds}
    return Comparison("the default run", "s", values, [Goal(DEFAULT_RUN, TWO_MINUTES, 1.0, is_least=False)])


def measure(settings: Settings) -> dict[str, Any]:
    """Against TRL, and the default run alone."""
    comparisons = [samples_per_second(settings)] + ([] if settings.small else [default_run(settings)])
    return record(comparisons, trl=trl_sides.trl.__version__)
