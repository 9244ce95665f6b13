"""A task for a chat model: short questions of twelve kinds. `make real-llm` trains SmolLM2-135M-Instruct on it.

`python -m examples.questions --model DIR --chat --max-new-tokens 12`; studies/real_model/ has what it came to.
"""

import random
import re
import unicodedata
from pathlib import Path

from pipeline.records import OUTCOMES, Outcome, Problem, Task
from pipeline.settings import Settings
from train_gsm8k import main

TESTS, RATES = (
    96,
    48,
)  # questions to test with, and those that chose the learning rate of studies/real_model/


def words(text: str) -> list[str]:
    """The words of a text, in small letters, without accents and the genitive's s."""
    plain = unicodedata.normalize("NFKD", re.sub(r"['’]s\b", "", text)).encode("ascii", "ignore")
    return re.findall("[a-z0-9]+", plain.decode().lower())


LINES = [
    line.split(" | ") for line in Path(__file__).with_suffix(".txt").read_text("utf-8").splitlines()
]
FRAME = set("a also an answer as city form it its known located official there word".split())
FRAME |= {word for _, question, _ in LINES for word in words(question)}  # no answer has one of them


def first_answer(text: str) -> str | None:
    """What the first part of a text says besides the words that frame an answer; None where no part says anything.

    >>> first_answer("In Colombia, it's Bogotá. Not"), first_answer("Lima or Quito"), first_answer("The capital of")
    ('bogota', 'lima or quito', None)
    """
    parts = (
        [word for word in words(part) if word not in FRAME]
        for part in re.split(r"[.,:;!?()\n]", text)
    )
    return next((" ".join(part) for part in parts if part), None)


def grade(text: str, gold: frozenset[str]) -> Outcome:
    """correct where the first answer is one of `gold`, invalid where there is none: of a list the first one counts."""
    return (
        "invalid"
        if (answer := first_answer(text)) is None
        else "correct"
        if answer in gold
        else "incorrect"
    )


def questions(settings: Settings) -> Task:
    """The questions in random order: the first are for tests, the last for training."""
    problems = [
        Problem(q, q, frozenset(" ".join(words(a)) for a in gold.split("/")))
        for _, q, gold in LINES
    ]
    random.Random(0).shuffle(problems)
    train, test = (
        problems[TESTS + RATES :][: settings.problems],
        problems[:TESTS][: settings.test_problems],
    )
    return Task("questions", train, test, parse=first_answer, grade=grade, outcomes=OUTCOMES)


if __name__ == "__main__":
    main("questions", __doc__, questions)
