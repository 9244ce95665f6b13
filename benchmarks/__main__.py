"""The command line of all benchmarks: `python -m benchmarks NAME --help` says what each can be told."""

import json
import shlex
import sys
from importlib import import_module

import tyro

from benchmarks import measuring
from pipeline.records import write_file
from pipeline.runtime.processes import rank

NAMES = "train_step loss_memory overhead sampling scaling end_to_end gpu_step fake_8b_step".split()


def main(name: str, arguments: list[str]) -> list[str]:
    """Measure, print, and write OUT/NAME.json; what the benchmark found to be wrong, in lines."""
    module = import_module(f"benchmarks.{name}")
    program = f"python -m benchmarks {name}"
    settings = tyro.cli(module.Settings, prog=program, description=module.__doc__, args=arguments)
    found = {"command": f"{program} {shlex.join(arguments)}".strip()} | module.measure(settings)
    faults = found.pop("faults", [])
    if rank() == 0:
        for table, lines in getattr(module, "tables", measuring.tables)(found):
            table.print()
            print(*lines, sep="\n")
        write_file(settings.out / f"{name}.json", json.dumps(found, indent=1, default=str) + "\n")
    return faults


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        sys.exit(f"python -m benchmarks NAME [options]: NAME is one of {', '.join(NAMES)}")
    sys.exit("\n".join(main(sys.argv[1], sys.argv[2:])) or None)
