r"""The experiment of train_gsm8k.py on MATH, with its problems, prompt and grading (Section 4.1 of the TOPR paper).

    python -m tasks.math                                       # a few problems of our own: shows that it runs, no more
    python -m tasks.math --data MATH_DIR --shots 4 --model DIR # the original files, the paper's 4-shot prompt
    torchrun --nproc-per-node 8 -m tasks.math paper            # the paper's run, on eight GPUs

docs/math_and_verifier.md has the form of the files, and says where the grading by math-verify is **stricter than the
script that the paper used** (Shao et al. 2024). No problem of MATH comes with this project: its licence is disputed.
"""

import ast
import re
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from pydantic import BaseModel, model_validator

from pipeline.records import OUTCOMES, Outcome, Problem, Task, read_shots, read_split
from pipeline.settings import TINY, Settings
from tasks.judge import Judge
from train_gsm8k import PAPER, main

FINAL, HOPE = "final answer is", "I hope"
FORMULA = re.compile(r"[\s:*]*(\$\$?|\\\[|\\\()(.+?)(?:\$\$?|\\\]|\\\))[\s.*]*(?:\n|$)", re.DOTALL)
LATEX = re.compile(r"\\(?:boxed|fbox)\s*\{?|\\.|[{}]", re.DOTALL)


def extract_answer(text: str) -> str | None:
    r"""The answer after the last "final answer is", else the content of the last \boxed{}; None if there is neither.

    After "final answer is" comes a box, else a formula, else the rest of the line; "I hope" (it is correct) ends it. Of
    nested boxes the innermost counts. A box that is empty or not closed does not count.

    >>> extract_answer(r"it is $\boxed{\frac{1}{2}}$."), extract_answer("The final answer is $[2,5)$. I hope ...")
    ('\\frac{1}{2}', '[2,5)')
    """
    _, marker, rest = text.rpartition(FINAL)
    rest = rest.partition(HOPE)[0] if marker else ""
    formula = FORMULA.match(rest)  # which may have several lines
    line = formula[2] if formula else rest.strip().partition("\n")[0].lstrip(" :$*")
    return extract_box(rest) or trim(line) or extract_box(text) or None


def extract_box(text: str) -> str | None:
    r"""The content of the last \boxed{} or \fbox{} that is closed and not empty; None without one. In linear time.

    >>> extract_box(r"\boxed{1}, \boxed{\{2, 3\}} and \boxed{4")
    '\\{2, 3\\}'
    """
    answer, last, open_braces = None, -1, []
    for match in LATEX.finditer(text):
        token = match[0]
        if token == "}" and open_braces:
            start = open_braces.pop()
            content = (
                trim(text[start : match.start()]) if start > last else ""
            )  # else a box inside it was read
            if content:
                answer, last = content, start
        elif token == "{":
            open_braces.append(-1)  # a plain brace is no box: -1 never exceeds `last`
        elif token.startswith(("\\boxed", "\\fbox")):
            if token.endswith("{"):
                open_braces.append(match.end())
            elif content := re.match(
                r"\s*([^\s${}]+?)[.,]?(?=[\s$]|$)", text[match.end() : match.end() + 100]
            ):
                answer, last = (
                    content[1],
                    match.end(),
                )  # \boxed 3, as some of MATH's own solutions have it
    return answer


def trim(answer: str) -> str:
    r"""The answer without the punctuation and spaces at its end: `\boxed{10.}` is 10.

    >>> trim(r" 12,\ ")
    '12'
    """
    match = re.match(r".*[^\s.,;:$*\\]", answer, re.DOTALL)
    trimmed = match[0].strip() if match else ""
    return f"{trimmed}." if trimmed.endswith(r"\right") else trimmed  # \right. closes a brace


