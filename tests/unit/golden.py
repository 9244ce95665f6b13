"""Three steps of Algorithm 1 in float64 with nothing of this project: what test_golden.py asks of a small run.

python tests/golden.py > tests/golden.json
"""

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

MODEL = Path(__file__).resolve().parent.parent / "tiny" / "two_thirds"
STEPS, LR, MAX_NORM = 3, 1e-4, 0.6
QUESTION = "Q: Ben buys {} boxes with {} stamps in each box and gives away {} stamps. How many stamps are left?\nA:"
ANSWER = (
    " Good. One has {a} * {b} = {x}, giving {x}. Now {x} - {c} = {y}, so {y}. The answer is {y}."
)
ROWS = [  # prompt, completion with the end of sequence, reward: all of them are in each step
    (
        QUESTION.format(a, b, c),
        ANSWER.format(a=a, b=b, c=c, x=a * b, y=y),
        1.0 if y == a * b - c else -1.0,
    )
    for a, b, c, y in (
        (8, 11, 10, 78),
        (7, 6, 12, 30),
        (4, 9, 6, 35),
        (5, 12, 20, 80),
        (3, 30, 5, 85),
        (9, 6, 4, 51),
    )
]


def numbers() -> dict:
    """Each step's loss and norm of the gradient; of each weight, five elements after the last, by their places.

    They are those of the largest gradients: where a gradient is tiny, AdamW takes its rounding error for a direction.
    """
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float64).eval()
    weights = dict(model.named_parameters())
    end = model.config.eos_token_id
    pairs = [
        (tokenizer.encode(q).ids, [*tokenizer.encode(a, add_special_tokens=False).ids, end])
        for q, a, _ in ROWS
    ]
    first, second = (
        {name: torch.zeros_like(weight) for name, weight in weights.items()} for _ in range(2)
    )
    logmu, found = None, {"loss": [], "grad_norm": []}
    for step in range(1, STEPS + 1):
        logp = []
        for prompt, completion in pairs:
            logits = model(torch.tensor([prompt + completion])).logits[0]
            p = logits.exp() / logits.exp().sum(-1, keepdim=True)
            logp.append(
                sum(p[len(prompt) - 1 + i, token].log() for i, token in enumerate(completion))
            )
        logmu = logmu or [value.item() for value in logp]
        loss = torch.zeros((), dtype=torch.float64)
        for value, mu, (_, completion), (*_, reward) in zip(logp, logmu, pairs, ROWS, strict=True):
            weight = 1.0 if reward > 0 else min(1.0, torch.exp(value.detach() - mu).item())
            loss = loss - weight * reward * value / len(completion) / len(ROWS)
        gradients = dict(
            zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True)
        )
        norm = sum((g**2).sum() for g in gradients.values()) ** 0.5
        found["loss"].append(loss.item())
        found["grad_norm"].append(norm.item())
        for (
            name,
            gradient,
        ) in gradients.items():  # AdamW without decay (Loshchilov and Hutter, Algorithm 2)
            gradient = gradient * min(1.0, MAX_NORM / norm.item())
            first[name] = 0.9 * first[name] + 0.1 * gradient
            second[name] = 0.999 * second[name] + 0.001 * gradient**2
            mean, square = first[name] / (1 - 0.9**step), second[name] / (1 - 0.999**step)
            weights[name].data -= LR * mean / (square**0.5 + 1e-8)
    places = {
        name: gradient.flatten().abs().topk(5).indices.tolist()
        for name, gradient in gradients.items()
    }
    found["weights"] = {
        name: {i: weights[name].flatten()[i].item() for i in places[name]} for name in weights
    }
    return found


if __name__ == "__main__":
    json.dump(numbers(), sys.stdout, indent=1)
