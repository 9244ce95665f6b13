"""What a run measures of itself: times.json, and a table of it beside the estimate of --dry-run."""

import json
import resource
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from pipeline.dataset import Inputs
from pipeline.dry_run import plan
from pipeline.records import write_file
from pipeline.report import Table
from pipeline.runtime.processes import Times, rank, ranks
from pipeline.settings import Settings

HOURS = "hours on H100s, estimated"  # the key of what --dry-run says of the stages


def note_times(folder: Path, times: Times, settings: Settings, inputs: Inputs) -> None:
    """On rank zero, add to times.json what was done since the last call; `times` begins anew."""
    if rank() > 0:
        return
    file = folder / "times.json"
    earlier = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    peak = peak or 1000 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # of this process, in kilobytes
    seconds = times.seconds | {"other": time.monotonic() - times.begun - times.seconds.total()}
    noted = earlier | {"processes": ranks(), "peak bytes": max(peak, earlier.get("peak bytes", 0))}
    for name, new in {"seconds": seconds, "counts": times.counts}.items():
        old = earlier.get(name, {})
        noted[name] = {key: old.get(key, 0) + new.get(key, 0) for key in {**old, **new}}
    if HOURS not in earlier and (settings.preset != "laptop" or torch.cuda.is_available()):
        ending = ", on H100s"
        planned = {name: value for name, (value, *_) in plan(settings, inputs, ranks()).items()}
        noted[HOURS] = {name.removesuffix(ending): planned[name] for name in planned if name.endswith(ending)}
        noted["bytes without activations, estimated"] = planned["training, per GPU"]
    with suppress(OSError):  # a full disk: what raised it says so
        write_file(file, json.dumps(noted, indent=2) + "\n")
        times.seconds.clear(), times.counts.clear()
        times.begun = time.monotonic()


def table_of(noted: Mapping[str, Any]) -> Table:
    """The content of times.json as a table."""
    seconds, counts, estimated = noted["seconds"], noted["counts"], noted.get(HOURS, {})
    per = {"sampling": ("sampled tokens", "tokens/s", True), "training": ("steps", "s a step", False)}
    rows = []
    for stage, took in seconds.items():
        name, unit, is_rate = per.get(stage, ("", "", False))
        speed = ""
        if counts.get(name) and took:
            speed = f"{counts[name] / took if is_rate else took / counts[name]:,.3g} {unit}"
        guess = f"{3600 * estimated[stage]:,.0f} s" if stage in estimated else "-"
        rows.append([stage, f"{took:,.0f} s", guess, speed])
    where = "of a GPU" if torch.cuda.is_available() else "of a process"
    least = noted.get("bytes without activations, estimated", 0)
    guess = f"{least / 1e9:.1f} GB + activations" if least else "-"
    rows.append([f"peak memory {where}", f"{noted['peak bytes'] / 1e9:.1f} GB", guess, ""])
    return Table(["", "measured", "estimated (H100s)", ""], rows)
