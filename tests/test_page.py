"""docs/index.html in a real browser: its numbers against those of Python, its looks, and that it is up to date."""

import json
import math
import random
import shutil
from functools import partial

import pytest
import torch

import topr
from conformance import variants
from docs import make_page, make_page_data
from paper import bandit as toy_bandit
from paper.bandit import Bandit, tensor
from paper.figures import weight_by_difficulty
from pipeline.methods import ppo_loss
from pipeline.records import Sample
from pipeline.settings import Settings

NAMES = {"TOPR": "topr", "REINFORCE": "reinforce", "SFT": "sft", "TIS": "tis", "plain IS": "off_policy", "PPO": "ppo"}
WIDTHS = (360, 1280)
SETTINGS = 200  # random settings of each part's controls
RESULTS = {name: make_page.load(name) for name in ("page", "fig5")}


# ---- without a browser --------------------------------------------------------------------------------------------


def test_it_is_what_the_command_makes(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["make_page.py", "--check"])
    make_page.main()
    stale = tmp_path / "index.html"
    stale.write_text(make_page.PAGE.read_text(encoding="utf-8").replace("collapse", "triumph"), encoding="utf-8")
    monkeypatch.setattr(make_page, "PAGE", stale)
    with pytest.raises(SystemExit, match="out of date"):
        make_page.main()


def test_it_is_small_and_self_contained():
    page = make_page.PAGE.read_text(encoding="utf-8")
    assert len(page.encode()) < 600_000
    assert not any(word in page for word in ("<link", "src=", "@import", "url(h", "fetch(", "XMLHttp"))


def test_results_that_contradict_the_text_are_noticed(monkeypatch):
    load = make_page.load

    def reversed_curves(name):
        content = load(name)
        if name == "page":
            content["curves"]["topr"]["correct"].reverse()
        return content

    monkeypatch.setattr(make_page, "load", reversed_curves)
    with pytest.raises(SystemExit, match="part 1: TOPR ends higher"):
        make_page.check_claims()


@pytest.mark.slow
def test_its_data_come_from_two_runs(monkeypatch, tmp_path):
    small = partial(Settings, problems=8, n=4, test_problems=6, test_samples=18)
    monkeypatch.setattr(make_page_data, "Settings", small)
    monkeypatch.setattr(make_page_data, "ROOT", tmp_path)
    make_page_data.main()
    made = json.loads((tmp_path / "results" / "page.json").read_text(encoding="utf-8"))
    assert made.keys() == RESULTS["page"].keys()
    assert made["steps"] == [0, 1, 2]  # of 32 samples
    assert [example["outcome"] for example in made["completions"]] == ["correct", "incorrect"]
    for example in made["completions"]:
        for start, *later in example["log_ratio"].values():
            assert start == [0.0] * len(example["tokens"])  # pi = mu
            assert all(len(values) == len(start) and any(values) for values in later)
    topr, reinforce = (made["completions"][1]["log_ratio"][method] for method in ("topr", "reinforce"))
    assert topr[1] == reinforce[1]  # all weights are 1 at the first step
    assert topr[2] != reinforce[2]


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
    opened, faults = [], []

    def open_it(width=1280, **options):
        page = browser.new_page(viewport={"width": width, "height": 800}, **options)
        page.on("console", lambda message: faults.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: faults.append(f"error: {error}"))
        page.on("request", lambda request: request.url == make_page.PAGE.as_uri() or faults.append(request.url))
        page.goto(make_page.PAGE.as_uri())
        opened.append(page)
        return page

    yield open_it
    for page in opened:
        page.close()
    assert faults == []


# Sets controls, clicks Step, and returns what the part then shows: its controls, numbers, their text, and chart lines.
SHOWN = """async ([part, settings]) => {
  const found = [], all = (what) => [...document.getElementById(part).querySelectorAll(what)];
  for (const {controls, clicks, lines} of settings) {
    for (const [id, value] of Object.entries(controls)) {
        document.getElementById(id).value = value;
        document.getElementById(id).dispatchEvent(new Event("input", {bubbles: true}));
    }
    for (let i = 0; i < clicks; i++) document.getElementById("bandit-step").click();
    await new Promise(requestAnimationFrame);  // the page draws once a frame
    found.push({
        controls: Object.fromEntries(all("input, select").map((e) => [e.id, e.value])),
        values: all("[data-name]").map((e) => [e.dataset.name, Number(e.dataset.value), e.textContent]),
        lines: lines ? Object.fromEntries(all(".chart").map((e) => [e.id, e.lines])) : {},
    });
  }
  return found;
}"""
DRAWN = "new Promise(requestAnimationFrame)"


