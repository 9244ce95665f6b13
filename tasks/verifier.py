"""Section 4.4 of the TOPR paper: train a generative verifier, and let its verdicts weigh the votes on an answer.

    python train_verifier.py                            # tiny problems, tiny models: four minutes on two cores
    python train_verifier.py --problems 64 --solutions 4 --verifications 8 --seed 1
    torchrun --nproc-per-node 8 train_verifier.py paper # MATH, on eight GPUs

A generator solves each problem several times; the verifier writes several verifications of each solution. The reward
is +1 where its verdict is the truth about the solution, -1 where it is not or cannot be read: so a verifier is trained
like a solver, its problems being solutions. Into `--out` come two runs in which the generator is sampled from,
solutions-train/ and solutions-test/, the verifier's own run, verifier/, and results.json and table2.png: Table 2.
"""

import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal, NamedTuple

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

import pipeline.stages
from pipeline.cli import one_line_errors, read_settings
from pipeline.evaluation import Estimate, collect, over_questions, wins
from pipeline.models.loading import load_meta
from pipeline.plots import Line, Panel, draw, save_figure
from pipeline.records import InputError, Outcome, Problem, Sample, Task, write_text
from pipeline.runtime.checksums import read_checked
from pipeline.runtime.processes import is_first_process, on_all_ranks, on_rank_zero, process_group
from pipeline.runtime.run_folder import RunFolder
from pipeline.settings import PAPER, TINY, Settings, check
from tasks.math import PRESETS as MATH_PRESETS
from tasks.math import math_task
from train_gsm8k import gsm8k_task

# ---- the task: solutions are its problems, the truth about them its gold answers ---------------------------------

QUESTION = "Verification: Is the answer correct (Yes/No)?"
INSTRUCTION = (  # in the manner of Zhang et al. 2024a, in words of our own
    "Check the solution below step by step, and say of each step whether it is right. End with a line of the form\n"
    f"{QUESTION} X\nwhere X is Yes or No.\n\n"
)


def parse_verdict(text: str) -> bool | None:
    """Whether the verdict is Yes: the word behind the last question; None if there is none, or another word.

    >>> [parse_verdict(f"2 + 2 = 4, right. {QUESTION} {word}") for word in ("Yes", "No", "Maybe")]
    [True, False, None]
    """
    _, found, rest = text.rpartition(QUESTION)
    word = re.match(r"[\s*]*(Yes|No)\b(?!\s*(?:/|or\b))", rest) if found else None
    return word[1] == "Yes" if word else None


def grade_verdict(text: str, truth: bool) -> Outcome:
    """invalid without a verdict, else correct if the verdict is the truth.

    >>> [grade_verdict(f"{QUESTION} {word}", truth=True) for word in ("Yes", "No", "")]
    ['correct', 'incorrect', 'invalid']
    """
    verdict = parse_verdict(text)
    if verdict is None:
        return "invalid"
    return "correct" if verdict == truth else "incorrect"


def to_problems(
    problems: Sequence[Problem], solutions: Sequence[Sample], task: Task, instruction: str
) -> list[Problem]:
    """Solutions as problems of their own, in their order: what is to be checked, and whether it is right."""
    questions = {problem.id: problem.question for problem in problems}
    return [
        Problem(
            id=f"{solution.problem_id}-{number}",
            question=f"{instruction}Q: {questions[solution.problem_id]}\nA:{task.visible(solution.completion)}\nCheck:",
            gold=solution.outcome == "correct",
        )
        for number, solution in enumerate(solutions)
    ]


# ---- settings ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VerifierSettings(Settings):
    """The verifier's run, and what it verifies; of what both sample, the law is the same."""

    model: str = str(TINY / "checker")
    """folder or hub name of the base verifier (ours; paper: Llama 3 8B)"""
    generator: str = str(TINY / "base")
    """folder or hub name of the model that writes solutions (ours; paper: Llama 3 70B)"""
    task: Literal["gsm8k", "math"] = "gsm8k"
    """whose problems, prompt and grading (ours; paper: MATH)"""
    problems: int = 256
    """training problems, the first ones (ours; paper: all)"""
    solutions: int = 4
    """solutions of each training problem (ours; paper, Section 4.4: 16)"""
    n: Annotated[int, tyro.conf.arg(name="verifications")] = 4
    """verifications of each training solution (paper, Section 4.4)"""
    test_solutions: int = 8
    """solutions of each test problem, which vote (ours; paper, Table 2: 32)"""
    test_samples: int = 4
    """verifications of each test solution, whose mean is its weight (paper, Section 4.4)"""
    max_new_tokens: int = 96
    """longest solution and verification, in tokens (ours; paper: 512)"""
    lr: float = 1e-4
    """the optimiser's constant learning rate (ours for a tiny model; paper: 5e-7)"""
    k: int = 1
    """the K of maj@K and pass@K of verdicts (ours; 1: none)"""
    curve_points: int = 1
    """evaluations along an epoch (paper: at its end)"""
    instruction: str | None = None
    """what the verifier is told before the question (ours; default: nothing to models of tiny/, which know the form)"""


