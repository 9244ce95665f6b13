"""Write the tables of the Markdown pages, and draw three pictures, from results/ and studies/.

    python scripts/make_tables.py

A table stands between the lines `<!-- table:FILE.TABLE -->` and `<!-- end -->`: results/FILE.json,
or studies/*/FILE.json, has it under `tables`. `FILE.made` says how FILE was made. Tables from
several files are `<!-- table:NAME ARGUMENT -->`; NAME is one of TABLES. figures/claims.py computes
the verdicts on claims. Commit 227e74c has the code of results/weights.json, docs/make_tables.py.
"""

import json
import re
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from figures.claims import (  # noqa: E402
    CONTRADICTED,
    INCONCLUSIVE,
    NOT_MET,
    NOT_RUN,
    REPRODUCED,
    VERDICTS,
    ClaimResult,
    claims_table,
    forest,
    judge_claims,
    margin,
    narrow_verdicts,
    number_text,
)
from figures.common import PAPER_METHODS, TUNED  # noqa: E402
from tasks.verifier import to_tables as verifier_tables  # noqa: E402
from toprlib.evaluation import METRICS, to_table  # noqa: E402
from toprlib.plotting import METHOD_LABELS, Line, Panel, draw, draw_curve, save_figure  # noqa: E402
from toprlib.preflight import RunSize, disk_needed, memory_needed  # noqa: E402
from toprlib.report import Table  # noqa: E402
from train_gsm8k import PRESETS  # noqa: E402

