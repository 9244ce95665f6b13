"""Numbers at their limits: enormous ratios, NaN and infinity, wrong shapes."""

import json
import math
import re
from itertools import product

import pytest
import torch
from unit_helpers import double, flat_weights, plain_batch, random_examples, tiny_llama

import topr
from toprlib.files import read_records
from toprlib.methods import METHODS
from toprlib.records import InputError, Sample

LOSSES = {name: method.loss for name, method in METHODS.items()}
# In a negative that has become probable, both take the ratio as it is (Equation 6, Table 1).
UNBOUNDED = ("off_policy", "ppo")


def four_completions(log_ratio):
    """token_logp, token_logmu, reward, mask: positives at 0 and 2, two tokens each."""
    token_logmu = double([-7.0, -1.0], [-9.0, -2.0], [-4.0, -0.5], [-11.0, -3.0])
    token_logp = (token_logmu + double(log_ratio).T / 2).requires_grad_()
    return token_logp, token_logmu, double(1, -1, 1, -1), torch.ones(4, 2)


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in UNBOUNDED])
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_enormous_ratio_leaves_loss_and_gradient_finite(name, size):
    token_logp, *others = four_completions([size, -size, -size, size])
    loss = LOSSES[name](token_logp, *others)
    loss.backward()
    assert loss.isfinite()
    assert token_logp.grad.isfinite().all()
    assert token_logp.grad.abs().max() <= 1


@pytest.mark.parametrize("name", UNBOUNDED)
def test_unbounded_loss_may_be_infinite_but_not_nan(name):
    token_logp, *others = four_completions([0.0, 1e4, 0.0, 0.0])
    loss = LOSSES[name](token_logp, *others)
    loss.backward()
    assert loss.abs() == math.inf
    assert not token_logp.grad.isnan().any()


# ---- training stops before a weight is spoiled ---------------------------------------------------
def assert_stops_before_update(batch, loss, model):
    before = flat_weights(model)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises((FloatingPointError, ValueError)):
        next(topr.train(model, sgd, [([batch], len(batch.reward))], loss))
    torch.testing.assert_close(flat_weights(model), before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", LOSSES)
def test_bad_reward_or_logits_change_no_weight(name, value):
    batch = plain_batch(random_examples(prompts=2, per_prompt=2))
    batch = batch._replace(reward=double(1, -1, 1, -1))
    model = tiny_llama()
    bad_reward = batch.reward.clone()
    bad_reward[0] = value
    if name != "dpo" or math.isnan(value):  # its rewards only say which one is preferred
        assert_stops_before_update(batch._replace(reward=bad_reward), LOSSES[name], model)
    model.lm_head.weight.data[3, 3] = value
    assert_stops_before_update(batch, LOSSES[name], model)


@pytest.mark.parametrize(("name", "value"), [("topr", math.nan), ("off_policy", -1e4)])
def test_bad_log_mu_changes_no_weight(name, value):
    batch = plain_batch(random_examples(prompts=2, per_prompt=2))
    bad_logmu = batch.token_logmu.clone()
    bad_logmu[1, 0] = value
    batch = batch._replace(token_logmu=bad_logmu, reward=-torch.ones(4))
    assert_stops_before_update(batch, LOSSES[name], tiny_llama())


# ---- arguments -----------------------------------------------------------------------------------
SHAPES = [(4, 3), (4, 3), (4,), (4, 3)]  # token_logp, token_logmu, reward, mask


PLACES = range(len(SHAPES))
OTHER_SHAPES = [(), (4,), (4, 1), (2, 3), (4, 3, 1)]
WRONG = [(i, shape) for i, shape in product(PLACES, OTHER_SHAPES) if shape != SHAPES[i]]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("place", "shape"), WRONG)
def test_wrong_shape_is_rejected(name, place, shape):
    shapes = [*SHAPES[:place], shape, *SHAPES[place + 1 :]]
    inputs = [torch.ones(size) for size in shapes]
    with pytest.raises(ValueError, match=re.escape(str(shape))):
        LOSSES[name](*inputs)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("shape", [(0, 3), (4, 0)])
def test_empty_batch_is_rejected(name, shape):
    values = torch.ones(shape)
    with pytest.raises(ValueError, match=re.escape(str(shape))):
        LOSSES[name](values, values, torch.ones(shape[0]), values)


@pytest.mark.parametrize("name", LOSSES)
def test_empty_completion_is_rejected(name):
    token_logp, token_logmu, reward, mask = four_completions([0.0, 0.0, 0.0, 0.0])
    mask[2] = 0
    with pytest.raises(ValueError, match="mask"):
        LOSSES[name](token_logp, token_logmu, reward, mask)


@pytest.mark.parametrize("name", LOSSES)
def test_reward_of_nan_is_rejected(name):
    token_logp, token_logmu, reward, mask = four_completions([0.0, 0.0, 0.0, 0.0])
    reward[2] = math.nan
    with pytest.raises(ValueError, match="reward"):
        LOSSES[name](token_logp, token_logmu, reward, mask)


# ---- files ---------------------------------------------------------------------------------------
ROW = {
    "prompt": "1 + 1 =",
    "completion": " 2",
    "reward": 1.0,
    "token_ids": [5],
    "token_logmu": [-1.0],
}


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", '"1"', "true"])
@pytest.mark.parametrize("field", ["reward", "token_logmu"])
def test_bad_number_in_a_file_is_named(tmp_path, field, value):
    file = tmp_path / "samples.jsonl"
    placed = "?" if field == "reward" else ["?"]
    bad_line = json.dumps(ROW | {field: placed}).replace('"?"', value)
    file.write_text(f"{json.dumps(ROW)}\n{bad_line}\n")
    with pytest.raises(InputError) as caught:
        read_records(file, Sample)
    assert (caught.value.file, caught.value.line) == (str(file), 2)
    assert caught.value.field is None or caught.value.field.startswith(field)
