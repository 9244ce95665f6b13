"""docs/page/: what a browser shows are the numbers of topr.py and toy_bandit.py, on any screen."""

import math
from dataclasses import astuple
from pathlib import Path

import pytest

import toy_bandit
from toy_bandit import TIS, TOPR, tensor

PAGE = Path(toy_bandit.__file__).parent / "docs" / "page" / "index.html"

pytestmark = pytest.mark.slow

# Sets controls of a part; returns the numbers that it then shows, by name.
SET_AND_READ = """([part, controls]) => {
  for (const [id, value] of Object.entries(controls)) {
    document.getElementById(id).value = value;
    document.getElementById(id).dispatchEvent(new Event("input", {bubbles: true}));
  }
  return Object.fromEntries([...document.querySelectorAll(`#${part} [data-name]`)].map(
    (one) => [one.dataset.name, Number(one.dataset.value)]));
}"""


@pytest.fixture
def open_page(browser):
    """open_page(width): the page in a window; nothing may reach the console."""
    problems = []

    def open_page_at(width):
        page = browser.new_page(viewport={"width": width, "height": 800})
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(PAGE.as_uri())
        return page

    yield open_page_at
    assert problems == []


def train_bandit():
    """The numbers of the page's bandit after three steps of TIS and of TOPR, by name."""
    mu = tensor([0.1, 0.3, 0.4, 0.2])
    bandit = toy_bandit.Bandit(mu, tensor([1.0, 1.0, -1.0, -1.0]))
    start = mu.log() + tensor([-6.0, 0.0, 0.0, 0.0])
    numbers = {"bound": 1}
    for panel, limits in (("other", TIS), ("topr", TOPR)):
        z = toy_bandit.ascend(start, bandit, limits, lr=1, steps=3)[-1]
        numbers[f"objective_{panel}"] = toy_bandit.objective(z, bandit, limits).item()
        weight = toy_bandit.weights(z, bandit, limits)
        push = toy_bandit.gradient(z, bandit, limits)
        for name, values in (("pi", z.softmax(-1)), ("weight", weight), ("push", push)):
            numbers |= {f"{name}_{panel}_{arm}": x for arm, x in enumerate(values.tolist(), 1)}
    return numbers


CASES = [  # part of the page, settings of its controls, numbers that it then shows
    ("collapse", {"evaluation": 16}, {"topr": 596 / 7.68, "reinforce": 5 / 7.68}),
    ("loss", {"log_ratio": 1}, {"weight_positive_off_policy": math.e, "weight_positive_ppo": 0}),
    ("loss", {"log_ratio": -2}, {"weight_negative_topr": math.exp(-2), "weight_negative_sft": 0}),
    ("loss", {"log_ratio": -1}, {"weight_positive_tis": math.exp(-1), "weight_negative_ppo": 0}),
    (  # below the bound of 1/2 the taper of a positive is linear in the log-ratio
        "bounds",
        {"a_pos": 0.5, "a_neg": 0.2, "b_neg": 0.8, "bounds_log_ratio": -1},
        {
            "weight_positive": 0.5,
            "rho_positive": math.log(2) / 2,
            "objective_negative": -1 / math.e,
        },
    ),
    ("bandit", {"other": "tis", "start": -6, "steps": 3}, train_bandit()),
]


@pytest.mark.parametrize("width", [390, 1280])
def test_parts_show_the_numbers_of_their_controls(open_page, width):
    page = open_page(width)
    # Before a control was moved:
    assert page.locator(".answer").filter(visible=True).count() == 0
    for part, controls, expected in CASES:
        values = page.evaluate(SET_AND_READ, [part, controls])
        actual = {name: values[name] for name in expected}
        assert actual == pytest.approx(expected, rel=1e-6, abs=1e-12)
        assert page.locator(f"#{part} .answer").filter(visible=True).count() > 0
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_buttons_set_the_bounds_of_table_1(open_page):
    page = open_page(1280)
    actual = set()
    for button in page.locator("#bounds button").all():
        button.click()
        values = page.evaluate(SET_AND_READ, ["bounds", {}])
        actual.add(tuple(values[name] for name in ("a_pos", "b_pos", "a_neg", "b_neg")))
    assert actual == {astuple(limits) for limits in toy_bandit.FAMILY[:-1]}
