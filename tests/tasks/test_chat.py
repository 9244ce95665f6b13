"""--chat: prompts and ends of turns as the templates of Llama 3, Qwen 2.5 and Phi 3 write them."""

import json
import shutil
from itertools import chain

import pytest
from chat_models import MARKS, chat_tokenizer, save_chat_model
from run_helpers import SMALL, run_small

import train_gsm8k
from toprlib.batches import tokenize_samples
from toprlib.chat import load_chat
from toprlib.files import read_records
from toprlib.hf_sampler import sample_completions
from toprlib.language_model import load_model
from toprlib.records import Example, InputError, Problem, Prompt, Sample
from toprlib.sampling import SamplingParameters, make_prompts

SYSTEM = "Answer in one line.\nWrite “The answer is” – and the number, ½ or 7."
QUESTION = "Q: Zoë has 3 figs\n  and eats one.\nHow many are left? 🍐\nA:"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: save_chat_model(tmp_path_factory.mktemp(name), name) for name in MARKS}


@pytest.fixture(scope="module", params=MARKS)
def family(request, folders):
    """The name of a family and its model, without its chat template."""
    return request.param, load_model(str(folders[request.param]))


def with_chat(lm, system=None):
    """The model as `load_model` returns it with uses_chat."""
    chat = load_chat(lm.tokenizer, system)
    return lm._replace(chat=chat, ends=lm.ends | {chat.end})


@pytest.mark.parametrize("system", [None, SYSTEM, ""], ids=["default", "own", "empty"])
def test_prompts_have_the_tokens_of_the_template(family, system):
    lm = with_chat(family[1], system)
    task = train_gsm8k.gsm8k_task(SMALL)
    problems = [*task.train, *task.test]
    questions = [QUESTION, *[task.prompt(problem) for problem in problems]]
    first = [] if system is None else [{"role": "system", "content": system}]
    messages = [[*first, {"role": "user", "content": question}] for question in questions]
    template = lm.tokenizer.apply_chat_template
    expected = template(messages, add_generation_prompt=True)["input_ids"]
    assert lm.prompt_ids([lm.chat.format(question) for question in questions]) == expected
    prompts = make_prompts(lm.chat.apply_to(task), problems, lm, 24)
    assert [prompt.ids for prompt in prompts] == expected[1:]


def sample(lm, text, n, seed=0):
    prompt = Prompt(Problem("", text), text, lm.prompt_ids([text])[0])
    parameters = SamplingParameters(max_new_tokens=60)
    finished = chain.from_iterable(sample_completions(lm, parameters, [prompt], n, seed))
    return [one for _, one in finished]


def test_a_completion_stops_at_the_end_of_its_turn(family):
    name, plain = family
    lm = with_chat(plain)
    end = lm.tokenizer.convert_tokens_to_ids(MARKS[name][-1])
    text = lm.chat.format("Hi?")
    assert end not in plain.ends
    finished = [one for one in sample(lm, text, 64) if one.finish_reason == "stop"]
    assert len(finished) > 48
    for one in finished:
        assert one.token_ids.index(end) == len(one.token_ids) - 1
        assert one.completion == lm.tokenizer.decode(one.token_ids[:-1])
    goes_past_the_end = [one.token_ids[:-1].count(end) > 1 for one in sample(plain, text, 64)]
    assert any(goes_past_the_end)


def test_text_gets_the_end_of_its_turn(family):
    name, plain = family
    lm = with_chat(plain)
    end = MARKS[name][-1]
    prompt = lm.chat.format(QUESTION)
    expected = {
        ("7", "stop"): f"7{end}",
        (f"7{end}", "stop"): f"7{end}",
        (f"7{end}\n", "stop"): f"7{end}",
        (f"7{end}{MARKS[name][1]}", "length"): f"7{end}",
        ("7", "length"): "7",
        ("7\nQ:", "stop"): "7\nQ:",
        ("7<|im", "stop"): f"7<|im{end}",
    }
    samples = []
    for text, reason in expected:
        samples.append(Sample(prompt=prompt, completion=text, finish_reason=reason, reward=1.0))
    examples = tokenize_samples(samples, range(len(samples)), lm, stop=("\nQ:",))
    actual = [lm.tokenizer.decode(example.completion_ids) for example in examples]
    assert actual == list(expected.values())


def test_a_prompt_without_the_template_is_refused(family):
    lm = with_chat(family[1])
    samples = [
        Sample(prompt=lm.chat.format("Hi?"), completion="7", reward=1.0),
        Sample(prompt="Hi?", completion="7", reward=1.0),
    ]
    with pytest.raises(InputError) as raised:
        tokenize_samples(samples, [0, 1], lm, source="a.jsonl")
    assert (raised.value.file, raised.value.line, raised.value.field) == ("a.jsonl", 2, "prompt")


