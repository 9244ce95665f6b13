"""Sampling: problems in, graded completions out.

A completion is exactly what the model wrote, up to and including its end of sequence or the stop
string. An engine makes completions; `sample_to_file` divides the work among the ranks, keeps
finished completions on the disk, and grades them.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from toprlib.distributed import gather, progress_bar, rank, rank_zero_only, ranks
from toprlib.files import append_to_file, exists, read_partial_records, remove, to_lines, write_file
from toprlib.grading import grade_samples
from toprlib.hf_sampler import sample_completions
from toprlib.language_model import LanguageModel, free_memory, load_weights
from toprlib.records import InputError, Problem, Prompt, Sample, Task

CHUNK = 256  # prompts between two writes to the disk; ours
Finished = list[tuple[int, Sample]]  # (index of the prompt, sample); finished together
Completions = Generator[Finished, None, None]


@dataclass(frozen=True)
class SamplingParameters:
    """The distribution that completions are sampled from; defaults of the paper, Section 4.2.

    top_k: 0 or -1 for all tokens. max_new_tokens: a completion that reaches it is cut, and graded
    as it is. stop: strings that end a completion; they are part of it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 500
    max_new_tokens: int = 512
    stop: tuple[str, ...] = ()


class Engine(NamedTuple):
    """What makes completions.

    generate(prompts, n, seed) yields n samples of each prompt, not graded, in lists of those that
    are finished together, each with the index of its prompt. It may use the seeds from `seed` to
    `seed + n * len(prompts) - 1`. gpus: the ranks whose GPUs one engine spans; only the first
    one samples. start() loads the model; without it, the first call of `generate` does.
    """

    generate: Callable[[Sequence[Prompt], int, int], Completions]
    gpus: int = 1
    start: Callable[[], object] = lambda: None


@contextmanager
def hf_engine(lm: LanguageModel, model: str, parameters: SamplingParameters) -> Iterator[Engine]:
    """An engine in this process. Its first call loads the weights; the end of the block frees them.

    lm: without weights. model: folder or hub name of the weights. Raises InputError for a model
    whose state is more than keys and values, such as Mamba.
    """
    if lm.model._is_stateful:
        message = f"{type(lm.model).__name__} has a state that this engine cannot copy"
        raise InputError(f"{message}; use --engine vllm or another --model", option="--engine")

    # Not at the start of the block: a run whose samples exist loads nothing.
    @cache
    def load() -> LanguageModel:
        return load_weights(lm, model)

    def generate(prompts: Sequence[Prompt], n: int, seed: int) -> Completions:
        yield from sample_completions(load(), parameters, prompts, n, seed)

    try:
        yield Engine(generate, start=load)
    finally:
        load.cache_clear()
        free_memory()


def make_prompts(
    task: Task, problems: Sequence[Problem], lm: LanguageModel, max_new_tokens: int
) -> list[Prompt]:
    """The prompts of problems. Raises InputError if one exceeds the context with the new tokens."""
    if not problems:
        return []
    texts = [task.prompt(problem) for problem in problems]
    prompts = []
    for problem, text, ids in zip(problems, texts, lm.prompt_ids(texts), strict=True):
        prompts.append(Prompt(problem, text, ids))
    longest = max(prompts, key=lambda prompt: len(prompt.ids))
    if len(longest.ids) + max_new_tokens > lm.context:
        message = f"the prompt of problem {longest.problem.id} has {len(longest.ids)} tokens: with "
        message += f"{max_new_tokens} new ones it exceeds the model's context of {lm.context}"
        raise InputError(f"{message}; use fewer --shots or tokens", option="--max-new-tokens")
    return prompts


def shard_prompts(prompts: Sequence[Prompt], gpus: int) -> tuple[Sequence[Prompt], int]:
    """This rank's consecutive share of the prompts, and the index of its first prompt.

    gpus: the ranks that one engine spans; the first of them has the whole share of the engine.

    >>> shard_prompts(["a", "b", "c"], gpus=1)  # one rank without torchrun
    (['a', 'b', 'c'], 0)
    """
    if rank() % gpus != 0:
        return [], 0
    # gpus divides the ranks of a machine, so that no engine spans two machines.
    engine = rank() // gpus
    engines = ranks() // gpus
    start = len(prompts) * engine // engines
    stop = len(prompts) * (engine + 1) // engines
    return prompts[start:stop], start


