"""What to change in a loss, for each difference from the paper's."""

import math
import re
from collections.abc import Sequence

from topr_conformance.vectors import LEFT_OUT, MIXED, NOT_FINITE, VectorResult

_DIVIDE_BY_LENGTH = (
    "divide each completion's sum by its own number of tokens, mask.sum(1); "
    "then take the mean over completions"
)
_IN_FLOAT32 = "compute log-probabilities, their sums and the weight in float32"
# How the name of a difference begins -> what to change. If several rows fit, all are printed.
ADVICE = {
    # the ratio
    "per-token": (
        "sum logp - logmu over the completion's tokens first; then clip the sum and take exp of it"
    ),
    "geometric mean of clipped tokens": "do not clip single tokens' log-ratios either; ",
    "geometric mean": (
        "do not divide the sum of the log-ratios by the length; divide the loss by it"
    ),
    "tempered": "take the ratio to the power 1: no factor and no temperature on its logarithm",
    "inverted ratio": "take logp - logmu, not logmu - logp",
    "scaled log-probabilities": (
        "take logp and logmu at one temperature, that of sampling, and without a factor"
    ),
    # the bounds
    "tis": "give positives (reward >= 0) the weight 1; clip only the weight of negatives",
    "ppo clip": (
        "take the detached weight, however small, times log pi, without PPO's min() of two terms; "
        "give positives the weight 1, and negatives min(pi/mu, 1)"
    ),
    "weight 0 outside": (
        "drop no token or completion because of its ratio: "
        "positives have the weight 1, negatives min(pi/mu, 1), however small"
    ),
    "another function of the ratio": (
        "give positives (reward >= 0) the weight 1, and negatives min(pi/mu, 1), detached: "
        "no sigmoid and no other function"
    ),
    "plain is": "give positives (reward >= 0) the weight 1; clip that of negatives to at most 1",
    "naive reinforce": (
        "weight negatives by min(pi/mu, 1); "
        "take log mu from the samples, not from the current model"
    ),
    "sft": "do not drop negatives: give them the weight min(pi/mu, 1)",
    "clip ": (
        "clip to [1, 1] where reward >= 0 and to [0, 1] elsewhere; "
        "clipping the log-ratio at -20 or lower does no harm"
    ),
    "clip 0..1 on positives, 1..1 on negatives": (
        "; the signs are exchanged: taper the negatives, not the positives"
    ),
    # where the gradient flows
    "no stop-gradient": "detach the weight",
    "frozen weight": "compute the weight from the current logp at every step",
    # the reward
    "batch-mean baseline": (
        "subtract your baseline before the loss, or keep this one if you want it"
    ),
    "constant baseline": (
        "subtract your baseline before the loss, and no other constant within it; "
        "a constant times log pi, as for an entropy, has the same effect"
    ),
    "branch by raw score": (
        "choose the bounds by the sign of what multiplies log pi: the reward after the baseline"
    ),
    "normalised reward": (
        "do not divide the reward by its standard deviation, or by another measure of its size"
    ),
    "normalised weights": "do not divide the weights by their mean or their sum in the batch",
    "clipped reward": "do not clip the reward or the advantage, and do not take its sign",
    "zero rewards": (
        "leave a reward of 0 at 0, without a gradient; "
        "if you want a negative, subtract a baseline instead"
    ),
    # the mean
    "token mean": _DIVIDE_BY_LENGTH,
    "sequence sum": _DIVIDE_BY_LENGTH,
    "divided by the longest length": (
        f"{_DIVIDE_BY_LENGTH}; do not divide by the longest length or the width of the batch"
    ),
    "length at least": f"{_DIVIDE_BY_LENGTH}, short ones included",
    "length off by": f"{_DIVIDE_BY_LENGTH}; count exactly the tokens of the sum",
    "mean over non-zero rewards": (
        "divide by the number of all completions, including those with a reward of 0"
    ),
    "separate means": "take one mean over all completions, positives and negatives together",
    "negatives count": ("remove the factor on negatives; use a baseline to make them count less"),
    # the mask, other terms, the precision
    "token missing": "shift logits against labels once; do not cut logp or the mask afterwards",
    "unmasked": (
        "align the mask with logp, and multiply by it before each sum, "
        "that of the log-ratios included"
    ),
    "extra term": (
        "remove terms that do not depend on the reward, such as a KL or an entropy, "
        "from the loss and from the reward"
    ),
    "left out": (
        "let every token of every completion count, in the loss and in the ratio, however long: "
        "no window of tokens, no filter of tokens or completions"
    ),
    "counted twice": (
        "let each completion enter one term only: multiply that of positives by reward >= 0 and "
        "that of negatives by reward < 0; nothing else may change it"
    ),
    "bfloat16": _IN_FLOAT32,
    "float16": _IN_FLOAT32,
    # differences without a name, which a failed vector shows
    "weight": (
        "weight negatives by the completion's min(pi/mu, 1): "
        "no other function of it, no clip of single tokens"
    ),
    "surrogate": (
        "take the detached weight, however small, times log pi: "
        "without a threshold, or PPO's min() of terms"
    ),
    "overflow": (
        "clip the log-ratio before exp, and take exp of differences only: "
        "log pi - log mu of a completion"
    ),
    "no known loss": "compare the gradients that --random 200 shows",
    # the sign, and which parameter is what
    "wrong sign": "put a minus before what is returned: a loss is minimised",
    "a guess": (
        "name the two parameters so that the checker knows which is log pi, of the model in "
        "training, and which is log mu, such as logp and logmu; until then no advice is certain"
    ),
}


