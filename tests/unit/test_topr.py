"""The mathematics of topr.py against closed forms, autograd, finite differences and float64.

V1, V2, ... are the vectors of conformance/vectors.py, worked out by hand.
"""

import math
from dataclasses import astuple, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import on_two_ranks

import topr
from conformance import VECTORS, adapted
from conformance.vectors import result_of
from pipeline.runtime.processes import rank, ranks
from topr import PRESETS, Limits, importance_weight, taper, topr_loss, topr_objective

numbers = st.floats(-30, 30) | st.sampled_from([-1000.0, 80.0])
rewards = st.sampled_from([-2.0, -1.0, -0.2, 0.0, 0.2, 1.0, 2.0])
bound = st.just(0.0) | st.floats(1e-3, 3)
bounds = st.tuples(bound, bound | st.just(math.inf)).filter(lambda ab: ab[0] <= ab[1])


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


def rho(x, a, b):
    """Section 3.1, literally, on numbers."""
    if x < a:
        return a * (1 + math.log(x / a))
    return b * (1 + math.log(x / b)) if x > b > 0 else min(x, b)


def test_presets_are_table_1_and_checked_where_they_are_varied():
    assert replace(PRESETS["topr"], b_pos=2) == Limits(1, 2, 0, 1)
    with pytest.raises(ValueError, match="need 0 <= a <= b"):
        replace(PRESETS["topr"], a_neg=5)
    assert {name: astuple(limits) for name, limits in PRESETS.items()} == {
        "topr": (1, 1, 0, 1),
        "tis": (0, 1, 0, 1),
        "sft": (1, 1, 0, 0),
        "reinforce": (1, 1, 1, 1),
        "off_policy": (0, math.inf, 0, math.inf),
    }


@pytest.mark.parametrize(
    ("a", "b"), [(-1, 1), (2, 1), (math.nan, 1), (0, math.nan), (math.inf, math.inf)]
)
def test_bounds_out_of_order_are_refused(a, b):
    for function in (importance_weight, taper) if a < math.inf else ():
        with pytest.raises(ValueError, match="need 0 <= a <= b"):
            function(torch.ones(2), a, b)
    with pytest.raises(ValueError, match=f"limits a_pos = {a:g}, b_pos = {b:g}: need 0 <= a <= b"):
        Limits(a, b, 0, 1)
    with pytest.raises(ValueError, match=f"limits a_neg = {a:g}, b_neg = {b:g}: need 0 <= a <= b"):
        Limits(0, 1, a, b)


def test_bounds_of_a_reward_s_sign():
    """Zero counts as positive, whatever its own sign; shape and precision are the reward's."""
    reward = torch.tensor([[2.0, 0.0, -0.0], [-1e-30, -2.0, 1e-30]])
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        a, b = Limits(0.25, 2, 0.125, math.inf).of_sign(reward.to(dtype))
        assert a.tolist() == [[0.25] * 3, [0.125, 0.125, 0.25]]
        assert b.tolist() == [[2] * 3, [math.inf, math.inf, 2]]
        assert a.dtype == b.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@given(numbers, bounds)
def test_weight_is_the_clipped_ratio_and_never_outside_its_bounds(log_ratio, ab):
    """exp(log(a)) may be a rounding error below a."""
    a, b = ab
    weight = importance_weight(double(log_ratio, -1000, 1000), a, b)
    assert weight.tolist() == pytest.approx([min(max(math.exp(log_ratio), a), b), a, b], rel=1e-12)
    assert ((weight >= a) & (weight <= b)).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_weight_of_extreme_ratios_is_finite_and_keeps_its_precision(dtype):
    log_ratio = torch.tensor([-1000.0, 0.0, 1000.0], dtype=dtype, requires_grad=True)
    weight = importance_weight(log_ratio, 0.5, 2.5)
    assert weight.tolist() == [0.5, 1, 2.5]
    weight.sum().backward()
    assert log_ratio.grad.tolist() == [0, 1, 0]
    assert weight.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert (
        not importance_weight(torch.tensor([-1000.0, 1000.0], dtype=dtype), 0, math.inf)
        .isnan()
        .any()
    )


@given(st.floats(1e-6, 1e6), bounds)
def test_taper_is_the_formula_never_above_the_ratio_and_its_slope_in_the_logarithm_is_the_weight(
    x, ab
):
    log_x = double(math.log(x)).requires_grad_()
    found = taper(log_x.exp(), *ab)
    found.sum().backward()
    assert found.item() == pytest.approx(rho(x, *ab), rel=1e-9, abs=1e-9)
    assert found.item() <= x * (1 + 1e-12)
    assert log_x.grad.item() == pytest.approx(
        importance_weight(log_x.detach(), *ab).item(), rel=1e-9, abs=1e-12
    )


