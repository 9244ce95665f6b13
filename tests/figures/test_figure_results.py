"""The published results: their numbers follow from their data, and their pictures can be drawn."""

import json
from pathlib import Path

import numpy as np
import pytest

from figures.run import FIGURES, load_figure
from toprlib.report import STUDENT_T

RESULTS = Path(__file__).resolve().parents[2] / "results"


def load(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def end(line):
    """The last point of a line, in each seed."""
    return np.array(line["each"][-1])


def start(line):
    """The first point of a line, in each seed."""
    return np.array(line["each"][0])


def fall(line):
    """How far a line ends below its highest point, in each seed."""
    each = np.array(line["each"])  # (points, seeds)
    return each.max(0) - each[-1]


def at(line, data, p_tilde):
    """A line over p~ at one of them, in each seed."""
    return np.array(line["each"][data["p~"].index(p_tilde)])


def correlation(data, rate):
    """Of the two sets' accuracies over p~, in each seed."""
    ten = np.array(data[rate]["10% positive"]["each"]).T  # (seeds, p~)
    fifty = np.array(data[rate]["50% positive"]["each"]).T
    return np.array([np.corrcoef(one, other)[0, 1] for one, other in zip(ten, fifty, strict=True)])


SGD = "sgd, 60% negative, clipped at 100, lr 0.1"

# File, name of a number there, and the number from the file's data.
DERIVED = [
    (
        "fig1",
        "TOPR - naive REINFORCE, one rate",
        lambda data: end(data["one rate"]["topr"]) - end(data["one rate"]["reinforce"]),
    ),
    (
        "fig1",
        "TOPR - TIS, own rates",
        lambda data: end(data["own rate"]["topr"]) - end(data["own rate"]["tis"]),
    ),
    (
        "fig1",
        "naive REINFORCE - TOPR, one rate: fall from the highest",
        lambda data: fall(data["one rate"]["reinforce"]) - fall(data["one rate"]["topr"]),
    ),
    (
        "fig3",
        "PPO - base, one rate: invalid",
        lambda data: end(data["ppo"]["invalid"]) - start(data["ppo"]["invalid"]),
    ),
    (
        "fig4",
        "TOPR - positives only: maj@16, second best rate",
        lambda data: (
            end(data["lr 0.0001"]["maj@n"]["topr"])
            - end(data["lr 0.0001"]["maj@n"]["positives_only"])
        ),
    ),
    (
        "fig5",
        "50% positive: p~ = 20% - p~ = 80%",
        lambda data: (
            at(data["lr 3e-05"]["50% positive"], data, 0.2)
            - at(data["lr 3e-05"]["50% positive"], data, 0.8)
        ),
    ),
    (
        "fig5",
        "p~ = 10% by sampling - by a baseline, second best rate",
        lambda data: (
            at(data["lr 0.0001"]["10% positive"], data, 0.1)
            - at(data["lr 0.0001"]["50% positive"], data, 0.1)
        ),
    ),
    ("fig5", "correlation of the two sets over p~", lambda data: correlation(data, "lr 3e-05")),
    (
        "fig6",
        "TOPR - TIS, p~ = 1%",
        lambda data: at(data["TOPR, lr 3e-5"], data, 0.01) - at(data["TIS, lr 3e-5"], data, 0.01),
    ),
    (
        "fig7",
        "sgd, 60% negative, clipped at 100: TOPR - plain IS",
        lambda data: end(data[SGD]["correct"]["topr"]) - end(data[SGD]["correct"]["off_policy"]),
    ),
    (
        "fig8",
        "Anna Karenina - uniform: pass@1, last iteration",
        lambda data: (
            end(data["pass@1, lr 3e-05"]["anna_karenina"])
            - end(data["pass@1, lr 3e-05"]["uniform"])
        ),
    ),
    (
        "fig9",
        "p~ = 80% - p~ = 20%: easiest third - hardest third, correct",
        lambda data: (
            at(data["easiest third"], data, 0.8)
            - at(data["hardest third"], data, 0.8)
            - at(data["easiest third"], data, 0.2)
            + at(data["hardest third"], data, 0.2)
        ),
    ),
    (
        "robustness",
        "DPO: three times the rate - best rate",
        lambda data: end(data["dpo"]["three"]) - end(data["dpo"]["best"]),
    ),
    (
        "variants",
        "geometric mean, lr 3e-05 - topr",
        lambda data: (
            end(data["one rate"]["geometric mean"]["correct"])
            - end(data["one rate"]["topr"]["correct"])
        ),
    ),
]


@pytest.mark.parametrize(("file", "name", "from_data"), DERIVED)
def test_numbers_follow_from_the_data(file, name, from_data):
    content = load(file)
    number = (content["shares"] | content["numbers"])[name]
    assert number["each"] == pytest.approx(from_data(content["data"]), abs=1e-12)


@pytest.mark.parametrize("name", FIGURES)
def test_means_and_intervals_follow_from_the_seeds(name):
    content = load(name)
    for number in [*content["shares"].values(), *content["numbers"].values()]:
        each = np.array(number["each"])
        assert number["mean"] == pytest.approx(each.mean(), abs=1e-12)
        if len(each) == 1:
            assert number["half_width"] is None
        else:
            error = each.std(ddof=1) / len(each) ** 0.5
            assert number["half_width"] == pytest.approx(STUDENT_T[len(each)] * error, abs=1e-12)


@pytest.mark.parametrize("name", FIGURES)
def test_every_picture_can_be_drawn_from_the_data(name):
    panels = load_figure(name).panels(load(name)["data"])
    assert panels
    for panel in panels:
        measured = [line for line in panel.lines if line.kind != "band"]
        assert measured
        for line in measured:
            assert len(line.x) == len(line.y) > 0
            assert np.isfinite(np.array(line.y, float)).any()
