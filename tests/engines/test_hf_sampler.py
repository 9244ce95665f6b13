"""The sampler of hf_sampler.py: exact distributions, batches, kinds of models, interruptions."""

import gc
import math
import signal
import threading
import weakref
from collections import Counter
from copy import deepcopy
from itertools import chain

import pytest
import torch
from helpers import MODEL, PROMPT, check_seeds, check_stop_string, generate, make_prompts
from transformers import LlamaConfig, LlamaForCausalLM

from toprlib import hf_sampler
from toprlib.hf_sampler import hf_engine
from toprlib.language_model import load_tokenizer
from toprlib.records import Prompt
from toprlib.settings import Settings


# ---- the distribution ----------------------------------------------------------------------------
def test_completions_depend_on_their_seeds_alone(make_hf_engine, lm):
    engine = make_hf_engine(max_new_tokens=24, temperature=2.0)
    check_seeds(engine, make_prompts(lm, [PROMPT])[0])


def probabilities(model, prompt, settings, temperature, tokens=()):
    """Yields each completion with its probability, from the whole model's logits at each token.

    tokens: those that the completion begins with; the probability is that of the others. 2 is the
    end.
    """
    logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, -1].double()
    logits = logits / temperature
    likeliest = sorted(range(len(logits)), key=lambda token: -logits[token])
    likeliest = likeliest[: settings.top_k if settings.top_k > 0 else None]
    p = logits[likeliest].softmax(0).tolist()
    for token, p_token in zip(likeliest, p, strict=True):
        completion = (*tokens, token)
        if token == 2 or len(completion) == settings.max_new_tokens:
            yield completion, p_token
        else:
            for longer, p_rest in probabilities(model, prompt, settings, temperature, completion):
                yield longer, p_token * p_rest


