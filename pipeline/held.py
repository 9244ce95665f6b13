"""What a run holds in memory: at any time an engine or a model in training, since either fills a GPU; and its times."""

import gc
import json
import resource
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipeline.dataset import Inputs
from pipeline.dry_run import plan
from pipeline.models.checkpoints import load_checkpoint
from pipeline.models.language_model import LanguageModel, load_model, load_to_train, make_optimizer
from pipeline.records import InputError, write_file
from pipeline.runtime.processes import Times, on_all_ranks, rank, ranks
from pipeline.runtime.run_folder import SUMS, check_folder
from pipeline.sampling import Engine, transformers_engine
from pipeline.settings import Settings
from pipeline.times import HOURS


def open_hf(
    model: str, settings: Settings, inputs: Inputs, log: Path
) -> AbstractContextManager[Engine]:
    """The model in this process; InputError if it keeps another state than keys and values, as Mamba does."""
    lm = load_model(model, None, settings)
    if lm.model._is_stateful:
        fault = f"{type(lm.model).__name__} keeps a state that --engine hf cannot copy"
        raise InputError(
            f"--model {model}: {fault}; give --engine vllm, or a model with attention alone"
        )
    return nullcontext(partial(transformers_engine, lm, settings.tokens_at_once))


def open_vllm(
    model: str, settings: Settings, inputs: Inputs, log: Path
) -> AbstractContextManager[Engine]:
    """vLLM in a process of its own, whose messages are in `log`."""
    from pipeline.vllm.client import vllm_engine

    return vllm_engine(model, inputs.lm, inputs.size.longest, settings, log)


# How an engine is opened, in a context that closes it: (model, settings, inputs, log). model: its folder or hub name.
ENGINES: dict[str, Callable[..., AbstractContextManager[Engine]]] = {
    "hf": open_hf,
    "vllm": open_vllm,
}


@dataclass
class Held:
    """An engine or a learner of a model, which is closed when another one is asked for, and at the end."""

    settings: Settings
    inputs: Inputs
    times: Times
    key: tuple[str, ...] = ()  # "engine" or "learner", and folders or hub names of its models
    content: Any = None
    stack: ExitStack = field(default_factory=ExitStack)  # what closes it
    intact: set[str] = field(default_factory=set)  # models whose checksums were compared

    def make_room(self, *key: str) -> None:
        """Close what is held for another key; InputError if one of the key's models is damaged.

        All ranks do this together, since one of them may need the others' GPUs.
        """
        self.note_times()  # an end may come before the next stage's
        if self.key == key:
            return
        self.key, self.content = key, None
        on_all_ranks(self.close)
        for model in key[1:]:
            if (Path(model) / SUMS).exists() and model not in self.intact:
                check_folder(Path(model))
                self.intact.add(model)

    def engine(self, model: str) -> Engine:
        """The engine that samples from a model, for this rank; `make_room("engine", model)` comes before."""
        if self.content is None:
            log = self.settings.out / f"vllm-{rank()}.log"
            with self.times("starting"):
                engine = ENGINES[self.settings.engine](model, self.settings, self.inputs, log)
                self.content = self.stack.enter_context(engine)
        return self.content

    def learner(
        self, model: str, checkpoint: Path | None = None
    ) -> tuple[LanguageModel, torch.optim.Optimizer]:
        """The model in training, sharded over the ranks, and its optimiser; as a checkpoint has them, if given."""
        settings = self.settings
        self.make_room("learner", model, *([str(checkpoint)] if checkpoint else []))
        if self.content is None:
            with self.times("starting"):
                is_plain = not (
                    dist.is_initialized() or settings.gradient_checkpointing or settings.lora
                )
                lm = (
                    load_model(model, None, settings)
                    if is_plain
                    else load_to_train(model, settings)
                )
                # Before a forward pass: after one, FSDP2 leaves some weights gathered in copies, which are not trained.
                optimizer = make_optimizer(settings.optimizer, lm.model, settings.lr)
                if checkpoint:
                    load_checkpoint(checkpoint, optimizer)
                self.content = lm, optimizer
        return self.content

    def note_times(self) -> None:
        """On rank zero, add to times.json what was done since the last call."""
        if rank() > 0:
            return
        file, times, settings = self.settings.out / "times.json", self.times, self.settings
        earlier = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        peak = (
            peak or 1000 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        )  # of this process, in kilobytes
        seconds = times.seconds | {"other": time.monotonic() - times.begun - times.seconds.total()}
        noted = earlier | {
            "processes": ranks(),
            "peak bytes": max(peak, earlier.get("peak bytes", 0)),
        }
        for name, new in {"seconds": seconds, "counts": times.counts}.items():
            old = earlier.get(name, {})
            noted[name] = {key: old.get(key, 0) + new.get(key, 0) for key in {**old, **new}}
        if HOURS not in earlier and (settings.preset != "laptop" or torch.cuda.is_available()):
            ending = ", on H100s"
            planned = {
                name: value for name, (value, *_) in plan(settings, self.inputs, ranks()).items()
            }
            noted[HOURS] = {
                name.removesuffix(ending): planned[name]
                for name in planned
                if name.endswith(ending)
            }
            noted["bytes without activations, estimated"] = planned["training, per GPU"]
        with suppress(OSError):  # a full disk: what raised it says so
            write_file(file, json.dumps(noted, indent=2) + "\n")
            times.seconds.clear(), times.counts.clear()
            times.begun = time.monotonic()

    def close(self) -> None:
        """Let go of what is held."""
        self.content = None
        self.stack.close()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
