"""The verifier: verdicts read and graded, solutions as problems, the weighted vote, and the run from end to end."""

import json
import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import problems as tiny_problems
import pytest

import train_gsm8k as gsm8k
from pipeline.evaluation import Answers, collect, wins
from pipeline.records import InputError, Problem, Sample, read_rows
from pipeline.report import Estimate
from pipeline.settings import TINY, intended_ranks
from tasks import verifier

QUESTION = verifier.QUESTION


VERDICTS = {
    f" 1 + 1 = 2, right. {QUESTION} Yes": True,
    f"{QUESTION} No": False,
    f"{QUESTION} No.": False,
    f"{QUESTION}\n\n**Yes**": True,
    f"{QUESTION} Yes\n\nThe solution is right.": True,
    f"{QUESTION} No. {QUESTION} Yes": True,
    f"{QUESTION} Yes. {QUESTION}": None,
    f"{QUESTION} Yesterday": None,
    f"{QUESTION} Yes/No": None,
    f"{QUESTION} Yes or No?": None,
    f"{QUESTION} yes": None,
    f"{QUESTION} X": None,
    "Is the answer correct? Yes": None,
    "Yes": None,
    "": None,
}


def test_verdicts_are_parsed_and_graded():
    assert {text: verifier.parse_verdict(text) for text in VERDICTS} == VERDICTS
    outcomes = {None: "invalid", True: "correct", False: "incorrect"}
    graded = {text: verifier.grade_verdict(text, True) for text in VERDICTS}
    assert graded == {text: outcomes[verdict] for text, verdict in VERDICTS.items()}


def sample(completion, outcome, problem="p"):
    reward = 1.0 if outcome == "correct" else -1.0
    return Sample(problem_id=problem, prompt="?", completion=completion, reward=reward, outcome=outcome)


def test_solutions_become_problems_in_the_form_that_the_tiny_model_was_taught():
    rng = random.Random(0)
    problem = tiny_problems.draw_problem(rng)
    solution, is_correct = tiny_problems.solve_badly(problem, tiny_problems.TEACHER, rng)
    solved = sample(solution, "correct" if is_correct else "incorrect")
    task = replace(gsm8k.gsm8k_task(gsm8k.Settings()), test=[Problem("p", problem.question, 0)])
    [made] = verifier.to_problems(task.test, [solved], task, "")
    assert (made.question, made.gold) == (f"Q: {problem.question}\nA:{solution}\nCheck:", is_correct)
    [told] = verifier.to_problems(task.test, [solved], task, verifier.INSTRUCTION)
    assert told.question == verifier.INSTRUCTION + made.question
    assert QUESTION in told.question
    solutions = [sample("a", "correct", "p"), sample("b", "incorrect", "p"), sample("c", "invalid", "p")]
    made = verifier.to_problems(task.test, solutions, task, "")
    assert [problem.gold for problem in made] == [True, False, False]  # an invalid solution is one that is not right
    assert len({problem.id for problem in made}) == 3


# ---- the vote ----------------------------------------------------------------------------------------------------


def vote_by_counting_twice(votes, correct, weights):
    """Another way to the same: every answer's weight by a sum of its own, in the order of the answers."""
    answers = [vote for i, vote in enumerate(votes) if vote is not None and vote not in votes[:i]]
    if not answers:
        return False
    sums = [sum(weight for vote, weight in zip(votes, weights, strict=True) if vote == answer) for answer in answers]
    return correct[votes.index(answers[sums.index(max(sums))])]


def test_the_weighted_vote_is_that_of_a_plain_count():
    rng = random.Random(0)
    for _ in range(200):
        votes = [rng.choice([1, 2, 3, None]) for _ in range(rng.randint(1, 9))]
        correct = [vote == 2 for vote in votes]
        weights = [rng.choice([0, 0.25, 0.5, 0.75, 1]) for _ in votes]
        found = wins(Answers(np.array([correct]), [votes]), 0, range(len(votes)), weights)
        assert found == vote_by_counting_twice(votes, correct, weights), (votes, weights)


def test_of_equal_answers_the_first_tells_whether_they_are_correct():
    """Where a grader does not treat them alike."""
    assert not wins(Answers(np.array([[False, True]]), [[7, 7]]), 0, [0, 1], [1, 1])


