"""What the paper's figures compare, at which size, and how a figure gets its runs.

All sizes of LAPTOP and QUICK are ours; PAPER has the paper's values.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from conformance.variants import VARIANTS
from paper.runs import Finished, Job, Jobs, Measured, Sweep, in_seeds, sharing_samples
from pipeline.plots import Style
from pipeline.records import Task
from pipeline.report import Estimate, Table
from pipeline.settings import TINY, Settings
from tasks.math import PRESETS as MATH_PRESETS
from tasks.math import math_task
from tasks.verifier import LLAMA_70B, VerifierSettings
from tasks.verifier import PRESETS as VERIFIER_PRESETS
from train_gsm8k import PRESETS, gsm8k_task

# ---- methods ----------------------------------------------------------------------------------------------------


class Arm(NamedTuple):
    """A method: its name in legends, its style, which may be one of plots.STYLES, and the settings that it changes."""

    name: str
    style: Style | str
    changes: Mapping[str, Any]


METHODS = {
    "topr": Arm("TOPR", "topr", {}),
    "dpo": Arm("DPO", "dpo", {"method": "dpo"}),
    "ppo": Arm("PPO", "ppo", {"method": "ppo"}),
    "reinforce": Arm("naive REINFORCE", "reinforce", {"method": "reinforce"}),
    "tis": Arm("TIS", "tis", {"method": "tis"}),
    "off_policy": Arm("plain IS", "off_policy", {"method": "off_policy"}),
    "sft": Arm("SFT on positives", "sft", {"method": "sft"}),
    # ours: neighbours of the paper's methods. AsymRE's mean is that of all samples.
    "group": Arm("TOPR, group-mean baseline", Style("#7B3FA0", (0, (5, 1)), "<"), {"baseline_from": "group"}),  # GRPO's
    "asymre": Arm(
        "AsymRE",
        Style("#8C6D1F", (0, (4, 2, 1, 2)), ">"),
        {"method": "reinforce", "baseline_from": "mean", "baseline": -0.1},
    ),
    # a penalty of 0.5 KL(mu || pi) by Proposition 3.1, were the loss not divided by the length
    "kl": Arm(
        "naive REINFORCE, c = -0.5", Style("#6E6E6E", (0, (2, 1)), "*"), {"method": "reinforce", "baseline": -0.5}
    ),
}
DEEPSEEK_8B = "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"
OF_THE_PAPER = ("topr", "dpo", "ppo", "reinforce")  # Figures 1 and 3


# ---- sizes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """The sizes of the figures' runs. Those of the laptop are ours: what two cores do in minutes."""

    base: Settings
    rates: tuple[float, ...]  # learning rates to choose from; paper: 5e-7 (4.2)
    shares: tuple[float, ...]  # p~ of Figures 5 and 6; paper: "from 1% all the way to 100%" (4.3), the steps are ours
    sets: Mapping[str, int]  # size of the sets of Figures 5 to 7
    passes: int  # over the sets of Figures 6 and 7; paper: one epoch (4.2)
    clips: tuple[float, float]  # Figure 7's gradient norms; paper: 1 and 100 (4.3)
    optimizers: Mapping[str, float]  # Figure 7's, and their rates as multiples of the grid's; paper: Adafactor (4.2)
    tested: int  # Figure 4: samples a test problem; paper: 64 (4.2)
    difficulty: int  # Figure 9: samples a question; paper: 128 (App. D)
    verifier: VerifierSettings  # Table 2
    other_verifiers: tuple[str, ...]  # base models of Table 2 besides the verifier's own
    iterated: Mapping[str, Any]  # settings that Figure 8 changes
    mapped: Mapping[str, Any] = field(default_factory=dict)  # settings that all runs of the map change
    of_methods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # settings that a method's runs change
    others: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # Figure 8: settings of other models' runs
    task: Callable[[Settings], Task] = gsm8k_task


