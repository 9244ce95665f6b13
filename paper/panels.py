"""The panels of each figure, as a function of its numbers alone: a picture can be drawn anew without a run.

A function has the name of its figure in paper/figures.py, and takes the `data` of results/NAME.json.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from paper.experiments import METHODS, OF_THE_PAPER, Arm
from paper.runs import Measured, Series
from pipeline.plots import STYLES, Line, Panel, Style
from tasks.verifier import to_panel

POSITIVES = {  # of Figure 4
    "topr": Arm("TOPR", "topr", {}),
    "positives_only": Arm("positives only", "sft", {"composition": "positives_only"}),
    "sft": Arm("positives, as many steps", "p5", {"method": "sft"}),  # negatives stay, with weight 0
}
COMPOSITIONS = {  # of Figure 8; what the control changes depends on the scale
    "uniform": Arm("uniform", "topr", {"composition": "uniform"}),
    "positives_only": Arm("positives only", "sft", {"composition": "positives_only"}),
    "anna_karenina": Arm("Anna Karenina", Style("#882255", (0, (5, 1)), "s"), {"composition": "anna_karenina"}),
    "control": Arm("as many positives, any", "p5", {"composition": "proportion"}),
}
VARIANTS_DRAWN = {  # and their styles
    "topr": STYLES["topr"],
    "per-token": Style("#E69F00", "--", "s"),
    "per-token + token mean": Style("#CC79A7", ":", "v"),
    "geometric mean": Style("#009E73", "-.", "^"),
    "clip 0.8..1.2": Style("#D55E00", (0, (6, 1, 1, 1, 1, 1)), "D"),
}
Data = Mapping[str, Any]
EPOCH, TRAINING, CORRECT = "share of the epoch (%)", "share of the training (%)", "correct (%), 95% interval"


def line(x: Sequence[float], y: Series, label: str, style: Style | str = "", scale: float = 100) -> Line:
    """A line with its 95% interval, in percent; None stands for what is not there.

    >>> line([1], {"mean": [0.5], "half_width": [None]}, "one seed").half_width is None
    True
    """
    mean, half_width = (scale * np.array(y[name], float) for name in ("mean", "half_width"))
    return Line(x, mean, label, style, half_width=None if np.isnan(half_width).all() else half_width)


def epoch(y: Series) -> list[float]:
    """The position of each point of a curve along the epoch, in percent."""
    return [100 * i / (len(y["mean"]) - 1) for i in range(len(y["mean"]))]


def middles(y: Series) -> list[float]:
    """The middles of equal parts of the training, in percent."""
    return [100 * (i + 0.5) / len(y["mean"]) for i in range(len(y["mean"]))]


def of_arms(
    curves: Mapping[str, Series],
    arms: Mapping[str, Arm],
    x: Callable[[Series], Sequence[float]] = epoch,
    scale: float = 100,
) -> list[Line]:
    """A line for each of some arms, with its name and style."""
    return [line(x(y), y, arms[key].name, arms[key].style, scale) for key, y in curves.items()]


def fig1(data: Data) -> list[Panel]:
    """The paper's methods along the epoch. Of the others, which end close together, the ends."""

    def ends(title: str, names: Sequence[str]) -> Panel:
        last = {name: {what: of[-1:] for what, of in own[name].items()} for name in reversed(names)}
        upright = of_arms(last, METHODS, lambda _: [0])
        drawn = [end._replace(x=end.y, y=[place], kind="rows") for place, end in enumerate(upright)]
        return Panel(
            f"{title}, own rate, at the end", CORRECT, "", drawn, {"yticks": [], "ylim": (-0.5, len(names) - 0.5)}
        )

    own, whole = data["own rate"], {"ylim": (-3, 100)}
    each = {name: own[name] for name in OF_THE_PAPER}
    return [
        Panel("TOPR's learning rate for all", EPOCH, CORRECT, of_arms(data["one rate"], METHODS), whole),
        Panel("each at its own learning rate", EPOCH, CORRECT, of_arms(each, METHODS), whole),
        ends("other bounds (Table 1)", ("topr", "tis", "off_policy", "sft")),
        ends("neighbours (ours)", ("topr", "group", "kl", "asymre")),
    ]


