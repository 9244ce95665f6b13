"""What tests of the sampling engines share: exact log-probabilities, a fake engine."""

import math
from collections import Counter
from itertools import chain
from pathlib import Path

import torch

from toprlib import sampling
from toprlib.distributed import gather
from toprlib.records import Engine, Grade, Problem, Prompt, Task

MODEL = str(Path(__file__).parents[2] / "tiny" / "two_thirds")
PROMPT = "Q: Ada has 31 apples and finds 45 more. How many apples does Ada have now?\nA:"


def make_prompts(lm, texts):
    """A prompt of each text as it is, with the ids 0, 1, ..."""
    prompts = []
    for i, (text, ids) in enumerate(zip(texts, lm.prompt_ids(texts), strict=True)):
        prompts.append(Prompt(Problem(str(i), text), text, ids))
    return prompts


def generate(engine, prompts, n=8, seed=0):
    """The fields of n completions of each prompt."""
    completions = [[] for _ in prompts]
    for index, fields in chain.from_iterable(engine.generate(prompts, n, seed)):
        completions[index].append(fields)
    assert [len(of_prompt) for of_prompt in completions] == [n] * len(prompts)
    return completions


def exact_logprobs(lm, prompt, token_ids):
    """log pi of every token of the vocabulary at each token of a completion: (T, V), float64.

    The model computes prompt and completion at once, without a cache.
    """
    prompt_ids = lm.prompt_ids([prompt])[0]
    input_ids = torch.tensor([prompt_ids + token_ids])
    with torch.no_grad():
        logits = lm.model(input_ids).logits[0, len(prompt_ids) - 1 : -1]
    return logits.double().log_softmax(-1)


def token_logprobs(logprobs, token_ids):
    """log pi (T,) of the tokens of a completion, from that of all tokens."""
    return logprobs.gather(1, torch.tensor(token_ids)[:, None])[:, 0]


def check_stop_string(completions, tokenizer, stop):
    """Enough completions have the stop string, and all of them end with the token that has it."""
    stopped = [fields for fields in completions if stop in fields["completion"]]
    assert len(stopped) > len(completions) / 2
    for fields in stopped:
        assert fields["finish_reason"] == "stop"
        assert fields["completion"] == tokenizer.decode(fields["token_ids"])
        assert stop not in tokenizer.decode(fields["token_ids"][:-1])


def check_seeds(engine, prompt):
    """Completion j of prompt i has the seed plus i n plus j, and depends on nothing else."""
    of_two_prompts = generate(engine, [prompt, prompt], n=3, seed=10)
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    by_seed = [generate(engine, [prompt], 1, seed)[0][0] for seed in range(10, 16)]
    token_ids = [fields["token_ids"] for fields in chain(*of_two_prompts)]
    assert token_ids == [fields["token_ids"] for fields in by_seed]
    assert len({tuple(ids) for ids in token_ids}) > 3
    assert torch.equal(state, torch.random.get_rng_state())


def deviating_tokens(tokens, p):
    """The tokens whose number of occurrences has a probability below one in two million.

    p: the probability of each token of the vocabulary. Five standard deviations, and one more for
    rare tokens, whose distribution is not normal.
    """
    counts = Counter(tokens)
    n = len(tokens)
    deviating = []
    for token, p_token in enumerate(p):
        deviation = math.sqrt(n * p_token * (1 - p_token))
        if abs(counts[token] - n * p_token) > 5 * deviation + 1:
            deviating.append(token)
    return deviating


# ---- a fake engine -------------------------------------------------------------------------------
def count_to(size):
    """Prompts Q0, Q1, ..."""
    return [Prompt(Problem(f"train-{i}", f"Q{i}", i), f"Q{i}", [i]) for i in range(size)]


def fake_task():
    """The reward is the number less that of the problem / 10; it is odd or even.

    What follows the stop string "|" is not graded.
    """

    def grade(completions, problems):
        grades = []
        for completion, problem in zip(completions, problems, strict=True):
            outcome = ["even", "odd"][int(completion) % 2]
            grades.append(Grade(int(completion) - problem.gold / 10, outcome))
        return grades

    return Task("parity", [], [], grade, outcomes=("odd", "even"), stop=("&", "|"))


def make_fake_engine(calls, gpus=1):
    """A completion is the number seed + i * n + j, and "|0"; the last prompts are finished first.

    calls: a list that gets the arguments of each call.
    """

    def sample_numbers(prompts, n, seed):
        calls.append((prompts, n, seed))
        for j in range(n):
            finished = []
            for i in reversed(range(len(prompts))):
                number = seed + i * n + j
                fields = {"completion": f"{number}|0", "token_ids": [number]}
                finished.append((i, fields | {"finish_reason": "stop"}))
            yield finished

    return Engine(sample_numbers, gpus)


def sample_shares(folder, cases, n, seed):
    """Sample five prompts to a file in each folder, in chunks of two, as one of several ranks.

    Returns the seeds of each rank's calls of its engine.
    """
    sampling.CHUNK = 2
    seeds = {}
    for case in cases:
        calls = []
        engine = make_fake_engine(calls, gpus=2 if case == "one engine" else 1)
        file = folder / case / "samples.jsonl"
        sampling.sample_to_file(file, engine, count_to(5), n, seed, fake_task())
        seeds[case] = [first_seed for _, _, first_seed in calls]
    return gather(seeds)
