"""What a run writes down: the dataset of an iteration, the log of its steps, results.json."""

import json
import platform
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from topr import StepStats
from toprlib.batches import plan_steps
from toprlib.distributed import gather, rank, rank_zero_only
from toprlib.evaluation import evaluate, to_table
from toprlib.files import (
    REGENERATE,
    append_to_file,
    read_json,
    read_records,
    write_file,
    write_json,
)
from toprlib.methods import METHODS
from toprlib.metrics import (
    check_given_logmu,
    check_start_ratio,
    engine_mismatch,
    step_metrics,
    summarize_epoch,
)
from toprlib.preflight import is_rehearsal
from toprlib.records import Example, InputError, Sample, Task
from toprlib.report import Table
from toprlib.settings import TINY, Settings

if TYPE_CHECKING:
    from train_gsm8k import EvalPoint

# Nats per token by which the log mu of engine and trainer may differ on average; ours. Completions
# come from the engine, so this average is a divergence: half the variance of the difference. It is
# 0.0025 if bfloat16 rounds logits of the size that metrics.START_TOLERANCE assumes.
MISMATCH_TOLERANCE = 0.01
# Below this percentage of positives, or of negatives, a run warns; ours.
FEW_PERCENT = 5


# ---- the dataset ---------------------------------------------------------------------------------
@rank_zero_only
def describe_dataset(
    iteration: int, samples: Sequence[Sample], rows: Sequence[Sequence[Example]], settings: Settings
) -> None:
    """Print what an iteration trains on, with warnings, and write dataset.json."""
    examples = list(chain.from_iterable(rows))
    steps = len(plan_steps(rows, settings.batch_size, settings.micro_batch_size))
    positive = 100 * sum(example.reward > 0 for example in examples) / len(examples)
    counts = f"{len(examples)} examples of {len(samples)} samples, {positive:.1f} % positive"
    unit = "optimizer step" if steps == 1 else "optimizer steps"
    print(f"iteration {iteration}: {counts}, {steps} {unit}", flush=True)
    for warning in dataset_warnings(samples, examples, steps, settings).values():
        print(f"iteration {iteration}: warning: {warning}", flush=True)

    example_of_sample = {example.sample: example for example in examples}
    chosen = [samples[index] for index in example_of_sample]
    baselines = []
    for index, example in example_of_sample.items():
        baselines.append(samples[index].reward - example.reward)
    content = {
        "composition": settings.composition,
        "seed": settings.seed_of(f"composition {iteration}"),
        "drawn": _count(samples),
        "trained": _count(chosen),
        "baseline": round(sum(baselines) / len(baselines), 12),  # the mean, where they differ
    }
    file = settings.iteration_folder(iteration) / "dataset.json"
    write_json(file, content)


def _count(samples: Sequence[Sample]) -> dict[str, int]:
    return {
        "samples": len(samples),
        "positive": sum(sample.reward >= 0 for sample in samples),
        "problems": len({sample.prompt for sample in samples}),
    }


def dataset_warnings(
    samples: Sequence[Sample], examples: Sequence[Example], steps: int, settings: Settings
) -> dict[str, str]:
    """What an iteration can hardly learn from, and how to fix it: {kind: message}.

    samples: all of the iteration. examples: those that are trained on. steps: optimizer steps. The
    kinds: "one step", and at most one of "ignored share", "no reward", "no negatives",
    "no positives", "changed signs", "few positives", "few negatives".
    """
    warnings = {}
    if steps == 1 and _weights_vary(settings):
        problem = "there is one optimizer step, and at the first step every weight is 1"
        fix = f"give a --batch-size below {len(examples)}, more samples or more --epochs"
        warnings["one step"] = f"{problem}; {fix}"
    warning = _warn_about_signs(samples, examples, settings)
    if warning is None:
        warning = _warn_about_few(samples, examples, settings)
    if warning is not None:
        kind, problem, fix = warning
        warnings[kind] = f"{problem}; {fix}"
    return warnings


