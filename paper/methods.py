"""Figures 1 to 4, and the variants of the loss: methods along one epoch. paper/figures.py says how a figure is made."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import torch

import topr
from paper.experiments import OF_THE_PAPER, Figure, Lab, Rates, Scale, called, of_method, variant_of
from paper.panels import POSITIVES, VARIANTS_DRAWN
from paper.runs import Finished, Job, Jobs, sharing_samples, texts
from pipeline.evaluation import collect, estimate, wins
from pipeline.methods import ppo_loss
from pipeline.records import Outcome
from pipeline.report import Estimate, Table

# ---- methods along one epoch ------------------------------------------------------------------------------------


def at_both_rates(scale: Scale, rates: Rates, at_one: Sequence[str] = OF_THE_PAPER) -> Jobs:
    """("own rate", method or variant), and ("one rate", ...) for those that also train at TOPR's learning rate."""
    which = {"own rate": rates, "one rate": dict.fromkeys(at_one, rates["topr"])}
    arms = {
        (kind, name): Job(name, of_method(scale, name, scale.base, rate), scale.task, token_loss=variant_of(name))
        for kind, of_kind in which.items()
        for name, rate in of_kind.items()
    }
    return sharing_samples(arms)


def fig1(lab: Lab) -> Figure:
    """Test accuracy over one epoch, all at TOPR's learning rate, and each at its own.

    Ours: TIS, plain IS, SFT on positives and three neighbours. On the laptop DPO makes about twice as many steps.
    """
    table, arms = lab.table(), legends(lab)
    shares = {f"{text}: correct at the end": table.mean(arm) for arm, text in arms.items()}
    topr_s = ("own rate", "topr")
    shares |= {f"TOPR - {arms['own rate', n]}": table.gain(topr_s, ("own rate", n)) for n in list(lab.rates)[1:]}
    data: dict[str, Any] = {
        which: {name: table.along((kind, name)) for kind, name in arms if kind == which}
        for which in ("own rate", "one rate")
    }
    data["steps"] = {name: lab.runs[("own rate", name), lab.seeds[0]].last_step for name in lab.rates}
    return Figure(data, shares)


def legends(lab: Lab) -> dict[tuple[str, str], str]:
    """(which rate, method) -> its name in legends."""
    one_rate = dict.fromkeys(OF_THE_PAPER, lab.rates["topr"])
    which = {"one rate": called(one_rate), "own rate": called(lab.rates)}
    return {(kind, name): text for kind, of_kind in which.items() for name, text in of_kind.items()}


def fig3(lab: Lab) -> Figure:
    """Shares of correct, incorrect and invalid completions over the epoch, all at TOPR's learning rate."""
    table = lab.table()
    shares = {"base: invalid": table.mean(("one rate", "topr"), "invalid", at=0)}
    shares |= {f"{text}: invalid at the end": table.mean(arm, "invalid") for arm, text in legends(lab).items()}
    data = {name: {o: table.along(("one rate", name), o) for o in get_args(Outcome)} for name in OF_THE_PAPER}
    return Figure(data, shares)


def variants_rated(scale: Scale) -> list[str]:
    """The paper's weight and the variants that a scale's micro-batches allow."""
    by_step = "per-token + token mean"  # a mean over the tokens of a whole step
    return [name for name in VARIANTS_DRAWN if name != by_step or scale.base.micro_batch >= scale.base.batch]


def variants(lab: Lab) -> Figure:
    """What variants cost that public code calls TOPR and that weigh otherwise (conformance/variants.py).

    All train on the same samples, in the same order, at TOPR's learning rate and each at its own.
    """
    table, shares, data = lab.table(), {}, {"one rate": {}, "own rate": {}}
    for kind in data:
        for name, own in lab.rates.items():
            arm, here = (kind, name), f"{name}, lr {own if kind == 'own rate' else lab.rates['topr']:g}"
            data[kind][name] = {outcome: table.along(arm, outcome) for outcome in get_args(Outcome)}
            shares[f"{here}: correct at the end"] = table.mean(arm)
            shares[f"{here}: invalid at the end"] = table.mean(arm, "invalid")
            if name != "topr":
                shares[f"{here} - topr"] = table.gain(arm, ("one rate", "topr"))
    return Figure(data, shares, tables={"weights": weights_table(data, lab.rates)})


