"""Sampling: prompts in, completions out, and then grades.

The engine here is `transformers`' own generate. A completion is what the model wrote, token by token, up to and
including its end of sequence or the stop string; nothing is appended and nothing is dropped before it is scored.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from tqdm import tqdm
from transformers import GenerationConfig

from pipeline.models import LanguageModel
from pipeline.records import InputError, Problem, Sample, Task
from pipeline.rows import batches_within


@dataclass(frozen=True)
class SamplingLaw:
    """The distribution that completions are drawn from (Section 4.2 of the paper, whose values these are).

    max_new_tokens counts the completion's tokens; a completion that reaches it is cut and graded as it is.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 500
    max_new_tokens: int = 512
    stop: tuple[str, ...] = ()


class Completion(NamedTuple):
    """One answer of the model; `text` is without the end-of-sequence token that `token_ids` may end with."""

    text: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length"]


Engine = Callable[[Sequence[str], int, SamplingLaw, int], list[list[Completion]]]
"""(prompts, completions per prompt, law, seed) -> for each prompt its completions"""


def draw_samples(
    task: Task, problems: Sequence[Problem], n: int, engine: Engine, law: SamplingLaw, seed: int
) -> list[Sample]:
    """n graded samples of each problem, in the problems' order: reward +1 if correct and -1 if not (Section 4.2)."""
    prompts = [task.prompt(problem) for problem in problems]
    samples = []
    for problem, prompt, completions in zip(problems, prompts, engine(prompts, n, law, seed), strict=True):
        for completion in completions:
            outcome = task.grade(task.visible(completion.text), problem.gold)
            samples.append(
                Sample(
                    problem_id=problem.id,
                    prompt=prompt,
                    completion=completion.text,
                    token_ids=completion.token_ids,
                    finish_reason=completion.finish_reason,
                    reward=1.0 if outcome == "correct" else -1.0,
                    outcome=outcome,
                )
            )
    return samples


def transformers_engine(lm: LanguageModel, tokens_at_once: int, description: str = "sampling") -> Engine:
    """An engine that batches `generate`; tokens_at_once bounds rows times (prompt + new tokens) of one batch."""

    def engine(prompts: Sequence[str], n: int, law: SamplingLaw, seed: int) -> list[list[Completion]]:
        prompt_ids = lm.tokenizer(list(prompts))["input_ids"]
        _check_lengths(prompt_ids, law.max_new_tokens, lm.context)
        # n rows for each prompt, those of like length together
        rows = [i for i in sorted(range(len(prompts)), key=lambda i: len(prompt_ids[i])) for _ in range(n)]
        widths = [len(prompt_ids[i]) + law.max_new_tokens for i in rows]
        completions: list[list[Completion]] = [[] for _ in prompts]
        with tqdm(total=n * len(prompts), desc=description, unit="sample") as progress:
            for number, batch in enumerate(batches_within(tokens_at_once, widths)):
                generated = _generate(lm, [prompt_ids[i] for i in rows[batch]], law, seed + number)
                for i, token_ids in zip(rows[batch], generated, strict=True):
                    completions[i].append(_cut(token_ids, lm, law))
                progress.update(len(generated))
        return completions

    return engine


def _check_lengths(prompt_ids: list[list[int]], new: int, context: int) -> None:
    longest = max(range(len(prompt_ids)), key=lambda i: len(prompt_ids[i]))
    if len(prompt_ids[longest]) + new > context:
        raise InputError(
            f"prompt {longest + 1} has {len(prompt_ids[longest])} tokens; with {new} new ones it exceeds the model's "
            f"context of {context}: take fewer shots or new tokens"
        )


def _generate(lm: LanguageModel, prompt_ids: list[list[int]], law: SamplingLaw, seed: int) -> list[list[int]]:
    """The raw continuation of each prompt, padding included; the global random state is left as it was."""
    model, tokenizer = lm
    config = GenerationConfig(
        do_sample=True,
        temperature=law.temperature,
        top_p=law.top_p,
        top_k=law.top_k,
        max_new_tokens=law.max_new_tokens,
        stop_strings=list(law.stop) or None,
        eos_token_id=model.generation_config.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    inputs = tokenizer.pad({"input_ids": prompt_ids}, padding_side="left", return_tensors="pt").to(model.device)
    # What the law leaves open, `generate` fills in from the model's own settings: none of them may leak in.
    own_config, model.generation_config = model.generation_config, config
    devices = [model.device] if model.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), torch.inference_mode():
            torch.manual_seed(seed)
            ids = model.generate(**inputs, generation_config=config, tokenizer=tokenizer if law.stop else None)
    finally:
        model.generation_config = own_config
    return ids[:, inputs["input_ids"].shape[1] :].tolist()


def _cut(token_ids: list[int], lm: LanguageModel, law: SamplingLaw) -> Completion:
    """The completion without the padding that follows its end."""

    def text(size: int) -> str:
        return lm.tokenizer.decode(token_ids[:size], clean_up_tokenization_spaces=False)

    def has_stop(size: int) -> bool:
        return any(string in text(size) for string in law.stop)

    ends = lm.ends
    end = next((i for i, token in enumerate(token_ids) if token in ends), len(token_ids))
    if has_stop(end):  # looked for first: where padding is the end of sequence too, one follows the stop string
        size = bisect_left(range(end), True, key=has_stop)  # the token that completes it is the last one chosen
        return Completion(text(size), token_ids[:size], "stop")
    return Completion(text(end), token_ids[: end + 1], "stop" if end < len(token_ids) else "length")