def is_close(one, other):
    return one == other or math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-12)


def number_in(text):
    """The number that a text such as −3.5 × 10⁻⁵ or 12.5 % says."""
    text = text.translate({ord("−"): "-", ord(","): None, ord("∞"): "inf", 0xA0: " "})
    if text.endswith("%"):
        return float(text[:-1]) / 100
    factor, _, power = text.partition(" × 10")
    return float(factor) * 10.0 ** int(power.translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")) or 0)


def compare(page, part, settings, expected):
    """Every number and every line that `part` shows under each of the settings, against those of `expected`."""
    for i, setting in enumerate(settings):
        setting["lines"] = i % 20 == 0
    for setting, shown in zip(settings, page.evaluate(SHOWN, [part, settings]), strict=True):
        values, lines = expected(shown["controls"] | {"clicks": setting["clicks"]})
        assert {name for name, _, _ in shown["values"]} == set(values)
        for name, value, text in shown["values"]:
            assert is_close(value, float(values[name])), (name, value, values[name], shown["controls"])
            assert math.isclose(number_in(text), value, rel_tol=6e-3, abs_tol=6e-4 if "%" in text else 1e-12), (
                name,
                text,
            )
        for chart, found in shown["lines"].items():
            for label, line in found.items():
                wanted = lines(chart, label, line["x"])
                assert len(line["y"]) == len(wanted)
                assert all(map(is_close, line["y"], wanted)), (chart, label, shown["controls"])


def drawn_settings(**controls):
    """Random values of the controls; each is a list to choose from, or a range (low, high) of a slider."""
    rng = random.Random(0)

    def draw(control):
        return rng.uniform(*control) if isinstance(control, tuple) else rng.choice(control)

    return [
        {"controls": {name.replace("__", "-"): draw(control) for name, control in controls.items()}, "clicks": 0}
        for _ in range(SETTINGS)
    ]


ON_BOTH_WIDTHS = pytest.mark.parametrize("width", WIDTHS)
SLOW = pytest.mark.slow
POINTS = list(range(len(RESULTS["page"]["seen"])))


def importance_weight(log_ratio, method, sign):
    a_pos, b_pos, a_neg, b_neg = topr.PRESETS[method]
    return topr.importance_weight(tensor(log_ratio), *((a_pos, b_pos) if sign > 0 else (a_neg, b_neg)))


def weight_in(method, log_ratio, sign):
    """What multiplies R grad log pi: for PPO, read off the gradient of its loss."""
    if method != "ppo":
        return importance_weight(log_ratio, method, sign).tolist()
    logp = tensor(log_ratio).requires_grad_()
    reward = torch.full_like(logp, sign)
    ppo_loss(logp, torch.zeros_like(logp), reward, torch.ones_like(logp), denominator=1).backward()
    return (-logp.grad / reward).tolist()


@SLOW
@ON_BOTH_WIDTHS
def test_part_1(open_page, width):
    data = RESULTS["page"]

    def expected(controls):
        now = int(controls["collapse-at"])
        values = {method: curve["correct"][now] for method, curve in data["curves"].items()}
        return values | dict.fromkeys(("seen", "collapse-at"), data["seen"][now]), lambda _, label, x: [
            100 * share for share in data["curves"][NAMES[label]]["correct"]
        ]

    page = open_page(width)
    compare(page, "collapse", drawn_settings(collapse__at=POINTS, collapse__question=[0, 1, 2, 3, 4]), expected)
    now, question = (int(page.locator(f"#collapse-{what}").input_value()) for what in ("at", "question"))
    assert page.locator("#collapse-asked").text_content() == data["questions"][question]["question"]
    for method, completions in data["questions"][question]["completions"].items():
        text, outcome = completions[now]
        assert page.locator(f"#collapse-text-{method}").text_content() == (text.strip() or "(nothing)")
        assert page.locator(f"#collapse-grade-{method}").text_content().startswith(outcome)


@SLOW
@ON_BOTH_WIDTHS
def test_part_2(open_page, width):
    def expected(controls):
        values = {}
        for name, sign in (("pos", 1.0), ("neg", -1.0)):
            log_ratio = float(controls[f"loss-{name}"])
            values |= {f"loss-{name}": log_ratio, f"ratio_{name}": math.exp(log_ratio)}
            values[f"each_of_200_{name}"] = 1 - math.exp(log_ratio) ** (1 / 200)
            for method in NAMES.values():
                [weight] = weight_in(method, [log_ratio], sign)
                values |= {f"weight_{name}_{method}": weight, f"push_{name}_{method}": weight * sign}
        return values, lambda chart, label, x: weight_in(
            NAMES[label], [math.log(ratio) for ratio in x], 1.0 if chart.endswith("pos") else -1.0
        )

    compare(open_page(width), "loss", drawn_settings(loss__pos=(-14, 2), loss__neg=(-14, 2)), expected)


@SLOW
@ON_BOTH_WIDTHS
def test_part_3(open_page, width):
    def expected(controls):
        bounds = [float(controls[name]) for name in ("a_pos", "b_pos", "a_neg", "b_neg")]
        limits = topr.Limits(*(math.inf if bound > 2.01 else bound for bound in bounds))  # b's last position
        ratio = math.exp(float(controls["bounds-ratio"]))
        values = limits._asdict() | {"bounds-ratio": ratio, "largest": max(limits.b_pos, limits.b_neg)}
        for name, sign in (("pos", 1.0), ("neg", -1.0)):
            [a], [b] = limits.of_sign(tensor([sign]))
            weight = topr.importance_weight(math.log(ratio), a, b)
            values |= {f"rho_{name}": topr.taper(ratio, a, b), f"weight_{name}": weight, f"slope_{name}": sign * weight}
            values[f"objective_{name}"] = topr.topr_objective(tensor([math.log(ratio)]), tensor([sign]), limits)

        def lines(chart, label, x):
            [a], [b] = limits.of_sign(tensor([1.0 if label == "positive" else -1.0]))
            is_taper = chart == "bounds-taper"
            return (topr.taper(tensor(x), a, b) if is_taper else topr.importance_weight(tensor(x).log(), a, b)).tolist()

        return values, lines

    page = open_page(width)
    bound = [i / 20 for i in range(42)]
    settings = drawn_settings(a_pos=bound[:-1], b_pos=bound, a_neg=bound[:-1], b_neg=bound, bounds__ratio=(-6, 2))
    compare(page, "bounds", settings, expected)
    assert page.evaluate("PRESETS") == {name: list(limits) for name, limits in topr.PRESETS.items()}
    for name, method in NAMES.items():
        if method != "ppo":
            page.get_by_role("group", name="Methods of Table 1").get_by_role("button", name=name, exact=True).click()
            page.evaluate(DRAWN)
            says = page.locator("#bounds-says").text_content()
            assert page.locator("#bounds-presets [aria-pressed=true]").all_text_contents() == [name]
            assert f"the bounds of {name}." in says
            assert ("no upper bound" in says) == (topr.PRESETS[method].a_neg > 0)  # Proposition 3.2
            assert ("not used" in says) == (topr.PRESETS[method].b_neg == 0)


@SLOW
@ON_BOTH_WIDTHS
def test_part_4(open_page, width):
    def expected(controls):
        arms = range(int(controls["bandit-arms"]))
        mu, reward, start = (tensor([float(controls[f"{x}-{i}"]) for i in arms]) for x in ("mu", "reward", "start"))
        bandit, lr = Bandit(mu / mu.sum(), reward), 10 ** float(controls["bandit-lr"])
        steps = int(controls["bandit-speed"]) * controls["clicks"]
        values, paths = {"step": steps, "bandit-lr": lr, "bandit-arms": len(arms)}, []
        for panel in (0, 1):
            limits = topr.PRESETS[controls[f"bandit-method-{panel}"]]
            path = toy_bandit.ascend(bandit.mu.log() + start, bandit, limits, lr, steps)
            z, pi, weight = path[-1], path[-1].softmax(-1), toy_bandit.weights(path[-1], bandit, limits)
            columns = {"pi": pi, "z": z, "weight": weight, "push": toy_bandit.gradient(z, bandit, limits)}
            values |= {f"{what}_{i}_{panel}": column[i] for what, column in columns.items() for i in arms}
            values |= {f"objective_{panel}": toy_bandit.objective(z, bandit, limits)}
            values |= {f"bound_{panel}": toy_bandit.upper_bound(reward)}
            paths.append((path, limits))

        def lines(chart, label, x):
            _, what, panel = chart.split("-")
            path, limits = paths[int(panel)]
            points = path[[int(step) for step in x]]
            assert x[0] == 0
            assert len(x) <= 241
            if what == "objective":
                return toy_bandit.objective(points, bandit, limits).tolist()
            arm = int(label.split()[1]) - 1
            return (points.softmax(-1) if what == "pi" else points)[:, arm].tolist()

        return values, lines

    rng, methods, settings = random.Random(0), list(topr.PRESETS), []
    for number in range(SETTINGS):
        arms = range(rng.randint(2, 6))
        controls = {"bandit-case": rng.choice(["two", "forgotten", "wrong"]), "bandit-arms": len(arms)}
        if number % 2:  # the arms of a reader; otherwise the case's own, and more or fewer of them
            controls |= {f"reward-{i}": round(rng.uniform(-1, 1), 2) for i in arms}
            controls |= {f"mu-{i}": round(rng.uniform(0.1, 9), 2) for i in arms}
            controls |= {f"start-{i}": round(rng.uniform(-5, 5), 2) for i in arms}
        controls |= {f"bandit-method-{panel}": rng.choice(methods) for panel in (0, 1)}
        controls |= {"bandit-lr": rng.uniform(-2, 0.5), "bandit-speed": 1000 if number == 0 else rng.choice([1, 10])}
        settings.append({"controls": controls, "clicks": rng.randint(0, 4)})
    compare(open_page(width), "bandit", settings, expected)


@SLOW
@ON_BOTH_WIDTHS
def test_part_5(open_page, width):
    data = RESULTS["fig5"]["data"]
    at_own_rate = data[f"lr {data['own rate']:g}"]

    def of_question(correct, c):  # ten completions, as the paper's Figure 9 weighs them
        samples = [Sample(prompt="?", completion="!", reward=1.0 if i < correct else -1.0) for i in range(10)]
        return sum(weight for weight in weight_by_difficulty(samples, c) if not math.isnan(weight)) / 10

    def expected(controls):
        c, p = float(controls["baseline-c"]), float(controls["baseline-p"])
        values = {"reward_right": 1 - c, "reward_wrong": -1 - c, "p_tilde": topr.effective_proportion(p, c)}
        values |= {"baseline-c": c, "baseline-p": p, "hard": of_question(1, c), "easy": of_question(9, c)}

        def lines(chart, label, x):
            if chart == "baseline-share":
                return [100 * topr.effective_proportion(p, one) for one in x]
            if chart == "baseline-question":
                return [of_question(round(correct / 10), c) for correct in x]
            assert x == [100 * share for share in data["p~"]]
            return [100 * share for share in at_own_rate[label.replace(" %", "%")]["mean"]]

        return values, lines

    compare(open_page(width), "baseline", drawn_settings(baseline__c=(-1, 1), baseline__p=(0.01, 0.99)), expected)


@SLOW
@ON_BOTH_WIDTHS
def test_part_6(open_page, width):
    data = RESULTS["page"]
    kinds = dict(zip(("right", "wrong"), data["completions"], strict=True))

    def expected(controls):
        now = int(controls["tokens-at"])
        values = dict.fromkeys(("seen", "tokens-at"), data["seen"][now])
        for kind, example in kinds.items():
            for method, log_ratio in example["log_ratio"].items():
                total = math.fsum(log_ratio[now])
                weight = importance_weight(total, method, example["reward"])
                values |= {f"log_ratio_{kind}_{method}": total, f"weight_{kind}_{method}": weight}

        def lines(chart, label, x):
            assert x == data["seen"]
            return [
                math.fsum(of_tokens) for of_tokens in data["completions"][int(chart[-1])]["log_ratio"][NAMES[label]]
            ]

        return values, lines

    page = open_page(width)
    compare(page, "tokens", drawn_settings(tokens__at=POINTS), expected)
    assert page.locator("#tokens .strip").count() == 4
    assert page.locator("#tokens .strip li").count() == 2 * sum(len(example["tokens"]) for example in kinds.values())


@SLOW
@ON_BOTH_WIDTHS
def test_part_7(open_page, width):
    data = RESULTS["page"]
    wrong = data["completions"][1]
    losses = {
        "topr": variants.paper,
        "per-token": variants.per_token,
        "per-token + token mean": variants.per_token_and_token_mean,
        "geometric mean": variants.geometric_mean,
        "clip 0.8..1.2": variants.clipped,
    }

    def weight(name, token_log_ratio):  # the mean over tokens of what multiplies R grad log pi / length
        logmu = tensor([[-1.0] * len(token_log_ratio)])
        logp = (logmu + tensor([token_log_ratio])).requires_grad_()
        losses[name](logp, logmu, tensor([-1.0]), torch.ones_like(logp)).backward()
        return logp.grad.sum().item()

    labels = {"paper": "topr", "per token": "per-token", "+ token mean": "per-token + token mean"}
    labels |= {"geometric mean": "geometric mean", "clip 0.8–1.2": "clip 0.8..1.2"}
    found = {
        name: {method: [weight(name, x) for x in log_ratio] for method, log_ratio in wrong["log_ratio"].items()}
        for name in losses
    }

    def expected(controls):
        now, method = int(controls["variants-at"]), controls["variants-run"]
        of_tokens = wrong["log_ratio"][method][now]
        values = dict.fromkeys(("seen", "variants-at"), data["seen"][now]) | {
            "drift": math.fsum(of_tokens) / len(of_tokens)
        }
        return values | {name: weights[method][now] for name, weights in found.items()}, lambda _, label, x: found[
            labels[label]
        ][method]

    settings = drawn_settings(variants__at=POINTS, variants__run=["topr", "reinforce"])
    compare(open_page(width), "variants", settings, expected)


# ---- for every reader -----------------------------------------------------------------------------------------------


@SLOW
@ON_BOTH_WIDTHS
def test_nothing_is_wider_than_the_screen(open_page, width):
    page = open_page(width)
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    beyond = """() => [...document.querySelectorAll("main *")].filter((e) => !e.closest("pre")
        && e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.outerHTML.slice(0, 80))"""
    assert page.evaluate(beyond) == []


@SLOW
@ON_BOTH_WIDTHS
def test_a_screen_reader_finds_names_contrast_and_order(open_page, width):
    from axe_playwright_python.sync_playwright import Axe

    page = open_page(width)
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    found = Axe().run(page)
    assert found.response["violations"] == []


@SLOW
def test_the_keyboard_moves_everything(open_page):
    page = open_page()
    page.locator("#loss-neg").focus()
    before = page.locator("#loss-says").text_content()
    page.keyboard.press("PageDown")
    page.evaluate(DRAWN)
    assert page.locator("#loss-says").text_content() != before
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.locator("#bandit-step").focus()
    page.keyboard.press("Enter")
    page.evaluate(DRAWN)
    assert page.locator("#bandit [data-name=step]").get_attribute("data-value") == "1"
    answer = page.locator("#collapse details")
    answer.locator("summary").focus()
    page.keyboard.press("Enter")
    assert answer.get_attribute("open") is not None
    reached = set()
    page.locator("body").click(position={"x": 1, "y": 1})
    for _ in range(200):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id"))
    visible = page.locator("input:visible, select:visible, button[id]:visible").evaluate_all(
        "all => all.map((e) => e.id)"
    )
    assert set(visible) <= reached


@SLOW
def test_dragging_on_a_chart_moves_its_slider(open_page):
    page = open_page()
    chart = page.locator("#loss-chart-neg")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + 60, box["y"] + 100)
    page.mouse.down()
    far = float(page.locator("#loss-neg").input_value())
    page.mouse.move(box["x"] + 200, box["y"] + 100)
    page.mouse.up()
    assert far < -12 < float(page.locator("#loss-neg").input_value()) < 0


