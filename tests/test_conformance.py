"""The checker names each variant, alone and in pairs, under changes that make no difference; its vectors can fail."""

import inspect
import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch

import topr
import toy_bandit as bandit
from conformance import VARIANTS, VECTORS, Hypothesis, InputError, LossInputs, compare, identify, load, oracle, variants
from conformance import __main__ as command
from conformance.adapters import ADAPTERS, takes_sequences
from conformance.gradient import push, total
from conformance.identification import probes
from conformance.vectors import result_of
from examples.topr_in_trl import loss as in_trl
from pipeline import dataset
from pipeline.evaluation import standard_error
from pipeline.methods import ppo_loss
from pipeline.models.language_model import collate, token_logprobs
from pipeline.records import Sample

ROOT = Path(__file__).resolve().parent.parent
ALL = {"paper": lambda: variants.paper, **VARIANTS}


def ours(*limits):
    """`topr.topr_loss_of_tokens` with these limits."""
    return lambda *inputs: topr.topr_loss_of_tokens(*inputs, topr.Limits(*limits))


# ---- what a loss is called ---------------------------------------------------------------------------------------


def reordered(*inputs):
    order = torch.randperm(len(inputs[0]), generator=torch.Generator().manual_seed(len(inputs[0])))
    return LossInputs(*(column[order] for column in inputs))


def padded(inputs, left=False, fill=(-7.0, -7.0)):
    """Two more columns of padding, on one side."""
    logp, logmu, reward, mask = inputs
    columns = [torch.full((len(mask), 2), value, dtype=mask.dtype) for value in (*fill, 0.0)]
    pairs = zip((logp, logmu, mask), columns, strict=True)
    logp, logmu, mask = (torch.cat(pair[::-1] if left else pair, dim=1) for pair in pairs)
    return LossInputs(logp, logmu, reward, mask)


