"""The process that compares answers for math_task.py.

math-verify computes what an answer says: 9^{9^{9^9}} takes unlimited time and memory. An exception
in the middle can leave sympy in a state in which later results are wrong. So a comparison that
takes too long ends its process. The limit is of CPU time: other programs change no grade.
"""

import json
import logging
import mmap
import os
import resource
import signal
import sys
from typing import Any

MEMORY = 2 << 30  # bytes
# Largest relative difference of a rounded decimal, and of two forms of one number.
ROUNDED = 2e-5
EXACT = 1e-30


def main() -> None:
    """Read pairs (gold, answer) as JSON; write whether they are equal, null if one took too long.

    Argument: the seconds of CPU time for a pair.
    """
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    logging.disable(logging.CRITICAL)
    is_equal("2x + 2", "2(x + 1)")  # imports and compiles once, for all processes
    pairs = json.load(sys.stdin)
    verdicts = mmap.mmap(-1, len(pairs) + 1)  # a byte for each, which the processes share
    start = 0
    while start < len(pairs):
        if os.fork() == 0:
            try:
                for index in range(start, len(pairs)):
                    signal.setitimer(signal.ITIMER_PROF, float(sys.argv[1]))  # then SIGPROF ends it
                    verdicts[index] = 2 if is_equal(*pairs[index]) else 1
            finally:
                os._exit(0)
        os.wait()
        start = verdicts.find(b"\0", start) + 1  # after the pair in which the process ended
    print(json.dumps([{1: False, 2: True}.get(verdicts[index]) for index in range(len(pairs))]))


def is_equal(gold: str, answer: str) -> bool:
    """Whether two texts are equal by math-verify, and by their numbers where they have a value."""
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy import And, Eq, FiniteSet, Interval, Tuple

    latex = [LatexExtractionConfig()]  # the reader for plain text ends in Python's eval
    # math-verify reads LaTeX only between dollars. Its own limits are of the wall clock.
    golds, answers = (parse(f"${text}$", latex, parsing_timeout=None) for text in (gold, answer))
    options = {"strict": True, "allow_set_relation_comp": True, "timeout_seconds": None}
    if not golds or not answers or not verify(golds, answers, **options):
        return False
    gold, answer = golds[0], answers[0]  # what follows in the lists is text
    # To math-verify, the list 2,5 is the pair (2,5), the interval 2 < x < 5 is the list, and 8=7
    # is 7.
    for one, other in ((gold, answer), (answer, gold)):
        if isinstance(one, Interval | Tuple) and isinstance(other, FiniteSet):
            return False
    equations = [] if isinstance(answer, str) else answer.atoms(Eq)
    is_inequality = isinstance(answer, And) or any(equation.has(Interval) for equation in equations)
    if isinstance(gold, FiniteSet) and is_inequality:
        return False
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
    if one == other:
        return True
    finiteness = {one.is_finite, other.is_finite}  # None: not known
    if finiteness != {True}:
        return finiteness != {True, False}
    tolerance = ROUNDED if one.has(Float) or other.has(Float) else EXACT
    size = abs(one.evalf(50)) + abs(other.evalf(50))
    return (abs((one - other).evalf(50)) > tolerance * size) is not true


if __name__ == "__main__":
    main()
