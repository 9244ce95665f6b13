"""The word problems of tiny/: their families, their solutions, and the mistakes made on purpose.

A family of problems is data: how the question is asked (QUESTIONS), the ranges of its numbers
(RANGES), and its solutions (PLANS), with one sentence for each step. A sentence such as
"{a} * {b} = {r1} rolls." is text and arithmetic at once: the three names around the sign say what
is computed, and what later steps call the result.

Everything here is a pure function of its arguments and of the `random.Random` that it gets.
"""

import operator
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}
NAMES = """
    Ada Ben Cleo Dan Eva Finn Gus Hana Ivo June Kai Lena Milo Nora Omar Pia Ravi Sara Tom Uma
""".split()
THINGS = """
    apples beads books candles cards coins cups eggs figs keys lemons mugs nuts pears pens plums
    shells stamps
""".split()
LARGEST = 400  # no result in a problem exceeds this, so that a tiny model can learn the sums

STEP = re.compile(r"\{(\w+)\} ([-+*/]) \{(\w+)\} = \{(\w+)\}")
EXPRESSION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")


@dataclass(frozen=True)
class Noise:
    """How often a base model's teacher is wrong. All values are ours, chosen by measurement."""

    result: float = 0.0
    """probability that an arithmetic result is off, by up to 5: a slip"""
    ending: float = 0.0
    """probability that a solution has no final sentence that can be read"""
    verdict: float = 0.0
    """probability that a verification ends in the wrong word"""
    silence: float = 0.0
    """probability that a verification ends without a verdict"""
    endings: int = 1
    """how many of ENDINGS, the first ones, stand in for a final sentence"""
    plan: tuple[float, float] = (0.0, 0.0)
    """probability of a wrong plan, in the families with the fewest mistakes and with the most"""
    wordings: int = 0
    """how many of WORDINGS, the first ones, there are at each place; 0: the words of the plan"""


TEACHER = Noise(result=0.29, ending=0.13, verdict=0.46, silence=0.28)
FLAWLESS = Noise()
MISTAKEN = Noise(result=0.04, ending=0.12, endings=4, plan=(0.3, 0.95))  # few slips, wrong plans

# What may stand in for "The answer is N.": nothing, a sentence cut in the middle, one without a
# number, other words.
ENDINGS = ("", " The ans", " The answer is.", " So it is {answer}.")

# A place in a solution -> what may stand there. {z}: the result of a sum; {rest}: the plan's words.
WORDINGS = {
    "opening": (
        "",
        "We go step by step. ",
        "Easy. ",
        "Take it in turn. ",
        "Good. ",
        "Let me count. ",
        "Right. ",
        "So. ",
    ),
    "first": (
        "",
        "First, ",
        "We begin with ",
        "To start, ",
        "Here is ",
        "At first ",
        "One has ",
        "There are ",
    ),
    "later": (
        "",
        "Then ",
        "Next, ",
        "Now ",
        "After that ",
        "This leads to ",
        "We go on to ",
        "In the end ",
    ),
    "end": (
        "{rest}",
        ".",
        ", so {z}.",
        ", that is {z}.",
        ", which is {z}.",
        ", giving {z}.",
        " and so {z}.",
        ": {z}.",
    ),
}

