"""The stages of a run: evaluate, sample, compose, train (Algorithm 1, Section 4.3). train_gsm8k.py puts them in order.

Each stage leaves a file that no later stage changes, and a stage whose file is there is not run again:

    iteration-1/test-0.jsonl        evaluate: completions of the test problems by the initial model, graded
    iteration-1/samples.jsonl       sample: completions of the training problems, graded
    iteration-1/train.jsonl         compose: what is trained on, in its order, with log mu; dataset.json: counts
    iteration-1/metrics.jsonl       train: the optimiser's steps
    iteration-1/checkpoint-256/     train: model and optimiser, until the epoch is done
    iteration-1/model/              train: the model after it, which iteration 2 samples from
    iteration-1/test-512.jsonl      evaluate: completions of the test problems by this model; others along the epoch
    results.json, curve.png         all iterations
"""

import gc
import json
import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import transformers
from torch import Tensor

import topr
from pipeline import dataset
from pipeline.compose import note_on_signs
from pipeline.evaluation import evaluate
from pipeline.grading import graded
from pipeline.held_out import Scored, draw_held_out, evaluate_held_out, to_scored
from pipeline.inputs import read_inputs
from pipeline.methods import METHODS, Loss
from pipeline.metrics import START_TOLERANCE, append_json, check_ratio, keep_lines, step_metrics
from pipeline.models import chunked_head
from pipeline.models.chat import load_to_ask
from pipeline.models.language_model import (
    LanguageModel,
    load_to_train,
    make_optimizer,
    shard,
    token_logprobs,
)
from pipeline.models.lora import add_adapters
from pipeline.plots import draw_curve, save_figure
from pipeline.records import Drawn, Example, InputError, Problem, Sample, Task, read_rows, to_lines, write_file
from pipeline.report import Table
from pipeline.runtime.checkpoints import load_optimizer, save_checkpoint, save_model
from pipeline.runtime.preflight import Size, check_machine, check_room, check_shared, on_cpu
from pipeline.runtime.processes import (
    end_with_others,
    from_all_ranks,
    on_all_ranks,
    on_rank_zero,
    process_group,
    progress_bar,
    rank,
    ranks,
    requests_are_noted,
)
from pipeline.runtime.run_folder import (
    check_folder,
    checkpoints,
    held_folder,
    read_checked,
    read_json,
    refuse_others,
    stage,
    write_checked,
)
from pipeline.sampling import (
    Engine,
    SamplingParameters,
    draw,
    transformers_engine,
)
from pipeline.settings import OF_SCORING, Settings
from pipeline.track import tracker

Learn = tuple[Callable[..., Tensor], Callable[..., Tensor]]  # a loss and the log-probabilities it learns from


class Point(NamedTuple):
    """A model to be evaluated: after how many steps of the epoch and samples trained on, and its folder or hub name."""

    step: int
    seen: int
    model: str


