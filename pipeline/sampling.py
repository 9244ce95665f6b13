"""Sampling: prompts in, completions out, and then grades.

The engine here is `transformers`' own generate; vllm/client.py has the other. A completion is what the model wrote,
token by token, up to and including its end of sequence or the stop string; nothing is appended or dropped before it is
scored.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from pipeline.grading import graded
from pipeline.models.language_model import LanguageModel
from pipeline.records import Drawn, InputError, Problem, Sample, Task
from pipeline.runtime.processes import progress_bar


@dataclass(frozen=True)
class SamplingParameters:
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
    token_logmu: list[float] | None = None  # as the engine saw them


Engine = Callable[[Sequence[str], int, SamplingParameters, int], Iterator[tuple[int, Completion]]]
"""(prompts, n, sampling, seed) -> n completions of each prompt as they come, with the prompt's number

The numbers seed to seed + n * prompts - 1 are the engine's own to seed random generators with.
"""


def draw_samples(
    task: Task,
    problems: Sequence[Problem],
    n: int,
    engine: Engine,
    sampling: SamplingParameters,
    seed: int,
    description: str = "sampling",
) -> list[Sample]:
    """n graded samples of each problem: the arguments are those of `draw`."""
    drawn = draw(task, problems, n, engine, sampling, seed, description)
    return graded(task, drawn, [problem for problem in problems for _ in range(n)])


def draw(
    task: Task,
    problems: Sequence[Problem],
    n: int,
    engine: Engine,
    sampling: SamplingParameters,
    seed: int,
    description: str,
) -> list[Drawn]:
    """n completions of each problem, in the problems' order. description: what the progress bar says."""
    prompts = [task.prompt(problem) for problem in problems]
    completions: list[list[Completion]] = [[] for _ in problems]
    drawn = progress_bar(engine(prompts, n, sampling, seed), description, "sample", n * len(problems))
    for number, completion in drawn:
        completions[number].append(completion)
    return [
        Drawn(
            problem_id=problem.id,
            prompt=prompt,
            completion=completion.text,
            token_ids=completion.token_ids,
            token_logmu_engine=completion.token_logmu,
            finish_reason=completion.finish_reason,
        )
        for problem, prompt, of_problem in zip(problems, prompts, completions, strict=True)
        for completion in of_problem
    ]


def transformers_engine(lm: LanguageModel, tokens_at_once: int) -> Engine:
    """An engine that batches `generate`; tokens_at_once bounds rows times (prompt + new tokens) of one batch."""

    def engine(
        prompts: Sequence[str], n: int, sampling: SamplingParameters, seed: int
    ) -> Iterator[tuple[int, Completion]]:
        prompt_ids = lm.prompt_ids(prompts)
        # n rows for each prompt, those of like length together
        rows = [i for i in sorted(range(len(prompt_ids)), key=lambda i: len(prompt_ids[i])) for _ in range(n)]
        widths = [len(prompt_ids[i]) + sampling.max_new_tokens for i in rows]
        for number, batch in enumerate(batches_within(tokens_at_once, widths)):
            generated = _generate(lm, [prompt_ids[i] for i in rows[batch]], sampling, seed + number)
            for i, token_ids in zip(rows[batch], generated, strict=True):
                yield i, _cut(token_ids, lm, sampling)

    return engine


def check_lengths(task: Task, lm: LanguageModel, new_tokens: int) -> int:
    """The tokens of the longest prompt with `new_tokens` behind it; InputError where they exceed the context.

    0 without problems.
    """
    problems = [*task.train, *task.test]
    if not problems:
        return 0
    sizes = [len(ids) for ids in lm.prompt_ids([task.prompt(problem) for problem in problems])]
    longest = max(range(len(sizes)), key=sizes.__getitem__)
    if sizes[longest] + new_tokens > lm.context:
        raise InputError(
            f"problem {problems[longest].id}: its prompt has {sizes[longest]} tokens; with {new_tokens} new ones it "
            f"exceeds the model's context of {lm.context}: take fewer shots or new tokens"
        )
    return sizes[longest] + new_tokens


