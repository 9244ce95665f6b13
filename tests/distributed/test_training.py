"""Training as the pipeline sets it up: FSDP2 on two ranks, Adafactor, bfloat16, checkpoints."""

import random
from collections import Counter
from unittest import mock

import pytest
import ranks
import torch
from helpers import fit, random_examples, steps_of, tiny_model
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel

import topr
from pipeline import dataset
from pipeline.models import language_model
from pipeline.models.language_model import load_model, make_optimizer, shard
from pipeline.records import Encoded, InputError, Sample
from pipeline.runtime.processes import process_group


def rows_of(prompts, per_prompt):
    return dataset.shuffled(random_examples(prompts, per_prompt), random.Random(0))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("processes", "batch", "micro_batch", "optimizer", "is_cut"),
    [
        (2, 3, 1, "adafactor", False),  # odd steps, one at a time
        pytest.param(2, 6, 4, "adafactor", False, marks=SLOW),  # ragged batches
        pytest.param(2, 3, 1, "adafactor", True, marks=SLOW),  # from a checkpoint after two steps
        (1, 3, 1, "adafactor", True),
        (1, 3, 1, "adamw", True),
    ],
)
def test_v19_two_ranks_and_a_checkpoint_change_nothing(
    processes, batch, micro_batch, optimizer, is_cut, tmp_path
):
    rows = rows_of(5, 3)  # 15 examples: the last step is short, and a rank runs out of rows
    metrics, *expected = ranks.epoch(rows, batch, micro_batch, optimizer)
    assert len(metrics) >= 3
    (tmp_path / "run").mkdir()
    given = rows, batch, micro_batch, optimizer, tmp_path / "run" if is_cut else None
    found = (
        ranks.epoch(*given) if processes == 1 else ranks.on_two_ranks(ranks.epoch, tmp_path, *given)
    )
    for one, other in zip(found[0], metrics, strict=True):
        assert one == pytest.approx(other, rel=1e-6)
    torch.testing.assert_close(found[1:], tuple(expected), rtol=1e-6, atol=1e-9)
    written = {str(file.relative_to(tmp_path / "run")) for file in (tmp_path / "run").glob("*/*")}
    expected = {"SHA256SUMS", *(f"rank-{number}.pt" for number in range(processes))}
    assert written == ({f"checkpoint-2/{name}" for name in expected} if is_cut else set())


class Collectives(TorchDispatchMode):
    """Counts the calls of collectives by name, but for those inside DTensor."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "c10d" in function.namespace:
            self.calls[function._opname] += 1
        return function(*args, **kwargs or {})


def kept_and_dropped(rows):
    """Weights after log mu and two steps, and these steps' calls: where layers stay gathered, and where they do not."""
    found, steps = [], steps_of(rows, 4, 2, ranks.rank(), 2)
    for reshard in (False, True):
        model = tiny_model()
        shard(model, "float32", reshard=reshard)
        optimizer = make_optimizer("adafactor", model, 1e-2)
        with torch.no_grad():
            topr.sequence_logprobs(model, steps[0].micro_batches[0])
        with Collectives() as collectives:
            fit(model, optimizer, steps * 2)
        found.append((ranks.whole(model.parameters()), dict(collectives.calls)))
    return found


def test_weights_that_stay_gathered_learn_the_same_on_two_ranks(tmp_path):
    (kept, fewer), (dropped, more) = ranks.on_two_ranks(kept_and_dropped, tmp_path, rows_of(4, 1))
    assert torch.equal(kept, dropped)
    usual = {
        "_reduce_scatter_base_": 2 * 4,
        "allreduce_": 2 * 2,
    }  # two layers, the head, the rest; Adafactor's two
    # What log mu was scored with is still gathered in the first step: all four parts, or head and rest, which stay.
    assert fewer == usual | {"_allgather_base_": 0 + 4}
    assert more == usual | {"_allgather_base_": (4 - 2 + 2) + (4 + 2)}  # a layer twice a step


