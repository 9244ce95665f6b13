"""The verifier: verdicts read and graded, solutions as problems, the weighted vote, and the run from end to end."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pipeline.evaluation import Answers, collect, wins
from pipeline.records import InputError, Problem, Sample, read_records, write_file
from pipeline.settings import TINY, check, intended_ranks

import train_gsm8k as gsm8k
from tasks import math, verifier

QUESTION = verifier.QUESTION
VERDICTS = {
    f" 1 + 1 = 2, right. {QUESTION} Yes": True,
    f"{QUESTION} No": False,
    f"{QUESTION}\n\n**Yes**": True,
    f"{QUESTION} No. {QUESTION} Yes": True,
    f"{QUESTION} Yes. {QUESTION}": None,
    f"{QUESTION} Yesterday": None,
    f"{QUESTION} Yes/No": None,
    f"{QUESTION} Yes or No?": None,
    f"{QUESTION} yes": None,
    "Yes": None,
}


def test_verdicts_are_parsed_and_graded():
    assert {text: verifier.parse_verdict(text) for text in VERDICTS} == VERDICTS
    outcomes = {None: "invalid", True: "correct", False: "incorrect"}
    for text, verdict in VERDICTS.items():
        assert verifier.grade_verdict(text, True) == outcomes[verdict]


def sample(completion, outcome, problem="p"):
    reward = 1.0 if outcome == "correct" else -1.0
    return Sample(
        problem_id=problem, prompt="?", completion=completion, reward=reward, outcome=outcome
    )


def test_solutions_become_problems_and_models_that_were_not_taught_the_form_are_told():
    problem, solution = Problem("p", "1 + 1?", 0), " 1 + 1 = 2. The answer is 2."
    solutions = [sample(solution, "correct"), sample("b", "incorrect"), sample("c", "invalid")]
    task = replace(gsm8k.gsm8k_task(gsm8k.Settings()), train=[problem])

    def made(**changes):
        return verifier.verifier_task(replace(SMALL, **changes), task, solutions, []).train

    plain = f"Q: {problem.question}\nA:{solution}\nCheck:"
    assert [made.gold for made in made()] == [
        True,
        False,
        False,
    ]  # an invalid solution is one that is not right
    assert len({made.id for made in made()}) == 3
    assert made()[0].question == made(model=str(TINY / "base"))[0].question == plain
    assert made(model="owner/name")[0].question == verifier.INSTRUCTION + plain
    assert QUESTION in verifier.INSTRUCTION
    assert made(model="owner/name", instruction="")[0].question == plain
    assert made(instruction="Look! ")[0].question == f"Look! {plain}"


def test_a_verified_vote_by_hand():
    """Two problems of three solutions, two verdicts each. Scores: 1/2, 0, 1 and 0, 0 (unreadable counts 0), 1/2."""
    texts = [f"{QUESTION} {verdict}" for verdict in "Yes No No No Yes Yes No ? ? ? No Yes".split()]
    given = [(8, "incorrect"), (8, "incorrect"), (7, "correct")]
    solutions = [
        sample(f" The answer is {number}.", right, problem)
        for problem in "ab"
        for number, right in given
    ]
    verifications = [
        sample(text, verifier.grade_verdict(text, i % 6 > 3)) for i, text in enumerate(texts)
    ]
    answers = collect(solutions, gsm8k.gsm8k_task(gsm8k.Settings()))
    found = verifier.verified(verifications, answers)
    assert found["verifier accuracy"].tolist() == pytest.approx([5 / 6, 2 / 6])
    assert found["invalid rate"].tolist() == pytest.approx([0, 3 / 6])
    assert found["weighted self-consistency"].tolist() == [1, 1]
    # one that is right, then two that are wrong alike: no Yes at all, equal sums, a Yes more against a vote more
    for verdicts, expected in (
        ("No No No No No No", 0),
        ("Yes No Yes No No No", 0),
        ("Yes Yes Yes No No No", 1),
    ):
        verifications = [sample(f"{QUESTION} {verdict}", "correct") for verdict in verdicts.split()]
        found = verifier.verified(
            verifications, Answers(np.array([[True, False, False]]), [[7, 8, 8]])
        )
        assert found["weighted self-consistency"].tolist() == [expected]
    unlike = Answers(np.array([[False, True]]), [[7, 7]])  # of equal answers the first is asked
    assert not wins(unlike, 0, [0, 1], [1, 1])


SIZES = {"problems": 6, "train_solutions": 3, "n": 2, "iterations": 2}
SIZES |= {"test_problems": 5, "test_solutions": 4, "test_samples": 2}
SMALL = replace(verifier.SETTINGS["laptop"], **SIZES)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("verifier") / "run"
    return out, verifier.run(replace(SMALL, out=out))


def test_the_numbers_are_those_of_the_files(finished):
    out, results = finished
    assert json.loads((out / "results.json").read_text()) == results
    assert (out / "table2.png").exists()
    solutions = read_records(out / "solutions-test" / "iteration-1" / "test-0.jsonl", Sample)
    steps = json.loads((out / "verifier" / "results.json").read_text())["iterations"][-1][
        "dataset"
    ]["steps"]
    for row, name in (
        ("base", "iteration-1/test-0.jsonl"),
        ("topr", f"iteration-2/test-{steps}.jsonl"),
    ):
        verifications = read_records(out / "verifier" / name, Sample)
        counts = Counter(verification.outcome for verification in verifications)
        for column, outcome in (("verifier accuracy", "correct"), ("invalid rate", "invalid")):
            assert results["table2"][row][column]["mean"] == pytest.approx(
                counts[outcome] / (5 * 4 * 2)
            )
    for i, verification in enumerate(
        verifications
    ):  # each is of the solution that it is counted for
        assert f"\nA:{solutions[i // 2].completion}\nCheck:" in verification.prompt
        is_true = verifier.parse_verdict(verification.completion) is (
            solutions[i // 2].outcome == "correct"
        )
        assert (verification.outcome == "correct", verification.reward) == (
            is_true,
            1.0 if is_true else -1.0,
        )
    assert (
        len(read_records(out / "verifier" / "iteration-1" / "samples.jsonl", Sample)) == 6 * 3 * 2
    )
    assert (len(solutions), len(results["iterations"])) == (5 * 4, 3)
    assert results["iterations"][-1] == results["table2"]["topr"]
    plain = [
        wins(collect(solutions, gsm8k.gsm8k_task(SMALL)), problem, range(4)) for problem in range(5)
    ]
    assert results["table2"]["no verifier"]["weighted self-consistency"]["mean"] == pytest.approx(
        np.mean(plain)
    )
    right = sum(solution.outcome == "correct" for solution in solutions) / (5 * 4)
    constant = results["table2"][verifier.CONSTANT]["verifier accuracy"]["mean"]
    assert constant == pytest.approx(
        max(right, 1 - right)
    )  # the better of always yes and always no
    for split in ("train", "test"):
        assert (
            json.loads((out / f"solutions-{split}" / "config.json").read_text())["model"]
            == "tiny/base"
        )
    base, after = (results["table2"][row]["verifier accuracy"]["mean"] for row in ("base", "topr"))
    gained = results["paired differences"]["verifier accuracy, topr - base"]["mean"]
    assert gained == pytest.approx(after - base) != 0


def test_a_finished_run_is_printed_and_not_made_again_and_others_are_refused(
    finished, monkeypatch, capsys
):
    out, results = finished
    before = {file: file.stat().st_mtime_ns for file in out.rglob("*.jsonl")}
    options = [
        f"--{'verifications' if name == 'n' else name.replace('_', '-')}={SIZES[name]}"
        for name in SIZES
    ]
    monkeypatch.setattr("sys.argv", ["tasks.verifier", *options, "--out", str(out)])
    verifier.main()
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("no verifier", "base", "topr", "maj@4", str(out)))
    assert json.loads((out / "results.json").read_text()) == results
    assert {file: file.stat().st_mtime_ns for file in out.rglob("*.jsonl")} == before
    with pytest.raises(InputError, match="other settings"):
        verifier.run(replace(SMALL, out=out, seed=1))


def test_a_verifier_of_mathematics(tmp_path):
    own = {"task": "math", "data": str(TINY / "math"), "instruction": verifier.INSTRUCTION}
    results = verifier.run(
        replace(SMALL, **own, iterations=0, max_new_tokens=8, out=tmp_path / "run")
    )
    assert results["table2"]["topr"] == results["table2"]["base"]  # nothing was trained
    [prompt] = {
        s.prompt
        for s in read_records(tmp_path / "run/verifier/iteration-1/test-0.jsonl", Sample)[:2]
    }
    assert prompt.startswith("Check the solution")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_solutions": 1}, "--train-solutions 1: must be at least 2"),
        ({"n": 0}, "--verifications 0: must be at least 1"),
        ({"generator": "nowhere"}, "--model nowhere: is neither"),
        ({"dry_run": True}, "--dry-run: "),
        ({"samples": Path("file")}, "--samples and --reuse"),
        ({"engine": "hf", "generator_gpus": 2}, "--generator-gpus 2: is for --engine vllm"),
        ({"data": "single"}, "1 test problem: has no interval"),
    ],
)
def test_what_is_refused(changes, message, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.chdir(tmp_path)
    for split in ("train", "test"):
        write_file(Path("single") / f"{split}.jsonl", '{"question": "1 + 1?", "answer": "#### 2"}')
    with pytest.raises(InputError, match=message):
        verifier.run(replace(SMALL, out=tmp_path / "run", **changes))
    assert not (tmp_path / "run").exists()


def test_presets_are_the_paper_s_where_it_speaks():
    for name, settings in [
        *verifier.SETTINGS.items(),
        *math.SETTINGS.items(),
        *gsm8k.SETTINGS.items(),
    ]:
        (verifier.check_verifier if isinstance(settings, type(SMALL)) else check)(
            settings, intended_ranks(name)
        )
        assert settings.preset == name
    paper = verifier.SETTINGS["paper"]
    assert (paper.train_solutions, paper.n, paper.test_solutions, paper.test_samples) == (
        16,
        4,
        32,
        4,
    )
    assert (paper.task, paper.generator_gpus, paper.engine_gpus, paper.examples) == (
        "math",
        4,
        1,
        480_000,
    )
    paper = math.SETTINGS["paper"]
    assert (paper.n, paper.shots, paper.test_problems, paper.test_samples, paper.lr) == (
        32,
        4,
        500,
        16,
        5e-7,
    )
