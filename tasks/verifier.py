"""Train a generative verifier, and weigh the votes on an answer by its verdicts (Section 4.4 of the TOPR paper).

    python -m tasks.verifier                             # tiny problems, tiny models: four minutes on two cores
    python -m tasks.verifier --problems 64 --train-solutions 4 --verifications 8 --seed 1
    torchrun --nproc-per-node 8 -m tasks.verifier paper  # MATH, on eight GPUs

A generator solves each problem several times, and the verifier writes several verifications of each solution. The
reward is +1 where the verdict on the solution is true, and -1 where it is false or cannot be read. A verifier is thus
trained like a solver whose problems are solutions, by the experiment of train_gsm8k.py.

`--out` then holds two runs of the generator, solutions-train/ and solutions-test/, one of the verifier, verifier/, and
Table 2: results.json, table2.png.
"""

import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from pipeline.evaluation import Answers, collect, wins
from pipeline.plots import Panel, draw, estimates, save_figure
from pipeline.records import OUTCOMES, InputError, Outcome, Problem, Sample, Task, write_file
from pipeline.report import Estimate, Table
from pipeline.runtime.preflight import check_machine
from pipeline.runtime.processes import (
    by_rank_zero,
    command,
    on_all_ranks,
    process_group,
    rank,
    ranks,
)
from pipeline.runtime.run_folder import held_folder, read_checked
from pipeline.settings import (
    TINY,
    Count,
    Settings,
    Several,
    check,
    check_engine_gpus,
    read_settings,
)
from tasks.math import SETTINGS as MATH_SETTINGS
from tasks.math import math_task
from train_gsm8k import experiment, gsm8k_task

QUESTION = "Verification: Is the answer correct (Yes/No)?"
INSTRUCTION = (  # in the manner of Zhang et al. 2024a, in words of our own
    "Check the solution below step by step, and say of each step whether it is right. End with a line of the form\n"
    f"{QUESTION} X\nwhere X is Yes or No.\n\n"
)


def parse_verdict(text: str) -> bool | None:
    """Whether the verdict is Yes: the word after the last question. None without a question, or for another word.

    >>> [parse_verdict(f"2 + 2 = 4, right. {QUESTION} {word}") for word in ("Yes", "No", "Maybe")]
    [True, False, None]
    """
    _, marker, rest = text.rpartition(QUESTION)
    word = re.match(r"[\s*]*(Yes|No)\b(?!\s*(?:/|or\b))", rest) if marker else None
    return word[1] == "Yes" if word else None


def grade_verdict(text: str, truth: bool) -> Outcome:
    """invalid without a verdict, else correct if the verdict is true.

    >>> [grade_verdict(f"{QUESTION} {word}", truth=True) for word in ("Yes", "No", "")]
    ['correct', 'incorrect', 'invalid']
    """
    return {None: "invalid", truth: "correct"}.get(parse_verdict(text), "incorrect")


def verifier_task(
    settings: "VerifierSettings", task: Task, train: Sequence[Sample], test: Sequence[Sample]
) -> Task:
    """Verification as a task. A problem's question is a solution to check, its gold answer whether that is correct."""
    instruction = settings.instruction
    if instruction is None:
        instruction = "" if Path(settings.model).resolve().is_relative_to(TINY) else INSTRUCTION

    def to_problems(problems: Sequence[Problem], solutions: Sequence[Sample]) -> list[Problem]:
        asked = {problem.id: f"{instruction}Q: {problem.question}\nA:" for problem in problems}
        texts = [
            f"{asked[one.problem_id]}{task.visible(one.completion)}\nCheck:" for one in solutions
        ]
        numbered = enumerate(zip(solutions, texts, strict=True))
        return [
            Problem(f"{one.problem_id}-{i}", text, gold=one.outcome == "correct")
            for i, (one, text) in numbered
        ]

    return Task(
        name="verification",
        train=to_problems(task.train, train),
        test=to_problems(task.test, test),
        parse=parse_verdict,
        grade=grade_verdict,
        outcomes=OUTCOMES,
        stop=("\nQ:",)
        if instruction
        else (),  # a model that was given an instruction may write another question
    )


