"""The figures: what a sweep keeps and shares, what is read off runs, and a figure from end to end."""

import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
import torch
from helpers import random_examples, tiny_model
from runs import SMALL, experiment

import pipeline.stages
import reproduce
import topr
import train_gsm8k as gsm8k
from conformance.variants import VARIANTS
from paper import experiments, figures
from paper.experiments import LAPTOP, METHODS, PAPER, SCALES
from paper.figures import STUDIES
from paper.methods import by_cardinality
from paper.real_llm import RealLLM
from paper.runs import Finished, Job, Sweep, folder_name
from paper.token_loss import learn_with
from pipeline.models.language_model import collate, token_logprobs
from pipeline.records import InputError, Sample, to_lines, write_file
from pipeline.report import Estimate
from pipeline.settings import OF_DRAWING, check, intended_ranks, read_settings
from tasks import math as train_math
from tasks import verifier as train_verifier

ROOT = Path(reproduce.__file__).parent
QUICK = replace(experiments.QUICK, base=replace(experiments.QUICK.base, problems=4, n=4, test_problems=3))


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    return Sweep(tmp_path_factory.mktemp("sweep"), workers=1)


@pytest.fixture
def command(monkeypatch):
    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["reproduce.py", *map(str, arguments)])
        reproduce.main()

    return command


class Pretended:
    """In place of a sweep: finished runs that nobody made. What they say is in the settings: `correct` below."""

    def make(self, jobs):
        placed = {key: replace(job.settings, out=Path("none", folder_name(job))) for key, job in jobs.items()}
        return {key: Finished(settings, pretended_results(settings)) for key, settings in placed.items()}


def correct(settings):
    """A share of correct answers that depends on everything that arms differ in."""
    named = "method lr seed optimizer baseline baseline_from proportion effective_proportion composition model".split()
    return crc32(str([getattr(settings, name) for name in named]).encode()) / 2**32


def pretended_results(settings):
    def entry(share):
        estimates = {name: {"mean": share} for name in ("pass@1", f"maj@{settings.k}")}
        return {"correct": share, "incorrect": 0.1, "invalid": 0.9 - share, **estimates}

    points = [entry(0.5), entry(correct(settings))]
    iteration = {"dataset": {"steps": 7, "drawn": {"samples": 4, "positive": 2}}, "curve": points, "after": points[1]}
    return {"before": points[0], "iterations": [iteration] * settings.iterations, "versions": {}}


def pretended(name, scale=LAPTOP, seeds=range(3)):
    study = STUDIES[name](scale, seeds)
    study.make(Pretended())
    return study, study.read()


def planned(name, scale=PAPER, seeds=range(1)):
    return STUDIES[name](scale, seeds).planned()


# ---- a sweep ----


def test_folders_differ_with_what_runs_are_made_with():
    first = Job("topr", SMALL, gsm8k.gsm8k_task)
    jobs = [first, first._replace(task=experiments.held_out_task)]
    jobs += [first._replace(settings=replace(SMALL, **changes)) for changes in ({"lr": 1.0}, {"seed": 1})]
    jobs += [first._replace(token_loss=name) for name in ("per-token", "geometric mean")]
    assert len({folder_name(job) for job in jobs}) == 6
    same = first._replace(settings=replace(SMALL, reuse=Path("elsewhere"), out=Path("here")), copies="another")
    assert folder_name(same) == folder_name(first)


