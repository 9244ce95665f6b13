"""Training on two gloo ranks against one process; sharding, precision, gradient checkpointing."""

import json
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import (
    VOCABULARY,
    flat_gradients,
    flat_weights,
    numbered,
    on_two_ranks,
    ordered_examples,
    random_examples,
    sharded_model,
    tiny_llama,
    whole,
)
from transformers import GPT2Config, GPT2LMHeadModel

import topr
from toprlib import dataset, training
from toprlib.dataset import add_logmu, collate, plan_steps, to_tensors
from toprlib.distributed import gather, rank, ranks
from toprlib.language_model import load_model
from toprlib.methods import METHODS
from toprlib.records import Sample
from toprlib.results import log_step
from toprlib.settings import Settings
from toprlib.training import load_checkpoint, save_checkpoint


# ---- two ranks compute what one computes ---------------------------------------------------------
def train_examples(examples, optimizer_name, loss=topr.topr_loss, sizes=(3, 1)):
    """An epoch on this process's rank: losses of all ranks, gradient norms, last gradient, weights.

    sizes: the other arguments of `plan_steps`.
    The gradient is clipped, and so are the last ones that it returns.
    """
    model, optimizer = sharded_model(optimizer_name)
    steps = plan_steps(examples, *sizes)
    metrics = run_steps(model, optimizer, steps, loss)
    return metrics, flat_gradients(model), flat_weights(model)


def train_with_checkpoint(examples, optimizer_name, folder, sizes=(3, 1)):
    """The same, but a second model resumes from a checkpoint after two steps."""
    steps = plan_steps(examples, *sizes)
    model, optimizer = sharded_model(optimizer_name)
    metrics = run_steps(model, optimizer, steps[:2])
    save_checkpoint(folder, 2, model, optimizer)
    resumed, optimizer = sharded_model(optimizer_name, seed=1)
    load_checkpoint(folder / "checkpoint-2", resumed, optimizer)
    metrics += run_steps(resumed, optimizer, steps[2:])
    return metrics, flat_gradients(resumed), flat_weights(resumed)


def run_steps(model, optimizer, steps, loss=topr.topr_loss):
    """Loss, a sum over ranks, and gradient norm of each step."""
    metrics = []
    tensors = to_tensors(steps, model if ranks() > 1 else None)
    for stats in topr.train(model, optimizer, tensors, loss, max_grad_norm=0.5):
        metrics.append((sum(gather(stats.loss)), stats.grad_norm))
    return metrics


# method, examples, batch size, micro-batch size, pairs; 15 examples: the last step is short
FIFTEEN = ordered_examples(5, 3)
PAIRS = ordered_examples(4, 3, uses_pairs=True)[:10]
CASES = {
    "odd examples": ("topr", FIFTEEN, 3, 1),
    "ragged micro-batches": ("topr", FIFTEEN, 7, 4),
    "one example per step": ("tis", FIFTEEN[:3], 1, 1),
    "odd examples with PPO": ("ppo", FIFTEEN[:5], 5, 2),
    "odd pairs": ("dpo", PAIRS, 6, 2, True),
    "odd pairs in larger micro-batches": ("dpo", PAIRS, 10, 4, True),
}


def train_case(name):
    method, examples, *sizes = CASES[name]
    return train_examples(examples, "adafactor", METHODS[method].loss, sizes)


def score_fifteen():
    """log mu of each completion. Fillers have a line, too, which no example has."""
    scored = add_logmu(FIFTEEN, plan_steps(FIFTEEN, 4, 2), tiny_llama())
    return [example.token_logmu for example in scored]


def train_all(folder):
    results = {name: train_case(name) for name in CASES}
    results["resumed"] = train_with_checkpoint(FIFTEEN, "adafactor", folder)
    results["log mu"] = score_fifteen()
    return results


@pytest.fixture(scope="module")
def on_two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return on_two_ranks(train_all, folder, folder)


