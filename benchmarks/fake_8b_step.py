"""A training step on tensors without values, counted. It builds on private interfaces of torch 2.13."""

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch._subclasses import fake_tensor
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torch.distributed._tools.mod_tracker import ModTracker
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

import topr
from benchmarks import Settings
from pipeline.dataset import epoch_steps, lay_out
from pipeline.models.language_model import SharedRows, make_optimizer, shard, token_logprobs
from pipeline.records import Example
from pipeline.report import Table

aten = torch.ops.aten
RESULTS = Path(__file__).resolve().parent.parent / "results" / "benchmarks" / "fake_8b_step.json"
SLACK = 1.001  # of what the results say
KINDS = {  # MemTracker's kinds, and what they are called here
    _MemRefType.PARAM: "weights",
    _MemRefType.BUFFER: "weights",
    _MemRefType.GRAD: "gradients",
    _MemRefType.OPT: "optimiser",
    _MemRefType.OTH: "gathered weights",
    _MemRefType.ACT: "activations",
    _MemRefType.TEMP: "the rest",
}
COLLECTIVES = re.compile("(all|reduce)_?(gather|reduce|scatter)")  # in the names of c10d and of its functional form
ON_A_CPU = {
    aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
}

EIGHT_B, SHORT = "Llama 3 8B", "eight layers of Llama 3 8B"
SHAPES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SHAPES += ("vocab_size", "tie_word_embeddings")
MODELS: Mapping[str, tuple[int, ...]] = {  # as their config.json has them
    EIGHT_B: (4096, 14_336, 32, 32, 8, 128_256, False),
    SHORT: (4096, 14_336, 8, 32, 8, 128_256, False),  # enough that activations decide what the peak is
    "Llama 3.2 3B": (3072, 8192, 28, 24, 8, 128_256, True),
    "Llama 3.2 1B": (2048, 8192, 16, 32, 8, 128_256, True),
    "Qwen2.5 0.5B": (896, 4864, 24, 14, 2, 151_936, True),
    "small": (256, 896, 4, 4, 4, 2048, False),  # for a CPU
}


def config_of(model: str) -> transformers.PreTrainedConfig:
    """The configuration of one of MODELS."""
    kind = transformers.Qwen2Config if model.startswith("Qwen") else transformers.LlamaConfig
    rope = {"rope_type": "default", "rope_theta": 500_000.0}
    shapes = dict(zip(SHAPES, MODELS[model], strict=True))
    return kind(**shapes, max_position_embeddings=8192, rope_parameters=rope)


class Setup(NamedTuple):
    """A step: by default the paper's, of 8 completions on 8 GPUs, as the preset `paper` computes it."""

    model: str = EIGHT_B
    processes: int = 8
    prompt: int = 1_100  # tokens of a prompt: eight worked examples
    completion: int = 512  # tokens of the longest completion
    batch: int = 8  # completions in a step, over all processes
    micro_batch: int = 1
    completions_per_row: int = 1
    compute: str = "bfloat16"
    optimizer: str = "adafactor"
    gradient_checkpointing: bool = False
    reshard: bool = False
    as_trl: bool = False  # sharded by accelerate, with fused AdamW


FAST, PLAIN = Setup(), Setup(reshard=True)
SMALL = Setup(gradient_checkpointing=True, reshard=True)
STEPS: Mapping[str, Setup] = {
    "no checkpointing, no resharding": FAST,
    "no checkpointing": PLAIN,
    "gradient checkpointing": SMALL,
    "16 completions on one prompt": SMALL._replace(batch=128, micro_batch=16, completions_per_row=16),
    "two padded rows": SMALL._replace(batch=16, micro_batch=2),
    "one GPU": SMALL._replace(processes=1),
}
GPUS = (("Qwen2.5 0.5B", 1), ("Llama 3.2 1B", 1), ("Llama 3.2 3B", 1), *((EIGHT_B, n) for n in (1, 2, 4, 8)))
GROUPS: Mapping[str, Mapping[str, Setup]] = {  # as in the results' file
    "steps": STEPS,
    "small": {name: setup._replace(model=SHORT) for name, setup in STEPS.items()},
    "sides": {  # their defaults; docs/internals/performance.md names the files that these are from
        "TRL 1.16.0": SMALL._replace(optimizer="adamw", as_trl=True),
        "verl 0.9.1": SMALL._replace(optimizer="adamw"),
        "topr": FAST,
    },
    "cards": {
        f"{model}, {n} GPUs, {way}": how._replace(model=model, processes=n)
        for model, n in GPUS
        for way, how in {"neither": FAST, "--reshard": PLAIN, "--reshard --gradient-checkpointing": SMALL}.items()
    },
}