def _weights_vary(settings: Settings) -> bool:
    """Whether the method has weights that change once pi differs from mu."""
    limits = settings.loss_limits
    if limits is None:
        return not METHODS[settings.method].uses_pairs  # PPO has a ratio
    return limits.a_pos < limits.b_pos or limits.a_neg < limits.b_neg


def _needs_negatives(settings: Settings) -> bool:
    limits = settings.loss_limits
    is_of_positives = settings.composition == "positives_only" or (limits and limits.b_neg == 0)
    return not is_of_positives and settings.effective_proportion != 1


def _warn_about_signs(
    samples: Sequence[Sample], examples: Sequence[Example], settings: Settings
) -> tuple[str, str, str] | None:
    """If one sign is missing, or most rewards changed sign: the kind, the problem and the fix."""
    if METHODS[settings.method].uses_pairs or not _needs_negatives(settings):
        return None
    before = [samples[example.sample].reward for example in examples]
    after = [example.reward for example in examples]
    flipped = sum(old * new < 0 for old, new in zip(before, after, strict=True))
    fix = _sign_fix(before, settings)
    if settings.effective_proportion is not None and len(set(before)) == 1:
        problem = "--effective-proportion is ignored: all rewards have the same sign"
        return "ignored share", problem, fix
    if max(after) <= 0 <= min(after):
        problem = f"all rewards are 0 after the baseline, so {settings.method} learns nothing"
        return "no reward", problem, fix
    if min(after) >= 0:
        problem = f"no reward is negative: {settings.method} only trains on positives"
        return "no negatives", problem, fix
    if max(after) <= 0:
        problem = f"no reward is positive: {settings.method} can only make samples less likely"
        return "no positives", problem, fix
    if min(before) < 0 < max(before) and 2 * flipped > len(after):
        share = 100 * flipped / len(after)
        problem = f"the baseline flipped the sign of {share:.1f} % of the rewards"
        return "changed signs", problem, fix
    return None


def _warn_about_few(
    samples: Sequence[Sample], examples: Sequence[Example], settings: Settings
) -> tuple[str, str, str] | None:
    """If almost all samples are wrong, or almost all right: the kind, the problem and the fix.

    Pairs, and every composition but uniform, choose by the sign of the samples' own rewards.
    """
    chooses_by_sign = settings.composition != "uniform" or METHODS[settings.method].uses_pairs
    rewards = [record.reward for record in (samples if chooses_by_sign else examples)]
    positive = sum(reward > 0 for reward in rewards)
    negative = sum(reward < 0 for reward in rewards)
    if positive == 0 or negative == 0:
        return None
    smaller = 100 * min(positive, negative) / (positive + negative)
    if smaller >= FEW_PERCENT:
        return None
    own_rewards = [sample.reward for sample in samples]
    if settings.baseline is not None and len(set(own_rewards)) > 2:
        fix = _sign_fix(own_rewards, settings)
    else:
        fix = _sample_fix(settings, more_positives=positive < negative)
    if positive < negative:
        problem = f"almost all samples are wrong: {smaller:.1f} % are positive"
        return "few positives", f"{problem}, so {settings.method} has little to reinforce", fix
    if _needs_negatives(settings):
        problem = f"almost all samples are right: {smaller:.1f} % are negative"
        return "few negatives", f"{problem}, so {settings.method} learns little from mistakes", fix
    return None


def _sign_fix(rewards: Sequence[float], settings: Settings) -> str:
    """A baseline between the smallest and the largest reward, or other samples."""
    smallest = min(rewards)
    largest = max(rewards)
    if smallest == largest:
        fix = _sample_fix(settings, more_positives=largest <= 0)
        return f"all rewards equal {largest:g}; {fix}"
    between = 0.0 if smallest < 0 < largest else (smallest + largest) / 2
    option = f"--baseline {between:g}"
    if settings.baseline_from != "zero":
        option = f"--baseline-from zero {option}"
    return f"give {option}, between the smallest reward {smallest:g} and the largest {largest:g}"