@pytest.mark.slow
def test_reusing_samples_gives_what_sampling_gives(run, tmp_path, monkeypatch):
    made, drawn = run(), run(method="tis")
    draw, score, shown = pipeline.stages.draw, pipeline.dataset.score, []
    monkeypatch.setattr(pipeline.stages, "draw", lambda *a: shown.append(a[6]) or draw(*a))
    monkeypatch.setattr(pipeline.dataset, "score", lambda *a: shown.append("scoring") or score(*a))
    experiment(tmp_path / "reused", method="tis", reuse=made)
    assert shown == ["evaluating at step 2", "evaluating at step 4"]  # and neither the samples nor log mu
    for changes in ({"micro_batch": SMALL.micro_batch // 2}, {"composition": "positives_only"}):
        shown.clear()
        experiment(tmp_path / str(*changes), reuse=made, **changes)
        assert shown[0] == "scoring"  # in other batches, log mu is rounded otherwise
    for name in ("samples.jsonl", "test-0.jsonl", "train.jsonl", "metrics.jsonl", "../results.json"):
        one, other = (folder / "iteration-1" / name for folder in (tmp_path / "reused", drawn))
        assert one.read_bytes() == other.read_bytes(), name


def test_samples_of_other_sampling_parameters_are_refused_and_those_of_other_problems_not_taken(run, tmp_path):
    for name, other in (("temperature", 0.5), ("seed", 1), ("max_new_tokens", 16)):
        with pytest.raises(InputError, match=rf"has drawn otherwise \({name} = .*give a --reuse that"):
            experiment(tmp_path / "run", reuse=run(), **{name: other})
    with pytest.raises(InputError, match=r"config\.json"):
        experiment(tmp_path / "run", reuse=tmp_path)
    assert not (tmp_path / "run").exists()
    assert set(OF_DRAWING) <= set(SMALL.record())
    fewer = experiment(tmp_path / "run", reuse=run(), problems=3, test_problems=2)
    assert (fewer["before"]["questions"], fewer["iterations"][0]["dataset"]["drawn"]["problems"]) == (2, 3)


@pytest.mark.slow
def test_two_workers_do_what_one_does(tmp_path):
    measured = replace(QUICK.base, iterations=0, test_problems=2)
    jobs = {seed: Job("measured", replace(measured, seed=seed), gsm8k.gsm8k_task) for seed in (0, 1)}
    with Sweep(tmp_path / "two", workers=2) as two:
        side_by_side = two.make(jobs)
        with pytest.raises(InputError, match="--lr -1"):
            two.make({"wrong": Job("wrong", replace(SMALL, lr=-1.0), gsm8k.gsm8k_task)})
    one_by_one = Sweep(tmp_path / "one", workers=1).make(jobs)
    assert [run.results for run in side_by_side.values()] == [run.results for run in one_by_one.values()]
    assert one_by_one[0].results["before"] != one_by_one[1].results["before"]


# ---- variants of the loss, trained with ----


def test_a_variant_s_gradient_goes_through_the_training_loop():
    """The gradient of the loss that `topr.train` is given is the variant's own, and none of them is the paper's."""
    model, examples = tiny_model(), random_examples(3, 2, seed=1)
    rng = np.random.default_rng(2)
    scored = [replace(e, token_logmu=rng.uniform(-4, -2, len(e.completion_ids)).tolist()) for e in examples]
    batch = collate([[replace(e, logmu=sum(e.token_logmu))] for e in scored])
    mask = (torch.arange(batch.token_logmu.shape[1]) < batch.length[:, None]).double()

    def gradient(loss):
        return torch.cat([x.flatten() for x in torch.autograd.grad(loss, list(model.parameters()))])

    paper = topr.topr_loss(token_logprobs(model, batch).sum(1), batch.logmu, batch.reward, batch.length)
    gradients = [gradient(paper)]
    for name in experiments.VARIANTS:
        token_logp = token_logprobs(model, batch)
        expected = VARIANTS[name]()(token_logp, batch.token_logmu, batch.reward, mask)
        loss, logprobs = learn_with(name)
        logp = logprobs(model, batch)
        torch.testing.assert_close(logp, token_logp.sum(1))
        found = gradient(loss(logp, batch.logmu, batch.reward, batch.length, denominator=len(examples)))
        torch.testing.assert_close(found, gradient(expected), rtol=1e-4, atol=1e-6, msg=name)  # log mu is float32
        assert not any(torch.allclose(found, other, rtol=1e-2) for other in gradients)
        gradients.append(found)


def test_the_paper_s_arm_samples_and_variants_copy_its_samples():
    jobs = planned("variants", experiments.QUICK, range(2))
    sources = {key: job for key, job in jobs.items() if job.copies is None}
    assert [(job.settings.seed, job.token_loss) for job in sources.values()] == [(0, None), (1, None)]
    for job in jobs.values():
        assert job.copies is None or sources[job.copies].settings == job.settings  # the same seed, too
    for scale in (experiments.QUICK, LAPTOP):
        jobs = planned("variants", scale).values()
        assert {job.token_loss for job in jobs} == {None, *experiments.VARIANTS}


# ---- what is read off runs ----


def test_shares_are_those_of_the_arms_that_their_names_say():
    study, figure = pretended("fig1")
    arms = {method: replace(LAPTOP.base, method=method, lr=rate) for method, rate in study.rates.items()}

    def each(settings):
        return tuple(correct(replace(settings, seed=seed)) for seed in range(3))

    rate = f"{study.rates['topr']:.0e}".replace("e-0", "e-")
    for label, method in (("TOPR", "topr"), ("PPO", "ppo"), ("naive REINFORCE", "reinforce")):
        at_one_rate = replace(arms[method], lr=study.rates["topr"])
        assert figure.shares[f"{label}, lr {rate}: correct at the end"].each == each(at_one_rate)
    [gain] = [value for name, value in figure.shares.items() if name.startswith("TOPR - PPO")]
    expected = np.subtract(each(arms["topr"]), each(arms["ppo"]))
    assert gain.each == pytest.approx(expected)
    assert gain.half_width == pytest.approx(4.303 * np.std(expected, ddof=1) / 3**0.5)
    _, figure = pretended("fig5")
    base = replace(LAPTOP.base, lr=figure.data["own rate"], composition="proportion")
    for share in (0.1, 0.5):
        for p in (0.1, 0.5, 0.8):
            arm = replace(base, proportion=share, effective_proportion=None if p == share else p)
            assert figure.shares[f"{share:.0%} positive, p~ = {p:.0%}"].each == each(arm)


def test_a_method_s_rate_is_the_best_of_the_grid_on_held_out_problems():
    jobs = planned("fig1", LAPTOP, range(3)).values()  # more runs follow, which depend on the results of these
    assert len(jobs) == len(METHODS) * len(LAPTOP.rates)
    assert {(job.task, job.settings.seed, job.token_loss) for job in jobs} == {(experiments.held_out_task, 100, None)}
    study, figure = pretended("fig1")
    assert set(study.rates) == set(study.tried) == set(METHODS)
    base = replace(LAPTOP.base, seed=100)
    for name, tried in study.tried.items():
        assert tried == {rate: correct(replace(base, lr=rate, **METHODS[name].changes)) for rate in LAPTOP.rates}
        assert tried[study.rates[name]] == max(tried.values())
    recorded = study.record("fig1", "fig1", figure)["learning_rates"]
    assert recorded["PPO"] == {f"{lr:g}": share for lr, share in study.tried["ppo"].items()}


def evaluated(folder, rewards, per_question=1, iterations=1):
    """A finished run whose test samples after its last step have these rewards."""
    settings = replace(SMALL, out=folder, test_samples=per_question, iterations=iterations)
    run = Finished(settings, pretended_results(settings))
    numbers = [i // per_question for i in range(len(rewards))]
    samples = [
        Sample(problem_id=f"{i}", prompt=f"{i}?", completion="", reward=reward)
        for i, reward in zip(numbers, rewards, strict=True)
    ]
    write_file(folder / "iteration-1" / f"test-{run.last_step}.jsonl", to_lines(samples))
    return run


def test_the_cardinality_of_a_problem_is_counted_in_fours(tmp_path):
    rewards = [1.0 if j < right else -1.0 for right in (0, 1, 4, 5, 8, 8) for j in range(8)]
    assert by_cardinality(evaluated(tmp_path, rewards, per_question=8)) == pytest.approx([1 / 6, 2 / 6, 3 / 6])


def test_thirds_of_the_questions_are_those_of_the_base(tmp_path):
    """Six questions, of which the base solves the last ones most often; training solves the first and the last."""
    base = evaluated(tmp_path / "base", [-1, -1, 1, -1, 1, 1], iterations=0)
    trained = evaluated(tmp_path / "trained", [1, 1, -1, -1, -1, 1])
    assert figures.by_third(base, trained) == [1.0, 0.0, 0.5]  # questions 0 1, then 3 2, then 4 5


def test_rates_are_chosen_on_problems_that_no_run_trains_or_tests_on():
    task, usual = experiments.held_out_task(SMALL), gsm8k.gsm8k_task(SMALL)
    assert [problem.id for problem in task.train] == [problem.id for problem in usual.train]
    held_out = {problem.question for problem in task.test}
    assert len(held_out) == experiments.HELD_OUT
    assert not held_out & {problem.question for problem in [*usual.train, *usual.test]}
    longest = LAPTOP.base.problems + experiments.HELD_OUT
    assert longest <= len(gsm8k.load_problems(SMALL.data, "train"))  # so that this holds for the laptop's figures too


def test_figure_2_is_where_the_paper_says_the_two_agree():
    _, figure = pretended("fig2")
    numbers = {name: value.mean for name, value in figure.numbers.items()}
    for sign, inside in (("+", "1 <= pi/mu <= 1.2"), ("-", "0.8 <= pi/mu <= 1")):
        assert numbers[f"R = {sign}1: largest |TOPR - PPO| for {inside}"] == pytest.approx(0, abs=1e-12)
        assert numbers[f"R = {sign}1: largest slope of PPO where PPO clips"] == pytest.approx(0, abs=1e-12)
        assert numbers[f"R = {sign}1: largest slope of TOPR where PPO clips"] > 0.9
    assert numbers["R = +1: largest slope of PPO for pi/mu <= 0.5"] == pytest.approx(1)
    assert numbers["R = +1: largest slope of TOPR for pi/mu <= 0.5"] > 50  # 1 / ratio, down to 0.01
    assert figure.data["TOPR, R = -1"][-1] == pytest.approx(-(1 + np.log(2.5)))


def test_a_model_that_is_not_trained_is_a_level_line_of_figure_8():
    others = {name: {"model": name, "iterations": n} for name, n in (("another", 2), ("as it is", 0))}
    study, figure = pretended("fig8", replace(QUICK, others=others), range(1))
    assert {key for key, job in study.arms().items() if job.copies is None} == {"uniform", *others}
    reached = correct(study.runs["another", 0].settings)
    for key in ("pass@1", "maj@2"):
        assert [figure.data[key][name]["mean"] for name in others] == [[0.5, reached, reached], [0.5] * 3]
        assert figure.shares[f"as it is: {key} after iteration 2"].mean == 0.5
        assert figure.shares[f"another: {key} after iteration 2"].mean == reached
    assert [line.label for line in study.panels(figure.data)[0].lines][4:] == list(others)


@pytest.mark.slow
def test_table_2_over_seeds_is_the_mean_of_its_runs(sweep):
    small = replace(QUICK.verifier, problems=4, test_problems=3, n=2, test_samples=2, iterations=1)
    study = STUDIES["table2"](replace(QUICK, verifier=small), range(2))
    study.make(sweep)
    shares, runs = study.read().shares, [study.runs["checker", seed] for seed in (0, 1)]
    for row, columns in runs[0].results["table2"].items():
        for column in columns:
            each = tuple(run.results["table2"][row][column]["mean"] for run in runs)
            assert shares[f"checker, {row}: {column}"].each == each
    weighted = train_verifier.WEIGHTED
    gains = [run.results["paired differences"][f"{weighted}, topr - maj@4"]["mean"] for run in runs]
    assert shares[f"checker, TOPR - no verifier: {weighted}"].each == pytest.approx(gains)
    assert not list(runs[0].folder.rglob("model.safetensors"))  # large, and measured


# ---- the runs of the paper's scale ----


# How many runs a figure has for each seed at the paper's scale, counted from its docstring.
RUNS_OF_THE_PAPER = {
    "fig1": 10,  # six methods of the paper and Table 1 besides TOPR, and three neighbours; one learning rate for all
    "fig2": 0,
    "fig3": 4,
    "fig4": 3,
    "fig5": 2 * 8,  # two sets, eight p~
    "fig6": 2 * 8,  # two methods
    "fig7": 2 * 2,  # two methods, two sets
    "fig8": 6,  # three compositions, a control, DeepSeek, and Llama 3 70B as it is
    "fig9": 2 + 8,  # difficulties of the training and of the test questions; eight p~
    "table2": 1,
    "variants": 4,
}


def test_all_runs_of_the_paper_s_figures_are_planned():
    assert set(reproduce.FIGURES) == set(RUNS_OF_THE_PAPER) == set(STUDIES)
    for name, count in RUNS_OF_THE_PAPER.items():
        jobs = {folder_name(job): job for job in planned(name, seeds=range(3)).values()}
        seeds = Counter(job.settings.seed for job in jobs.values())
        assert seeds == ({0: count, 1: count, 2: count} if count else {}), name
    for name in reproduce.ON_MATH:
        jobs = planned(name.removesuffix("-math"), SCALES["paper-math"]).values()
        found = {(job.task, job.settings.data, job.settings.shots) for job in jobs}
        assert found == {(train_math.math_task, "EleutherAI/hendrycks_math", 4)}


def test_a_dry_run_says_what_runs_change_and_do_and_what_eight_processes_cannot(command, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(train_verifier, "run", lambda *_: pytest.fail("a run was made"))
    monkeypatch.setattr(gsm8k, "experiment", lambda *_: pytest.fail("a run was made"))
    arguments = ["fig9", "fig1", "--preset", "paper", "--runs", tmp_path / "runs"]
    monkeypatch.setenv("COLUMNS", "150")
    command(*arguments, "--seeds", "2", "--dry-run")
    rows = [re.split(r"\s*│\s*", line)[1:-1] for line in capsys.readouterr().out.splitlines() if "│" in line]
    found = {label: rest for label, *rest in rows}
    # 7,473 x 16 samples; 1,319 x 64 before and after, and x 4 at four points between
    assert found["topr"] == ["0 1", "", f"{119_568 + 2 * 84_416 + 4 * 5_276:,}", f"{119_568 // 8:,}"]
    assert found["dpo"][1:] == ["method=dpo batch=16", found["topr"][2], f"{7_473 * 32 // 16:,}"]
    monkeypatch.setitem(SCALES, "paper", replace(PAPER, of_methods={}))  # half a pair for each process
    told = "reproduce: fig1, dpo: --batch 8: is less than a row for each of 8 processes; give --batch 16"
    with pytest.raises(SystemExit, match=told):
        command(*arguments, "--dry-run")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(SystemExit, match=told):
        command(*arguments)
    assert not (tmp_path / "runs").exists()


def test_section_4_2_s_epoch_over_all_samples_is_a_command():
    settings = read_settings("paper --iterations 1 --examples None --curve-points 5".split(), gsm8k.PRESETS)
    assert replace(settings, out=None) == PAPER.base
    check(settings, intended_ranks("paper"))


# ---- the command ----


def test_a_picture_is_drawn_anew_from_its_numbers_and_keeps_what_was_judged(command, tmp_path):
    command("fig2", "--out", tmp_path)
    file, picture = tmp_path / "fig2.json", tmp_path / "fig2.png"
    numbers, drawn = json.loads(file.read_text()), picture.read_bytes()
    picture.unlink()
    command("fig2", "--redraw", "--out", tmp_path)
    assert picture.read_bytes() == drawn
    file.write_text(json.dumps({"judgement": "as claimed"} | numbers))
    command("fig2", "--out", tmp_path)
    assert json.loads(file.read_text()) == {"judgement": "as claimed"} | numbers
    with pytest.raises(SystemExit, match=r"fig9\.json: no such file"):
        command("fig9", "--redraw", "--out", tmp_path)


@pytest.mark.parametrize("name", [*reproduce.FIGURES, "real-llm"])
def test_every_committed_picture_can_be_drawn_anew(name):
    content = json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))
    drawn = (STUDIES | {"real-llm": RealLLM})[name].panels(content["data"])
    assert drawn
    for line in [line for panel in drawn for line in panel.lines if line.kind != "band"]:
        assert len(line.x) == len(line.y) > 0
        assert np.isfinite(np.array(line.y, float)).any()
    for value in [*content["shares"].values(), *content["numbers"].values()]:  # as they would be counted today
        assert Estimate.over_seeds(value["each"])[:2] == pytest.approx((value["mean"], value["half_width"]), abs=1e-12)
    rows = dict(content["tables"]["numbers"]["rows"])
    for what, value in content["shares"].items():
        half_width = "" if value["half_width"] is None else f" ± {100 * value['half_width']:.1f}"
        assert rows[what] == f"{100 * value['mean']:.1f}{half_width} %"


def test_help_needs_nothing_that_is_slow_to_import():
    code = "import reproduce, sys; print({'torch', 'transformers', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "set()\n", done.stderr


def test_a_figure_from_end_to_end_and_again(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SCALES, "quick", QUICK)
    draw, shown = pipeline.stages.draw, []
    monkeypatch.setattr(pipeline.stages, "draw", lambda *a: shown.append(a[6]) or draw(*a))
    out, runs = tmp_path / "out", tmp_path / "runs"
    arguments = ["variants", "--quick", "--workers", "1", "--runs", runs, "--out", out]
    command(*arguments)
    assert "topr, lr 0.0001: invalid at the end" in capsys.readouterr().out
    content = json.loads((out / "variants.json").read_text())
    assert (content["seeds"], content["runs"]) == ([0], 5)
    assert content["command"] == "python reproduce.py variants --preset laptop --seeds 1 --seed 0 --quick"
    assert all(json.loads(file.read_text())["seconds"] > 0 for file in runs.rglob("made.json"))
    assert re.fullmatch(r"unknown|[0-9a-f]{7,}(-dirty)?", *content["commits"])
    for curves in content["data"]["one rate"].values():
        assert len(curves["invalid"]["mean"]) == 2  # before and after the only step
        assert sum(curves[outcome]["mean"][-1] for outcome in ("correct", "incorrect", "invalid")) == pytest.approx(1)
    first = {file.parents[1].name: file.read_text().split("\n")[0] for file in runs.rglob("metrics.jsonl")}
    assert len(first) == 5
    assert all(abs(json.loads(line)["log_ratio_neg_q50"]) < 1e-4 for line in first.values())  # all start at mu
    assert (
        len({json.loads(line)["grad_norm"] for line in first.values()}) == 2
    )  # where weights are 1, one divides otherwise
    assert Counter(shown) == {"sampling": 1, "evaluating at step 0": 1, "evaluating at step 1": 5}  # others copy
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    assert set(before) == {"variants.json", "variants.png"}
    monkeypatch.setattr(gsm8k, "experiment", lambda *_: pytest.fail("made again"))
    command(*arguments)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ([], "no figure named: choose from fig1"),
        (["fig1", "--seeds", "0"], "--seeds 0: must be at least 1"),
        (["fig1", "--quick", "--preset", "paper"], "--quick: is for the laptop"),
        (["fig2", "fig8-math", "--quick"], "fig8-math: is for --preset paper only"),
        (["map", "--redraw"], "map --redraw: the map is drawn from its runs' lines; give --hours 0"),
    ],
    ids=str,
)
def test_bad_options_are_one_line(arguments, fault, command, tmp_path):
    with pytest.raises(SystemExit, match=f"reproduce: {re.escape(fault)}"):
        command(*arguments, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()
