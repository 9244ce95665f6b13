"""A base model before it is trained: how often it is right, in how many texts, and how large its gradients are."""

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

import topr
from pipeline.records import Example, Sample

EIGHT = 8  # right samples of a prompt whose different texts are counted; ours


class Base(NamedTuple):
    """What `describe_base` measures.

    >>> Base(0.5, 8.0, -12.0, e_pos=1.0, e_neg=4.0).best_share
    0.8
    """

    right: float  # p, the share of right samples
    texts: float  # different texts among the first EIGHT right samples of a prompt: a mean; NaN if no prompt has EIGHT
    logmu: float  # mean log mu(y|x) of right examples, in nats
    e_pos: float  # E+
    e_neg: float  # E-

    @property
    def e_ratio(self) -> float:
        """E-/E+."""
        return self.e_neg / self.e_pos

    @property
    def best_share(self) -> float:
        """p~* = E- / (E- + E+): the effective share of positives with which the first steps are fastest."""
        return self.e_neg / (self.e_neg + self.e_pos)


def pace(share: float, p_tilde: float, right: float, e_ratio: float) -> float:
    """How fast the first steps are on a set with a share of positives, at the effective share p~ (ours).

    The set is composed of samples of a model of which a share `right` is right; e_ratio: E-/E+. At pi = mu the step is
    p~ g+ - (1-p~) g-, with right g+ + (1-right) g- = 0; an optimiser that divides by the gradient's size moves as
    signal over noise. Positives alone, all of the set, have pace 1.

    >>> round(pace(0.67, 0.67, 0.67, 3.25) / pace(0.67, 1.0, 0.67, 3.25), 2)  # TOPR beside positives in as many steps
    1.24
    """
    signal = p_tilde + (1 - p_tilde) * right / (1 - right)
    noise = p_tilde**2 / share + ((1 - p_tilde) ** 2 * e_ratio / (1 - share) if p_tilde < 1 else 0.0)
    return signal / noise**0.5


def describe_base(model: PreTrainedModel, samples: Sequence[Sample], examples: Sequence[Example]) -> Base:
    """A model, from graded samples that it wrote itself. Right are those with a reward above 0.

    samples: they are counted. examples: these samples or some of them, as token ids, with the same rewards; their
    gradients are taken one by one. ValueError where they are all right, or all wrong.

    E+ is the mean squared gradient of log pi(y|x) / |y| of a right example, E- that of a wrong one, at pi = mu. The
    square of each weight's gradient is divided by its mean over all examples, as AdamW does, and weights that no
    example moves are left out. Takes a few float64 numbers for each weight.

    At pi = mu the mean gradient of log pi is 0. So all effective shares of positives pull in one direction, and differ
    in noise alone, which is least at p~* (ours; notebook 3 derives it, results/share.md tests it). It is about the
    first steps: later the weights of negatives fade.
    """
    if len({example.reward > 0 for example in examples}) < 2:
        raise ValueError("the examples are all right, or all wrong: there is nothing to compare")
    texts = defaultdict(list)  # of right samples, by prompt
    for sample in samples:
        if sample.reward > 0:
            texts[sample.prompt].append(sample.completion)
    different = [len(set(right[:EIGHT])) for right in texts.values() if len(right) >= EIGHT]

    weights = [weight for weight in model.parameters() if weight.requires_grad]
    size, device = sum(weight.numel() for weight in weights), weights[0].device
    squares = {is_right: torch.zeros(size, dtype=torch.float64) for is_right in (True, False)}  # summed over examples
    logmu = {True: [], False: []}
    for example in examples:
        prompt, length = len(example.prompt_ids), len(example.completion_ids)
        ids = torch.tensor([example.prompt_ids + example.completion_ids], device=device)
        is_completion = torch.arange(prompt + length, device=device)[None] >= prompt
        unused = torch.zeros(1, device=device)  # log mu, reward and length, which log pi does not need
        logp = topr.sequence_logprobs(model, topr.Batch(ids, torch.ones_like(ids), is_completion, *[unused] * 3)).sum()
        gradient = torch.autograd.grad(logp / length, weights, materialize_grads=True)
        squares[example.reward > 0] += torch.cat([part.flatten() for part in gradient]).cpu().double().square()
        logmu[example.reward > 0].append(logp.item())

    right, wrong = len(logmu[True]), len(logmu[False])
    mean = (squares[True] + squares[False]) / (right + wrong)
    is_moved = mean > 1e-10 * mean.max()  # what is below is 0 but for rounding
    return Base(
        right=sum(sample.reward > 0 for sample in samples) / len(samples),
        texts=fmean(different) if different else math.nan,
        logmu=fmean(logmu[True]),
        e_pos=(squares[True] / right / mean)[is_moved].mean().item(),
        e_neg=(squares[False] / wrong / mean)[is_moved].mean().item(),
    )
