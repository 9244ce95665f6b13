"""Train a generative verifier, and weigh the votes on an answer by its verdicts (Section 4.4).

    python -m tasks.verifier                             # tiny problems and models: four minutes
    python -m tasks.verifier --problems 64 --train-solutions 4 --verifications 8 --seed 1
    torchrun --nproc-per-node 8 -m tasks.verifier paper  # MATH, on eight GPUs

A generator solves each problem several times, and the verifier writes several verifications of each
solution. The reward is +1 if the verdict on the solution is true, and -1 if it is false or cannot
be read. So a verifier is trained like a solver whose problems are solutions, by the experiment of
train_gsm8k.py.

`--out` then holds two runs of the generator, solutions-train/ and solutions-test/, one of the
verifier, verifier/, and Table 2: results.json, table2.png.
"""

import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from tasks.math import SETTINGS as MATH_SETTINGS
from tasks.math import math_task
from toprlib.command import command
from toprlib.distributed import process_group, rank, rank_zero_only, ranks
from toprlib.evaluation import Answers, majority_is_correct, to_answers
from toprlib.files import locked_run_folder, read_records, write_file
from toprlib.language_model import load_without_weights
from toprlib.plotting import Panel, draw, estimates, save_figure
from toprlib.preflight import check_gpu
from toprlib.records import OUTCOMES, InputError, Outcome, Problem, Sample, Task
from toprlib.report import Estimate, Table
from toprlib.settings import (
    TINY,
    AtLeastTwo,
    Count,
    Settings,
    check,
    check_engine_gpus,
    read_settings,
)
from train_gsm8k import experiment, gsm8k_task

QUESTION = "Verification: Is the answer correct (Yes/No)?"
INSTRUCTION = (  # in the manner of Zhang et al. 2024a, in words of our own
    "Check the solution below step by step, and say of each step whether it is right. "
    f"End with a line of the form\n{QUESTION} X\nwhere X is Yes or No.\n\n"
)


# ---- the task: a problem is a solution to check --------------------------------------------------
def parse_verdict(text: str) -> bool | None:
    """Whether the verdict is Yes: the word after the last question; None for any other text.

    >>> verdicts = [f"2 + 2 = 4, right. {QUESTION} {word}" for word in ("Yes", "No", "Maybe")]
    >>> [parse_verdict(verdict) for verdict in verdicts]
    [True, False, None]
    """
    _, marker, rest = text.rpartition(QUESTION)
    word = re.match(r"[\s*]*(Yes|No)\b(?!\s*(?:/|or\b))", rest) if marker else None
    return word[1] == "Yes" if word else None


def grade_verdict(text: str, is_correct: bool) -> Outcome:
    """invalid without a verdict, else correct if the verdict says whether the solution is_correct.

    >>> [grade_verdict(f"{QUESTION} {word}", is_correct=True) for word in ("Yes", "No", "")]
    ['correct', 'incorrect', 'invalid']
    """
    verdict = parse_verdict(text)
    if verdict is None:
        return "invalid"
    return "correct" if verdict == is_correct else "incorrect"


def verifier_task(
    settings: "VerifierSettings", task: Task, train: Sequence[Sample], test: Sequence[Sample]
) -> Task:
    """Verification as a task. train, test: the generator's solutions of the problems of `task`."""
    instruction = settings.instruction
    if instruction is None:
        # The tiny models were trained on the form of the prompt and know no instructions.
        is_tiny = Path(settings.model).resolve().is_relative_to(TINY)
        instruction = "" if is_tiny else INSTRUCTION
    return Task(
        name="verification",
        train=to_problems(task, task.train, train, instruction),
        test=to_problems(task, task.test, test, instruction),
        parse=parse_verdict,
        grade=grade_verdict,
        outcomes=OUTCOMES,
        # After an instruction, a model may continue with another question.
        stop=("\nQ:",) if instruction else (),
    )


