"""The lecture: PDFs are built from the sources, numbers are those of results/, text is legible."""

import re
import shutil
from itertools import pairwise

import numpy as np
import pytest
import torch
from docs_helpers import at_rate, read_page
from matplotlib.text import Text

import topr
import toy_bandit
from scripts import make_lecture
from scripts.make_lecture import BUILD, DECKS, PICTURES, SOURCES
from scripts.make_tables import load
from topr import PRESETS, Limits, importance_weight
from toy_bandit import FOUR_ARMS, Bandit, ascend, tensor

NOTE = re.compile(r"<!--\n(.*?)-->", re.DOTALL)


@pytest.fixture(scope="module")
def rendered():
    """The Markdown of each deck, with its numbers."""
    return {deck: make_lecture.render(deck) for deck in DECKS}


@pytest.fixture(scope="module")
def slides(rendered):
    """The slides, without the front matter, and with plain spaces."""
    text = rendered["slides"].replace("\u00a0", " ")
    return re.split(r"^---$", text, flags=re.MULTILINE)[2:]


# ---- the PDFs ------------------------------------------------------------------------------------
@pytest.mark.parametrize("deck", DECKS)
def test_a_pdf_is_built_from_the_present_sources(deck, rendered, slides):
    pages, fingerprint = make_lecture.read_pdf(SOURCES / f"{deck}.pdf")
    assert fingerprint == make_lecture.fingerprint(deck, rendered[deck]), "run make lecture"
    assert pages == (len(slides) if deck == "slides" else 1)


def test_a_changed_number_changes_the_fingerprint(rendered):
    changed = rendered["slides"].replace("0.906", "0.907")
    assert changed != rendered["slides"]
    before = make_lecture.fingerprint("slides", rendered["slides"])
    assert make_lecture.fingerprint("slides", changed) != before


# ---- numbers -------------------------------------------------------------------------------------
# Numbers that the template itself may have: they come from no run.
TYPED = {
    "2503.14286",  # arXiv
    "5 %", "0.95",  # the question of the 200 tokens, and its wrong answer
    "0.05", "−0.5", "10 %",  # questions
    "60 %",  # the composition of a data set
    "± 95", "95 %",  # intervals
    "±1",  # rewards
    "0.01", "3.2",  # Proposition 3.2, and its a- = 0.01
    "−0.8",  # exercise 6
    "0.45",  # the section `way_back` of toy_bandit.py states it
}  # fmt: skip


def test_the_template_has_no_number_of_a_result():
    source = (SOURCES / "slides.md.jinja").read_text(encoding="utf-8")
    text = re.sub(r"\{\{.*?\}\}|\{#.*?#\}|\(\w+\.svg\)", "", source, flags=re.DOTALL)
    text = re.sub(r"^\$\$.*\$\$$", "", text, flags=re.MULTILINE)
    numbers = set(re.findall(r"−?\d+ %|−?\d+\.\d+|± ?\d+", text.replace("e^{-0.5}", "")))
    assert numbers - TYPED == set()


def test_numbers_are_those_of_the_files(slides):
    for share in load("completions")["correct"].values():
        assert f"{100 * share:.0f} %" in slides[2]
    for one in load("completions")["completions"].values():
        assert one["text"] in slides[2]
    for name, best, three, late, _, lr in load("robustness")["tables"]["robustness"]["rows"]:
        after = re.escape(f" | {best} | {three} | {late} |")
        [shown_lr] = re.findall(rf"\| {name} \| (\S+){after}", slides[19])
        assert float(shown_lr) == float(lr)
    for name in ("topr", "reinforce"):
        end = load("robustness")["data"][name]["late"]["mean"][-1]
        assert f"{100 * end:.1f} %" in slides[5]
    compared = [
        ("two_thirds", "10 % positive", "50 %", "100 %"),
        ("worded", "natural", "70 %", "sft"),
        ("two_thirds", "natural", "topr", "sft"),
    ]
    for base, name, arm, sft in compared:
        for lr in (3e-5, 1e-4, 2e-4):
            each = at_rate((base, name), arm, lr) - at_rate((base, name), sft, lr)
            mean = f"{np.mean(each):+.1f}".replace("-", "−")
            half_width = 2.7764 * np.std(each, ddof=1) / 5**0.5
            assert f"{mean} ± {half_width:.1f}" in slides[20]


