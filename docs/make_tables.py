"""Place the tables of results in the Markdown pages, and draw two pictures, from the files in results/.

    python docs/make_tables.py            # write them
    python docs/make_tables.py --check    # exit status 1 if a page is out of date; nothing is written

A table stands between the lines `<!-- table:FILE.TABLE -->` and `<!-- end -->`: results/FILE.json has it, under
`tables`. `FILE.made` says how FILE was made. Tables of several files, or of other things, are `<!-- table:NAME ARGUMENT
-->`; NAME is one of TABLES.
"""

import argparse
import ast
import dataclasses
import json
import re
import statistics
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pipeline.report import Estimate, Table  # noqa: E402

RESULTS = ROOT / "results"
PAGES = [ROOT / "README.md", RESULTS / "README.md", RESULTS / "benchmarks" / "README.md"]
PAGES += sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"(<!-- table:([\w.-]+) ?([\w-]*) -->\n).*?(<!-- end -->)", re.DOTALL)


def load(name: str) -> dict[str, Any]:
    """A file of results/; the map has its runs, one a line, and is counted from these.

    >>> load("laptop")["before"]["questions"]
    150
    """
    if name != "map":
        return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    from paper.map_figure import record

    return record(RESULTS / "map_runs.jsonl")


@cache
def tables_of(name: str) -> dict[str, str]:
    """The tables that a file of results has, in Markdown, and how it was made.

    >>> tables_of("fig2")["made"]
    '`python reproduce.py fig2 --preset laptop --seeds 3 --seed 0`: no runs.'
    """
    found = load(name)
    count, commits = found["runs"], ", ".join(f"`{commit}`" for commit in found["commits"])
    cost = f"{count} runs, {found['core_minutes']:.0f} core-minutes, commits {commits}" if count else "no runs"
    tables = {key: Table(*table.values()).markdown() for key, table in found["tables"].items()}
    return tables | {"made": f"`{found['command']}`: {cost}."}


def interval(estimate: dict[str, Any], unit: str = " %") -> str:
    """A share in percent, with its 95% interval.

    >>> interval({"mean": 0.5, "half_width": 0.127, "each": [0.49, 0.51]})
    '50.0 ± 12.7 %'
    """
    return Estimate(estimate["mean"], estimate["half_width"]).text(100, unit=unit)


def last(series: dict[str, list[float | None]]) -> str:
    """The end of a line of a figure.

    >>> last({"mean": [0.4, 0.5], "half_width": [0.1, 0.02]})
    '50.0 ± 2.0 %'
    """
    return Estimate(series["mean"][-1], series["half_width"][-1]).text(100, unit=" %")


# ---- runs -----------------------------------------------------------------------------------------------------------


def outcomes(columns: dict[str, dict[str, Any]]) -> Table:
    """Entries of results.json side by side."""
    from pipeline.evaluation import shown

    shown_of = [shown(entry) for entry in columns.values()]
    return Table(["", *columns], [[name, *(column[name] for column in shown_of)] for name in shown_of[0]])


def laptop() -> Table:
    """Before and after the default run, and after naive REINFORCE on the same samples."""
    ours, naive = load("laptop"), load("methods")["python train_gsm8k.py --method reinforce"]
    after = {"after TOPR": ours, "after naive REINFORCE": naive}
    return outcomes({"before": ours["before"]} | {name: run["iterations"][0]["after"] for name, run in after.items()})


def iterations() -> Table:
    """Before and after each iteration of the run with Anna Karenina sampling."""
    run = load("iterations")
    after = {f"after iteration {i}": entry["after"] for i, entry in enumerate(run["iterations"], start=1)}
    return outcomes({"before": run["before"]} | after)


def methods() -> Table:
    """The default run with each method."""
    rows = []
    for command, run in load("methods").items():
        after, curve = run["iterations"][0]["after"], run["iterations"][0]["curve"]
        along = " ".join(f"{100 * point['correct']:.0f}" for point in curve)
        options = command.removeprefix("python train_gsm8k.py").strip()
        correct = Estimate.read(after["pass@1"]).text(100, unit=" %")
        rows.append([f"`{options}`" if options else "(none)", correct, f"{100 * after['invalid']:.1f} %", along])
    return Table(["options", "correct at the end", "invalid", "correct along the epoch, in %"], rows)


