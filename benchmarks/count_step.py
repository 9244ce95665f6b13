"""Count a training step of `single-gpu` without a GPU: its kernel launches, and its peak memory.

    python benchmarks/count_step.py launches     # of a step of 8 completions, 30 layers
    python benchmarks/count_step.py memory       # GB of a step of 8 prompts of 1,100 + 512 tokens

Launches: operations except views, in tiny models of 2 and 6 layers, carried on to 30 layers.
Memory: by torch's MemTracker, on tensors that have shapes and no values. Not seen: fragments,
CUDA's context, workspaces of kernels.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from torch._subclasses import fake_tensor
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed._tools.mod_tracker import ModTracker
from torch.utils._python_dispatch import TorchDispatchMode

import topr
from toprlib import dataset, training
from toprlib.language_model import LanguageModel
from toprlib.records import Example
from toprlib.settings import Settings

NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
NAMES += ("num_key_value_heads", "vocab_size", "tie_word_embeddings")
MODELS = {  # as their config.json has them
    "Qwen2.5 0.5B": (896, 4864, 24, 14, 2, 151_936, True),
    "Qwen2.5 1.5B": (1536, 8960, 28, 12, 2, 151_936, True),
    "Llama 3.2 1B": (2048, 8192, 16, 32, 8, 128_256, True),
    "Llama 3.2 3B": (3072, 8192, 28, 24, 8, 128_256, True),
    "Llama 3 8B": (4096, 14_336, 32, 32, 8, 128_256, False),
}
VIEWS = """view _unsafe_view reshape transpose t expand unsqueeze squeeze slice select permute alias
    detach as_strided split split_with_sizes unbind chunk narrow unfold""".split()


def make_model(shape: tuple) -> transformers.PreTrainedModel:
    """A model of this shape, with random weights."""
    kind = transformers.Qwen2Config if shape[5] == 151_936 else transformers.LlamaConfig
    config = kind(**dict(zip(NAMES, shape, strict=True)), max_position_embeddings=8192)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def make_steps(prompt: int, completion: int, micro_batch_size: int) -> list[dataset.StepPlan]:
    """The micro-batches of a step of 8; every second completion is a token shorter."""
    rows = []
    for i in range(8):
        ids = [0] * (completion - i % 2)
        rows.append([Example([0] * prompt, ids, -1.0, i, i, [-1.0] * len(ids))])
    return dataset.plan_steps(rows, 8, micro_batch_size)


def load(model: transformers.PreTrainedModel, settings: Settings) -> tuple:
    """Model and optimizer as a run trains them."""
    training.load_model = lambda *_: model
    lm, optimizer = training.load_for_training(LanguageModel(None, None, [1], 8192), "", settings)
    return lm.model, optimizer


# ---- launches ------------------------------------------------------------------------------------
class Launches(TorchDispatchMode):
    """Counts operations that are not views."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001
        self.count += func.overloadpacket.__name__ not in VIEWS
        return func(*args, **(kwargs or {}))


def count_launches(micro_batch_size: int, settings: Settings) -> int:
    """Of a step of 8 completions by a Llama of 30 layers."""
    counts = []
    for layers in (2, 6):
        model, optimizer = load(make_model((64, 128, layers, 4, 2, 256, True)), settings)
        steps = dataset.to_tensors(make_steps(16, 8, micro_batch_size) * 2)
        steps = topr.train(model, optimizer, steps)
        next(steps)  # makes the states of the optimizer
        with Launches() as launches:
            next(steps)
        counts.append(launches.count)
    return round(counts[0] + 28 * (counts[1] - counts[0]) / 4)


# ---- memory --------------------------------------------------------------------------------------
class Passes(ModTracker):
    """In place of the tracker of modules; whether a pass is backward is set by hand."""

    is_bw = False


class Memory(MemTracker):
    """Where code asks for the value of a tensor that has none, the answer is 1, or True."""

    def __init__(self) -> None:
        super().__init__()
        self._mod_tracker = Passes()

    # In place of statistics of modules, which do not allow a layer to be called twice.
    _pre_fw_hook = _post_fw_hook = _pre_bw_hook = _post_bw_hook = lambda *_: None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001
        is_value = func is torch.ops.aten._local_scalar_dense.default
        if is_value and getattr(args[0], "constant", 0) is None:
            return args[0].dtype == torch.bool or 1.0
        return super().__torch_dispatch__(func, types, args, kwargs)


def count_memory(shape: tuple, micro_batch_size: int, settings: Settings) -> float:
    """The peak of a step, in GB."""
    fake_tensor.CONSTANT_NUMEL_LIMIT = 2**20  # masks and ids keep their values
    transformers.masking_utils.is_tracing = lambda *_: False  # so that masks are looked at
    memory = Memory()
    token_logprobs = topr.token_logprobs

    def marked_logprobs(*inputs) -> torch.Tensor:
        memory._mod_tracker.is_bw = False
        values = token_logprobs(*inputs)
        memory._mod_tracker.is_bw = True
        return values

    [(batches, _)] = dataset.to_tensors(make_steps(1100, 512, micro_batch_size))
    batches = list(batches)
    with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True) as fake:
        known = partial(fake.fake_tensor_converter.from_real_tensor, fake, make_constant=True)
        fakes = [topr.Batch(*map(known, batch)) for batch in batches]
        model = make_model(shape)
        model.to = lambda *_: model  # fake weights cannot move
        model, optimizer = load(model, settings)
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight.detach())
        optimizer.step()  # makes the states of the optimizer
        optimizer.zero_grad()
        memory.track_external(model, optimizer)
        topr.token_logprobs = marked_logprobs
        with memory:
            memory._track_module_params_and_buffers(model)
            list(topr.train(model, optimizer, [(fakes, 8)], limits=None))
        topr.token_logprobs = token_logprobs
    snapshot = memory.get_tracker_snapshot("peak")
    return sum(sum(kinds[kind] for kind in kinds if kind != "Total") for kinds in snapshot.values())


def main() -> None:
    """Print one JSON object per step."""
    single = Settings(dtype="bfloat16", optimizer="adafactor", lr=1e-6)
    models = MODELS if sys.argv[1] == "memory" else ["Llama, 30 layers"]
    for model in models:
        for checkpointing in (False, True):
            for size in (1, 8):
                changes = {"gradient_checkpointing": checkpointing}
                settings = Settings(**{**vars(single), **changes})
                found = {"model": model, "micro_batch_size": size, **changes}
                if sys.argv[1] == "memory":
                    found["gb"] = round(count_memory(MODELS[model], size, settings) / 1e9, 1)
                else:
                    found["launches"] = count_launches(size, settings)
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
