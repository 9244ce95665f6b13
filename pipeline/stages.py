"""The run: iterations of sampling, grading, composing, scoring, training and evaluating (Algorithm 1, Section 4.3).

Every stage leaves a file, which is there when it is whole, and a stage whose file is there is not done again. So the
same command, given after whatever ended a run, goes on where it was:

    iteration-1/test-0.jsonl        completions of the test problems by the initial model
    iteration-1/samples.jsonl       completions of the training problems, graded; with log mu once they are scored
    iteration-1/metrics.jsonl       the optimiser's steps
    iteration-1/checkpoint-256/     model and optimiser, until the epoch is done
    iteration-1/model/              the model after it, which iteration 2 samples from
    iteration-1/test-512.jsonl      completions of the test problems by this model; others along the epoch
    results.json, curve.png         all iterations
"""

import gc
import platform
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

import topr
from conformance.variants import DEPARTURES
from pipeline import dataset
from pipeline import selection as composition
from pipeline.evaluation import evaluate
from pipeline.models import chunked_head as head
from pipeline.models import rows
from pipeline.models.loading import LanguageModel, load_meta, load_model
from pipeline.models.sharding import fingerprint, make_optimizer, shard
from pipeline.plots import draw_curve, save_figure
from pipeline.records import InputError, Problem, Sample, Task, read_rows, to_lines, write_text
from pipeline.runtime.checkpoints import checkpoints, load_checkpoint, publish_model, save_checkpoint
from pipeline.runtime.checksums import check_folder, read_checked, write_checked
from pipeline.runtime.processes import device, on_all_ranks, on_rank_zero, process_group, rank, ranks, say
from pipeline.runtime.run_folder import RunFolder, append_json
from pipeline.runtime.signals import requests_are_noted
from pipeline.sampling import Engine, SamplingParameters, check_lengths, draw_samples, draw_to_file, transformers_engine
from pipeline.settings import OF_DRAWING, Settings
from pipeline.vllm.client import vllm_engine


def run(settings: Settings, task: Task) -> dict:
    """All iterations of a run whose settings `check` has passed; returns what results.json holds.

    InputError where model, samples or folder do not fit, before anything is written.
    """
    with process_group(alone=settings.compute != "float32"), Sampler() as sampler, ExitStack() as stack:
        this = on_all_ranks(lambda: _prepare(settings, task, sampler))
        if (results := this.folder.read_json("results.json")) is not None:
            say(f"{this.folder.path}: this run is finished; what it found:")
            return results
        on_rank_zero(lambda: stack.enter_context(this.folder.held()))
        before = last = this.measure(1, 0, settings.model, settings.test_samples)
        model, iterations = settings.model, []
        for number in range(1, settings.iterations + 1):
            iterations.append(this.iterate(number, model, last))
            model, last = str(this.here(number) / "model"), iterations[-1]["after"]
        results = {"before": before, "iterations": iterations, "versions": versions()}
        on_rank_zero(lambda: this.publish(results))
        return results


def _prepare(settings: Settings, task: Task, sampler: "Sampler") -> "Run":
    """What takes neither weights nor an engine, so that what cannot work fails before anything is written."""
    meta = load_meta(settings.model, settings.trust_remote_code)
    if settings.sliced_head:
        head.check_head(meta.model)
    longest = check_lengths(task, meta, settings.max_new_tokens)
    given = read_rows(settings.samples, Sample) if settings.samples else None
    if given is not None:
        if settings.trust_logmu:
            dataset.check_logmu(given, str(settings.samples))
        compose(settings, given, meta, task)
    folder = RunFolder(settings.out or settings.default_out(), settings.record())
    if settings.reuse is not None:
        folder.agree(settings.reuse, OF_DRAWING)
    return Run(settings, task, folder, meta, longest, sampler, given)


