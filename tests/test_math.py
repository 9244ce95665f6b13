"""The MATH task: answers found, compared and graded; problems and worked examples; text that means harm."""

import gc
import json
import re
import signal
from dataclasses import replace

import pytest
import sympy

from pipeline.evaluation import collect
from pipeline.records import InputError, Sample, write_file
from pipeline.settings import TINY
from tasks import math
from tasks.judge import Judge


@pytest.fixture(scope="module")
def judge():
    return Judge()


EXTRACTED = [
    (r"\boxed{x + \boxed{3}}", "3"),
    (r"\boxed{\left\{1\right.}", r"\left\{1\right."),
    (r"\fbox{4}", "4"),
    (r"it is $\boxed 5$.", "5"),
    (r"\boxed{5} and \boxed{}", "5"),
    (r"} \boxed{5}", "5"),
    (r"\boxed{ }", None),
    (r"\boxed", None),
    ("The final answer is", None),
    ("The final answer is .5", ".5"),
    ("The final answer is 3\nand more", "3"),
    (r"So \boxed{2}. The final answer is $3$. I hope it is correct.", "3"),
    (r"So \boxed{2}. The final answer is", "2"),
    (r"The final answer is 3. So \boxed{2}", "2"),
    ("The final answer is 1. The final answer is 2.", "2"),
    ("The final answer is 3\u2028$\u2028", "3"),
    ("The final answer is\n$$\n\\frac{1}{2}\n$$. I hope it is correct.", "\\frac{1}{2}"),
    ("The final answer is $1\n2$.\nIndeed $3$.", "1\n2"),
    ("The final answer is therefore:\n\\[\\boxed{4}\\]", "4"),
    ("The final answer is **12**.", "12"),
    ("The final answer is \\(4\\).", "4"),
    ("The final answer is $x=1$ or $x=2$.", "x=1$ or $x=2"),
    (r"\boxed{25\text{ cm}.}", r"25\text{ cm}"),
]


def test_extract_answer():
    assert [(text, math.extract_answer(text)) for text, _ in EXTRACTED] == EXTRACTED


def test_equal_answers_vote_together_and_others_do_not():
    task = math.math_task(math.SETTINGS["laptop"])
    texts = [
        r"\boxed{\sqrt{81}}",
        r"\boxed{3}",
        "none",
        "final answer is 9",
        r"\boxed{x=5}",
        r"\boxed{5}",
    ]
    samples = [
        Sample(problem_id="p", prompt="?", completion=text, reward=-1.0, outcome="incorrect")
        for text in texts
    ]
    assert collect(samples, task).votes == [[r"\sqrt{81}", "3", None, r"\sqrt{81}", "x=5", "x=5"]]


HOSTILE = {  # to a gold answer of 3
    "nested braces": (r"\boxed{" + "{" * 200 + "4" + "}" * 200 + "}", "incorrect"),
    "tower": (r"\boxed{9^{9^{9^9}}}", "incorrect"),
    "boxes in boxes": (r"\boxed{" * 5_000 + "4" + "}" * 5_000, "incorrect"),
    "fractions": (r"\boxed{" + r"\frac{" * 70 + "}" * 70 + "}", "incorrect"),
    "lone surrogate": ("\\boxed{\ud800}", "incorrect"),
    "code": (r"\boxed{__import__('os').getcwd()}", "incorrect"),
    "a megabyte of boxes": (r"\boxed{" * 150_000, "invalid"),
    "final answers": ("final answer is " * 70_000, "invalid"),
    "dollars": (r"\boxed{" + "$" * 400 + "}", "invalid"),
}


def test_hostile_text_gets_a_verdict_and_the_judge_goes_on():
    hasty = Judge(seconds=1)  # what takes it too long takes any judge too long
    for name, (text, outcome) in HOSTILE.items():
        assert math.grade(text, "3", hasty) == outcome, name
        assert hasty._ask("3", "3.0"), name  # not from the cache
    assert not hasty.equal("9^{9^{9^9}}", "9^{9^{9^8}}")
    assert hasty.equal("0+" * 200 + "1", "1")
    for texts in (
        ("0+" * 300 + "1", "1"),
        ("1", "0+" * 300 + "1"),
    ):  # the same, but too long to be looked into
        assert not hasty.equal(*texts)
    assert hasty.equal("1" * 10_000, "1" * 10_000)