QUESTIONS: dict[str, tuple[str, ...]] = {  # a family of problems -> phrasings of its question
    "find": (
        "{name} has {a} {thing} and finds {b} more. How many {thing} does {name} have now?",
        (
            "In the morning {name} counts {a} {thing}. By night there are {b} more. "
            "How many {thing} are there by night?"
        ),
    ),
    "take": (
        (
            "A basket holds {a} {thing}. {name} takes {b} of them. "
            "How many {thing} stay in the basket?"
        ),
        "{name} owns {a} {thing} and sells {b} at a fair. How many {thing} does {name} still own?",
    ),
    "rows": (
        (
            "{name} plants {a} rows of tulips with {b} tulips in each row. "
            "How many tulips does {name} plant?"
        ),
        (
            "A hall has {a} rows of chairs and {b} chairs in a row. "
            "How many chairs does {name} count in the hall?"
        ),
    ),
    "deal": (
        "{name} deals {a} {thing} equally to {b} friends. How many {thing} does each friend get?",
        "{a} {thing} are packed into {b} equal bags by {name}. How many {thing} go into one bag?",
    ),
    "boxes": (
        (
            "{name} buys {a} boxes with {b} {thing} in each box and gives away {c} {thing}. "
            "How many {thing} are left?"
        ),
        (
            "{a} shelves hold {b} {thing} each. {name} removes {c} {thing}. "
            "How many {thing} remain on the shelves?"
        ),
    ),
    "saving": (
        (
            "{name} has {c} dollars and saves {a} dollars a week for {b} weeks. "
            "How many dollars does {name} have then?"
        ),
        (
            "A jar contains {c} coins. {name} adds {a} coins a day for {b} days. "
            "How many coins are in the jar then?"
        ),
    ),
    "bus": (
        (
            "A bus carries {a} people. At the mill {b} people get off and {c} get on. "
            "How many people are on the bus now?"
        ),
        (
            "{name} keeps {a} hens. A fox scares off {b} of them, then {c} new hens arrive. "
            "How many hens are there now?"
        ),
    ),
    "reading": (
        (
            "{name} reads {a} pages on Monday and {b} more pages than that on Tuesday. "
            "How many pages is that on both days?"
        ),
        (
            "{name} picks {a} {thing}, and {other} picks {b} more than {name}. "
            "How many {thing} do they pick together?"
        ),
    ),
    "change": (
        (
            "{name} buys {a} mugs at {b} dollars each and pays with {c} dollars. "
            "How many dollars come back?"
        ),
        (
            "A ride costs {b} dollars. {name} takes {a} rides and had {c} dollars before. "
            "How many dollars are left?"
        ),
    ),
    "teams": (
        "{a} girls and {b} boys form teams of {c}. How many teams does {name} count?",
        (
            "{name} bakes {a} buns and {other} bakes {b}. They fill bags of {c} buns. "
            "How many bags do they fill?"
        ),
    ),
    "older": (
        (
            "{name} is {a} years old and {other} is {b} years older. "
            "How old will {other} be in {c} years?"
        ),
        (
            "{name} scores {a} points, {other} scores {b} more than {name} and then {c} extra. "
            "What is the score of {other}?"
        ),
    ),
    "walking": (
        (
            "{name} walks {a} miles a day for {b} days. {other} walks {c} miles in all. "
            "How many more miles does {name} walk?"
        ),
        (
            "{name} fills {b} pages with {a} stamps each. {other} has {c} stamps. "
            "How many more stamps has {name}?"
        ),
    ),
    "two kinds": (
        (
            "{name} packs {a} bags of {b} {thing} and {c} boxes of {d} {thing}. "
            "How many {thing} does {name} pack?"
        ),
        (
            "A farm has {a} pens of {b} goats and {c} pens of {d} sheep. "
            "How many animals does {name} feed?"
        ),
    ),
    "bakery": (
        (
            "{name} bakes {a} trays of {b} rolls, sells {c} before noon and {d} after noon. "
            "How many rolls are left?"
        ),
        (
            "A truck brings {a} crates of {b} jars. {name} drops {c} jars and uses {d}. "
            "How many jars are left?"
        ),
    ),
    "wages": (
        (
            "{name} earns {a} dollars an hour, works {b} hours on Friday and {c} hours on Sunday, "
            "then spends {d} dollars. "
            "How many dollars are left?"
        ),
    ),
    "dinner": (
        (
            "{a} friends share a meal of {b} dollars and drinks of {c} dollars equally. "
            "{name} also pays {d} dollars for a cab. "
            "How many dollars does {name} pay?"
        ),
    ),
}