def test_over_questions_is_the_standard_error_of_a_mean():
    values = np.random.default_rng(0).normal(size=50)
    found = Estimate.over_samples(values)
    assert found.mean == pytest.approx(values.sum() / 50)
    assert found.half_width == pytest.approx(2 * (((values - values.mean()) ** 2).sum() / 49 / 50) ** 0.5)


def test_a_verified_vote_by_hand():
    """Two problems of three solutions, two verdicts each. Scores: 1/2, 0, 1 and 0, 0 (unreadable counts 0), 1/2."""
    yes, no, none = f"{QUESTION} Yes", f"{QUESTION} No", "?"
    verdicts = [(yes, no), (no, no), (yes, yes), (no, none), (none, none), (no, yes)]
    solutions = [
        sample(f" The answer is {number}.", "correct" if number == 7 else "incorrect", problem)
        for problem in "ab"
        for number in (8, 8, 7)
    ]
    verifications = [
        sample(text, verifier.grade_verdict(text, solution.outcome == "correct"))
        for solution, of_it in zip(solutions, verdicts, strict=True)
        for text in of_it
    ]
    answers = collect(solutions, gsm8k.gsm8k_task(gsm8k.Settings()))
    found = verifier.verified(verifications, answers)
    assert found["verifier accuracy"].tolist() == pytest.approx([5 / 6, 2 / 6])
    assert found["invalid rate"].tolist() == pytest.approx([0, 3 / 6])
    assert found["weighted self-consistency"].tolist() == [1, 1]
    assert verifier.votes_won(answers, np.ones((2, 3))).tolist() == [0, 0]  # a plain majority


# ---- the run -----------------------------------------------------------------------------------------------------

SIZES = {"problems": 6, "train_solutions": 3, "n": 2, "iterations": 2}
SIZES |= {"test_problems": 5, "test_solutions": 4, "test_samples": 2}
SMALL = verifier.VerifierSettings(**SIZES)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("verifier") / "run"
    return out, verifier.run(replace(SMALL, out=out))


def test_the_numbers_are_those_of_the_files(finished):
    out, results = finished
    assert json.loads((out / "results.json").read_text()) == results
    assert (out / "table2.png").exists()
    solutions = read_rows(out / "solutions-test" / "iteration-1" / "test-0.jsonl", Sample)
    assert len(solutions) == 5 * 4
    steps = json.loads((out / "verifier" / "results.json").read_text())["iterations"][-1]["dataset"]["steps"]
    for row, name in (("base", "iteration-1/test-0.jsonl"), ("topr", f"iteration-2/test-{steps}.jsonl")):
        verifications = read_rows(out / "verifier" / name, Sample)
        assert len(verifications) == 5 * 4 * 2
        counts = Counter(verification.outcome for verification in verifications)
        assert results["table2"][row]["verifier accuracy"]["mean"] == pytest.approx(counts["correct"] / 40)
        assert results["table2"][row]["invalid rate"]["mean"] == pytest.approx(counts["invalid"] / 40)
    for i, verification in enumerate(verifications):  # each is of the solution that it is counted for
        assert f"\nA:{solutions[i // 2].completion}\nCheck:" in verification.prompt
        is_right = solutions[i // 2].outcome == "correct"
        is_true = verifier.parse_verdict(verification.completion) is is_right
        assert (verification.outcome == "correct", verification.reward) == (is_true, 1.0 if is_true else -1.0)
    assert len(read_rows(out / "verifier" / "iteration-1" / "samples.jsonl", Sample)) == 6 * 3 * 2
    assert len(results["iterations"]) == 3
    assert results["iterations"][-1] == results["table2"]["topr"]
    generators = [json.loads((out / f"solutions-{split}" / "config.json").read_text()) for split in ("train", "test")]
    assert {generator["model"] for generator in generators} == {SMALL.generator} != {SMALL.model}
    gained, *_ = results["paired differences"].values()
    base, after = (results["table2"][row]["verifier accuracy"]["mean"] for row in ("base", "topr"))
    assert gained["mean"] == pytest.approx(after - base) != 0


def test_a_finished_run_is_printed_and_not_made_again_and_others_are_refused(finished, monkeypatch, capsys):
    out, results = finished
    before = {file: file.stat().st_mtime_ns for file in out.rglob("*.jsonl")}
    names = {name: name.replace("_", "-") for name in SIZES} | {"n": "verifications"}
    options = [f"--{names[name]}={value}" for name, value in SIZES.items()]
    monkeypatch.setattr("sys.argv", ["tasks.verifier", *options, "--out", str(out)])
    verifier.main()
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("no verifier", "base", "topr", "maj@4", str(out)))
    assert json.loads((out / "results.json").read_text()) == results
    assert {file: file.stat().st_mtime_ns for file in out.rglob("*.jsonl")} == before
    with pytest.raises(InputError, match="other settings"):
        verifier.run(replace(SMALL, out=out, seed=1))


