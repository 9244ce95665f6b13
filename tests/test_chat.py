"""--chat: prompts and ends of turns as the templates of Llama 3 and Qwen 2.5 write them."""

import json
import shutil

import pytest
from chats import MARKS, chat_tokenizer, save_chat_model
from pipeline.dataset import encode
from pipeline.models.chat import chat_of
from pipeline.models.language_model import load_model
from pipeline.records import Example, InputError, Problem, Sample, read_records
from pipeline.sampling import Prompt, SamplingParameters, prompts_of, transformers_engine
from runs import SMALL, experiment

import train_gsm8k as gsm8k

SYSTEM = "Answer in one line.\nWrite “The answer is” – and the number, ½ or 7."
QUESTION = "Q: Zoë has 3 figs\n  and eats one.\nHow many are left? 🍐\nA:"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: save_chat_model(tmp_path_factory.mktemp(name), name) for name in MARKS}


@pytest.fixture(scope="module", params=MARKS)
def family(request, folders):
    """The name of a family and its model, not yet in a chat."""
    return request.param, load_model(str(folders[request.param]))


def in_chat(lm, system=None):
    """The model as `load_model` gives it with --chat."""
    chat = chat_of(lm.tokenizer, system)
    return lm._replace(chat=chat, ends=lm.ends | {chat.end})


@pytest.mark.parametrize("system", [None, SYSTEM, ""], ids=["usual", "own", "empty"])
def test_a_prompt_has_the_tokens_that_the_template_gives_and_is_measured_with_them(family, system):
    lm, task = in_chat(family[1], system), gsm8k.gsm8k_task(SMALL)
    asked = [QUESTION, *map(task.prompt, (*task.train, *task.test))]
    before = [{"role": "system", "content": system}] * (system is not None)
    messages = [[*before, {"role": "user", "content": text}] for text in asked]
    expected = lm.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert lm.prompt_ids([*map(lm.chat.ask, asked)]) == expected
    prompts = prompts_of(lm.chat.asking(task), [*task.train, *task.test], lm, 24)
    assert [prompt.ids for prompt in prompts] == expected[1:]


def test_a_completion_stops_at_the_end_of_its_turn(family):
    name, plain = family
    lm = in_chat(plain)
    turn_end = lm.tokenizer.convert_tokens_to_ids(MARKS[name][-1])
    assert turn_end not in plain.ends

    def draw(lm, n, seed=0):
        text = in_chat(plain).chat.ask("Hi?")
        prompt = Prompt(Problem("", "Hi?"), text, lm.prompt_ids([text])[0])
        sampling = SamplingParameters(max_new_tokens=60)
        return [c for _, c in transformers_engine(lm, 40_000, [prompt], n, sampling, seed)]

    finished = [completion for completion in draw(lm, 64) if completion.finish_reason == "stop"]
    assert len(finished) > 48
    for completion in finished:
        assert completion.token_ids.index(turn_end) == len(completion.token_ids) - 1
        assert completion.completion == lm.tokenizer.decode(completion.token_ids[:-1])
    calls = []
    with lm.model.register_forward_pre_hook(lambda *_: calls.append(1)):
        [alone] = draw(lm, 1, seed=1)
    assert len(calls) == len(alone.token_ids) < 60
    assert any(c.token_ids[:-1].count(turn_end) > 1 for c in draw(plain, 64))


def test_text_from_elsewhere_gets_the_end_of_its_turn_and_needs_a_prompt_of_the_template(family):
    name, plain = family
    lm, turn_end = in_chat(plain), MARKS[name][-1]
    prompt = lm.chat.ask(QUESTION)
    texts = [
        ("7", "stop"),
        (f"7{turn_end}", "stop"),
        ("7", "length"),
        ("7\nQ:", "stop"),
        ("7<|im", "stop"),
    ]
    given = [
        Sample(prompt=prompt, completion=text, finish_reason=reason, reward=1.0)
        for text, reason in texts
    ]
    examples = encode(given, range(len(given)), lm, (), ("\nQ:",))
    found = [lm.tokenizer.decode(example.completion_ids) for example in examples]
    assert found == [f"7{turn_end}", f"7{turn_end}", "7", "7\nQ:", f"7<|im{turn_end}"]
    foreign = [*given[:1], given[0].model_copy(update={"prompt": "Hi?"})]
    with pytest.raises(
        InputError, match=r"given.jsonl:2: field prompt: lacks tokens of the chat template"
    ):
        encode(foreign, [0, 1], lm, source="given.jsonl")


