"""What tests of the sampling engines share: exact log-probabilities, a fake engine."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import torch

from toprlib import sampling
from toprlib.distributed import gather
from toprlib.language_model import LanguageModel
from toprlib.records import Grade, Problem, Prompt, Sample, Task
from toprlib.sampling import Completions, Engine

TINY = Path(__file__).parents[2] / "tiny"
MODEL = str(TINY / "two_thirds")
PROMPT = "Q: Ada has 31 apples and finds 45 more. How many apples does Ada have now?\nA:"
START = PROMPT + " So."  # many tokens are likely after it


def make_prompts(lm: LanguageModel, texts: Sequence[str]) -> list[Prompt]:
    """A prompt of each text as it is, with the ids 0, 1, ..."""
    prompts = []
    for i, (text, ids) in enumerate(zip(texts, lm.prompt_ids(texts), strict=True)):
        prompts.append(Prompt(Problem(str(i), text), text, ids))
    return prompts


def generate(
    engine: Engine, prompts: Sequence[Prompt], n: int = 8, seed: int = 0
) -> list[list[Sample]]:
    """The n samples of each prompt."""
    samples = [[] for _ in prompts]
    for index, sample in chain.from_iterable(engine.generate(prompts, n, seed)):
        samples[index].append(sample)
    assert [len(of_prompt) for of_prompt in samples] == [n] * len(prompts)
    return samples


def exact_logprobs(lm: LanguageModel, prompt: str, token_ids: list[int]) -> torch.Tensor:
    """log pi of every token of the vocabulary at each token of a completion: (T, V), float64.

    The model computes prompt and completion at once, without a cache.
    """
    prompt_ids = lm.prompt_ids([prompt])[0]
    input_ids = torch.tensor([prompt_ids + token_ids])
    with torch.no_grad():
        logits = lm.model(input_ids).logits[0, len(prompt_ids) - 1 : -1]
    return logits.double().log_softmax(-1)


def exact_token_logprobs(lm: LanguageModel, prompt: str, token_ids: list[int]) -> list[float]:
    """log pi of the tokens of a completion."""
    logprobs = exact_logprobs(lm, prompt, token_ids)
    return logprobs.gather(1, torch.tensor(token_ids)[:, None])[:, 0].tolist()


def check_stop_string(samples, tokenizer, stop):
    """Enough samples have the stop string, and all that have it end with the token that has it."""
    stopped = [sample for sample in samples if stop in sample.completion]
    assert len(stopped) > 16
    for sample in stopped:
        assert sample.finish_reason == "stop"
        assert sample.completion == tokenizer.decode(sample.token_ids)
        assert stop not in tokenizer.decode(sample.token_ids[:-1])


def deviating_tokens(tokens: Sequence[int], p: Sequence[float]) -> list[int]:
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
def count_to(size: int) -> list[Prompt]:
    """Prompts Q0, Q1, ..."""
    return [Prompt(Problem(f"train-{i}", f"Q{i}"), f"Q{i}", [i]) for i in range(size)]


def fake_task() -> Task:
    """The reward of an odd number is 1, that of an even one 0."""

    def reward(completion: str, problem: Problem) -> Grade:
        is_odd = int(completion) % 2
        return Grade(is_odd, ["even", "odd"][is_odd])

    return Task("parity", [], [], reward=reward, outcomes=("odd", "even"))


def make_fake_engine(calls: list, gpus: int = 1) -> Engine:
    """A completion is the number seed + i * n + j; the last prompts are finished first.

    calls: a list that gets the arguments of each call.
    """

    def sample_numbers(prompts: Sequence[Prompt], n: int, seed: int) -> Completions:
        calls.append((prompts, n, seed))
        for j in range(n):
            finished = []
            for i in reversed(range(len(prompts))):
                number = seed + i * n + j
                sample = Sample(
                    problem_id=prompts[i].problem.id,
                    prompt=prompts[i].text,
                    completion=str(number),
                    token_ids=[number],
                )
                finished.append((i, sample))
            yield finished

    return Engine(sample_numbers, gpus)


def sample_shares(folder: Path, cases: Sequence[str], n: int, seed: int) -> list[dict]:
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
