"""Rehearsals of a training step: against what real steps allocate, closed forms, and what must be told as a fault."""

import json

import fake_8b_step
import gpu_step
import pytest
import ranks
import torch
import transformers
from helpers import random_examples, shared_logprobs, steps_of, tiny_model

import topr
from pipeline.models.language_model import make_optimizer, shard, token_logprobs
from pipeline.records import Example, InputError
from pipeline.rehearsal import Meter, Rehearsal, Setup, choose, needed, rehearse

PROMPT, COMPLETION = 60, 40
OTHERS = {"gradient_checkpointing": True}, {"micro_batch": 2}


def small(tmp_path, **changes):
    """A step of one process on a model of 4 layers, small enough to be computed too."""
    fake_8b_step.MODELS["small"]().save_pretrained(tmp_path)
    usual = {"processes": 1, "batch": 4, "micro_batch": 4, "compute": "float32", "optimizer": "adamw"}
    switches = {"gradient_checkpointing": False, "reshard": True}
    return Setup(**{"model": str(tmp_path), "prompt": PROMPT, "completion": COMPLETION} | usual | switches | changes)


def allocated(setup):
    """Bytes that a real step of the setup allocates at most, by torch's profiler, with those of weights and state."""
    model = real_model(setup)
    shard(model, "float32", setup.gradient_checkpointing)
    optimizer = make_optimizer(setup.optimizer, model, 1e-6)
    rows = [[Example([1] * PROMPT, [1] * (COMPLETION - i % 2), -1.0, 1.0)] for i in range(setup.batch)]
    steps = steps_of(rows, setup.batch, setup.micro_batch)

    def step():
        return list(topr.train(model, optimizer, steps, logprobs=shared_logprobs))

    step()
    optimizer.zero_grad()
    held = [*model.parameters(), *model.buffers(), *(t for s in optimizer.state.values() for t in s.values())]
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    now = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak + sum(t.nbytes for t in held if torch.is_tensor(t))


def real_model(setup):
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(setup.model)).eval()


@pytest.mark.parametrize("changes", [{}, *(pytest.param(c, marks=pytest.mark.slow) for c in OTHERS)])
def test_the_peak_is_what_a_real_step_allocates(tmp_path, changes):
    setup = small(tmp_path, **changes)
    assert rehearse(setup).peak == pytest.approx(allocated(setup), rel=0.02)


@pytest.mark.slow
def test_the_operations_are_those_of_the_matrices(tmp_path):
    """6 a weight and token, 8 with gradient checkpointing; attention in full, which `operations` counts by half.

    Recomputing a layer ends before its last product.
    """
    setup = small(tmp_path, batch=1, micro_batch=1)
    model = real_model(setup)
    weights = sum(w.numel() for w in model.model.layers.parameters() if w.ndim > 1)
    example = Example([1] * PROMPT, [1] * COMPLETION, -1.0, 1.0)
    tokens, config = PROMPT + COMPLETION, model.config
    attention = 4 * config.num_hidden_layers * config.hidden_size * tokens**2  # of a forward pass
    # the head is also computed for the prompt's last token; a backward pass of attention computes the scores again
    head = 6 * config.hidden_size * config.vocab_size
    plain = gpu_step.operations(config, weights, [example]) - 1.5 * attention + head
    assert rehearse(setup).flops == pytest.approx(plain + 3.5 * attention, rel=1e-6)
    recomputed = rehearse(setup._replace(gradient_checkpointing=True)).flops
    last = config.num_hidden_layers * config.hidden_size * config.intermediate_size  # nobody needs what it gives
    again = 2 * (weights - last) * tokens + attention
    assert recomputed == pytest.approx(plain + 3.5 * attention + again, rel=1e-6)


def test_collectives_are_fsdp_s_and_few_of_the_optimiser():
    """On eight processes: all that are allowed for layers, and transformers' Adafactor is found out."""
    found = fake_8b_step.rehearsed("small", fake_8b_step.SMALL | {"batch": 24})  # three micro-batches
    calls = {k: n for k, n in found["collectives"].items() if k != "all-reduce"}
    assert calls == fake_8b_step.allowed(found["setup"]) == {"all-gather": 3 * 9, "reduce-scatter": 3 * 5}
    assert fake_8b_step.faults("now", found, found) == []
    before = fake_8b_step.rehearsed("small", fake_8b_step.FAST, (fake_8b_step.transformers_adafactor,))
    assert sum(before["of_update"].values()) > 100
    assert any("the optimiser call" in told for told in fake_8b_step.faults("before", before, before))


