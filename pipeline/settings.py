"""Every setting of a run, once, and the presets: sets of them that go together (arXiv 2503.14286, Section 4)."""

import dataclasses
import hashlib
import math
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal, get_args

import torch
import tyro

from pipeline.evaluation import standard_error
from pipeline.models.sharding import Compute, OptimizerName
from pipeline.records import InputError
from pipeline.selection import Composition
from topr import PRESETS as BOUNDS
from topr import Limits

TINY = Path(__file__).resolve().parent.parent / "tiny"
Preset = Literal["laptop", "single-gpu", "paper"]
Method = Literal["topr", "tis", "sft", "reinforce", "off_policy", "ppo", "dpo"]
Departure = Literal["per-token", "per-token + token mean", "geometric mean", "clip 0.8..1.2"]


@dataclass(frozen=True)
class Settings:
    """Every setting of a run; "paper" or "ours" says where the default of the preset laptop is from."""

    preset: tyro.conf.Positional[Preset] = "laptop"
    """comes first: laptop, a tiny model on tiny problems (ours); single-gpu, 24 GB (ours); paper, 8 x H100"""

    model: str = str(TINY / "base")
    """folder or hub name of the base model (ours; paper: Llama 3 8B Instruct)"""
    trust_remote_code: bool = False
    """run code that comes with the model; it can do anything (ours)"""
    data: str = str(TINY)
    """folder with train.jsonl and test.jsonl in GSM8K's form, or a hub name such as openai/gsm8k (ours)"""
    test_data: str | None = None
    """where the test problems are, if they are not in --data (ours; MATH-500 has a name of its own)"""
    samples: Path | None = None
    """samples.jsonl to train on instead of sampling; prompt, completion and reward suffice (ours)"""
    trust_logmu: bool = False
    """take the log mu of --samples as it is, whatever model it is from; training need not start at mu then (ours)"""
    shots: int = 0
    """worked examples before the question (ours for the tiny model; paper: 8)"""
    shots_file: Path | None = None
    """text of the worked examples, a blank line between them; default: those of the installed lm-eval package"""

    iterations: int = 1
    """times to sample from the model and train it on what it said, mu_i = pi_{i-1} (paper, Section 4.3); 0: measure"""
    problems: int = 512
    """training problems to sample from, the first ones (ours; paper: all 7,473)"""
    n: int = 16
    """samples per training problem (paper, Section 4.1)"""
    composition: Composition = "uniform"
    """which samples to train on: any (paper), the positives, Anna Karenina's, or a --proportion of positives"""
    candidates: int = 64
    """samples per training problem for anna_karenina, in place of n (paper, Section 4.3)"""
    proportion: float | None = None
    """share of positives for --composition proportion (paper, Section 4.3: 0.1 and 0.5)"""
    examples: int | None = None
    """samples to train on in an iteration (paper: 50,000); default: all, for anna_karenina 50,000 / 7,473 a problem"""

    engine: Literal["hf", "vllm"] | None = None
    """what samples; default: vllm where there is a GPU (paper, Section 4.2), else transformers' generate"""
    vllm_python: Path | None = None
    """interpreter whose environment has vLLM; default: this one (ours)"""
    vllm_memory: float = 0.85
    """share of the GPU's memory that vLLM may fill; the rest is for what the trainer keeps (ours)"""
    temperature: float = 1.0
    """sampling temperature (paper, Section 4.2)"""
    top_p: float = 1.0
    """nucleus of the sampler (paper, Section 4.2)"""
    top_k: int = 500
    """the sampler's most probable tokens (paper, Section 4.2)"""
    max_new_tokens: int = 128
    """longest completion, in tokens (ours; paper: 512)"""
    tokens_at_once: int = 40_000
    """tokens in a batch of transformers' generate, prompts and padding included: memory and speed (ours)"""
    chunk: int = 256
    """problems sampled between two writes to the disk, by each process (ours)"""

    method: Method = "topr"
    """topr, tis, sft, reinforce, off_policy: rows of Table 1; ppo, dpo: what the paper compares with"""
    limits: tuple[float, float, float, float] | None = None
    """a+ b+ a- b-: bounds of the ratio (Eq. 7) in place of the method's"""
    baseline: float | None = None
    """c, subtracted from the reward (paper: none)"""
    baseline_from: Literal["zero", "mean", "group"] = "zero"
    """what --baseline is counted from: zero (paper), the samples' mean reward, or that of the prompt's own samples"""
    effective_proportion: float | None = None
    """p~, effective share of positives, in place of --baseline (Eq. 12)"""
    departure: Departure | None = None
    """train with what other code calls TOPR (departures.py) instead, to see what it costs (ours: none)"""
    eps: float = 0.2
    """PPO's clipping (paper, Section 4.3)"""
    beta: float = 0.1
    """DPO's temperature (ours; the paper does not give its own)"""
    pairs: int = 16
    """DPO's pairs per problem, at most (paper, Section 4.3)"""

    optimizer: OptimizerName = "adamw"
    """adamw (ours for a tiny model) or adafactor (paper, Section 4.2); neither decays weights"""
    lr: float = 5e-5
    """the optimiser's constant learning rate (ours for a tiny model; paper: 5e-7)"""
    batch: int = 16
    """completions per optimiser step, over all processes (ours; paper: 8, one on each GPU)"""
    micro_batch: int = 16
    """completions per forward pass of a process: memory and speed, never the gradient (ours; paper: 1)"""
    completions_per_row: int = 1
    """completions of a prompt that share its computation and their step (ours)"""
    max_norm: float = 1.0
    """gradient norm is clipped to this (paper, Section 4.2)"""
    compute: Compute = "float32"
    """precision of forward and backward passes; weights and gradients' sums are float32 (ours)"""
    sliced_head: bool = False
    """log pi without whole logits, for many words and long micro-batches: memory, never the gradient (ours)"""
    gradient_checkpointing: bool = False
    """compute activations again for the backward pass instead of keeping them: memory, never the gradient (ours)"""
    save_every: int = 256
    """optimiser steps between two checkpoints (ours)"""

    test_problems: int = 150
    """test problems to evaluate on, the first ones (ours; paper: all 1,319)"""
    test_samples: int = 32
    """samples per test problem (ours; paper: 64)"""
    k: int = 16
    """the K of maj@K and pass@K (paper, Section 4.3)"""
    curve_points: int = 5
    """evaluations along an epoch for the curve, the last one in full (ours; paper: at its end)"""
    curve_samples: int = 4
    """samples per test problem at the points before the last (ours)"""

    dry_run: bool = False
    """say what the run would draw, train and need in memory, and do nothing"""
    debug: bool = False
    """end with a traceback, not with a line, where something is wrong"""
    seed: int = 0
    """seed of everything that is drawn"""
    out: Path | None = None
    """folder to write into; default: runs/PRESET, followed by the settings that differ from the preset's"""
    reuse: Path | None = None
    """folder of another run: what it has drawn from the initial model is taken from there, not drawn again (ours)"""

    @property
    def drawn_per_problem(self) -> int:
        """Samples that are drawn of each training problem."""
        return self.candidates if self.composition == "anna_karenina" else self.n

    @property
    def row_size(self) -> int:
        """Completions of a prompt in a row, in scoring as in training: a pair for DPO."""
        return 2 if self.method == "dpo" else self.completions_per_row

    @property
    def layout(self) -> str:
        """What log mu depends on besides the weights: precision and rows; in bfloat16 on what shares a batch too."""
        is_shared = self.compute == "bfloat16" and max(self.micro_batch, self.row_size) > 1
        batches = f" {zlib.crc32(repr(self.record()).encode()):08x}" if is_shared else ""
        return f"{self.compute} {self.row_size}{batches}"

    @property
    def chosen_engine(self) -> Literal["hf", "vllm"]:
        """What samples on this machine."""
        return self.engine or ("vllm" if torch.cuda.is_available() else "hf")

    @property
    def bounds(self) -> Limits:
        """The four bounds: those given, or the method's."""
        return Limits(*self.limits or BOUNDS[self.method])

    def seed_of(self, stage: str) -> int:
        """A seed of its own for each stage, so that a change in one stage leaves the others' draws alone."""
        return zlib.crc32(f"{stage} {self.seed}".encode())

    def record(self) -> dict:
        """What a run is, for config.json: its settings, a hash of the samples it was given, and its processes."""
        content = self.samples.read_bytes() if self.samples else None
        others = {
            "samples_sha256": hashlib.sha256(content).hexdigest() if content else None,
            "ranks": int(os.environ.get("WORLD_SIZE", 1)),
            "engine": self.chosen_engine,
        }
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in NOT_OF_A_RUN} | others

    def default_out(self, usual: "Settings | None" = None, runs: str = "runs/") -> Path:
        """runs/PRESET, and what differs from it (default: the preset of GSM8K): runs/laptop_method=reinforce.

        >>> Settings(method="reinforce", seed=3).default_out().as_posix()
        'runs/laptop_method=reinforce_seed=3'
        """
        there, here = dataclasses.asdict(usual or PRESETS[self.preset]), dataclasses.asdict(self)
        differing = [f"{k}={v}" for k, v in here.items() if v != there[k] and k not in NOT_OF_A_RUN]
        name = re.sub("[^A-Za-z0-9._=+-]+", "_", " ".join([self.preset, *differing]))[:120]
        return Path(f"{runs}{name}")


