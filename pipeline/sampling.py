"""Sampling: prompts in, completions out, and then grades.

A completion is what the model wrote, token by token, up to and including its end of sequence or the stop string;
nothing is appended or dropped before it is scored.
"""

import inspect
import math
import signal
import threading
import traceback
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, GenerationConfig

from pipeline.models.language_model import LanguageModel
from pipeline.records import Drawn, Grade, InputError, Problem, Sample, Task, read_records, to_lines, write, write_file
from pipeline.runtime.processes import by_rank_zero, end_with_others, progress_bar, rank, ranks
from pipeline.runtime.run_folder import read_checked

REWARD_SECONDS = 300.0  # for a completion, ours: a function that hangs by mistake ends the run with a line


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


class Prompt(NamedTuple):
    """A problem as the model is asked it."""

    problem: Problem
    text: str
    ids: list[int]


# (prompts, n, sampling, seed) -> n completions of each prompt as they come, with the prompt's index. A completion's
# text is without the end-of-sequence token. The engine may use the seeds from `seed` to `seed + n * len(prompts) - 1`.
Engine = Callable[[Sequence[Prompt], int, SamplingParameters, int], Iterator[tuple[int, Drawn]]]


def prompts_of(task: Task, problems: Sequence[Problem], lm: LanguageModel, new_tokens: int) -> list[Prompt]:
    """The prompts of problems; InputError where the longest with `new_tokens` behind it exceeds the model's context."""
    if not problems:
        return []
    texts = [task.prompt(problem) for problem in problems]
    prompts = [Prompt(*columns) for columns in zip(problems, texts, lm.prompt_ids(texts), strict=True)]
    longest = max(len(prompt.ids) for prompt in prompts)
    if longest + new_tokens > lm.context:
        number = next(prompt.problem.id for prompt in prompts if len(prompt.ids) == longest)
        fault = f"with {new_tokens} new ones it exceeds the model's context of {lm.context}"
        advice = "take fewer shots or new tokens"
        raise InputError(f"problem {number}: its prompt has {longest} tokens; {fault}: {advice}")
    return prompts


def draw_samples(
    task: Task, prompts: Sequence[Prompt], n: int, engine: Engine, sampling: SamplingParameters, seed: int
) -> list[Sample]:
    """n graded samples of each prompt, in the prompts' order."""
    drawn = draw(prompts, n, engine, sampling, seed, "sampling")
    return graded(task, drawn, [prompt.problem for prompt in prompts])


def draw(
    prompts: Sequence[Prompt], n: int, engine: Engine, sampling: SamplingParameters, seed: int, description: str
) -> list[Drawn]:
    """n completions of each prompt, in the prompts' order. description: what the progress bar says."""
    drawn: list[list[Drawn]] = [[] for _ in prompts]
    for index, one in progress_bar(engine(prompts, n, sampling, seed), description, "sample", n * len(prompts)):
        drawn[index].append(one)
    return [one for completions in drawn for one in completions]


def share_of(prompts: Sequence[Prompt], gpus: int) -> tuple[Sequence[Prompt], int]:
    """This rank's consecutive share of the prompts, and how many precede it; empty but for every gpus-th rank.

    There is an engine for `gpus` ranks. As `gpus` divides the ranks of a machine, none has GPUs of two machines.
    """
    engine, engines = rank() // gpus, ranks() // gpus
    first = len(prompts) * engine // engines
    behind = len(prompts) * (engine + 1) // engines if rank() % gpus == 0 else first
    return prompts[first:behind], first


def draw_into(
    part: Path,
    task: Task,
    prompts: Sequence[Prompt],
    n: int,
    open_engine: Callable[[], Engine],
    sampling: SamplingParameters,
    seed: int,
    chunk: int,
    description: str,
) -> None:
    """Write n graded samples of each prompt to `part`, at most `chunk` prompts at a time.

    Completions are in PART.drawn before they are graded. An interrupted call, given again, goes on behind the last
    whole chunk, and grades what it had drawn. The engine is opened where there is something left to draw.
    """
    ungraded, samples = part.with_name(f"{part.name}.drawn"), read_records(part, Sample, "growing")
    done = len(prompts) if len(samples) == n * len(prompts) else len(samples) // (n * chunk) * chunk
    write_file(part, to_lines(samples[: done * n]))
    for start in range(done, len(prompts), chunk):
        if ranks() > 1:
            end_with_others()
        some = prompts[start : start + chunk]
        drawn = read_records(ungraded, Drawn, "growing")
        if not (drawn and is_of(drawn, some, n)):
            drawn = draw(some, n, open_engine(), sampling, seed + start * n, description)
            write_file(ungraded, to_lines(drawn))
        write(part, "ab", to_lines(graded(task, drawn, [prompt.problem for prompt in some])))


