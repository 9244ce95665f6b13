"""Three steps of Algorithm 1 in float64, without any code of this project: what golden.json has.

python tests/unit/golden.py > tests/unit/golden.json
"""

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

MODEL = Path(__file__).resolve().parents[2] / "tiny" / "two_thirds"
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


if __name__ == "__main__":
    json.dump(train(), sys.stdout, indent=1)