def test_weights_and_sums_of_gradients_stay_float32_and_move_at_the_papers_learning_rate(
    monkeypatch,
):
    """In bfloat16 nearly every update would round to nothing."""
    sharding = mock.Mock(wraps=language_model.fully_shard)
    monkeypatch.setattr(language_model, "fully_shard", sharding)
    with process_group(alone=True):
        model = tiny_model(dtype=torch.float32)
        before = ranks.whole([weight.clone() for weight in model.parameters()])
        shard(model, "bfloat16")
        policies = {call.kwargs["mp_policy"] for call in sharding.call_args_list}
        assert policies == {MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)}
        optimizer = make_optimizer("adafactor", model, 5e-7)
        fit(model, optimizer, steps_of(rows_of(3, 2), 2, 2))
        assert {weight.dtype for weight in model.parameters()} == {torch.float32}
        assert (ranks.whole(list(model.parameters())) != before).float().mean() > 0.9


def test_in_bfloat16_log_mu_is_scored_in_the_batches_that_train(lm):
    samples = [
        Sample(
            prompt="Q: " + "1 + " * i + "1?\nA:",
            completion=" The answer is" + " 2" * (17 - i),
            reward=1.0,
        )
        for i in range(16)
    ]
    rows = [[encoded] for encoded in dataset.encode(samples, range(16), lm)]
    with process_group(alone=True):
        model = load_model(lm.model.name_or_path)
        shard(model.model, "bfloat16")
        logmu = dataset.score(rows, dataset.epoch_steps(rows, 16, 4), model.model)
        [step] = steps_of(dataset.to_examples(rows, logmu), 16, 4)
        for batch in step.micro_batches:  # equal but for the sum's own rounding
            torch.testing.assert_close(
                topr.sequence_logprobs(model.model, batch), batch.logmu, rtol=0, atol=1e-4
            )


def test_gradient_checkpointing_computes_layers_twice_and_the_same_gradient():
    [[batch], _] = steps_of(rows_of(2, 2), 4, 4)[0]
    gradients, calls = [], []
    for recompute in (False, True):
        model, called = tiny_model(), []
        # before, not after it: the second time ends as soon as what the backward pass needs is there
        model.model.layers[0].mlp.register_forward_pre_hook(
            lambda *_, called=called: called.append(1)
        )
        shard(model, "float32", recompute)
        topr.sequence_logprobs(model, batch).sum().backward()
        gradients.append([weight.grad for weight in model.parameters()])
        calls.append(len(called))
    assert calls == [1, 2]
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_a_model_whose_layers_cannot_be_found_is_named():
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=8))
    shard(model, "float32")  # one process needs nothing
    with pytest.raises(InputError, match="GPT2LMHeadModel has no decoder"):
        shard(model, "float32", gradient_checkpointing=True)


def test_a_pair_s_log_mu_is_its_own():
    """DPO's completion may be in several pairs; each is scored in the batch that trains it."""
    pairs = [((0, 1.0), (1, -1.0)), ((0, 1.0), (2, -1.0))]
    rows = [[Encoded([1], [2, 3 + i], reward, i) for i, reward in pair] for pair in pairs]
    model = tiny_model()
    scored = dataset.to_examples(rows, dataset.score(rows, dataset.epoch_steps(rows, 2, 2), model))
    assert [[(e.sample, e.row) for e in row] for row in scored] == [
        [(0, 0), (1, 0)],
        [(0, 1), (2, 1)],
    ]
    assert len({e.logmu for row in scored for e in row}) == 3
    for row in scored:
        [step] = steps_of([row], 2, 2)
        logp = topr.sequence_logprobs(model, step.micro_batches[0])
        torch.testing.assert_close(logp.float(), step.micro_batches[0].logmu, rtol=1e-6, atol=1e-6)