def to_problems(
    task: Task, problems: Sequence[Problem], solutions: Sequence[Sample], instruction: str
) -> list[Problem]:
    """The solutions as problems, whose gold answer is whether the solution is correct."""
    question_of = {problem.id: problem.question for problem in problems}
    verifications = []
    for index, solution in enumerate(solutions):
        question = question_of[solution.problem_id]
        answer = task.graded_text(solution.completion)
        text = f"{instruction}Q: {question}\nA:{answer}\nCheck:"
        is_correct = solution.outcome == "correct"
        verifications.append(Problem(f"{solution.problem_id}-{index}", text, gold=is_correct))
    return verifications


# ---- settings ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class VerifierSettings(Settings):
    """Settings of the verifier's run and of the generator's, which sample alike."""

    model: str = str(TINY / "checker")
    """folder or hub name of the base verifier (ours; paper: Llama 3 8B)"""
    generator: str = str(TINY / "base")
    """folder or hub name of the model that writes solutions (ours; paper: Llama 3 70B)"""
    task: Literal["gsm8k", "math"] = "gsm8k"
    """task with the problems, prompt and grading (ours; paper: MATH)"""
    problems: Count = 256
    """number of training problems, from the first on (ours; paper: all)"""
    generator_gpus: Count = 1
    """GPUs that an engine of the generator spans (ours; a 70B model in bfloat16 needs 4)"""
    train_solutions: AtLeastTwo = 4
    """solutions of each training problem (ours; paper, Section 4.4: 16)"""
    n: Annotated[Count, tyro.conf.arg(name="verifications")] = 4
    """verifications of each training solution (paper, Section 4.4)"""
    test_problems: AtLeastTwo = 150
    """number of test problems, from the first on (ours; paper: all of MATH-500)"""
    test_solutions: AtLeastTwo = 8
    """solutions of each test problem, which vote (ours; paper, Table 2: 32)"""
    eval_samples: Annotated[AtLeastTwo, tyro.conf.arg(name="test-verifications")] = 4
    """verifications of each test solution, whose mean is its weight (paper, Section 4.4)"""
    instruction: str | None = None
    """text before the question (ours; default: none for models of tiny/)"""


SETTINGS = {
    # ours; k = 1: verdicts have no majority
    "laptop": VerifierSettings(max_new_tokens=96, lr=1e-4, k=1, evals_per_epoch=1),
    "paper": replace(
        VerifierSettings(**vars(MATH_SETTINGS["paper"])),
        generator="meta-llama/Meta-Llama-3-70B-Instruct",  # "we used the 70B model" (4.4)
        generator_gpus=4,  # ours: its weights take 141 GB in bfloat16
        task="math",
        iterations=1,
        train_solutions=16,
        n=4,  # "16 solutions per problem, each with 4 verifications" (4.4)
        examples=480_000,  # "a total of 480,000 data points" (4.4)
        test_solutions=32,  # "weighted self-consistency with 32 generations" (Table 2)
        eval_samples=4,
        k=1,
    ),
}


def check_verifier(settings: VerifierSettings, processes: int | None = None) -> None:
    """Raises InputError for settings that `check` refuses, or that do not suit a verifier."""
    # `check` would call these options by the names of their fields.
    for option, value, least in (
        ("--verifications", settings.n, 1),
        ("--test-verifications", settings.eval_samples, 2),
    ):
        if value < least:
            raise InputError(f"{value}: must be at least {least}", option=option)
    if settings.k > settings.eval_samples:
        message = f"{settings.k}: must be at most --test-verifications {settings.eval_samples}"
        raise InputError(message, option="--k")
    if settings.dry_run:
        message = "leave it out: the verifier's problems come from the generator's run"
        raise InputError(message, option="--dry-run")
    if settings.samples is not None:
        message = "leave it out: a verifier is trained on its own verifications"
        raise InputError(message, option="--samples")
    check(settings, processes)
    gpus = settings.generator_gpus
    if gpus > 1:
        check_engine_gpus("--generator-gpus", settings.engine_name, gpus, processes or ranks())


