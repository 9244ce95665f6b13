"""Place the tables of results in the Markdown pages, and draw four pictures, from the files in results/.

    python docs/make_tables.py

A table stands between the lines `<!-- table:FILE.TABLE -->` and `<!-- end -->`: results/FILE.json,
or studies/*/FILE.json, has it under `tables`. `FILE.made` says how FILE was made, `FILE.numbers`
what came out. Tables of several files, or of other things, are `<!-- table:NAME ARGUMENT -->`;
NAME is one of TABLES. Verdicts are computed: paper/verdicts.py. results/weights.json is a record
of two default runs: its code is that of commit 227e74c, in this file.
"""

import json
import re
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from paper.experiments import PAPER_METHODS, RATED, Figure  # noqa: E402
from paper.verdicts import VERDICTS, Judged, forest, judged, table  # noqa: E402
from pipeline.dry_run import COMPLETION, counts, hours  # noqa: E402
from pipeline.evaluation import METRICS, to_table  # noqa: E402
from pipeline.plots import CALLED, Line, Panel, draw, draw_curve, save_figure  # noqa: E402
from pipeline.report import Estimate, Table  # noqa: E402
from tasks.verifier import tables as tables_of_verifier  # noqa: E402
from train_gsm8k import PAPER  # noqa: E402

