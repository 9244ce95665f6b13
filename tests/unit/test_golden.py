"""A run of three steps against the same steps in float64 without any code of this project."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

import train_gsm8k as gsm8k
from toprlib.settings import TINY, Settings

MODEL = TINY / "two_thirds"
STEPS = 3
LR = 1e-4
MAX_GRAD_NORM = 0.6
PLACES = 5  # elements of each weight in golden.json
QUESTION = (
    "Q: Ben buys {} boxes with {} stamps in each box and gives away {} stamps. "
    "How many stamps are left?\nA:"
)
ANSWER = (
    " Good. One has {a} * {b} = {x}, giving {x}. Now {x} - {c} = {y}, so {y}. The answer is {y}."
)
PROBLEMS = [  # boxes, stamps, gives away, the answer: right or wrong
    (8, 11, 10, 78),
    (7, 6, 12, 30),
    (4, 9, 6, 35),
    (5, 12, 20, 80),
    (3, 30, 5, 85),
    (9, 6, 4, 51),
]


def make_samples():
    """All of them are in each step."""
    samples = []
    for a, b, c, y in PROBLEMS:
        samples.append(
            {
                "prompt": QUESTION.format(a, b, c),
                "completion": ANSWER.format(a=a, b=b, c=c, x=a * b, y=y),
                "reward": 1.0 if y == a * b - c else -1.0,
            }
        )
    return samples


def sequence_logp(model, prompt, completion):
    """log pi(y|x) of one completion: no batch, no padding."""
    logits = model(torch.tensor([prompt + completion])).logits[0]
    probability = logits.exp() / logits.exp().sum(-1, keepdim=True)
    logp = torch.zeros((), dtype=torch.float64)
    for i, token in enumerate(completion):
        logp = logp + probability[len(prompt) - 1 + i, token].log()
    return logp


def topr_loss(logps, logmus, rewards, lengths):
    loss = torch.zeros((), dtype=torch.float64)
    for logp, logmu, reward, length in zip(logps, logmus, rewards, lengths, strict=True):
        weight = 1.0
        if reward < 0:
            weight = min(1.0, torch.exp(logp.detach() - logmu).item())
        loss = loss - weight * reward * logp / length / len(rewards)
    return loss


def adamw(weight, gradient, moments, step):
    """Without weight decay (Loshchilov and Hutter, Algorithm 2); moments: changed in place."""
    first, second = moments
    first[:] = 0.9 * first + 0.1 * gradient
    second[:] = 0.999 * second + 0.001 * gradient**2
    mean = first / (1 - 0.9**step)
    square = second / (1 - 0.999**step)
    weight.data -= LR * mean / (square**0.5 + 1e-8)


def train():
    """Each step's loss and gradient norm; after the last, some elements of each weight."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float64).eval()
    samples = make_samples()
    rewards = [sample["reward"] for sample in samples]
    pairs = []
    for sample in samples:
        prompt = tokenizer.encode(sample["prompt"]).ids
        completion = tokenizer.encode(sample["completion"], add_special_tokens=False).ids
        pairs.append((prompt, [*completion, model.config.eos_token_id]))
    lengths = [len(completion) for _, completion in pairs]
    weights = dict(model.named_parameters())
    moments = {name: torch.zeros(2, *weight.shape).double() for name, weight in weights.items()}
    logmus = None
    golden = {"loss": [], "grad_norm": []}
    for step in range(1, STEPS + 1):
        logps = [sequence_logp(model, prompt, completion) for prompt, completion in pairs]
        if logmus is None:  # mu is the model before the first step
            logmus = [logp.item() for logp in logps]
        loss = topr_loss(logps, logmus, rewards, lengths)
        values = torch.autograd.grad(loss, list(weights.values()))
        gradients = dict(zip(weights, values, strict=True))
        norm = sum((gradient**2).sum() for gradient in values).item() ** 0.5
        golden["loss"].append(loss.item())
        golden["grad_norm"].append(norm)
        scale = min(1.0, MAX_GRAD_NORM / norm)
        for name, gradient in gradients.items():
            adamw(weights[name], scale * gradient, moments[name], step)
    golden["weights"] = {name: pick(weights[name], gradients[name]) for name in weights}
    return golden


def pick(weight, gradient):
    """The elements with the largest gradients: place -> value.

    Where a gradient is tiny, AdamW takes its rounding error for a direction.
    """
    places = gradient.flatten().abs().topk(PLACES).indices.tolist()
    return {place: weight.flatten()[place].item() for place in places}


# ---- the run -------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def iteration(tmp_path_factory):
    """The folder of the run's only iteration: its six samples are one step of an epoch."""
    folder = tmp_path_factory.mktemp("golden")
    samples = folder / "samples.jsonl"
    lines = [json.dumps(sample) + "\n" for sample in make_samples()]
    samples.write_text("".join(lines))
    settings = Settings(
        samples=str(samples),
        test_problems=0,
        epochs=STEPS,
        batch_size=6,
        micro_batch_size=2,
        lr=LR,
        max_grad_norm=MAX_GRAD_NORM,
        out=folder / "run",
    )
    gsm8k.experiment(settings, gsm8k.gsm8k_task(settings))
    return folder / "run" / "iteration-1"


def test_three_steps_are_those_of_float64(iteration):
    golden = train()
    lines = (iteration / "metrics.jsonl").read_text().splitlines()
    for name in ("loss", "grad_norm"):
        actual = [json.loads(line)[name] for line in lines]
        # Rounding in float32 changes them by up to 1.6e-6, which depends on the processor.
        assert actual == pytest.approx(golden[name], rel=5e-6, abs=5e-6)
    weights = load_file(iteration / "model" / "model.safetensors")
    assert weights.keys() == golden["weights"].keys()
    for name, expected in golden["weights"].items():
        weight = weights[name].flatten()
        actual = {place: weight[place].item() for place in expected}
        assert actual == pytest.approx(expected, rel=0, abs=1e-6), name
