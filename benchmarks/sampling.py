"""Tokens sampled per second on a laptop: the default engine, plain batched `generate`, and vLLM on a processor.

    make .venv-vllm/ready
    .venv/bin/python -m benchmarks sampling --vllm-python .venv-vllm/bin/python

tiny/base on its own problems, 16 completions each. What `generate` can be set to is tried on it: its batch, its cache,
the order of the prompts; so is the engine's batch. The completions that count are cut at their end of sequence.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

import train_gsm8k
from benchmarks import measuring
from benchmarks.measuring import Comparison, Goal, in_turn, record, seconds
from pipeline.models.language_model import LanguageModel, load_model
from pipeline.sampling import Engine, SamplingParameters, transformers_engine
from pipeline.settings import TINY
from pipeline.settings import Settings as RunSettings
from pipeline.vllm.client import vllm_engine

ENGINE, PLAIN, VLLM = "the engine, {:,} tokens at once", "generate, {}", "vLLM on the processor"


SIZES = (10_000, 20_000, 40_000, 80_000)  # of the engine's batches in tokens, prompts and padding included
PROMPTS = 16  # in a batch of plain `generate`: 256 rows


@dataclass(frozen=True)
class Settings(measuring.Settings):
    """What is measured; every default is ours."""

    vllm_python: Path | None = None
    """interpreter whose environment has vLLM; without it vLLM is left out"""


def generate(lm: LanguageModel, prompts: Sequence[str], n: int, sampling: SamplingParameters, **others: str) -> int:
    """Sample as the documentation of `generate` does; the number of tokens up to each end of sequence."""
    end, total = lm.tokenizer.eos_token_id, 0
    config = GenerationConfig(
        do_sample=True,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        max_new_tokens=sampling.max_new_tokens,
        num_return_sequences=n,
        eos_token_id=end,
        pad_token_id=lm.tokenizer.pad_token_id,
        **others,
    )
    for start in range(0, len(prompts), PROMPTS):
        inputs = lm.tokenizer(
            list(prompts[start : start + PROMPTS]), padding=True, padding_side="left", return_tensors="pt"
        )
        ids = lm.model.generate(**inputs, generation_config=config)[:, inputs["input_ids"].shape[1] :]
        total += sum([*row, end].index(end) + (end in row) for row in ids.tolist())
    return total


def measure(settings: Settings) -> dict[str, Any]:
    """Tokens per second of the engine, of `generate` and of vLLM."""
    problems, n = (2, 2) if settings.small else (64, 16)
    usual = RunSettings(model=str(TINY / "base"), problems=problems, vllm_python=settings.vllm_python)
    task, lm = train_gsm8k.gsm8k_task(usual), load_model(usual.model)
    sampling, prompts = (
        SamplingParameters(max_new_tokens=usual.max_new_tokens),
        [task.prompt(problem) for problem in task.train],
    )
    by_length = sorted(prompts, key=len)

    def speed(count: Callable[[], int]) -> Callable[[], float]:
        def measure() -> float:
            tokens: list[int] = []
            return 1 / seconds(lambda: tokens.append(count())) * tokens[0]

        return measure

    def of_engine(engine: Engine) -> Callable[[], float]:
        def completions() -> Iterator[int]:
            return (len(found.token_ids) for _, found in engine(prompts, n, sampling, settings.seed))

        return speed(lambda: sum(completions()))

    def of_generate(prompts: Sequence[str], **others: str) -> Callable[[], float]:
        return speed(lambda: generate(lm, prompts, n, sampling, **others))

    with ExitStack() as stack:
        sides = {ENGINE.format(size): of_engine(transformers_engine(lm, size)) for size in SIZES}
        sides[PLAIN.format("prompts as they come")] = of_generate(prompts)
        sides[PLAIN.format("prompts by length")] = of_generate(by_length)
        sides[PLAIN.format("by length, static cache")] = of_generate(by_length, cache_implementation="static")
        if settings.vllm_python is not None:
            log = settings.out / "vllm.log"
            engine = stack.enter_context(vllm_engine(usual.model, lm, lm.context, usual, log))
            sides[VLLM] = of_engine(engine)
        torch.manual_seed(settings.seed)
        for side in sides.values():
            side()
        values = in_turn(sides, settings.rounds)
    ours = ENGINE.format(usual.tokens_at_once)
    goals = [Goal(ours, other, 1.0) for other in sides if other != ours]
    what = f"{problems} problems, {n} completions each; the default is {ours}"
    return record([Comparison(what, "tokens/s", values, goals)])
