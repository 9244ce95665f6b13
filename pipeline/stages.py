"""The stages of a run: evaluate, sample, compose, train (Algorithm 1, Section 4.3). train_gsm8k.py puts them in order.

Each stage leaves a file that no later stage changes, and a stage whose file is there is not run again:

    iteration-1/test-0.jsonl        evaluate: completions of the test problems by the initial model, graded
    iteration-1/samples.jsonl       sample: completions of the training problems, graded
    iteration-1/train.jsonl         compose: what is trained on, in its order, with log mu; dataset.json: counts
    iteration-1/metrics.jsonl       train: the optimiser's steps
    iteration-1/checkpoint-256/     train: weights and optimiser, until the epoch is done
    iteration-1/model/              train: the model after it, which iteration 2 samples from
    iteration-1/test-320.jsonl      evaluate: completions of the test problems by this model; others along the epoch
    results.json, curve.png         all iterations
"""

import gc
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import topr
from pipeline import dataset
from pipeline.compose import COMPOSITIONS, note_on_signs
from pipeline.evaluation import Scored, to_scored
from pipeline.methods import METHODS, Loss
from pipeline.metrics import START_TOLERANCE, append_json, check_ratio, keep_lines, step_metrics
from pipeline.models import chunked_head, language_model
from pipeline.models.language_model import LanguageModel, load_model, load_to_train, make_optimizer, token_logprobs
from pipeline.records import Drawn, Example, InputError, Problem, Sample, Task, read_rows, write_file
from pipeline.results import publish, track_evaluation
from pipeline.runtime import processes, run_folder
from pipeline.runtime.preflight import TOKEN_BYTES, check_room
from pipeline.runtime.processes import device, from_all_ranks, on_all_ranks, on_rank_zero, progress_bar, rank, ranks
from pipeline.runtime.run_folder import Point, check_folder, read_checked, refuse_others, remove, stage
from pipeline.sampling import ENGINES, draw, draw_into, known_samples
from pipeline.settings import Settings
from pipeline.times import note_times
from pipeline.track import Tell, tracker

Learn = tuple[Callable[..., Tensor], Callable[..., Tensor]]  # a loss and the log-probabilities it learns from
LARGE = 1e9  # bytes; a run below it is not measured against the machine's memory and disk; ours


@contextmanager
def open_run(settings: Settings, task: Task, learn: Learn | None = None) -> Iterator["Run"]:
    """A run of the settings, which `check` has passed, on a task. Its folder is held until the block ends.

    learn: loss and logprobs for `topr.train`, in place of the method's. InputError, with nothing written, where model,
    samples, folder or disk do not fit.
    """
    engine = settings.engine or ("vllm" if device().type == "cuda" else "hf")  # vLLM is the paper's (Section 4.2)
    settings = replace(settings, engine=engine, out=settings.out or settings.default_out(Settings()))
    with ExitStack() as stack:
        if ranks() > 1 or settings.compute != "float32":  # FSDP2 computes in other precisions
            stack.enter_context(processes.process_group(alone=True))
        inputs = on_all_ranks(lambda: dataset.read_inputs(settings, task))
        token_logp = chunked_head.token_logprobs if settings.sliced_head else token_logprobs
        own = METHODS[settings.method].loss
        loss = own(settings) if own else partial(topr.topr_loss, limits=settings.bounds)
        loss, logprobs = learn or (loss, lambda model, batch: token_logp(model, batch).sum(-1))
        is_finished = on_rank_zero((settings.out / "results.json").exists)
        run = Run(settings, inputs, Point(0, 0, settings.model), settings.out, is_finished, loss, logprobs, token_logp)
        if run.is_finished:
            refuse_others(run.folder, inputs.record, "holds a run with other settings", "choose another --out")
            if rank() == 0:
                print(f"{run.folder}: this run is finished; what it found:", flush=True)
        else:
            tokens = inputs.size.longest * (inputs.size.drawn + inputs.size.tested)
            if 12 * inputs.size.parameters + TOKEN_BYTES * tokens > LARGE:
                on_all_ranks(lambda: check_room(settings, run.folder, inputs.size))
            if not Path(settings.model).is_dir():
                on_all_ranks(lambda: language_model.download(settings.model))
            stack.enter_context(run_folder.held_folder(run.folder, inputs.record))
            if settings.track is not None:
                tracked = tracker(settings.track, run.folder, inputs.record)
                run.tell = on_all_ranks(lambda: stack.enter_context(tracked))
        try:
            with run.holding:
                yield run
        finally:
            if run.moments and rank() == 0:
                with suppress(OSError):  # a full disk: what raised it says so
                    note_times(run, [*run.moments, ("", time.monotonic())])


