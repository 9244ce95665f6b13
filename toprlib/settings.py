"""Every setting of a run, once: its range, where its default is from, and how a command line is read into it."""

import dataclasses
import io
import math
import os
import re
import sys
import zlib
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    get_args,
    get_type_hints,
)

import tyro

from toprlib.compositions import BASELINES, COMPOSITIONS
from toprlib.methods import METHODS
from toprlib.external_samples import columns_of
from toprlib.records import InputError, read_text
from toprlib.distributed import device, ranks

if TYPE_CHECKING:
    from topr import Limits

TINY = Path(__file__).resolve().parent.parent / "tiny"
Preset = Literal["laptop", "single-gpu", "paper"]
EngineName = Literal["hf", "vllm"]  # a test says that held.ENGINES has the same
OptimizerName = Literal["adamw", "adafactor", "sgd"]
Compute = Literal["float32", "bfloat16"]


class Range(NamedTuple):
    """The least and the largest value of a setting, and how to say it."""

    low: float
    high: float
    text: str


ABOVE_0, BELOW_1, LARGEST = math.nextafter(0.0, 1.0), math.nextafter(1.0, 0.0), sys.float_info.max
Count = Annotated[int, Range(1, LARGEST, "must be at least 1")]
Several = Annotated[int, Range(2, LARGEST, "must be at least 2")]
AtLeastZero = Annotated[int, Range(0, LARGEST, "must be at least 0")]
OffOrCount = Annotated[int, Range(-1, LARGEST, "must be at least -1")]
Positive = Annotated[float, Range(ABOVE_0, LARGEST, "must be positive and finite")]
Share = Annotated[float, Range(ABOVE_0, 1, "must lie in (0, 1]")]
OpenShare = Annotated[float, Range(ABOVE_0, BELOW_1, "must lie in (0, 1)")]
Clip = Annotated[float, Range(0, 1, "must lie in [0, 1]")]
Finite = Annotated[float, Range(-LARGEST, LARGEST, "must be finite")]

INSTEAD = {  # what is asked for and is no option, and what to do instead
    "--resume": "give the same command again: the run goes on where it was",
    "--learning-rate": "it is called --lr",
    "--completions-per-row": "leave it out: each completion is a row of its own",
    "--solutions": "leave it out: --generator writes the solutions",
    "--sliced-head": "leave it out; a smaller --micro-batch or --gradient-checkpointing saves memory",
    "--track": "python -m examples.track FOLDER tensorboard, or wandb, shows a run, while it goes on too",
}


