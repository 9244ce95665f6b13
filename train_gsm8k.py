"""Section 4 of the TOPR paper as a script: sample, grade, compose, train, evaluate, on GSM8K or problems like it.

    python train_gsm8k.py                                  # tiny problems, tiny model: 3 minutes on two cores
    python train_gsm8k.py --method reinforce               # the same with naive REINFORCE, which collapses
    python train_gsm8k.py --data GSM8K_DIR --shots 8 ...   # real problems, the paper's 8-shot prompt
    python train_gsm8k.py --samples FILE                   # no sampling: train on completions you already have

What it leaves out against the paper so far: vLLM, several GPUs, several iterations. It writes, into `--out`:
config.json, samples.jsonl, metrics.jsonl, results.json, curve.png and the trained model under model/.
"""

import dataclasses
import hashlib
import importlib.util
import math
import platform
import random
import re
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import torch
import transformers
import tyro
from pydantic import BaseModel
from rich.console import Console
from rich.table import Table

import topr
from pipeline import dataset, rows
from pipeline.evaluation import evaluate, standard_error
from pipeline.models import LanguageModel, is_hub_name, load_model, save_model
from pipeline.plots import draw_curve, save_figure
from pipeline.records import InputError, Outcome, Problem, Sample, Task, read_rows, write_rows
from pipeline.run import RunFolder, append_json
from pipeline.sampling import SamplingLaw, draw_samples, transformers_engine

HERE = Path(__file__).resolve().parent
Method = Literal["topr", "tis", "sft", "reinforce", "off_policy", "ppo", "dpo"]


@dataclass(frozen=True)
class Settings:
    """Every setting of a run, once; "paper" or "ours" says where its default is from (arXiv 2503.14286)."""

    preset: tyro.conf.Positional[Literal["laptop"]] = "laptop"
    """laptop: a tiny model on tiny problems, in minutes on two cores (ours)"""

    model: str = str(HERE / "tiny" / "base")
    """folder or hub name of the base model (ours; paper: Llama 3 8B Instruct)"""
    data: str = str(HERE / "tiny")
    """folder with train.jsonl and test.jsonl in GSM8K's form, or a hub name such as openai/gsm8k (ours)"""
    samples: Path | None = None
    """samples.jsonl to train on instead of sampling; prompt, completion and reward suffice (ours)"""
    shots: int = 0
    """worked examples before the question (ours for the tiny model; paper: 8)"""
    shots_file: Path | None = None
    """text of the worked examples, a blank line between them; default: those of the installed lm-eval package"""

    problems: int = 512
    """training problems to sample from, the first ones (ours; paper: all 7,473)"""
    n: int = 16
    """samples per training problem (paper, Section 4.1)"""
    temperature: float = 1.0
    """sampling temperature (paper, Section 4.2)"""
    top_p: float = 1.0
    """nucleus of the sampler (paper, Section 4.2)"""
    top_k: int = 500
    """the sampler's most probable tokens (paper, Section 4.2)"""
    max_new_tokens: int = 128
    """longest completion, in tokens (ours; paper: 512)"""

    method: Method = "topr"
    """topr, tis, sft, reinforce, off_policy: rows of Table 1; ppo, dpo: what the paper compares with"""
    limits: tuple[float, float, float, float] | None = None
    """a+ b+ a- b-: bounds of the ratio (Eq. 7) in place of the method's"""
    baseline: float | None = None
    """c, subtracted from the reward (paper: none)"""
    effective_proportion: float | None = None
    """p~, effective share of positives, in place of --baseline (Eq. 12)"""
    eps: float = 0.2
    """PPO's clipping (paper, Section 4.3)"""
    beta: float = 0.1
    """DPO's temperature (ours; the paper does not give its own)"""
    pairs: int = 16
    """DPO's pairs per problem, at most (paper, Section 4.3)"""

    lr: float = 5e-5
    """AdamW's constant learning rate (ours for a tiny model; paper: Adafactor at 5e-7)"""
    batch: int = 16
    """completions per optimiser step (ours; paper: 8, one on each GPU)"""
    micro_batch: int = 16
    """completions per forward pass: memory and speed, never the gradient (ours)"""
    completions_per_row: int = 1
    """completions of a prompt that share its computation and their step (ours)"""
    max_norm: float = 1.0
    """gradient norm is clipped to this (paper, Section 4.2)"""

    test_problems: int = 150
    """test problems to evaluate on, the first ones (ours; paper: all 1,319)"""
    test_samples: int = 32
    """samples per test problem (ours; paper: 64)"""
    k: int = 16
    """the K of maj@K and pass@K (paper, Section 4.3)"""
    curve_points: int = 5
    """evaluations along the epoch for the curve, the last one in full (ours)"""
    curve_samples: int = 4
    """samples per test problem at the points before the last (ours)"""

    tokens_at_once: int = 40_000
    """tokens in a batch of sampling or scoring, prompts and padding included: memory and speed (ours)"""
    seed: int = 0
    """seed of everything that is drawn"""
    out: Path | None = None
    """folder to write into; default: runs/PRESET, followed by the settings that differ from the preset's"""


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


