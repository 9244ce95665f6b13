"""Ours: accuracy against learning rate, for all methods and for variants of TOPR's loss.

It is measured on training problems that no figure trains on or tests on. All figures choose their
learning rates by these runs: Figures 4 and 8, which compare methods at their own rates, by three
seeds, since the difference of two rates in one seed is often within its error.
"""

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from figures.common import by_seed, curve
from figures.pictures import LABELS, LOOKS, new_figure, plot
from figures.runs import Rates, Row, Run, measure
from figures.scales import OPTIMIZERS, PAPER_METHODS, RATE_SEEDS, VARIANTS, Scale
from toprlib.records import Task
from toprlib.settings import Settings
from train_gsm8k import gsm8k_task

TUNED = ()
FIRST_SEED = RATE_SEEDS[0]  # for seed 0 of the command
HELD_OUT = 100  # problems
# Their accuracy collapses between two rates of the grid.
WITH_A_CLIFF = ("reinforce", "dpo", *VARIANTS)
PANELS = {
    "the paper's methods": PAPER_METHODS,
    "other methods": ("topr", "tis", "off_policy", "sft", "positives_only", "group"),
    "variants of TOPR's loss": ("topr", *VARIANTS),
}


def held_out_task(settings: Settings) -> Task:
    """The training problems, and as test problems the HELD_OUT training problems after them."""
    # With --samples a run would load no training problems.
    task = gsm8k_task(replace(settings, problems=settings.problems + HELD_OUT, samples=None))
    train = task.train[: settings.problems]
    return replace(task, train=train, test=task.train[settings.problems :])


def rate_grid(scale: Scale, arm: str) -> list[float]:
    """The learning rates to try for an arm, in ascending order."""
    finer = scale["finer rates"] if arm in WITH_A_CLIFF else ()
    return sorted(rate * OPTIMIZERS.get(arm, 1) for rate in (*scale["rates"], *finer))


def rate_rows(scale: Scale, arms: Sequence[str]) -> list[Row]:
    """A row on held-out problems for each arm and rate."""
    changes = {"eval_samples": 6, "evals_per_epoch": 1}
    rows = []
    for arm in arms:
        row = {"arm": arm, "changes": changes, "task": held_out_task}
        rows += [{**row, "lr": lr} for lr in rate_grid(scale, arm)]
    return rows


def rank_rates(runs: Sequence[Run]) -> tuple[Rates, dict[str, dict[str, float]]]:
    """The learning rates of each arm, the best one first; and the accuracies that say so."""
    accuracy = by_seed(measure(runs), "correct", ["arm", "lr"]).mean()
    ranked = {}
    tried = {}
    for arm in accuracy.index.unique(0):
        ranked[arm] = list(accuracy[arm].sort_values(ascending=False, kind="stable").index)
        tried[LABELS.get(arm, arm)] = {f"{lr:g}": share for lr, share in accuracy[arm].items()}
    return ranked, tried


def rows(scale: Scale, rates: Rates) -> list[Row]:
    """All methods and variants at all rates."""
    return rate_rows(scale, list(dict.fromkeys(arm for arms in PANELS.values() for arm in arms)))


def read(runs: list[Run], scale: Scale) -> dict:
    """Accuracy over learning rates."""
    correct = by_seed(measure(runs), "correct", ["arm", "lr"])
    data = {}
    for arm in correct.columns.unique(0):
        data[arm] = {"lr": list(correct[arm]), **curve(correct[arm])}
    return {"shares": {}, "numbers": {}, "data": data}


def draw(data: dict) -> Figure:
    """Three groups of arms; the values have no interval."""
    figure, panels = new_figure(len(PANELS))
    for axes, (title, arms) in zip(panels, PANELS.items(), strict=True):
        for arm in arms:
            plot(axes, data[arm], LOOKS[arm], data[arm]["lr"])
        axes.set(title=title, xlabel="learning rate", xscale="log", ylabel="correct (%)")
    return figure
