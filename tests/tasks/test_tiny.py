"""tiny/: sound problems, the files that make.py writes, and a teacher who errs as often as set."""

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
from transformers import AutoTokenizer

import train_gsm8k as gsm8k

TINY = Path(make.__file__).parent


# ---- files ---------------------------------------------------------------------------------------
def test_make_writes_the_text_files_and_the_tokenizer_byte_for_byte(tmp_path):
    make.main(make.Settings(out=tmp_path, steps=1, checker_steps=1))  # models do not matter here
    names = ["train.jsonl", "test.jsonl"]
    for model in ("base", "checker"):
        names += [f"{model}/tokenizer.json", f"{model}/config.json"]
    for name in names:
        assert (tmp_path / name).read_bytes() == (TINY / name).read_bytes(), name


@pytest.mark.parametrize("model", ["checker", "worded", "two_thirds"])
def test_models_share_the_base_models_tokenizer_and_sizes(model):
    base = TINY / "base"
    assert (TINY / model / "tokenizer.json").samefile(base / "tokenizer.json")
    assert (TINY / model / "config.json").read_bytes() == (base / "config.json").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "models"),
    [
        ({}, ["base", "checker"]),
        ({"base": TINY / "base", "habit": 2, "checker_steps": 0}, ["base"]),
    ],
    ids=["new", "fine-tuned"],
)
def test_the_same_seed_makes_the_same_weights(tmp_path, changes, models):
    for name in ("first", "second"):
        settings = make.Settings(out=tmp_path / name, steps=3, checker_steps=3)
        make.main(replace(settings, **changes))
    written = [path.parent.name for path in (tmp_path / "first").rglob("*.safetensors")]
    assert sorted(written) == models
    for model in models:
        name = f"{model}/model.safetensors"
        weights = (tmp_path / "first" / name).read_bytes()
        assert weights == (tmp_path / "second" / name).read_bytes()
        assert weights != (TINY / name).read_bytes()


# ---- training ------------------------------------------------------------------------------------
def test_a_model_is_taught_completions_and_not_their_prompts():
    tokenizer = AutoTokenizer.from_pretrained(TINY / "base")
    examples = [("Q: 1 + 1?\nA:", " 2."), ("Q?", " 1 + 2 = 3 figs. The answer is 3.")]
    ids, labels = make.encode(tokenizer, examples)
    width = ids.shape[1]
    for row, (prompt, completion) in enumerate(examples):
        prompt_ids = tokenizer(prompt)["input_ids"]
        taught = [*tokenizer(completion)["input_ids"], tokenizer.eos_token_id]
        padding = width - len(prompt_ids) - len(taught)
        pads = [tokenizer.pad_token_id] * padding
        assert ids[row].tolist() == [*prompt_ids, *taught, *pads]
        # cross_entropy leaves -100 out.
        assert labels[row].tolist() == [-100] * len(prompt_ids) + taught + [-100] * padding


def test_the_teacher_is_flawless_at_first(monkeypatch):
    teachers = []

    def make_example(rng, used, is_verification, noise):
        teachers.append(noise)
        return "Q?", " 1."

    monkeypatch.setattr(make, "make_example", make_example)
    tokenizer = AutoTokenizer.from_pretrained(TINY / "base")
    settings = make.Settings(steps=4, batch=1, flawless=0.25, teacher=problems.MISTAKEN)
    make.train_supervised(make.make_model(tokenizer, 0), tokenizer, set(), settings)
    assert teachers == [problems.FLAWLESS] + [problems.MISTAKEN] * 3


def test_a_flawless_teacher_verifies_solutions_with_mistakes():
    are_right = []
    for seed in range(60):
        prompt, check = make.make_example(random.Random(seed), set(), True, problems.FLAWLESS)
        _, answer = problems.solve(problems.draw_problem(random.Random(seed)))
        is_right = prompt.endswith(f" The answer is {answer}.\nCheck:")
        assert check.endswith("? Yes" if is_right else "? No")
        are_right.append(is_right)
    assert 10 < sum(are_right) < 50


# ---- problems ------------------------------------------------------------------------------------
def test_training_and_test_problems_are_disjoint():
    train = {problem.question for problem in gsm8k.load_problems(str(TINY), "train")}
    test = {problem.question for problem in gsm8k.load_problems(str(TINY), "test")}
    assert (len(train), len(test), len(train & test)) == (1000, 500, 0)


def test_sixteen_families_have_one_to_three_steps_and_wrong_plans():
    steps = Counter(plans[0].count("=") for plans in problems.PLANS.values())
    assert steps == {1: 4, 2: 8, 3: 4}
    for plans in problems.PLANS.values():
        assert len(set(plans)) == len(plans) >= 3