@dataclass(frozen=True)
class Run:
    """What the stages have in common."""

    settings: Settings
    task: Task
    folder: RunFolder
    meta: LanguageModel  # the initial model without its weights
    longest: int  # tokens of a prompt and its completion
    sampler: "Sampler"
    given: list[Sample] | None  # what to train on instead of sampling

    def here(self, number: int) -> Path:
        """The folder of an iteration."""
        return self.folder / f"iteration-{number}"

    def iterate(self, number: int, mu: str, before: dict) -> dict:
        """One iteration, from the model in folder or hub name `mu`: an entry of results.json."""
        settings, here = self.settings, self.here(number)
        samples = self.samples(number, mu)
        steps = compose(settings, samples, self.meta, self.task, number)
        counts = describe(settings, samples, number) | {"steps": len(steps)}
        taken, drawn = counts["trained"], counts["drawn"]["samples"]
        say(
            f"iteration {number}: {len(steps)} steps on {taken['samples']} of {drawn} samples, "
            f"{100 * taken['positive'] / taken['samples']:.1f} % positive, baseline {counts['baseline']:.4g}"
        )
        del samples  # they are large, and read again where they are needed
        curve = [{"samples_seen": 0, **before}]
        for i in range(1, settings.curve_points + 1):
            stop, is_last = len(steps) * i // settings.curve_points, i == settings.curve_points
            if stop == 0:  # fewer steps than points
                continue
            if not on_rank_zero((here / "model").exists):
                self.train_until(stop, number, mu)
                free_memory()
                if is_last:
                    publish_model(here, stop)
            model = here / "model" if is_last else here / f"checkpoint-{stop}"
            point = self.measure(number, stop, str(model), settings.test_samples if is_last else settings.curve_samples)
            curve.append({"samples_seen": steps.samples_until(stop), **point})
        entry = {"dataset": counts, "curve": curve, "after": point}
        mismatch = on_rank_zero(lambda: dataset.engine_mismatch(read_rows(here / "samples.jsonl", Sample)))
        if mismatch is not None:
            mean, largest = mismatch["mean"], mismatch["largest"]
            say(f"log mu of a completion, engine - trainer: {mean:+.3g} nats on average, {largest:.3g} at most")
            entry["engine_mismatch"] = mismatch
        return entry

    def samples(self, number: int, mu: str) -> list[Sample]:
        """The iteration's samples: those given, or drawn from `mu` and graded."""
        file = self.here(number) / "samples.jsonl"
        if self.given is not None:
            on_rank_zero(lambda: file.exists() or write_checked(file, to_lines(self.given).encode()))
        else:
            self.draw(file, self.task.train, self.settings.drawn_per_problem, mu, f"samples {number}", "sampling")
        return read_checked(file, Sample)

    def measure(self, number: int, step: int, model: str, n: int) -> dict:
        """An evaluation of `model`, which `step` steps of the iteration have made: shares and estimates."""
        settings = self.settings
        file = self.here(number) / f"test-{step}.jsonl"
        self.draw(file, self.task.test, n, model, f"test {number} {step}", f"evaluating at step {step}")
        ks = [settings.k] if 1 < settings.k < n else []  # pass@1 is there in any case
        return on_rank_zero(lambda: evaluate(read_checked(file, Sample), self.task, ks, settings.seed))

    def draw(self, file: Path, problems: Sequence[Problem], n: int, model: str, stage: str, description: str) -> None:
        """Write n graded samples of each problem by `model` to `file`, unless they are there."""
        sampling, seed = sampling_parameters(self.settings, self.task), self.settings.seed_of(stage)
        if self.settings.reuse is not None and model == self.settings.model:
            on_rank_zero(lambda: self.take(self.settings.reuse / file.relative_to(self.folder.path), file, problems, n))

        def draw(some: Sequence[Problem], samples_before: int) -> list[Sample]:
            engine = self.sampler.engine(model, self.open_engine)
            shown = description if rank() == 0 else None
            return draw_samples(self.task, some, n, engine, sampling, seed + samples_before, shown)

        draw_to_file(file, problems, n, self.settings.chunk, draw)

    def take(self, source: Path, file: Path, problems: Sequence[Problem], n: int) -> None:
        """Copy `source`, what another run has drawn, to `file`, if it holds n samples of each problem."""
        if source.exists() and not file.exists():
            found = [(sample.problem_id, sample.prompt) for sample in read_checked(source, Sample)]
            if found == [(problem.id, self.task.prompt(problem)) for problem in problems for _ in range(n)]:
                write_checked(file, source.read_bytes())

    @contextmanager
    def open_engine(self, model: str) -> Iterator[Engine]:
        """The engine of the settings, for the model of this folder or hub name."""
        settings = self.settings
        if settings.chosen_engine == "hf":
            lm = load_model(model, trust_remote_code=settings.trust_remote_code)
            yield transformers_engine(lm, settings.tokens_at_once)
        else:
            check_folder(Path(model))
            log = self.folder / f"vllm-{rank()}.log"
            with vllm_engine(model, self.meta, self.longest, settings, log) as engine:
                yield engine

    def train_until(self, stop: int, number: int, mu: str) -> None:
        """Train to `stop` steps of the iteration, from its last checkpoint or from `mu`; it ends with a checkpoint."""
        settings, here = self.settings, self.here(number)
        done = on_rank_zero(lambda: max(checkpoints(here), default=0))
        if done >= stop:
            return
        self.sampler.close()
        last = str(here / f"checkpoint-{done}") if done else mu
        lm = load_model(last, torch.device("cpu"), settings.trust_remote_code)
        samples = read_checked(here / "samples.jsonl", Sample)
        by = "" if done else f"{fingerprint(lm.model)} {settings.layout}"
        shard(lm.model, settings.compute, settings.gradient_checkpointing)
        if not dist.is_initialized():
            lm.model.to(device())
        # before any forward pass: after one, FSDP2 leaves some weights gathered, which are copies and not trained
        optimizer = make_optimizer(settings.optimizer, lm.model, settings.lr)
        if done:
            load_checkpoint(here, done, optimizer)
        elif not settings.trust_logmu:
            samples = self.with_logmu(samples, number, lm, by)
        steps = compose(settings, samples, lm, self.task, number)
        # In bfloat16 log mu depends on the pair that a completion is scored in, and it may be in several.
        knows_mu = not settings.trust_logmu and (settings.method, settings.compute) != ("dpo", "bfloat16")
        log = here / "metrics.jsonl"
        on_rank_zero(lambda: keep_lines(log, done))

        def after_step(step: int, metrics: dict[str, float]) -> None:
            if rank() == 0:
                append_json(log, metrics)
            is_to_end = any(topr.from_all_ranks(is_asked()))
            if is_to_end or step == stop or step % settings.save_every == 0:
                save_checkpoint(here, step, lm, optimizer)
            if is_to_end:
                raise KeyboardInterrupt

        with requests_are_noted() as is_asked:
            topr.train(
                lm.model,
                optimizer,
                steps[done:stop],
                loss=make_loss(settings),
                logprobs=make_logprobs(settings),
                max_norm=settings.max_norm,
                start_at_mu=0.01 if knows_mu else None,
                after_step=after_step,
                done=done,
            )

    def with_logmu(self, samples: list[Sample], number: int, lm: LanguageModel, by: str) -> list[Sample]:
        """The samples, those to be trained on with log mu by `lm`, which scores them unless it did; in the file too."""
        steps = compose(self.settings, samples, lm, self.task, number)
        chosen = choose(self.settings, samples, number)
        if any(samples[i].logmu_by != by for i in chosen):
            if self.given is not None:
                say("the initial model stands in for the samples' own: log mu is scored by it")
            of_tokens = head.token_logprobs if self.settings.sliced_head else rows.token_logprobs
            samples = dataset.score(samples, lm, steps, by, of_tokens)
            on_rank_zero(lambda: write_checked(self.here(number) / "samples.jsonl", to_lines(samples).encode()))
        return samples

    def publish(self, results: dict) -> None:
        """Write results.json, and curve.png, which joins the iterations."""
        points, before = [], 0
        for entry in results["iterations"]:
            curve = entry["curve"][1 if points else 0 :]  # an iteration begins where the one before it ended
            points += [point | {"samples_seen": before + point["samples_seen"]} for point in curve]
            before = points[-1]["samples_seen"]
        settings = self.settings
        title = f"{settings.departure or settings.method}, learning rate {settings.lr:g}"
        if points:
            save_figure(draw_curve(points, title), self.folder / "curve.png")
        self.folder.write_json("results.json", results)


