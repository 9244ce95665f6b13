"""What the paper's figures compare, at which size, and how a figure gets its runs.

All sizes of LAPTOP and QUICK are ours; PAPER has the paper's values.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from paper.runs import Finished, Job, Jobs, Measured, Sweep, in_seeds, sharing_samples
from pipeline.plots import CALLED, Style, draw, save_figure
from pipeline.records import Task, read_text, write_file
from pipeline.report import Estimate, Table
from pipeline.settings import TINY, Settings
from tasks.math import SETTINGS as MATH_SETTINGS
from tasks.math import math_task
from tasks.verifier import SETTINGS as VERIFIER_SETTINGS
from tasks.verifier import VerifierSettings
from train_gsm8k import SETTINGS, gsm8k_task


class Arm(NamedTuple):
    """What a figure compares: its name in legends, its style (or the name of one), and what it changes in a run."""

    name: str
    style: Style | str
    changes: Mapping[str, Any] = MappingProxyType({})  # settings
    token_loss: str | None = None  # as in a Job


PAPER_METHODS = ("topr", "dpo", "ppo", "reinforce")  # Figures 1 and 3
METHOD_ARMS = {
    **{
        name: Arm(CALLED[name], name, {"method": name})
        for name in (*PAPER_METHODS, "tis", "off_policy")
    },
    "sft": Arm("SFT on positives", "sft", {"method": "sft"}),
    # ours: with GRPO's baseline
    "group": Arm(
        "TOPR, group-mean baseline", Style("#7B3FA0", (0, (5, 1)), "<"), {"baseline_from": "group"}
    ),
}
STYLES_OF_VARIANTS = {  # of the loss, by their names in conformance.variants.VARIANTS
    "per-token": Style("#E69F00", "--", "s"),
    "per-token + token mean": Style("#CC79A7", ":", "v"),
    "geometric mean": Style("#009E73", "-.", "^"),
    "clip 0.8..1.2": Style("#D55E00", (0, (6, 1, 1, 1, 1, 1)), "D"),
}
VARIANTS = {name: Arm(name, style, token_loss=name) for name, style in STYLES_OF_VARIANTS.items()}
# whose accuracy falls from near its best to a half or less from one rate of the grid to the next
WITH_A_CLIFF = {"reinforce", "dpo", *VARIANTS}
RATED = (
    METHOD_ARMS
    | VARIANTS
    | {name: Arm(name, "", {"optimizer": name}) for name in ("adamw", "adafactor", "sgd")}
)


@dataclass(frozen=True)
class Scale:
    """The sizes of the figures' runs. Those of the laptop are ours: what two cores do in minutes."""

    base: Settings
    rates: tuple[float, ...]  # learning rates to choose from; paper: 5e-7 (4.2)
    shares: tuple[
        float, ...
    ]  # p~ of Figures 5 and 6; paper: "from 1% all the way to 100%" (4.3), the steps are ours
    sets: Mapping[str, int]  # size of the sets of Figures 5 to 7
    clips: tuple[float, float]  # Figure 7's gradient norms; paper: 1 and 100 (4.3)
    optimizers: Mapping[
        str, float
    ]  # Figure 7's, and their rates as multiples of the grid's; paper: Adafactor (4.2)
    tested: Mapping[
        str, int
    ]  # settings that Figure 4 changes; paper: 64 samples a test problem (4.2)
    verifier: VerifierSettings  # Table 2
    iterated: Mapping[str, Any]  # settings that Figure 8 changes
    finer: tuple[float, ...] = ()  # learning rates besides, for those WITH_A_CLIFF
    decisive: Mapping[str, int] = field(
        default_factory=dict
    )  # study -> seeds of arms that a verdict hangs on
    passes: int = 1  # over the sets of Figures 6 and 7; paper: one epoch (4.2)
    difficulty: int = 128  # Figure 9: samples a question (App. D)
    other_verifiers: tuple[str, ...] = ()  # base models of Table 2 besides the verifier's own
    method_changes: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict
    )  # method -> settings that it changes
    others: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict
    )  # Figure 8: settings of other models' runs
    task: Callable[[Settings], Task] = gsm8k_task


