"""The checker names each variant, alone and in pairs, under changes that make no difference; its vectors can fail."""

import json
import math
import re
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.functional import pad

from conformance import VARIANTS, VECTORS, Hypothesis, compare, identify, oracle, variants
from conformance import __main__ as command
from conformance.losses import ADAPTERS, InputError, LossInputs, adapted, push, total
from conformance.variants import tapered, varied
from conformance.vectors import CASES, result_of
from examples.topr_in_trl import loss as in_trl
from pipeline.methods import ppo_loss
from topr import PRESETS, Limits, topr_loss_of_tokens

ROOT = Path(__file__).resolve().parent.parent


def padded(inputs, sides=(0, 2), fill=(-7.0, -7.0)):
    """More columns of padding, left and right."""
    columns = zip((inputs[0], inputs[1], inputs[3]), (*fill, 0.0), strict=True)
    logp, logmu, mask = (pad(column, sides, value=value) for column, value in columns)
    return LossInputs(logp, logmu, inputs[2], mask)


def disguised(loss):
    """A small multiple of the loss, on sequences in another order and padded on both sides."""

    def same(*inputs):
        order = torch.randperm(len(inputs[0]), generator=torch.Generator().manual_seed(len(inputs[0])))
        return 1e-3 * loss(*padded([column[order] for column in inputs], (2, 2)))

    return same


# By what `identify` says: combinations that public code contains, and limits that are hard to tell apart.
HYPOTHESES = {
    "tempered + token mean": {"power": 0.5, "aggregation": "token mean"},
    "no stop-gradient + unmasked": {"stops_gradient": False, "ratio_padding": "in the sum", "loss_padding": "in both"},
    "per-token + unmasked": {"unit": "per-token", "loss_padding": "in both"},
    "per-token + frozen weight": {"unit": "per-token", "frozen": ("logp", "mask", "reward")},
    "frozen weight + token mean": {"frozen": ("logp", "mask"), "aggregation": "token mean"},
    "tis + unmasked": {"limits": PRESETS["tis"], "ratio_padding": "in the sum", "loss_padding": "in the sum"},
    "geometric mean + unmasked": {"unit": "geometric mean", "ratio_padding": "in the divisor"},
    "geometric mean + clip 0..5 on positives, 0..5 on negatives + no stop-gradient": {
        "unit": "geometric mean", "limits": Limits(0, 5, 0, 5), "stops_gradient": False,
    },
    "clip 0..infinity": {"limits": Limits(1, 1, 0, math.inf)},
    "clip 0.9997..1.0004": {"limits": Limits(1, 1, 0.9997, 1.0004)},
    "clip 0.0001..1": {"limits": Limits(1, 1, 1e-4, 1)},
    "clip 0..0.5 on positives, 0..1 on negatives": {"limits": Limits(0, 0.5, 0, 1)},  # weight 1/2 on-policy
    "clip 0.2..0.5 on positives, 0..0.5 on negatives": {"limits": Limits(0.2, 0.5, 0, 0.5)},
    "clip 2..3 on positives, 0..1 on negatives": {"limits": Limits(2, 3, 0, 1)},
}  # fmt: skip


def in_one_precision(dtype):
    """The paper's loss with a product of matrices, which takes this precision only."""
    return lambda *inputs: variants.paper(*inputs) + 0 * (inputs[3] @ torch.ones(inputs[3].shape[1], dtype=dtype)).sum()


def in_bfloat16(loss, then=torch.bfloat16):
    return lambda *inputs: loss(*(column.bfloat16().to(then) for column in inputs))


