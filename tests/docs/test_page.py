"""docs/page/: what a browser shows are the numbers of topr.py and toy_bandit.py, on any screen."""

import json
import math
from pathlib import Path

import pytest

import topr
import toy_bandit
from toy_bandit import tensor

PAGE = Path(topr.__file__).parent / "docs" / "page"
POINT = 4  # one of the evaluations along the runs

pytestmark = pytest.mark.slow

# Sets controls of a part and clicks Step; returns the numbers that it then shows, by name.
SET_AND_READ = """async ([part, controls, clicks]) => {
  for (const [id, value] of Object.entries(controls)) {
    document.getElementById(id).value = value;
    document.getElementById(id).dispatchEvent(new Event("input", {bubbles: true}));
  }
  for (let i = 0; i < clicks; i++) document.getElementById("bandit-step").click();
  await new Promise(requestAnimationFrame);
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
        page.goto((PAGE / "index.html").as_uri())
        return page

    yield open_page_at
    assert problems == []


def bandit_numbers():
    """Three steps of the page's first case: two right arms, two wrong ones."""
    mu = tensor([0.1, 0.3, 0.4, 0.2])
    bandit = toy_bandit.Bandit(mu, tensor([1.0, 1.0, -1.0, -1.0]))
    path = toy_bandit.ascend(bandit.mu.log(), bandit, topr.TABLE_1["topr"], lr=0.1, steps=3)
    return {"objective_1": toy_bandit.objective(path[-1], bandit).item(), "bound_0": 1}


def wrong_completion():
    """The log-ratios of the wrong completion's tokens under naive REINFORCE."""
    [line] = [line for line in (PAGE / "data.js").read_text().splitlines() if "log_ratio" in line]
    [_, wrong] = json.loads(line.partition(":")[2].rstrip(","))
    return wrong["log_ratio"]["reinforce"][POINT]


LOG_RATIO = wrong_completion()
CASES = {  # part of the page: settings of its controls, numbers that it then shows
    "loss": (
        {"loss-pos": 1, "loss-neg": -2},
        {"weight_pos_off_policy": math.e, "weight_pos_ppo": 0, "weight_neg_topr": math.exp(-2)},
    ),
    "bounds": (  # below the bound of 1/2 the taper of a positive is linear in the log-ratio
        {"a_pos": 0.5, "a_neg": 0.2, "b_neg": 0.8, "bounds-ratio": -1},
        {"weight_pos": 0.5, "rho_pos": math.log(2) / 2, "objective_neg": -math.exp(-1)},
    ),
    "bandit": ({"bandit-lr": -1, "bandit-speed": 1}, bandit_numbers()),
    "baseline": (  # p~ = p (1 - c) / (p (1 - c) + (1 - p) (1 + c))
        {"baseline-c": 0.5, "baseline-p": 0.2},
        {"p_tilde": 0.1 / (0.1 + 1.2), "reward_wrong": -1.5, "hard": 0.1 * 0.5 + 0.9 * 1.5},
    ),
    "variants": (
        {"variants-at": POINT, "variants-run": "reinforce"},
        {
            "topr": math.exp(sum(LOG_RATIO)),
            "per-token": sum(min(math.exp(value), 1) for value in LOG_RATIO) / len(LOG_RATIO),
            "geometric mean": math.exp(sum(LOG_RATIO) / len(LOG_RATIO)),
            "clip 0.8..1.2": 0.8,
        },
    ),
}


@pytest.mark.parametrize("width", [390, 1280])
def test_parts_show_the_numbers_of_their_controls(open_page, width):
    page = open_page(width)
    for part, (controls, expected) in CASES.items():
        answers = page.locator(f"#{part} .answer")
        assert answers.filter(visible=True).count() == 0  # before a control was moved
        values = page.evaluate(SET_AND_READ, [part, controls, 3 if part == "bandit" else 0])
        actual = {name: values[name] for name in expected}
        assert actual == pytest.approx(expected, rel=1e-6, abs=1e-12)
        assert answers.filter(visible=True).count() > 0
    assert page.evaluate("document.documentElement.scrollWidth") <= width
