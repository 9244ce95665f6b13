"""Figures: what a panel shows, legends that cover nothing, styles that differ without color."""

import math
from itertools import combinations

import pytest
from matplotlib.image import imread

from toprlib.plotting import (
    METHOD_LABELS,
    PARAMETERS,
    STYLES,
    Line,
    Panel,
    Style,
    draw,
    draw_curve,
    estimates,
    lines,
    save_figure,
)


def draw_one(drawn, **options):
    """The axes of a figure with one panel."""
    [axes] = draw([Panel("title", "x (s)", "y (m)", drawn, options)]).axes
    return axes


def labels_of(legend):
    return [text.get_text() for text in legend.get_texts()]


# ---- styles --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "names", [tuple(METHOD_LABELS), PARAMETERS, ("correct", "incorrect", "invalid")]
)
def test_styles_of_one_figure_differ_in_color_dashes_and_marker(names):
    """Any two of these lines can be distinguished in greyscale, by dashes or by markers alone."""
    for one, other in combinations(names, 2):
        first, second = STYLES[one], STYLES[other]
        assert first.colour != second.colour
        assert first.marker != second.marker
        assert first.dashes != second.dashes


def test_lines_without_a_style_get_that_of_their_label_or_the_next_of_the_parameters():
    own = Line([0, 1], [0, 1], style=Style("#123456", "-", "o"))
    named = Line([0, 1], [0, 1], "anything", style="limit")
    others = lines([0, 1], {"a": [0, 1], "tis": [1, 0], "b": [1, 1]})
    axes = draw_one([own, named, *others])
    expected = ["#123456"] + [STYLES[name].colour for name in ("limit", "p1", "tis", "p2")]
    assert [line.get_color() for line in axes.lines] == expected


# ---- panels --------------------------------------------------------------------------------------
def test_a_line_is_joined_and_its_interval_is_an_area():
    axes = draw_one([Line([0, 1], [5, 7], "tis", half_width=[1, 2])], yscale="log")
    [line] = axes.lines
    assert line.get_xydata().tolist() == [[0, 5], [1, 7]]
    assert line.get_linestyle() == "--"
    [area] = axes.collections
    corners = {tuple(corner) for corner in area.get_paths()[0].vertices.tolist()}
    assert corners == {(0, 4), (0, 6), (1, 5), (1, 9)}
    texts = (axes.get_title(), axes.get_xlabel(), axes.get_ylabel(), axes.get_yscale())
    assert texts == ("title", "x (s)", "y (m)", "log")


@pytest.mark.parametrize(("kind", "axis"), [("points", 1), ("rows", 0)])
def test_points_are_not_joined_and_rows_have_level_intervals(kind, axis):
    """each: dots for the values, on the height or above the place of their point."""
    values = [[4.0, 5.5], [6.5, 8.0]]
    x_and_y = [[0, 1], [5, 7]] if kind == "points" else [[5, 7], [0, 1]]
    drawn = Line(*x_and_y, "tis", kind=kind, half_width=[1, 2], each=values)
    axes = draw_one([drawn])
    points = axes.lines[0]
    assert [points.get_xdata().tolist(), points.get_ydata().tolist()] == x_and_y
    assert points.get_linestyle() == "None"
    bars, *dots = axes.collections
    ends = [sorted(path.vertices[:, axis].tolist()) for path in bars.get_paths()]
    assert ends == [[4, 6], [5, 9]]
    for position, (scatter, expected) in enumerate(zip(dots, values, strict=True)):
        offsets = scatter.get_offsets()
        assert offsets[:, axis].tolist() == expected
        assert offsets[:, 1 - axis].tolist() == [position, position]


def test_a_band_covers_its_range_and_is_in_the_legend():
    axes = draw_one([Line([1, 3], label="best", kind="band"), Line([0, 4], [0, 1], "tis")])
    [band] = axes.patches
    assert (band.get_x(), band.get_width()) == (1, 2)
    assert labels_of(axes.get_legend()) == ["best", "TIS"]


def test_a_line_without_numbers_is_not_in_the_legend():
    axes = draw_one(lines([0, 1], {"shown": [0, math.nan], "hidden": [math.nan] * 2, "empty": []}))
    assert labels_of(axes.get_legend()) == ["shown"]


def test_markers_of_long_lines_are_few_and_apart():
    axes = draw_one(lines(list(range(100)), {"a": [0] * 100, "b": [0] * 100}))
    starts = [line.get_markevery()[0] for line in axes.lines]
    spacings = {line.get_markevery()[1] for line in axes.lines}
    assert starts[0] != starts[1]
    assert spacings == {100 // 6}


@pytest.mark.parametrize(
    ("scale", "limits", "expected"),
    [
        ("linear", (0, 100), ["0", "20", "40", "60", "80", "100"]),
        ("log", (0.1, 10), ["0.1", "0.2", "0.5", "1", "2", "5", "10"]),
        ("log", (1, 10_000), ["1", "10", "100", "1,000", "10,000"]),
    ],
)
def test_ticks_are_plain_numbers(scale, limits, expected):
    axes = draw_one([Line(limits, [0, 1])], xscale=scale, xlim=limits)
    axes.figure.draw_without_rendering()
    low, high = limits
    ticks = []
    for place, label in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True):
        if low <= place <= high:
            ticks.append(label.get_text())
    assert ticks == expected


