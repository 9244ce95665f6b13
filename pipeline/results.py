"""What the stages' files say, evaluated: results.json and curve.png."""

import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from pipeline.dataset import Inputs
from pipeline.evaluation import MEASURED, SIGNS, Scored, evaluate, evaluate_held_out
from pipeline.metrics import over_epoch
from pipeline.plots import Panel, draw, draw_curve, estimates, learnt_from, save_figure
from pipeline.records import Sample, read_text, write_file
from pipeline.runtime.preflight import on_cpu
from pipeline.runtime.processes import by_rank_zero
from pipeline.runtime.run_folder import read_checked, read_json
from pipeline.settings import Settings

# iteration -> samples trained on and file of each evaluation; the first is that of the initial model
Evaluations = Mapping[int, Sequence[tuple[int, Path]]]


@by_rank_zero
def publish(
    folder: Path, settings: Settings, inputs: Inputs, evaluations: Evaluations
) -> dict[str, Any]:
    """Read the evaluations of a run, write results.json and curve.png, and return what the former holds.

    InputError where a file of the run is missing or damaged.
    """
    results, iterations, last = {}, [], None
    if settings.evaluation:
        last = results["before"] = measure(settings, inputs, evaluations[1][0][1])
    for number in range(1, settings.iterations + 1):
        file = folder / f"iteration-{number}" / "dataset.json"
        counts = read_json(file, "remove it and train.jsonl to make both anew")
        mismatch = counts.pop("engine_mismatch")
        steps = map(json.loads, read_text(file.with_name("metrics.jsonl")).splitlines())
        entry = {"dataset": counts, "training": over_epoch([*steps])}
        if settings.evaluation:
            curve = [{"samples_seen": 0, **last}]
            for seen, file in evaluations[number][1:] if number == 1 else evaluations[number]:
                last = measure(settings, inputs, file)
                curve.append({"samples_seen": seen, **last})
            entry |= {"curve": curve, "after": last}
        iterations.append(entry if mismatch is None else entry | {"engine_mismatch": mismatch})
    versions = {
        name: module.__version__
        for name, module in (("torch", torch), ("transformers", transformers))
    }
    results |= {
        "iterations": iterations,
        "versions": {"python": platform.python_version()} | versions,
    }
    if torch.cuda.is_available() or on_cpu():  # what is made for a processor need not say so
        results["device"] = (
            torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu, a rehearsal"
        )
    if iterations and settings.evaluation:
        title = f"{settings.method}, learning rate {settings.lr:g}"
        draw_tests = draw_curve if inputs.held_out is None else draw_held_out
        save_figure(draw_tests(iterations, title), folder / "curve.png")
    write_file(folder / "results.json", json.dumps(results, indent=2) + "\n")
    return results


def measure(settings: Settings, inputs: Inputs, file: Path) -> dict[str, Any]:
    """An entry of results.json: how good the completions in `file` are."""
    if inputs.held_out is not None:
        return evaluate_held_out(read_checked(file, Scored))
    return evaluate(read_checked(file, Sample), inputs.task, settings.k, settings.seed)


def draw_held_out(iterations: Sequence[Mapping[str, Any]], title: str) -> Any:
    """A figure of log pi - log mu and of log pi, both per token, over training, as `draw_curve` of one iteration."""
    panels = []
    for key, heading in (("log_ratio_per_token", title), ("logp_per_token", "held-out samples")):
        lines = []
        for name, style in zip(SIGNS, ("p1", "p3"), strict=True):
            curve = {point["samples_seen"]: point[name][key] for point in iterations[0]["curve"]}
            lines += [estimates(curve, f"{name}s", style)] if all(curve.values()) else []
        panels.append(Panel(heading, "samples trained on", f"{MEASURED[key]}, ± 2 SE", lines))
    return draw([*panels, *learnt_from(iterations)])
