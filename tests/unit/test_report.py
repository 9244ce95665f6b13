"""Estimates against closed forms, and the text that shows them."""

import math
import re

import numpy as np
import pytest

from toprlib.report import STUDENT_T, Estimate, Table


@pytest.mark.parametrize("n", STUDENT_T)
def test_student_t_covers_95_percent_of_its_density(n):
    """The density of Student's t, integrated numerically between - quantile and + quantile."""
    freedom = n - 1
    x = np.linspace(-STUDENT_T[n], STUDENT_T[n], 200_001)
    constant = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2)
    constant /= math.sqrt(freedom * math.pi)
    density = constant * (1 + x**2 / freedom) ** (-(freedom + 1) / 2)
    covered = np.sum((density[1:] + density[:-1]) / 2) * (x[1] - x[0])
    assert covered == pytest.approx(0.95, abs=1e-4)


def test_the_interval_over_seeds_is_that_of_students_t():
    actual = Estimate.over_seeds([1.0, 2.0, 6.0])
    variance = ((1 - 3) ** 2 + (2 - 3) ** 2 + (6 - 3) ** 2) / 2
    assert actual.mean == 3
    assert actual.half_width == pytest.approx(4.303 * math.sqrt(variance / 3))
    assert actual.each == (1, 2, 6)


def test_more_than_thirteen_seeds_use_the_quantile_of_thirteen():
    actual = Estimate.over_seeds([0.0, 1.0] * 8)
    variance = 16 * 0.25 / 15
    assert actual.half_width == pytest.approx(2.179 * math.sqrt(variance / 16))


def test_the_interval_over_samples_is_two_standard_errors():
    actual = Estimate.over_samples([1.0, 2.0, 6.0])
    assert actual == (3, pytest.approx(2 * math.sqrt(7 / 3)), ())


@pytest.mark.parametrize("over", [Estimate.over_seeds, Estimate.over_samples])
def test_a_single_value_has_no_interval(over):
    actual = over([4.0])
    assert (actual.mean, actual.half_width) == (4.0, None)


@pytest.mark.parametrize("half_width", [0.25, 0.0, None])
def test_json_returns_the_same_estimate(half_width):
    estimate = Estimate(0.5, half_width)
    assert Estimate.from_json(estimate.to_json()) == estimate
    expected = None if half_width is None else half_width / 2
    assert estimate.to_json() == {"mean": 0.5, "se": expected}


@pytest.mark.parametrize(
    ("mean", "half_width", "shows_interval"),
    [
        (0.5, 0.2, True),
        (0.8, 0.2, True),  # reaches 1 exactly
        (0.2, 0.2, True),  # reaches 0 exactly
        (0.9, 0.2, False),  # above the possible values
        (0.1, 0.2, False),  # below them
    ],
)
def test_an_impossible_interval_is_replaced_by_the_values(mean, half_width, shows_interval):
    actual = Estimate(mean, half_width, each=(0.25, 0.75)).text(100, unit=" %", within=(0, 1))
    interval = f"{100 * mean:.1f} ± {100 * half_width:.1f} %"
    assert actual == (interval if shows_interval else "25.0, 75.0 %")


def test_an_impossible_interval_without_values_stays():
    assert Estimate(0.9, 0.2).text(within=(0, 1)) == "0.9 ± 0.2"


def test_a_table_prints_cells_as_they_are(capsys):
    """Text in square brackets and between colons means something to the library that prints it."""
    Table(["[bold]", "b"], [["[red]x[/red]", ":smile:"]]).print()
    printed = capsys.readouterr().out
    for cell in ("[bold]", "[red]x[/red]", ":smile:"):
        assert cell in printed


@pytest.mark.parametrize("columns", ["20", "30"])
def test_a_narrow_terminal_shows_every_letter(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    names = ["incorrect", "invalid"]
    Table(["", "before training"], [[name, "26.8 ± 1.2 %"] for name in names]).print()
    rows = re.split("[├└]", capsys.readouterr().out)  # a name may go over several lines
    letters = "".join(line.split("│")[1].strip() for line in rows[0].splitlines() if "│" in line)
    assert letters == "".join(names)


def test_markdown_keeps_each_row_on_its_line():
    lines = Table(["a", "b"], [["1|2", "3\n4"], ["5", "6"]]).markdown().split("\n")
    assert len(lines) == 4
    bars = [line.replace("\\|", "").count("|") for line in lines]
    assert bars == [3, 3, 3, 3]
