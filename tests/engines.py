"""What tests of the sampling engines share: how they draw, and what the model itself says of it."""

import math
from collections import Counter

import torch

PROMPT = "Q: Ada has 31 apples and finds 45 more. How many apples does Ada have now?\nA:"
START = PROMPT + " So."  # behind which many tokens are likely


def drawn(engine, sampling, prompts=(PROMPT,), n=8, seed=0):
    """n completions of each prompt."""
    found = [[] for _ in prompts]
    for number, completion in engine(prompts, n, sampling, seed):
        found[number].append(completion)
    return found


def logps_after(lm, prompt, token_ids):
    """log pi of the tokens behind the prompt, and (T, V) of all tokens at each of these places, in float64."""
    prompt_ids = lm.prompt_ids([prompt])[0]
    ids = torch.tensor([prompt_ids + token_ids])
    with torch.no_grad():
        known = lm.model(ids).logits[0, len(prompt_ids) - 1 : -1].double().log_softmax(-1)
    return known.gather(1, ids[0, len(prompt_ids) :, None])[:, 0].tolist(), known


def deviating(drawn, p):
    """What was drawn more or less often than chance makes it once in two million times; p: all probabilities."""
    counts, n = Counter(drawn), len(drawn)
    return [
        i for i, chance in enumerate(p) if abs(counts[i] - n * chance) > 5 * math.sqrt(n * chance * (1 - chance)) + 1
    ]
