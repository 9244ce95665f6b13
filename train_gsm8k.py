"""Section 4 of the TOPR paper: sample, choose, train, evaluate; on GSM8K or a task like it.

    python train_gsm8k.py                                   # tiny problems and model: 3 minutes
    python train_gsm8k.py --method reinforce                # naive REINFORCE, which collapses
    python train_gsm8k.py --data GSM8K_DIR --shots 8        # real problems, the paper's prompt
    python train_gsm8k.py --samples FILE --test-problems 0  # your own completions
    torchrun --nproc-per-node 8 train_gsm8k.py paper        # the paper's run, on eight GPUs

Read `experiment` first: it runs Algorithm 1 once per iteration. The columns below: line of the
algorithm, its function, and the file that it writes in --out/iteration-1/.

    -    sample_test                test-0.jsonl     the first model's answers to test problems,
                                                     and at temperature 0 in test-0-greedy.jsonl
    3    sample                     samples.jsonl    n graded completions y ~ mu(.|x) of each x
    4    choose                                      those to train on, rewards less the baseline
    6    compute_behavior_logprobs  train.jsonl      these in the order of training, with log mu
    5-9  train_policy               metrics.jsonl    one line per step, which `topr.train` makes
                                    checkpoint-100/  weights and optimizer; removed at the end
                                    model-64/        evaluated into test-64.jsonl, then removed
                                    model/           the last model; iteration 2 starts from it

The behavior policy mu is the model that an iteration starts from, also with --samples; with
--trust-logmu, the samples have log mu. Under torchrun each rank samples for its part of the
prompts, with its own vLLM, and trains on its part of each step. A file that exists is not computed
again, so the same command resumes a run: at a chunk of 256 prompts, or after the last checkpoint.
"""

import os

# Read by torch when it is imported: threads that spin while they wait slow a busy machine down.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import random
import re
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from fractions import Fraction
from functools import partial
from importlib.metadata import distribution
from pathlib import Path

import rich
import torch
import yaml
from pydantic import BaseModel
from torch import Tensor

import topr
from toprlib import dataset, distributed, files, results, sampling
from toprlib.evaluation import to_table
from toprlib.language_model import LanguageModel, check_architecture, free_gpu, load_tokenizer
from toprlib.methods import METHODS
from toprlib.numerals import first_number
from toprlib.records import (
    Engine,
    EvalPoint,
    Example,
    Grade,
    InputError,
    Outcome,
    Problem,
    Prompt,
    Sample,
    Task,
)
from toprlib.settings import TINY, Settings, command, print_plan, read_settings
from toprlib.vllm_client import vllm_engine

# ---- the task: GSM8K (Section 4.1) ---------------------------------------------------------------
MARKER = "The answer is"
# After the marker, without what begins a formula or a list on a line of its own.
LINE = re.compile(r"[ :\t]*(?:(?:\\\[|\$\$)\s*|\n[\s:]*(?:- )?)*(.*)")


class QuestionRow(BaseModel):
    """A row of GSM8K; `answer` ends with "#### NUMBER"."""

    question: str
    answer: str


def parse_answer(text: str) -> Fraction | None:
    """The first number (numerals.py) after "The answer is", in its line or the next; None without.

    The last "The answer is" with a digit counts: "The answer is correct" is a remark.

    >>> parse_answer("4 * 300 = 1200. The answer is $1,200.00. I think The answer is right.")
    Fraction(1200, 1)
    """
    for rest in reversed(text.split(MARKER)[1:]):
        line = LINE.match(rest)[1]
        if any(character.isnumeric() for character in line):
            return first_number(line)
    return None


def grade(text: str, gold: Fraction) -> Outcome:
    """invalid without "The answer is", else correct if the number after it equals gold.

    >>> [grade(text, Fraction(7)) for text in ("The answer is 7.0", "The answer is 8.", "7")]
    ['correct', 'incorrect', 'invalid']
    """
    if MARKER not in text:
        return "invalid"
    return "correct" if parse_answer(text) == gold else "incorrect"