def change(name: str) -> str:
    """What to change in a loss with a difference of this name.

    >>> change("clip 0.00673795..1").partition("; 0")[2]
    '.00673795 is e^-5'
    """
    texts = [text for start, text in ADVICE.items() if name.startswith(start)]
    if name.startswith("clip "):
        for bound in re.findall(r"0\.\d+", name):
            logarithm = math.log(float(bound))
            if abs(logarithm - round(logarithm)) < 1e-5:  # a clip of the log-ratio at an integer
                texts.append(f"; {bound} is e^{logarithm:.0f}")
    return "".join(texts)


# ---- differences without a name ------------------------------------------------------------------
# (a vector, how its measurement begins, a key of ADVICE): the first row that fits a failed vector
# is the most informative.
READINGS = [
    # First a failure that shows one thing only: tokens without a gradient,
    ("V5", f".*{LEFT_OUT}", "left out"),
    # a gradient where the reward is 0,
    ("V10", "R w = (?!0;)", "extra term"),
    # none where there should be one,
    ("V6", "R w = 0$", "surrogate"),
    ("V4", ".* 0(;|$)", "surrogate"),
    # one of the wrong sign,
    ("V7", "R w = (?!-)", "no stop-gradient"),
    ("V20", ".*infinity", "batch-mean baseline"),
    # terms that all completions enter,
    ("V20", f".*{MIXED}", "counted twice"),
    # then the vectors that ask for one thing alone,
    ("V9", "", "length off by"),
    ("V23", f"(?!.*{NOT_FINITE})", "left out"),
    ("V11", "", "unmasked"),
    ("V6", "", "weight"),
    ("V17", "", "weight"),
    ("V20", "", "separate means"),
    ("V22", "", "negatives count"),
    # then the others.
    ("V1", "", "per-token"),
    ("V2", "", "per-token"),
    ("V3", "", "geometric mean"),
    ("V4", "", "clip "),
    ("V8", "", "branch by raw score"),
    ("V10", "", "branch by raw score"),
    ("V16", "", "frozen weight"),
    ("V7", "", "no stop-gradient"),
    ("V5", "", "overflow"),
    ("V13", "", "overflow"),
]


def most_informative(results: Sequence[VectorResult]) -> tuple[VectorResult, str] | None:
    """The most informative failed vector, and its key of ADVICE; None if no vector failed."""
    failed = {result.name: result for result in results if result.status == "fail"}
    # A number says more than NaN, which may have many causes.
    finite = {name: result for name, result in failed.items() if NOT_FINITE not in result.measured}
    candidates = finite or failed
    for vector, start, advice in READINGS:
        if vector in candidates and re.match(start, candidates[vector].measured):
            return candidates[vector], advice
    return None
