"""The process that compares answers for judge.py. It imports little, to start fast."""

import logging
import resource
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

MEMORY = 2 << 30  # bytes, ours
# Largest relative difference of a rounded decimal, and of two forms of one number; ours.
ROUNDED = 2e-5
EXACT = 1e-30


def main() -> None:
    """Answer True when ready, then each pair (gold, answer) by whether the two are equal.

    Arguments: the seconds of CPU time for a pair, and the number of the pipe. A comparison that
    takes longer ends the process.
    """
    seconds = int(sys.argv[1])
    pipe = Connection(int(sys.argv[2]))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    logging.disable(logging.CRITICAL)

    compare("2x + 2", "2(x + 1)")  # imports and compiles now, not in the time of the first pair
    pipe.send(True)
    while True:  # until EOFError, when the judge has ended
        gold, answer = pipe.recv()
        signal.setitimer(signal.ITIMER_PROF, seconds)  # at its end SIGPROF ends the process
        is_equal = compare(gold, answer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        pipe.send(is_equal)


def compare(gold: str, answer: str) -> bool:
    """Whether two texts are equal by math-verify, and by their numbers where they have a value."""
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy import Eq, FiniteSet, Interval, Tuple

    latex = [LatexExtractionConfig()]  # the reader for plain text ends in Python's eval
    # math-verify reads LaTeX only between dollars. Its own limits are of the wall clock.
    golds, answers = (parse(f"${text}$", latex, parsing_timeout=None) for text in (gold, answer))
    options = {"strict": True, "allow_set_relation_comp": True, "timeout_seconds": None}
    if not golds or not answers or not verify(golds, answers, **options):
        return False
    gold, answer = golds[0], answers[0]  # what follows in the lists is text
    # To math-verify, the list 2,5 is the pair (2,5), and 8=7 is 7.
    if isinstance(gold, Interval | Tuple) and isinstance(answer, FiniteSet):
        return False
    equations = [] if isinstance(answer, str) else answer.atoms(Eq)
    pairs = [(gold, answer), *(equation.args for equation in equations)]
    return all(may_be_equal(one, other) for one, other in pairs)


def may_be_equal(one: Any, other: Any) -> bool:
    """False for two numbers that differ by more than rounding; math-verify takes 1/2^99 for 1/2^98.

    True for expressions without a value, and for 50%, which math-verify takes for 50, too.
    """
    from sympy import Expr, Float, UnevaluatedExpr, true

    for expression in (one, other):
        is_number = isinstance(expression, Expr) and expression.is_number
        if not is_number or expression.has(UnevaluatedExpr):
            return True
    one = one.doit()
    other = other.doit()
    if one == other or not (one.is_finite and other.is_finite):
        return True
    tolerance = ROUNDED if one.has(Float) or other.has(Float) else EXACT
    size = abs(one.evalf(50)) + abs(other.evalf(50))
    return (abs((one - other).evalf(50)) > tolerance * size) is not true


if __name__ == "__main__":
    main()