def grade_all(texts: Sequence[str], problems: Sequence[Problem]) -> list[Grade]:
    """Reward +1 for correct completions, -1 for the others (Section 4.2)."""
    grades = []
    for text, problem in zip(texts, problems, strict=True):
        outcome = grade(text, problem.gold)
        grades.append(Grade(1.0 if outcome == "correct" else -1.0, outcome))
    return grades


def load_problems(data: str, split: str) -> list[Problem]:
    """The problems of DIR/SPLIT.jsonl or of the hub; gold is the number after "####"."""
    problems = []
    for line, row in enumerate(files.load_rows(data, split, QuestionRow, "main"), start=1):
        _, marker, gold = row.answer.rpartition("####")
        number = first_number(gold)
        if not marker or number is None:
            raise InputError(f"{data}, {split}:{line}: the answer needs a number after ####")
        problems.append(Problem(row.question, number, f"{split}-{line}"))
    return problems


def gsm8k_task(settings: Settings) -> Task:
    """`Q: ... A:` after the worked examples; with these, the next `Q:` ends a completion."""
    shots = load_shots()[: settings.shots] if settings.shots else []
    if settings.samples and settings.test_problems and settings.data == str(TINY):
        raise InputError("--samples: set --data DIR with test problems, or --test-problems 0")
    train = [] if settings.samples else load_problems(settings.data, "train")
    test = load_problems(settings.data, "test") if settings.test_problems else []
    return Task(
        name="gsm8k",
        train=train[: settings.problems],
        test=test[: settings.test_problems],
        grade=grade_all,
        prompt=lambda problem: "\n\n".join([*shots, f"Q: {problem.question}\nA:"]),
        parse=parse_answer,
        stop=("\nQ:",) if shots else (),
    )


def load_shots() -> list[str]:
    """The worked examples of the lm-eval package: the prompt of Wang et al. 2022."""
    package = distribution("lm_eval").locate_file("lm_eval")
    text = Path(package, "tasks/gsm8k/gsm8k-cot.yaml").read_text(encoding="utf-8")
    examples = yaml.safe_load(text)["fewshot_config"]["samples"]
    return [f"Q: {example['question']}\nA: {example['target']}" for example in examples]


# ---- Algorithm 1, iterated (Section 4.3) ---------------------------------------------------------
def experiment(settings: Settings, task: Task, loss: Callable[..., Tensor] | None = None) -> dict:
    """All stages of a run; returns the content of results.json.

    loss: in place of the method's; called as in `topr.train`. Raises InputError, before anything is
    written, if tokenizer, samples or folder do not fit.
    """
    from toprlib import training  # here, since FSDP takes a second to import: --help need not wait

    if settings.test_problems and not task.test:
        raise InputError(f"task {task.name} has no test problems; set --test-problems 0")
    lm = load_tokenizer(settings.model, settings.chat)
    if settings.engine == "hf" and (task.train or task.test):
        check_architecture(settings.model)
    train_prompts = sampling.make_prompts(task, task.train, lm, settings)
    test_prompts = sampling.make_prompts(task, task.test, lm, settings)
    open_engine = partial(sampling_engine, lm, task, train_prompts + test_prompts, settings)
    provided_samples = read_samples(settings)
    if provided_samples:
        choose(1, provided_samples, lm, task, settings)  # raises now if they do not fit
    trained = {prompt.text for prompt in train_prompts}
    trained |= {sample.prompt for sample in provided_samples}
    sampling.print_shared_problems(trained, test_prompts)
    config = settings.to_config() | {"inputs_crc32": checksum(task, provided_samples)}
    with distributed.process_group(), files.run_folder(settings.out, config):
        if settings.chat:
            sampling.write_chats(task, train_prompts + test_prompts, settings.out)
        file = settings.iteration_folder(1) / "test-0.jsonl"
        point = EvalPoint(1, 0, 0, settings.model, file, is_end=True)
        all_points = [point]
        for iteration in range(1, settings.iterations + 1):
            # Here the GPU is for sampling from mu, the model that the previous iteration trained.
            with open_engine(point.model) as engine:
                sample_test(point, engine, test_prompts, task, settings)
                samples = provided_samples or sample(  # line 3
                    iteration, engine, train_prompts, task, settings
                )
            examples = choose(iteration, samples, lm, task, settings)  # line 4
            dataset.print_dataset(iteration, samples, examples)
            del samples  # gigabytes at the paper's scale
            points = evaluation_points(iteration, examples, settings)
            if not files.exists(Path(points[-1].model)):
                # Here the GPU is for training pi, which begins as mu.
                policy, optimizer = training.load_for_training(lm, point.model, settings)
                examples = compute_behavior_logprobs(iteration, examples, policy, settings)
                train_policy(iteration, examples, policy, optimizer, loss, settings)  # lines 5-9
                del policy, optimizer
                free_gpu()
            files.remove(*settings.iteration_folder(iteration).glob("checkpoint-*"))
            for earlier in points[:-1]:
                with open_engine(earlier.model) as engine:
                    sample_test(earlier, engine, test_prompts, task, settings)
                files.remove(Path(earlier.model))
            point = points[-1]  # mu_i = pi_{i-1} (Section 4.3)
            all_points += points
        with open_engine(point.model) as engine:
            sample_test(point, engine, test_prompts, task, settings)
        return distributed.on_rank_zero(results.write_results, all_points, task, settings)