class Sampler(AbstractContextManager):
    """Keeps one engine open, for the model that was last asked for: it is expensive to start, and fills a GPU."""

    def __init__(self) -> None:
        self._stack, self._model, self._engine = ExitStack(), None, None

    def engine(self, model: str, open_engine: Callable[[str], AbstractContextManager[Engine]]) -> Engine:
        """The engine for `model`, opened unless it is there."""
        if self._model != model:
            self.close()
            self._engine, self._model = self._stack.enter_context(open_engine(model)), model
        return self._engine

    def close(self) -> None:
        """End the engine and free what it held."""
        self._model = self._engine = None
        self._stack.close()
        free_memory()

    def __exit__(self, *_: object) -> None:
        self.close()


def choose(settings: Settings, samples: Sequence[Sample], number: int = 1) -> list[int]:
    """Which samples iteration `number` trains on, by the setting `composition`."""
    rng = random.Random(settings.seed_of(f"composition {number}"))
    size = settings.examples or len(samples)
    match settings.composition:
        case "positives_only":
            return composition.positives_only(samples, size, rng)
        case "anna_karenina":
            problems = len({sample.prompt for sample in samples})
            return composition.anna_karenina(
                samples, settings.examples or composition.anna_karenina_size(problems), rng
            )
        case "proportion":
            return composition.proportion(samples, size, settings.proportion, rng)
    return composition.uniform(samples, size, rng)


