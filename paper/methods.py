"""Figures 1 to 4, and the variants of the loss: methods along one epoch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import numpy as np
import torch

import topr
from paper.experiments import (
    METHOD_ARMS,
    PAPER_METHODS,
    RATED,
    VARIANTS,
    Arm,
    Figure,
    Study,
    called,
)
from paper.panels import CORRECT, EPOCH, TRAINING, WHOLE, Data, accuracy, arm_lines, epoch, line
from paper.runs import Finished, Jobs, Measured, sharing_samples
from pipeline.evaluation import collect, estimate, wins
from pipeline.methods import METHODS, ppo_loss
from pipeline.plots import Line, Panel, Style
from pipeline.records import Outcome
from pipeline.report import Estimate, Table


class AtBothRates(Study):
    """Arms (name, learning rate): each at its own rate, and those of `at_one` at TOPR's too."""

    at_one: Sequence[str] = PAPER_METHODS

    @property
    def kinds(self) -> dict[str, Mapping[str, float]]:
        """Which rate -> the learning rates of those that train at it."""
        return {"own rate": self.rates, "one rate": dict.fromkeys(self.at_one, self.rates["topr"])}

    def arms(self) -> Jobs:
        wanted = [arm for rates in self.kinds.values() for arm in rates.items()]
        return sharing_samples(
            {(name, lr): self.job(name, self.scale.base, RATED[name], lr=lr) for name, lr in wanted}
        )

    def ends(self, table: Measured, what: str) -> dict[str, Estimate]:
        """What is measured of each arm at the end, by its name in legends."""
        arms = (arm for rates in reversed(self.kinds.values()) for arm in rates.items())
        return {f"{called(*arm)}: {what} at the end": table.mean(arm, what) for arm in arms}


class Fig1(AtBothRates):
    """Test accuracy over one epoch, all at TOPR's learning rate, and each at its own.

    Ours: TIS, plain IS, SFT on positives, a group baseline. On the laptop DPO makes about twice as many steps.
    """

    rated = tuple(METHOD_ARMS)

    def read(self) -> Figure:
        def also(run: Finished) -> dict[str, Sequence[float]]:
            curve, is_ppo = (
                run.measured["correct"],
                run.settings.method == "ppo",
            )  # PPO gives a clipped sample weight 0
            clipped = {"clipped": run.by_tenth("weights_below_1e-6")} if is_ppo else {}
            return {"fall": [max(curve) - curve[-1]], **clipped}

        table, (topr, *others), maj = (
            self.table(also),
            self.rates.items(),
            f"maj@{self.scale.base.k}",
        )
        gains = {
            f"TOPR - {METHOD_ARMS[arm[0]].name}, own rates": table.gain(topr, arm) for arm in others
        }
        for name in PAPER_METHODS[1:]:
            text, arm = METHOD_ARMS[name].name, (name, topr[1])
            gains[f"TOPR - {text}, one rate"] = table.gain(topr, arm)
            if name != "dpo":
                gains[f"DPO - {text}, one rate"] = table.gain(("dpo", topr[1]), arm)
            gains[f"{text} - TOPR, one rate: fall from the highest"] = table.gain(arm, topr, "fall")
        numbers = {
            f"{METHOD_ARMS[n].name}: own rate / TOPR's": Estimate.over_seeds([lr / topr[1]])
            for n, lr in others
        }
        data = {
            kind: {arm[0]: table.along(arm) for arm in rates.items()}
            for kind, rates in self.kinds.items()
        }
        shares = self.ends(table, "correct") | gains | {f"base: {maj}": table.mean(topr, maj, at=0)}
        for kind, rates in self.kinds.items():
            ppo = ("ppo", rates["ppo"])
            for at, tenth in ((0, "first"), (-1, "last")):
                shares[f"PPO, {kind}: clipped samples, {tenth} tenth"] = table.mean(
                    ppo, "clipped", at=at
                )
            for name in PAPER_METHODS:
                shares[f"{METHOD_ARMS[name].name}, {kind}: {maj} at the end"] = table.mean(
                    (name, rates[name]), maj
                )
        return Figure(data, shares, numbers)

    @staticmethod
    def panels(data: Data) -> list[Panel]:
        """The paper's methods along the epoch. Of the others, which end close together, the ends."""
        curves = data["own rate"]
        panels = [accuracy("TOPR's learning rate for all", data["one rate"], METHOD_ARMS)]
        panels.append(
            accuracy(
                "each at its own learning rate",
                {name: curves[name] for name in PAPER_METHODS},
                METHOD_ARMS,
            )
        )
        names = ("group", "sft", "off_policy", "tis", "topr")
        last = {
            name: {what: values[-1:] for what, values in curves[name].items()} for name in names
        }
        ends = enumerate(arm_lines(last, METHOD_ARMS, lambda _: [0]))
        drawn = [end._replace(x=end.y, y=[i], kind="rows") for i, end in ends]
        options = {"yticks": [], "ylim": (-0.5, len(names) - 0.5)}
        return [
            *panels,
            Panel("other bounds and baselines, own rate, at the end", CORRECT, "", drawn, options),
        ]