# ---- the three runs ------------------------------------------------------------------------------
def run(settings: VerifierSettings) -> dict:
    """Solve, verify and train; returns the content of results.json. Raises InputError."""
    check_verifier(settings)
    check_gpu(settings)
    task = gsm8k_task(settings) if settings.task == "gsm8k" else math_task(settings)
    if len(task.test) < 2:
        message = f"{len(task.test)}: an interval needs at least 2"
        raise InputError(message, option="--test-problems")
    # A model that cannot be used fails here, before anything is written.
    load_without_weights(settings.model, settings.chat, settings.system_prompt)
    try:
        load_without_weights(settings.generator, settings.chat, settings.system_prompt)
    except InputError as error:
        option = "--generator" if error.option == "--model" else error.option
        raise InputError(error.message, option=option, file=error.file) from error
    with (
        process_group(settings.dtype != "float32"),
        locked_run_folder(settings.out, settings.to_config()),
    ):
        train_solutions = solve(settings, task, "train")
        test_solutions = solve(settings, task, "test")
        training = replace(settings, out=settings.out / "verifier")
        verification = verifier_task(settings, task, train_solutions, test_solutions)
        results = experiment(training, verification)
        return write_table2(settings, task, test_solutions, results)


def solve(settings: VerifierSettings, task: Task, split: str) -> list[Sample]:
    """The generator's graded solutions of a split: a run that evaluates it on that split."""
    is_train = split == "train"
    generation = replace(
        settings,
        model=settings.generator,
        iterations=0,
        eval_samples=settings.train_solutions if is_train else settings.test_solutions,
        k=1,
        out=settings.out / f"solutions-{split}",
        engine_gpus=settings.generator_gpus,
    )
    experiment(generation, replace(task, test=task.train if is_train else task.test))
    return read_records(generation.iteration_folder(1) / "test-0.jsonl", Sample)


# ---- Table 2 -------------------------------------------------------------------------------------
ACCURACY = "verifier accuracy"
INVALID = "invalid rate"
WEIGHTED = "weighted self-consistency"
COLUMNS = (ACCURACY, INVALID, WEIGHTED)
CONSTANT = "the same verdict on all"  # ours: the accuracy of always Yes, or of always No


def verify(verifications: Sequence[Sample], answers: Answers) -> dict[str, np.ndarray]:
    """A verifier's results on the test solutions, by COLUMNS: one value for each of Q problems.

    verifications: in the order of the solutions. answers: of the solutions, m for each problem. A
    solution's score is the mean of its verdicts: 1 for Yes, 0 for No and for one that cannot be
    read (ours; the paper says "aggregated"). If sums of scores are equal, the number of solutions
    decides (ours).
    """
    problems, m = answers.correct.shape
    outcomes = [sample.outcome for sample in verifications]
    outcomes = np.array(outcomes).reshape(problems, -1)
    is_yes = [parse_verdict(sample.completion) is True for sample in verifications]
    scores = np.array(is_yes).reshape(problems, m, -1).mean(2)  # (Q, m)
    scores += 1 / (m + 1) / outcomes.shape[1]  # m of these are less than a verdict
    wins = []
    for problem in range(problems):
        wins.append(majority_is_correct(answers, problem, range(m), scores[problem]))
    return {
        ACCURACY: (outcomes == "correct").mean(1),
        INVALID: (outcomes == "invalid").mean(1),
        WEIGHTED: np.array(wins, dtype=float),
    }


