"""The way from a prompt (text or chat messages) to token ids, with exactly one BOS."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from hybridflow.errors import DataError

Messages = list[dict[str, Any]]


def check_messages(messages: Any, place: str) -> Messages:
    """The messages without the empty fields a columnar file adds. Raises DataError when they are not chat messages."""
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{place}: chat messages must be a list [{{role, content}}, ...] of at least one, got {messages!r}")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise DataError(f"{place}: a chat message needs `role` and `content`, got {message!r}")
    # Parquet gives every message every key (tool_calls=None, ...), and templates ask whether a key is there.
    return [{key: value for key, value in message.items() if value is not None or key == "content"} for message in messages]


def render_chat(tokenizer: PreTrainedTokenizerBase, messages: Messages, place: str) -> str:
    """The text of a chat up to the point where the assistant answers. Raises DataError when there is no usable template."""
    if tokenizer.chat_template is None:
        raise DataError(
            f"{place}: the prompt is a list of chat messages, but the tokenizer {tokenizer.name_or_path!r} has no chat template; "
            "set actor.model.chat_template=FILE (a Jinja template), or give prompts as plain strings"
        )
    return _render(tokenizer, messages, place, answering=True)


def render_reply(tokenizer: PreTrainedTokenizerBase, messages: Messages, reply: Messages, place: str) -> str:
    """What the template writes after the prompt `messages` for the assistant's `reply`, up to and with the EOS token if it has one.

    `reply` is one assistant message; it may repeat the prompt's messages before it. Raises DataError where it is anything
    else, or where the template writes the prompt in another way once there is a reply.
    """
    own = reply[len(messages):] if reply[: len(messages)] == messages else reply
    if [message["role"] for message in own] != ["assistant"]:
        roles = [message["role"] for message in reply]
        raise DataError(f"{place}: a response in chat messages is one assistant message, after the prompt's messages or alone; got the "
                        f"roles {roles} for a prompt of {[message['role'] for message in messages]}")
    prompt, whole = render_chat(tokenizer, messages, place), _render(tokenizer, messages + own, place, answering=False)
    if not whole.startswith(prompt):
        raise DataError(f"{place}: the chat template writes the prompt in another way once there is a reply, so that the response has no "
                        f"beginning; give the response as a string. Prompt: {prompt!r}; with the reply: {whole!r}")
    text, eos = whole[len(prompt):], tokenizer.eos_token
    return text[: text.rindex(eos) + len(eos)] if eos and eos in text else text


def render_conversation(tokenizer: PreTrainedTokenizerBase, messages: Messages, place: str) -> str:
    """The text of a whole chat, the assistant's last message included."""
    return _render(tokenizer, messages, place, answering=False)


def _render(tokenizer: PreTrainedTokenizerBase, messages: Messages, place: str, answering: bool) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answering)
    except jinja2.TemplateError as error:
        raise DataError(f"{place}: the chat template refuses these messages: {error}; correct them or actor.model.chat_template") from error


def encode_chats(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Ids of rendered chats. A template writes its own special tokens, so the tokenizer adds none (no second BOS);
    the ids equal `apply_chat_template(tokenize=True)`."""
    return tokenizer(list(texts), add_special_tokens=False)["input_ids"] if texts else []


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Ids of plain texts with the BOS token where the tokenizer adds one itself; a text that already starts with it gets no
    second one. An EOS token that the tokenizer adds is left out: what follows a prompt must not follow an end."""
    encoded = tokenizer(list(texts))["input_ids"] if texts else []
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    rows = [ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids for ids in encoded]
    if eos is None:
        return rows
    own = [1 if text.endswith(tokenizer.eos_token) else 0 for text in texts]
    return [ids[:-1] if ids[-1 - end:] == [eos] * (1 + end) else ids for end, ids in zip(own, rows)]