PRESETS = MappingProxyType(
    {
        "laptop": VerifierSettings(),
        "paper": VerifierSettings(
            **vars(
                replace(
                    MATH_PRESETS["paper"],
                    iterations=1,
                    n=4,  # "16 solutions per problem, each with 4 verifications" (4.4)
                    examples=480_000,  # "a total of 480,000 data points" (4.4)
                    test_samples=4,
                    k=1,  # ours: a majority of verdicts is not asked for
                )
            ),
            generator=PAPER.model,  # ours: the paper's 70B model needs more than a GPU for each copy
            task="math",
            solutions=16,
            test_solutions=32,  # "Weighted SC is weighted self-consistency with 32 generations" (Table 2)
        ),
    }
)


RUNS = "runs/verifier-"


def check_verifier(settings: VerifierSettings) -> None:
    """InputError for what cannot be run, before anything is loaded or written."""
    least = {"solutions": 2, "test_solutions": 2, "test_problems": 2, "n": 1}
    for name, number in least.items():
        if getattr(settings, name) < number:
            option = "verifications" if name == "n" else name.replace("_", "-")
            raise InputError(f"--{option} {getattr(settings, name)}: must be at least {number}")
    if settings.dry_run:
        raise InputError("--dry-run: what there is to verify is not known before the generator has run")
    if settings.samples is not None or settings.reuse is not None:
        raise InputError("--samples and --reuse: a verifier is trained on verifications of its own")
    check(settings)


# ---- the run -----------------------------------------------------------------------------------------------------


def run(settings: VerifierSettings) -> dict:
    """Solve, verify and train: returns what results.json holds. InputError as `pipeline.stages.run` raises it."""
    check_verifier(settings)
    settings = replace(settings, out=settings.out or settings.default_out(PRESETS[settings.preset], RUNS))
    task = gsm8k_task(settings) if settings.task == "gsm8k" else math_task(settings)
    with process_group(alone=settings.compute != "float32"), ExitStack() as stack:
        folder = on_all_ranks(lambda: _prepare(settings))
        on_rank_zero(lambda: stack.enter_context(folder.held()))
        train = solve(settings, task, "train")
        test = solve(settings, task, "test")
        found = pipeline.stages.run(
            replace(settings, out=settings.out / "verifier"), verifier_task(settings, task, train, test)
        )
        return on_rank_zero(lambda: publish(settings, table2(settings, task, test, found)))


def _prepare(settings: VerifierSettings) -> RunFolder:
    for model in (settings.generator, settings.model):
        load_meta(model, settings.trust_remote_code)  # to miss what is not there before anything is written
    return RunFolder(settings.out, settings.record())


def solve(settings: VerifierSettings, task: Task, split: Literal["train", "test"]) -> list[Sample]:
    """The generator's graded solutions of a split, problem by problem; kept in a run that measures it."""
    count = settings.solutions if split == "train" else settings.test_solutions
    asked = replace(task, test=getattr(task, split))
    run = replace(settings, model=settings.generator, iterations=0, test_samples=count, k=1)
    run = replace(run, out=settings.out / f"solutions-{split}")
    pipeline.stages.run(run, asked)
    return read_checked(run.out / "iteration-1" / "test-0.jsonl", Sample)


def verifier_task(settings: VerifierSettings, task: Task, train: Sequence[Sample], test: Sequence[Sample]) -> Task:
    """Verification as a task like any other."""
    knows = Path(settings.model).resolve().is_relative_to(TINY)
    instruction = ("" if knows else INSTRUCTION) if settings.instruction is None else settings.instruction
    return Task(
        name="verification",
        train=to_problems(task.train, train, task, instruction),
        test=to_problems(task.test, test, task, instruction),
        prompt=lambda problem: problem.question,
        parse=parse_verdict,
        grade=grade_verdict,
        stop=("\nQ:",) if instruction else (),  # what is told what to do may go on to the next question
    )


# ---- Table 2 -----------------------------------------------------------------------------------------------------


class Verified(NamedTuple):
    """What a verifier made of the test solutions: a value for each of Q problems."""

    accuracy: np.ndarray  # the share of verifications whose verdict is the truth
    invalid: np.ndarray  # the share of them without a verdict
    is_won: np.ndarray  # whether weighted self-consistency is right


def verified(verifications: Sequence[Sample], solutions: Sequence[Sample], task: Task) -> Verified:
    """Put together the verifications of solutions, which come solution by solution, and these problem by problem.

    The score of a solution is the mean of its verdicts, Yes 1 and No 0; one that cannot be read counts 0 (ours; the
    paper says "aggregated"). The answer with the highest sum of scores is chosen.
    """
    answers = collect(solutions, task)
    problems, m = answers.correct.shape
    outcomes = np.array([sample.outcome for sample in verifications]).reshape(problems, -1)
    says_yes = np.array([parse_verdict(sample.completion) is True for sample in verifications])
    scores = says_yes.reshape(problems, m, -1).mean(2)
    is_won = np.array([wins(answers, problem, range(m), scores[problem]) for problem in range(problems)])
    return Verified((outcomes == "correct").mean(1), (outcomes == "invalid").mean(1), is_won)