def fig2(data: Data) -> list[Panel]:
    """Positives left, negatives right."""
    panels = []
    for name in ("R = +1", "R = -1"):
        drawn = [Line(data["ratio"], data[f"{method}, {name}"], method, method.lower()) for method in ("TOPR", "PPO")]
        axes = r"$\pi / \mu$", "objective of one sequence"
        panels.append(Panel(name.replace("-", "−"), *axes, drawn, {"ylim": (-2.6, 2.6)}))
    return panels


def fig3(data: Data) -> list[Panel]:
    """A panel for each method."""
    return [
        Panel(METHODS[name].name, EPOCH, "share (%), 95% interval", along_epoch(curves), {"ylim": (-3, 103)})
        for name, curves in data.items()
    ]


def along_epoch(curves: Mapping[str, Series], styles: Mapping[str, Style] = STYLES) -> list[Line]:
    """A line along the epoch under each name, which is also that of its style."""
    return [line(epoch(y), y, name, styles[name]) for name, y in curves.items()]


def fig4(data: Data) -> list[Panel]:
    """Accuracy along the epoch, maj@n, and the test problems by how often each is solved."""
    ks, bins = data["n"], range(len(data["cardinality"]["topr"]["mean"]))
    of_n = {"xscale": "log", "xticks": ks, "xticklabels": ks}
    of_bins = {"xticks": bins, "xticklabels": ["0", *(f"{4 * i + 1}-{4 * i + 4}" for i in bins[:-1])]}
    counted = "test problems by correct completions", "correct completions of a problem", "problems (%), 95% interval"
    majority = of_arms(data["maj@n"], POSITIVES, lambda _: ks)
    return [
        Panel("accuracy", EPOCH, CORRECT, of_arms(data["correct"], POSITIVES)),
        Panel("self-consistency", "n", "maj@n (%), 95% interval", majority, of_n),
        Panel(*counted, of_arms(data["cardinality"], POSITIVES, lambda _: bins), of_bins),
    ]


def of_shares(title: str, lines: Iterable[Line]) -> Panel:
    """Accuracy against the effective share of positives."""
    ticks = [1, 2, 5, 10, 20, 50, 100]
    options = {"xscale": "log", "xticks": ticks, "xticklabels": ticks, "ylim": (-3, 100)}
    return Panel(title, r"effective share of positives $\tilde p$ (%)", CORRECT, list(lines), options)


def fig5(data: Data) -> list[Panel]:
    """A panel for each learning rate, with both sets."""
    paper, styles = Line([10, 20], label="paper's\nbest", kind="band"), {"10% positive": "p1", "50% positive": "p3"}
    x, panels = percent(data["p~"]), []
    for title in [key for key in data if key.startswith("lr")]:
        drawn = [line(x, data[title][name], name, style) for name, style in styles.items()]
        best = " (TOPR's best)" * (title == f"lr {data['own rate']:g}")
        panels.append(of_shares(f"{title}{best}", [paper, *drawn]))
    return panels


def percent(shares: Sequence[float]) -> list[float]:
    """Shares in percent."""
    return [100 * share for share in shares]


def symbols(text: str) -> str:
    """A text with p~ as a formula."""
    return text.replace("p~", r"$\tilde p$")


def fig6(data: Data) -> list[Panel]:
    """Accuracy at the end against the effective share; at single shares accuracy and log-ratio along the training."""
    ends = {key.partition(",")[0]: y for key, y in data.items() if "mean" in y}
    drawn = [line(percent(data["p~"]), y, name, name.lower()) for name, y in ends.items()]
    panels = [of_shares("set with 10% positive, at the end", drawn)]
    for title in [key for key in data if key.startswith("p~ = ")]:
        low = of_arms(data[title]["log-ratio of positives"], METHODS, middles, 1)
        right = of_arms(data[title]["correct"], METHODS)
        panels.append(Panel(symbols(title), TRAINING, CORRECT, right, {"ylim": (-3, 100)}))
        panels.append(Panel(f"positives, {symbols(title)}", TRAINING, "median log-ratio (nats), 95% interval", low))
    return panels


