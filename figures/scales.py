"""The sizes of the figures' runs: LAPTOP and QUICK are ours, PAPER and PAPER_MATH the paper's."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tasks.math import SETTINGS as MATH_SETTINGS
from tasks.math import math_task
from tasks.verifier import SETTINGS as VERIFIER_SETTINGS
from tasks.verifier import VerifierSettings
from toprlib.records import Task
from toprlib.settings import TINY, Settings
from train_gsm8k import PRESETS, gsm8k_task

# Changes to settings: the name of a setting -> its value.
Changes = Mapping[str, Any]


@dataclass(frozen=True)
class Scale:
    """The size of every figure. Each field that the paper has a value for names it."""

    base: Settings

    # Learning rates to choose from (paper, Section 4.2: 5e-7).
    rates: tuple[float, ...]

    # Effective shares of positives, p~, in Figures 5 and 6
    # (paper, Section 4.3: "from 1% all the way to 100%"; the steps are ours).
    shares: tuple[float, ...]

    # Size of the training sets of Figures 5, 6, 7 and 9 (paper, Section 4.3: 50,000 examples).
    sets: Mapping[str, int]

    # The two gradient norms that Figure 7 clips at (paper, Section 4.3: 1 and 100).
    clips: tuple[float, float]

    # Optimizers of Figure 7, and how many times the rates of `rates` each one tries
    # (paper, Section 4.2: Adafactor).
    optimizers: Mapping[str, float]

    # Settings of Figure 4 (paper, Section 4.2: 64 samples of each test problem).
    tested: Mapping[str, int]

    # Settings of Table 2.
    verifier: VerifierSettings

    # Settings of Figure 8.
    iterated: Changes

    # More learning rates, for methods whose accuracy falls from near its best to half of it or
    # less between two neighbours of `rates`.
    finer_rates: tuple[float, ...] = ()

    # Figure, or a part of one -> least number of seeds of those of its runs that decide a claim.
    deciding_seeds: Mapping[str, int] = field(default_factory=dict)

    # Passes over the training sets of Figures 6 and 7 (paper, Section 4.2: 1).
    passes: int = 1

    # Samples of each question in Figure 9 (paper, Appendix D: 128).
    difficulty: int = 128

    # Base models of Table 2 besides the one in `verifier`.
    other_verifiers: tuple[str, ...] = ()

    # Method -> settings that it changes at this scale.
    method_changes: Mapping[str, Changes] = field(default_factory=dict)

    # Other models of Figure 8: name in the legend -> settings.
    others: Mapping[str, Changes] = field(default_factory=dict)

    task: Callable[[Settings], Task] = gsm8k_task

    def seeds_for(self, figure: str, seeds: range) -> range:
        """The seeds of the runs of a figure that decide a claim: `seeds`, and more if too few.

        >>> LAPTOP.seeds_for("fig1", range(3)), LAPTOP.seeds_for("fig2", range(3))
        (range(0, 5), range(0, 3))
        """
        count = max(len(seeds), self.deciding_seeds.get(figure, 0))
        return range(seeds.start, seeds.start + count)


LAPTOP_BASE = replace(
    PRESETS["laptop"],
    problems=160,
    max_new_tokens=96,
    micro_batch_size=16,
    eval_samples=8,
    k=4,
)

LAPTOP = Scale(
    base=LAPTOP_BASE,
    rates=(3e-6, 1e-5, 3e-5, 1e-4, 3e-4),
    finer_rates=(1.8e-5, 5.5e-5),
    deciding_seeds={
        "fig1": 5,
        "fig3": 5,
        "fig4": 5,
        "fig5": 5,
        "fig6, p~ = 1%": 13,
        "fig6, p~ = 10%": 8,
        "fig8": 5,
        "robustness": 5,
    },
    shares=(0.01, 0.1, 0.2, 0.5, 0.8, 1.0),
    # With n = 24 there are enough negatives for a set with 10% positives up to a pass@1 of 76%.
    sets={"examples": 1_024, "n": 24},
    passes=4,
    # The paper's norm of 1 is hardly ever reached by the tiny model.
    clips=(0.1, 100.0),
    # AdamW divides by the gradient's size, SGD does not.
    optimizers={"adamw": 1, "sgd": 1e4},
    tested={"test_problems": 200, "eval_samples": 24},
    verifier=VERIFIER_SETTINGS["laptop"],
    other_verifiers=(str(TINY / "base"),),
    iterated={
        # After three iterations more than 91% of the samples are correct: too few negatives.
        "iterations": 3,
        # 643 / 96 = 6.7 samples a problem, as the paper's 50,000 / 7,473.
        "problems": 96,
        "examples": 643,
        # The paper's number for Anna Karenina; all compositions choose from the same samples.
        "n": 64,
        # For maj@16.
        "test_problems": 100,
        "eval_samples": 16,
        "k": 16,
    },
)

QUICK = replace(
    LAPTOP,
    base=replace(
        LAPTOP_BASE,
        problems=12,
        n=8,
        test_problems=10,
        eval_samples=4,
        k=2,
        evals_per_epoch=2,
    ),
    rates=(1e-4,),
    finer_rates=(),
    deciding_seeds={},
    shares=(0.1, 1.0),
    sets={"examples": 24},
    passes=2,
    optimizers={"adamw": 1},
    tested={"eval_samples": 6},
    difficulty=16,
    verifier=replace(
        VERIFIER_SETTINGS["laptop"],
        problems=8,
        test_problems=10,
        train_solutions=4,
        test_solutions=4,
        iterations=2,
    ),
    other_verifiers=(),
    iterated={"iterations": 2, "n": 16, "examples": 24},
)

DEEPSEEK = "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"
PAPER = Scale(
    # One epoch over all samples (Section 4.2). Evaluations along it and after each iteration
    # have the same number of samples (ours).
    base=replace(PRESETS["paper"], iterations=1, examples=None, evals_per_epoch=5),
    rates=(5e-7,),
    shares=(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.8, 1.0),
    # With n = 20 there are enough negatives (ours).
    sets={"examples": 50_000, "n": 20},
    clips=(1.0, 100.0),
    optimizers={"adafactor": 1},
    tested={"eval_samples": 64},
    verifier=VERIFIER_SETTINGS["paper"],
    # "to N = 50,000 data points" (Section 4.3).
    # "For each problem, we sample 64 candidate solutions" (Section 4.3).
    iterated={"iterations": 5, "n": 64, "examples": 50_000},
    # "a per-GPU batch size of 1" (Section 4.2): a pair is two completions.
    method_changes={"dpo": {"batch_size": 16}},
    # "applied to the more recent DeepSeek 8B model", "the 70B version of Llama 3" (Section 4.3).
    others={
        "DeepSeek-R1 8B, Anna Karenina": {"model": DEEPSEEK, "composition": "anna_karenina"},
        # Its weights take 141 GB.
        "Llama 3 70B": {
            "model": VERIFIER_SETTINGS["paper"].generator,
            "iterations": 0,
            "engine_gpus": 4,
        },
    },
)

PAPER_MATH = replace(
    PAPER,
    base=replace(MATH_SETTINGS["paper"], iterations=1, examples=None, evals_per_epoch=5),
    # "n = 32 candidate solutions" (Section 4.1).
    sets={"examples": 50_000, "n": 32},
    # "16 for MATH due to the cost of evaluating" (Section 4.2).
    tested={"eval_samples": 16},
    task=math_task,
)

SCALES = {"laptop": LAPTOP, "quick": QUICK, "paper": PAPER, "paper-math": PAPER_MATH}

# Training problems that learning rates are chosen on, ours; no figure trains on them.
HELD_OUT = 100


def held_out_task(settings: Settings) -> Task:
    """The training problems, and as test problems the HELD_OUT training problems after them."""
    # With --samples a run would load no training problems.
    task = gsm8k_task(replace(settings, problems=settings.problems + HELD_OUT, samples=None))
    train = task.train[: settings.problems]
    test = task.train[settings.problems :]
    return replace(task, train=train, test=test)


def training_task(settings: Settings) -> Task:
    """The training problems as test problems, to measure how hard they are."""
    task = gsm8k_task(settings)
    return replace(task, test=task.train)
