"""The pictures: told apart without colour, complete, and there whole or not at all."""

import math
from itertools import combinations

import pytest
from matplotlib.image import imread
from matplotlib.text import Text

from figures.common import METHODS, VARIANTS
from pipeline.plots import (
    PARAMETERS,
    STYLES,
    Line,
    Panel,
    Style,
    draw,
    draw_curve,
    lines,
    save_figure,
)

ARMS, WEIGHTS = ([arm.style for arm in arms.values()] for arms in (METHODS, VARIANTS))


@pytest.mark.parametrize(
    "styles", [ARMS, ["topr", *WEIGHTS], PARAMETERS, ("correct", "incorrect", "invalid")]
)
def test_styles_of_one_picture_differ_without_colour(styles):
    for one, other in combinations([STYLES.get(style, style) for style in styles], 2):
        assert all(ours != theirs for ours, theirs in zip(one, other, strict=True))


@pytest.mark.parametrize(("kind", "axis"), [("line", 1), ("points", 1), ("rows", 0)])
def test_a_panel_is_drawn_as_described_with_its_intervals(kind, axis):
    x_and_y = [[0, 1], [5, 7]][:: 1 if axis else -1]
    drawn = Line(*x_and_y, "tis", kind=kind, half_width=[1, 2])
    [axes] = draw([Panel("title", "x (s)", "y (m)", [drawn], {"yscale": "log"})]).axes
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == ("title", "x (s)", "y (m)")
    assert axes.get_yscale() == "log"
    line, [interval] = axes.lines[0], axes.collections
    assert [line.get_xdata().tolist(), line.get_ydata().tolist()] == x_and_y
    assert line.get_color() == STYLES["tis"].colour
    assert (line.get_linestyle() == "None") == (kind != "line")  # points are not joined
    assert [text.get_text() for text in axes.texts] == ["TIS"]
    ends = [path.vertices[:, axis] for path in interval.get_paths()]
    assert {float(end) for of_one in ends for end in of_one} == {4, 5, 6, 9}


def test_labels_stand_beside_the_ends_of_their_lines_and_not_on_each_other():
    ends = {
        "low": 0.0,
        "one": 5.0,
        "two": 5.01,
        "three": 5.02,
        "none": math.nan,
        "high": 9.0,
        "above": 99.0,
    }
    drawn = lines([0, 1, 2], {name: [1, 5, end] for name, end in ends.items()}, "topr " * len(ends))
    figure = draw(
        [Panel("", "", "", [*drawn, Line([0, 1], [math.nan] * 2, "nowhere")], {"ylim": (0, 10)})]
    )
    figure.draw_without_rendering()
    [axes] = figure.axes
    boxes = {
        text.get_text(): Text.get_window_extent(text) for text in axes.texts
    }  # without the leader
    assert boxes.keys() == ends.keys()
    assert min(box.x0 for box in boxes.values()) > axes.get_window_extent().x1
    assert not any(one.overlaps(other) for one, other in combinations(boxes.values(), 2))
    assert sorted(boxes, key=lambda name: boxes[name].y0) == [
        "low",
        "one",
        "none",
        "two",
        "three",
        "high",
        "above",
    ]
    for name, height in {"low": 0.0, "high": 9.0}.items():
        _, wanted = axes.transData.transform((0, height))
        assert (boxes[name].y0 + boxes[name].y1) / 2 == pytest.approx(wanted, abs=3)  # pixels


def test_lines_without_a_style_get_different_ones_and_a_band_has_its_name_inside():
    own = Line([0, 1], [0, 1], style=Style("#123456", "-", "o"))
    band = Line([1, 2], label="here", kind="band")
    [axes] = draw(
        [Panel("", "", "", [band, own, *lines([0, 1], {name: [0, 1] for name in "abcde"})])]
    ).axes
    assert [line.get_color() for line in axes.lines] == [
        "#123456",
        *(STYLES[name].colour for name in PARAMETERS),
    ]
    assert [text.get_text() for text in axes.texts] == ["here", *"abcde"]
    assert (axes.texts[0].xy[0], len(axes.patches)) == (1.5, 1)


def test_a_curve_shows_accuracy_and_outcomes_in_percent_and_joins_iterations():
    entry = {
        "correct": 0.5,
        "incorrect": 0.3,
        "invalid": 0.2,
        "pass@1": {"mean": 0.5, "se": 0.01},
        "questions": 9,
    }
    curve = [{"samples_seen": n, **entry, "reward": {"mean": 2.0, "se": None}} for n in (0, 100)]
    accuracy, outcomes, reward = draw_curve([{"curve": curve}] * 2, "topr").axes
    assert [axes.get_title() for axes in (accuracy, outcomes, reward)] == [
        "topr",
        "outcomes",
        "reward",
    ]
    assert accuracy.lines[0].get_xydata().tolist() == [[0, 50], [100, 50], [200, 50]]
    assert reward.lines[0].get_ydata().tolist() == [2, 2, 2]
    shares = {line.get_label(): line.get_ydata()[0] for line in outcomes.lines}
    assert shares == pytest.approx({"correct": 50, "incorrect": 30, "invalid": 20})
    training = {"tenths": {"realised_share": [0.5, 0.75], "weight_neg_mean": [1.0, None]}}
    *_, reward, learnt = draw_curve([{"curve": curve, "training": training}] * 2, "topr").axes
    assert learnt.lines[0].get_xydata().tolist() == [[25, 50], [75, 75], [125, 50], [175, 75]]
    assert [*map(str, learnt.lines[1].get_ydata())] == ["100.0", "nan", "100.0", "nan"]


def test_panels_stand_in_rows_and_a_figure_is_saved_whole(tmp_path):
    figure = draw([Panel("", "", "", [Line([0], [0])])] * 5, columns=2)
    assert figure.axes[0].get_subplotspec().get_gridspec().get_geometry() == (3, 2)
    save_figure(figure, tmp_path / "figure.png")
    assert imread(tmp_path / "figure.png").shape[2] == 4
    assert [path.name for path in tmp_path.iterdir()] == ["figure.png"]