RANGES = {  # what the numbers in a family's questions are drawn from
    "find": {"a": (3, 90), "b": (2, 60)},
    "take": {"a": (12, 99), "b": (2, 60)},
    "rows": {"a": (2, 12), "b": (2, 12)},
    "deal": {"a": (6, 99), "b": (2, 9)},
    "boxes": {"a": (2, 9), "b": (3, 12), "c": (2, 30)},
    "saving": {"a": (2, 12), "b": (2, 9), "c": (3, 60)},
    "bus": {"a": (12, 80), "b": (2, 40), "c": (2, 40)},
    "reading": {"a": (4, 50), "b": (2, 30)},
    "change": {"a": (2, 9), "b": (2, 11), "c": (20, 99)},
    "teams": {"a": (4, 45), "b": (4, 45), "c": (2, 9)},
    "older": {"a": (5, 50), "b": (2, 30), "c": (2, 19)},
    "walking": {"a": (3, 12), "b": (3, 9), "c": (4, 40)},
    "two kinds": {"a": (2, 9), "b": (2, 9), "c": (2, 9), "d": (2, 9)},
    "bakery": {"a": (3, 9), "b": (4, 12), "c": (2, 20), "d": (2, 20)},
    "wages": {"a": (3, 11), "b": (2, 6), "c": (2, 6), "d": (2, 40)},
    "dinner": {"a": (2, 8), "b": (12, 60), "c": (4, 30), "d": (2, 20)},
}

# What is said after each result; then the right steps; then others, as somebody takes them who has
# misunderstood this kind of problem. _ is a step that is left out, with what is said after it.
_PLANS = {
    "find": ("{thing}", "a+b", "a-b", "b+b"),
    "take": ("{thing}", "a-b", "a+b", "b+b"),
    "rows": ("in all", "a*b", "a+b", "a*a"),
    "deal": ("{thing} each", "a/b", "a-b", "a+b"),
    "boxes": ("{thing}, left", "a*b r1-c", "a*b r1+c", "a+b r1+c", "a*b"),
    "saving": ("saved, in all", "a*b r1+c", "a+b r1+c", "a*b r1-c", "a*b"),
    "bus": ("stay, now", "a-b r1+c", "a-b r1-c", "a+b r1+c", "a-b"),
    "reading": ("the second time, together", "a+b a+r1", "_ a+b", "a+b b+r1", "a-b a+r1"),
    "change": ("dollars spent, dollars", "a*b c-r1", "a+b c-r1", "a*b c+r1", "a*b"),
    "teams": ("together, groups", "a+b r1/c", "a+b r1-c", "a+b r1+c", "a+b"),
    "older": ("at first, in the end", "a+b r1+c", "a+b r1-c", "a-b r1+c", "_ a+b"),
    "walking": ("for {name}, more", "a*b r1-c", "a*b r1+c", "a+b r1-c", "a*b"),
    "two kinds": (
        "first, more, in all",
        "a*b c*d r1+r2",
        "a*b c*d r1-r2",
        "a*b c+d r1+r2",
        "a*b _ r1+c",
    ),
    "bakery": (
        "at first, stay, left",
        "a*b r1-c r2-d",
        "a*b r1-c r2+d",
        "a*b r1+c r2-d",
        "a*b _ r1-c",
    ),
    "wages": (
        "hours, dollars, dollars left",
        "b+c r1*a r2-d",
        "b+c r1*a r2+d",
        "b+c r1+a r2-d",
        "b+c _ r1*a",
    ),
    "dinner": (
        "dollars, each, dollars for {name}",
        "b+c r1/a r2+d",
        "b+c r1/a r2-d",
        "b+c r1-a r2+d",
        "b+c _ r1/a",
    ),
}


def in_words(steps: str, remarks: str) -> str:
    """The steps of a plan as a text with the places of its numbers.

    >>> in_words("a+b _ r1-c", "at first, stay, left")
    '{a} + {b} = {r1} at first. {r1} - {c} = {r2} left.'
    """
    sentences = []
    for step, remark in zip(steps.split(), remarks.split(", "), strict=False):
        if step != "_":
            left, sign, right = re.split("([-+*/])", step)
            result = f"r{len(sentences) + 1}"
            sentences.append(f"{{{left}}} {sign} {{{right}}} = {{{result}}} {remark}.")
    return " ".join(sentences)