class Run(AbstractContextManager):
    """A run of the settings on a task. It holds its folder and, at any time, an engine or a model in training.

    found: what results.json holds if the run is finished, else None. learn: what `topr.train` is to be given as loss
    and logprobs, in place of the method's. InputError where model, samples or folder do not fit; nothing is written
    then.
    """

    def __init__(self, settings: Settings, task: Task, learn: Learn | None = None):
        check_machine(settings)
        self.folder = settings.out or settings.default_out(Settings())
        settings = replace(settings, engine=chosen_engine(settings, "--engine-gpus", settings.engine_gpus))
        self.settings, self.start = settings, Point(0, 0, settings.model)
        self._token_logprobs = chunked_head.token_logprobs if settings.sliced_head else token_logprobs
        own = make_loss(settings), lambda model, batch: self._token_logprobs(model, batch).sum(-1)
        self._loss, self._logprobs = learn or own
        self._tests: dict[int, list[tuple[int, Path]]] = {}  # iteration -> samples seen and file of each evaluation
        self._held, self._holding = None, ExitStack()
        self._checked: set[str] = set()
        self.found: dict[str, Any] | None = None

        with ExitStack() as stack:
            if ranks() > 1 or settings.compute != "float32":  # FSDP2 computes in other precisions
                stack.enter_context(process_group(alone=True))
            self.inputs = inputs = on_all_ranks(lambda: read_inputs(settings, task))
            if on_rank_zero((self.folder / "results.json").exists):
                refuse_others(self.folder, inputs.record, "holds a run with other settings", "choose another --out")
                self.found = read_json(self.folder / "results.json")
                if rank() == 0:
                    print(f"{self.folder}: this run is finished; what it found:", flush=True)
            else:
                parameters = sum(weight.numel() for weight in inputs.meta.model.parameters())
                drawn = len(task.train) * settings.drawn_per_problem if inputs.given is None else len(inputs.given)
                size = Size(parameters, drawn, len(inputs.task.test) * settings.test_samples, inputs.longest)
                on_all_ranks(lambda: check_room(settings, self.folder, size))
                on_rank_zero(lambda: stack.enter_context(held_folder(self.folder, inputs.record)))
                on_all_ranks(lambda: check_shared(self.folder))
                tracked = tracker(settings.track, self.folder, inputs.record)
                self._tell = on_all_ranks(lambda: stack.enter_context(tracked))
            stack.callback(self._hold, None)
            self._stack = stack.pop_all()

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # ---- evaluate and sample ------------------------------------------------------------------------------------

    def evaluate(self, iteration: int, point: Point) -> None:
        """Sample from a model on the test problems, or score the held-out samples by it: test-STEP.jsonl.

        `results` tells how good it is. Nothing happens with --no-evaluation.
        """
        settings, here = self.settings, self.folder / f"iteration-{iteration}"
        if not settings.evaluation:
            return
        file, is_along = here / f"test-{point.step}.jsonl", point.model == str(here / f"model-{point.step}")
        n = settings.curve_samples if is_along else settings.test_samples
        seed = settings.seed_of(f"test {iteration} {point.step}")
        if self.inputs.held_out is not None:
            stage(file, lambda: self._score_held_out(file, point.model))
        else:
            self._draw(file, self.inputs.task.test, n, point.model, seed, f"evaluating at step {point.step}")
        if is_along:
            on_rank_zero(lambda: shutil.rmtree(point.model, ignore_errors=True))
        self._tests.setdefault(iteration, []).append((point.seen, file))
        if settings.track is not None:
            on_rank_zero(lambda: self._track_evaluation(file, n, self._steps_before(iteration) + point.step))

    def _track_evaluation(self, file: Path, n: int, step: int) -> None:
        self._tell({"test": self._measure(file)}, step)
        if self.inputs.held_out is None:  # a few completions, of the same problems each time
            columns = ("step", "problem_id", "prompt", "completion", "outcome", "reward")
            samples = read_checked(file, Sample)[: 8 * n : n]
            rows = [[step, *(getattr(sample, name) for name in columns[1:])] for sample in samples]
            self._tell({"completions": Table(columns, rows)}, step)

    def _steps_before(self, iteration: int) -> int:
        """The optimiser steps of the iterations before this one."""
        logs = [self.folder / f"iteration-{number}" / "metrics.jsonl" for number in range(1, iteration)]
        return sum(log.read_bytes().count(b"\n") for log in logs if log.exists())

    def _score_held_out(self, file: Path, model: str) -> list[Scored]:
        """The held-out samples by a model: it computes them as it would to train on them."""
        steps = dataset.epoch_steps(
            self.inputs.held_out, self.settings.batch, self.settings.micro_batch, rank(), ranks()
        )
        found = dataset.score(self.inputs.held_out, steps, self._learner(model)[0], self._token_logprobs)
        before = file.with_name("test-0.jsonl")
        return to_scored(self.inputs.held_out, found, read_checked(before, Scored) if before.exists() else ())

    def sample(self, iteration: int, model: str) -> list[Sample]:
        """The iteration's graded samples, those given or drawn from `model`: samples.jsonl."""
        file, settings = self.folder / f"iteration-{iteration}" / "samples.jsonl", self.settings
        if self.inputs.given is not None:
            stage(file, lambda: self.inputs.given)
        else:
            seed = settings.seed_of(f"samples {iteration}")
            self._draw(file, self.inputs.task.train, settings.drawn_per_problem, model, seed, "sampling")
        return read_checked(file, Sample)

    def _draw(self, file: Path, problems: Sequence[Problem], n: int, model: str, seed: int, description: str) -> None:
        """The stage that writes n graded samples of each problem by `model` to `file`.

        Each engine, that of every `engine_gpus`-th rank, draws for a consecutive share of the problems, at most `chunk`
        problems at a time. What it has drawn is in FILE.part-RANK.drawn before it is graded, and in FILE.part-RANK
        afterwards. An interrupted run goes on behind the last whole chunk.
        """
        settings = self.settings
        if settings.reuse is not None and model == settings.model:
            on_rank_zero(lambda: self._take(settings.reuse / file.relative_to(self.folder), file, problems, n))
        sampling = sampling_parameters(settings, self.inputs.task)
        parts = {r: file.with_name(f"{file.name}.part-{r}") for r in range(0, ranks(), settings.engine_gpus)}
        numbers = share(len(problems), rank(), ranks(), settings.engine_gpus)
        own, first = problems[numbers.start : numbers.stop], numbers.start

        def drawn_once(part: Path, some: Sequence[Problem], seed: int) -> list[Drawn]:
            """n completions of each of some problems: those that a run left which could not grade them, or new ones."""
            left = part.with_name(f"{part.name}.drawn")
            kept = read_rows(left, Drawn, "growing")
            asked = [(problem.id, self.inputs.task.prompt(problem)) for problem in some for _ in range(n)]
            if [(drawn.problem_id, drawn.prompt) for drawn in kept] == asked:
                return kept
            engine = self._hold(("engine", model), lambda: self._open_engine(model))
            drawn = draw(self.inputs.task, some, n, engine, sampling, seed, description)
            write_file(left, to_lines(drawn))
            return drawn

        def draw_own(part: Path) -> None:
            kept = read_rows(part, Sample, "growing")
            done = len(own) if len(kept) == n * len(own) else len(kept) // (n * settings.chunk) * settings.chunk
            write_file(part, to_lines(kept[: done * n]))
            with part.open("a", encoding="utf-8") as growing:
                for start in range(done, len(own), settings.chunk):
                    end_with_others()
                    some = own[start : start + settings.chunk]
                    drawn_before = (first + start) * n
                    drawn = drawn_once(part, some, seed + drawn_before)
                    of_each = [problem for problem in some for _ in range(n)]
                    growing.write(to_lines(graded(self.inputs.task, drawn, of_each)))
                    growing.flush()

        def make() -> list[Sample]:
            self._check(model)
            on_all_ranks(lambda: self._hold(("engine", model)))  # closes what is on the GPUs of other ranks' engines
            on_all_ranks(lambda: draw_own(parts[rank()]) if rank() in parts else None)
            # A rank that has no problem, because there are fewer of them than ranks, has left an empty file.
            drawn = (read_rows(part, Sample, "growing") for part in parts.values() if rank() == 0)
            return [sample for samples in drawn for sample in samples]

        stage(file, make)
        on_rank_zero(lambda: [left.unlink() for left in file.parent.glob(f"{file.name}.part-*")])

    def _take(self, source: Path, file: Path, problems: Sequence[Problem], n: int) -> None:
        """Copy `source`, a stage's file of another run, to `file`, if it holds n samples of each problem.

        They are graded anew: the reward may have changed since.
        """
        if source.exists() and not file.exists():
            samples, of_each = read_checked(source, Sample), [problem for problem in problems for _ in range(n)]
            asked = [(problem.id, self.inputs.task.prompt(problem)) for problem in of_each]
            if [(sample.problem_id, sample.prompt) for sample in samples] == asked:
                anew = graded(self.inputs.task, samples, of_each)
                write_checked(file, to_lines(anew).encode())

    # ---- compose and train --------------------------------------------------------------------------------------

    def compose(self, iteration: int, samples: list[Sample], model: str) -> list[dataset.Row]:
        """What to train on, in its order, with log mu by `model`, which starts the iteration: train.jsonl."""
        here, settings = self.folder / f"iteration-{iteration}", self.settings

        def make() -> list[Example]:
            rows, counts = dataset.compose(settings, samples, self.inputs.meta, self.inputs.task.stop, iteration)
            steps = dataset.epoch_steps(rows, settings.batch, settings.micro_batch, rank(), ranks())
            if not settings.trust_logmu:
                known = on_rank_zero(lambda: self._with_known_logmu(rows, here / "train.jsonl", model))
                rows = known or dataset.score(rows, steps, self._learner(model)[0], self._token_logprobs)
            is_known = any(sample.token_logmu_engine for sample in samples)
            mismatch = dataset.engine_mismatch(samples, rows) if is_known else None
            counts |= {"steps": len(steps), "engine_mismatch": mismatch}
            on_rank_zero(lambda: write_file(here / "dataset.json", json.dumps(counts, indent=2) + "\n"))
            return [example for row in rows for example in row]

        stage(here / "train.jsonl", make)
        examples = read_checked(here / "train.jsonl", Example)
        rows = [list(row) for _, row in groupby(examples, key=lambda example: example.row)]
        positive = 100 * sum(example.reward >= 0 for example in examples) / len(examples)
        if rank() == 0:
            told = f"{len(examples)} examples of {len(samples)} samples, {positive:.1f} % positive"
            print(f"iteration {iteration}: {told}", flush=True)
            drawn = [samples[example.sample].reward for example in examples]
            if note := note_on_signs(settings, drawn, [example.reward for example in examples]):
                print(f"iteration {iteration}: {note}", flush=True)
        return rows

    def _with_known_logmu(self, rows: list[dataset.Row], file: Path, model: str) -> list[dataset.Row]:
        """The rows with log mu of --reuse, where it has computed the same batches with the same model, or none."""
        settings = self.settings
        if settings.reuse is None or model != settings.model:
            return []
        source, there = settings.reuse / file.relative_to(self.folder), read_json(settings.reuse / "config.json")
        if not source.exists() or any(there[name] != self.inputs.record[name] for name in OF_SCORING):
            return []
        return dataset.with_logmu_of(rows, read_checked(source, Example))

    def train(self, iteration: int, rows: list[dataset.Row], model: str) -> list[Point]:
        """One epoch on `rows`, from `model`: metrics.jsonl, and the models to evaluate, of which model/ is the last."""
        settings, here = self.settings, self.folder / f"iteration-{iteration}"
        steps = dataset.epoch_steps(rows, settings.batch, settings.micro_batch, rank(), ranks())
        curve_points = settings.curve_points if settings.evaluation else 1
        stops = sorted({len(steps) * i // curve_points for i in range(1, curve_points)} - {0})
        seen = {stop: sum(step.sequences for step in steps[:stop]) for stop in (*stops, len(steps))}
        points = [Point(stop, seen[stop], str(here / f"model-{stop}")) for stop in stops if stop < len(steps)]
        last = Point(len(steps), seen[len(steps)], str(here / "model"))

        def is_missing(point: Point) -> bool:
            is_tested = point != last and (here / f"test-{point.step}.jsonl").exists()
            return not (Path(point.model).exists() or is_tested)

        missing = on_rank_zero(lambda: [point.step for point in (*points, last) if is_missing(point)])
        if missing:
            usable = [
                step for step in on_rank_zero(lambda: checkpoints(here)) if step < missing[0] or missing[0] == last.step
            ]
            done = max(usable, default=0)
            on_rank_zero(lambda: [shutil.rmtree(p.model, ignore_errors=True) for p in points if p.step > done])
            lm, optimizer = self._learner(model, str(here / f"checkpoint-{done}") if done else None)
            if done:
                load_optimizer(here, done, optimizer)
            self._epoch(iteration, steps, done, (*points, last), lm, optimizer)
        leftovers = [*here.glob("checkpoint-*"), *here.glob("model*.unfinished")]
        on_rank_zero(lambda: [shutil.rmtree(path) for path in leftovers])
        return [*points, last]

    def _epoch(
        self,
        iteration: int,
        steps: Sequence[dataset.EpochStep],
        done: int,
        points: Sequence[Point],
        lm: LanguageModel,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """The steps that are not `done`: their metrics are logged, checkpoints and the models of `points` saved."""
        settings, here = self.settings, self.folder / f"iteration-{iteration}"
        log, before = here / "metrics.jsonl", self._steps_before(iteration)
        on_rank_zero(lambda: keep_lines(log, done) if done else log.unlink(missing_ok=True))
        stops = {point.step: Path(point.model) for point in points}
        is_there = on_rank_zero(stops[len(steps)].exists)  # a later iteration may have begun with this model
        laid_out = dataset.lay_out(steps[done:])
        with requests_are_noted() as is_asked:
            trained = topr.train(lm.model, optimizer, laid_out, self._loss, self._logprobs, settings.max_norm)
            for step in progress_bar(range(done + 1, len(steps) + 1), "training", "step"):
                try:
                    stats = next(trained)
                except FloatingPointError as error:
                    raise FloatingPointError(f"step {step}: {error}; the weights are of step {step - 1}") from None
                own = torch.stack([stats.log_ratio, stats.reward, stats.weight]).cpu()
                losses, columns, asked = zip(*from_all_ranks((stats.loss, own, is_asked())), strict=True)
                log_ratio, reward, weight = torch.cat(columns, dim=1)
                if not settings.trust_logmu:
                    check_ratio(step, log_ratio, START_TOLERANCE[settings.compute])
                metrics = {"step": step, "loss": sum(losses), "grad_norm": stats.grad_norm}
                if rank() == 0:
                    metrics |= step_metrics(log_ratio, reward, weight)
                    append_json(log, metrics)
                    self._tell({"train": metrics}, before + step)
                if step in stops and step < len(steps):
                    save_model(lm, stops[step])
                if step < len(steps) and (any(asked) or step % settings.save_every == 0):
                    save_checkpoint(here, step, lm, optimizer)
                if any(asked) and step < len(steps):
                    raise KeyboardInterrupt
            if not is_there:  # still inside the block: a request to stop waits until the model is saved
                save_model(lm, stops[len(steps)])

    # ---- results ------------------------------------------------------------------------------------------------

    def results(self) -> dict[str, Any]:
        """What the stages' files say, evaluated: results.json, and curve.png."""
        return on_rank_zero(self._publish)

    def _publish(self) -> dict[str, Any]:
        settings, measure = self.settings, self._measure
        tests = {number: list(points) for number, points in self._tests.items()}
        last = measure(tests[1].pop(0)[1]) if settings.evaluation else None
        results = {} if last is None else {"before": last}
        iterations = []
        for number in range(1, settings.iterations + 1):
            counts = read_json(
                self.folder / f"iteration-{number}" / "dataset.json", "remove it and train.jsonl to make both anew"
            )
            mismatch = counts.pop("engine_mismatch")
            entry = {"dataset": counts}
            if settings.evaluation:
                curve = [{"samples_seen": 0, **last}]
                for seen, file in tests[number]:
                    last = measure(file)
                    curve.append({"samples_seen": seen, **last})
                entry |= {"curve": curve, "after": last}
            iterations.append(entry if mismatch is None else entry | {"engine_mismatch": mismatch})
        results |= {"iterations": iterations, "versions": versions()}
        if torch.cuda.is_available() or on_cpu():  # what is made for a processor need not say so
            results["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu, a rehearsal"
        if iterations and settings.evaluation:
            title = f"{settings.method}, learning rate {settings.lr:g}"
            is_held_out = self.inputs.held_out is not None
            figure = draw_held_out(iterations[0]["curve"], title) if is_held_out else draw_curve(iterations, title)
            save_figure(figure, self.folder / "curve.png")
            self._tell({"curve": self.folder / "curve.png"}, self._steps_before(settings.iterations + 1))
        write_file(self.folder / "results.json", json.dumps(results, indent=2) + "\n")
        return results

    def _measure(self, file: Path) -> dict:
        """An entry of results.json: how good the completions in `file` are."""
        if self.inputs.held_out is not None:
            return evaluate_held_out(read_checked(file, Scored))
        return evaluate(read_checked(file, Sample), self.inputs.task, self.settings.k, self.settings.seed)

    # ---- what is held open: an engine or a learner, since either fills a GPU ------------------------------------

    def _hold(self, key: tuple[str, str] | None, open_it: Callable[[], AbstractContextManager] | None = None) -> Any:
        """What is open for `key`, opened if it was not; what was open for another key is closed. None just closes.

        Without `open_it` nothing is opened.
        """
        if self._held is None or self._held[0] != key:
            self._held = None
            self._holding.close()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self._held = (key, self._holding.enter_context(open_it())) if open_it else None
        return self._held[1] if self._held else None

    def _check(self, model: str) -> None:
        """InputError if a model of ours is damaged: rank zero reads it, once in a run. Every rank calls it."""
        if model not in self._checked:
            on_rank_zero(lambda: check_folder(Path(model)))
            self._checked.add(model)

    @contextmanager
    def _open_engine(self, model: str) -> Iterator[Engine]:
        settings = self.settings
        if settings.engine == "hf":
            yield transformers_engine(load_to_ask(settings, model), settings.tokens_at_once)
        else:
            from pipeline.vllm.client import vllm_engine

            log = self.folder / f"vllm-{rank()}.log"
            with vllm_engine(model, self.inputs.meta, self.inputs.longest, settings, log) as engine:
                yield engine

    def _learner(self, model: str, checkpoint: str | None = None) -> tuple[LanguageModel, torch.optim.Optimizer]:
        """The model in training, sharded over the ranks, and its optimiser. checkpoint: where it goes on, if anywhere.

        A checkpoint is a whole model or, of a model with adapters, these alone.
        """

        def load() -> tuple[LanguageModel, torch.optim.Optimizer]:
            self._check(start)
            shard_it = partial(
                shard,
                compute=settings.compute,
                gradient_checkpointing=settings.gradient_checkpointing,
                reshard=settings.reshard,
            )
            if settings.lora is None:
                lm = load_to_train(start, shard_it, settings.trust_remote_code)
            else:
                self._check(model)
                seed = settings.seed_of("adapters")
                adapt = partial(add_adapters, rank=settings.lora, seed=seed, checkpoint=checkpoint)
                lm = load_to_train(model, shard_it, settings.trust_remote_code, adapt)
            # Before any forward pass: after one, FSDP2 leaves some weights gathered in copies, which are not trained.
            return lm, make_optimizer(settings.optimizer, lm.model, settings.lr)

        settings, start = self.settings, checkpoint or model
        key = ("learner", start)
        on_all_ranks(lambda: self._hold(key))  # closes engines, one of which may span this rank's GPU
        return self._hold(key, lambda: nullcontext(load()))


def share(problems: int, rank: int, ranks: int, gpus: int) -> range:
    """The problems that a rank's engine, of so many GPUs, draws for; none where its GPU is that of another's engine.

    gpus divides the ranks of a machine, which are consecutive, so that no engine has GPUs of two machines.

    >>> [share(5, rank, ranks=4, gpus=2) for rank in range(4)]
    [range(0, 2), range(0, 0), range(2, 5), range(0, 0)]
    """
    engine, engines = rank // gpus, ranks // gpus
    return range(problems * engine // engines, problems * (engine + 1) // engines) if rank % gpus == 0 else range(0)


def chosen_engine(settings: Settings, option: str, gpus: int) -> Literal["hf", "vllm"]:
    """What samples; InputError where it cannot span as many GPUs as the option says.

    >>> chosen_engine(Settings(engine="hf"), "--engine-gpus", 1)
    'hf'
    """
    engine = settings.engine or ("vllm" if torch.cuda.is_available() else "hf")
    if engine == "hf" and gpus > 1:
        raise InputError(f"{option} {gpus}: is for --engine vllm; transformers' generate uses the process's own GPU")
    return engine


def make_loss(settings: Settings) -> Loss:
    """The loss of the chosen method, as `topr.train` calls it."""
    own = METHODS[settings.method].loss
    return own(settings) if own else partial(topr.topr_loss, limits=settings.bounds)


def sampling_parameters(settings: Settings, task: Task) -> SamplingParameters:
    """The sampling parameters of training and test samples alike."""
    return SamplingParameters(settings.temperature, settings.top_p, settings.top_k, settings.max_new_tokens, task.stop)


def versions() -> dict[str, str]:
    """What the numbers were made with."""
    return {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
