"""The process that compares answers for judge.py. It imports nothing else, to start fast."""

import logging
import resource
import sys
from multiprocessing.connection import Connection

MEMORY = 2 << 30  # bytes, ours


def main() -> None:
    """Answer True when ready, then each pair (gold, answer) by whether the two are equal."""
    seconds, pipe = (
        int(sys.argv[1]),
        Connection(int(sys.argv[2])),
    )  # for reading an answer, and for comparing two
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    logging.disable(logging.CRITICAL)
    from math_verify import LatexExtractionConfig, parse, verify

    pipe.send(True)
    for pair in iter(pipe.recv, None):  # until EOFError, where the judge has ended
        # `$...$`: math-verify reads no LaTeX without it. LaTeX only: its reader for plain text
        # ends in Python's eval.
        expressions = [
            parse(f"${text}$", [LatexExtractionConfig()], parsing_timeout=seconds) for text in pair
        ]
        pipe.send(
            bool(all(expressions) and verify(*expressions, strict=True, timeout_seconds=seconds))
        )


if __name__ == "__main__":
    main()