def is_of(drawn: Sequence[Drawn], prompts: Sequence[Prompt], n: int) -> bool:
    """Whether these are n completions of each prompt."""
    return [(d.problem_id, d.prompt) for d in drawn] == [(p.problem.id, p.text) for p in prompts for _ in range(n)]


@by_rank_zero
def samples_there(source: Path, task: Task, prompts: Sequence[Prompt], n: int) -> list[Sample]:
    """The samples in a file of another run, if it holds n of each prompt; else none.

    They are graded anew: the reward may have changed since.
    """
    samples = read_checked(source, Sample) if source.exists() else []
    return graded(task, samples, [prompt.problem for prompt in prompts]) if is_of(samples, prompts, n) else []


def graded(
    task: Task, drawn: Sequence[Drawn], problems: Sequence[Problem], seconds: float = REWARD_SECONDS
) -> list[Sample]:
    """Each completion with the grade of its text before the stop string, in place of any grade that it had.

    problems: in order, each has equally many of the completions. seconds: for each completion. InputError names the
    problem, the completion and the line of the task's code that raised, hung, or returned what is no grade.

    >>> task = Task("short", [], [], reward=lambda completion, problem: 1 - len(completion))
    >>> [sample] = graded(task, [Drawn(prompt="?", completion="four")], [Problem("1", "?")])
    >>> sample.reward, sample.outcome
    (-3.0, 'incorrect')
    """
    problems = [problem for problem in problems for _ in range(len(drawn) // len(problems))]
    texts = [task.visible(one.completion) for one in drawn]
    function = task.reward or task.batch_reward or task.grade
    values: list[Any] = []
    if task.batch_reward and texts:
        with named(function, problems[0].id, texts[0], seconds * len(texts)):
            values = list(function(texts, problems))
            if len(values) != len(texts):
                raise _Fault(f"returned {len(values)} grades for {len(texts)} completions, of which this is the first")
    samples = []
    for i, (one, text, problem) in enumerate(zip(drawn, texts, problems, strict=True)):
        with named(function, problem.id, text, seconds):
            value = values[i] if values else function(text, problem.gold if task.grade else problem)
            if task.grade:
                grade = Grade(1.0 if value == task.outcomes[0] else -1.0, value)
            elif isinstance(value, Grade):
                grade = value
            else:
                grade = Grade(value, task.outcomes[0 if isinstance(value, Real) and value > 0 else 1])
            if not (isinstance(grade.reward, Real) and math.isfinite(grade.reward)):
                raise _Fault(f"returned {grade.reward!r:.80}, where a finite number or a Grade should be")
            if grade.outcome not in task.outcomes:
                fault = f"none of the task's outcomes {task.outcomes}"
                raise _Fault(f"returned the outcome {grade.outcome!r:.80}, which is {fault}")
        samples.append(Sample(**dict(one) | {"reward": float(grade.reward), "outcome": grade.outcome}))
    return samples


class _Fault(BaseException):
    """What a task's function did wrong. No Exception: code that expects some of its own catches these too often."""


@contextmanager
def named(function: Callable, problem_id: str | None, text: str, seconds: float = math.inf) -> Iterator[None]:
    """Inside it a task's `function` is called on a text; InputError tells where it raised or ran out of time.

    The time limit is an alarm, which the main thread alone gets. Code in C that ignores signals goes on to its end.
    """

    def ring(number: int, frame: Any) -> None:
        raise _Fault(f"took more than {seconds:g} s, see REWARD_SECONDS in pipeline/sampling.py")

    has_alarm = seconds < math.inf and threading.current_thread() is threading.main_thread()
    if has_alarm:
        handler = signal.signal(signal.SIGALRM, ring)
        delay, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except InputError:
        raise
    except (_Fault, Exception) as error:
        [*_, line] = traceback.format_exception_only(error)
        fault = " ".join(str(error).split()) if isinstance(error, _Fault) else line.strip().partition("\n")[0]
        advice = "mend it, and the same command goes on with what was drawn"
        where = f"problem {problem_id}, completion {text[:80]!r}: {_place(function, error)}"
        raise InputError(f"{where}: {fault}; {advice}") from error
    finally:
        if has_alarm:
            signal.setitimer(signal.ITIMER_REAL, delay, interval)
            signal.signal(signal.SIGALRM, handler)


def _place(function: Callable, error: BaseException) -> str:
    """FILE:LINE of the last line of the function's file that was at work at the error; else of the function."""
    function = inspect.unwrap(function.func if isinstance(function, partial) else function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if code is None:  # written in C
        return repr(function)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == code.co_filename]
    return f"{code.co_filename}:{[code.co_firstlineno, *lines][-1]}"


def transformers_engine(
    lm: LanguageModel, tokens_at_once: int, prompts: Sequence[Prompt], n: int, sampling: SamplingParameters, seed: int
) -> Iterator[tuple[int, Drawn]]:
    """With its first two arguments given, an engine that batches `generate`.

    tokens_at_once: at most so many rows times (prompt + new tokens) in a batch.
    """
    lengths = [len(prompt.ids) for prompt in prompts]
    # n rows for each prompt, those of like length together
    rows = [i for i in sorted(range(len(prompts)), key=lengths.__getitem__) for _ in range(n)]
    widths = [lengths[i] + sampling.max_new_tokens for i in rows]
    for number, batch in enumerate(batches_within(tokens_at_once, widths)):
        generated = _generate(lm, [prompts[i].ids for i in rows[batch]], sampling, seed + number)
        for i, token_ids in zip(rows[batch], generated, strict=True):
            token_ids, reason = _cut(token_ids, lm, sampling.stop)
            asked, text = {"problem_id": prompts[i].problem.id, "prompt": prompts[i].text}, lm.text(token_ids)
            yield i, Drawn(**asked, completion=text, token_ids=token_ids, finish_reason=reason)


def _generate(
    lm: LanguageModel, prompt_ids: list[list[int]], sampling: SamplingParameters, seed: int
) -> list[list[int]]:
    """The raw continuation of each prompt, padding included; the global random state is left as it was."""
    model, tokenizer = lm.model, lm.tokenizer
    distribution = asdict(sampling) | {"top_k": max(sampling.top_k, 0)}  # by `generate`'s names; 0 is off
    ends = {"stop_strings": list(distribution.pop("stop")) or None, "eos_token_id": sorted(lm.ends) or None}
    config = GenerationConfig(do_sample=True, pad_token_id=tokenizer.pad_token_id, **distribution, **ends)
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
            cache = None
            if len(prompts) < len(prompt_ids) and width > 1:
                # Keys and values of all but the last token of each prompt are computed once for all its completions,
                # and repeated to (B, heads, P - 1, size), from where `generate` goes on.
                cache, mask = DynamicCache(config=model.config), padded["attention_mask"][:, :-1]
                at = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp_min(0)}
                model(padded["input_ids"][:, :-1], **at, past_key_values=cache, logits_to_keep=1)
                cache.batch_select_indices(prompt_of)
            ids = model.generate(**inputs, generation_config=config, tokenizer=stop_tokenizer, past_key_values=cache)
    finally:
        model.generation_config = own_config
    return ids[:, width:].tolist()


def _cut(token_ids: list[int], lm: LanguageModel, stop: Sequence[str]) -> tuple[list[int], str]:
    """A completion's tokens without the padding that follows its end, and the reason why it ends."""

    def has_stop(size: int) -> bool:
        return any(string in lm.text(token_ids[:size]) for string in stop)

    end = next((i for i, token in enumerate(token_ids) if token in lm.ends), len(token_ids))
    # Looked for first: where padding is the end of sequence too, one follows the stop string.
    if stop and end and has_stop(end):
        return token_ids[: bisect_left(range(end), True, key=has_stop)], "stop"  # up to the token that completes it
    token_ids = token_ids[: end + 1]
    return token_ids, "stop" if token_ids[-1] in lm.ends else "length"


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