def test_a_prompt_in_which_the_assistant_has_begun_is_refused(folders, tmp_path):
    """The template would end its turn, and begin another one."""
    question = {"role": "user", "content": "Hi?"}
    begun = {"role": "assistant", "content": "The"}
    rows = []
    for messages in ([question], [question, begun, question], [question, begun]):
        rows.append(json.dumps({"prompt": messages, "completion": " 7", "reward": 1.0}))
    file = tmp_path / "samples.jsonl"
    file.write_text("\n".join(rows))
    with pytest.raises(InputError) as raised:
        run_small(
            tmp_path / "run",
            samples=str(file),
            test_problems=0,
            model=str(folders["qwen2.5"]),
            chat=True,
        )
    assert (raised.value.file, raised.value.line, raised.value.field) == (str(file), 3, "prompt")
    assert not (tmp_path / "run").exists()


def test_text_of_the_template_without_chat(family):
    """Begin of text is there once; a mark that the model has for no end is refused."""
    name, plain = family
    text = with_chat(plain).chat.format("Hi?")
    [ids] = plain.prompt_ids([text])
    assert ids == with_chat(plain).prompt_ids([text])[0]
    sample = Sample(prompt=text, completion="7", reward=1.0)
    [example] = tokenize_samples([sample], [0], plain)
    assert example.completion_ids == [
        *plain.tokenizer("7", add_special_tokens=False)["input_ids"],
        plain.tokenizer.eos_token_id,
    ]
    ended = sample.model_copy(update={"completion": f"7{MARKS[name][-1]}"})
    with pytest.raises(InputError) as raised:
        tokenize_samples([ended], [0], plain, source="a.jsonl")
    assert (raised.value.file, raised.value.line, raised.value.field) == (
        "a.jsonl",
        1,
        "completion",
    )


FEW = {
    "problems": 4,
    "n": 4,
    "max_new_tokens": 24,
    "test_problems": 2,
    "evals_per_epoch": 1,
    "batch_size": 8,
}


def test_a_run_and_its_samples_as_text_and_messages(folders, tmp_path):
    system = tmp_path / "system.txt"
    system.write_text(f"\n{SYSTEM}\n", encoding="utf-8")
    options = FEW | {"model": str(folders["llama3"]), "chat": True, "system": system}
    run_small(tmp_path / "run", iterations=2, **options)
    first = tmp_path / "run" / "iteration-1"
    second = tmp_path / "run" / "iteration-2"
    samples = read_records(first / "samples.jsonl", Sample)
    examples = read_records(first / "train.jsonl", Example)
    tokenizer = chat_tokenizer("llama3")
    task = train_gsm8k.gsm8k_task(SMALL)
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task.prompt(task.train[0])},
    ]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    [example] = [example for example in examples if example.sample == 0]
    assert example.prompt_ids == expected
    assert samples[0].prompt == tokenizer.decode(expected)
    # The model of iteration 1 was saved with the template.
    next_samples = read_records(second / "samples.jsonl", Sample)
    assert [one.prompt for one in next_samples] == [one.prompt for one in samples]
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["system"] == SYSTEM

    rows = []
    for number, one in enumerate(samples):
        row = one.model_dump()
        # Some texts have other tokens when they are tokenized again.
        ids = tokenizer(one.completion, add_special_tokens=False)["input_ids"]
        if ids and ids == one.token_ids[: len(ids)]:
            row["token_ids"] = None
        if number < 4:
            row["prompt"] = messages[1:]
            row["completion"] = [{"role": "assistant", "content": one.completion}]
        rows.append(json.dumps(row))
    provided = tmp_path / "provided.jsonl"
    provided.write_text("\n".join(rows))
    run_small(tmp_path / "again", samples=str(provided), **options)
    actual = (tmp_path / "again" / "iteration-1" / "train.jsonl").read_bytes()
    assert actual == (first / "train.jsonl").read_bytes()


FAILING = {  # a template, and the option that it does not serve
    "{{ raise_exception('No system') }}": "--chat",
    "{{ messages[0]['content'] + 1 }}": "--chat",
    "{{ messages[-1]['content'] }}<|im_end|>": "--system",
    "{% for m in messages %}{{ m['content'] }}\n{% endfor %}": "--chat",
    "": "--chat",
    "{{ 1 / 0 }}": "--chat",
    "{% macro call() %}{{ call() }}{% endmacro %}{{ call() }}": "--chat",
    "{{ 'a' * 10 ** 18 }}": "--chat",  # more memory than any machine has
    "{% for": "--chat",
}


@pytest.mark.parametrize(("template", "option"), FAILING.items())
def test_a_template_that_does_not_serve(folders, tmp_path, template, option):
    model = shutil.copytree(folders["qwen2.5"], tmp_path / "model")
    system = tmp_path / "system.txt"
    system.write_text("Be brief.")
    tokenizer = chat_tokenizer("qwen2.5")
    tokenizer.chat_template = template or None
    (model / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(model)
    with pytest.raises(InputError) as raised:
        run_small(tmp_path / "run", model=str(model), chat=True, system=system)
    assert raised.value.option == option
    assert not (tmp_path / "run").exists()
