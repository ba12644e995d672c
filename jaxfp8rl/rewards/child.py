"""The scoring process: `python -m jaxfp8rl.rewards.child SOCKET_FD TIMEOUT_S TASK_JSON`. Never imports jax or
torch.

Both directions carry one JSON object a line. The child first sends `{"ready": true}` or `{"fatal": why}`, and
then answers each problem and text with its scores by name.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import signal
import socket
import sys

from jaxfp8rl.data.problem import Problem
from jaxfp8rl.data.task import Task
from jaxfp8rl.data.tasks import from_json, named
from jaxfp8rl.errors import UserError
from jaxfp8rl.rewards.scoring import judge

# A scorer that runs away with memory gets a MemoryError instead of taking the learner's machine down.
_MEMORY_BYTES = 8 << 30


def _load(task_json: str) -> tuple[dict[str, Task], dict]:
    """(the tasks of the rewards that are scored here, by name; the first message to the parent)."""
    try:
        tasks = {name: task for name, task in named(from_json(task_json)).items() if task.in_child}
        for task in tasks.values():
            task.load_scorer()
        return tasks, {"ready": True}
    except UserError as e:
        return {}, {"fatal": e.message, "next_step": e.next_step}
    except Exception as e:  # the parent raises it as a ConfigError
        return {}, {"fatal": f"the scorer cannot be loaded: {type(e).__name__}: {e}",
                    "next_step": "run the scorer by hand in a fresh Python"}


def main(fd: int, timeout_s: float, task_json: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    stream = socket.socket(fileno=fd).makefile("rw", encoding="ascii", newline="\n")

    def reply(message: dict) -> None:
        stream.write(json.dumps(message) + "\n")
        stream.flush()

    tasks, hello = _load(task_json)
    reply(hello)
    for line in stream if tasks else ():
        request = json.loads(line)
        # The parent's timeout expires first. This alarm, which by default ends the process, is for a scorer
        # whose parent was killed.
        signal.setitimer(signal.ITIMER_REAL, timeout_s + 1)
        problem, text = Problem(**request["problem"]), request["text"]
        scores = {name: dataclasses.asdict(judge(task, problem, text)) for name, task in tasks.items()}
        signal.setitimer(signal.ITIMER_REAL, 0)
        reply(scores)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