@SLOW
def test_play_and_pause(open_page):
    page = open_page()
    step = "Number(document.querySelector('#bandit [data-name=step]').dataset.value)"
    page.get_by_role("button", name="Play").click()
    page.wait_for_function(f"{step} > 5")
    page.get_by_role("button", name="Pause").click()
    stopped = page.evaluate(step)
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert page.evaluate(step) == stopped
    page.get_by_role("button", name="Back to the start").click()
    page.evaluate(DRAWN)
    assert page.evaluate(step) == 0


@SLOW
def test_reduced_motion_has_none(open_page):
    page = open_page(reduced_motion="reduce")
    page.get_by_role("button", name="Play").click()
    page.evaluate(DRAWN)
    assert page.locator("#bandit [data-name=step]").get_attribute("data-value") == "100"
    assert page.locator("#bandit-play").text_content() == "Play"
    scrolling = "getComputedStyle(document.documentElement).scrollBehavior"
    assert (page.evaluate(scrolling), open_page().evaluate(scrolling)) == ("auto", "smooth")


@SLOW
def test_a_reader_of_the_bandit_sees_what_the_text_says(open_page):
    page = open_page()

    def after(case, speed, clicks):
        controls = {"bandit-case": case, "bandit-speed": speed}
        [shown] = page.evaluate(SHOWN, ["bandit", [{"controls": controls, "clicks": clicks, "lines": False}]])
        return {name: value for name, value, _ in shown["values"]}

    two = after("two", 1000, 3)  # REINFORCE, then TOPR
    assert two["objective_0"] > 10 * two["bound_0"]
    assert two["objective_1"] < two["bound_1"]
    assert two["pi_0_0"] < 1e-6 < 0.1 < two["pi_0_1"]  # a right arm
    forgotten = after("forgotten", 100, 1)  # TIS, then TOPR
    assert forgotten["pi_0_0"] < 1e-5 < 0.5 < forgotten["pi_0_1"]
    assert after("forgotten", 10_000, 100)["pi_0_0"] > 0.5


