"""Is that TOPR? Checks a loss against the paper, and names the differences.

    topr-conformance package.module:function      # or: python -m conformance folder/file.py:function
    topr-conformance package.module:function --random 200
    topr-conformance --list

The function takes logp, logmu (B, T), reward (B,) and mask (B, T), and returns a scalar to be minimised. Its gradient
decides; a constant factor and a sum over sequences are no difference. The exit status is 0 for the paper's loss only.
"""

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path


def read(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line as a namespace; wrong options end the process with status 2."""
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("topr-conformance", description=__doc__, formatter_class=kind)
    parser.add_argument(
        "loss", nargs="?", help="what to check, as package.module:function or file.py:function"
    )
    parser.add_argument("--list", action="store_true", help="show the vectors and do nothing else")
    parser.add_argument("--verbose", action="store_true", help="show what each vector found, too")
    parser.add_argument(
        "--random",
        type=int,
        default=0,
        metavar="N",
        help="compare N ragged batches with Eq. 7, too",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random batches")
    parser.add_argument(
        "--out", type=Path, help="folder for report.json; without it nothing is written"
    )
    options = parser.parse_args(arguments)
    if options.random < 0:
        parser.error(f"--random {options.random}: must not be negative")
    return options


def main() -> None:
    """The command: prints what the loss is and what to change; exit status 0 for the paper's loss only."""
    options = read()
    sys.path.insert(
        0, str(Path(__file__).resolve().parent.parent)
    )  # the current folder may hold another topr.py
    from topr_conformance import VECTORS, InputError, adapted, compare, identify, load

    if options.list:
        signal.signal(
            signal.SIGPIPE, signal.SIG_DFL
        )  # its reader may have seen enough, as `head` has
        print("\n\n".join(VECTORS.values()))
        return
    try:
        if options.loss is None:
            raise InputError(
                "say which loss to check, as package.module:function or file.py:function, or --list"
            )
        loss = load(options.loss)
        report = identify(loss)
        difference = (
            compare(adapted(loss, report.adapter), options.random, options.seed)
            if options.random
            else None
        )
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            content = (
                {"loss": options.loss}
                | asdict(report)
                | {"random": options.random, "difference": difference}
            )
            (options.out / "report.json").write_text(
                json.dumps(content, indent=2) + "\n", encoding="utf-8"
            )
    except InputError as error:
        sys.exit(f"conformance: {error}")
    except OSError as error:
        sys.exit(
            f"conformance: --out {options.out}: {error.strerror}; name a folder, for report.json"
        )
    print(f"{options.loss}: {report.variant}{f' ({report.note})' if report.note else ''}")
    print(*(f"to change: {sentence}\n" for sentence in report.changes), sep="", end="")
    if report.adapter != "none":
        print(f"called with: {report.adapter}")
    if report.adapter.endswith(("tokens", "mean over completions")):
        print(
            "its values were averaged over a completion's tokens, then over completions: your trainer has to do that"
        )
    if options.random:
        print(difference or f"{options.random} random batches agree with Eq. 7")
    if options.verbose:
        print(report.table())
    sys.exit(report.variant != "paper" or difference is not None)


if __name__ == "__main__":
    main()
