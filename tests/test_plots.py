"""The pictures: told apart without colour, complete, and there whole or not at all."""

from itertools import combinations

import pytest
from matplotlib.image import imread

from pipeline.plots import (
    METHODS,
    PARAMETERS,
    STYLES,
    VARIANTS_DRAWN,
    Line,
    Panel,
    draw,
    draw_curve,
    draw_tokens,
    lines,
    save_figure,
)


@pytest.mark.parametrize("names", [METHODS, VARIANTS_DRAWN, PARAMETERS, ("correct", "incorrect", "invalid")])
def test_styles_of_one_picture_differ_without_colour(names):
    for one, other in combinations(names, 2):
        assert STYLES[one].dashes != STYLES[other].dashes
        assert STYLES[one].marker != STYLES[other].marker
        assert STYLES[one].colour != STYLES[other].colour


def test_a_panel_is_drawn_as_described():
    panel = Panel(
        "title", "x (s)", "y (m)", [Line([0, 1, 2], [1, 2, 3], "tis", half_width=[0.1] * 3)], {"yscale": "log"}
    )
    [axes] = draw([panel]).axes
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == ("title", "x (s)", "y (m)")
    assert axes.get_yscale() == "log"
    [line] = axes.lines
    assert line.get_ydata().tolist() == [1, 2, 3]
    assert line.get_color() == STYLES["tis"].colour
    assert len(axes.collections) == 1  # the interval
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["tis"]


@pytest.mark.parametrize(("kind", "axis"), [("points", 1), ("rows", 0)])
def test_points_have_bars_for_their_intervals(kind, axis):
    x_and_y = [[0, 1], [5, 7]] if kind == "points" else [[5, 7], [0, 1]]
    [axes] = draw([Panel("", "", "", [Line(*x_and_y, "tis", kind=kind, half_width=[1, 2])])]).axes
    [bars] = axes.collections
    assert [segment[:, axis].tolist() for segment in bars.get_segments()] == [[4, 6], [5, 9]]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["tis"]


def test_lines_without_a_style_get_different_ones():
    [axes] = draw([Panel("", "", "", lines([0, 1], {name: [0, 1] for name in "abcde"}))]).axes
    assert [line.get_color() for line in axes.lines] == [STYLES[name].colour for name in PARAMETERS]


def test_points_are_not_joined():
    [axes] = draw([Panel("", "", "", [Line([0, 1], [0, 1], kind="points")])]).axes
    assert axes.lines[0].get_linestyle() == "None"


def test_panels_stand_in_rows():
    figure = draw([Panel("", "", "", [Line([0], [0])])] * 5, columns=2)
    assert figure.axes[0].get_subplotspec().get_gridspec().get_geometry() == (3, 2)


def test_a_curve_shows_accuracy_and_outcomes_in_percent_and_joins_iterations():
    curve = [
        {"samples_seen": n, "pass@1": {"mean": 0.5, "se": 0.01}, "correct": 0.5, "incorrect": 0.3, "invalid": 0.2}
        for n in (0, 100)
    ]
    accuracy, outcomes = draw_curve([{"curve": curve}] * 2, "topr").axes
    assert accuracy.lines[0].get_xdata().tolist() == [0, 100, 200]
    assert accuracy.lines[0].get_ydata().tolist() == [50, 50, 50]
    band = accuracy.collections[0].get_paths()[0].vertices[:, 1]
    assert (min(band), max(band)) == pytest.approx((48, 52))
    assert {line.get_label(): line.get_ydata()[0] for line in outcomes.lines} == pytest.approx(
        {"correct": 50, "incorrect": 30, "invalid": 20}
    )


def test_tokens_are_wrapped_and_coloured_by_sign():
    figure = draw_tokens([" word"] * 40 + ["$"], [1.0, -9.0] * 20 + [0.0], "title", furthest=1)
    [axes] = figure.axes
    heights = {text.get_position()[1] for text in axes.texts}
    assert len(heights) > 2  # more than one row
    assert max(text.get_position()[0] for text in axes.texts) < 9.2
    red, green, _, _ = axes.patches[0].get_facecolor()
    assert green > red  # above zero: green
    red, green, _, _ = axes.patches[1].get_facecolor()
    assert red > green  # below: brown
    figure.canvas.draw()  # a lone dollar sign is no formula


def test_a_figure_is_saved_whole(tmp_path):
    save_figure(draw([Panel("", "", "", [Line([0, 1], [0, 1])])]), tmp_path / "figure.png")
    assert imread(tmp_path / "figure.png").shape[2] == 4
    assert [path.name for path in tmp_path.iterdir()] == ["figure.png"]
