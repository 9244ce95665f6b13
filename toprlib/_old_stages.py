"""The stages of a run: evaluate, sample, compose, score, train (Algorithm 1, Section 4.3), in train_gsm8k.py's order.

Each stage but compose, which takes seconds, leaves a file that no later stage changes. A stage whose file is there is
not run again; sampling goes on behind its last chunk, training behind its last checkpoint:

    iteration-1/test-0.jsonl        evaluate: completions of the test problems by the initial model, graded
    iteration-1/samples.jsonl       sample: completions of the training problems, graded
    iteration-1/train.jsonl         score: what `compose` has put together, with log mu; dataset.json: counts
    iteration-1/metrics.jsonl       train: the optimiser's steps
    iteration-1/checkpoint-256/     train: weights and optimiser, until the epoch is done
    iteration-1/model/              train: the model after it, which iteration 2 samples from
    iteration-1/test-320.jsonl      evaluate: completions of the test problems by this model; others along the epoch
    results.json, curve.png         all iterations
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import topr
from pipeline import dataset
from toprlib.compositions import COMPOSITIONS
from toprlib.batches import Composed, Inputs, epoch_steps, lay_out, read_inputs, to_examples
from toprlib.epoch import Saver, explained, log_step, signs_note, try_longest
from toprlib.evaluation import Scored, to_scored
from toprlib.held import Held
from toprlib.methods import METHODS, Loss
from toprlib.metrics import START_TOLERANCE, engine_mismatch
from toprlib.language_model import download
from toprlib.records import Example, Sample, Task, read_records
from toprlib.results import publish
from toprlib.runtime import processes, run_folder
from toprlib.preflight import TOKEN_BYTES, check_room
from toprlib.distributed import Times, device, on_all_ranks, rank, ranks
from toprlib.files import (
    Point,
    is_there,
    publish_file,
    publish_records,
    read_checked,
    remove,
)
from toprlib.sampling import Prompt, draw_into, samples_there, share_of
from toprlib.settings import Settings

Learn = tuple[
    Callable[..., Tensor], Callable[..., Tensor]
]  # a loss and the log-probabilities it learns from
LARGE = 1e9  # bytes; a run below it is not measured against the machine's memory and disk; ours


@contextmanager
def open_run(settings: Settings, task: Task, learn: Learn | None = None) -> Iterator["Run"]:
    """Open a run; call `check(settings)` first. Its folder is held until the block ends.

    learn: loss and logprobs for `topr.train`, in place of the method's. InputError, with nothing written, where model,
    samples, folder or disk do not fit.
    """
    engine = settings.engine or (
        "vllm" if device().type == "cuda" else "hf"
    )  # vLLM is the paper's (Section 4.2)
    settings = replace(
        settings, engine=engine, out=settings.out or settings.default_out(Settings())
    )
    with ExitStack() as stack:
        if ranks() > 1 or settings.compute != "float32":  # FSDP2 computes in other precisions
            stack.enter_context(processes.process_group(alone=True))
        inputs = on_all_ranks(partial(read_inputs, settings, task))
        method, loss = METHODS[settings.method], partial(topr.topr_loss, limits=settings.bounds)
        if method.loss is not None:
            loss = partial(
                method.loss, **{name: getattr(settings, name) for name in method.options}
            )
        loss, logprobs = learn or (loss, topr.sequence_logprobs)
        times, is_finished = Times(), is_there(settings.out / "results.json")
        start, held = Point(0, 0, settings.model), Held(settings, inputs, times)
        run = Run(settings, inputs, settings.out, start, loss, logprobs, is_finished, times, held)
        if is_finished:
            run_folder.refuse_others(
                run.folder, inputs.record, "holds a run with other settings", "choose another --out"
            )
            if rank() == 0:
                print(f"{run.folder}: this run is finished; what it found:", flush=True)
        else:
            tokens = inputs.size.longest * (inputs.size.drawn + inputs.size.tested)
            if 12 * inputs.size.parameters + TOKEN_BYTES * tokens > LARGE:
                on_all_ranks(partial(check_room, settings, run.folder, inputs.size))
            if not Path(settings.model).is_dir():
                on_all_ranks(partial(download, settings.model))
            stack.enter_context(run_folder.held_folder(run.folder, inputs.record))
            for last in (
                held.note_times,
                held.close,
                held.note_times,
            ):  # backwards: others may not wait for closing
                stack.callback(last)
        yield run


@dataclass
class Run:
    """The stages of a run."""

    settings: Settings
    inputs: Inputs
    folder: Path
    start: Point  # the model that the run begins with
    loss: Loss
    logprobs: Callable[..., Tensor]  # (model, batch) -> (B,), which `loss` learns from
    is_finished: bool  # by an earlier call
    times: Times
    held: Held
    evaluations: dict[int, list[tuple[int, Path]]] = field(
        default_factory=dict
    )  # see results.Evaluations

    def evaluate(self, iteration: int, point: Point) -> None:
        """Sample from a model on the test problems, or score the held-out samples by it: test-STEP.jsonl.

        `results` tells how good it is. Nothing happens with --no-evaluation.
        """
        settings, here = self.settings, self.folder / f"iteration-{iteration}"
        if not settings.evaluation:
            return
        file, is_along = (
            here / f"test-{point.step}.jsonl",
            point.model == str(here / f"model-{point.step}"),
        )
        n = settings.curve_samples if is_along else settings.test_samples
        if not is_along and point.step > 0 and iteration < settings.iterations:
            n = settings.between_samples or n
        if self.inputs.held_out is None:
            seed = settings.seed_of(f"test {iteration} {point.step}")
            self._draw(
                file, self.inputs.test, n, point.model, seed, f"evaluating at step {point.step}"
            )
        elif not is_there(file):
            examples = to_examples(
                self.inputs.held_out, self._logp(self.inputs.held_out, point.model)
            )
            before = read_checked(here / "test-0.jsonl", Scored) if point.step else None
            publish_records(file, to_scored(self.inputs.held_out, examples, before))
        if is_along:
            remove(Path(point.model))
        self.evaluations.setdefault(iteration, []).append((point.seen, file))

    def sample(self, iteration: int, model: str) -> list[Sample]:
        """The iteration's graded samples, those given or drawn from `model`: samples.jsonl."""
        file, settings = self.folder / f"iteration-{iteration}" / "samples.jsonl", self.settings
        if self.inputs.given is None:
            n = getattr(settings, COMPOSITIONS[settings.composition].draws)
            self._draw(
                file,
                self.inputs.train,
                n,
                model,
                settings.seed_of(f"samples {iteration}"),
                "sampling",
            )
        elif not is_there(file):
            publish_records(file, self.inputs.given)
        return read_checked(file, Sample)

    def _draw(
        self, file: Path, prompts: Sequence[Prompt], n: int, model: str, seed: int, description: str
    ) -> None:
        """n graded samples of each prompt by `model`, or those of --reuse: `file`.

        Each engine draws for a consecutive share of the prompts, into FILE.part-RANK.
        """
        settings, task = self.settings, self.inputs.task
        if not is_there(file):
            samples = []
            if settings.reuse is not None and model == settings.model:
                source = settings.reuse / file.relative_to(self.folder)
                samples = samples_there(source, task, prompts, n)
            if not samples:
                parts = [file.with_name(f"{file.name}.part-{r}") for r in range(ranks())]
                share, before = share_of(prompts, settings.engine_gpus)
                drawing = partial(
                    draw_into,
                    parts[rank()],
                    task,
                    share,
                    n,
                    open_engine=partial(self.held.engine, model),
                    sampling=self.inputs.sampling,
                    seed=seed + before * n,
                    chunk=settings.chunk,
                    description=description,
                )
                self.held.make_room("engine", model)
                with self.times("sampling"):
                    on_all_ranks(drawing)
                if rank() == 0:
                    samples = [
                        sample for part in parts for sample in read_records(part, Sample, "growing")
                    ]
                self.times.counts["sampled tokens"] += sum(
                    len(sample.token_ids) for sample in samples
                )
            publish_records(file, samples)
        remove(*file.parent.glob(f"{file.name}.part-*"))

    def compose(self, iteration: int, samples: list[Sample]) -> Composed:
        """Which of the samples to train on, in which order, with their rewards less the baseline."""
        settings, inputs = self.settings, self.inputs
        composed = inputs.composed
        if composed is None:
            composed = dataset.compose(
                settings, samples, inputs.lm, inputs.task.stop, inputs.train, iteration
            )
        if rank() == 0:
            chosen = list(chain(*composed.rows))
            before, after = (
                [samples[one.sample].reward for one in chosen],
                [one.reward for one in chosen],
            )
            positive = 100 * sum(reward > 0 for reward in after) / len(after)
            counts = f"{len(after)} examples of {len(samples)} samples, {positive:.1f} % positive"
            print(f"iteration {iteration}: {counts}", flush=True)
            if settings.effective_proportion is not None and len(set(before)) == 1:
                print(
                    f"iteration {iteration}: --effective-proportion: one sign alone keeps its rewards",
                    flush=True,
                )
            is_odd = before != after or not min(after) < 0 < max(after)
            if is_odd and (note := signs_note(settings, before, after)):
                print(f"iteration {iteration}: {note}", flush=True)
        return composed

    def score(self, iteration: int, composed: Composed, model: str) -> list[list[Example]]:
        """What to train on, with log mu: train.jsonl.

        log mu is computed by `model`, which starts the iteration, for --samples too, whoever wrote them; with
        --trust-logmu it is that of the samples, and with --reuse that of the other run, if it is the same.
        """
        file = self.folder / f"iteration-{iteration}" / "train.jsonl"
        settings, rows = self.settings, composed.rows
        if not is_there(file):
            logmu = []
            if settings.trust_logmu:
                logmu = [[one.token_logmu for one in row] for row in rows]
            elif settings.reuse is not None and model == settings.model:
                logmu = dataset.logmu_there(settings, self.inputs.record, file, rows)
            examples = to_examples(rows, logmu or self._logp(rows, model))
            engine = {
                one.sample: one.logmu_engine for one in chain(*rows) if one.logmu_engine is not None
            }
            mismatch = None
            if engine:
                trainer = {one.sample: math.fsum(one.token_logmu) for one in chain(*examples)}
                mismatch = engine_mismatch(engine, trainer)
            steps = len(epoch_steps(rows, settings.batch, settings.micro_batch))
            counts = composed.counts | {"steps": steps, "engine_mismatch": mismatch}
            publish_file(file.with_name("dataset.json"), json.dumps(counts, indent=2) + "\n")
            publish_records(file, chain(*examples))
        return [list(row) for _, row in groupby(read_checked(file, Example), key=attrgetter("row"))]

    def _logp(self, rows: Sequence[dataset.Row], model: str) -> list[list[list[float]]]:
        """log-probabilities by a model, in nats: for each row, completion and token."""
        lm, _ = self.held.learner(model)
        with self.times("scoring"):
            return dataset.score(
                rows, epoch_steps(rows, self.settings.batch, self.settings.micro_batch), lm.model
            )

    def train(self, iteration: int, rows: list[list[Example]], model: str) -> list[Point]:
        """One epoch on `rows`, from `model`: metrics.jsonl, and the models to evaluate, of which model/ is the last."""
        here, settings = self.folder / f"iteration-{iteration}", self.settings
        steps = epoch_steps(rows, settings.batch, settings.micro_batch)
        curve_points = settings.curve_points if settings.evaluation else 1
        points = []
        for stop in sorted(
            {len(steps) * i // curve_points for i in range(1, curve_points + 1)} - {0}
        ):
            folder = here / ("model" if stop == len(steps) else f"model-{stop}")
            points.append(Point(stop, sum(step.sequences for step in steps[:stop]), str(folder)))
        done = run_folder.resume_step(here, points)
        if done is not None:
            lm, optimizer = self.held.learner(model, here / f"checkpoint-{done}" if done else None)
            tolerance = None if settings.trust_logmu else START_TOLERANCE[settings.compute]
            saver = Saver(here, lm, optimizer, points, settings.save_every, self.times)
            batches = lay_out(rows, steps[done:])
            trained = topr.train(
                lm.model, optimizer, batches, self.loss, self.logprobs, settings.max_norm
            )
            with processes.requests_are_noted() as is_asked, self.times("training"):
                for step in processes.progress_bar(
                    range(done + 1, len(steps) + 1), "training", "step"
                ):
                    with explained(step):
                        stats = next(trained)
                        if (
                            step == done + 1 and torch.cuda.is_available()
                        ):  # the optimiser has its memory by now
                            try_longest(rows, steps, lm.model, self.loss, self.logprobs)
                    is_asked_of_any = log_step(
                        here / "metrics.jsonl", step, stats, tolerance, is_asked()
                    )
                    self.times.counts["steps"] += 1
                    saver.after(step, is_asked_of_any)
        remove(*here.glob("checkpoint-*"), *here.glob("model*.unfinished"))
        return points

    def results(self) -> dict[str, Any]:
        """What the stages' files say, evaluated: results.json, and curve.png; what is there, of a finished run."""
        if self.is_finished:
            return run_folder.read_json(self.folder / "results.json")
        return publish(self.folder, self.settings, self.inputs, self.evaluations)
