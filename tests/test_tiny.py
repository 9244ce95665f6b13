"""tiny/: its problems are sound, its files are those that make.py writes, its models are as good as they should be."""

import random
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import make
import numpy as np
import problems
import pytest
from hypothesis import given
from hypothesis import strategies as st

import train_gsm8k as gsm8k

TINY = Path(make.__file__).parent


def test_the_committed_files_are_those_that_make_writes(tmp_path):
    make.main(
        make.Settings(out=tmp_path, steps=1, checker_steps=1)
    )  # base models that were hardly taught
    of_models = [
        f"{model}/{name}"
        for model in ("base", "checker")
        for name in ("tokenizer.json", "config.json")
    ]
    for name in ("train.jsonl", "test.jsonl", *of_models):
        assert (tmp_path / name).read_bytes() == (TINY / name).read_bytes(), name
    for model in ("checker", "worded", "two_thirds"):
        assert (TINY / model / "config.json").read_bytes() == (
            TINY / "base" / "config.json"
        ).read_bytes()
        assert (TINY / model / "tokenizer.json").samefile(TINY / "base" / "tokenizer.json")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "models"),
    [
        ({}, ["base", "checker"]),
        ({"base": TINY / "base", "habit": 2, "checker_steps": 0}, ["base"]),
    ],
    ids=["new", "taught on"],
)
def test_same_seed_same_weights(tmp_path, changes, models):
    one, two = (tmp_path / name for name in "ab")
    for out in (one, two):
        make.main(replace(make.Settings(out=out, steps=3, checker_steps=3), **changes))
    assert sorted(path.parent.name for path in one.rglob("*.safetensors")) == models
    for name in (f"{model}/model.safetensors" for model in models):
        assert (one / name).read_bytes() == (two / name).read_bytes() != (TINY / name).read_bytes()


def test_problems_are_of_sixteen_families_disjoint_and_as_many_as_they_should_be():
    train, test = (
        {p.question for p in gsm8k.load_problems(str(TINY), split)} for split in ("train", "test")
    )
    assert (len(train), len(test), len(train & test)) == (1000, 500, 0)
    assert Counter(plans[0].count("=") for plans in problems.PLANS.values()) == {1: 4, 2: 8, 3: 4}


@given(st.integers(0, 10**6))
def test_every_solution_is_sound_and_a_teacher_without_noise_gives_it(seed):
    rng = random.Random(seed)
    problem = problems.draw_problem(rng)
    solution, answer = problems.solve(problem)
    found = problems.EXPRESSION.findall(solution)
    for left, sign, right, result in found:
        assert eval(f"{left} {sign} {right}") == int(
            result
        )  # Python's own arithmetic, on digits and a sign
    assert int(found[-1][3]) == answer
    assert "{" not in problem.question
    taught = problems.solve_badly(problem, problems.FLAWLESS, rng)
    assert taught == (f" {solution} The answer is {answer}.", True)
    assert problems.verify(taught[0], True, problems.FLAWLESS, rng).endswith(
        "correct (Yes/No)? Yes"
    )


def test_noise_is_as_frequent_as_it_says():
    rng, noise = random.Random(0), problems.Noise(result=0.3, ending=0.2, verdict=0.4, silence=0.25)
    taught = [
        (p := problems.draw_problem(rng), *problems.solve_badly(p, noise, rng)) for _ in range(4000)
    ]
    missing = ["The answer is" not in solution for _, solution, _ in taught]
    one_step = [
        ok
        for (p, _, ok), lost in zip(taught, missing, strict=True)
        if p.family == "find" and not lost
    ]
    verdicts = [
        (ok, problems.verify(solution, ok, noise, rng)[-4:].strip(" ?"))
        for _, solution, ok in taught
    ]
    spoken = [ok != (verdict == "Yes") for ok, verdict in verdicts if verdict in ("Yes", "No")]
    shares = [sum(of) / len(of) for of in (missing, one_step, spoken)]
    assert shares == pytest.approx([0.2, 0.7, 0.4], abs=0.05)
    assert 1 - len(spoken) / len(verdicts) == pytest.approx(0.25, abs=0.03)


def test_plans_and_endings_are_wrong_as_often_as_the_teacher_is_told():
    rng, noise, count = (
        random.Random(0),
        problems.Noise(plan=(0.2, 0.9), ending=0.4, endings=4),
        20_000,
    )
    plans, endings, same = defaultdict(Counter), Counter(), []
    for _ in range(count):
        problem = problems.draw_problem(rng)
        text, is_right = problems.solve_badly(problem, noise, rng)
        solved = [problems.solve(problem, plan) for plan in problems.PLANS[problem.family]]
        plan = max(
            (i for i, (s, _) in enumerate(solved) if text.startswith(f" {s}")),
            key=lambda i: len(solved[i][0]),
        )
        ending = text.removeprefix(f" {solved[plan][0]}").replace(str(solved[plan][1]), "{answer}")
        plans[problem.family][plan] += 1
        endings[ending] += 1
        assert is_right == (gsm8k.parse_answer(text) == solved[0][1])
        same += [answer == solved[0][1] for _, answer in solved[1:]]
    wrong = sorted(1 - counts[0] / counts.total() for counts in plans.values())
    expected = [
        0.2 + 0.7 * i / 15 for i in range(16)
    ]  # evenly spaced, whichever family comes first
    assert wrong == pytest.approx(expected, abs=4 * (0.25 / (count / 16)) ** 0.5)
    first, others = (
        sum(counts[i] for counts in plans.values() for i in of) for of in ((1,), (2, 3))
    )
    assert first / (first + others) == pytest.approx(problems.USUAL, abs=0.02)
    expected = dict.fromkeys(problems.ENDINGS, 0.1) | {" The answer is {answer}.": 0.6}
    assert {ending: n / count for ending, n in endings.items()} == pytest.approx(expected, abs=0.02)
    assert sum(same) / len(same) < 0.03  # a wrong plan mostly gives another answer
    assert all(len(set(plans)) == len(plans) >= 3 for plans in problems.PLANS.values())


@pytest.mark.parametrize(("wordings", "texts"), [(1, 1), (3, 7.8), (8, 8)])
def test_a_worded_solution_keeps_the_numbers_of_its_plan(wordings, texts):
    rng, noise, distinct = random.Random(0), problems.Noise(wordings=wordings), []
    for _ in range(300):
        problem = problems.draw_problem(rng)
        solution, answer = problems.solve(problem)
        worded = [problems.solve_badly(problem, noise, rng)[0] for _ in range(8)]
        plain = [
            (*sorted((x, y)), sign, z) for x, sign, y, z in problems.EXPRESSION.findall(solution)
        ]
        for text in worded:
            assert [
                (*sorted((x, y)), sign, z) for x, sign, y, z in problems.EXPRESSION.findall(text)
            ] == plain
            assert gsm8k.parse_answer(text) == answer
            assert text.count(".") >= len(plain) + 1
        distinct.append(len(set(worded)))
    assert np.mean(distinct) == pytest.approx(texts, abs=0.2)  # of eight
