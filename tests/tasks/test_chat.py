"""--chat: prompts and ends of turns as the templates of Llama 3 and Qwen 2.5 write them."""

from fractions import Fraction
from itertools import chain

import pytest
from chat_models import MARKS, save_chat_model
from run_helpers import SMALL, run_small
from task_helpers import read_rows, write_rows

import train_gsm8k as gsm8k
from toprlib.distributed import progress_bar
from toprlib.evaluation import to_answers
from toprlib.hf_sampler import sample_completions
from toprlib.language_model import load_model, load_tokenizer
from toprlib.records import Engine, Problem, Prompt
from toprlib.sampling import make_prompts, sample_prompts
from toprlib.settings import Settings

QUESTION = "Q: Zoë has 3 figs\n  and eats one.\nHow many are left? 🍐\nA:"
FEW = {"problems": 4, "n": 4, "max_new_tokens": 24, "test_problems": 2, "evaluate_after": ()}


@pytest.fixture(scope="module", params=MARKS)
def family(request, tmp_path_factory):
    """The name of a family, the folder of its model, and the model with the chat template."""
    folder = save_chat_model(tmp_path_factory.mktemp(request.param), request.param)
    lm = load_tokenizer(str(folder), uses_chat=True)
    return request.param, folder, lm._replace(model=load_model(str(folder)))


def test_prompts_have_the_tokens_of_the_template(family):
    _, folder, lm = family
    task = gsm8k.gsm8k_task(SMALL)
    problems = [Problem("", QUESTION), *task.test]
    texts = []
    for prompt in make_prompts(task, problems, lm, Settings(max_new_tokens=24)):
        messages = [{"role": "user", "content": task.prompt(prompt.problem)}]
        template = lm.tokenizer.apply_chat_template
        assert prompt.ids == template(messages, add_generation_prompt=True)["input_ids"]
        texts.append(prompt.text)
    # Begin of text is there once, also for a prompt of --samples without --chat.
    plain = load_tokenizer(str(folder))
    assert plain.prompt_ids(texts) == lm.prompt_ids(texts)


def test_a_completion_stops_at_the_end_of_its_turn(family):
    name, _, lm = family
    end = lm.tokenizer.convert_tokens_to_ids(MARKS[name][-1])
    assert lm.ends[0] == end
    prompt = Prompt(Problem("", "?"), "?", lm.prompt_ids(["?"])[0])
    plain = lm._replace(ends=lm.ends[1:])
    completions = {}
    for key, model in (("chat", lm), ("plain", plain)):
        settings = Settings(max_new_tokens=60)
        batches = sample_completions(model, settings, (), [prompt], range(64))
        completions[key] = [fields for _, fields in chain.from_iterable(batches)]
    finished = [one for one in completions["chat"] if one["finish_reason"] == "stop"]
    assert len(finished) > 48
    for one in finished:
        assert one["token_ids"].index(end) == len(one["token_ids"]) - 1
        assert one["completion"] == lm.tokenizer.decode(one["token_ids"][:-1])
    assert any(one["token_ids"][:-1].count(end) > 1 for one in completions["plain"])


def test_a_run_and_its_samples_as_text(tmp_path):
    """The model of iteration 1 is saved with the template; text gets the end of its turn."""
    folder = save_chat_model(tmp_path / "model", "llama3")
    lm = load_tokenizer(str(folder), uses_chat=True)
    options = FEW | {"model": str(folder), "chat": True, "batch_size": 8}
    run_small(tmp_path / "run", iterations=2, **options)
    samples = read_rows(tmp_path / "run" / "iteration-1" / "samples.jsonl")
    later = read_rows(tmp_path / "run" / "iteration-2" / "samples.jsonl")
    assert [row["prompt"] for row in later] == [row["prompt"] for row in samples]
    rows = []
    for row in samples:
        # Some texts have other tokens when they are tokenized again.
        ids = lm.tokenizer(row["completion"], add_special_tokens=False)["input_ids"]
        if ids == row["token_ids"][: len(ids)]:
            del row["token_ids"]
        rows.append(row)
    file = write_rows(tmp_path / "own.jsonl", rows)
    assert sum("token_ids" not in row for row in rows) > 4
    run_small(tmp_path / "again", samples=file, **options)
    actual = (tmp_path / "again" / "iteration-1" / "train.jsonl").read_bytes()
    assert actual == (tmp_path / "run" / "iteration-1" / "train.jsonl").read_bytes()


DATE = "{%- set today = strftime_now('%Y-%m-%d %H:%M:%S.%f') -%}{{- today -}}"
THINKS = "{%- if is_thinking -%}{{- '<think>\\n' -}}{%- endif -%}"


def test_a_run_of_another_day_has_the_prompts_that_it_began_with(tmp_path):
    """The template writes the time; `is_thinking` is of --chat-args."""
    folder = save_chat_model(tmp_path / "model", "qwen2.5")
    template = folder / "chat_template.jinja"
    template.write_text(DATE + template.read_text() + THINKS)
    arguments = {"chat": True, "chat_args": '{"is_thinking": true}'}
    options = FEW | arguments | {"model": str(folder), "batch_size": 8}
    run = tmp_path / "run"
    run_small(run, **options)
    files = [run / "iteration-1" / name for name in ("samples.jsonl", "test-2.jsonl")]
    prompts = [[row["prompt"] for row in read_rows(file)] for file in files]
    for prompt in {*prompts[0], *prompts[1]}:
        assert prompt.endswith("<think>\n")
    for file in files:
        file.unlink()
    run_small(run, **options)
    assert [[row["prompt"] for row in read_rows(file)] for file in files] == prompts


@pytest.mark.parametrize(
    ("prompt", "completion", "expected"),
    [
        ("Q", "<think> The answer is 7. </think> The answer is 8.", "incorrect"),
        ("Q", "<think> The answer is 8. </think> The answer is 7.\nQ:", "correct"),
        ("Q", "<think> Suppose The answer is 7. But wait", "invalid"),
        ("Q<think>\n", " Suppose The answer is 7. But wait", "invalid"),
        ("Q<think>\n", " 8? </think>The answer is 7.", "correct"),
        ("Q<think>\n\n</think>\n", "The answer is 7.", "correct"),
        ("Q", "The answer is 7. <think> or The answer is 8.", "invalid"),
        ("Q", "a</think>The answer is 8.</think>The answer is 7.", "correct"),
    ],
)
def test_a_thought_is_not_graded_and_does_not_vote(prompt, completion, expected):
    task = gsm8k.gsm8k_task(Settings(shots=1))
    problem = Problem("1", prompt, Fraction(7))
    fields = {"completion": completion, "token_ids": [5], "finish_reason": "stop"}

    def generate(prompts, n, seed):
        yield [(0, fields)]

    asked = [Prompt(problem, prompt, [5])]
    [sample] = sample_prompts(Engine(generate), asked, 1, 0, task, progress_bar(None, "", "", 1))
    assert sample.outcome == expected
    [[vote]] = to_answers([sample], task).votes
    assert vote == {"correct": 7, "incorrect": 8, "invalid": None}[expected]
