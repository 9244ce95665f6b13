"""--chat: prompts and ends of turns as the templates of Llama 3, Qwen 2.5 and SmolLM2 write them."""

import json
from dataclasses import replace

import pytest
from chats import MARKS, QWEN_DEFAULT, SMOLLM_DEFAULT, chat_tokenizer, save_chat_model

import train_gsm8k as gsm8k
from pipeline.dataset import encode
from pipeline.models.chat import asked_by, in_chat
from pipeline.models.language_model import load_model
from pipeline.records import Example, InputError, Sample, read_rows, to_lines
from pipeline.sampling import SamplingParameters, check_lengths, transformers_engine

FAMILIES = ("llama3", "qwen2.5", "smollm2")
SYSTEM = "Answer in one line.\nWrite “The answer is” – and the number, ½ or 7."
QUESTION = "Q: Zoë has 3 figs\n  and eats one.\nHow many are left? 🍐\nA:"
SMALL = gsm8k.Settings(
    chat=True, problems=4, n=4, max_new_tokens=24, test_problems=2, test_samples=4, k=2, curve_points=1, batch=8
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: save_chat_model(tmp_path_factory.mktemp(name), name) for name in FAMILIES}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, folders):
    """The name of a family and its model, not yet in a chat."""
    return request.param, load_model(str(folders[request.param]))


def run(folder, model, **changes):
    settings = replace(SMALL, model=str(model), out=folder, **changes)
    gsm8k.check(settings)
    return gsm8k.experiment(settings, gsm8k.gsm8k_task(settings))


# ---- prompts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", [None, SYSTEM, ""], ids=["usual", "own", "empty"])
def test_a_prompt_has_the_tokens_that_the_template_gives(family, system):
    _, plain = family
    lm = in_chat(plain, system)
    messages = [{"role": "system", "content": system}] * (system is not None) + [{"role": "user", "content": QUESTION}]
    expected = lm.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert lm.prompt_ids([lm.chat.ask(QUESTION)]) == [expected]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "llama3",
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            "qwen2.5",
            f"<|im_start|>system\n{QWEN_DEFAULT}<|im_end|>\n<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "smollm2",
            f"<|im_start|>system\n{SMOLLM_DEFAULT}<|im_end|>\n<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n",
        ),
    ],
)
def test_a_prompt_by_hand(folders, name, expected):
    lm = in_chat(load_model(str(folders[name])))
    assert lm.chat.ask("Hi?") == expected
    [ids] = lm.prompt_ids([expected])
    assert lm.tokenizer.decode(ids) == expected
    if name == "llama3":
        assert ids.count(lm.tokenizer.bos_token_id) == 1
        assert load_model(str(folders[name])).prompt_ids([expected])[0] == [lm.tokenizer.bos_token_id, *ids]


def test_a_task_asks_in_the_template_and_its_prompts_are_measured_there(family):
    _, plain = family
    task, lm = gsm8k.gsm8k_task(replace(SMALL, test_problems=1)), in_chat(plain, SYSTEM)
    asked = asked_by(lm, task)
    assert [asked.prompt(p) for p in task.train] == [lm.chat.ask(task.prompt(p)) for p in task.train]
    assert asked_by(plain, task) is task
    longest = max(len(lm.tokenizer(asked.prompt(p), add_special_tokens=False)[0]) for p in (*task.train, *task.test))
    assert check_lengths(asked, lm, 24) == longest + 24


# ---- ends of turns ----------------------------------------------------------------------------------------------


def test_a_completion_stops_at_the_end_of_its_turn(family):
    name, plain = family
    lm, sampling = in_chat(plain), SamplingParameters(max_new_tokens=60)
    turn_end = lm.tokenizer.convert_tokens_to_ids(MARKS[name][-1])
    assert turn_end not in plain.ends
    drawn = [c for _, c in transformers_engine(lm, 40_000)([lm.chat.ask("Hi?")], 64, sampling, seed=0)]
    finished = [completion for completion in drawn if completion.finish_reason == "stop"]
    assert len(finished) > 48
    for completion in finished:
        assert completion.token_ids.index(turn_end) == len(completion.token_ids) - 1
        assert completion.text == lm.tokenizer.decode(completion.token_ids[:-1])
        assert MARKS[name][-1] not in completion.text
    calls = []
    with lm.model.register_forward_pre_hook(lambda *_: calls.append(1)):
        [(_, alone)] = transformers_engine(lm, 40_000)([lm.chat.ask("Hi?")], 1, sampling, seed=1)
    assert len(calls) == len(alone.token_ids) < 60
    on = [c.token_ids for _, c in transformers_engine(plain, 40_000)([lm.chat.ask("Hi?")], 64, sampling, seed=0)]
    assert any(ids[:-1].count(turn_end) > 1 for ids in on)