@dataclass(frozen=True)
class Settings:
    """Every setting of a run; "paper" or "ours" says where the default of the preset laptop is from."""

    preset: tyro.conf.Positional[Preset] = "laptop"
    """comes first: laptop, a tiny model on tiny problems (ours); single-gpu, 24 GB (ours); paper, 8 x H100"""

    model: str = str(
        TINY / "two_thirds"
    )  # folder or hub name of the base model (ours; paper: Llama 3 8B Instruct)
    trust_remote_code: bool = False  # run code that comes with the model; it can do anything (ours)
    data: str = str(
        TINY
    )  # folder with train.jsonl and test.jsonl in GSM8K's form, or a hub name: openai/gsm8k (ours)
    test_data: str | None = (
        None  # where the test problems are, if not in --data (ours; MATH-500 has a name of its own)
    )
    samples: str | None = None
    """file, folder or hub name of samples to train on, not sampled here: prompt, completion, reward suffice (ours)"""
    columns: tuple[str, ...] = ()
    """FIELD=COLUMN ...: where --samples and --held-out have fields under other names, reward=A+B for a sum (ours)"""
    held_out: str | None = None
    """evaluate on the log-probabilities of these samples instead of on test problems; do not train on them (ours)"""
    evaluation: bool = True  # --no-evaluation trains on --samples and measures nothing (ours)
    trust_logmu: bool = False
    """take token_logmu of --samples for log mu; the check that pi = mu at the first step is skipped (ours)"""
    shots: int = 0  # worked examples before the question (ours for the tiny model; paper: 8)
    shots_file: Path | None = None
    """text of the worked examples, a blank line between them; default: those of the installed lm-eval package"""
    chat: bool = False  # ask in the tokenizer's own chat template, whose end of turn ends a completion (ours)
    system: Path | None = (
        None  # file with the system prompt for --chat; default: the template's own, if any (ours)
    )

    iterations: AtLeastZero = 1
    """rounds of sampling from the model and training it, mu_i = pi_{i-1} (paper, Section 4.3); 0: evaluate only"""
    problems: Count = (
        320  # training problems to sample from, the first ones (ours; paper: all 7,473)
    )
    n: Count = 16  # samples per training problem (paper, Section 4.1)
    composition: Literal[*COMPOSITIONS] = "uniform"
    """which samples to train on: any (paper), the positives, Anna Karenina's, or a --proportion of positives"""
    candidates: Count = (
        64  # samples per training problem for anna_karenina, in place of n (paper, Section 4.3)
    )
    proportion: OpenShare | None = None
    """share of positives for --composition proportion (paper, Section 4.3: 0.1 and 0.5)"""
    examples: Count | None = None
    """samples to train on in an iteration, at most (paper: 50,000); default: all that the composition allows"""
    epochs: Count = (
        1  # passes over these samples, each in an order of its own (paper, Section 4.2: 1)
    )

    engine: EngineName | None = None
    """what samples; default: vllm where there is a GPU (paper, Section 4.2), else hf, this process itself"""
    vllm_python: Path | None = (
        None  # interpreter whose environment has vLLM; default: this one (ours)
    )
    engine_gpus: Count = 1
    """GPUs that an engine of vLLM spans, by tensor parallelism; each is that of a process (ours; 70B weights need 4)"""
    temperature: Positive = 1.0  # sampling temperature (paper, Section 4.2)
    top_p: Share = 1.0  # top-p threshold of sampling (paper, Section 4.2)
    top_k: OffOrCount = (
        500  # sample among this many most probable tokens (paper, Section 4.2); 0 or -1: among all
    )
    max_new_tokens: Count = 128  # longest completion, in tokens (ours; paper: 512)
    tokens_at_once: Count = 40_000
    """tokens in a batch of --engine hf, prompts and new tokens included: memory and speed (ours)"""
    chunk: Count = 256  # problems sampled between two writes to the disk, by each process (ours)

    method: Literal[*METHODS] = "topr"
    """topr, tis, sft, reinforce, off_policy: rows of Table 1; ppo, dpo: what the paper compares with"""
    limits: tuple[float, float, float, float] | None = None
    """a+ b+ a- b-: bounds of the ratio (Eq. 7) in place of the method's"""
    baseline: Finite | None = None  # c, subtracted from the reward (paper: none)
    baseline_from: Literal[*BASELINES] = "zero"
    """what --baseline is counted from: zero (paper), the mean reward of all chosen samples, or of the prompt's own"""
    effective_proportion: Share | None = (
        None  # p~, effective share of positives, in place of --baseline (Eq. 12)
    )
    eps: Clip = 0.2  # PPO's clipping (paper, Section 4.3)
    beta: Positive = 0.1  # DPO's temperature (ours; the paper does not give its own)
    pairs: Count = 16  # DPO's pairs per problem, at most (paper, Section 4.3)

    optimizer: OptimizerName = "adamw"
    """adamw (ours for a tiny model), adafactor (paper, Section 4.2) or sgd (ours); none decays weights"""
    lr: Positive = (
        5e-5  # the optimiser's constant learning rate (ours for a tiny model; paper: 5e-7)
    )
    batch: Count = (
        16  # completions per optimiser step, over all processes (ours; paper: 8, one on each GPU)
    )
    micro_batch: Count = 8
    """completions of like length per forward pass of a process: memory and speed, not the gradient (ours; paper: 1)"""
    max_norm: Positive = 1.0  # gradient norm is clipped to this (paper, Section 4.2)
    compute: Compute = "float32"  # precision of forward and backward passes; weights, sums of gradients: float32 (ours)
    gradient_checkpointing: bool = (
        False  # recompute activations in backward passes: less memory, same gradient (ours)
    )
    reshard: bool = (
        True  # gather weights again for the backward pass: less memory, same gradient (ours)
    )
    lora: Count | None = None
    """rank of the adapters that are trained in place of the weights, through peft; default: all weights (ours)"""
    save_every: Count = 256  # optimiser steps between two checkpoints (ours)

    test_problems: Count = (
        150  # test problems to evaluate on, the first ones (ours; paper: all 1,319)
    )
    test_samples: Several = 16  # samples per test problem (ours; paper: 64)
    between_samples: Several | None = None
    """samples per test problem after an iteration that another one follows (ours); default: --test-samples"""
    k: Count = 16  # the K of maj@K and pass@K (paper, Section 4.3)
    curve_points: Count = 5  # evaluations along an epoch for the curve, the last one in full (ours; paper: at its end)
    curve_samples: Several = 4  # samples per test problem at the points before the last (ours)

    dry_run: bool = False  # say what the run would draw, train and need in memory, and do nothing
    debug: bool = False  # end with a traceback, not with a line, where something is wrong
    seed: AtLeastZero = 0  # seed of everything that is drawn
    out: Path | None = (
        None  # folder to write into; default: runs/PRESET and the settings that differ from the preset's
    )
    reuse: Path | None = None
    """folder of another run: copy what the initial model has drawn there, with the same sampling settings (ours)"""

    @property
    def test_source(self) -> str | None:
        """Where the test problems are; None for a run without any.

        >>> Settings(data="here").test_source, Settings(held_out="file").test_source
        ('here', None)
        """
        return (self.test_data or self.data) if self.evaluation and self.held_out is None else None

    @property
    def system_prompt(self) -> str | None:
        """The text of --system, without the white space around it; InputError where it cannot be read."""
        return None if self.system is None else read_text(self.system).strip()

    @property
    def bounds(self) -> "Limits | None":
        """The four bounds: those given, or the method's row of Table 1; None for a method with a loss of its own."""
        from topr import PRESETS, Limits

        if METHODS[self.method].loss is not None:
            return None
        return Limits(*self.limits) if self.limits else PRESETS[self.method]

    def seed_of(self, stage: str) -> int:
        """A seed of its own for each stage, so that a change in one stage leaves the others' draws alone."""
        return zlib.crc32(f"{stage} {self.seed}".encode())

    def record(self, samples_sha256: str | None = None, held_out_sha256: str | None = None) -> dict:
        """What a run is, for config.json: its settings, hashes of the samples it was given, and its processes."""
        others = {
            "system": self.system_prompt if self.chat else None,
            "samples_sha256": samples_sha256,
            "held_out_sha256": held_out_sha256,
            "ranks": ranks(),
        }
        project = f"{TINY.parent}/"  # from where a path within it is told, so that a copy of the project has the same
        values = {
            name: value
            for name, value in dataclasses.asdict(self).items()
            if name not in NOT_OF_A_RUN
        }
        return {
            n: str(v).removeprefix(project) if isinstance(v, str | Path) else v
            for n, v in values.items()
        } | others

    def default_out(self, usual: "Settings", runs: str = "runs/") -> Path:
        """The folder runs/PRESET, named after what differs from the `usual` settings of the preset too.

        >>> Settings(method="reinforce", seed=3).default_out(Settings()).as_posix()
        'runs/laptop_method=reinforce_seed=3'
        """
        there, here = dataclasses.asdict(usual), dataclasses.asdict(self)
        differing = [f"{k}={v}" for k, v in here.items() if v != there[k] and k not in NOT_OF_A_RUN]
        name = re.sub("[^A-Za-z0-9._=+-]+", "_", " ".join([self.preset, *differing]))
        if len(name) > 120:  # a long path, for one; what was cut still tells runs apart
            name = f"{name[:111]}_{zlib.crc32(name.encode()):08x}"
        return Path(f"{runs}{name}")


