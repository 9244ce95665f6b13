"""Write results/page.json, two runs examined closely, which docs/index.html shows.

    python scripts/make_page_data.py    # ten minutes on one core; then python scripts/make_page.py

TOPR and naive REINFORCE train on the same completions in the same order, each at its best learning
rate: seed 0 of the runs in results/robustness.json with 60% negatives and late clipping, with more
evaluations on the way. What is shown is chosen by rule, before training: the first five test
questions, each with a model's first completion, and the training samples that `choose_pair` takes.
"""

import json
import platform
import sys
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import topr  # noqa: E402
from figures.runs import commit  # noqa: E402
from toprlib import batches, language_model, sampling  # noqa: E402
from toprlib.evaluation import evaluate  # noqa: E402
from toprlib.files import write_file  # noqa: E402
from toprlib.hf_sampler import sample_completions  # noqa: E402
from toprlib.records import OUTCOMES, Example, Sample  # noqa: E402
from toprlib.settings import Settings  # noqa: E402
from train_gsm8k import choose, gsm8k_task  # noqa: E402

RATES = {"topr": 3e-5, "reinforce": 1.8e-5}
STEPS_BETWEEN_LOOKS = 16
QUESTIONS = 5  # the first test questions
SETTINGS = {
    "problems": 160,
    "n": 24,
    "composition": "proportion",
    "proportion": 0.4,
    "examples": 1_024,
    "epochs": 4,
    "max_grad_norm": 100.0,
    "max_new_tokens": 96,
    "micro_batch_size": 16,
    "eval_samples": 8,
}


def choose_pair(samples: Sequence[Sample], examples: Sequence[Example]) -> list[Example]:
    """The first correct and the first incorrect example of the first problem that has both."""
    first: dict[str, dict[str, Example]] = {}
    for example in sorted(examples, key=lambda one: one.sample):
        sample = samples[example.sample]
        first.setdefault(sample.prompt, {}).setdefault(sample.outcome, example)
    both = [of for of in first.values() if {"correct", "incorrect"} <= set(of)]
    return [both[0]["correct"], both[0]["incorrect"]]


@torch.no_grad()
def log_ratios(model: torch.nn.Module, pair: Sequence[Example]) -> list[list[float]]:
    """log pi - log mu of each token of two examples."""
    found = []
    for example in pair:
        batch = batches.collate([example])
        values = (topr.token_logprobs(model, batch) - batch.token_logmu)[0]
        found.append([round(value, 4) for value in values.tolist()])
    return found


def train_and_look(method: str) -> dict[str, Any]:
    """A run: what every look at it saw, the questions, and the pair with its log-ratios."""
    torch.set_num_threads(1)
    settings = Settings(method=method, lr=RATES[method], **SETTINGS)
    task = gsm8k_task(settings)
    lm = language_model.load_model(settings.model)
    parameters = sampling.SamplingParameters(max_new_tokens=settings.max_new_tokens)
    engine = sampling.Engine(partial(sample_completions, lm, parameters))
    prompts = sampling.make_prompts(task, task.train, lm, settings.max_new_tokens)
    test_prompts = sampling.make_prompts(task, task.test, lm, settings.max_new_tokens)

    samples = sampling.sample_prompts(
        engine, prompts, settings.n, settings.seed_of("samples 1"), task
    )
    rows = choose(1, samples, lm, task, settings)
    steps = batches.plan_steps(rows, settings.batch_size, settings.micro_batch_size)
    rows = batches.score_rows(rows, steps, lm.model)
    steps = batches.plan_steps(rows, settings.batch_size, settings.micro_batch_size)
    examples = list(chain.from_iterable(rows))
    pair = choose_pair(samples, examples[: settings.examples])
    looks = []

    def look(step: int) -> None:
        is_end = step in (0, len(steps))
        n = settings.eval_samples if is_end else settings.eval_samples // 2
        seed = settings.seed_of(f"test 1 {step}")
        written = sampling.sample_prompts(engine, test_prompts, n, seed, task)
        entry = evaluate(written, task, k=1, seed=0)
        look_now = {outcome: round(entry[outcome], 6) for outcome in OUTCOMES}
        look_now["se"] = round(entry["pass@1"]["se"], 6)
        look_now["seen"] = sum(plan.completions for plan in steps[:step])
        look_now["first"] = [
            [sample.completion, sample.outcome] for sample in written[: QUESTIONS * n : n]
        ]
        look_now["log_ratio"] = log_ratios(lm.model, pair)
        looks.append(look_now)
        print(method, step, look_now["correct"], look_now["first"][0], flush=True)

    look(0)
    optimizer = language_model.make_optimizer(settings.optimizer, lm.model, settings.lr)
    all_stats = topr.train(
        lm.model,
        optimizer,
        batches.to_tensors(steps),
        settings.method_loss,
        settings.loss_limits,
        settings.max_grad_norm,
    )
    for step, _ in enumerate(all_stats, start=1):
        if step % STEPS_BETWEEN_LOOKS == 0:
            look(step)

    questions = [{"question": p.question, "gold": str(p.gold)} for p in task.test[:QUESTIONS]]
    asked = {problem.id: problem.question for problem in task.train}
    completions = []
    for example in pair:
        sample = samples[example.sample]
        completions.append(
            {
                "question": asked[sample.problem_id],
                "outcome": sample.outcome,
                "reward": example.reward,
                "tokens": [lm.tokenizer.decode([token]) for token in example.completion_ids],
            }
        )
    return {"looks": looks, "questions": questions, "completions": completions}


def main() -> None:
    """The command: both runs, then results/page.json."""
    runs = {method: train_and_look(method) for method in RATES}
    first = next(iter(runs.values()))
    curves = {}
    for method, run in runs.items():
        names = (*OUTCOMES, "se")
        curves[method] = {name: [look[name] for look in run["looks"]] for name in names}
    questions = []
    for i, question in enumerate(first["questions"]):
        written = {m: [look["first"][i] for look in run["looks"]] for m, run in runs.items()}
        questions.append({**question, "completions": written})
    completions = []
    for i, completion in enumerate(first["completions"]):
        of = {m: [look["log_ratio"][i] for look in run["looks"]] for m, run in runs.items()}
        completions.append({**completion, "log_ratio": of})
    content = {
        "command": f"git checkout {commit()} && python scripts/make_page_data.py",
        "settings": {"model": "tiny/two_thirds", "seed": 0, "lr": RATES, "batch_size": 16}
        | SETTINGS,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "seen": [look["seen"] for look in first["looks"]],
        "curves": curves,
        "questions": questions,
        "completions": completions,
    }
    text = json.dumps(content, indent=1, ensure_ascii=False)
    write_file(ROOT / "results" / "page.json", text + "\n")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
