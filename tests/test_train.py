"""The training loop: what it computes, what it refuses, and that micro-batches and ranks leave the gradient alone."""

import math
import random
import warnings
from dataclasses import replace

import pytest
import ranks
import torch
from helpers import fit, plain_batch, random_examples, shared_logprobs, tiny_model

import topr
from pipeline import dataset
from pipeline.methods import dpo_loss_of_rows
from pipeline.metrics import check_ratio, step_metrics
from pipeline.models.language_model import collate


def at_mu(model, examples):
    """The examples with log mu as the model has it."""
    logmu = topr.sequence_logprobs(model, plain_batch(examples)).detach().tolist()
    return [replace(example, logmu=value) for example, value in zip(examples, logmu, strict=True)]


def sgd(model, lr=1e-2):
    return torch.optim.SGD(model.parameters(), lr=lr)


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_one_step_is_gradient_descent_on_the_loss():
    model, oracle = tiny_model(), tiny_model()
    batch = plain_batch(at_mu(model, random_examples(3, 2)))
    [metrics] = fit(model, sgd(model), [[batch]])
    logp = topr.sequence_logprobs(oracle, batch)
    loss = topr.topr_loss(logp, batch.logmu, batch.reward, batch.length)
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in oracle.parameters()])
    norm = gradient.norm()
    expected = weights(oracle) - 1e-2 * gradient / max(1.0, norm.item())
    torch.testing.assert_close(weights(model), expected, rtol=1e-6, atol=1e-9)
    assert metrics["loss"] == pytest.approx(loss.item())
    assert metrics["grad_norm"] == pytest.approx(norm.item())
    assert norm > 1, "the clip was not reached, so it was not tested"


@pytest.mark.parametrize("size", [1, 2, 5])
def test_micro_batches_leave_the_gradient_alone(size):
    whole, split = tiny_model(), tiny_model()
    examples = at_mu(whole, random_examples(3, 2))
    fit(whole, sgd(whole), [[plain_batch(examples)]])
    fit(split, sgd(split), [[plain_batch(examples[i : i + size]) for i in range(0, 6, size)]])
    torch.testing.assert_close(weights(split), weights(whole), rtol=1e-9, atol=1e-12)


