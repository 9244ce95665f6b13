"""A task for a chat model: short questions of twelve kinds. `make real-llm` trains a model on it.

`python -m examples.questions --model DIR --chat --max-new-tokens 12`. Its results are in
studies/real_model/.
"""

import random
import re
import unicodedata
from pathlib import Path

from toprlib.records import OUTCOMES, Outcome, Problem, Task
from toprlib.settings import Settings
from train_gsm8k import main

NUM_TEST = 96  # questions to test with
NUM_RATES = 48  # questions that chose the learning rate of studies/real_model/
COMMON = "a also an answer as city form it its known located official there word"


def find_words(text: str) -> list[str]:
    """The words of a text in lower case, without accents and without the genitive's s."""
    without_genitive = re.sub(r"['’]s\b", "", text)
    plain = unicodedata.normalize("NFKD", without_genitive).encode("ascii", "ignore")
    return re.findall("[a-z0-9]+", plain.decode().lower())


def read_questions() -> list[list[str]]:
    """The lines of questions.txt: kind, question, and answers with a slash between them."""
    text = Path(__file__).with_suffix(".txt").read_text("utf-8")
    return [line.split(" | ") for line in text.splitlines()]


def frame_words() -> set[str]:
    """Words that frame an answer: common ones and those of the questions. No answer has one."""
    words = set(COMMON.split())
    for _, question, _ in read_questions():
        words.update(find_words(question))
    return words


FRAME = frame_words()


def parse_answer(text: str) -> str | None:
    """What the first part of a text says besides the words that frame an answer; None if nothing.

    >>> parse_answer("In Colombia, it's Bogotá. Not"), parse_answer("The capital of")
    ('bogota', None)
    >>> parse_answer("Lima or Quito")
    'lima or quito'
    """
    for part in re.split(r"[.,:;!?()\n]", text):
        words = [word for word in find_words(part) if word not in FRAME]
        if words:
            return " ".join(words)
    return None


def grade(text: str, gold: frozenset[str]) -> Outcome:
    """correct if the first answer is one of `gold`, invalid if there is none."""
    answer = parse_answer(text)
    if answer is None:
        return "invalid"
    return "correct" if answer in gold else "incorrect"


def questions_task(settings: Settings) -> Task:
    """The questions in random order: the first ones are for tests, the last ones for training."""
    problems = []
    for _, question, answers in read_questions():
        gold = frozenset(" ".join(find_words(answer)) for answer in answers.split("/"))
        problems.append(Problem(question, question, gold))
    random.Random(0).shuffle(problems)
    return Task(
        name="questions",
        train=problems[NUM_TEST + NUM_RATES :][: settings.problems],
        test=problems[:NUM_TEST][: settings.test_problems],
        parse=parse_answer,
        grade=grade,
        outcomes=OUTCOMES,
    )


if __name__ == "__main__":
    main("questions", __doc__, questions_task)
