"""Build the lecture: docs/lecture/slides.pdf, handout.pdf and asymmetry.png.

    make lecture

slides.md.jinja and handout.md.jinja are Markdown for Marp. {{ }} stands for a number or a table
from results/ and studies/, or for one that is computed here. The Makefile installs Marp and the
fonts into build/lecture/. Chromium prints the pages; a page with too much text ends the program.
"""

import contextlib
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import textwrap
import zlib
from collections.abc import Callable
from dataclasses import astuple
from functools import cache
from pathlib import Path
from typing import Any

import torch
import tyro
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import toy_bandit  # noqa: E402
from figures.scales import LAPTOP  # noqa: E402
from scripts.make_tables import completions, load, verdict_counts  # noqa: E402
from topr import (  # noqa: E402
    PRESETS,
    baseline_for_proportion,
    effective_proportion,
    importance_weight,
    taper,
)
from topr_conformance import identify  # noqa: E402
from topr_conformance import load as load_loss  # noqa: E402
from topr_conformance.__main__ import parse_arguments, print_report  # noqa: E402
from toprlib.files import write_file  # noqa: E402
from toprlib.plotting import METHOD_LABELS, Line, Panel, Style, draw, save_figure  # noqa: E402
from toprlib.plotting import STYLES as LINE_STYLES  # noqa: E402
from toprlib.report import Estimate, Table  # noqa: E402
from toy_bandit import FOUR_ARMS, Bandit, ascend, tensor  # noqa: E402
from train_gsm8k import Settings  # noqa: E402

SOURCES = ROOT / "docs" / "lecture"
BUILD = ROOT / "build" / "lecture"
DECKS = {"slides": "theme.css", "handout": "handout.css"}
WIDTH, HEIGHT = 1280, 720  # of a slide, in pixels
SMALLEST = 24  # of text on a slide, in pixels
MARGIN = 48  # right of and below what is on a slide, in pixels

FOUR_LINES = """\
log_ratio = torch.where(mask > 0, token_logp.detach() - token_logmu, 0.0).sum(1)
weight = torch.where(reward < 0, log_ratio.clamp(max=0).exp(), 1.0)
token_loss = -(weight * reward)[:, None] * torch.where(mask > 0, token_logp, 0.0)
loss = (token_loss.sum(1) / mask.sum(1)).mean()"""

# The gains on the slide about wrong answers: stored answers, share of right answers in the weight,
# and in studies/rate_and_share the names of base and set, of TOPR's runs and of SFT's.
TENTH = "66 %, 10 % positive"
GAINS = [
    ("1 in 10 is right", "10 % (no baseline)", TENTH, "10 %", "100 %"),
    ("1 in 10 is right", "50 %", TENTH, "50 %", "100 %"),
    ("46 % are right", "46 % (no baseline)", "46 %, natural", "topr", "sft"),
    ("46 % are right", "70 %", "46 %, natural", "70 %", "sft"),
    ("66 % are right", "66 % (no baseline)", "66 %, natural", "topr", "sft"),
    ("66 % are right", "90 %", "66 %, natural", "90 %", "sft"),
]
GAIN_RATES = (3e-5, 1e-4, 2e-4)


# ---- numbers -------------------------------------------------------------------------------------
def percent(share: float, digits: int = 1) -> str:
    """A share in per cent, without the sign: 0.645 becomes "64.5"."""
    return f"{100 * share:.{digits}f}"


def rate(value: float) -> str:
    """A learning rate, as a reader writes it.

    >>> rate(1.8e-05), rate(0.0001)
    ('1.8e-5', '1e-4')
    """
    digits, exponent = f"{value:.1e}".split("e")
    return f"{digits.removesuffix('.0')}e{int(exponent)}"


def power(value: float) -> str:
    """A small number with a power of ten.

    >>> power(1.579e-79)
    '1.6 × 10<sup>−79</sup>'
    """
    return re.sub(r"e-0*(.+)", r" × 10<sup>−\1</sup>", f"{value:.1e}")


def points(estimate: Estimate) -> str:
    """A difference of shares in points, with its sign.

    >>> points(Estimate(0.012, 0.0085)).split()
    ['+1.2', '±', '0.9']
    """
    sign = "+" if estimate.mean > 0 else ""
    return unbroken(sign + estimate.text(100).replace("-", "−"))


def unbroken(text: str) -> str:
    """A text that stays on one line."""
    return text.replace(" ", "\u00a0")


