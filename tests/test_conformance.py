"""The checker names each variant, alone and in pairs, under changes that make no difference; its vectors can fail."""

import json
import math
import re
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.functional import pad

from examples.topr_in_trl import loss as in_trl
from pipeline.methods import ppo_loss
from topr import Limits, topr_loss, topr_loss_of_tokens
from topr_conformance import VARIANTS, VECTORS, Hypothesis, compare, identify, oracle, variants
from topr_conformance import __main__ as command
from topr_conformance.losses import LossInputs, adapted, push, total
from topr_conformance.variants import paper, tapered, varied
from topr_conformance.vectors import _ragged, result_of


def disguised(loss):
    """A small multiple of the loss, on sequences in another order and padded on both sides."""

    def same(*inputs):
        order = torch.randperm(
            len(inputs[0]), generator=torch.Generator().manual_seed(len(inputs[0]))
        )
        p, m, reward, mask = (column[order] for column in inputs)
        return 1e-3 * loss(*(pad(x, (2, 2), value=-7.0) for x in (p, m)), reward, pad(mask, (2, 2)))

    return same


def in_one_precision(dtype):
    """The paper's loss with a product of matrices, which takes this precision only."""
    return lambda *inputs: (
        paper(*inputs) + 0 * (inputs[3] @ torch.ones(inputs[3].shape[1], dtype=dtype)).sum()
    )


def in_bfloat16(loss, then=torch.bfloat16):
    return lambda *inputs: loss(*(column.bfloat16().to(then) for column in inputs))


def blind(loss):
    """The loss if it takes padding for tokens."""
    return lambda p, m, r, mask: loss(p, m, r, torch.ones_like(mask))


def rewarded(change):
    return lambda p, m, r, mask: paper(p, m, change(r), mask)


kept = {}  # old log-probabilities; mask and branch are those of each call
LOSSES = (
    VARIANTS
    | {  # combinations that public code contains, and limits that are hard to tell apart
        "tempered + length off by +1": Hypothesis(power=0.5, aggregation="length off by +1").loss,
        "per-token + frozen weight": Hypothesis(
            unit="per-token", frozen=("logp", "mask", "reward")
        ).loss,
        "frozen weight + token mean": Hypothesis(
            frozen=("logp", "mask"), aggregation="token mean"
        ).loss,
        "geometric mean + no stop-gradient": Hypothesis(
            unit="geometric mean", stops_gradient=False
        ).loss,
        "tis + negatives count 0.5 times": Hypothesis(Limits(0, 1, 0, 1), negatives=0.5).loss,
        "clip 0..infinity": Hypothesis(Limits(1, 1, 0, math.inf)).loss,
        "clip 0.9997..1.0004": Hypothesis(Limits(1, 1, 0.9997, 1.0004)).loss,
        "clip 0.0001..1": Hypothesis(Limits(1, 1, 1e-4, 1)).loss,
        "clip 0..0.5 on positives, 0..1 on negatives": Hypothesis(
            Limits(0, 0.5, 0, 1)
        ).loss,  # weight 1/2 on-policy
    }
)
[UNMASKED] = [name for name in VARIANTS if "unmasked" in name]
ROUNDED = (
    "per-token",
    "plain is",
    "tempered",
    "clip 0.8..1.2",
    "token mean",
    "branch by raw score",
    UNMASKED,
)
NAMED = [
    *((name, make()) for name, make in LOSSES.items()),
    *((name, disguised(make())) for name, make in VARIANTS.items() if name != UNMASKED),
    ("paper", paper),
    ("paper", disguised(paper)),
    ("paper", variants.objective),
    ("paper", in_trl),
    ("paper", lambda *inputs: 512 * len(inputs[2]) * paper(*inputs)),
    ("paper", in_one_precision(torch.float32)),
    (
        "clip 0.8..1.2",
        varied(lambda p, m, mask: total(p.float() - m.float(), mask).exp().clamp(0.8, 1.2)),
    ),
    (
        "frozen weight",
        varied(lambda p, m, mask: tapered(kept.setdefault("logp", p.detach()), m, mask)),
    ),
    (
        f"token mean + {UNMASKED.split(' + ', 1)[1]} + normalised reward",
        blind(rewarded(lambda r: r / r.std())),
    ),
    (f"no stop-gradient + {UNMASKED}", blind(variants.no_stop_gradient)),
    (f"geometric mean + {UNMASKED}", blind(variants.geometric_mean)),
    (
        "batch-mean baseline + token mean",
        lambda p, m, r, o: variants.token_mean(p, m, r.sub_(r.mean()), o),
    ),
    (
        "per-token",
        lambda logp, logmu, reward, is_in_len: variants.per_token(logp, logmu, reward, is_in_len),
    ),
    ("bfloat16", in_bfloat16(paper)),
    ("bfloat16", in_one_precision(torch.bfloat16)),
    *(
        (f"{x} + bfloat16", in_bfloat16(LOSSES[x](), then))
        for x in ROUNDED
        for then in (torch.float32, torch.bfloat16)
    ),
]


