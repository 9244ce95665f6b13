"""A process that reads and compares mathematical answers: one JSON object a line in, one a line out; see judge.py.

It imports math-verify and nothing of this project: it is started again whenever an answer was too much for it.
"""

import json
import logging
import os
import resource
import sys

MEMORY = 2 << 30  # bytes, ours


def main() -> None:
    """Answer `{"ready": true}`, then each `[gold, answer]` by `{"equal": bool}`."""
    seconds = int(sys.argv[1])  # for reading an answer, and for comparing two
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    sys.path.pop(0)  # this folder, whose files have names that others have too
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get among the answers
    logging.disable(logging.CRITICAL)
    from math_verify import LatexExtractionConfig, parse, verify

    def answer(content: dict) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    answer({"ready": True})
    for line in sys.stdin:
        # `$...$`: without it, math-verify reads no LaTeX. LaTeX only: its reader for plain text ends in Python's eval.
        found = [parse(f"${text}$", [LatexExtractionConfig()], parsing_timeout=seconds) for text in json.loads(line)]
        answer({"equal": all(found) and verify(*found, strict=True, timeout_seconds=seconds)})


if __name__ == "__main__":
    main()
