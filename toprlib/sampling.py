"""Sampling: prompts in, completions out, and then grades.

A completion is what the model wrote, token by token, up to and including its end of sequence or the stop string;
nothing is appended or dropped before it is scored.
"""

import inspect
import math
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import pad
from tqdm import tqdm
from transformers import DynamicCache, DynamicLayer

from toprlib.language_model import LanguageModel
from toprlib.records import (
    Drawn,
    Grade,
    InputError,
    Problem,
    Sample,
    Task,
    read_records,
    to_lines,
    write,
    write_file,
)
from toprlib.distributed import by_rank_zero, end_with_others, progress_bar, rank, ranks
from toprlib.files import read_checked

REWARD_SECONDS = (
    300.0  # for a completion, ours: a function that hangs by mistake ends the run with a line
)


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


def prompts_of(
    task: Task, problems: Sequence[Problem], lm: LanguageModel, new_tokens: int
) -> list[Prompt]:
    """The prompts of problems; InputError where the longest with `new_tokens` behind it exceeds the model's context."""
    if not problems:
        return []
    texts = [task.prompt(problem) for problem in problems]
    prompts = [
        Prompt(*columns) for columns in zip(problems, texts, lm.prompt_ids(texts), strict=True)
    ]
    longest = max(len(prompt.ids) for prompt in prompts)
    if longest + new_tokens > lm.context:
        number = next(prompt.problem.id for prompt in prompts if len(prompt.ids) == longest)
        fault = f"with {new_tokens} new ones it exceeds the model's context of {lm.context}"
        advice = "take fewer shots or new tokens"
        raise InputError(f"problem {number}: its prompt has {longest} tokens; {fault}: {advice}")
    return prompts


def draw_samples(
    task: Task,
    prompts: Sequence[Prompt],
    n: int,
    engine: Engine,
    sampling: SamplingParameters,
    seed: int,
) -> list[Sample]:
    """n graded samples of each prompt, in the prompts' order."""
    with progress_bar(None, "sampling", "sample", n * len(prompts)) as bar:
        drawn = draw(prompts, n, engine, sampling, seed, bar)
    return graded(task, drawn, [prompt.problem for prompt in prompts])


def draw(
    prompts: Sequence[Prompt],
    n: int,
    engine: Engine,
    sampling: SamplingParameters,
    seed: int,
    bar: tqdm,
) -> list[Drawn]:
    """n completions of each prompt, in the prompts' order. bar: the progress bar that counts them."""
    drawn: list[list[Drawn]] = [[] for _ in prompts]
    for index, one in engine(prompts, n, sampling, seed):
        drawn[index].append(one)
        bar.update()
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
    with progress_bar(None, description, "sample", n * len(prompts)) as bar:
        bar.update(done * n)
        for start in range(done, len(prompts), chunk):
            if ranks() > 1:
                end_with_others()
            some = prompts[start : start + chunk]
            drawn = read_records(ungraded, Drawn, "growing")
            if drawn and is_of(drawn, some, n):
                bar.update(len(drawn))
            else:
                drawn = draw(some, n, open_engine(), sampling, seed + start * n, bar)
                write_file(ungraded, to_lines(drawn))
            write(part, "ab", to_lines(graded(task, drawn, [prompt.problem for prompt in some])))


def is_of(drawn: Sequence[Drawn], prompts: Sequence[Prompt], n: int) -> bool:
    """Whether these are n completions of each prompt."""
    return [(d.problem_id, d.prompt) for d in drawn] == [
        (p.problem.id, p.text) for p in prompts for _ in range(n)
    ]


@by_rank_zero
def samples_there(source: Path, task: Task, prompts: Sequence[Prompt], n: int) -> list[Sample]:
    """The samples in a file of another run, if it holds n of each prompt; else none.

    They are graded anew: the reward may have changed since.
    """
    samples = read_checked(source, Sample) if source.exists() else []
    return (
        graded(task, samples, [prompt.problem for prompt in prompts])
        if is_of(samples, prompts, n)
        else []
    )


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
                raise _Fault(
                    f"returned {len(values)} grades for {len(texts)} completions, of which this is the first"
                )
    samples = []
    for i, (one, text, problem) in enumerate(zip(drawn, texts, problems, strict=True)):
        with named(function, problem.id, text, seconds):
            value = values[i] if values else function(text, problem.gold if task.grade else problem)
            if task.grade:
                grade = Grade(1.0 if value == task.outcomes[0] else -1.0, value)
            elif isinstance(value, Grade):
                grade = value
            else:
                grade = Grade(
                    value, task.outcomes[0 if isinstance(value, Real) and value > 0 else 1]
                )
            if not (isinstance(grade.reward, Real) and math.isfinite(grade.reward)):
                raise _Fault(
                    f"returned {grade.reward!r:.80}, where a finite number or a Grade should be"
                )
            if grade.outcome not in task.outcomes:
                fault = f"none of the task's outcomes {task.outcomes}"
                raise _Fault(f"returned the outcome {grade.outcome!r:.80}, which is {fault}")
        samples.append(
            Sample(**dict(one) | {"reward": float(grade.reward), "outcome": grade.outcome})
        )
    return samples


