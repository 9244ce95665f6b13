"""Every setting of a run: its range, where its default is from, and the command line."""

import dataclasses
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, TypeVar, get_args

import tyro
from annotated_types import Ge, Gt, Le, Lt
from pydantic import FiniteFloat, TypeAdapter, ValidationError

import topr
from toprlib.compositions import BASELINES, COMPOSITIONS
from toprlib.distributed import local_ranks, ranks
from toprlib.external_samples import fingerprint, parse_columns
from toprlib.files import first_validation_error, read_text
from toprlib.language_model import Dtype, OptimizerName
from toprlib.methods import METHODS, Loss
from toprlib.records import InputError, Prompt, Sample, Task

PROJECT = Path(__file__).resolve().parent.parent
TINY = PROJECT / "tiny"
Preset = Literal["laptop", "single-gpu", "paper"]
EngineName = Literal["hf", "vllm"]

Count = Annotated[int, Ge(1)]
AtLeastZero = Annotated[int, Ge(0)]
AtLeastTwo = Annotated[int, Ge(2)]
Positive = Annotated[FiniteFloat, Gt(0)]
Share = Annotated[FiniteFloat, Gt(0), Le(1)]
OpenShare = Annotated[FiniteFloat, Gt(0), Lt(1)]


@dataclass(frozen=True)
class Settings:
    """Every setting of a run. "paper" or "ours" says where the default of `laptop` is from."""

    preset: tyro.conf.Positional[Preset] = "laptop"
    """comes first: laptop (tiny model, ours), single-gpu (24 GB, ours) or paper (8 x H100)"""

    model: str = str(TINY / "two_thirds")
    """folder or hub name of the base model (ours; paper: Llama 3 8B Instruct)"""
    data: str = str(TINY)
    """folder with train.jsonl and test.jsonl in GSM8K's form, or a hub name: openai/gsm8k (ours)"""
    samples: str | None = None
    """file, folder or hub name of samples to train on: prompt, completion, reward (ours)"""
    columns: tuple[str, ...] = ()
    """FIELD=COLUMN ...: columns of --samples with other names; reward=A+B for a sum (ours)"""
    trust_logmu: bool = False
    """take token_logmu of --samples for log mu; skips the check that pi = mu at step 1 (ours)"""
    shots: AtLeastZero = 0
    """worked examples before the question (ours for the tiny model; paper: 8)"""
    chat: bool = False
    """format prompts with the chat template and stop at its end-of-turn token (ours)"""
    system: Path | None = None
    """file with the system prompt for --chat; default: the template's own, if it has one (ours)"""

    iterations: AtLeastZero = 1
    """rounds of sampling from the model and training it (paper, Section 4.3); 0: evaluate only"""
    problems: Count = 320
    """number of training problems to sample from, from the first on (ours; paper: all 7,473)"""
    n: Count = 16
    """samples per training problem (paper, Section 4.1; for Anna Karenina 64, Section 4.3)"""
    composition: Literal[*COMPOSITIONS] = "uniform"
    """samples to train on: any (paper), positives, Anna Karenina's, a --proportion of positives"""
    proportion: OpenShare | None = None
    """share of positives for --composition proportion (paper, Section 4.3: 0.1 and 0.5)"""
    examples: Count | None = None
    """samples to train on in an iteration, at most (paper: 50,000); default: all"""
    epochs: Count = 1
    """passes over these samples, each in another order (paper, Section 4.2: 1)"""

    engine: EngineName | None = None
    """sampling engine: vllm (paper, Section 4.2), or hf in this process (ours; for laptop)"""
    vllm_python: Path | None = None
    """interpreter that has vLLM; default: this one (ours)"""
    engine_gpus: Count = 1
    """GPUs that an engine of vLLM spans by tensor parallelism (ours; 70B weights need 4)"""
    temperature: Positive = 1.0
    """sampling temperature (paper, Section 4.2)"""
    top_p: Share = 1.0
    """top-p of sampling (paper, Section 4.2)"""
    top_k: Annotated[int, Ge(-1)] = 500
    """sample from this many most probable tokens (paper, Section 4.2); 0 or -1: from all"""
    max_new_tokens: Count = 128
    """longest completion, in tokens (ours; paper: 512)"""

    method: Literal[*METHODS] = "topr"
    """topr, tis, sft, reinforce, off_policy: rows of Table 1; ppo, dpo: for comparison (4.3)"""
    limits: tuple[float, float, float, float] | None = None
    """a+ b+ a- b-: bounds of the ratio (Eq. 7), in place of the method's"""
    baseline: FiniteFloat | None = None
    """c, subtracted from the reward (paper: none)"""
    baseline_from: Literal[*BASELINES] = "zero"
    """what --baseline is added to: zero (paper), the mean reward of all samples, or a prompt's"""
    effective_proportion: Share | None = None
    """p~, effective share of positives, in place of --baseline (Eq. 12)"""

    optimizer: OptimizerName = "adamw"
    """adamw (ours for a tiny model), adafactor (paper, Section 4.2), sgd (ours); no decay"""
    lr: Positive = 5e-5
    """constant learning rate (ours for a tiny model; paper: 5e-7)"""
    batch_size: Count = 16
    """completions per optimizer step, over all processes (ours; paper: 8, one on each GPU)"""
    micro_batch_size: Count = 8
    """completions per forward pass of a process; does not change gradients (ours; paper: 1)"""
    max_grad_norm: Positive = 1.0
    """the gradient is clipped to this norm (paper, Section 4.2)"""
    dtype: Dtype = "float32"
    """precision of forward and backward passes; weights stay float32 (ours)"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: less memory, same gradient (ours)"""
    reshard_after_forward: bool = True
    """gather weights again for the backward pass: less memory, same gradient (ours)"""
    lora: Count | None = None
    """rank of LoRA adapters to train in place of the weights; default: all weights (ours)"""
    save_every: Count = 100
    """optimizer steps between two checkpoints: the most that an interrupted run loses (ours)"""

    test_problems: AtLeastZero = 150
    """number of test problems, from the first on (ours; paper: all 1,319); 0: no evaluation"""
    eval_samples: AtLeastTwo = 16
    """samples per test problem (ours; paper: 64); a quarter of them before the end of an epoch"""
    k: Count = 16
    """the K of maj@K and pass@K (paper, Section 4.3)"""
    evals_per_epoch: Count = 5
    """evaluations along an epoch, the last one in full (ours; paper: 1, at its end)"""

    dry_run: bool = False
    """print what the run would sample, train and need in memory; start nothing"""
    seed: AtLeastZero = 0
    """seed of all random numbers"""
    out: Path | None = None
    """folder to write into; default: runs/PRESET and the settings that differ from the preset's"""

    @property
    def loss_limits(self) -> topr.Limits | None:
        """The four bounds of the ratio; None for a method whose loss has none."""
        if self.limits is not None:
            return topr.Limits(*self.limits)
        return METHODS[self.method].limits

    @property
    def method_loss(self) -> Loss:
        """The method's loss, with the four bounds where it has them."""
        if self.loss_limits is None:
            return METHODS[self.method].loss
        return partial(topr.topr_loss, limits=self.loss_limits)

    @property
    def engine_name(self) -> EngineName:
        """The engine that samples."""
        return self.engine or ("hf" if self.preset == "laptop" else "vllm")

    @property
    def system_prompt(self) -> str | None:
        """The text of --system, without white space around it. Raises InputError."""
        return None if self.system is None else read_text(self.system).strip()

    def eval_samples_at(self, is_end: bool) -> int:
        """Samples per test problem: all at the end of an epoch, a quarter (at least 2) before it.

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

    def to_config(
        self, provided_samples: Sequence[Sample] = (), prompts: Sequence[Prompt] = ()
    ) -> dict:
        """The content of config.json.

        provided_samples: those of --samples. prompts: those of all problems; a run whose problems
        have changed cannot resume. A path inside the project is relative to it, so that a copy of
        the project can resume its runs.
        """
        config = {}
        for name, value in dataclasses.asdict(self).items():
            if name not in NOT_IN_CONFIG:
                is_text = isinstance(value, str | Path)
                config[name] = str(value).removeprefix(f"{PROJECT}/") if is_text else value
        config["engine"] = self.engine_name
        config["system"] = self.system_prompt if self.chat else None
        digest = fingerprint(self.samples, provided_samples) if self.samples else None
        config["samples_sha256"] = digest
        if prompts:
            text = "\n".join(prompt.text for prompt in prompts)
            config["problems_crc32"] = f"{zlib.crc32(text.encode()):08x}"
        config["ranks"] = ranks()
        return config

    def default_out(self, defaults: "Settings", runs: str = "runs/") -> Path:
        """The folder runs/PRESET, named after what differs from the preset's defaults.

        >>> Settings(method="reinforce", seed=3).default_out(Settings()).as_posix()
        'runs/laptop_method=reinforce_seed=3'
        """
        default_values = dataclasses.asdict(defaults)
        parts = [self.preset]
        for name, value in dataclasses.asdict(self).items():
            if name not in NOT_IN_CONFIG and value != default_values[name]:
                parts.append(f"{name}={value}")
        folder = re.sub("[^A-Za-z0-9._=+-]+", "_", " ".join(parts))
        if len(folder) > 120:  # with a long path, for instance; the checksum distinguishes runs
            folder = f"{folder[:111]}_{zlib.crc32(folder.encode()):08x}"
        return Path(f"{runs}{folder}")


NOT_IN_CONFIG = ("out", "dry_run", "vllm_python")  # they change no number
AnySettings = TypeVar("AnySettings", bound=Settings)


# ---- the command line ----------------------------------------------------------------------------
def read_settings(
    arguments: Sequence[str],
    presets: Mapping[str, AnySettings],
    description: str | None = None,
    runs: str = "runs/",
) -> AnySettings:
    """The settings of a command line: a preset, if it begins with one, and changes to it.

    runs: what the name of the run's folder begins with if --out is missing.

    >>> read_settings(["--seed", "1"], {"laptop": Settings()}).out.as_posix()
    'runs/laptop_seed=1'
    """
    preset = arguments[0] if arguments and arguments[0] in get_args(Preset) else "laptop"
    if preset not in presets:
        message = f"{preset} is not a preset of this script; choose from {', '.join(presets)}"
        raise InputError(message, option="preset")
    defaults = presets[preset]
    config = (tyro.conf.FlagCreatePairsOff,)
    settings = tyro.cli(
        type(defaults), args=arguments, default=defaults, description=description, config=config
    )
    if settings.preset != preset:
        message = f"{settings.preset}: a preset comes first, before the options that change it"
        raise InputError(message, option="preset")
    options = {argument.partition("=")[0] for argument in arguments}
    if settings.samples and not options & {"--data", "--test-problems"}:
        message = "requires --data DIR with test problems, or --test-problems 0"
        raise InputError(message, option="--samples")
    return replace(settings, out=settings.out or settings.default_out(defaults, runs))


# ---- checks --------------------------------------------------------------------------------------
def check(settings: Settings, processes: int | None = None) -> None:
    """Raises InputError for settings out of range, or that do not go together.

    processes: how many the run will have; default: as many as it has now.
    """
    try:
        TypeAdapter(type(settings)).validate_python(dataclasses.asdict(settings), strict=False)
    except ValidationError as error:
        message, field = first_validation_error(error)
        raise InputError(message, option=_option(field.partition(".")[0])) from None
    processes = processes or ranks()
    check_sizes(settings, processes)
    check_sources(settings)
    check_method(settings)


def check_task(settings: Settings, task: Task) -> None:
    """Raises InputError if the task lacks the problems that the settings ask for."""
    if settings.test_problems > 0 and not task.test:
        message = f"task {task.name} has no test problems; add some, or set --test-problems 0"
        raise InputError(message, option="--test-problems")
    if settings.iterations > 0 and not settings.samples and not task.train:
        message = f"task {task.name} has no training problems; add some, or set --samples"
        raise InputError(message, option="--problems")


def check_sizes(settings: Settings, processes: int) -> None:
    """Raises InputError for sizes that do not go together."""
    per_row = 2 if METHODS[settings.method].uses_pairs else 1
    size = settings.batch_size
    if size % per_row > 0:
        raise InputError(f"{size}: must be even for {settings.method}", option="--batch-size")
    if size < per_row * processes:
        message = f"{size}: {processes} processes need {per_row * processes} completions or more"
        raise InputError(message, option="--batch-size")
    if settings.k > settings.eval_samples and settings.test_problems > 0:
        message = f"{settings.k}: must be at most --eval-samples {settings.eval_samples}"
        raise InputError(message, option="--k")
    if settings.lora is not None and processes > 1:
        message = f"{settings.lora}: is for one process, not for {processes}; train all weights"
        raise InputError(message, option="--lora")
    if settings.engine_gpus > 1:
        check_engine_gpus("--engine-gpus", settings.engine_name, settings.engine_gpus, processes)


def check_engine_gpus(option: str, engine: EngineName, gpus: int, processes: int) -> None:
    """Raises InputError unless engines of `gpus` GPUs can share a machine's processes evenly."""
    local_processes = local_ranks(without_torchrun=processes)
    if local_processes % gpus > 0:
        message = f"{gpus}: must divide the {local_processes} processes of a machine"
        raise InputError(message, option=option)
    if engine != "vllm":
        message = f"{gpus}: is for --engine vllm; hf uses the process's own GPU"
        raise InputError(message, option=option)