class Fig2(Study):
    """TOPR's objective with a+ = 1, b+ = 1 + eps, a- = 0, b- = 1, and PPO's, as functions of pi / mu.

    The two are compared where PPO does not clip: on [1, 1 + eps] for positives, on [1 - eps, 1] for negatives.
    """

    rated = ()

    def read(self) -> Figure:
        eps, ratio = self.scale.base.eps, np.linspace(0.01, 2.5, 250)
        log_ratio = torch.tensor(ratio).log()
        data, numbers = {"ratio": ratio.tolist()}, {}
        for sign, name, low, high in ((1.0, "R = +1", 1, 1 + eps), (-1.0, "R = -1", 1 - eps, 1)):
            reward, one = torch.full_like(log_ratio, sign), torch.ones(1, dtype=log_ratio.dtype)
            ours = topr.topr_objective(log_ratio, reward, topr.Limits(1, 1 + eps, 0, 1)).numpy()
            ppo = np.array(
                [-ppo_loss(x, 0 * x, sign * one, one, eps).item() for x in log_ratio[:, None]]
            )
            data |= {f"TOPR, {name}": ours.tolist(), f"PPO, {name}": ppo.tolist()}
            inside, outside = (
                (ratio >= low) & (ratio <= high),
                ratio > high if sign > 0 else ratio < low,
            )
            largest = {
                f"|TOPR - PPO| for {low:g} <= pi/mu <= {high:g}": np.abs(ours - ppo)[inside].max()
            }
            for method, values in (("PPO", ppo), ("TOPR", ours)):
                slopes = np.abs(np.gradient(values, ratio))
                largest[f"slope of {method} where PPO clips"] = slopes[outside][1:-1].max()
                largest[f"slope of {method} for pi/mu <= 0.5"] = slopes[ratio <= 0.5].max()
            numbers |= {
                f"{name}: largest {what}": Estimate.over_seeds([value])
                for what, value in largest.items()
            }
        return Figure(data, {}, numbers)

    @staticmethod
    def panels(data: Data) -> list[Panel]:
        panels = []
        for name in ("R = +1", "R = -1"):
            drawn = [
                Line(data["ratio"], data[f"{label}, {name}"], label, label.lower())
                for label in ("TOPR", "PPO")
            ]
            title, y = name.replace("-", "−"), "objective of one sequence"
            panels.append(Panel(title, r"$\pi / \mu$", y, drawn, {"ylim": (-2.6, 2.6)}))
        return panels


class Fig3(AtBothRates):
    """Shares of correct, incorrect and invalid completions over the epoch, all at TOPR's learning rate."""

    rated = PAPER_METHODS

    def read(self) -> Figure:
        table, one = self.table(), self.rates["topr"]
        shares = {"base: invalid": table.mean(("topr", one), "invalid", at=0)} | self.ends(
            table, "invalid"
        )
        changes = {name: table.change((name, one), "invalid") for name in PAPER_METHODS}
        shares |= {
            f"{METHOD_ARMS[name].name} - base, one rate: invalid": change
            for name, change in changes.items()
        }
        data = {
            name: {o: table.along((name, one), o) for o in get_args(Outcome)}
            for name in PAPER_METHODS
        }
        return Figure(data, shares)

    @staticmethod
    def panels(data: Data) -> list[Panel]:
        panels = []
        for name, curves in data.items():
            drawn = [line(epoch(y), y, outcome) for outcome, y in curves.items()]
            panels.append(
                Panel(METHOD_ARMS[name].name, EPOCH, "share (%), 95% interval", drawn, WHOLE)
            )
        return panels