@pytest.fixture
def four_tokens(lm):
    """An untrained model of four tokens, with large weights so that they differ; 2 is the end."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 4, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data *= 20
    return lm._replace(model=model, ends=[2])


@pytest.mark.parametrize(("temperature", "top_k"), [(0.7, 0), (1.0, 2), (0.7, 3), (1.0, 500)])
def test_completions_are_as_frequent_as_they_are_likely(
    monkeypatch, four_tokens, temperature, top_k
):
    """Chi-square of 10,000 completions of two prompts."""
    n = 10_000
    noise = torch.rand(2 * n, 3, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(hf_sampler, "_draw_noise", lambda rows, size: noise)
    settings = Settings(top_k=top_k, max_new_tokens=3)
    prompts = [Prompt(None, "", [3]), Prompt(None, "", [0, 1, 1])]
    rows = [(0, 0)] * n + [(1, 0)] * n
    sampled = hf_sampler._sample_batch(four_tokens, settings, (), prompts, rows, temperature)
    completions = [tuple(fields["token_ids"]) for _, fields in sampled]
    for i, prompt in enumerate(prompts):
        with torch.no_grad():
            expected = dict(probabilities(four_tokens.model, prompt.ids, settings, temperature))
        counts = Counter(completions[i * n : (i + 1) * n])
        assert counts.keys() <= expected.keys()
        assert len(expected) > 3
        chi_square = 0.0
        for completion, p in expected.items():
            chi_square += (counts[completion] - n * p) ** 2 / (n * p)
        # About as many degrees of freedom as completions: five standard deviations above the mean.
        assert chi_square < len(expected) + 5 * math.sqrt(2 * len(expected))
    for _, fields in sampled[::1000]:
        assert fields["finish_reason"] == ("stop" if fields["token_ids"][-1] == 2 else "length")


@pytest.mark.parametrize("changes", [{"top_k": 50}, {"temperature": 2.0}], ids=str)
def test_a_completion_does_not_depend_on_its_batch(make_hf_engine, lm, changes, monkeypatch):
    """Neither on the chunk or the thread. In float64, no rounding changes a token."""
    in_float64 = lm._replace(model=deepcopy(lm.model).double())
    engine = make_hf_engine(in_float64, max_new_tokens=24, **changes)
    texts = [PROMPT, "Q", "Q: " + "figs " * 30 + "\nA:", PROMPT.replace("Ada", "Uma")]
    prompts = make_prompts(lm, texts)
    expected = generate(engine, prompts, n=3, seed=7)
    monkeypatch.setattr(hf_sampler, "MAX_BATCH_TOKENS", 200)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        assert generate(engine, prompts, n=3, seed=7) == expected
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(threads)
    in_two_chunks = generate(engine, prompts[:2], n=3, seed=7)
    in_two_chunks += generate(engine, prompts[2:], n=3, seed=7 + 2 * 3)
    assert in_two_chunks == expected
    assert len({fields["completion"] for fields in chain(*expected)}) > 8


def test_batches_are_as_large_as_the_memory_allows(monkeypatch, make_hf_engine, lm):
    """Padded to its longest prompt, a batch of several rows has at most MAX_BATCH_TOKENS."""
    shapes = []
    hook = lm.model.register_forward_pre_hook(
        lambda model, args: shapes.append((args[0].shape[0], args[0].shape[1]))
    )
    monkeypatch.setattr(hf_sampler, "MAX_BATCH_TOKENS", 55)
    prompts = [Prompt(None, "", [5] * length) for length in (9, 1, 90)]
    completions = generate(make_hf_engine(max_new_tokens=1), prompts, n=4)
    hook.remove()
    # 4 of 2 tokens, and one of 10; then 3 of 10; then the longest, each alone. Prompts count once.
    assert sorted(shapes) == sorted([(2, 9), (1, 9), *[(1, 90)] * 4])
    assert [len(of_prompt) for of_prompt in completions] == [4, 4, 4]


# ---- ends of completions -------------------------------------------------------------------------
def test_a_stop_string_ends_a_completion_and_is_kept(make_hf_engine, lm):
    """Also where padding is the end of sequence, and with a string that does not occur."""
    tokenizer = deepcopy(lm.tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    other = lm._replace(tokenizer=tokenizer)
    engine = make_hf_engine(other, stop=("7 2 7", "The ans"), max_new_tokens=60)
    [completions] = generate(engine, make_prompts(lm, [PROMPT]), n=32)
    check_stop_string(completions, tokenizer, "The ans")


@pytest.mark.parametrize(
    ("text", "expected"), [("figs: 🦊🦊", True), ("figs: 🦊", False), ("a.c", True), ("abc", False)]
)
def test_a_stop_string_may_have_more_tokens_than_characters(lm, text, expected):
    tokens = torch.tensor([lm.tokenizer(text)["input_ids"]])
    assert len(lm.tokenizer("🦊🦊")["input_ids"]) == 8
    assert hf_sampler._has_stop(lm, tokens, ["🦊🦊", "a.c"]).tolist() == [expected]


# ---- weights, and interruptions ------------------------------------------------------------------
def test_weights_are_loaded_by_the_first_call_and_freed_at_the_end(make_hf_engine, lm, monkeypatch):
    models = weakref.WeakSet()
    load_model = hf_sampler.load_model

    def load(name):
        assert len(models) == 0
        model = load_model(name)
        models.add(model)
        return model

    monkeypatch.setattr(hf_sampler, "load_model", load)
    prompts = make_prompts(lm, [PROMPT])
    with hf_engine(load_tokenizer(MODEL), MODEL, Settings(max_new_tokens=4), ()) as engine:
        assert len(models) == 0
        completions = generate(engine, prompts)
        assert generate(engine, prompts) == completions
        assert len(models) == 1
        gc.disable()  # the end of the block frees the weights, not a lucky collection
    gc.enable()
    assert len(models) == 0
    assert completions == generate(make_hf_engine(max_new_tokens=4), prompts)


def test_ctrl_c_stops_the_threads_that_sample(make_hf_engine, lm):
    """A signal reaches the main thread, which waits for a batch."""
    passes = []
    main_thread = threading.main_thread().ident

    def interrupt_at_fifth(*_):
        passes.append(len(passes))
        if len(passes) == 5:
            signal.pthread_kill(main_thread, signal.SIGINT)

    prompts = make_prompts(lm, [PROMPT])
    endless = make_hf_engine(lm._replace(ends=[]), max_new_tokens=50)
    hook = lm.model.register_forward_pre_hook(interrupt_at_fifth)
    try:
        with pytest.raises(KeyboardInterrupt):
            generate(endless, prompts, n=1)
    finally:
        hook.remove()
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("sampling")]
    assert generate(make_hf_engine(max_new_tokens=8), prompts)  # as before
