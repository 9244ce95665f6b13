"""Is that TOPR? Checks a loss against the paper, and names the differences.

    topr-conformance path/file.py:function      # or: python -m topr_conformance ...

The function takes logp, logmu (B, T), reward (B,) and mask (B, T), and returns a scalar to be
minimised. Only its gradient is compared, up to a constant factor: a sum over completions is fine.
The exit status is 0 for the paper's loss only, with or without a baseline.
"""

import argparse
import importlib
import json
import runpy
import sys
from dataclasses import asdict
from pathlib import Path

from topr_conformance.identification import identify
from topr_conformance.losses import InputError, Loss, describe_error
from topr_conformance.vectors import TEXT


def main() -> None:
    """The command: prints what the loss is and what to change, and exits with the verdict."""
    parser = argparse.ArgumentParser("topr-conformance", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("loss", nargs="?", help="package.module:function or path/file.py:function")
    parser.add_argument("--list", action="store_true", help="show the test vectors and exit")
    parser.add_argument("--verbose", action="store_true", help="also show what each measured")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random batches")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for report.json")
    options = parser.parse_args()
    if options.list:
        print(TEXT)
        return
    if options.loss is None:
        parser.error("give a loss, or --list")
    try:
        report = identify(load(options.loss), options.seed)
        if options.out:
            options.out.mkdir(parents=True, exist_ok=True)
            content = json.dumps({"loss": options.loss, **asdict(report)}, indent=2)
            (options.out / "report.json").write_text(f"{content}\n", encoding="utf-8")
    except (InputError, OSError) as error:
        sys.exit(f"topr-conformance {options.loss}: {error}")
    print(f"{options.loss}: {report.variant}")
    print(*report.changes, f"arguments: {report.arguments}", sep="\n")
    if options.verbose:
        print(*report.vectors, sep="\n")
    sys.exit(bool(report.changes))


def load(name: str) -> Loss:
    """Import the function that package.module:function or path/file.py:function names.

    A file imports from its own folder. Raises InputError if the function cannot be imported.
    """
    location, _, attribute = name.rpartition(":")
    is_file = location.endswith(".py")
    sys.path.insert(0, str(Path(location).parent) if is_file else "")
    try:
        if is_file:
            return runpy.run_path(location)[attribute]
        return getattr(importlib.import_module(location), attribute)
    except Exception as error:  # a user's module may raise anything
        form = "give package.module:function or path/file.py:function"
        raise InputError(f"cannot be imported: {describe_error(error)}; {form}") from error


if __name__ == "__main__":
    main()
