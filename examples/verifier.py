"""Train a generative verifier, and weigh the votes on an answer by its verdicts (Section 4.4).

    python -m examples.verifier                             # tiny problems and models: four minutes
    python -m examples.verifier --problems 64 --train-solutions 4 --verifications 8 --seed 1
    torchrun --nproc-per-node 8 -m examples.verifier paper  # MATH, on eight GPUs

A generator solves each problem several times, and a verifier writes several verifications of each
solution. It is trained by train_gsm8k.py, as a solver whose problems are solutions. --out has the
runs solutions-train/, solutions-test/ and verifier/, and Table 2 as results.json.
"""

import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
import rich
import rich.table
import tyro
from pydantic.dataclasses import dataclass

from examples.math_task import PRESETS as MATH_PRESETS
from examples.math_task import math_task
from toprlib.distributed import process_group, rank
from toprlib.evaluation import Answers, format_value, to_answers, vote_is_correct
from toprlib.files import read_records, write_file
from toprlib.language_model import load_tokenizer
from toprlib.records import Grade, InputError, Problem, Sample, Task
from toprlib.sampling import graded_text
from toprlib.settings import TINY, AtLeastTwo, Count, Settings, command, read_settings
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


def grade(completions: Sequence[str], problems: Sequence[Problem]) -> list[Grade]:
    """+1 for a correct verdict, else -1. gold: whether the solution is correct.

    >>> texts = [f"{QUESTION} {word}" for word in ("Yes", "No", "")]
    >>> [grade.outcome for grade in grade(texts, [Problem("?", gold=True)] * 3)]
    ['correct', 'incorrect', 'invalid']
    """
    grades = []
    for completion, problem in zip(completions, problems, strict=True):
        names = {None: "invalid", problem.gold: "correct"}
        outcome = names.get(parse_verdict(completion), "incorrect")
        grades.append(Grade(1.0 if outcome == "correct" else -1.0, outcome))
    return grades