kept = {}  # old log-probabilities; mask and branch are those of each call
LOSSES = VARIANTS | {name: Hypothesis(**properties).loss for name, properties in HYPOTHESES.items()}
ROUNDED = ("per-token", "plain is", "tempered", "clip 0.8..1.2", "token mean", "branch by raw score", "unmasked")
ROUNDED += ("clip 0..0.5 on positives, 0..1 on negatives",)
NAMED = [
    *((name, make()) for name, make in LOSSES.items()),
    *((name, disguised(make())) for name, make in VARIANTS.items()),
    ("paper", variants.paper),
    ("paper", disguised(variants.paper)),
    ("paper", variants.objective),
    ("paper", in_trl),
    ("paper", lambda *inputs: 512 * len(inputs[2]) * variants.paper(*inputs)),
    ("paper", in_one_precision(torch.float32)),
    ("paper", varied(lambda logp, logmu, mask: total(logp - logmu, mask).clamp(-20, 0).exp())),
    ("clip 0.8..1.2", varied(lambda p, m, mask: total(p.float() - m.float(), mask).exp().clamp(0.8, 1.2))),
    ("frozen weight", varied(lambda p, m, mask: tapered(kept.setdefault("logp", p.detach()), m, mask))),
    ("unmasked", lambda *inputs: variants.unmasked(*padded(inputs, fill=(-7.0, -3.0)))),
    ("unmasked", lambda *inputs: variants.unmasked(*padded(inputs, fill=(-3.0, -7.0)))),
    ("geometric mean + unmasked", lambda p, m, r, mask: variants.geometric_mean(p, m, r, torch.ones_like(mask))),
    ("batch-mean baseline + normalised reward", lambda p, m, r, o: variants.paper(p, m, (r - r.mean()) / r.std(), o)),
    ("batch-mean baseline + token mean", lambda p, m, r, o: variants.token_mean(p, m, r.sub_(r.mean()), o)),
    ("naive reinforce", adapted(lambda p, m, r, n: -(p * (r / n).repeat_interleave(n)).sum(), "packed")),
    ("naive reinforce", adapted(lambda logp, logmu, reward, mask: -reward[:, None] * logp, "tokens")),
    ("per-token", lambda logp, logmu, reward, is_in_len: variants.per_token(logp, logmu, reward, is_in_len)),
    ("bfloat16", in_bfloat16(variants.paper)),
    ("bfloat16", varied(in_bfloat16(tapered))),
    ("bfloat16", in_one_precision(torch.bfloat16)),
    *((f"{name} + bfloat16", in_bfloat16(LOSSES[name](), torch.float32)) for name in ROUNDED),
    *((f"{name} + bfloat16", in_bfloat16(LOSSES[name]())) for name in ROUNDED),
]


def apart(*inputs):
    """The paper's loss of positives and that of the others, each a mean of its own."""
    sides = (inputs[2] > 0, inputs[2] <= 0)
    return sum(variants.paper(*(column[rows] for column in inputs)) for rows in sides if rows.any())


ODD = {
    "counted apart": apart,
    "counted apart, summed": lambda *inputs: len(inputs[2]) * apart(*inputs),
    "explicit mu": varied(lambda p, m, mask: (total(p, mask).exp() / (total(m, mask).exp() + 1e-12)).clamp(max=1)),
    "exp then clip": varied(lambda p, m, mask: total(p - m, mask).exp() - (total(p - m, mask).exp() - 1).clamp(min=0)),
    "recomputed": lambda logp, logmu, reward, mask: variants.paper(logp, logp.detach(), reward, mask),
}


def cut(of_logp, of_mask):
    """The paper's loss of some columns of the log-probabilities and of the mask."""
    return lambda p, m, r, mask: variants.paper(p[:, of_logp], m[:, of_logp], r, mask[:, of_mask])


def with_kl(loss):
    k3 = lambda p, m, mask: (total((m - p).exp() - (m - p) - 1, mask) / mask.sum(1)).mean()  # noqa: E731
    return lambda p, m, r, mask: loss(p, m, r, mask) + 0.1 * k3(p, m, mask)


