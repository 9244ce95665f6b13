"""The benchmarks run, at a size that says nothing; what they count is what real steps take, and what is above is told.

How long something takes is not for tests.
"""

import json
import os
from types import SimpleNamespace

import numpy
import pytest
import ranks
import torch
import transformers
from helpers import random_examples, shared_logprobs, steps_of, tiny_model

import topr
from benchmarks import fake_8b_step, gpu_step, measuring
from benchmarks.__main__ import main
from benchmarks.fake_8b_step import FAST, SMALL, Meter, config_of, counted, faults
from pipeline.models.language_model import make_optimizer, shard, token_logprobs
from pipeline.records import Example

ON_ONE = FAST._replace(model="small", processes=1, prompt=60, completion=40, batch=4, micro_batch=4, compute="float32")


@pytest.mark.parametrize(
    ("name", "compared"), [("overhead", 2), ("sampling", 1), pytest.param("scaling", 3, marks=pytest.mark.slow)]
)
def test_a_benchmark_of_sides_prints_and_writes_them(name, compared, tmp_path, capsys):
    assert main(name, ["--small", "--rounds", "2", "--out", str(tmp_path)]) == []
    printed, record = capsys.readouterr().out, json.loads((tmp_path / f"{name}.json").read_text())
    assert record["command"].startswith(f"python -m benchmarks {name} --small")
    assert len(record["comparisons"]) == compared
    for comparison, (_, lines) in zip(record["comparisons"], measuring.tables(record), strict=True):
        assert all(len(values) == 2 for values in comparison["values"].values())
        assert all(line in printed for line in lines)
        assert len(lines) >= len(comparison["goals"])


def test_the_gpu_step_runs_on_a_processor_too(tmp_path, capsys):
    main("gpu_step", ["--small", "--batches", "1", "3", "--rounds", "2", "--out", str(tmp_path)])
    assert "peak of matrices" in capsys.readouterr().out
    record = json.loads((tmp_path / "gpu_step.json").read_text())
    assert [row["batch"] for row in record["measured"]] == [1, 3]
    assert all(row["tokens_per_second"] > 0 and row["operations_per_second"] > 0 for row in record["measured"])
    assert record["processes"] == 1


def test_a_goal_is_judged_by_the_median_of_the_rounds_ratios():
    found = measuring.Comparison("", "", {"a": [1.0, 2.0, 9.0], "b": [1.0, 1.0, 1.0]})
    for goal, verdict in {
        (2.0, True): "least 2: met",
        (2.1, True): "least 2.1: missed",
        (1.9, False): "missed",
    }.items():
        assert found.verdict(measuring.Goal("a", "b", *goal)).endswith(verdict)


