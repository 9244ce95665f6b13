"""The sampling engines on the real tiny model: the distribution they draw from, where completions end, their seeds."""

from copy import deepcopy
from dataclasses import replace
from functools import partial

import pytest
import torch
from engines import PROMPT, START, deviating, drawn, logps_after
from runs import contents

import train_gsm8k as gsm8k
from pipeline import sampling, stages
from pipeline.models.language_model import load_model
from pipeline.records import Drawn, Problem
from pipeline.sampling import SamplingParameters, transformers_engine

TWO = [PROMPT, PROMPT.replace("Ada", "Uma")]


@pytest.fixture(params=["hf", "vllm"])
def engine(request, lm):
    """What holds for every engine is tested with each of them."""
    return partial(transformers_engine, lm, 40_000) if request.param == "hf" else request.getfixturevalue("vllm")


def test_same_seed_same_completions_and_the_global_random_state_is_left_alone(engine):
    state = torch.random.get_rng_state()
    sampling = SamplingParameters(max_new_tokens=24, temperature=2.0)
    first, second, other = (drawn(engine, sampling, TWO, seed=seed) for seed in (0, 0, 1))
    assert first == second != other
    assert torch.equal(state, torch.random.get_rng_state())
    assert len({completion.completion for completion in first[0]}) > 4  # completions of a prompt differ
    same = drawn(engine, sampling, [PROMPT, PROMPT])
    assert same[0] != same[1]  # and so do prompts' seeds


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"),
    [(1.0, 1.0, 500), (1.0, 1.0, 3), (1.0, 1.0, 0), (1.0, 1.0, -1), (2.0, 1.0, 500), (1.0, 0.6, 500)],
)
def test_tokens_are_drawn_from_the_models_own_distribution(engine, lm, temperature, top_p, top_k):
    found = drawn(engine, SamplingParameters(temperature, top_p, top_k, max_new_tokens=1), [START], n=1000)[0]
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


def test_completions_come_back_to_their_prompts_from_batches_of_any_size(lm):
    engines_of = {size: partial(transformers_engine, lm, size) for size in (1, 200, 300, 40_000)}  # tokens at once
    prompts = [PROMPT, "Q: " + "figs " * 30 + "\nA:", TWO[1]]
    for engine in engines_of.values():
        found = drawn(engine, SamplingParameters(max_new_tokens=12), prompts, n=3)
        assert [len(completions) for completions in found] == [3, 3, 3]
    greedy, whole = SamplingParameters(max_new_tokens=12, top_k=1), engines_of[40_000]
    assert drawn(engines_of[300], greedy, prompts, n=2) == [drawn(whole, greedy, [one], n=2)[0] for one in prompts]
    assert len(drawn(whole, greedy, ["Q"])[0]) == 8  # of one token: there is nothing to compute before it
    alone = drawn(engines_of[1], SamplingParameters(max_new_tokens=24, temperature=2.0))[0]
    assert len({completion.completion for completion in alone}) > 4  # each batch has a seed of its own


@pytest.mark.parametrize("prompts", [(PROMPT,), (PROMPT, "Q: " + "figs " * 30 + "\nA:"), ("Q", PROMPT, "Q: 1?\nA:")])
def test_prompts_that_are_computed_once_give_what_plain_generate_gives(lm, prompts, monkeypatch):
    exact = lm._replace(model=deepcopy(lm.model).double())  # so that no rounding decides
    prefills = []
    exact.model.register_forward_pre_hook(
        lambda _, args, kwargs: prefills.append(kwargs["past_key_values"].get_seq_length()), with_kwargs=True
    )
    engine, sampling = (
        partial(transformers_engine, exact, 40_000),
        SamplingParameters(max_new_tokens=24, temperature=2.0),
    )
    shared = drawn(engine, sampling, prompts)
    assert 0 in prefills
    assert len({len(exact.tokenizer(prompt)["input_ids"]) for prompt in prompts}) == len(prompts)
    generate = exact.model.generate
    monkeypatch.setattr(exact.model, "generate", lambda past_key_values, **others: generate(**others))
    assert drawn(engine, sampling, prompts) == shared
    assert len({completion.completion for completions in shared for completion in completions}) > 4 * len(prompts)


def test_the_models_own_sampling_habits_do_not_leak_in(lm, monkeypatch):
    plain = drawn(partial(transformers_engine, lm, 40_000), SamplingParameters(max_new_tokens=24))
    monkeypatch.setattr(lm.model.generation_config, "repetition_penalty", 50.0)
    assert drawn(partial(transformers_engine, lm, 40_000), SamplingParameters(max_new_tokens=24)) == plain


def test_an_interrupted_drawing_goes_on_behind_its_last_whole_chunk(monkeypatch, tmp_path):
    settings = gsm8k.Settings(problems=5, n=3, chunk=2, max_new_tokens=60, test_problems=1)
    task, asked = gsm8k.gsm8k_task(settings), []

    draw = sampling.draw

    def draw_some(prompts, n, engine, parameters, seed, description):
        if len(asked) == 2:
            raise InterruptedError
        asked.append((seed - settings.seed_of("samples 1"), [prompt.problem.id for prompt in prompts]))
        return draw(prompts, n, engine, parameters, seed, description)

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
    part.write_text("".join(lines[:10]) + lines[10][:20])  # one problem of the second chunk is whole, the other is not
    asked.append("torn")
    samples = sample("torn")
    first, second, third = (0, ["train-1", "train-2"]), (6, ["train-3", "train-4"]), (12, ["train-5"])
    assert asked == [first, second, "torn", third]  # what was torn is graded anew, not drawn anew
    assert samples == sample("at once")
    assert contents(here) == contents(tmp_path / "at once" / "iteration-1")
    assert contents(here).keys() == {"samples.jsonl", "SHA256SUMS"}
    for one, problem in zip(samples, [problem for problem in task.train for _ in range(3)], strict=True):
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
