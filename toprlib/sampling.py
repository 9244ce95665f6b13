"""Sampling: problems in, graded completions out.

A completion is exactly what the model wrote, up to and including its end of sequence or the stop
string.
"""

import json
from collections.abc import Collection, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from tqdm import tqdm

from toprlib.distributed import gather, progress_bar, rank, ranks
from toprlib.files import append_to_file, exists, read_records, remove, to_lines, write_file
from toprlib.language_model import LanguageModel
from toprlib.records import Engine, InputError, Problem, Prompt, Sample, Task
from toprlib.settings import Settings

CHUNK = 256  # prompts between two writes to the disk


def make_prompts(
    task: Task, problems: Sequence[Problem], lm: LanguageModel, settings: Settings
) -> list[Prompt]:
    """The prompts of problems. Raises InputError if one exceeds the context with the new tokens.

    A run that resumes has the prompts that it began with, from chats.json: a chat template may
    write the date.
    """
    chats = {}
    if lm.chat and settings.out and (settings.out / "chats.json").exists():
        chats = json.loads((settings.out / "chats.json").read_text())
    arguments = json.loads(settings.chat_args)
    prompts = []
    for problem in problems:
        text = task.prompt(problem)
        if lm.chat and text not in chats:
            messages = [{"role": "user", "content": text}]
            chats[text] = lm.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **arguments
            )
        text = chats.get(text, text)
        [ids] = lm.prompt_ids([text])
        if len(ids) + settings.max_new_tokens > lm.context:
            message = f"exceeds the model's context of {lm.context} with --max-new-tokens"
            raise InputError(f"{problem.question[:40]!r}: {message}; reduce --max-new-tokens")
        prompts.append(Prompt(problem, text, ids))
    return prompts


def print_shared_problems(trained: Collection[str], test: Sequence[Prompt]) -> None:
    """Rank zero warns of test problems that are trained on. trained: texts of prompts."""
    shared = sum(prompt.text in trained for prompt in test)
    if rank() == 0 and shared:
        message = f"{shared} test problems are trained on; remove them from --data"
        print(f"warning: {message}", flush=True)


def write_chats(task: Task, prompts: Sequence[Prompt], folder: Path) -> None:
    """Keep the prompts of chats for a run that resumes, in chats.json. Every rank calls this."""
    if rank() == 0:
        chats = {task.prompt(prompt.problem): prompt.text for prompt in prompts}
        write_file(folder / "chats.json", json.dumps(chats))


def sample_to_file(
    file: Path, engine: Engine, prompts: Sequence[Prompt], n: int, seed: int, task: Task
) -> None:
    """Write n graded samples of each prompt to `file`, in the order of the prompts.

    Every rank calls this; a file that exists is left as it is. Each engine samples its share of the
    prompts into FILE.part-RANK, chunk by chunk. After an interruption, the same call resumes after
    the last complete chunk. Up to rounding, completions do not depend on the number of ranks.
    """
    if exists(file):
        return
    start, share = _own_share(prompts, engine.gpus)
    part = file.with_name(f"{file.name}.part-{rank()}")
    samples = read_records(part, Sample, is_partial=True) if part.exists() else []
    done = len(samples) // (n * CHUNK) * CHUNK  # prompts
    if len(samples) == n * len(share):
        done = len(share)
    write_file(part, to_lines(samples[: n * done]))  # without an incomplete chunk
    name = f"{file.parent.name}/{file.name}"
    with progress_bar(None, name, "sample", n * len(share), n * done) as bar:
        for first in range(done, len(share), CHUNK):
            chunk = share[first : first + CHUNK]
            samples = sample_prompts(engine, chunk, n, seed + n * (start + first), task, bar)
            append_to_file(part, to_lines(samples))
    gather(None)  # all ranks have sampled their shares
    if rank() == 0:
        parts = [file.with_name(f"{file.name}.part-{number}") for number in range(ranks())]
        write_file(file, "".join(part.read_text(encoding="utf-8") for part in parts))
        remove(*parts)
    gather(None)


def _own_share(prompts: Sequence[Prompt], gpus: int) -> tuple[int, Sequence[Prompt]]:
    """The index of the first prompt of this rank's share, and the share.

    gpus: the ranks that an engine spans; the first of them has the engine's whole share.
    """
    if rank() % gpus > 0:
        return 0, []
    engines = -(-ranks() // gpus)
    engine = rank() // gpus
    start = len(prompts) * engine // engines
    return start, prompts[start : len(prompts) * (engine + 1) // engines]


def graded_text(prompt: str, completion: str, stop: Sequence[str]) -> str:
    """What follows the thought of a completion, up to the first stop string.

    A thought ends with </think>, and begins with <think> in the completion or at the end of the
    prompt. Nothing follows a thought that does not end.

    >>> [graded_text("?", text, ["Q:"]) for text in ("<think>4</think>5Q:", "<think>4", "5")]
    ['5', '', '5']
    """
    _, end, text = completion.rpartition("</think>")
    is_in_thought = prompt.rstrip().endswith("<think>") and not end
    if is_in_thought or "<think>" in text:
        return ""
    for string in stop:
        text = text.partition(string)[0]
    return text


def sample_prompts(
    engine: Engine, prompts: Sequence[Prompt], n: int, seed: int, task: Task, bar: tqdm
) -> list[Sample]:
    """n graded samples of each prompt, in the order of the prompts. bar: counts them."""
    fields_of: list[list[dict[str, Any]]] = [[] for _ in prompts]
    # Closed at once after an exception, so that an engine's threads stop.
    with closing(engine.generate(prompts, n, seed)) as batches:
        for completions in batches:
            for index, fields in completions:
                fields_of[index].append(fields)
            bar.update(len(completions))
    rows = []
    for prompt, all_fields in zip(prompts, fields_of, strict=True):
        rows += [(prompt, fields) for fields in all_fields]
    texts = [graded_text(prompt.text, each["completion"], task.stop) for prompt, each in rows]
    grades = task.grade(texts, [prompt.problem for prompt, _ in rows])
    unknown = {grade.outcome for grade in grades} - set(task.outcomes)
    if unknown:  # no share of results.json would count them
        raise InputError(f"task {task.name}: add the outcomes {sorted(unknown)} to `outcomes`")
    samples = []
    for (prompt, fields), grade in zip(rows, grades, strict=True):
        known = {"problem_id": prompt.problem.id, "prompt": prompt.text, **grade._asdict()}
        samples.append(Sample(**known, **fields))
    return samples
