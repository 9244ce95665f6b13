"""The sampling engines on the real tiny model: the distribution they draw from, where completions end, their seeds."""

import math
import signal
import threading
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
from engines import PROMPT, START, deviating, drawn, logps_after
from runs import contents
from transformers import AutoConfig, AutoModelForCausalLM

import train_gsm8k as gsm8k
from pipeline import sampling, stages
from pipeline.held import open_hf
from pipeline.models.language_model import load_model
from pipeline.records import Drawn, InputError, Problem
from pipeline.sampling import SamplingParameters, transformers_engine

TWO = [PROMPT, PROMPT.replace("Ada", "Uma")]


@pytest.fixture(params=["hf", "vllm"])
def engine(request, lm):
    """What holds for every engine is tested with each of them."""
    return (
        partial(transformers_engine, lm, 40_000)
        if request.param == "hf"
        else request.getfixturevalue("vllm")
    )


def test_same_seed_same_completions_and_the_global_random_state_is_left_alone(engine):
    state = torch.random.get_rng_state()
    sampling = SamplingParameters(max_new_tokens=24, temperature=2.0)
    first, second, other = (drawn(engine, sampling, TWO, seed=seed) for seed in (0, 0, 1))
    assert first == second != other
    assert torch.equal(state, torch.random.get_rng_state())
    assert (
        len({completion.completion for completion in first[0]}) > 4
    )  # completions of a prompt differ
    same = drawn(engine, sampling, [PROMPT, PROMPT])
    assert same[0] != same[1]  # and so do prompts' seeds


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"),
    [
        (1.0, 1.0, 500),
        (1.0, 1.0, 3),
        (1.0, 1.0, 0),
        (1.0, 1.0, -1),
        (2.0, 1.0, 500),
        (1.0, 0.6, 500),
    ],
)
def test_tokens_are_drawn_from_the_models_own_distribution(engine, lm, temperature, top_p, top_k):
    found = drawn(
        engine, SamplingParameters(temperature, top_p, top_k, max_new_tokens=1), [START], n=1000
    )[0]
    p = (logps_after(lm, START, found[0].token_ids)[1][0] / temperature).softmax(-1)
    assert (p > 0.02).sum() > 5
    likeliest = p.topk(min(top_k if top_k > 0 else len(p), len(p)))
    before = likeliest.values.cumsum(0) - likeliest.values  # of those that are likelier
    kept = likeliest.indices[before < top_p].tolist()
    p = torch.zeros_like(p).index_copy(0, torch.tensor(kept), p[kept] / p[kept].sum())
    assert deviating([completion.token_ids[0] for completion in found], p.tolist()) == []
    assert {completion.token_ids[0] for completion in found} <= set(kept)


def test_a_completion_ends_with_its_end_of_sequence_or_is_cut_at_the_limit(engine, lm):
    for completion in drawn(engine, SamplingParameters(max_new_tokens=64), n=32)[0]:
        assert completion.finish_reason == "stop"
        assert completion.token_ids[-1] == lm.tokenizer.eos_token_id
        assert lm.tokenizer.pad_token_id not in completion.token_ids
        assert completion.completion == lm.tokenizer.decode(completion.token_ids[:-1])
    for completion in drawn(engine, SamplingParameters(max_new_tokens=3))[0]:
        assert (completion.finish_reason, len(completion.token_ids)) == ("length", 3)


@pytest.mark.parametrize("pads_with_eos", [False, True])
def test_a_stop_string_ends_a_completion_and_is_kept(engine, lm, pads_with_eos):
    """Where padding is the end of sequence too, as with `generate`, one may follow the stop string."""
    tokenizer = lm.tokenizer
    if pads_with_eos:
        tokenizer = load_model(gsm8k.Settings().model).tokenizer
        tokenizer.pad_token = tokenizer.eos_token
        engine = partial(transformers_engine, lm._replace(tokenizer=tokenizer), 40_000)
    found = drawn(engine, SamplingParameters(max_new_tokens=60, stop=("The ans",)), n=32)[0]
    found = [completion for completion in found if "The ans" in completion.completion]
    assert len(found) > 16
    for completion in found:
        assert completion.finish_reason == "stop"
        assert completion.completion == tokenizer.decode(completion.token_ids)
        assert "The ans" not in tokenizer.decode(completion.token_ids[:-1])