LAPTOP = Scale(
    base=replace(
        PRESETS["laptop"],
        problems=160,
        max_new_tokens=64,
        tokens_at_once=20_000,
        test_samples=8,
        k=4,
        curve_samples=3,
    ),
    rates=(3e-6, 1e-5, 3e-5, 1e-4, 3e-4),
    shares=(0.01, 0.1, 0.2, 0.5, 0.8, 1.0),
    sets={"examples": 1_280},
    passes=4,
    clips=(0.1, 100.0),  # a norm of 1 is hardly ever reached
    optimizers={"adamw": 1, "adafactor": 1, "sgd": 1e4},
    tested=24,
    difficulty=128,
    verifier=VERIFIER_PRESETS["laptop"],
    other_verifiers=(str(TINY / "base"),),
    # 643 / 96 = 6.7 samples a problem, as the paper's 50,000 / 7,473
    iterated={"iterations": 5, "problems": 96, "examples": 643, "test_problems": 100, "test_samples": 20, "k": 16},
    mapped={"problems": 640, "lr": 3e-5, "test_problems": 100, "test_samples": 24, "k": 16, "curve_points": 1},
)
QUICK = Scale(
    base=replace(LAPTOP.base, problems=12, n=8, test_problems=10, test_samples=4, k=2, curve_points=2, curve_samples=2),
    rates=(1e-4,),
    shares=(0.1, 1.0),
    sets={"examples": 24},
    passes=2,
    clips=(0.1, 100.0),
    optimizers={"adamw": 1},
    tested=6,
    difficulty=16,
    verifier=replace(
        VERIFIER_PRESETS["laptop"], problems=8, test_problems=10, train_solutions=4, test_solutions=4, iterations=2
    ),
    other_verifiers=(),
    iterated={"iterations": 2, "candidates": 16, "examples": 24},
    mapped={"curve_points": 1},
)
PAPER = Scale(
    base=replace(PRESETS["paper"], iterations=1, examples=None, curve_points=5),  # an epoch over all samples (4.2)
    rates=(5e-7,),
    shares=(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.8, 1.0),
    sets={"examples": 50_000, "n": 20},  # "two datasets containing 50,000 examples"; 20: for enough negatives (ours)
    passes=1,
    clips=(1.0, 100.0),
    optimizers={"adafactor": 1},
    tested=64,
    difficulty=128,
    verifier=VERIFIER_PRESETS["paper"],
    other_verifiers=(),
    iterated={"iterations": 5, "examples": 50_000},  # "to N = 50,000 data points" (4.3)
    of_methods={"dpo": {"batch": 16}},  # "a per-GPU batch size of 1" (4.2): a pair is two completions
    others={  # "applied to the more recent DeepSeek 8B model", "the 70B version of Llama 3" (4.3)
        "DeepSeek-R1 8B, Anna Karenina": {"model": DEEPSEEK_8B, "composition": "anna_karenina"},
        "Llama 3 70B": {"model": LLAMA_70B, "iterations": 0, "engine_gpus": 4},  # 141 GB of weights
    },
)
PAPER_MATH = replace(
    PAPER,
    base=replace(MATH_PRESETS["paper"], iterations=1, examples=None, curve_points=5),
    sets={"examples": 50_000, "n": 32},  # "n = 32 candidate solutions" (4.1)
    tested=16,  # "16 for MATH due to the cost of evaluating" (4.2)
    task=math_task,
)
SCALES = {"laptop": LAPTOP, "quick": QUICK, "paper": PAPER, "paper-math": PAPER_MATH}
HELD_OUT = 100  # training problems that learning rates are chosen on, ours; no figure trains on them


# ---- problems other than those of the test set ------------------------------------------------------------------


def held_out_task(settings: Settings) -> Task:
    """The training problems, and as test problems the HELD_OUT training problems that follow them."""
    task = gsm8k_task(replace(settings, problems=settings.problems + HELD_OUT))
    return replace(task, train=task.train[: settings.problems], test=task.train[settings.problems :])


def training_task(settings: Settings) -> Task:
    """The training problems as test problems, to measure how hard they are."""
    task = gsm8k_task(settings)
    return replace(task, test=task.train)


# ---- arms -------------------------------------------------------------------------------------------------------

Rates = Mapping[str, float]  # the learning rate of each method, variant or optimiser


def of_method(scale: Scale, name: str, base: Settings, rate: float) -> Settings:
    """The settings of a run of a method, variant or optimiser: the base's with what it changes, also at this scale."""
    changes = METHODS[name].changes if name in METHODS else {}  # a variant has TOPR's
    changes = {"optimizer": name} if name in scale.optimizers else changes
    return replace(base, lr=rate, **changes, **scale.of_methods.get(name, {}))


def variant_of(name: str) -> str | None:
    """The name, if it is that of a variant and of no method; some names are of both.

    >>> variant_of("geometric mean"), variant_of("topr")
    ('geometric mean', None)
    """
    return name if name in VARIANTS and name not in METHODS else None


def called(rates: Rates) -> dict[str, str]:
    """The methods' names in legends, with their learning rates.

    >>> called({"topr": 1e-4})
    {'topr': 'TOPR, lr 1e-4'}
    """
    return {name: f"{METHODS[name].name}, lr {rate:.0e}".replace("e-0", "e-") for name, rate in rates.items()}


def grids(scale: Scale, names: Sequence[str]) -> dict[str, list[float]]:
    """The learning rates to choose from; an optimiser has a grid of its own.

    >>> grids(QUICK, ["topr"])
    {'topr': [0.0001]}
    """
    return {name: [rate * scale.optimizers.get(name, 1) for rate in scale.rates] for name in names}


