"""--chat: prompts and ends of turns as the templates of Llama 3 and Qwen 2.5 write them."""

from fractions import Fraction
from itertools import chain

import pytest
import torch
from helpers import SMALL, read_rows, run_small, write_rows
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

import train_gsm8k as gsm8k
from toprlib.distributed import progress_bar
from toprlib.evaluation import to_answers
from toprlib.hf_sampler import sample_completions
from toprlib.language_model import load_model, load_tokenizer
from toprlib.records import Engine, Problem, Prompt
from toprlib.sampling import make_prompts, sample_prompts
from toprlib.settings import TINY, Settings

# ---- small chat models ---------------------------------------------------------------------------
# As the families' public tokenizers write prompts, without tools.
LLAMA = """{%- for message in messages -%}
    {{- bos_token if loop.first else '' -}}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' -}}
    {{- message['content'] | trim -}}{{- '<|eot_id|>' -}}
{%- endfor -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' if add_generation_prompt else '' -}}"""
CHATML = """{%- if messages[0]['role'] != 'system' -%}
    {{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. ' -}}
    {{- 'You are a helpful assistant.<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}
{%- endfor -%}
{{- '<|im_start|>assistant\\n' if add_generation_prompt else '' -}}"""
TEMPLATES = {"llama3": LLAMA, "qwen2.5": CHATML}
MARKS = {  # the first begins a text, the second ends one; neither ends a turn
    "llama3": [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ],
    "qwen2.5": ["<|im_start|>", "<|endoftext|>", "<|im_end|>"],
}


def chat_tokenizer(name):
    """The tiny tokenizer with the family's own tokens; Llama's puts the begin of text first."""
    begin, end = MARKS[name][:2]
    tokenizer = AutoTokenizer.from_pretrained(TINY / "base")
    tokenizer.add_special_tokens(
        {"eos_token": end, "pad_token": end, "extra_special_tokens": MARKS[name]}
    )
    if name == "llama3":
        tokenizer.bos_token = begin
        marks = [(begin, tokenizer.bos_token_id)]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{begin} $A", special_tokens=marks
        )
    tokenizer.chat_template = TEMPLATES[name]
    return tokenizer


def save_chat_model(folder, name):
    """The folder of a model that writes random ASCII; every tenth token ends the turn.

    Neither the tokenizer nor the generation config names the end of a turn.
    """
    tokenizer = chat_tokenizer(name)
    torch.manual_seed(0)
    marks = {mark: getattr(tokenizer, mark) for mark in ("eos_token_id", "pad_token_id")}
    # A single head of 32: vLLM has no smaller one for a processor.
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    sizes["vocab_size"] = len(tokenizer)
    config = LlamaConfig(max_position_embeddings=1024, bos_token_id=None, **sizes, **marks)
    model = LlamaForCausalLM(config)
    printable = [tokenizer.convert_tokens_to_ids(chr(letter)) for letter in range(33, 127)]
    # After the last norm the first coordinate is about 5.7: it decides which tokens may follow.
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 1.0
        head = model.get_output_embeddings().weight
        head[:, 0] = -5.0
        head[printable, 0] = 0.0
        head[tokenizer.convert_tokens_to_ids(MARKS[name][-1]), 0] = 0.4
    model.generation_config = GenerationConfig(**marks)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# ---- prompts, ends and runs ----------------------------------------------------------------------
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
    problems = [Problem(QUESTION), *task.test]
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
    prompt = Prompt(Problem("?"), "?", lm.prompt_ids(["?"])[0])
    plain = lm._replace(ends=lm.ends[1:])
    completions = {}
    for key, model in (("chat", lm), ("plain", plain)):
        settings = Settings(max_new_tokens=60)
        batches = sample_completions(model, settings, (), [prompt], range(64), 1.0)
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
    run_small(tmp_path / "again", samples=file, **options | {"test_problems": 0})
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
    problem = Problem(prompt, Fraction(7))
    fields = {"completion": completion, "token_ids": [5], "finish_reason": "stop"}

    def generate(prompts, n, seed):
        yield [(0, fields)]

    asked = [Prompt(problem, prompt, [5])]
    [sample] = sample_prompts(Engine(generate), asked, 1, 0, task, progress_bar(None, "", "", 1))
    assert sample.outcome == expected
    [[vote]] = to_answers([sample], 1, task).votes
    assert vote == {"correct": 7, "incorrect": 8, "invalid": None}[expected]
