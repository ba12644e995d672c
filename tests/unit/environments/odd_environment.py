"""An environment that does whatever its problem's answer says, in `reset` or at a `step`."""

import asyncio
import os
import time

from jaxfp8rl.data.problem import Problem

KINDS = {
    "fine": ("ok", 1.0, True), "bytes": (b"ok", 1.0, True), "nan": ("ok", float("nan"), True),
    "megabyte": ("x" * 2**20, 1.0, True), "word": ("ok", "1.0", True), "gym": ("ok", 0.5, False, True, {}),
    "surrogate": ("\ud800", 1.0, True), "nothing": None, "maybe": ("ok", 1.0, "yes"),
    "messages": ([{"role": "user", "content": "ok"}], 0.25, False), "never": ("+", 0.0, False),
    "counted": ("ok", 1.0, True, {"malformed_calls": 2}),
}


class Odd:
    def __init__(self, refuse: bool = False, seconds: float = 0.0):
        if refuse:
            raise RuntimeError("no licence")
        self.seconds = seconds

    def problems(self):
        return [Problem(kind, "?", kind) for kind in KINDS]

    def reset(self, problem):
        self.kind = problem.answer
        if self.kind == "raise in reset":
            raise KeyError("no such board")
        return ("begin", {}) if self.kind == "gym" else ""

    def step(self, action):
        if self.kind == "raise":
            raise KeyError("no such move")
        if self.kind == "die":
            os._exit(3)
        if self.kind == "hang":
            time.sleep(60)
        if self.kind == "memory":
            return "x" * (1 << 40), 0.0, True
        if self.kind == "print":
            print('{"id": 7}')
        return KINDS.get(self.kind, (action, 1.0, True))


class Slow(Odd):
    """Answers late, the first asked the latest."""

    async def step(self, action):
        await asyncio.sleep(60 if action == "forever" else float(action))
        return f"after {action}", 1.0, True


class Long:
    """Three turns after a prompt that is longer than a block of vLLM's cache."""

    def problems(self):
        return [Problem(str(n), f"{n}" * 150, "") for n in range(9)]

    def reset(self, problem):
        self.left = 3
        return ""

    def step(self, action):
        self.left -= 1
        return "+", float(action == "1"), self.left == 0


class Bare:
    def reset(self, problem):
        return ""