@dataclass(frozen=True)
class VerifierSettings(Settings):
    """Settings of the verifier's run and of the generator's. Both sample with the same parameters."""

    model: str = str(
        TINY / "checker"
    )  # folder or hub name of the base verifier (ours; paper: Llama 3 8B)
    generator: str = str(TINY / "base")
    """folder or hub name of the model that writes solutions (ours; paper: Llama 3 70B)"""
    task: Literal["gsm8k", "math"] = (
        "gsm8k"  # whose problems, prompt and grading (ours; paper: MATH)
    )
    problems: Count = 256  # training problems, the first ones (ours; paper: all)
    generator_gpus: Count = 1
    """GPUs that an engine of the generator spans, in place of --engine-gpus (ours; a 70B model in bfloat16 needs 4)"""
    train_solutions: Several = (
        4  # solutions of each training problem (ours; paper, Section 4.4: 16)
    )
    n: Annotated[Count, tyro.conf.arg(name="verifications")] = 4
    """verifications of each training solution (paper, Section 4.4)"""
    test_problems: Several = 150  # test problems, the first ones (ours; paper: all of MATH-500)
    test_solutions: Several = (
        8  # solutions of each test problem, which vote (ours; paper, Table 2: 32)
    )
    test_samples: Several = (
        4  # verifications of each test solution, whose mean is its weight (paper, Section 4.4)
    )
    instruction: str | None = None
    """instruction before the question (ours; default: none for models of tiny/, which were trained on the form)"""


SETTINGS = {
    "laptop": VerifierSettings(
        max_new_tokens=96, lr=1e-4, k=1, curve_points=1
    ),  # ours; k = 1: no majority of verdicts
    "paper": replace(
        VerifierSettings(**vars(MATH_SETTINGS["paper"])),
        generator="meta-llama/Meta-Llama-3-70B-Instruct",  # "we used the 70B model to generate 16 solutions" (4.4)
        generator_gpus=4,  # ours: its weights take 141 GB in bfloat16
        task="math",
        iterations=1,
        train_solutions=16,
        n=4,  # "16 solutions per problem, each with 4 verifications" (4.4)
        examples=480_000,  # "a total of 480,000 data points" (4.4)
        test_solutions=32,  # "Weighted SC is weighted self-consistency with 32 generations" (Table 2)
        test_samples=4,
        k=1,
    ),
}


def check_verifier(settings: VerifierSettings, processes: int | None = None) -> None:
    """InputError where `pipeline.settings.check` raises it, and for settings that do not suit a verifier."""
    if settings.n < 1:
        raise InputError(f"--verifications {settings.n}: must be at least 1")
    if settings.dry_run:
        raise InputError(
            "--dry-run: what there is to verify is not known before the generator has run"
        )
    if settings.samples is not None or settings.reuse is not None:
        raise InputError("--samples and --reuse: a verifier is trained on verifications of its own")
    check(settings, processes)
    check_engine_gpus(
        "--generator-gpus", settings.engine, settings.generator_gpus, processes or ranks()
    )


def run(settings: VerifierSettings) -> dict:
    """Solve, verify and train; returns what results.json holds. InputError as `train_gsm8k.experiment` raises it."""
    from pipeline.models.language_model import META, load_model

    check_verifier(settings)
    check_machine(settings)
    task = gsm8k_task(settings) if settings.task == "gsm8k" else math_task(settings)
    if len(task.test) < 2:
        raise InputError(f"{len(task.test)} test problem: has no interval; take at least 2")
    with ExitStack() as stack:
        if ranks() > 1 or settings.compute != "float32":
            stack.enter_context(process_group(alone=True))  # one for all three runs
        models = settings.generator, settings.model
        on_all_ranks(
            lambda: [load_model(model, META, settings) for model in models]
        )  # before anything is written
        stack.enter_context(held_folder(settings.out, settings.record()))
        train, test = (solve(settings, task, split) for split in ("train", "test"))
        training = replace(settings, out=settings.out / "verifier")
        run_results = experiment(training, verifier_task(settings, task, train, test))
        return publish_table2(settings, task, test, run_results)


def solve(settings: VerifierSettings, task: Task, split: str) -> list[Sample]:
    """The generator's graded solutions of a split, problem by problem: a run that evaluates it on that split."""
    count = settings.train_solutions if split == "train" else settings.test_solutions
    run = replace(settings, model=settings.generator, iterations=0, test_samples=count, k=1)
    run = replace(run, out=settings.out / f"solutions-{split}", engine_gpus=settings.generator_gpus)
    experiment(run, replace(task, test=getattr(task, split)))
    return read_checked(run.out / "iteration-1" / "test-0.jsonl", Sample)


COLUMNS = ACCURACY, INVALID, WEIGHTED = (
    "verifier accuracy",
    "invalid rate",
    "weighted self-consistency",
)
CONSTANT = "the same verdict on all"  # a row of ours: the accuracy of Yes or of No, whichever is right more often


def verified(verifications: Sequence[Sample], answers: Answers) -> dict[str, np.ndarray]:
    """A verifier's results on the test solutions, by COLUMNS: one value for each of Q problems, (Q,).

    verifications: in the order of the solutions, whose answers these are, Q problems with m each. A solution's score is
    the mean of its verdicts: 1 for Yes, 0 for No and for one that cannot be read (ours; the paper says "aggregated").
    Between answers with equal sums of scores the number of solutions decides (ours).
    """
    problems, m = answers.correct.shape
    outcomes = np.array([sample.outcome for sample in verifications]).reshape(problems, -1)
    says_yes = np.array([parse_verdict(sample.completion) is True for sample in verifications])
    scores = says_yes.reshape(problems, m, -1).mean(2)
    scores += (
        1 / (m + 1) / outcomes.shape[1]
    )  # m of these are less than a verdict: votes only break ties
    won = np.array(
        [wins(answers, problem, range(m), scores[problem]) for problem in range(problems)],
        dtype=float,
    )
    return {
        ACCURACY: (outcomes == "correct").mean(1),
        INVALID: (outcomes == "invalid").mean(1),
        WEIGHTED: won,
    }


