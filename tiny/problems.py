"""The word problems of tiny/: their families, their worked solutions, and the mistakes put in on purpose.

A family of problems is data: how the question is asked (QUESTIONS), the ranges its numbers are drawn from (RANGES), and
its solutions (PLANS), with one sentence a step. A sentence such as "{a} * {b} = {r1} rolls." is text and arithmetic at
once: the three names around the sign say what is computed and what later steps call the result.

Everything here is a pure function of its arguments and of the `random.Random` that it is handed.
"""

import operator
import random
import re
from collections.abc import Callable
from dataclasses import dataclass

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}
NAMES = "Ada Ben Cleo Dan Eva Finn Gus Hana Ivo June Kai Lena Milo Nora Omar Pia Ravi Sara Tom Uma".split()
THINGS = "apples beads books candles cards coins cups eggs figs keys lemons mugs nuts pears pens plums".split()
THINGS += ["shells", "stamps"]
LARGEST = 400  # no result in a problem exceeds this, so that a tiny model can learn the sums

STEP = re.compile(r"\{(\w+)\} ([-+*/]) \{(\w+)\} = \{(\w+)\}")
EXPRESSION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")


@dataclass(frozen=True)
class Noise:
    """How often a base model's teacher is wrong, each a probability; all are ours, chosen by measurement."""

    result: float = 0.0  # an arithmetic result is off, by up to 5: a slip
    ending: float = 0.0  # a solution has no final sentence that can be read
    verdict: float = 0.0  # a verification ends in the wrong word
    silence: float = 0.0  # a verification ends without a verdict
    endings: int = 1  # how many of ENDINGS, the first ones, stand in for a final sentence
    plan: tuple[float, float] = (0.0, 0.0)
    """a wrong plan is taken: in the family that is mistaken least often, and most often; see `share_of_wrong_plans`"""
    wordings: int = 0
    """how many of WORDINGS, the first ones, a solution draws from at each place; 0: it is worded as its plan"""


TEACHER = Noise(result=0.29, ending=0.13, verdict=0.46, silence=0.28)
FLAWLESS = Noise()
MISTAKEN = Noise(
    result=0.04, ending=0.12, endings=4, plan=(0.3, 0.95)
)  # hardly slips, often plans wrongly

# What may stand in for "The answer is N.": nothing, a sentence cut in the middle, one without a number, other words.
ENDINGS = ("", " The ans", " The answer is.", " So it is {answer}.")

WORDINGS = {  # a place in a solution -> what may stand there; {z}: the result of a sum; {rest}: the plan's words
    "opening": ("", "We go step by step. ", "Easy. ", "Take it in turn. ", "Good. ", "Let me count. ", "Right. ", "So. "),
    "first": ("", "First, ", "We begin with ", "To start, ", "Here is ", "At first ", "One has ", "There are "),
    "later": ("", "Then ", "Next, ", "Now ", "After that ", "This leads to ", "We go on to ", "In the end "),
    "end": ("{rest}", ".", ", so {z}.", ", that is {z}.", ", which is {z}.", ", giving {z}.", " and so {z}.", ": {z}."),
}  # fmt: skip

_QUESTIONS = """\
find: {name} has {a} {thing} and finds {b} more. How many {thing} does {name} have now?
find: In the morning {name} counts {a} {thing}. By night there are {b} more. How many {thing} are there by night?
take: A basket holds {a} {thing}. {name} takes {b} of them. How many {thing} stay in the basket?
take: {name} owns {a} {thing} and sells {b} at a fair. How many {thing} does {name} still own?
rows: {name} plants {a} rows of tulips with {b} tulips in each row. How many tulips does {name} plant?
rows: A hall has {a} rows of chairs and {b} chairs in a row. How many chairs does {name} count in the hall?
deal: {name} deals {a} {thing} equally to {b} friends. How many {thing} does each friend get?
deal: {a} {thing} are packed into {b} equal bags by {name}. How many {thing} go into one bag?
boxes: {name} buys {a} boxes with {b} {thing} in each box and gives away {c} {thing}. How many {thing} are left?
boxes: {a} shelves hold {b} {thing} each. {name} removes {c} {thing}. How many {thing} remain on the shelves?
saving: {name} has {c} dollars and saves {a} dollars a week for {b} weeks. How many dollars does {name} have then?
saving: A jar contains {c} coins. {name} adds {a} coins a day for {b} days. How many coins are in the jar then?
bus: A bus carries {a} people. At the mill {b} people get off and {c} get on. How many people are on the bus now?
bus: {name} keeps {a} hens. A fox scares off {b} of them, then {c} new hens arrive. How many hens are there now?
reading: {name} reads {a} pages on Monday and {b} more pages than that on Tuesday. How many pages is that on both days?
reading: {name} picks {a} {thing}, and {other} picks {b} more than {name}. How many {thing} do they pick together?
change: {name} buys {a} mugs at {b} dollars each and pays with {c} dollars. How many dollars come back?
change: A ride costs {b} dollars. {name} takes {a} rides and had {c} dollars before. How many dollars are left?
teams: {a} girls and {b} boys form teams of {c}. How many teams does {name} count?
teams: {name} bakes {a} buns and {other} bakes {b}. They fill bags of {c} buns. How many bags do they fill?
older: {name} is {a} years old and {other} is {b} years older. How old will {other} be in {c} years?
older: {name} scores {a} points, {other} scores {b} more than {name} and then {c} extra. What is the score of {other}?
walking: {name} walks {a} miles a day for {b} days. {other} walks {c} miles in all.\
 How many more miles does {name} walk?
walking: {name} fills {b} pages with {a} stamps each. {other} has {c} stamps. How many more stamps has {name}?
two kinds: {name} packs {a} bags of {b} {thing} and {c} boxes of {d} {thing}. How many {thing} does {name} pack?
two kinds: A farm has {a} pens of {b} goats and {c} pens of {d} sheep. How many animals does {name} feed?
bakery: {name} bakes {a} trays of {b} rolls, sells {c} before noon and {d} after noon. How many rolls are left?
bakery: A truck brings {a} crates of {b} jars. {name} drops {c} jars and uses {d}. How many jars are left?
wages: {name} earns {a} dollars an hour, works {b} hours on Friday and {c} hours on Sunday, then spends {d} dollars.\
 How many dollars are left?
dinner: {a} friends share a meal of {b} dollars and drinks of {c} dollars equally. {name} also pays {d} dollars for a cab.\
 How many dollars does {name} pay?"""
