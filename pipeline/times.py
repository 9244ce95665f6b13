"""What a run measures of itself: times.json, and a table of it beside the estimate of --dry-run."""

import json
import resource
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from pipeline.records import write_file
from pipeline.report import Table
from pipeline.runtime.processes import ranks

if TYPE_CHECKING:
    from pipeline.stages import Run

HOURS = "hours on H100s, estimated"  # the key of what --dry-run says of the stages


def note_times(run: "Run", moments: Sequence[tuple[str, float]]) -> None:
    """Write times.json: what this call of the command did, added to what earlier calls in the folder have noted."""
    file = run.folder / "times.json"
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    peak = peak or 1000 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # of this process, in kilobytes
    found: dict[str, Any] = {"processes": ranks(), "peak bytes": max(peak, known.get("peak bytes", 0))}
    seconds: dict[str, float] = defaultdict(float)
    for (stage, begun), (_, ended) in pairwise(moments):
        seconds[stage] += ended - begun
    for name, new in {"seconds": seconds, "counts": run.counts}.items():
        old = known.get(name, {})
        found[name] = {key: old.get(key, 0) + new.get(key, 0) for key in {**old, **new}}
    if run.settings.preset != "laptop" or torch.cuda.is_available():
        from pipeline.dry_run import plan

        ending = ", on H100s"
        planned = {name: value for name, (value, *_) in plan(run.settings, run.inputs, ranks()).items()}
        found[HOURS] = {name.removesuffix(ending): planned[name] for name in planned if name.endswith(ending)}
        found["bytes without activations, estimated"] = planned["training, per GPU"]
    write_file(file, json.dumps(found, indent=2) + "\n")


def table_of(found: Mapping[str, Any]) -> Table:
    """The content of times.json as a table."""
    seconds, counts, estimated = found["seconds"], found["counts"], found.get(HOURS, {})
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
    least = found.get("bytes without activations, estimated", 0)
    guess = f"{least / 1e9:.1f} GB + activations" if least else "-"
    rows.append([f"peak memory {where}", f"{found['peak bytes'] / 1e9:.1f} GB", guess, ""])
    return Table(["", "measured", "estimated (H100s)", ""], rows)