@dataclass
class Run:
    """The stages of a run. It holds at any time an engine or a model in training, since either fills a GPU."""

    settings: Settings
    inputs: dataset.Inputs
    start: Point  # the model that the run begins with
    folder: Path
    is_finished: bool  # by an earlier call
    loss: Loss
    logprobs: Callable[..., Tensor]  # (model, batch) -> (B,), which `loss` learns from
    token_logprobs: Callable[..., Tensor]  # (model, batch) -> (B, C), to score with
    tell: Tell | None = None  # the tracker, if there is one
    tests: dict[int, list[tuple[int, Path]]] = field(default_factory=dict)  # see results.Tests
    held_key: tuple[str, ...] | None = None  # "engine" or "learner", and folders or hub names of its models
    held: Any = None
    holding: ExitStack = field(default_factory=ExitStack)
    checked: set[str] = field(default_factory=set)  # the models that are not damaged
    moments: list[tuple[str, float]] = field(default_factory=list)  # when it began to do what, for times.json
    counts: Counter[str] = field(default_factory=Counter)  # what it did so often

    def evaluate(self, iteration: int, point: Point) -> None:
        """Sample from a model on the test problems, or score the held-out samples by it: test-STEP.jsonl.

        `results` tells how good it is. Nothing happens with --no-evaluation.
        """
        settings, here = self.settings, self.folder / f"iteration-{iteration}"
        if not settings.evaluation:
            return
        file, is_along = here / f"test-{point.step}.jsonl", point.model == str(here / f"model-{point.step}")
        n = settings.curve_samples if is_along else settings.test_samples
        if not is_along and point.step > 0 and iteration < settings.iterations:
            n = settings.between_samples or n
        seed = settings.seed_of(f"test {iteration} {point.step}")
        if (rows := self.inputs.held_out) is not None:

            def make() -> list[Scored]:
                steps = dataset.epoch_steps(rows, settings.batch, settings.micro_batch)
                lm, _ = self._learner(point.model)
                self.moments.append(("scoring", time.monotonic()))
                found = dataset.score(rows, steps, lm, self.token_logprobs)
                self.moments.append(("other", time.monotonic()))
                before = read_checked(here / "test-0.jsonl", Scored) if point.step else None
                return to_scored([*chain(*rows)], [*chain(*found)], before)

            stage(file, make)
        else:
            self._draw(file, self.inputs.task.test, n, point.model, seed, f"evaluating at step {point.step}")
        if is_along:
            remove(Path(point.model))
        self.tests.setdefault(iteration, []).append((point.seen, file))
        if self.tell is not None:
            step = run_folder.steps_before(self.folder, iteration) + point.step
            on_rank_zero(lambda: track_evaluation(self.tell, settings, self.inputs, file, n, step))

    def sample(self, iteration: int, model: str) -> list[Sample]:
        """The iteration's graded samples, those given or drawn from `model`: samples.jsonl."""
        file, settings = self.folder / f"iteration-{iteration}" / "samples.jsonl", self.settings
        if self.inputs.given is not None:
            stage(file, lambda: self.inputs.given)
        else:
            seed = settings.seed_of(f"samples {iteration}")
            n = COMPOSITIONS[settings.composition].drawn(settings)
            self._draw(file, self.inputs.task.train, n, model, seed, "sampling")
        return read_checked(file, Sample)

    def _draw(self, file: Path, problems: Sequence[Problem], n: int, model: str, seed: int, description: str) -> None:
        """The stage that writes n graded samples of each problem by `model` to `file`.

        Each engine, that of every `engine_gpus`-th rank, draws for a consecutive share of the problems, into
        FILE.part-RANK; as these divide the ranks of a machine, no engine has GPUs of two machines.
        """
        settings, inputs, task, gpus = self.settings, self.inputs, self.inputs.task, self.settings.engine_gpus
        parts = [file.with_name(f"{file.name}.part-{r}") for r in range(ranks())]
        engine, engines = rank() // gpus, ranks() // gpus
        first, behind = (len(problems) * i // engines for i in (engine, engine + (rank() % gpus == 0)))

        def draw_some(some: Sequence[Problem], before: int) -> list[Drawn]:
            log, load = self.folder / f"vllm-{rank()}.log", partial(load_model, model, None, settings)
            opening = partial(ENGINES[settings.engine], model, load, inputs, settings, log)
            engine = self._hold(("engine", model), opening)
            return draw(task, some, n, engine, inputs.sampling, seed + first * n + before, description)

        def make() -> list[Sample]:
            is_reused = settings.reuse is not None and model == settings.model
            if is_reused and (known := on_rank_zero(lambda: known_samples(settings, file, task, problems, n))):
                return known
            self._hold(("engine", model))
            self.moments.append(("sampling", time.monotonic()))
            own = problems[first:behind]  # none where there are fewer of them than engines, and the part is empty
            on_all_ranks(lambda: draw_into(parts[rank()], task, own, n, settings.chunk, draw_some))
            samples = [sample for part in parts if rank() == 0 for sample in read_rows(part, Sample, "growing")]
            self.moments.append(("other", time.monotonic()))
            self.counts["sampled tokens"] += sum(len(sample.token_ids) for sample in samples)
            return samples

        stage(file, make)
        remove(*file.parent.glob(f"{file.name}.part-*"))

    def compose(self, iteration: int, samples: list[Sample], model: str) -> list[dataset.Row]:
        """What to train on, in its order, with log mu by `model`, which starts the iteration: train.jsonl."""
        file = self.folder / f"iteration-{iteration}" / "train.jsonl"
        settings, inputs = self.settings, self.inputs

        def make() -> list[Example]:
            of_inputs = settings, samples, inputs.meta, inputs.task.stop, iteration
            rows, counts = inputs.composed or dataset.compose(*of_inputs)
            steps = dataset.epoch_steps(rows, settings.batch, settings.micro_batch)
            if not settings.trust_logmu:
                known = None
                if settings.reuse and model == settings.model:
                    known = on_rank_zero(lambda: dataset.known_logmu(settings, inputs.record, file, rows))
                if not known:
                    lm, _ = self._learner(model)
                    self.moments.append(("scoring", time.monotonic()))
                    known = dataset.score(rows, steps, lm, self.token_logprobs)
                    self.moments.append(("other", time.monotonic()))
                rows = known
            is_known = any(sample.token_logmu_engine for sample in samples)
            mismatch = dataset.engine_mismatch(samples, rows) if is_known else None
            counts |= {"steps": len(steps), "engine_mismatch": mismatch}
            on_rank_zero(lambda: write_file(file.with_name("dataset.json"), json.dumps(counts, indent=2) + "\n"))
            return [*chain(*rows)]

        stage(file, make)
        examples = read_checked(file, Example)
        if rank() == 0:
            drawn = [samples[example.sample].reward for example in examples]
            learnt = [example.reward for example in examples]
            positive = 100 * sum(reward >= 0 for reward in learnt) / len(examples)
            told = [f"{len(examples)} examples of {len(samples)} samples, {positive:.1f} % positive"]
            if drawn != learnt or not min(learnt) < 0 < max(learnt):
                told += filter(None, [note_on_signs(settings, drawn, learnt)])
            for note in told:
                print(f"iteration {iteration}: {note}", flush=True)
        return [list(row) for _, row in groupby(examples, key=lambda example: example.row)]

    def train(self, iteration: int, rows: list[dataset.Row], model: str) -> list[Point]:
        """One epoch on `rows`, from `model`: metrics.jsonl, and the models to evaluate, of which model/ is the last."""
        settings, here = self.settings, self.folder / f"iteration-{iteration}"
        steps = dataset.epoch_steps(rows, settings.batch, settings.micro_batch)
        curve_points = settings.curve_points if settings.evaluation else 1
        points = []
        for stop in sorted({len(steps) * i // curve_points for i in range(1, curve_points + 1)} - {0}):
            folder = here / ("model" if stop == len(steps) else f"model-{stop}")
            points.append(Point(stop, sum(step.sequences for step in steps[:stop]), str(folder)))
        done = run_folder.resume_step(here, points)
        if done is not None:
            self._epoch(iteration, steps, done, points, model)
        remove(*here.glob("checkpoint-*"), *here.glob("model*.unfinished"))
        return points

    def _epoch(
        self, iteration: int, steps: Sequence[dataset.EpochStep], done: int, points: Sequence[Point], model: str
    ) -> None:
        """The steps that are not `done`: their metrics are logged, checkpoints and the models of `points` saved."""
        settings, here = self.settings, self.folder / f"iteration-{iteration}"
        lm, optimizer = self._learner(model, here / f"checkpoint-{done}" if done else None)
        log, stops = here / "metrics.jsonl", {point.step: Path(point.model) for point in points}
        before = run_folder.steps_before(self.folder, iteration) if self.tell is not None else 0
        on_rank_zero(lambda: keep_lines(log, done) if done else log.unlink(missing_ok=True))
        is_there = on_rank_zero(stops[len(steps)].exists)  # a later iteration may have begun with this model
        laid_out = dataset.lay_out(steps[done:])
        self.moments.append(("training", time.monotonic()))
        with processes.requests_are_noted() as is_asked:
            trained = topr.train(lm.model, optimizer, laid_out, self.loss, self.logprobs, settings.max_norm)
            for step in progress_bar(range(done + 1, len(steps) + 1), "training", "step"):
                try:
                    stats = next(trained)
                    if step == done + 1 and torch.cuda.is_available():  # the optimiser has its memory by now
                        self._try_longest(lm, steps)
                except FloatingPointError as error:
                    raise FloatingPointError(f"step {step}: {error}; the weights are of step {step - 1}") from None
                except torch.OutOfMemoryError as error:
                    [fault, *_] = str(error).splitlines()
                    advice = "give --gradient-checkpointing, --reshard, or a smaller --micro-batch"
                    raise InputError(f"step {step}: it does not fit the GPU: {fault}; {advice}") from None
                own = torch.stack([stats.log_ratio, stats.reward, stats.weight]).cpu()
                losses, columns, asked = zip(*from_all_ranks((stats.loss, own, is_asked())), strict=True)
                log_ratio, reward, weight = torch.cat(columns, dim=1)
                if not settings.trust_logmu:
                    check_ratio(step, log_ratio, START_TOLERANCE[settings.compute])
                metrics = {"step": step, "loss": sum(losses), "grad_norm": stats.grad_norm}
                if rank() == 0:
                    metrics |= step_metrics(log_ratio, reward, weight)
                    append_json(log, metrics)
                    if self.tell is not None:
                        self.tell({"train": metrics}, before + step)
                self.counts["steps"] += 1
                self.moments.append(("saving", time.monotonic()))
                if step in stops and step < len(steps):
                    run_folder.save_model(lm, stops[step])
                if step < len(steps) and (any(asked) or step % settings.save_every == 0):
                    run_folder.save_checkpoint(here, step, optimizer)
                self.moments.append(("training", time.monotonic()))
                if any(asked) and step < len(steps):
                    raise processes.SharedStop
            self.moments.append(("saving", time.monotonic()))
            if not is_there:  # still inside the block: a request to stop waits until the model is saved
                run_folder.save_model(lm, stops[len(steps)])
            self.moments.append(("other", time.monotonic()))

    def _try_longest(self, lm: LanguageModel, steps: Sequence[dataset.EpochStep]) -> None:
        """Compute the gradients of the longest step and drop them: what does not fit fails in the first minute."""
        sizes = [max(len(rows) * sum(dataset.longest(rows)) for rows in step.micro_batches) for step in steps]
        of_ranks = from_all_ranks(sizes)  # tokens of the largest micro-batch, padding included
        longest = max(range(len(steps)), key=lambda i: max(tokens[i] for tokens in of_ranks))
        [step] = dataset.lay_out([steps[longest]])
        for batch in step.micro_batches:
            logp = self.logprobs(lm.model, batch)
            self.loss(logp, batch.logmu, batch.reward, batch.length, denominator=step.sequences).backward()

    def results(self) -> dict[str, Any]:
        """What the stages' files say, evaluated: results.json, and curve.png; what is there, of a finished run."""
        if self.is_finished:
            return run_folder.read_json(self.folder / "results.json")
        return on_rank_zero(lambda: publish(self.folder, self.settings, self.inputs, self.tests, self.tell))

    def _hold(self, key: tuple[str, ...], open_it: Callable[[], AbstractContextManager] | None = None) -> Any:
        """What is held for `key`, an engine or a learner of models, opened by `open_it` if it was not.

        What was held for another key is closed first, and the models checked: InputError if one of ours is damaged. All
        ranks do this together, since one of them may need the others' GPUs; a call without `open_it` does no more.
        """

        def let_go() -> None:
            self.holding.close()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

        if self.held_key != key:
            self.held_key, self.held = key, None
            on_all_ranks(let_go)
            for model in key[1:]:
                if (Path(model) / run_folder.SUMS).exists() and model not in self.checked:
                    on_rank_zero(partial(check_folder, Path(model)))
                    self.checked.add(model)
        if self.held is None and open_it is not None:
            doing = self.moments[-1][0] if self.moments else ""
            self.moments.append(("starting", time.monotonic()))
            self.held = self.holding.enter_context(open_it())
            self.moments.append((doing, time.monotonic()))
        return self.held

    def _learner(self, model: str, checkpoint: Path | None = None) -> tuple[LanguageModel, torch.optim.Optimizer]:
        """The model in training, sharded over the ranks, and its optimiser; as a checkpoint has them, if given."""
        settings, key = self.settings, ("learner", model, *([str(checkpoint)] if checkpoint else []))

        def load() -> nullcontext:
            is_plain = not (dist.is_initialized() or settings.gradient_checkpointing or settings.lora)
            lm = load_model(model, None, settings) if is_plain else load_to_train(model, settings)
            # Before any forward pass: after one, FSDP2 leaves some weights gathered in copies, which are not trained.
            optimizer = make_optimizer(settings.optimizer, lm.model, settings.lr)
            if checkpoint:
                run_folder.load_checkpoint(checkpoint, optimizer)
            return nullcontext((lm, optimizer))

        return self._hold(key, load)