RESULTS = ROOT / "results"
STUDIES = ROOT / "studies"
PAGES = [
    ROOT / "README.md",
    *sorted(RESULTS.glob("*.md")),
    *sorted(STUDIES.rglob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
# Points by which the interval of a narrow verdict clears the bound, at most.
NARROW = 0.2
BLOCK = re.compile(r"(<!-- table:([\w.-]+) ?([\w-]*) -->\n).*?(<!-- end -->)", re.DOTALL)


@cache
def load(name: str) -> dict[str, Any]:
    """The content of a file of results/, or of a folder of studies/."""
    [file] = [*RESULTS.glob(f"{name}.json"), *STUDIES.glob(f"*/{name}.json")]
    return json.loads(file.read_text(encoding="utf-8"))


# ---- tables of one file ----


@cache
def tables_of(name: str) -> dict[str, str]:
    """The tables of a file of results/ or studies/, in Markdown, and how it was made.

    >>> tables_of("fig2")["made"]
    '`python reproduce.py fig2 --preset laptop --seeds 3 --seed 0`: no runs.'
    """
    content = load(name)
    tables = {key: Table(**fields).markdown() for key, fields in content["tables"].items()}
    cost = "no runs"
    if content["runs"]:
        commits = ", ".join(f"`{commit}`" for commit in content["commits"])
        minutes = content["core_minutes"]
        cost = f"{content['runs']} runs, {minutes:.0f} core-minutes, commits {commits}"
    return {**tables, "made": f"`{content['command']}`: {cost}."}


# ---- tables of several files ----


@cache
def claim_results() -> list[ClaimResult]:
    """The paper's claims with their verdicts."""
    claims = json.loads((RESULTS / "claims.json").read_text(encoding="utf-8"))
    return judge_claims(claims, load)


def findings() -> Table:
    """Every claim and its verdict; then the analysis, which `toy_bandit.py` checks."""
    table = claims_table(claim_results(), load, "README.md")
    return Table(table.head, [*table.rows, analysis_row("../docs/")])


def chosen_findings() -> Table:
    """The claims that README shows."""
    results = [result for result in claim_results() if "readme" in result.claim]
    table = claims_table(results, load, "results/README.md")
    return Table(table.head, [*table.rows, analysis_row("docs/")])


def analysis_row(docs: str) -> list[str]:
    """The paper's analysis as a row of the claims; docs: the path of the folder docs/."""
    claim = "Propositions 3.1 and 3.2, Appendices B and C"
    ours = "`python toy_bandit.py` checks each statement"
    return [f"[Analysis]({docs}analysis.md)", claim, ours, f"**{REPRODUCED}**"]


def verdict_counts() -> str:
    """How many claims have each verdict, the row of the analysis included."""
    verdicts = [result.verdict for result in claim_results()] + [REPRODUCED]
    present = [verdict for verdict in VERDICTS if verdict in verdicts]
    return "; ".join(f"{verdicts.count(verdict)} **{verdict}**" for verdict in present)


def in_numbers(figure: str) -> str:
    """The numbers of a figure's claims, a line for each verdict; reproduced claims come last."""
    results = [one for one in claim_results() if one.claim["figure"] == figure]
    lines = []
    for verdict in (CONTRADICTED, INCONCLUSIVE, NOT_MET, NOT_RUN, REPRODUCED):
        chosen = [one for one in results if one.verdict == verdict and one.claim["key"]]
        texts = [f"{one.claim['short']}: {number_text(one)}" for one in chosen]
        if texts:
            lines.append(f"- **{verdict}:** {'; '.join(texts)}")
    return "\n".join(lines)


def narrow() -> str:
    """The verdicts that a small shift of the interval would change, with this shift in points."""
    results = narrow_verdicts(claim_results(), NARROW)
    texts = [f"{one.claim['short']} ({one.verdict}, {margin(one):.2f})" for one in results]
    return f"{len(texts)} verdicts have a margin of {NARROW} points or less: {'; '.join(texts)}."


def completions() -> Table:
    """Answers to one test problem before training, after TOPR and after naive REINFORCE."""
    content = load("completions")
    names = {
        "before": "before training",
        "topr": "after TOPR",
        "reinforce": "after naive REINFORCE",
    }
    rows = []
    for key, name in names.items():
        text = content["completions"][key]["text"]
        rows.append([name, text, f"{100 * content['correct'][key]:.0f} %"])
    question = content["prompt"].removeprefix("Q: ").removesuffix("\nA:")
    return Table(["", question, "right, of 2,400 answers"], rows)


def metrics() -> Table:
    """The metrics of results.json."""
    rows = [[f"`{name}`", metric.meaning] for name, metric in METRICS.items()]
    return Table(["metric", "what it is"], rows)


def laptop() -> Table:
    """What the default run prints."""
    return to_table(load("laptop"))


def needs() -> Table:
    """The disk and memory of the paper's run, for Llama 3 8B and prompts of 1,100 tokens."""
    paper = PRESETS["paper"]
    rows = []
    for options, n in (("", paper.n), (" --n 64", 64)):
        settings = replace(paper, n=n)
        num_samples = n * settings.problems
        num_tests = settings.eval_samples * settings.test_problems
        size = RunSize(8_030_261_248, num_samples, num_tests, 1_100 + settings.max_new_tokens)
        disk = disk_needed(settings, size) / 1e9
        memory = memory_needed(settings, size) / 1e9
        rows.append([f"`paper{options}`", f"{disk:.0f} GB", f"{memory:.0f} GB"])
    return Table(["run", "disk of `--out`", "memory of the machine, besides the GPUs"], rows)


def one_gpu() -> Table:
    """Steps as one of N GPUs computes them: counted and measured memory, and time."""
    rows = []
    for step in load("benchmarks/h200")["step_of_one_rank"]:
        memory = [f"{step[field]:.1f}" for field in ("counted_gb", "peak_gb", "reserved_gb")]
        seconds = "" if step["gpu_is_shared"] else f"{step['step_seconds']:.2f}"
        rows.append([step["model"], str(step["gpus"]), step["options"], *memory, seconds])
    heads = ["model", "GPUs", "options", "counted, GB", "measured, GB", "reserved, GB", "step, s"]
    return Table(heads, rows)


def held_out(file: str) -> Table:
    """Accuracy on the problems that choose a file's learning rates, at the rates of TOPR."""
    tried = load(file)["learning_rates"]
    rows = []
    for rate in tried["TOPR"]:
        shares = [f"{100 * of_method[rate]:.1f} %" for of_method in tried.values()]
        rows.append([f"{float(rate):g}", *shares])
    return Table(["learning rate, held-out problems", *tried], rows)


def verifier(name: str) -> str:
    """The two tables of a verifier's run."""
    return "\n\n".join(table.markdown() for table in verifier_tables(load(name)))


# The name in a marker -> the function that makes its table, from the marker's argument if any.
TABLES = {
    "completions": completions,
    "findings": findings,
    "claims": chosen_findings,
    "counted": verdict_counts,
    "narrow": narrow,
    "numbers": in_numbers,
    "metrics": metrics,
    "laptop": laptop,
    "needs": needs,
    "one-gpu": one_gpu,
    "held-out": held_out,
    "verifier": verifier,
}


def update_tables(text: str) -> str:
    """The text of a page with its tables made from the files in results/."""
    return BLOCK.sub(_update_block, text)


def _update_block(match: re.Match[str]) -> str:
    marker, name, argument, end = match.groups()
    file, _, key = name.partition(".")
    table = tables_of(file)[key] if key else TABLES[name](*argument.split())
    content = table.markdown() if isinstance(table, Table) else table
    return f"{marker}\n{content}\n\n{end}"


# ---- pictures ----


def rate_panels() -> list[Panel]:
    """Accuracy on held-out problems against the learning rate."""
    papers = {METHOD_LABELS[method] for method in PAPER_METHODS}
    others = set(load("fig1")["learning_rates"]) - papers | {METHOD_LABELS["topr"]}
    variants = set(load("variants")["learning_rates"])
    return [
        rate_panel("the paper's methods", "fig1", papers),
        rate_panel("other methods", "fig1", others),
        rate_panel("variants of TOPR's weight (ours)", "variants", variants),
    ]


def rate_panel(title: str, file: str, names: set[str]) -> Panel:
    """A line for each of some names among the learning rates of a file."""
    styles = {arm.name: arm.style for arm in TUNED.values()}
    lines = []
    for name, tried in load(file)["learning_rates"].items():
        if name in names:
            rates = [float(rate) for rate in tried]
            shares = [100 * share for share in tried.values()]
            lines.append(Line(rates, shares, name, styles[name]))
    options = {"xscale": "log", "ylim": (-3, 100)}
    return Panel(title, "learning rate", "correct (%), held-out problems, one seed", lines, options)


def main() -> None:
    """The command: write the pages that are out of date, and three pictures."""
    for page in PAGES:
        old = page.read_text(encoding="utf-8")
        new = update_tables(old)
        if new != old:
            page.write_text(new, encoding="utf-8")
            print(page.relative_to(ROOT))
    save_figure(draw(rate_panels()), RESULTS / "rates.png")
    save_figure(draw(forest(claim_results()), size=(10, 11)), RESULTS / "claims.png")
    iterations = load("laptop")["iterations"]
    save_figure(draw_curve(iterations, "TOPR, the default run"), RESULTS / "laptop.png")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)  # which refuses arguments
