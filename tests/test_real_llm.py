"""The comparison on a model that was made elsewhere: its task, and its runs from end to end on a small chat model."""

import json
from dataclasses import replace

import pytest
from chats import save_chat_model

from examples.questions import LINES, RATES, TESTS, grade, questions, words
from paper import real_llm


def test_no_question_is_asked_in_two_sets_and_each_set_has_all_kinds():
    task, other = (of(replace(real_llm.SETTINGS, problems=1000)) for of in (questions, real_llm.held_out))
    sets = [task.train, task.test, other.test]
    assert list(map(len, sets)) == [len(LINES) - TESTS - RATES, TESTS, RATES]
    kinds = {question: kind for kind, question, _ in LINES}
    assert {problem.question for part in sets for problem in part} == set(kinds)
    assert all({kinds[problem.question] for problem in part} == set(kinds.values()) for part in sets)


RIGHT = ("{}", "The answer is {}.", "It's {}, I", "{} (or Foo", '"{}" is it.', "Is\n{}\nFoo")
WRONG = ("Foo, {}", "Foo or {}", "{} or Foo", "{} Foo", "not {}", "Foo. {}.", "un{}")


def test_an_accepted_answer_is_right_alone_or_in_a_sentence_and_not_second_in_a_list():
    for _, question, gold in LINES:
        accepted = frozenset(" ".join(words(answer)) for answer in gold.split("/"))
        for answer in gold.split("/"):
            told = (*RIGHT, f"{question[:-1]} is {{}}, I", question + " {}")
            assert {grade(text.format(answer.upper()), accepted) for text in told} == {"correct"}, answer
            assert {grade(text.format(answer), accepted) for text in WRONG} == {"incorrect"}, answer
        assert grade(question, accepted) == grade("", accepted) == "invalid"


@pytest.mark.slow
def test_the_arms_train_on_the_same_samples(tmp_path, monkeypatch):
    small = replace(real_llm.SETTINGS, problems=2, n=4, completions_per_row=2, batch=4, test_problems=2)
    monkeypatch.setattr(real_llm, "SETTINGS", small)

    def of_length(settings):  # for a model that writes at random
        return replace(questions(settings), grade=lambda text, _: ("correct", "incorrect")[len(text) % 2])

    monkeypatch.setattr(real_llm, "questions", of_length)
    monkeypatch.setattr(real_llm, "held_out", of_length)
    model = save_chat_model(tmp_path / "model", "qwen2.5")
    real_llm.main(model, seeds=2, workers=1, runs=tmp_path / "runs", out=tmp_path / "out")
    content = json.loads((tmp_path / "out" / "real-llm.json").read_text())
    assert (content["runs"], content["seeds"]) == (15, [0, 1])  # three of them for the rate
    assert len({curve["mean"][0] for curve in content["data"].values()}) == 1
    assert content["numbers"]["positives only, as many steps: realised_share"]["mean"] == 1
    falls = content["data"]["reinforce"]["mean"]
    assert content["shares"]["naive REINFORCE: end - maximum"]["mean"] == pytest.approx(falls[-1] - max(falls))
    assert (tmp_path / "out" / "real-llm.png").exists()
    for seed in (0, 1):
        files = [*(tmp_path / "runs").glob(f"*_{seed}_*/iteration-1/samples.jsonl")]
        assert len(files) == len(content["data"]) == len(real_llm.ARMS)
        assert len({file.read_bytes() for file in files}) == 1