def rate_arms(scale: Scale, rated: Mapping[str, Sequence[float]]) -> Jobs:
    """(name, learning rate) -> its run on held-out problems, with one seed; all train on samples of TOPR's first."""
    base, first = replace(scale.base, seed=100, test_samples=6, curve_points=1), scale.rates[0]  # no figure's seed
    arms = {("topr", first): Job(f"rate-topr-{first:g}", of_method(scale, "topr", base, first), held_out_task)}
    for name, grid in rated.items():
        for rate in grid:
            settings = of_method(scale, name, base, rate)
            arms[name, rate] = Job(f"rate-{name}-{rate:g}", settings, held_out_task, token_loss=variant_of(name))
    return sharing_samples(arms)


# ---- a figure ---------------------------------------------------------------------------------------------------


class Figure(NamedTuple):
    """All numbers of a picture (data), those worth a sentence, which are shares in [0, 1] or others, and tables."""

    data: Mapping[str, Any]
    shares: Mapping[str, Estimate]
    numbers: Mapping[str, Estimate] = MappingProxyType({})
    tables: Mapping[str, Table] = MappingProxyType({})

    def table(self, name: str = "measured") -> Table:
        """The numbers worth a sentence, each with its interval; name: above the first column."""
        rows = [[what, value.text(100, unit=" %")] for what, value in self.shares.items()]
        rows += [[what, value.text(digits=1 if value.mean >= 1 else 3)] for what, value in self.numbers.items()]
        return Table([name, "95% interval over seeds"], rows)


class Lab(NamedTuple):
    """What a figure is read off: its finished runs, and the learning rates, with what each rate that was tried reached.

    of_rates: the runs that the learning rates were chosen by.
    """

    scale: Scale
    seeds: range
    runs: Mapping[tuple[Hashable, int], Finished]  # by (arm, seed)
    rates: Rates = MappingProxyType({})
    tried: Mapping[str, Mapping[float, float]] = MappingProxyType({})  # name -> learning rate -> correct
    of_rates: Mapping[Hashable, Finished] = MappingProxyType({})

    @property
    def costs(self) -> list[dict[str, Any]]:
        """What each run has cost, and by which code it was made."""
        found = {run.folder: run.cost for run in (*self.of_rates.values(), *self.runs.values())}
        return list(found.values())

    def table(self, also: Callable[[Finished], Mapping[str, Sequence[float]]] = lambda _: {}) -> Measured:
        """What was measured of the runs; also: what the figure measures besides, from a run's files."""
        return Measured((arm, seed, {**run.measured, **also(run)}) for (arm, seed), run in self.runs.items())


class Study(NamedTuple):
    """How a figure is made: what is read off its runs, its arms, and whose learning rates these need."""

    read: Callable[[Lab], Figure]
    arms: Callable[[Scale, Rates], Jobs] = lambda scale, rates: {}
    rated: Callable[[Scale], Sequence[str]] = lambda scale: ()

    def planned(self, scale: Scale, seeds: range) -> Jobs:
        """All of its runs; those alone by which learning rates are chosen, if there is more than one to choose from."""
        rated = grids(scale, self.rated(scale))
        if rated and len(scale.rates) > 1:
            return rate_arms(scale, rated)
        return in_seeds(self.arms(scale, {name: grid[0] for name, grid in rated.items()}), seeds)

    def lab(self, scale: Scale, seeds: range, sweep: Sweep) -> Lab:
        """Its runs; those that are not there yet are made.

        A learning rate is the one with most correct answers on held-out problems.
        """
        rated = grids(scale, self.rated(scale))
        rates, of_rates, tried = {name: grid[0] for name, grid in rated.items()}, {}, {}
        if rated and len(scale.rates) > 1:
            of_rates = sweep.make(rate_arms(scale, rated))
            for name, grid in rated.items():
                tried[name] = {rate: of_rates[name, rate].measured["correct"][-1] for rate in grid}
                rates[name] = max(grid, key=tried[name].__getitem__)
        return Lab(scale, seeds, sweep.make(in_seeds(self.arms(scale, rates), seeds)), rates, tried, of_rates)


def provenance(command: str, seeds: Sequence[int], costs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How a figure was made: by which command, seeds and runs; costs: as Finished.cost has them, of each run."""
    return {
        "command": command,
        "seeds": list(seeds),
        "runs": len(costs),
        "core_minutes": round(sum(cost["seconds"] for cost in costs) / 60, 1),
        "commits": sorted({cost["commit"] for cost in costs}),
        "versions": costs[0]["versions"] if costs else {},
    }


def record(name: str, command: str, lab: Lab, figure: Figure) -> dict[str, Any]:
    """The content of NAME.json: how it was made, the numbers worth a sentence, and those of the picture."""
    return {
        "figure": name,
        **provenance(command, lab.seeds, lab.costs),
        "learning_rates": {
            METHODS[n].name if n in METHODS else n: {f"{lr:g}": share for lr, share in tried.items()}
            for n, tried in lab.tried.items()
        },
        "shares": {what: value._asdict() for what, value in figure.shares.items()},
        "numbers": {what: value._asdict() for what, value in figure.numbers.items()},
        "tables": {key: table._asdict() for key, table in {"numbers": figure.table(), **figure.tables}.items()},
        "data": figure.data,
    }