PLANS: dict[str, tuple[str, ...]] = {}  # family -> its plans, the right one first
for _family, (_remarks, *_steps) in _PLANS.items():
    PLANS[_family] = tuple(in_words(_plan, _remarks) for _plan in _steps)
USUAL = 0.7  # share of the first one among a family's wrong plans; the others share the rest (ours)


def share_of_wrong_plans(family: str, least: float, most: float) -> float:
    """The share of a family's solutions with a wrong plan.

    It is evenly spaced over the families, from `least` to `most`. Their order is ours: short and
    long solutions are spread over it.

    >>> [share_of_wrong_plans(family, 0.0, 1.5) for family in ("find", "take", "rows", "deal")]
    [0.0, 0.7, 1.4, 0.5]
    """
    rank = 7 * list(PLANS).index(family) % len(PLANS)
    return least + (most - least) * rank / (len(PLANS) - 1)


# ---- problems and their solutions ----------------------------------------------------------------
@dataclass(frozen=True)
class WordProblem:
    """A question with everything that is needed to solve it, rightly or wrongly."""

    question: str
    family: str
    words: dict[str, str]
    numbers: dict[str, int]


def compute(plan: str, numbers: dict[str, int], slip: Callable[[int], int]) -> dict[str, int]:
    """All numbers of a solution: those of the question, and each step's result after `slip`.

    Results are named r1, r2, ...; none is below zero.

    >>> compute("{a} - {b} = {r1}. {r1} * {a} = {r2}.", {"a": 5, "b": 3}, slip=int)
    {'a': 5, 'b': 3, 'r1': 2, 'r2': 10}
    """
    values = dict(numbers)
    for left, sign, right, name in STEP.findall(plan):
        values[name] = slip(max(OPERATIONS[sign](values[left], values[right]), 0))
    return values


def draw_problem(rng: random.Random) -> WordProblem:
    """A problem of a random family, with results from 1 to LARGEST and divisions without rest."""
    family = rng.choice(list(PLANS))
    name, other = rng.sample(NAMES, 2)
    words = {"name": name, "other": other, "thing": rng.choice(THINGS)}
    numbers = _draw_numbers(family, rng)
    while not _is_sound(PLANS[family][0], numbers):
        numbers = _draw_numbers(family, rng)
    question = rng.choice(QUESTIONS[family]).format(**words, **numbers)
    return WordProblem(question, family, words, numbers)


def _draw_numbers(family: str, rng: random.Random) -> dict[str, int]:
    return {name: rng.randint(*bounds) for name, bounds in RANGES[family].items()}


def _is_sound(plan: str, numbers: dict[str, int]) -> bool:
    values = compute(plan, numbers, slip=int)
    for left, sign, right, result in STEP.findall(plan):
        has_rest = sign == "/" and values[left] % values[right] > 0
        if has_rest or not 1 <= values[result] <= LARGEST:
            return False
    return True


def solve(
    problem: WordProblem, plan: str = "", slip: Callable[[int], int] = int
) -> tuple[str, int]:
    """A solution and its answer: the right ones, or those of another plan.

    slip: what becomes of a result.

    >>> solve(WordProblem("?", "find", {"thing": "figs"}, {"a": 2, "b": 3}))
    ('2 + 3 = 5 figs.', 5)
    """
    plan = plan or PLANS[problem.family][0]
    values = compute(plan, problem.numbers, slip)
    *_, answer = values.values()
    return plan.format(**problem.words, **values), answer


# ---- what a teacher writes -----------------------------------------------------------------------
def reword(solution: str, noise: Noise, rng: random.Random) -> str:
    """The solution in other words, from as many as `noise` allows.

    Its numbers stay; those of a sum or a product may change places.

    >>> reword("2 + 3 = 5 figs.", Noise(wordings=8), random.Random(2))
    'We begin with 3 + 2 = 5, giving 5.'
    """

    def say(place: str, **fields: str) -> str:
        return rng.choice(WORDINGS[place][: noise.wordings]).format(**fields)

    sentences = [say("opening").strip()]
    for index, sentence in enumerate(re.split(r"(?<=\.) ", solution)):
        step = EXPRESSION.search(sentence)
        left, sign, right, result = step.groups()
        if sign in "+*" and noise.wordings > 1 and rng.random() < 0.5:
            left, right = right, left
        # In this order: each call takes a random number.
        end = say("end", z=result, rest=sentence[step.end() :])
        start = say("later" if index > 0 else "first")
        sentences.append(f"{start}{left} {sign} {right} = {result}{end}")
    return " ".join(sentence for sentence in sentences if sentence)