def check_sources(settings: Settings) -> None:
    """Raises InputError for options about samples and prompts that do not go together."""
    for option in ("trust_logmu", "columns"):
        if getattr(settings, option) and settings.samples is None:
            raise InputError("requires --samples", option=_option(option))
    if settings.samples is not None and settings.iterations != 1:
        raise InputError("requires --iterations 1", option="--samples")
    parse_columns(settings.columns)
    if settings.system is not None and not settings.chat:
        raise InputError("requires --chat", option="--system")


def check_method(settings: Settings) -> None:
    """Raises InputError for options about the method that do not go together."""
    method = METHODS[settings.method]
    has_baseline = settings.baseline is not None or settings.baseline_from != "zero"
    has_share = settings.effective_proportion is not None
    if has_baseline and has_share:
        message = "sets the baseline; leave --baseline and --baseline-from out"
        raise InputError(message, option="--effective-proportion")
    if method.uses_pairs and (has_baseline or has_share):
        message = f"--method {settings.method} has no baseline; leave it out"
        raise InputError(message, option="--baseline")
    is_proportion = settings.composition == "proportion"
    if is_proportion != (settings.proportion is not None):
        message = "goes with --composition proportion; set both or neither"
        raise InputError(message, option="--proportion")
    if settings.limits is not None:
        if method.limits is None:
            message = f"--method {settings.method} has no limits; leave them out"
            raise InputError(message, option="--limits")
        try:
            topr.Limits(*settings.limits)
        except ValueError as error:
            raise InputError(str(error), option="--limits") from None


def _option(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def intended_ranks(preset: Preset) -> int:
    """The processes that a preset is for: 8 for the paper's node (Section 4.2), unless torchrun
    has started others.
    """
    return 8 if preset == "paper" and "WORLD_SIZE" not in os.environ else ranks()
