"""The checker: it names each departure, alone and in pairs, under changes that are none, and its vectors can fail."""

import inspect
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import topr
import topr_example
import toy_bandit as bandit
from conformance import identify as conformance
from conformance import variants as departures
from conformance.identify import compare, identify, oracle, probes
from conformance.variants import DEPARTURES, total
from conformance.vectors import VECTORS, Batch, put
from examples import topr_in_trl
from pipeline import dataset
from pipeline.evaluation import standard_error
from pipeline.models import rows
from pipeline.records import InputError, Sample

ROOT = Path(conformance.__file__).parent
ALL = {"paper": lambda: departures.paper, **DEPARTURES}


def ours(limits=topr.PRESETS["topr"]):
    """`topr.topr_loss` on per-token tensors."""
    return lambda logp, logmu, reward, mask: topr.topr_loss(
        total(logp, mask), total(logmu, mask), reward, mask.sum(1), limits
    )


# ---- what a loss is called ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_every_departure_is_named(name):
    assert identify(ALL[name]()).variant == name


@pytest.mark.parametrize(
    "loss",
    [ours(), departures.objective, topr_example.loss, topr_in_trl.loss, conformance.Hypothesis().loss(probes()[0])],
)
def test_the_paper_s_loss_has_several_forms(loss):
    report = identify(loss)
    assert report.variant == "paper"
    assert {row.status for row in report.vectors} == {"pass", "not applicable"}
    assert compare(loss, 50) is None


@pytest.mark.parametrize(
    ("preset", "name"), [("tis", "tis"), ("off_policy", "plain is"), ("reinforce", "naive reinforce"), ("sft", "sft")]
)
def test_the_rows_of_table_1_are_named(preset, name):
    assert identify(ours(topr.PRESETS[preset])).variant == name


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        ((1, 1, 0.5, 2), "clip 0.5..2"),
        ((1, 1, 0, math.inf), "clip 0..inf"),
        ((0, 5, 0, 5), "clip 0..5 on positives, 0..5 on negatives"),
    ],
)
def test_other_bounds_are_written_as_found(limits, name):
    assert identify(ours(topr.Limits(*limits))).variant == name


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("factor", [1e-3, 512.0])
def test_a_constant_factor_changes_nothing(name, factor):
    loss = ALL[name]()
    assert identify(lambda *batch: factor * loss(*batch)).variant == name


@pytest.mark.parametrize("name", ALL)
def test_the_order_of_a_batch_changes_nothing(name):
    loss = ALL[name]()

    def permuted(*batch):
        order = torch.randperm(len(batch[0]), generator=torch.Generator().manual_seed(len(batch[0])))
        return loss(*(column[order] for column in batch))

    assert identify(permuted).variant == name


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("left", [True, False])
def test_more_padding_changes_nothing(name, left):
    loss = ALL[name]()

    def padded(logp, logmu, reward, mask):
        fill = logp.new_full((len(logp), 2), -7.0)
        columns = [[x, fill] for x in (logp, logmu)] + [[mask, 0 * fill]]
        logp, logmu, mask = (torch.cat(pair[::-1] if left else pair, dim=1) for pair in columns)
        return loss(logp, logmu, reward, mask)

    assert identify(padded).variant == name


def test_a_sum_over_sequences_is_as_good_as_a_mean():
    def summed(logp, logmu, reward, mask):
        return len(reward) * departures.paper(logp, logmu, reward, mask)

    assert identify(summed).variant == "paper"
    assert compare(summed, 50) is None


# ---- pairs, as they occur in public code, written out -------------------------------------------------------------


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
    return departures.paper(logp, logmu, reward - reward.mean(), mask)


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


def in_float32_only(logp, logmu, reward, mask):
    weight = torch.where(reward < 0, total(logp - logmu, mask).clamp(max=0).exp(), 1.0).detach()
    return -(weight * reward * ((logp * mask) @ torch.ones(mask.shape[1])) / mask.sum(1)).mean()


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
    return departures.naive_reinforce(logp, logmu, reward - reward.mean(), mask)