def grade(text: str, gold: str, judge: Judge) -> Outcome:
    r"""invalid without an answer, else correct if math-verify finds it equal to gold. An unreadable one is incorrect.

    >>> [grade(text, "0.5", Judge()) for text in (r"\boxed{1/2}", r"\boxed{50}", r"\boxed{?}", r"\boxed{}", "1/2")]
    ['correct', 'incorrect', 'incorrect', 'invalid', 'invalid']
    """
    answer = extract_answer(text)
    if answer is None:
        return "invalid"
    return "correct" if judge.equal(gold, answer) else "incorrect"


class MathRow(BaseModel):
    """A problem as MATH's files have it, with its answer in the solution; MATH-500 has the answer by itself."""

    problem: str
    solution: str | None = None
    answer: str | None = None

    @model_validator(mode="after")
    def _find_answer(self) -> "MathRow":
        self.answer = self.answer or extract_box(self.solution or "")
        if not self.answer:
            raise ValueError("field solution: no answer in \\boxed{}, and no field answer")
        return self


def load_problems(data: str, split: str) -> list[Problem]:
    """The problems of a split; InputError names the file and line without an answer.

    The files are sorted by subject. Here the order is fixed but mixed, so that the first problems are of all subjects.
    """
    rows = read_split(data, split, MathRow)
    problems = [
        Problem(f"{split}-{line}", row.problem, row.answer)
        for line, row in enumerate(rows, start=1)
    ]
    return sorted(problems, key=lambda problem: zlib.crc32(problem.question.encode()))


def load_shots(count: int, file: Path | None) -> list[str]:
    """`count` worked examples: from `file`, or the 4-shot prompt of Lewkowycz et al. 2022 in the lm-eval package.

    The package's module is parsed, not imported: its import needs other versions of packages than this project.
    """

    def parse(text: str) -> list[str]:
        functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
        [function] = [f for f in functions if f.name == "list_fewshot_samples"]
        rows = ast.literal_eval(function.body[-1].value)
        return [f"Problem:\n{row['problem']}\n\nSolution: {row['solution']}" for row in rows]

    return read_shots(count, file, "Problem:", "tasks/minerva_math/utils.py", parse)


def without_shots(problems: list[Problem], shots: list[str]) -> list[Problem]:
    """The problems without those among the worked examples, which are MATH's own. Compares letters and digits only."""
    letters = partial(re.sub, r"[\W_]+", "")
    texts = [letters(shot) for shot in shots]
    return [
        p
        for p in problems
        if not any(s.startswith(letters(f"Problem{p.question}Solution")) for s in texts)
    ]


def math_task(settings: Settings) -> Task:
    """MATH as a task: `Problem: ... Solution:` after the shots; with shots, the next `Problem:` ends a completion."""
    shots, judge = load_shots(settings.shots, settings.shots_file), Judge()
    train = load_problems(settings.data, "train") if settings.samples is None else []

    return Task(
        name="math",
        train=without_shots(train, shots)[: settings.problems],
        test=load_problems(settings.test_source, "test")[: settings.test_problems]
        if settings.test_source
        else [],
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
        "laptop": Settings(data=str(TINY / "math"), n=4, test_samples=4, k=2, curve_points=1),
        "paper": replace(
            PAPER,
            data="EleutherAI/hendrycks_math",
            test_data="HuggingFaceH4/MATH-500",  # "the smaller MATH-500 test set (Lightman et al., 2023)" (4.1)
            shots=4,  # "using the 4-shot prompt from Lewkowycz et al. (2022)" (4.1)
            problems=7_500,  # "7,500 training problems" (4.1), less the four of the prompt
            n=32,  # "For each training question we generate n = 32 candidate solutions" (4.1)
            test_problems=500,
            test_samples=16,  # "16 for MATH due to the cost of evaluating" (4.2)
            k=16,  # Figure 8's maj@16, here of all 16 samples: it has no interval of its own
        ),
    }
)


if __name__ == "__main__":
    main("tasks.math", __doc__, math_task, SETTINGS, "runs/math-")