def shard_as_accelerate(model: transformers.PreTrainedModel) -> None:
    """As accelerate 1.15.0 does (utils/fsdp_utils.py, fsdp2_prepare_model): gradients are added up in bfloat16."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    decoder = model.get_decoder()
    for layer in decoder.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    for part in (*decoder.layers, decoder.embed_tokens):
        fully_shard(part, reshard_after_forward=True, mp_policy=policy)
    fully_shard([decoder.norm, model.lm_head], reshard_after_forward=False, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


class _Passes(ModTracker):
    """In place of the tracker of modules: `is_bw` is set by hand, since FSDP ends a backward pass in a callback."""

    is_bw = False


class Meter(MemTracker):
    """Counts collectives, bytes and operations, besides the memory that MemTracker tracks.

    Where code asks for the value of a tensor that has none, the answer is 1, or True.
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives, self.sent, self.flops = Counter(), Counter(), 0.0
        self._mod_tracker = _Passes()

    # In place of MemTracker's statistics of modules, which do not allow a layer to be called twice.
    _pre_fw_hook = _post_fw_hook = _pre_bw_hook = _post_bw_hook = lambda *_: None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001
        if func is aten._local_scalar_dense.default and getattr(args[0], "constant", 0) is None:
            return args[0].dtype == torch.bool or 1.0
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if out is NotImplemented:
            return out
        if "c10d" in func.namespace and (named := COLLECTIVES.search(func._opname)):
            name = "-".join(named.groups())
            whole = max((x for x in tree_leaves((args, out)) if isinstance(x, Tensor)), key=lambda x: x.nbytes)
            self.collectives[name] += 1
            self.sent[name] += whole.nbytes
            if name == "all-gather":
                self._update_and_maybe_create_winfos(whole, _MemRefType.OTH)
        elif count := flop_registry.get(func.overloadpacket) or ON_A_CPU.get(func.overloadpacket):
            self.flops += count(*args, **kwargs or {}, out_val=out)
        elif func is torch.ops.fsdp.split_with_sizes_copy.default:
            for gathered in kwargs["out"]:
                self._update_and_maybe_create_winfos(gathered, _MemRefType.OTH)
        return out


