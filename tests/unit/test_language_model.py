"""Tokenizers and their ends, tokens of texts, and models whose weights do not fit."""

import json
import shutil

import pytest
import torch
from helpers import flat_weights
from tokenizers import Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Replace, Strip
from tokenizers.decoders import Sequence as DecoderSequence
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Metaspace
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from toprlib.language_model import load_model, load_tokenizer
from toprlib.records import InputError
from toprlib.settings import TINY, Settings

MODEL = Settings().model


# ---- the ends of completions ---------------------------------------------------------------------
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{{ '<|im_start|>assistant\n' if add_generation_prompt else eos_token }}"
)
NO_END = "{% for message in messages %}{{ message.content }}\n{% endfor %}"  # as GLM's
TURNS = ["<|im_start|>", "<|im_end|>"]  # neither the tokenizer nor a config names them


def make_folder(folder, stated=None, template=None, **marks):
    """The tokenizer and config of a model, without weights.

    stated: the generation config's end. marks: of the tokenizer.
    """
    tokenizer = AutoTokenizer.from_pretrained(TINY / "base", **marks)
    tokenizer.add_special_tokens({"extra_special_tokens": TURNS})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    shutil.copy(TINY / "base" / "config.json", folder)
    if stated is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stated}))
    return str(folder)


@pytest.mark.parametrize(
    ("stated", "eos_token", "template", "expected"),
    [
        (None, "<eos>", None, [1]),
        (7, "<eos>", None, [1, 7]),
        ([9, 1, 7], "<eos>", None, [1, 9, 7]),
        (7, None, None, [7]),
        (None, "<eos>", CHATML, ["<|im_end|>", 1]),
        ([7], "<eos>", CHATML, ["<|im_end|>", 1, 7]),
        (None, "<|im_end|>", CHATML, ["<|im_end|>"]),
        ([7, 9], "<eos>", NO_END, [1, 7, 9]),
    ],
)
def test_ends_are_of_the_turn_the_tokenizer_and_the_generation_config(
    tmp_path, stated, eos_token, template, expected
):
    """After the end of the last turn, this template writes the end of the text."""
    marks = {"eos_token": eos_token} if eos_token != "<eos>" else {}
    lm = load_tokenizer(make_folder(tmp_path, stated, template, **marks), template is not None)
    ids = [
        end if isinstance(end, int) else lm.tokenizer.convert_tokens_to_ids(end) for end in expected
    ]
    assert lm.ends == ids
    assert lm.model is None
    assert lm.text([5, ids[-1]]) == lm.text([5]) == lm.tokenizer.decode([5])
    assert lm.text([ids[-1], 5]) == lm.tokenizer.decode([ids[-1], 5])  # only the last token


def test_a_tokenizer_without_an_end_or_that_ends_prompts_is_refused(tmp_path):
    with pytest.raises(InputError, match="--model"):
        load_tokenizer(make_folder(tmp_path, eos_token=None))
    folder = make_folder(tmp_path)
    lm = load_tokenizer(folder)
    marks = [("<eos>", lm.ends[0])]
    lm.tokenizer.backend_tokenizer.post_processor = TemplateProcessing("$A <eos>", None, marks)
    lm.tokenizer.save_pretrained(folder)
    with pytest.raises(InputError, match="ends prompts"):
        load_tokenizer(folder)


# ---- tokens of texts -----------------------------------------------------------------------------
@pytest.fixture(scope="module", params=["first", "always"])
def sentence_piece(lm, request):
    """The tiny model with a tokenizer as Llama 2 has one: a space is part of the next word."""
    tokenizer = Tokenizer(BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Metaspace(prepend_scheme=request.param)
    spaces = [Replace("▁", " "), ByteFallback(), Fuse(), Strip(" ", 1, 0)]
    tokenizer.decoder = DecoderSequence(spaces)
    bytes_ = [f"<0x{number:02X}>" for number in range(256)]
    trainer = BpeTrainer(vocab_size=400, special_tokens=["<unk>", "<s>", "</s>", *bytes_])
    texts = ["Q: What is 31 + 45?\nA: The answer is 76.", "31 + 45 = 76 + 0 = 76. 31 + 4 = 35."]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = TemplateProcessing("<s> $A", None, [("<s>", 1)])
    marks = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **marks)
    return lm._replace(tokenizer=fast, ends=[2])


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        ("What is 31 + 45?\n", "31 + 45 = 76."),
        ("What is 31 + 45?", " The answer is 76."),
        ("What is 31 + 45?\nA: ", "The answer is 76."),
        ("What is 31 + 45?\n", "\nThe answer is 76."),
        ("<s>What is 31 + 45?\n", "31 + 45 = 76."),
        ("What is 3", "1 + 45?"),
    ],
)
def test_a_completion_gets_no_space_that_it_does_not_have(sentence_piece, prompt, completion):
    tokenizer = sentence_piece.tokenizer
    alone = tokenizer(["7\n", "3"], add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(alone[0] + alone[1]) == "7\n 3"  # what is to be avoided
    [prompt_ids] = sentence_piece.prompt_ids([prompt])
    assert [place for place, token in enumerate(prompt_ids) if token == 1] == [0]
    ids = prompt_ids + sentence_piece.completion_ids(prompt, completion)
    text = tokenizer.decode(ids, skip_special_tokens=True)
    assert text == prompt.removeprefix("<s>") + completion


def test_tokens_of_a_completion_depend_on_the_end_of_its_prompt(lm):
    """Of other starts the line break would become a part, and the text alone would get a space."""
    vocabulary = {"▁": 0, "7": 1, "\n": 2, "\n\n": 3}
    tokenizer = Tokenizer(BPE(vocabulary, [("\n", "\n")]))
    tokenizer.pre_tokenizer = Metaspace(prepend_scheme="always")
    model = lm._replace(tokenizer=PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    prompt = "7" * 99 + "\n" + "7" * 100
    assert model.completion_ids(prompt, "\n7") == [2, 1]


# ---- weights -------------------------------------------------------------------------------------
def test_weights_are_float32_whatever_the_file_has(lm, tmp_path):
    half = LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
    half.save_pretrained(tmp_path)
    torch.backends.cuda.enable_cudnn_sdp(True)
    loaded = load_model(str(tmp_path))
    assert {weight.dtype for weight in loaded.parameters()} == {torch.float32}
    assert torch.equal(flat_weights(loaded), flat_weights(half).float())
    assert not loaded.training  # without dropout
    assert not torch.backends.cuda.cudnn_sdp_enabled()