# ---- the run -----------------------------------------------------------------------------------------------------


def check(settings: Settings) -> None:
    """InputError for what cannot be run, before anything is loaded or written."""

    def refuse(is_wrong: bool, message: str) -> None:
        if is_wrong:
            raise InputError(message)

    method, c, p_tilde = settings.method, settings.baseline, settings.effective_proportion
    refuse(method not in get_args(Method), f"--method {method}: choose from {', '.join(get_args(Method))}")
    counts = "problems n max_new_tokens pairs batch micro_batch completions_per_row test_problems curve_points"
    for name in [*counts.split(), "tokens_at_once"]:
        value = getattr(settings, name)
        refuse(value < 1, f"--{name.replace('_', '-')} {value}: must be at least 1")
    for name in ("temperature", "top_p", "lr", "beta", "max_norm"):
        value = getattr(settings, name)
        refuse(not 0 < value < math.inf, f"--{name.replace('_', '-')} {value}: must be positive and finite")
    refuse(settings.top_p > 1, f"--top-p {settings.top_p}: must be at most 1")
    refuse(not 0 <= settings.eps <= 1, f"--eps {settings.eps}: must lie in [0, 1]")
    size = row_size(settings)
    refuse(settings.batch % size > 0, f"--batch {settings.batch}: must be a multiple of the {size} in a row")
    standard_error(0.0, settings.k, settings.test_samples)
    standard_error(0.0, 1, settings.curve_samples)
    refuse(settings.limits is not None and method in ("ppo", "dpo"), f"--limits: have no meaning for {method}")
    refuse(settings.shots_file is not None and settings.shots < 1, "--shots-file: say with --shots how many to take")
    refuse(c is not None and p_tilde is not None, "--baseline and --effective-proportion: give one of them")
    refuse(method == "dpo" and (c, p_tilde) != (None, None), "--method dpo: has no baseline; give none")
    refuse(c is not None and not -1 <= c <= 1, f"--baseline {c}: must lie in [-1, 1]")
    refuse(p_tilde is not None and not 0 < p_tilde <= 1, f"--effective-proportion {p_tilde}: must lie in (0, 1]")
    try:
        topr.Limits(*settings.limits or topr.PRESETS["topr"])
    except ValueError as error:
        raise InputError(f"--limits: {error}") from None


