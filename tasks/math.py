r"""The experiment of train_gsm8k.py on MATH: problems, prompt and grading (Section 4.1).

    python -m tasks.math                                       # a few problems of ours
    python -m tasks.math --data MATH_DIR --shots 4 --model DIR # original files, the paper's prompt
    torchrun --nproc-per-node 8 -m tasks.math paper            # the paper's run, on eight GPUs

docs/math_and_verifier.md has the form of the files, and says where the grading by math-verify is
**stricter than the script that the paper used** (Shao et al. 2024). No problem of MATH comes with
this project: its licence is disputed.
"""

import ast
import re
import zlib
from dataclasses import replace
from types import MappingProxyType

from pydantic import BaseModel, Field, ValidationInfo, field_validator

from tasks.judge import Judge
from toprlib.problems import read_shots, read_split
from toprlib.records import OUTCOMES as GSM8K_OUTCOMES
from toprlib.records import Problem, Task
from toprlib.settings import TINY, Settings
from train_gsm8k import PAPER, main

MATH = "EleutherAI/hendrycks_math"  # its training problems
MATH_500 = "HuggingFaceH4/MATH-500"  # "the smaller MATH-500 test set (Lightman et al., 2023)" (4.1)

OUTCOMES = (*GSM8K_OUTCOMES, "abandoned")  # the judge gave the comparison up
FINAL = "final answer is"
HOPE = "I hope"  # ... it is correct: the end of an answer in the paper's prompt
FORMULA = re.compile(r"[\s:*]*(\$\$?|\\\[|\\\()(.+?)(?:\$\$?|\\\]|\\\))[\s.*]*(?:\n|$)", re.DOTALL)
NEXT_SENTENCE = re.compile(r"\.\s+(?=[A-Z])")
MATHEMATICS = re.compile(r"[0-9\\$^=+<>∞π√½¼¾]|^\W*\w\W*$")  # or a single letter
LATEX = re.compile(r"\\(?:boxed|fbox)\s*\{?|\\.|[{}]", re.DOTALL)


def extract_answer(text: str) -> str | None:
    r"""The answer after the last "final answer is", else in the last \boxed{}; None without both.

    This answer is a box, else a formula, else the rest of the line or sentence; it ends before "I
    hope". If it has no box, formula or digit, it is a remark ("the final answer is
    right"): then an earlier "final answer is" counts, or a box. Of nested boxes the innermost
    counts. A box that is empty or not closed does not count.

    >>> extract_answer(r"it is $\boxed{\frac{1}{2}}$. I think that the final answer is right.")
    '\\frac{1}{2}'
    >>> extract_answer("The final answer is $[2,5)$. I hope it is correct.")
    '[2,5)'
    """
    remark = None
    for rest in reversed(text.split(FINAL)[1:]):
        rest = rest.partition(HOPE)[0]
        sentence = NEXT_SENTENCE.split(rest, maxsplit=1)[0]
        formula = FORMULA.match(sentence)  # which may have several lines
        line = formula[2] if formula else sentence.strip().partition("\n")[0].lstrip(" :$*")
        box = extract_box(rest)
        answer = box or trim(line)
        if answer and (box or formula or MATHEMATICS.search(line)):
            return answer
        remark = remark or answer
    return extract_box(text) or remark or None


def extract_box(text: str) -> str | None:
    r"""The content of the last \boxed{} or \fbox{} that is closed and not empty. In linear time.

    >>> extract_box(r"\boxed{1}, \boxed{\{2, 3\}} and \boxed{4")
    '\\{2, 3\\}'
    """
    answer = None
    last_start = -1  # where the content of `answer` begins
    open_braces = []  # for each one where the content of its box begins, or -1 for a plain brace
    for match in LATEX.finditer(text):
        token = match[0]
        if token == "{":
            open_braces.append(-1)
        elif token.startswith(("\\boxed", "\\fbox")) and token.endswith("{"):
            open_braces.append(match.end())
        elif token.startswith(("\\boxed", "\\fbox")):
            content = _box_without_braces(text, match.end())
            if content:
                answer = content
                last_start = match.end()
        elif token == "}" and open_braces:
            start = open_braces.pop()
            # An outer box closes after a box inside it, which counts instead.
            content = trim(text[start : match.start()]) if start > last_start else ""
            if content:
                answer = content
                last_start = start
    return answer


def _box_without_braces(text: str, start: int) -> str | None:
    r"""The content of `\boxed 3`, as some of MATH's own solutions have it."""
    match = re.match(r"\s*([^\s${}]+?)[.,]?(?=[\s$]|$)", text[start : start + 100])
    return match[1] if match else None