def test_text_from_elsewhere_gets_the_end_of_its_turn(family):
    name, plain = family
    lm, turn_end = in_chat(plain), MARKS[name][-1]
    prompt = lm.chat.ask(QUESTION)
    texts = [("7", "stop"), (f"7{turn_end}", "stop"), ("7", "length"), ("7\nQ:", "stop"), ("7<|im", "stop")]
    given = [Sample(prompt=prompt, completion=text, finish_reason=reason, reward=1.0) for text, reason in texts]
    found = [lm.tokenizer.decode(example.completion_ids) for example in encode(given, lm, ("\nQ:",))]
    assert found == [f"7{turn_end}", f"7{turn_end}", "7", "7\nQ:", f"7<|im{turn_end}"]
    whole = lm.tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "7"}]
    )["input_ids"]
    example = encode(given, lm)[0]
    row = example.prompt_ids + example.completion_ids
    assert whole[: len(row)] == row
    assert lm.tokenizer.decode(whole[len(row) :]).strip() == ""


def test_a_prompt_that_no_template_has_written_is_named(family):
    _, plain = family
    lm = in_chat(plain)
    asked = Sample(prompt=lm.chat.ask("Hi?"), completion="7", reward=1.0)
    with pytest.raises(InputError, match=r"given.jsonl:2: field prompt: lacks tokens of the chat template"):
        encode([asked, asked.model_copy(update={"prompt": "Hi?"})], lm, source="given.jsonl")


# ---- runs -------------------------------------------------------------------------------------------------------


def test_a_run_in_a_chat_and_its_samples_given_back_as_text(folders, tmp_path):
    system, shots = tmp_path / "system.txt", tmp_path / "shots.txt"
    system.write_text(f"\n{SYSTEM}\n", encoding="utf-8")
    shots.write_text("Q: 1 + 1?\nA: The answer is 2.\n\nQ: 2 + 1?\nA: The answer is 3.\n")
    options = {"system": system, "shots": 2, "shots_file": shots}
    run(tmp_path / "run", folders["llama3"], iterations=2, **options)
    here = tmp_path / "run" / "iteration-1"
    samples, tokenizer = read_rows(here / "samples.jsonl", Sample), chat_tokenizer("llama3")
    question = gsm8k.gsm8k_task(SMALL).train[0].question
    said = {"system": SYSTEM, "user": f"{shots.read_text().strip()}\n\nQ: {question}\nA:"}
    messages = [{"role": role, "content": text} for role, text in said.items()]
    [example] = [e for e in read_rows(here / "train.jsonl", Example) if e.sample == 0]
    assert example.prompt_ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert samples[0].prompt == tokenizer.decode(example.prompt_ids)
    # The model of iteration 1 has the template too.
    assert {s.prompt for s in read_rows(tmp_path / "run/iteration-2/samples.jsonl", Sample)} == {
        s.prompt for s in samples
    }

    given = tmp_path / "given.jsonl"
    # A completion that ended at once has no text to give back.
    texts = [sample.model_copy(update={"token_ids": None}) if sample.completion else sample for sample in samples]
    given.write_text(to_lines(texts))
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}
    run(tmp_path / "again", folders["llama3"], samples=given, test_data=SMALL.data, **options)
    assert (tmp_path / "again/iteration-1/train.jsonl").read_bytes() == (here / "train.jsonl").read_bytes()

    assert json.loads((tmp_path / "run" / "config.json").read_text())["system"] == SYSTEM
    system.write_text("Answer.")
    with pytest.raises(InputError, match=r"holds a run with other settings .system ="):
        run(tmp_path / "run", folders["llama3"], iterations=2, **options)
    with pytest.raises(InputError, match=r"has drawn otherwise .system ="):
        run(tmp_path / "other", folders["llama3"], reuse=tmp_path / "run", **options)


FAILING = {
    "{{ raise_exception('System role not supported') if messages[0]['role'] == 'system' }}hi<|im_end|>": (
        "--chat: the chat template of .* fails on system and user: System role not supported"
    ),
    "{% for m in messages if m['role'] != 'system' %}{{ m['content'] }}<|im_end|>{% endfor %}": (
        "--system: the chat template of .* drops the system prompt"
    ),
    "{% for m in messages %}{{ m['content'] }}\n{% endfor %}": "no token behind an answer that ends the turn",
    "{% for m in messages if m['role'] != 'assistant' %}{{ m['content'] }}<|im_end|>{% endfor %}": (
        "no token behind an answer that ends the turn"
    ),
    "{{ messages[0]['content'] + 1 }}": "fails on system and user: .*str",
    "{% for %}": "fails on system and user: ",
    "": "--chat: the tokenizer of .* has no chat template",
}


@pytest.mark.parametrize(("template", "message"), FAILING.items())
def test_a_template_that_does_not_serve_is_refused_before_anything_is_written(folders, tmp_path, template, message):
    lm = load_model(str(folders["qwen2.5"]))
    lm.tokenizer.chat_template = template or None
    lm.model.save_pretrained(tmp_path / "model")
    lm.tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "system.txt").write_text("Be brief.")
    with pytest.raises(InputError, match=message) as caught:
        run(tmp_path / "run", tmp_path / "model", system=tmp_path / "system.txt")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_system_prompt_without_a_chat_or_a_file_is_refused(folders, tmp_path):
    with pytest.raises(InputError, match="--system: is the system prompt of a --chat"):
        run(tmp_path / "run", folders["llama3"], system=tmp_path / "system.txt", chat=False)
    with pytest.raises(InputError, match=r"system.txt: no such file"):
        run(tmp_path / "run", folders["llama3"], system=tmp_path / "system.txt")
    assert not (tmp_path / "run").exists()