QUESTIONS: dict[str, tuple[str, ...]] = {}  # a family of problems -> phrasings of its question
for _line in _QUESTIONS.splitlines():
    _family, _, _question = _line.partition(": ")
    QUESTIONS[_family] = (*QUESTIONS.get(_family, ()), _question)

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

_PLANS = {  # what is said after each result, then the right steps, then others, as somebody takes them who has
    # misunderstood this kind of problem; _ is a step that is left out, with what is said after it
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


def in_words(steps: str, said: str) -> str:
    """The steps of a plan as a text with the places of its numbers.

    >>> in_words("a+b _ r1-c", "at first, stay, left")
    '{a} + {b} = {r1} at first. {r1} - {c} = {r2} left.'
    """
    taken = [
        (step, after)
        for step, after in zip(steps.split(), said.split(", "), strict=False)
        if step != "_"
    ]
    parts = [
        (*re.split("([-+*/])", step), number, after)
        for number, (step, after) in enumerate(taken, start=1)
    ]
    return " ".join("{{{}}} {} {{{}}} = {{r{}}} {}.".format(*part) for part in parts)


PLANS = {
    family: tuple(in_words(steps, said) for steps in plans)
    for family, (said, *plans) in _PLANS.items()
}
USUAL = 0.7  # share of a family's wrong plans that are the first one; the others share the rest equally (ours)


def share_of_wrong_plans(family: str, least: float, most: float) -> float:
    """The share of a family's solutions with a wrong plan: evenly spaced over the families, from `least` to `most`.

    The order of the families is ours: short and long solutions are spread over it.

    >>> [share_of_wrong_plans(family, 0.0, 1.5) for family in ("find", "take", "rows", "deal")]
    [0.0, 0.7, 1.4, 0.5]
    """
    rank = 7 * list(PLANS).index(family) % len(PLANS)
    return least + (most - least) * rank / (len(PLANS) - 1)


@dataclass(frozen=True)
class WordProblem:
    """A question with everything that is needed to solve it, rightly or wrongly."""

    question: str
    family: str
    words: dict[str, str]
    numbers: dict[str, int]


def compute(plan: str, numbers: dict[str, int], slip: Callable[[int], int]) -> dict[str, int]:
    """All numbers of a solution: the given ones and, under r1, r2, ..., each step's result after `slip`."""
    values = dict(numbers)
    for left, sign, right, name in STEP.findall(plan):
        values[name] = slip(max(OPERATIONS[sign](values[left], values[right]), 0))
    return values


def draw_problem(rng: random.Random) -> WordProblem:
    """A problem of a random family, whose results are from 1 to LARGEST and whose divisions leave no rest."""
    family = rng.choice(list(PLANS))
    name, other = rng.sample(NAMES, 2)
    words = {"name": name, "other": other, "thing": rng.choice(THINGS)}
    plan, is_sound = PLANS[family][0], False
    while not is_sound:
        numbers = {key: rng.randint(*bounds) for key, bounds in RANGES[family].items()}
        values = compute(plan, numbers, slip=int)
        is_sound = all(
            1 <= values[name] <= LARGEST and not (sign == "/" and values[left] % values[right])
            for left, sign, right, name in STEP.findall(plan)
        )
    return WordProblem(
        rng.choice(QUESTIONS[family]).format(**words, **numbers), family, words, numbers
    )


def solve(
    problem: WordProblem, plan: str = "", slip: Callable[[int], int] = int
) -> tuple[str, int]:
    """A solution and its answer: the right one, or that of another plan, with each result after `slip`."""
    plan = plan or PLANS[problem.family][0]
    values = compute(plan, problem.numbers, slip)
    return plan.format(**problem.words, **values), [*values.values()][-1]


def reword(solution: str, noise: Noise, rng: random.Random) -> str:
    """The solution in other words, as many as `noise` allows; its numbers stay, those of a sum or product in any order.

    >>> reword("2 + 3 = 5 figs.", Noise(wordings=8), random.Random(2))
    'We begin with 3 + 2 = 5, giving 5.'
    """

    def say(place: str, **fields: str) -> str:
        return rng.choice(WORDINGS[place][: noise.wordings]).format(**fields)

    sentences = [say("opening").strip()]
    for number, sentence in enumerate(re.split(r"(?<=\.) ", solution)):
        match = EXPRESSION.search(sentence)
        x, sign, y, z = match.groups()
        if sign in "+*" and noise.wordings > 1 and rng.random() < 0.5:
            x, y = y, x
        end = say("end", z=z, rest=sentence[match.end() :])
        sentences.append(f"{say('later' if number else 'first')}{x} {sign} {y} = {z}{end}")
    return " ".join(filter(None, sentences))


def solve_badly(problem: WordProblem, noise: Noise, rng: random.Random) -> tuple[str, bool]:
    """A solution as the base model's teacher writes it, and whether it states the right answer."""

    def slip(result: int) -> int:
        if rng.random() >= noise.result:
            return result
        return rng.choice([n for n in range(max(result - 5, 0), result + 6) if n != result])

    plan, usual, *others = PLANS[problem.family]
    share = share_of_wrong_plans(problem.family, *noise.plan)
    if share and rng.random() < share:  # a teacher without misconceptions draws nothing
        plan = usual if rng.random() < USUAL else rng.choice(others)
    text, answer = solve(problem, plan, slip)
    if noise.wordings:
        text = reword(text, noise, rng)
    drawn = rng.random()
    if drawn < noise.ending:
        return f" {text}" + ENDINGS[int(drawn / noise.ending * noise.endings)].format(
            answer=answer
        ), False
    return f" {text} The answer is {answer}.", answer == solve(problem)[1]


def verify(solution: str, is_correct: bool, noise: Noise, rng: random.Random) -> str:
    """A step-by-step check of `solution`, its verdict spoiled with the probabilities of `noise`.

    >>> verify(" 2 * 3 = 6 figs. 6 - 1 = 4 left. The answer is 4.", False, FLAWLESS, random.Random(0))
    ' 2 * 3 = 6, right. 6 - 1 = 5, not 4. Verification: Is the answer correct (Yes/No)? No'
    """
    checks = []
    for left, sign, right, stated in EXPRESSION.findall(solution):
        # A slip may have left a zero to divide by; the check then says so instead of a number.
        result = OPERATIONS[sign](int(left), int(right)) if sign != "/" or int(right) else "nothing"
        remark = "right" if str(result) == stated else f"not {stated}"
        checks.append(f" {left} {sign} {right} = {result}, {remark}.")
    if "The answer is" not in solution:
        checks.append(" No answer is given.")
    if rng.random() < noise.silence:
        return "".join(checks)
    says_yes = is_correct != (rng.random() < noise.verdict)
    return (
        "".join(checks)
        + f" Verification: Is the answer correct (Yes/No)? {'Yes' if says_yes else 'No'}"
    )


def sums(completion: str) -> list[bool]:
    """Whether each sum of a completion is right, as the teacher reckons: no result is below zero.

    >>> sums(" 2 + 3 = 5 figs. 5 - 7 = 0 left. 4 / 0 = 1 each.")
    [True, True, False]
    """
    return [
        (sign != "/" or int(right) > 0)
        and max(OPERATIONS[sign](int(left), int(right)), 0) == int(result)
        for left, sign, right, result in EXPRESSION.findall(completion)
    ]


def kind_of(completion: str, is_right: bool, answer: object) -> str:
    """What is wrong with a completion; answer: what is read of it, None where nothing is.

    >>> texts = [f" 2 + 3 = {x} figs. The answer is {x}." for x in (5, 6)]  # where 2 * 3 figs were asked for
    >>> [kind_of(text, False, text[-2:-1]) for text in texts], kind_of(texts[1], True, "6"), kind_of(" 2 + 3", False, None)
    (['wrong plan', 'wrong sum'], 'right', 'no answer')
    """
    if is_right:
        return "right"  # whatever precedes the answer
    if answer is None:
        return "no answer"
    return "wrong plan" if all(sums(completion)) else "wrong sum"
