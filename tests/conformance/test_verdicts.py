"""Each loss gets its verdict: the paper's in disguise, public ones, mistakes, planted ones."""

import random

import pytest
import torch
from public_losses import (
    NOT,
    PUBLIC,
    FrozenWeight,
    but,
    mean_of_tokens,
    separate_means,
    tapered,
    total,
)
from torch.nn.functional import pad

import topr
from topr_conformance import InputError, identify, paper
from topr_conformance.combinations import CHOICES, GRADIENTS, POWERS, TABLE_1, Combination
from topr_conformance.identification import find_differences


# ---- the paper's loss ----------------------------------------------------------------------------
def equation_11(logp, logmu, reward, mask):
    log_ratio = total(logp - logmu, mask)
    clipped = log_ratio.clamp(max=0)
    taper = torch.where(reward < 0, clipped.exp() * (1 + log_ratio - clipped), 1 + log_ratio)
    return -(taper * reward / mask.sum(1)).mean()


def in_loops(logp, logmu, reward, mask):
    loss = 0.0
    for row in range(len(reward)):
        tokens = mask[row] > 0
        weight = (logp - logmu)[row, tokens].detach().sum().clamp(max=0).exp()
        loss = loss - (weight if reward[row] < 0 else 1) * reward[row] * logp[row, tokens].mean()
    return loss


def disguised(logp, logmu, reward, mask):
    """Rows in another order, padded on both sides, and another scale."""
    columns = [pad(column.flip(0), (2, 2), value=-7.0) for column in (logp, logmu)]
    return 512 * paper(*columns, reward.flip(0), pad(mask.flip(0), (2, 2)))


def in_float32_and_in_place(logp, logmu, reward, mask):
    return paper(logp.mul_(1), logmu, reward.mul_(mask.new_ones(1) @ torch.ones(1)), mask)


def other_names(scores, old_log_probs, log_probs, action_mask=None, mask=None, beta=0.1):
    return paper(log_probs, old_log_probs, scores, action_mask)


def with_metrics(logp, logmu, reward, mask):
    return paper(logp, logmu, reward, mask), {"weight": tapered(logp, logmu, mask)}


class Module(torch.nn.Module):
    def forward(self, *, prev_logprobs, curr_logprobs, scores, loss_mask, **options):
        return paper(curr_logprobs, prev_logprobs, scores, loss_mask)


def guards_at_20(logp, logmu, mask):
    """A weight below e^-20 may be anything."""
    return total((logp - logmu).clamp(-20, 20), mask).clamp(-20, 0).exp()


def with_a_proportion(negatives):
    """An effective proportion multiplies the negatives' gradient by (1 - p) / p."""
    loss = but(change=lambda reward: torch.where(reward < 0, negatives * reward, reward))
    name = f"a proportion of {100 / (1 + negatives):.4g} %: the paper's loss with a baseline"
    return name, loss


PAPER = [paper, topr.topr_loss, equation_11, in_loops, disguised, in_float32_and_in_place]
PAPER += [other_names, Module(), with_metrics, but(guards_at_20)]
PAPER = [("paper", loss) for loss in PAPER]
PAPER += [with_a_proportion(negatives) for negatives in (3 / 7, 1 / 9, 4, 1.001)]


# ---- mistakes ------------------------------------------------------------------------------------
def ratio_differentiated(logp, logmu, reward, mask):
    ratio = total(logp - logmu, mask).exp().clamp(max=1)
    return -(torch.where(reward < 0, ratio, total(logp, mask)) * reward / mask.sum(1)).mean()


def minus_missing(logp, logmu, reward, mask):
    normalised = (reward - reward.mean()) / reward.std()
    return -paper(logp, logmu, normalised, mask)


def logmu_recomputed(logp, logmu, reward, mask):
    return paper(logp, logp.detach(), reward, mask)


def entropy(logp, logmu, reward, mask):
    return paper(logp, logmu, reward, mask) + 10 * mean_of_tokens(logp, mask)


def mean_over_non_zero_rewards(logp, logmu, reward, mask):
    return paper(logp, logmu, reward, mask) / (reward != 0).double().mean()


def temperature_of_0_7(logp, logmu, reward, mask):
    return paper(logp / 0.7, logmu, reward, mask)


def guards_of_tokens(limit):
    return but(lambda p, mu, mask: total((p - mu).clamp(-limit, limit), mask).clamp(max=0).exp())


def guard_of_completions(limit):
    return but(lambda logp, logmu, mask: total(logp - logmu, mask).clamp(-limit, 0).exp())


def half_but_for_seven_tokens(logp, logmu, mask):
    return tapered(logp, logmu, mask) * torch.where(mask.sum(1) == 7, 0.6, 0.5)