def test_taper_of_nan_is_nan_and_only_of_positive_ratios():
    assert taper(torch.tensor([math.nan]), 0.5, 1).isnan().all()
    for ratio in (0.0, -0.5):
        with pytest.raises(
            ValueError, match=f"ratio = {ratio:g}: a ratio of probabilities is positive"
        ):
            taper(torch.tensor([1.0, ratio]), 0, 1)


@given(
    st.lists(
        st.tuples(numbers, st.floats(-60, 0), rewards, st.integers(1, 9)), min_size=1, max_size=5
    )
)
def test_gradient_of_the_loss_is_that_of_the_objective(rows):
    log_ratio, logp, reward, length = double(*rows).T
    logp.requires_grad_()
    logmu = logp.detach() - log_ratio
    for limits in PRESETS.values():
        [of_loss] = torch.autograd.grad(topr_loss(logp, logmu, reward, length, limits), logp)
        objective = topr_objective(logp - logmu, reward, limits)
        [of_objective] = torch.autograd.grad(-(objective / length).mean(), logp)
        assert objective.isfinite().all()
        torch.testing.assert_close(of_loss, of_objective, rtol=1e-10, atol=1e-300)


@pytest.mark.parametrize("vector", VECTORS)
def test_both_forms_of_the_loss_pass_the_vectors(vector):
    for loss in (adapted(topr_loss, "sequences"), topr.topr_loss_of_tokens):
        result = result_of(vector, loss)
        assert result.status == "pass", result.measured


def test_log_ratios_of_half_precision_are_float32():
    halves = torch.tensor(
        [[-1 - 2**-7], [-(2**-8)]], dtype=torch.bfloat16
    )  # whose difference needs 9 bits
    of_halves, of_floats = (
        topr_loss(*columns, -torch.ones(1), torch.ones(1)) for columns in (halves, halves.float())
    )
    assert torch.equal(of_halves, of_floats)


def of_tokens(seed=0, batch=9, tokens=7):
    """token_logp, token_logmu, reward, mask: ragged, with padding on either side and within."""
    generator = torch.Generator().manual_seed(seed)
    token_logp, token_logmu = -4 * torch.rand(
        2, batch, tokens, dtype=torch.float64, generator=generator
    )
    mask = torch.rand(batch, tokens, generator=generator) < 0.6
    mask[torch.arange(batch), torch.randint(tokens, (batch,), generator=generator)] = (
        True  # one token at least
    )
    reward = double(1, -1, 0, -0.2, 2, -2, -1, -1, 0.2)
    return token_logp.requires_grad_(), token_logmu, reward, mask.long()


def loss_by_loops(token_logp, token_logmu, reward, mask, limits):
    """Algorithm 1 on Python's numbers: the loss, and its gradient in each token_logp."""
    loss, gradient = 0.0, []
    for i, of_completion in enumerate(mask.tolist()):
        chosen = [t for t, is_of_completion in enumerate(of_completion) if is_of_completion]
        ratio = math.exp(sum(token_logp[i, t].item() - token_logmu[i, t].item() for t in chosen))
        a, b = astuple(limits)[:2] if reward[i] >= 0 else astuple(limits)[2:]
        factor = -min(max(ratio, a), b) * reward[i].item() / len(chosen) / len(mask)
        loss += factor * sum(token_logp[i, t].item() for t in chosen)
        gradient.append([factor * is_of_completion for is_of_completion in of_completion])
    return loss, gradient


@pytest.mark.parametrize("limits", [*PRESETS.values(), Limits(0.5, 2, 0.25, 4)])
def test_loss_of_tokens_is_algorithm_1_by_loops(limits):
    batch = of_tokens()
    parts = zip(*(x.split([2, 1, 6]) for x in batch), strict=True)  # micro-batches
    loss = sum(topr.topr_loss_of_tokens(*part, limits, denominator=9) for part in parts)
    loss.backward()
    expected, gradient = loss_by_loops(*batch, limits)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(batch[0].grad, double(*gradient), rtol=1e-12, atol=1e-300)


