"""Chat models: a prompt is the user's message in the tokenizer's own chat template, whose end of turn ends the answer.

The template writes the special tokens, so that none are added when its text is turned into token ids.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from toprlib.records import InputError, Task

QUESTION, ANSWER = "a question that no template has", "an answer that no template has"
Messages = Sequence[Mapping[str, str]]  # each with role and content


class Chat(NamedTuple):
    """A tokenizer's chat template: how it asks, and what ends the answer."""

    tokenizer: PreTrainedTokenizerBase
    system: (
        str | None
    )  # the system prompt; None leaves it to the template, which may have one of its own
    end: int  # the token id that ends a turn
    marks: frozenset[int]  # the added tokens in every prompt that the template writes

    def ask(self, question: str | Messages, is_answered: bool = False) -> str:
        """The prompt that the template writes for a text or messages, up to the answer; InputError where it fails.

        Messages may have a system prompt of their own. is_answered: they end with the answer.
        """
        from jinja2 import TemplateError

        messages = (
            [{"role": "user", "content": question}] if isinstance(question, str) else question
        )
        if self.system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=not is_answered
            )
        except (TemplateError, TypeError, ValueError) as error:
            fault = f"fails on {' and '.join(message['role'] for message in messages)}: {str(error).splitlines()[0]}"
            raise InputError(
                f"--chat: the chat template of {self.tokenizer.name_or_path} {fault}"
            ) from error

    def asking(self, task: Task) -> Task:
        """The task with its prompts in the chat template."""
        return replace(task, prompt=lambda problem: self.ask(task.prompt(problem)))


def chat_of(tokenizer: PreTrainedTokenizerBase, system: str | None = None) -> Chat:
    """The chat template of a tokenizer, whose turns end as the template ends them.

    InputError without a template, or where it fails, drops the system prompt or has no token that ends a turn.
    """
    name = tokenizer.name_or_path
    if not tokenizer.chat_template:
        advice = "models for chats have one, and others do without --chat"
        raise InputError(f"--chat: the tokenizer of {name} has no chat template; {advice}")
    chat = Chat(tokenizer, system, -1, frozenset())
    asked, answered = (
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": ANSWER},
    )
    prompt = chat.ask([asked])
    if system is not None and system not in prompt:
        raise InputError(f"--system: the chat template of {name} drops the system prompt")
    ends = _added_tokens(
        tokenizer, chat.ask([asked, answered], is_answered=True).partition(ANSWER)[2]
    )
    if not ends:
        raise InputError(
            f"--chat: the chat template of {name} has no token behind an answer that ends the turn"
        )
    return chat._replace(end=ends[0], marks=frozenset(_added_tokens(tokenizer, prompt)))


def _added_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of `text` that were added to the vocabulary, such as <|im_end|>, in their order; no white space."""
    added = {
        number for number, token in tokenizer.added_tokens_decoder.items() if token.content.strip()
    }
    return [
        number
        for number in tokenizer(text, add_special_tokens=False)["input_ids"]
        if number in added
    ]