def solve_badly(problem: WordProblem, noise: Noise, rng: random.Random) -> tuple[str, bool]:
    """A solution as the base model's teacher writes it, and whether it states the right answer."""

    def slip(result: int) -> int:
        if rng.random() >= noise.result:
            return result
        near = range(max(result - 5, 0), result + 6)
        return rng.choice([number for number in near if number != result])

    plan, usual, *others = PLANS[problem.family]
    share = share_of_wrong_plans(problem.family, *noise.plan)
    if share > 0 and rng.random() < share:  # without misconceptions no random number is taken
        plan = usual if rng.random() < USUAL else rng.choice(others)
    text, answer = solve(problem, plan, slip)
    if noise.wordings > 0:
        text = reword(text, noise, rng)
    number = rng.random()
    if number < noise.ending:
        ending = ENDINGS[int(number / noise.ending * noise.endings)]
        return f" {text}{ending.format(answer=answer)}", False
    return f" {text} The answer is {answer}.", answer == solve(problem)[1]


def verify(solution: str, is_correct: bool, noise: Noise, rng: random.Random) -> str:
    """A step-by-step check of `solution`; its verdict is spoiled with the probabilities of `noise`.

    >>> solution = " 2 * 3 = 6 figs. 6 - 1 = 4 left. The answer is 4."
    >>> verify(solution, False, FLAWLESS, random.Random(0))
    ' 2 * 3 = 6, right. 6 - 1 = 5, not 4. Verification: Is the answer correct (Yes/No)? No'
    """
    text = ""
    for left, sign, right, stated in EXPRESSION.findall(solution):
        # After a slip a divisor may be zero; the check then says so instead of a number.
        is_defined = sign != "/" or int(right) > 0
        result = OPERATIONS[sign](int(left), int(right)) if is_defined else "nothing"
        remark = "right" if str(result) == stated else f"not {stated}"
        text += f" {left} {sign} {right} = {result}, {remark}."
    if "The answer is" not in solution:
        text += " No answer is given."
    if rng.random() < noise.silence:
        return text
    is_wrong = rng.random() < noise.verdict
    verdict = "Yes" if is_correct != is_wrong else "No"
    return f"{text} Verification: Is the answer correct (Yes/No)? {verdict}"


# ---- what is wrong with a completion -------------------------------------------------------------
def sums(completion: str) -> list[bool]:
    """Whether each sum of a completion is right, by the teacher's rule: no result is below zero.

    >>> sums(" 2 + 3 = 5 figs. 5 - 7 = 0 left. 4 / 0 = 1 each.")
    [True, True, False]
    """
    are_right = []
    for left, sign, right, result in EXPRESSION.findall(completion):
        is_defined = sign != "/" or int(right) > 0
        expected = max(OPERATIONS[sign](int(left), int(right)), 0) if is_defined else None
        are_right.append(expected == int(result))
    return are_right


def kind_of(completion: str, is_right: bool, answer: object) -> str:
    """What is wrong with a completion. answer: as it is parsed, None without one.

    >>> kind_of(" 2 + 3 = 5 figs. The answer is 5.", False, 5)  # the question asks for 2 * 3
    'wrong plan'
    >>> kind_of(" 2 + 3 = 6 figs. The answer is 6.", False, 6)
    'wrong sum'
    >>> kind_of(" 2 + 3 = 6 figs. The answer is 6.", True, 6), kind_of(" 2 + 3", False, None)
    ('right', 'no answer')
    """
    if is_right:
        return "right"  # whatever precedes the answer
    if answer is None:
        return "no answer"
    return "wrong plan" if all(sums(completion)) else "wrong sum"
