"""The stages of a run: evaluate, sample, compose, train (Algorithm 1, Section 4.3). train_gsm8k.py puts them in order.

Each stage leaves a file that is never rewritten, and a stage whose file is there is not run again:

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
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

import topr
from pipeline import dataset
from pipeline.baselines import dpo_loss_of_rows, ppo_loss
from pipeline.evaluation import evaluate
from pipeline.metrics import append_json, check_ratio, keep_lines, step_metrics
from pipeline.models import chunked_head
from pipeline.models.language_model import LanguageModel, load_meta, load_model, make_optimizer, shard, token_logprobs
from pipeline.plots import draw_curve, save_figure
from pipeline.records import Example, Problem, Sample, Task, read_rows, write_text
from pipeline.runtime.checkpoints import checkpoints, load_optimizer, remove_checkpoints, save_checkpoint, save_model
from pipeline.runtime.processes import (
    device,
    from_all_ranks,
    on_all_ranks,
    on_rank_zero,
    process_group,
    progress_bar,
    rank,
    requests_are_noted,
    say,
)
from pipeline.runtime.run_folder import RunFolder, check_folder, read_checked, stage, write_checked
from pipeline.sampling import (
    Engine,
    SamplingParameters,
    check_lengths,
    draw_in_chunks,
    draw_samples,
    transformers_engine,
)
from pipeline.settings import OF_DRAWING, Settings

Learn = tuple[Callable[..., Tensor], Callable[..., Tensor]]  # a loss and the log-probabilities it learns from


class Point(NamedTuple):
    """A model to be evaluated: after how many steps of the epoch and samples trained on, and its folder or hub name."""

    step: int
    seen: int
    model: str


class Run(AbstractContextManager):
    """A run of the settings on a task: its folder, and the one expensive thing (engine or learner) it holds open.

    found: what results.json holds if the run is finished, else None. learn: what `topr.train` is to be given as loss
    and logprobs, in place of the method's. InputError where model, samples or folder do not fit; nothing is written
    then.
    """

    def __init__(self, settings: Settings, task: Task, learn: Learn | None = None):
        self.settings, self.task = settings, task
        self.start = Point(0, 0, settings.model)
        self._token_logprobs = chunked_head.token_logprobs if settings.sliced_head else token_logprobs
        own = make_loss(settings), lambda model, batch: self._token_logprobs(model, batch).sum(-1)
        self._loss, self._logprobs = learn or own
        self._held, self._holding = None, ExitStack()
        self._tests: dict[int, list[tuple[int, Path]]] = {}  # iteration -> samples seen and file of each evaluation

    def __enter__(self) -> "Run":
        with ExitStack() as stack:
            stack.enter_context(process_group(alone=self.settings.compute != "float32"))
            on_all_ranks(self._prepare)
            self.found = on_rank_zero(lambda: self.folder.read_json("results.json"))
            if self.found is None:
                on_rank_zero(lambda: stack.enter_context(self.folder.held()))
            else:
                say(f"{self.folder.path}: this run is finished; what it found:")
            stack.callback(self._release)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _prepare(self) -> None:
        """Validate inputs before loading or writing anything."""
        settings = self.settings
        self.meta = load_meta(settings.model, settings.trust_remote_code)
        if settings.sliced_head:
            chunked_head.check_head(self.meta.model)
        self.longest = check_lengths(self.task, self.meta, settings.max_new_tokens)
        self.given = read_rows(settings.samples, Sample) if settings.samples else None
        if self.given is not None:
            if settings.trust_logmu:
                dataset.check_logmu(self.given, str(settings.samples))
            dataset.compose(settings, self.given, self.meta, self.task.stop)
        self.folder = RunFolder(settings.out or settings.default_out(Settings()), settings.record())
        if settings.reuse is not None:
            self.folder.agree(settings.reuse, OF_DRAWING)

    def _here(self, number: int) -> Path:
        return self.folder / f"iteration-{number}"

    # ---- evaluate and sample ------------------------------------------------------------------------------------

    def evaluate(self, number: int, point: Point) -> None:
        """Sample from a model on the test problems: test-STEP.jsonl. `results` tells how good it is."""
        settings, file = self.settings, self._here(number) / f"test-{point.step}.jsonl"
        is_full = point.step == 0 or point.model == str(self._here(number) / "model")
        n = settings.test_samples if is_full else settings.curve_samples
        seed = settings.seed_of(f"test {number} {point.step}")
        self._draw(file, self.task.test, n, point.model, seed, f"evaluating at step {point.step}")
        if not is_full:
            on_rank_zero(lambda: shutil.rmtree(point.model, ignore_errors=True))
        self._tests.setdefault(number, []).append((point.seen, file))

    def sample(self, number: int, model: str) -> list[Sample]:
        """The iteration's graded samples, those given or drawn from `model`: samples.jsonl."""
        file, settings = self._here(number) / "samples.jsonl", self.settings
        if self.given is not None:
            stage(file, lambda: self.given)
        else:
            seed = settings.seed_of(f"samples {number}")
            self._draw(file, self.task.train, settings.drawn_per_problem, model, seed, "sampling")
        return read_checked(file, Sample)

    def _draw(self, file: Path, problems: Sequence[Problem], n: int, model: str, seed: int, description: str) -> None:
        """The stage that writes n graded samples of each problem by `model` to `file`."""
        settings = self.settings
        sampling = sampling_parameters(settings, self.task)
        if settings.reuse is not None and model == settings.model:
            on_rank_zero(lambda: self._take(settings.reuse / file.relative_to(self.folder.path), file, problems, n))

        def draw(some: Sequence[Problem], samples_before: int) -> list[Sample]:
            engine = self._hold(("engine", model), lambda: self._open_engine(model))
            return draw_samples(self.task, some, n, engine, sampling, seed + samples_before, description)

        stage(file, lambda: draw_in_chunks(file, problems, n, settings.chunk, draw))
        parts = list(file.parent.glob(f"{file.name}.part-*")) if rank() == 0 else []
        on_rank_zero(lambda: [part.unlink() for part in parts])

    def _take(self, source: Path, file: Path, problems: Sequence[Problem], n: int) -> None:
        """Copy `source`, a stage's file of another run, to `file`, if it holds n samples of each problem."""
        if source.exists() and not file.exists():
            found = [(sample.problem_id, sample.prompt) for sample in read_checked(source, Sample)]
            if found == [(problem.id, self.task.prompt(problem)) for problem in problems for _ in range(n)]:
                write_checked(file, source.read_bytes())

    # ---- compose and train --------------------------------------------------------------------------------------

    def compose(self, number: int, samples: list[Sample], model: str) -> list[dataset.Row]:
        """What to train on, in its order, with log mu by `model`, which starts the iteration: train.jsonl."""
        here, settings = self._here(number), self.settings

        def make() -> list[Example]:
            rows, counts = dataset.compose(settings, samples, self.meta, self.task.stop, number)
            steps = dataset.Steps.of(settings, rows)
            if not settings.trust_logmu:
                if self.given is not None:
                    say("log mu of the given samples is computed by the initial model, in place of their sampler")
                lm, _ = self._learner(model)
                rows = dataset.score(steps, lm, self._token_logprobs)
            counts |= {"steps": len(steps), "engine_mismatch": dataset.engine_mismatch(samples, rows)}
            on_rank_zero(lambda: write_text(here / "dataset.json", json.dumps(counts, indent=2) + "\n"))
            return [example for row in rows for example in row]

        stage(here / "train.jsonl", make)
        counts = self._counts(number)
        taken, drawn = counts["trained"], counts["drawn"]["samples"]
        say(
            f"iteration {number}: {counts['steps']} steps on {taken['samples']} of {drawn} samples, "
            f"{100 * taken['positive'] / taken['samples']:.1f} % positive, baseline {counts['baseline']:.4g}"
        )
        if counts["engine_mismatch"] is not None:
            mean, largest = counts["engine_mismatch"]["mean"], counts["engine_mismatch"]["largest"]
            say(f"log mu of a completion, engine - trainer: {mean:+.3g} nats on average, {largest:.3g} at most")
        return dataset.group_rows(read_checked(here / "train.jsonl", Example))

    def _counts(self, number: int) -> dict:
        return on_rank_zero(lambda: json.loads((self._here(number) / "dataset.json").read_text()))

    def train(self, number: int, rows: list[dataset.Row], model: str) -> list[Point]:
        """One epoch on `rows`, from `model`: metrics.jsonl, and the models to evaluate, of which model/ is the last."""
        settings, here = self.settings, self._here(number)
        steps = dataset.Steps.of(settings, rows)
        stops = {len(steps) * i // settings.curve_points for i in range(1, settings.curve_points)} - {0, len(steps)}
        points = [Point(stop, steps.samples_until(stop), str(here / f"model-{stop}")) for stop in sorted(stops)]
        last = Point(len(steps), steps.samples_until(len(steps)), str(here / "model"))
        if not on_rank_zero(Path(last.model).exists):
            done = on_rank_zero(lambda: max(checkpoints(here), default=0))
            lm, optimizer = self._learner(str(here / f"checkpoint-{done}") if done else model)
            if done:
                load_optimizer(here, done, optimizer)
            self._epoch(here, steps, done, points, lm, optimizer)
            save_model(lm, Path(last.model))
        on_rank_zero(lambda: remove_checkpoints(here, checkpoints(here)))
        return [*points, last]

    def _epoch(
        self,
        here: Path,
        steps: dataset.Steps,
        done: int,
        points: Sequence[Point],
        lm: LanguageModel,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """The steps that are not `done`, with their metrics logged, checkpoints and the models of `points` saved."""
        settings, log = self.settings, here / "metrics.jsonl"
        on_rank_zero(lambda: keep_lines(log, done))
        with requests_are_noted() as is_asked:
            trained = topr.train(lm.model, optimizer, steps[done:], self._loss, self._logprobs, settings.max_norm)
            for step in progress_bar(range(done + 1, len(steps) + 1), "training", "step"):
                try:
                    stats = next(trained)
                except FloatingPointError as error:
                    raise FloatingPointError(f"step {step}: {error}; the weights are of step {step - 1}") from None
                own = torch.stack([stats.log_ratio, stats.reward, stats.weight]).cpu()
                losses, columns, asked = zip(*from_all_ranks((stats.loss, own, is_asked())), strict=True)
                log_ratio, reward, weight = torch.cat(columns, dim=1)
                if not settings.trust_logmu:
                    check_ratio(step, log_ratio)
                metrics = {"step": step, "loss": sum(losses), "grad_norm": stats.grad_norm}
                if rank() == 0:
                    append_json(log, metrics | step_metrics(log_ratio, reward, weight))
                for point in points:
                    if point.step == step and not on_rank_zero(Path(point.model).exists):
                        save_model(lm, Path(point.model))
                if any(asked) or (step % settings.save_every == 0 and step < len(steps)):
                    save_checkpoint(here, step, lm, optimizer)
                if any(asked):
                    raise KeyboardInterrupt

    # ---- results ------------------------------------------------------------------------------------------------

    def results(self) -> dict[str, Any]:
        """What the stages' files say, evaluated: results.json, and curve.png."""
        return on_rank_zero(self._publish)

    def _publish(self) -> dict[str, Any]:
        settings = self.settings

        def measure(file: Path, n: int) -> dict:
            ks = [settings.k] if 1 < settings.k < n else []  # pass@1 is there in any case
            return evaluate(read_checked(file, Sample), self.task, ks, settings.seed)

        tests = {number: list(points) for number, points in self._tests.items()}
        _, first = tests[1].pop(0)
        before = last = measure(first, settings.test_samples)
        iterations = []
        for number in range(1, settings.iterations + 1):
            counts = self._counts(number)
            mismatch = counts.pop("engine_mismatch")
            curve = [{"samples_seen": 0, **last}]
            for i, (seen, file) in enumerate(tests[number], start=1):
                last = measure(file, settings.test_samples if i == len(tests[number]) else settings.curve_samples)
                curve.append({"samples_seen": seen, **last})
            entry = {"dataset": counts, "curve": curve, "after": last}
            iterations.append(entry if mismatch is None else entry | {"engine_mismatch": mismatch})
        results = {"before": before, "iterations": iterations, "versions": versions()}
        if iterations:
            title = f"{settings.method}, learning rate {settings.lr:g}"
            save_figure(draw_curve(iterations, title), self.folder / "curve.png")
        self.folder.write_json("results.json", results)
        return results

    # ---- what is held open: an engine or a learner, since either fills a GPU ------------------------------------

    def _hold(self, key: tuple[str, str], open_it: Callable[[], AbstractContextManager[Any]]) -> Any:
        """What was opened for `key`; before it is opened, what was open is closed and its memory freed."""
        if self._held is None or self._held[0] != key:
            self._release()
            self._held = key, self._holding.enter_context(open_it())
        return self._held[1]

    def _release(self) -> None:
        self._held = None
        self._holding.close()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @contextmanager
    def _open_engine(self, model: str) -> Iterator[Engine]:
        settings = self.settings
        if settings.chosen_engine == "hf":
            lm = load_model(model, trust_remote_code=settings.trust_remote_code)
            yield transformers_engine(lm, settings.tokens_at_once)
        else:
            from pipeline.vllm.client import vllm_engine

            check_folder(Path(model))
            log = self.folder / f"vllm-{rank()}.log"
            with vllm_engine(model, self.meta, self.longest, settings, log) as engine:
                yield engine

    def _learner(self, model: str) -> tuple[LanguageModel, torch.optim.Optimizer]:
        """The model in training, sharded over the ranks, and its optimiser."""

        def load() -> tuple[LanguageModel, torch.optim.Optimizer]:
            lm = load_model(model, torch.device("cpu"), settings.trust_remote_code)
            shard(lm.model, settings.compute, settings.gradient_checkpointing)
            if not dist.is_initialized():
                lm.model.to(device())
            # Before any forward pass: after one, FSDP2 leaves some weights gathered in copies, which are not trained.
            return lm, make_optimizer(settings.optimizer, lm.model, settings.lr)

        settings = self.settings
        return self._hold(("learner", model), lambda: nullcontext(load()))


def make_loss(settings: Settings) -> Callable[..., Tensor]:
    """The loss of the chosen method, as `topr.train` calls it."""
    if settings.method == "ppo":
        return partial(ppo_loss, eps=settings.eps)
    if settings.method == "dpo":
        return partial(dpo_loss_of_rows, beta=settings.beta)
    return partial(topr.topr_loss, limits=settings.bounds)


def sampling_parameters(settings: Settings, task: Task) -> SamplingParameters:
    """The sampling parameters of training and test samples alike."""
    return SamplingParameters(settings.temperature, settings.top_p, settings.top_k, settings.max_new_tokens, task.stop)


def versions() -> dict[str, str]:
    """What the numbers were made with."""
    return {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