@pytest.mark.parametrize(
    "sampling", [SamplingParameters(), SamplingParameters(0.7, 0.9, 50), SamplingParameters(2.0)]
)
def test_what_a_row_draws_depends_on_its_seed_and_not_on_what_is_drawn_beside_it(lm, sampling):
    """Neither on the batch, nor on the chunk, nor on the rank that draws it. In float64 no rounding decides."""
    exact = lm._replace(model=deepcopy(lm.model).double())
    sampling = replace(sampling, max_new_tokens=60)
    prompts = [PROMPT, "Q", "Q: " + "figs " * 30 + "\nA:", TWO[1]]  # the second is of one token
    whole = drawn(partial(transformers_engine, exact, 40_000), sampling, prompts, n=3, seed=7)
    for tokens_at_once in (1, 200, 300):
        assert (
            drawn(
                partial(transformers_engine, exact, tokens_at_once), sampling, prompts, n=3, seed=7
            )
            == whole
        )
    engine = partial(transformers_engine, exact, 40_000)
    assert (
        drawn(engine, sampling, prompts[:2], 3, 7)
        + drawn(engine, sampling, prompts[2:], 3, 7 + 2 * 3)
        == whole
    )
    assert drawn(engine, sampling, prompts, n=3, seed=8)[0][:2] == whole[0][1:]
    assert len({one.completion for completions in whole for one in completions}) > 8


DISTRIBUTIONS = [(0.7, 1.0, 0), (1.0, 1.0, 2), (1.0, 0.6, 0), (0.7, 0.8, 3)]


def probabilities(model, prompt, sampling, end, limit, before=()):
    """Each completion with its probability, by the whole model for each token, in the order of its tokens."""
    logits = model(torch.tensor([[*prompt, *before]])).logits[0, -1].double() / sampling.temperature
    likeliest = sorted(range(len(logits)), key=lambda token: -logits[token])[
        : sampling.top_k or None
    ]
    p, kept = logits[likeliest].softmax(0).tolist(), {}
    for token, chance in zip(likeliest, p, strict=True):
        if sum(kept.values()) < sampling.top_p:
            kept[token] = chance
    for token, chance in kept.items():
        whole, p_token = (*before, token), chance / sum(kept.values())
        if token == end or len(whole) == limit:
            yield whole, p_token
        else:
            rest = probabilities(model, prompt, sampling, end, limit, whole)
            yield from ((longer, p_token * chance) for longer, chance in rest)


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), DISTRIBUTIONS)
def test_completions_are_as_frequent_as_they_are_likely(lm, temperature, top_p, top_k):
    """All completions of a model of four tokens, of which 2 ends them: chi-square of 200,000 draws."""
    torch.manual_seed(0)
    shape = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", vocab_size=4, **shape)
    ).eval()
    for weight in model.parameters():
        weight.data *= 20 if weight.dim() > 1 else 1  # so that the tokens are not equally likely
    parameters, tiny = (
        SamplingParameters(temperature, top_p, top_k),
        lm._replace(model=model, ends=frozenset({2})),
    )
    prompts, n, limit = [[3], [0, 1, 1]], 100_000, 3
    noise = torch.rand(2 * n, limit, generator=torch.Generator().manual_seed(0))
    prompt_of = torch.arange(2).repeat_interleave(n)
    completions = [
        tuple(token_ids)
        for token_ids, _ in sampling.sample(tiny, prompts, prompt_of, noise, parameters)
    ]
    for number, prompt in enumerate(prompts):
        with torch.no_grad():
            expected = dict(probabilities(model, prompt, parameters, end=2, limit=limit))
        counts = Counter(completions[number * n : (number + 1) * n])
        assert counts.keys() <= expected.keys()
        assert len(expected) > 3
        assert sum(expected.values()) == pytest.approx(1)
        square = sum((counts[one] - n * p) ** 2 / (n * p) for one, p in expected.items())
        assert square < len(expected) + 5 * math.sqrt(2 * len(expected))