def _sample_fix(settings: Settings, more_positives: bool) -> str:
    """How to get more positives, or more negatives."""
    if settings.samples is not None:
        kind = "right" if more_positives else "wrong"
        return f"add samples that are {kind}, or check the signs of the rewards"
    if not more_positives:
        return "use harder problems, or a larger --n"
    if Path(settings.model).resolve().is_relative_to(TINY):
        known = "questions in the form of tiny/train.jsonl"
        return f"the tiny models know {known}: use these or another --model (docs/own_task.md)"
    return "use easier problems, a larger --n or another --model"


@rank_zero_only
def report_mismatch(iteration: int, settings: Settings) -> None:
    """Print how far the engine's log mu is from the trainer's; a warning if it is far.

    An engine that computes no log mu has nothing to report.
    """
    mismatch = _compare_engine(settings.iteration_folder(iteration))
    if mismatch is None:
        return
    numbers = ", ".join(f"{name} {mismatch[name]:.2g}" for name in ("mean", "q05", "q95"))
    what = "the engine's log mu of a completion minus the trainer's"
    print(f"iteration {iteration}: {what}, in nats: {numbers}", flush=True)
    per_token = mismatch["mean_per_token"]
    if not abs(per_token) <= MISMATCH_TOLERANCE:
        problem = f"the engine samples from another distribution: {per_token:.3g} nats a token"
        fix = "compare the first tokens of a prompt and the precision, or give --engine hf"
        print(f"iteration {iteration}: {problem}, above {MISMATCH_TOLERANCE}; {fix}", flush=True)


# ---- the steps -----------------------------------------------------------------------------------
def log_step(file: Path, step: int, stats: StepStats, settings: Settings) -> None:
    """Append what a step saw, on all ranks, to metrics.jsonl.

    Raises ArithmeticError if the first step does not start at pi = mu; warns instead if log mu was
    given.
    """
    columns = [stats.log_ratio, stats.reward]
    if stats.weight is not None:
        columns.append(stats.weight)
    own_columns = torch.stack(columns).cpu()  # (2 or 3, n) of this rank
    losses, parts = zip(*gather((stats.loss, own_columns)), strict=True)
    log_ratio, reward, *weight = torch.cat(parts, dim=1)
    if not settings.trust_logmu:
        check_start_ratio(step, log_ratio, settings.dtype)
    if rank() == 0:
        if settings.trust_logmu:
            check_given_logmu(step, log_ratio, reward, settings.dtype)
        metrics = {"step": step, "loss": sum(losses), "grad_norm": stats.grad_norm}
        metrics |= step_metrics(log_ratio, reward, weight[0] if weight else None)
        append_to_file(file, json.dumps(metrics) + "\n")


def explain_errors(steps: Iterable[StepStats], done: int) -> Iterator[StepStats]:
    """The same steps; an error says which step it was, and what to do. done: steps made before."""
    step = done
    try:
        for stats in steps:
            step += 1
            yield stats
    except FloatingPointError as error:
        message = f"step {step + 1}: {error}; try a lower --lr or --max-grad-norm"
        raise FloatingPointError(message) from None
    except torch.OutOfMemoryError as error:
        reason = str(error).splitlines()[0]
        fix = "give --gradient-checkpointing or a smaller --micro-batch-size"
        raise InputError(f"step {step + 1} does not fit the GPU: {reason}; {fix}") from None