def verifier(name: str) -> Table:
    """Table 2 of one run."""
    rows, columns = load(name)["table2"], list(load(name)["table2"]["base"])
    text = {
        row: [Estimate.read(cells[c]).text(100, unit=" %") if c in cells else "-" for c in columns]
        for row, cells in rows.items()
    }
    return Table(["verifier", *columns], [[row, *cells] for row, cells in text.items()])


def differences(name: str) -> Table:
    """The differences between the rows of Table 2 of one run."""
    found = load(name)["paired differences"]
    rows = [[what, Estimate.read(value).text(100, unit=" points")] for what, value in found.items()]
    return Table(["difference on the same solutions", ""], rows)


def collapse() -> list:
    """The panels of the README's picture: TOPR and naive REINFORCE along the epoch of the default run, seed 0."""
    from pipeline.plots import Line, Panel

    runs, panels = load("methods"), []
    commands = {"topr": "python train_gsm8k.py", "reinforce": "python train_gsm8k.py --method reinforce"}
    for outcome, title in (("correct", "Correct completions"), ("invalid", "Completions without an answer")):
        lines = []
        for style, label in (("topr", "TOPR"), ("reinforce", "naive REINFORCE")):
            curve = runs[commands[style]]["iterations"][0]["curve"]
            seen = [point["samples_seen"] / 1000 for point in curve]
            lines.append(Line(seen, [100 * point[outcome] for point in curve], label, style))
        panels.append(Panel(title, "samples trained on (thousands)", "% of completions", lines, {"ylim": (-3, 103)}))
    return panels


# ---- claims and mistakes --------------------------------------------------------------------------------------------


def claims() -> Table:
    """Every claim of the paper that was measured, and whether it was found."""
    text = (RESULTS / "README.md").read_text(encoding="utf-8")
    rows = []
    for name in (*(f"fig{i}" for i in range(1, 10)), "table2"):
        content = load(name)
        judged = content["judgement"]
        numbers = {what: interval(of, " points" if " - " in what else " %") for what, of in content["shares"].items()}
        numbers |= {what: Estimate(*of.values()).text() for what, of in content["numbers"].items()}
        measured = re.sub(r"{(.*?)}", lambda match: numbers[match[1]], judged["measured"])  # noqa: B023
        [heading] = re.findall(rf"^## ({name}\b.*)$", text, re.MULTILINE)
        called = name.replace("fig", "Figure ").replace("table", "Table ")
        rows.append([called, judged["claim"], measured, f"[{judged['verdict']}](results/README.md#{anchor(heading)})"])
    stated = [row for rows in load("bandit/claims")["claims"].values() for row in rows]
    proved = "Propositions 3.1 and 3.2, Sections 2.4 to 3.2, Table 1, Appendices B and C"
    counted = f"{sum(row['holds'] for row in stated)} of {len(stated)} statements hold on a softmax bandit"
    rows.append(["Analysis", proved, counted, "[agrees](docs/analysis.md)"])
    rows.append(["Figures 4, 6, 8", "on MATH, with DeepSeek-R1 8B, with a 70B model", "needs GPUs", "not measured"])
    return Table(["", "the paper's claim", "measured here", "verdict"], rows)


def anchor(heading: str) -> str:
    """What a link to a heading ends with.

    >>> anchor("fig1: accuracy over one epoch")
    'fig1-accuracy-over-one-epoch'
    """
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def mistakes() -> Table:
    """What the five ways to get it wrong cost; log mu that is recomputed at every step is naive REINFORCE."""
    of_variants, of_methods = load("variants")["data"], load("fig1")["data"]
    named = {
        "none: the paper's loss": "topr",
        "1. per-token ratio": "per-token",
        "2. geometric mean": "geometric mean",
        "3. clipped from below, at 0.8": "clip 0.8..1.2",
    }
    rates = ("one rate", "own rate")
    rows = [[what, *(last(of_variants[rate][name]["correct"]) for rate in rates)] for what, name in named.items()]
    rows.append(["4. recomputed log mu", *(last(of_methods[rate]["reinforce"]) for rate in rates)])
    rows.append(["5. normalised advantages", "not measured", "not measured"])
    return Table(["mistake", "correct at the end", "at its own learning rate"], rows)


def bandit() -> Table:
    """The statements that `python toy_bandit.py` checks, with what was measured."""
    content = load("bandit/claims")["claims"]
    rows = [
        [f"`{name}`", row["source"], row["text"], row["measured"], "yes" if row["holds"] else "no"]
        for name, rows in content.items()
        for row in rows
    ]
    return Table(["claim", "source", "statement", "measured", "holds"], rows)


