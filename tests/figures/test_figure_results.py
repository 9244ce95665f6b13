"""The numbers and pictures of figures against their data: of the published runs, of pretended ones.

What is published was made by the code of an earlier day; pretended runs go through that of today.
"""

import json
import zlib
from functools import cache
from pathlib import Path
from unittest import mock

import numpy as np
import pandas as pd
import pytest

from figures import robustness
from figures.run import FIGURES, load_figure, to_json
from figures.runs import Run, folder_name
from figures.scales import LAPTOP
from figures.table2 import DIFFERENCES
from toprlib.evaluation import Answers
from toprlib.records import OUTCOMES, Sample
from toprlib.report import STUDENT_T

RESULTS = Path(__file__).resolve().parents[2] / "results"


# ---- the runs ------------------------------------------------------------------------------------
def load_published(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


class PretendedRun(Run):
    """A run with random numbers, which differ from run to run, in place of files."""

    @property
    def rng(self):
        return np.random.default_rng(zlib.crc32(folder_name(self.job).encode()))

    def steps(self):
        names = ["grad_norm", "weights_below_1e-6", "log_ratio_pos_q50"]
        return pd.DataFrame(self.rng.random((20, 3)), columns=names)

    def outcomes(self, step):
        """Of six questions' completions, (6, n); the first question is always too hard."""
        rng = np.random.default_rng([step, int(self.rng.integers(2**32))])
        outcomes = rng.choice(OUTCOMES, (6, self.settings.eval_samples))
        outcomes[0] = "incorrect"
        return outcomes

    def test_samples(self, step):
        samples = []
        for question, outcomes in enumerate(self.outcomes(step)):
            for outcome in outcomes:
                reward = 1.0 if outcome == "correct" else -1.0
                samples.append(Sample(prompt=f"Q{question}", completion=outcome, reward=reward))
        return samples

    def answers(self, step):
        outcomes = self.outcomes(step)
        return Answers(outcomes == "correct", outcomes.tolist())


def pretend(job):
    rng = np.random.default_rng(zlib.crc32(folder_name(job).encode()))

    def entry():
        numbers = dict(zip(OUTCOMES, rng.dirichlet([1, 1, 1]).tolist(), strict=True))
        for name in ("pass@1", f"maj@{job.settings.k}"):
            numbers[name] = {"mean": rng.random(), "se": 0.01}
        return numbers

    results = {"before": entry(), "iterations": [], "table2": {}}
    last = results["before"]
    for _ in range(job.settings.iterations):
        curve = [last, *(entry() for _ in range(job.settings.evals_per_epoch))]
        last = curve[-1]
        training = {"realised_share": rng.random()}
        iteration = {"dataset": {"steps": 20}, "training": training, "curve": curve, "after": last}
        results["iterations"].append(iteration)
    for column, *rows in DIFFERENCES:
        for row in rows:
            results["table2"].setdefault(row, {})[column] = {"mean": rng.random()}
    return PretendedRun(job, None, results)


@cache
def load_pretended(name):
    figure = load_figure(name)
    rates = {}
    for method in figure.tuned(LAPTOP):
        rates[method] = [3e-5, 1e-4]
    # Other best rates than TOPR's.
    different = {"sgd": [0.1], "sft": [1e-4], "positives_only": [3e-4]}
    rates |= {method: different[method] for method in rates.keys() & different.keys()}
    jobs = figure.arms(LAPTOP, rates, range(2))
    with mock.patch.object(robustness, "steps_to_recover", return_value=7):  # which takes long
        findings = figure.read([pretend(job) for job in jobs], LAPTOP)
    return json.loads(json.dumps(to_json(findings)))


LOADERS = pytest.mark.parametrize("load", [load_published, load_pretended])


# ---- numbers -------------------------------------------------------------------------------------


def end(line):
    """The last point of a line, in each seed."""
    return np.array(line["each"][-1])


def start(line):
    """The first point of a line, in each seed."""
    return np.array(line["each"][0])


def after_one_pass(line):
    """The second point of a line that has a point after each pass, in each seed."""
    return np.array(line["each"][1])


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


def values_of(line, seeds):
    """A line's last point in some of its seeds, which are 0, 1, ... ."""
    return end(line)[list(seeds)]


def few(line):
    """The share of problems with at most 4 right answers, in each seed."""
    each = line["each"]  # bins: 0, then 1 to 4, 5 to 8, ...
    return np.array(each[0]) + np.array(each[1])


def mean_of_gains(one, other):
    """One line minus another, the mean of points 1 to 3, in each seed."""
    gains = np.array(one["each"]) - np.array(other["each"])
    return gains[1:4].mean(0)


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
        "fig6",
        "TOPR - TIS, p~ = 1%, seeds 8 to 12",
        lambda data: (
            values_of(data["p~ = 1%"]["correct"]["topr"], range(8, 13))
            - values_of(data["p~ = 1%"]["correct"]["tis"], range(8, 13))
        ),
    ),
    (
        "fig6",
        "TOPR - TIS, p~ = 10%, after one pass",
        lambda data: (
            after_one_pass(data["p~ = 10%"]["correct"]["topr"])
            - after_one_pass(data["p~ = 10%"]["correct"]["tis"])
        ),
    ),
    (
        "fig4",
        "TOPR - positives only, own rate",
        lambda data: (
            end(data["own rate"]["correct"]["topr"])
            - end(data["own rate"]["correct"]["positives_only"])
        ),
    ),
    (
        "fig4",
        "TOPR - positives, as many steps: maj@16, own rate",
        lambda data: (
            end(data["own rate"]["maj@n"]["topr"]) - end(data["lr 0.0001"]["maj@n"]["sft"])
        ),
    ),
    (
        "fig4",
        "positives only - TOPR: problems with at most 4 correct, second best rate",
        lambda data: (
            few(data["lr 0.0001"]["cardinality"]["positives_only"])
            - few(data["lr 0.0001"]["cardinality"]["topr"])
        ),
    ),
    (
        "fig7",
        "sgd, 60% negative, clipped at 100: TOPR - plain IS",
        lambda data: end(data[SGD]["correct"]["topr"]) - end(data[SGD]["correct"]["off_policy"]),
    ),
    (
        "fig8",
        "uniform - positives, as many steps: pass@1, mean of iterations 1 to 3, own rate",
        lambda data: mean_of_gains(
            data["pass@1, lr 3e-05"]["uniform"], data["pass@1, lr 0.0001"]["its_positives"]
        ),
    ),
    (
        "fig8",
        "Anna Karenina - positives only: maj@16, last iteration, own rate",
        lambda data: (
            end(data["maj@16, lr 3e-05"]["anna_karenina"])
            - end(data["maj@16, own rate"]["positives_only"])
        ),
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


@LOADERS
@pytest.mark.parametrize(("file", "name", "from_data"), DERIVED)
def test_numbers_follow_from_the_data(load, file, name, from_data):
    content = load(file)
    number = (content["shares"] | content["numbers"])[name]
    assert number["each"] == pytest.approx(from_data(content["data"]), abs=1e-12)


@pytest.mark.parametrize("name", FIGURES)
def test_every_claim_s_number_is_measured(name):
    content = load_pretended(name)
    measured = content["shares"].keys() | content["numbers"].keys()
    needed = set()
    for claim in json.loads((RESULTS / "claims.json").read_text(encoding="utf-8")):
        numbers = [(claim["figure"], claim["key"])]
        numbers += [(figure, key) for figure, key, *_ in claim.get("needs", [])]
        needed |= {key for figure, key in numbers if figure == name and key}
    assert needed - measured == set()


@pytest.mark.parametrize("name", FIGURES)
def test_means_and_intervals_follow_from_the_seeds(name):
    content = load_published(name)
    for number in [*content["shares"].values(), *content["numbers"].values()]:
        each = np.array(number["each"])
        assert number["mean"] == pytest.approx(each.mean(), abs=1e-12)
        if len(each) == 1:
            assert number["half_width"] is None
        else:
            error = each.std(ddof=1) / len(each) ** 0.5
            assert number["half_width"] == pytest.approx(STUDENT_T[len(each)] * error, abs=1e-12)


def test_figure_2_is_the_published_one():
    """It has no runs, and is the same whenever it is made."""
    today = load_pretended("fig2")
    published = load_published("fig2")
    for name, values in published["data"].items():
        assert today["data"][name] == pytest.approx(values, rel=1e-6, abs=1e-6)
    for name, number in published["numbers"].items():
        assert today["numbers"][name]["mean"] == pytest.approx(number["mean"], rel=1e-6, abs=1e-6)


# ---- pictures ------------------------------------------------------------------------------------
def mean(line):
    return np.array(line["mean"], float)


OWN = "each at its own learning rate"
DRAWN = [  # file, title of a panel, label of a line there, what it shows
    ("fig1", OWN, "PPO", lambda data: 100 * mean(data["own rate"]["ppo"])),
    ("fig2", "R = −1", "PPO", lambda data: data["PPO, R = -1"]),
    ("fig3", "naive REINFORCE", "invalid", lambda data: 100 * mean(data["reinforce"]["invalid"])),
    (
        "fig4",
        "self-consistency, lr 3e-05",
        "positives only",
        lambda data: 100 * mean(data["lr 3e-05"]["maj@n"]["positives_only"]),
    ),
    (
        "fig5",
        "lr 0.0001",
        "50% positive",
        lambda data: 100 * mean(data["lr 0.0001"]["50% positive"]),
    ),
    (
        "fig6",
        r"positives, $\tilde p$ = 10%",
        "TIS",
        lambda data: mean(data["p~ = 10%"]["log-ratio of positives"]["tis"]),
    ),
    ("fig7", SGD, "plain IS", lambda data: mean(data[SGD]["gradient norm"]["off_policy"])),
    (
        "fig8",
        "maj@16, lr 0.0001",
        "positives only",
        lambda data: 100 * mean(data["maj@16, lr 0.0001"]["positives_only"]),
    ),
    (
        "fig9",
        "test questions after training",
        "easiest third",
        lambda data: 100 * mean(data["easiest third"]),
    ),
    (
        "robustness",
        "three times the best learning rate",
        "DPO",
        lambda data: 100 * mean(data["dpo"]["three"]),
    ),
    (
        "variants",
        "invalid, TOPR's learning rate",
        "per-token",
        lambda data: 100 * mean(data["one rate"]["per-token"]["invalid"]),
    ),
]


@LOADERS
@pytest.mark.parametrize(("file", "title", "label", "from_data"), DRAWN)
def test_a_line_shows_its_data(load, file, title, label, from_data):
    data = load(file)["data"]
    [panel] = [panel for panel in load_figure(file).panels(data) if panel.title == title]
    [line] = [line for line in panel.lines if line.label == label and line.kind != "band"]
    assert len(line.x) == len(line.y) > 1
    assert list(line.y) == pytest.approx(list(from_data(data)), nan_ok=True)


@pytest.mark.parametrize(
    ("file", "title", "label", "arm"),
    [
        ("fig4", "self-consistency, own rate", "positives only\nlr 3e-4", "positives_only"),
        ("fig4", "self-consistency, own rate", "TOPR\nlr 3e-5", "topr"),
        ("fig8", "maj@16, own rate", "positives, as many steps\nlr 1e-4", "its_positives"),
        ("fig8", "maj@16, own rate", "Anna Karenina\nlr 3e-5", "anna_karenina"),
    ],
)
def test_a_line_at_its_own_rate_shows_its_data_and_its_rate(file, title, label, arm):
    def from_data(data):
        lines = data["own rate"]["maj@n"] if file == "fig4" else data["maj@16, own rate"]
        return 100 * mean(lines[arm])

    test_a_line_shows_its_data(load_pretended, file, title, label, from_data)


@pytest.mark.parametrize("file", ["fig4", "fig8"])
def test_own_rates_that_are_all_topr_s_are_not_drawn(file):
    figure = load_figure(file)
    rates = {name: [3e-5, 1e-4] for name in figure.tuned(LAPTOP)}
    runs = [pretend(job) for job in figure.arms(LAPTOP, rates, range(1))]
    panels = figure.panels(figure.read(runs, LAPTOP).data)
    at_rate = [panel.title.partition(", ")[2] for panel in panels]
    assert set(at_rate) == {"lr 3e-05", "lr 0.0001"}


@LOADERS
@pytest.mark.parametrize("name", FIGURES)
def test_every_picture_can_be_drawn_from_the_data(load, name):
    panels = load_figure(name).panels(load(name)["data"])
    assert panels
    for panel in panels:
        measured = [line for line in panel.lines if line.kind != "band"]
        assert measured
        for line in measured:
            assert len(line.x) == len(line.y) > 0
            assert np.isfinite(np.array(line.y, float)).any()