CHANGES = {
    "none": lambda loss: loss,
    "larger, padded on the left": lambda loss: lambda *inputs: 512 * loss(*padded(inputs, left=True)),
    "smaller, in another order, padded on the right": lambda loss: (
        lambda *inputs: 1e-3 * loss(*padded(reordered(*inputs)))
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ALL)
def test_every_variant_is_named_also_under_changes_that_make_no_difference(name, change):
    assert identify(CHANGES[change](ALL[name]())).variant == name


def summed(logp, logmu, reward, mask):
    return len(reward) * variants.paper(logp, logmu, reward, mask)


def in_float32_only(logp, logmu, reward, mask):
    weight = torch.where(reward < 0, total(logp - logmu, mask).clamp(max=0).exp(), 1.0).detach()
    return -(weight * reward * ((logp * mask) @ torch.ones(mask.shape[1])) / mask.sum(1)).mean()


def packed_by_running_sums(logp, logmu, reward, mask):
    inside, lengths = mask.bool(), mask.sum(1).long()
    ends = lengths.cumsum(0)
    logp, logmu = (
        torch.cat([x.new_zeros(1), x[inside].cumsum(0)])[torch.stack([ends - lengths, ends])].diff(dim=0)[0]
        for x in (logp, logmu)
    )
    weight = torch.where(reward < 0, (logp - logmu).clamp(-20, 0).exp(), 1.0).detach()
    return -(weight * reward * logp / lengths).mean()


@pytest.mark.parametrize(
    "loss",
    [
        topr.topr_loss_of_tokens,
        takes_sequences(topr.topr_loss),
        variants.objective,
        Hypothesis().loss(probes()[0]),
        in_trl,
        summed,
        in_float32_only,
    ],
)
def test_the_paper_s_loss_has_several_forms(loss):
    report = identify(loss)
    assert (report.variant, report.note) == ("paper", "")
    assert {result.status for result in report.vectors} == {"pass", "not applicable"}
    assert compare(loss, 50) is None


def test_a_completion_that_trl_masks_whole_counts_in_the_mean_without_a_gradient():
    ones = torch.ones(2, 3)
    inputs = LossInputs(-ones, -ones, torch.tensor([1.0, -1.0]), torch.tensor([[1.0, 1, 0], [0, 0, 0]]))
    assert torch.equal(4 * push(in_trl, inputs), torch.tensor([[0.25, 0.25, 0.0], [0.0, 0.0, 0.0]]))


# ---- what public code contains, written out ----------------------------------------------------------------------


def per_token_by_raw_score(logp, logmu, reward, mask):
    weight = torch.where(reward[:, None] < 0, (logp - logmu).clamp(max=0).exp(), 1.0).detach()
    return -((reward - reward.mean()) * total(weight * logp, mask) / mask.sum(1)).mean()


def clipped_and_differentiated(logp, logmu, reward, mask):
    weight = torch.where(reward < 0, total(logp - logmu, mask).exp().clamp(0.8, 1.2), 1.0)
    return -(weight * reward * total(logp, mask) / mask.sum(1)).mean()


def geometric_to_5_differentiated(logp, logmu, reward, mask):
    weight = (total(logp - logmu, mask) / mask.sum(1)).exp().clamp(max=5)
    return -(weight * reward * total(logp, mask) / mask.sum(1)).mean()


def tempered_token_mean(logp, logmu, reward, mask):
    weight = torch.where(reward < 0, (0.3 * total(logp - logmu, mask)).clamp(max=0).exp(), 1.0).detach()
    return -(weight * reward * total(logp, mask)).sum() / mask.sum()


def per_token_unmasked(logp, logmu, reward, mask):
    weight = torch.where(reward[:, None] < 0, (logp - logmu).clamp(max=0).exp(), 1.0).detach()
    return -(weight * reward[:, None] * logp).mean()


def unmasked_in_the_ratio_only(logp, logmu, reward, mask):
    weight = torch.where(reward < 0, (logp - logmu).sum(1).clamp(max=0).exp(), 1.0).detach()
    return -(weight * reward * total(logp, mask)).sum() / mask.sum()


def with_a_mean_baseline(logp, logmu, reward, mask):
    return variants.paper(logp, logmu, reward - reward.mean(), mask)


def frozen_per_token():
    kept = []

    def loss(logp, logmu, reward, mask):
        kept.append((logp - logmu).clamp(max=0).exp().detach()) if not kept else None
        weight = torch.where(reward[:, None] < 0, kept[0], 1.0)
        return -(reward * total(weight * logp, mask)).sum() / mask.sum()

    return loss


def frozen_by_batch():
    """Keeps the weight of each batch of data that it meets, told by its log mu."""
    kept = {}

    def loss(logp, logmu, reward, mask):
        weight = total(logp - logmu, mask).clamp(max=0).exp().detach()
        weight = kept.setdefault((logmu.shape, logmu.sum().item()), weight)
        return -(torch.where(reward < 0, weight, 1.0) * reward * total(logp, mask) / mask.sum(1)).mean()

    return loss


def frozen_log_ratio():
    """Keeps the old log-probabilities; mask and branch are those of each call."""
    kept = []

    def loss(logp, logmu, reward, mask):
        kept.append(logp.detach()) if not kept else None
        weight = torch.where(reward < 0, total(kept[0] - logmu, mask).clamp(max=0).exp(), 1.0)
        return -(weight * reward * total(logp, mask) / mask.sum(1)).mean()

    return loss


def clipped_in_float32(logp, logmu, reward, mask):
    ratio = total(logp.float() - logmu.float(), mask).exp().clamp(0.8, 1.2)
    weight = torch.where(reward < 0, ratio, 1.0).detach()
    return -(weight * reward * total(logp, mask) / mask.sum(1)).mean()


def mean_over_all_positions(logp, logmu, reward, mask):
    weight = torch.where(reward < 0, (logp - logmu).mean(1).clamp(max=0).exp(), 1.0).detach()
    return -(weight * reward * logp.mean(1)).mean()


def masked_mean_over_all_positions(logp, logmu, reward, mask):
    weight = torch.where(reward < 0, ((logp - logmu) * mask).mean(1).clamp(max=0).exp(), 1.0).detach()
    return -(weight * reward * total(logp, mask) / mask.sum(1)).mean()


def unmasked_sums(logp, logmu, reward, mask):
    weight = torch.where(reward < 0, (logp - logmu).sum(1).clamp(max=0).exp(), 1.0).detach()
    return -(weight * reward * logp.sum(1) / mask.sum(1)).mean()


def unmasked_and_differentiated(logp, logmu, reward, mask):
    weight = torch.where(reward < 0, (logp - logmu).sum(1).clamp(max=0).exp(), 1.0)
    return -(weight * reward * logp.mean(1)).mean()


def centred_reinforce(logp, logmu, reward, mask):
    return variants.naive_reinforce(logp, logmu, reward - reward.mean(), mask)


def normalised_by_raw_score(logp, logmu, reward, mask):
    advantage = (reward - reward.mean()) / (reward.std() + 1e-8)
    weight = torch.where(reward < 0, total(logp - logmu, mask).clamp(max=0).exp(), 1.0).detach()
    return -(weight * advantage * total(logp, mask) / mask.sum(1)).mean()


def clip_of(low, high):
    def loss(logp, logmu, reward, mask):
        weight = torch.where(reward < 0, total(logp - logmu, mask).exp().clamp(low, high), 1.0).detach()
        return -(weight * reward * total(logp, mask) / mask.sum(1)).mean()

    return loss


def centred_in_place(logp, logmu, reward, mask):
    reward -= reward.mean()
    return variants.token_mean(logp, logmu, reward, mask)


def per_token_unmasked_differentiated(logp, logmu, reward, mask):
    weight = torch.where(reward[:, None] < 0, (logp - logmu).clamp(max=0).exp(), 1.0)
    return -(weight * reward[:, None] * logp).mean()


def per_token_positives_at_half(logp, logmu, reward, mask):
    ratio = (logp - logmu).exp()
    weight = torch.where(reward[:, None] < 0, ratio.clamp(max=1), ratio.clamp(max=0.5)).detach()
    return -(reward * total(weight * logp, mask)).sum() / mask.sum()


FOUND = {
    "per-token + branch by raw score": lambda: per_token_by_raw_score,
    "clip 0.8..1.2 + no stop-gradient": lambda: clipped_and_differentiated,
    "geometric mean + clip 0..5 on positives, 0..5 on negatives + no stop-gradient": lambda: (
        geometric_to_5_differentiated
    ),
    "tempered + token mean": lambda: tempered_token_mean,
    "per-token + unmasked": lambda: per_token_unmasked,
    "token mean + unmasked": lambda: unmasked_in_the_ratio_only,
    "batch-mean baseline": lambda: with_a_mean_baseline,
    "per-token + frozen weight + token mean": frozen_per_token,
    "geometric mean + unmasked": lambda: mean_over_all_positions,
    "no stop-gradient + unmasked": lambda: unmasked_and_differentiated,
    "naive reinforce + batch-mean baseline": lambda: centred_reinforce,
    "branch by raw score + normalised reward": lambda: normalised_by_raw_score,
    "clip 0.9..1.1": lambda: clip_of(0.9, 1.1),
    "clip 0.9997..1.0004": lambda: clip_of(1 - 3e-4, 1 + 4e-4),
    "clip 0.00673795..1": lambda: clip_of(math.exp(-5), 1),
    "clip 0.0001..1": lambda: clip_of(1e-4, 1),
    "batch-mean baseline + token mean": lambda: centred_in_place,
    "per-token + no stop-gradient + unmasked": lambda: per_token_unmasked_differentiated,
    "clip 0.5..2": lambda: ours(1, 1, 0.5, 2),
    "clip 0..inf": lambda: ours(1, 1, 0, math.inf),
    "clip 0..5 on positives, 0..5 on negatives": lambda: ours(0, 5, 0, 5),
    "clip 0..0.5 on positives, 0..1 on negatives": lambda: ours(0, 0.5, 0, 1),  # an on-policy positive has weight 1/2
    "clip 0.1..0.9 on positives, 0..1 on negatives": lambda: ours(0.1, 0.9, 0, 1),
    "clip 0.2..0.5 on positives, 0..0.5 on negatives": lambda: ours(0.2, 0.5, 0, 0.5),
    "clip 0.5..0.5 on positives, 0..1 on negatives": lambda: ours(0.5, 0.5, 0, 1),
    "clip 2..3 on positives, 0..1 on negatives": lambda: ours(2, 3, 0, 1),
    "per-token + clip 0..0.5 on positives, 0..1 on negatives + token mean": lambda: per_token_positives_at_half,
}
FORMS = [  # other ways to write variants
    (frozen_by_batch, "frozen weight"),
    (frozen_log_ratio, "frozen weight"),
    (lambda: unmasked_sums, "unmasked"),
    (lambda: clipped_in_float32, "clip 0.8..1.2"),
    (lambda: packed_by_running_sums, "paper"),
    (lambda: masked_mean_over_all_positions, "geometric mean + unmasked"),
    (lambda: ours(*topr.PRESETS["tis"]), "tis"),
    (lambda: ours(*topr.PRESETS["off_policy"]), "plain is"),
    (lambda: ours(*topr.PRESETS["reinforce"]), "naive reinforce"),
    (lambda: ours(*topr.PRESETS["sft"]), "sft"),
]


@pytest.mark.parametrize(("make", "name"), [*((make, name) for name, make in FOUND.items()), *FORMS])
def test_what_public_code_contains_is_named(make, name):
    assert identify(make()).variant == name


@pytest.mark.parametrize("fill", [(-7.0, -3.0), (-3.0, -7.0)])
def test_whatever_stands_in_padding_a_loss_that_counts_it_is_unmasked(fill):
    assert identify(lambda *inputs: variants.unmasked(*padded(inputs, fill=fill))).variant == "unmasked"


def test_a_loss_for_one_side_of_padding_is_not_the_paper_s():
    def left_aligned(logp, logmu, reward, mask):
        rows = [
            variants.paper(p[None, :n], m[None, :n], r[None], torch.ones(1, n))
            for p, m, r, n in zip(logp, logmu, reward, mask.sum(1).int().tolist(), strict=True)
        ]
        return torch.stack(rows).mean()

    report = identify(left_aligned)
    assert (report.variant, report.note) == ("unknown", "it changes with the side that is padded")


def test_a_tempered_loss_is_told_its_power():
    assert identify(tempered_token_mean).note == "ratio to the power 0.3"


# ---- bfloat16 ----------------------------------------------------------------------------------------------------


def in_bfloat16(loss, then=torch.bfloat16):
    return lambda *inputs: loss(*(column.bfloat16().to(then) for column in inputs))


def weight_in_bfloat16(logp, logmu, reward, mask):
    weight = total(logp.bfloat16() - logmu.bfloat16(), mask).clamp(max=0).exp()
    weight = torch.where(reward < 0, weight, 1.0).detach()
    return -(weight * reward * total(logp, mask) / mask.sum(1)).mean()


def in_bfloat16_only(logp, logmu, reward, mask):
    weight = torch.where(reward < 0, total(logp - logmu, mask).clamp(max=0).exp(), 1.0).detach()
    summed = (logp * mask) @ torch.ones(mask.shape[1], dtype=torch.bfloat16)
    return -(weight * reward * summed / mask.sum(1)).mean()


ROUNDED = {name: make() for name, make in VARIANTS.items() if name not in ("no stop-gradient", "frozen weight")}
ROUNDED |= {"clip 0..0.5 on positives, 0..1 on negatives": ours(0, 0.5, 0, 1)}


@pytest.mark.parametrize("then", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ROUNDED)
def test_a_variant_in_bfloat16_is_named_with_its_precision(name, then):
    assert identify(in_bfloat16(ROUNDED[name], then)).variant == f"{name} + bfloat16"


@pytest.mark.parametrize("loss", [in_bfloat16(variants.paper), weight_in_bfloat16, in_bfloat16_only])
def test_the_paper_s_loss_in_bfloat16_differs_by_its_precision_alone(loss):
    assert identify(loss).variant == "bfloat16"


def test_what_is_unknown_in_bfloat16_is_said_to_be_rounded():
    for loss in (in_bfloat16(with_entropy_bonus), in_bfloat16(variants.no_stop_gradient)):
        report = identify(loss)
        assert report.variant == "unknown"
        assert "bfloat16" in report.note
    assert "bfloat16" not in identify(with_entropy_bonus).note


def test_coarse_probes_are_exact_in_bfloat16_and_leave_no_log_ratio_near_0():
    for batch in probes(is_coarse=True):
        inside = batch.mask > 0
        log_ratio = batch.logp - batch.logmu
        for exact in (batch.logp, batch.logmu, log_ratio * inside, batch.reward, total(log_ratio, inside)):
            assert torch.equal(exact, exact.bfloat16().double())
        assert log_ratio[inside][1:].abs().min() >= 1 / 8  # the first is on-policy


# ---- one number per sequence -------------------------------------------------------------------------------------


def per_sequence(logp, logmu, reward, length):
    weight = torch.where(reward < 0, (logp - logmu).clamp(max=0).exp(), 1.0).detach()
    return -(weight * reward * logp / length).mean()


def per_sequence_geometric(logp, logmu, reward, n_tokens):
    weight = torch.where(reward < 0, ((logp - logmu) / n_tokens).clamp(max=0).exp(), 1.0).detach()
    return -(weight * reward * logp / n_tokens).mean()


def per_sequence_frozen():
    kept = []

    def loss(logp, logmu, reward, seq_lens):
        kept.append(torch.where(reward < 0, (logp - logmu).clamp(max=0).exp(), 1.0).detach()) if not kept else None
        return -(kept[0] * reward * logp / seq_lens).mean()

    return loss


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (topr.topr_loss, "paper"),
        (per_sequence, "paper"),
        (per_sequence_geometric, "geometric mean"),
        (per_sequence_frozen(), "frozen weight"),
    ],
)
def test_a_loss_of_one_number_per_sequence_is_recognised_by_the_name_of_its_lengths(loss, name):
    report = identify(loss)
    assert (report.variant, report.adapter) == (name, "sequences")
    fixed = identify(takes_sequences(loss))
    assert fixed.adapter == "none"
    assert name == "frozen weight" or (fixed.variant, fixed.vectors) == (name, report.vectors)