UNKNOWN = [  # with the note's beginning
    ("it fails V5: ", ODD["exp then clip"]),
    ("it computes in bfloat16; it fails V1: ", in_bfloat16(lambda *i: variants.paper(*i) + 1e-4 * i[0].sum())),
    ("it computes in bfloat16; it fails V1: ", in_bfloat16(variants.no_stop_gradient)),
    ("it fails V6: ", varied(lambda *i: (tapered(*i) > 0.1).double())),  # 0 and 1 have 8 bits, and are not rounded
    ("it fails V9: ", lambda p, m, r, o: variants.paper(p, m, r * (o.sum(1) > 1), o)),
    ("it changes with the side ", lambda *i: variants.paper(*i[:3], i[3].sort(1, descending=True)[0])),
    ("every vector passes, but", lambda p, m, r, o: variants.paper(p, m, r * (1 + (o.sum(1) == 5)), o)),
]
but_last, but_first = slice(None, -1), slice(1, None)
MISTAKES = {  # those that newcomers tried, then others; what is named, or the vector that an unknown loss is told of
    "positives are clipped too": (partial(topr_loss_of_tokens, limits=Limits(0, 1, 0, 1)), "tis"),
    "the weight is not detached": (variants.no_stop_gradient, "no stop-gradient"),
    "the log-ratio is clipped at -5": (varied(lambda *i: tapered(*i).clamp(min=math.exp(-5))), "clip 0.00673795..1"),
    "padding counts in the ratio": (varied(lambda p, m, mask: tapered(p, m, torch.ones_like(mask))), "unmasked"),
    "the sign is that before the baseline": (variants.branch_by_raw_score, "branch by raw score"),
    "the minus is missing": (lambda *i: -variants.paper(*i), "it pushes an on-policy positive down: "),
    "over the longest length": (varied(length=lambda mask: mask.sum(1).max()), "divided by the longest length"),
    "over the length + 1": (varied(length=lambda mask: mask.sum(1) + 1), "length off by +1"),
    "the mask is shifted by one": (cut(but_last, but_first), "token missing at the end"),
    "the last column is cut": (cut(but_last, but_last), "token missing at the end"),
    "a temperature on log pi": (lambda p, *i: variants.paper(p / 0.7, *i), "scaled log-probabilities (logp x 1.429)"),
    "mu over pi": (varied(lambda p, m, mask: tapered(m, p, mask)), "inverted ratio"),
    "a KL is added": (with_kl(variants.paper), "extra term"),
    "negatives are halved": (varied(lambda *i: 0.5 * tapered(*i)), "negatives count 0.5 times"),
    "positives and negatives have a mean each": (apart, "separate means of positives and negatives"),
    "R = 0 counts as negative": (lambda p, m, r, o: variants.paper(p, m, torch.where(r == 0, -1e-300, r), o), "paper"),
    "the first token is cut": (cut(but_first, but_first), "token missing at the start"),
    "over the length - 1": (varied(length=lambda mask: (mask.sum(1) - 1).clamp(min=1)), "length off by -1"),
    "over the width": (varied(length=lambda mask: mask.shape[1]), "divided by the longest length"),
    "half of log mu": (lambda p, m, *i: variants.paper(p, m / 2, *i), "scaled log-probabilities (logmu x 0.5)"),
    "a KL in the reward": (lambda p, m, r, o: variants.paper(p, m, r - total(p - m, o).detach(), o), "it fails V10: "),
    "PPO's objective": (adapted(ppo_loss, "sequences"), "it fails V6: "),
    "each token is clipped": (varied(lambda p, m, o: total((p - m).clamp(max=0), o).exp()), "it fails V2: "),
    "as public code has it": (with_kl(variants.per_token_and_token_mean), "per-token + token mean + extra term"),
}


@pytest.mark.parametrize(("verdict", "loss"), NAMED + UNKNOWN + [row[::-1] for row in MISTAKES.values()])
def test_losses_are_named_however_they_are_written_or_what_tells_most_and_what_to_change_is_said(verdict, loss):
    report = identify(loss)
    names = report.variant.split(" + ")
    statuses = {result.name: result.status for result in report.vectors}
    assert report.adapter == "none"
    assert len(report.changes) == (0 if report.variant == "paper" else len(names))
    assert not re.search(r"\b(nan|inf)\b", f"{report.note} {report.changes} {report.table()}")
    if report.variant == "unknown":
        assert report.note.startswith(verdict)
        assert all(report.changes)
    else:
        note, power, value = report.note.partition("ratio to the power ")
        assert (report.variant, note, bool(power)) == (verdict, "", "tempered" in verdict)
        assert not power or float(value) == pytest.approx(0.5, rel=1e-2 if "bfloat16" in names else 1e-9)
        assert all(sentence.partition(": ")[2] for sentence in report.changes)
    if "frozen weight" in names:
        assert statuses.pop("V16") == "fail"
        assert set(statuses.values()) == {"not applicable"}
    elif report.variant == "paper" or "fail" not in statuses.values():
        assert set(statuses.values()) == {"pass"}
        assert (compare(loss, 200) is None) == (report.variant == "paper")


def test_where_padding_counts_is_told():
    [change] = identify(MISTAKES["padding counts in the ratio"][0]).changes
    assert change.startswith("unmasked in the ratio: ")


