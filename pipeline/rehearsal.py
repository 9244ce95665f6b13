"""What a training step needs, counted without a GPU: the step itself, on tensors that have shapes and no values.

A model of the true size is built under torch's FakeTensorMode, in a process group of any size whose collectives do
nothing, and trained for one step by the project's own functions. Memory is what their tensors would take, collectives
and operations are those that they call. Not seen: fragments, CUDA's context, NCCL's buffers and kernels' workspaces,
which `needed` makes room for. Attention is counted in full, without a causal kernel's saving of a half.

The process group is the only one in its process, and no GPU may be seen there: `rehearse` has a process of its own.
"""

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import NamedTuple

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch._subclasses import fake_tensor
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torch.distributed._tools.mod_tracker import ModTracker
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

import topr
from pipeline.dataset import epoch_steps
from pipeline.models import chunked_head
from pipeline.models.language_model import SharedRows, collate, make_optimizer, shard, token_logprobs
from pipeline.records import Example, InputError
from pipeline.runtime.processes import hide_gpus
from pipeline.settings import Compute, OptimizerName, Settings

aten = torch.ops.aten
KINDS = {  # MemTracker's kinds, and what they are called here
    _MemRefType.PARAM: "weights",
    _MemRefType.BUFFER: "weights",
    _MemRefType.GRAD: "gradients",
    _MemRefType.OPT: "optimiser",
    _MemRefType.OTH: "gathered weights",
    _MemRefType.ACT: "activations",
    _MemRefType.TEMP: "the rest",
}
COLLECTIVES = {  # as c10d and its functional form call them
    "_allgather_base_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "broadcast_": "broadcast",
}
NewOptimizer = Callable[..., torch.optim.Optimizer]
ON_A_CPU = {
    aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
}


class Setup(NamedTuple):
    """A step to rehearse: the model and its processes, the longest sequences, and the settings that matter."""

    model: str  # a folder or the hub's name of a model; its config is read, its weights are not
    processes: int
    prompt: int  # tokens of a prompt
    completion: int  # tokens of a completion
    batch: int = 8  # completions in a step, over all processes
    micro_batch: int = 1
    completions_per_row: int = 1
    compute: Compute = "bfloat16"
    optimizer: OptimizerName = "adafactor"
    sliced_head: bool = False
    gradient_checkpointing: bool | None = None  # None: to be chosen
    reshard: bool | None = None
    trust_remote_code: bool = False


def setup_of(settings: Settings, processes: int, prompt: int, completion: int) -> Setup:
    """The step of a run whose longest prompt and completion have so many tokens."""
    here = {name: getattr(settings, name) for name in Setup._fields if hasattr(settings, name)}
    if settings.method == "dpo":
        here["completions_per_row"] = 2  # a pair
    return Setup(**here, processes=processes, prompt=prompt, completion=completion)


class Rehearsal(NamedTuple):
    """What a step needs of each process."""

    passes: dict[str, int]  # bytes by kind, where the forward and backward passes hold the most
    update: dict[str, int]  # bytes by kind, where the optimiser does
    collectives: dict[str, int]  # calls of a step
    sent: dict[str, int]  # bytes of the whole tensors that they gather, scatter or add up
    of_update: dict[str, int]  # those of the collectives that clipping and the optimiser call
    flops: float  # of a step, recomputation included
    forward_flops: float  # of its forward passes
    host_seconds: float  # that clipping and the optimiser keep the processor busy, measured here

    @property
    def peak(self) -> int:
        """Bytes, at most."""
        return max(sum(self.passes.values()), sum(self.update.values()))


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

    def _nothing(self, *_: object) -> None:
        """In place of MemTracker's statistics of modules, which do not allow a layer to be called twice."""

    _pre_fw_hook = _post_fw_hook = _pre_bw_hook = _post_bw_hook = _nothing

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001
        if func is aten._local_scalar_dense.default and getattr(args[0], "constant", 0) is None:
            return args[0].dtype == torch.bool or 1.0
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if out is NotImplemented:
            return out
        if name := COLLECTIVES.get(func._opname):
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

    def peak_by_kind(self) -> dict[str, int]:
        """Bytes by kind at the peak, which then counts anew."""
        found = dict.fromkeys(KINDS.values(), 0)
        for snapshot in self.get_tracker_snapshot("peak").values():
            for kind, name in KINDS.items():
                found[name] += snapshot[kind]
        self._peak_mem.clear()
        self._peak_mem_snap.clear()
        return found


