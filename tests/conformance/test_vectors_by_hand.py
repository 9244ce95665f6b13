"""Losses fail the test vectors with the numbers that the text of the vector gives for them."""

import math
import re

import pytest
import torch
from public_losses import (
    FrozenWeight,
    but,
    ppo_with,
    remaining,
    separate_means,
    sum_of_completions,
    tapered,
    times_mask,
    with_tool_output,
)

from topr_conformance import VARIANTS, paper
from topr_conformance.vectors import VECTORS, check_vector


def explicit_probability_of_mu(logp, logmu, mask):
    probability = (logmu * mask).sum(1).exp() + 1e-12
    return ((logp * mask).sum(1).exp() / probability).clamp(max=1)


def last_4096_tokens(logp, logmu, mask):
    return tapered(logp, logmu, mask * (remaining(mask) <= 4096))


def a_little_padding(logp, logmu, mask):
    return tapered(logp + 1e-7 * (logp * (1 - mask)).sum(1, keepdim=True), logmu, mask)


def clip_after_exp(logp, logmu, reward, mask):
    ratio = ((logp - logmu) * mask).sum(1).exp()
    return -(torch.where(reward < 0, ratio.clamp(max=1), 1 + ratio.log()) * reward).mean()


MEASURED = [  # (the vector, the loss, what is measured)
    ("V1", VARIANTS["per-token"], [-0.606531]),
    ("V1", VARIANTS["geometric mean"], [-0.606531]),
    ("V2", VARIANTS["per-token"], [-1, -0.367879]),
    ("V3", VARIANTS["geometric mean"], [-0.606531]),
    ("V3", VARIANTS["per-token"], [-1, -0.22313]),
    ("V4", VARIANTS["tis"], [0.0497871, 1, -1]),
    ("V4", VARIANTS["plain is"], [0.0497871, 7.38906, -7.38906]),
    ("V5", clip_after_exp, [0, math.nan]),
    ("V6", VARIANTS["clip 0.8..1.2"], [-0.8]),
    ("V6", ppo_with(sum_of_completions), [0]),
    ("V7", VARIANTS["no stop-gradient"], [0.606531]),
    ("V8", VARIANTS["branch by raw score"], [-3]),
    ("V9", VARIANTS["token mean"], [1]),
    ("V9", VARIANTS["sequence sum"], [1]),
    ("V10", VARIANTS["naive reinforce"], [0, -0.2]),
    # The row of R = -2 among seven; NaN shows it, too.
    ("V11", but(a_little_padding), [1.47e-5 * 2 / 7, math.nan, 1.47e-5 * 2 / 7]),
    ("V11", but(times_mask), [0, math.nan, 0]),
    # Two tokens of R = -1 with a log-ratio of -0.3; of the tool's output it is -98.
    ("V11", but(with_tool_output), [0, 0, math.exp(-0.3) / 2 / 7]),
    ("V13", but(explicit_probability_of_mu), [-8.75651e-15]),
    ("V16", FrozenWeight(), [0.367879]),
    ("V17", VARIANTS["tempered"], [-0.367879]),
    ("V20", separate_means, [1.5, -1.43278]),
    ("V23", but(last_4096_tokens), [-0.606531]),
]


@pytest.mark.parametrize(("name", "loss", "expected"), MEASURED)
def test_a_loss_fails_with_the_numbers_of_the_text(name, loss, expected):
    result = check_vector(name, loss)
    assert (result.name, result.passed) == (name, False)
    numbers = re.findall(r"nan|-?\d+(?:\.\d+)?(?:e[-+]\d+)?", result.measured)
    actual = [float(number) for number in numbers]
    assert actual == pytest.approx(expected, rel=0.01, abs=1e-16, nan_ok=True)


def test_each_vector_has_a_loss_that_fails_it_and_the_paper_s_passes_all():
    assert {name for name, *_ in MEASURED} == set(VECTORS)
    assert all(check_vector(name, paper).passed for name in VECTORS)


def test_a_loss_may_subtract_the_mean_itself():
    """V8 has two right values: with the scores as they are, and with a baseline in the loss."""

    def with_baseline(logp, logmu, reward, mask):
        return paper(logp, logmu, reward - reward.mean(), mask)

    result = check_vector("V8", with_baseline)
    assert float(result.measured.split()[-1]) == pytest.approx(-3 * math.exp(-2), rel=1e-4)
    assert result.passed


def takes_the_first_tokens(logp, logmu, reward, mask):
    is_first = torch.arange(mask.shape[1]) < mask.sum(1, keepdim=True)
    return paper(logp, logmu, reward, is_first.to(mask.dtype))


def takes_all_tokens(logp, logmu, reward, mask):
    return paper(logp, logmu, reward, torch.ones_like(mask))


@pytest.mark.parametrize("loss", [takes_the_first_tokens, takes_all_tokens])
def test_padding_on_either_side_is_noticed(loss):
    assert not check_vector("V11", loss).passed
    assert check_vector("V11", paper).passed
