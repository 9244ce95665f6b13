"""docs/index.html: it is up to date, and shows in a browser the numbers of Python and of files."""

import math
import re
from dataclasses import astuple
from statistics import fmean

import pytest

import topr
import toy_bandit
from scripts import make_page
from scripts.make_tables import load
from toy_bandit import tensor

ADDRESS = make_page.PAGE.as_uri()
SLOW = pytest.mark.slow


# ---- without a browser ---------------------------------------------------------------------------
def test_the_page_is_up_to_date():
    page = make_page.PAGE.read_text(encoding="utf-8")
    assert page == make_page.make_page(), "run make page"


def test_the_page_is_small_and_loads_nothing():
    page = make_page.PAGE.read_text(encoding="utf-8")
    assert len(page.encode()) < 600_000
    for word in ("<link", "src=", "@import", "url(h", "fetch(", "XMLHttp"):
        assert word not in page


def test_part_1_comes_before_the_letters_and_uses_none():
    page = make_page.PAGE.read_text(encoding="utf-8")
    before, _, after = page.partition('<dl class="letters">')
    assert "Tapered Off-Policy REINFORCE" in before
    part_1 = before[before.index('<section id="collapse">') :]
    assert set("xyRrμπ") <= set(re.sub("<[^>]+>", "", after[: after.index("</dl>")]))
    assert not set("μπρ") & set(part_1)
    assert not re.findall(r"\b[xyRr]\b", re.sub("<[^>]+>", "", part_1))


