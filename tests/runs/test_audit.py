"""An audit of finished runs: each file is recomputed from the files that it follows from.

The audit starts `train_gsm8k.py` as a user does, in one process and on two ranks (slow), and reads
what it wrote. It shares no code with the project. Sampling, grades, the training set, Algorithm 1
and the estimates are written here again: one completion at a time, without padding, in float64.

So this file also describes what a run is. Sections are those of the paper (arXiv 2503.14286):

    prompt        "Q: QUESTION", a new line, "A:"; no worked examples
    sampling      temperature, then top-k (Section 4.2). A token is sampled where its noise
                  falls into the cumulative distribution, in the order of the vocabulary
    seeds         a stage has the seed crc32("STAGE SEED"); those of iteration I are "samples I",
                  "test I STEP", "composition I" and "order I". Completion j of prompt i takes its
                  noise from a generator with that seed + i * n + j, on any rank (ours)
    grade         correct, incorrect or invalid, by the number after "The answer is" (Section 4.1)
    reward        +1 if correct, else -1 (Section 4.2), minus the prompt's mean and c (ours)
    log mu        of the model that starts the iteration: mu_i = pi_{i-1} (Section 4.3), over the
                  whole vocabulary, at temperature 1
    loss          Algorithm 1: a negative has the weight min(1, pi/mu), a positive 1. Each term is
                  divided by the completion's length (Section 4.2), their sum by the step's size
    optimizer     AdamW without weight decay (ours); the gradient's norm is clipped (Section 4.2)
    pass@K, maj@K the mean over 100 draws of K of a problem's N completions; the standard error is
                  sqrt(K V / (N - K)), where V is the variance of these draws (Section 4.2)

The run deletes the models at evaluation points within an epoch. The audit trains them itself.
"""

import copy
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import zlib
from collections import Counter
from fractions import Fraction
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tiny"
INITIAL_MODEL = DATA / "base"

# ---- the audited run -----------------------------------------------------------------------------
# Counts differ, so that one in another's place shows. The last step of an epoch has one completion.
# The evaluations have fewer completions of a problem than K, and more.
ITERATIONS = (1, 2)
PROBLEMS = 4
SAMPLES = 6
EXAMPLES = 22
BATCH = 3
STEPS = (4, 8)  # two evaluation points an epoch: 8 // 2, and 8 = ceil(EXAMPLES / BATCH)
LR = 1e-4
MAX_NORM = 0.8  # some of the steps are clipped
BASELINE = 0.3
TEMPERATURE = 0.9
TOP_K = 5
MAX_NEW_TOKENS = 48  # some of the completions are cut
TEST_PROBLEMS = 3
EVAL_SAMPLES = 5
EVAL_SAMPLES_BEFORE_THE_END = 2  # a quarter, at least 2
K = 4
SEED = 11

OPTIONS = {
    "--data": DATA,
    "--iterations": len(ITERATIONS),
    "--problems": PROBLEMS,
    "--n": SAMPLES,
    "--examples": EXAMPLES,
    "--batch-size": BATCH,
    "--micro-batch-size": 2,
    "--lr": LR,
    "--max-grad-norm": MAX_NORM,
    "--baseline": BASELINE,
    "--baseline-from": "group",
    "--temperature": TEMPERATURE,
    "--top-k": TOP_K,
    "--max-new-tokens": MAX_NEW_TOKENS,
    "--test-problems": TEST_PROBLEMS,
    "--eval-samples": EVAL_SAMPLES,
    "--evaluate-after": STEPS[0] / STEPS[-1],
    "--k": K,
    "--seed": SEED,
}
CORRECT, INCORRECT, INVALID = OUTCOMES = ("correct", "incorrect", "invalid")

# ---- tolerances: how far the run's float32 may be from the audit's float64 -----------------------
# Measured log-probabilities differ by up to 1e-5 a token, and so does the cumulative distribution.
# Noise that lies so close to a token's bound may fall on either side of it.
LOGMU_TOLERANCE = 1e-4
NOISE_TOLERANCE = 1e-5
# AdamW divides a gradient by its size. Where a gradient is nearly 0, it is mostly rounding error,
# which moves the weight by a part of LR either way. Measured over an epoch, weights differ by 2e-4
# of the distance that they go (weight decay of 0.01 makes 2e-3), and metrics by up to 2e-4.
WEIGHT_TOLERANCE = 1e-3
METRIC_TOLERANCE = 1e-3