NOT_OF_A_RUN = ("out", "reuse", "dry_run", "debug", "vllm_python")
OF_DRAWING = (
    "model",
    "engine",
    "temperature",
    "top_p",
    "top_k",
    "max_new_tokens",
    "tokens_at_once",
    "chunk",
    "seed",
)
OF_DRAWING += ("compute", "samples_sha256", "chat", "system")
OF_SCORING = ("batch", "micro_batch", "lora", "trust_logmu", "ranks")  # and the model and --compute

AnySettings = TypeVar("AnySettings", bound=Settings)


def read_settings(
    arguments: Sequence[str],
    presets: Mapping[str, AnySettings],
    description: str | None = None,
    runs: str = "runs/",
) -> AnySettings:
    """The settings of a command line: the preset that it begins with, if it does, and changes to it.

    runs: what the folder's name begins with where no --out is given; the settings returned always have an `out`.

    >>> read_settings(["--seed", "1"], {"laptop": Settings()}).out.as_posix()
    'runs/laptop_seed=1'
    """
    for argument in arguments:
        option = argument.partition("=")[0].replace("_", "-").replace("--no-", "--")
        if option in INSTEAD:
            raise InputError(f"{option}: is no option; {INSTEAD[option]}")
    preset = arguments[0] if arguments and arguments[0] in get_args(Preset) else "laptop"
    if preset not in presets:
        raise InputError(f"{preset}: is not among this script's presets, {', '.join(presets)}")
    usual = presets[preset]
    settings = parsed(type(usual), arguments, description=description, default=usual)
    if settings.preset != preset:
        raise InputError(
            f"{settings.preset}: a preset comes first, before the settings that change it"
        )
    return replace(settings, out=settings.out or settings.default_out(usual, runs))