RESULTS = ROOT / "results"
STUDIES = ROOT / "studies"
PAGES = [
    ROOT / "README.md",
    *sorted(RESULTS.glob("*.md")),
    *sorted(STUDIES.rglob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
BLOCK = re.compile(r"(<!-- table:([\w.-]+) ?([\w-]*) -->\n).*?(<!-- end -->)", re.DOTALL)


def load(name: str) -> dict[str, Any]:
    """A file of results/, or of a folder of studies/."""
    [file] = [*RESULTS.glob(f"{name}.json"), *STUDIES.glob(f"*/{name}.json")]
    return json.loads(file.read_text(encoding="utf-8"))


@cache
def tables_of(name: str) -> dict[str, str]:
    """The tables that a file of results has, in Markdown, and how it was made.

    >>> tables_of("fig2")["made"]
    '`python reproduce.py fig2 --preset laptop --seeds 3 --seed 0`: no runs.'
    """
    content = load(name)
    count, commits = content["runs"], ", ".join(f"`{commit}`" for commit in content["commits"])
    cost = (
        f"{count} runs, {content['core_minutes']:.0f} core-minutes, commits {commits}"
        if count
        else "no runs"
    )
    tables = {key: Table(**fields).markdown() for key, fields in content["tables"].items()}
    if "numbers" in content:
        estimates = [
            {key: Estimate(**x) for key, x in content[kind].items()}
            for kind in ("shares", "numbers")
        ]
        tables["numbers"] = Figure({}, *estimates).table().markdown()
    return tables | {"made": f"`{content['command']}`: {cost}."}


def methods() -> Table:
    """The default run with each method."""
    rows = []
    for command, run in load("methods").items():
        after, curve = run["iterations"][0]["after"], run["iterations"][0]["curve"]
        along = " ".join(f"{100 * point['correct']:.0f}" for point in curve)
        options = command.removeprefix("python train_gsm8k.py --model tiny/worded").strip()
        correct = Estimate.read(after["pass@1"]).text(100, unit=" %")
        rows.append(
            [
                f"`{options}`" if options else "(none)",
                correct,
                f"{100 * after['invalid']:.1f} %",
                along,
            ]
        )
    return Table(
        ["options", "correct at the end", "invalid", "correct along the epoch, in %"], rows
    )


@cache
def claims() -> list[Judged]:
    """The paper's claims with their verdicts."""
    return judged(json.loads((RESULTS / "claims.json").read_text(encoding="utf-8")), cache(load))


def findings(pages: str = "README.md", docs: str = "../docs/", is_chosen: bool = False) -> Table:
    """Every claim and its verdict, or those chosen for the README; then the analysis, which is no measurement."""
    measured = table(
        [claim for claim in claims() if "readme" in claim.row or not is_chosen], load, pages
    )
    what, ours = (
        "Propositions 3.1 and 3.2, Appendices B and C",
        "`python toy_bandit.py` checks each statement",
    )
    row = [f"[Analysis]({docs}analysis.md)", what, "", ours, "", "**agrees**"]
    return measured._replace(rows=[*measured.rows, row])


def chosen() -> Table:
    """The README's claims."""
    rows = findings("results/README.md", "docs/", is_chosen=True).rows
    return Table(
        ["", "the paper's claim", "here", "verdict"],
        [[row[i] for i in (0, 1, 3, 5)] for row in rows],
    )


def counted() -> str:
    """How many claims have each verdict, the row of the analysis included."""
    names = [re.match(r"\*\*(.+?)\*\*", row[-1])[1] for row in findings().rows]
    return "; ".join(
        f"{names.count(name)} **{name}**"
        for name in dict.fromkeys([*VERDICTS, *names])
        if name in names
    )


def in_numbers(name: str) -> str:
    """Up to six numbers of a figure's claims, in a line; the table of claims has all."""
    measured = [claim for claim in claims() if claim.row["figure"] == name and claim.estimate][:6]
    return "; ".join(
        f"{claim.row['short']}: **{claim.ours(load)}** ({claim.verdict})" for claim in measured
    )


def completions() -> Table:
    """One test problem as it is answered before training, after TOPR and after naive REINFORCE."""
    content = load("completions")
    names = {
        "before": "before training",
        "topr": "after TOPR",
        "reinforce": "after naive REINFORCE",
    }
    rows = [
        [name, content["completions"][key]["text"], f"{100 * content['correct'][key]:.0f} %"]
        for key, name in names.items()
    ]
    question = content["prompt"].removeprefix("Q: ").removesuffix("\nA:")
    return Table(["", question, "right, of 2,400 answers"], rows)


def rates() -> list[Panel]:
    """Accuracy on held-out problems against the learning rate: the paper's methods, other methods, the variants."""
    styles, panels, papers = (
        {arm.name: arm.style for arm in RATED.values()},
        [],
        {CALLED[x] for x in PAPER_METHODS},
    )
    for title, file, left_out in (
        ("the paper's methods", "fig1", {arm.name for arm in RATED.values()} - papers),
        ("other methods", "fig1", papers - {CALLED["topr"]}),
        ("variants of TOPR's weight (ours)", "variants", set()),
    ):
        tried = {
            name: grid
            for name, grid in load(file)["learning_rates"].items()
            if name not in left_out
        }
        drawn = [
            Line([*map(float, x)], [100 * y for y in x.values()], name, styles[name])
            for name, x in tried.items()
        ]
        options = {"xscale": "log", "ylim": (-3, 100)}
        panels.append(
            Panel(
                title, "learning rate", "correct (%), held-out problems, one seed", drawn, options
            )
        )
    return panels


def llama_3_8b() -> LlamaConfig:
    """The shapes of Llama 3 8B."""
    sizes = {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "vocab_size": 128_256,
    }
    return LlamaConfig(**sizes, num_attention_heads=32, num_key_value_heads=8)


def stages() -> Table:
    """The time of each stage on eight H100s, for the short run of docs/gpu.md and for the preset `paper`."""
    first = replace(PAPER, problems=64, examples=512, iterations=2, test_problems=64)
    model = llama_3_8b(), 8_030_261_248, 8, 1_100, COMPLETION * PAPER.max_new_tokens
    times = [
        hours(run, counts(run, run.problems, run.test_problems), *model) for run in (first, PAPER)
    ]
    rows = [
        [stage, f"{60 * time:.1f}", f"{times[1][stage][0]:.1f}", how]
        for stage, (time, how) in times[0].items()
    ]
    sums = [sum(time for time, _ in run.values()) for run in times]
    rows.append(["all", f"{60 * sums[0]:.0f}", f"{sums[1]:.1f}", ""])
    return Table(["stage", "first run (minutes)", "`paper` (hours)", "assumed"], rows)


named = (completions, methods, findings, counted, stages)
TABLES = {table.__name__: table for table in named} | {  # a marker's name -> what makes its table
    "laptop": lambda: to_table(load("laptop")),  # what the default run prints
    "verifier": lambda name: "\n\n".join(
        table.markdown() for table in tables_of_verifier(load(name))
    ),
    "claims": chosen,
    "numbers": in_numbers,
    "metrics": lambda: Table(
        ["metric", "what it is"], [[f"`{name}`", each.meaning] for name, each in METRICS.items()]
    ),
}


def renewed(text: str) -> str:
    """The text of a page with its tables made anew."""

    def new(match: re.Match[str]) -> str:
        marker, name, argument, end = match.groups()
        file, _, key = name.partition(".")
        made = tables_of(file)[key] if key else TABLES[name](*argument.split())
        return f"{marker}\n{made if isinstance(made, str) else made.markdown()}\n\n{end}"

    return BLOCK.sub(new, text)


def main() -> None:
    """The command: write the pages that are out of date, and four pictures."""
    for page in PAGES:
        old = page.read_text(encoding="utf-8")
        if (new := renewed(old)) != old:
            page.write_text(new, encoding="utf-8")
            print(page.relative_to(ROOT))
    save_figure(draw(rates()), RESULTS / "rates.png")
    save_figure(draw(forest(claims()), size=(10, 11)), RESULTS / "claims.png")
    save_figure(
        draw_curve(load("laptop")["iterations"], "TOPR, the default run"), RESULTS / "laptop.png"
    )


if __name__ == "__main__":
    main()
