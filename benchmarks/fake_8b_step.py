"""A training step of Llama 3 8B on eight GPUs, without a GPU: its memory, collectives, operations and host time.

    python benchmarks/fake_8b_step.py                     # against results/benchmarks/fake_8b_step.json: a few minutes
    python benchmarks/fake_8b_step.py --all               # with TRL's and verl's settings, and other models and GPUs

pipeline/rehearsal.py trains a step on tensors without values, by the functions that a run calls; `--dry-run` shows what
it finds. The exit status is 1 where a peak or the operations exceed what the results' file says, on which docs/gpu.md
and docs/performance.md rest, or where there are more collectives than FSDP and an optimiser should need.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from math import ceil
from pathlib import Path
from typing import Any

import torch
import transformers
import tyro
from rich.console import Console
from rich.table import Table
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pipeline.dry_run import COMPLETION, scoring_seconds, step_seconds, tokens_per_second
from pipeline.records import write_file
from pipeline.rehearsal import Setup, needed, rehearse
from pipeline.runtime.preflight import WRITING
from pipeline.settings import Settings as RunSettings
from train_gsm8k import PAPER

PROMISED = Path(__file__).resolve().parent.parent / "results" / "benchmarks" / "fake_8b_step.json"
PROMPT, EIGHT_B = 1_100, "Llama 3 8B"
OF_UPDATE = 5  # collectives that clipping and the optimiser may call, however many weights there are
SLACK = 1.001  # of what was promised
START = 180.0  # seconds that an engine takes to start, and the trainer to load the model; assumed
FIRST = replace(PAPER, problems=64, examples=512, iterations=2, test_problems=64)  # docs/gpu.md's first command

LLAMA = {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}, "max_position_embeddings": 8192}


def _llama(hidden: int, inner: int, layers: int, heads: int, **other: object) -> transformers.PreTrainedConfig:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    heads = {"num_attention_heads": heads, "num_key_value_heads": 8}
    return transformers.LlamaConfig(**{"vocab_size": 128_256} | LLAMA | sizes | heads | other)


MODELS: Mapping[str, Callable[[], transformers.PreTrainedConfig]] = {  # as their config.json says
    EIGHT_B: partial(_llama, 4096, 14_336, 32, 32),
    "Llama 3.2 3B": partial(_llama, 3072, 8192, 28, 24, tie_word_embeddings=True),
    "Llama 3.2 1B": partial(_llama, 2048, 8192, 16, 32, tie_word_embeddings=True),
    "Qwen2.5 0.5B": partial(
        transformers.Qwen2Config,
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "small": partial(_llama, 256, 896, 4, 4, num_key_value_heads=4, vocab_size=2048),  # for tests
}

FAST = {"gradient_checkpointing": False, "reshard": False}
PLAIN = {"gradient_checkpointing": False, "reshard": True}
SMALL = {"gradient_checkpointing": True, "reshard": True}
STEPS: Mapping[str, dict[str, object]] = {
    "no checkpointing, no resharding": FAST,
    "no checkpointing": PLAIN,
    "gradient checkpointing": SMALL,
    "16 completions on one prompt": SMALL | {"batch": 128, "micro_batch": 16, "completions_per_row": 16},
    "two padded rows": SMALL | {"batch": 16, "micro_batch": 2},
    "one GPU": SMALL | {"processes": 1},
}


def transformers_adafactor(name: str, model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    """Adafactor as this project had it until c7f49a7: transformers' own, which leaves collectives to DTensor."""
    optimizer = transformers.Adafactor(model.parameters(), lr=lr, scale_parameter=False, relative_step=False)
    for weight in model.parameters():
        zero = torch.zeros_like(weight.detach())
        means = {"exp_avg_sq_row": zero.mean(-1), "exp_avg_sq_col": zero.mean(-2)} if zero.ndim > 1 else {}
        optimizer.state[weight] = {"step": 0, "RMS": 0} | (means or {"exp_avg_sq": zero})
    return optimizer


def fused_adamw(name: str, model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    """transformers' default for its trainers: adamw_torch_fused."""
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=True)


def shard_as_accelerate(
    model: transformers.PreTrainedModel, compute: str, gradient_checkpointing: bool, reshard: bool
) -> None:
    """As accelerate 1.15.0 does (utils/fsdp_utils.py, fsdp2_prepare_model): gradients are added up in bfloat16."""
    options = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16)}
    decoder = model.get_decoder()
    for layer in decoder.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        fully_shard(layer, reshard_after_forward=True, **options)
    fully_shard(decoder.embed_tokens, reshard_after_forward=True, **options)
    fully_shard([decoder.norm, model.lm_head], reshard_after_forward=False, **options)
    fully_shard(model, **options)