@SLOW
def test_on_paper_every_answer_is_open(open_page):
    page = open_page()
    page.pdf()
    were_open = page.locator("details").evaluate_all("all => all.map((one) => one.dataset.was)")
    assert set(were_open) == {"false"}  # asked for when the print began
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
    assert page.evaluate("Math.max(...[...document.querySelectorAll('svg')].map((e) => e.viewBox.baseVal.width))") < 700
    step = page.locator("#bandit [data-name=step]")
    assert step.get_attribute("data-value") == "300"
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("details[open]").count() == 0
    assert step.get_attribute("data-value") == "0"


@SLOW
def test_on_paper_there_is_only_what_can_be_read_there(open_page):
    page = open_page(width=700)  # of a sheet, about
    controls = page.locator("button, nav, .hint")
    assert controls.filter(visible=True).count() > 10
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert controls.filter(visible=True).count() == 0
    looks = {
        "figure, .strip, table, pre, h2": ("breakInside", "avoid"),  # none is on two sheets
        ".strip li": ("printColorAdjust", "exact"),  # what its colour says is printed
        "body": ("marginLeft", "0px"),
    }
    for elements, (name, value) in looks.items():
        found = page.locator(elements).evaluate_all(f"all => all.map((e) => getComputedStyle(e).{name})")
        assert set(found) == {value}, elements
    assert page.evaluate("document.documentElement.scrollWidth") <= 700


def test_lines_that_share_a_chart_differ_without_colour():
    styles = make_page.data()["styles"]
    for names in (
        NAMES.values(),
        ("correct", "invalid"),
        ("p1", "p2", "p3", "p4", "p5", "limit"),
        make_page.data()["variants"],
    ):
        dashes = [
            tuple(styles[name]["dashes"]) for name in names if "token mean" not in name
        ]  # drawn as one with another
        assert len(set(dashes)) == len(dashes)