SPEEDS = [  # what, file, comparison, goal: numbers as they stand in the file
    ("training, no worked examples, against TRL", "train_step", 0, 0),
    ("training, prompts of 600 tokens, against TRL", "train_step", 1, 0),
    ("training, prompts of 1,100 tokens, against TRL", "train_step", 2, 0),
    ("training, prompts of 1,100 tokens, against padded rows", "train_step", 2, 1),
    ("memory of the output layer, against TRL", "loss_memory", 0, 0),
    ("a step of TOPR, against cross-entropy", "overhead", 0, 0),
    ("sampling, against plain `generate`", "sampling", 0, 3),
    ("sampling, against vLLM on a CPU", "sampling", 0, 6),
    ("sampling and training, against TRL", "end_to_end", 0, 0),
    ("the default run, against two minutes", "end_to_end", 1, 0),
]


def speed() -> Table:
    """Medians of both sides of each comparison; the ratio is the median of the rounds' ratios, with its range."""
    rows = []
    for what, name, number, of_goals in SPEEDS:
        comparison = load(f"benchmarks/{name}")["comparisons"][number]
        goal = comparison["goals"][of_goals]
        ours, theirs = (comparison["values"][goal[side]] for side in ("side", "against"))
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        ratio = statistics.median(ratios)
        is_met = ratio >= goal["bound"] if goal["is_least"] else ratio <= goal["bound"]
        medians = [f"{statistics.median(side):,.4g}" for side in (ours, theirs)]
        hoped = f"{'>=' if goal['is_least'] else '<='} {goal['bound']:g}: {'met' if is_met else 'missed'}"
        ratio = f"{ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        rows.append([what, comparison["unit"], *medians, ratio, hoped])
    return Table(["", "unit", "topr", "other", "ratio (lowest to highest)", "goal"], rows)


def benchmark(name: str) -> str:
    """What a benchmark found: how it was called, on which machine, and each comparison with what follows from it."""
    from benchmarks.measuring import tables

    found = load(f"benchmarks/{name}")
    parts = [f"`{found['command']}`: {', '.join(f'{what} {value}' for what, value in found['machine'].items())}"]
    for compared, lines in tables(found):
        parts += [compared.markdown(), "\n".join(f"- {line}" for line in lines)]
    return "\n\n".join(part for part in parts if part)


def stages() -> Table:
    """The time of each stage on eight H100s, for docs/gpu.md's first command and for the preset `paper`."""
    from benchmarks.fake_8b_step import EIGHT_B, config_of
    from pipeline.dry_run import ASSUMED, COMPLETION, counts, hours
    from train_gsm8k import PAPER

    first, found = dataclasses.replace(PAPER, problems=64, examples=512, iterations=2, test_problems=64), []
    for run in (first, PAPER):
        of_run, tokens = counts(run, run.problems * run.n, run.test_problems), COMPLETION * run.max_new_tokens
        found.append(
            hours(run, of_run, config_of(EIGHT_B), 8_030_261_248, processes=8, prompt=1_100, completion=tokens)
        )
    rows = [[name, f"{60 * found[0][name]:.1f}", f"{found[1][name]:.1f}", ASSUMED[name]] for name in ASSUMED]
    sums = [f"{60 * sum(found[0].values()):.0f}", f"{sum(found[1].values()):.1f}"]
    return Table(["stage", "first run (minutes)", "`paper` (hours)", "assumed"], [*rows, ["all", *sums, ""]])


def cards() -> Table:
    """What a step of the paper's batch takes of each GPU, in three ways to compute it."""
    peaks: dict[tuple[str, int], list[str]] = {}
    for step in load("benchmarks/fake_8b_step")["cards"]:
        gpu = step["setup"]["model"], step["setup"]["processes"]
        peaks.setdefault(gpu, []).append(f"{step['peak'] / 1e9:.1f}")
    rows = [[model, str(gpus), *of_ways] for (model, gpus), of_ways in peaks.items()]
    return Table(["model", "GPUs", "neither", "`--reshard`", "`--reshard --gradient-checkpointing`"], rows)