def read_samples(settings: Settings) -> list[Sample]:
    """The samples of --samples; none without."""
    if not settings.samples:
        return []
    samples = files.load_rows(settings.samples, "train", Sample)
    if not samples:
        raise InputError(f"--samples {settings.samples}: has no rows; choose another file")
    return samples


def checksum(task: Task, samples: Sequence[Sample]) -> str:
    """Of problems, gold answers and samples: a run whose input has changed cannot resume."""
    texts = [f"{task.prompt(problem)} {problem.gold}" for problem in (*task.train, *task.test)]
    content = "\n".join(texts) + files.to_lines(samples)
    return f"{zlib.crc32(content.encode()):08x}"


# ---- line 3: y ~ mu(.|x) -------------------------------------------------------------------------
def sampling_engine(
    lm: LanguageModel, task: Task, prompts: list[Prompt], settings: Settings, model: str
) -> AbstractContextManager[Engine]:
    """The engine that samples from a model: vLLM in its own process, or the model in this one.

    It starts when it is first used, and frees its memory at the end of the block.
    """
    if settings.engine == "hf":
        from toprlib.hf_sampler import hf_engine

        return hf_engine(lm, model, settings, task.stop)
    longest = max((len(prompt.ids) for prompt in prompts), default=0)
    max_tokens = longest + settings.max_new_tokens
    return vllm_engine(lm, model, settings, task.stop, max_tokens)


def sample(
    iteration: int, engine: Engine, prompts: list[Prompt], task: Task, settings: Settings
) -> list[Sample]:
    """Line 3: n graded completions of each training problem."""
    file = settings.iteration_folder(iteration) / "samples.jsonl"
    seed = settings.seed_of(f"samples {iteration}")
    sampling.sample_to_file(file, engine, prompts, settings.n, seed, task)  # unless it exists
    return files.read_records(file, Sample)


# ---- line 4: the dataset, with rewards less the baseline -----------------------------------------
def choose(
    iteration: int, samples: list[Sample], lm: LanguageModel, task: Task, settings: Settings
) -> list[Example]:
    """Line 4: the samples to train on, in the order of training, with rewards less the baseline."""
    rng = random.Random(settings.seed_of(f"composition {iteration}"))
    size = min(settings.examples or len(samples), len(samples))
    indices = dataset.choose_samples(settings.composition, samples, size, rng, settings.proportion)
    if not indices:
        message = f"--composition {settings.composition}: selects none of {len(samples)} samples"
        raise InputError(f"{message}; sample more, or choose another composition")
    examples = dataset.tokenize_samples(samples, indices, lm, task.stop, settings.trust_logmu)
    baselines = choose_baselines([samples[index] for index in indices], settings)
    examples = [
        replace(example, reward=example.reward - baseline)
        for example, baseline in zip(examples, baselines, strict=True)
    ]

    rng = random.Random(settings.seed_of(f"order {iteration}"))
    uses_pairs = METHODS[settings.method].uses_pairs
    order = dataset.pair_examples if uses_pairs else dataset.shuffle_examples
    ordered = []
    for _ in range(settings.epochs):
        ordered += order(examples, rng)
    if not ordered:
        message = "no problem has a sample with a reward of at least 0 and one below 0"
        raise InputError(f"--method dpo: {message}; sample more, or correct the rewards")
    if settings.composition == "positives_only":
        # Repeated to as many optimizer steps as all samples would make.
        while len(ordered) < settings.epochs * size:
            ordered += order(examples, rng)
        ordered = ordered[: settings.epochs * size]
    return [replace(example, line=line) for line, example in enumerate(ordered)]