def fig7(data: Data) -> list[Panel]:
    """Where IS should break: 60% negative, and gradients clipped late."""
    panels, label = [], "gradient norm, mean over a tenth"
    for title in [key for key in data if "60% negative" in key]:
        norms = of_arms(data[title]["gradient norm"], METHODS, middles, 1)
        panels.append(Panel(title, TRAINING, CORRECT, of_arms(data[title]["correct"], METHODS), {"ylim": (-3, 100)}))
        panels.append(Panel(title, TRAINING, label, norms, {"yscale": "log"}))
    return panels


def fig8(data: Data) -> list[Panel]:
    """pass@1 and maj@k over the iterations."""
    panels = []
    for key, curves in data.items():
        arms = {name: COMPOSITIONS.get(name, Arm(name, "", {})) for name in curves}
        drawn = of_arms(curves, arms, lambda y: range(len(y["mean"])))
        panels.append(Panel(key, "iterations", f"{key} (%), 95% interval", drawn, {"xticks": drawn[0].x}))
    return panels


def fig9(data: Data) -> list[Panel]:
    """What a question weighs at each effective share, and the accuracy on thirds of the test questions against it."""
    buckets = [5 + 10 * i for i in range(10)]
    drawn = [line(buckets, y, symbols(key)) for key, y in data.items() if key.startswith("p~ = ")]
    axes = "base model's accuracy on a question (%)", "weight of a question (%), 95% interval"
    highest = max(float(np.nanmax(one.y)) for one in drawn)
    styles = {"hardest third": "p1", "middle third": "p3", "easiest third": "p5"}
    thirds = [line(percent(data["p~"]), data[key], key, style) for key, style in styles.items()]
    return [
        Panel("what an average question weighs", *axes, drawn, {"ylim": (0, 1.1 * highest)}),
        of_shares("test questions after training", thirds),
    ]


def table2(data: Data) -> list[Panel]:
    """A panel for each base verifier."""
    panels = []
    for name, found in data.items():
        table, rows = rows_of_table2(found), found[0]["table2"]
        cells = {row: {column: table.mean(row, column) for column in rows[row]} for row in rows}
        panels.append(to_panel(cells)._replace(title=f"base verifier: {name}"))
    return panels


def rows_of_table2(found: Sequence[Mapping[str, Any]]) -> Measured:
    """What runs of one verifier say of each row of the table; found: the results of each run."""
    return Measured(
        (row, number, {column: [cell["mean"]] for column, cell in columns.items()})
        for number, results in enumerate(found)
        for row, columns in results["table2"].items()
    )


def variants(data: Data) -> list[Panel]:
    """Correct and invalid completions along the epoch: at TOPR's learning rate, and each at its own if they differ."""
    titles = {"one rate": "TOPR's learning rate", "own rate": "its own learning rate"}
    if data["own rate"] == data["one rate"]:
        del titles["own rate"]
    return [
        Panel(
            f"{outcome}, {title}",
            EPOCH,
            f"{outcome} (%), 95% interval",
            along_epoch({name: curves[outcome] for name, curves in data[kind].items()}, VARIANTS_DRAWN),
            {"ylim": (-3, 103)},
        )
        for kind, title in titles.items()
        for outcome in ("correct", "invalid")
    ]


def real_llm(data: Data) -> list[Panel]:
    """Right answers along the epoch."""
    title = "SmolLM2-135M-Instruct, capitals"
    return [Panel(title, EPOCH, CORRECT, of_arms(data, METHODS), {"ylim": (-3, 100)})]
