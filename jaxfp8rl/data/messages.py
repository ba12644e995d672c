"""The prompt of a row: text, or chat messages in any of the common forms, up to the turn that the model
answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

Prompt = str | tuple[dict[str, Any], ...]
SHAREGPT = {"human": "user", "gpt": "assistant"}
ANSWERERS = {"assistant", "gpt", "model", "bot", "chatgpt"}


def as_prompt(value: Any) -> tuple[Prompt, bool]:
    """(the prompt in a field, whether replies to it were cut off).

    Messages are {role, content} or ShareGPT's {from, value}, as a list or as JSON text. Raises ValueError
    with the reason if the field is not a usable prompt.
    """
    if isinstance(value, str):
        messages = _messages_in(value)
        if messages is None:
            return _not_empty(value), False
        value = messages
    if not isinstance(value, list):
        raise ValueError(f"must be a string or a list of {{role, content}}, but is {kind(value)}")
    messages = [_message(i, m) for i, m in enumerate(value)]
    question = messages[: _end_of_question(messages)]
    if messages and not question:
        raise ValueError("contains only the assistant's turn, which leaves nothing to answer")
    _not_empty("".join(m["content"] for m in question))
    return tuple(question), len(question) < len(messages)


def check_text(text: str) -> str:
    """The text. Raises ValueError if it contains a lone surrogate (half a character), which no tokenizer can
    read."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise ValueError(
            f"contains half a character, U+{ord(text[e.start]):04X}, at position {e.start}") from e
    return text


def kind(value: Any) -> str:
    """The JSON type of a value, with its article: "a string"."""
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string",
             list: "a list"}
    one = next((names[t] for t in type(value).__mro__ if t in names), type(value).__name__)
    return "an object" if isinstance(value, dict) else one


def _not_empty(text: str) -> str:
    if not text.strip():
        raise ValueError("empty")
    return check_text(text)


def _messages_in(text: str) -> list | None:
    """The messages if a text is their JSON, as in many Parquet files; None for any other text."""
    if not text.startswith("[") or not ('"role"' in text or '"from"' in text):
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    keys = ({"role", "content"}, {"from", "value"})
    return value if value and all(isinstance(m, dict) and any(k <= m.keys() for k in keys)
                                  for m in value) else None


def _message(i: int, message: Any) -> dict[str, Any]:
    """{role, content} and all other values that are not null, because a template may read a name or a tool
    call."""
    if not isinstance(message, dict):
        raise ValueError(f"message {i} must be {{role, content}}, but is {kind(message)}")
    if "role" not in message and "from" in message:
        message = {"role": SHAREGPT.get(message["from"], message["from"]), "content": message.get("value"),
                   **{k: v for k, v in message.items() if k not in ("from", "value")}}
    role, content = message.get("role"), message.get("content")
    if content is None and message.get("tool_calls"):
        content = ""
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str)
                                         for p in content):
        content = "".join(part["text"] for part in content)
    if not (isinstance(role, str) and isinstance(content, str)):
        raise ValueError(
            f"message {i} must be {{role, content}} with two strings, but its content is {kind(content)}")
    rest = {k: v for k, v in message.items() if v is not None and k not in ("role", "content")}
    return {"role": role, "content": check_text(content), **rest}


def _end_of_question(messages: Sequence[dict[str, Any]]) -> int:
    """The number of messages before the assistant's answer to the last user turn. A tool call with its result
    belongs to the question."""
    end = max((i for i, m in enumerate(messages) if m["role"].lower() == "user"), default=-1) + 1
    while end < len(messages):
        message = messages[end]
        followed = end + 1 < len(messages) and messages[end + 1]["role"] == "tool"
        if message["role"].lower() in ANSWERERS and not (message.get("tool_calls") and followed):
            break
        end += 1
    return end
