"""The benchmarks run, at a small size, and what they count is what real steps take. Times are not for tests."""

import json

import numpy
import pytest
import torch
import transformers
from helpers import fit, shared_logprobs, steps_of

from benchmarks import comparisons, fake_8b_step
from benchmarks.__main__ import main
from benchmarks.fake_8b_step import FAST, SMALL, config_of, counted, faults
from pipeline.models.language_model import make_optimizer, shard
from pipeline.records import Example

ON_ONE = FAST._replace(model="small", processes=1, prompt=60, completion=40, batch=4, micro_batch=4, compute="float32")
MEASURED = {
    "sharded": SMALL._replace(model="small", processes=2, batch=6),
    "kept": FAST._replace(model="small", processes=2, batch=6),
    "as it is": ON_ONE,
    "recomputed": ON_ONE._replace(gradient_checkpointing=True),
    "by halves": ON_ONE._replace(micro_batch=2),
    "adamw": ON_ONE._replace(optimizer="adamw"),
    "of one": ON_ONE._replace(batch=1, micro_batch=1),
    "of one, recomputed": ON_ONE._replace(batch=1, micro_batch=1, gradient_checkpointing=True),
}


@pytest.mark.parametrize("name", ["overhead", "loss_memory"])
def test_a_benchmark_prints_and_writes_what_it_finds(name, tmp_path, capsys):
    assert main(name, ["--small", "--rounds", "2", "--out", str(tmp_path)]) == []
    record, printed = json.loads((tmp_path / f"{name}.json").read_text()), capsys.readouterr().out
    assert record["command"].startswith(f"python -m benchmarks {name} --small")
    for each in record["comparisons"]:
        assert all(len(values) == 2 and min(values) > 0 for values in each["values"].values())
        assert all(line in printed for line in each["notes"])


def test_the_peak_of_memory_is_that_of_what_was_held_at_once():
    """Roughly: Linux counts a processor's last pages late. Twice 256 MiB, dropped before the next."""
    peak = comparisons.peak_above(lambda: [numpy.ones(2**25).sum() for _ in range(2)])
    assert peak == pytest.approx(2**28, rel=0.1)


@pytest.fixture(scope="module")
def found():
    return dict(zip(MEASURED, counted(list(MEASURED.values())), strict=True))


def allocated(setup):
    """Bytes that a real step of the setup allocates at most, by torch's profiler, with those of weights and state."""
    model = transformers.AutoModelForCausalLM.from_config(config_of(setup.model)).eval()
    shard(model, "float32", setup.gradient_checkpointing)
    optimizer = make_optimizer(setup.optimizer, model, 1e-6)
    lengths = [setup.completion - i % 2 for i in range(setup.batch)]
    rows = [[Example([1] * setup.prompt, [1] * length, -1.0, 1.0)] for length in lengths]
    steps = steps_of(rows, setup.batch, setup.micro_batch)
    fit(model, optimizer, steps, logprobs=shared_logprobs)
    optimizer.zero_grad()
    held = [*model.parameters(), *model.buffers(), *(t for s in optimizer.state.values() for t in s.values())]
    with torch.profiler.profile(profile_memory=True) as profile:
        fit(model, optimizer, steps, logprobs=shared_logprobs)
    events = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return numpy.cumsum(events).max() + sum(t.nbytes for t in held if torch.is_tensor(t))


@pytest.mark.parametrize("name", ["as it is", "recomputed", "by halves", "adamw"])
def test_the_peak_is_what_a_real_step_allocates(found, name):
    assert found[name]["peak"] == pytest.approx(allocated(MEASURED[name]), rel=0.02)


def test_the_operations_counted_are_those_of_the_matrices(found):
    """6 a weight and token; attention in full, though it is causal; recomputing ends before a layer's last product."""
    setup, config = MEASURED["of one"], config_of("small")
    model = transformers.AutoModelForCausalLM.from_config(config)
    weights = sum(w.numel() for w in model.model.layers.parameters() if w.ndim > 1)
    tokens = setup.prompt + setup.completion
    attention = 4 * config.num_hidden_layers * config.hidden_size * tokens**2  # of a forward pass
    # the head is of the completion and of the prompt's last token; a backward pass computes attention's scores again
    head = 6 * config.hidden_size * config.vocab_size * (setup.completion + 1)
    plain = 6 * weights * tokens + 3.5 * attention + head
    assert found["of one"]["flops"] == pytest.approx(plain, rel=1e-6)
    last = config.num_hidden_layers * config.hidden_size * config.intermediate_size  # nobody needs what it gives
    again = 2 * (weights - last) * tokens + attention
    assert found["of one, recomputed"]["flops"] == pytest.approx(plain + again, rel=1e-6)


def test_collectives_are_fsdp_s_and_three_of_clipping_and_optimiser(found):
    """For each of three micro-batches four layers and the rest, the layers again where they were dropped."""
    assert found["sharded"]["collectives"] == {"all-gather": 3 * (4 + 5), "reduce-scatter": 3 * 5, "all-reduce": 3}
    assert found["kept"]["collectives"] == {"all-gather": 3 * 5, "reduce-scatter": 3 * 5, "all-reduce": 3}


def test_what_exceeds_the_results_is_told():
    step = json.loads(fake_8b_step.RESULTS.read_text())["steps"]["no checkpointing"]
    fewer = {"collectives": step["collectives"] | {"all-gather": 64}}
    for less in ({"peak": 0.99 * step["peak"]}, {"flops": 0.99 * step["flops"]}, fewer):
        assert len(faults("a step", step, step | less)) == 1
    assert faults("a step", step, step) == []
    assert all("no such step" in faults("a step", step, other)[0] for other in (None, step | {"setup": {}}))


@pytest.mark.slow
def test_llama_3_8b_needs_no_more_than_the_results_say(tmp_path):
    """With eight of its layers, of which a further one differs in nothing."""
    assert main("fake_8b_step", ["--small", "--out", str(tmp_path)]) == []