def normalised_by_raw_score(logp, logmu, reward, mask):
    advantage = (reward - reward.mean()) / (reward.std() + 1e-8)
    weight = torch.where(reward < 0, total(logp - logmu, mask).clamp(max=0).exp(), 1.0).detach()
    return -(weight * advantage * total(logp, mask) / mask.sum(1)).mean()


def clip_of(low, high):
    def loss(logp, logmu, reward, mask):
        weight = torch.where(reward < 0, total(logp - logmu, mask).exp().clamp(low, high), 1.0).detach()
        return -(weight * reward * total(logp, mask) / mask.sum(1)).mean()

    return loss


PAIRS = {
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
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_are_named(name):
    assert identify(PAIRS[name]()).variant == name


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (frozen_by_batch(), "frozen weight"),
        (frozen_log_ratio(), "frozen weight"),
        (unmasked_sums, "unmasked"),
        (clipped_in_float32, "clip 0.8..1.2"),
        (in_float32_only, "paper"),
        (masked_mean_over_all_positions, "geometric mean + unmasked"),
    ],
)
def test_other_ways_to_write_them_change_nothing(loss, name):
    assert identify(loss).variant == name


def centred_in_place(logp, logmu, reward, mask):
    reward -= reward.mean()
    return departures.token_mean(logp, logmu, reward, mask)


def per_token_unmasked_differentiated(logp, logmu, reward, mask):
    weight = torch.where(reward[:, None] < 0, (logp - logmu).clamp(max=0).exp(), 1.0)
    return -(weight * reward[:, None] * logp).mean()


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
    ("loss", "name"),
    [
        (centred_in_place, "batch-mean baseline + token mean"),
        (per_token_unmasked_differentiated, "per-token + no stop-gradient + unmasked"),
        (packed_by_running_sums, "paper"),
    ],
)
def test_odd_ways_to_write_them_change_nothing(loss, name):
    assert identify(loss).variant == name


@pytest.mark.parametrize("fill", [(-7.0, -3.0), (-3.0, -7.0)])
def test_whatever_stands_in_padding_a_loss_that_counts_it_is_unmasked(fill):
    def padded(logp, logmu, reward, mask):
        columns = [
            torch.cat([x, x.new_full((len(x), 2), value)], 1) for x, value in ((logp, fill[0]), (logmu, fill[1]))
        ]
        return departures.unmasked(*columns, reward, torch.cat([mask, torch.zeros(len(mask), 2)], 1))

    assert identify(padded).variant == "unmasked"


def test_a_loss_for_one_side_of_padding_is_not_the_paper_s():
    def left_aligned(logp, logmu, reward, mask):
        rows = [
            departures.paper(p[None, :n], m[None, :n], r[None], torch.ones(1, n))
            for p, m, r, n in zip(logp, logmu, reward, mask.sum(1).int().tolist(), strict=True)
        ]
        return torch.stack(rows).mean()

    report = identify(left_aligned)
    assert (report.variant, report.note) == ("unknown", "it changes with the side that is padded")


def test_a_tempered_loss_is_told_its_power():
    assert identify(tempered_token_mean).note == "ratio to the power 0.3"


# ---- what is none of them ----------------------------------------------------------------------------------------


def ppo(logp, logmu, reward, mask):
    return topr.ppo_loss(total(logp, mask), total(logmu, mask), reward, mask.sum(1))


def with_entropy_bonus(logp, logmu, reward, mask):
    return departures.paper(logp, logmu, reward, mask) + 1e-4 * (logp * mask).sum()