def test_a_loss_of_tokens_that_calls_its_mask_lengths_is_called_as_it_is():
    def loss(logp, logmu, reward, lengths_mask):
        return variants.per_token(logp, logmu, reward, lengths_mask)

    report = identify(loss)
    assert (report.variant, report.adapter) == ("per-token", "none")


# ---- what is none of them ----------------------------------------------------------------------------------------


def ppo(logp, logmu, reward, mask):
    return ppo_loss(total(logp, mask), total(logmu, mask), reward, mask.sum(1))


def with_entropy_bonus(logp, logmu, reward, mask):
    return variants.paper(logp, logmu, reward, mask) + 1e-4 * (logp * mask).sum()


def counted_apart(logp, logmu, reward, mask):
    """Positives and negatives averaged each by themselves."""
    parts = [
        variants.paper(logp[chosen], logmu[chosen], reward[chosen], mask[chosen])
        for chosen in (reward >= 0, reward < 0)
        if chosen.any()
    ]
    return sum(parts)


def with_explicit_mu(logp, logmu, reward, mask):
    mu = total(logmu, mask).exp() + 1e-12  # "to be safe"
    weight = torch.where(reward < 0, (total(logp, mask).exp() / mu).clamp(max=1), 1.0).detach()
    return -(weight * reward * total(logp, mask) / mask.sum(1)).mean()