GREY = Style("#6E6E6E", (0, (2, 1)), "*")
POSITIVES = {
    "topr": METHOD_ARMS["topr"],
    "positives_only": Arm("positives only", "sft", {"composition": "positives_only"}),
    "sft": Arm(
        "positives, as many steps", "p5", {"method": "sft"}
    ),  # negatives stay, with weight 0
}


class Fig4(Study):
    """TOPR against positives only: accuracy, maj@n, and how often each question is solved. On MATH: fig4-math.

    At TOPR's two best learning rates.
    """

    def arms(self) -> Jobs:
        base = replace(self.scale.base, **self.scale.tested)
        wanted = [(name, rate) for rate in self.two_rates.values() for name in POSITIVES]
        arms = {
            arm: self.job(f"fig4-{arm[0]}-{arm[1]:g}", base, POSITIVES[arm[0]], lr=arm[1])
            for arm in wanted
        }
        return sharing_samples(arms)

    def read(self) -> Figure:
        ks = [k for k in (1, 2, 4, 8, 16, 32) if k < self.scale.tested["test_samples"]]

        def at_the_end(run: Finished) -> dict[str, Sequence[float]]:
            tested = [
                collect(run.tested(at), self.scale.task(run.settings)) for at in (0, run.last_step)
            ]
            base, majority = (
                [estimate(wins, answers, k, run.settings.seed).mean for k in ks]
                for answers in tested
            )
            right = [
                (sample.prompt, sample.completion) for sample in run.tested(0) if sample.reward > 0
            ]
            few, still = ((answers.correct.sum(1) <= 4) for answers in tested)
            measured = {
                "maj@n": majority,
                "base maj@n": base,
                "cardinality": by_cardinality(tested[1].correct),
            }
            measured |= {
                "still few": [still[few].mean()],
                "ahead": [tested[1].correct.mean() - base[-1]],
            }
            return measured | {
                "vote": [base[-1] - base[0]],
                "distinct": [len(set(right)) / max(len(right), 1)],
            }

        table, last, topr = self.table(at_the_end), f"maj@{ks[-1]}", ("topr", self.rates["topr"])
        shares = {
            "base: correct": table.mean(topr, at=0),
            f"base: {last} - pass@1": table.mean(topr, "vote"),
            "base: distinct texts among right ones": table.mean(topr, "distinct"),
        }
        numbers, data, of = {}, {"n": ks}, "of positives only"
        for end, rate in self.two_rates.items():
            arms, here = {name: (name, rate) for name in POSITIVES}, {}
            for name, arm in POSITIVES.items():
                here |= {f"{arm.name}: correct at the end": table.mean(arms[name])}
                here |= {f"{arm.name}: {last}": table.mean(arms[name], "maj@n")}
                here |= {
                    f"{arm.name}: few correct before, and still": table.mean(
                        arms[name], "still few"
                    )
                }
            one, other = arms["topr"], arms["positives_only"]
            for name in ("positives_only", "sft"):
                here[f"TOPR - {POSITIVES[name].name}"] = table.gain(one, arms[name])
                here[f"TOPR - {POSITIVES[name].name}: {last}"] = table.gain(
                    one, arms[name], "maj@n"
                )
            here["positives only - TOPR: few correct before, and still"] = table.gain(
                other, one, "still few"
            )
            here[f"TOPR: pass@1 - {last} of the base"] = table.mean(one, "ahead")
            shares |= {f"{what}{end}": value for what, value in here.items()}
            votes = [table.each(one, "maj@n", at) for at in range(len(ks))]
            needed = [  # the smallest k that suffices; twice the largest if none does
                next(
                    (k for k, by_seed in zip(ks, votes, strict=True) if by_seed[seed] >= wanted),
                    2 * ks[-1],
                )
                for seed, wanted in table.each(other, "maj@n").items()
            ]
            numbers[f"samples of TOPR for {last} {of}{end}"] = Estimate.over_seeds(needed)
            whats = ("correct", "maj@n", "cardinality")
            curves = {
                what: {name: table.along(arm, what) for name, arm in arms.items()} for what in whats
            }
            curves["maj@n"]["base"] = table.along(topr, "base maj@n")
            data[f"lr {rate:g}"] = curves
        return Figure(data, shares, numbers)

    @staticmethod
    def panels(data: Data) -> list[Panel]:
        """A row for each of the three, a column for each learning rate."""
        ks, rows = data["n"], ([], [], [])
        n_axis = {"xscale": "log", "xticks": ks, "xticklabels": ks}
        solved, share = "correct completions of a problem", "problems (%), 95% interval"
        for title in [key for key in data if key.startswith("lr")]:
            here, bins = data[title], range(len(data[title]["cardinality"]["topr"]["mean"]))
            bin_axis = {
                "xticks": bins,
                "xticklabels": ["0", *(f"{4 * i + 1}-{4 * i + 4}" for i in bins[:-1])],
            }
            counted = arm_lines(here["cardinality"], POSITIVES, lambda _, bins=bins: bins)
            majority = arm_lines(
                here["maj@n"], POSITIVES | {"base": Arm("base", GREY)}, lambda _: ks
            )
            curves = arm_lines(here["correct"], POSITIVES)
            rows[0].append(Panel(f"accuracy, {title}", EPOCH, CORRECT, curves))
            rows[1].append(
                Panel(
                    f"self-consistency, {title}", "n", "maj@n (%), 95% interval", majority, n_axis
                )
            )
            rows[2].append(Panel(f"test problems, {title}", solved, share, counted, bin_axis))
        return [panel for row in rows for panel in row]