def run(settings: Settings) -> dict:
    """One iteration: sample and grade, compose, train one epoch; evaluated before and after.

    Returns what results.json holds. A run that was cut short goes on with the samples it had drawn.
    """
    check(settings)
    task = gsm8k_task(settings)
    given = read_rows(settings.samples, Sample) if settings.samples else None
    folder = RunFolder(settings.out or default_out(settings), to_record(settings))
    if (results := folder.read_json("results.json")) is not None:
        print(f"{folder.path}: this run is finished; what it found:")
        return results

    lm = load_model(settings.model)
    samples = training_samples(settings, task, lm, folder, given)
    steps = compose(settings, samples, lm, task)
    keep_samples(folder, samples)

    def measure(name: str, n: int) -> dict:
        engine = transformers_engine(lm, settings.tokens_at_once, f"evaluating {name}")
        drawn = draw_samples(task, task.test, n, engine, sampling_law(settings, task), seed_of(settings, name))
        return evaluate(drawn, task, [settings.k] if n > settings.k else [], settings.seed)

    before = measure("before", settings.test_samples)
    curve = [{"samples_seen": 0, **before}]
    curve_steps = {len(steps) * i // settings.curve_points for i in range(1, settings.curve_points)}
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as metrics_file:

        def after_step(done: int, metrics: dict[str, float]) -> None:
            append_json(metrics_file, metrics)
            if done in curve_steps:
                point = measure(f"at step {done} of {len(steps)}", settings.curve_samples)
                curve.append({"samples_seen": steps.samples_until(done), **point})

        topr.train(
            lm.model,
            torch.optim.AdamW(lm.model.parameters(), lr=settings.lr, weight_decay=0.0),
            steps,
            loss=make_loss(settings),
            logprobs=rows.sequence_logprobs,
            max_norm=settings.max_norm,
            start_at_mu=None if given and dataset.has_logmu(given) else 0.01,
            after_step=after_step,
        )
    after = measure("after", settings.test_samples)
    curve.append({"samples_seen": steps.samples_until(len(steps)), **after})
    save_model(lm, folder / "model")
    save_figure(draw_curve(curve, f"{settings.method}, learning rate {settings.lr:g}"), folder / "curve.png")
    folder.write_json("results.json", {"before": before, "after": after, "curve": curve, "versions": versions()})
    return folder.read_json("results.json")


def training_samples(
    settings: Settings, task: Task, lm: LanguageModel, folder: RunFolder, given: list[Sample] | None
) -> list[Sample]:
    """The given samples, or n graded ones of each training problem; all with their log mu."""
    if (folder / "samples.jsonl").exists():
        return read_rows(folder / "samples.jsonl", Sample)
    if given is not None and dataset.has_logmu(given, str(settings.samples)):
        return given
    if given is not None:
        print("samples come without log mu: scored by the initial model, which stands in for their sampler")
        return dataset.score(given, lm, row_size(settings), settings.tokens_at_once, task.stop, str(settings.samples))
    engine = transformers_engine(lm, settings.tokens_at_once)
    law, seed = sampling_law(settings, task), seed_of(settings, "samples")
    samples = draw_samples(task, task.train, settings.n, engine, law, seed)
    samples = dataset.score(samples, lm, row_size(settings), settings.tokens_at_once)
    keep_samples(folder, samples)  # at once: they were expensive
    return samples


def keep_samples(folder: RunFolder, samples: list[Sample]) -> None:
    """Write the run's samples.jsonl unless it is there; only now does the folder come into being."""
    if not (folder / "samples.jsonl").exists():
        folder.create()
        write_rows(folder / "samples.jsonl", samples)


def row_size(settings: Settings) -> int:
    """Completions of a prompt in a row, in scoring as in training: a pair for DPO."""
    return 2 if settings.method == "dpo" else settings.completions_per_row


def compose(settings: Settings, samples: list[Sample], lm: LanguageModel, task: Task) -> dataset.Steps:
    """The optimiser steps of one epoch: every sample once (uniform), or DPO's pairs; the baseline subtracted."""
    rng = random.Random(seed_of(settings, "order"))
    examples = dataset.encode(samples, lm, task.stop, str(settings.samples or "samples.jsonl"))
    if settings.method == "dpo":
        pairs = dataset.pairs_of_prompt(examples, settings.pairs, rng)
        if not pairs:
            raise InputError("--method dpo: no problem has both a positive and a negative sample to pair")
        return dataset.Steps(pairs, settings.batch, settings.micro_batch, lm.model.device)
    baseline = settings.baseline or 0.0
    if settings.effective_proportion is not None:
        positives = dataset.share_of_positives(examples)
        if not 0 < positives < 1 or {abs(example.reward) for example in examples} != {1.0}:
            raise InputError("--effective-proportion: needs rewards -1 and +1, and samples of both signs")
        baseline = topr.baseline_for_proportion(positives, settings.effective_proportion)
        print(f"share of positives {positives:.4f}: baseline {baseline:.4f} makes it {settings.effective_proportion:g}")
    examples = dataset.subtract_baseline(examples, baseline)
    if settings.method != "ppo" and limits_of(settings).b_neg == 0 and all(example.reward <= 0 for example in examples):
        raise InputError(f"--method {settings.method}: no positive sample, and it learns from nothing else; draw more")
    grouped = dataset.rows_of_prompt(examples, row_size(settings), rng)
    return dataset.Steps(grouped, settings.batch, settings.micro_batch, lm.model.device)


def make_loss(settings: Settings) -> Callable[..., torch.Tensor]:
    """The loss of the chosen method, as `topr.train` calls it."""
    if settings.method == "ppo":
        return partial(topr.ppo_loss, eps=settings.eps)
    if settings.method == "dpo":
        return partial(dataset.dpo_loss_of_rows, beta=settings.beta)
    return partial(topr.topr_loss, limits=limits_of(settings))


def limits_of(settings: Settings) -> topr.Limits:
    """The four bounds: those given, or the method's."""
    return topr.Limits(*settings.limits or topr.PRESETS[settings.method])


def sampling_law(settings: Settings, task: Task) -> SamplingLaw:
    """The law of training and test samples alike."""
    return SamplingLaw(settings.temperature, settings.top_p, settings.top_k, settings.max_new_tokens, task.stop)


def seed_of(settings: Settings, stage: str) -> int:
    """A seed of its own for each stage, so that a change in one stage leaves the others' draws alone."""
    return zlib.crc32(f"{stage} {settings.seed}".encode())


def to_record(settings: Settings) -> dict:
    """What a run is, for config.json: its settings, but for where it lies, and a hash of the samples it was given."""
    record = {name: value for name, value in dataclasses.asdict(settings).items() if name != "out"}
    content = Path(settings.samples).read_bytes() if settings.samples else b""
    return record | {"samples_sha256": hashlib.sha256(content).hexdigest() if content else None}


def default_out(settings: Settings) -> Path:
    """runs/PRESET, and what differs from the preset: runs/laptop_method=reinforce."""
    usual, here = dataclasses.asdict(Settings()), dataclasses.asdict(settings)
    differing = [f"{name}={value}" for name, value in here.items() if value != usual[name]]
    return Path("runs") / re.sub("[^A-Za-z0-9._=+-]+", "_", " ".join([settings.preset, *differing]))[:120]


def versions() -> dict[str, str]:
    """What the numbers were made with."""
    return {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}


def print_table(results: dict) -> None:
    """Before and after: the outcomes, and pass@k and maj@k with +- 2 standard errors, in percent."""
    table = Table("", "before", "after")
    for name, value in results["after"].items():
        if isinstance(value, dict):
            entries = [results[when][name] for when in ("before", "after")]
            table.add_row(name, *(f"{100 * e['mean']:.1f} ± {200 * e['se']:.1f} %" for e in entries))
        elif name in get_args(Outcome):
            table.add_row(name, *(f"{100 * results[when][name]:.1f} %" for when in ("before", "after")))
    Console().print(table)


def main() -> None:
    """The command line: settings in, a table out; one line and a non-zero exit status on bad input."""
    settings = tyro.cli(Settings, description=__doc__)
    started = time.monotonic()
    try:
        print_table(run(settings))
    except (InputError, ArithmeticError) as error:
        sys.exit(f"train_gsm8k: {error}")
    print(f"{settings.out or default_out(settings)}: {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