def against_itself(logp, logmu, reward, mask):
    """Takes the present log pi for log mu, as if data were always fresh."""
    return variants.paper(logp, logp.detach(), reward, mask)


def exp_then_clip(logp, logmu, reward, mask):
    ratio = total(logp - logmu, mask).exp()
    weight = torch.where(reward < 0, ratio - (ratio - 1).clamp(min=0), 1.0).detach()
    return -(weight * reward * total(logp, mask) / mask.sum(1)).mean()


@pytest.mark.parametrize(
    ("loss", "first"),
    [(ppo, "V1"), (with_entropy_bonus, "V1"), (counted_apart, "V4"), (exp_then_clip, "V5"), (with_explicit_mu, "V5")],
)
def test_other_losses_are_unknown_and_the_first_vector_that_tells_is_named(loss, first):
    report = identify(loss)
    assert report.variant == "unknown"
    assert f"it fails {first} first: " in report.note
    assert next(result.name for result in report.vectors if result.status == "fail") == first


def test_an_objective_is_not_a_loss():
    report = identify(lambda *batch: -variants.paper(*batch))
    assert report.variant == "unknown"
    assert "to be maximised" in report.note


def test_what_passes_every_vector_need_not_be_the_paper_s():
    def odd(logp, logmu, reward, mask):  # differs for five tokens and more
        return variants.paper(logp, logmu, reward * torch.where(mask.sum(1) == 5, 2.0, 1.0), mask)

    report = identify(odd)
    assert report.variant == "unknown"
    assert "every vector passes" in report.note
    assert "differs from Eq. 7" in compare(odd, 200)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda logp, logmu, reward, mask: -reward[:, None] * logp, r"returned a tensor of shape \(176, 6\), a scalar"),
        (lambda logp, logmu, reward, mask: 1.0, "returned a float"),
        (lambda logp, logmu, reward, mask: reward.sum(), "does not depend on logp"),
        (lambda logp, logmu: logp.sum(), "cannot be called with logp, logmu .*TypeError"),
        (lambda logp, logmu, adv, m: -(adv * logp * m).sum(1).mean(), "--adapter advantages can call it. RuntimeError"),
        (lambda logp, logmu, r, size: -(r * logp / size).mean(), "--adapter advantages or sequences can call it. Runt"),
        (lambda logp, logmu, reward, mask: logp @ logmu, "cannot be called with .*RuntimeError"),
    ],
)
def test_what_is_no_loss_is_refused(loss, message):
    with pytest.raises(InputError, match=message):
        identify(loss)


