"""The program that drives the model in environments of `verifiers`: it asks, runs the tools of the task that
are called, and asks again until a reply calls none. It runs in the environment's own process, as verifiers
allows, and gives the model no tools but those of the task. verifiers finds it by the name PLUGIN."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from typing import Any

import httpx
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult

PLUGIN = "jaxfp8rl_chat"
TOOLS_S = 60.0  # for the servers of tools to say what they have
__all__ = ["Chat"]
sys.modules[PLUGIN] = sys.modules[__name__]  # verifiers imports a program by a name without dots


class Chat(Harness[HarnessConfig]):
    """`verifiers.v1.Harness` of a plain conversation with the tools of the task."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    SUPPORTS_TOOL_INTERCEPTION = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str,
                     mcp_urls: dict[str, str],
                     data: Any, tool_interception_url: str | None = None) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        messages += ([{"role": "user", "content": prompt}] if isinstance(prompt, str)
                     else [message_to_wire(m) for m in prompt or ()])
        async with contextlib.AsyncExitStack() as stack:
            http = await stack.enter_async_context(httpx.AsyncClient(
                timeout=None, trust_env=False, headers={"Authorization": f"Bearer {secret}"}))
            servers = {name: {"url": url, "timeout": self.config.tool_timeout}
                       for name, url in mcp_urls.items()}
            tools = await asyncio.wait_for(connect_mcp({"mcpServers": servers}, stack), TOOLS_S)
            talk = _Talk(http, f"{endpoint}/chat/completions", tool_interception_url, ctx.model, *tools)
            return await talk.run(messages)


class _Talk:
    def __init__(self, http: httpx.AsyncClient, url: str, gate: str | None, model: str, schemas: list[dict],
                 dispatch: dict, servers: dict):
        self._http, self._url, self._gate = http, url, gate
        self._asked = {"model": model, **({"tools": schemas} if schemas else {})}
        self._dispatch, self._servers = dispatch, servers

    async def run(self, messages: list[dict[str, Any]]) -> ProgramResult:
        while True:
            answer = await self._http.post(self._url, json={**self._asked, "messages": messages})
            if answer.status_code != 200:  # verifiers keeps the cause
                return ProgramResult(exit_code=1, stdout="", stderr=answer.text)
            reply = answer.json()["choices"][0]["message"]
            messages.append(reply)
            if not reply.get("tool_calls"):
                return ProgramResult(exit_code=0, stdout="", stderr="")
            for call in reply["tool_calls"]:
                messages.append(await self._result(call))

    async def _result(self, call: dict[str, Any]) -> dict[str, Any]:
        """The message with what the tool says, or with the task's reason against the call."""
        name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
        if self._gate:
            asked = {"tool_call_id": call["id"], "name": name, "arguments": arguments}
            answer = (await self._http.post(self._gate, json=asked)).raise_for_status().json()
            if answer["action"] == "stop":
                raise RuntimeError(answer["reason"])
            if answer["action"] == "deny":
                return answer["message"]
        known = name in self._dispatch
        content = (await call_mcp(self._servers, self._dispatch, name, arguments) if known
                   else f"error: unknown tool {name!r}")
        return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}
