"""The scoring process: `python -m jaxfp8rl.rewards.child SOCKET_FD TIMEOUT_S TASK_JSON`. Never imports jax or torch.

One JSON object a line each way: first `{"ready": true}` or `{"fatal": why}`, then a score for every problem and text.
"""

from __future__ import annotations

import dataclasses
import json
import math
import resource
import signal
import socket
import sys

from jaxfp8rl.data.tasks import Problem, Task, from_json
from jaxfp8rl.errors import UserError

# A scorer that runs away with memory gets a MemoryError instead of taking the learner's machine down.
_MEMORY_BYTES = 8 << 30


@dataclasses.dataclass(frozen=True)
class Score:
    """`value` None: undefined. `why`: "ok", "timeout", "crash" or "error: ...", the scorer's own exception."""

    value: float | None
    why: str


def score_one(task: Task, problem: Problem, text: str) -> Score:
    """Score one completion; an exception of the scorer, None, NaN or infinity make the score undefined.

    Raises MemoryError: a process whose memory is full is not asked again.
    """
    try:
        value = task.score(problem, text)
        if value is not None and math.isfinite(value):
            return Score(float(value), "ok")
        return Score(None, f"error: the scorer returned {value}")
    except MemoryError:
        raise
    except Exception as e:  # whatever else a scorer raises, its score is undefined
        return Score(None, f"error: {type(e).__name__}: {e}")


def _load(task_json: str) -> tuple[Task | None, dict]:
    try:
        task = from_json(task_json)
        task.load_scorer()
        return task, {"ready": True}
    except UserError as e:
        return None, {"fatal": e.message, "next_step": e.next_step}
    except Exception as e:  # the parent raises it again, as the user's error
        return None, {"fatal": f"the scorer cannot be loaded: {type(e).__name__}: {e}"}


def main(fd: int, timeout_s: float, task_json: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    stream = socket.socket(fileno=fd).makefile("rw", encoding="ascii", newline="\n")

    def reply(message: dict) -> None:
        stream.write(json.dumps(message) + "\n")
        stream.flush()

    task, hello = _load(task_json)
    reply(hello)
    for line in stream if task else ():
        request = json.loads(line)
        # The parent's clock comes first. This alarm, whose default is death, ends a scorer whose parent was killed.
        signal.setitimer(signal.ITIMER_REAL, timeout_s + 1)
        score = score_one(task, Problem(**request["problem"]), request["text"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        reply(dataclasses.asdict(score))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
