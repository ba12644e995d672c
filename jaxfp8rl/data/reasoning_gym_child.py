"""A process that generates problems: `python -m jaxfp8rl.data.reasoning_gym_child TASK_JSON START STOP`. It
prints a line of JSON for each, once all are there. Never imports jax or torch."""

from __future__ import annotations

import contextlib
import json
import sys

from jaxfp8rl.data.generated import written
from jaxfp8rl.data.reasoning_gym_task import ReasoningGymTask


def main(task: str, start: int, stop: int) -> None:
    with contextlib.redirect_stdout(sys.stderr):  # whatever a generator prints is no problem
        gym = ReasoningGymTask(**json.loads(task))
        lines = [written(gym.problem(i)) for i in range(start, stop)]
    print("\n".join(lines))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