def counted(setups: Sequence[Setup]) -> list[dict[str, Any]]:
    """What the first process needs for a step of each setup, as records for JSON; found in a process of its own.

    peak, kinds: bytes at the peak, and what they are. collectives: calls of a step; sent: bytes of the whole tensors
    that they gather, scatter or add up. flops: of a step, recomputation included.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as apart:
        return list(apart.map(_counted, setups))


def _counted(setup: Setup) -> dict[str, Any]:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    fake_tensor.CONSTANT_NUMEL_LIMIT = 2**20  # masks and token ids keep their values, which decide what is computed
    transformers.masking_utils.is_tracing = lambda *_: False  # so that masks are looked at, as on a GPU
    if dist.is_initialized():
        dist.destroy_process_group()
    if setup.processes > 1 or setup.compute != "float32":
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=setup.processes)
    # Every second completion is a token shorter than the longest, so that padding is masked.
    examples = [Example([0] * setup.prompt, [0] * (setup.completion - i % 2), -1.0, 1.0) for i in range(setup.batch)]
    rows = [examples[i : i + setup.completions_per_row] for i in range(0, setup.batch, setup.completions_per_row)]
    [step] = lay_out(epoch_steps(rows, setup.batch, setup.micro_batch, 0, setup.processes), "cpu")
    meter = Meter()

    def logprobs(model: torch.nn.Module, batch: SharedRows) -> Tensor:
        meter._mod_tracker.is_bw = False
        logp = token_logprobs(model, batch).sum(-1)
        meter._mod_tracker.is_bw = True
        return logp

    with fake_tensor.FakeTensorMode() as fake:
        known = partial(fake.fake_tensor_converter.from_real_tensor, fake, make_constant=True)
        batches = [batch._make(known(x) if isinstance(x, Tensor) else x for x in batch) for batch in step.micro_batches]
        model = transformers.AutoModelForCausalLM.from_config(config_of(setup.model), dtype=torch.float32).eval()
        with fake_tensor.unset_fake_temporarily():  # the mesh of processes needs values
            if setup.as_trl:
                shard_as_accelerate(model)
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
            else:
                shard(model, setup.compute, setup.gradient_checkpointing, setup.reshard)
                optimizer = make_optimizer(setup.optimizer, model, 1e-6)
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight.detach())
        # An update before those that count, so that the optimiser's state is there, and DTensor, which tries an
        # operation on tensors of the whole shape when it meets it first, has met them all.
        with Meter():
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        optimizer.zero_grad()
        meter.track_external(model, optimizer)
        with meter:
            meter._track_module_params_and_buffers(model)
            list(topr.train(model, optimizer, [topr.Step(batches, step.sequences)], logprobs=logprobs))
    kinds = dict.fromkeys(KINDS.values(), 0)
    for kind, name in KINDS.items():
        kinds[name] += sum(of_device[kind] for of_device in meter.get_tracker_snapshot("peak").values())
    found = {"setup": setup._asdict(), "peak": sum(kinds.values()), "kinds": kinds}
    return found | {"collectives": dict(meter.collectives), "sent": dict(meter.sent), "flops": meter.flops}


def faults(name: str, found: Mapping[str, Any], promised: Mapping[str, Any] | None) -> list[str]:
    """In lines: what a step takes above what the results say."""
    if promised is None or found["setup"] != promised["setup"]:
        return [f"{name}: the results' file has no such step, {found['setup']}"]
    pairs = {what: (found[what], SLACK * promised[what]) for what in ("peak", "flops")}
    pairs |= {kind: (calls, promised["collectives"].get(kind, 0)) for kind, calls in found["collectives"].items()}
    return [f"{name}: {what} {own:,.0f}, above {most:,.0f}" for what, (own, most) in pairs.items() if own > most]


def fake_8b_step(settings: Settings) -> dict[str, Any]:
    """A training step of Llama 3 8B on eight GPUs, without a GPU: its memory, collectives and operations.

    The step is trained by the functions that a run calls, on tensors that have shapes and no values, in a process group
    whose collectives do nothing. Not seen: fragments, CUDA's context, NCCL's buffers and kernels' workspaces. The exit
    status is 1 where a step takes more than the results' file says, which docs/gpu.md and the presets rest on.
    """
    found, told, promised = {}, [], json.loads(RESULTS.read_text())
    for group in GROUPS if settings.all else ["small" if settings.small else "steps"]:
        found[group] = dict(zip(GROUPS[group], counted(list(GROUPS[group].values())), strict=True))
        for name, step in found[group].items():
            told += faults(name, step, promised.get(group, {}).get(name))
    return found | {"faults": told}


def tables(found: Mapping[str, Any]) -> list[tuple[Table, Sequence[str]]]:
    """For each group a row for each step: GB by kind at the peak, and their sum; GB sent; calls; operations."""
    made, head = [], ["GB", *dict.fromkeys(KINDS.values()), "peak", "sent", "collectives", "of the optimiser", "TFLOP"]
    for steps in (found[group] for group in GROUPS if group in found):
        rows = []
        for name, step in steps.items():
            sizes = (*step["kinds"].values(), step["peak"], sum(step["sent"].values()))
            calls = sum(step["collectives"].values()), step["collectives"]["all-reduce"]
            cells = [*(f"{size / 1e9:.1f}" for size in sizes), *map(str, calls)]
            rows.append([name, *cells, f"{step['flops'] / 1e12:.1f}"])
        made.append((Table(head, rows), ()))
    return made
