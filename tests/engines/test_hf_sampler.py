"""The sampler of hf_sampler.py: exact distributions, batches, kinds of models, interruptions."""

import gc
import math
import signal
import threading
import weakref
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from unittest.mock import MagicMock

import pytest
import torch
from engine_helpers import (
    MODEL,
    PROMPT,
    START,
    check_stop_string,
    exact_logprobs,
    generate,
    make_prompts,
)
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from toprlib import hf_sampler, sampling
from toprlib.hf_sampler import has_stop, sample_batch
from toprlib.language_model import load_without_weights
from toprlib.records import InputError, Task
from toprlib.sampling import Engine, SamplingParameters, hf_engine, sample_to_file


def make_engine(lm, parameters):
    return Engine(partial(hf_sampler.sample_completions, lm, parameters))


# ---- the distribution ----------------------------------------------------------------------------
def probabilities(model, prompt, parameters, end, limit, tokens=()):
    """Yields each completion with its probability, from the whole model's logits at each token.

    tokens: those that the completion begins with; the probability is that of the others.
    """
    logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, -1].double()
    logits = logits / parameters.temperature
    likeliest = sorted(range(len(logits)), key=lambda token: -logits[token])
    likeliest = likeliest[: parameters.top_k or None]
    p = logits[likeliest].softmax(0).tolist()
    kept = {}
    for token, p_token in zip(likeliest, p, strict=True):
        if sum(kept.values()) < parameters.top_p:
            kept[token] = p_token
    for token, p_token in kept.items():
        p_token /= sum(kept.values())
        completion = (*tokens, token)
        if token == end or len(completion) == limit:
            yield completion, p_token
        else:
            for longer, p_rest in probabilities(model, prompt, parameters, end, limit, completion):
                yield longer, p_token * p_rest


def test_a_temperature_that_float32_rounds_to_zero(lm):
    engine = make_engine(lm, SamplingParameters(temperature=1e-320, max_new_tokens=8))
    with pytest.raises(InputError) as raised:
        generate(engine, make_prompts(lm, [PROMPT, "Q"]))
    assert raised.value.option == "--temperature"


def test_a_top_p_that_float32_rounds_to_zero_keeps_the_likeliest_token(lm):
    prompts = make_prompts(lm, [PROMPT, START])
    smallest = make_engine(lm, SamplingParameters(top_p=1e-300, max_new_tokens=8))
    greedy = make_engine(lm, SamplingParameters(top_k=1, max_new_tokens=8))
    assert generate(smallest, prompts) == generate(greedy, prompts)