@given(st.integers(0, 10**6))
def test_a_solution_without_noise_is_right(seed):
    rng = random.Random(seed)
    problem = problems.draw_problem(rng)
    solution, answer = problems.solve(problem)
    steps = problems.EXPRESSION.findall(solution)
    for left, sign, right, result in steps:
        assert eval(f"{left} {sign} {right}") == int(result)  # Python's own arithmetic
    assert int(steps[-1][3]) == answer
    assert "{" not in problem.question
    text, is_correct = problems.solve_badly(problem, problems.FLAWLESS, rng)
    assert (text, is_correct) == (f" {solution} The answer is {answer}.", True)
    check = problems.verify(text, True, problems.FLAWLESS, rng)
    assert check.endswith("correct (Yes/No)? Yes")


# ---- noise ---------------------------------------------------------------------------------------
def test_noise_is_as_frequent_as_its_probabilities():
    rng = random.Random(0)
    noise = problems.Noise(result=0.3, ending=0.2, verdict=0.4, silence=0.25)
    has_no_ending = []
    one_step_is_correct = []
    has_no_verdict = []
    verdict_is_wrong = []
    for _ in range(4000):
        problem = problems.draw_problem(rng)
        solution, is_correct = problems.solve_badly(problem, noise, rng)
        has_no_ending.append("The answer is" not in solution)
        if problem.family == "find" and not has_no_ending[-1]:
            one_step_is_correct.append(is_correct)
        check = problems.verify(solution, is_correct, noise, rng)
        verdict = check[-4:].strip(" ?")
        has_no_verdict.append(verdict not in ("Yes", "No"))
        if not has_no_verdict[-1]:
            verdict_is_wrong.append(is_correct != (verdict == "Yes"))
    assert np.mean(has_no_ending) == pytest.approx(0.2, abs=0.05)
    assert np.mean(one_step_is_correct) == pytest.approx(0.7, abs=0.05)
    assert np.mean(has_no_verdict) == pytest.approx(0.25, abs=0.03)
    assert np.mean(verdict_is_wrong) == pytest.approx(0.4, abs=0.05)


def find_plan(problem, text):
    """Which of its family's plans a text follows, with the plan's solution and answer."""
    candidates = []
    for index, plan in enumerate(problems.PLANS[problem.family]):
        solution, answer = problems.solve(problem, plan)
        if text.startswith(f" {solution}"):
            candidates.append((len(solution), index, solution, answer))
    _, index, solution, answer = max(candidates)  # one plan may be the beginning of another
    return index, solution, answer


def test_plans_and_endings_are_wrong_as_often_as_set():
    rng = random.Random(0)
    noise = problems.Noise(plan=(0.2, 0.9), ending=0.4, endings=4)
    count = 20_000
    plans = defaultdict(Counter)  # family -> index of a plan -> how often
    endings = Counter()
    wrong_plan_is_right = []
    for _ in range(count):
        problem = problems.draw_problem(rng)
        text, is_correct = problems.solve_badly(problem, noise, rng)
        gold = problems.solve(problem)[1]
        index, solution, answer = find_plan(problem, text)
        plans[problem.family][index] += 1
        endings[text.removeprefix(f" {solution}").replace(str(answer), "{answer}")] += 1
        assert is_correct == (gsm8k.parse_answer(text) == gold)
        for plan in problems.PLANS[problem.family][1:]:
            wrong_plan_is_right.append(problems.solve(problem, plan)[1] == gold)

    actual = sorted(1 - counts[0] / counts.total() for counts in plans.values())
    expected = [0.2 + 0.7 * rank / 15 for rank in range(16)]  # evenly spaced over the families
    standard_error = (0.25 / (count / 16)) ** 0.5
    assert actual == pytest.approx(expected, abs=4 * standard_error)

    usual = sum(counts[1] for counts in plans.values())
    others = sum(counts[2] + counts[3] for counts in plans.values())
    assert usual / (usual + others) == pytest.approx(problems.USUAL, abs=0.02)
    assert np.mean(wrong_plan_is_right) < 0.03

    shares = {ending: number / count for ending, number in endings.items()}
    expected = dict.fromkeys(problems.ENDINGS, 0.1) | {" The answer is {answer}.": 0.6}
    assert shares == pytest.approx(expected, abs=0.02)


def find_steps(text):
    """The steps of a solution; the two numbers on the left in increasing order."""
    steps = []
    for left, sign, right, result in problems.EXPRESSION.findall(text):
        steps.append((*sorted((left, right)), sign, result))
    return steps


@pytest.mark.parametrize(("wordings", "expected"), [(1, 1), (3, 7.8), (8, 8)])
def test_a_solution_in_other_words_keeps_its_steps(wordings, expected):
    """expected: distinct texts among eight solutions of a problem."""
    rng = random.Random(0)
    noise = problems.Noise(wordings=wordings)
    distinct = []
    for _ in range(300):
        problem = problems.draw_problem(rng)
        solution, answer = problems.solve(problem)
        texts = [problems.solve_badly(problem, noise, rng)[0] for _ in range(8)]
        for text in texts:
            assert find_steps(text) == find_steps(solution)
            assert gsm8k.parse_answer(text) == answer
            assert text.count(".") >= len(find_steps(solution)) + 1
        distinct.append(len(set(texts)))
    assert np.mean(distinct) == pytest.approx(expected, abs=0.2)
