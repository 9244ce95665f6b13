"""Is that TOPR? Compares a loss's gradient with the paper's: `identify(loss).variant`."""

from topr_conformance import variants
from topr_conformance.adapters import adapted
from topr_conformance.hypotheses import Hypothesis
from topr_conformance.identification import Report, identify
from topr_conformance.limits import Limits
from topr_conformance.loading import load
from topr_conformance.losses import InputError, LossInputs, neg_grad
from topr_conformance.oracle import paper_neg_grad
from topr_conformance.random_batches import compare
from topr_conformance.variants import VARIANTS
from topr_conformance.vectors import VECTORS, check_vector

__all__ = [
    "VARIANTS",
    "VECTORS",
    "Hypothesis",
    "InputError",
    "Limits",
    "LossInputs",
    "Report",
    "adapted",
    "check_vector",
    "compare",
    "identify",
    "load",
    "neg_grad",
    "paper_neg_grad",
    "variants",
]