def bandit_numbers() -> dict[str, Any]:
    """What the slides say of the two bandits of toy_bandit.py."""
    wrong = 2  # the arm that the slides speak of
    topr_path, reinforce_path = proposition_paths()
    step_100 = reinforce_path[100]
    push_topr = toy_bandit.gradient(topr_path[100], FOUR_ARMS)[wrong]
    push_reinforce = toy_bandit.gradient(step_100, FOUR_ARMS, toy_bandit.REINFORCE)[wrong]
    objective_topr = toy_bandit.objective(topr_path[-1], FOUR_ARMS)
    objective_reinforce = toy_bandit.objective(reinforce_path[-1], FOUR_ARMS, toy_bandit.REINFORCE)
    back_topr, back_tis = [int((pi < 0.5).sum()) for pi in way_back_paths()]
    steps = len(way_back_paths()[1]) - 1
    assert back_tis > steps  # TIS is not back
    return {
        "pi_at_100": float(step_100.softmax(-1)[wrong]),
        "push_topr": f"{push_topr.abs():.4f}",
        "push_reinforce": f"{push_reinforce.abs():.2f}",
        "objective_topr": f"{objective_topr:.3f}",
        "objective_reinforce": f"{objective_reinforce:,.0f}",
        "back_topr": back_topr,
        "not_back_tis": f"{steps:,}",
    }


@cache
def proposition_paths() -> list[torch.Tensor]:
    """The logits along 3,000 steps of TOPR and of naive REINFORCE, as in Proposition 3.2."""
    start = FOUR_ARMS.mu.log()
    methods = (toy_bandit.TOPR, toy_bandit.REINFORCE)
    return [ascend(start, FOUR_ARMS, limits, lr=4.0, steps=3000) for limits in methods]


@cache
def way_back_paths() -> list[torch.Tensor]:
    """The probability of the forgotten answer along 1,000 steps of TOPR and of TIS."""
    bandit = Bandit(tensor([0.2] * 5), tensor([1.0, -1.0, -1.0, -1.0, -1.0]))
    start = tensor([1e-6, *[(1 - 1e-6) / 4] * 4]).log()
    paths = []
    for limits in (toy_bandit.TOPR, toy_bandit.TIS):
        path = ascend(start, bandit, limits, lr=1.0, steps=1000)
        paths.append(path.softmax(-1)[:, 0])
    return paths


def detach_numbers() -> dict[str, str]:
    """The gradient of the loss of a wrong answer, with and without detach."""
    log_mu = tensor(-1.5)
    gradients = []
    for hold in (torch.Tensor.detach, lambda log_pi: log_pi):
        log_pi = tensor(-2.0).requires_grad_()
        loss = (hold(log_pi) - log_mu).exp() * log_pi
        [gradient] = torch.autograd.grad(loss, log_pi)
        gradients.append(f"{gradient:.2f}".replace("-", "−"))
    return {"weight": gradients[0], "with": gradients[0], "without": gradients[1]}


def checker_output() -> str:
    """What the checker prints of a loss with a ratio for each token."""
    name = "topr_conformance.variants:per_token"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        print_report(parse_arguments([name]), identify(load_loss(name)), None)
    text = printed.getvalue().replace(name, "my_loss.py:loss")
    lines = [line for line in text.splitlines() if not line.startswith("arguments")]
    return "\n".join(textwrap.fill(line, 84, subsequent_indent="    ") for line in lines)


# ---- tables --------------------------------------------------------------------------------------
def table_1() -> str:
    """The bounds of each method."""
    rows = []
    for name, limits in PRESETS.items():
        bounds = [f"{bound:g}".replace("inf", "∞") for bound in astuple(limits)]
        rows.append([METHOD_LABELS[name], *bounds])
    head = ["", "right: $a^+$", "$b^+$", "wrong: $a^-$", "$b^-$"]
    return Table(head, rows).markdown()


def weights_table(ratio: float) -> str:
    """The weights of a right and of a wrong answer, with each method."""
    log_ratio = tensor(ratio).log()
    rows = []
    for name, limits in PRESETS.items():
        right = importance_weight(log_ratio, limits.a_pos, limits.b_pos)
        wrong = importance_weight(log_ratio, limits.a_neg, limits.b_neg)
        rows.append([METHOD_LABELS[name], f"{right:g}", f"{wrong:g}"])
    return Table(["", "right answer", "wrong answer"], rows).markdown()


