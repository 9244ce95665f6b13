"""What a run measures of itself, beside the estimate of --dry-run: times.json as a table."""

from collections.abc import Mapping
from typing import Any

import torch

from pipeline.report import Table

HOURS = "hours on H100s, estimated"  # the key of what --dry-run says of the stages


def table_of(noted: Mapping[str, Any]) -> Table:
    """The content of times.json as a table."""
    seconds, counts, estimated = noted["seconds"], noted["counts"], noted.get(HOURS, {})
    per = {
        "sampling": ("sampled tokens", "tokens/s", True),
        "training": ("steps", "s a step", False),
    }
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
