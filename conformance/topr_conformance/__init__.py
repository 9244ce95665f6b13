"""Is that TOPR? Compares a loss's gradient with the paper's: `identify(loss).variant`."""

from topr_conformance.combinations import VARIANTS, paper
from topr_conformance.identification import identify
from topr_conformance.losses import InputError, LossInputs, neg_grad
from topr_conformance.random_batches import compare

__all__ = ["VARIANTS", "InputError", "LossInputs", "compare", "identify", "neg_grad", "paper"]