def memory() -> Table:
    """What a training step of Llama 3 8B takes of each GPU, by kind, where its passes take the most."""
    steps = load("benchmarks/fake_8b_step")["steps"]
    kinds = list(next(iter(steps.values()))["passes"])
    rows = []
    for name, step in steps.items():
        sizes = [*(step["passes"][kind] for kind in kinds), step["peak"]]
        calls, work = sum(step["collectives"].values()), step["flops"] / 1e12
        rows.append([name, *(f"{size / 1e9:.1f}" for size in sizes), str(calls), f"{work:.0f}"])
    return Table(["a step", *kinds, "peak", "collectives", "TFLOP"], rows)


def sides() -> Table:
    """A step of 8 samples on eight GPUs as this code does it, and with other trainers' settings."""
    rows = []
    for name, side in load("benchmarks/fake_8b_step")["sides"].items():
        calls = str(sum(side["collectives"].values())), str(side["collectives"]["all-reduce"])
        sizes = sum(side["sent"].values()) / 1e9, side["flops"] / 1e12, side["peak"] / 1e9
        rows.append([name, *calls, *(f"{size:.1f}" for size in sizes)])
    head = ["", "collectives", "of the optimiser", "GB of weights and gradients", "TFLOP", "GB at the peak"]
    return Table(head, rows)


def metrics() -> Table:
    """The metrics of a test set, by their names in results.json."""
    from pipeline.evaluation import METRICS

    return Table(["metric", "what it is"], [[f"`{name}`", metric.meaning] for name, metric in METRICS.items()])


def settings(first: str) -> Table:
    """The settings from `first` to the one before the next table's first."""
    from train_gsm8k import PRESETS

    fields = [field.name for field in dataclasses.fields(PRESETS["laptop"])]
    page = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    starts = [*re.findall(r"<!-- table:settings (\w+) -->", page), None]
    after = starts[starts.index(first) + 1]
    chosen = fields[fields.index(first) : fields.index(after) if after else None]

    def shown(value: object) -> str:
        text = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        return {"": "-", "None": "-", "True": "on", "False": "off"}.get(text, text.replace(f"{ROOT}/", ""))

    help_of = help_of_settings()
    rows = [
        [
            f"`--{name.replace('_', '-')}`",
            *(shown(getattr(PRESETS[p], name)) for p in ("laptop", "paper")),
            help_of[name],
        ]
        for name in chosen
    ]
    return Table(["option", "laptop", "paper", "meaning"], rows)


def help_of_settings() -> dict[str, str]:
    """The text below each field of pipeline.settings.Settings.

    >>> help_of_settings()["seed"]
    'seed of everything that is drawn'
    """
    tree = ast.parse((ROOT / "pipeline" / "settings.py").read_text(encoding="utf-8"))
    [fields] = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Settings"]
    pairs = [(a, b) for a, b in pairwise(fields) if isinstance(a, ast.AnnAssign)]
    return {a.target.id: " ".join(b.value.value.split()) for a, b in pairs}


# ---- the command ----------------------------------------------------------------------------------------------------


OF_RUNS = (laptop, iterations, methods, verifier, differences, claims, mistakes, bandit)
OTHERS = (speed, benchmark, stages, cards, memory, sides, metrics, settings)
TABLES = {function.__name__: function for function in (*OF_RUNS, *OTHERS)}


def renewed(text: str) -> str:
    """The text of a page with its tables made anew.

    >>> renewed("no table").removeprefix("no")
    ' table'
    """

    def new(match: re.Match[str]) -> str:
        marker, name, argument, end = match.groups()
        file, _, of_file = name.partition(".")
        made = tables_of(file)[of_file] if of_file else TABLES[name](*argument.split())
        return f"{marker}\n{made if isinstance(made, str) else made.markdown()}\n\n{end}"

    return BLOCK.sub(new, text)


def main() -> None:
    """The command line: write the pages and two pictures, or say which page is out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a page is out of date")
    is_check = parser.parse_args().check
    stale = {page: new for page in PAGES if (new := renewed(old := page.read_text(encoding="utf-8"))) != old}
    if is_check:
        names = ", ".join(str(page.relative_to(ROOT)) for page in stale)
        sys.exit(f"make_tables: {names}: out of date; run python docs/make_tables.py" if stale else 0)
    for page, text in stale.items():
        page.write_text(text, encoding="utf-8")
        print(page.relative_to(ROOT))
    from pipeline.plots import draw, draw_curve, save_figure

    save_figure(draw(collapse()), RESULTS / "collapse.png")
    save_figure(draw_curve(load("laptop")["iterations"], "TOPR, the default run"), RESULTS / "laptop.png")


if __name__ == "__main__":
    main()
