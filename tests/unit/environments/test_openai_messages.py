"""What a program asks a model in OpenAI's form, and a turn as the program takes it."""

from __future__ import annotations

import json

import pytest

from jaxfp8rl.environments.openai_messages import (
    BadRequest,
    checked_request,
    completion,
    events,
    for_template,
    reply_of,
)

ADD = {"type": "function", "function": {"name": "add", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}}}


def test_a_request_is_read_in_one_way():
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    asked = {"model": "m", "messages": [
        {"role": "user", "content": [{"type": "text", "text": "1 +"}, {"type": "text", "text": " 2?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "x", "content": "3"}], "tools": [ADD], "temperature": None}
    messages, tools = checked_request(asked)
    assert tools == [ADD] and messages == [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "3"}]
    assert for_template(messages[2], "gemma") == {"role": "user", "content": "```tool_output\n3\n```"}
    assert for_template(messages[2], "hermes") is messages[2]


@pytest.mark.parametrize("body, message", [
    ({"temperature": 0.5}, "temperature: the run itself says how"), ({"n": 2}, "a turn is one completion"),
    ({"tool_choice": "required"}, "a turn is one completion"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
     "other than text"),
])
def test_what_the_run_cannot_give_is_refused(body, message):
    with pytest.raises(BadRequest, match=message):
        checked_request({"messages": [], **body})


HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
GEMMA = "```tool_code\nadd(1, b=2)\n```"


@pytest.mark.parametrize("form, action, content", [
    ("hermes", f"I add.\n{HERMES}", "I add."), ("gemma", f"I add.\n{GEMMA}", "I add."),
    ("llama", '{"name": "add", "parameters": {"a": 1, "b": 2}}', "")])
def test_a_call_is_a_message_with_the_arguments_by_name(form, action, content):
    message, counts = reply_of(action, [ADD], form, (), 3)
    [call] = message["tool_calls"]
    assert (message["content"], call["id"], counts) == (content, "call_3_0",
                                                        {"tool_calls": 1, "malformed_calls": 0})
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}


def test_a_malformed_call_and_one_that_no_tool_takes_stay_text():
    for action, tools, counts in ((f"{HERMES}<tool_call>{{", [ADD], {"tool_calls": 2, "malformed_calls": 1}),
                                  (HERMES, [], {})):
        assert reply_of(action, tools, "hermes", (), 0) == ({"role": "assistant", "content": action}, counts)


def test_thoughts_are_not_the_answer():
    message, counts = reply_of(f"<think>{HERMES}</think>\n\nfour", [ADD], "hermes", ("<think>", "</think>"),
                               0)
    assert message == {"role": "assistant", "content": "four", "reasoning_content": HERMES} and counts == {}


def test_an_answer_in_a_stream_is_the_same():
    message, _ = reply_of(f"I add.\n{HERMES}", [ADD], "hermes", (), 0)
    body = completion(message, 0)
    *chunks, end, empty = events(body).decode().split("\n\n")
    assert (end, empty) == ("data: [DONE]", "")
    chunks = [json.loads(c.removeprefix("data: ")) for c in chunks]
    delta = chunks[0]["choices"][0]["delta"]
    assert [{k: v for k, v in c.items() if k != "index"}
            for c in delta["tool_calls"]] == message["tool_calls"]
    assert delta["content"] == "I add." and chunks[1]["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks[2]["usage"]["total_tokens"] == 0 and body["choices"][0]["message"] == message