@pytest.mark.slow
def test_a_verifier_of_mathematics(tmp_path):
    settings = replace(SMALL, task="math", data=str(TINY / "math"), iterations=0, out=tmp_path / "run")
    results = verifier.run(replace(settings, max_new_tokens=8, instruction=verifier.INSTRUCTION))
    assert results["table2"]["topr"] == results["table2"]["base"]  # nothing was trained
    [prompt] = {s.prompt for s in read_rows(tmp_path / "run/verifier/iteration-1/test-0.jsonl", Sample)[:2]}
    assert prompt.startswith("Check the solution")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_solutions": 1}, "--train-solutions 1: must be at least 2"),
        ({"n": 0}, "--verifications 0: must be at least 1"),
        ({"test_problems": 1}, "--test-problems 1: must be at least 2"),
        ({"generator": "nowhere"}, "--model nowhere: is neither"),
        ({"dry_run": True}, "--dry-run: "),
        ({"samples": Path("file")}, "--samples and --reuse"),
        ({"reuse": Path("folder")}, "--samples and --reuse"),
        ({"lr": -1.0}, "--lr"),
        ({"generator_gpus": 2}, "--generator-gpus 2: must divide the 1 processes of a machine"),
        ({"solutions": Path("nowhere")}, "nowhere: no such file"),
    ],
)
def test_what_is_refused(changes, message, tmp_path):
    with pytest.raises(InputError, match=message):
        verifier.run(replace(SMALL, out=tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


def test_transformers_cannot_span_gpus(monkeypatch, tmp_path):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(InputError, match="--generator-gpus 2: is for --engine vllm"):
        verifier.run(replace(SMALL, out=tmp_path / "run", engine="hf", generator_gpus=2))
    assert not (tmp_path / "run").exists()


def test_a_single_test_problem_has_no_interval(tmp_path):
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text('{"question": "1 + 1?", "answer": "#### 2"}\n')
    with pytest.raises(InputError, match="1 test problem: has no interval"):
        verifier.run(replace(SMALL, out=tmp_path / "run", data=str(tmp_path)))


def test_a_folder_with_something_else_is_left_alone(tmp_path):
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(InputError, match="is not empty and no run"):
        verifier.run(replace(SMALL, out=tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]


# ---- solutions made elsewhere ------------------------------------------------------------------------------------


def given(folder, rows, **changes):
    """Settings of a run on a file of solutions."""
    file = folder / "solutions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return replace(SMALL, solutions=file, out=folder / "run", **changes)


@pytest.fixture(scope="module")
def elsewhere(finished):
    """The finished run's solutions as others may bring them: those of test by question, those of training by id."""
    out, _ = finished
    task = gsm8k.gsm8k_task(SMALL)
    questions = {problem.id: problem.question for problem in task.test}
    own = {split: read_rows(out / f"solutions-{split}/iteration-1/test-0.jsonl", Sample) for split in ("test", "train")}
    rows = [{"question": questions[one.problem_id], "completion": one.completion} for one in own["test"]]
    return own, rows + [{"problem_id": one.problem_id, "completion": one.completion} for one in own["train"]]


def test_solutions_made_elsewhere_are_graded_and_verified_as_own_ones(finished, elsewhere, tmp_path):
    own, rows = elsewhere
    settings = given(tmp_path, rows, generator="nowhere", iterations=0)
    found = verifier.given_solutions(settings, gsm8k.gsm8k_task(settings))
    for split, samples in own.items():
        alike = {"token_ids": None, "finish_reason": "stop"}
        assert found[split] == [sample.model_copy(update=alike) for sample in samples]
    assert verifier.run(settings)["table2"]["no verifier"] == finished[1]["table2"]["no verifier"]
    assert not list((tmp_path / "run").glob("solutions-*"))
    settings.solutions.write_text(settings.solutions.read_text() + "\n")
    with pytest.raises(InputError, match="solutions_sha256"):
        verifier.run(settings)


def test_only_what_the_file_has_not_is_drawn(elsewhere, tmp_path):
    settings = given(tmp_path, [row for row in elsewhere[1] if "problem_id" in row])
    assert list(verifier.given_solutions(settings, gsm8k.gsm8k_task(settings))) == ["train"]
    assert verifier.given_solutions(SMALL, gsm8k.gsm8k_task(SMALL)) == {}


def test_solutions_that_do_not_fit_are_refused(elsewhere, tmp_path):
    question, right = gsm8k.gsm8k_task(SMALL).train[0].question, {"problem_id": "test-1", "completion": "!"}
    none = "is none of the run's problems"
    for rows, fault in (
        ([right, {"problem_id": "train-7", "completion": "!"}], f":2: problem 'train-7': {none}"),
        ([{"completion": "!"}], f":1: problem '': {none}"),
        ([{"question": question, "split": "test", "completion": "!"}], f":1: problem .* {none}"),
        ([right], "problem test-1 has 1 solutions; --test-solutions 4 must be there of each"),
        (elsewhere[1][1:], "problem test-1 has 3 solutions; --test-solutions 4"),
        ([{**right, "text": "!"}], ":1: field text: "),
        ([{"problem_id": "test-1"}], ":1: field completion: "),
    ):
        with pytest.raises(InputError, match=f"solutions.jsonl.*{fault}"):
            verifier.run(given(tmp_path, rows))
    assert not (tmp_path / "run").exists()


def test_a_question_of_both_splits_needs_its_split(tmp_path):
    same = [Problem("train-1", "1 + 1?", 2), Problem("test-1", "1 + 1?", 2)]
    task = replace(gsm8k.gsm8k_task(gsm8k.Settings()), train=same[:1], test=same[1:])
    row = {"question": " 1 + 1?\n", "completion": " The answer is 2."}
    with pytest.raises(InputError, match=r"1: problem .*: is in both splits; give its split"):
        verifier.given_solutions(given(tmp_path, [row]), task)
    [solution] = verifier.given_solutions(given(tmp_path, [{**row, "split": "train"}]), task)["train"]
    assert (solution.problem_id, solution.outcome) == ("train-1", "correct")


# ---- settings ----------------------------------------------------------------------------------------------------


def test_models_that_were_not_taught_the_form_are_told():
    task = replace(gsm8k.gsm8k_task(gsm8k.Settings()), train=[Problem("p", "1 + 1?", 2)])
    solved = [sample(" The answer is 2.", "correct")]

    def prompt(**changes):
        made = verifier.verifier_task(replace(SMALL, **changes), task, solved, [])
        return made.prompt(made.train[0])

    plain = "Q: 1 + 1?\nA: The answer is 2.\nCheck:"
    assert prompt() == prompt(model=str(TINY / "base")) == plain
    assert prompt(model="owner/name") == verifier.INSTRUCTION + plain
    assert prompt(model="owner/name", instruction="") == plain
    assert prompt(instruction="Look! ") == f"Look! {plain}"


def test_presets_are_the_paper_s_where_it_speaks():
    for name, settings in verifier.PRESETS.items():
        verifier.check_verifier(settings, intended_ranks(name))
        assert settings.preset == name
    paper = verifier.PRESETS["paper"]
    assert (paper.generator, paper.generator_gpus, paper.engine_gpus) == (verifier.LLAMA_70B, 4, 1)
    assert (paper.train_solutions, paper.n, paper.test_solutions, paper.test_samples) == (16, 4, 32, 4)
    assert (paper.task, paper.data, paper.examples, paper.lr) == ("math", "EleutherAI/hendrycks_math", 480_000, 5e-7)


def test_every_setting_says_where_its_default_is_from():
    text = Path(verifier.__file__).read_text(encoding="utf-8")
    fields = dict(re.findall(r"^    (\w+): .* = .*\n    \"\"\"(.*)\"\"\"", text, re.MULTILINE))
    assert set(fields) == set(verifier.VerifierSettings.__annotations__)
    assert all("paper" in help or "ours" in help for help in fields.values())