NOT_OF_A_RUN = ("out", "reuse", "dry_run", "debug", "vllm_python", "vllm_memory")
OF_DRAWING = ("model", "engine", "temperature", "top_p", "top_k", "max_new_tokens", "tokens_at_once", "chunk", "seed")
OF_DRAWING += ("compute", "samples_sha256")

PAPER = Settings(
    preset="paper",
    model="meta-llama/Meta-Llama-3-8B-Instruct",  # "using the 8B model unless otherwise specified" (4.1)
    data="openai/gsm8k",
    shots=8,  # "using the 8-shot prompt from Wang et al. (2022)" (4.1)
    iterations=5,  # "model performance continues to improve over multiple iterations" (4.3); the number is ours
    problems=7_473,  # "1,319 problems for testing and 7,473 for training" (4.1)
    n=16,  # "For each training question we generate n = 16 candidate solutions" (4.1)
    candidates=64,  # "For each problem, we sample 64 candidate solutions" (4.3)
    examples=50_000,  # "an iteration batch of N = 50,000 data points" (4.3)
    temperature=1.0,  # "with temperature T = 1, top_p = 1, top_k = 500, and a maximum of 512 tokens" (4.2)
    top_p=1.0,
    top_k=500,
    max_new_tokens=512,
    chunk=32,  # ours
    eps=0.2,  # "For PPO, we use eps = 0.2" (4.3)
    pairs=16,  # "so as to obtain up to 16 contrastive pairs" (4.3)
    optimizer="adafactor",  # "the Adafactor optimizer (Shazeer and Stern, 2018) to minimize memory usage" (4.2)
    lr=5e-7,  # "a constant learning rate of 5e-7 chosen from a small parameter sweep" (4.2)
    batch=8,  # "data parallelism on a single H100 node with a per-GPU batch size of 1" (4.2)
    micro_batch=1,
    max_norm=1.0,  # "HuggingFace's default gradient clipping parameter of 1.0" (4.2)
    compute="bfloat16",  # ours: the paper does not tell its precision
    gradient_checkpointing=True,  # ours
    save_every=1_000,  # ours
    test_problems=1_319,
    test_samples=64,  # "we generate 64 solutions for each question for GSM8K" (4.2)
    k=16,  # Figure 8's maj@16
    curve_points=1,  # "measured by evaluating the model at the end of the iteration" (4.2)
)

