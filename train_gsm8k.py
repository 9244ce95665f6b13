"""Section 4 of the TOPR paper as a script: evaluate, sample, compose, score, train, evaluate; on GSM8K or the like.

    python train_gsm8k.py                                  # tiny problems, tiny model: 3 minutes on two cores
    python train_gsm8k.py --method reinforce               # the same with naive REINFORCE, which collapses
    python train_gsm8k.py --data GSM8K_DIR --shots 8 ...   # real problems, the paper's 8-shot prompt
    python train_gsm8k.py --samples FILE --held-out FILE   # no sampling: train on completions you already have
    torchrun --nproc-per-node 8 train_gsm8k.py paper       # the paper's run, on eight GPUs

The run's stages are the methods of `Run` in pipeline/stages.py; every setting is in pipeline/settings.py, the method
itself in topr.py. A run writes config.json, results.json, curve.png and a folder for each iteration into `--out`.
"""

import json
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, BaseModel

from pipeline.records import OUTCOMES, Outcome, Problem, Task, read_shots, read_split
from pipeline.runtime.preflight import check_machine
from pipeline.runtime.processes import command, device, rank, ranks
from pipeline.settings import Settings, check, intended_ranks, read_settings

if TYPE_CHECKING:
    from pipeline.stages import Learn

# ---- the experiment: Algorithm 1, iterated (Section 4.3) ---------------------------------------------------------


def experiment(settings: Settings, task: Task, learn: "Learn | None" = None) -> dict:
    """All stages of a run in their order, each done unless its file is there. Returns what results.json holds.

    settings: such as `check` has passed. learn: the functions (loss, logprobs) that `topr.train` is given, instead of
    the method's. InputError where model, samples or folder do not fit; nothing is written then.
    """
    from pipeline.stages import open_run  # loads torch and transformers, which --help does without

    with open_run(settings, task, learn) as run:
        if run.is_finished:  # by an earlier call
            return run.results()
        run.evaluate(1, run.start)
        model = run.start.model
        for iteration in range(1, settings.iterations + 1):
            samples = run.sample(
                iteration, model
            )  # Algorithm 1, line 3: y ~ mu(.|x), n of each problem; graded
            composed = run.compose(
                iteration, samples
            )  # line 4: the dataset; rewards less the baseline
            del samples  # gigabytes at the paper's scale
            rows = run.score(
                iteration, composed, model
            )  # log mu(y|x) of line 6, by `model`, which is mu
            points = run.train(
                iteration, rows, model
            )  # lines 5 to 9: from pi = mu, one epoch of `topr.train`
            for point in points:
                run.evaluate(iteration, point)
            model = points[-1].model  # mu of the next iteration: mu_i = pi_{i-1} (Section 4.3)
        return run.results()


# ---- the task: GSM8K's problems, prompt and grading (Section 4.1) ------------------------------------------------

MARKER = "The answer is"
NUMBER = re.compile(r"-?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)")


def parse_answer(text: str) -> Decimal | None:
    """The first number on the line that follows the last "The answer is"; None if there is none.

    `$` and commas are dropped wherever they stand; a colon or a line break right after the marker does not count.

    >>> parse_answer("4 * 300 = 1200. The answer is $1,200.00.")
    Decimal('1200.00')
    """
    _, marker, rest = text.rpartition(MARKER)
    line = rest.lstrip(" :\n\t").partition("\n")[0].replace("$", "").replace(",", "")
    number = NUMBER.search(line) if marker else None
    return Decimal(number[0]) if number else None


def parse_gold(answer: str) -> Decimal:
    """The number after "####" in GSM8K's answer field; ValueError without one.

    >>> parse_gold("10 * 123 = 1230 eggs.\\n#### 1,230")
    Decimal('1230')
    """
    _, marker, rest = answer.rpartition("####")
    number = rest.strip().replace(",", "").replace("$", "")
    if not marker or not NUMBER.fullmatch(number):
        raise ValueError("no number after ####")
    return Decimal(number)


def grade(text: str, gold: Decimal) -> Outcome:
    """invalid without "The answer is", else correct if the number that follows equals gold (Section 4.1).

    >>> [grade(text, Decimal(7)) for text in ("The answer is 7.0", "The answer is 8.", "7")]
    ['correct', 'incorrect', 'invalid']
    """
    if MARKER not in text:
        return "invalid"
    return "correct" if parse_answer(text) == gold else "incorrect"


class Gsm8kRow(BaseModel):
    """A line of GSM8K's files, of whose answer the number is kept."""

    question: str
    answer: Annotated[str, AfterValidator(parse_gold)]


def load_problems(data: str, split: str) -> list[Problem]:
    """The problems of a split, from DIR/SPLIT.jsonl or from the hub; InputError names the line that has no answer."""
    rows = read_split(data, split, Gsm8kRow, configs=["main"])
    return [
        Problem(f"{split}-{line}", row.question, row.answer)
        for line, row in enumerate(rows, start=1)
    ]


def load_shots(count: int, file: Path | None) -> list[str]:
    """`count` worked examples as text: from `file`, or the 8-shot prompt of Wang et al. 2022 in the lm-eval package."""

    def parse(text: str) -> list[str]:
        import yaml

        examples = yaml.safe_load(text)["fewshot_config"]["samples"]
        return [f"Q: {example['question']}\nA: {example['target']}" for example in examples]

    return read_shots(count, file, "Q:", "tasks/gsm8k/gsm8k-cot.yaml", parse)


