"""Is that TOPR? Checks a loss against the paper, and names the differences.

    topr-conformance path/file.py:function      # or: python -m topr_conformance ...
    topr-conformance package.module:function --random 200
    topr-conformance --list

The function takes logp, logmu (B, T), reward (B,) and mask (B, T), and returns a scalar to be
minimised. Only its gradient is compared, up to a constant factor: a sum over completions is fine.
The exit status is 0 for the paper's loss only.
"""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from topr_conformance import VECTORS, InputError, Report, adapted, compare, identify, load

MAX_RANDOM = 10_000  # batches: some seconds
# The form of what a loss returns -> what a trainer must do with it, as the checker did
MEANS = {
    "tokens": (
        "the loss returns a value for each token: your trainer must average these over each "
        "completion's tokens, then over completions"
    ),
    "mean over completions": (
        "the loss returns a value for each completion: your trainer must average these over "
        "completions, and do nothing else"
    ),
}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line as a namespace; wrong options end the process with status 2."""
    parser = argparse.ArgumentParser(
        "topr-conformance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "loss", nargs="?", help="what to check, as package.module:function or file.py:function"
    )
    parser.add_argument("--list", action="store_true", help="show the test vectors and exit")
    parser.add_argument(
        "--verbose", action="store_true", help="also show what each vector measured"
    )
    parser.add_argument(
        "--random",
        type=int,
        default=0,
        metavar="N",
        help="also compare N random batches with Eq. 7",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random batches")
    parser.add_argument(
        "--out", type=Path, help="folder for report.json; without it nothing is written"
    )
    options = parser.parse_args(arguments)
    if not 0 <= options.random <= MAX_RANDOM:
        parser.error(f"--random {options.random}: give 0 to {MAX_RANDOM} batches")
    return options


def main() -> None:
    """The command: prints what the loss is and what to change, and exits with the verdict."""
    options = parse_arguments()
    if options.list:
        # Its reader may close the pipe early, as `head` does: end then, without a traceback.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        print("\n\n".join(VECTORS.values()))
        return
    try:
        if options.loss is None:
            raise InputError(
                "needs a loss: package.module:function or file.py:function; --list shows the tests"
            )
        loss = load(options.loss)
        report = identify(loss)
        difference = None
        if options.random:
            difference = compare(adapted(loss, report.adapter), options.random, options.seed)
        if options.out is not None:
            write_report(options, report, difference)
    except InputError as error:
        sys.exit(f"topr-conformance: {error}")
    except OSError as error:
        problem = f"--out {options.out}: {error.strerror}"
        sys.exit(f"topr-conformance: {problem}; name a folder for report.json")
    print_report(options, report, difference)
    sys.exit(report.variant != "paper" or difference is not None)


def write_report(options: argparse.Namespace, report: Report, difference: str | None) -> None:
    """Write report.json into the folder --out, which is made if it is missing."""
    content = {
        "loss": options.loss,
        **asdict(report),
        "random": options.random,
        "difference": difference,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=2) + "\n"
    (options.out / "report.json").write_text(text, encoding="utf-8")


def print_report(options: argparse.Namespace, report: Report, difference: str | None) -> None:
    """Print the verdict, what to change, and what the options ask for."""
    note = f" ({report.note})" if report.note else ""
    print(f"{options.loss}: {report.variant}{note}")
    for sentence in report.changes:
        print(f"to change: {sentence}")
    print(f"arguments: {report.arguments}")
    if report.adapter != "none":
        print(f"called with: {report.adapter} (a form that the checker knows, not a difference)")
    for form, mean in MEANS.items():
        if report.adapter.endswith(form):
            print(mean)
    if options.random:
        agree = f"{options.random} random batches agree with Eq. 7, with the arguments above"
        print(difference or agree)
    if options.verbose:
        print(report.table())


if __name__ == "__main__":
    main()
