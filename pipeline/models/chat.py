"""Chat models: a prompt is the user's message in the tokenizer's own chat template, whose end of turn ends the answer.

The template writes the special tokens, so that none are added when its text is turned into token ids.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from transformers import PreTrainedTokenizerBase

from pipeline.records import InputError, Task

if TYPE_CHECKING:
    from pipeline.models.language_model import LanguageModel

QUESTION, ANSWER = "a question that no template has", "an answer that no template has"
Messages = Sequence[Mapping[str, str]]  # each with role and content


class Chat(NamedTuple):
    """A tokenizer's chat template: how it asks, and what ends the answer."""

    tokenizer: PreTrainedTokenizerBase
    system: str | None  # the system prompt; None leaves it to the template, which may have one of its own
    end: int  # the token id that ends a turn
    marks: frozenset[int]  # the added tokens in every prompt that the template writes

    def ask(self, question: str | Messages) -> str:
        """The prompt that the template writes up to the answer to a text or to messages; InputError where it fails."""
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
        return _written(self.tokenizer, self.system, messages)


def in_chat(lm: "LanguageModel", system: str | None = None) -> "LanguageModel":
    """A model that is asked through its tokenizer's chat template, and whose turns end as the template ends them.

    system: the system prompt. InputError without a template, or where the template fails, drops the system prompt or
    has no token that ends a turn.
    """
    tokenizer = lm.tokenizer
    if not tokenizer.chat_template:
        raise InputError(
            f"--chat: the tokenizer of {tokenizer.name_or_path} has no chat template; models for chats have one, "
            "and others do without --chat"
        )
    asked, answered = {"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}
    prompt = _written(tokenizer, system, [asked])
    if system is not None and system not in prompt:
        raise InputError(f"--system: the chat template of {tokenizer.name_or_path} drops the system prompt")
    ends = _added_tokens(tokenizer, _written(tokenizer, system, [asked, answered], True).partition(ANSWER)[2])
    if not ends:
        raise InputError(
            f"--chat: the chat template of {tokenizer.name_or_path} has no token behind an answer that ends the turn"
        )
    chat = Chat(tokenizer, system, ends[0], frozenset(_added_tokens(tokenizer, prompt)))
    return lm._replace(chat=chat, ends=lm.ends | {chat.end})


def asked_by(lm: "LanguageModel", task: Task) -> Task:
    """The task with its prompts in the chat template of a model that is in a chat."""
    return replace(task, prompt=lambda problem: lm.chat.ask(task.prompt(problem)))


def _written(tokenizer: PreTrainedTokenizerBase, system: str | None, messages: Messages, ends: bool = False) -> str:
    """The text of messages behind the system prompt, unless they have one; up to an answer, unless it ends with one."""
    from jinja2 import TemplateError

    if system is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=not ends)
    except (TemplateError, TypeError, ValueError) as error:
        roles = " and ".join(message["role"] for message in messages)
        raise InputError(
            f"--chat: the chat template of {tokenizer.name_or_path} fails on {roles}: {str(error).splitlines()[0]}"
        ) from error


def _added_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of `text` that were added to the vocabulary, such as <|im_end|>, in their order; no white space."""
    added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    return [number for number in tokenizer(text, add_special_tokens=False)["input_ids"] if number in added]