def apart(*inputs):
    """The paper's loss of positives and that of the others, each a mean of its own."""
    sides = (inputs[2] > 0, inputs[2] <= 0)
    return sum(paper(*(column[rows] for column in inputs)) for rows in sides if rows.any())


ODD = {
    "counted apart": apart,
    "explicit mu": varied(
        lambda p, m, mask: (total(p, mask).exp() / (total(m, mask).exp() + 1e-12)).clamp(max=1)
    ),
    "exp then clip": varied(
        lambda p, m, mask: total(p - m, mask).exp() - (total(p - m, mask).exp() - 1).clamp(min=0)
    ),
    "recomputed": lambda logp, logmu, reward, mask: paper(logp, logp.detach(), reward, mask),
    "per-token, blind": blind(variants.per_token),
    "weights 0.1 % larger": varied(lambda *i: 1.001 * tapered(*i)),
    "padding x 0.001": lambda p, m, r, mask: paper(p, m, r, mask) + 1e-3 * (p * (1 - mask)).sum(),
    "padding in weights": varied(
        lambda p, m, mask: tapered(p + 1e-7 * (p * (1 - mask)).sum(1)[:, None], m, mask)
    ),
}


def cut(of_logp, of_mask):
    """The paper's loss of some columns of the log-probabilities and of the mask."""
    return lambda p, m, r, mask: paper(p[:, of_logp], m[:, of_logp], r, mask[:, of_mask])


def plus(term, loss=paper):
    """The loss, and a term of each token's log pi and log mu: its mean over tokens, then over completions."""
    return lambda p, m, r, mask: (
        loss(p, m, r, mask) + 0.1 * (total(term(p, m), mask) / mask.sum(1)).mean()
    )


def limited(*limits):
    return partial(topr_loss_of_tokens, limits=Limits(*limits))


def surrogate(positive, negative):
    """The mean of R / length times a term for each sign of R, a function of the ratio and of log pi."""

    def loss(p, m, r, mask):
        inputs = total(p - m, mask).exp(), total(p, mask)
        return -(torch.where(r < 0, negative(*inputs), positive(*inputs)) * r / mask.sum(1)).mean()

    return loss


def verl(old_log_prob, log_prob, advantages, response_mask, config=None):
    """As verl calls its losses: advantages (B, T), a mask of booleans; it returns metrics, too."""
    p, m = (x.masked_fill(~response_mask, 0) for x in (log_prob, old_log_prob))
    return paper(p, m, advantages[:, 0], response_mask), {"metric": 0.0}


def packed(logp, logmu, reward, lengths):
    rows = torch.arange(len(lengths)).repeat_interleave(lengths)
    p, m = (torch.zeros_like(reward).index_add(0, rows, x) for x in (logp, logmu))
    return topr_loss(p, m, reward, lengths)


def of_tokens(p, m, r, mask):
    return -(tapered(p, m, mask).where(r < 0, 1).detach() * r)[:, None] * p


def normalised(p, m, r, mask):
    return paper(p, m, r, mask) / tapered(p, m, mask).where(r < 0, 1).detach().mean()