def test_ticks_of_the_options_stay():
    axes = draw_one([Line([1, 50], [0, 1])], xscale="log", xticks=[1, 7, 50])
    assert axes.get_xticks().tolist() == [1, 7, 50]


# ---- legends -------------------------------------------------------------------------------------
def test_a_legend_is_beside_the_axes_and_within_the_figure():
    labels = ["naive REINFORCE", "a label\nof two lines", *PARAMETERS]
    figure = draw(
        [
            Panel("left", "x", "y", lines([0, 1], {label: [0, 1] for label in labels})),
            Panel("right", "x", "y", lines([0, 1], {"topr": [0, 1]})),
        ]
    )
    figure.draw_without_rendering()
    left, right = figure.axes
    for axes, end in ((left, right.get_tightbbox().x0), (right, figure.bbox.x1)):
        legend = axes.get_legend().get_window_extent()
        assert legend.x0 >= axes.get_window_extent().x1
        assert legend.x1 <= end


def test_panels_with_the_same_labels_share_a_legend():
    drawn = lines([0, 1], {"topr": [0, 1], "reinforce": [1, 0]})
    figure = draw([Panel("one", "x", "y", drawn), Panel("two", "x", "y", drawn)])
    [legend] = figure.legends
    assert labels_of(legend) == ["TOPR", "naive REINFORCE"]
    assert [axes.get_legend() for axes in figure.axes] == [None, None]
    figure.draw_without_rendering()
    end = max(axes.get_window_extent().x1 for axes in figure.axes)
    assert end <= legend.get_window_extent().x0 < legend.get_window_extent().x1 <= figure.bbox.x1


def test_a_figure_without_labels_has_no_legend():
    figure = draw([Panel("", "", "", [Line([0, 1], [0, 1])])] * 2)
    assert figure.legends == []
    assert [axes.get_legend() for axes in figure.axes] == [None, None]


# ---- figures -------------------------------------------------------------------------------------
def test_panels_are_in_rows_and_a_figure_is_saved_as_png(tmp_path):
    figure = draw([Panel("", "", "", [Line([0], [0])])] * 5, columns=2, size=(3, 2))
    assert figure.axes[0].get_subplotspec().get_gridspec().get_geometry() == (3, 2)
    assert figure.get_size_inches().tolist() == [6, 6]
    save_figure(figure, tmp_path / "figure.png")
    assert imread(tmp_path / "figure.png").shape == (900, 900, 4)
    assert [path.name for path in tmp_path.iterdir()] == ["figure.png"]


def test_estimates_have_intervals_of_two_standard_errors():
    line = estimates({0: {"mean": 0.5, "se": 0.01}, 8: {"mean": 0.6, "se": None}}, scale=100)
    assert (line.x, line.y) == ([0, 8], [50, 60])
    assert line.half_width == pytest.approx([2, 0])


# ---- the figure of a run -------------------------------------------------------------------------
def make_point(samples_seen, share):
    return {
        "samples_seen": samples_seen,
        "correct": share,
        "incorrect": 0.9 - share,
        "invalid": 0.1,
        "pass@1": {"mean": share, "se": 0.01},
        "reward": {"mean": 2 * share, "se": None},
        "questions": 9,
        "samples_per_question": 4,
    }


def make_iteration(shares, realised_share, weight_neg_mean, samples=100):
    curve = [make_point(0, shares[0]), make_point(samples, shares[1])]
    tenths = {"realised_share": realised_share, "weight_neg_mean": weight_neg_mean}
    return {"curve": curve, "training": {"tenths": tenths}}


ITERATIONS = [
    make_iteration((0.5, 0.625), [0.5, 0.75], [1.0, None]),
    make_iteration((0.625, 0.75), [0.8], [0.25], samples=60),
]


def test_a_curve_joins_the_iterations_in_percent():
    accuracy, outcomes, reward, training = draw_curve(ITERATIONS, "the run").axes
    titles = [axes.get_title() for axes in (accuracy, outcomes, reward, training)]
    assert titles == ["the run", "outcomes", "reward", "weights in training"]
    assert accuracy.lines[0].get_xydata().tolist() == [[0, 50], [100, 62.5], [160, 75]]
    shares = {line.get_label(): line.get_ydata().tolist() for line in outcomes.lines}
    assert shares["correct"] == [50, 62.5, 75]
    assert shares["incorrect"] == pytest.approx([40, 27.5, 15])
    assert shares["invalid"] == [10, 10, 10]
    assert reward.lines[0].get_ydata().tolist() == [1.0, 1.25, 1.5]


def test_training_is_shown_at_the_middle_of_each_part_of_an_epoch():
    *_, training = draw_curve(ITERATIONS, "").axes
    share, weight = training.lines
    assert share.get_xydata().tolist() == [[25, 50], [75, 75], [130, 80]]
    assert weight.get_ydata().tolist() == pytest.approx([100, math.nan, 25], nan_ok=True)


def test_a_loss_without_weights_has_no_panel_of_weights():
    iteration = make_iteration((0.5, 0.75), [None, None], [None, None])
    titles = [axes.get_title() for axes in draw_curve([iteration], "ppo").axes]
    assert titles == ["ppo", "outcomes", "reward"]
