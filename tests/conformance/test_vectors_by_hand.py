"""Variants fail the test vectors with the values of their texts."""

import math
import re

import pytest
import torch
from loss_builders import changed_reward
from mistaken_losses import (
    a_little_padding_in_the_loss,
    a_little_padding_in_the_ratio,
    exp_before_clip,
    explicit_probability_of_mu,
    per_token_of_padding,
    separate_means,
    weights_0_1_percent_larger,
)
from public_losses import without_completions_above_1024

from topr_conformance import VECTORS, check_vector, variants
from topr_conformance.variants import FrozenWeight
from topr_conformance.vectors import CASES, CHECKS

MEASURED = [  # (the vector, the loss, the first numbers that are measured)
    ("V1", variants.geometric_mean, [-0.606531]),
    ("V1", weights_0_1_percent_larger, [-0.135471]),  # e^-2 is 0.135335
    ("V2", variants.per_token, [-1, -0.367879]),
    ("V3", variants.geometric_mean, [-0.606531]),
    ("V4", variants.tis, [0.0497871, 1, -1]),
    ("V5", exp_before_clip, [0]),  # then not a number
    ("V6", variants.clipped, [-0.8]),
    ("V7", variants.no_stop_gradient, [0.606531]),
    ("V8", variants.branch_by_raw_score, [-3]),
    ("V9", variants.token_mean, [3, 1]),  # of three tokens
    ("V10", variants.naive_reinforce, [0, -0.2]),
    ("V11", per_token_of_padding, [0, 0.0357]),
    ("V11", a_little_padding_in_the_loss, [0, 0.001]),
    ("V11", a_little_padding_in_the_ratio, [4.2e-6]),
    ("V13", explicit_probability_of_mu, [-8.7565e-15]),
    ("V16", FrozenWeight(), [0.367879, 0.367879]),
    ("V17", variants.tempered, [-0.367879]),
    ("V20", separate_means, [1, 1]),
    ("V22", separate_means, [-0.333333]),
    ("V23", without_completions_above_1024, [2100, 0]),
]


def numbers(text):
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?(?:e[-+]\d+)?", text)]


@pytest.mark.parametrize(("name", "loss", "measured"), MEASURED)
def test_a_variant_fails_with_the_value_of_the_text(name, loss, measured):
    result = check_vector(name, loss)
    assert (result.name, result.status) == (name, "fail")
    assert numbers(result.measured)[: len(measured)] == pytest.approx(measured, rel=0.01)


@changed_reward
def subtracting_the_mean(reward):
    return reward - reward.mean()


def test_a_loss_may_subtract_the_mean_itself():
    """V8 has two right values: with the scores as they are, and with a baseline in the loss."""
    on_scores = check_vector("V8", variants.paper)
    with_baseline = check_vector("V8", subtracting_the_mean)
    assert numbers(on_scores.measured)[0] == pytest.approx(0.2)
    assert numbers(with_baseline.measured)[0] == pytest.approx(-3 * math.exp(-2), rel=1e-4)
    assert on_scores.status == with_baseline.status == "pass"


def test_every_vector_has_a_check_and_a_variant_that_fails_it():
    assert {name for name, *_ in MEASURED} == set(VECTORS)
    assert set(CASES) | set(CHECKS) == set(VECTORS)
    assert not set(CASES) & set(CHECKS)


def test_a_loss_that_raises_an_exception_fails():
    def broken(logp, logmu, reward, mask):
        return torch.ones(2)[5]

    result = check_vector("V1", broken)
    assert result.status == "fail"
    assert result.measured.startswith("IndexError")