SHAPE = {
    "vocab_size": 768,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "config", [{"model_type": "llama"}, {"model_type": "qwen2"}, {"model_type": "mistral"}]
)
def test_models_of_other_kinds_continue_as_they_would_without_a_cache(lm, config, dtype):
    """The likeliest token each time, up to rounding; Mistral's layers see a window of eight tokens."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        **config, **SHAPE, **({"sliding_window": 8} if "mistral" in config.values() else {})
    )
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for weight in model.parameters():
        weight.data *= 8 if weight.dim() > 1 else 1
    other = lm._replace(model=model)
    greedy = SamplingParameters(top_k=1, max_new_tokens=24)
    completions = drawn(partial(transformers_engine, other, 40_000), greedy, [PROMPT, "Q: 1?"], n=2)
    for prompt, rows in zip([PROMPT, "Q: 1?"], completions, strict=True):
        for row in rows:
            logps, of_all = logps_after(other, prompt, row.token_ids)
            assert (of_all.amax(-1) - torch.tensor(logps)).max() < (
                1e-5 if dtype == torch.float32 else 0.1
            )
            assert len(set(row.token_ids)) > 4


def test_a_model_that_keeps_a_state_is_refused_by_name(tmp_path):
    config = AutoConfig.for_model(
        "jamba", **SHAPE, mamba_d_state=2, num_experts=1, use_mamba_kernels=False
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    load_model(gsm8k.Settings().model).tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"Jamba.* --engine vllm"):
        open_hf(str(tmp_path), gsm8k.Settings(), None, None)


def test_an_engine_that_is_interrupted_computes_no_further_token(lm):
    """A signal reaches the main thread, which waits; those that sample would go on to the end of their batches."""
    passes, limit = [], 1_500
    main = threading.main_thread().ident

    def interrupt(*_):
        passes.append(len(passes))
        if len(passes) == 5:
            signal.pthread_kill(main, signal.SIGINT)

    hook = lm.model.register_forward_pre_hook(interrupt)
    engine = partial(transformers_engine, lm._replace(ends=frozenset()), 40_000)
    with pytest.raises(KeyboardInterrupt):
        drawn(engine, SamplingParameters(max_new_tokens=limit), n=1)
    hook.remove()
    assert 5 <= len(passes) < limit / 2
    assert drawn(
        partial(transformers_engine, lm, 40_000), SamplingParameters(max_new_tokens=8)
    )  # as before


def test_an_interrupted_drawing_goes_on_behind_its_last_whole_chunk(monkeypatch, tmp_path):
    settings = gsm8k.Settings(problems=5, n=3, chunk=2, max_new_tokens=60, test_problems=1)
    task, asked = gsm8k.gsm8k_task(settings), []

    draw = sampling.draw

    def draw_some(prompts, n, engine, parameters, seed, bar):
        if len(asked) == 2:
            raise InterruptedError
        asked.append(
            (seed - settings.seed_of("samples 1"), [prompt.problem.id for prompt in prompts])
        )
        return draw(prompts, n, engine, parameters, seed, bar)

    def sample(name):
        with stages.open_run(replace(settings, out=tmp_path / name), task) as run:
            return run.sample(1, settings.model)

    monkeypatch.setattr(sampling, "draw", draw_some)
    with pytest.raises(InterruptedError):
        sample("torn")
    here = tmp_path / "torn" / "iteration-1"
    part = here / "samples.jsonl.part-0"
    lines = part.read_text().splitlines(keepends=True)
    assert len(lines) == 12
    part.write_text(
        "".join(lines[:10]) + lines[10][:20]
    )  # one problem of the second chunk is whole, the other is not
    asked.append("torn")
    samples = sample("torn")
    first, second, third = (
        (0, ["train-1", "train-2"]),
        (6, ["train-3", "train-4"]),
        (12, ["train-5"]),
    )
    assert asked == [first, second, "torn", third]  # what was torn is graded anew, not drawn anew
    assert samples == sample("at once")
    assert contents(here) == contents(tmp_path / "at once" / "iteration-1")
    assert contents(here).keys() == {"samples.jsonl", "SHA256SUMS"}
    for one, problem in zip(
        samples, [problem for problem in task.train for _ in range(3)], strict=True
    ):
        assert one.outcome == gsm8k.grade(one.completion, problem.gold)
    assert len({one.outcome for one in samples}) > 1


def test_engines_of_two_gpus_draw_consecutive_shares_of_all_prompts(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    shares = []
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        shares.append(sampling.share_of("abcdefg", gpus=2))
    assert shares == [("abc", 0), ("", 0), ("defg", 3), ("", 3)]


def test_what_was_drawn_of_another_prompt_is_not_taken():
    one = Drawn(problem_id="1", prompt="Q", completion="A")
    prompts = [sampling.Prompt(Problem("1", ""), text, [1]) for text in ("Q", "other")]
    assert [sampling.is_of([one], [prompt], 1) for prompt in prompts] == [True, False]
