"""What every sampling engine does, on the real tiny model: hf_sampler.py and vLLM."""

import pytest
import torch
from engine_helpers import (
    PROMPT,
    START,
    check_stop_string,
    deviating_tokens,
    exact_logprobs,
    generate,
    make_prompts,
)

from toprlib.sampling import SamplingParameters


def test_samples_depend_on_the_seed_alone(make_engine, lm):
    engine = make_engine(SamplingParameters(max_new_tokens=24, temperature=2.0))
    prompts = make_prompts(lm, [PROMPT, PROMPT.replace("Ada", "Uma")])
    samples = generate(engine, prompts, seed=0)
    torch.manual_seed(1)
    global_state = torch.random.get_rng_state()
    assert generate(engine, prompts, seed=0) == samples
    assert generate(engine, prompts, seed=100) != samples
    assert torch.equal(global_state, torch.random.get_rng_state())


def test_completion_j_of_prompt_i_has_the_seed_plus_i_n_plus_j(make_engine, lm):
    engine = make_engine(SamplingParameters(max_new_tokens=24, temperature=2.0))
    prompts = make_prompts(lm, [PROMPT])
    of_two_prompts = generate(engine, prompts * 2, n=3, seed=10)
    token_ids = [sample.token_ids for samples in of_two_prompts for sample in samples]
    by_seed = [generate(engine, prompts, 1, seed=seed)[0][0].token_ids for seed in range(10, 16)]
    assert token_ids == by_seed
    assert len({tuple(ids) for ids in token_ids}) == 6


def test_a_sample_has_the_problem_and_the_prompt_and_no_grade(make_engine, lm):
    engine = make_engine(SamplingParameters(max_new_tokens=8))
    prompts = make_prompts(lm, [PROMPT, START])
    for prompt, samples in zip(prompts, generate(engine, prompts, n=2), strict=True):
        for sample in samples:
            assert (sample.problem_id, sample.prompt) == (prompt.problem.id, prompt.text)
            assert (sample.reward, sample.outcome) == (None, None)


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
def test_tokens_have_the_models_distribution(make_engine, lm, temperature, top_p, top_k):
    engine = make_engine(SamplingParameters(temperature, top_p, top_k, max_new_tokens=1))
    [samples] = generate(engine, make_prompts(lm, [START]), n=1000)
    tokens = [sample.token_ids[0] for sample in samples]

    logprobs = exact_logprobs(lm, START, tokens[:1])[0]
    p = (logprobs / temperature).softmax(-1)
    assert (p > 0.02).sum() > 5
    likeliest = p.topk(min(top_k, len(p)) if top_k > 0 else len(p))
    p_of_likelier = likeliest.values.cumsum(0) - likeliest.values
    kept = likeliest.indices[p_of_likelier < top_p]
    expected = torch.zeros_like(p)
    expected[kept] = p[kept] / p[kept].sum()
    assert deviating_tokens(tokens, expected.tolist()) == []
    assert set(tokens) <= set(kept.tolist())


def test_a_completion_ends_with_its_end_of_sequence(make_engine, lm):
    engine = make_engine(SamplingParameters(max_new_tokens=64))
    for sample in generate(engine, make_prompts(lm, [PROMPT]), n=32)[0]:
        assert sample.finish_reason == "stop"
        assert sample.token_ids[-1] == lm.tokenizer.eos_token_id
        assert lm.tokenizer.pad_token_id not in sample.token_ids
        assert sample.completion == lm.tokenizer.decode(sample.token_ids[:-1])


def test_a_completion_is_cut_at_max_new_tokens(make_engine, lm):
    engine = make_engine(SamplingParameters(max_new_tokens=3))
    for sample in generate(engine, make_prompts(lm, [PROMPT]))[0]:
        assert (sample.finish_reason, len(sample.token_ids)) == ("length", 3)
        assert sample.completion == lm.tokenizer.decode(sample.token_ids)


def test_a_stop_string_ends_a_completion_and_is_kept(make_engine, lm):
    engine = make_engine(SamplingParameters(max_new_tokens=60, stop=("7 2 7", "The ans")))
    [samples] = generate(engine, make_prompts(lm, [PROMPT]), n=32)
    check_stop_string(samples, lm.tokenizer, "The ans")