def completions_table() -> dict[str, Any]:
    """README's three completions: the question apart, and shorter names in the first column."""
    table = completions()
    outcomes = [one["outcome"] for one in load("completions")["completions"].values()]
    rows = []
    for (name, text, correct), outcome in zip(table.rows, outcomes, strict=True):
        mark = "✓" if outcome == "correct" else "✗"
        rows.append([name, f"{text}\u00a0{mark}", unbroken(correct)])
    head = ["", "answer", "right"]
    return {"question": table.head[1], "table": Table(head, rows).markdown()}


def robustness_table() -> str:
    """The table of results/README.md without the bandit of the forgotten answer."""
    table = load("robustness")["tables"]["robustness"]
    head = ["", "best rate", "accuracy", "at 3 × best rate", "60 % wrong"]
    rows = [[name, rate(float(lr)), *shares] for name, *shares, _, lr in table["rows"]]
    return Table(head, rows).markdown()


def gains_table() -> str:
    """What wrong answers add to supervised training on the right ones, at three learning rates."""
    rows = []
    for answers, share, name, topr, sft in GAINS:
        cells = [points(gain(name, topr, sft, lr)) for lr in GAIN_RATES]
        rows.append([answers, share, *cells])
    head = ["stored answers", "share", *(f"at {rate(lr)}" for lr in GAIN_RATES)]
    return Table(head, rows).markdown()


def gain(name: str, topr: str, sft: str, lr: float) -> Estimate:
    """The accuracy of TOPR less that of SFT at one rate, on a base and set of the study."""
    shares = load("rate_and_share")["shares"]
    ends = [shares[f"base of {name}: {arm}, {lr:g}"]["each"] for arm in (topr, sft)]
    differences = [one - other for one, other in zip(*ends, strict=True)]
    return Estimate.over_seeds(differences)


def tuned_gains() -> dict[str, str]:
    """TOPR less SFT with rate and share chosen on other seeds and problems, by base and set."""
    shares = load("rate_and_share")["shares"]
    what = "TOPR, tuned - SFT, tuned, pass@1, over seeds"
    sets = {"tenth": TENTH, "half": "46 %, natural", "most": "66 %, natural"}
    gains = {}
    for short, name in sets.items():
        gains[short] = points(Estimate(**shares[f"base of {name}: {what}"]))
    return gains


def gains_note() -> str:
    """The same gain in two studies of a real model."""
    half = load("room_to_learn")["shares"]
    tuned = points(Estimate(**half["TOPR - SFT, as many steps: pass@1"]))
    greedy = points(Estimate(**half["TOPR - SFT, as many steps: T = 0"]))
    fifth = points(Estimate(**load("real-llm")["shares"]["TOPR - positives only"]))
    return (
        f"The same for SmolLM2, 135 million parameters: right in half of its samples, both tuned, "
        f"{tuned}, but {greedy} at temperature 0; right in a fifth, at 1e-5, {fifth}."
    )


def verdicts() -> str:
    """How many claims of the paper have each verdict."""
    counts = verdict_counts().replace("*", "").split("; ")
    return " · ".join(unbroken(count) for count in counts)


@cache
def values() -> dict[str, Any]:
    """What the templates may name."""
    robustness = load("robustness")
    late = {name: robustness["data"][name]["late"]["mean"] for name in ("topr", "reinforce")}
    seeds = robustness["shares"]["TOPR, 60% negative, late clipping: correct at the end"]["each"]
    collapse = {name: unbroken(f"{percent(curve[-1])} %") for name, curve in late.items()}
    return {
        "settings": Settings(),
        "scale": LAPTOP,
        "seeds": len(robustness["seeds"]),
        "completions": load("completions") | completions_table(),
        "bandit": bandit_numbers(),
        "collapse": collapse | {"seeds": len(seeds)},
        "ratio_of_200": f"{0.95**200:.6f}",
        "detach": detach_numbers(),
        "checker": checker_output(),
        "four_lines": FOUR_LINES,
        "table_1": table_1(),
        "weights_at_005": weights_table(0.05),
        "robustness": robustness_table(),
        "gains": gains_table(),
        "tuned": tuned_gains(),
        "gains_note": gains_note(),
        "verdicts": verdicts(),
    }


def render(deck: str) -> str:
    """The Markdown of a deck, with its numbers."""
    environment = Environment(loader=FileSystemLoader(SOURCES), undefined=StrictUndefined)
    environment.filters |= {"percent": percent, "rate": rate, "power": power}
    return environment.get_template(f"{deck}.md.jinja").render(values()) + "\n"