def majority(solutions: Sequence[Sample], task: Task) -> np.ndarray:
    """Whether the most frequent of all answers to a problem is right, for each of Q problems: maj@m, no verifier."""
    answers = collect(solutions, task)
    problems, m = answers.correct.shape
    return np.array([wins(answers, problem, range(m), np.ones(m)) for problem in range(problems)])


COLUMNS = ACCURACY, INVALID, WEIGHTED = "verifier accuracy", "invalid rate", "weighted self-consistency"


def table2(settings: VerifierSettings, task: Task, solutions: Sequence[Sample], found: dict) -> dict:
    """The rows of Table 2, after each iteration too; means over problems, and standard errors over problems."""
    folder = settings.out / "verifier"
    files = [folder / "iteration-1" / "test-0.jsonl"]
    for number, iteration in enumerate(found["iterations"], start=1):
        files.append(folder / f"iteration-{number}" / f"test-{iteration['dataset']['steps']}.jsonl")
    base, *trained = [verified(read_checked(file, Sample), solutions, task) for file in files]
    none = majority(solutions, task)
    problems, m = len(none), settings.test_solutions
    plain, after = f"maj@{m}", trained[-1] if trained else base
    rows = {"no verifier": {WEIGHTED: over_questions(none)}, "base": to_row(base)}
    rows[settings.method] = to_row(after)
    differences = {
        f"{ACCURACY}, {settings.method} - base": over_questions(after.accuracy - base.accuracy),
        f"{WEIGHTED}, {settings.method} - {plain}": over_questions(1.0 * after.is_won - none),
        f"{WEIGHTED}, base - {plain}": over_questions(1.0 * base.is_won - none),
    }
    return {
        "table2": {name: _plain(row) for name, row in rows.items()},
        "paired differences": _plain(differences),
        "iterations": [_plain(to_row(measured)) for measured in (base, *trained)],
        "test": {"problems": problems, "solutions": m, "verifications": settings.test_samples},
        "trained on": [iteration["dataset"]["trained"] for iteration in found["iterations"]],
        "versions": found["versions"],
    }


def to_row(measured: Verified) -> dict[str, Estimate]:
    """A row of Table 2."""
    return dict(zip(COLUMNS, map(over_questions, measured), strict=True))


def _plain(row: dict[str, Estimate]) -> dict[str, dict[str, float]]:
    return {name: estimate._asdict() for name, estimate in row.items()}


def publish(settings: VerifierSettings, results: dict) -> dict:
    """Write results.json, and table2.png; what is in the former comes back."""
    save_figure(draw([to_panel(results["table2"])], legend="below"), settings.out / "table2.png")
    write_text(settings.out / "results.json", json.dumps(results, indent=2) + "\n")
    return results


def to_panel(rows: Mapping[str, Mapping[str, Mapping[str, float | None]]]) -> Panel:
    """Table 2 as points: name of a row -> column -> `mean` and `se`, which is None for a single seed.

    >>> to_panel({"base": {ACCURACY: {"mean": 0.25, "se": 0.01}}}).lines[0].y
    [25.0]
    """
    drawn = []
    for number, (name, row) in enumerate(rows.items()):
        x = [COLUMNS.index(column) + 0.15 * (number - 1) for column in row]  # side by side
        mean, se = zip(*((value["mean"], value["se"]) for value in row.values()), strict=True)
        half_width = None if None in se else [200 * e for e in se]
        drawn.append(Line(x, [100 * m for m in mean], name, ("p5", "p3", "topr")[number], "points", half_width))
    ticks = {"xticks": [0, 1, 2], "xticklabels": COLUMNS, "ylim": (-3, 103), "xlim": (-0.5, 2.5)}
    return Panel("Table 2", "", "%, ± 2 SE", drawn, ticks)


# ---- the command -------------------------------------------------------------------------------------------------


def print_table2(results: dict) -> None:
    """Table 2, and the differences that its claim is about, with +- 2 standard errors over problems, in percent."""

    def text(estimate: dict[str, float]) -> str:
        return f"{100 * estimate['mean']:.1f} ± {200 * estimate['se']:.1f}"

    table = Table("verifier", f"{ACCURACY} (%)", f"{INVALID} (%)", f"{WEIGHTED} (%)")
    for name, row in results["table2"].items():
        table.add_row(name, *(text(row[column]) if column in row else "-" for column in COLUMNS))
    Console().print(table)
    for name, estimate in results["paired differences"].items():
        print(f"{name}: {text(estimate)} points")


def main() -> None:
    """The command line: settings in, Table 2 out; one line and a non-zero exit status on bad input."""
    started = time.monotonic()
    with one_line_errors("train_verifier"):
        settings = read_settings(sys.argv[1:], PRESETS, __doc__, RUNS)
        results = run(settings)
        if is_first_process():
            print_table2(results)
            print(f"{settings.out}: {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