def to_problems(
    task: Task, problems: Sequence[Problem], solutions: Sequence[Sample], instruction: str
) -> list[Problem]:
    """The solutions as problems, whose gold answer is whether the solution is correct.

    solutions: problem by problem, equally many of each.
    """
    per_problem = len(solutions) // len(problems)
    verifications = []
    for index, solution in enumerate(solutions):
        answer = graded_text(solution.prompt, solution.completion, task.stop)
        question = problems[index // per_problem].question
        text = f"{instruction}Q: {question}\nA:{answer}\nCheck:"
        verifications.append(Problem(text, gold=solution.outcome == "correct"))
    return verifications


# ---- settings ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class VerifierSettings(Settings):
    """Settings of the verifier's run and of the generator's, which sample alike."""

    model: str = str(TINY / "verifier")
    """folder or hub name of the base verifier (paper: Llama 3 8B)"""
    generator: str = str(TINY / "base")
    """folder or hub name of the model that writes solutions (paper: Llama 3 70B)"""
    task: Literal["gsm8k", "math"] = "gsm8k"
    """task with the problems, prompt and grading (paper: MATH)"""
    problems: Count = 256
    """number of training problems, from the first on (paper: all)"""
    generator_gpus: Count = 1
    """GPUs that an engine of the generator spans (a 70B model in bfloat16 needs 4)"""
    train_solutions: AtLeastTwo = 4
    """solutions of each training problem (paper: 16)"""
    n: Annotated[Count, tyro.conf.arg(name="verifications")] = 4
    """verifications of each training solution (paper, Section 4.4)"""
    test_problems: AtLeastTwo = 150
    """number of test problems, from the first on (paper: all of MATH-500)"""
    test_solutions: AtLeastTwo = 8
    """solutions of each test problem, which vote (paper: 32)"""
    eval_samples: Annotated[AtLeastTwo, tyro.conf.arg(name="test-verifications")] = 4
    """verifications of each test solution, whose mean is its weight (paper, Section 4.4)"""
    instruction: str = ""
    """text before the question; tiny/verifier needs none, the preset `paper` has one"""


PRESETS = {
    # k = 1: verdicts have no majority
    "laptop": VerifierSettings(problems=320, max_new_tokens=96, lr=1e-4, k=1, evaluate_after=()),
    "paper": replace(
        VerifierSettings(**vars(MATH_PRESETS["paper"])),
        generator="meta-llama/Meta-Llama-3-70B-Instruct",  # "we used the 70B model" (4.4)
        generator_gpus=4,  # its weights take 141 GB in bfloat16
        task="math",
        instruction=INSTRUCTION,
        iterations=1,
        train_solutions=16,
        n=4,  # "16 solutions per problem, each with 4 verifications" (4.4)
        examples=480_000,  # "a total of 480,000 data points" (4.4)
        test_solutions=32,  # "weighted self-consistency with 32 generations" (Table 2)
        eval_samples=4,
        k=1,
    ),
}


# ---- the three runs ------------------------------------------------------------------------------
def run(settings: VerifierSettings) -> dict:
    """Solve, verify and train; returns the content of results.json."""
    load_tokenizer(settings.model, settings.chat)  # fails now rather than after the solutions
    task = gsm8k_task(settings) if settings.task == "gsm8k" else math_task(settings)
    with process_group():  # one for all runs
        train_solutions = solve(settings, task, "train")
        test_solutions = solve(settings, task, "test")
        verification = Task(
            name="verification",
            train=to_problems(task, task.train, train_solutions, settings.instruction),
            test=to_problems(task, task.test, test_solutions, settings.instruction),
            grade=grade,
            parse=parse_verdict,
            # After an instruction, a model may continue with another question.
            stop=("\nQ:",) if settings.instruction else (),
        )
        results = experiment(replace(settings, out=settings.out / "verifier"), verification)
    answers = to_answers(test_solutions, len(task.test), task)
    results = make_table2(settings, answers, results)
    if rank() == 0:
        write_file(settings.out / "results.json", json.dumps(results, indent=2) + "\n")
    return results


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
CONSTANT = "the same verdict on all"  # the accuracy of always Yes, or of always No


def to_entry(values: Sequence[float]) -> dict[str, float]:
    """The mean of a value for each problem, and its standard error."""
    se = np.std(values, ddof=1) / len(values) ** 0.5
    return {"mean": float(np.mean(values)), "se": float(se)}


def verify(verifications: Sequence[Sample], answers: Answers) -> dict[str, dict[str, float]]:
    """A verifier's results on the test solutions, by column. answers: m for each problem.

    A solution's score is the mean of its verdicts: 1 for Yes, 0 for No and for one that cannot be
    read (the paper says "aggregated"). If sums of scores are equal, the number of solutions
    decides. Both rules are not from the paper.
    """
    problems, m = answers.correct.shape
    outcomes = np.array([sample.outcome for sample in verifications]).reshape(problems, -1)
    is_yes = [parse_verdict(sample.completion) is True for sample in verifications]
    scores = np.array(is_yes).reshape(problems, m, -1).mean(2)  # (Q, m)
    scores += 1 / (m + 1) / outcomes.shape[1]  # m of these are less than a verdict
    return {
        ACCURACY: to_entry((outcomes == "correct").mean(1)),
        INVALID: to_entry((outcomes == "invalid").mean(1)),
        WEIGHTED: to_entry(list(map(vote_is_correct, answers.votes, answers.correct, scores))),
    }


def make_table2(settings: VerifierSettings, answers: Answers, verifier_results: dict) -> dict:
    """The content of results.json: Table 2, and its rows of verifiers after each iteration.

    answers: of the test solutions. verifier_results: of the verifier's run.
    """
    folder = settings.out / "verifier"
    iterations = verifier_results["iterations"]
    files = [folder / "iteration-1/test-0.jsonl"]
    for number, iteration in enumerate(iterations, start=1):
        files.append(folder / f"iteration-{number}/test-{iteration['dataset']['steps']}.jsonl")
    verifiers = [verify(read_records(file, Sample), answers) for file in files]
    problems, m = answers.correct.shape
    wins = list(map(vote_is_correct, answers.votes, answers.correct, np.ones((problems, m))))
    share_correct = answers.correct.mean(1)  # (Q,) what always Yes gets right
    return {
        "table2": {
            "no verifier": {WEIGHTED: to_entry(wins)},
            CONSTANT: {ACCURACY: to_entry(max(share_correct, 1 - share_correct, key=np.mean))},
            "base": verifiers[0],
            settings.method: verifiers[-1],
        },
        "iterations": verifiers,
        "test": {"problems": problems, "solutions": m, "verifications": settings.eval_samples},
        "trained on": [iteration["dataset"]["trained"] for iteration in iterations],
        "versions": verifier_results["versions"],
    }


# ---- the command ---------------------------------------------------------------------------------
def main() -> None:
    """The command line: settings in, Table 2 out."""
    start = time.monotonic()
    with command("examples.verifier"):
        settings = read_settings(sys.argv[1:], PRESETS, __doc__, "runs/verifier-")
        if settings.dry_run:
            raise InputError("--dry-run: leave it out; the problems come from the generator's run")
        results = run(settings)
        if rank() == 0:
            table = rich.table.Table("verifier", *COLUMNS)
            for name, row in results["table2"].items():
                cells = [format_value(row[column]) if column in row else "" for column in COLUMNS]
                table.add_row(name, *cells)
            rich.print(table)
            print(f"files: {settings.out} ({time.monotonic() - start:.0f} s)")


if __name__ == "__main__":
    main()
