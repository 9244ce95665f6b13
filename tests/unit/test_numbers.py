"""Numbers at their limits: what is not finite, enormous ratios, no tokens."""

import json
import math
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from helpers import plain_batch, random_examples, tiny_model

import topr
from pipeline.methods import dpo_loss, ppo_loss
from pipeline.records import InputError, Sample, read_records

LOSSES = {name: partial(topr.topr_loss, limits=limits) for name, limits in topr.PRESETS.items()}
LOSSES |= {"ppo": partial(ppo_loss, eps=0.2), "dpo": partial(dpo_loss, beta=0.1, denominator=4)}
WITH_LENGTHS = [name for name in LOSSES if name != "dpo"]


def columns(log_ratio, reward, length=(3, 5, 2, 7)):
    logmu = torch.tensor([-7.0, -9.0, -4.0, -11.0], dtype=torch.float64)
    logp = (logmu + torch.tensor(log_ratio, dtype=torch.float64)).requires_grad_()
    return logp, logmu, torch.tensor(reward, dtype=torch.float64), torch.tensor(length)


UNBOUNDED = (
    "off_policy",
    "ppo",
)  # of a negative that has become probable, both take the ratio itself (Eq. 6)


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in UNBOUNDED])
def test_enormous_ratios_leave_loss_and_gradient_finite(name):
    for size in (1e4, -1e4):
        logp, *others = columns([size, -size, size, -size], [1.0, 1.0, -1.0, -1.0])
        loss = LOSSES[name](logp, *others)
        loss.backward()
        assert loss.isfinite()
        assert logp.grad.isfinite().all()
        assert logp.grad.abs().max() <= 1


SPOILED = [
    ("topr", "logmu", math.nan),
    *((name, "logmu", -1e4) for name in UNBOUNDED),
]  # exp(10,000) is infinite
SPOILED += [
    ("topr", what, value)
    for what in ("logits", "reward")
    for value in (math.nan, math.inf, -math.inf)
]


@pytest.mark.parametrize(("name", "spoiled", "value"), SPOILED)
def test_what_is_not_finite_stops_training_before_it_reaches_a_weight(name, spoiled, value):
    model, examples = (
        tiny_model(),
        [replace(example, reward=-1.0) for example in random_examples(2, 2)],
    )
    if spoiled == "logits":
        model.lm_head.weight.data[3, 3] = value
    else:
        examples = [replace(example, **{spoiled: value}) for example in examples]
    before = [weight.clone() for weight in model.parameters()]
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    is_refused = spoiled == "reward" and math.isnan(value)  # by the loss itself
    fault = ValueError if is_refused else FloatingPointError
    with pytest.raises(
        fault, match="NaN is no reward" if is_refused else r"loss is .*, grad_norm is (nan|inf)"
    ):
        next(
            topr.train(
                model, sgd, [topr.Step([plain_batch(examples)], len(examples))], LOSSES[name]
            )
        )
    for old, new in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)


ROW = {
    "prompt": "1 + 1 =",
    "completion": " 2",
    "reward": 1.0,
    "token_ids": [5],
    "token_logmu": [-1.0],
}


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", '"1"', "null"])
@pytest.mark.parametrize(("field", "marked"), [("reward", "?"), ("token_logmu", ["?"])])
def test_a_file_with_such_numbers_is_refused_by_line_and_field(tmp_path, field, marked, value):
    file = tmp_path / "samples.jsonl"
    file.write_text(
        f"{json.dumps(ROW)}\n{json.dumps(ROW | {field: marked})}\n".replace('"?"', value)
    )
    with pytest.raises(InputError, match=rf"samples.jsonl:2: (field {field}|Invalid JSON)"):
        read_records(file, Sample)


@pytest.mark.parametrize(
    ("name", "place"), [*product(LOSSES, range(3)), *product(WITH_LENGTHS, [3])]
)
def test_columns_of_different_shapes_are_refused(name, place):
    columns = [*torch.ones(4, 2)]
    columns[place] = columns[place][:, None]
    for wrong in (columns, torch.ones(4, 0)):
        with pytest.raises(ValueError, match="one number per sequence"):
            LOSSES[name](*wrong, denominator=None)
