"""tiny/: problems for training and tests are disjoint, and all models have one tokenizer."""

import json

import pytest
from transformers import AutoTokenizer

import train_gsm8k as gsm8k
from toprlib.settings import TINY


def test_training_and_test_problems_are_disjoint():
    train = {problem.question for problem in gsm8k.load_problems(str(TINY), "train")}
    test = {problem.question for problem in gsm8k.load_problems(str(TINY), "test")}
    assert (len(train), len(test), len(train & test)) == (1000, 500, 0)


@pytest.mark.parametrize("name", ["base", "verifier", "weaker"])
def test_a_models_tokenizer_reads_every_question(name):
    tokenizer = AutoTokenizer.from_pretrained(TINY / name)
    vocabulary = json.loads((TINY / name / "config.json").read_text())["vocab_size"]
    for problem in gsm8k.load_problems(str(TINY), "test")[:50]:
        ids = tokenizer(problem.question)["input_ids"]
        assert tokenizer.decode(ids) == problem.question
        assert max(ids) < vocabulary