def counted_apart(logp, logmu, reward, mask):
    """Positives and negatives averaged each by themselves."""
    parts = [
        departures.paper(logp[chosen], logmu[chosen], reward[chosen], mask[chosen])
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
    return departures.paper(logp, logp.detach(), reward, mask)


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
    assert f"first told by {first}: " in report.note
    assert next(row.name for row in report.vectors if row.status == "fail") == first


def test_an_objective_is_not_a_loss():
    report = identify(lambda *batch: -departures.paper(*batch))
    assert report.variant == "unknown"
    assert "to be maximised" in report.note


def test_what_passes_every_vector_need_not_be_the_paper_s():
    def odd(logp, logmu, reward, mask):  # differs for five tokens and more
        return departures.paper(logp, logmu, reward * torch.where(mask.sum(1) == 5, 2.0, 1.0), mask)

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
        (lambda logp, logmu: logp.sum(), "cannot be called with logp, logmu"),
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
    **DEPARTURES,
    **PAIRS,
    "ppo": lambda: ppo,
    "counted apart": lambda: counted_apart,
    "explicit mu": lambda: with_explicit_mu,
    "exp then clip": lambda: exp_then_clip,
    "recomputed": lambda: against_itself,
}


def vector(name):
    return next(row for row in VECTORS if row.name == name)


@pytest.mark.parametrize("name", [row.name for row in VECTORS if row.applies_to == "loss"])
def test_every_vector_passes_the_paper_and_fails_another(name):
    assert put(vector(name), departures.paper).status == "pass"
    assert put(vector(name), ours()).status == "pass"
    assert "fail" in {put(vector(name), make()).status for make in LOSSES.values()}


@pytest.mark.parametrize(
    ("name", "variant", "measured"),
    [
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
        ("V8", "branch by raw score", "push of row 4 / row 1: -3 "),
        ("V10", "naive reinforce", "R w = 0; -0.2"),
        ("V11", "unmasked", "gradient changes by 0.07"),
        ("V11", "per-token + unmasked", "gradient changes by 0; on masked positions it reaches 0.03"),
        ("V11", "token mean + unmasked", "gradient changes by 0.1"),
        ("V13", "explicit mu", "R w = -8.7565"),
        ("V16", "recomputed", "weights 1, 1"),
        ("V20", "counted apart", "of the positives' own gradient 1, of the negatives' 1"),
        ("V22", "counted apart", "negatives' pushes over the positive's: -0.333333"),
    ],
)
def test_a_variant_gives_what_is_written_beside_the_vector(name, variant, measured):
    found = put(vector(name), LOSSES[variant]())
    assert found.status == "fail"
    assert found.measured.startswith(measured)


def test_a_nan_fails():
    found = put(vector("V5"), exp_then_clip)
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
    sample = Sample(prompt="Q: 1 + 1?\nA:", completion=" The answer is 2.", reward=-1.0)
    scored = dataset.score([sample], lm)
    batch = rows.collate([dataset.encode(scored, lm)], "cpu")
    log_ratio = rows.sequence_logprobs(lm.model, batch) - batch.logmu
    assert topr.importance_weight(log_ratio, 0, 1).item() == pytest.approx(1, abs=1e-5)
    assert math.exp(300 * math.log(0.995)) == pytest.approx(numbers(vector("V18").others)[0], abs=1e-3)


def test_v21_the_interval():
    assert standard_error(0.18, 1, 64) == pytest.approx(numbers(vector("V21").paper)[0], abs=1e-6)


# ---- the oracle --------------------------------------------------------------------------------------------------


def test_the_oracle_is_worked_out_by_hand():
    batch = Batch(
        torch.tensor([[-1.0, -2.0, 99.0], [-3.0, -1.0, -1.0]]),
        torch.tensor([[-1.0, -1.0, -99.0], [-1.0, -1.0, -2.0]]),
        torch.tensor([-0.5, 2.0]),
        torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]),
    )
    weight = 0.36787944  # e^-1
    assert oracle(batch) == [pytest.approx([-0.25 * weight, -0.25 * weight, 0.0]), pytest.approx([2 / 3] * 3)]


