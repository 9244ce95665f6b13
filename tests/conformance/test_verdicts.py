"""Each loss gets its name: alone, combined, disguised, rounded. Without a name it gets advice."""

import math
import re

import pytest
import torch
from loss_builders import (
    changed_reward,
    disguised,
    divisor,
    in_bfloat16,
    in_one_precision,
    method_loss,
    surrogate,
    taking_padding_for_tokens,
    tapered,
    total,
    weight_of_negatives,
)
from mistaken_losses import (
    NAMED_MISTAKES,
    UNMASKED,
    UNNAMED_MISTAKES,
    completions_of_5_tokens_count_twice,
    extra_term_in_bfloat16,
    reward_over_its_std,
    sigmoid_differentiated,
)
from public_losses import PUBLIC, PUBLIC_UNNAMED, floor_of_1e7

from topr_conformance import VARIANTS, VECTORS, compare, identify, variants
from topr_conformance.advice import ADVICE, change, most_informative
from topr_conformance.variants import FrozenWeight, paper
from topr_conformance.vectors import NOT_FINITE, VectorResult


# ---- combinations that public code contains, and bounds that are hard to tell apart --------------
def tempered_and_length_plus_1(logp, logmu, reward, mask):
    log_ratio = 0.5 * total(logp - logmu, mask)
    weight = torch.where(reward < 0, log_ratio.clamp(max=0).exp(), 1.0).detach()
    return -(weight * reward * total(logp, mask) / (mask.sum(1) + 1)).mean()


def geometric_mean_without_stop_gradient(logp, logmu, reward, mask):
    log_ratio = total(logp - logmu, mask) / mask.sum(1)
    weight = torch.where(reward < 0, log_ratio.clamp(max=0).exp(), 1.0)
    return -(weight * reward * total(logp, mask) / mask.sum(1)).mean()


def tis_and_half_of_negatives(logp, logmu, reward, mask):
    weight = tapered(logp, logmu, mask).detach() * torch.where(reward < 0, 0.5, 1.0)
    return -(weight * reward * total(logp, mask) / mask.sum(1)).mean()


def positives_at_most_half(logp, logmu, reward, mask):
    ratio = total(logp - logmu, mask).exp()
    weight = torch.where(reward < 0, ratio.clamp(0, 1), ratio.clamp(0, 0.5)).detach()
    return -(weight * reward * total(logp, mask) / mask.sum(1)).mean()


@weight_of_negatives
def no_upper_bound(logp, logmu, mask):
    return total(logp - logmu, mask).exp()


@weight_of_negatives
def narrow_clip(logp, logmu, mask):
    return total(logp - logmu, mask).exp().clamp(0.9997, 1.0004)


@weight_of_negatives
def low_clip(logp, logmu, mask):
    return total(logp - logmu, mask).exp().clamp(1e-4, 1)


@weight_of_negatives
def clip_in_float32(logp, logmu, mask):
    return total(logp.float() - logmu.float(), mask).exp().clamp(0.8, 1.2)


def baseline_in_place_and_token_mean(logp, logmu, reward, mask):
    return variants.token_mean(logp, logmu, reward.sub_(reward.mean()), mask)


def unmasked_token_mean_over_std(logp, logmu, reward, mask):
    ones = torch.ones_like(mask)
    return reward_over_its_std(logp, logmu, reward, ones)


def mask_named_in_len(logp, logmu, reward, is_in_len):
    return variants.per_token(logp, logmu, reward, is_in_len)


class FrozenPerToken:
    """Per-token ratios whose weights, branches included, are those of the first call."""

    def __init__(self):
        self.weight = None

    def __call__(self, logp, logmu, reward, mask):
        if self.weight is None:
            ratio = (logp - logmu).clamp(max=0).exp()
            self.weight = torch.where(reward[:, None] < 0, ratio, 1.0).detach()
        return -(reward * total(self.weight * logp, mask) / mask.sum(1)).mean()


class FrozenTokenMean:
    """The ratios are those of the first call; the reward of each call chooses the bounds."""

    def __init__(self):
        self.ratio = None

    def __call__(self, logp, logmu, reward, mask):
        if self.ratio is None:
            self.ratio = tapered(logp, logmu, mask).detach()
        weight = torch.where(reward < 0, self.ratio, 1.0)
        return -(weight * reward * total(logp, mask) / mask.sum(1).mean()).mean()


class FrozenLogp:
    """Old log-probabilities are kept; mask and branch are those of each call."""

    def __init__(self):
        self.logp = None

    def __call__(self, logp, logmu, reward, mask):
        if self.logp is None:
            self.logp = logp.detach()
        weight = torch.where(reward < 0, tapered(self.logp, logmu, mask), 1.0)
        return -(weight * reward * total(logp, mask) / mask.sum(1)).mean()


COMBINATIONS = [  # (the verdict, the loss)
    ("tempered + length off by +1", tempered_and_length_plus_1),
    ("per-token + frozen weight", FrozenPerToken()),
    ("frozen weight + token mean", FrozenTokenMean()),
    ("frozen weight", FrozenLogp()),
    ("frozen weight", FrozenWeight()),
    ("geometric mean + no stop-gradient", geometric_mean_without_stop_gradient),
    ("tis + negatives count 0.5 times", tis_and_half_of_negatives),
    ("clip 0..infinity", no_upper_bound),
    ("clip 0.9997..1.0004", narrow_clip),
    ("clip 0.0001..1", low_clip),
    ("clip 0.8..1.2", clip_in_float32),
    ("clip 0..0.5 on positives, 0..1 on negatives", positives_at_most_half),
    ("batch-mean baseline + token mean", baseline_in_place_and_token_mean),
    ("per-token", mask_named_in_len),
    (f"token mean + {UNMASKED} + normalised reward", unmasked_token_mean_over_std),
]


