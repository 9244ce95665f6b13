"""docs/index.html: it is up to date, shows in a real browser the numbers of Python and of the files, and is for all."""

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

PAGE, FIG5 = load("page"), make_page.accuracy_by_share()
CURVES, [_, WRONG] = PAGE["curves"], PAGE["completions"]
ADDRESS = make_page.PAGE.as_uri()
CORRECT = {  # along the default run with each method
    command.removeprefix("python train_gsm8k.py --model tiny/worded"): [
        point["correct"] for point in run["iterations"][0]["curve"]
    ]
    for command, run in load("methods").items()
}


# ---- without a browser --------------------------------------------------------------------------------------------


def test_it_is_what_the_command_makes_small_and_self_contained():
    page = make_page.PAGE.read_text(encoding="utf-8")
    assert page == make_page.make_page()
    assert len(page.encode()) < 600_000
    assert not any(
        word in page for word in ("<link", "src=", "@import", "url(h", "fetch(", "XMLHttp")
    )


# ---- the browser --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    """The system's chromium; where there is none the tests are skipped, which .ci/run does not allow."""
    found = shutil.which("chromium")
    if found is None:
        pytest.skip("no chromium: the tests of docs/index.html in a browser did not run")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Opens the page; at the end, nothing may have gone to the console or to another host."""
    faults = []

    def open_it(width=1280, setting="", **options):
        page = browser.new_page(viewport={"width": width, "height": 800}, **options)
        page.on("console", lambda message: faults.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: faults.append(f"error: {error}"))
        page.on(
            "request",
            lambda request: request.url.split("#")[0] == ADDRESS or faults.append(request.url),
        )
        page.goto(ADDRESS + setting)
        return page

    yield open_it
    assert faults == []


SLOW = pytest.mark.slow
DRAWN = "new Promise(requestAnimationFrame)"  # the page draws once a frame


def near(value):
    return pytest.approx(value, rel=1e-6, abs=1e-12)


# Sets controls, clicks Step, and returns what the part then shows: numbers, and the lines of its charts.
SHOWN = """async ([part, controls, clicks]) => {
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


def shown(page, part, controls, clicks=0):
    """The numbers of a part by name, and the lines of its charts by the chart's id and their label."""
    values, lines = page.evaluate(SHOWN, [part, controls, clicks])
    assert all(
        len(line["x"]) == len(line["y"]) > 0 and None not in line["y"] for line in lines.values()
    )
    return dict(values), lines


AT = 4  # a point of the runs
OF_TOKENS = [math.fsum(values) for values in WRONG["log_ratio"]["reinforce"]]
TWO = toy_bandit.Bandit(
    tensor([0.1, 0.3, 0.4, 0.2]), tensor([1.0, 1.0, -1.0, -1.0])
)  # the page's first case
PATH = toy_bandit.ascend(TWO.mu.log(), TWO, topr.PRESETS["topr"], lr=0.1, steps=3)
PARTS = {  # controls of each part, and some numbers that it then shows
    "collapse": (
        {"collapse-at": AT, "collapse-question": 0, "collapse-tis": True},
        {name: CURVES[name]["correct"][AT] for name in CURVES}
        | {"tis": CORRECT[" --method tis"][1]},
    ),
    "loss": (
        {"loss-pos": 1, "loss-neg": -2},
        {
            "weight_pos_off_policy": math.e,
            "weight_pos_ppo": 0,
            "push_neg_topr": -math.exp(-2),
            "weight_neg_ppo": 0,
        },
    ),
    "bounds": (  # the taper of a positive is linear in the log-ratio below the bound of 1/2
        {"a_pos": 0.5, "a_neg": 0.2, "b_neg": 0.8, "bounds-ratio": -1},
        {
            "weight_pos": 0.5,
            "slope_neg": -math.exp(-1),
            "rho_pos": math.log(2) / 2,
            "objective_neg": -math.exp(-1),
        },
    ),
    "bandit": (
        {"bandit-lr": -1, "bandit-speed": 1},
        {"objective_1": toy_bandit.objective(PATH[-1], TWO).item(), "bound_1": 1},
    ),
    "baseline": (  # p~ = p (1 - c) / (p (1 - c) + (1 - p) (1 + c)), of a right and a wrong answer 1/2 and 3/2
        {"baseline-c": 0.5, "baseline-p": 0.2},
        {
            "p_tilde": 0.1 / (0.1 + 1.2),
            "reward_right": 0.5,
            "reward_wrong": -1.5,
            "hard": 0.1 * 0.5 + 0.9 * 1.5,
        },
    ),
    "share": (  # signal over noise: 0.4 and sqrt(3.4) at p~, 1 and sqrt(5) of positives alone; 2 Phi(-1) = 0.3173
        {"share-p_tilde": 0.2, "share-p": 0.2, "share-sigma": 2},
        {
            "pace": 0.4 * (5 / 3.4) ** 0.5,
            "best": 0.8,
            "gain": 0.85 / 0.68**0.5,
            "weight": math.erfc(0.5**0.5),
        },
    ),
    "tokens": (
        {"tokens-at": 2},
        {"log_ratio_wrong_reinforce": OF_TOKENS[2], "weight_wrong_reinforce": 1},
    ),
    "variants": (
        {"variants-at": AT, "variants-run": "reinforce"},
        {
            "topr": math.exp(OF_TOKENS[AT]),
            "per-token": fmean(min(math.exp(x), 1) for x in WRONG["log_ratio"]["reinforce"][AT]),
            "geometric mean": math.exp(fmean(WRONG["log_ratio"]["reinforce"][AT])),
            "clip 0.8..1.2": 0.8,
        },
    ),
}


@SLOW
def test_a_part_asks_then_shows_what_its_controls_ask_for_and_its_link_restores_them(open_page):
    page, [question, *_] = (
        open_page(setting="#collapse?collapse-question=9&reward-0=x&no=1"),
        PAGE["questions"],
    )
    assert (
        page.locator("#collapse-question").input_value() == "1"
    )  # the first that TOPR gets right in the end
    known = {"baseline-question"}  # a chart that does not answer its question
    for part, (controls, values) in PARTS.items():
        answers, clicks = page.locator(f"#{part} .answer"), 3 * (part == "bandit")
        _, lines = shown(page, part, controls if part == "bandit" else {})  # which waits for steps
        assert {name.split()[0] for name, line in lines.items() if len(set(line["x"])) > 1} <= known
        assert answers.filter(visible=True).count() == 0 < answers.count()
        found, lines = shown(page, part, controls, clicks)
        assert answers.filter(visible=True).count() == answers.count()
        assert {name: found[name] for name in values} == near(values), part
        other = open_page(setting=page.locator(f"#{part} > .hint a").last.get_attribute("href"))
        assert shown(other, part, {}, clicks) == (found, lines)
        assert other.evaluate("scrollY") > 0
    assert page.locator("#collapse-asked").text_content() == question["question"]
    for method, completions in question["completions"].items():
        assert page.locator(f"#collapse-text-{method}").text_content() == (
            completions[AT][0].strip() or "(nothing)"
        )
    page.get_by_role("group", name="Methods of Table 1").get_by_role(
        "button", name="SFT", exact=True
    ).click()
    page.evaluate(DRAWN)
    assert (
        "the bounds of SFT. Negatives are not used." in page.locator("#bounds-says").text_content()
    )
    assert page.evaluate("PRESETS") == {
        name: list(astuple(limits)) for name, limits in topr.PRESETS.items()
    }


@SLOW
@pytest.mark.parametrize("width", [390, 1280])
def test_the_first_chart_is_on_the_first_screen_and_names_appear_with_what_is_drawn(
    open_page, width
):
    def end(what):
        box = page.locator(what).bounding_box()
        return box["y"] + box["height"]

    page, names = open_page(width), ["TOPR", "REINFORCE", "SFT", "TIS", "plain IS", "PPO", "paper"]
    assert end("#collapse-at") < end("#collapse-curve svg") <= 800
    charts = page.locator("#collapse svg, #loss svg, #bounds svg, #tokens svg, #variants svg")
    assert not set(names) & set(charts.locator("text").all_text_contents())
    shown(page, "loss", {"loss-neg": -2})
    assert set(names[:-1]) <= set(page.locator("#loss-chart-neg text").all_text_contents())
    shown(page, "bandit", {}, clicks=3)  # both methods stand with Play on one screen
    assert page.locator("#bandit-says [data-name=step]").text_content() == "300"
    assert end("#bandit-z-1 svg") - page.locator("#bandit-play").bounding_box()["y"] <= 800
    sizes = """(all) => all.map((one) => parseFloat(getComputedStyle(one).fontSize)
      * one.ownerSVGElement.getBoundingClientRect().width / one.ownerSVGElement.viewBox.baseVal.width)"""
    assert min(page.locator("svg text").evaluate_all(sizes)) >= 10 * 96 / 72  # 10 points, in pixels


# ---- for every reader -----------------------------------------------------------------------------------------------


@SLOW
@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_is_wider_than_the_screen_and_a_screen_reader_finds_names_contrast_and_order(
    open_page, width
):
    from axe_playwright_python.sync_playwright import Axe

    page = open_page(width)
    far = {
        "collapse-at": 16,
        "loss-pos": -14,
        "loss-neg": -14,
        "bandit-speed": 1000,
        "variants-at": 16,
    }
    shown(page, "bandit", far, clicks=1)  # so that numbers are long
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert Axe().run(page).response["violations"] == []