# ---- pictures ------------------------------------------------------------------------------------
RIGHT = LINE_STYLES["correct"].colour
WRONG = LINE_STYLES["invalid"].colour
WIDE = (5.3, 2.0)  # inches; 1,120 pixels on the slide
NARROW = (3.3, 2.4)  # 640 pixels
MIDDLE = (3.6, 2.4)  # 720 pixels


def plot(panel: Panel, size: tuple[float, float]) -> Figure:
    """One panel in the project's style, without markers and without a legend."""
    lines = []
    for line in panel.lines:
        style = LINE_STYLES[line.style] if isinstance(line.style, str) else line.style
        lines.append(line._replace(style=style._replace(marker="")))
    figure = draw([panel._replace(lines=lines)], size=size)
    [axes] = figure.axes
    axes.get_legend().remove()  # `name_line` writes names next to the lines
    return figure


def name_line(axes: Axes, x: float, y: float, text: str, colour: str) -> None:
    """Write the name of a line next to it."""
    axes.text(x, y, text, color=colour, fontsize=11, fontweight="bold")


def draw_push() -> Figure:
    """The size of the push on a wrong arm, for TOPR and naive REINFORCE."""
    wrong = 2
    steps = torch.arange(1, 101)
    lines = []
    for path, name in zip(proposition_paths(), ("topr", "reinforce"), strict=True):
        push = toy_bandit.gradient(path[1:101], FOUR_ARMS, PRESETS[name])[:, wrong]
        lines.append(Line(steps, push.abs(), name, name))
    options = {"yscale": "log", "ylim": (5e-4, 1), "xlim": (0, 100)}
    figure = plot(Panel("", "step", "push down", lines, options), WIDE)
    [axes] = figure.axes
    name_line(axes, 60, 0.33, "naive REINFORCE", LINE_STYLES["reinforce"].colour)
    name_line(axes, 60, 0.004, "TOPR", LINE_STYLES["topr"].colour)
    return figure


def draw_collapse() -> Figure:
    """Right test answers along four passes over stored answers, 60 % of them wrong."""
    lines = []
    for name in ("topr", "reinforce"):
        curve = load("robustness")["data"][name]["late"]
        mean = [100 * value for value in curve["mean"]]
        lines.append(Line(range(0, 101, 20), mean, name, name))
    options = {"ylim": (-3, 103), "xlim": (0, 100)}
    figure = plot(Panel("", "training completed (%)", "right answers (%)", lines, options), WIDE)
    [axes] = figure.axes
    name_line(axes, 55, 84, "TOPR", LINE_STYLES["topr"].colour)
    name_line(axes, 20, 30, "naive REINFORCE", LINE_STYLES["reinforce"].colour)
    return figure


def draw_tokens() -> Figure:
    """The ratio of an answer, each token of which is 5 % less probable; and the mean."""
    tokens = torch.arange(1, 201)
    product = Line(tokens, 0.95**tokens, "product", "topr")
    mean = Line(tokens, torch.full((200,), 0.95), "mean", "reinforce")
    options = {"yscale": "log", "ylim": (1e-5, 3), "xlim": (0, 200)}
    panel = Panel("", "tokens in the answer", "ratio", [product, mean], options)
    figure = plot(panel, WIDE)
    [axes] = figure.axes
    name_line(axes, 110, 0.16, "mean over tokens", LINE_STYLES["reinforce"].colour)
    name_line(axes, 110, 0.012, "product: the ratio π/μ", LINE_STYLES["topr"].colour)
    return figure


def draw_asymmetry() -> Figure:
    """The weight of a right and of a wrong answer against the ratio."""
    ratio = torch.linspace(0, 2, 201)
    right = Line(ratio, torch.ones(201), "right", Style(RIGHT, "-", ""))
    weight = importance_weight(ratio.log(), 0, 1)
    wrong = Line(ratio, weight, "wrong", Style(WRONG, (0, (3, 1.5)), ""))
    options = {"ylim": (-0.05, 1.3), "xlim": (0, 2)}
    label = "ratio π/μ: probability now / probability when written"
    figure = plot(Panel("", label, "weight", [right, wrong], options), (5.3, 2.35))
    [axes] = figure.axes
    for line in axes.lines:
        line.set_linewidth(3)
    name_line(axes, 0.03, 1.09, "right answer", RIGHT)
    name_line(axes, 0.5, 0.33, "wrong answer", WRONG)
    return figure