def test_the_four_lines_compute_topr_loss(rendered):
    for markdown in rendered.values():
        assert make_lecture.FOUR_LINES in markdown
    generator = torch.Generator().manual_seed(0)
    token_logp, token_logmu = -torch.rand(2, 20, 5, generator=generator)
    names = {
        "torch": torch,
        "token_logp": token_logp.requires_grad_(),
        "token_logmu": token_logmu,
        "reward": torch.randn(20, generator=generator),
        "mask": (torch.arange(5) < torch.arange(20)[:, None] % 5 + 1).float(),
    }
    exec(make_lecture.FOUR_LINES, names)
    arguments = [names[name] for name in ("token_logp", "token_logmu", "reward", "mask")]
    expected = topr.topr_loss(*arguments)
    torch.testing.assert_close(names["loss"], expected)
    [actual_gradient] = torch.autograd.grad(names["loss"], token_logp)
    [expected_gradient] = torch.autograd.grad(expected, token_logp)
    torch.testing.assert_close(actual_gradient, expected_gradient)


# ---- the solutions -------------------------------------------------------------------------------
LOST = Bandit(tensor([0.2] * 5), tensor([1.0, -1.0, -1.0, -1.0, -1.0]))
LOST_START = tensor([1e-6, *[(1 - 1e-6) / 4] * 4]).log()


def weights_of(methods, log_ratio, reward):
    bounds = [PRESETS[name].of_sign(tensor(reward)) for name in methods]
    return [f"{importance_weight(log_ratio, *pair):.2g}" for pair in bounds]


def steps_back():
    for a_pos in (1, 0.1, 0.01):
        path = ascend(LOST_START, LOST, Limits(a_pos, 1, 0, 1), lr=1.0, steps=4000)
        yield f"{int((path.softmax(-1)[:, 0] < 0.5).sum()):,}"


def step_above_the_bound():
    limits = Limits(1, 1, 0.01, 1)
    path = ascend(FOUR_ARMS.mu.log(), FOUR_ARMS, limits, lr=4.0, steps=3000)
    return f"{int((toy_bandit.objective(path, FOUR_ARMS, limits) <= 1).sum()):,}"


def end_where_topr_fails():
    bandit = Bandit(tensor([0.05, 0.95]), tensor([1.0, 0.1]))
    end = ascend(bandit.mu.log(), bandit, toy_bandit.TOPR, lr=1.0, steps=3000)[-1]
    return f"{end.softmax(-1)[0]:.2f}"


def solution_numbers():
    """The numbers of each solution, by its number in the list."""
    hundred_tokens = 100 * tensor(0.98).log()
    baselines = topr.baseline_for_proportion(tensor(0.1), tensor([0.5, 0.7]))
    push_topr = toy_bandit.gradient(LOST_START, LOST)[0]
    push_tis = toy_bandit.gradient(LOST_START, LOST, toy_bandit.TIS)[0]
    weight_tis = toy_bandit.weights(LOST_START, LOST, toy_bandit.TIS)[0]
    detach = make_lecture.detach_numbers()
    return {
        1: weights_of(("topr", "reinforce", "sft"), hundred_tokens, -1.0),
        2: weights_of(("topr", "tis", "sft", "reinforce", "off_policy"), tensor(-3.0), 1.0),
        5: [detach["with"], detach["without"]],
        6: [f"{c:.2g}".replace("-", "−") for c in baselines],
        9: [f"{push_topr:.2g}", f"{push_tis:.2g}", f"{weight_tis:.2g}"],
        11: list(steps_back()),
        12: [step_above_the_bound()],
        13: [end_where_topr_fails()],
    }


def test_numbers_of_the_solutions_are_computed():
    parts = re.split(r"^(\d+)\. ", read_page("docs/lecture/solutions.md"), flags=re.MULTILINE)[1:]
    written = {}
    for number, text in zip(parts[::2], parts[1::2], strict=True):
        bold = re.findall(r"\*\*(.*?)\*\*", text)
        if bold:
            written[int(number)] = bold
    assert written == solution_numbers()