# ---- vectors -----------------------------------------------------------------------------------------------------


def test_the_vectors_are_v1_to_v22():
    assert [vector.name for vector in VECTORS] == [f"V{i}" for i in range(1, 23)]
    assert all(all(isinstance(text, str) and text for text in vector[:7]) for vector in VECTORS)


LOSSES = {
    **VARIANTS,
    **FOUND,
    "ppo": lambda: ppo,
    "counted apart": lambda: counted_apart,
    "explicit mu": lambda: with_explicit_mu,
    "exp then clip": lambda: exp_then_clip,
    "recomputed": lambda: against_itself,
}


def vector(name):
    return next(vector for vector in VECTORS if vector.name == name)


MEASURED = [  # what stands beside a vector as the value of a variant
    ("V1", "geometric mean", "R w = -0.606531"),
    ("V1", "per-token", "R w = -0.606531"),
    ("V2", "per-token", "R w = -1, -0.367879"),
    ("V3", "geometric mean", "R w = -0.606531"),
    ("V3", "per-token", "R w = -1, -0.22313"),
    ("V4", "tis", "R w = 0.0497871; 1; -1"),
    ("V4", "plain is", "R w = 0.0497871; 7.38906; -7.38906"),
    ("V5", "geometric mean", "R w = -0.818731; -1"),
    ("V6", "clip 0.8..1.2", "R w = -0.8"),
    ("V7", "no stop-gradient", "R w = 0.606531"),
    ("V9", "token mean", "1 of the first's"),
    ("V16", "frozen weight", "weights 0.367879, 0.367879"),
    ("V17", "tempered", "R w = -0.367879"),
    ("V8", "branch by raw score", "push of the last / the first: -3 "),
    ("V10", "naive reinforce", "R w = 0; -0.2"),
    ("V11", "unmasked", "gradient changes by 0.07"),
    ("V11", "per-token + unmasked", "gradient changes by 0; on masked positions it reaches 0.03"),
    ("V11", "token mean + unmasked", "gradient changes by 0.1"),
    ("V13", "explicit mu", "R w = -8.7565"),
    ("V16", "recomputed", "weights 1, 1"),
    ("V20", "counted apart", "of the positives' own gradient 1, of the negatives' 1"),
    ("V22", "counted apart", "negatives' pushes over the positive's: -0.333333"),
]


