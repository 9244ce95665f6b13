"""Small models, batches and training that several tests use."""

import random

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM

import topr
from pipeline import dataset
from pipeline.metrics import step_metrics
from pipeline.records import Example

VOCABULARY = 32


def tiny_model(seed: int = 0, dtype: torch.dtype = torch.float64) -> LlamaForCausalLM:
    """An untrained Llama with a vocabulary of 32, in float64 so that equality can be asked for to many digits."""
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = LlamaConfig(vocab_size=VOCABULARY, initializer_range=0.5, **sizes)  # far from uniform
    return LlamaForCausalLM(config).to(dtype).eval()


def random_examples(prompts: int, per_prompt: int, seed: int = 0) -> list[Example]:
    """Examples of random tokens and ragged lengths, prompt by prompt, with rewards of both signs."""
    rng = random.Random(seed)

    def tokens(most: int) -> list[int]:
        return [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, most))]

    return [
        Example(
            prompt,
            tokens(6),
            -rng.uniform(5, 25),
            rng.choice([-1.0, 1.0]),
            sample=0,
            row=0,
            token_logmu=[],
        )
        for prompt in (tokens(9) for _ in range(prompts))
        for _ in range(per_prompt)
    ]


def plain_batch(
    examples: list[Example], padding_side: str = "right", filler: int = 0
) -> topr.Batch:
    """One padded row per completion; `filler` is what padding holds."""

    def padded(rows: list[list], value: int = 0) -> torch.Tensor:
        return pad_sequence([torch.tensor(row) for row in rows], True, value, padding_side)

    ids = padded([e.prompt_ids + e.completion_ids for e in examples], filler)
    attention_mask = padded([[1.0] * len(e.prompt_ids + e.completion_ids) for e in examples])
    completion_mask = padded(
        [[0.0] * len(e.prompt_ids) + [1.0] * len(e.completion_ids) for e in examples]
    )
    columns = [
        [e.logmu for e in examples],
        [e.reward for e in examples],
        [len(e.completion_ids) for e in examples],
    ]
    return topr.Batch(ids, attention_mask, completion_mask, *map(torch.tensor, columns))


def steps_of(rows, batch, micro_batch, rank=0, ranks=1):
    """The steps of an epoch over rows, as `topr.train` takes them."""
    return list(
        dataset.lay_out(rows, dataset.epoch_steps(rows, batch, micro_batch, rank, ranks), "cpu")
    )


def fit(model, optimizer, steps, **options):
    """What `topr.train` yields, as a dict of metrics a step; a list of micro-batches is a step of one process."""
    steps = [
        s if isinstance(s, topr.Step) else topr.Step(s, sum(len(batch.reward) for batch in s))
        for s in steps
    ]
    return [
        {
            "loss": stats.loss,
            "grad_norm": stats.grad_norm,
            **step_metrics(stats.log_ratio, stats.reward, stats.weight),
        }
        for stats in topr.train(model, optimizer, steps, **options)
    ]
