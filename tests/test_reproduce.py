"""The figures: what a sweep keeps and shares, what is read off runs, and a figure from end to end."""

import json
import math
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from zlib import crc32

import numpy as np
import pytest
import torch
from helpers import random_examples, tiny_model
from runs import SMALL, experiment

import pipeline.sampling
import reproduce
import topr
import train_gsm8k as gsm8k
from paper import experiments, figures, methods
from paper.experiments import LAPTOP, METHOD_ARMS, PAPER, SCALES
from paper.figures import STUDIES
from paper.methods import by_cardinality
from paper.runs import Finished, Job, Measured, Sweep, folder_name, in_seeds, learn_with
from pipeline.models.language_model import collate
from pipeline.records import Example, InputError, Sample, read_records
from pipeline.report import STUDENT, Estimate
from pipeline.settings import read_settings
from pipeline.stages import open_run
from tasks import math as train_math
from tasks import verifier as train_verifier
from topr_conformance.variants import VARIANTS

ROOT = Path(reproduce.__file__).parent
QUICK = replace(
    experiments.QUICK, base=replace(experiments.QUICK.base, problems=4, n=4, test_problems=3)
)


@pytest.fixture
def command(monkeypatch):
    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["reproduce.py", *map(str, arguments)])
        reproduce.main()

    return command


@pytest.fixture
def shown(monkeypatch):
    """What runs draw and score, in order, by the text of their progress."""
    draw, score, shown = pipeline.sampling.draw, pipeline.dataset.score, []
    monkeypatch.setattr(
        pipeline.sampling, "draw", lambda *a: shown.append(a[5].desc.removesuffix(": ")) or draw(*a)
    )
    monkeypatch.setattr(pipeline.dataset, "score", lambda *a: shown.append("scoring") or score(*a))
    return shown


def pretend(jobs):
    """In place of a sweep's `make`: finished runs that nobody made. What they say is in the settings: `correct`."""
    placed = {
        key: replace(job.settings, out=Path("none", folder_name(job))) for key, job in jobs.items()
    }
    made = {
        key: Finished(settings, pretended_results(settings)) for key, settings in placed.items()
    }
    for run in made.values():
        run.__dict__["steps"] = [{"weights_below_1e-6": share} for share in (0.25, run.settings.lr)]
    return made


def correct(settings):
    """A share of correct answers that depends on everything that arms differ in."""
    named = "method lr seed optimizer baseline baseline_from proportion effective_proportion composition model".split()
    return crc32(str([getattr(settings, name) for name in named]).encode()) / 2**32


def pretended_results(settings):
    def entry(share):
        estimates = {name: {"mean": share} for name in ("pass@1", f"maj@{settings.k}")}
        return {"correct": share, "incorrect": 0.1, "invalid": 0.9 - share, **estimates}

    points = [entry(0.5), entry(correct(settings))]
    iteration = {
        "training": {"realised_share": settings.effective_proportion or settings.proportion},
        "dataset": {"steps": 7, "drawn": {"samples": 4, "positive": 2}},
        "curve": points,
        "after": points[1],
    }
    return {"before": points[0], "iterations": [iteration] * settings.iterations, "versions": {}}


def pretended(name, scale=LAPTOP, seeds=range(3)):
    study = STUDIES[name](scale, seeds)
    study.make(SimpleNamespace(make=pretend))
    return study, study.read()


# ---- a sweep ----


def test_folders_differ_with_what_runs_are_made_with():
    first = Job("topr", SMALL, gsm8k.gsm8k_task)
    jobs = [
        first,
        first._replace(task=experiments.held_out_task),
        first._replace(token_loss="per-token"),
    ]
    jobs += [
        first._replace(settings=replace(SMALL, **changes)) for changes in ({"lr": 1.0}, {"seed": 1})
    ]
    assert len({folder_name(job) for job in jobs}) == 5
    same = first._replace(
        settings=replace(SMALL, reuse=Path("elsewhere"), out=Path("here")), copies="another"
    )
    assert folder_name(same) == folder_name(first)


