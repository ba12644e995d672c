"""Tool calls as models write them, by form.

    hermes    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>              Hermes, Qwen2.5, Qwen3
    qwen_xml  <tool_call><function=add><parameter=a>1</parameter></function></tool_call> Qwen3-Coder, Qwen3.5
    llama     {"name": "add", "parameters": {"a": 1}}, alone, several joined by ";"      Llama 3.1 to 3.3
    gemma     ```tool_code
              add(a=1)
              ```                                                                            Gemma 3

What looks like a call and is none is Malformed, which the model is told. Text without a call is an answer.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

TOOLS_IN_WORDS = (  # the form "gemma"
    "You can call the functions below. To call one, write a block with the call in Python's form, "
    "and wait for its "
    "result:\n```tool_code\nname(argument=value)\n```\nAnswer without a block once you know the answer.")


class Call(NamedTuple):
    """arguments: by name; those under "" were given by their place."""

    name: str
    arguments: dict[str, Any]


class Malformed(NamedTuple):
    why: str


Found = list[Call | Malformed]


def calls_in(text: str, form: str, think_tags: tuple[str, ...] = ()) -> Found:
    """The calls of a turn, in order; those inside a model's thoughts do not count. Never raises."""
    if think_tags:
        text = text.rpartition(think_tags[1])[2]
    return FORMS[form](text)


def before_calls(text: str, form: str) -> str:
    """The text of a turn that stands before its calls."""
    return "" if form == "llama" else text.partition("```tool_code" if form == "gemma"
                                                     else "<tool_call>")[0].strip()


def told(tools: Sequence[Any], messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the tools in the first, for a chat template that does not write them itself."""
    first, *rest = messages
    schemas = "\n".join(json.dumps(tool["function"]) for tool in tools)
    return [{**first, "content": f"{TOOLS_IN_WORDS}\n\n{schemas}\n\n{first['content']}"}, *rest]


def form_of(template: str) -> str | None:
    """The form that a chat template asks for, or None if it names none."""
    if "<function=" in template:
        return "qwen_xml"
    if "<tool_call>" in template:
        return "hermes"
    if "ipython" in template or "<|python_tag|>" in template:
        return "llama"
    return "gemma" if "<start_of_turn>" in template else None


def _hermes(text: str) -> Found:
    return [_from_json(body, "arguments") for body in _tagged(text)]


def _qwen_xml(text: str) -> Found:
    found: Found = []
    for body in _tagged(text):
        call = re.fullmatch(r"\s*<function=([^>\n]+)>(.*)</function>\s*", body or "", re.S)
        if not call:
            found.append(Malformed("expected <function=NAME> ... </function> inside <tool_call>"))
            continue
        given = re.findall(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", call[2], re.S)
        found.append(Call(call[1].strip(), {name.strip(): _value(value) for name, value in given}))
    return found


def _llama(text: str) -> Found:
    text = text.strip().removeprefix("<|python_tag|>").removesuffix("<|eom_id|>").strip()
    if not re.match(r"\{\s*\"", text) or '"name"' not in text:
        return []
    parts, at, decoder = list[Call | Malformed](), 0, json.JSONDecoder()
    while at < len(text):
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as e:
            return [*parts, Malformed(f"not JSON: {e}")]
        parts.append(_from_value(value, "parameters"))
        at = end + len(re.match(r"[\s;,]*", text[end:])[0])  # pyright: ignore[reportOptionalSubscript]
    return parts


def _gemma(text: str) -> Found:
    blocks = re.findall(r"```tool_code\s*\n(.*?)(?:```|\Z)", text, re.S)
    return [call for block in blocks for call in _python(block)]


def _python(code: str) -> Found:
    """Calls written as Python: they are read, not run."""
    try:
        lines = ast.parse(code.strip()).body
        return [_python_call(line) for line in lines] or [Malformed("no call in the block")]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        return [Malformed(f"not a call in Python: {e}")]


def _python_call(line: ast.stmt) -> Call | Malformed:
    value = line.value if isinstance(line, ast.Expr) else None
    if isinstance(value, ast.Call) and isinstance(value.func,
                                                  ast.Name) and value.func.id == "print" and value.args:
        value = value.args[0]
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Name):
        return Malformed("write one call of a tool a line: name(argument=value)")
    try:
        arguments = {k.arg: ast.literal_eval(k.value) for k in value.keywords if k.arg}
        placed = [ast.literal_eval(a) for a in value.args]
    except (ValueError, TypeError):
        return Malformed(f"the arguments of {value.func.id} must be plain values")
    return Call(value.func.id, arguments | ({"": placed} if placed else {}))


def _tagged(text: str) -> list[str | None]:
    """What stands in each <tool_call>; None for one that is not closed."""
    parts = text.split("<tool_call>")[1:]
    return [part.partition("</tool_call>")[0] if "</tool_call>" in part else None for part in parts]


def _from_json(body: str | None, arguments: str) -> Call | Malformed:
    if body is None:
        return Malformed("<tool_call> without </tool_call>")
    try:
        return _from_value(json.loads(body), arguments)
    except (ValueError, RecursionError) as e:
        return Malformed(f"not JSON: {e}")


def _from_value(value: Any, arguments: str) -> Call | Malformed:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return Malformed(f'expected {{"name": ..., "{arguments}": {{...}}}}')
    given = value.get(arguments, value.get("arguments", value.get("parameters", {})))
    if not isinstance(given, dict):
        return Malformed(f'"{arguments}" must be an object, with each argument by name')
    return Call(value["name"], given)


def _value(text: str) -> Any:
    """A value in XML: JSON where it is some, else the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


FORMS: dict[str, Callable[[str], Found]] = {"hermes": _hermes, "qwen_xml": _qwen_xml, "llama": _llama,
                                            "gemma": _gemma}
