"""What several benchmarks train on: a small model with random weights, and random tokens in GSM8K's lengths."""

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import topr
from benchmarks.measuring import seconds
from pipeline.metrics import step_metrics
from pipeline.models.language_model import SharedRows, pad, token_logprobs
from pipeline.records import Example

VOCABULARY = 2_048


class Shape(NamedTuple):
    """A prompt and its completions, in tokens; a completion has two thirds of the longest or more."""

    name: str
    prompt: int
    completion: int


SHAPES = (Shape("0-shot", 40, 26), Shape("8-shot, short", 600, 26), Shape("8-shot", 1_100, 150))


def make_model(seed: int) -> LlamaForCausalLM:
    """A Llama of 6 layers of width 256, far enough from uniform that log-probabilities differ."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 8}
    others = {"max_position_embeddings": 16_384, "initializer_range": 0.05}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **others)).eval()


def draw(
    rng: random.Random, shape: Shape, steps: int, completions: int, small: bool, vocabulary: int = VOCABULARY
) -> list[list[Example]]:
    """For each step the completions of one prompt; if `small`, of a tenth of their length."""

    def tokens(size: float) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(max(round(size * (0.1 if small else 1)), 2))]

    def example(prompt: list[int]) -> Example:
        ids = tokens(rng.uniform(2 / 3, 1) * shape.completion)
        return Example(prompt, ids, 0.0, rng.choice([-1.0, 1.0]))

    prompts = [tokens(shape.prompt) for _ in range(steps)]
    return [[example(prompt) for _ in range(completions)] for prompt in prompts]


def plain(examples: Sequence[Example]) -> topr.Batch:
    """A padded row for each example."""
    ids, mask = pad([example.prompt_ids + example.completion_ids for example in examples], is_left=False)
    of_completion = mask.clone()
    for row, example in zip(of_completion, examples, strict=True):
        row[: len(example.prompt_ids)] = 0
    columns = zip(*((e.logmu, e.reward, float(len(e.completion_ids))) for e in examples), strict=True)
    return topr.Batch(ids, mask, of_completion, *map(torch.tensor, columns))


def shared_logprobs(model: torch.nn.Module, batch: SharedRows) -> Tensor:
    """log pi of a batch's completions, (B,), as the pipeline computes it."""
    return token_logprobs(model, batch).sum(-1)


def adamw(model: torch.nn.Module, lr: float = 1e-5) -> torch.optim.Optimizer:
    """The optimiser of all sides; its learning rate is small, so that the weights hardly change."""
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)


def train_ours(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Sequence[topr.Step],
    logprobs: Callable[..., Tensor],
) -> float:
    """Train by `topr.train`, with the metrics of each step; the seconds that it takes."""

    def work() -> None:
        for stats in topr.train(model, optimizer, steps, logprobs=logprobs):
            step_metrics(stats.log_ratio, stats.reward, stats.weight)

    return seconds(work)
