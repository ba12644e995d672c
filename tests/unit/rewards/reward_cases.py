"""Shared by the tests of rewards."""

from __future__ import annotations

from jaxfp8rl.data.problem import Problem

# The problem's answer selects the behaviour of the scorer under test; the text names a file for process ids.
SCORER = """
import os, re, signal, subprocess, sys, time

def score(problem, text):
    act = problem.answer
    if act == "sleep":
        time.sleep(60)
    elif act == "hold_the_gil":
        re.match(r"(a+)+$", "a" * 40 + "b")
    elif act == "ignore_signals":
        for s in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(s, signal.SIG_IGN)
        time.sleep(60)
    elif act == "fork":
        child = os.fork()
        if child:
            open(text, "w").write(f"{os.getpid()} {child}")
        time.sleep(60)
    elif act == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif act == "exit":
        os._exit(0)
    elif act == "sys_exit":
        sys.exit(1)
    elif act == "memory":
        return float(len(bytearray(1 << 40)))
    elif act == "print":
        print('{"value": 1.0, "why": "ok"}', flush=True)
        return 0.25
    elif act == "modules":
        return float(bool({"jax", "torch", "vllm"} & sys.modules.keys()))
    elif act == "raise":
        raise KeyError("no such thing")
    elif act in ("none", "nan"):
        return {"none": None, "nan": float("nan")}[act]
    elif act == "complain":
        print(text, file=sys.stderr, flush=True)
        return 1.0
    elif act == "length":
        return float(len(text))
    else:
        return float(text == act)
"""


def problem(answer):
    return Problem(f"p-{answer}", "?", answer)