def weights_table(data: Mapping[str, Any], rates: Rates) -> Table:
    """What each weight reaches, at TOPR's learning rate and at its own."""
    head = ["weight", "correct at the end", "invalid at the end", "own learning rate", "correct with that"]
    rows = []
    for name, curves in data["one rate"].items():
        ends = [texts(y)[-1] for y in (curves["correct"], curves["invalid"], data["own rate"][name]["correct"])]
        rows.append([f"`{name}`", *ends[:2], f"{rates[name]:g}", ends[2]])
    return Table(head, rows)


# ---- the objectives ---------------------------------------------------------------------------------------------


def fig2(lab: Lab) -> Figure:
    """TOPR's objective with a+ = 1, b+ = 1 + eps, a- = 0, b- = 1, and PPO's, as functions of pi / mu.

    The two are compared where PPO does not clip: on [1, 1 + eps] for positives, on [1 - eps, 1] for negatives.
    """
    eps, ratio = lab.scale.base.eps, np.linspace(0.01, 2.5, 250)
    log_ratio = torch.tensor(ratio).log()
    data, numbers = {"ratio": ratio.tolist()}, {}
    for sign, name, low, high in ((1.0, "R = +1", 1, 1 + eps), (-1.0, "R = -1", 1 - eps, 1)):
        reward = torch.full_like(log_ratio, sign)
        ours = topr.topr_objective(log_ratio, reward, topr.Limits(1, 1 + eps, 0, 1)).numpy()
        one = torch.ones(1, dtype=log_ratio.dtype)
        ppo = np.array([-ppo_loss(x, 0 * x, sign * one, one, eps).item() for x in log_ratio[:, None]])
        data |= {f"TOPR, {name}": ours.tolist(), f"PPO, {name}": ppo.tolist()}
        inside, outside = (ratio >= low) & (ratio <= high), ratio > high if sign > 0 else ratio < low
        largest = {f"|TOPR - PPO| for {low:g} <= pi/mu <= {high:g}": np.abs(ours - ppo)[inside].max()}
        for method, values in (("PPO", ppo), ("TOPR", ours)):
            slopes = np.abs(np.gradient(values, ratio))
            largest[f"slope of {method} where PPO clips"] = slopes[outside][1:-1].max()
            largest[f"slope of {method} for pi/mu <= 0.5"] = slopes[ratio <= 0.5].max()
        numbers |= {f"{name}: largest {what}": Estimate.over_seeds([value]) for what, value in largest.items()}
    return Figure(data, {}, numbers)


# ---- TOPR against positives only --------------------------------------------------------------------------------


def fig4_arms(scale: Scale, rates: Rates) -> Jobs:
    """POSITIVES, all at TOPR's learning rate."""
    base = replace(scale.base, lr=rates["topr"], test_samples=scale.tested)
    return sharing_samples({n: Job(n, replace(base, **arm.changes), scale.task) for n, arm in POSITIVES.items()})


def fig4(lab: Lab) -> Figure:
    """TOPR against positives only: accuracy, maj@n, and how often each question is solved. On MATH: fig4-math."""
    ks = [k for k in (1, 2, 4, 8, 16, 32) if k < lab.scale.tested]

    def at_the_end(run: Finished) -> dict[str, Sequence[float]]:
        answers = collect(run.tested(run.last_step), lab.scale.task(run.settings))
        bins = by_cardinality(run)
        majority = [estimate(wins, answers, k, run.settings.seed).mean for k in ks]
        return {"maj@n": majority, "cardinality": bins, "few": [sum(bins[:2])]}

    table = lab.table(at_the_end)
    shares = {f"{arm.name}: correct at the end": table.mean(key) for key, arm in POSITIVES.items()}
    shares |= {f"{arm.name}: problems with at most 4 correct": table.mean(k, "few") for k, arm in POSITIVES.items()}
    shares |= {f"TOPR - {POSITIVES[key].name}": table.gain("topr", key) for key in ("positives_only", "sft")}
    shares |= {f"{arm.name}: maj@{ks[-1]}": table.mean(key, "maj@n") for key, arm in POSITIVES.items()}
    data: dict[str, Any] = {
        what: {name: table.along(name, what) for name in POSITIVES} for what in ("correct", "maj@n", "cardinality")
    }
    data["n"] = ks
    data["trained on"] = lab.runs["topr", lab.seeds[0]].results["iterations"][0]["dataset"]["trained"]
    return Figure(data, shares)


def by_cardinality(run: Finished) -> list[float]:
    """The share of test problems with 0, 1-4, 5-8, ... correct completions."""
    n = run.settings.test_samples
    rewards = np.array([sample.reward > 0 for sample in run.tested(run.last_step)]).reshape(-1, n).sum(1)
    return (np.bincount(-(-rewards // 4), minlength=-(-n // 4) + 1) / len(rewards)).tolist()