def test_shared_rows_train_like_plain_rows():
    plain, shared = tiny_model(), tiny_model()
    examples = at_mu(plain, random_examples(2, 4))
    steps = [[plain_batch(examples[:4])], [plain_batch(examples[4:])]]
    fit(plain, sgd(plain), steps)
    steps = [[collate([examples[:4]])], [collate([examples[4:]])]]
    fit(shared, sgd(shared), steps, logprobs=shared_logprobs)
    torch.testing.assert_close(weights(shared), weights(plain), rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("shares", [(3, 3), (4, 2)], ids=["even", "ragged"])
def test_v19_two_ranks_equal_one_process(shares, tmp_path):
    model = tiny_model()
    examples = at_mu(model, random_examples(6, 2))
    alone = fit(model, torch.optim.AdamW(model.parameters(), lr=1e-2), ranks.two_steps(examples, (0, 6), 6))
    together, found = ranks.on_two_ranks(ranks.train_in_shares, tmp_path, examples, shares)
    torch.testing.assert_close(found, weights(model), rtol=1e-6, atol=1e-9)
    assert [m["loss"] for m in together] == pytest.approx([m["loss"] for m in alone])
    assert [m["grad_norm"] for m in together] == pytest.approx([m["grad_norm"] for m in alone])


def test_v16_the_weight_follows_the_model():
    model = tiny_model()
    batch = plain_batch([e for e in at_mu(model, random_examples(6, 2)) if e.reward < 0])
    first, second = fit(model, sgd(model), [[batch], [batch]])
    assert first["weight_neg_q05"] == pytest.approx(1)
    assert second["weight_neg_q05"] < 0.99


def test_metrics_by_hand():
    log_ratio, reward = torch.tensor([-1.0, 0.0, 2.0, -50.0]), torch.tensor([1.0, 1.0, -1.0, -1.0])
    metrics = step_metrics(log_ratio, reward, torch.tensor([1.0, 1.0, 1.0, math.exp(-50)]))
    assert metrics["ess"] == pytest.approx(3)
    assert metrics["weights_below_1e-6"] == 0.25
    assert metrics["log_ratio_pos_q50"] == -0.5
    assert metrics["weight_neg_q50"] == pytest.approx(0.5)


def test_metrics_leave_out_what_has_no_gradient():
    reward = torch.tensor([1.0, 0.0, 0.0, 0.0])
    metrics = step_metrics(torch.zeros(4), reward, reward)
    assert (metrics["weight_pos_q50"], metrics["weights_below_1e-6"], metrics["ess"]) == (1, 0, 1)
    assert step_metrics(torch.zeros(2), torch.zeros(2), torch.zeros(2)) == {"weights_below_1e-6": 0, "ess": 0}


def test_metrics_leave_out_a_sign_that_is_absent():
    metrics = step_metrics(torch.zeros(2), torch.ones(2), torch.ones(2))
    assert "weight_pos_q50" in metrics
    assert "weight_neg_q50" not in metrics


def test_weights_in_the_metrics_are_those_of_the_loss():
    model = tiny_model()
    examples = at_mu(model, random_examples(6, 2))
    shifted = plain_batch([replace(e, logmu=e.logmu + 2) for e in examples])
    [metrics] = fit(model, sgd(model), [[shifted]])
    assert metrics["weight_pos_q50"] == pytest.approx(1)
    assert metrics["weight_neg_q50"] == pytest.approx(math.exp(-2))


def test_training_away_from_mu_is_refused():
    with pytest.raises(ArithmeticError, match=r"step 1: \|log pi - log mu\| reaches 0.5, above 0.4.*--trust-logmu"):
        check_ratio(1, torch.tensor([0.0, -0.5]), tolerance=0.4)
    with pytest.raises(ArithmeticError, match="reaches nan"):
        check_ratio(1, torch.tensor([math.nan]), tolerance=1)
    check_ratio(1, torch.tensor([0.5, -0.5]), tolerance=0.6)
    check_ratio(2, torch.tensor([0.0, -0.5]), tolerance=0.4)


@pytest.mark.parametrize("spoil", ["logmu", "reward"])
def test_a_loss_that_is_not_finite_stops_training_before_the_weights_change(spoil):
    model = tiny_model()
    batch = plain_batch(at_mu(model, random_examples(2, 2)))
    bad = batch._replace(
        **{spoil: torch.full((4,), math.nan)}, **({} if spoil == "reward" else {"reward": -torch.ones(4)})
    )
    before = weights(model)
    with pytest.raises(FloatingPointError, match="loss is nan"):
        fit(model, sgd(model), [[bad]])
    assert torch.equal(weights(model), before)


def test_a_loss_that_is_infinite_poisons_the_gradient_so_that_all_processes_stop():
    """The gradient itself may be finite: its norm, which all processes share, must tell of the loss."""
    model = tiny_model()
    batch = plain_batch(at_mu(model, random_examples(2, 2)))
    with pytest.raises(FloatingPointError, match="loss is inf, grad_norm is nan"):
        fit(model, sgd(model), [[batch]], loss=lambda logp, *_, **__: logp.sum() + math.inf)


def test_a_ratio_that_never_moves_is_warned_about():
    with pytest.warns(UserWarning, match="every log-ratio is 0"):
        check_ratio(2, torch.zeros(3), tolerance=0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_ratio(2, torch.tensor([0.0, 1e-9]), tolerance=0.01)
        check_ratio(3, torch.zeros(3), tolerance=0.01)


def test_a_step_is_made_for_each_next_and_not_before():
    model = tiny_model()
    batch = plain_batch(at_mu(model, random_examples(2, 2)))
    before = weights(model)
    training = topr.train(model, sgd(model), [topr.Step([batch], 4)] * 2)
    assert torch.equal(weights(model), before)
    assert next(training).log_ratio.abs().max() < 1e-6
    assert not torch.equal(weights(model), before)
    assert next(training).log_ratio.abs().max() > 1e-6
    with pytest.raises(StopIteration):
        next(training)


def test_dpo_of_rows_is_dpo_of_the_pairs():
    model = tiny_model()
    pairs = dataset.pairs_of_prompt(at_mu(model, random_examples(2, 6)), most=4, rng=random.Random(0))
    batch = collate(pairs)
    logp = shared_logprobs(model, batch).detach() + torch.arange(len(pairs) * 2)
    found = dpo_loss_of_rows(logp, batch.logmu, batch.reward, batch.length, len(pairs) * 2, beta=0.1)
    margins = [0.1 * ((logp[2 * i] - p.logmu) - (logp[2 * i + 1] - n.logmu)) for i, (p, n) in enumerate(pairs)]
    expected = sum(math.log1p(math.exp(-margin)) for margin in margins) / len(pairs)
    assert len(pairs) >= 2
    assert found.item() == pytest.approx(expected)