class _Fault(BaseException):
    """What a task's function did wrong. No Exception: code that expects some of its own catches these too often."""


@contextmanager
def named(
    function: Callable, problem_id: str | None, text: str, seconds: float = math.inf
) -> Iterator[None]:
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
        fault = (
            " ".join(str(error).split())
            if isinstance(error, _Fault)
            else line.strip().partition("\n")[0]
        )
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
    lm: LanguageModel,
    tokens_at_once: int,
    prompts: Sequence[Prompt],
    n: int,
    sampling: SamplingParameters,
    seed: int,
) -> Iterator[tuple[int, Drawn]]:
    """With its first two arguments given, an engine that samples in this process, in batches.

    tokens_at_once: at most so many rows times (prompt + new tokens) in a batch. Completion j of prompt i is drawn by
    numbers of its own, of the seed `seed + i * n + j`: up to rounding it is the same whatever is drawn beside it.
    """
    lengths = [len(prompt.ids) for prompt in prompts]
    rows = [
        (i, seed + i * n + j)
        for i in sorted(range(len(prompts)), key=lengths.__getitem__)
        for j in range(n)
    ]
    batches = [
        rows[b]
        for b in batches_within(
            tokens_at_once, [lengths[i] + sampling.max_new_tokens for i, _ in rows]
        )
    ]
    # One thread is as fast as several where a model is small: up to four batches are computed at a time on a processor.
    threads = torch.get_num_threads()
    workers = min(threads, 4) if lm.model.device.type == "cpu" else 1
    pool, results = (
        ThreadPoolExecutor(workers, "sampling", torch.set_num_threads, (threads // workers,)),
        [],
    )
    try:
        for batch in batches:
            numbers, seeds = zip(*batch, strict=True)
            distinct, prompt_of = torch.tensor(numbers).unique_consecutive(return_inverse=True)
            generators = [torch.Generator().manual_seed(row_seed) for row_seed in seeds]
            noise = torch.stack(
                [torch.rand(sampling.max_new_tokens, generator=one) for one in generators]
            )
            results.append(
                pool.submit(
                    sample, lm, [prompts[i].ids for i in distinct], prompt_of, noise, sampling
                )
            )
        for batch, completions in zip(batches, results, strict=True):
            for (i, _), (token_ids, reason) in zip(batch, completions.result(), strict=True):
                asked, text = (
                    {"problem_id": prompts[i].problem.id, "prompt": prompts[i].text},
                    lm.text(token_ids),
                )
                yield i, Drawn(**asked, completion=text, token_ids=token_ids, finish_reason=reason)
    finally:
        hook = lm.model.register_forward_pre_hook(
            _not_wanted
        )  # threads that still compute hear of no signal
        pool.shutdown(cancel_futures=True)
        hook.remove()
        torch.set_num_threads(threads)


def _not_wanted(*_: Any) -> NoReturn:
    raise InterruptedError("nobody waits for these completions any more")


@torch.inference_mode()
def sample(
    lm: LanguageModel,
    prompts: Sequence[list[int]],
    prompt_of: Tensor,
    noise: Tensor,
    sampling: SamplingParameters,
) -> list[tuple[list[int], str]]:
    """A completion for each row, and why it ends: "stop", or "length" where it has as many tokens as there is noise.

    prompts: token ids. prompt_of: (B,) the number of each row's prompt. noise: (B, T), uniform in [0, 1).
    """
    device, limit = lm.model.device, noise.shape[1]
    noise, prompt_of, ends = (
        x.to(device) for x in (noise, prompt_of, torch.tensor([*lm.ends], dtype=torch.long))
    )
    padded = lm.tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt").to(
        device
    )
    token, mask, cache = (
        padded["input_ids"],
        padded["attention_mask"],
        DynamicCache(config=lm.model.config),
    )
    position = (mask.cumsum(-1) - 1).clamp_min(0)
    rows, tokens, completions = (
        torch.arange(len(noise), device=device),
        torch.zeros_like(noise, dtype=torch.long),
        {},
    )
    for t in range(limit):
        at = {"attention_mask": mask, "position_ids": position, "past_key_values": cache}
        logits = (
            lm.model(token, **at, logits_to_keep=1).logits[:, -1].float() / sampling.temperature
        )
        if (
            t == 0
        ):  # a prompt is computed once; its logits, keys and values are copied to all rows that continue it
            logits, mask, position = logits[prompt_of], mask[prompt_of], position[prompt_of, -1:]
            cache.batch_select_indices(prompt_of)
            cache.layers = [
                Room(layer, limit) if type(layer) is DynamicLayer else layer
                for layer in cache.layers
            ]
        if 0 < sampling.top_k < logits.shape[-1]:
            least = logits.topk(sampling.top_k, sorted=False).values.amin(-1, keepdim=True)
            logits = logits.masked_fill(logits < least, -math.inf)
        p = logits.softmax(-1)  # (B, V)
        if sampling.top_p < 1:
            likeliest, order = p.sort(descending=True)
            likeliest *= (
                likeliest.cumsum(-1) - likeliest < sampling.top_p
            )  # drops a token if the likelier have top_p
            p = torch.zeros_like(p).scatter(-1, order, likeliest)
        cumulative = p.cumsum(-1)  # a token is drawn where the noise falls into its part of the sum
        token = torch.searchsorted(
            cumulative, noise[rows, t, None] * cumulative[:, -1:], right=True
        )  # (B, 1)
        tokens[rows, t] = token[:, 0]
        has_ended = torch.isin(token[:, 0], ends)
        if sampling.stop:
            has_ended |= has_stop(lm, tokens[rows, : t + 1], sampling.stop)
        completions |= {
            row: (tokens[row, : t + 1].tolist(), "stop") for row in rows[has_ended].tolist()
        }
        if len(completions) == len(noise):
            break
        if has_ended.any():  # rows from the end of the batch take the places of those that leave it
            left = (~has_ended).nonzero()[:, 0]
            kept = torch.arange(len(left), device=device)
            kept[has_ended[: len(left)]] = left[left >= len(left)]
            cache.batch_select_indices(kept)
            rows, token, mask, position = (x[kept] for x in (rows, token, mask, position))
        mask, position = torch.cat([mask, torch.ones_like(token)], dim=1), position + 1
    return [completions.get(row, (tokens[row].tolist(), "length")) for row in range(len(noise))]


def has_stop(lm: LanguageModel, tokens: Tensor, stop: Sequence[str]) -> Tensor:
    """Whether a stop string is complete in each of B completions, tokens (B, t), that had none one token ago: (B,)."""
    # It began in the last tokens then: a token may have no more than a quarter of a character.
    texts = map(lm.text, tokens[:, -4 * max(map(len, stop)) :].tolist())
    return torch.tensor(
        [any(string in text for string in stop) for text in texts], device=tokens.device
    )


class Room(DynamicLayer):
    """A layer's keys and values, (B, heads, tokens, size), in memory that has room for `limit` tokens more.

    What is appended or leaves is copied alone; `DynamicLayer` copies all of it each time.
    """

    def __init__(self, layer: DynamicLayer, limit: int) -> None:
        super().__init__()
        self.rooms = [pad(x, (0, 0, 0, limit)) for x in (layer.keys, layer.values)]
        self.keys, self.values, self.is_initialized = layer.keys, layer.values, True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Append those of one token, (B, heads, 1, size); returns those of all."""
        width = self.keys.shape[2]
        for room, states in zip(self.rooms, (key_states, value_states), strict=True):
            room[:, :, width : width + 1] = states
        self.keys, self.values = (room[:, :, : width + 1] for room in self.rooms)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order. A row that stays in its place is not copied."""
        moved = (indices != torch.arange(len(indices), device=indices.device)).nonzero()[:, 0]
        for room in self.rooms:
            room[moved] = room[indices[moved]]
        self.rooms = [room[: len(indices)] for room in self.rooms]


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
