r"""The experiment of train_gsm8k.py on MATH: problems, prompt and grading (Section 4.1).

    python -m examples.math_task                                       # a few problems of ours
    python -m examples.math_task --data DIR --shots 4 --model DIR      # MATH's files, 4-shot prompt
    torchrun --nproc-per-node 8 -m examples.math_task paper            # the paper's, on eight GPUs

docs/math_and_verifier.md has the form of the files, and says where the grading by math-verify is
**stricter than the script that the paper used** (Shao et al. 2024). No problem of MATH comes with
this project: its licence is disputed.
"""

import ast
import json
import re
import subprocess
import sys
import unicodedata
import zlib
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path

from pydantic import BaseModel

from toprlib.files import load_rows
from toprlib.numerals import first_number
from toprlib.records import OUTCOMES as GSM8K_OUTCOMES
from toprlib.records import Grade, InputError, Problem, Task
from toprlib.settings import TINY, Settings
from train_gsm8k import PAPER, main

MATH = "EleutherAI/hendrycks_math"  # its training problems, in parts
SUBJECTS = ("algebra", "counting_and_probability", "geometry", "intermediate_algebra")
SUBJECTS += ("number_theory", "prealgebra", "precalculus")
MATH_500 = "HuggingFaceH4/MATH-500"  # "the smaller MATH-500 test set (Lightman et al., 2023)" (4.1)

OUTCOMES = (*GSM8K_OUTCOMES, "abandoned")  # the comparison took too long
WORKER = Path(__file__).with_name("math_worker.py")
CPU_SECONDS = 3  # for a comparison
LONGEST = 500  # characters of an answer that math-verify reads


# ---- the answer of a completion ------------------------------------------------------------------
FINAL = "final answer is"
HOPE = "I hope"  # ... it is correct: the end of an answer in the paper's prompt
FORMULA = re.compile(r"[\s:*]*(\$\$?|\\\[|\\\()(.+?)(?:\$\$?|\\\]|\\\))[\s.*]*(?:\n|$)", re.DOTALL)
NEXT_SENTENCE = re.compile(r"\.\s+(?=[A-Z])")
MATHEMATICS = re.compile(r"[0-9\\$^=+<>∞π√½¼¾]|^\W*\w\W*$")  # or a single letter

BRACED = r"(?:\\.|[^{}\\])*"
for _ in range(9):  # braces in braces
    BRACED = rf"(?:\\.|[^{{}}\\]|\{{{BRACED}\}})*"
# \boxed 3, too, as some of MATH's own solutions have it
BOX = re.compile(
    rf"\\(?:boxed|fbox)\s*(?:\{{({BRACED})\}}|([^\s${{}}]{{1,100}}?)[.,]?(?=[\s$]|$))", re.DOTALL
)

# Between two boxes of a list.
ALTERNATIVE = re.compile(r"[\s$\\()]*,?\s*(?:\\text\{)?\s*(?:(?<=,)|\bor\b|\band\b)[\s$\\(){}]*")


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
    r"""The content of the last \boxed{} or \fbox{} that is closed and not empty.

    Several boxes with "or", "and" or a comma between them are a list.

    >>> extract_box(r"\boxed{1}, so $\boxed{\{2, 3\}}$ and $\boxed{4}$ or \boxed{5")
    '\\{2, 3\\}, 4'
    """
    answer = None
    next_start = 0  # of the box after
    for box in reversed(list(BOX.finditer(text))):
        in_braces, without_braces = box.groups()
        content = without_braces or trim(in_braces)
        content = extract_box(content) or content
        if answer and not ALTERNATIVE.fullmatch(text, box.end(), next_start):
            break
        if content:
            answer = f"{content}, {answer}" if answer else content
            next_start = box.start()
    return answer


def trim(answer: str) -> str:
    r"""The answer without the punctuation and spaces at its end: `\boxed{10.}` is 10.

    >>> trim(r" 12,\ ")
    '12'
    """
    match = re.match(r".*[^\s.,;:$*\\]", answer, re.DOTALL)
    trimmed = match[0].strip() if match else ""
    return f"{trimmed}." if trimmed.endswith(r"\right") else trimmed  # \right. closes a brace


# ---- grading -------------------------------------------------------------------------------------
def to_fraction(repeating_decimal: re.Match) -> str:
    r"""0.1\overline{6} as (16 - 1) / 90. groups: 0, 1 and 6."""
    whole, fixed, repeated = repeating_decimal.groups(default="")
    numerator = int(whole + fixed + repeated) - int(f"0{whole}{fixed}")
    denominator = "9" * len(repeated) + "0" * len(fixed)
    return rf"\frac{{{numerator}}}{{{denominator}}}"


