"""Tools: functions that the model may call. Their JSON schema comes from the signature and the docstring."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

import pydantic

from jaxfp8rl.environments.calculator import calculator
from jaxfp8rl.environments.calls import Call, Malformed, calls_in
from jaxfp8rl.environments.protocol import Message
from jaxfp8rl.environments.sqlite_tool import sqlite_tool
from jaxfp8rl.errors import ConfigError, nearest
from jaxfp8rl.verifiers.own_scorers import find_object

Tool = Callable[..., Any]


def find_tool(name: str, folder: str = "") -> Tool:
    """"calculator", "sqlite:FILE", or a user's own "module:function". Raises ConfigError if there is none."""
    if name == "calculator":
        return calculator
    if name.startswith("sqlite:"):
        return sqlite_tool(name.removeprefix("sqlite:"))
    if ":" not in name:
        raise ConfigError('environment.tools: there is no tool '
                          f'"{name}"{nearest(name, ["calculator", "sqlite:FILE"])}',
                          'your own is "module:function" or "file.py:function"')
    found = find_object(name, folder, "environment.tools")
    if not callable(found) or isinstance(found, type):
        raise ConfigError(f'environment.tools: "{name}" is not a function but {type(found).__name__}',
                          "name a function")
    return found


def schema_of(tool: Tool) -> dict[str, Any]:
    """The tool as chat templates take it: {"type": "function", "function": {"name", "description",
    "parameters"}}.

    The first paragraph of the docstring describes the tool, and its lines "name: text" the parameters. Raises
    ConfigError for a parameter without a type or with one that JSON does not have.
    """
    hints, properties, required = get_type_hints(tool), {}, []
    text = inspect.getdoc(tool) or ""
    about = dict(re.findall(r"^\s*(\w+): *(.+)$", text, re.M))
    for p in inspect.signature(tool).parameters.values():
        if p.name not in hints or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            raise ConfigError(f'environment.tools: "{tool.__name__}": the parameter `{p.name}` has no '
                              f'type of its own',
                              "annotate each parameter, for example with int, float, str or list[str]")
        properties[p.name] = _parameter(tool, p.name, hints[p.name])
        if p.name in about:
            properties[p.name]["description"] = about[p.name]
        if p.default is not p.empty:
            properties[p.name]["default"] = p.default
        else:
            required.append(p.name)
    return {"type": "function", "function": {
        "name": tool.__name__, "description": " ".join(text.partition("\n\n")[0].split()),
        "parameters": {"type": "object", "properties": properties, "required": required}}}


def _parameter(tool: Tool, name: str, hint: Any) -> dict[str, Any]:
    try:
        return {k: v for k, v in pydantic.TypeAdapter(hint).json_schema().items() if k != "title"}
    except Exception as e:  # pydantic has several
        raise ConfigError(f'environment.tools: "{tool.__name__}": JSON has no type for `{name}`: {e}',
                          "use int, float, bool, str, list or dict") from e


class Toolbox:
    """An environment that answers tool calls. A turn without a call is the answer, and ends the trajectory;
    the task scores it.

    form: of the calls (jaxfp8rl.environments.calls). A call that is malformed, names no tool, or fails is
    answered with what was wrong.
    """

    def __init__(self, tools: Sequence[Tool], form: str, think_tags: tuple[str, ...] = ()):
        self._tools, self._form, self._think_tags = {t.__name__: t for t in tools}, form, think_tags

    def reset(self, problem: Any) -> str:
        return ""

    async def step(self, action: str) -> tuple[str | list[Message], float, bool, dict[str, int]]:
        calls = calls_in(action, self._form, self._think_tags)
        if not calls:
            return "", 0.0, True, {}
        results = [await self._result(call) for call in calls]
        wrong = sum(not worked for _, worked in results)
        return self._messages([text for text, _ in results]), 0.0, False, {
            "tool_calls": len(calls), "malformed_calls": wrong}

    async def _result(self, call: Call | Malformed) -> tuple[str, bool]:
        """(what the model is told, whether the call was one that a tool takes)."""
        if isinstance(call, Malformed):
            return f"error: {call.why}", False
        tool = self._tools.get(call.name)
        if tool is None:
            return f'error: there is no tool "{call.name[:60]}"{nearest(call.name[:60], self._tools)}', False
        try:
            arguments = checked(tool, call.arguments)
        except (TypeError, ValueError) as e:
            return f"error: {e}", False
        try:
            found = tool(**arguments)
            return str(await found if inspect.isawaitable(found) else found), True
        except Exception as e:
            return f"error: {type(e).__name__}: {e}", True

    def _messages(self, results: Sequence[str]) -> list[Message]:
        if self._form != "gemma":
            return [{"role": "tool", "content": text} for text in results]
        text = "\n".join(results)
        return [{"role": "user", "content": f"```tool_output\n{text}\n```"}]  # Gemma has no other role


def checked(tool: Tool, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments as the signature has them. Raises TypeError or ValueError that names the one that is
    wrong."""
    signature, hints = inspect.signature(tool), get_type_hints(tool)
    by_name = {k: v for k, v in given.items() if k}
    bound = signature.bind(*given.get("", ()), **by_name).arguments
    for name, value in bound.items():
        try:
            bound[name] = pydantic.TypeAdapter(hints[name]).validate_python(value)
        except pydantic.ValidationError as e:
            raise ValueError(f"{name}: {e.errors()[0]['msg']}") from None
    return dict(bound)
