"""OpenAI's chat messages: what a program asks a model, as a template takes it, and a turn as the program
takes it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxfp8rl.environments.calls import Call, before_calls, calls_in
from jaxfp8rl.environments.protocol import Message


class BadRequest(ValueError):
    """What is asked is not something that the run can give."""


ASKED = {"model", "messages", "tools", "stream", "stream_options", "tool_choice", "n", "parallel_tool_calls"}


def checked_request(body: Mapping[str, Any]) -> tuple[list[Message], list[dict[str, Any]]]:
    """(messages, tools) of a request. Raises BadRequest if it sets what the run sets, or has what is no
    text."""
    others = sorted(k for k in body.keys() - ASKED if body[k] is not None)
    if others:
        raise BadRequest(f"{', '.join(others)}: the run itself says how the policy samples ([rollout])")
    if body.get("n") not in (None, 1) or body.get("tool_choice") not in (None, "auto"):
        raise BadRequest("a turn is one completion, in which the policy chooses whether to call a tool")
    return [_message(m) for m in body["messages"]], list(body.get("tools") or [])


def _message(given: Mapping[str, Any]) -> Message:
    """role, content, name and tool_calls, in the one way that messages can be compared."""
    content = given.get("content")
    if isinstance(content, list):
        content = "".join(_text(part) for part in content)
    message: Message = {"role": given["role"], "content": content or ""}
    if given.get("name"):
        message["name"] = given["name"]
    if given.get("tool_calls"):
        message["tool_calls"] = [{"type": "function", "function": {
            "name": c["function"]["name"], "arguments": _arguments(c["function"]["arguments"])}}
            for c in given["tool_calls"]]
    return message


def _text(part: Any) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        raise BadRequest("a message with something other than text, which the policy does not read")
    return part["text"]


def _arguments(given: Any) -> Any:
    """As templates take them: an object."""
    try:
        return json.loads(given) if isinstance(given, str) else given
    except ValueError:
        return given


def for_template(message: Message, form: str) -> Message:
    """The message as the template of models that call in this form takes it."""
    if form == "gemma" and message["role"] == "tool":  # Gemma has no other role
        return {"role": "user", "content": f"```tool_output\n{message['content']}\n```"}
    return message


def reply_of(action: str, tools: Sequence[Mapping[str, Any]], form: str, think_tags: tuple[str, ...],
             number: int) -> tuple[dict[str, Any], dict[str, int]]:
    """(the assistant's message with the text of a turn, counts of its calls). number: of the turn, for ids.

    Thoughts are its `reasoning_content`. Malformed calls stay in the text, beside which there are then no
    others.
    """
    thoughts, text = _without_thoughts(action, think_tags)
    found = calls_in(text, form) if tools else []
    calls = [c for c in found if isinstance(c, Call)]
    counts = {"tool_calls": len(found), "malformed_calls": len(found) - len(calls)} if found else {}
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls and len(calls) == len(found):
        message["content"] = before_calls(text, form)
        message["tool_calls"] = [
            {"id": f"call_{number}_{i}", "type": "function",
             "function": {"name": c.name, "arguments": json.dumps(_by_name(c, tools))}}
            for i, c in enumerate(calls)]
    return message, counts


def _without_thoughts(action: str, think_tags: tuple[str, ...]) -> tuple[str, str]:
    if not think_tags or think_tags[1] not in action:
        return "", action
    thoughts, _, text = action.rpartition(think_tags[1])
    return thoughts.partition(think_tags[0])[2] or thoughts, text.lstrip("\n")


def _by_name(call: Call, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The arguments, those given by place under the names of the schema."""
    placed = call.arguments.get("", ())
    schema = next((t["function"] for t in tools if t["function"]["name"] == call.name), {})
    names = list(schema.get("parameters", {}).get("properties", {}))
    return dict(zip(names, placed)) | {k: v for k, v in call.arguments.items() if k}


def completion(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The message as the body of an answer to /v1/chat/completions."""
    why = "tool_calls" if message.get("tool_calls") else "stop"
    return {"id": f"turn-{number}", "object": "chat.completion", "created": 0, "model": "policy",
            "choices": [{"index": 0, "message": dict(message), "finish_reason": why}],
            "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}}


def events(body: Mapping[str, Any]) -> bytes:
    """The same answer as a stream of events."""
    choice = body["choices"][0]
    calls = [{"index": i, **c} for i, c in enumerate(choice["message"].get("tool_calls", ()))]
    delta = {**choice["message"], **({"tool_calls": calls} if calls else {})}
    head = {k: body[k] for k in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    chunks = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
              {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
              {**head, "choices": [], "usage": body["usage"]}]
    return "".join(f"data: {json.dumps(c)}\n\n" for c in chunks).encode() + b"data: [DONE]\n\n"
