"""A run of six steps that takes seconds, for tests of faults; as a program, a run that kills itself:

    python micro_run.py PLACE TIMES jaxfp8rl-words...     SIGKILLs itself at the TIMES-th call of PLACE,
                                                          "module:Class.function"

An untrained model is never right, so a completion's reward is a number derived from its text. It gives a
gradient and is reproducible in every process.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
import tempfile
import time
import zlib
from pathlib import Path

import jax
import numpy as np

from jaxfp8rl.checkpoint.store import Checkpoints
from jaxfp8rl.config.schema import Config
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.monitors.jsonl import read_metrics
from jaxfp8rl.rewards.runner import RewardRunner, Score

MICRO = {
    "run.steps": 6, "run.eval_problems": 4, "run.eval_every": 0, "run.save_every": 2,
    "rollout.prompts_per_step": 4, "rollout.samples_per_prompt": 2, "rollout.kv_cache": "auto",
    "rollout.max_num_seqs": 8,
    "train.row_tokens": 40, "train.rows_per_microbatch": 2, "sft.steps": 0, "precision.recipe": "bf16",
    "gate.completions": 4,
    "model.config.hidden_size": 32, "model.config.intermediate_size": 32, "model.config.num_hidden_layers": 1,
    "model.config.num_attention_heads": 1, "model.config.num_key_value_heads": 1, "model.config.head_dim": 32,
    "task.options.operands": 2, "task.options.demonstration_error": 0.0, "optim.lr": 0.01,
    "optim.warmup_steps": 0,
    "optim.schedule": "constant",
}


def words(directory: Path | str, of: dict = MICRO, **changes) -> list[str]:
    """Command-line overrides: the settings `of` a run with changes, "__" for the dot."""
    settings = of | {"run.dir": str(directory)} | {k.replace("__", "."): v for k, v in changes.items()}
    return [w for k, v in settings.items() for w in (f"--{k}", str(v))]


def config(directory: Path | str, of: dict = MICRO, **changes) -> Config:
    return load_config("demo", words(directory, of, **changes))


def rewarded(self: RewardRunner, items) -> list[Score]:
    return [Score(zlib.crc32(f"{problem.id} {text}".encode()) % 7 / 6, "ok") for problem, text in items]


def equal(a: object, b: object) -> bool:
    """Whether they are equal, NaN to NaN."""
    try:
        np.testing.assert_equal(a, b)
    except AssertionError:
        return False
    return True


def metrics(directory: Path) -> list[dict]:
    return read_metrics(directory / "metrics.jsonl")


def arrays(directory: Path, step: int) -> dict[str, np.ndarray]:
    """Every array of a checkpoint, by its path."""
    from orbax.checkpoint import v1 as ocp

    assert step in Checkpoints(directory / "checkpoints", 1).steps()
    folder, here = (directory / "checkpoints"
                    / str(step)).absolute(), jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=here),
                        ocp.checkpointables_metadata(folder).metadata["state"])
    tree = ocp.load_checkpointables(folder, {"state": like})
    return {jax.tree_util.keystr(path): np.asarray(x)
            for path, x in jax.tree_util.tree_leaves_with_path(tree["state"])}


def lasting(rows: list[dict]) -> list[dict]:
    """Metrics without clocks, memory and the counts of faults."""
    passing = ("time/", "memory/", "engine/restarts", "tokens/rollout_per_s", "tokens/update_per_s")
    return [{k: v for k, v in r.items() if not k.startswith(passing)} for r in rows]


def assert_same_run(directory: Path, straight: Path, step: int = 6) -> None:
    """Compare every line of metrics without clocks, memory and the counts of faults; every sample; and every
    bit of the final state."""
    np.testing.assert_equal(lasting(metrics(directory)), lasting(metrics(straight)))
    assert (directory / "samples.jsonl").read_bytes() == (straight / "samples.jsonl").read_bytes()
    have, want = arrays(directory, step), arrays(straight, step)
    assert have.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(have[name], want[name], err_msg=name)


def kill_at(place: str, times: int) -> None:
    """SIGKILL this process at the `times`-th call of a function, before it does anything."""
    module, _, path = place.partition(":")
    owner = functools.reduce(getattr, path.split(".")[:-1], importlib.import_module(module))
    name, count = path.rpartition(".")[2], iter(range(1, 10**9))
    function = getattr(owner, name)

    @functools.wraps(function)
    def killing(*args, **kwargs):
        if next(count) == times:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    setattr(owner, name, killing)


def child() -> int:
    """The process id of an engine that this process owns, which must not outlive it: a stub of `vllm
    serve`."""
    from bridges.served import serve_process

    stub = Path(__file__).parents[1] / "bridges" / "stub_vllm.py"
    script = Path(tempfile.gettempdir(), f"stub-of-{os.getuid()}-{os.getpid()}")
    script.write_text(f'#!/bin/sh\nrm "$0"\nexec {sys.executable} -S -E {stub} "$@"\n')
    script.chmod(0o700)
    serve_process.console_script = lambda: str(script)
    engines = serve_process.ServeProcesses("model", [])
    engines.wait_until_ready(60)
    return engines.pid(0)


def outlives(pid: int, seconds: float = 5.0) -> bool:
    """Whether a process still exists; a zombie does not count."""
    from benchmarks.processes import runs  # not where this is a program

    until = time.monotonic() + seconds
    while runs(pid) and time.monotonic() < until:
        time.sleep(0.05)
    return runs(pid)


if __name__ == "__main__":
    from jaxfp8rl.cli.main import main

    RewardRunner.score = rewarded
    print("child", child(), flush=True)
    kill_at(sys.argv[1], int(sys.argv[2]))
    sys.exit(main(sys.argv[3:]))