def test_the_peak_of_memory_is_that_of_what_was_held_at_once():
    """Up to what Linux counts late: each processor adds its pages to the process's three counters (of memory, files
    and shared memory) when it has max(32, 2 * processors) of them, which may be before and after. So it stays on one.
    """
    size, processors = 2**26, os.sched_getaffinity(0)

    def hold_twice():
        for _ in range(2):
            numpy.ones(size // 8)  # 64 MiB, dropped before the next

    late = 2 * 3 * max(32, 2 * os.cpu_count()) * os.sysconf("SC_PAGE_SIZE")
    os.sched_setaffinity(0, {min(processors)})
    try:
        peak = measuring.peak_above(hold_twice)
    finally:
        os.sched_setaffinity(0, processors)
    assert size - late <= peak < 1.5 * size


def test_operations_are_those_of_the_matrices():
    config = SimpleNamespace(num_hidden_layers=2, hidden_size=8, vocab_size=10)
    example = Example([1, 2], [3, 4, 5], 0.0, 1.0)
    # weights 6 x 100 x 5, head 6 x 8 x 10 x 3; attention of a layer: scores and values, 2 x 2 x 8 x 5 x 5 / 2 (causal),
    # and backward twice that
    expected = 3000 + 1440 + 3 * 2 * (2 * 2 * 8 * 25 / 2)
    assert gpu_step.operations(config, 100, [example]) == pytest.approx(expected)


# ---- a step on tensors without values ----------------------------------------------------------------------------


def allocated(setup):
    """Bytes that a real step of the setup allocates at most, by torch's profiler, with those of weights and state."""
    model = transformers.AutoModelForCausalLM.from_config(config_of(setup.model)).eval()
    shard(model, "float32", setup.gradient_checkpointing)
    optimizer = make_optimizer(setup.optimizer, model, 1e-6)
    lengths = [setup.completion - i % 2 for i in range(setup.batch)]
    rows = [[Example([1] * setup.prompt, [1] * length, -1.0, 1.0)] for length in lengths]
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


OTHERS = {"gradient_checkpointing": True}, {"micro_batch": 2}, {"optimizer": "adamw"}


@pytest.mark.parametrize("changes", [{}, *(pytest.param(c, marks=pytest.mark.slow) for c in OTHERS)])
def test_the_peak_is_what_a_real_step_allocates(changes):
    setup = ON_ONE._replace(**changes)
    assert counted(setup)["peak"] == pytest.approx(allocated(setup), rel=0.02)


@pytest.mark.slow
def test_the_operations_counted_are_those_of_the_matrices():
    """6 a weight and token, 8 with gradient checkpointing; attention in full, which `operations` counts by half.

    Recomputing a layer ends before its last product.
    """
    setup, config = ON_ONE._replace(batch=1, micro_batch=1), config_of("small")
    model = transformers.AutoModelForCausalLM.from_config(config)
    weights = sum(w.numel() for w in model.model.layers.parameters() if w.ndim > 1)
    example = Example([1] * setup.prompt, [1] * setup.completion, -1.0, 1.0)
    tokens = setup.prompt + setup.completion
    attention = 4 * config.num_hidden_layers * config.hidden_size * tokens**2  # of a forward pass
    # the head is also computed for the prompt's last token; a backward pass of attention computes the scores again
    head = 6 * config.hidden_size * config.vocab_size
    plain = gpu_step.operations(config, weights, [example]) - 1.5 * attention + head
    assert counted(setup)["flops"] == pytest.approx(plain + 3.5 * attention, rel=1e-6)
    last = config.num_hidden_layers * config.hidden_size * config.intermediate_size  # nobody needs what it gives
    again = 2 * (weights - last) * tokens + attention
    recomputed = counted(setup._replace(gradient_checkpointing=True))["flops"]
    assert recomputed == pytest.approx(plain + 3.5 * attention + again, rel=1e-6)


def test_collectives_are_fsdp_s_and_three_of_clipping_and_optimiser():
    """For each of three micro-batches four layers and the rest, the layers again where they were dropped."""
    found = counted(SMALL._replace(model="small", batch=24))
    assert found["collectives"] == {"all-gather": 3 * (4 + 5), "reduce-scatter": 3 * 5, "all-reduce": 3}


def test_the_collectives_of_the_results_are_fsdp_s():
    """A group for each layer and one for the rest; a prompt that completions share is a forward pass of its own."""
    record = json.loads(fake_8b_step.RESULTS.read_text())
    for step in (*record["steps"].values(), *record["cards"]):
        setup = step["setup"]
        gathered = (setup["layers"] * (1 + setup["reshard"]) + 1) * (1 + (setup["completions_per_row"] > 1))
        batches = setup["batch"] // setup["processes"] // setup["micro_batch"] if setup["processes"] > 1 else 0
        assert step["collectives"].get("all-gather", 0) <= batches * gathered
        assert step["collectives"].get("reduce-scatter", 0) <= batches * (setup["layers"] + 1)
        assert step["collectives"]["all-reduce"] <= 5


def test_what_exceeds_the_results_is_told():
    found = json.loads(fake_8b_step.RESULTS.read_text())["steps"]["no checkpointing"]
    assert faults("a step", found, found) == []
    for what in ("peak", "flops"):
        [told] = faults("a step", found, found | {what: 0.99 * found[what]})
        assert what in told
    fewer = found | {"collectives": found["collectives"] | {"all-gather": 64}}
    assert faults("a step", found, fewer) == ["a step: all-gather 65, above 64"]
    for other in (None, found | {"setup": {}}):
        assert "no such step" in faults("a step", found, other)[0]


@pytest.mark.slow
def test_llama_3_8b_needs_no_more_than_the_results_say(tmp_path):
    assert main("fake_8b_step", ["--out", str(tmp_path)]) == []


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
