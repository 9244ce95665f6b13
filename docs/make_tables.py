"""Write the tables of numbers in the Markdown pages, and two pictures, from the files in results/.

    python docs/make_tables.py            # write them
    python docs/make_tables.py --check    # exit status 1 if a page is out of date; nothing is written

A table stands between the lines `<!-- table:NAME ARGUMENT -->` and `<!-- end -->`; NAME is a function of this file.
"""

import argparse
import ast
import dataclasses
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
PAGES = [ROOT / "README.md", RESULTS / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(<!-- table:(\w+) ?([\w-]*) -->\n).*?(<!-- end -->)", re.DOTALL)


def load(name: str) -> dict[str, Any]:
    """A file of results/.

    >>> load("laptop")["before"]["questions"]
    150
    """
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    r"""A Markdown table.

    >>> print(table(["a", "b"], [["1", "|x|"]]))
    | a | b |
    |---|---|
    | 1 | \|x\| |
    """
    lines = [[cell.replace("|", "\\|") for cell in row] for row in (head, *rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines).replace("\n", f"\n|{'---|' * len(head)}\n", 1)


def interval(estimate: dict[str, Any], scale: float = 100, unit: str = " %", digits: int = 1) -> str:
    """An estimate times `scale`, with its 95% interval if it has one: by default a share in percent.

    One run gives its standard error, `se`, half of the interval's half-width; results over seeds have `half_width`.

    >>> interval({"mean": 0.5, "se": 0.01}), interval({"mean": 0.5, "half_width": 0.127})
    ('50.0 ± 2.0 %', '50.0 ± 12.7 %')
    """
    from pipeline.report import Estimate

    if "half_width" not in estimate:
        return Estimate.read(estimate).text(scale, digits, unit)
    return Estimate(estimate["mean"], estimate["half_width"]).text(scale, digits, unit)


# ---- the README -----------------------------------------------------------------------------------------------------


def laptop() -> str:
    """Before and after the default run, and after naive REINFORCE on the same samples."""
    ours, naive = load("laptop"), load("methods")["python train_gsm8k.py --method reinforce"]
    return _outcomes(
        {
            "before": ours["before"],
            "after TOPR": ours["iterations"][0]["after"],
            "after naive REINFORCE": naive["iterations"][0]["after"],
        }
    )


def iterations() -> str:
    """Before and after each iteration of the run with Anna Karenina sampling."""
    run = load("iterations")
    after = {f"after iteration {i}": entry["after"] for i, entry in enumerate(run["iterations"], start=1)}
    return _outcomes({"before": run["before"]} | after)


def _outcomes(entries: dict[str, dict]) -> str:
    rows = [["correct", *(interval({"mean": e["correct"], "se": e["pass@1"]["se"]}) for e in entries.values())]]
    rows += [[name, *(f"{100 * e[name]:.1f} %" for e in entries.values())] for name in ("incorrect", "invalid")]
    rows += [[name, *(interval(e[name]) for e in entries.values())] for name in ("maj@16", "pass@16")]
    return table(["", *entries], rows)


CLAIMS = [  # figure, what the paper claims, what was measured; the verdict is that of results/README.md
    (
        "fig1",
        "Naive REINFORCE rises and collapses, PPO stops improving, DPO fares better, TOPR is best",
        "TOPR {fig1[TOPR, lr 1e-4: correct at the end]}, PPO {fig1[PPO, lr 1e-4: correct at the end]}, "
        "naive REINFORCE {fig1[naive REINFORCE, lr 1e-4: correct at the end]}; but DPO collapses too, "
        "{fig1[DPO, lr 1e-4: correct at the end]}",
    ),
    (
        "fig2",
        "TOPR's objective equals PPO's inside PPO's clip range and keeps its gradient outside",
        "they differ by {fig2[R = -1: largest |TOPR - PPO| for 0.8 <= pi/mu <= 1]} inside; "
        "outside TOPR's slope is {fig2[R = -1: largest slope of TOPR where PPO clips]}, "
        "PPO's {fig2[R = -1: largest slope of PPO where PPO clips]}",
    ),
    (
        "fig3",
        "TOPR alone removes invalid completions",
        "{fig3[base: invalid]} before; TOPR leaves {fig3[TOPR, lr 1e-4: invalid at the end]}, "
        "but PPO also reduces them, to {fig3[PPO, lr 1e-4: invalid at the end]}",
    ),
    (
        "fig4",
        "TOPR beats training on positives alone: accuracy, maj@n, questions with few correct answers",
        "accuracy {fig4[TOPR - positives only]}, and {fig4[TOPR - positives, as many steps]} with as many steps; "
        "maj@n is not higher, and problems with at most 4 correct are "
        "{fig4[TOPR: problems with at most 4 correct]} with TOPR, "
        "{fig4[positives only: problems with at most 4 correct]} with positives only",
    ),
    (
        "fig5",
        "An effective share of positives of 10 to 20 % is best; sampling reaches a share better than a baseline",
        "the highest mean is at 80 % for both sets, at three learning rates; sampling - baseline is "
        "{fig5[p~ = 10% by sampling - by a baseline]}",
    ),
    (
        "fig6",
        "At a low effective share truncated importance sampling (TIS) collapses and TOPR recovers",
        "at 1 % TOPR ends at {fig6[TOPR, lr 1e-4, p~ = 1%]}, TIS at {fig6[TIS, lr 1e-4, p~ = 1%]}, TOPR being ahead in "
        "all seeds; from 20 % on they are alike",
    ),
    (
        "fig7",
        "With 60 % negatives and weak clipping plain importance sampling harms the model",
        "with SGD plain IS ends at {fig7[sgd, 60% negative, clipped at 100, plain IS: correct]}, TOPR at "
        "{fig7[sgd, 60% negative, clipped at 100, TOPR: correct]}; with AdamW TOPR - plain IS is "
        "{fig7[adamw, 60% negative, clipped at 100: TOPR - plain IS]}, with Adafactor "
        "{fig7[adafactor, 60% negative, clipped at 100: TOPR - plain IS]}",
    ),
    (
        "fig8",
        "Over several iterations Anna Karenina sampling beats uniform sampling",
        "after five iterations Anna Karenina - uniform is {fig8[Anna Karenina - uniform: pass@1 after iteration 5]}; "
        "positives only leads in pass@1 all along",
    ),
    (
        "fig9",
        "The lower the effective share, the more hard questions weigh, which should narrow the gap to easy ones",
        "the three hardest groups weigh {fig9[p~ = 80%: weight of the three hardest buckets]} at a share of 80 %, "
        "{fig9[p~ = 5%: weight of the three hardest buckets]} at 5 %; but after training the hardest third is right in "
        "{fig9[hardest third, p~ = 80%: correct]} at 80 %, {fig9[hardest third, p~ = 10%: correct]} at 10 %",
    ),
    (
        "table2",
        "TOPR trains a verifier, whose votes then beat a plain majority",
        "accuracy {table2[checker, base: verifier accuracy]}, then {table2[checker, topr: verifier accuracy]}; "
        "the vote gains {table2[checker, TOPR - no verifier: weighted self-consistency]}. "
        "From a base that checks badly the gain is {table2[base, TOPR - no verifier: weighted self-consistency]}",
    ),
]


def claims() -> str:
    """Every claim of the paper that was measured, and whether it was found."""
    text = (RESULTS / "README.md").read_text(encoding="utf-8")
    numbers = {}
    for name, *_ in CLAIMS:
        content = load(name)
        units = {what: " points" if " - " in what else " %" for what in content["shares"]}
        numbers[name] = {what: interval(content["shares"][what], unit=unit) for what, unit in units.items()}
        numbers[name] |= {what: interval(value, 1, "") for what, value in content["numbers"].items()}
    rows = []
    for name, claim, measured in CLAIMS:
        [(heading, verdict)] = re.findall(rf"^## ({name}\b.*?)$.*?^\*\*Verdict: (.*?)[.*]", text, re.M | re.DOTALL)
        called = name.replace("fig", "Figure ").replace("table", "Table ")
        rows.append([called, claim, measured.format(**numbers), f"[{verdict}](results/README.md#{anchor(heading)})"])
    stated = [row for rows in load("bandit/claims")["claims"].values() for row in rows]
    proved = "Propositions 3.1 and 3.2, Sections 2.4 to 3.2, Table 1, Appendices B and C"
    counted = f"{sum(row['holds'] for row in stated)} of {len(stated)} statements hold on a softmax bandit"
    rows.append(["Analysis", proved, counted, "[agrees](docs/analysis.md)"])
    rows.append(["Figures 4, 6, 8", "on MATH, with DeepSeek-R1 8B, with a 70B model", "needs GPUs", "not measured"])
    return table(["", "the paper's claim", "measured here", "verdict"], rows)


def anchor(heading: str) -> str:
    """What a link to a heading ends with.

    >>> anchor("fig1: accuracy over one epoch")
    'fig1-accuracy-over-one-epoch'
    """
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def collapse() -> list:
    """The panels of the README's picture: TOPR and naive REINFORCE along the epoch of the default run, seed 0."""
    from pipeline.plots import Line, Panel

    runs = load("methods")
    curves = {
        ("TOPR", "topr"): runs["python train_gsm8k.py"]["iterations"][0]["curve"],
        ("naive REINFORCE", "reinforce"): runs["python train_gsm8k.py --method reinforce"]["iterations"][0]["curve"],
    }
    panels = []
    for outcome, title in (("correct", "Correct completions"), ("invalid", "Completions without an answer")):
        lines = []
        for (label, style), curve in curves.items():
            x, y = ([point[name] for point in curve] for name in ("samples_seen", outcome))
            lines.append(Line([seen / 1000 for seen in x], [100 * share for share in y], label, style))
        panels.append(Panel(title, "samples trained on (thousands)", "% of completions", lines, {"ylim": (-3, 103)}))
    return panels


# ---- the other pages ------------------------------------------------------------------------------------------------


def figure(name: str) -> str:
    """How a figure was made, and the numbers of it that results/README.md discusses."""
    content = load(name)
    rows = [[what, interval(value)] for what, value in content["shares"].items()]
    for what, value in content["numbers"].items():
        rows.append([what, interval(value, 1, "", digits=1 if value["mean"] >= 1 else 3)])
    return f"{made(name)}\n\n{table(['measured', '95% interval over seeds'], rows)}"


def made(name: str) -> str:
    """How a figure was made: its command, and the runs that it needed, those that choose learning rates included.

    >>> made("fig2")
    '`python reproduce.py fig2 --preset laptop --seeds 3 --seed 0`: no runs.'
    """
    content = load(name)
    count, commits = content["runs"], ", ".join(f"`{commit}`" for commit in content["commits"])
    cost = f"{count} runs, {content['core_minutes']:.0f} core-minutes, commits {commits}" if count else "no runs"
    return f"`{content['command']}`: {cost}."


def over_iterations(name: str) -> str:
    """Figure 8 over its iterations, and the differences between Anna Karenina sampling and the others."""
    from paper.figures import COMPOSITIONS

    content, rows = load(name), []
    for key, of_key in content["data"].items():
        rows += [[f"{key}: {COMPOSITIONS[composition][0]}", *points(of_key[composition])] for composition in of_key]
        differences: dict[str, list[str]] = {}
        for what, value in content["shares"].items():
            between, _, where = what.partition(": ")
            if " - " in between and where.startswith(f"{key} "):
                differences.setdefault(between, [""]).append(interval(value, unit=""))
        rows += [[f"{key}: {between} (points)", *of_difference] for between, of_difference in differences.items()]
    return table(["", "before", *(f"iteration {i}" for i in range(1, len(rows[0]) - 1))], rows)


ERRORS = {  # what the map measures of a run -> its name
    "correct": "correct",
    "maj": "maj@16",
    "pass": "pass@16",
    "plan": "wrong plan",
    "sum": "wrong sum",
    "none": "no answer",
    "wrong sums": "sums that are wrong",
}


def places() -> str:
    """The places of the map: accuracy before and after training on positives alone, and gains on that."""
    from paper.map import PLACES

    data, rows = load("map")["data"], []
    for place, states in data["states"].items():
        start, end = (interval(states[stage]["correct"] | {"half_width": None}, unit="") for stage in ("before", "sft"))
        of_pair = data["gains"][place]
        told = [
            interval(of_pair[f"{arm} - sft"]["correct"], unit="") if f"{arm} - sft" in of_pair else ""
            for arm in ("topr", "topr-70", "tis")
        ]
        rows.append([PLACES[place].name, start, end, *told, str(len(states["sft"]["correct"]["each"]))])
    others = ("TOPR", "TOPR, p~ = 70%", "TIS")
    head = ["place", "right at the start (%)", "positives only (%)", *(f"{o} (points)" for o in others), "seeds"]
    return table(head, rows)


def gains(arm: str) -> str:
    """An arm of the map minus positives only, at each place, in what is measured of the test problems."""
    from paper.map import PLACES

    rows = [
        [PLACES[place].name, *(interval(of_pair[f"{arm} - sft"][name], unit="") for name in ERRORS)]
        for place, of_pair in load("map")["data"]["gains"].items()
    ]
    return table(["in points", *ERRORS.values()], rows)


def kinds(place: str) -> str:
    """The kinds of error at a place of the map, before training and after it with each arm, in percent."""
    from paper.map import ARMS

    rows = [
        [ARMS[stage].name if stage in ARMS else stage, *(f"{100 * state[name]['mean']:.1f}" for name in ERRORS)]
        for stage, state in load("map")["data"]["states"][place].items()
    ]
    return table(["in %", *ERRORS.values()], rows)


def methods() -> str:
    """The default run with each method."""
    rows = []
    for command, run in load("methods").items():
        after, curve = run["iterations"][0]["after"], run["iterations"][0]["curve"]
        along = " ".join(f"{100 * point['correct']:.0f}" for point in curve)
        correct = interval({"mean": after["correct"], "se": after["pass@1"]["se"]})
        options = command.removeprefix("python train_gsm8k.py").strip()
        rows.append([f"`{options}`" if options else "(none)", correct, f"{100 * after['invalid']:.1f} %", along])
    return table(["options", "correct at the end", "invalid", "correct along the epoch, in %"], rows)


def points(series: dict[str, list[float | None]]) -> list[str]:
    """The points of a line of a figure, shares in percent, with their 95% intervals.

    >>> points({"mean": [0.4, 0.5], "half_width": [0.1, None]})
    ['40.0 ± 10.0 %', '50.0 %']
    """
    return [
        f"{100 * mean:.1f} %" if half_width is None else f"{100 * mean:.1f} ± {100 * half_width:.1f} %"
        for mean, half_width in zip(series["mean"], series["half_width"], strict=True)
    ]


def last(series: dict[str, list[float | None]]) -> str:
    """The end of a line of a figure.

    >>> last({"mean": [0.4, 0.5], "half_width": [0.1, 0.02]})
    '50.0 ± 2.0 %'
    """
    return points(series)[-1]


def variants() -> str:
    """What other losses of that name reach, at the learning rate chosen for the paper's weight and at their own."""
    found = load("variants")
    one, own = (found["data"][rate] for rate in ("one rate", "own rate"))
    rows = []
    for name, curves in one.items():
        tried = found["learning_rates"]["TOPR" if name == "topr" else name]
        rate = max(tried, key=tried.get)
        rows.append([f"`{name}`", *map(last, (curves["correct"], curves["invalid"])), rate, last(own[name]["correct"])])
    return table(["weight", "correct at the end", "invalid at the end", "own learning rate", "correct with that"], rows)


def mistakes() -> str:
    """What the five ways to get it wrong cost; log mu that is recomputed at every step is naive REINFORCE."""
    variants, fig1 = (load(name)["data"] for name in ("variants", "fig1"))
    names = {
        "none: the paper's loss": (variants, "topr"),
        "1. per-token ratio": (variants, "per-token"),
        "2. geometric mean": (variants, "geometric mean"),
        "3. clipped from below, at 0.8": (variants, "clip 0.8..1.2"),
    }
    rows = [
        [what, *(last(of[rate][name]["correct"]) for rate in ("one rate", "own rate"))]
        for what, (of, name) in names.items()
    ]
    rows.append(["4. recomputed log mu", *(last(fig1[rate]["reinforce"]) for rate in ("one rate", "own rate"))])
    unknown = ["5. normalised advantages", "not measured", "not measured"]
    return table(["mistake", "correct at the end", "at its own learning rate"], [*rows, unknown])


def verifier(name: str) -> str:
    """Table 2 of one run, and the differences between its rows."""
    found = load(name)
    columns = list(found["table2"]["base"])
    rows = [
        [row, *(interval(cells[c]) if c in cells else "-" for c in columns)] for row, cells in found["table2"].items()
    ]
    differences = [[what, interval(value, unit=" points")] for what, value in found["paired differences"].items()]
    return f"{table(['verifier', *columns], rows)}\n\n{table(['difference on the same solutions', ''], differences)}"


def bandit() -> str:
    """The statements that `python toy_bandit.py` checks, with what was measured."""
    content = load("bandit/claims")["claims"]
    rows = [
        [f"`{name}`", row["source"], row["text"], row["measured"], "yes" if row["holds"] else "no"]
        for name, rows in content.items()
        for row in rows
    ]
    return table(["claim", "source", "statement", "measured", "holds"], rows)


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


def speed() -> str:
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
    return table(["", "unit", "topr", "other", "ratio (lowest to highest)", "goal"], rows)


def stages() -> str:
    """The time of each stage on eight H100s, for docs/gpu.md's first command and for the preset `paper`."""
    from pipeline.dry_run import COMPLETION, LINKS, MATRICES, MEMORY
    from pipeline.runtime.preflight import WRITING
    from pipeline.vllm.client import GPU_MEMORY
    from train_gsm8k import PAPER

    record = load("benchmarks/fake_8b_step")
    step, short, long = record["sides"]["now"], record["first run"], record["sides"]["now"]["hours"]
    compute, peak = f"{MATRICES / 1e12:.0f} TFLOP/s", f"{step['peak'] / 1e9:.1f} GB"
    told = {  # what a GPU holds, what is counted, and what is assumed of an H100
        "starting": ("", "an engine for each model, the trainer for each iteration", "3 minutes for both"),
        "sampling": (
            f"{GPU_MEMORY:.0%} of its memory",
            f"{COMPLETION:.0%} of {PAPER.max_new_tokens} tokens for each sample",
            f"{MEMORY / 1e12:.2f} TB/s read",
        ),
        "scoring": (f"less than {peak}", f"{step['forward_flops'] / 1e12:.0f} TFLOP a step on each GPU", compute),
        "training": (
            peak,
            f"{step['flops'] / 1e12:.0f} TFLOP a step on each GPU, {sum(step['sent'].values()) / 1e9:.0f} GB sent",
            f"{compute}, then {LINKS / 1e9:.0f} GB/s",
        ),
        "saving": (
            "",
            f"32 GB of weights after every {PAPER.save_every:,} steps and at the end",
            f"{WRITING / 1e9} GB/s",
        ),
    }
    rows = [[name, f"{60 * short[name]:.1f}", f"{long[name]:.1f}", *texts] for name, texts in told.items()]
    sums = f"{60 * sum(short[name] for name in told):.0f}", f"{sum(long[name] for name in told):.1f}"
    head = ["stage", "first run (minutes)", "`paper` (hours)", "on a GPU", "counted", "assumed"]
    return table(head, [*rows, ["all", *sums, "", "", ""]])


def cards() -> str:
    """What a step of the paper's batch needs of each GPU, and the fastest way to compute it that fits a card."""
    ways, cards = ("fastest", "no checkpointing", "checkpointing"), (24, 48, 80)
    needed: dict[tuple[str, int], list[float]] = {}
    for step in load("benchmarks/fake_8b_step")["cards"]:
        needed.setdefault((step["setup"]["model"], step["setup"]["processes"]), []).append(step["needed"] / 1e9)
    rows = []
    for (model, gpus), sizes in needed.items():
        fits = [next((way for way, size in zip(ways, sizes, strict=True) if size <= card), "no") for card in cards]
        rows.append([model, str(gpus), *(f"{size:.0f}" for size in sizes), *fits])
    return table(["model", "GPUs", *(f"{way} (GB)" for way in ways), *(f"card of {card} GB" for card in cards)], rows)


def memory() -> str:
    """What a training step of Llama 3 8B takes of each GPU, by kind, where its passes take the most."""
    steps = load("benchmarks/fake_8b_step")["steps"]
    kinds = list(next(iter(steps.values()))["passes"])
    rows = []
    for name, step in steps.items():
        sizes = [*(step["passes"][kind] for kind in kinds), step["peak"]]
        calls, work = sum(step["collectives"].values()), step["flops"] / 1e12
        rows.append([name, *(f"{size / 1e9:.1f}" for size in sizes), str(calls), f"{work:.0f}"])
    return table(["a step", *kinds, "peak", "collectives", "TFLOP"], rows)


def sides() -> str:
    """A step of 8 samples on eight GPUs as this code did and does it, and with other trainers' settings."""
    rows = []
    for name, side in load("benchmarks/fake_8b_step")["sides"].items():
        calls = [str(sum(side[which].values())) for which in ("collectives", "of_update")]
        sent = f"{sum(side['sent'].values()) / 1e9:.0f}"
        work = f"{side['flops'] / 1e12:.1f}", f"{side['host_seconds']:.3f}", f"{side['peak'] / 1e9:.1f}"
        stages = {stage: value for stage, value in side["hours"].items() if stage != "a step"}
        hours = f"{3600 * side['hours']['a step']:.2f}", f"{sum(stages.values()):.1f}"
        rows.append([name, *calls, sent, *work, *hours])
    head = [
        "",
        "collectives",
        "of the optimiser",
        "GB of weights and gradients",
        "TFLOP",
        "s of clipping and optimiser on the host",
    ]
    return table([*head, "GB at the peak", "s a step, estimated", "h in all, estimated"], rows)


def metrics() -> str:
    """The metrics of a test set, by their names in results.json."""
    from pipeline.evaluation import METRICS

    return table(["metric", "what it is"], [[f"`{name}`", metric.meaning] for name, metric in METRICS.items()])


def settings(first: str) -> str:
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
    return table(["option", "laptop", "paper", "meaning"], rows)


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

TABLES: dict[str, Callable[..., str]] = {
    f.__name__: f
    for f in (
        laptop,
        iterations,
        claims,
        figure,
        made,
        over_iterations,
        places,
        gains,
        kinds,
        methods,
        variants,
        mistakes,
        verifier,
        bandit,
        speed,
        stages,
        cards,
        memory,
        sides,
        metrics,
        settings,
    )
}


def renewed(text: str) -> str:
    """The text of a page with its tables made anew.

    >>> renewed("no table").removeprefix("no")
    ' table'
    """

    def new(match: re.Match[str]) -> str:
        marker, name, argument, end = match.groups()
        return f"{marker}\n{TABLES[name](*argument.split())}\n\n{end}"

    return BLOCK.sub(new, text)


def main() -> None:
    """The command line: write the pages and two pictures, or say which page is out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a page is out of date")
    is_check = parser.parse_args().check
    sys.path.insert(0, str(ROOT))
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