MAJORITY_SETTINGS = {
    "test_problems": 100,
    "test_samples": 16,
    "k": 16,
}  # how the laptop measures maj@16
LAPTOP = Scale(
    base=replace(
        SETTINGS["laptop"],
        problems=160,
        max_new_tokens=96,
        tokens_at_once=20_000,
        micro_batch=16,
        test_samples=8,
        k=4,
        curve_samples=3,
    ),
    rates=(3e-6, 1e-5, 3e-5, 1e-4, 3e-4),
    finer=(1.8e-5, 5.5e-5),
    decisive={"fig1": 5, "fig3": 5, "fig4": 5, "fig5": 5, "fig6": 8, "fig8": 5, "robustness": 5},
    shares=(0.01, 0.1, 0.2, 0.5, 0.8, 1.0),
    sets={
        "examples": 1_024,
        "n": 24,
    },  # 24: enough negatives for a set with 10% positives up to a pass@1 of 76%
    passes=4,
    clips=(0.1, 100.0),  # a norm of 1 is hardly ever reached
    optimizers={
        "adamw": 1,
        "sgd": 1e4,
    },  # one that divides by the gradient's size, and one that does not
    tested={"test_problems": 200, "test_samples": 24},
    verifier=VERIFIER_SETTINGS["laptop"],
    other_verifiers=(str(TINY / "base"),),
    # 643 / 96 = 6.7 samples a problem, as the paper's 50,000 / 7,473. n: all compositions choose from the same samples.
    # Three iterations: later more than 91% of the samples are right, and too few negatives are left for a set.
    iterated={"iterations": 3, "problems": 96, "examples": 643, "n": 64, **MAJORITY_SETTINGS},
)
QUICK = replace(
    LAPTOP,
    base=replace(
        LAPTOP.base,
        problems=12,
        n=8,
        test_problems=10,
        test_samples=4,
        k=2,
        curve_points=2,
        curve_samples=2,
    ),
    rates=(1e-4,),
    finer=(),
    decisive={},
    shares=(0.1, 1.0),
    sets={"examples": 24},
    passes=2,
    optimizers={"adamw": 1},
    tested={"test_samples": 6},
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
    iterated={"iterations": 2, "candidates": 16, "n": 16, "examples": 24},
)
DEEPSEEK = "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"
PAPER = Scale(
    base=replace(  # an epoch over all samples (4.2), and the same intervals after each iteration (ours)
        SETTINGS["paper"], iterations=1, examples=None, curve_points=5, between_samples=None
    ),
    rates=(5e-7,),
    shares=(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.8, 1.0),
    sets={
        "examples": 50_000,
        "n": 20,
    },  # "two datasets containing 50,000 examples"; 20: for enough negatives (ours)
    clips=(1.0, 100.0),
    optimizers={"adafactor": 1},
    tested={"test_samples": 64},
    verifier=VERIFIER_SETTINGS["paper"],
    iterated={"iterations": 5, "examples": 50_000},  # "to N = 50,000 data points" (4.3)
    method_changes={
        "dpo": {"batch": 16}
    },  # "a per-GPU batch size of 1" (4.2): a pair is two completions
    others={  # "applied to the more recent DeepSeek 8B model", "the 70B version of Llama 3" (4.3)
        "DeepSeek-R1 8B, Anna Karenina": {"model": DEEPSEEK, "composition": "anna_karenina"},
        "Llama 3 70B": {
            "model": VERIFIER_SETTINGS["paper"].generator,
            "iterations": 0,
            "engine_gpus": 4,
        },  # 141 GB
    },
)
PAPER_MATH = replace(
    PAPER,
    base=replace(MATH_SETTINGS["paper"], iterations=1, examples=None, curve_points=5),
    sets={"examples": 50_000, "n": 32},  # "n = 32 candidate solutions" (4.1)
    tested={"test_samples": 16},  # "16 for MATH due to the cost of evaluating" (4.2)
    task=math_task,
)
SCALES = {"laptop": LAPTOP, "quick": QUICK, "paper": PAPER, "paper-math": PAPER_MATH}
HELD_OUT = (
    100  # training problems that learning rates are chosen on, ours; no figure trains on them
)


