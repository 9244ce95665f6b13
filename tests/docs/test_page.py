"""docs/index.html: it is up to date, and shows in a browser the numbers of Python and of files."""

import math
import shutil
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


# ---- the browser ---------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def browser():
    """The system's chromium; without one the tests are skipped, which .ci/run does not allow."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("no chromium: the tests of docs/index.html in a browser did not run")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """open_page(width, setting): the page; nothing may reach the console or another host."""
    problems = []

    def check_request(request):
        if request.url.split("#")[0] != ADDRESS:
            problems.append(request.url)

    def open_page_at(width=1280, setting=""):
        page = browser.new_page(viewport={"width": width, "height": 800})
        page.on("console", lambda message: problems.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on("request", check_request)
        page.goto(ADDRESS + setting)
        return page

    yield open_page_at
    assert problems == []


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


def bottom_of(page, selector):
    """The lower edge of an element, in pixels from the top of the page."""
    box = page.locator(selector).bounding_box()
    return box["y"] + box["height"]


# ---- numbers -------------------------------------------------------------------------------------
POINT = 4  # one of the evaluations along the runs of results/page.json


def collapse_numbers():
    curves = load("page")["curves"]
    methods = load("methods")
    run = methods["python train_gsm8k.py --model tiny/worded --method tis"]
    # At 1,280 completions, the last evaluation of TIS is its second one, at 1,024.
    numbers = {"tis": run["iterations"][0]["curve"][1]["correct"]}
    for method, curve in curves.items():
        numbers[method] = curve["correct"][POINT]
    return numbers


def bandit_numbers():
    """Three steps of the page's first case: two right arms, two wrong ones."""
    mu = tensor([0.1, 0.3, 0.4, 0.2])
    bandit = toy_bandit.Bandit(mu, tensor([1.0, 1.0, -1.0, -1.0]))
    path = toy_bandit.ascend(bandit.mu.log(), bandit, topr.PRESETS["topr"], lr=0.1, steps=3)
    return {"objective_1": toy_bandit.objective(path[-1], bandit).item(), "bound_1": 1}


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
        {"collapse-at": POINT, "collapse-question": 0, "collapse-tis": True},
        collapse_numbers(),
    ),
    (
        "loss",
        {"loss-pos": 1, "loss-neg": -2},
        {
            "weight_pos_off_policy": math.e,
            "weight_pos_ppo": 0,
            "push_neg_topr": -math.exp(-2),
            "weight_neg_ppo": 0,
        },
    ),
    (
        # The taper of a positive is linear in the log-ratio below the bound of 1/2.
        "bounds",
        {"a_pos": 0.5, "a_neg": 0.2, "b_neg": 0.8, "bounds-ratio": -1},
        {
            "weight_pos": 0.5,
            "slope_neg": -math.exp(-1),
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
    assert page.locator("#collapse-question").input_value() == "1"


@SLOW
def test_question_and_completions_are_those_of_the_file(open_page):
    page = open_page()
    set_and_read(page, "collapse", {"collapse-at": POINT, "collapse-question": 0})
    question = load("page")["questions"][0]
    assert page.locator("#collapse-asked").text_content() == question["question"]
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


# ---- for every reader ----------------------------------------------------------------------------
WIDTHS = pytest.mark.parametrize("width", [390, 1280])


@SLOW
@WIDTHS
def test_the_first_chart_is_on_the_first_screen(open_page, width):
    page = open_page(width)
    assert bottom_of(page, "#collapse-at") < bottom_of(page, "#collapse-curve svg") <= 800


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
@WIDTHS
def test_both_bandits_stand_on_one_screen_with_their_button(open_page, width):
    page = open_page(width)
    set_and_read(page, "bandit", {}, clicks=3)
    assert page.locator("#bandit-says [data-name=step]").text_content() == "300"
    top = page.locator("#bandit-play").bounding_box()["y"]
    assert bottom_of(page, "#bandit-z-1 svg") - top <= 800


TEXT_SIZES = """(all) => all.map((one) => parseFloat(getComputedStyle(one).fontSize)
  * one.ownerSVGElement.getBoundingClientRect().width / one.ownerSVGElement.viewBox.baseVal.width)
"""


@SLOW
@WIDTHS
def test_text_in_charts_has_at_least_10_points(open_page, width):
    page = open_page(width)
    set_and_read(page, "loss", {"loss-neg": -2})
    sizes = page.locator("svg text").evaluate_all(TEXT_SIZES)
    assert min(sizes) >= 10 * 96 / 72  # in pixels


@SLOW
@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_wider_than_the_screen_and_screen_readers_find_everything(open_page, width):
    from axe_playwright_python.sync_playwright import Axe

    page = open_page(width)
    far = {
        "collapse-at": 16,
        "loss-pos": -14,
        "loss-neg": -14,
        "bandit-speed": 1000,
        "variants-at": 16,
    }
    set_and_read(page, "bandit", far, clicks=1)  # numbers are long then
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert Axe().run(page).response["violations"] == []