def untrained_model(sizes, dtype=torch.float32, scale=1.0, **config):
    """A model with random weights, matrices multiplied by `scale` so that tokens differ."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**config, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data *= scale
    return model


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"),
    [(0.7, 1.0, 0), (1.0, 1.0, 2), (1.0, 0.6, 0), (0.7, 0.8, 3)],
)
def test_completions_are_as_frequent_as_they_are_likely(lm, temperature, top_p, top_k):
    """Chi-square of 100,000 completions of two prompts, by a model of four tokens; 2 is the end."""
    sizes = {
        "vocab_size": 4,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    model = untrained_model(sizes, scale=20, model_type="llama")
    four_tokens = lm._replace(model=model, ends=frozenset({2}))
    parameters = SamplingParameters(temperature, top_p, top_k)
    prompts = [[3], [0, 1, 1]]
    n = 100_000
    limit = 3
    noise = torch.rand(2 * n, limit, generator=torch.Generator().manual_seed(0))
    prompt_of = torch.arange(2).repeat_interleave(n)
    sampled = sample_batch(four_tokens, parameters, prompts, prompt_of, noise)
    completions = [tuple(token_ids) for token_ids, _ in sampled]
    for i, prompt in enumerate(prompts):
        with torch.no_grad():
            expected = dict(probabilities(model, prompt, parameters, end=2, limit=limit))
        counts = Counter(completions[i * n : (i + 1) * n])
        assert counts.keys() <= expected.keys()
        assert len(expected) > 3
        assert sum(expected.values()) == pytest.approx(1)
        chi_square = 0.0
        for completion, p in expected.items():
            chi_square += (counts[completion] - n * p) ** 2 / (n * p)
        # About as many degrees of freedom as completions: five standard deviations above the mean.
        assert chi_square < len(expected) + 5 * math.sqrt(2 * len(expected))
    for token_ids, finish_reason in sampled[::1000]:
        assert finish_reason == ("stop" if token_ids[-1] == 2 else "length")


@pytest.mark.parametrize(
    "parameters",
    [SamplingParameters(), SamplingParameters(0.7, 0.9, 50), SamplingParameters(2.0)],
)
def test_a_completion_does_not_depend_on_its_batch(lm, parameters, monkeypatch):
    """Neither on the chunk, and so not on the rank. In float64, no rounding changes a token."""
    in_float64 = lm._replace(model=deepcopy(lm.model).double())
    engine = make_engine(in_float64, replace(parameters, max_new_tokens=40))
    texts = [PROMPT, "Q", "Q: " + "figs " * 30 + "\nA:", PROMPT.replace("Ada", "Uma")]
    prompts = make_prompts(lm, texts)
    assert len(prompts[1].ids) == 1
    expected = generate(engine, prompts, n=3, seed=7)
    for max_tokens in (1, 200, 300):
        monkeypatch.setattr(hf_sampler, "MAX_BATCH_TOKENS", max_tokens)
        assert generate(engine, prompts, n=3, seed=7) == expected
    in_two_chunks = generate(engine, prompts[:2], n=3, seed=7)
    in_two_chunks += generate(engine, prompts[2:], n=3, seed=7 + 2 * 3)
    assert in_two_chunks == expected
    assert len({sample.completion for samples in expected for sample in samples}) > 8


def test_several_threads_sample_what_one_samples(lm, monkeypatch):
    """Of many batches, each in a thread that is one of four."""
    in_float64 = lm._replace(model=deepcopy(lm.model).double())
    engine = make_engine(in_float64, SamplingParameters(max_new_tokens=30))
    prompts = make_prompts(lm, [PROMPT, PROMPT + " So", "Q: 1?"])
    monkeypatch.setattr(hf_sampler, "MAX_BATCH_TOKENS", 200)
    expected = generate(engine, prompts, n=5)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        assert generate(engine, prompts, n=5) == expected
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(threads)


@given(st.lists(st.integers(1, 12)), st.integers(1, 40))
def test_batches_have_all_rows_in_order_and_as_many_as_fit(widths, max_tokens):
    """Padded to its widest row, a batch of several rows has at most max_tokens."""
    batches = [widths[batch] for batch in hf_sampler.batch_slices(widths, max_tokens)]
    assert all(batches)
    assert list(chain.from_iterable(batches)) == widths
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(batch) <= max_tokens
    for batch, following in pairwise(batches):
        longer = [*batch, following[0]]
        assert len(longer) * max(longer) > max_tokens


# ---- ends of completions -------------------------------------------------------------------------
def test_a_stop_string_works_where_padding_is_the_end_of_sequence(lm):
    tokenizer = deepcopy(lm.tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    parameters = SamplingParameters(max_new_tokens=60, stop=("The ans",))
    engine = make_engine(lm._replace(tokenizer=tokenizer), parameters)
    [samples] = generate(engine, make_prompts(lm, [PROMPT]), n=32)
    check_stop_string(samples, tokenizer, "The ans")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("figs: 🦊🦊", True), ("figs: 🦊", False), ("🦊", False)],
)
def test_a_stop_string_may_have_more_tokens_than_characters(lm, text, expected):
    tokens = torch.tensor([lm.tokenizer(text)["input_ids"]])
    assert len(lm.tokenizer("🦊🦊")["input_ids"]) == 8
    assert has_stop(lm, tokens, ["🦊🦊"]).tolist() == [expected]


# ---- kinds of models -----------------------------------------------------------------------------
SIZES = {
    "vocab_size": 768,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama"},
        {"model_type": "qwen2"},
        {"model_type": "mistral", "sliding_window": 8},
        {"model_type": "gpt2", "bos_token_id": 1, "eos_token_id": 1},
    ],
    ids=lambda config: config["model_type"],
)
def test_other_models_continue_as_without_a_cache(lm, config, dtype):
    """The likeliest token each time, up to rounding.

    Mistral's layers see a window of 8 tokens, and GPT-2 counts positions from the start.
    """
    other = lm._replace(model=untrained_model(SIZES, dtype, scale=8, **config))
    engine = make_engine(other, SamplingParameters(top_k=1, max_new_tokens=24))
    prompts = make_prompts(lm, [PROMPT, "Q: 1?"])
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    for prompt, samples in zip(prompts, generate(engine, prompts, n=2), strict=True):
        for sample in samples:
            logprobs = exact_logprobs(other, prompt.text, sample.token_ids)  # (T, V)
            actual = logprobs.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
            assert (logprobs.amax(-1) - actual).max() < tolerance
            assert len(set(sample.token_ids)) > 4


def test_a_model_with_another_state_is_refused(lm, tmp_path):
    config = AutoConfig.for_model(
        "jamba", **SIZES, mamba_d_state=2, num_experts=1, use_mamba_kernels=False
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    lm.tokenizer.save_pretrained(tmp_path)
    jamba = load_without_weights(str(tmp_path))
    with (
        pytest.raises(InputError) as raised,
        hf_engine(jamba, str(tmp_path), SamplingParameters()),
    ):
        pass
    assert raised.value.option == "--engine"


# ---- weights -------------------------------------------------------------------------------------
def test_weights_are_loaded_by_the_first_call_and_freed_at_the_end(lm, monkeypatch):
    models = weakref.WeakSet()
    load_weights = sampling.load_weights

    def load(lm, name):
        assert len(models) == 0
        loaded = load_weights(lm, name)
        models.add(loaded.model)
        return loaded

    monkeypatch.setattr(sampling, "load_weights", load)
    parameters = SamplingParameters(max_new_tokens=4)
    prompts = make_prompts(lm, [PROMPT])
    gc.disable()  # the end of the block frees the weights, not a lucky collection
    try:
        with hf_engine(load_without_weights(MODEL), MODEL, parameters) as engine:
            assert len(models) == 0
            samples = generate(engine, prompts)
            assert generate(engine, prompts) == samples
            assert len(models) == 1
        assert len(models) == 0
    finally:
        gc.enable()
    assert samples == generate(make_engine(lm, parameters), prompts)


# ---- interruptions -------------------------------------------------------------------------------
def sampling_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("sampling")]


def test_ctrl_c_stops_the_threads_that_sample(lm):
    """A signal reaches the main thread, which waits for a batch that would take 1,500 passes."""
    passes = []
    main_thread = threading.main_thread().ident

    def interrupt_at_fifth(*_):
        passes.append(len(passes))
        if len(passes) == 5:
            signal.pthread_kill(main_thread, signal.SIGINT)

    hook = lm.model.register_forward_pre_hook(interrupt_at_fifth)
    prompts = make_prompts(lm, [PROMPT])
    endless = make_engine(lm._replace(ends=frozenset()), SamplingParameters(max_new_tokens=1500))
    try:
        with pytest.raises(KeyboardInterrupt):
            generate(endless, prompts, n=1)
    finally:
        hook.remove()
    assert 5 <= len(passes) < 750
    assert sampling_threads() == []
    assert generate(make_engine(lm, SamplingParameters(max_new_tokens=8)), prompts)  # as before


def test_ctrl_c_between_two_samples_stops_the_threads(lm, monkeypatch, tmp_path):
    """They have more batches to compute when the first sample has come."""
    monkeypatch.setattr(hf_sampler, "MAX_BATCH_TOKENS", 1)

    bar = MagicMock()
    bar.__enter__.return_value.update.side_effect = KeyboardInterrupt
    bar.__exit__.return_value = None
    monkeypatch.setattr(sampling, "progress_bar", lambda *args, **options: bar)
    engine = make_engine(lm._replace(ends=frozenset()), SamplingParameters(max_new_tokens=200))
    prompts = make_prompts(lm, [PROMPT])
    task = Task("own", [], [], reward=lambda completion, problem: 1.0)
    with pytest.raises(KeyboardInterrupt):
        sample_to_file(tmp_path / "samples.jsonl", engine, prompts, n=50, seed=0, task=task)
    assert sampling_threads() == []