FORMS = [  # the variant, the form that is recognised, the loss
    ("paper", "arguments by name + advantages + boolean mask + first output", verl),
    (
        "paper",
        "arguments by name",
        lambda old_log_prob, log_prob, adv, mask: paper(log_prob, old_log_prob, adv, mask),
    ),
    (
        "paper",
        "arguments by name + sequences",
        lambda reward, mu, logp, n_tok: topr_loss(logp, mu, reward, n_tok),
    ),
    ("per-token", "advantages", lambda p, m, r, mask: variants.per_token(p, m, r[:, 0], mask)),
    (
        "unknown",
        "sequences",
        lambda p, m, r, n_tok: -(r * p * (p - m).sigmoid().detach() / n_tok).mean(),
    ),
    ("paper", "time first", lambda p, m, r, mask: paper(p.T, m.T, r, mask.T)),
    (
        "paper",
        "boolean mask",
        lambda p, m, r, mask: paper(p.where(mask, 0), m.where(mask, 0), r, mask),
    ),
    ("paper", "integer mask", lambda p, m, r, mask: paper(p, m, r, torch.arange(2)[mask])),
    ("paper", "packed", packed),
    (
        "paper",
        "cumulative lengths + packed",
        lambda p, m, r, cu_seqlens: packed(p, m, r, cu_seqlens.diff()),
    ),
    (
        "paper",
        "one dictionary",
        lambda x: paper(x["logp"], x["old_logp"], x["advantages"], x["completion_mask"]),
    ),
    ("paper", "output 'loss'", lambda *inputs: {"loss": paper(*inputs)}),
    (
        "paper",
        "mean over completions",
        lambda *inputs: total(of_tokens(*inputs), inputs[3]) / inputs[3].sum(1),
    ),
    ("paper", "tokens", of_tokens),
]


@pytest.mark.parametrize(("variant", "form", "loss"), FORMS)
def test_a_loss_in_another_form_is_called_in_it_and_the_form_is_said(variant, form, loss):
    report = identify(loss)
    assert (report.variant, report.adapter) == (variant, form)
    assert (compare(adapted(loss, form), 50) is None) == (variant == "paper")