MISTAKES = [  # (the verdict, the loss)
    ("log-ratio of tokens clipped at -10", guards_of_tokens(10)),
    ("log-ratio of tokens clipped at -5", guards_of_tokens(5)),
    ("log-ratio clipped at -15", guard_of_completions(15)),
    ("log-ratio clipped at -10", guard_of_completions(10)),
    ("clip 0.082085..1", guard_of_completions(2.5)),
    ("negatives count 0.5 times", but(half_but_for_seven_tokens)),
    ("inverted ratio", but(lambda logp, logmu, mask: tapered(logmu, logp, mask))),
    ("clip 0.1..1", but(lambda *inputs: tapered(*inputs).clamp(min=0.1))),
    ("negatives count -1 times", but(lambda *inputs: -tapered(*inputs))),
    ("naive reinforce", logmu_recomputed),
    ("clip 0..infinity + weight 0 outside 0..1 on negatives", ratio_differentiated),
    ("wrong sign + batch-mean baseline + normalised reward", minus_missing),
    ("extra term", entropy),
    ("length off by -1", but(divisor=lambda mask: (mask.sum(1) - 1).clamp(min=1))),
    ("divided by the longest length", but(divisor=lambda mask: mask.shape[1])),
    ("sequence sum", but(divisor=lambda mask: 1024)),
    ("unmasked in the ratio", but(lambda logp, logmu, mask: tapered(logp, logmu, mask + 1))),
    (NOT, but(lambda logp, logmu, mask: total((logp - logmu).clamp(max=0), mask).exp())),
    (NOT, but(lambda logp, logmu, mask: tapered(logp, logmu.bfloat16(), mask).float())),
    (NOT, but(lambda logp, logmu, mask: total(logp - logmu, mask).sigmoid())),
    (NOT, but(divisor=lambda mask: mask.sum(1) + 3)),
    (NOT, but(change=lambda reward: reward.clamp(-60, 60))),
    (NOT, but(change=lambda reward: reward.where(reward != 0, -1))),
    (NOT, separate_means),
    (NOT, mean_over_non_zero_rewards),
    (NOT, but(divisor=lambda mask: mask.sum(1) * (1 + (mask.sum(1) == 5)))),
    (NOT, but(counts=lambda mask: mask.sort(1, descending=True).values)),
    (NOT, temperature_of_0_7),
    (NOT, FrozenWeight()),
]


@pytest.mark.parametrize(("verdict", "loss"), PAPER + MISTAKES + PUBLIC)
def test_a_loss_gets_its_verdict(verdict, loss):
    report = identify(loss)
    assert report.variant == verdict
    failed = [result for result in report.vectors if not result.passed]
    if (verdict, loss) in PAPER:
        assert not failed
        assert report.changes == []
    elif verdict == NOT:
        others = not failed and len(report.changes) == 1
        assert others or report.changes == [str(result) for result in failed]
    else:
        starts = [f"to change: {name}: " for name in verdict.split(" + ")]
        advice = zip(report.changes, starts, strict=True)
        assert all(change.startswith(start) and change != start for change, start in advice)


# ---- planted differences -------------------------------------------------------------------------
FIELDS = CHOICES | {"power": POWERS, "gradient": GRADIENTS}
CLIP = TABLE_1[""]._replace(a_neg=0.7, b_neg=1.3)
PLAIN = TABLE_1["plain is"]
PPO = {"limits": PLAIN, "window": PLAIN._replace(b_pos=1.15, a_neg=0.85, b_neg=4)}
SMALLEST = "divided by the length and the batch's tokens"  # the gradient
PLANTED = []
for field, names in FIELDS.items():
    for name in list(names)[1:]:
        PLANTED.append(Combination(**{field: name}))
LOW = TABLE_1[""]._replace(b_neg=0.5)
for limits in [*TABLE_1.values(), LOW, CLIP, CLIP._replace(a_pos=0.5, b_pos=2)]:
    PLANTED.append(Combination(limits))
PLANTED += [Combination(**PPO), Combination(guard=1.0)]
PLANTED.append(Combination(unit="per-token", reward="branch by raw score", mean=SMALLEST))
generator = random.Random(0)
for bounds in 3 * [{}, {"limits": CLIP}, PPO]:
    names = {each: generator.choice(list(FIELDS[each])) for each in ("unit", "reward", "mean")}
    PLANTED.append(Combination(gradient=generator.choice(GRADIENTS), **names, **bounds))


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: " + ".join(planted.differences()))
def test_planted_differences_are_named(planted):
    assert find_differences(planted.loss) == planted.differences()


# ---- what cannot be checked ----------------------------------------------------------------------
REFUSED = {  # the loss -> what the message names
    torch.add: "add",
    lambda a, b, reward, mask: a.sum(): "a, b",
    lambda first_logp, logmu, reward, mask: first_logp.sum(): "first_logp",
    lambda logp, reward, mask: logp.sum(): "example.py",
    lambda logp, logmu, reward, mask, config: logp.sum(): "config",
    lambda logp, ref_logp, reward, mask: logp.sum(): "ref_logp",
    lambda logp, logmu, reward, mask: logp: "(5, 3)",
    lambda logp, logmu, reward, mask: logp.sum().item(): "float",
    lambda logp, logmu, reward, mask: ({}, logp.sum()): "dict",
    lambda logp, logmu, reward, mask: paper(logp.detach(), logmu, reward, mask): "gradient",
    lambda logp, logmu, reward, mask: logp.sum() * float("nan"): "finite",
    lambda logp, logmu, advantages, mask: (advantages * logp).sum(): "RuntimeError",
    lambda logp, logmu, reward, mask: logp.no_such_name: "no_such_name",
}


@pytest.mark.parametrize("loss", REFUSED)
def test_a_loss_that_cannot_be_checked_is_refused_in_a_line(loss):
    with pytest.raises(InputError) as refused:
        identify(loss)
    assert REFUSED[loss] in str(refused.value)
    assert "\n" not in str(refused.value)