def draw_taper() -> Figure:
    """TOPR's two tapers over a logarithmic ratio."""
    ratio = torch.logspace(-1.3, 0.6, 200)
    right = Line(ratio, taper(ratio, 1, 1), "right", Style(RIGHT, "-", ""))
    wrong = Line(ratio, taper(ratio, 0, 1), "wrong", Style(WRONG, (0, (3, 1.5)), ""))
    options = {"xscale": "log", "xlim": (0.05, 4), "ylim": (-2.2, 2.6)}
    figure = plot(Panel("", "ratio π/μ", "taper ρ", [right, wrong], options), NARROW)
    [axes] = figure.axes
    name_line(axes, 0.06, 0.8, "wrong answer", WRONG)
    name_line(axes, 0.25, -1.1, "right answer", RIGHT)
    return figure


def draw_bounded() -> Figure:
    """The objectives of TOPR and of naive REINFORCE in the bandit of Proposition 3.2."""
    steps = torch.arange(1, 3001)
    lines = []
    for path, name in zip(proposition_paths(), ("topr", "reinforce"), strict=True):
        value = toy_bandit.objective(path[1:], FOUR_ARMS, PRESETS[name])
        lines.append(Line(steps, value, name, name))
    lines.append(Line(steps, torch.ones(3000), "max R", "limit"))
    options = {"xscale": "log", "yscale": "log", "xlim": (1, 3000), "ylim": (0.3, 3000)}
    figure = plot(Panel("", "step", "objective J", lines, options), MIDDLE)
    [axes] = figure.axes
    name_line(axes, 1.3, 250, "naive REINFORCE", LINE_STYLES["reinforce"].colour)
    name_line(axes, 60, 1.4, "best reward", "black")
    name_line(axes, 60, 0.42, "TOPR", LINE_STYLES["topr"].colour)
    return figure


def draw_way_back() -> Figure:
    """The probability of a forgotten right answer, with TOPR and with TIS."""
    steps = torch.arange(101)
    lines = []
    for pi, name in zip(way_back_paths(), ("topr", "tis"), strict=True):
        lines.append(Line(steps, pi[:101], name, name))
    options = {"yscale": "log", "ylim": (3e-7, 5), "xlim": (0, 100)}
    figure = plot(Panel("", "step", "π of the right answer", lines, options), WIDE)
    [axes] = figure.axes
    name_line(axes, 20, 0.02, "TOPR", LINE_STYLES["topr"].colour)
    name_line(axes, 70, 3e-6, "TIS", "#1b6ca8")
    return figure


def draw_shares() -> Figure:
    """The effective share of right answers for four baselines, where a tenth is right."""
    p = 0.1
    figure = Figure(figsize=NARROW, layout="constrained", dpi=100)
    axes = figure.subplots()
    labels = []
    for row, share in enumerate((0.1, 0.2, 0.5, 0.7)):
        c = float(baseline_for_proportion(tensor(p), tensor(share)))
        right = 100 * float(effective_proportion(tensor(p), tensor(c)))
        axes.barh(row, right, color=RIGHT, height=0.7)
        axes.barh(row, 100 - right, left=right, color=WRONG, height=0.7)
        axes.text(right / 2, row, f"{right:.0f}", color="white", ha="center", va="center_baseline")
        labels.append(f"c = {round(c, 2):g}".replace("-", "−"))
    axes.set_yticks(range(4), labels)
    axes.invert_yaxis()
    axes.set(xlim=(0, 100), xlabel="right | wrong: share of the weight (%)")
    axes.spines[["top", "right", "left"]].set_visible(False)
    return figure


# The name of each picture, how it is drawn, and its width on the slide in pixels.
PICTURES: dict[str, tuple[Callable[[], Figure], int]] = {
    "push": (draw_push, 1120),
    "collapse": (draw_collapse, 1120),
    "tokens": (draw_tokens, 1120),
    "asymmetry": (draw_asymmetry, 1120),
    "taper": (draw_taper, 640),
    "bounded": (draw_bounded, 720),
    "way_back": (draw_way_back, 1120),
    "share": (draw_shares, 640),
}


# ---- the build -----------------------------------------------------------------------------------
def fingerprint(deck: str, markdown: str) -> str:
    """A name for what a PDF is built from: its text and its styles; the PDF's keywords have it."""
    content = markdown + (SOURCES / "theme.css").read_text(encoding="utf-8")
    content += (SOURCES / DECKS[deck]).read_text(encoding="utf-8")
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def with_keywords(deck: str, markdown: str) -> str:
    """The Markdown with its fingerprint in the front matter."""
    return markdown.replace("\n", f"\nkeywords: sources-{fingerprint(deck, markdown)}\n", 1)