def sample_to_file(
    file: Path, engine: Engine, prompts: Sequence[Prompt], n: int, seed: int, task: Task
) -> None:
    """Write n graded samples of each prompt to `file`, in the order of the prompts.

    Every rank calls this; a file that exists is left as it is. Each rank samples its share into
    FILE.part-RANK, chunk by chunk, and grades the share once it is complete. After an interruption
    or an error of the reward function, the same call resumes after the last complete chunk. Up to
    rounding, completions do not depend on the number of ranks. Raises InputError as `grade_samples`
    does, and if a part has samples of other prompts.
    """
    if not exists(file):
        share, start = shard_prompts(prompts, engine.gpus)
        part = _part(file, rank())
        _sample_share(part, engine, share, n, seed + start * n)
        _grade_share(part, share, task)
        gather(None)  # all ranks have graded their shares
        _join_parts(file, prompts, n)
    remove(*file.parent.glob(f"{file.name}.part-*"))


def sample_prompts(
    engine: Engine, prompts: Sequence[Prompt], n: int, seed: int, task: Task
) -> list[Sample]:
    """n graded samples of each prompt, in the order of the prompts, by this process alone."""
    engine.start()
    with progress_bar(None, "sampling", "sample", n * len(prompts)) as bar:
        samples = _sample_chunk(engine, prompts, n, seed, bar)
    return grade_samples(task, samples, [prompt.problem for prompt in prompts])


def _part(file: Path, rank: int) -> Path:
    """The file of the samples of one rank, which are not graded until the share is complete."""
    return file.with_name(f"{file.name}.part-{rank}")


# Sampling and grading a share have no collective call: a rank whose share is complete skips them.
def _sample_share(part: Path, engine: Engine, share: Sequence[Prompt], n: int, seed: int) -> None:
    """Append to `part` the chunks of the share that it lacks. seed: of the first prompt."""
    samples = read_partial_records(part, Sample)
    done = len(share)  # prompts
    if len(samples) != n * len(share):
        done = len(samples) // (n * CHUNK) * CHUNK
    samples = samples[: n * done]
    _check_prompts(part, samples, share[:done], n)
    write_file(part, to_lines(samples))  # without an incomplete chunk
    if done < len(share):
        engine.start()  # before the bar, whose rate would include minutes of loading
    description = f"{part.parent.name}/{part.stem}"
    with progress_bar(None, description, "sample", n * len(share), done=n * done) as bar:
        for start in range(done, len(share), CHUNK):
            chunk = share[start : start + CHUNK]
            samples = _sample_chunk(engine, chunk, n, seed + n * start, bar)
            append_to_file(part, to_lines(samples))


def _sample_chunk(
    engine: Engine, prompts: Sequence[Prompt], n: int, seed: int, bar: tqdm
) -> list[Sample]:
    """n samples of each prompt, in the order of the prompts. bar: counts them as they come."""
    samples_of: list[list[Sample]] = [[] for _ in prompts]
    # Closed at once after an exception, so that an engine's threads stop.
    with closing(engine.generate(prompts, n, seed)) as completions:
        for finished in completions:
            for index, sample in finished:
                samples_of[index].append(sample)
            bar.update(len(finished))
    return list(chain.from_iterable(samples_of))


def _grade_share(part: Path, share: Sequence[Prompt], task: Task) -> None:
    """Grade the samples of a complete part, unless they are graded."""
    samples = read_partial_records(part, Sample)
    if any(sample.reward is None for sample in samples):
        problems = [prompt.problem for prompt in share]
        write_file(part, to_lines(grade_samples(task, samples, problems)))


@rank_zero_only
def _join_parts(file: Path, prompts: Sequence[Prompt], n: int) -> None:
    """Write `file` from the parts of all ranks, whose shares are consecutive."""
    samples = []
    for number in range(ranks()):
        samples += read_partial_records(_part(file, number), Sample)
    _check_prompts(file, samples, prompts, n)
    if all(sample.finish_reason == "length" for sample in samples):
        problem = f"{file}: none of the {len(samples)} completions has ended, all were cut off"
        fix = "increase --max-new-tokens; add --chat for a chat model; or correct eos_token_id"
        print(f"{problem}; {fix} in the model's generation_config.json", flush=True)
    write_file(file, to_lines(samples))


def _check_prompts(
    file: Path, samples: Sequence[Sample], prompts: Sequence[Prompt], n: int
) -> None:
    """Raises InputError unless these are n samples of each prompt, in order."""
    expected = []
    for prompt in prompts:
        expected += [(prompt.problem.id, prompt.text)] * n
    actual = [(sample.problem_id, sample.prompt) for sample in samples]
    if actual != expected:
        message = "its samples are not those of this run's prompts; remove the *.part-* files"
        raise InputError(f"{message} of this folder and repeat the command", file=file)