def paper_times_batch_size(logp, logmu, reward, mask):
    return 512 * len(reward) * paper(logp, logmu, reward, mask)


PADDED = f"divided by the longest length + {UNMASKED}"
DISGUISES = [  # (the verdict, the loss)
    ("paper", disguised(paper)),
    ("paper", variants.objective),
    ("paper", method_loss),
    ("paper", paper_times_batch_size),
    ("paper", in_one_precision(torch.float32)),
    (f"no stop-gradient + {PADDED}", taking_padding_for_tokens(variants.no_stop_gradient)),
    (f"geometric mean + {PADDED}", taking_padding_for_tokens(variants.geometric_mean)),
    ("frozen weight", disguised(FrozenWeight())),
]
for name, variant in VARIANTS.items():
    if name != PADDED:  # the disguise adds padding
        DISGUISES.append((name, disguised(variant)))

ROUNDED = [
    ("extra term + unmasked in the loss + bfloat16", extra_term_in_bfloat16),
    ("bfloat16", in_bfloat16(paper)),
    ("bfloat16", in_one_precision(torch.bfloat16)),
]
for name in ("per-token", "plain is", "tempered", "clip 0.8..1.2", "token mean", PADDED):
    for precision in (torch.float32, torch.bfloat16):
        ROUNDED.append((f"{name} + bfloat16", in_bfloat16(VARIANTS[name], precision)))
for precision in (torch.float32, torch.bfloat16):
    by_raw_score = in_bfloat16(variants.branch_by_raw_score, precision)
    ROUNDED.append(("branch by raw score + bfloat16", by_raw_score))

NAMED = [("paper", paper), *VARIANTS.items()]
NAMED += COMBINATIONS + DISGUISES + ROUNDED + NAMED_MISTAKES + PUBLIC


@pytest.mark.parametrize(("verdict", "loss"), NAMED)
def test_a_loss_gets_its_name(verdict, loss):
    report = identify(loss)
    assert (report.variant, report.adapter) == (verdict, "none")
    power = float(report.note.split()[-1]) if report.note else 1.0
    rounding = 1e-2 if "float16" in verdict else 1e-9
    assert power == pytest.approx(0.5 if "tempered" in verdict else 1, rel=rounding)
    names = [] if verdict == "paper" else verdict.split(" + ")
    assert report.changes == [f"{name}: {change(name)}" for name in names]
    assert all(change(name) for name in names)
    check_vectors(report, loss)


@pytest.mark.parametrize(("vector", "advice", "loss"), UNNAMED_MISTAKES + PUBLIC_UNNAMED)
def test_a_loss_without_a_name_gets_the_advice_of_the_most_informative_vector(vector, advice, loss):
    report = identify(loss)
    assert (report.variant, report.adapter) == ("unknown", "none")
    result, _ = most_informative(report.vectors)
    assert result.name == vector
    assert vector in report.note
    assert report.changes == [change(advice)]
    check_vectors(report, loss)


@pytest.mark.parametrize(
    ("advice", "loss"),
    [
        ("no known loss", completions_of_5_tokens_count_twice),
        ("bfloat16", in_bfloat16(sigmoid_differentiated)),
    ],
)
def test_a_loss_without_a_name_gets_advice_where_no_vector_shows_more(advice, loss):
    report = identify(loss)
    assert (report.variant, report.changes) == ("unknown", [change(advice)])
    assert report.note
    check_vectors(report, loss)


def check_vectors(report, loss):
    """The vectors and the random batches agree with the verdict; all numbers are spelt out."""
    statuses = {result.name: result.status for result in report.vectors}
    assert list(statuses) == list(VECTORS)
    assert not re.search(r"\b(nan|inf)\b", f"{report.note} {report.changes} {report.table()}")
    is_paper = report.variant == "paper"
    if "frozen weight" in report.variant:
        assert statuses.pop("V16") == "fail"
        assert set(statuses.values()) == {"not applicable"}
    elif is_paper or "fail" not in statuses.values():
        assert set(statuses.values()) == {"pass"}
        assert (compare(loss, 200) is None) == is_paper


def lengths(mask):
    return mask.sum(1)


def weighted_logp(ratio, logp, reward):
    return torch.where(reward < 0, ratio.clamp(max=1), 1.0).detach() * logp


def unchanged(reward):
    return reward


@pytest.mark.parametrize(
    "loss",
    [
        weight_of_negatives(tapered),
        divisor(lengths),
        surrogate(weighted_logp),
        changed_reward(unchanged),
    ],
)
def test_a_builder_of_these_tests_changes_nothing_but_its_function(loss):
    assert identify(loss).variant == "paper"


def test_a_floor_above_the_guard_of_exp_is_a_bound():
    """No vector shows it, and random batches hardly do."""
    assert identify(floor_of_1e7).variant == "clip 1e-07..1"


def test_a_number_is_more_informative_than_a_value_that_is_not_one():
    not_finite = VectorResult("V9", "a question?", "fail", f"it is {NOT_FINITE}")
    number = VectorResult("V13", "a question?", "fail", "R w = -0.5")
    passed = VectorResult("V6", "a question?", "pass", "R w = 0")
    assert most_informative([not_finite, number, passed]) == (number, "overflow")
    assert most_informative([not_finite, passed]) == (not_finite, "length off by")
    assert most_informative([passed]) is None


def test_advice_on_a_bound_says_which_power_of_e_it_is():
    assert "e^-5" in change(f"clip {math.exp(-5):.6g}..1")
    assert change("clip 0.1..1") == ADVICE["clip "]
