"""What figures compare, and the sizes of their runs, which are ours."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from examples import verifier
from toprlib.settings import TINY
from train_gsm8k import PRESETS

RATE_SEEDS = range(100, 103)  # of the runs that choose learning rates; no figure trains with them
PAPER_METHODS = ("topr", "dpo", "ppo", "reinforce")  # of the paper's Figures 1 and 3
METHODS = (*PAPER_METHODS, "tis", "off_policy", "sft", "group")
# Variants of TOPR's loss in public code, by their names in topr_conformance.VARIANTS.
VARIANTS = ("per-token", "per-token + token mean", "geometric mean", "clip 0.8..1.2")
OPTIMIZERS = {"adamw": 1, "sgd": 1e4}  # of Figure 7, and how many times `rates` each one tries
# What figures compare -> its settings, or the variant of its loss.
ARMS: dict[str, Mapping[str, Any]] = {
    **{name: {"method": name} for name in METHODS},  # sft: negatives stay, with weight 0
    "group": {"baseline_from": "group"},  # GRPO's baseline with TOPR's weight: ours
    "positives_only": {"composition": "positives_only"},  # fewer samples, and so fewer steps
    "uniform": {"composition": "uniform"},
    "its_positives": {"composition": "uniform", "method": "sft"},
    "anna_karenina": {"composition": "anna_karenina"},
    **{name: {"optimizer": name} for name in OPTIMIZERS},
    **{name: {"variant": name} for name in VARIANTS},
}

Scale = Mapping[str, Any]  # the size of every figure
SMALL = {"problems": 160, "max_new_tokens": 96, "micro_batch_size": 16, "eval_samples": 8, "k": 4}
LAPTOP: Scale = {
    "base": replace(PRESETS["laptop"], **SMALL),
    "rates": (3e-6, 1e-5, 3e-5, 1e-4, 3e-4),  # learning rates to choose from
    "finer rates": (1.8e-5, 5.5e-5),  # for arms that collapse between two of these
    # Figure, or a part of one -> least number of seeds of those of its runs that decide a claim.
    "seeds": {
        **dict.fromkeys(("fig1", "fig3", "fig4", "fig5", "fig8"), 5),
        "fig6, p~ = 1%": 13,
        "fig6, p~ = 10%": 8,
    },
    "fig4": {"test_problems": 200, "eval_samples": 24},
    # Figures 5, 6, 7. Enough negatives for a set with 10% positives up to a pass@1 of 76%.
    "sets": {"examples": 1_024, "n": 24},
    "shares": (0.01, 0.1, 0.2, 0.5, 0.8, 1.0),  # p~ in Figures 5 and 6
    "passes": 4,  # over the sets of Figures 6 and 7
    "clips": (0.1, 100.0),  # Figure 7; the tiny model hardly ever reaches the paper's norm of 1
    "fig8": {
        "iterations": 3,  # after these, more than 91% of the samples are correct
        "problems": 96,
        "examples": 643,  # 6.7 samples a problem, as the paper's 50,000 / 7,473
        "n": 64,  # the paper's number for Anna Karenina; all compositions choose from these
        "test_problems": 100,
        "eval_samples": 16,
        "k": 16,
    },
    "difficulty": 128,  # samples of each question in Figure 9 (paper, Appendix D)
    "verifiers": [
        verifier.SETTINGS["laptop"],
        replace(verifier.SETTINGS["laptop"], model=str(TINY / "base")),
    ],
}

FEW = {"problems": 12, "n": 8, "test_problems": 10, "eval_samples": 4, "k": 2, "evals_per_epoch": 2}
FEW_SOLUTIONS = {"problems": 8, "test_problems": 10, "train_solutions": 4, "test_solutions": 4}
QUICK: Scale = {
    **LAPTOP,
    "base": replace(LAPTOP["base"], **FEW),
    "rates": (1e-4,),
    "finer rates": (),
    "seeds": {},
    "fig4": {"eval_samples": 6},
    "sets": {"examples": 24},
    "shares": (0.1, 1.0),
    "passes": 2,
    "fig8": {"iterations": 2, "n": 16, "examples": 24},
    "difficulty": 16,
    "verifiers": [replace(LAPTOP["verifiers"][0], **FEW_SOLUTIONS, iterations=2)],
}
SCALES = {"laptop": LAPTOP, "quick": QUICK}