# ---- the run, and its files ----------------------------------------------------------------------
# Two ranks share the prompts and each step, and what they write must be the same as of one process.
LAUNCHERS = {  # "--", because torchrun would take --n for an abbreviation of its own options
    "one process": [],
    "two ranks": "-m torch.distributed.run --standalone --nproc-per-node 2 --".split(),
}


def slow(*values):
    return pytest.param(values, marks=pytest.mark.slow, id=", ".join(values))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("one process", "llama"), id="one process"),
        slow("two ranks", "llama"),
        slow("one process", "qwen2"),
        slow("two ranks", "phi3"),
    ],
)
def run(request, tmp_path_factory):
    """The folder of a finished run."""
    launcher, kind = request.param
    folder = tmp_path_factory.mktemp("audited") / "run"
    write_initial_model(kind, initial_model(folder))
    options = [str(word) for word in chain.from_iterable(OPTIONS.items())]
    options += ["--model", str(initial_model(folder))]
    command = [sys.executable, *LAUNCHERS[launcher], "train_gsm8k.py", *options]
    process = subprocess.run(
        [*command, "--out", str(folder)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    return folder


def initial_model(run):
    return run.parent / "initial_model"


def write_initial_model(kind, folder):
    """The tiny Llama as a model of another type: Qwen2 adds biases, Phi3 joins matrices."""
    shutil.copytree(INITIAL_MODEL, folder)
    if kind == "llama":
        return
    llama = load_model(INITIAL_MODEL).float()
    sizes = llama.config.to_dict()
    for name in ("model_type", "architectures", "transformers_version"):
        del sizes[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    weights = llama.state_dict()
    if kind == "qwen2":
        for name, weight in model.state_dict().items():
            if name.endswith(".bias"):
                weights[name] = 0.05 * torch.randn_like(weight)
    joined = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")} if kind == "phi3" else {}
    for whole, parts in joined.items():
        first = f"{parts[0]}_proj.weight"
        for prefix in [name.removesuffix(first) for name in weights if name.endswith(f".{first}")]:
            matrices = [weights.pop(f"{prefix}{part}_proj.weight") for part in parts]
            weights[f"{prefix}{whole}_proj.weight"] = torch.cat(matrices)
    model.load_state_dict(weights)
    model.save_pretrained(folder)


def iteration_folder(run, iteration):
    return run / f"iteration-{iteration}"


def read_lines(file):
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def model_before(run, iteration):
    """The model that starts an iteration, which is its mu."""
    if iteration == 1:
        return load_model(initial_model(run))
    return load_model(iteration_folder(run, iteration - 1) / "model")


def load_model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


def load_tokenizer(run):
    return AutoTokenizer.from_pretrained(initial_model(run))  # its class is that of the model type


def seed_of(stage):
    return zlib.crc32(f"{stage} {SEED}".encode())


class Problem(NamedTuple):
    """A word problem as the model is asked it, and its answer."""

    name: str
    prompt: str
    answer: Fraction


def read_problems(split, count):
    problems = []
    for number, row in enumerate(read_lines(DATA / f"{split}.jsonl")[:count], start=1):
        prompt = f"Q: {row['question']}\nA:"
        _, answer = row["answer"].split("####")
        problems.append(Problem(f"{split}-{number}", prompt, Fraction(answer.strip())))
    return problems


# ---- samples and evaluations: from a model and a seed --------------------------------------------
def completion_logits(model, prompt_ids, completion_ids):
    """(T, V): the logits that predict each of a completion's T tokens."""
    input_ids = torch.tensor([prompt_ids + completion_ids])
    # Logits predict the next token: those for the completion's first are at the prompt's last.
    return model(input_ids).logits[0, len(prompt_ids) - 1 : -1]


def sampling_distribution(logits):
    """(T, V): each token's probability of being sampled."""
    logits = logits / TEMPERATURE
    least_kept = logits.topk(TOP_K).values[:, -1:]  # (T, 1)
    return logits.masked_fill(logits < least_kept, -math.inf).softmax(-1)


@torch.no_grad()
def noise_gaps(model, prompt_ids, completion_ids, seed):
    """(T,): the distance of each noise from its token's part of the cumulative distribution.

    It is 0 where the noise lies within this part, so that no other token can be sampled.
    """
    p = sampling_distribution(completion_logits(model, prompt_ids, completion_ids))
    token = torch.tensor(completion_ids)[:, None]  # (T, 1)
    cumulative = p.cumsum(-1)
    upper = cumulative.gather(1, token)
    lower = upper - p.gather(1, token)
    noise = torch.rand(MAX_NEW_TOKENS, generator=torch.Generator().manual_seed(seed))
    position = noise[: len(token), None] * cumulative[:, -1:]
    return torch.maximum(lower - position, position - upper).clamp_min(0.0)[:, 0]


def check_completion(sample, problem, tokenizer):
    """Assert which problem a completion is of, where it ends, and its text."""
    assert sample["problem_id"] == problem.name
    assert sample["prompt"] == problem.prompt
    token_ids = sample["token_ids"]
    end = tokenizer.eos_token_id
    assert end not in token_ids[:-1]
    is_finished = token_ids[-1] == end
    assert is_finished or len(token_ids) == MAX_NEW_TOKENS
    assert sample["finish_reason"] == ("stop" if is_finished else "length")
    text_ids = token_ids[:-1] if is_finished else token_ids
    assert sample["completion"] == tokenizer.decode(text_ids, clean_up_tokenization_spaces=False)


def check_samples(file, problems, per_problem, model, stage):
    """Assert that a file has what the model samples with the stage's seed, token by token."""
    tokenizer = load_tokenizer(file.parents[1])
    samples = read_lines(file)
    assert len(samples) == len(problems) * per_problem
    gaps = []
    for number, sample in enumerate(samples):
        problem = problems[number // per_problem]
        check_completion(sample, problem, tokenizer)
        prompt_ids = tokenizer(problem.prompt)["input_ids"]
        seed = seed_of(stage) + number
        gaps.append(noise_gaps(model, prompt_ids, sample["token_ids"], seed))
    gap = torch.cat(gaps)
    wrong = (gap > NOISE_TOLERANCE).sum().item()
    assert wrong == 0, f"{file}: {wrong} of {len(gap)} tokens are of another model or seed"


@torch.no_grad()
def check_greedy(file, problems, model):
    """Assert that a file has one completion of each problem, and its tokens the largest logits."""
    tokenizer = load_tokenizer(file.parents[1])
    for sample, problem in zip(read_lines(file), problems, strict=True):
        check_completion(sample, problem, tokenizer)
        prompt_ids = tokenizer(problem.prompt)["input_ids"]
        logits = completion_logits(model, prompt_ids, sample["token_ids"])  # (T, V)
        token = torch.tensor(sample["token_ids"])[:, None]  # (T, 1)
        gap = logits.max(-1).values - logits.gather(1, token)[:, 0]  # (T,)
        assert (gap < LOGMU_TOLERANCE).all()


@pytest.mark.parametrize("iteration", ITERATIONS)
def test_training_problems_are_sampled_from_the_model_before(run, iteration):
    file = iteration_folder(run, iteration) / "samples.jsonl"
    model = model_before(run, iteration)
    problems = read_problems("train", PROBLEMS)
    check_samples(file, problems, SAMPLES, model, f"samples {iteration}")


def test_initial_model_is_evaluated(run):
    file = iteration_folder(run, 1) / "test-0.jsonl"
    problems = read_problems("test", TEST_PROBLEMS)
    model = load_model(initial_model(run))
    check_samples(file, problems, EVAL_SAMPLES, model, "test 1 0")
    check_greedy(file.with_name("test-0-greedy.jsonl"), problems, model)


@pytest.mark.parametrize("iteration", ITERATIONS)
@pytest.mark.parametrize("step", STEPS)
def test_model_after_a_step_is_evaluated(run, epochs, iteration, step):
    per_problem = EVAL_SAMPLES if step == STEPS[-1] else EVAL_SAMPLES_BEFORE_THE_END
    file = iteration_folder(run, iteration) / f"test-{step}.jsonl"
    model = epochs[iteration].models[step]
    problems = read_problems("test", TEST_PROBLEMS)
    check_samples(file, problems, per_problem, model, f"test {iteration} {step}")
    check_greedy(file.with_name(f"test-{step}-greedy.jsonl"), problems, model)


# ---- grades and rewards: from texts --------------------------------------------------------------
def parse_answer(text):
    """The first number on the line after the last "The answer is"; None without one."""
    _, marker, rest = text.rpartition("The answer is")
    line = rest.lstrip(" :\n\t").split("\n")[0]
    number = re.search(r"-?\d+(\.\d+)?", line.replace(",", "").replace("$", ""))
    return Fraction(number[0]) if marker and number else None


def grade(text, answer):
    if "The answer is" not in text:
        return INVALID
    return CORRECT if parse_answer(text) == answer else INCORRECT


def test_grades_and_rewards(run):
    problems = read_problems("train", PROBLEMS) + read_problems("test", TEST_PROBLEMS)
    answers = {problem.name: problem.answer for problem in problems}
    samples = []
    for iteration in ITERATIONS:
        samples += read_lines(iteration_folder(run, iteration) / "samples.jsonl")
        for file in iteration_folder(run, iteration).glob("test-*.jsonl"):
            samples += read_lines(file)
    outcomes = {sample["outcome"] for sample in samples}
    model_type = json.loads((initial_model(run) / "config.json").read_text())["model_type"]
    # A llama's weights make a model of another type that is hardly ever right.
    assert outcomes == set(OUTCOMES) or (model_type != "llama" and len(outcomes) == 2)
    for sample in samples:
        outcome = grade(sample["completion"], answers[sample["problem_id"]])
        assert sample["outcome"] == outcome
        assert sample["reward"] == (1.0 if outcome == CORRECT else -1.0)


# ---- the training set: from samples and seeds ----------------------------------------------------
def choose_samples(samples, iteration):
    """The numbers of the samples to train on, in the order of training."""
    choice = random.Random(seed_of(f"composition {iteration}"))
    chosen = sorted(choice.sample(range(len(samples)), EXAMPLES))
    # The order is random before the samples are grouped by prompt, and again afterwards.
    order = random.Random(seed_of(f"order {iteration}"))
    groups = {}
    for number in order.sample(chosen, len(chosen)):
        groups.setdefault(samples[number]["prompt"], []).append(number)
    numbers = list(chain.from_iterable(groups.values()))
    order.shuffle(numbers)
    return numbers


def count_samples(samples):
    return {
        "samples": len(samples),
        "positive": sum(sample["reward"] >= 0 for sample in samples),
        "problems": len({sample["problem_id"] for sample in samples}),
    }


def expected_counts(run, iteration):
    """What results.json should have of the training set."""
    samples = read_lines(iteration_folder(run, iteration) / "samples.jsonl")
    trained = [samples[number] for number in choose_samples(samples, iteration)]
    return {
        "composition": "uniform",
        "seed": seed_of(f"composition {iteration}"),
        "drawn": count_samples(samples),
        "trained": count_samples(trained),
        "baseline": pytest.approx(fmean(baselines_of(trained))),
        "steps": STEPS[-1],
    }


def baselines_of(chosen):
    """The mean reward of the chosen samples of each one's prompt, and c."""
    baselines = []
    for sample in chosen:
        rewards = [other["reward"] for other in chosen if other["prompt"] == sample["prompt"]]
        baselines.append(fmean(rewards) + BASELINE)
    return baselines


@pytest.mark.parametrize("iteration", ITERATIONS)
def test_training_set_has_the_chosen_samples_in_order(run, iteration):
    tokenizer = load_tokenizer(run)
    samples = read_lines(iteration_folder(run, iteration) / "samples.jsonl")
    examples = read_lines(iteration_folder(run, iteration) / "train.jsonl")
    assert [example["sample"] for example in examples] == choose_samples(samples, iteration)
    chosen = [samples[example["sample"]] for example in examples]
    for example, sample, baseline in zip(examples, chosen, baselines_of(chosen), strict=True):
        assert example["prompt_ids"] == tokenizer(sample["prompt"])["input_ids"]
        assert example["completion_ids"] == sample["token_ids"]
        assert example["reward"] == pytest.approx(sample["reward"] - baseline)


# ---- log mu, metrics and models: from the training set -------------------------------------------
class Epoch(NamedTuple):
    """The audit's training on an iteration's train.jsonl."""

    steps: list[dict]  # what metrics.jsonl should have
    models: dict[int, torch.nn.Module]  # after each of STEPS


@pytest.fixture(scope="module")
def epochs(run):
    """The audit's training in each iteration, from the model that starts it."""
    epochs = {}
    for iteration in ITERATIONS:
        examples = read_lines(iteration_folder(run, iteration) / "train.jsonl")
        epochs[iteration] = train(model_before(run, iteration), examples)
    return epochs


def train(model, examples):
    """Algorithm 1, lines 5 to 9: an epoch on the examples in their order. It changes the model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    epoch = Epoch(steps=[], models={})
    for number, start in enumerate(range(0, len(examples), BATCH), start=1):
        batch = examples[start : start + BATCH]
        optimizer.zero_grad()
        terms = [backpropagate(model, example, len(batch)) for example in batch]
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        epoch.steps.append(summarise_step(number, terms, grad_norm.item()))
        if number in STEPS:
            epoch.models[number] = copy.deepcopy(model)
    return epoch


def backpropagate(model, example, batch_size):
    """Add an example's gradient to the model's. Returns its loss, log-ratio, reward and weight."""
    reward = example["reward"]
    logp = token_logprobs(model, example).sum()
    log_ratio = logp.item() - sum(example["token_logmu"])
    weight = min(1.0, math.exp(log_ratio)) if reward < 0 else 1.0  # a number, without gradient
    loss = -weight * reward * logp / len(example["completion_ids"]) / batch_size
    loss.backward()
    return loss.item(), log_ratio, reward, weight


def token_logprobs(model, example):
    """(T,): log pi of each token of an example's completion."""
    completion_ids = example["completion_ids"]
    logits = completion_logits(model, example["prompt_ids"], completion_ids)
    return logits.log_softmax(-1).gather(1, torch.tensor(completion_ids)[:, None])[:, 0]


def summarise_step(number, terms, grad_norm):
    """What metrics.jsonl should have of a step. A sign that no example has has no means."""
    loss, log_ratio, reward, weight = np.array(terms).T
    mass = weight * np.abs(reward)
    summary = {
        "step": number,
        "loss": loss.sum(),
        "grad_norm": grad_norm,
        "gradient_mass": mass.sum(),
        "realised_proportion": mass[reward > 0].sum() / mass.sum(),
    }
    if (reward > 0).any():
        summary["log_ratio_pos_mean"] = log_ratio[reward > 0].mean()
        summary["weight_pos_mean"] = weight[reward > 0].mean()
    if (reward < 0).any():
        summary["log_ratio_neg_mean"] = log_ratio[reward < 0].mean()
        summary["weight_neg_mean"] = weight[reward < 0].mean()
    return summary


def all_weights(model):
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


@pytest.mark.parametrize("iteration", ITERATIONS)
def test_logmu_is_of_the_model_before(run, iteration):
    model = model_before(run, iteration)
    for example in read_lines(iteration_folder(run, iteration) / "train.jsonl"):
        with torch.no_grad():
            expected = token_logprobs(model, example).tolist()
        assert example["token_logmu"] == pytest.approx(expected, abs=LOGMU_TOLERANCE)


@pytest.mark.parametrize("iteration", ITERATIONS)
def test_metrics_are_those_of_algorithm_1(run, epochs, iteration):
    lines = read_lines(iteration_folder(run, iteration) / "metrics.jsonl")
    for line, expected in zip(lines, epochs[iteration].steps, strict=True):
        actual = {name: line[name] for name in expected}
        assert actual == pytest.approx(expected, rel=0, abs=METRIC_TOLERANCE)
        assert ("weight_neg_mean" in line) == ("weight_neg_mean" in expected)


@pytest.mark.parametrize("iteration", ITERATIONS)
def test_model_is_that_of_algorithm_1(run, epochs, iteration):
    before = all_weights(model_before(run, iteration))
    actual = all_weights(load_model(iteration_folder(run, iteration) / "model"))
    expected = all_weights(epochs[iteration].models[STEPS[-1]])
    assert (actual - expected).norm() < WEIGHT_TOLERANCE * (expected - before).norm()


# ---- results.json: from all other files ----------------------------------------------------------
def expected_results(run):
    """What results.json should have."""
    problems = read_problems("test", TEST_PROBLEMS)
    latest = evaluate(iteration_folder(run, 1) / "test-0.jsonl", problems)
    results = {"before": latest, "iterations": []}
    for iteration in ITERATIONS:
        here = iteration_folder(run, iteration)
        curve = [{"samples_seen": 0} | latest]
        for step in STEPS:
            latest = evaluate(here / f"test-{step}.jsonl", problems)
            samples_seen = min(step * BATCH, EXAMPLES)
            curve.append({"samples_seen": samples_seen} | latest)
        entry = {
            "dataset": expected_counts(run, iteration),
            "training": summarise_training(read_lines(here / "metrics.jsonl")),
            "curve": curve,
            "after": latest,
        }
        results["iterations"].append(entry)
    return results


def evaluate(file, problems):
    """What results.json should have of a file of completions of the test problems."""
    samples = read_lines(file)
    outcomes = Counter(sample["outcome"] for sample in samples)
    answers = [parse_answer(sample["completion"]) for sample in samples]
    per_problem = len(samples) // len(problems)
    questions = []  # of each problem its answer, and those of its completions
    for number, problem in enumerate(problems):
        start = number * per_problem
        questions.append((problem.answer, answers[start : start + per_problem]))
    entry = {outcome: outcomes[outcome] / len(samples) for outcome in OUTCOMES}
    entry["questions"] = len(problems)
    entry["samples_per_question"] = per_problem
    # The mean over draws of one completion is known without drawing; its error is not.
    entry["pass@1"] = estimate(is_any_correct, questions, 1)
    entry["pass@1"]["mean"] = outcomes[CORRECT] / len(samples)
    greedy = read_lines(file.with_stem(f"{file.stem}-greedy"))
    right = sum(sample["outcome"] == CORRECT for sample in greedy)
    entry["greedy"] = {"mean": right / len(problems), "se": None}
    if per_problem >= K:
        entry[f"maj@{K}"] = estimate(is_majority_correct, questions, K)
        entry[f"pass@{K}"] = estimate(is_any_correct, questions, K)
    return entry


def is_any_correct(right_answer, answers):
    return right_answer in answers


def is_majority_correct(right_answer, answers):
    """Whether the most frequent answer is right; the first of them, where several are."""
    votes = Counter(answer for answer in answers if answer is not None)
    return bool(votes) and votes.most_common(1)[0][0] == right_answer


def estimate(score, questions, k):
    """The mean score of k completions a question over 100 draws, and its standard error.

    questions: (right answer, the answers of N completions) of each. score: (right answer, answers).
    """
    generator = np.random.default_rng(SEED)
    n = len(questions[0][1])
    means = []
    for _ in range(100):
        draw = generator.permuted(np.tile(np.arange(n), (len(questions), 1)), axis=1)[:, :k]
        scores = []
        for (right_answer, answers), numbers in zip(questions, draw, strict=True):
            scores.append(score(right_answer, [answers[number] for number in numbers]))
        means.append(fmean(scores))
    variance = np.var(means, ddof=1)
    standard_error = math.sqrt(k * variance / (n - k)) if k < n else None
    return {"mean": fmean(means), "se": standard_error}


def summarise_training(lines):
    """What results.json should have of metrics.jsonl: means over the epoch or over its end."""
    last_tenth = lines[len(lines) * 9 // 10 :]
    summary = {}
    for name in ("realised_proportion", "weight_neg_mean"):
        summary[name] = mean_metric(lines, name)
    for name in ("log_ratio_pos_mean", "log_ratio_neg_mean"):
        summary[name] = mean_metric(last_tenth, name)
    return summary


def mean_metric(lines, name):
    """The mean over the steps that have the metric, if any; a share's is weighted by its mass."""
    lines = [line for line in lines if name in line]
    if not lines:
        return None
    values = [line[name] for line in lines]
    masses = [line["gradient_mass"] for line in lines]
    return round(fmean(values, masses if name == "realised_proportion" else None), 3)


def leaves(value, path=""):
    """The values in nested dicts and lists, by their paths.

    >>> leaves({"curve": [{"mean": 0.5}, {"mean": None}]})
    {'/curve/0/mean': 0.5, '/curve/1/mean': None}
    """
    if isinstance(value, list):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return {path: value}
    found = {}
    for name, child in value.items():
        found |= leaves(child, f"{path}/{name}")
    return found


def test_results_are_those_of_the_files(run):
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    del results["versions"]
    assert leaves(results) == pytest.approx(leaves(expected_results(run)))
