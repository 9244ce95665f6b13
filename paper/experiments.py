"""What the paper's figures compare, at which size, and how they get their runs.

All sizes of LAPTOP and QUICK are ours; PAPER has the paper's values.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from conformance.variants import VARIANTS
from paper.sweep import Finished, Job, Sweep
from pipeline.plots import Style
from pipeline.records import Task
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
    "group": Arm(
        "TOPR, group-mean baseline", Style("#7B3FA0", (0, (5, 1)), "<"), {"baseline_from": "group"}
    ),  # of GRPO
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


# ---- runs -------------------------------------------------------------------------------------------------------


@dataclass
class Lab:
    """Makes the runs of a figure, and records which it used."""

    sweep: Sweep
    scale: Scale
    seeds: range
    used: list[Finished] = field(default_factory=list)
    tried: dict[str, dict[float, float]] = field(default_factory=dict)  # label -> learning rate -> correct

    @property
    def base(self) -> Settings:
        """The settings that all runs have in common."""
        return self.scale.base

    def make(self, jobs: Sequence[Job]) -> list[Finished]:
        """The runs of the jobs."""
        made = self.sweep.make(jobs)
        self.used += [run for run in made if run.folder not in {other.folder for other in self.used}]
        return made

    def runs(
        self,
        arms: Mapping[str, Settings],
        task: Callable[[Settings], Task] | None = None,
        token_losses: Mapping[str, str] = MappingProxyType({}),
    ) -> dict[str, list[Finished]]:
        """The runs of each arm, one for each seed. The first arm samples, the others copy its samples.

        task: by default the scale's own. token_losses: arm -> the variant that it trains with, one of
        conformance.variants.VARIANTS.
        """

        def of_seeds(label: str, settings: Settings) -> list[Job]:
            made_of = task or self.scale.task
            token_loss = token_losses.get(label)
            return [Job(label, replace(settings, seed=seed), made_of, token_loss=token_loss) for seed in self.seeds]

        (first, settings), *others = arms.items()
        source = dict(zip(self.seeds, self.make(of_seeds(first, settings)), strict=True))
        jobs = [job for label, settings in others for job in of_seeds(label, settings)]
        made = iter(self.make([_reusing(job, source[job.settings.seed]) for job in jobs]))
        return {first: list(source.values())} | {label: [next(made) for _ in self.seeds] for label, _ in others}

    def rates(self, names: Sequence[str]) -> dict[str, float]:
        """The learning rate of each: the one with most correct answers on held-out problems; one seed.

        names: methods, variants, and optimisers, which are TOPR's with another optimiser and a grid of its own.
        """
        grids = {name: [rate * self.scale.optimizers.get(name, 1) for rate in self.scale.rates] for name in names}
        if len(self.scale.rates) == 1:
            return {name: grid[0] for name, grid in grids.items()}
        base = replace(self.base, seed=100, test_samples=6, curve_points=1)  # a seed that no figure uses
        jobs = {
            (name, rate): Job(
                f"rate-{name}-{rate:g}",
                self.of_method(name, base, rate),
                held_out_task,
                token_loss=name if name in VARIANTS and name not in METHODS else None,  # some have a name of both
            )
            for name, grid in grids.items()
            for rate in grid
        }
        first = self.scale.rates[0]
        [source] = self.make([Job(f"rate-topr-{first:g}", replace(base, lr=first), held_out_task)])
        runs = dict(zip(jobs, self.make([_reusing(job, source) for job in jobs.values()]), strict=True))
        self.tried |= {n: {rate: runs[n, rate].curve[-1]["correct"] for rate in grid} for n, grid in grids.items()}
        return {name: max(grid, key=self.tried[name].__getitem__) for name, grid in grids.items()}

    def at_topr_rate(self, **changes: Any) -> Settings:
        """The base settings with changes, at the learning rate that was chosen for TOPR."""
        return replace(self.base, lr=self.rates(["topr"])["topr"], **changes)

    def methods(self, rates: Mapping[str, float]) -> dict[str, list[Finished]]:
        """The runs of each method at its given learning rate."""
        return self.runs({name: self.of_method(name, self.base, rate) for name, rate in rates.items()})

    def of_method(self, name: str, base: Settings, rate: float) -> Settings:
        """The settings of a method's run: the base's with what the method changes, here and at this scale."""
        changes = METHODS[name].changes if name in METHODS else {}  # a variant has TOPR's
        changes = {"optimizer": name} if name in self.scale.optimizers else changes
        return replace(base, lr=rate, **changes, **self.scale.of_methods.get(name, {}))


def called(rates: Mapping[str, float]) -> dict[str, str]:
    """The methods' names in legends, with their learning rates.

    >>> called({"topr": 1e-4})
    {'topr': 'TOPR, lr 1e-4'}
    """
    return {name: f"{METHODS[name].name}, lr {rate:.0e}".replace("e-0", "e-") for name, rate in rates.items()}


def _reusing(job: Job, source: Finished) -> Job:
    return job._replace(settings=replace(job.settings, reuse=source.folder))