def test_a_completion_that_trl_masks_whole_counts_in_the_mean_without_a_gradient():
    ones = torch.ones(2, 3)
    inputs = LossInputs(-ones, -ones, torch.tensor([1.0, -1.0]), torch.tensor([[1.0, 1, 0], [0, 0, 0]]))
    assert torch.equal(4 * push(in_trl, inputs), torch.tensor([[0.25, 0.25, 0.0], [0.0, 0.0, 0.0]]))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda logp, logmu, reward, mask: -reward[:, None] * logp, r"returned a tensor of shape \(176, 6\), a scalar"),
        (lambda logp, logmu, reward, mask: 1.0, "returned a float"),
        (lambda logp, logmu, reward, mask: reward.sum(), "does not depend on logp"),
        (lambda logp, logmu, r, size: -(r * logp / size).mean(), "--adapter advantages or sequences can call it. Runt"),
    ],
)
def test_what_is_no_loss_is_refused(loss, message):
    with pytest.raises(InputError, match=message):
        identify(loss)


def test_the_weights_of_equation_7_stand_in_a_vector_s_text():
    """[pi/mu]_a^b with the bounds of Section 3.2, written out."""
    for name, case in ((name, case) for name, cases in CASES.items() for case in cases):
        weight = 1 if case.reward >= 0 else min(math.exp(math.fsum(case.log_ratio)), 1)
        assert f"{weight:.6f}".rstrip("0").rstrip(".") in VECTORS[name]


MEASURED = [  # what stands beside a vector as the value of a variant
    ("V1", "geometric mean", "R w = -0.606531"),
    ("V2", "per-token", "R w = -1, -0.367879"),
    ("V3", "geometric mean", "R w = -0.606531"),
    ("V4", "tis", "R w = 0.0497871; 1; -1"),
    ("V5", "geometric mean", "R w = -0.818731; -1"),
    ("V5", "exp then clip", "R w = 0; not a number"),
    ("V6", "clip 0.8..1.2", "R w = -0.8"),
    ("V7", "no stop-gradient", "R w = 0.606531"),
    ("V9", "token mean", "a token of three has 1 of "),
    ("V16", "frozen weight", "weights 0.367879, 0.367879"),
    ("V17", "tempered", "R w = -0.367879"),
    ("V8", "branch by raw score", "push of the last / the first: -3 "),
    ("V10", "naive reinforce", "R w = 0; -0.2"),
    ("V11", "unmasked", "gradient changes by 0.07"),
    ("V11", "per-token + unmasked", "gradient changes by 0; on masked positions it reaches 0.25"),
    ("V13", "explicit mu", "R w = -8.7565"),
    ("V16", "recomputed", "weights 1, 1"),
    ("V20", "counted apart", "of the positives' own gradient 1, of the negatives' 1"),
    ("V20", "counted apart, summed", "of the positives' own gradient 2.5, of the negatives' 1.66667"),
    ("V22", "counted apart", "negatives' pushes over the positive's: -0.333333"),
]
assert {name for name, *_ in MEASURED} == set(VECTORS)


@pytest.mark.parametrize(("name", "variant", "measured"), MEASURED)
def test_a_variant_gives_what_is_written_beside_the_vector_and_the_paper_s_loss_passes_it(name, variant, measured):
    found = result_of(name, ODD.get(variant) or LOSSES[variant]())
    assert found.status == "fail"
    assert found.measured.startswith(measured)
    assert result_of(name, variants.paper).status == "pass"


def test_random_batches_find_a_difference_and_show_the_smallest():
    shown = compare(variants.token_mean, 100)
    assert shown == compare(variants.token_mean, 100, seed=0) != compare(variants.token_mean, 100, seed=1)
    columns = (column.split(" ", 1) for column in shown.splitlines()[1:])
    found = {name: torch.tensor(json.loads(numbers), dtype=torch.float64) for name, numbers in columns}
    inputs = LossInputs(*(found.pop(name) for name in LossInputs._fields))
    assert inputs.mask.numel() <= 8  # of 1 to 40
    assert found["push"] == pytest.approx(push(variants.token_mean, inputs), abs=1e-6)
    assert found["paper"] == pytest.approx(torch.tensor(oracle(inputs)) / len(inputs.reward), abs=1e-6)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda *inputs: 0.0 * variants.paper(*inputs), "has a push of 0"),
        (lambda *inputs: len(inputs[2]) ** 2 * variants.paper(*inputs), "has a push of 1 alone, 2 as one of two"),
        (lambda logp, logmu: logp.sum(), "on an on-policy positive it raised TypeError"),
        (lambda *i: variants.paper(*i) if len(i[2]) < 3 else i.three, "\nraised AttributeError: 'tuple' object has no"),
    ],
)
def test_random_batches_need_a_push_up_on_one_positive_and_on_two_and_tell_what_a_loss_raises(loss, message):
    assert message in compare(loss, 100)