def choose_baselines(chosen: list[Sample], settings: Settings) -> list[float]:
    """Each sample's baseline: c, or the one for the effective proportion p~ (Equation 12)."""
    c = settings.baseline
    if settings.effective_proportion is not None:
        if {sample.reward for sample in chosen} - {-1.0, 1.0}:
            raise InputError("--effective-proportion: needs rewards of -1 and +1; set --baseline")
        p = sum(sample.reward > 0 for sample in chosen) / len(chosen)
        if 0 < p < 1:  # with one sign only, rewards stay as they are
            c = topr.baseline_for_proportion(p, settings.effective_proportion)
    means = dataset.mean_rewards(chosen, settings.baseline_from)  # 0 in the paper
    return [mean + c for mean in means]


# ---- log mu(y|x), for the weight of line 6 -------------------------------------------------------
def compute_behavior_logprobs(
    iteration: int, examples: list[Example], policy: LanguageModel, settings: Settings
) -> list[Example]:
    """The examples with behavior log-probabilities: log mu(y|x) by the iteration's first model.

    They are over the full vocabulary at temperature 1, in the batches of the first pass: same
    padding, same precision, so that pi = mu in the first step. With --trust-logmu the samples have
    them.
    """
    file = settings.iteration_folder(iteration) / "train.jsonl"
    if not files.exists(file):
        if not settings.trust_logmu:
            one_of_each = list({example.sample: example for example in examples}.values())
            steps = plan(one_of_each, settings)
            examples = dataset.add_logmu(examples, steps, policy.model)
        distributed.on_rank_zero(files.write_file, file, files.to_lines(examples))
        dataset.print_mismatch(iteration, examples)
    return files.read_records(file, Example)


# ---- lines 5 to 9: the optimizer steps, from pi = mu ---------------------------------------------
def plan(examples: list[Example], settings: Settings) -> list[dataset.StepPlan]:
    """The optimizer steps over the examples, as this rank has them."""
    uses_pairs = METHODS[settings.method].uses_pairs
    sizes = (settings.batch_size, settings.micro_batch_size)
    return dataset.plan_steps(examples, *sizes, uses_pairs)


def evaluation_points(
    iteration: int, examples: list[Example], settings: Settings
) -> list[EvalPoint]:
    """The models of an iteration to evaluate; the next iteration starts from the last one."""
    folder = settings.iteration_folder(iteration)
    steps = plan(examples, settings)
    stops = {len(steps)}
    if settings.test_problems:
        for passes in settings.evaluate_after:
            stops.add(min(int(len(steps) * passes / settings.epochs), len(steps)))
    points = []
    for stop in sorted(stops - {0}):
        is_end = stop == len(steps)
        model = folder / ("model" if is_end else f"model-{stop}")
        seen = sum(step.completions for step in steps[:stop])
        file = folder / f"test-{stop}.jsonl"
        points.append(EvalPoint(iteration, stop, seen, str(model), file, is_end))
    return points


def train_policy(
    iteration: int,
    examples: list[Example],
    policy: LanguageModel,
    optimizer: torch.optim.Optimizer,
    loss: Callable[..., Tensor] | None,
    settings: Settings,
) -> None:
    """Lines 5 to 9: `topr.train` on all examples, from pi = mu or the last checkpoint."""
    from toprlib import training

    folder = settings.iteration_folder(iteration)
    steps = plan(examples, settings)
    points = evaluation_points(iteration, examples, settings)
    models = {point.step: Path(point.model) for point in points}
    method = settings.chosen_method()
    limits = None if loss else method.limits  # for the logged weights
    loss = loss or method.loss

    done = distributed.on_rank_zero(training.last_checkpoint, folder)
    if done > 0:
        training.load_checkpoint(folder / f"checkpoint-{done}", policy.model, optimizer)
    sums_once = distributed.ranks() > 1 and not settings.gradient_checkpointing
    tensors = dataset.to_tensors(steps[done:], policy.model if sums_once else None)
    all_stats = topr.train(policy.model, optimizer, tensors, loss, settings.max_grad_norm)
    bar = distributed.progress_bar(all_stats, "training", "step", len(steps), done)
    for step, stats in enumerate(bar, start=done + 1):
        results.log_step(folder / "metrics.jsonl", step, stats, limits, settings)
        if step in models and not files.exists(models[step]):
            training.save_model(policy, models[step])
        if step % settings.save_every == 0 and step < len(steps):
            training.save_checkpoint(folder, step, policy.model, optimizer)