def test_there_is_a_variant_that_fails_it_for_every_vector_of_a_loss():
    assert {name for name, *_ in MEASURED} == {vector.name for vector in VECTORS if vector.applies_to == "loss"}


@pytest.mark.parametrize(("name", "variant", "measured"), MEASURED)
def test_a_variant_gives_what_is_written_beside_the_vector_and_the_paper_s_loss_passes_it(name, variant, measured):
    found = result_of(vector(name), LOSSES[variant]())
    assert found.status == "fail"
    assert found.measured.startswith(measured)
    assert result_of(vector(name), variants.paper).status == "pass"


def test_a_nan_fails():
    found = result_of(vector("V5"), exp_then_clip)
    assert found.status == "fail"
    assert "nan" in found.measured


def numbers(text):
    return [float(word.strip("(),.;")) for word in text.split() if word.strip("(),.;-").replace(".", "").isdigit()]


def test_v12_the_taper():
    found = [
        topr.taper(x, a, b).item()
        for x, a, b in ((0.5, 0.8, 1.2), (1, 0.8, 1.2), (2, 0.8, 1.2), (3, 0, 1), (0.3, 1, 1))
    ]
    assert found == pytest.approx(numbers(vector("V12").paper), abs=1e-6)


def test_v14_the_baseline():
    pairs = [(0.5, 0.6), (0.1, 0), (0.1, -1), (0.1, -0.8), (0.8, 0.5), (0.9, 0.9)]
    found = [topr.effective_proportion(p, c) for p, c in pairs]
    assert found == pytest.approx(numbers(vector("V14").paper)[:6], abs=1e-6)
    assert [topr.baseline_for_proportion(p, s) for (p, _), s in zip(pairs, found, strict=True)] == pytest.approx(
        [c for _, c in pairs]
    )


def test_v15_a_lone_negative():
    arms = bandit.Bandit(bandit.tensor([0.5, 0.5]), bandit.tensor([-1.0, 0.0]))
    path = bandit.ascend(arms.mu.log(), arms, topr.PRESETS["topr"], lr=1.0, steps=4000, keep=1000)
    assert bandit.gradient(path[-1], arms).abs().max() < 1e-3
    assert bandit.objective(path, arms).max() < 0


def test_v18_log_mu_scored_by_the_trainer(lm):
    [example] = dataset.encode([Sample(prompt="Q: 1 + 1?\nA:", completion=" The answer is 2.", reward=-1.0)], lm)
    steps = dataset.epoch_steps([[example]], batch=1, micro_batch=1)
    [[scored]] = dataset.score([[example]], steps, lm, token_logprobs)
    log_ratio = token_logprobs(lm.model, collate([[scored]])).sum(1) - scored.logmu
    assert topr.importance_weight(log_ratio, 0, 1).item() == pytest.approx(1, abs=1e-5)
    assert math.exp(300 * math.log(0.995)) == pytest.approx(numbers(vector("V18").others)[0], abs=1e-3)


def test_v21_the_interval():
    assert standard_error(0.18, 1, 64) == pytest.approx(numbers(vector("V21").paper)[0], abs=1e-6)


# ---- the oracle --------------------------------------------------------------------------------------------------


def test_the_oracle_is_worked_out_by_hand():
    batch = LossInputs(
        torch.tensor([[-1.0, -2.0, 99.0], [-3.0, -1.0, -1.0]]),
        torch.tensor([[-1.0, -1.0, -99.0], [-1.0, -1.0, -2.0]]),
        torch.tensor([-0.5, 2.0]),
        torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]),
    )
    weight = 0.36787944  # e^-1
    assert oracle(batch) == [pytest.approx([-0.25 * weight, -0.25 * weight, 0.0]), pytest.approx([2 / 3] * 3)]