@by_rank_zero
def publish_table2(
    settings: VerifierSettings, task: Task, solutions: Sequence[Sample], run_results: dict
) -> dict:
    """Write Table 2, and its values after each iteration: results.json, which is returned, and table2.png.

    solutions: of the test problems; run_results: of the verifier's run. Means and standard errors are over problems.
    """
    folder, method = settings.out / "verifier", settings.method
    steps = [iteration["dataset"]["steps"] for iteration in run_results["iterations"]]
    files = [
        "iteration-1/test-0.jsonl",
        *(f"iteration-{i}/test-{last}.jsonl" for i, last in enumerate(steps, start=1)),
    ]
    answers = collect(solutions, task)
    each = [verified(read_checked(folder / file, Sample), answers) for file in files]
    base, after = each[0], each[-1]
    problems, m = answers.correct.shape
    plain = np.array([wins(answers, problem, range(m)) for problem in range(problems)], dtype=float)
    right = answers.correct.mean(1)
    constant = max(right, 1 - right, key=np.mean)
    rows = {
        "no verifier": {WEIGHTED: plain},
        CONSTANT: {ACCURACY: constant},
        "base": base,
        method: after,
    }
    differences = {
        f"{ACCURACY}, {method} - base": after[ACCURACY] - base[ACCURACY],
        f"{WEIGHTED}, {method} - maj@{m}": after[WEIGHTED] - plain,
        f"{WEIGHTED}, base - maj@{m}": base[WEIGHTED] - plain,
    }

    def records(row: Mapping[str, np.ndarray]) -> dict:
        return {name: Estimate.over_samples(values).record() for name, values in row.items()}

    results = {
        "table2": {name: records(row) for name, row in rows.items()},
        "paired differences": records(differences),
        "iterations": [records(row) for row in each],
        "test": {"problems": problems, "solutions": m, "verifications": settings.test_samples},
        "trained on": [iteration["dataset"]["trained"] for iteration in run_results["iterations"]],
        "versions": run_results["versions"],
    }
    save_figure(draw([to_panel(results["table2"])]), settings.out / "table2.png")
    write_file(settings.out / "results.json", json.dumps(results, indent=2) + "\n")
    return results


def to_panel(rows: Mapping[str, Mapping[str, Any]]) -> Panel:
    """Table 2 as points: name of a row -> column -> entry of results.json; without an interval for a single seed.

    >>> to_panel({"base": {ACCURACY: {"mean": 0.25, "se": 0.01}}}).lines[0].half_width
    [2.0]
    """
    drawn = []
    for number, (name, row) in enumerate(rows.items()):
        points = {
            COLUMNS.index(column) + 0.15 * (number - 1.5): entry for column, entry in row.items()
        }  # side by side
        line = estimates(points, name, ("p5", "p1", "p3", "topr")[number], scale=100)
        is_single = any(entry["se"] is None for entry in row.values())
        drawn.append(
            line._replace(kind="points", half_width=None if is_single else line.half_width)
        )
    names = [column.replace(" ", "\n") for column in COLUMNS]
    ticks = {"xticks": [0, 1, 2], "xticklabels": names, "ylim": (-3, 103), "xlim": (-0.5, 2.5)}
    return Panel("Table 2", "", "%, 95% interval", drawn, ticks)


def tables(results: dict) -> list[Table]:
    """Table 2 of results.json and its paired differences, with +- 2 standard errors."""

    def text(entry: Mapping[str, Any], unit: str) -> str:
        return Estimate.read(entry).text(100, unit=unit)

    shown = results["table2"].items()
    rows = [
        [name, *(text(row[c], " %") if c in row else "-" for c in COLUMNS)] for name, row in shown
    ]
    pairs = [
        [what, text(entry, " points")] for what, entry in results["paired differences"].items()
    ]
    return [
        Table(["verifier", *COLUMNS], rows),
        Table(["difference on the same solutions", ""], pairs),
    ]


def main() -> None:
    """The command line: settings in, Table 2 and its paired differences out."""
    started = time.monotonic()
    with command("tasks.verifier"):
        settings = read_settings(sys.argv[1:], SETTINGS, __doc__, "runs/verifier-")
        results = run(settings)
        if rank() == 0:
            for table in tables(results):
                table.print()
            print(f"{settings.out}: {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
