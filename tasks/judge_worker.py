"""The process that compares mathematical answers for judge.py. It imports nothing of this project, to start fast."""

import json
import logging
import os
import resource
import sys

MEMORY = 2 << 30  # bytes, ours


def main() -> None:
    """Answer `{"ready": true}`, then each line `[gold, answer]` by `{"equal": bool}`."""
    seconds = int(sys.argv[1])  # for reading an answer, and for comparing two
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # so that what libraries print does not mix with the answers
    logging.disable(logging.CRITICAL)
    from math_verify import LatexExtractionConfig, parse, verify

    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        # `$...$`: without it, math-verify reads no LaTeX. LaTeX only: its reader for plain text ends in Python's eval.
        found = [parse(f"${text}$", [LatexExtractionConfig()], parsing_timeout=seconds) for text in json.loads(line)]
        is_equal = all(found) and verify(*found, strict=True, timeout_seconds=seconds)
        print(json.dumps({"equal": is_equal}), file=answers)


if __name__ == "__main__":
    main()