def _generate(
    lm: LanguageModel, prompt_ids: list[list[int]], sampling: SamplingParameters, seed: int
) -> list[list[int]]:
    """The raw continuation of each prompt, padding included; the global random state is left as it was."""
    model, tokenizer = lm.model, lm.tokenizer
    config = GenerationConfig(
        do_sample=True,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_new_tokens=sampling.max_new_tokens,
        stop_strings=list(sampling.stop) or None,
        eos_token_id=sorted(lm.ends) or None,
        pad_token_id=tokenizer.pad_token_id,
    )
    prompts = {tuple(ids): number for number, ids in enumerate(dict.fromkeys(map(tuple, prompt_ids)))}
    padded = tokenizer.pad({"input_ids": [*map(list, prompts)]}, padding_side="left", return_tensors="pt")
    prompt_of = torch.tensor([prompts[tuple(ids)] for ids in prompt_ids], device=model.device)
    padded = padded.to(model.device)
    width = padded["input_ids"].shape[1]
    inputs = {name: tensor[prompt_of] for name, tensor in padded.items()}  # (B, P)
    # `generate` takes what is not set here from the model's own settings: none of them may leak in.
    own_config, model.generation_config = model.generation_config, config
    devices = [model.device] if model.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), torch.inference_mode():
            torch.manual_seed(seed)
            stop_tokenizer = tokenizer if sampling.stop else None
            cache = _computed_once(model, padded["attention_mask"], padded["input_ids"], prompt_of)
            ids = model.generate(**inputs, generation_config=config, tokenizer=stop_tokenizer, past_key_values=cache)
    finally:
        model.generation_config = own_config
    return ids[:, width:].tolist()


def _computed_once(model: PreTrainedModel, mask: Tensor, prompt_ids: Tensor, prompt_of: Tensor) -> DynamicCache | None:
    """Keys and values of all but the last token of each prompt, computed once for all its completions.

    mask, prompt_ids: (R, P); prompt_of: (B,). They are repeated to (B, heads, P - 1, size), from where `generate` goes
    on. None where no two completions share a prompt, or prompts have a single token.
    """
    if len(prompt_ids) == len(prompt_of) or prompt_ids.shape[1] == 1:
        return None
    cache, mask = DynamicCache(config=model.config), mask[:, :-1]
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    model(prompt_ids[:, :-1], attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1)
    cache.batch_select_indices(prompt_of)
    return cache


def _cut(token_ids: list[int], lm: LanguageModel, sampling: SamplingParameters) -> Completion:
    """The completion without the padding that follows its end."""

    def has_stop(size: int) -> bool:
        return any(string in lm.text(token_ids[:size]) for string in sampling.stop)

    ends = lm.ends
    end = next((i for i, token in enumerate(token_ids) if token in ends), len(token_ids))
    if end and has_stop(end):  # looked for first: where padding is the end of sequence too, one follows the stop string
        end = bisect_left(range(end), True, key=has_stop)  # the token that completes it is the last one chosen
        return Completion(lm.text(token_ids[:end]), token_ids[:end], "stop")
    token_ids = token_ids[: end + 1]
    return Completion(lm.text(token_ids), token_ids, "stop" if token_ids[-1] in ends else "length")


def batches_within(tokens: int, widths: Sequence[int]) -> Iterator[slice]:
    """Consecutive runs of rows that, padded to their widest, have at most `tokens` tokens; a row at least.

    >>> list(batches_within(12, widths=[3, 4, 4, 5, 20]))
    [slice(0, 3, None), slice(3, 4, None), slice(4, 5, None)]
    """
    start, widest = 0, 0
    for i, width in enumerate(widths):
        widest = max(widest, width)
        if i > start and (i + 1 - start) * widest > tokens:
            yield slice(start, i)
            start, widest = i, width
    yield slice(start, len(widths))