# What each does by default for a step of 8: gradient checkpointing on, weights gathered again. The optimiser is AdamW:
# of TRL 1.16.0 (trl/trainer/base_config.py; trl/accelerate_configs/fsdp2.yaml; transformers' optim, adamw_torch_fused)
# and of verl 0.9.1 (verl/trainer/config: engine/fsdp.yaml, model/hf_model.yaml, optim/fsdp.yaml; wraps as FSDP2 here).
SIDES: Mapping[str, tuple[dict[str, object], tuple[Callable, ...]]] = {
    "before (c7f49a7)": (SMALL, (transformers_adafactor,)),
    "TRL 1.16.0": (SMALL, (fused_adamw, shard_as_accelerate)),
    "verl 0.9.1": (SMALL | {"optimizer": "adamw"}, ()),
}
CARDS = (("Qwen2.5 0.5B", 1), ("Llama 3.2 1B", 1), ("Llama 3.2 3B", 1), *((EIGHT_B, n) for n in (1, 2, 4, 8)))


@dataclass(frozen=True)
class Settings:
    """What is rehearsed."""

    all: bool = False
    """with TRL's and verl's settings, and other models and GPUs, for the tables of the pages"""
    steps: tuple[str, ...] = tuple(STEPS)
    """the configurations of Llama 3 8B"""
    model: str = EIGHT_B
    """whose shapes; for tests"""
    promised: Path = PROMISED
    """the results that must hold"""
    out: Path = Path("runs/bench")
    """folder to write fake_8b_step.json into"""


def rehearsed(model: str, changes: Mapping[str, object], functions: tuple[Callable, ...] = ()) -> dict[str, Any]:
    """A step of the paper's batch of 8, 1,100 tokens of prompt and 512 of completion, as a record for JSON."""
    usual = {"batch": PAPER.batch, "micro_batch": PAPER.micro_batch, "optimizer": PAPER.optimizer}
    sizes = {"processes": 8, "prompt": PROMPT, "completion": PAPER.max_new_tokens}
    return _rehearsed(model, tuple((usual | sizes | changes).items()), functions)