def parsed(kind: type, arguments: Sequence[str] | None = None, **options: Any) -> Any:
    """What `tyro.cli` reads; where it cannot, InputError with what it says in a box of several lines."""
    box = io.StringIO()
    try:
        with redirect_stderr(box):
            return tyro.cli(kind, args=arguments, **options)
    except SystemExit as ended:
        if ended.code == 0:  # --help
            raise
        first, *others = re.split(
            "│[ ─]+│", box.getvalue().partition("\n")[2]
        )  # at rules and blank lines
        fault = " ".join(first.replace("│", "").split()).removeprefix("Error parsing ").rstrip(".")
        near = (
            re.findall(r"│ {5}(--[\w-]+)", "".join(others))
            if "Perhaps you meant" in box.getvalue()
            else []
        )
        raise InputError(
            f"{fault}; did you mean {' or '.join(near)}?" if near else f"{fault}; see --help"
        ) from ended


def intended_ranks(preset: Preset) -> int:
    """The processes that a preset is for where torchrun does not start any: 8 for the paper's node (Section 4.2)."""
    return 8 if preset == "paper" and "WORLD_SIZE" not in os.environ else ranks()


def check_engine_gpus(option: str, engine: EngineName | None, gpus: int, processes: int) -> None:
    """InputError unless the engine can span so many GPUs, and such engines divide a machine's processes."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    if local % gpus > 0:
        raise InputError(
            f"{option} {gpus}: must divide the {local} processes of a machine, one for each GPU"
        )
    is_of_gpus = (
        processes != ranks() or device().type == "cuda"
    )  # other processes than these have GPUs
    if gpus > 1 and (engine or ("vllm" if is_of_gpus else "hf")) != "vllm":
        raise InputError(f"{option} {gpus}: is for --engine vllm; hf uses the process's own GPU")


def check(settings: Settings, processes: int | None = None) -> None:
    """InputError for settings that are out of range or do not go together, before anything is loaded or written.

    processes: how many there will be; None for as many as there are.
    """
    for name, hint in get_type_hints(type(settings), include_extras=True).items():
        value = getattr(settings, name)
        for part in (hint, *get_args(hint)):  # `Count | None` joins two, each with notes of its own
            for rule in getattr(part, "__metadata__", ()):
                if (
                    isinstance(rule, Range)
                    and value is not None
                    and not rule.low <= value <= rule.high
                ):
                    raise InputError(f"--{name.replace('_', '-')} {value}: {rule.text}")
    if settings.method not in METHODS:
        raise InputError(f"--method {settings.method}: choose from {', '.join(METHODS)}")
    processes = processes or ranks()
    if settings.engine_gpus > 1:
        check_engine_gpus("--engine-gpus", settings.engine, settings.engine_gpus, processes)
    for is_broken, message in _rules(settings, processes):
        if is_broken:
            raise InputError(message)
    if settings.columns:
        columns_of(settings.columns)
    if settings.limits is not None:
        try:
            _ = settings.bounds  # which checks their order
        except ValueError as error:
            raise InputError(f"--limits: {error}") from None


def _rules(settings: Settings, processes: int) -> list[tuple[bool, str]]:
    """Of each rule, whether the settings break it, and what is said then: sizes, samples, method."""
    method, batch, k, n = (
        METHODS[settings.method],
        settings.batch,
        settings.k,
        settings.test_samples,
    )
    per_row, lora, is_given = (
        2 if method.of_pairs else 1,
        settings.lora,
        settings.samples is not None,
    )
    too_few = (
        f"is less than a row for each of {processes} processes; give --batch {per_row * processes}"
    )
    rules = [
        (batch % per_row > 0, f"--batch {batch}: must be a multiple of the {per_row} in a row"),
        (batch < per_row * processes, f"--batch {batch}: {too_few}"),
        (
            k > n,
            f"--test-samples {n}: must be at least --k {k}; with more, maj@{k} has an interval",
        ),
        (
            lora is not None and processes > 1,
            f"--lora {lora}: is for one process, and there are {processes}; train all weights, or start one",
        ),
        (
            lora is not None and find_spec("peft") is None,
            f"--lora {lora}: needs peft, which is not installed: {sys.executable} -m pip install peft",
        ),
    ]
    only_with_samples = {
        "--trust-logmu": settings.trust_logmu,
        "--columns": settings.columns != (),
        "--held-out": settings.held_out is not None,
        "--no-evaluation": not settings.evaluation,
    }
    rules += [
        (not is_given and is_set, f"{option}: is for --samples")
        for option, is_set in only_with_samples.items()
    ]
    evaluations = (
        (settings.held_out is not None)
        + (not settings.evaluation)
        + (settings.test_data is not None)
    )
    rules += [
        (
            is_given and evaluations != 1,
            "--samples: say how to evaluate, by one of --test-data DIR (problems), --held-out FILE (samples that are "
            "not trained on) and --no-evaluation",
        ),
        (is_given and settings.iterations > 1, "--samples: serve one iteration, not several"),
        (
            settings.shots_file is not None and settings.shots < 1,
            "--shots-file: say with --shots how many to take",
        ),
        (
            settings.system is not None and not settings.chat,
            "--system: is the system prompt of a --chat; give both",
        ),
    ]

    has_baseline = settings.baseline is not None or settings.baseline_from != "zero"
    has_share, is_proportion = (
        settings.effective_proportion is not None,
        settings.composition == "proportion",
    )
    return [
        *rules,
        (has_baseline and has_share, "--effective-proportion: sets the baseline; give no other"),
        (
            method.of_pairs and (has_baseline or has_share),
            f"--method {settings.method}: has no baseline; give none",
        ),
        (
            is_proportion != (settings.proportion is not None),
            "--composition proportion and --proportion P: give both or neither",
        ),
        (
            settings.limits is not None and method.loss is not None,
            f"--limits: have no meaning for {settings.method}",
        ),
    ]
