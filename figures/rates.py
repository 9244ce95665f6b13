"""How the figures choose learning rates: by accuracy on training problems that no figure uses.

Figures 4 and 8 and robustness compare methods at their own rates. They take the mean over three
seeds, since the difference of two rates in one seed is often within its error. The other figures
take the first of these seeds (ours): their runs are not repeated.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from figures.common import TUNED, VARIANTS, Rates, by_seed, make_job
from figures.runs import Job, Run, in_seeds, measurements, with_shared_samples
from figures.scales import Scale, held_out_task

# Their accuracy falls from near its best to half of it or less between two rates of the grid.
WITH_A_CLIFF = ("reinforce", "dpo", *VARIANTS)

# Name in TUNED -> learning rate -> accuracy on held-out problems, the mean over seeds.
Tried = Mapping[str, Mapping[float, float]]


def rate_grid(scale: Scale, name: str) -> list[float]:
    """The learning rates to try for a name in TUNED, in ascending order."""
    rates = scale.rates
    if name in WITH_A_CLIFF:
        rates += scale.finer_rates
    return sorted(rate * scale.optimizers.get(name, 1) for rate in rates)


def rate_arms(scale: Scale, names: Sequence[str], seeds: range) -> list[Job]:
    """A run on held-out problems for each name, rate and seed; none if there is only one rate.

    All of a seed train on the samples of a run with TOPR.
    """
    if not names or len(scale.rates) == 1:
        return []
    wanted = [("topr", scale.rates[0])]
    for name in names:
        wanted += [(name, lr) for lr in rate_grid(scale, name)]
    jobs = []
    for name, lr in dict.fromkeys(wanted):
        columns = {"name": name, "lr": lr}
        changes = {"eval_samples": 6, "evals_per_epoch": 1, "lr": lr}
        job = make_job(scale, columns, f"rate-{name}-{lr:g}", TUNED[name], **changes)
        jobs.append(replace(job, task=held_out_task))
    return in_seeds(with_shared_samples(jobs), seeds)


def tried_rates(names: Sequence[str], runs: Sequence[Run]) -> Tried:
    """The mean accuracy of each name at each learning rate, in the runs of `rate_arms`."""
    if not runs:
        return {}
    accuracy = by_seed(measurements(runs), "correct", ["name", "lr"]).mean()
    return {name: accuracy[name].to_dict() for name in names}


def best_rates(scale: Scale, names: Sequence[str], tried: Tried) -> Rates:
    """The learning rates of each name, the best one first; the smallest one if none was tried.

    >>> from figures.scales import LAPTOP
    >>> best_rates(LAPTOP, ["topr"], {"topr": {1e-5: 0.5, 3e-5: 0.75, 1e-4: 0.25}})
    {'topr': [3e-05, 1e-05, 0.0001]}
    >>> best_rates(LAPTOP, ["topr"], {})
    {'topr': [3e-06]}
    """
    ranked = {}
    for name in names:
        accuracy = tried.get(name)
        if accuracy is None:
            ranked[name] = rate_grid(scale, name)[:1]
        else:
            ranked[name] = sorted(accuracy, key=accuracy.__getitem__, reverse=True)
    return ranked