# ---- evaluation (Section 4.2) --------------------------------------------------------------------
def sample_test(
    point: EvalPoint, engine: Engine, prompts: list[Prompt], task: Task, settings: Settings
) -> None:
    """Write graded completions of the test problems by a model, and one at temperature 0."""
    if prompts:
        n = settings.eval_samples_at(point.is_end)
        seed = settings.seed_of(f"test {point.iteration} {point.step}")
        sampling.sample_to_file(point.file, engine, prompts, n, seed, task)  # unless it exists
        greedy = engine._replace(generate=partial(engine.generate, temperature=0.0))
        sampling.sample_to_file(point.greedy_file, greedy, prompts, 1, seed, task)


# ---- presets: settings that go together (Section 4) ----------------------------------------------
PAPER = Settings(
    engine="vllm",  # "vLLM" (4.2)
    model="meta-llama/Meta-Llama-3-8B-Instruct",  # "the 8B model unless otherwise specified" (4.1)
    data="openai/gsm8k",
    shots=8,  # "the 8-shot prompt from Wang et al. (2022)" (4.1)
    iterations=5,  # "over multiple iterations" (4.3); the paper does not say how many
    problems=7_473,  # "1,319 problems for testing and 7,473 for training" (4.1)
    n=16,  # "n = 16 candidate solutions" (4.1)
    examples=50_000,  # "an iteration batch of N = 50,000 data points" (4.3)
    max_new_tokens=512,  # "a maximum of 512 tokens" (4.2); temperature and top_k: defaults
    optimizer="adafactor",  # "to minimize memory usage" (4.2)
    lr=5e-7,  # "a constant learning rate of 5e-7 chosen from a small parameter sweep" (4.2)
    batch_size=8,  # "a single H100 node with a per-GPU batch size of 1" (4.2)
    micro_batch_size=1,
    dtype="bfloat16",  # the paper does not say
    save_every=500,  # not from the paper
    test_problems=1_319,
    eval_samples=64,  # "64 solutions for each question for GSM8K" (4.2)
    evaluate_after=(),  # "evaluating the model at the end of the iteration" (4.2)
)
SINGLE_GPU = replace(  # a small model on one GPU of 48 GB, or 24 GB with checkpointing
    PAPER,
    model="Qwen/Qwen2.5-0.5B-Instruct",
    iterations=1,
    problems=2_500,
    n=8,
    examples=None,  # all
    lr=1e-6,
    micro_batch_size=8,
    eval_samples=16,
    k=8,
)
PRESETS = {"laptop": Settings(), "single-gpu": SINGLE_GPU, "paper": PAPER}


# ---- the command ---------------------------------------------------------------------------------
def main(
    name: str,
    description: str,
    make_task: Callable[[Settings], Task],
    presets: Mapping[str, Settings] = PRESETS,
    runs: str | None = None,
) -> None:
    """The command line of a task. runs: what the default of --out begins with (runs/NAME-)."""
    start = time.monotonic()
    with command(name):
        settings = read_settings(sys.argv[1:], presets, description, runs or f"runs/{name}-")
        task = make_task(settings)
        if settings.dry_run:
            print_plan(settings, task, len(read_samples(settings)))
            return
        found = experiment(settings, task)
        if distributed.rank() == 0:
            if settings.test_problems:
                rich.print(to_table(found))
            print(f"files: {settings.out} ({time.monotonic() - start:.0f} s)")


if __name__ == "__main__":
    main("train_gsm8k", __doc__, gsm8k_task, runs="runs/")
