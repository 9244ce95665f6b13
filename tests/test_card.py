"""The card of a base: mean squared gradients, the share that they make fastest, different texts, the command."""

import json
import sys
from itertools import combinations

import numpy as np
import pytest
import torch
from helpers import plain_batch, random_examples, tiny_model

import topr
from pipeline import card


def test_the_best_share_is_where_the_pace_is_highest_whatever_the_share_of_positives():
    for p in (0.1, 0.4, 0.8):
        for e_pos, e_neg in ((1.0, 14.0), (1.0, 1.0), (5.0, 1.0)):
            grid = np.arange(0.001, 1, 0.001)
            best = grid[np.argmax([card.pace(p, share, e_pos, e_neg) for share in grid])]
            assert best == pytest.approx(card.best_share(e_pos, e_neg), abs=0.001)
            # Positives only are slower than no baseline exactly where 3 p E+ > (1 - p) E-.
            assert (card.pace(p, p, e_pos, e_neg) > 1) == (3 * p * e_pos > (1 - p) * e_neg)


def test_mean_squares_of_a_bandit_are_those_of_its_closed_form():
    """Arms with probabilities pi, each drawn that often: the gradient of log pi of arm j is e_j - pi."""
    pi, is_right = np.array([0.5, 0.25, 0.125, 0.125]), np.array([True, False, True, False])
    squares = (np.eye(4) - pi) ** 2
    noise = np.array([[1e-18, 0], [0, 0], [0, 0], [0, 0]])  # rounding errors where the gradient is 0
    second = pi * (1 - pi)  # the variance of one arm's indicator
    of_arm = (squares / second).mean(1)
    expected = [(pi * of_arm)[chosen].sum() / pi[chosen].sum() for chosen in (is_right, ~is_right)]
    assert card.mean_squares(np.hstack([squares, noise]), is_right, pi * 8) == pytest.approx(expected)
    assert np.isnan(card.mean_squares(squares, is_right, np.array([1, 0, 1, 0]))).all()


def test_gradients_are_those_of_each_sample_alone():
    model, examples = tiny_model(), random_examples(2, 3)
    expected, logp = [], topr.sequence_logprobs(model, plain_batch(examples))
    for example in examples:
        model.zero_grad()
        (topr.sequence_logprobs(model, plain_batch([example])).sum() / len(example.completion_ids)).backward()
        expected.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]).square().numpy())
    of_all, found = card.gradients_of(model, examples, 10**6, seed=0)
    np.testing.assert_allclose(of_all, logp.detach(), rtol=1e-9)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-18)
    _, some = card.gradients_of(model, examples[:1], 1000, seed=0)
    assert some.shape == (1, 1000)
    assert np.isin(some.round(12), found[:1].round(12)).all()


def test_the_interval_is_over_problems_and_not_over_their_samples():
    squares = np.tile(np.random.default_rng(0).exponential(size=(4, 9)), (30, 1))
    is_right = np.tile([True, False, False, True], 30)
    e_pos, e_neg = card.mean_squares(squares, is_right)
    alike = card.over_problems(squares, is_right, np.arange(120) // 4, seed=0)  # whatever is drawn, the same samples
    assert alike == pytest.approx([e_neg / e_pos] * 2)
    low, high = card.over_problems(squares, is_right, np.arange(120), seed=0)
    assert low < 0.95 * e_neg / e_pos < 1.05 * e_neg / e_pos < high


def test_different_texts_are_counted_as_all_draws_would():
    draws = [len(set(some)) for some in combinations("aaabbcdde", 8)]
    assert card.expected_distinct("aaabbcdde") == pytest.approx(np.mean(draws))


def test_the_command_writes_a_card_and_refuses_in_a_line(tmp_path, monkeypatch, capsys):
    options = f"--problems 6 --n 16 --gradients 20 --max-new-tokens 48 --model tiny/base --out {tmp_path}"
    monkeypatch.setattr(sys, "argv", ["card", *options.split()])
    card.main()
    found, printed = json.loads((tmp_path / "card.json").read_text()), capsys.readouterr().out
    p, e_pos, e_neg = found["pass@1"]["mean"], found["e_pos"], found["e_neg"]
    assert found["pace_0.5"] == pytest.approx(card.pace(p, 0.5, e_pos, e_neg))
    assert found["best_share"] == pytest.approx(e_neg / (e_pos + e_neg))
    assert found["ratio_interval"][0] <= found["ratio"] <= found["ratio_interval"][1]
    assert found["logmu_wrong"] < found["logmu_right"] < 0
    assert 1 <= found["distinct"] <= 8
    assert "maj@16" in printed
    monkeypatch.setattr(sys, "argv", ["card", *options.split(), "--task", "no.such"])
    with pytest.raises(SystemExit, match=r"--task no\.such"):
        card.main()
