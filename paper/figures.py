"""Figures 5 to 9 and Table 2, and STUDIES with all figures; those along one epoch are in paper/methods.py."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

import topr
from paper.experiments import METHOD_ARMS, RATED, Arm, Figure, Study, called
from paper.methods import Fig1, Fig2, Fig3, Fig4, Robustness, Variants
from paper.panels import (
    CORRECT,
    P_TILDE,
    TRAINING,
    Data,
    accuracy,
    arm_lines,
    line,
    shares_panel,
    tenths_panel,
)
from paper.runs import Finished, Job, Jobs, Measured, best_elsewhere, series, sharing_samples
from pipeline.compositions import rewards_of_groups
from pipeline.plots import Line, Panel, Style
from pipeline.records import Sample, Task
from pipeline.report import Estimate
from pipeline.settings import Settings
from tasks.verifier import ACCURACY, CONSTANT, INVALID, WEIGHTED, to_panel
from train_gsm8k import gsm8k_task


def by_share(study: Study, wanted: Sequence[tuple[str, float, float]], **changes: Any) -> Jobs:
    """Arms (method, learning rate, share of positives in the set, effective share p~); wanted: without p~."""
    changes, arms = (
        {"composition": "proportion", "curve_points": 1, **study.scale.sets, **changes},
        {},
    )
    for method, rate, share in wanted:
        here = changes | {"lr": rate, "proportion": share}
        for p in study.scale.shares:
            label = f"share-{method}-{rate:g}-{share:g}-{p:g}"
            here["effective_proportion"] = (
                None if p == share else p
            )  # p~ is the share itself without a baseline
            arms[method, rate, share, p] = study.job(
                label, study.scale.base, METHOD_ARMS[method], **here
            )
    return sharing_samples(arms)


SETS = {"10% positive": 0.1, "50% positive": 0.5}


class Fig5(Study):
    """Two sets of equal size, 10% and 50% positive; a baseline sets the effective share of positives p~.

    At TOPR's two best learning rates, since the best share may move with the rate.
    """

    def arms(self) -> Jobs:
        return by_share(
            self,
            [("topr", rate, share) for share in SETS.values() for rate in self.two_rates.values()],
        )

    def read(self) -> Figure:
        table = self.table(
            lambda run: {"realised": [run.results["iterations"][0]["training"]["realised_share"]]}
        )
        p_tildes, numbers = self.scale.shares, {}
        shares = {"base: correct": table.mean(("topr", self.rates["topr"], 0.5, 1.0), at=0)}
        data: dict[str, Any] = {
            "p~": list(p_tildes),
            "own rate": self.rates["topr"],
            "realised share": {},
        }
        for at, rate in self.two_rates.items():
            ends, here, realised = {}, {}, {}
            for name, share in SETS.items():
                arms = {p: ("topr", rate, share, p) for p in p_tildes}
                here[name] = series(map(table.mean, arms.values()))
                realised[name] = series(table.mean(arm, "realised") for arm in arms.values())
                ends[name] = {p: table.each(arm) for p, arm in arms.items()}
                each = {p: [*by_seed.values()] for p, by_seed in ends[name].items()}
                gains = {
                    f"p~ = 20% - p~ = {p:.0%}": table.gain(arms.get(0.2), arms.get(p))
                    for p in (0.01, 0.8, 1.0)
                }
                gains |= {
                    f"best p~ on other seeds - p~ = {p:.0%}": best_elsewhere(each, p)
                    for p in (0.5, 1.0)
                }
                shares |= {f"{name}, p~ = {p:.0%}{at}": table.mean(arm) for p, arm in arms.items()}
                shares |= {f"{name}: {pair}{at}": gain for pair, gain in gains.items() if gain}
            for p, sampled, other in ((0.1, 0.1, 0.5), (0.5, 0.5, 0.1)):
                if p in p_tildes:
                    gain = table.gain(("topr", rate, sampled, p), ("topr", rate, other, p))
                    shares[f"p~ = {p:.0%} by sampling - by a baseline{at}"] = gain
            seeds = self.seeds_of(arms[1.0])
            both = [
                [[by_seed[seed] for by_seed in ends[name].values()] for name in SETS]
                for seed in seeds
            ]
            correlations = Estimate.over_seeds(
                float(np.corrcoef(two_curves)[0, 1]) for two_curves in both
            )
            numbers[f"correlation of the two sets over p~{at}"] = correlations
            data[f"lr {rate:g}"], data["realised share"][f"lr {rate:g}"] = here, realised
        return Figure(data, shares, numbers)

    @staticmethod
    def panels(data: Data) -> list[Panel]:
        paper, panels = Line([10, 20], label="paper's\nbest", kind="band"), []
        for title in [key for key in data if key.startswith("lr")]:
            best = " (TOPR's best)" * (title == f"lr {data['own rate']:g}")
            sets = {named: data[title][named[0]] for named in zip(SETS, ("p1", "p3"), strict=True)}
            panels.append(shares_panel(f"{title}{best}", data["p~"], sets, paper))
        return panels


class Fig6(Study):
    """TOPR and TIS on the set with 10% positives, over several passes: a recovery takes time. On MATH: fig6-math."""

    rated = ("topr", "tis")

    def arms(self) -> Jobs:
        wanted = [(method, rate, 0.1) for method, rate in self.rates.items()]
        points = (
            self.scale.passes if self.scale.passes > 1 else self.scale.base.curve_points
        )  # after each pass
        return by_share(self, wanted, epochs=self.scale.passes, curve_points=points)

    def decides(self, arm: Sequence[Any]) -> bool:
        return arm[-1] in (0.01, 0.1)

    def read(self) -> Figure:
        names = {method: called(method, rate) for method, rate in self.rates.items()}
        low, p_tildes = "log-ratio of positives", self.scale.shares
        table = self.table(lambda run: {low: run.by_tenth("log_ratio_pos_q50")})

        arms = {(m, p): (m, rate, 0.1, p) for m, rate in self.rates.items() for p in p_tildes}
        data: dict[str, Any] = {
            text: series(table.mean(arms[m, p]) for p in p_tildes) for m, text in names.items()
        }
        data["p~"] = list(p_tildes)
        for p in [p for p in (0.01, 0.1) if p in p_tildes]:
            curves = {
                what: {m: table.along(arms[m, p], what) for m in names} for what in ("correct", low)
            }
            data[f"p~ = {p:.0%}"] = curves
        shares = {f"{names[m]}, p~ = {p:.0%}": table.mean(arm) for (m, p), arm in arms.items()}
        for what, at in (("", -1), (", after one pass", 1 if self.scale.passes > 1 else -1)):
            gains = {p: table.gain(arms["topr", p], arms["tis", p], at=at) for p in p_tildes}
            shares |= {f"TOPR - TIS, p~ = {p:.0%}{what}": gain for p, gain in gains.items()}
        shares |= {
            f"{METHOD_ARMS[m].name} - base, p~ = {p:.0%}": table.change(arm)
            for (m, p), arm in arms.items()
        }
        ends = {
            key: table.each(arm) for key, arm in arms.items()
        }  # some p~ have more seeds than self.seeds
        highest = {
            m: [max(ends[m, p][seed] for p in p_tildes) for seed in self.seeds] for m in names
        }
        shares["TIS - TOPR: highest of all p~"] = Estimate.over_seeds(
            np.subtract(highest["tis"], highest["topr"])
        )
        return Figure(data, shares)

    @staticmethod
    def panels(data: Data) -> list[Panel]:
        names = {key: key.partition(",")[0] for key, y in data.items() if "mean" in y}
        ends = {(name, name.lower()): data[key] for key, name in names.items()}
        panels = [shares_panel("set with 10% positive, at the end", data["p~"], ends)]
        for title in [key for key in data if key.startswith("p~ = ")]:
            share, low = title.replace("p~", P_TILDE), data[title]["log-ratio of positives"]
            panels.append(accuracy(share, data[title]["correct"], METHOD_ARMS, TRAINING))
            panels.append(
                tenths_panel(f"positives, {share}", "median log-ratio (nats), 95% interval", low)
            )
        return panels


class Fig7(Study):
    """TOPR against plain importance sampling: 33% negative and gradients clipped early, 60% and clipped late.

    On the laptop with two optimisers, as one divides by the gradient's size; each at TOPR's best learning rate.
    Arms: (optimiser, share of negatives, gradient norm to clip at, method).
    """

    rated = property(lambda self: list(self.scale.optimizers))

    def arms(self) -> Jobs:
        base, arms = (
            replace(
                self.scale.base,
                composition="proportion",
                epochs=self.scale.passes,
                **self.scale.sets,
            ),
            {},
        )
        for optimizer, rate in self.rates.items():
            for negative, clip in zip((0.33, 0.6), self.scale.clips, strict=True):
                for method in ("topr", "off_policy"):
                    changes = {
                        "lr": rate,
                        "proportion": 1 - negative,
                        "max_norm": clip,
                        **RATED[optimizer].changes,
                    }
                    label = f"fig7-{optimizer}-{negative}-{clip}-{method}"
                    arms[optimizer, negative, clip, method] = self.job(
                        label, base, METHOD_ARMS[method], **changes
                    )
        return sharing_samples(arms)

    def read(self) -> Figure:
        def norms(run: Finished) -> dict[str, Sequence[float]]:
            each = np.array([step["grad_norm"] for step in run.steps])
            summary = {
                "largest gradient norm": [each.max()],
                "steps clipped": [(each > run.settings.max_norm).mean()],
            }
            return summary | {"gradient norm": run.by_tenth("grad_norm")}

        table, data, shares, numbers = self.table(norms), {}, {}, {}
        for arm in self.arms():
            optimizer, negative, clip, method = arm
            here = f"{optimizer}, {negative:.0%} negative, clipped at {clip:g}"
            name = f"{here}, {METHOD_ARMS[method].name}"
            curves = data.setdefault(
                f"{here}, lr {self.rates[optimizer]:g}", {"correct": {}, "gradient norm": {}}
            )
            for what in curves:
                curves[what][method] = table.along(arm, what)
            shares |= {
                f"{name}: {what}": table.mean(arm, what)
                for what in ("correct", "invalid", "steps clipped")
            }
            shares[f"{name} - base: correct"] = table.change(arm)
            if method != "topr":
                other = (*arm[:3], "topr")
                shares[f"{here}: TOPR - {METHOD_ARMS[method].name}"] = table.gain(other, arm)
                largest = [
                    [*table.each(one, "largest gradient norm").values()] for one in (arm, other)
                ]
                ratio = Estimate.over_seeds(np.subtract(*np.log10(largest)))
                numbers[
                    f"{here}: log10 of largest gradient norm, {METHOD_ARMS[method].name} / TOPR"
                ] = ratio
            numbers[f"{name}: largest gradient norm"] = table.mean(arm, "largest gradient norm")
        return Figure(data, shares, numbers)

    @staticmethod
    def panels(data: Data) -> list[Panel]:
        panels, settings = [], {}
        for key in data:  # "OPTIMISER, SHARE negative, clipped at NORM, lr RATE"
            settings.setdefault(", ".join(key.split(", ")[1:3]), []).append(key)
        for setting, keys in settings.items():  # the ends, one optimiser below the other
            at, drawn = -np.arange(len(keys)), []
            for method, shift in (("topr", 0.15), ("off_policy", -0.15)):
                curves = [data[key]["correct"][method] for key in keys]
                ends = {what: [curve[what][-1] for curve in curves] for what in curves[0]}
                points = line(at, ends, METHOD_ARMS[method].name, METHOD_ARMS[method].style)
                drawn.append(points._replace(x=points.y, y=at + shift, kind="rows"))
            named = [f"{key.split(', ')[0]}, {key.split(', ')[-1]}" for key in keys]
            options = {
                "yticks": at,
                "yticklabels": named,
                "xlim": (-3, 103),
                "ylim": (0.5 - len(keys), 0.5),
            }
            panels.append(Panel(f"{setting}, at the end", CORRECT, "", drawn, options))
        for key in [key for key in data if "60% negative" in key]:
            norms = data[key]["gradient norm"]
            panels.append(
                tenths_panel(key, "gradient norm, mean over a tenth", norms, yscale="log")
            )
        return panels


COMPOSITION_ARMS = {
    "uniform": Arm("uniform", "topr", {"composition": "uniform"}),
    "its_positives": Arm(
        "positives, as many steps", "p5", {"composition": "uniform", "method": "sft"}
    ),
    "positives_only": Arm("positives only", "sft", {"composition": "positives_only"}),
    "anna_karenina": Arm(
        "Anna Karenina", Style("#882255", (0, (5, 1)), "s"), {"composition": "anna_karenina"}
    ),
}


class Fig8(Study):
    """Iterations of sampling and training: uniform, positives only, Anna Karenina. On MATH: fig8-math.

    Three iterations, at the paper's scale five (both ours), at TOPR's two best learning rates. Two arms have
    positives alone: as many as uniform has, in as many steps; and as many samples as uniform has. At the paper's scale
    with DeepSeek-R1 8B too, and with Llama 3 70B, a line that is not trained; other models draw samples of their own.
    """

    def arms(self) -> Jobs:
        base, arms = replace(self.scale.base, curve_points=1, **self.scale.iterated), {}
        for rate in self.two_rates.values():
            arms |= {
                (k, rate): self.job(f"fig8-{k}-{rate:g}", base, arm, lr=rate)
                for k, arm in COMPOSITION_ARMS.items()
            }
        topr_rate = self.rates["topr"]
        others = {
            (n, topr_rate): self.job(n, base, lr=topr_rate, **changes)
            for n, changes in self.scale.others.items()
        }
        return sharing_samples(arms) | others

    def read(self) -> Figure:
        topr_rate = self.rates["topr"]
        settings = self.runs[("uniform", topr_rate), self.seeds[0]].settings
        steps, keys = range(settings.iterations + 1), ("pass@1", f"maj@{settings.k}")

        def level(run: Finished) -> dict[str, Sequence[float]]:
            """A model that is not trained stays what it is for all iterations."""
            return (
                {}
                if run.settings.iterations
                else {key: run.measured[key] * len(steps) for key in keys}
            )

        table, data = self.table(level), {}
        shares = {"base: correct": table.mean(("uniform", topr_rate), "pass@1", at=0)}
        pairs = {
            f"Anna Karenina - {arm.name}": ("anna_karenina", k)
            for k, arm in [*COMPOSITION_ARMS.items()][:-1]
        }
        pairs |= {
            f"uniform - {COMPOSITION_ARMS[k].name}": ("uniform", k)
            for k in ("its_positives", "positives_only")
        }
        for (at_rate, rate), key in product(self.two_rates.items(), keys):
            names = {k: arm.name for k, arm in COMPOSITION_ARMS.items()}
            names |= {name: name for name in self.scale.others} if rate == topr_rate else {}
            data[f"{key}, lr {rate:g}"] = {name: table.along((name, rate), key) for name in names}
            for text, (one, other) in pairs.items():
                each = [table.gain((one, rate), (other, rate), key, at=i) for i in steps]
                shares |= {
                    f"{text}: {key} after iteration {i}{at_rate}": each[i] for i in steps[1:]
                }
                gains = np.array([gain.each for gain in each[1:]])
                first = Estimate.over_seeds(gains[:3].mean(0))  # later the problems run out
                shares[f"{text}: {key}, mean of iterations 1 to 3{at_rate}"] = first
                shares[f"{text}: {key}, last iteration{at_rate}"] = each[-1]
                shares[f"{text}: {key}, last iteration - first{at_rate}"] = Estimate.over_seeds(
                    gains[-1] - gains[0]
                )
            for (name, text), i in product(names.items(), steps[1:]):
                shares[f"{text}: {key} after iteration {i}{at_rate}"] = table.mean(
                    (name, rate), key, at=i
                )
        return Figure(data, shares)

    @staticmethod
    def panels(data: Data) -> list[Panel]:
        panels = []
        for key, curves in data.items():
            arms = {name: COMPOSITION_ARMS.get(name, Arm(name, "")) for name in curves}
            drawn = arm_lines(curves, arms, lambda y: range(len(y["mean"])))
            y_label = f"{key.partition(',')[0]} (%), 95% interval"
            panels.append(Panel(key, "iterations", y_label, drawn, {"xticks": drawn[0].x}))
        return panels


def training_task(settings: Settings) -> Task:
    """The training problems as test problems, to measure how hard they are."""
    task = gsm8k_task(settings)
    return replace(task, test=task.train)


THIRDS = {"hardest third": "p1", "middle third": "p3", "easiest third": "p5"}  # and their styles


class Fig9(Study):
    """The weight of questions of each difficulty in the data: ten equally wide buckets by the base model's accuracy.

    Ours: the accuracy on test questions of each difficulty after training, on the set with 50% positives of Figure 5.
    """

    def arms(self) -> Jobs:
        base = replace(self.scale.base, iterations=0, test_samples=self.scale.difficulty)
        bases = {"test": self.job("fig9-test", base), "training": Job("fig9", base, training_task)}
        return {**by_share(self, [("topr", self.rates["topr"], 0.5)]), **bases}

    def read(self) -> Figure:
        weights, shares, hardest, topr_rate = {}, {}, {}, self.rates["topr"]
        sampled = [self.runs["training", seed].tested(0) for seed in self.seeds]
        positives = [
            sum(sample.reward >= 0 for sample in samples) / len(samples) for samples in sampled
        ]
        for p in (0.05, 0.1, 0.2, 0.5, 0.8, 1.0):
            baselines = [topr.baseline_for_proportion(share, p) for share in positives]
            each = np.array([*map(weight_by_difficulty, sampled, baselines)])  # (seeds, buckets)
            each /= np.nansum(each, axis=1, keepdims=True)
            weights[f"p~ = {p:.0%}"] = series(map(Estimate.over_seeds, each.T))
            hardest[p] = np.nansum(each[:, :3], axis=1)
            shares[f"p~ = {p:.0%}: weight of the three hardest buckets"] = Estimate.over_seeds(
                hardest[p]
            )
        heavier = Estimate.over_seeds(hardest[0.1] - hardest[0.8])
        shares["p~ = 10% - p~ = 80%: weight of the three hardest buckets"] = heavier
        thirds = {
            p: [
                by_third(self.runs["test", seed], self.runs[("topr", topr_rate, 0.5, p), seed])
                for seed in self.seeds
            ]
            for p in self.scale.shares
        }
        data = {**weights, "p~": list(thirds)}
        for number, third in enumerate(THIRDS):
            estimates = {
                p: Estimate.over_seeds(accuracy[number] for accuracy in each)
                for p, each in thirds.items()
            }
            shares |= {f"{third}, p~ = {p:.0%}: correct": value for p, value in estimates.items()}
            data[third] = series(estimates.values())
        gap = {
            p: np.array([easiest - hard for hard, _, easiest in each]) for p, each in thirds.items()
        }
        if {0.2, 0.8} <= {*gap}:
            narrower = Estimate.over_seeds(gap[0.8] - gap[0.2])
            shares["p~ = 80% - p~ = 20%: easiest third - hardest third, correct"] = narrower
        return Figure(data, shares)

    @staticmethod
    def panels(data: Data) -> list[Panel]:
        buckets = [5 + 10 * i for i in range(10)]
        drawn = [
            line(buckets, y, key.replace("p~", P_TILDE))
            for key, y in data.items()
            if key.startswith("p~ = ")
        ]
        axes = "base model's accuracy on a question (%)", "weight of a question (%), 95% interval"
        highest = max(float(np.nanmax(one.y)) for one in drawn)
        thirds = {(third, style): data[third] for third, style in THIRDS.items()}
        return [
            Panel("what an average question weighs", *axes, drawn, {"ylim": (0, 1.1 * highest)}),
            shares_panel("test questions after training", data["p~"], thirds),
        ]


def by_third(base: Finished, trained: Finished) -> list[float]:
    """Accuracy after training on the third of the test questions that is hardest for the base, the next, the last."""
    groups = [rewards_of_groups(run.tested(run.last_step)).values() for run in (base, trained)]
    before, after = (
        np.array([np.mean([r > 0 for r in rewards]) for rewards in questions])
        for questions in groups
    )
    hardest_first = after[np.argsort(before, kind="stable")]
    return [float(third.mean()) for third in np.array_split(hardest_first, 3)]


def weight_by_difficulty(
    samples: Sequence[Sample], baseline: float, buckets: int = 10
) -> list[float]:
    """The weight of an average question of each difficulty in the dataset (Fig. 9): the sum of |reward - baseline|.

    Rewards are -1 and +1, so a correct sample weighs 1 - c and an incorrect one 1 + c. Questions are in equally wide
    buckets by their share of correct samples, the hardest first; NaN where a bucket is empty.

    >>> samples = [Sample(prompt="?", completion="!", reward=reward) for reward in (1.0, -1.0, -1.0, -1.0)]
    >>> weight_by_difficulty(samples, baseline=0.5, buckets=2)
    [5.0, nan]
    """
    weights: list[list[float]] = [[] for _ in range(buckets)]
    for rewards in rewards_of_groups(samples).values():
        correct = sum(reward > 0 for reward in rewards)
        bucket = min(correct * buckets // len(rewards), buckets - 1)
        weights[bucket].append(sum(abs(reward - baseline) for reward in rewards))
    return [sum(bucket) / len(bucket) if bucket else math.nan for bucket in weights]


class Table2(Study):
    """Generative verifiers before and after TOPR, and weighted self-consistency with their verdicts as weights."""

    rated = ()

    def arms(self) -> Jobs:
        verifier = self.scale.verifier
        models = {
            Path(model).name: model for model in (verifier.model, *self.scale.other_verifiers)
        }
        return {
            name: self.job(f"table2-{name}", verifier, model=model)
            for name, model in models.items()
        }

    def read(self) -> Figure:
        data = {
            name: [self.runs[name, seed].results for seed in self.seeds] for name in self.arms()
        }
        shares = {}
        for name, results in data.items():
            table = rows_of_table2(results)
            for row, columns in results[0]["table2"].items():
                shares |= {
                    f"{name}, {row}: {column}": table.mean(row, column) for column in columns
                }
            shares[f"{name}, TOPR - base: {ACCURACY}"] = table.gain("topr", "base", ACCURACY)
            shares[f"{name}, TOPR - constant verdict: {ACCURACY}"] = table.gain(
                "topr", CONSTANT, ACCURACY
            )
            shares[f"{name}, TOPR - no verifier: {WEIGHTED}"] = table.gain(
                "topr", "no verifier", WEIGHTED
            )
            shares[f"{name}, base - no verifier: {WEIGHTED}"] = table.gain(
                "base", "no verifier", WEIGHTED
            )
            shares[f"{name}, base - TOPR: {INVALID}"] = table.gain("base", "topr", INVALID)
        return Figure(data, shares)

    @staticmethod
    def panels(data: Data) -> list[Panel]:
        panels = []
        for name, results in data.items():
            table, rows = rows_of_table2(results), results[0]["table2"]
            cells = {
                row: {column: table.mean(row, column).record() for column in rows[row]}
                for row in rows
            }
            panels.append(to_panel(cells)._replace(title=f"base verifier: {name}"))
        return panels


def rows_of_table2(results: Sequence[Mapping[str, Any]]) -> Measured:
    """Each row of the table, over the runs of one verifier; results: what each run measured."""
    rows = [
        (row, seed, cells)
        for seed, run in enumerate(results)
        for row, cells in run["table2"].items()
    ]
    return Measured(
        (row, seed, {name: [cell["mean"]] for name, cell in cells.items()})
        for row, seed, cells in rows
    )


ALL = (Fig1, Fig2, Fig3, Fig4, Fig5, Fig6, Fig7, Fig8, Fig9, Table2, Robustness, Variants)
STUDIES: dict[str, type[Study]] = {study.__name__.lower(): study for study in ALL}