class Choice(NamedTuple):
    """How a step is computed, and what it then needs."""

    gradient_checkpointing: bool
    reshard: bool
    found: Rehearsal
    fits: bool

    def __str__(self) -> str:
        checkpointing = "on" if self.gradient_checkpointing else "off"
        return (
            f"gradient checkpointing {checkpointing}, resharding {'on' if self.reshard else 'off'}: a step needs "
            f"{self.found.peak / 1e9:.1f} GB of each GPU, {needed(self.found.peak) / 1e9:.1f} GB with what a rehearsal "
            "does not see"
        )


def needed(peak: int) -> int:
    """Bytes that a GPU should have free for a step with this peak: fragments, workspaces and NCCL's buffers take more.

    >>> needed(10 * 10**9)
    15000000000
    """
    return round(1.1 * peak + 4e9)  # ours; not measured on a GPU


def choose(setup: Setup, free: float) -> Choice:
    """The fastest way to compute a step that fits into the `free` bytes of a GPU; the smallest one if none does.

    What `setup` has set stays. Faster first: without gradient checkpointing, which computes the forward pass twice;
    then without resharding, which gathers the weights twice.
    """
    for checkpointing, reshard in product((False, True), repeat=2):
        if setup.gradient_checkpointing in (None, checkpointing) and setup.reshard in (None, reshard):
            found = rehearse(setup._replace(gradient_checkpointing=checkpointing, reshard=reshard))
            choice = Choice(checkpointing, reshard, found, needed(found.peak) <= free)
            if choice.fits:
                break
    return choice


def rehearse(setup: Setup, optimizer: NewOptimizer = make_optimizer, sharded: Callable[..., None] = shard) -> Rehearsal:
    """What the first process needs for a step of `setup`; it is found in a process of its own.

    InputError where the model cannot be rehearsed, because what it computes depends on the values of its tensors.
    """
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=hide_gpus) as apart:
        found = apart.submit(_attempt, setup, optimizer, sharded).result()
    if isinstance(found, str):
        raise InputError(
            f"--model {setup.model}: a step cannot be rehearsed: {found}; give both --gradient-checkpointing "
            "and --reshard, and no --dry-run"
        )
    return found


def _attempt(setup: Setup, *functions: Callable) -> Rehearsal | str:
    """What is found, or in a line why nothing is: not every exception of torch's can be sent between processes."""
    try:
        return _rehearse(setup, *functions)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


