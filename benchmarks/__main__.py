"""The command line of all benchmarks: `python -m benchmarks NAME --help` says what each can be told."""

import json
import os
import platform
import re
import shlex
import sys
import time
from inspect import getdoc
from pathlib import Path

import torch
import tyro

from benchmarks import Settings, comparisons, fake_8b_step
from pipeline.records import write_file
from pipeline.results import versions

NAMES = {"loss_memory": comparisons, "overhead": comparisons, "fake_8b_step": fake_8b_step}


def main(name: str, arguments: list[str]) -> list[str]:
    """Measure, print, and write OUT/NAME.json; what the benchmark found to be wrong, in lines."""
    measure, program = getattr(NAMES[name], name), f"python -m benchmarks {name}"
    settings = tyro.cli(Settings, prog=program, description=getdoc(measure), args=arguments)
    processors = [*re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text()), platform.machine()]
    machine = {"processor": processors[0], "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    machine |= versions() | {"date": time.strftime("%Y-%m-%d")}
    found = {"command": f"{program} {shlex.join(arguments)}".strip(), "machine": machine} | measure(settings)
    faults = found.pop("faults", [])
    for table, lines in NAMES[name].tables(found):
        table.print()
        print(*lines, sep="\n")
    write_file(settings.out / f"{name}.json", json.dumps(found, indent=1) + "\n")
    return faults


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        sys.exit(f"python -m benchmarks NAME [options]: NAME is one of {', '.join(NAMES)}")
    sys.exit("\n".join(main(sys.argv[1], sys.argv[2:])) or None)