def read_pdf(path: Path) -> tuple[int, str]:
    """The number of pages of a PDF, and the fingerprint in its keywords."""
    content = path.read_bytes()
    parts = [content]
    for stream in re.findall(rb"stream\r?\n(.*?)\r?\nendstream", content, re.DOTALL):
        with contextlib.suppress(zlib.error):
            parts.append(zlib.decompress(stream))
    objects = b"\n".join(parts)
    pages = len(re.findall(rb"/Type\s*/Page\b", objects))
    [keywords] = re.findall(rb"/Keywords\s*<FEFF([0-9A-F]+)>", objects)
    return pages, bytes.fromhex(keywords.decode()).decode("utf-16-be").removeprefix("sources-")


def run_marp(deck: str, *options: str) -> None:
    """Convert a deck in build/lecture/ with Marp, in the system's Chromium."""
    command = [str(BUILD / "node_modules" / ".bin" / "marp"), f"{deck}.md", "--html"]
    command += ["--theme-set", ".", "--allow-local-files", *options]
    environment = os.environ | {"CHROME_NO_SANDBOX": "1"}
    result = subprocess.run(command, cwd=BUILD, env=environment, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"make_lecture.py: Marp failed on {deck}.md\n{result.stderr}")


# What is wrong with the pages of an open deck: text outside of a page, or too small.
FIND_PROBLEMS = """([smallest, margin]) => {
const pages = [...document.querySelectorAll("section")];
return pages.flatMap((page, i) => {
  const frame = page.getBoundingClientRect();
  const scale = frame.width / page.offsetWidth;
  const problems = [];
  if (page.scrollHeight > page.clientHeight || page.scrollWidth > page.clientWidth)
    problems.push(`page ${i + 1}: too much content`);
  for (const element of page.querySelectorAll("*")) {
    const box = element.getBoundingClientRect();
    const name = `page ${i + 1}: <${element.localName}> ${element.textContent.slice(0, 40)}`;
    if (box.bottom > frame.bottom - margin * scale || box.right > frame.right - margin * scale)
      problems.push(`${name}: too near to the edge of the page`);
    if (element.scrollWidth > element.clientWidth + 1 && element.localName === "pre")
      problems.push(`${name}: too wide`);
    const hasText = [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    const special = element.closest("mjx-container, svg, sup, script, style");
    const isSpecial = special && page.contains(special);  // each page is in an svg itself
    if (hasText && !isSpecial && parseFloat(getComputedStyle(element).fontSize) < smallest)
      problems.push(`${name}: text below ${smallest} px`);
  }
  return problems;
})}"""


def find_problems(deck: str) -> list[str]:
    """What is outside of a page or too small, in build/lecture/DECK.html."""
    from playwright.sync_api import sync_playwright

    limits = [SMALLEST, MARGIN] if deck == "slides" else [0, 0]
    with sync_playwright() as playwright:
        program = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto((BUILD / f"{deck}.html").as_uri())
        page.evaluate("document.fonts.ready")
        problems = page.evaluate(FIND_PROBLEMS, limits)
        browser.close()
    return problems


def make_html(deck: str) -> None:
    """Write build/lecture/DECK.html, in which all pages stand below each other."""
    for css in SOURCES.glob("*.css"):
        shutil.copy(css, BUILD)
    markdown = with_keywords(deck, render(deck))
    (BUILD / f"{deck}.md").write_text(markdown, encoding="utf-8")
    run_marp(deck, "--template", "bare", "--output", f"{deck}.html")


def write_pictures() -> None:
    """Write all pictures into build/lecture/."""
    for name, (draw_picture, _) in PICTURES.items():
        draw_picture().savefig(BUILD / f"{name}.svg")


def main() -> None:
    """The command: build both PDFs and one picture."""
    write_pictures()
    save_figure(draw_asymmetry(), SOURCES / "asymmetry.png")
    for deck in DECKS:
        make_html(deck)
        problems = find_problems(deck)
        if problems:
            raise SystemExit("\n".join([f"make_lecture.py: {deck}.md.jinja", *problems]))
        notes = ["--pdf-notes"] if deck == "slides" else []
        run_marp(deck, "--pdf", *notes, "--output", f"{deck}.pdf")
        write_file(SOURCES / f"{deck}.pdf", (BUILD / f"{deck}.pdf").read_bytes())
        print(f"docs/lecture/{deck}.pdf")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)  # which refuses arguments