def test_points_add_up():
    page = read_page("docs/lecture/exercises.md")
    total = int(re.search(r"^(\d+) points\.", page, re.MULTILINE).group(1))
    assert sum(int(points) for points in re.findall(r"\((\d) points\)", page)) == total
    solutions = re.findall(r"^\d+\.", read_page("docs/lecture/solutions.md"), re.MULTILINE)
    assert len(solutions) == len(re.findall(r"^\d+\.", page, re.MULTILINE))


# ---- the lesson ----------------------------------------------------------------------------------
def test_every_slide_has_a_title_and_a_note_with_its_minute(slides):
    minutes = []
    for slide in slides:
        assert len(re.findall(r"^# .+", slide, re.MULTILINE)) == 1
        [note] = NOTE.findall(slide)
        minutes.append(int(re.search(r"Minutes? (\d+)", note).group(1)))
    assert minutes == sorted(minutes)
    assert minutes[0] == 0
    assert 40 <= minutes[-1] < 45


def test_the_answer_follows_its_question(slides):
    asks = ['class="ask"' in slide for slide in slides]
    assert sum(asks) >= 8
    for asked, follows in pairwise(asks):
        assert not (asked and follows)


def test_the_plan_is_that_of_the_slides(slides, rendered):
    plan = read_page("docs/teaching.md")
    assert len(plan.split()) <= 900
    assert f"{len(slides)} slides" in plan
    [by_minute_20] = [n for n, slide in enumerate(slides, 1) if "BY MINUTE 20" in slide]
    assert f"By minute 20 you should be at slide {by_minute_20}" in plan
    correct = load("completions")["correct"]
    shares = [f"{100 * correct[name]:.0f} %" for name in ("reinforce", "topr")]
    assert " and ".join(shares) in plan
    values = make_lecture.bandit_numbers()
    for name in ("objective_reinforce", "objective_topr", "back_topr", "not_back_tis"):
        assert str(values[name]) in plan


# ---- legibility ----------------------------------------------------------------------------------
def test_no_text_of_the_theme_is_too_small():
    theme = (SOURCES / "theme.css").read_text(encoding="utf-8")
    sizes = [float(size) for size in re.findall(r"font-size: ([\d.]+)px", theme)]
    assert len(sizes) >= 8
    assert min(sizes) >= make_lecture.SMALLEST


@pytest.fixture(scope="module")
def figures():
    """The pictures of the slides."""
    drawn = {name: draw_picture() for name, (draw_picture, _) in PICTURES.items()}
    for figure in drawn.values():
        figure.draw_without_rendering()
    return drawn


@pytest.mark.parametrize("name", PICTURES)
def test_text_in_pictures_is_legible(name, figures, rendered):
    _, width = PICTURES[name]
    assert re.search(rf"!\[w:{width} [^\]]+\]\({name}\.svg\)", rendered["slides"])
    figure = figures[name]
    pixels_per_point = width / (72 * figure.get_figwidth())
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
    assert min(text.get_fontsize() for text in texts) * pixels_per_point >= 20


@pytest.mark.parametrize("name", PICTURES)
def test_names_in_pictures_cover_no_line(name, figures):
    [axes] = figures[name].axes
    for text in axes.texts:
        box = text.get_window_extent()
        for line in axes.lines:
            points = line.get_transform().transform(line.get_xydata())
            assert not any(box.contains(x, y) for x, y in points), text.get_text()


@pytest.fixture(scope="module")
def marp():
    """The build of `make lecture`; without it the layout of the slides is not tested here."""
    if not (BUILD / "node_modules").exists() or shutil.which("chromium") is None:
        pytest.skip("no Marp or no chromium: the layout of the slides was not tested")
    make_lecture.write_pictures()


@pytest.mark.parametrize("deck", DECKS)
def test_nothing_is_outside_of_a_page_or_too_small(deck, marp):
    make_lecture.make_html(deck)
    assert make_lecture.find_problems(deck) == []


def test_a_slide_with_too_much_text_is_found(marp, monkeypatch):
    page = "---\nmarp: true\ntheme: topr\n---\n# Title\n\n" + "- a line\n" * 20
    small = "\n---\n# Title\n\n<p style='font-size: 20px'>small</p>\n"
    monkeypatch.setattr(make_lecture, "render", lambda deck: page + small)
    make_lecture.make_html("slides")
    problems = make_lecture.find_problems("slides")
    assert "page 1: too much content" in problems
    assert any("below 24 px" in problem for problem in problems)
