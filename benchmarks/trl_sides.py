"""TRL's GRPO trainer as a side of the benchmarks, in the environment of `make .venv-trl/ready`."""

import sys
import time
from collections.abc import Callable, Sequence
from tempfile import TemporaryDirectory

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from pipeline.models.language_model import LanguageModel, pad
from pipeline.records import Example

try:
    import trl
    from datasets import Dataset
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer import utils as trl_utils
    from trl.trainer.utils import selective_log_softmax  # noqa: F401 - for loss_memory.py
except ImportError:
    sys.exit("no TRL here: make .venv-trl/ready, and give the command to .venv-trl/bin/python")


def chunked_logprobs(hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """log softmax(hidden @ weight.T) at `tokens`, (N,), as the head of TRL's trainer computes it."""
    size = trl_utils._CHUNKED_LOGPROB_CHUNK_SIZE
    return ChunkedLogProbFunction.apply(hidden, weight, None, tokens, 1.0, size, None, 1.0, ("log_probs",))[0]


class Stopwatch(TrainerCallback):
    """Notes when the steps of the optimiser began and ended."""

    def __init__(self) -> None:
        self.begun: list[float] = []
        self.ended: list[float] = []

    def on_step_begin(self, *_: object, **__: object) -> None:
        self.begun.append(time.perf_counter())

    def on_step_end(self, *_: object, **__: object) -> None:
        self.ended.append(time.perf_counter())


def configuration(folder: str, steps: int, lr: float, completions: int, **others: object) -> trl.GRPOConfig:
    """GRPO with `completions` of a prompt a step; float32, and nothing that costs time and is not asked for."""
    settings = {
        "output_dir": folder,
        "max_steps": steps,
        "learning_rate": lr,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "per_device_train_batch_size": completions,
        "num_generations": completions,
        "gradient_checkpointing": False,  # TRL's default is True
        "bf16": False,
        "use_cpu": not torch.cuda.is_available(),
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "report_to": [],
    }
    return trl.GRPOConfig(**settings | others)


class FixedBatches(trl.GRPOTrainer):
    """A trainer that is handed its completions; all that follows is TRL's own."""

    def __init__(self, *args: object, batches: Sequence[dict[str, torch.Tensor]], **kwargs: object):
        super().__init__(*args, **kwargs)
        self.batches = iter(batches)

    def _prepare_inputs(self, generation_batch: object) -> dict[str, torch.Tensor]:
        return next(self.batches)


def padded(examples: Sequence[Example]) -> dict[str, torch.Tensor]:
    """What TRL trains on: prompts padded on the left, completions on the right, in tensors of their own."""
    prompt_ids, prompt_mask = pad([example.prompt_ids for example in examples], is_left=True)
    completion_ids, completion_mask = pad([example.completion_ids for example in examples], is_left=False)
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": torch.tensor([example.reward for example in examples]),
        "num_items_in_batch": completion_mask.sum(),
    }


def reward_of(is_correct: Callable[[str, str], bool]) -> Callable[..., list[float]]:
    """TRL's form of a reward: +1 and -1, for completions and the column gold of their prompts."""

    def reward(completions: list[str], gold: list[str], **_: object) -> list[float]:
        return [1.0 if is_correct(text, answer) else -1.0 for text, answer in zip(completions, gold, strict=True)]

    return reward


def prepare(
    lm: LanguageModel,
    reward: Callable[..., list[float]],
    prompts: list[dict[str, str]],
    n: int,
    max_new_tokens: int,
    **others: object,
) -> Callable[[], object]:
    """A trainer that generates n completions of each prompt and trains on them, once; it is yet to be called."""
    folder = TemporaryDirectory()
    config = configuration(folder.name, len(prompts), 1e-5, n, max_completion_length=max_new_tokens, **others)
    trainer = trl.GRPOTrainer(lm.model, reward, config, Dataset.from_list(prompts), processing_class=lm.tokenizer)

    def train() -> None:
        with folder:
            trainer.train()

    return train


def train(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, steps: Sequence[Sequence[Example]], lr: float
) -> float:
    """Train on `steps`; the seconds from the beginning of the first to the end of the last."""
    watch = Stopwatch()
    with TemporaryDirectory() as folder:
        trainer = FixedBatches(
            model,
            lambda completions, **_: [0.0] * len(completions),
            configuration(folder, len(steps), lr, len(steps[0])),
            Dataset.from_list([{"prompt": "?"}] * len(steps)),
            processing_class=tokenizer,
            callbacks=[watch],
            batches=[padded(examples) for examples in steps],
        )
        trainer.train()
    return watch.ended[-1] - watch.begun[0]