@rank_zero_only
def write_table2(
    settings: VerifierSettings, task: Task, solutions: Sequence[Sample], verifier_results: dict
) -> dict:
    """Write results.json, which is returned, and table2.png: Table 2, after each iteration.

    solutions: of the test problems; verifier_results: of the verifier's run. Means and standard
    errors are over problems.
    """
    folder = settings.out / "verifier"
    iterations = verifier_results["iterations"]
    files = [folder / "iteration-1" / "test-0.jsonl"]
    for number, iteration in enumerate(iterations, start=1):
        last_step = iteration["dataset"]["steps"]
        files.append(folder / f"iteration-{number}" / f"test-{last_step}.jsonl")
    answers = to_answers(solutions, task)
    rows_of_models = [verify(read_records(file, Sample), answers) for file in files]
    problems, m = answers.correct.shape
    results = compare_verifiers(settings.method, answers, rows_of_models[0], rows_of_models[-1])
    results |= {
        "iterations": [to_entries(row) for row in rows_of_models],
        "test": {
            "problems": problems,
            "solutions": m,
            "verifications": settings.eval_samples,
        },
        "trained on": [iteration["dataset"]["trained"] for iteration in iterations],
        "versions": verifier_results["versions"],
    }
    save_figure(draw([to_panel(results["table2"])]), settings.out / "table2.png")
    write_file(settings.out / "results.json", json.dumps(results, indent=2) + "\n")
    return results


def compare_verifiers(
    method: str, answers: Answers, base: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]
) -> dict[str, dict]:
    """The rows of Table 2 and their paired differences. base, after: of `verify`."""
    problems, m = answers.correct.shape
    majority = [majority_is_correct(answers, problem, range(m)) for problem in range(problems)]
    plain = np.array(majority, dtype=float)
    share_correct = answers.correct.mean(1)  # (Q,) what always Yes gets right
    constant = max(share_correct, 1 - share_correct, key=np.mean)
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
    return {
        "table2": {name: to_entries(row) for name, row in rows.items()},
        "paired differences": to_entries(differences),
    }


def to_entries(row: Mapping[str, np.ndarray]) -> dict[str, dict]:
    """The mean and standard error over problems of each column."""
    return {name: Estimate.over_samples(values).to_json() for name, values in row.items()}


def to_panel(rows: Mapping[str, Mapping[str, Any]]) -> Panel:
    """Table 2 as points: name of a row -> column -> entry of results.json.

    A single seed has no interval.

    >>> to_panel({"base": {ACCURACY: {"mean": 0.25, "se": 0.01}}}).lines[0].half_width
    [2.0]
    """
    styles = ("p5", "p1", "p3", "topr")
    lines = []
    for number, (name, row) in enumerate(rows.items()):
        shift = 0.15 * (number - 1.5)  # side by side
        points = {}
        for column, entry in row.items():
            points[COLUMNS.index(column) + shift] = entry
        line = estimates(points, name, styles[number], scale=100)
        has_interval = all(entry["se"] is not None for entry in row.values())
        lines.append(
            line._replace(kind="points", half_width=line.half_width if has_interval else None)
        )
    options = {
        "xticks": [0, 1, 2],
        "xticklabels": [column.replace(" ", "\n") for column in COLUMNS],
        "ylim": (-3, 103),
        "xlim": (-0.5, 2.5),
    }
    return Panel("Table 2", "", "%, 95% interval", lines, options)


def to_tables(results: dict) -> list[Table]:
    """Table 2 of results.json and its paired differences, with +- 2 standard errors."""
    rows = []
    for name, row in results["table2"].items():
        cells = [_format(row[column], " %") if column in row else "-" for column in COLUMNS]
        rows.append([name, *cells])
    pairs = []
    for name, entry in results["paired differences"].items():
        pairs.append([name, _format(entry, " points")])
    table2 = Table(["verifier", *COLUMNS], rows)
    return [table2, Table(["difference on the same solutions", ""], pairs)]


def _format(entry: Mapping[str, Any], unit: str) -> str:
    return Estimate.from_json(entry).text(100, unit=unit)


# ---- the command ---------------------------------------------------------------------------------
def main() -> None:
    """The command line: settings in, Table 2 and its paired differences out."""
    start = time.monotonic()
    with command("tasks.verifier"):
        settings = read_settings(sys.argv[1:], SETTINGS, __doc__, "runs/verifier-")
        results = run(settings)
        if rank() == 0:
            for table in to_tables(results):
                table.print()
            print(f"files: {settings.out} ({time.monotonic() - start:.0f} s)")


if __name__ == "__main__":
    main()