WRONG = {  # 40 of an engineer's mistakes, then others: the verdict, or by what an unknown one is told; a word of advice
    "token-level ratio": (variants.per_token, "per-token", "sum logp - logmu"),
    "geometric mean": (variants.geometric_mean, "geometric mean", "divide the loss"),
    "both signs clipped": (limited(0, 1, 0, 1), "tis", "(reward >= 0) the weight 1"),
    "positives cut at 1": (
        surrogate(*[lambda w, p: w.clamp(max=1).detach() * p] * 2),
        "tis",
        "the weight 1",
    ),
    "gradient of the clip": (
        surrogate(lambda w, p: p, lambda w, p: w.clamp(max=1)),
        "V4: ",
        "times log pi",
    ),
    "not detached": (variants.no_stop_gradient, "no stop-gradient", "detach"),
    "no length": (variants.sequence_sum, "sequence sum", "its own number of tokens"),
    "baseline after the sign": (
        variants.branch_by_raw_score,
        "branch by raw score",
        "after the baseline",
    ),
    "sign flipped": (
        limited(0, 1, 1, 1),
        "clip 0..1 on positives, 1..1 on negatives",
        "signs are exchanged",
    ),
    "over std": (rewarded(lambda r: r / r.std()), "normalised reward", "standard deviation"),
    "GRPO": (
        rewarded(lambda r: (r - r.mean()) / r.std()),
        "batch-mean baseline + normalised reward",
        "deviation",
    ),
    "log mu in bfloat16": (
        varied(lambda p, m, o: tapered(p, m.bfloat16().to(p.dtype), o)),
        "bfloat16",
        "in float32",
    ),
    "log-ratio in bfloat16": (
        varied(lambda p, m, o: tapered(p.bfloat16(), m, o).float()),
        "bfloat16",
        "in float32",
    ),
    "first token cut": (
        cut(slice(1, None), slice(1, None)),
        "token missing at the start",
        "shift logits",
    ),
    "mask off by one": (cut(slice(-1), slice(1, None)), "token missing at the end", "shift logits"),
    "prompt in the length": (
        varied(length=lambda o: o.sum(1) + 3),
        "V9: ",
        "its own number of tokens",
    ),
    "over the width": (
        varied(length=lambda o: o.shape[1]),
        "divided by the longest length",
        "not by the width",
    ),
    "over the longest": (
        varied(length=lambda o: o.sum(1).max()),
        "divided by the longest length",
        "by the longest",
    ),
    "guards at 20": (
        varied(lambda p, m, o: total((p - m).clamp(-20, 20), o).clamp(-20, 0).exp()),
        "paper",
        "",
    ),
    "tokens clipped": (
        varied(lambda p, m, o: tapered((p - m).clamp(-2, 2), 0, o)),
        "V6: ",
        "single tokens",
    ),
    "zeros negative": (
        rewarded(lambda r: r.where(r != 0, -1)),
        "zero rewards as negatives",
        "leave a reward of 0",
    ),
    "entropy": (plus(lambda p, m: p), "extra term", "an entropy"),
    "k3": (plus(lambda p, m: torch.expm1(m - p) - (m - p)), "extra term", "a KL"),
    "advantages clipped at 1": (
        rewarded(lambda r: r.clamp(-1, 1)),
        "clipped reward",
        "do not clip the reward",
    ),
    "advantages clipped at 5": (
        rewarded(lambda r: r.clamp(-5, 5)),
        "clipped reward",
        "do not clip the reward",
    ),
    "PPO's positives": (
        surrogate(lambda w, p: w.clamp(max=1.2), lambda w, p: w.detach() * p),
        "V4: ",
        "PPO's min()",
    ),
    "DAPO": (variants.token_mean, "token mean", "its own number of tokens"),
    "Dr.GRPO": (varied(length=lambda o: 1024), "sequence sum", "its own number of tokens"),
    "padding averaged": (
        lambda *i: of_tokens(*i).mean(),
        UNMASKED.replace("ratio + unmasked in the ", ""),
        "number",
    ),
    "minus missing": (lambda *i: -paper(*i), "it pushes an on-policy positive down: ", "minus"),
    "probabilities": (
        varied(lambda p, m, o: (total(p, o).exp() / total(m, o).exp()).clamp(max=1)),
        "V5: ",
        "exp",
    ),
    "log mu recomputed": (ODD["recomputed"], "naive reinforce", "log mu from the samples"),
    "GSPO": (
        adapted(lambda p, m, r, n: ppo_loss((p - m) / n, 0 * p, r, n / n), "sequences"),
        "V6: ",
        "PPO's min()",
    ),
    "dual clip": (
        surrogate(lambda w, p: w.clamp(max=1.2), lambda w, p: w.clamp(0.8, 3)),
        "V6: ",
        "PPO's min()",
    ),
    "weight at least 0.1": (limited(1, 1, 0.1, 1), "clip 0.1..1", "[0, 1] elsewhere"),
    "negatives count less": (
        varied(lambda *i: 0.3 * tapered(*i)),
        "negatives count 0.3 times",
        "the factor",
    ),
    "weights over their mean": (normalised, "normalised weights", "by their mean"),
    "mean over non-zero": (
        lambda *i: paper(*i) / (i[2] != 0).double().mean(),
        "mean over non-zero rewards",
        "of 0",
    ),
    "log mu at 0.7": (
        lambda p, m, *i: paper(p, m / 0.7, *i),
        "scaled log-probabilities (logmu x 1.429)",
        "one temp",
    ),
    "sigmoid": (
        varied(lambda p, m, o: 2 * total(p - m, o).clamp(max=0).sigmoid()),
        "V6: ",
        "no other function",
    ),
    "hard cut": (
        varied(lambda *i: tapered(*i) * (tapered(*i) > 0.5)),
        "V6: ",
        "without a threshold",
    ),
    "sigmoid, half on-policy": (
        varied(lambda p, m, o: total(p - m, o).sigmoid()),
        "V6: ",
        "no other function",
    ),
    "signs of rewards": (
        rewarded(lambda r: (r > 0) * 2.0 - 1),
        "zero rewards as negatives + clipped reward",
        "sign",
    ),
    "negatives normalised": (
        varied(lambda *i: tapered(*i) / tapered(*i).mean()),
        "normalised weights",
        "their mean",
    ),
    "sigmoid, not detached": (
        surrogate(lambda w, p: p, lambda w, p: w / (1 + w) * p),
        "V7: ",
        "detach",
    ),
    "padding in the ratio": (
        varied(lambda p, m, o: tapered(p, m, o + 1)),
        "unmasked in the ratio",
        "align the mask",
    ),
    "the last column is cut": (
        cut(slice(-1), slice(-1)),
        "token missing at the end",
        "shift logits",
    ),
    "temperature": (
        lambda p, *i: paper(p / 0.7, *i),
        "scaled log-probabilities (logp x 1.429)",
        "one temperature",
    ),
    "mu over pi": (varied(lambda p, m, o: tapered(m, p, o)), "inverted ratio", "take logp - logmu"),
    "means apart": (
        apart,
        "separate means of positives and negatives",
        "one mean over all completions",
    ),
    "over the length - 1": (
        varied(length=lambda o: (o.sum(1) - 1).clamp(min=1)),
        "length off by -1",
        "own number",
    ),
    "KL in the reward": (
        lambda p, m, r, o: paper(p, m, r - total(p - m, o).detach(), o),
        "V10: ",
        "within the reward",
    ),
    "each token clipped": (
        varied(lambda p, m, o: total((p - m).clamp(max=0), o).exp()),
        "V2: ",
        "then clip",
    ),
    "a weight of 0 or 1": (
        varied(lambda *i: (tapered(*i) > 0.1).double()),
        "V6: ",
        "without a threshold",
    ),
    "padding on the right": (
        lambda *i: paper(*i[:3], i[3].sort(1, descending=True)[0]),
        "V11: ",
        "align the mask",
    ),
    "length 5 twice": (
        lambda p, m, r, o: paper(p, m, r * (1 + (o.sum(1) == 5)), o),
        "every vector",
        "--random",
    ),
    "GRPO, clipped": (
        rewarded(lambda r: ((r - r.mean()) / (1e-6 + r.std(0, False))).clamp(-1, 1)),
        "V20: ",
        "base",
    ),
    "bfloat16 and more": (
        in_bfloat16(lambda *i: paper(*i) + 1e-4 * i[0].sum()),
        "it computes in bfloat16",
        "float32",
    ),
}