def by_cardinality(correct: np.ndarray) -> list[float]:
    """The share of test problems with 0, 1-4, 5-8, ... correct completions, from (Q, N) bool."""
    questions, n = correct.shape
    return (np.bincount(-(-correct.sum(1) // 4), minlength=-(-n // 4) + 1) / questions).tolist()


class Robustness(Study):
    """Ours: seven methods after an epoch at their best rates and at three times these, and where clipping is late.

    Late clipping is Figure 7's harder setting, at each method's best rate. The last column needs no run: `steps_back`.
    """

    rated = ("topr", "sft", "tis", "off_policy", "ppo", "dpo", "reinforce")

    def arms(self) -> Jobs:
        base, rates = self.scale.base, self.rates
        hard = {"epochs": self.scale.passes, "max_norm": self.scale.clips[1], **self.scale.sets}
        late = replace(base, composition="proportion", proportion=0.4, **hard)
        best = {
            (k, "best"): self.job(k, base, METHOD_ARMS[k], lr=rate) for k, rate in rates.items()
        }
        three = {
            (k, "three"): self.job(f"{k}-3", base, METHOD_ARMS[k], lr=3 * rate)
            for k, rate in rates.items()
        }
        negatives = {
            (k, "late"): self.job(f"{k}-late", late, METHOD_ARMS[k], lr=rate)
            for k, rate in rates.items()
        }
        return sharing_samples(best | three) | sharing_samples(negatives)

    def decides(self, arm: Any) -> bool:
        """Four passes take long, and show differences that three seeds tell."""
        return arm[1] != "late"

    def read(self) -> Figure:
        table, shares, numbers, rows = self.table(), {}, {}, []
        settings = {
            "best": "best rate",
            "three": "three times the rate",
            "late": "60% negative, late clipping",
        }
        for name, rate in self.rates.items():
            text, row = METHOD_ARMS[name].name, []
            for key, setting in settings.items():
                end = table.mean((name, key))
                row.append(end.text(100, unit=" %", within=(0, 1)))
                shares[f"{text}, {setting}: correct at the end"] = end
                if name != "topr":
                    shares[f"TOPR - {text}, {setting}"] = table.gain(("topr", key), (name, key))
            shares[f"{text}: three times the rate - best rate"] = table.gain(
                (name, "three"), (name, "best")
            )
            steps = steps_back(name)
            if steps is not None:
                numbers[f"{text}: steps until a forgotten right answer is back"] = (
                    Estimate.over_seeds([float(steps)])
                )
            rows.append(
                [text, *row, "more than 10,000" if steps is None else str(steps), f"{rate:g}"]
            )
        head = [
            "",
            *settings.values(),
            "steps until a forgotten right answer is back",
            "best rate is",
        ]
        data = {name: {key: table.along((name, key)) for key in settings} for name in self.rates}
        return Figure(data, shares, numbers, {"robustness": Table(head, rows)})

    @staticmethod
    def panels(data: Data) -> list[Panel]:
        """The paper's methods, and the positives alone, along the training in the two settings that are hard."""
        titles = {
            "three": "three times the best learning rate",
            "late": "60% negative, late clipping, best rate",
        }
        curves = {
            title: {name: data[name][key] for name in (*PAPER_METHODS, "sft")}
            for key, title in titles.items()
        }
        return [accuracy(title, each, METHOD_ARMS, TRAINING) for title, each in curves.items()]


def steps_back(method: str, steps: int = 10_000) -> int | None:
    """Steps of gradient ascent until pi of a right arm, at first 1e-6, is 1/2 again (Section 3.1); None: more.

    A bandit of five arms, one right, mu = 1/5 each; the expected loss is exact, and the step 1 in the logits.

    >>> steps_back("topr"), steps_back("tis", steps=100)
    (52, None)
    """
    reward, logmu, length = (
        torch.tensor([1.0, -1, -1, -1, -1]),
        torch.full((5,), 0.2).log(),
        torch.ones(5),
    )
    z = torch.tensor([1e-6] + [(1 - 1e-6) / 4] * 4, dtype=torch.float64).log().requires_grad_()
    loss = METHODS[method].loss or partial(topr.topr_loss, limits=topr.PRESETS[method])
    rows = (
        torch.tensor([0, 1, 0, 2, 0, 3, 0, 4]) if METHODS[method].of_pairs else torch.arange(5)
    )  # right, wrong, ...
    for step in range(steps):
        logp = z.log_softmax(-1)
        if logp[0].exp() >= 0.5:
            return step
        [gradient] = torch.autograd.grad(
            loss(logp[rows], logmu[rows], reward[rows], length[rows]), z
        )
        z = (z - gradient).detach().requires_grad_()
    return None


class Variants(AtBothRates):
    """What variants cost that public code calls TOPR and that weigh otherwise (conformance/variants.py)."""

    @property
    def rated(self) -> Sequence[str]:
        """The paper's weight and the variants that a scale's micro-batches allow."""
        by_step = "per-token + token mean"  # a mean over the tokens of a whole step
        fits = self.scale.base.micro_batch >= self.scale.base.batch
        return [name for name in ("topr", *VARIANTS) if fits or name != by_step]

    at_one = rated

    def read(self) -> Figure:
        table, shares, data, rows = self.table(), {}, {"one rate": {}, "own rate": {}}, []
        topr = ("topr", self.rates["topr"])
        for kind in data:
            for arm in self.kinds[kind].items():
                name, here = arm[0], f"{arm[0]}, lr {arm[1]:g}"
                data[kind][name] = {
                    outcome: table.along(arm, outcome) for outcome in get_args(Outcome)
                }
                shares |= {
                    f"{here}: {what} at the end": table.mean(arm, what)
                    for what in ("correct", "invalid")
                }
                if name != "topr":
                    shares[f"{here} - topr"] = table.gain(arm, topr)
        for name, lr in self.rates.items():
            one, best = (name, topr[1]), (name, lr)
            ends = [
                table.mean(*cell).text(100, unit=" %")
                for cell in ((one,), (one, "invalid"), (best,))
            ]
            rows.append([f"`{name}`", *ends[:2], f"{lr:g}", ends[2]])
        head = [
            "weight",
            "correct at the end",
            "invalid at the end",
            "own learning rate",
            "correct with that",
        ]
        return Figure(data, shares, tables={"weights": Table(head, rows)})

    @staticmethod
    def panels(data: Data) -> list[Panel]:
        """Correct and invalid completions: at TOPR's learning rate, and each at its own if they differ."""
        titles = {"one rate": "TOPR's learning rate", "own rate": "its own learning rate"}
        if data["own rate"] == data["one rate"]:
            del titles["own rate"]
        panels = []
        for kind, title in titles.items():
            for outcome in ("correct", "invalid"):
                drawn = arm_lines(
                    {name: curves[outcome] for name, curves in data[kind].items()}, RATED
                )
                panels.append(
                    Panel(
                        f"{outcome}, {title}", EPOCH, f"{outcome} (%), 95% interval", drawn, WHOLE
                    )
                )
        return panels