def test_a_run_in_a_chat_and_its_samples_given_back_as_text(folders, tmp_path):
    system, shots, given = (tmp_path / name for name in ("system.txt", "shots.txt", "given.jsonl"))
    system.write_text(f"\n{SYSTEM}\n", encoding="utf-8")
    shots.write_text("Q: 1 + 1?\nA: The answer is 2.\n\nQ: 2 + 1?\nA: The answer is 3.\n")
    few = {
        "problems": 4,
        "n": 4,
        "max_new_tokens": 24,
        "test_problems": 2,
        "curve_points": 1,
        "batch": 8,
    }
    options = few | {
        "model": str(folders["llama3"]),
        "chat": True,
        "system": system,
        "shots": 2,
        "shots_file": shots,
    }
    experiment(tmp_path / "run", iterations=2, **options)
    first, second = (tmp_path / "run" / f"iteration-{i}" for i in (1, 2))
    samples, tokenizer = read_records(first / "samples.jsonl", Sample), chat_tokenizer("llama3")
    question = f"{shots.read_text()}\nQ: {gsm8k.gsm8k_task(SMALL).train[0].question}\nA:"
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    [example] = [e for e in read_records(first / "train.jsonl", Example) if e.sample == 0]
    assert (
        example.prompt_ids
        == tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    )
    assert samples[0].prompt == tokenizer.decode(example.prompt_ids)
    prompts = [sample.prompt for sample in samples]  # the model of iteration 1 has the template too
    assert [sample.prompt for sample in read_records(second / "samples.jsonl", Sample)] == prompts

    # Those of the first problem as messages. Some texts have other tokens when they are read again.
    token_ids = [
        tokenizer(sample.completion, add_special_tokens=False)["input_ids"] for sample in samples
    ]
    is_same = [
        ids == sample.token_ids[: len(ids)] != []
        for ids, sample in zip(token_ids, samples, strict=True)
    ]
    assert sum(is_same) > len(samples) / 2
    rows = [
        one.model_dump() | ({"token_ids": None} if same else {})
        for one, same in zip(samples, is_same, strict=True)
    ]
    for row in rows[:4]:
        row |= {
            "prompt": messages[1:],
            "completion": [{"role": "assistant", "content": row["completion"]}],
        }
    given.write_text("\n".join(map(json.dumps, rows)))
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}
    experiment(tmp_path / "again", samples=str(given), test_data=SMALL.data, **options)
    assert (tmp_path / "again/iteration-1/train.jsonl").read_bytes() == (
        first / "train.jsonl"
    ).read_bytes()

    assert json.loads((tmp_path / "run" / "config.json").read_text())["system"] == SYSTEM


FAILING = {
    "{{ raise_exception('No system') }}": "^--chat: the chat template of .* fails on system and user: No system",
    "{{ messages[0]['content'] + 1 }}": "fails on system and user: .*str",
    "{{ messages[-1]['content'] }}<|im_end|>": "^--system: the chat template of .* drops the system prompt",
    "{% for m in messages %}{{ m['content'] }}\n{% endfor %}": "no token behind an answer that ends the turn",
    "": "^--chat: the tokenizer of .* has no chat template",
}


def test_what_does_not_serve_as_a_chat_is_refused_before_anything_is_written(folders, tmp_path):
    model, system = shutil.copytree(folders["qwen2.5"], tmp_path / "model"), tmp_path / "system.txt"
    tokenizer = chat_tokenizer("qwen2.5")

    def assert_refused(message, chat=True):
        with pytest.raises(InputError, match=message) as caught:
            experiment(tmp_path / "run", model=str(model), chat=chat, system=system)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "run").exists()

    assert_refused("system.txt: no such file$")
    assert_refused("^--system: is the system prompt of a --chat", chat=False)
    system.write_text("Be brief.")
    for template, message in FAILING.items():
        tokenizer.chat_template = template or None
        (model / "chat_template.jinja").unlink(missing_ok=True)
        tokenizer.save_pretrained(model)
        assert_refused(message)