def test_random_batches_find_a_difference_and_show_the_smallest():
    shown = compare(variants.token_mean, 100)
    assert shown == compare(variants.token_mean, 100)  # the same seed
    assert shown != compare(variants.token_mean, 100, seed=1)
    first, *columns = shown.splitlines()
    assert first == "differs from Eq. 7 on this batch:"
    found = {name: json.loads(text) for name, text in (column.split(" ", 1) for column in columns)}
    assert list(found) == [*LossInputs._fields, "push", "paper"]
    inputs = LossInputs(*(torch.tensor(found[name], dtype=torch.float64) for name in LossInputs._fields))
    assert inputs.mask.numel() <= 8  # of 1 to 40
    expected = push(variants.token_mean, inputs), torch.tensor(oracle(inputs)) / len(inputs.reward)
    for name, values in zip(("push", "paper"), expected, strict=True):
        assert torch.tensor(found[name]) == pytest.approx(values, abs=1e-6)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda *inputs: 0.0 * variants.paper(*inputs), "has a push of 0"),
        (lambda *inputs: -variants.paper(*inputs), "has a push of -1"),
        (lambda *inputs: len(inputs[2]) ** 2 * variants.paper(*inputs), "has a push of 1 alone, 2 as one of two"),
        (lambda logp, logmu: logp.sum(), "on an on-policy positive it raised TypeError"),
    ],
)
def test_random_batches_need_a_push_up_on_one_positive_and_on_two(loss, message):
    assert message in compare(loss, 5)


def test_random_batches_report_what_a_loss_raises():
    def fragile(logp, logmu, reward, mask):
        if len(reward) == 3:
            raise ValueError("three is too many")
        return variants.paper(logp, logmu, reward, mask)

    *columns, raised = compare(fragile, 100).splitlines()
    assert raised == "raised ValueError: three is too many"
    assert len(columns) == 5


# ---- form, and the command ---------------------------------------------------------------------------------------


def test_a_variant_can_be_read_at_a_glance():
    found = [value for value in vars(variants).values() if inspect.isfunction(value) and value is not total]
    assert len(found) == len(VARIANTS) + 2  # and the paper's, in two forms
    assert max(len(inspect.getsource(function).splitlines()) for function in found) <= 10


def call(monkeypatch, *arguments):
    """The exit status of the command; an error message in place of it."""
    monkeypatch.setattr(sys, "argv", ["topr-conformance", *map(str, arguments)])
    monkeypatch.setattr(sys, "path", sys.path[:])
    with pytest.raises(SystemExit) as done:
        command.main()
    return done.value.code


def test_the_command_passes_the_paper_s_loss_only(monkeypatch, tmp_path, capsys):
    arguments = ["topr:topr_loss_of_tokens", "--random", 200, "--out", tmp_path / "here"]
    assert call(monkeypatch, *arguments) == 0
    assert capsys.readouterr().out.endswith("\ntopr:topr_loss_of_tokens: paper\n200 random batches agree with Eq. 7\n")
    report = json.loads((tmp_path / "here" / "report.json").read_text(encoding="utf-8"))
    assert (report["variant"], len(report["vectors"]), report["difference"]) == ("paper", 22, None)
    assert report["vectors"][0]["measured"] == "R w = -0.135335"
    name = "conformance.variants:tempered"
    assert call(monkeypatch, name, "--random", 5) == 1
    table, verdict, *difference = capsys.readouterr().out.partition(f"{name}: tempered (ratio to the power 0.5)\n")
    assert [line.split()[0] for line in table.splitlines()] == [vector.name for vector in VECTORS]
    assert verdict
    assert difference[0].startswith("differs from Eq. 7")