@cache
def _rehearsed(model: str, changes: tuple[tuple[str, object], ...], functions: tuple[Callable, ...]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        config = MODELS[model]()
        config.save_pretrained(folder)
        setup = Setup(model=folder, **dict(changes))
        found = rehearse(setup, *functions)
    kept = setup._asdict() | {"model": model, "layers": config.num_hidden_layers}
    return {"setup": kept, **found._asdict(), "peak": found.peak, "needed": needed(found.peak)}


def allowed(setup: Mapping[str, Any]) -> dict[str, int]:
    """The most collectives of FSDP2 in a step, with a group for each layer and one for the rest of the model.

    A forward pass gathers each group's weights, a backward pass those of the layers again if they were resharded; a
    prompt that several completions share is a forward pass of its own. Gradients are scattered once.

    >>> allowed({"processes": 8, "batch": 8, "micro_batch": 1, "completions_per_row": 1, "layers": 32, "reshard": True})
    {'all-gather': 65, 'reduce-scatter': 33}
    """
    if setup["processes"] == 1:
        return {"all-gather": 0, "reduce-scatter": 0}
    batches = ceil(setup["batch"] / setup["processes"] / setup["micro_batch"])
    calls = 1 + (setup["completions_per_row"] > 1)
    gathered = setup["layers"] * (1 + setup["reshard"]) + 1
    return {"all-gather": batches * calls * gathered, "reduce-scatter": batches * (setup["layers"] + 1)}


def faults(name: str, found: Mapping[str, Any], promised: Mapping[str, Any] | None) -> list[str]:
    """What a step takes above what was promised, or may be needed."""
    told = []
    for kind, most in allowed(found["setup"]).items():
        if (calls := found["collectives"].get(kind, 0) - found["of_update"].get(kind, 0)) > most:
            told.append(f"{name}: {calls} calls of {kind}, at most {most} are needed")
    if (calls := sum(found["of_update"].values())) > OF_UPDATE:
        told.append(f"{name}: clipping and the optimiser call {calls} collectives, at most {OF_UPDATE} are allowed")
    if promised is None:
        return [*told, f"{name}: the results' file has no such step"]
    if found["setup"] != promised["setup"]:
        told.append(f"{name}: {found['setup']} was rehearsed, the results are of {promised['setup']}")
    for what in ("peak", "flops"):
        if found[what] > SLACK * promised[what]:
            told.append(f"{name}: {what} {found[what]:,.0f}, above the {promised[what]:,.0f} that were promised")
    return told


# ---- hours -------------------------------------------------------------------------------------------------------


def estimate(
    step: Mapping[str, Any], config: transformers.PreTrainedConfig, parameters: int, run: RunSettings
) -> dict[str, float]:
    """Hours of a run on eight H100s, stage by stage, by the assumptions of pipeline/dry_run.py and preflight.py.

    Every side scores each sample once before it trains on it: TRL with vLLM and verl compute old log-probabilities.
    Sampling, engines and saving are taken to be the same for all.
    """
    completion = COMPLETION * run.max_new_tokens
    share = (PROMPT + completion) / (PROMPT + run.max_new_tokens)
    k, steps = run.iterations, min(run.examples, run.problems * run.n) // run.batch
    drawn = k * run.problems * run.n + (1 + k) * run.test_problems * run.test_samples
    one = step_seconds(share * step["flops"], step["sent"], 8, step["host_seconds"])
    score = scoring_seconds(share * step["forward_flops"], parameters, step["setup"]["reshard"], 8)
    speed = 8 * tokens_per_second(config, parameters, PROMPT + completion)
    seconds = {
        "training": k * steps * one,
        "scoring": k * steps * score,
        "sampling": drawn * completion / speed,
        "saving": k * (steps // run.save_every + 1) * 4 * parameters / WRITING,
        "starting": (1 + k) * START,
    }
    return {"a step": one / 3600} | {name: value / 3600 for name, value in seconds.items()}


# ---- the command -------------------------------------------------------------------------------------------------


def main(settings: Settings) -> list[str]:
    """Rehearse, print, write; the faults that were found."""
    record: dict[str, Any] = {
        "command": "python benchmarks/fake_8b_step.py --all",
        "machine": {"torch": torch.__version__, "transformers": transformers.__version__},
        "date": time.strftime("%Y-%m-%d"),
        "steps": {name: rehearsed(settings.model, STEPS[name]) for name in settings.steps},
    }
    print_steps(record["steps"])
    promised = json.loads(settings.promised.read_text())["steps"] if settings.promised.exists() else {}
    found = [fault for name, step in record["steps"].items() for fault in faults(name, step, promised.get(name))]
    if settings.all:
        config = MODELS[settings.model]()
        with torch.device("meta"):
            parameters = transformers.AutoModelForCausalLM.from_config(config).num_parameters()
        sides = {name: rehearsed(settings.model, changes, how) for name, (changes, how) in SIDES.items()}
        sides["now"] = rehearsed(settings.model, FAST)
        record["sides"] = {n: side | {"hours": estimate(side, config, parameters, PAPER)} for n, side in sides.items()}
        record["first run"] = estimate(sides["now"], config, parameters, FIRST)
        record["cards"] = [rehearsed(m, how | {"processes": n}) for m, n in CARDS for how in (FAST, PLAIN, SMALL)]
        print_steps(record["sides"])
    write_file(settings.out / "fake_8b_step.json", json.dumps(record, indent=1) + "\n")
    return found


def print_steps(steps: Mapping[str, Mapping[str, Any]]) -> None:
    """A row for each step: GB by kind at the peak, collectives, TFLOP, host time."""
    kinds = list(next(iter(steps.values()))["passes"])
    table = Table("", *kinds, "peak", "optimiser's peak", "collectives", "of the optimiser", "TFLOP", "host time")
    for name, step in steps.items():
        memory = [*(step["passes"][kind] for kind in kinds), step["peak"], sum(step["update"].values())]
        calls = (sum(step[which].values()) for which in ("collectives", "of_update"))
        work = f"{step['flops'] / 1e12:.1f}", f"{step['host_seconds']:.3f} s"
        table.add_row(name, *(f"{size / 1e9:.1f}" for size in memory), *map(str, calls), *work)
    Console(width=200).print(table)


if __name__ == "__main__":
    if told := main(tyro.cli(Settings, description=__doc__)):
        sys.exit("\n".join(told))
