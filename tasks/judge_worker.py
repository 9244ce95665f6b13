"""The process that compares answers for judge.py. It imports nothing else, to start fast."""

import logging
import resource
import sys
from multiprocessing.connection import Connection

MEMORY = 2 << 30  # bytes, ours


def main() -> None:
    """Answer True when ready, then each pair (gold, answer) by whether the two are equal.

    Arguments: the seconds to read an answer or to compare two, and the number of the pipe.
    """
    seconds = int(sys.argv[1])
    pipe = Connection(int(sys.argv[2]))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    logging.disable(logging.CRITICAL)
    from math_verify import LatexExtractionConfig, parse, verify

    pipe.send(True)
    latex = [LatexExtractionConfig()]  # the reader for plain text ends in Python's eval
    while True:  # until EOFError, when the judge has ended
        expressions = []
        for text in pipe.recv():
            # math-verify reads LaTeX only between dollars.
            expressions.append(parse(f"${text}$", latex, parsing_timeout=seconds))
        is_equal = all(expressions) and verify(*expressions, strict=True, timeout_seconds=seconds)
        pipe.send(bool(is_equal))


if __name__ == "__main__":
    main()
