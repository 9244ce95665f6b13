"""Held-out samples: how training has moved log pi of completions that it has not seen. No engine samples for it.

TOPR is to make good completions more probable and bad ones less (Section 3), so that log pi - log mu of held-out
positives should rise, and that of negatives fall. Intervals are +- 2 standard errors over the samples, as if these were
independent; they tell how far other held-out samples would move the number.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from pipeline.compose import baselines_of
from pipeline.dataset import EpochStep, Row, encode, score
from pipeline.models.language_model import LanguageModel
from pipeline.plots import Panel, draw, estimates
from pipeline.records import Sample
from pipeline.report import Estimate
from pipeline.runtime.run_folder import read_checked
from pipeline.settings import Settings

MEASURED = {
    "log_ratio": "log pi - log mu, nats",
    "log_ratio_per_token": "log pi - log mu, nats per token",
    "logp_per_token": "log pi, nats per token",
}
RANKED = "positive ahead of negative, of a prompt's pairs"
SIGNS = {"positive": "p1", "negative": "p3"}  # and their styles


@dataclass(frozen=True)
class Scored:
    """A held-out sample under a model: a line of test-STEP.jsonl."""

    prompt: int  # the index of its prompt among the held-out ones
    reward: float  # after the baseline
    length: int  # of the completion, in tokens
    logp: float  # log pi(y|x) of this model, in nats
    logmu: float  # log mu(y|x): of the model that training begins with, or of the samples with --trust-logmu

    def measured(self) -> dict[str, float]:
        """The quantities of MEASURED."""
        log_ratio = self.logp - self.logmu
        return dict(zip(MEASURED, (log_ratio, log_ratio / self.length, self.logp / self.length), strict=True))


def rows_held_out(settings: Settings, samples: Sequence[Sample], lm: LanguageModel, stop: Sequence[str]) -> list[Row]:
    """The held-out samples as token ids, a row each; InputError names the line of one that does not fit.

    The baseline is counted from the held-out samples themselves. That of an effective proportion, which changes no
    sign, is left out. log mu is NaN unless it is to be trusted.
    """
    examples = encode(samples, lm, stop, str(settings.held_out))
    baselines = baselines_of(replace(settings, effective_proportion=None), samples)
    unknown = {} if settings.trust_logmu else {"logmu": math.nan, "token_logmu": None}
    pairs = zip(examples, baselines, strict=True)
    return [[replace(example, reward=example.reward - c, row=i, **unknown)] for i, (example, c) in enumerate(pairs)]


def score_held_out(
    file: Path, rows: Sequence[Row], steps: Sequence[EpochStep], lm: LanguageModel, logprobs: Callable[..., Tensor]
) -> list[Scored]:
    """The lines of `file`: the held-out `rows` under a model, which computes them as it would to train on them.

    log mu is that of test-0.jsonl beside the file, where it is there.
    """
    before = file.with_name("test-0.jsonl")
    return to_scored(rows, score(rows, steps, lm, logprobs), read_checked(before, Scored) if before.exists() else ())


def to_scored(rows: Iterable[Row], found: Iterable[Row], before: Sequence[Scored] = ()) -> list[Scored]:
    """The held-out `rows` with log pi, which `found`, the same rows scored by a model, has as logmu.

    Where log mu is unknown it is that of `before`, the samples under the model that training begins with, or, without
    it, this model's.
    """
    prompts: dict[tuple[int, ...], int] = {}
    scored = []
    for i, ([example], [own]) in enumerate(zip(rows, found, strict=True)):
        known = before[i].logmu if before else own.logmu
        logmu = known if math.isnan(example.logmu) else example.logmu
        prompt = prompts.setdefault(tuple(example.prompt_ids), len(prompts))
        scored.append(Scored(prompt, example.reward, len(example.completion_ids), own.logmu, logmu))
    return scored


def evaluate_held_out(scored: Sequence[Scored]) -> dict[str, Any]:
    """An entry of results.json: for each sign the number of samples and, of MEASURED, means with standard errors.

    ranked is the share of pairs, a positive and a negative of a prompt, in which the positive has the higher log pi per
    token, as the mean over prompts; None without such a pair.

    >>> scored = [Scored(0, 1.0, 2, logp=-1.0, logmu=-2.0), Scored(0, -1.0, 4, logp=-9.0, logmu=-5.0)]
    >>> found = evaluate_held_out(scored)
    >>> found["positive"]["log_ratio_per_token"], found["negative"]["log_ratio"]["mean"], found["ranked"]["mean"]
    ({'mean': 0.5, 'se': None}, -4.0, 1.0)
    """
    entry: dict[str, Any] = {}
    for name in SIGNS:
        own = [one.measured() for one in scored if (one.reward >= 0) == (name == "positive")]
        entry[name] = {"samples": len(own)} | {key: _mean([measured[key] for measured in own]) for key in MEASURED}
    by_prompt: dict[int, tuple[list[float], list[float]]] = {}  # log pi per token of its positives and negatives
    for one in scored:
        by_prompt.setdefault(one.prompt, ([], []))[one.reward < 0].append(one.logp / one.length)
    shares = [np.greater.outer(*signs).mean() for signs in by_prompt.values() if all(signs)]
    return entry | {"ranked": _mean(shares)}


def _mean(values: Sequence[float]) -> dict[str, float | None] | None:
    return Estimate.over_samples(values).record() if values else None


def shown(entry: Mapping[str, Any]) -> dict[str, str]:
    """The rows of the printed table, of an entry of results.json, with +- 2 standard errors."""

    def text(found: Mapping[str, Any] | None, *how: Any) -> str:
        return "-" if found is None else Estimate.read(found).text(*how)

    rows = {f"{name}s: {label}": text(entry[name][key], 1, 3) for name in SIGNS for key, label in MEASURED.items()}
    return rows | {RANKED: text(entry["ranked"], 100, 1, " %")}


def draw_held_out(curve: Sequence[Mapping[str, Any]], title: str) -> Any:
    """A figure of log pi - log mu and of log pi, both per token, over training; curve: that of results.json."""
    panels = []
    for key, heading in (("log_ratio_per_token", title), ("logp_per_token", "held-out samples")):
        lines = []
        for name, style in SIGNS.items():
            found = {point["samples_seen"]: point[name][key] for point in curve if point[name][key]}
            lines += [estimates(found, f"{name}s", style)] if found else []
        panels.append(Panel(heading, "samples trained on", f"{MEASURED[key]}, ± 2 SE", lines))
    return draw(panels)
