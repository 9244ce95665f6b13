"""Numbers at their limits: what is not finite, enormous ratios, no tokens and a million, one sign only, duplicates."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import random_examples, tiny_model

import topr
import train_gsm8k as gsm8k
from pipeline import dataset
from pipeline.models import rows
from pipeline.records import InputError

LOSSES = {name: lambda *a, limits=limits: topr.topr_loss(*a, limits=limits) for name, limits in topr.PRESETS.items()}
LOSSES |= {"ppo": lambda *a: topr.ppo_loss(*a, eps=0.2), "dpo": lambda *a: dataset.dpo_loss_of_rows(*a, 4, beta=0.1)}


def columns(log_ratio, reward, length=(3, 5, 2, 7)):
    logmu = torch.tensor([-7.0, -9.0, -4.0, -11.0], dtype=torch.float64)
    logp = (logmu + torch.tensor(log_ratio, dtype=torch.float64)).requires_grad_()
    return logp, logmu, torch.tensor(reward, dtype=torch.float64), torch.tensor(length)


UNBOUNDED = ("off_policy", "ppo")  # of a negative that has become probable, both take the ratio itself (Eq. 6)


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in UNBOUNDED])
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_enormous_ratios_leave_loss_and_gradient_finite(name, size):
    logp, *others = columns([size, -size, size, -size], [1.0, 1.0, -1.0, -1.0])
    loss = LOSSES[name](logp, *others)
    loss.backward()
    assert loss.isfinite()
    assert logp.grad.isfinite().all()
    assert logp.grad.abs().max() <= 1


@pytest.mark.parametrize("name", UNBOUNDED)
def test_a_ratio_that_is_no_number_stops_training_before_it_reaches_a_weight(name):
    """exp(10,000) overflows."""
    model, examples = tiny_model(), random_examples(2, 2)
    far = [replace(example, logmu=-1e4, reward=-1.0) for example in examples]
    steps = dataset.Steps([[example] for example in far], 4, 4, "cpu")
    before = [weight.clone() for weight in model.parameters()]
    with pytest.raises(FloatingPointError, match=r"step 1: .*; the weights are of step 0"):
        topr.train(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            steps,
            loss=lambda *a, denominator: LOSSES[name](*a) * len(a[0]) / denominator,
            logprobs=rows.sequence_logprobs,
            max_norm=1.0,
            start_at_mu=None,
        )
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("spoiled", ["logits", "logmu", "reward"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_never_reaches_a_weight(spoiled, value):
    model, examples = tiny_model(), random_examples(2, 2)
    if spoiled == "logits":
        with torch.no_grad():
            model.lm_head.weight[3, 3] = value
    else:
        examples = [replace(example, **{spoiled: value}) for example in examples]
    before = [weight.clone() for weight in model.parameters()]
    steps = dataset.Steps([[example] for example in examples], 4, 4, "cpu")
    with pytest.raises(ArithmeticError, match="step 1: "):
        topr.train(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            steps,
            loss=lambda *a, **k: topr.topr_loss(*a, limits=topr.PRESETS["topr"], **k),
            logprobs=rows.sequence_logprobs,
            max_norm=1.0,
            start_at_mu=0.01,
        )
    for old, new in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)


ROW = {"prompt": "1 + 1 =", "completion": " 2", "reward": 1.0, "token_ids": [5], "token_logmu": [-1.0]}


@pytest.mark.parametrize("field", ["reward", "token_logmu"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", '"1"', "null"])
def test_a_file_with_such_numbers_is_refused_by_line_and_field(tmp_path, field, value):
    good = json.dumps(ROW)
    number = str(ROW[field][0] if field == "token_logmu" else ROW[field])
    bad = good.replace(f'"{field}": {f"[{number}]" if field == "token_logmu" else number}', f'"{field}": @')
    bad = bad.replace("@", f"[{value}]" if field == "token_logmu" else value)
    (tmp_path / "samples.jsonl").write_text(f"{good}\n{bad}\n")
    settings = gsm8k.Settings(samples=tmp_path / "samples.jsonl", out=tmp_path / "run")
    with pytest.raises(InputError, match=rf"samples.jsonl:2: (field {field}|Invalid JSON)"):
        gsm8k.run(settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", LOSSES)
def test_a_completion_without_tokens_is_refused_and_one_with_one_is_not(name):
    batch = columns([0.0] * 4, [1.0, -1.0, 1.0, -1.0], length=[1, 1, 1, 1])
    assert LOSSES[name](*batch).isfinite()
    if name != "dpo":  # which does not look at lengths
        with pytest.raises(ValueError, match="length = 0: a completion has at least one token"):
            LOSSES[name](*columns([0.0] * 4, [1.0, -1.0, 1.0, -1.0], length=[1, 0, 1, 1]))


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "dpo"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_batch_of_one_sign_is_the_mean_of_its_sequences(name, sign):
    """Of four sequences in a batch and of each alone: nothing depends on the other sign's being there."""
    ratios = [0.5, -0.5, 0.05, -2.0]
    logp, *others = columns(ratios, [sign] * 4)
    LOSSES[name](logp, *others).backward()
    for i in range(4):
        alone, *rest = (column[i : i + 1] for column in columns(ratios, [sign] * 4))
        alone = alone.detach().requires_grad_()
        LOSSES[name](alone, *rest).backward()
        assert logp.grad[i].item() == pytest.approx(alone.grad.item() / 4, abs=1e-15)


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "dpo"])
def test_a_duplicate_counts_twice(name):
    logp, *others = columns([0.5, 0.5, -0.5, -0.5], [1.0, 1.0, -1.0, -1.0], length=[3, 3, 5, 5])
    twice = LOSSES[name](logp[[0, 0, 2, 2]], *(column[[0, 0, 2, 2]] for column in others))
    once = LOSSES[name](logp[[0, 2]], *(column[[0, 2]] for column in others))
    assert twice.item() == pytest.approx(once.item(), rel=1e-12)


def test_a_million_tokens_sum_in_float32_to_what_they_sum_to_in_float64():
    """log mu is summed by numpy and log pi by torch: at zero drift the ratio must still be 1."""
    token_logp = np.random.default_rng(0).exponential(size=1_000_000).astype(np.float32) * -1
    exact = math.fsum(token_logp.tolist())
    by_numpy = float(np.sum(token_logp, dtype=np.float32))
    by_torch = torch.from_numpy(token_logp)[None].sum(-1).item()
    print(f"exact {exact:.3f}, numpy {by_numpy - exact:+.4f}, torch {by_torch - exact:+.4f} nats")
    assert abs(by_numpy - exact) < 0.5
    assert abs(by_torch - exact) < 0.5
    assert abs(by_torch - by_numpy) < 0.5
