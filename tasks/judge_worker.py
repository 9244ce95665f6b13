"""The process that reads and compares mathematical answers for judge.py: a line of JSON in, a line of JSON out.

It imports math-verify and nothing of this project, so that it starts fast: it is restarted after an answer that took
too long.
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
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # so that what libraries print does not mix with the answers
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
