"""Every setting of a run: its range, where its default is from, and the command line."""

import dataclasses
import json
import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import tyro
from annotated_types import Ge, Gt, Le, Lt
from pydantic import FiniteFloat, ValidationError
from pydantic.dataclasses import dataclass

import topr
from toprlib.distributed import rank, ranks
from toprlib.methods import METHODS, Method
from toprlib.records import InputError, Task

TINY = Path(__file__).resolve().parent.parent / "tiny"

Count = Annotated[int, Ge(1)]
AtLeastZero = Annotated[int, Ge(0)]
AtLeastTwo = Annotated[int, Ge(2)]
Positive = Annotated[FiniteFloat, Gt(0)]


@dataclass(frozen=True)
class Settings:
    """Every setting of a run, with the defaults of the preset `laptop`.

    "(paper, Section 4.1)": the default is the paper's. "(paper: 8)": the paper has another value.
    """

    model: str = str(TINY / "base")
    """folder or hub name of the base model (paper: Llama 3 8B Instruct)"""
    data: str = str(TINY)
    """folder with train.jsonl and test.jsonl in GSM8K's form, or a hub name: openai/gsm8k"""
    samples: str | None = None
    """samples to train on (prompt, completion, reward): .jsonl, .parquet or hub name"""
    trust_logmu: bool = False
    """take token_logmu of --samples for log mu; skips the check that pi = mu at step 1"""
    shots: Annotated[int, Ge(0), Le(8)] = 0
    """worked examples before the question (paper: 8)"""
    chat: bool = False
    """format prompts with the chat template and stop at its end-of-turn token"""
    chat_args: str = "{}"
    """arguments of the chat template, as a JSON object: '{"enable_thinking": false}'"""

    iterations: AtLeastZero = 1
    """rounds of sampling from the model and training it (paper, Section 4.3); 0: evaluate only"""
    problems: Count = 256
    """number of training problems to sample from: the first N (paper: all 7,473)"""
    n: Count = 16
    """samples per training problem (paper, Section 4.1; for Anna Karenina 64, Section 4.3)"""
    composition: Literal["uniform", "positives_only", "anna_karenina", "proportion"] = "uniform"
    """samples to train on: any (paper), positives, which are repeated to as many steps as all
    samples make, Anna Karenina's, or a --proportion of positives"""
    proportion: Annotated[FiniteFloat, Gt(0), Lt(1)] | None = None
    """proportion of positives for --composition proportion (paper: 0.1 and 0.5)"""
    examples: Count | None = None
    """samples to train on in an iteration, at most (paper: 50,000); default: all"""
    epochs: Count = 1
    """passes over these samples, each in another order (paper, Section 4.2: 1)"""

    engine: Literal["hf", "vllm"] = "hf"
    """sampling engine: vllm (paper, Section 4.2), or hf in this process"""
    vllm_python: Path | None = None
    """interpreter that has vLLM; default: this one"""
    engine_gpus: Count = 1
    """GPUs that an engine of vLLM spans by tensor parallelism (70B weights need 4)"""
    temperature: Positive = 1.0
    """sampling temperature (paper, Section 4.2)"""
    top_k: AtLeastZero = 500
    """sample from this many most probable tokens (paper, Section 4.2); 0: from all. Top-p is 1"""
    max_new_tokens: Count = 128
    """longest completion, in tokens (paper: 512)"""

    method: Literal[*METHODS] = "topr"
    """topr, tis, sft, reinforce, off_policy: rows of Table 1; ppo, dpo: for comparison (4.3)"""
    limits: tuple[float, float, float, float] | None = None
    """a+ b+ a- b-: bounds of the ratio (Eq. 7), in place of the method's"""
    baseline: FiniteFloat = 0.0
    """c, subtracted from the reward (paper: none)"""
    baseline_from: Literal["zero", "mean", "group"] = "zero"
    """what --baseline is added to: zero (paper), or the mean reward: all samples', a prompt's"""
    effective_proportion: Annotated[FiniteFloat, Gt(0), Le(1)] | None = None
    """p~, effective proportion of positives, in place of --baseline (Eq. 12)"""

    optimizer: Literal["adamw", "adafactor", "sgd"] = "adamw"
    """adamw, adafactor or sgd, without weight decay (paper: adafactor)"""
    lr: Positive = 5e-5
    """constant learning rate (paper: 5e-7)"""
    batch_size: Count = 16
    """completions per optimizer step, over all processes (paper: 8, one on each GPU)"""
    micro_batch_size: Count = 8
    """completions per forward pass of a process; does not change gradients (paper: 1)"""
    max_grad_norm: Positive = 1.0
    """the gradient is clipped to this norm (paper, Section 4.2)"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """precision of forward and backward passes; weights stay float32"""
    gradient_checkpointing: bool = False
    """recompute activations, gather weights again: less memory, same gradient, slower"""
    save_every: Count = 100
    """optimizer steps between two checkpoints: the most that an interrupted run loses"""

    test_problems: AtLeastZero = 150
    """number of test problems: the first N (paper: all 1,319); 0: no evaluation"""
    eval_samples: AtLeastTwo = 16
    """samples per test problem (paper: 64); a quarter of them before the end of training"""
    k: Count = 16
    """the K of maj@K and pass@K (paper, Section 4.3)"""
    evaluate_after: tuple[Positive, ...] = (0.25, 0.5, 0.75)
    """passes over the samples after which to evaluate, besides at their end (paper: none)"""

    dry_run: bool = False
    """print what the run would sample and train; start nothing"""
    seed: AtLeastZero = 0
    """seed of all random numbers"""
    out: Path | None = None
    """folder to write into; default: runs/PRESET and the settings that differ from the preset's"""

    def __post_init__(self) -> None:
        """Raises ValueError for settings that do not go together."""
        method = METHODS[self.method]
        has_target = self.effective_proportion is not None
        has_baseline = self.baseline != 0 or self.baseline_from != "zero"
        is_proportion = self.composition == "proportion"
        try:
            chat_args = json.loads(self.chat_args)
        except ValueError:
            chat_args = None
        conflicts = {
            "--effective-proportion sets the baseline; leave --baseline and --baseline-from out": (
                has_target and has_baseline
            ),
            "dpo has no baseline; leave it out": method.uses_pairs and (has_target or has_baseline),
            "--composition proportion and --proportion go together; set both or neither": (
                is_proportion != bool(self.proportion)
            ),
            "--samples is for one iteration; set --iterations 1": (
                self.samples and self.iterations != 1
            ),
            "--chat-args is for --chat": chat_args and not self.chat,
            """--chat-args is not a JSON object; write '{"name": value}'""": (
                not isinstance(chat_args, dict)
            ),
            "--trust-logmu is for --samples; leave it out": self.trust_logmu and not self.samples,
            "--k is above --eval-samples; reduce it": (
                self.test_problems and self.k > self.eval_samples
            ),
            "this method has no --limits; leave them out": self.limits and not method.limits,
            "--engine-gpus is for --engine vllm": self.engine_gpus > 1 and self.engine != "vllm",
        }
        for message, is_conflict in conflicts.items():
            if is_conflict:
                raise ValueError(message)
        self.chosen_method()  # raises ValueError if the limits are out of range

    def chosen_method(self) -> Method:
        """The method, with --limits in place of its own."""
        if self.limits is None:
            return METHODS[self.method]
        limits = topr.Limits(*self.limits)
        return Method(partial(topr.topr_loss, limits=limits), limits)

    def eval_samples_at(self, is_end: bool) -> int:
        """Samples per test problem: all at the end of training, a quarter (at least 2) before it.

        >>> Settings(eval_samples=16).eval_samples_at(is_end=False)
        4
        """
        return self.eval_samples if is_end else max(self.eval_samples // 4, 2)

    def iteration_folder(self, iteration: int) -> Path:
        """Where the files of an iteration are."""
        return self.out / f"iteration-{iteration}"

    def seed_of(self, stage: str) -> int:
        """A seed for each stage, so that a change in one stage leaves the others' numbers alone."""
        return zlib.crc32(f"{stage} {self.seed}".encode())

    def to_config(self) -> dict:
        """The content of config.json: what a command has to repeat to resume the run."""
        config = dataclasses.asdict(self) | {"ranks": ranks()}
        for name in ("out", "dry_run", "vllm_python", "gradient_checkpointing"):
            del config[name]  # they change no number
        return config


def print_plan(settings: Settings, task: Task, provided_samples: int) -> None:
    """Print what a run would sample and train, at most. provided_samples: those of --samples."""
    samples = provided_samples or settings.n * len(task.train)
    examples = min(settings.examples or samples, samples) * settings.epochs
    # Of each test problem; each evaluation has one more, at temperature 0.
    between = (settings.eval_samples_at(is_end=False) + 1) * len(settings.evaluate_after)
    at_end = settings.eval_samples + 1
    test_samples = at_end + settings.iterations * (between + at_end)
    counts = {
        "samples per iteration": samples,
        "optimizer steps per iteration": -(-examples // settings.batch_size),
        "completions of test problems": test_samples * len(task.test),
    }
    for name, count in counts.items():
        print(f"{name:32}{count:>12,}")


# ---- the command line ----------------------------------------------------------------------------
AnySettings = TypeVar("AnySettings", bound=Settings)


def read_settings(
    arguments: Sequence[str],
    presets: Mapping[str, AnySettings],
    description: str | None = None,
    runs: str = "runs/",
) -> AnySettings:
    """The settings of a command line: the name of a preset, by default the first, then changes.

    >>> read_settings(["--seed", "1"], {"laptop": Settings()}).out.as_posix()
    'runs/laptop_seed=1'
    """
    name = next(iter(presets))
    if arguments and arguments[0] in presets:
        name, *arguments = arguments
    defaults = presets[name]
    description = f"{description}\nPresets, which come first: {', '.join(presets)}"
    config = (tyro.conf.FlagCreatePairsOff,)
    settings = tyro.cli(
        type(defaults), args=arguments, default=defaults, description=description, config=config
    )
    if settings.out is not None:
        return settings
    parts = [name]
    default_config = defaults.to_config()
    for setting, value in settings.to_config().items():
        if value != default_config[setting]:
            parts.append(f"{setting}={value}")
    folder = re.sub("[^A-Za-z0-9._=+-]+", "_", " ".join(parts))
    return dataclasses.replace(settings, out=Path(f"{runs}{folder}"))


@contextmanager
def command(name: str) -> Iterator[None]:
    """In the block, an error that the user can fix ends the program with one line."""
    sys.stdout.reconfigure(errors="replace")  # a terminal in ASCII has no ±
    try:
        yield
    except (InputError, ValidationError, OSError, ImportError, FloatingPointError) as error:
        sys.exit(f"{name}: rank {rank()}: {error}" if ranks() > 1 else f"{name}: {error}")
    except KeyboardInterrupt:
        sys.exit(f"{name}: interrupted; repeat the command to resume")