def under_ddp(batch):
    """The gradient that DDP leaves of a ragged part of the batch on each rank, by what `denominator` is."""
    token_logp, *others = (x.detach() for x in batch)
    part, gradients = slice(0, 6) if rank() == 0 else slice(6, None), []
    for denominator in (len(token_logp), len(token_logp) / ranks()):
        model = torch.nn.Linear(len(token_logp), token_logp.shape[1], bias=False).double()
        model.weight.data = token_logp.T.contiguous()
        rows = torch.eye(len(token_logp), dtype=torch.float64)[
            part
        ]  # of which the model makes the part's token_logp
        parallel = torch.nn.parallel.DistributedDataParallel(
            model
        )  # which reduces gradients while it is held
        topr.topr_loss_of_tokens(
            parallel(rows), *(x[part] for x in others), denominator=denominator
        ).backward()
        gradients.append(model.weight.grad.T)
    return gradients


def test_processes_that_average_want_a_denominator_divided_by_their_number(tmp_path):
    batch = of_tokens()
    topr.topr_loss_of_tokens(*batch).backward()
    averaged, right = on_two_ranks(under_ddp, tmp_path, [x.detach() for x in batch])
    torch.testing.assert_close(right, batch[0].grad)
    torch.testing.assert_close(averaged, batch[0].grad / 2)


@pytest.mark.parametrize("filler", [-50.0, math.inf, math.nan])
def test_what_stands_outside_the_mask_changes_no_bit(filler):
    found = []
    for is_spoiled in (False, True):
        token_logp, token_logmu, reward, mask = of_tokens()
        spoiled = [
            torch.where((mask == 0) & is_spoiled, filler, x.detach())
            for x in (token_logp, token_logmu)
        ]
        loss = topr.topr_loss_of_tokens(spoiled[0].requires_grad_(), spoiled[1], reward, mask)
        loss.backward()
        found.append((loss, spoiled[0].grad))
    for clean, spoiled in zip(*found, strict=True):
        assert torch.equal(clean, spoiled)


def test_masks_of_every_type_but_empty_ones_and_half_precision():
    token_logp, token_logmu, reward, mask = of_tokens()
    exact = topr.topr_loss_of_tokens(token_logp, token_logmu, reward, mask, PRESETS["topr"])
    for same in (mask, mask.bool(), mask.float(), mask.to(torch.uint8)):
        assert torch.equal(topr.topr_loss_of_tokens(token_logp, token_logmu, reward, same), exact)
    for limits in ("topr", (1, 1, 0, 1)):
        with pytest.raises(TypeError, match="need Limits"):
            topr.topr_loss_of_tokens(token_logp, token_logmu, reward, mask, limits)
    with pytest.raises(ValueError, match=r"reward = .*: NaN is no reward"):
        topr.topr_loss_of_tokens(token_logp, token_logmu, reward * math.nan, mask)
    with pytest.raises(ValueError, match="length = 0: a completion has at least one token"):
        topr.topr_loss_of_tokens(token_logp, token_logmu, reward, mask.tril(-1))
    halves = [x.detach().bfloat16() for x in (token_logp, token_logmu)]
    found = topr.topr_loss_of_tokens(*halves, reward.float(), mask)
    assert found.dtype == torch.float32
    # Summed in float32, it is the loss of the halves to float32's precision.
    torch.testing.assert_close(
        found.double(),
        topr.topr_loss_of_tokens(*(x.double() for x in halves), reward, mask),
        rtol=1e-5,
        atol=1e-6,
    )


@given(st.floats(0.01, 0.99), st.floats(-1, 1))
def test_proportion_is_the_share_of_weight_and_its_inverse_undoes_it(p, c):
    p_tilde = topr.effective_proportion(p, c)
    assert p_tilde == pytest.approx(p * (1 - c) / (p * (1 - c) + (1 - p) * (1 + c)))
    assert topr.baseline_for_proportion(p, p_tilde) == pytest.approx(c, abs=1e-9)


@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        (topr.effective_proportion, (0, 0), "p = 0"),
        (topr.effective_proportion, (1.0, 0), "p = 1"),
        (topr.effective_proportion, (math.nan, 0), "p = nan"),
        (topr.effective_proportion, (0.5, 1.1), "c = 1.1"),
        (topr.effective_proportion, (double(0.5, 2.0), 0), "p = "),
        (topr.baseline_for_proportion, (0, 0.5), "p = 0"),
        (topr.baseline_for_proportion, (0.5, 1.5), "p_tilde = 1.5"),
    ],
)
def test_shares_and_baselines_out_of_range_are_named(function, arguments, name):
    with pytest.raises(ValueError, match=name):
        function(*arguments)