FIELDS = re.findall(
    r"^\| `([\w.\[\]]+)` \| (string|integer|list|string or null) \| ",
    (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)
TYPES = {"string": str, "integer": int, "list": list, "string or null": str | None}


@pytest.mark.parametrize(
    ("arguments", "adapter", "variant", "note", "difference"),
    [
        (["topr:topr_loss_of_tokens"], "none", "paper", "", None),
        (["topr:topr_loss", "--random", 20], "sequences", "paper", "", None),
        (["topr:topr_loss", "--adapter", "sequences"], "sequences", "paper", "", None),
        (["conformance.variants:tempered", "--random", 20], "none", "tempered", "ratio to the power 0.5", "differs"),
    ],
)
def test_the_report_has_the_fields_that_are_described(
    monkeypatch, tmp_path, arguments, adapter, variant, note, difference
):
    status = call(monkeypatch, *arguments, "--out", tmp_path)
    assert status == (variant != "paper")
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    vectors = report["vectors"]
    assert [name for name, _ in FIELDS if "." not in name] == list(report)
    assert [name.removeprefix("vectors[].") for name, _ in FIELDS if "." in name] == list(vectors[0])
    for name, kind in FIELDS:
        held = [row[name.removeprefix("vectors[].")] for row in vectors] if "." in name else [report[name]]
        assert all(isinstance(value, TYPES[kind]) for value in held)
    assert (report["loss"], report["adapter"], report["variant"]) == (arguments[0], adapter, variant)
    assert report["note"] == note
    assert report["random"] == (20 if "--random" in arguments else 0)
    assert (report["difference"] or "").startswith(difference or "")
    assert (report["difference"] is None) == (difference is None)
    assert [row["name"] for row in vectors] == [f"V{i}" for i in range(1, 23)]
    assert {row["status"] for row in vectors} <= {"pass", "fail", "not applicable"}


def test_a_loss_that_cannot_be_called_leaves_no_report(monkeypatch, tmp_path):
    assert "cannot be called" in call(monkeypatch, "conformance.adapters:total", "--out", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_loss_is_taken_from_the_current_folder_and_adapted(monkeypatch, tmp_path, capsys):
    source = "def loss(logp, logmu, advantages, mask):\n    return -(advantages * logp * mask).sum()\n"
    (tmp_path / "my_loss_of_advantages.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "my_loss_of_advantages:loss", "--adapter", "advantages") == 1
    assert "my_loss_of_advantages:loss: naive reinforce + sequence sum" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} <= {"my_loss_of_advantages.py", "__pycache__"}


def test_a_loss_that_only_random_batches_catch_does_not_pass(monkeypatch, tmp_path, capsys):
    source = "from conformance import variants\n\ndef loss(logp, logmu, reward, mask):\n"
    source += "    return variants.paper(logp, logmu, reward * (1 + (logp.shape == (4, 7))), mask)\n"
    (tmp_path / "my_odd_loss.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "my_odd_loss:loss") == 0
    assert call(monkeypatch, "my_odd_loss:loss", "--random", 200) == 1
    assert "my_odd_loss:loss: paper\ndiffers from Eq. 7 on this batch:\n" in capsys.readouterr().out


def test_the_example_can_be_copied_and_changed(monkeypatch, tmp_path):
    source = inspect.getsource(inspect.getmodule(load("conformance.example:loss")))
    assert source.count("(logp, logmu, reward, mask)") == 1
    changed = source.replace("(logp, logmu, reward, mask)", "(logp, logmu, reward - reward.mean(), mask)")
    (tmp_path / "my_copy.py").write_text(changed, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    assert identify(load("conformance.example:loss")).variant == "paper"
    assert identify(load("my_copy:loss")).variant == "batch-mean baseline"


def test_every_adapter_is_an_option():
    assert tuple(ADAPTERS) == command.ADAPTERS
    assert ADAPTERS["none"](variants.paper) is variants.paper


def test_the_list_has_every_vector(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["topr-conformance", "--list"])
    monkeypatch.setattr(sys, "path", sys.path[:])
    command.main()
    shown = capsys.readouterr().out.split("\n\n")
    assert [text.split()[0] for text in shown] == [vector.name for vector in VECTORS]
    assert all(len(text.strip().splitlines()) == 5 for text in shown)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "say which loss to check, as package.module:function, or --list"),
        (["topr"], "topr: write it as package.module:function"),
        (["topr:nothing"], "topr:nothing: topr has no function 'nothing'"),
        (["conformance.variants:VARIANTS"], "conformance.variants:VARIANTS: conformance.variants has no function"),
        (["no_such_module:loss"], "no_such_module:loss: cannot be imported: ModuleNotFoundError"),
        (["my_broken_file:loss"], "my_broken_file:loss: cannot be imported: SyntaxError"),
        (["conformance.adapters:total"], "the loss cannot be called with"),
        (["topr:topr_loss_of_tokens", "--out", "my_broken_file.py"], "[Errno 17] File exists: 'my_broken_file.py'"),
    ],
)
def test_what_cannot_be_checked_is_said_in_a_line(monkeypatch, tmp_path, arguments, message):
    (tmp_path / "my_broken_file.py").write_text("def loss(:\n")
    monkeypatch.chdir(tmp_path)
    said = call(monkeypatch, *arguments)
    assert said.startswith(f"conformance: {message}")
    assert "\n" not in said


@pytest.mark.parametrize("arguments", [["topr:topr_loss_of_tokens", "--random", -1], ["x:y", "--adapter", "other"]])
def test_options_that_make_no_sense_are_refused(monkeypatch, capsys, arguments):
    assert call(monkeypatch, *arguments) == 2
    assert str(arguments[2]) in capsys.readouterr().err