@pytest.mark.parametrize(
    ("loss", "verdict", "word"), [(loss, name, "") for name, loss in NAMED] + [*WRONG.values()]
)
def test_losses_are_named_however_they_are_written_or_what_tells_most_and_what_to_change_is_said(
    loss, verdict, word
):
    report = identify(loss)
    names = report.variant.split(" + ")
    statuses = {result.name: result.status for result in report.vectors}
    assert report.adapter == "none"
    assert len(report.changes) == (0 if report.variant == "paper" else len(names))
    assert word in " ".join(report.changes)
    assert not re.search(r"\b(nan|inf)\b", f"{report.note} {report.changes} {report.table()}")
    if report.variant == "unknown":
        assert report.note.removeprefix("it fails ").startswith(verdict)
        assert all(report.changes)
    else:
        note, power, value = report.note.partition("ratio to the power ")
        assert (report.variant, note, bool(power)) == (verdict, "", "tempered" in verdict)
        assert not power or float(value) == pytest.approx(
            0.5, rel=1e-2 if "bfloat16" in names else 1e-9
        )
        assert all(sentence.partition(": ")[2] for sentence in report.changes)
    if "frozen weight" in names:
        assert statuses.pop("V16") == "fail"
        assert set(statuses.values()) == {"not applicable"}
    elif report.variant == "paper" or "fail" not in statuses.values():
        assert set(statuses.values()) == {"pass"}
        assert (compare(loss, 200) is None) == (report.variant == "paper")


def test_a_completion_that_trl_masks_whole_counts_in_the_mean_without_a_gradient():
    ones = torch.ones(2, 3)
    inputs = LossInputs(
        -ones, -ones, torch.tensor([1.0, -1.0]), torch.tensor([[1.0, 1, 0], [0, 0, 0]])
    )
    assert torch.equal(4 * push(in_trl, inputs), torch.tensor([[0.25, 0.25, 0.0], [0.0, 0.0, 0.0]]))


MEASURED = [  # what stands beside a vector as the value of a variant
    ("V1", "geometric mean", "R w = -0.606531"),
    ("V2", "per-token", "R w = -1, -0.367879"),
    ("V3", "geometric mean", "R w = -0.606531"),
    ("V4", "tis", "R w = 0.0497871; 1; -1"),
    ("V5", "exp then clip", "R w = 0; not a number"),
    ("V6", "clip 0.8..1.2", "R w = -0.8"),
    ("V7", "no stop-gradient", "R w = 0.606531"),
    ("V9", "token mean", "a token of three has 1 of "),
    ("V16", "frozen weight", "weights 0.367879, 0.367879"),
    ("V17", "tempered", "R w = -0.367879"),
    ("V8", "branch by raw score", "push of the last / the first: -3 "),
    ("V10", "naive reinforce", "R w = 0; -0.2"),
    ("V1", "weights 0.1 % larger", "R w = -0.135471"),
    ("V11", "per-token, blind", "gradient changes by 0; on masked positions it reaches 0.0357;"),
    ("V11", "padding x 0.001", "gradient changes by 0; on masked positions it reaches 0.001;"),
    ("V11", "padding in weights", "gradient changes by 4"),
    ("V13", "explicit mu", "R w = -8.7565"),
    ("V20", "counted apart", "of the positives' own gradient 1, of the negatives' 1"),
    ("V22", "counted apart", "negatives' pushes over the positive's: -0.333333"),
]
assert {name for name, *_ in MEASURED} == set(VECTORS)


