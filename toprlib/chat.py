"""Chat models: a prompt is a user's message in the tokenizer's own chat template.

The template writes the special tokens; none are added when its text is tokenized. Its end-of-turn
token ends a completion.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from toprlib.records import InputError, Task, first_line

# Texts that occur in no template, to see where it puts a question and an answer.
QUESTION = "a question that no template has"
ANSWER = "an answer that no template has"

Messages = Sequence[Mapping[str, str]]  # each with role and content


class Chat(NamedTuple):
    """A tokenizer's chat template."""

    tokenizer: PreTrainedTokenizerBase
    system: str | None  # the system prompt; None: the template's own, if it has one
    end: int  # the token id that ends a turn
    marks: frozenset[int]  # the added tokens in every prompt that the template writes

    def format(self, question: str | Messages, is_answered: bool = False) -> str:
        """The prompt for a text or for messages, up to where the answer begins.

        Messages may have a system prompt of their own. is_answered: the last message is the answer.
        Raises InputError if the template fails, or if the assistant has begun to answer: the
        template would end that turn.
        """
        messages = question
        if isinstance(question, str):
            messages = [{"role": "user", "content": question}]
        if not is_answered and messages[-1]["role"] == "assistant":
            message = "the last message is the assistant's, and the template would end its turn; "
            message += "write the prompt as text, up to where the completion begins"
            raise InputError(message, option="--chat")
        if self.system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=not is_answered
            )
        except Exception as error:  # a template is a program: it may raise anything
            roles = " and ".join(message["role"] for message in messages)
            name = self.tokenizer.name_or_path
            message = f"the chat template of {name} fails on {roles}: {first_line(error)}"
            raise InputError(f"{message}; correct it, or remove --chat", option="--chat") from error

    def apply_to(self, task: Task) -> Task:
        """The task with its prompts in the chat template."""
        return replace(task, prompt=lambda problem: self.format(task.prompt(problem)))


def load_chat(tokenizer: PreTrainedTokenizerBase, system: str | None = None) -> Chat:
    """The chat template of a tokenizer.

    Raises InputError if there is none, or if it fails, drops the system prompt, or has no token
    that ends a turn.
    """
    name = tokenizer.name_or_path
    if not tokenizer.chat_template:
        message = f"the tokenizer of {name} has no chat template; remove --chat"
        raise InputError(message, option="--chat")
    chat = Chat(tokenizer, system, -1, frozenset())
    question = {"role": "user", "content": QUESTION}
    answer = {"role": "assistant", "content": ANSWER}
    prompt = chat.format([question])
    if system is not None and system not in prompt:
        message = f"the chat template of {name} drops the system prompt; leave --system out"
        raise InputError(message, option="--system")
    after_answer = chat.format([question, answer], is_answered=True).partition(ANSWER)[2]
    ends = _added_tokens(tokenizer, after_answer)
    if not ends:
        message = f"the chat template of {name} writes no end-of-turn token after an answer"
        raise InputError(f"{message}; remove --chat", option="--chat")
    marks = frozenset(_added_tokens(tokenizer, prompt))
    return chat._replace(end=ends[0], marks=marks)


def _added_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The added tokens in `text`, such as <|im_end|>, in order; white space does not count."""
    added = set()
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if token.content.strip():
            added.add(token_id)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return [token_id for token_id in ids if token_id in added]