def held_out_task(settings: Settings) -> Task:
    """The training problems, and as test problems the HELD_OUT training problems that follow them."""
    task = gsm8k_task(replace(settings, problems=settings.problems + HELD_OUT))
    return replace(
        task, train=task.train[: settings.problems], test=task.train[settings.problems :]
    )


def called(method: str, lr: float) -> str:
    """A method's name in legends, with its learning rate: "TOPR, lr 1e-4"."""
    return f"{METHOD_ARMS[method].name}, lr {lr:.0e}".replace("e-0", "e-")


class Figure(NamedTuple):
    """All numbers of a picture (data), those worth a sentence, which are shares in [0, 1] or others, and tables."""

    data: Mapping[str, Any]
    shares: Mapping[str, Estimate]
    numbers: Mapping[str, Estimate] = MappingProxyType({})
    tables: Mapping[str, Table] = MappingProxyType({})

    def table(self, name: str = "measured") -> Table:
        """The numbers worth a sentence, each with its interval; name: above the first column."""
        gains = {what: (" points", -1) if " - " in what else (" %", 0) for what in self.shares}
        rows = [
            [w, x.text(100, unit=gains[w][0], within=(gains[w][1], 1))]
            for w, x in self.shares.items()
        ]
        for what, value in self.numbers.items():
            digits, lowest = (
                1 if value.mean >= 1 else 3,
                0 if min(value.each, default=-1) >= 0 else -math.inf,
            )
            is_largest = what.endswith("largest gradient norm")
            text = (
                value.spread(digits)
                if is_largest
                else value.text(digits=digits, within=(lowest, math.inf))
            )
            rows.append([what, text])
        return Table(
            [name, "95% interval over seeds; or its seeds; of largest norms median and range"], rows
        )