@pytest.mark.parametrize(("name", "variant", "measured"), MEASURED)
def test_a_variant_gives_what_is_written_beside_the_vector_and_the_paper_s_loss_passes_it(
    name, variant, measured
):
    found = result_of(name, ODD.get(variant) or LOSSES[variant]())
    assert found.status == "fail"
    assert found.measured.startswith(measured)
    assert result_of(name, paper).status == "pass"


def test_random_batches_find_a_difference_and_show_the_smallest():
    draw, shown = torch.Generator().manual_seed(0), compare(variants.token_mean, 100)
    masks = [_ragged(draw).mask for _ in range(30)]  # padded on either side
    assert {(x[:, 0].min().item(), x[:, -1].min().item()) for x in masks} == {
        (0, 1),
        (1, 0),
        (1, 1),
    }
    assert (
        shown
        == compare(variants.token_mean, 100, seed=0)
        != compare(variants.token_mean, 100, seed=1)
    )
    columns = (column.split(" ", 1) for column in shown.splitlines()[1:])
    found = {
        name: torch.tensor(json.loads(numbers), dtype=torch.float64) for name, numbers in columns
    }
    inputs = LossInputs(*(found.pop(name) for name in LossInputs._fields))
    assert inputs.mask.numel() <= 8  # of 1 to 40
    assert found["push"] == pytest.approx(push(variants.token_mean, inputs), abs=1e-6)
    assert found["paper"] == pytest.approx(
        torch.tensor(oracle(inputs)) / len(inputs.reward), abs=1e-6
    )


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda *inputs: 0.0 * paper(*inputs), "has a push of 0"),
        (lambda *inputs: len(inputs[2]) ** 2 * paper(*inputs), "has a push of 1, as one of two 2"),
        (lambda logp, logmu: logp.sum(), "on an on-policy positive it raised TypeError"),
        (
            lambda *i: paper(*i) if len(i[2]) < 3 else i.three,
            "\nraised AttributeError: 'tuple' object has no",
        ),
    ],
)
def test_random_batches_need_a_push_up_on_one_positive_and_on_two_and_tell_what_a_loss_raises(
    loss, message
):
    assert message in compare(loss, 100)