# ---- the browser ---------------------------------------------------------------------------------
@pytest.fixture
def open_page(browser):
    """open_page(width, setting, scheme): the page, in a window of a laptop or of a telephone.

    Nothing may reach the console or another host.
    """
    problems = []

    def check_request(request):
        if request.url.split("#")[0] != ADDRESS:
            problems.append(request.url)

    def open_page_at(width=1280, setting="", scheme="light"):
        page = browser.new_page(
            viewport={"width": width, "height": HEIGHTS[width]},
            color_scheme=scheme,
            reduced_motion="reduce",  # it scrolls at once
        )
        page.on("console", lambda message: problems.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on("request", check_request)
        page.goto(ADDRESS + setting)
        return page

    yield open_page_at
    assert problems == []


HEIGHTS = {1280: 720, 390: 844, 360: 800}
NEXT_FRAME = "new Promise(requestAnimationFrame)"  # the page draws once a frame

# Sets controls and clicks Step; returns the numbers that a part then shows, and the lines of its
# charts.
SET_AND_READ = """async ([part, controls, clicks]) => {
  const all = (what) => [...document.getElementById(part).querySelectorAll(what)];
  for (const [id, value] of Object.entries(controls)) {
    document.getElementById(id)[value === true ? "checked" : "value"] = value;
    document.getElementById(id).dispatchEvent(new Event("input", {bubbles: true}));
  }
  for (let i = 0; i < clicks; i++) document.getElementById("bandit-step").click();
  await new Promise(requestAnimationFrame);
  return [all("[data-name]").map((e) => [e.dataset.name, Number(e.dataset.value)]),
    Object.fromEntries(all(".chart").flatMap((e) =>
      Object.entries(e.lines).map(([name, line]) => [e.id + " " + name, line])))];
}"""


def set_and_read(page, part, controls, clicks=0):
    """The numbers of a part by name, and the lines of its charts by the chart's id and label."""
    values, lines = page.evaluate(SET_AND_READ, [part, controls, clicks])
    for line in lines.values():
        assert len(line["x"]) == len(line["y"]) > 0
        assert None not in line["y"]
    return dict(values), lines


def edges_of(page, selector):
    """The upper and the lower edge of an element, in pixels from the top of the window."""
    box = page.locator(selector).first.bounding_box()
    return box["y"], box["y"] + box["height"]


def bottom_of(page, selector):
    """The lower edge of an element, in pixels from the top of the window."""
    return edges_of(page, selector)[1]


def distance(page, first, last):
    """From the upper edge of one element to the lower edge of a later one, in pixels."""
    return bottom_of(page, last) - edges_of(page, first)[0]


def open_answers(page):
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")


# ---- numbers -------------------------------------------------------------------------------------
POINT = 4  # one of the evaluations along the runs of results/page.json


def collapse_numbers():
    curves = load("page")["curves"]
    return {method: curve["correct"][POINT] for method, curve in curves.items()}


def bandit_numbers():
    """Three steps of the page's first case: two right arms, two wrong ones."""
    mu = tensor([0.1, 0.3, 0.4, 0.2])
    bandit = toy_bandit.Bandit(mu, tensor([1.0, 1.0, -1.0, -1.0]))
    path = toy_bandit.ascend(bandit.mu.log(), bandit, topr.PRESETS["topr"], lr=0.1, steps=3)
    return {"objective_1": toy_bandit.objective(path[-1], bandit).item(), "bound_0": 1}


def wrong_completion(point):
    """The log-ratios of the wrong completion's tokens under naive REINFORCE."""
    [_, wrong] = load("page")["completions"]
    return wrong["log_ratio"]["reinforce"][point]


def variant_weights():
    token_log_ratio = wrong_completion(POINT)
    return {
        "topr": math.exp(math.fsum(token_log_ratio)),
        "per-token": fmean(min(math.exp(value), 1) for value in token_log_ratio),
        "geometric mean": math.exp(fmean(token_log_ratio)),
        "clip 0.8..1.2": 0.8,
    }


CASES = [  # part of the page, settings of its controls, numbers that it then shows
    (
        "collapse",
        {"collapse-at": POINT, "collapse-question": 2},
        collapse_numbers(),
    ),
    (
        "loss",
        {"loss-pos": 1, "loss-neg": -2},
        {
            "weight_pos_off_policy": math.e,
            "weight_pos_ppo": 0,
            "weight_neg_topr": math.exp(-2),
            "weight_neg_ppo": 0,
        },
    ),
    (
        # The taper of a positive is linear in the log-ratio below the bound of 1/2.
        "bounds",
        {"a_pos": 0.5, "a_neg": 0.2, "b_neg": 0.8, "bounds-ratio": -1},
        {
            "weight_pos": 0.5,
            "weight_neg": math.exp(-1),
            "rho_pos": math.log(2) / 2,
            "objective_neg": -math.exp(-1),
        },
    ),
    ("bandit", {"bandit-lr": -1, "bandit-speed": 1}, bandit_numbers()),
    (
        # p~ = p (1 - c) / (p (1 - c) + (1 - p) (1 + c)); the rewards become 1/2 and -3/2.
        "baseline",
        {"baseline-c": 0.5, "baseline-p": 0.2},
        {
            "p_tilde": 0.1 / (0.1 + 1.2),
            "reward_right": 0.5,
            "reward_wrong": -1.5,
            "hard": 0.1 * 0.5 + 0.9 * 1.5,
        },
    ),
    (
        # Signal over noise: 0.4 and sqrt(3.4) at p~; 1 and sqrt(5) of positives alone. The mean
        # weight is 2 Phi(-1).
        "share",
        {"share-p_tilde": 0.2, "share-p": 0.2, "share-sigma": 2},
        {
            "pace": 0.4 * (5 / 3.4) ** 0.5,
            "best": 0.8,
            "gain": 0.85 / 0.68**0.5,
            "weight": math.erfc(0.5**0.5),
        },
    ),
    (
        "tokens",
        {"tokens-at": 2},
        {
            "log_ratio_wrong_reinforce": math.fsum(wrong_completion(2)),
            "weight_wrong_reinforce": 1,
        },
    ),
    ("variants", {"variants-at": POINT, "variants-run": "reinforce"}, variant_weights()),
]
IDS = [part for part, _, _ in CASES]


@SLOW
@pytest.mark.parametrize(("part", "controls", "expected"), CASES, ids=IDS)
def test_a_part_shows_the_numbers_of_its_controls(open_page, part, controls, expected):
    clicks = 3 if part == "bandit" else 0
    values, _ = set_and_read(open_page(), part, controls, clicks)
    actual = {name: values[name] for name in expected}
    assert actual == pytest.approx(expected, rel=1e-6, abs=1e-12)


@SLOW
@pytest.mark.parametrize(("part", "controls"), [case[:2] for case in CASES], ids=IDS)
def test_a_part_asks_before_it_answers(open_page, part, controls):
    """Answers, and the lines of charts that give them, appear once a control was moved."""
    page = open_page()
    answers = page.locator(f"#{part} .answer")
    # The bandit waits for its steps, not for its controls.
    _, lines = set_and_read(page, part, controls if part == "bandit" else {})
    for name, line in lines.items():
        is_of_question = name.startswith("baseline-question ")  # a chart without the answer
        assert is_of_question or len(set(line["x"])) == 1
    assert answers.filter(visible=True).count() == 0
    set_and_read(page, part, controls, clicks=3 if part == "bandit" else 0)
    assert answers.filter(visible=True).count() == answers.count() > 0


@SLOW
@pytest.mark.parametrize(("part", "controls"), [case[:2] for case in CASES], ids=IDS)
def test_the_link_of_a_part_restores_its_controls(open_page, part, controls):
    clicks = 3 if part == "bandit" else 0
    page = open_page()
    expected = set_and_read(page, part, controls, clicks)
    link = page.locator(f"#{part} > .hint a").last.get_attribute("href")
    restored = open_page(setting=link)
    assert set_and_read(restored, part, {}, clicks) == expected
    assert restored.evaluate("scrollY") > 0


@SLOW
def test_a_link_with_unknown_settings_is_ignored(open_page):
    page = open_page(setting="#collapse?collapse-question=9&reward-0=x&no=1")
    # The default question is the first that TOPR gets right in the end.
    assert page.locator("#collapse-question").input_value() == "0"


@SLOW
def test_question_and_completions_are_those_of_the_file(open_page):
    page = open_page()
    set_and_read(page, "collapse", {"collapse-at": POINT, "collapse-question": 0})
    question = load("page")["questions"][0]
    assert page.locator("#collapse-asked").text_content().startswith(question["question"])
    for method, completions in question["completions"].items():
        expected = completions[POINT][0].strip() or "(nothing)"
        assert page.locator(f"#collapse-text-{method}").text_content() == expected


@SLOW
def test_buttons_set_the_bounds_of_table_1(open_page):
    page = open_page()
    buttons = page.get_by_role("group", name="Methods of Table 1")
    buttons.get_by_role("button", name="SFT", exact=True).click()
    page.evaluate(NEXT_FRAME)
    actual = {name: page.locator(f"#{name}").input_value() for name in ("a_pos", "b_neg")}
    assert actual == {"a_pos": "1", "b_neg": "0"}


@SLOW
def test_presets_are_those_of_python(open_page):
    expected = {name: list(astuple(limits)) for name, limits in topr.PRESETS.items()}
    assert open_page().evaluate("PRESETS") == expected


# ---- one number for one quantity -----------------------------------------------------------------
PERCENT = re.compile(r"([0-9.]+)\s%")


@SLOW
def test_the_answer_of_part_1_has_the_numbers_of_its_box(open_page):
    page = open_page()
    answer = page.locator("#collapse details").first.text_content()
    shares = [set(PERCENT.findall(answer))]
    for point in (0, 16):
        set_and_read(page, "collapse", {"collapse-at": point})
        shares.append(set(PERCENT.findall(page.locator("#collapse-says").text_content())))
    in_answer, start, end = shares
    assert len(start) == 1
    assert len(end) == 2
    assert start | end < in_answer  # which also has the highest share of naive REINFORCE
    assert len(in_answer) == 4


@SLOW
def test_python_and_javascript_round_a_share_alike(open_page):
    page = open_page()
    for thousandths in range(0, 10_000, 25):
        share = thousandths / 10_000
        shown = page.evaluate("([share]) => FORMS.percent(share)", [share])
        assert shown.split()[0] == make_page.percent(share)


@SLOW
def test_a_thousand_times_less_probable_is_0_001_everywhere(open_page):
    page = open_page()
    page.get_by_role("button", name="a thousand times less probable").click()
    page.evaluate(NEXT_FRAME)
    shown = {}
    for name in ("ratio_pos", "ratio_neg", "weight_neg_topr", "weight_pos_tis"):
        shown[name] = page.locator(f"#loss [data-name={name}]").first.text_content()
    assert set(shown.values()) == {"0.001"}
    assert "the weight 0.001" in page.locator("#loss details").text_content()


@SLOW
def test_200_tokens_have_one_ratio_on_the_whole_page(open_page):
    page = open_page()
    page.get_by_role("button", name="200 tokens").click()
    page.evaluate(NEXT_FRAME)
    ratio = page.locator("#loss-says [data-name=ratio_pos]").text_content()
    places = page.locator("p:has(sup)").filter(has_text="0.95200").all_text_contents()
    assert len(places) == 2
    for text in places:
        [found] = re.findall(r"= ([0-9.]+) × 10−([0-9]+)", text)
        assert float("{}e-{}".format(*found)) == pytest.approx(0.95**200, rel=2e-3)
        assert ratio.startswith(found[0])


# ---- questions -----------------------------------------------------------------------------------
def test_the_three_closing_questions_need_parts_1_to_4_alone():
    page = make_page.PAGE.read_text(encoding="utf-8")
    [section] = re.findall('<section id="questions">(.*?)</section>', page, re.DOTALL)
    questions = re.findall("<summary>(.*?)</summary>", section)
    assert len(questions) == 3
    named = re.findall(r"\(Parts? ([0-9])(?: and ([0-9]))?\)", section)
    assert {part for pair in named for part in pair if part} <= {"1", "2", "3", "4"}
    assert "baseline" not in section


# ---- for every reader ----------------------------------------------------------------------------
WIDTHS = pytest.mark.parametrize("width", [390, 1280])


@SLOW
@WIDTHS
def test_the_first_chart_is_on_the_first_screen(open_page, width):
    page = open_page(width)
    bottom = bottom_of(page, "#collapse-curve svg")
    assert bottom_of(page, "#collapse-at") < bottom <= HEIGHTS[width]


@SLOW
@WIDTHS
def test_names_of_methods_appear_with_their_lines(open_page, width):
    page = open_page(width)
    names = {"TOPR", "REINFORCE", "SFT", "TIS", "plain IS", "PPO"}
    charts = page.locator("#collapse svg, #loss svg, #bounds svg, #tokens svg, #variants svg")
    assert not {*names, "paper"} & set(charts.locator("text").all_text_contents())
    set_and_read(page, "loss", {"loss-neg": -2})
    assert names <= set(page.locator("#loss-chart-neg text").all_text_contents())


@SLOW
def test_the_marker_at_the_start_shows_both_methods(open_page):
    """Both start at the same point, so each has a half of the ring."""
    rings = open_page().locator("#collapse-curve .ring")
    colours = rings.evaluate_all("(all) => all.map((one) => getComputedStyle(one).stroke)")
    starts = rings.evaluate_all("(all) => all.map((one) => one.getAttribute('stroke-dashoffset'))")
    assert len(set(colours)) == len(set(starts)) == 2


@SLOW
def test_arrow_keys_move_a_slider_without_steps(open_page):
    page = open_page()
    page.locator("#loss-neg").focus()
    page.keyboard.press("ArrowLeft")
    page.evaluate(NEXT_FRAME)
    assert -1 < float(page.locator("#loss-neg").input_value()) < 0


@SLOW
@WIDTHS
@pytest.mark.parametrize("question", range(5))
def test_completions_are_visible_together_with_their_slider(open_page, width, question):
    page = open_page(width)
    for point in (0, 8, 16):
        controls = {"collapse-at": point, "collapse-question": question}
        set_and_read(page, "collapse", controls)
        for method in ("topr", "reinforce"):
            text = f"#collapse-text-{method}"
            assert distance(page, "label[for=collapse-at]", text) <= HEIGHTS[width]


@SLOW
@WIDTHS
def test_the_box_of_part_3_is_visible_together_with_its_sliders(open_page, width):
    page = open_page(width)
    set_and_read(page, "bounds", {"bounds-ratio": -6, "a_neg": 0.5})
    assert "no upper bound" in page.locator("#bounds-says").text_content()
    chart = "#bounds-weight svg"
    assert distance(page, "label[for=bounds-ratio]", chart) <= HEIGHTS[width]


@SLOW
@WIDTHS
def test_both_bandits_stand_on_one_screen_with_their_button(open_page, width):
    page = open_page(width)
    set_and_read(page, "bandit", {}, clicks=3)
    assert page.locator("#bandit-says [data-name=step]").text_content() == "300"
    assert distance(page, "#bandit-step", "#bandit-z-1 svg") <= HEIGHTS[width]


@SLOW
@WIDTHS
def test_the_step_button_stays_on_the_screen_above_the_tables(open_page, width):
    page = open_page(width)
    set_and_read(page, "bandit", {}, clicks=3)
    page.locator("#bandit-table-1").evaluate("(table) => table.scrollIntoView({block: 'end'})")
    top, bottom = edges_of(page, "#bandit-step")
    assert top >= 0
    assert bottom < edges_of(page, "#bandit-table-0")[0]
    page.locator("#bandit-step").click()
    # The page draws in its next frame.
    shows_400 = "document.querySelector('#bandit-says [data-name=step]').textContent === '400'"
    page.wait_for_function(shows_400)


TEXT_SIZES = """(all) => all.map((one) => parseFloat(getComputedStyle(one).fontSize)
  * one.ownerSVGElement.getBoundingClientRect().width / one.ownerSVGElement.viewBox.baseVal.width)
"""


@SLOW
@WIDTHS
def test_charts_are_as_wide_as_the_column_and_their_text_is_legible(open_page, width):
    page = open_page(width)
    set_and_read(page, "loss", {"loss-neg": -2})
    assert min(page.locator("svg text").evaluate_all(TEXT_SIZES)) >= 13  # pixels
    column = page.locator("main").bounding_box()["width"]
    for chart in page.locator("main .chart").all():
        if not chart.evaluate("(one) => Boolean(one.closest('.twins'))"):
            assert chart.bounding_box()["width"] == pytest.approx(column, abs=1)


@SLOW
@pytest.mark.parametrize("width", [360, 390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_the_screen_and_screen_readers_find_everything(
    open_page, width, scheme
):
    """Axe also checks the contrast of text."""
    from axe_playwright_python.sync_playwright import Axe

    page = open_page(width, scheme=scheme)
    far = {
        "collapse-at": 16,
        "loss-pos": -14,
        "loss-neg": -14,
        "tokens-at": 16,
        "bandit-speed": 1000,
        "variants-at": 16,
    }
    set_and_read(page, "bandit", far, clicks=1)  # numbers are long then
    open_answers(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert Axe().run(page).response["violations"] == []


COLOURS = """(all) => all.map((one) => {
  const style = getComputedStyle(one);
  const drawn = one.matches("text, circle:not(.ring)") ? style.fill : style.stroke;
  return [drawn, getComputedStyle(document.body).backgroundColor];
})"""


def to_hex(colour):
    """#rrggbb of a computed colour, "rgb(r, g, b)"."""
    channels = [int(number) for number in re.findall("[0-9]+", colour)]
    return "#" + "".join(f"{channel:02x}" for channel in channels)


@SLOW
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_lines_and_text_of_charts_stand_out_from_the_page(open_page, scheme):
    page = open_page(scheme=scheme)
    for part, controls, _ in CASES:
        set_and_read(page, part, controls, clicks=3 if part == "bandit" else 0)
    drawn = page.locator("svg .line, svg .ring, svg text, svg .rule").evaluate_all(COLOURS)
    assert len(drawn) > 100
    for colour, background in {tuple(pair) for pair in drawn}:
        contrast = make_page.contrast(to_hex(colour), to_hex(background))
        assert contrast >= 4.5, (colour, background)
    is_dark = make_page.luminance(to_hex(drawn[0][1])) < 0.1
    assert is_dark == (scheme == "dark")


FOCUS = """() => {
  const one = document.activeElement;
  if (one === document.body) return null; // after the last one
  const {outlineStyle, outlineWidth} = getComputedStyle(one);
  return [one.id || one.textContent.trim(), outlineStyle, parseFloat(outlineWidth)];
}"""


@SLOW
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_keyboard_focus_is_visible(open_page, scheme):
    page = open_page(scheme=scheme)
    for part, controls, _ in CASES:  # answers are there then
        set_and_read(page, part, controls, clicks=3 if part == "bandit" else 0)
    page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
    reached = []
    for _ in range(100):
        page.keyboard.press("Tab")
        focused = page.evaluate(FOCUS)
        if focused is None:
            break
        name, style, width = focused
        reached.append(name)
        assert (style, width) == ("solid", 3), name
    assert {"collapse-at", "loss-neg", "a_neg", "bandit-step", "baseline-c"} <= set(reached)