@pytest.fixture
def call(monkeypatch, tmp_path):
    """The exit status of the command in a folder with a file of losses; an error message in place of it."""
    own = """
        from conformance import variants
        def odd(p, m, reward, mask): return variants.paper(p, m, reward * (1 + (p.shape == (4, 7))), mask)
        def naive(logp, logmu, reward, mask): return -(reward * logp * mask).sum()
        def five(logp, logmu, reward, mask, settings): return naive(logp, logmu, reward, mask)
        def means(p, m, r, n_tokens): return variants.geometric_mean(p[:, None], m[:, None], r, n_tokens[:, None])
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


PAGE = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
FIELDS = dict(re.findall(r"(?m)^\| `(\S+)` \| (string|integer|list|string or null) \| ", PAGE))
TYPES = {"string": str, "integer": int, "list": list, "string or null": str | None}


@pytest.mark.parametrize(
    ("arguments", "adapter", "variant", "note", "is_alike"),
    [
        (["topr:topr_loss_of_tokens", "--random", 200], "none", "paper", "", True),
        (["topr:topr_loss", "--random", 20], "sequences", "paper", "", True),
        (["my_losses:means"], "sequences", "geometric mean", "", True),
        (["./my_losses.py:odd", "--random", 200], "none", "paper", "", False),
        (["my_losses:naive", "--adapter", "advantages"], "advantages", "naive reinforce + sequence sum", "", True),
        (["conformance.variants:tempered", "--random", 20], "none", "tempered", "ratio to the power 0.5", False),
    ],
)
def test_the_command_passes_the_paper_s_loss_only_and_writes_the_fields_that_are_described(
    call, capsys, arguments, adapter, variant, note, is_alike
):
    assert call(*arguments, "--out", "report") == (variant != "paper" or not is_alike)
    table, _, end = re.sub(r"(?m)^to change: .*\n", "", capsys.readouterr().out).partition(
        f"{arguments[0]}: {variant}{f' ({note})' if note else ''}\n"
    )
    report = json.loads(Path("report/report.json").read_text(encoding="utf-8"))
    for vector in report["vectors"]:
        fields = report | {f"vectors[].{name}": value for name, value in vector.items()}
        assert fields.keys() == FIELDS.keys()
        assert all(isinstance(value, TYPES[FIELDS[name]]) for name, value in fields.items())
    random = arguments[2] if "--random" in arguments else 0
    expected = {"loss": arguments[0], "adapter": adapter, "variant": variant, "note": note, "random": random}
    assert {name: report[name] for name in expected} == expected
    assert end == (f"{report['difference'] or f'{random} random batches agree with Eq. 7'}\n" if random else "")
    assert (report["difference"] is None) == is_alike
    names = [row["name"] for row in report["vectors"]]
    assert names == [line.split()[0] for line in table.splitlines() if line.startswith("V")] == list(VECTORS)
    assert (report["vectors"][0]["measured"] == "R w = -0.135335") == (variant == "paper")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "say which loss to check, as package.module:function or file.py:function, or --list"),
        (["topr"], "topr: write it as package.module:function or path/file.py:function"),
        (["topr:nothing"], "topr:nothing: topr has no function 'nothing'"),
        (["my_broken_file:loss"], "my_broken_file:loss: cannot be imported: SyntaxError"),
        (["topr:topr_loss", "--out", "my_broken_file.py"], "--out my_broken_file.py: File exists; name a folder"),
        (["here/nothing.py:loss"], "here/nothing.py:loss: there is no file here/nothing.py"),
        (
            ["my_losses.py:five"],
            "the loss cannot be called with logp, logmu (B, T), reward (B,), float mask (B, T); copy",
        ),
    ],
)
def test_what_cannot_be_checked_is_said_in_a_line(call, arguments, message):
    said = call("--out", "report", *arguments)
    assert said.startswith(f"conformance: {message}")
    assert "\n" not in said
    assert not Path("report").exists()


def test_options(call, monkeypatch, capsys):
    assert ("none", *ADAPTERS) == command.ADAPTERS
    assert call("topr:topr_loss_of_tokens", "--random", -1) == 2
    assert "-1" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["topr-conformance", "--list"])
    command.main()
    assert capsys.readouterr().out == "\n\n".join(VECTORS.values()) + "\n"
