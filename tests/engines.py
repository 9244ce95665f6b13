"""What tests of the sampling engines share: how they draw, and what the model itself says of it."""

import math
from collections import Counter
from functools import cache

import torch

import train_gsm8k as gsm8k
from pipeline.models.language_model import META, load_model
from pipeline.records import Problem
from pipeline.sampling import Prompt

PROMPT = "Q: Ada has 31 apples and finds 45 more. How many apples does Ada have now?\nA:"
START = PROMPT + " So."  # behind which many tokens are likely


@cache
def usual():
    """The default model, without weights."""
    return load_model(gsm8k.Settings().model, META)


def drawn(engine, sampling, texts=(PROMPT,), n=8, seed=0, lm=None):
    """n completions of each prompt, whose tokens are those of `lm`, by default of the default model."""
    prompts = [
        Prompt(Problem("", text), text, ids)
        for text, ids in zip(texts, (lm or usual()).prompt_ids(texts), strict=True)
    ]
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
        i
        for i, chance in enumerate(p)
        if abs(counts[i] - n * chance) > 5 * math.sqrt(n * chance * (1 - chance)) + 1
    ]