def test_what_exceeds_the_results_is_told(tmp_path, monkeypatch, capsys):
    found = json.loads(fake_8b_step.PROMISED.read_text())["steps"]["no checkpointing"]
    monkeypatch.setattr(fake_8b_step, "rehearsed", lambda *_: found)
    promised = tmp_path / "promised.json"
    settings = fake_8b_step.Settings(steps=("no checkpointing",), promised=promised, out=tmp_path)
    assert "no such step" in fake_8b_step.main(settings)[0]
    for what in ("peak", "flops"):
        promised.write_text(json.dumps({"steps": {"no checkpointing": found | {what: 0.99 * found[what]}}}))
        [told] = fake_8b_step.main(settings)
        assert what in told
    promised.write_text((tmp_path / "fake_8b_step.json").read_text())
    assert fake_8b_step.main(settings) == []
    assert "no checkpointing" in capsys.readouterr().out


@pytest.mark.slow
def test_llama_3_8b_needs_no_more_than_the_results_say(tmp_path):
    assert fake_8b_step.main(fake_8b_step.Settings(out=tmp_path)) == []


# ---- the choice ------------------------------------------------------------------------------------------------------

GIGABYTES = {(False, False): 32.06, (False, True): 19.35, (True, False): 29.85, (True, True): 13.81}  # 8B on 8


@pytest.fixture
def recorded(monkeypatch):
    """The peaks that were rehearsed for Llama 3 8B on eight GPUs."""
    asked = []

    def rehearse(setup):
        asked.append((setup.gradient_checkpointing, setup.reshard))
        return Rehearsal({"weights": round(1e9 * GIGABYTES[asked[-1]])}, {}, {}, {}, {}, 0.0, 0.0, 0.0)

    monkeypatch.setattr("pipeline.rehearsal.rehearse", rehearse)
    return asked


@pytest.mark.parametrize(
    ("card", "chosen", "fits"),
    [
        (80, (False, False), True),
        (48, (False, False), True),
        (32, (False, True), True),
        (24, (True, True), True),
        (16, (True, True), False),
    ],
)
def test_the_fastest_step_that_fits_is_chosen(recorded, card, chosen, fits):
    found = choose(Setup("8b", 8, 1_100, 512), card * 1e9)
    assert (found.gradient_checkpointing, found.reshard, found.fits) == (*chosen, fits)
    assert found.fits == (needed(found.found.peak) <= card * 1e9)


def test_what_is_set_stays(recorded):
    setup = Setup("8b", 8, 1_100, 512, gradient_checkpointing=True)
    assert choose(setup, 80e9)[:2] == (True, False)
    assert choose(setup._replace(reshard=True), 80e9)[:2] == (True, True)
    assert recorded == [(True, False), (True, True)]


def test_a_model_that_cannot_be_rehearsed_is_named(tmp_path):
    transformers.GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=8).save_pretrained(tmp_path)
    setup = Setup(str(tmp_path), 8, 4, 4, gradient_checkpointing=False, reshard=False)
    with pytest.raises(InputError, match=r"a step cannot be rehearsed: .*GPT2LMHeadModel has no decoder"):
        rehearse(setup)


def trained(reshard):
    """The weights after scoring twice and two steps, on this rank's share; how often the second scoring gathers."""
    model = tiny_model()
    shard(model, "float32", reshard=reshard)
    optimizer = make_optimizer("adafactor", model, 1e-2)
    steps = steps_of([[example] for example in random_examples(4, 1)], 4, 1, ranks.rank(), 2)
    batches = [batch for step in steps for batch in step.micro_batches]
    with torch.no_grad():
        first = [token_logprobs(model, batch) for batch in batches]
        with Meter() as meter:
            second = [token_logprobs(model, batch) for batch in batches]
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    list(topr.train(model, optimizer, steps * 2, logprobs=shared_logprobs))
    return ranks.whole(model.parameters()), meter.collectives["all-gather"]


def test_weights_that_stay_gathered_learn_the_same_on_two_ranks(tmp_path):
    found = {}
    for reshard in (False, True):
        (tmp_path / str(reshard)).mkdir()
        found[reshard] = ranks.on_two_ranks(trained, tmp_path / str(reshard), reshard)
    assert torch.equal(found[False][0], found[True][0])
    assert (found[False][1], found[True][1]) == (0, 4)  # two layers, for each of two micro-batches
