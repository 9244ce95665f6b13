"""What a run is given: problems or samples, and the model that they must fit. Read and checked before it begins."""

from dataclasses import replace
from typing import Any, NamedTuple

from pipeline import dataset
from pipeline.held_out import rows_held_out
from pipeline.models import chunked_head
from pipeline.models.chat import asked_by, load_to_ask
from pipeline.models.language_model import META, LanguageModel
from pipeline.own_samples import digest_of
from pipeline.records import InputError, Sample, Task
from pipeline.runtime.processes import rank
from pipeline.runtime.run_folder import refuse_others
from pipeline.sampling import check_lengths
from pipeline.settings import OF_DRAWING, Settings


class Inputs(NamedTuple):
    """The task with the prompts that the model gets, the model without weights, and what was read of the files."""

    task: Task
    meta: LanguageModel
    longest: int  # tokens of a prompt and its completion
    lengths: tuple[int, int]  # those of a prompt and of a completion that is trained on, at most
    given: list[Sample] | None  # --samples
    held_out: list[dataset.Row] | None  # --held-out
    record: dict[str, Any]  # what the run is, for config.json


def read_inputs(settings: Settings, task: Task) -> Inputs:
    """The inputs of a run; InputError where model, problems and samples do not fit together."""
    is_drawn = bool(settings.iterations and not settings.samples)
    is_tested = settings.test_source is not None
    task = task if is_tested else replace(task, test=())
    for problems, name, is_needed in ((task.train, "training", is_drawn), (task.test, "test", is_tested)):
        if is_needed and not problems:
            raise InputError(f"task {task.name}: has no {name} problems")
    meta = load_to_ask(settings, settings.model, META)
    if settings.sliced_head:
        chunked_head.check_head(meta.model)
    task = asked_by(meta, task)
    longest = check_lengths(task, meta, settings.max_new_tokens)
    lengths = longest - settings.max_new_tokens, settings.max_new_tokens
    given, held_out, digests = None, None, {}
    if settings.samples:
        given = dataset.given_samples(settings, settings.samples, meta)
        digests["samples_sha256"] = digest_of(settings.samples, given)
        lengths = dataset.longest(dataset.compose(settings, given, meta, task.stop)[0])
        longest = longest or sum(lengths)
    if settings.held_out:
        others = dataset.given_samples(settings, settings.held_out, meta)
        digests["held_out_sha256"] = digest_of(settings.held_out, others)
        held_out = rows_held_out(settings, others, meta, task.stop)
        prompts, trained = ({sample.prompt for sample in samples} for samples in (others, given))
        if (shared := len(prompts & trained)) and rank() == 0:
            print(f"{settings.held_out}: {shared} of {len(prompts)} prompts are trained on too", flush=True)
    record = settings.record(**digests)
    if settings.reuse is not None:
        here = {name: record[name] for name in OF_DRAWING}
        refuse_others(settings.reuse, here, "has drawn otherwise", "give a --reuse that has drawn the same")
    return Inputs(task, meta, longest, lengths, given, held_out, record)