class Study:
    """How a figure is made. Each is a subclass, with its `arms`; `read()`, the Figure, from the finished runs; and
    `panels(data)`, the picture, from Figure.data alone: it can be drawn anew without a run.

    rated: the names in RATED whose learning rates it needs. `make` fills rates, the learning rate of each; tried, the
    accuracy at each rate tried; runs, the finished run of each (arm, seed); rate_runs, those that chose the rates.
    """

    rated: Sequence[str] = ("topr",)

    def __init__(self, scale: Scale, seeds: Sequence[int]):
        self.scale, self.seeds = scale, seeds
        self.grids = {}
        for name in self.rated:
            rates = scale.rates + scale.finer * (name in WITH_A_CLIFF)
            self.grids[name] = sorted(rate * scale.optimizers.get(name, 1) for rate in rates)
        self.rates = {name: grid[0] for name, grid in self.grids.items()}
        self.tried, self.runs, self.rate_runs = {}, {}, {}

    def arms(self) -> Jobs:
        """The run of each arm."""
        return {}

    @property
    def two_rates(self) -> dict[str, float]:
        """TOPR's best rate and the second best, by what is added to the name of a claim that depends on the rate."""
        tried = self.tried.get("topr", {})
        if len(tried) < 2:
            return {"": self.rates["topr"]}
        return {
            "": self.rates["topr"],
            ", second best rate": sorted(tried, key=tried.__getitem__)[-2],
        }

    def decides(self, arm: Any) -> bool:
        """Whether a verdict hangs on the arm, which then gets at least the seeds that Scale.decisive says."""
        return True

    def seeds_of(self, arm: Any) -> range:
        """The seeds of an arm; those of arms that share its samples may be fewer."""
        wanted = self.scale.decisive.get(type(self).__name__.lower(), 0) if self.decides(arm) else 0
        return range(self.seeds[0], self.seeds[0] + max(len(self.seeds), wanted))

    def job(
        self, label: str, base: Settings, arm: Arm = METHOD_ARMS["topr"], **changes: Any
    ) -> Job:
        """The run of an arm: the base with what the arm changes, its method at this scale, and `changes`."""
        method_changes = self.scale.method_changes.get(arm.changes.get("method"), {})
        settings = replace(base, **{**arm.changes, **method_changes, **changes})
        return Job(label, settings, self.scale.task, token_loss=arm.token_loss)

    def rate_arms(self) -> Jobs:
        """(name, learning rate) -> its run on held-out problems, with TOPR's samples, where there are several rates."""
        if not self.grids or len(self.scale.rates) == 1:
            return {}
        base = replace(
            self.scale.base, seed=100, test_samples=6, curve_points=1
        )  # no figure's seed
        wanted = [
            ("topr", self.scale.rates[0]),
            *((name, rate) for name, grid in self.grids.items() for rate in grid),
        ]
        arms = {
            (n, rate): self.job(f"rate-{n}-{rate:g}", base, RATED[n], lr=rate) for n, rate in wanted
        }
        return sharing_samples({key: job._replace(task=held_out_task) for key, job in arms.items()})

    def planned(self) -> Jobs:
        """All of its runs; where there are several learning rates to choose from, only the runs that choose."""
        return self.rate_arms() or in_seeds(self.arms(), self.seeds_of)

    def make(self, sweep: Sweep) -> None:
        """Make those of its runs that are not there. A learning rate is the one with most correct held-out answers."""
        self.rate_runs = sweep.make(self.rate_arms())
        if self.rate_runs:
            for name, grid in self.grids.items():
                self.tried[name] = {
                    rate: self.rate_runs[name, rate].measured["correct"][-1] for rate in grid
                }
                self.rates[name] = max(grid, key=self.tried[name].__getitem__)
        self.runs = sweep.make(in_seeds(self.arms(), self.seeds_of))

    def table(
        self, also: Callable[[Finished], Mapping[str, Sequence[float]]] = lambda _: {}
    ) -> Measured:
        """What was measured of the runs; also: what the figure measures besides, from a run's files."""
        return Measured(
            (arm, seed, {**run.measured, **also(run)}) for (arm, seed), run in self.runs.items()
        )

    def publish(self, name: str, command: str, out: Path) -> None:
        """Write NAME.json and NAME.png into `out`, and print the numbers worth a sentence."""
        file, figure = out / f"{name}.json", self.read()
        costs = [
            *{
                run.settings.out: run.cost
                for run in (*self.rate_runs.values(), *self.runs.values())
            }.values()
        ]
        tried = {
            RATED[n].name: {f"{rate:g}": share for rate, share in each.items()}
            for n, each in self.tried.items()
        }
        content = {
            "figure": name,
            "command": command,
            "seeds": sorted({*self.seeds, *(seed for _, seed in self.runs)}),
            "runs": len(costs),
            "core_minutes": round(sum(cost["seconds"] for cost in costs) / 60, 1),
            "commits": sorted({cost["commit"] for cost in costs}),
            "versions": costs[0]["versions"] if costs else {},
            "learning_rates": tried,
            "shares": {what: value._asdict() for what, value in figure.shares.items()},
            "numbers": {what: value._asdict() for what, value in figure.numbers.items()},
            "tables": {key: table._asdict() for key, table in figure.tables.items()},
            "data": figure.data,
        }
        write_file(file, json.dumps(content, indent=1, allow_nan=False) + "\n")
        self.redraw(file)
        figure.table(name).print()

    def redraw(self, file: Path) -> None:
        """Draw NAME.png from the numbers of NAME.json."""
        save_figure(
            draw(self.panels(json.loads(read_text(file))["data"])), file.with_suffix(".png")
        )