@pytest.fixture
def call(monkeypatch, tmp_path):
    """The exit status of the command in a folder with a file of losses; an error message in place of it."""
    own = """
        from topr_conformance import variants
        def odd(p, m, reward, mask): return variants.paper(p, m, reward * (1 + (p.shape == (4, 7))), mask)
        def naive(logp, logmu, reward, mask): return -(reward * logp * mask).sum()
        def cube(logp, *inputs): return logp[None]
        def number(*inputs): return variants.paper(*inputs).item()
        def detached(logp, *inputs): return variants.paper(logp.detach(), *inputs)
        def five(logp, logmu, reward, mask, settings): return naive(logp, logmu, reward, mask)
        def each(logp, logmu, reward, length): return -reward * logp / length
    """
    (tmp_path / "my_losses.py").write_text(textwrap.dedent(own))
    (tmp_path / "my_broken_file.py").write_text("def loss(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["topr-conformance", *map(str, words)])
        with pytest.raises(SystemExit) as done:
            command.main()
        return done.value.code

    return call


PAGE = Path(__file__).parent.with_name("docs") / "internals" / "run_details.md"
FIELDS = dict(
    re.findall(
        r"(?m)^\| `(\S+)` \| (string|integer|list|string or null) \| ", PAGE.read_text("utf-8")
    )
)
TYPES = {"string": str, "integer": int, "list": list, "string or null": str | None}


@pytest.mark.parametrize(
    ("arguments", "adapter", "variant", "note", "is_alike"),
    [
        (["topr:topr_loss_of_tokens", "--random", 200], "none", "paper", "", True),
        (["topr:topr_loss", "--random", 20], "sequences", "paper", "", True),
        (["my_losses:each"], "sequences + mean over completions", "naive reinforce", "", True),
        (["./my_losses.py:odd", "--random", 200], "none", "paper", "", False),
        (
            ["topr_conformance.variants:tempered", "--random", 20],
            "none",
            "tempered",
            "ratio to the power 0.5",
            False,
        ),
    ],
)
def test_the_command_passes_the_paper_s_loss_only_and_writes_the_fields_that_are_described(
    call, capsys, arguments, adapter, variant, note, is_alike
):
    assert call(*arguments, "--out", "report", "--verbose") == (variant != "paper" or not is_alike)
    said = capsys.readouterr().out
    assert ("\nits values were averaged " in said) == (arguments == ["my_losses:each"])
    first, end = re.sub(r"(?m)^(to change|called with|its values).*\n", "", said).split("\n", 1)
    end, _, table = end.partition("V1 ")
    assert first == f"{arguments[0]}: {variant}{f' ({note})' if note else ''}"
    report = json.loads(Path("report/report.json").read_text(encoding="utf-8"))
    for vector in report["vectors"]:
        fields = report | {f"vectors[].{name}": value for name, value in vector.items()}
        assert fields.keys() == FIELDS.keys()
        assert all(isinstance(value, TYPES[FIELDS[name]]) for name, value in fields.items())
    random = arguments[2] if "--random" in arguments else 0
    expected = {
        "loss": arguments[0],
        "adapter": adapter,
        "variant": variant,
        "note": note,
        "random": random,
    }
    assert {name: report[name] for name in expected} == expected
    assert end == (
        f"{report['difference'] or f'{random} random batches agree with Eq. 7'}\n" if random else ""
    )
    assert (report["difference"] is None) == is_alike
    names = [row["name"] for row in report["vectors"]]
    assert names == [line.split()[0] for line in f"V1 {table}".splitlines()] == list(VECTORS)
    assert (report["vectors"][0]["measured"] == "R w = -0.135335") == (variant == "paper")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "say which loss to check, as package.module:function or file.py:function, or --list"),
        (["topr"], "topr: write it as package.module:function or path/file.py:function"),
        (["topr:nothing"], "topr:nothing: topr has no function 'nothing'"),
        (["my_broken_file:loss"], "my_broken_file:loss: cannot be imported: SyntaxError"),
        (
            ["topr:topr_loss", "--out", "my_broken_file.py"],
            "--out my_broken_file.py: File exists; name a folder",
        ),
        (["here/nothing.py:loss"], "here/nothing.py:loss: there is no file here/nothing.py"),
        (["my_losses:cube"], "the loss returned a tensor of shape (1, 177, 6), a scalar"),
        (["my_losses:number"], "the loss returned a float"),
        (["my_losses:detached"], "the loss does not depend on logp: "),
        (
            ["my_losses.py:five"],
            "the loss cannot be called with logp, logmu (B, T), reward (B,), mask (B, T), or in",
        ),
    ],
)
def test_what_cannot_be_checked_is_said_in_a_line(call, arguments, message):
    said = call("--out", "report", *arguments)
    assert said.startswith(f"conformance: {message}")
    assert "\n" not in said
    assert not Path("report").exists()


def test_options(call, monkeypatch, capsys):
    assert call("topr:topr_loss_of_tokens", "--random", -1) == 2
    assert "-1" in capsys.readouterr().err
    assert call("topr:topr_loss_of_tokens") == 0
    assert capsys.readouterr().out == "topr:topr_loss_of_tokens: paper\n"
    monkeypatch.setattr(sys, "argv", ["topr-conformance", "--list"])
    monkeypatch.setattr(
        "signal.signal", lambda *_: None
    )  # which would act on all tests of this process
    command.main()
    assert capsys.readouterr().out == "\n\n".join(VECTORS.values()) + "\n"


def test_a_reader_that_has_seen_enough_of_the_list_is_no_fault():
    listing, pipes = [sys.executable, "-m", "topr_conformance", "--list"], {"stdout": subprocess.PIPE}
    with subprocess.Popen(listing, cwd=PAGE.parents[2], stderr=subprocess.PIPE, **pipes) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