def assert_same_training(actual, expected):
    """Losses and gradient norms of all steps, the last gradient, the weights."""
    for step, other in zip(actual[0], expected[0], strict=True):
        assert step == pytest.approx(other, rel=1e-6)
    torch.testing.assert_close(actual[1:], expected[1:], rtol=1e-6, atol=5e-7)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_like_one(name, on_two):
    examples = CASES[name][1]
    assert len(examples) in (3, 5, 10, 15)
    assert_same_training(on_two[name], train_case(name))


def test_two_ranks_resume_from_a_checkpoint(on_two):
    expected = train_examples(FIFTEEN, "adafactor")
    assert len(expected[0]) == 5
    assert_same_training(on_two["resumed"], expected)


def test_two_ranks_score_like_one(on_two):
    for actual, expected in zip(on_two["log mu"], score_fifteen(), strict=True):
        assert actual == pytest.approx(expected, rel=1e-6)


# ---- the log of a step ---------------------------------------------------------------------------
def log_on_ranks(folder, log_ratios, step):
    """Whether log_step accepts the log-ratios of both ranks.

    Rank 0 has two completions and a loss of 1, rank 1 three completions and a loss of 2.
    """
    log_ratio = torch.tensor(log_ratios[rank()])
    stats = topr.StepStats(rank() + 1.0, 0.25, log_ratio, torch.ones(len(log_ratio)))
    limits = topr.Limits(1, math.exp(4), 0, 1)
    try:
        log_step(folder / "metrics.jsonl", step, stats, limits, Settings())
    except ArithmeticError:
        return False
    return True


def test_log_is_of_both_ranks(tmp_path):
    assert on_two_ranks(log_on_ranks, tmp_path, tmp_path, [[1.0, 2.0], [3.0, 4.0, 5.0]], 7)
    [line] = (tmp_path / "metrics.jsonl").read_text().splitlines()
    metrics = json.loads(line)
    assert (metrics["step"], metrics["loss"], metrics["grad_norm"]) == (7, 3.0, 0.25)
    assert metrics["log_ratio_pos_mean"] == pytest.approx(3)
    weights = [math.exp(log_ratio) for log_ratio in (1, 2, 3, 4, 4)]  # the last is clipped
    assert metrics["weight_pos_mean"] == pytest.approx(sum(weights) / 5)
    assert metrics["ess"] == pytest.approx(sum(weights) ** 2 / sum(w**2 for w in weights))


def test_first_step_of_another_rank_is_checked(tmp_path):
    assert not on_two_ranks(log_on_ranks, tmp_path, tmp_path, [[0.0, 0.0], [0.0, 0.0, 0.5]], 1)


# ---- memory against time -------------------------------------------------------------------------
def train_in_both_ways(examples):
    """The weights after two steps: layers stay gathered, or are gathered and computed again."""
    weights = []
    for gradient_checkpointing in (False, True):
        changes = {"gradient_checkpointing": gradient_checkpointing}
        model, optimizer = sharded_model("adafactor", **changes)
        run_steps(model, optimizer, plan_steps(examples, 2, 2))
        weights.append(whole(model.parameters()))
    return weights


def test_gradient_checkpointing_on_two_ranks_trains_the_same(tmp_path):
    assert torch.equal(*on_two_ranks(train_in_both_ways, tmp_path, ordered_examples(4, 1)))


GATHER, SUM = "all_gather_single", "reduce_scatter_single"


def count_collectives(examples):
    """Gathers and sums of a step of three micro-batches: in each of them, or once."""
    counts = []
    for is_once in (False, True):
        model, _ = sharded_model("sgd")
        [(micro_batches, _)] = to_tensors(plan_steps(examples, 6, 1), model if is_once else None)
        gather = mock.patch.object(dist, GATHER, wraps=getattr(dist, GATHER))
        add = mock.patch.object(dist, SUM, wraps=getattr(dist, SUM))
        with gather as gathers, add as sums:
            for batch in micro_batches:
                topr.token_logprobs(model, batch).sum().backward()
        counts.append([gathers.call_count, sums.call_count])
    return counts