# What math-verify does not read, or misreads -> what it reads; before NFKC, and after it.
SYMBOLS = (
    ("∞", r"\\infty "),
    ("°", r"^\\circ "),
    ("ℝ", r"\\mathbb{R}"),
    ("ℤ", r"\\mathbb{Z}"),
    ("∅", r"\\emptyset "),
    (r"(?<=[0-9])(?=[¼-¾⅐-⅞])", " "),  # 3½
    (r"[⁰¹²³⁴-⁹⁺⁻ⁿ]+", r"^{\g<0>}"),
)
SPELLINGS = [
    ("−", "-"),
    (r"([0-9]+)\u2044([0-9]+)", r"\\frac{\1}{\2}"),  # of ½
    (r"√\s*(?:([0-9]+|[a-zA-Z])|\(([^()]*)\))", r"\\sqrt{\1\2}"),
    (r"^\*\*(.+?)\**$", r"\1"),  # bold print
    (r"(?<=[0-9])[eE]([-+]?[0-9]{1,2})$", r"\\cdot 10^{\1}"),
    (r"\\(?:text)?color\s*\{[^{}]*\}", ""),
    (r"\\(?:mathrm|text)\{i\}", "i"),
    (r"^\\text\{([^{}]*)\}$", r"\1"),
    (r"\{:\}", ":"),
    # Thousands: math-verify takes 9\,500 for 9 + 500.
    (r"(?<=[0-9])(?:\{,\}|,\\!|\\[,;: ]|~)(?=[0-9]{3}(?![0-9]))", ""),
    (r"^(-?[0-9]{1,3}(?: [0-9]{3})+)(?![0-9])", lambda match: match[1].replace(" ", "")),
    # 0.1\overline{6}
    (r"([0-9]+)?\.([0-9]*)\\(?:overline|bar|dot)\s*\{([0-9]+)\}(?![0-9_])", to_fraction),
]
for word, power in {"hundred": 2, "thousand": 3, "million": 6, "billion": 9}.items():
    SPELLINGS.append((rf"(?<=[0-9])\s*(\\text\{{)?\s*{word}\b", rf"\\cdot 10^{{{power}}}\1"))
# The base of a number, and the half of the day: math-verify takes them for units.
SUFFIX = re.compile(r"[0-9]_\{?([0-9]+)|\b([ap])\.?\s?m\b")


def normalize(answer: str) -> str:
    r"""The answer as math-verify reads it: Unicode's symbols and some LaTeX are rewritten.

    >>> normalize("３x² + ½"), normalize(r"9\,500"), normalize("2 million")
    ('3x^{2} + \\frac{1}{2}', '9500', '2\\cdot 10^{6}')
    """
    for pattern, replacement in SYMBOLS:
        answer = re.sub(pattern, replacement, answer)
    answer = unicodedata.normalize("NFKC", answer)  # full-width forms, kinds of spaces, ½, ²
    answer = " ".join(answer.split())  # in math-verify, $...$ ends with the line
    for pattern, replacement in SPELLINGS:
        answer = re.sub(pattern, replacement, answer)
    return answer


def are_equal(pairs: Sequence[tuple[str, str]]) -> list[bool | None]:
    """Whether each pair (gold, answer) is the same text, or equal by math-verify.

    None if the comparison takes too long. A text above LONGEST characters equals only itself.
    """
    pairs = [(normalize(gold), normalize(answer)) for gold, answer in pairs]
    verdicts: dict[tuple[str, str], bool | None] = {}
    asked = []
    for gold, answer in dict.fromkeys(pairs):
        suffixes = SUFFIX.findall(gold), SUFFIX.findall(answer)
        has_another = all(suffixes) and suffixes[0] != suffixes[1]
        is_short = len(gold) <= LONGEST and 0 < len(answer) <= LONGEST
        verdicts[gold, answer] = gold == answer
        if gold != answer and is_short and not has_another:
            asked.append((gold, answer))
    if asked:
        command = [sys.executable, str(WORKER), str(CPU_SECONDS)]
        worker = subprocess.run(
            command, input=json.dumps(asked), stdout=subprocess.PIPE, text=True, check=True
        )
        verdicts.update(zip(asked, json.loads(worker.stdout), strict=True))
    return [verdicts[pair] for pair in pairs]


def grade(completions: Sequence[str], problems: Sequence[Problem]) -> list[Grade]:
    r"""+1 and correct for an answer that math-verify finds equal to gold; else -1.

    Without an answer a completion is invalid. An answer that math-verify cannot read is incorrect.

    >>> texts = (r"\boxed{1/2}", r"\boxed{50}", r"\boxed{?}", r"\boxed{}", "1/2")
    >>> [grade.outcome for grade in grade(texts, [Problem("?", gold="0.5")] * 5)]
    ['correct', 'incorrect', 'incorrect', 'invalid', 'invalid']
    """
    answers = [extract_answer(text) for text in completions]
    pairs = [
        (problem.gold, answer or "") for problem, answer in zip(problems, answers, strict=True)
    ]
    names = {True: "correct", False: "incorrect", None: "abandoned"}
    grades = []
    for answer, is_equal in zip(answers, are_equal(pairs), strict=True):
        outcome = names[is_equal] if answer else "invalid"
        grades.append(Grade(1.0 if outcome == "correct" else -1.0, outcome))
    return grades