def test_a_judge_whose_process_ended_or_takes_too_long_or_was_left_alone_starts_another(
    monkeypatch,
):
    judge = Judge()
    assert judge.equal("1/2", "0.5")
    first = judge._process
    first.kill()
    first.wait()
    assert judge.equal("1/4", "0.25")
    assert judge._process.pid != first.pid
    with monkeypatch.context() as patched:
        patched.setattr(judge, "_patience", 0.1)
        judge._process.send_signal(signal.SIGSTOP)  # the comparison takes too long
        assert not judge.equal("1/5", "0.2")
        assert judge._process.poll() is not None
    with monkeypatch.context() as patched:
        patched.setattr(judge, "_answer", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            judge.equal("3", "4")
    assert judge.equal(
        "5", "5.0"
    )  # and the answer to the interrupted question is not taken for this one's
    last = judge._process
    del judge
    gc.collect()
    assert last.poll() is not None


# A part of the question: its answer, which sympy works out.
SOLVED = """fraction of the loaf: (12 - 9) / 12; a discount: 80 * 65 / 100; Which percentage: 100 * 8 / 40;
a mixed number: 17 / 5; four such tanks: 4 * 1250; Solve $3x: (11 + 7) / 3; the remainder: Mod(2**10, 7);
the distance between: sqrt((4 - 1)**2 + (-2 - 2)**2); sqrt{50}: sqrt(50) + sqrt(18); How many zeros:
multiplicity(5, factorial(30)); Two angles: 180 - 48 - 67; area of a circle: pi * 3**2; the height upon:
2 * 6 / sqrt(2**2 + 6**2); five different books: factorial(5); a sum of 9: 4 / 36;
Compute $(3: expand((3 + 2*I) * (1 - I)); the series: 1 / (1 - 2/3); cos 150: cos(150 * pi / 180);
of 45: 2/3 * 45; frac{x}{4}: 4 * 9 / 10;
greatest common: gcd(84, 126); the diagonal: sqrt(2) * sqrt(18); Three of seven: binomial(7, 3)"""


def test_our_own_problems_are_several_and_have_the_right_answers(judge):
    problems = [
        problem
        for split in ("train", "test")
        for problem in math.load_problems(str(TINY / "math"), split)
    ]
    assert len({problem.question for problem in problems}) == 32
    for problem in problems:
        assert judge._ask(problem.gold, problem.gold)  # by math-verify, not as the same text
        assert math.grade(r"\boxed{123456}", problem.gold, judge) == "incorrect"
    for part, value in (solved.split(":") for solved in SOLVED.split(";")):
        [problem] = [problem for problem in problems if part.strip() in problem.question]
        assert judge.equal(problem.gold, sympy.latex(sympy.sympify(value.strip()))), (
            problem.question
        )


ROW = {
    "problem": "1 + 1?",
    "level": "Level 1",
    "type": "Prealgebra",
    "solution": r"It is $\boxed{2}$.",
}


def test_the_original_folders_hold_a_file_for_each_problem(tmp_path):
    for i in range(12):
        write_file(
            file := tmp_path / f"train/prealgebra/{i}.json",
            json.dumps(ROW | {"problem": f"{i}?"}, indent=4),
        )
    problems = math.load_problems(str(tmp_path), "train")
    assert {(problem.question, problem.gold) for problem in problems} == {
        (f"{i}?", "2") for i in range(12)
    }
    assert [p.id for p in problems] != sorted(
        (p.id for p in problems), key=lambda i: int(i.split("-")[1])
    )  # mixed
    file.write_text("{")
    with pytest.raises(InputError, match=r"prealgebra/11.json: .*JSON"):
        math.load_problems(str(tmp_path), "train")


def written(folder, split, *rows):
    (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


@pytest.mark.parametrize("solution", [r"It is \boxed{2", None])
def test_a_problem_without_an_answer_is_named(tmp_path, solution):
    alone = {"problem": "1 + 1?", "answer": "2", "unique_id": "test/1.json"}  # as MATH-500 has it
    assert math.load_problems(written(tmp_path, "test", alone), "test")[0].gold == "2"
    folder = written(tmp_path, "train", ROW, ROW | {"solution": solution})
    with pytest.raises(InputError, match=r"train.jsonl:2: field solution: no answer"):
        math.load_problems(folder, "train")


def test_the_package_s_shots_are_left_out_of_the_problems(tmp_path):
    shots = math.load_shots(4, None)
    assert all(
        re.match("Problem:\n(?s:.*)\n\nSolution: (?s:.*)final answer is", shot) for shot in shots
    )
    asked = [
        shot.partition("\n\nSolution:")[0].removeprefix("Problem:\n").replace("  ", " ")
        for shot in shots
    ]
    same = [
        ROW | {"problem": question + extra}
        for question, extra in zip(asked, (".}", "", " ", "\n"), strict=True)
    ]
    for split in ("train", "test"):
        written(tmp_path, split, ROW, *same)
    settings = math.Settings(data=str(tmp_path), shots=4)
    task = math.math_task(settings)
    assert [problem.question for problem in task.train] == ["1 + 1?"]
    assert len(task.test) == 5
    assert task.prompt(task.train[0]) == "\n\n".join([*shots, "Problem:\n1 + 1?\n\nSolution:"])
    assert task.visible(" It is 2.\n\nProblem: 3?") == " It is 2.\n"
    assert len(math.math_task(replace(settings, shots=0)).train) == 5