def gsm8k_task(settings: Settings) -> Task:
    """GSM8K's form of a task: `Q: ... A:` after the shots; with shots, the next `Q:` ends a completion."""
    shots = load_shots(settings.shots, settings.shots_file) if settings.shots else []
    if shots and settings.model == Settings().model and rank() == 0:
        print("--shots: the tiny model was not trained on worked examples", flush=True)
    train = load_problems(settings.data, "train") if settings.samples is None else []
    return Task(
        name="gsm8k",
        train=train[: settings.problems],
        test=load_problems(settings.test_source, "test")[: settings.test_problems]
        if settings.test_source
        else [],
        prompt=lambda problem: "\n\n".join([*shots, f"Q: {problem.question}\nA:"]),
        parse=parse_answer,
        grade=grade,
        outcomes=OUTCOMES,
        stop=("\nQ:",) if shots else (),
    )


# ---- presets: settings that go together (arXiv 2503.14286, Section 4) --------------------------------------------

PAPER = Settings(
    preset="paper",
    model="meta-llama/Meta-Llama-3-8B-Instruct",  # "using the 8B model unless otherwise specified" (4.1)
    data="openai/gsm8k",
    shots=8,  # "using the 8-shot prompt from Wang et al. (2022)" (4.1)
    iterations=5,  # "model performance continues to improve over multiple iterations" (4.3); the number is ours
    problems=7_473,  # "1,319 problems for testing and 7,473 for training" (4.1)
    n=16,  # "For each training question we generate n = 16 candidate solutions" (4.1)
    candidates=64,  # "For each problem, we sample 64 candidate solutions" (4.3)
    examples=50_000,  # "an iteration batch of N = 50,000 data points" (4.3)
    temperature=1.0,  # "with temperature T = 1, top_p = 1, top_k = 500, and a maximum of 512 tokens" (4.2)
    top_p=1.0,
    top_k=500,
    max_new_tokens=512,
    chunk=128,  # ours: 2,048 requests for each engine, of which vLLM computes up to 1,024 at a time
    eps=0.2,  # "For PPO, we use eps = 0.2" (4.3)
    pairs=16,  # "so as to obtain up to 16 contrastive pairs" (4.3)
    optimizer="adafactor",  # "the Adafactor optimizer (Shazeer and Stern, 2018) to minimize memory usage" (4.2)
    lr=5e-7,  # "a constant learning rate of 5e-7 chosen from a small parameter sweep" (4.2)
    batch=8,  # "data parallelism on a single H100 node with a per-GPU batch size of 1" (4.2)
    micro_batch=1,
    max_norm=1.0,  # "HuggingFace's default gradient clipping parameter of 1.0" (4.2)
    compute="bfloat16",  # ours: the paper does not tell its precision
    gradient_checkpointing=False,  # ours: without both a step takes 32.8 GB of each of eight GPUs, counted
    reshard=False,  # without a GPU (results/benchmarks/head_group.json)
    save_every=3_000,  # ours
    test_problems=1_319,
    test_samples=64,  # "we generate 64 solutions for each question for GSM8K" (4.2)
    between_samples=16,  # ours: a quarter of the time of these evaluations
    k=16,  # Figure 8's maj@16
    curve_points=1,  # "measured by evaluating the model at the end of the iteration" (4.2)
)

SETTINGS: Mapping[str, Settings] = MappingProxyType(
    {
        "laptop": Settings(),
        "single-gpu": replace(  # ours: a small model on one card of 24 GB, of which a step takes 8.4 (the same count)
            PAPER,
            preset="single-gpu",
            model="Qwen/Qwen2.5-0.5B-Instruct",
            iterations=1,
            n=8,
            examples=20_000,
            lr=1e-6,
            test_samples=16,
            between_samples=None,
            k=8,
        ),
        "paper": PAPER,
    }
)


# ---- the command -------------------------------------------------------------------------------------------------


def main(
    name: str,
    description: str,
    task: Callable[[Settings], Task],
    presets: Mapping[str, Settings] = SETTINGS,
    runs: str | None = None,
) -> None:
    """The command line of a task: settings in, a table out; one line and a non-zero exit status on bad input.

    runs: what the folder's name begins with where no --out is given; default: runs/NAME-.
    """
    started = time.monotonic()
    with command(name):
        settings = read_settings(sys.argv[1:], presets, description, runs or f"runs/{name}-")
        check(settings, intended_ranks(settings.preset) if settings.dry_run else None)
        if settings.dry_run and rank() == 0:
            from pipeline.dry_run import print_plan

            print_plan(settings, task(settings))
        elif not settings.dry_run:
            if settings.preset != "laptop" or ranks() > 1 or device().type == "cuda":
                check_machine(settings)
            results = experiment(settings, task(settings))
            if rank() == 0:
                if settings.evaluation:
                    from pipeline.evaluation import to_table

                    to_table(results).print()
                if settings.preset != "laptop" or device().type == "cuda":
                    from pipeline.times import table_of

                    table_of(
                        json.loads((settings.out / "times.json").read_text(encoding="utf-8"))
                    ).print()
                print(f"{settings.out}: {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main("train_gsm8k", __doc__, gsm8k_task, runs="runs/")