# What is left out of a vote: names and units, but not a.m. and p.m., nor another answer.
UNITS = r"^x\s*=|\\(?:left|right|[,;! ])|\^\{?\\circ\}?|\\?[%$]"
UNITS += r"|(?<=.)\\text\{(?!\s*(?:[ap]\.?\s?m|or\b|and\b)).*"
NUMBER = re.compile(r"(?:\\[dt]?frac|,(?=[0-9])|[-0-9./{}\s])+")


def parse_vote(text: str) -> str | None:
    r"""The answer that maj@k votes on, without math-verify. Equal numbers have the same text.

    Two forms of another expression, such as x(x+1) and x^2+x, are two votes.

    >>> [parse_vote(rf"\boxed{{{answer}}}") for answer in (r"\dfrac12", "0.5", "x = 1/2", "x^{2}")]
    ['1/2', '1/2', '1/2', 'x^2']
    """
    answer = extract_answer(text)
    if answer is None:
        return None
    vote = re.sub(UNITS, "", normalize(answer)).strip()
    number = first_number(vote) if NUMBER.fullmatch(vote) else None
    if number is not None:
        return str(number)
    return re.sub(r"\s+", "", re.sub(r"\{(\w)\}", r"\1", vote.replace("dfrac", "frac")))


# ---- problems ------------------------------------------------------------------------------------
class MathRow(BaseModel):
    """A problem of MATH's files: the answer is in the solution, or in the field of MATH-500."""

    problem: str
    answer: str | None = None
    solution: str = ""


def load_problems(data: str, split: str) -> list[Problem]:
    """The problems of a split. Raises InputError for one without an answer.

    The files are sorted by subject. Here the order is fixed but mixed, so that the first problems
    are of all subjects.
    """
    rows = []
    for part in SUBJECTS if data == MATH else (None,):
        rows += load_rows(data, split, MathRow, part)
    problems = []
    for line, row in enumerate(rows, start=1):
        gold = row.answer or extract_box(row.solution)
        if not gold:
            message = "no answer in \\boxed{}; add one, or the field answer"
            raise InputError(f"{data}, {split}:{line}: {message}")
        problems.append(Problem(row.problem, gold, f"{split}-{line}"))
    return sorted(problems, key=lambda problem: zlib.crc32(problem.question.encode()))


def load_shots() -> list[str]:
    """The worked examples of the lm-eval package: Lewkowycz et al. 2022.

    Their module is parsed, not imported: its import needs other packages than this project.
    """
    package = distribution("lm_eval").locate_file("lm_eval")
    module = ast.parse(Path(package, "tasks/minerva_math/utils.py").read_text(encoding="utf-8"))
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    rows = ast.literal_eval(functions["list_fewshot_samples"].body[-1].value)
    return [f"Problem:\n{row['problem']}\n\nSolution: {row['solution']}" for row in rows]


def letters(text: str) -> str:
    """The letters and digits of a text."""
    return re.sub(r"[\W_]+", "", text)


def math_task(settings: Settings) -> Task:
    """`Problem: ... Solution:` after the shots; with these, another `Problem:` ends a sample."""
    if find_spec("math_verify") is None:  # before sampling, not after it
        raise InputError("math-verify is missing; make .venv/notebooks-ready installs it")
    shots = load_shots()[: settings.shots] if settings.shots else []
    train = [] if settings.samples else load_problems(settings.data, "train")
    # Those of the worked examples are among MATH's training problems.
    shown = letters("".join(shots))
    train = [row for row in train if letters(f"Problem{row.question}Solution") not in shown]
    test_data = MATH_500 if settings.data == MATH else settings.data
    test = load_problems(test_data, "test") if settings.test_problems else []
    return Task(
        name="math",
        train=train[: settings.problems],
        test=test[: settings.test_problems],
        prompt=lambda problem: "\n\n".join([*shots, f"Problem:\n{problem.question}\n\nSolution:"]),
        grade=grade,
        parse=parse_vote,
        outcomes=OUTCOMES,
        stop=("\nProblem:",) if shots else (),
    )


PRESETS = {
    # The tiny model cannot solve such problems
    "laptop": Settings(data=str(TINY / "math"), n=4, eval_samples=4, k=2, evaluate_after=()),
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


if __name__ == "__main__":
    main("examples.math_task", __doc__, math_task, PRESETS, "runs/math-")