DRAWING = "model engine temperature top_p top_k max_new_tokens tokens_at_once chunk seed compute samples_sha256 chat system"


@pytest.mark.parametrize("name", DRAWING.split())
def test_samples_that_were_drawn_otherwise_are_refused(run, tmp_path, name):
    other = json.loads((run() / "config.json").read_text()) | {name: "other"}
    (tmp_path / "config.json").write_text(json.dumps(other))
    with pytest.raises(InputError, match=rf"has drawn otherwise \({name} = .*give a --reuse that"):
        experiment(tmp_path / "run", reuse=tmp_path)


def test_log_mu_of_another_run_is_taken_if_its_batches_are_the_same_and_its_rewards_are_not(
    run, tmp_path, shown
):
    made = run()
    for changes in ({"micro_batch": SMALL.micro_batch // 2}, {"composition": "positives_only"}, {}):
        settings = replace(
            SMALL, reuse=made, baseline=-0.5, out=tmp_path / f"run{''.join(changes)}", **changes
        )
        shown.clear()
        with open_run(settings, gsm8k.gsm8k_task(settings)) as one:
            one.score(1, one.compose(1, one.sample(1, settings.model)), settings.model)
        assert shown == ["scoring"] * len(changes)  # in other batches it is rounded otherwise
    there, here = (
        read_records(folder / "iteration-1" / "train.jsonl", Example)
        for folder in (made, settings.out)
    )
    assert here == [replace(example, reward=example.reward + 0.5) for example in there]


def test_arms_are_compared_over_the_seeds_that_both_have():
    rows = [("a", 1, 5.0), ("a", 0, 1.0), ("b", 1, 2.0), ("b", 2, 9.0), ("b", 0, 0.5)]
    table = Measured((arm, seed, {"correct": [value]}) for arm, seed, value in rows)
    assert table.gain("a", "b").mean == (5.0 - 2.0 + 1.0 - 0.5) / 2


def test_samples_of_no_run_are_refused_and_those_of_other_problems_not_taken(run, tmp_path):
    with pytest.raises(InputError, match="no such"):
        experiment(tmp_path / "run", reuse=tmp_path)
    assert not (tmp_path / "run").exists()
    fewer = experiment(tmp_path / "run", reuse=run(), problems=3, test_problems=2)
    assert (
        fewer["before"]["questions"],
        fewer["iterations"][0]["dataset"]["drawn"]["problems"],
    ) == (2, 3)


# ---- variants of the loss, trained with ----


def test_a_variant_s_gradient_goes_through_the_training_loop():
    """The gradient of the loss that `topr.train` is given is the variant's own, and none of them is the paper's."""
    model, mu, batch = tiny_model(), tiny_model(seed=1), collate(random_examples(3, 2, seed=1))
    with torch.no_grad():
        token_logmu = topr.token_logprobs(mu, batch)
    batch = batch._replace(logmu=token_logmu.sum(1))
    mask, *others = batch.completion_mask[:, -token_logmu.shape[1] :].double(), *batch[3:]

    def gradient(loss):
        return torch.cat([x.flatten() for x in torch.autograd.grad(loss, list(model.parameters()))])

    gradients = [gradient(topr.topr_loss(topr.sequence_logprobs(model, batch), *others))]
    for name in experiments.VARIANTS:
        token_logp, (loss, logprobs) = topr.token_logprobs(model, batch), learn_with(name, mu)
        expected = gradient(VARIANTS[name](token_logp, token_logmu, batch.reward, mask))
        logp = logprobs(model, batch)
        torch.testing.assert_close(logp, token_logp.sum(1), msg=name)
        found = gradient(loss(logp, *others))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6, msg=name)
        assert not any(torch.allclose(found, other, rtol=1e-2) for other in gradients)
        gradients.append(found)


# ---- what is read off runs ----


def test_a_forgotten_answer_comes_back_as_fast_as_pairs_of_each_wrong_one_pull_it():
    """DPO's steps by hand: beta = 0.1, the right arm against each of four wrong ones, which stay alike."""
    right, wrong, steps = math.log(1e-6), math.log((1 - 1e-6) / 4), 0
    while (ratio := math.exp(right - wrong)) < 4:  # pi of the right arm below 1/2
        pull = 0.1 / (1 + ratio**0.1) / 4  # of one pair's loss on its margin, of their mean
        right, wrong, steps = right + 4 * pull, wrong - pull, steps + 1
    assert methods.steps_back("dpo") == steps


def test_shares_are_those_of_the_arms_that_their_names_say(monkeypatch):
    monkeypatch.setattr(
        methods, "steps_back", partial(methods.steps_back, steps=100)
    )  # of 10,000, for three methods
    study, figure = pretended("fig1")

    def each(seeds=range(5), **changes):
        return tuple(correct(replace(LAPTOP.base, seed=seed, **changes)) for seed in seeds)

    one = study.rates["topr"]
    for label, method in (("TOPR", "topr"), ("PPO", "ppo")):
        text = f"{label}, lr {one:.0e}: correct at the end".replace("e-0", "e-")
        assert figure.shares[text].each == each(method=method, lr=one)
    for at, lr in (("own rates", study.rates["ppo"]), ("one rate", one)):
        expected = np.subtract(each(lr=one), each(method="ppo", lr=lr))
        assert figure.shares[f"TOPR - PPO, {at}"].each == pytest.approx(expected)
    ppo = study.rates["ppo"]
    assert figure.shares["PPO, own rate: clipped samples, first tenth"].each == pytest.approx(
        [0.25] * 5
    )
    assert figure.shares["PPO, own rate: clipped samples, last tenth"].each == pytest.approx(
        [ppo] * 5
    )
    assert figure.shares["PPO, one rate: clipped samples, last tenth"].each == pytest.approx(
        [one] * 5
    )
    _, figure = pretended("fig5")
    assert figure.data["realised share"][f"lr {figure.data['own rate']:g}"]["10% positive"][
        "mean"
    ] == list(LAPTOP.shares)
    for share, p in ((0.1, 0.1), (0.1, 0.8), (0.5, 0.1), (0.5, 0.5)):
        of_set = {"lr": figure.data["own rate"], "composition": "proportion", "proportion": share}
        arm = each(**of_set, effective_proportion=None if p == share else p)
        assert figure.shares[f"{share:.0%} positive, p~ = {p:.0%}"].each == arm
    low, all_positive = (figure.shares[f"50% positive, p~ = {p}%"].each for p in (20, 100))
    gain = figure.shares["50% positive: p~ = 20% - p~ = 100%"].each
    assert gain == pytest.approx(np.subtract(low, all_positive))
    second = sorted(study.tried["topr"], key=study.tried["topr"].__getitem__)[-2]
    arm = each(lr=second, composition="proportion", proportion=0.5, effective_proportion=0.2)
    assert figure.shares["50% positive, p~ = 20%, second best rate"].each == arm
    curves = [
        [figure.shares[f"{n}% positive, p~ = {p:.0%}"].each[2] for p in LAPTOP.shares]
        for n in (10, 50)
    ]
    x, y = (np.array(curve) - np.mean(curve) for curve in curves)
    found = figure.numbers["correlation of the two sets over p~"].each[2]
    assert found == pytest.approx(x @ y / np.sqrt((x @ x) * (y @ y)))
    study, figure = pretended("robustness")
    three, ppo = (
        each(method="ppo", lr=3 * study.rates["ppo"]),
        each(method="ppo", lr=study.rates["ppo"]),
    )
    assert figure.shares["PPO: three times the rate - best rate"].each == pytest.approx(
        np.subtract(three, ppo)
    )
    late = {"composition": "proportion", "proportion": 0.4}
    of_topr, of_ppo = ({"method": name, "lr": study.rates[name]} | late for name in ("topr", "ppo"))
    expected = np.subtract(each(range(3), **of_topr), each(range(3), **of_ppo))
    assert figure.shares["TOPR - PPO, 60% negative, late clipping"].each == pytest.approx(expected)


def test_arms_that_a_verdict_hangs_on_have_more_seeds_and_all_have_samples_to_copy():
    def counted(name, scale=LAPTOP, seeds=range(3)):
        study = STUDIES[name](scale, seeds)
        study.make(SimpleNamespace(make=pretend))
        jobs = in_seeds(study.arms(), study.seeds_of)
        assert {job.copies for job in jobs.values()} - {None} <= set(jobs)
        assert all(job.settings.seed == seed for (_, seed), job in jobs.items())
        return Counter(arm for arm, _ in jobs)

    counts = counted("fig5")
    assert len({rate for _, rate, *_ in counts}) == 2
    assert set(counts.values()) == {5}
    assert counted("fig6") == {arm: 8 if arm[3] < 0.2 else 3 for arm in counted("fig6")}
    assert set(counted("fig6", seeds=range(2, 11)).values()) == {9}
    assert [set(counted(name).values()) for name in ("fig1", "fig4", "fig8", "fig9")] == [
        {5},
        {5},
        {5},
        {3},
    ]
    assert set(counted("fig6", experiments.QUICK, range(1)).values()) == {1}


def test_a_method_s_rate_is_the_best_of_the_grid_on_held_out_problems(tmp_path):
    study, _ = pretended("fig1")
    jobs = study.planned().values()  # more runs follow, which depend on the results of these
    grids = {name: [3e-6, 1e-5, 3e-5, 1e-4, 3e-4] for name in METHOD_ARMS}
    for name in ("reinforce", "dpo"):
        grids[name] = [3e-6, 1e-5, 1.8e-5, 3e-5, 5.5e-5, 1e-4, 3e-4]
    assert len(jobs) == sum(map(len, grids.values()))
    assert {(job.task, job.settings.seed, job.token_loss) for job in jobs} == {
        (experiments.held_out_task, 100, None)
    }
    assert set(study.rates) == set(study.tried) == set(METHOD_ARMS)
    base = replace(LAPTOP.base, seed=100)
    for name, tried in study.tried.items():
        assert tried == {
            rate: correct(replace(base, lr=rate, **METHOD_ARMS[name].changes))
            for rate in grids[name]
        }
        assert tried[study.rates[name]] == max(tried.values())
    study.publish("fig1", "fig1", tmp_path)
    recorded = json.loads((tmp_path / "fig1.json").read_text())["learning_rates"]
    assert recorded["PPO"] == {f"{lr:g}": share for lr, share in study.tried["ppo"].items()}


def evaluated(rewards):
    """A run whose test samples after its last step, one of each problem, have these rewards."""
    samples = [
        Sample(prompt=f"{i}?", completion="", reward=reward) for i, reward in enumerate(rewards)
    ]
    return SimpleNamespace(last_step=0, tested=lambda step: samples)


def test_problems_are_counted_in_fours_of_correct_completions_and_in_thirds_of_the_base():
    assert by_cardinality(np.arange(8) < np.array([[0], [1], [4], [5], [8], [8]])) == pytest.approx(
        [1 / 6, 2 / 6, 3 / 6]
    )
    base, trained = evaluated([-1, -1, 1, -1, 1, 1]), evaluated([1, 1, -1, -1, -1, 1])
    assert figures.by_third(base, trained) == [1.0, 0.0, 0.5]  # questions 0 1, then 3 2, then 4 5


def test_figure_4_counts_those_of_few_correct_before_that_stay_so_and_one_sample_against_the_base_s_votes():
    def tested(*counts):
        told = [
            (str(i), "correct" if j < count else "incorrect")
            for i, count in enumerate(counts)
            for j in range(6)
        ]
        texts = {"correct": "The answer is 1.", "incorrect": "The answer is 2."}
        return [
            Sample(problem_id=i, prompt=i, completion=texts[o], reward=1, outcome=o)
            for i, o in told
        ]

    study = STUDIES["fig4"](replace(LAPTOP, tested={"test_samples": 6}), range(1))
    same = {"settings": LAPTOP.base, "last_step": 9, "measured": {"correct": [0.5]}}
    for name, *after in (("topr", 1, 5, 6), ("positives_only", 1, 0, 6), ("sft", 5, 5, 6)):
        run = SimpleNamespace(tested={0: tested(1, 0, 6), 9: tested(*after)}.get, **same)
        study.runs[(name, study.rates["topr"]), 0] = run
    shares, few = (
        {name: value.mean for name, value in study.read().shares.items()},
        "few correct before, and still",
    )
    assert [
        shares[f"{arm}: {few}"] for arm in ("TOPR", "positives only", "positives, as many steps")
    ] == [0.5, 1, 0]
    assert shares[f"positives only - TOPR: {few}"] == 0.5
    assert shares["TOPR: pass@1 - maj@4 of the base"] == pytest.approx(12 / 18 - 1 / 3)


def test_rates_are_chosen_on_problems_that_no_run_trains_or_tests_on():
    task, usual = experiments.held_out_task(SMALL), gsm8k.gsm8k_task(SMALL)
    assert [problem.id for problem in task.train] == [problem.id for problem in usual.train]
    held_out = {problem.question for problem in task.test}
    assert len(held_out) == experiments.HELD_OUT
    assert not held_out & {problem.question for problem in [*usual.train, *usual.test]}
    longest = LAPTOP.base.problems + experiments.HELD_OUT
    assert longest <= len(
        gsm8k.load_problems(SMALL.data, "train")
    )  # so that this holds for the laptop's figures too


@pytest.mark.slow
def test_table_2_over_seeds_is_the_mean_of_its_runs_and_two_workers_make_what_one_makes(tmp_path):
    small = replace(QUICK.verifier, problems=4, test_problems=3, n=2, test_samples=2, iterations=1)
    study = STUDIES["table2"](replace(QUICK, verifier=small), range(2))
    with Sweep(tmp_path / "two", workers=2) as two:
        study.make(two)
        with pytest.raises(InputError, match="--lr -1"):
            two.make({"wrong": Job("wrong", replace(SMALL, lr=-1.0), gsm8k.gsm8k_task)})
    [alone] = Sweep(tmp_path / "one", workers=1).make({0: study.planned()["checker", 0]}).values()
    shares, results = study.read().shares, [run.results for run in study.runs.values()]
    assert alone.results["table2"] == results[0]["table2"] != results[1]["table2"]
    for row, columns in results[0]["table2"].items():
        for column in columns:
            each = [of["table2"][row][column]["mean"] for of in results]
            assert shares[f"checker, {row}: {column}"].each == tuple(each)
    weighted = train_verifier.WEIGHTED
    gains = [of["paired differences"][f"{weighted}, topr - maj@4"]["mean"] for of in results]
    assert shares[f"checker, TOPR - no verifier: {weighted}"].each == pytest.approx(gains)
    assert not list(tmp_path.rglob("model.safetensors"))  # large, and measured


# ---- the runs of the paper's scale ----


# How many runs a figure has for each seed at the paper's scale, counted from its docstring: Figure 1 has eight methods,
# with one learning rate for all; Figures 5 and 6 eight p~ on two sets, or of two methods; Figure 9 two difficulties.
RUNS_OF_THE_PAPER = {
    "fig1": 8,
    "fig2": 0,
    "fig3": 4,
    "fig4": 3,
    "fig5": 2 * 8,
    "fig6": 2 * 8,
    "fig7": 2 * 2,
}
RUNS_OF_THE_PAPER |= {"fig8": 6, "fig9": 2 + 8, "table2": 1, "robustness": 3 * 7, "variants": 4}


def test_all_runs_of_the_paper_s_figures_are_planned():
    assert set(reproduce.FIGURES) == set(RUNS_OF_THE_PAPER) == set(STUDIES)
    for name, count in RUNS_OF_THE_PAPER.items():
        jobs = {folder_name(job): job for job in STUDIES[name](PAPER, range(3)).planned().values()}
        assert Counter(job.settings.seed for job in jobs.values()) == dict.fromkeys(
            range(3) if count else (), count
        )
        for job in jobs.values():
            job.check(8)  # raises where eight processes cannot make it
    for name in reproduce.ON_MATH:
        jobs = (
            STUDIES[name.removesuffix("-math")](SCALES["paper-math"], range(1)).planned().values()
        )
        found = {(job.task, job.settings.data, job.settings.shots) for job in jobs}
        assert found == {(train_math.math_task, "EleutherAI/hendrycks_math", 4)}
    changes = "--iterations 1 --examples None --curve-points 5 --between-samples None"
    settings = read_settings(f"paper {changes}".split(), gsm8k.SETTINGS)
    assert (
        replace(settings, out=None) == PAPER.base
    )  # Section 4.2's epoch over all samples is a command


def test_a_dry_run_says_what_runs_change_and_do_and_what_eight_processes_cannot(
    command, monkeypatch, tmp_path, capsys
):
    arguments = ["fig9", "fig1", "--preset", "paper", "--runs", tmp_path / "runs"]
    monkeypatch.setenv("COLUMNS", "150")
    command(*arguments, "--seeds", "2", "--dry-run")
    rows = [
        re.split(r"\s*│\s*", line)[1:-1]
        for line in capsys.readouterr().out.splitlines()
        if "│" in line
    ]
    found = {label: rest for label, *rest in rows}
    # 7,473 x 16 samples; 1,319 x 64 before and after, and x 4 at four points between
    assert found["topr"] == [
        "0 1",
        "",
        f"{119_568 + 2 * 84_416 + 4 * 5_276:,}",
        f"{119_568 // 8:,}",
    ]
    assert found["dpo"][1:] == ["method=dpo batch=16", found["topr"][2], f"{7_473 * 32 // 16:,}"]
    command(*arguments, "--seeds", "2", "--seed", "3", "--dry-run")
    assert re.search(r"│ topr +│ 3 4 +│", capsys.readouterr().out)
    monkeypatch.setitem(
        SCALES, "paper", replace(PAPER, method_changes={})
    )  # half a pair for each process
    told = "reproduce: fig1, dpo: --batch 8: is less than a row for each of 8 processes; give --batch 16"
    with pytest.raises(SystemExit, match=told):
        command(*arguments, "--dry-run")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(SystemExit, match=told):
        command(*arguments)
    assert not (tmp_path / "runs").exists()


# ---- the command ----


def test_an_interval_over_seeds_is_student_s():
    """The quantile leaves 2.5% above it: the density integrated numerically."""
    for n, quantile in STUDENT.items():
        x = np.linspace(-quantile, quantile, 20_001)
        scale = math.gamma(n / 2) / math.gamma((n - 1) / 2) / math.sqrt(math.pi * (n - 1))
        assert np.trapezoid(scale * (1 + x**2 / (n - 1)) ** (-n / 2), x) == pytest.approx(
            0.95, abs=1e-4
        )
    assert Estimate.over_seeds([0, 1] * 8)[:2] == pytest.approx(
        (0.5, STUDENT[10] * (0.25 / 15) ** 0.5)
    )  # more than 10
    assert Estimate.over_seeds([1.0]) == Estimate(1.0, None, (1.0,))


@pytest.mark.parametrize("name", reproduce.FIGURES)
def test_every_committed_picture_can_be_drawn_anew(name):
    content = json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))
    for panel in STUDIES[name].panels(content["data"]):
        for line in [line for line in panel.lines if line.kind != "band"]:
            assert len(line.x) == len(line.y) > 0
            assert np.isfinite(np.array(line.y, float)).any()
    for value in [
        *content["shares"].values(),
        *content["numbers"].values(),
    ]:  # as they would be counted today
        assert Estimate.over_seeds(value["each"])[:2] == pytest.approx(
            (value["mean"], value["half_width"]), abs=1e-12
        )