def trim(answer: str) -> str:
    r"""The answer without the punctuation and spaces at its end: `\boxed{10.}` is 10.

    >>> trim(r" 12,\ ")
    '12'
    """
    match = re.match(r".*[^\s.,;:$*\\]", answer, re.DOTALL)
    trimmed = match[0].strip() if match else ""
    return f"{trimmed}." if trimmed.endswith(r"\right") else trimmed  # \right. closes a brace


def grade(text: str, gold: str, judge: Judge) -> str:
    r"""invalid without an answer, else correct if math-verify finds it equal to gold.

    An answer that math-verify cannot read is incorrect; abandoned if the judge gave it up.

    >>> judge = Judge()
    >>> texts = (r"\boxed{1/2}", r"\boxed{50}", r"\boxed{?}", r"\boxed{}", "1/2")
    >>> [grade(text, "0.5", judge) for text in texts]
    ['correct', 'incorrect', 'incorrect', 'invalid', 'invalid']
    """
    answer = extract_answer(text)
    if answer is None:
        return "invalid"
    is_equal = judge.equal(gold, answer)
    if is_equal is None:
        return "abandoned"
    return "correct" if is_equal else "incorrect"


class MathRow(BaseModel):
    """A problem of MATH's files: the answer is in the solution, or in the field of MATH-500."""

    problem: str
    answer: str | None = None
    solution: str | None = Field(default=None, validate_default=True)

    @field_validator("solution")
    @classmethod
    def _check_answer(cls, solution: str | None, info: ValidationInfo) -> str | None:
        # Fields are validated in their order, so `info.data` has the answer.
        if not info.data.get("answer") and not extract_box(solution or ""):
            raise ValueError("has no answer in \\boxed{}; add one, or the field answer")
        return solution


def load_problems(data: str, split: str) -> list[Problem]:
    """The problems of a split. Raises InputError for a line without an answer.

    The files are sorted by subject. Here the order is fixed but mixed, so that the first problems
    are of all subjects.
    """
    problems = []
    for line, row in enumerate(read_split(data, split, MathRow), start=1):
        gold = row.answer or extract_box(row.solution)
        problems.append(Problem(f"{split}-{line}", row.problem, gold))
    return sorted(problems, key=lambda problem: zlib.crc32(problem.question.encode()))


def parse_shots(text: str) -> list[str]:
    """The worked examples in a module of the lm-eval package: Lewkowycz et al. 2022.

    The module is parsed, not imported: its import needs other packages than this project.
    """
    functions = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            functions[node.name] = node
    rows = ast.literal_eval(functions["list_fewshot_samples"].body[-1].value)
    return [f"Problem:\n{row['problem']}\n\nSolution: {row['solution']}" for row in rows]


def remove_shots(problems: list[Problem], shots: list[str]) -> list[Problem]:
    """The problems without those of the worked examples, which are MATH's own training problems."""
    shot_texts = [_letters(shot) for shot in shots]
    kept = []
    for problem in problems:
        start = _letters(f"Problem{problem.question}Solution")
        if not any(text.startswith(start) for text in shot_texts):
            kept.append(problem)
    return kept


def _letters(text: str) -> str:
    return re.sub(r"[\W_]+", "", text)


def math_task(settings: Settings) -> Task:
    """`Problem: ... Solution:` after the shots; with these, another `Problem:` ends a sample."""
    judge = Judge()
    shots = read_shots(settings.shots, "Problem:", "tasks/minerva_math/utils.py", parse_shots)
    train = [] if settings.samples else load_problems(settings.data, "train")
    test_data = MATH_500 if settings.data == MATH else settings.data
    test = load_problems(test_data, "test") if settings.test_problems else []
    return Task(
        name="math",
        train=remove_shots(train, shots)[: settings.problems],
        test=test[: settings.test_problems],
        prompt=lambda problem: "\n\n".join([*shots, f"Problem:\n{problem.question}\n\nSolution:"]),
        parse=extract_answer,
        grade=lambda text, gold: grade(text, gold, judge),
        outcomes=OUTCOMES,
        stop=("\nProblem:",) if shots else (),
        same=judge.equal,
    )


SETTINGS = MappingProxyType(
    {
        # ours: the tiny model cannot solve such problems
        "laptop": Settings(data=str(TINY / "math"), n=4, eval_samples=4, k=2, evals_per_epoch=1),
        "paper": replace(
            PAPER,
            data=MATH,
            shots=4,  # "using the 4-shot prompt from Lewkowycz et al. (2022)" (4.1)
            problems=7_500,  # "7,500 training problems" (4.1), less the four of the prompt
            n=32,  # "For each training question we generate n = 32 candidate solutions" (4.1)
            test_problems=500,
            eval_samples=16,  # "16 for MATH due to the cost of evaluating" (4.2)
            k=16,  # Figure 8's maj@16, here of all 16 samples: it has no interval of its own
        ),
    }
)


if __name__ == "__main__":
    main("tasks.math", __doc__, math_task, SETTINGS, "runs/math-")