def describe(settings: Settings, samples: Sequence[Sample], number: int) -> dict:
    """What iteration `number` trains on, in numbers, for results.json."""

    def count(some: Sequence[Sample]) -> dict[str, int]:
        problems = {sample.prompt for sample in some}
        return {"samples": len(some), "positive": sum(s.reward >= 0 for s in some), "problems": len(problems)}

    chosen = [samples[i] for i in choose(settings, samples, number)]
    seed = settings.seed_of(f"composition {number}")
    return {
        "composition": settings.composition,
        "seed": seed,
        "drawn": count(samples),
        "trained": count(chosen),
        "baseline": sum(baselines_of(settings, chosen)) / max(len(chosen), 1),  # the mean, where they differ
    }


def baselines_of(settings: Settings, chosen: Sequence[Sample]) -> list[float]:
    """Each chosen sample's baseline: the one that is set, or that which gives an effective share of positives."""
    if settings.baseline_from != "zero":
        means = dataset.mean_rewards(chosen, by_prompt=settings.baseline_from == "group")
        return [mean + (settings.baseline or 0.0) for mean in means]
    if settings.effective_proportion is None:
        return [settings.baseline or 0.0] * len(chosen)
    positives = dataset.share_of_positives(chosen)
    if not 0 < positives < 1 or {abs(sample.reward) for sample in chosen} != {1.0}:
        raise InputError("--effective-proportion: needs rewards -1 and +1, and samples of both signs")
    return [topr.baseline_for_proportion(positives, settings.effective_proportion)] * len(chosen)


def compose(
    settings: Settings, samples: Sequence[Sample], lm: LanguageModel, task: Task, number: int = 1
) -> dataset.Steps:
    """The optimiser steps of iteration `number`: every chosen sample once, or DPO's pairs; the baseline subtracted.

    The order depends on the seed and on the samples, not on their log mu. InputError where nothing can be learnt.
    """
    rng = random.Random(settings.seed_of(f"order {number}"))
    numbers = choose(settings, samples, number)
    if not numbers:
        raise InputError(f"--composition {settings.composition}: none of the {len(samples)} samples fits; draw more")
    examples = dataset.encode(samples, lm, task.stop, str(settings.samples or "samples.jsonl"), numbers)
    sizes = settings.batch, settings.micro_batch, device(), rank(), ranks()
    if settings.method == "dpo":
        pairs = dataset.pairs_of_prompt(examples, settings.pairs, rng)
        if not pairs:
            raise InputError("--method dpo: no problem has both a positive and a negative sample to pair")
        return dataset.Steps(pairs, *sizes)
    examples = dataset.subtract_baselines(examples, baselines_of(settings, [samples[i] for i in numbers]))
    if settings.method != "ppo" and settings.bounds.b_neg == 0 and all(example.reward <= 0 for example in examples):
        raise InputError(f"--method {settings.method}: no positive sample, and it learns from nothing else; draw more")
    return dataset.Steps(dataset.rows_of_prompt(examples, settings.row_size, rng), *sizes)


def make_loss(settings: Settings) -> Callable[..., torch.Tensor]:
    """The loss of the chosen method, as `topr.train` calls it."""
    if settings.method == "ppo":
        return partial(topr.ppo_loss, eps=settings.eps)
    if settings.method == "dpo":
        return partial(dataset.dpo_loss_of_rows, beta=settings.beta)
    if settings.departure is not None:
        return partial(topr.topr_loss, limits=topr.PRESETS["reinforce"])
    return partial(topr.topr_loss, limits=settings.bounds)


def make_logprobs(settings: Settings) -> Callable[..., torch.Tensor]:
    """What `topr.train` gets log pi(y|x) from; a departure is in its gradient."""
    if settings.departure is None:
        return head.sequence_logprobs if settings.sliced_head else rows.sequence_logprobs
    return rows.logprobs_with_gradient_of(DEPARTURES[settings.departure]())


def sampling_parameters(settings: Settings, task: Task) -> SamplingParameters:
    """The sampling parameters of training and test samples alike."""
    return SamplingParameters(settings.temperature, settings.top_p, settings.top_k, settings.max_new_tokens, task.stop)


def versions() -> dict[str, str]:
    """What the numbers were made with."""
    return {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}


def keep_lines(file: Path, count: int) -> None:
    """Cut a log to its first `count` lines: what came after the checkpoint that a run goes on from."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    write_text(file, "".join(text.splitlines(keepends=True)[:count]))


def free_memory() -> None:
    """Give back what dropped models held on the GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