def _rehearse(setup: Setup, new_optimizer: NewOptimizer, sharded: Callable[..., None]) -> Rehearsal:
    torch.set_num_threads(1)
    fake_tensor.CONSTANT_NUMEL_LIMIT = 2**20  # masks and token ids keep their values, which decide what is computed
    transformers.masking_utils.is_tracing = lambda *_: False  # so that masks are looked at, as on a GPU
    if setup.processes > 1 or setup.compute != "float32":
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=setup.processes)
    config = transformers.AutoConfig.from_pretrained(setup.model, trust_remote_code=setup.trust_remote_code)
    step = epoch_steps(_rows(setup), setup.batch, setup.micro_batch, 0, setup.processes)[0]
    batches = [collate(rows, "cpu", shares) for rows, shares, _ in step.micro_batches]
    with fake_tensor.FakeTensorMode() as fake:
        known = partial(fake.fake_tensor_converter.from_real_tensor, fake, make_constant=True)
        batches = [type(batch)(*(known(x) if isinstance(x, Tensor) else x for x in batch)) for batch in batches]
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=setup.trust_remote_code
        ).eval()
        shapes = [weight.shape for weight in model.parameters()]
        with fake_tensor.unset_fake_temporarily():  # the mesh of processes needs values
            sharded(model, setup.compute, setup.gradient_checkpointing, setup.reshard)
        optimizer = new_optimizer(setup.optimizer, model, 1e-6)
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight.detach())
        # An update before those that count, so that the optimiser's state is there, and DTensor, which tries an
        # operation on tensors of the whole shape when it meets it first, has met them all.
        with Meter():
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        optimizer.zero_grad()
        head = chunked_head.token_logprobs if setup.sliced_head else token_logprobs
        passes, update, meter, flops = _train(model, optimizer, batches, step.sequences, head)
    seconds, of_update = _host(shapes, partial(new_optimizer, setup.optimizer))
    return Rehearsal(passes, update, dict(meter.collectives), dict(meter.sent), of_update, meter.flops, flops, seconds)


def _train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[SharedRows],
    sequences: int,
    head: Callable[..., Tensor],
) -> tuple[dict[str, int], dict[str, int], Meter, float]:
    """One step by `topr.train`, of two micro-batches at most; what more of them would take is that of the first."""
    meter, marks, peaks = Meter(), [], []

    def logprobs(model: torch.nn.Module, batch: SharedRows) -> Tensor:
        before = (meter.collectives.copy(), meter.sent.copy(), meter.flops)
        meter._mod_tracker.is_bw = False
        logp = head(model, batch).sum(-1)
        meter._mod_tracker.is_bw = True
        marks.append((*before, meter.flops - before[2]))
        return logp

    optimizer.register_step_pre_hook(lambda *_: peaks.append(meter.peak_by_kind()))
    meter.track_external(model, optimizer)
    with meter:
        meter._track_module_params_and_buffers(model)
        list(topr.train(model, optimizer, [topr.Step(batches[:2], sequences)], logprobs=logprobs))
    if more := len(batches[2:]):
        calls, sent, flops, _ = marks[1]
        for counter, first in ((meter.collectives, calls), (meter.sent, sent)):
            counter.update({name: more * value for name, value in first.items()})
        meter.flops += more * flops
    return peaks[0], meter.peak_by_kind(), meter, marks[0][-1] * len(batches)


def _rows(setup: Setup) -> list[list[Example]]:
    """The rows of a step. Every second completion is a token shorter than the longest, so that padding is masked."""
    examples = [
        Example([0] * setup.prompt, [0] * max(setup.completion - i % 2, 1), -1.0, 1.0) for i in range(setup.batch)
    ]
    return [examples[i : i + setup.completions_per_row] for i in range(0, len(examples), setup.completions_per_row)]


def _host(shapes: list[torch.Size], new_optimizer: NewOptimizer) -> tuple[float, dict[str, int]]:
    """Seconds of clipping and optimiser for as many weights, so small that computing takes no time; their collectives.

    Not on fake tensors, whose own cost is far above that of real ones.
    """
    model = torch.nn.Module()
    for i, shape in enumerate(shapes):
        model.register_parameter(str(i), torch.nn.Parameter(torch.zeros([min(size, 64) for size in shape])))
    if dist.is_initialized():
        fully_shard(model)
    optimizer = new_optimizer(model, 1e-6)

    def update() -> float:
        for weight in model.parameters():
            weight.grad = torch.ones_like(weight.detach())
        start = time.process_time()  # other processes do not count
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()
        optimizer.step()
        return time.process_time() - start

    update()
    seconds = min(update() for _ in range(10))
    with Meter() as meter:
        update()
    return seconds, dict(meter.collectives)
