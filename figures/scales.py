"""What figures compare, and the sizes of their runs: laptop and quick are ours."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from examples import math, verifier
from toprlib.settings import TINY
from train_gsm8k import PRESETS, gsm8k_task

RATE_SEEDS = range(100, 103)  # of the runs that choose learning rates; no figure trains with them
PAPER_METHODS = ("topr", "dpo", "ppo", "reinforce")  # of the paper's Figures 1 and 3
METHODS = (*PAPER_METHODS, "tis", "off_policy", "sft", "group")
# Variants of TOPR's loss in public code, by their names in topr_conformance.VARIANTS.
VARIANTS = ("per-token", "per-token + token mean", "geometric mean", "clip 0.8..1.2")
OPTIMIZERS = ("adamw", "adafactor", "sgd")
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
    "task": gsm8k_task,
    "method changes": {},  # to the settings of a method
    "rates": (3e-6, 1e-5, 3e-5, 1e-4, 3e-4),  # learning rates to choose from
    "finer rates": (1.8e-5, 5.5e-5),  # for arms that collapse between two of these
    # Figure, or a part of one -> least number of seeds of those of its runs that decide a claim.
    "seeds": {
        **dict.fromkeys(("fig1", "fig3", "fig4", "fig5", "fig8"), 5),
        "fig6, p~ = 1%": 13,
        "fig6, p~ = 10%": 8,
    },
    "fig4": {"test_problems": 200, "eval_samples": 24},
    # Figures 5, 6, 7, 9. Enough negatives for a set with 10% positives up to a pass@1 of 76%.
    "sets": {"examples": 1_024, "n": 24},
    "shares": (0.01, 0.1, 0.2, 0.5, 0.8, 1.0),  # p~ in Figures 5, 6 and 9
    "passes": 4,  # over the sets of Figures 6 and 7
    "clips": (0.1, 100.0),  # Figure 7; the tiny model hardly ever reaches the paper's norm of 1
    # Figure 7: how many times `rates` each one tries. AdamW divides by the gradient's size.
    "optimizers": {"adamw": 1, "sgd": 1e4},
    "fig8": {
        "iterations": 3,  # after these, more than 91% of the samples are correct
        "problems": 96,
        "examples": 643,  # 6.7 samples a problem, as the paper's 50,000 / 7,473
        "n": 64,  # the paper's number for Anna Karenina; all compositions choose from these
        "test_problems": 100,
        "eval_samples": 16,
        "k": 16,
    },
    "other models": {},  # of Figure 8
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
    "optimizers": {"adamw": 1},
    "fig8": {"iterations": 2, "n": 16, "examples": 24},
    "difficulty": 16,
    "verifiers": [replace(LAPTOP["verifiers"][0], **FEW_SOLUTIONS, iterations=2)],
}

# One epoch over all samples (Section 4.2); the number of evaluations is ours.
ONE_EPOCH = {"iterations": 1, "examples": None, "evals_per_epoch": 5}
# "applied to the more recent DeepSeek 8B model", "the 70B version of Llama 3" (Section 4.3)
DEEPSEEK = {"model": "deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "composition": "anna_karenina"}
LLAMA_70B = {"model": verifier.SETTINGS["paper"].generator, "iterations": 0, "engine_gpus": 4}
PAPER: Scale = {
    **LAPTOP,
    "base": replace(PRESETS["paper"], **ONE_EPOCH),
    "method changes": {"dpo": {"batch_size": 16}},  # "a per-GPU batch size of 1" (4.2), of pairs
    "rates": (5e-7,),  # "chosen from a small parameter sweep" (4.2)
    "finer rates": (),
    "seeds": {},
    "fig4": {"eval_samples": 64},
    "sets": {"examples": 50_000, "n": 20},  # "50,000" (4.3); n is ours: enough negatives
    "shares": (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.8, 1.0),  # "from 1% all the way to 100%" (4.3)
    "passes": 1,
    "clips": (1.0, 100.0),
    "optimizers": {"adafactor": 1},
    # "to N = 50,000 data points"; "for each problem, we sample 64 candidate solutions" (4.3)
    "fig8": {"iterations": 5, "n": 64, "examples": 50_000},
    "other models": {"DeepSeek-R1 8B, Anna Karenina": DEEPSEEK, "Llama 3 70B": LLAMA_70B},
    "verifiers": [verifier.SETTINGS["paper"]],
}
PAPER_MATH: Scale = {
    **PAPER,
    "base": replace(math.SETTINGS["paper"], **ONE_EPOCH),
    "task": math.math_task,
    "fig4": {"eval_samples": 16},  # "16 for MATH due to the cost of evaluating" (4.2)
    "sets": {"examples": 50_000, "n": 32},  # "n = 32 candidate solutions" (4.1)
}
SCALES = {"laptop": LAPTOP, "quick": QUICK, "paper": PAPER, "paper-math": PAPER_MATH}