def test_ranks_gather_weights_and_sum_gradients_once_in_a_step(tmp_path):
    each, once = on_two_ranks(count_collectives, tmp_path, ordered_examples(2, 3))
    assert once == [3, 3]  # of two layers and the rest
    assert each == [9, 9]


# ---- precision -----------------------------------------------------------------------------------
def train_in_bfloat16():
    """Types of the passes, the gradient sums and the weights; the share of weights that moved."""
    model = tiny_llama(dtype=torch.float32)
    before = whole([weight.clone() for weight in model.parameters()])
    with mock.patch.object(training, "fully_shard", wraps=training.fully_shard) as fully_shard:
        training._set_up_passes(model, Settings(dtype="bfloat16"))
    policies = [call.kwargs["mp_policy"] for call in fully_shard.call_args_list]
    types = {(policy.param_dtype, policy.reduce_dtype) for policy in policies}
    products = []
    head = model.get_output_embeddings()
    head.register_forward_hook(lambda module, inputs, output: products.append(output.dtype))
    optimizer = training.Adafactor(model.parameters(), lr=5e-7)
    run_steps(model, optimizer, plan_steps(ordered_examples(3, 2), 2, 2))
    weights = list(model.parameters())
    types |= {weight.dtype for weight in weights} | set(products)
    return types, (whole(weights) != before).float().mean().item()


def test_weights_and_gradient_sums_are_float32(tmp_path):
    """In bfloat16 nearly every update at the paper's learning rate would round to nothing."""
    types, share = train_in_bfloat16()
    assert types == {torch.bfloat16, torch.float32}
    assert share > 0.9
    types, share = on_two_ranks(train_in_bfloat16, tmp_path)
    assert types == {torch.bfloat16, torch.float32, (torch.bfloat16, torch.float32)}
    assert share > 0.9


def test_bfloat16_training_starts_at_mu(lm):
    """log mu is computed in the batches of training: same padding, same rounding."""
    samples = []
    for count in range(16):
        prompt = "Q: " + "1 + " * count + "1?\nA:"
        completion = " The answer is" + " 2" * (17 - count)
        samples.append(Sample(prompt=prompt, completion=completion, reward=1.0))
    examples = numbered(dataset.tokenize_samples(samples, range(16), lm))
    model = load_model(lm.model.name_or_path)
    training._set_up_passes(model, Settings(dtype="bfloat16"))
    scored = add_logmu(examples, plan_steps(examples, 16, 4), model)
    [(micro_batches, _)] = to_tensors(plan_steps(scored, 16, 4))
    for batch in micro_batches:
        token_logp = topr.token_logprobs(model, batch)
        assert torch.equal(token_logp, batch.token_logmu)


# ---- gradient checkpointing ----------------------------------------------------------------------
def test_gradient_checkpointing_recomputes_the_same_gradient():
    batch = collate(random_examples(prompts=2, per_prompt=2))
    gradients = []
    counts = []
    for gradient_checkpointing in (False, True):
        torch.manual_seed(0)
        # GPT-2 calls its list of layers `h`, and has dropout.
        config = GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2)
        model = GPT2LMHeadModel(config).eval()
        calls = []
        # A hook before the layer: the recomputation ends as soon as the backward pass has all.
        model.transformer.h[0].mlp.register_forward_pre_hook(
            lambda *_, calls=calls: calls.append(1)
        )
        training._set_up_passes(model, Settings(gradient_checkpointing=gradient_checkpointing))
        topr.token_logprobs(model, batch).sum().backward()
        gradients.append(flat_gradients(model))
        counts.append(len(calls))
    assert counts == [1, 2]
    assert torch.equal(*gradients)