# ---- the results ---------------------------------------------------------------------------------
@rank_zero_only
def write_results(points: Sequence["EvalPoint"], task: Task, settings: Settings) -> dict[str, Any]:
    """results.json and curve.png from the files of the run; returns the content of the former.

    points: every model of the run that was evaluated, the first model first. Raises InputError if a
    file is missing or damaged.
    """
    results: dict[str, Any] = {}
    last = None
    if settings.test_problems:
        last = results["before"] = _evaluate_file(points[0].file, task, settings)
    iterations = []
    for iteration in range(1, settings.iterations + 1):
        folder = settings.iteration_folder(iteration)
        steps = read_records(folder / "metrics.jsonl", dict[str, float], fix=_train_again(folder))
        entry = {
            "dataset": read_json(folder / "dataset.json") | {"steps": len(steps)},
            "training": summarize_epoch(steps),
        }
        if settings.test_problems:
            curve = [{"samples_seen": 0, **last}]
            for point in points[1:]:
                if point.iteration == iteration:
                    last = _evaluate_file(point.file, task, settings)
                    curve.append({"samples_seen": point.samples_seen, **last})
            entry |= {"curve": curve, "after": last}
        mismatch = _compare_engine(folder)
        if mismatch is not None:
            entry["engine_mismatch"] = mismatch
        iterations.append(entry)
    results["iterations"] = iterations
    results["versions"] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    # The last bits of a sum depend on it, and with them a few samples of several thousand.
    results["instruction_set"] = torch.backends.cpu.get_cpu_capability()
    if torch.cuda.is_available():
        results["device"] = torch.cuda.get_device_name()
    elif is_rehearsal():
        results["device"] = "cpu, a rehearsal"
    if iterations and settings.test_problems:
        from toprlib.plotting import draw_curve, save_figure

        title = f"{settings.method}, learning rate {settings.lr:g}"
        save_figure(draw_curve(iterations, title), settings.out / "curve.png")
    write_file(settings.out / "results.json", json.dumps(results, indent=2) + "\n")
    return results


def _evaluate_file(file: Path, task: Task, settings: Settings) -> dict[str, Any]:
    samples = read_records(file, Sample, fix=REGENERATE)
    return evaluate(samples, task, settings.k, settings.seed)


def _train_again(folder: Path) -> str:
    names = f"metrics.jsonl, train.jsonl and model in {folder}"
    return f"remove {names}, then repeat the command, which trains again"


def _compare_engine(folder: Path) -> dict[str, float] | None:
    """log mu by the sampling engine against the trainer's; None if the engine computes none."""
    file = folder / "samples.jsonl"
    samples = read_records(file, Sample, fix=REGENERATE) if file.exists() else []
    if not samples or samples[0].token_logmu_engine is None:
        return None
    engine = {}
    trainer = {}
    for example in read_records(folder / "train.jsonl", Example, fix=_train_again(folder)):
        engine[example.sample] = sum(samples[example.sample].token_logmu_engine)
        trainer[example.sample] = sum(example.token_logmu)
    tokens = sum(len(samples[index].token_ids) for index in engine)
    mismatch = engine_mismatch(engine, trainer)
    return mismatch | {"mean_per_token": mismatch["mean"] * len(engine) / tokens}


def print_results(results: dict[str, Any]) -> None:
    """Print the table of a run: the test results, or without them what training has changed."""
    if "before" in results:
        to_table(results).print()
    elif results["iterations"]:
        training_table(results).print()


def training_table(results: dict[str, Any]) -> Table:
    """How far training has moved the samples, in the last tenth of each iteration's steps.

    >>> training = {"log_ratio_pos_mean": 0.5, "log_ratio_neg_mean": None}
    >>> print(training_table({"iterations": [{"training": training}]}).markdown())
    | log pi - log mu, nats | iteration 1 | should be |
    |---|---|---|
    | positives | 0.500 | above 0 |
    | negatives | none | below 0 |
    """
    head = ["log pi - log mu, nats"]
    rows = [["positives"], ["negatives"]]
    for number, iteration in enumerate(results["iterations"], start=1):
        head.append(f"iteration {number}")
        for row, sign in zip(rows, ("pos", "neg"), strict=True):
            value = iteration["training"][f"log_ratio_{sign}_mean"]
            row.append("none" if value is None else f"{value:.3f}")
    rows[0].append("above 0")
    rows[1].append("below 0")
    return Table([*head, "should be"], rows)