@pytest.mark.parametrize(
    ("script", "slow"),
    [("reproduce", {"torch", "matplotlib"}), ("toy_bandit", {"matplotlib.pyplot"})],
)
def test_help_needs_nothing_that_is_slow_to_import(script, slow):
    code = f"import {script}, sys; print({slow | {'transformers'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "set()\n", done.stderr


def test_a_figure_from_end_to_end_and_again(command, tmp_path, monkeypatch, capsys, shown):
    monkeypatch.setitem(SCALES, "quick", QUICK)
    out, runs = tmp_path / "out", tmp_path / "runs"
    arguments = ["variants", "--quick", "--workers", "1", "--runs", runs, "--out", out]
    command(*arguments)
    assert "topr, lr 0.0001: invalid at the end" in capsys.readouterr().out
    content = json.loads((out / "variants.json").read_text())
    assert (content["seeds"], content["runs"]) == ([0], 5)
    assert (
        content["command"]
        == "python reproduce.py variants --preset laptop --seeds 1 --seed 0 --quick"
    )
    assert all(json.loads(file.read_text())["seconds"] > 0 for file in runs.rglob("made.json"))
    assert re.fullmatch(r"unknown|[0-9a-f]{7,}(-dirty)?", *content["commits"])
    for curves in content["data"]["one rate"].values():  # before and after the only step
        shares = [curves[outcome]["mean"] for outcome in ("correct", "incorrect", "invalid")]
        assert np.sum(shares, 0).tolist() == [1, 1]
    first = [json.loads(file.read_text().split("\n")[0]) for file in runs.rglob("metrics.jsonl")]
    assert len(first) == 5
    assert all(abs(line["log_ratio_neg_q50"]) < 1e-4 for line in first)  # all start at mu
    assert (
        len({round(line["grad_norm"], 5) for line in first}) == 2
    )  # where weights are 1, one divides otherwise
    drawn = Counter(text for text in shown if text != "scoring")
    assert drawn == {
        "sampling": 1,
        "evaluating at step 0": 1,
        "evaluating at step 1": 5,
    }  # others copy
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    assert set(before) == {"variants.json", "variants.png"}
    monkeypatch.setattr(gsm8k, "experiment", lambda *_: pytest.fail("made again"))
    command(*arguments)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    (out / "variants.png").unlink()
    command("variants", "--redraw", "--out", out)  # from its numbers
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ([], "no figure named: choose from fig1"),
        (["fig1", "--seeds", "0"], "--seeds 0: must be at least 1"),
        (["fig1", "--quick", "--preset", "paper"], "--quick: is for the laptop"),
        (["fig1", "fig10"], "fig10: is no figure; choose from fig1"),
        (
            ["share"],
            "share: is a finished study; studies/README.md has its page, and commit 82e5ae4",
        ),
        (["fig2", "fig8-math", "--quick"], "fig8-math: is for --preset paper only"),
        (["fig2", "--out", __file__], f"--out {__file__}: is a file; choose another folder"),
    ],
)
def test_bad_options_are_one_line(arguments, fault, command, tmp_path):
    with pytest.raises(SystemExit, match=f"reproduce: {re.escape(fault)}"):
        command("--out", tmp_path / "out", *arguments)
    assert not (tmp_path / "out").exists()
