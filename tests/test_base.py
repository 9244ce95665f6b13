"""What is measured of a base model: gradients and log mu by hand, texts counted, and where steps are fastest."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import random_examples, tiny_model

from paper.base import Base, describe_base
from pipeline.records import Sample

REWARDS = [1.0, -1.0, -1.0, 0.5, 0.0, -1.0]
EXAMPLES = [replace(example, reward=r) for example, r in zip(random_examples(3, 2), REWARDS, strict=True)]
TEXTS = {"a": "aabcaabdef", "b": "ab", "c": "cccccccccc"}  # right ones by prompt
SAMPLES = [Sample(prompt="a", completion=text, reward=reward) for text in "xyz" for reward in (-1.0, 0.0, -1.0)]
SAMPLES += [Sample(prompt=prompt, completion=text, reward=1.0) for prompt, texts in TEXTS.items() for text in texts]


def test_gradients_and_log_mu_are_those_of_each_example_by_hand():
    model, squares, logmu = tiny_model(), [], []
    for example in EXAMPLES:
        ids, first = example.prompt_ids + example.completion_ids, len(example.prompt_ids)
        logits = model(torch.tensor([ids])).logits[0]
        logp = sum(logits[i - 1, ids[i]] - logits[i - 1].exp().sum().log() for i in range(first, len(ids)))
        model.zero_grad()
        (logp / len(example.completion_ids)).backward()
        squares.append(np.concatenate([weight.grad.flatten() for weight in model.parameters()]) ** 2)
        logmu.append(logp.item())
    base, right = describe_base(model, SAMPLES, EXAMPLES), np.array(REWARDS) > 0
    moved = np.max(squares, 0) > 1e-20  # not those of tokens that do not occur
    assert 0.5 < moved.mean() < 1
    scaled = np.array(squares)[:, moved] / np.mean(squares, 0)[moved]
    assert (base.e_pos, base.e_neg) == pytest.approx((scaled[right].mean(), scaled[~right].mean()))
    assert base.logmu == pytest.approx(np.mean(np.array(logmu)[right]))


def test_samples_are_counted():
    base = describe_base(tiny_model(), SAMPLES, EXAMPLES)
    assert base.right == 22 / 31
    assert base.texts == (4 + 1) / 2  # a, b, c and d of the first eight; one
    assert math.isnan(describe_base(tiny_model(), SAMPLES[-12:-10], EXAMPLES).texts)
    for alike in (EXAMPLES[:1], EXAMPLES[1:3]):
        with pytest.raises(ValueError, match="all right, or all wrong"):
            describe_base(tiny_model(), SAMPLES, alike)


@pytest.mark.parametrize(("e_pos", "e_neg"), [(1.0, 14.0), (1.0, 1.0), (5.0, 1.0)])
@pytest.mark.parametrize("p", [0.1, 0.4, 0.8])
def test_steps_are_fastest_at_the_best_share_whatever_the_share_of_right_samples(p, e_pos, e_neg):
    """Signal over noise of a gradient in which a right sample weighs p~ / p, and a wrong one (1 - p~) / (1 - p)."""
    share = np.arange(0.001, 1, 0.001)
    right, wrong = share / p, (1 - share) / (1 - p)
    pace = (right + wrong) / np.sqrt(p * right**2 * e_pos + (1 - p) * wrong**2 * e_neg)
    assert Base(p, 8.0, -12.0, e_pos, e_neg).best_share == pytest.approx(share[pace.argmax()], abs=0.001)