PRESETS: Mapping[str, Settings] = MappingProxyType(
    {
        "laptop": Settings(),
        "single-gpu": replace(  # ours: a small model on one card of 24 GB
            PAPER,
            preset="single-gpu",
            model="Qwen/Qwen2.5-0.5B-Instruct",
            iterations=1,
            n=8,
            examples=20_000,
            lr=1e-6,
            test_samples=16,
            k=8,
        ),
        "paper": PAPER,
    }
)


def check(settings: Settings) -> None:
    """InputError for what cannot be run, before anything is loaded or written."""

    def refuse(is_wrong: bool, message: str) -> None:
        if is_wrong:
            raise InputError(message)

    method, c, p_tilde, share = settings.method, settings.baseline, settings.effective_proportion, settings.proportion
    refuse(method not in get_args(Method), f"--method {method}: choose from {', '.join(get_args(Method))}")
    refuse(settings.iterations < 0, f"--iterations {settings.iterations}: must be at least 0")
    counts = "problems n candidates max_new_tokens tokens_at_once chunk pairs batch micro_batch"
    for name in [*counts.split(), "completions_per_row", "save_every", "test_problems", "curve_points", "examples"]:
        value = getattr(settings, name)
        refuse(value is not None and value < 1, f"--{name.replace('_', '-')} {value}: must be at least 1")
    for name in ("temperature", "top_p", "vllm_memory", "lr", "beta", "max_norm"):
        value = getattr(settings, name)
        refuse(not 0 < value < math.inf, f"--{name.replace('_', '-')} {value}: must be positive and finite")
    refuse(settings.top_p > 1, f"--top-p {settings.top_p}: must be at most 1")
    refuse(settings.vllm_memory > 1, f"--vllm-memory {settings.vllm_memory}: must be at most 1")
    refuse(not 0 <= settings.eps <= 1, f"--eps {settings.eps}: must lie in [0, 1]")
    size = settings.row_size
    refuse(settings.batch % size > 0, f"--batch {settings.batch}: must be a multiple of the {size} in a row")
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    refuse(settings.batch < size * ranks, f"--batch {settings.batch}: is less than a row for each of {ranks} processes")
    standard_error(0.0, settings.k, settings.test_samples)
    standard_error(0.0, 1, settings.curve_samples)
    refuse(settings.limits is not None and method in ("ppo", "dpo"), f"--limits: have no meaning for {method}")
    refuse(settings.shots_file is not None and settings.shots < 1, "--shots-file: say with --shots how many to take")
    refuse(c is not None and p_tilde is not None, "--baseline and --effective-proportion: give one of them")
    is_from_zero = settings.baseline_from == "zero"
    refuse(p_tilde is not None and not is_from_zero, "--effective-proportion: its baseline is counted from zero")
    is_departed = settings.departure is not None
    refuse(is_departed and (method != "topr" or settings.limits is not None), "--departure: departs from topr alone")
    refuse(is_departed and settings.sliced_head, "--departure: looks at single tokens; leave out --sliced-head")
    is_split = settings.micro_batch < settings.batch or ranks > 1
    is_over_tokens = settings.departure == "per-token + token mean"
    refuse(
        is_over_tokens and is_split, "--departure: a mean over a step's tokens needs --micro-batch as large as --batch"
    )
    has_baseline = (c, p_tilde) != (None, None) or not is_from_zero
    refuse(method == "dpo" and has_baseline, "--method dpo: has no baseline; give none")
    refuse(c is not None and not -1 <= c <= 1, f"--baseline {c}: must lie in [-1, 1]")
    refuse(p_tilde is not None and not 0 < p_tilde <= 1, f"--effective-proportion {p_tilde}: must lie in (0, 1]")
    is_proportion = settings.composition == "proportion"
    refuse(is_proportion != (share is not None), "--composition proportion and --proportion P: give both or neither")
    refuse(share is not None and not 0 < share < 1, f"--proportion {share}: must lie in (0, 1)")
    refuse(settings.samples is None and settings.trust_logmu, "--trust-logmu: is for --samples")
    refuse(settings.samples is not None and settings.iterations > 1, "--samples: serve one iteration, not several")
    try:
        Limits(*settings.limits or BOUNDS["topr"])
    except ValueError as error:
        raise InputError(f"--limits: {error}") from None