def test_random_batches_find_a_departure_and_show_the_smallest():
    shown = compare(departures.token_mean, 100)
    assert shown == compare(departures.token_mean, 100)  # the same seed
    assert shown.splitlines()[1].startswith("logp [[")
    assert shown.count("\n") == 6


@pytest.mark.parametrize("factor", [0.0, -1.0])
def test_random_batches_want_a_push_up(factor):
    assert "has a push of" in compare(lambda *batch: factor * departures.paper(*batch), 5)


def test_random_batches_report_what_a_loss_raises():
    def fragile(logp, logmu, reward, mask):
        if len(reward) == 3:
            raise ValueError("three is too many")
        return departures.paper(logp, logmu, reward, mask)

    assert "three is too many" in compare(fragile, 100)


# ---- form, and the command ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, value in vars(departures).items() if inspect.isfunction(value)])
def test_a_departure_can_be_read_at_a_glance(name):
    if name != "total":
        assert len(inspect.getsource(getattr(departures, name)).splitlines()) <= 10


def command(*arguments, cwd=ROOT):
    return subprocess.run(
        [sys.executable, str(ROOT / "conformance.py"), *map(str, arguments)], capture_output=True, text=True, cwd=cwd
    )


def test_the_command_passes_the_paper_s_loss_only(tmp_path):
    done = command("topr_example:loss", "--random", 20, "--out", tmp_path / "here")
    assert done.returncode == 0, done.stderr
    assert "topr_example:loss: paper" in done.stdout
    assert "20 random batches agree with Eq. 7" in done.stdout
    report = json.loads((tmp_path / "here" / "report.json").read_text(encoding="utf-8"))
    assert (report["variant"], len(report["vectors"]), report["difference"]) == ("paper", 22, None)
    done = command("departures:per_token_and_token_mean")
    assert done.returncode == 1
    assert "departures:per_token_and_token_mean: per-token + token mean" in done.stdout


def test_the_command_takes_losses_from_where_it_is_called_and_adapts_them(tmp_path):
    source = "def loss(logp, logmu, advantages, mask):\n    return -(advantages * logp * mask).sum()\n"
    (tmp_path / "mine.py").write_text(source)
    done = command("mine:loss", "--adapter", "advantages", cwd=tmp_path)
    assert done.returncode == 1
    assert "mine:loss: naive reinforce + sequence sum" in done.stdout
    assert command("mine:loss", "--random", 5, "--adapter", "advantages", cwd=tmp_path).returncode == 1
    assert {path.name for path in tmp_path.iterdir()} <= {"mine.py", "__pycache__"}


def test_a_module_of_the_user_s_that_is_hidden_by_ours_is_not_mistaken(tmp_path):
    (tmp_path / "departures.py").write_text("def paper(logp, logmu, reward, mask):\n    return logp.sum()\n")
    done = command("departures:paper", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("conformance: departures:paper: departures.py is hidden by ")


def test_a_module_that_cannot_be_read_is_said_in_a_line(tmp_path):
    (tmp_path / "broken.py").write_text("def loss(:\n")
    done = command("broken:loss", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("conformance: broken:loss: cannot be imported: SyntaxError")
    assert "Traceback" not in done.stderr


def test_the_list_has_every_vector():
    done = command("--list")
    assert done.returncode == 0
    assert all(f"│ {vector.name} " in done.stdout for vector in VECTORS)


@pytest.mark.parametrize(
    "name", ["topr_example", "topr_example:nothing", "no_such_module:loss", "departures:DEPARTURES"]
)
def test_what_cannot_be_loaded_is_said_in_a_line(name):
    with pytest.raises(InputError, match=name):
        conformance.load(name)


def test_without_a_name_the_command_says_what_it_needs():
    done = command()
    assert done.returncode == 1
    assert done.stderr.strip() == "conformance: say which loss to check, as package.module:function, or --list"
