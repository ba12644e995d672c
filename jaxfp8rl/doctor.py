"""`jaxfp8rl doctor`: is this machine fit, one line a check; what fails says its fix.

"ok" is fine, "-" is absent and needed for some uses alone (the line says which), "FAIL" must be mended. torch and vLLM are
looked at in a child process, so that a broken install of theirs is a line here and not the end of the doctor.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Literal

from jaxfp8rl.errors import UserError
from jaxfp8rl.toml_config import load_config, presets

PACKAGES = ("jaxlib", "flax", "optax", "orbax-checkpoint", "chex", "numpy", "safetensors", "tokenizers", "pydantic")
PROBE_SECONDS = 180
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Check:
    """One finding. `fix` is what to do when the status is "FAIL", or "-" and the thing is wanted."""

    name: str
    status: Literal["ok", "-", "FAIL"]
    detail: str
    fix: str = ""

    def __str__(self) -> str:
        fix = f"\n{'':16}fix: {self.fix}" if self.fix else ""
        return f"{self.status:4} {self.name:10} {self.detail}{fix}"


class DoctorFailed(UserError):
    """Some check failed; each has said its fix."""

    exit_code = 1


def run_doctor(as_json: bool = False) -> None:
    """Print every check as it is made, or all of them as one JSON object. Raises DoctorFailed if any failed."""
    checks = []
    for group in (_python, _gpu, _jax, _packages, _bridge, _memory, _disk, _configs):
        for check in _guarded(group):
            checks.append(check)
            if not as_json:
                print(check, flush=True)
    if as_json:
        print(json.dumps([dataclasses.asdict(c) for c in checks], indent=1))
    failed = [c.name for c in checks if c.status == "FAIL"]
    if failed:
        raise DoctorFailed(f"doctor: {len(failed)} of {len(checks)} checks failed: {', '.join(failed)}")


def _guarded(group: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    """The group's checks; an error while checking is itself a failed check."""
    try:
        yield from group()
    except Exception as e:
        yield Check(group.__name__.strip("_"), "FAIL", f"{type(e).__name__}: {e}", "install again: see README, Install")


def _python() -> Iterator[Check]:
    if sys.version_info[:2] >= (3, 12):  # noqa: UP036 - a checkout can be run by any Python
        yield Check("python", "ok", f"{platform.python_version()} on {platform.machine()} {platform.system()}")
    else:
        yield Check("python", "FAIL", platform.python_version(), "install Python 3.12 and make the environment anew")


def _gpu() -> Iterator[Check]:
    """The driver's view, before any library's."""
    if not shutil.which("nvidia-smi"):
        yield Check("gpu", "-", "no NVIDIA driver here: runs are on the CPU (make demo does)")
        return
    query = ["nvidia-smi", "--query-gpu=name,compute_cap,driver_version,memory.total", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30)
    if done.returncode:
        yield Check("gpu", "FAIL", f"nvidia-smi: {(done.stderr or done.stdout).strip()}", "mend the NVIDIA driver")
        return
    for line in done.stdout.strip().splitlines():
        name, capability, driver, memory = line.split(", ")
        detail = f"{name}, compute capability {capability}, driver {driver}, {memory}"
        hopper = capability == "9.0"
        yield Check("gpu", "ok" if hopper else "-", detail, "" if hopper else "tested on Hopper (9.0) alone")


def _jax() -> Iterator[Check]:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # a doctor takes no bed
    import jax

    devices = jax.devices()
    detail = f"{jax.__version__}, {len(devices)} x {devices[0].device_kind} ({devices[0].platform})"
    unused = shutil.which("nvidia-smi") and devices[0].platform == "cpu" and os.environ.get("JAX_PLATFORMS") != "cpu"
    fix = 'pip install "jaxfp8rl[cuda13]": JAX has no CUDA plug-in and does not see the GPU'
    yield Check("jax", "FAIL" if unused else "ok", detail, fix if unused else "")


def _packages() -> Iterator[Check]:
    missing = [p for p in PACKAGES if not _version(p)]
    detail = ", ".join(f"{p} {_version(p)}" for p in PACKAGES if p not in missing)
    if missing:
        yield Check("packages", "FAIL", f"missing: {', '.join(missing)}", "pip install jaxfp8rl, or make demo in a checkout")
    else:
        yield Check("packages", "ok", detail)
    tasks = [p for p in ("reasoning-gym", "math-verify", "transformers") if not _version(p)]
    detail, fix = f"missing: {', '.join(tasks)}; wanted for their tasks and scorers", 'pip install "jaxfp8rl[tasks]"'
    yield Check("tasks", "-", detail, fix) if tasks else Check("tasks", "ok", "reasoning-gym, math-verify, transformers")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _bridge() -> Iterator[Check]:
    """torch, DLPack and vLLM, from `bridges.probe` in a child process."""
    probe = [sys.executable, "-m", "bridges.probe"]
    done = subprocess.run(probe, capture_output=True, text=True, timeout=PROBE_SECONDS)
    if done.returncode:
        why = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        yield Check("torch", "FAIL", f"breaks when used: {why}", 'pip install --force-reinstall "jaxfp8rl[vllm]"')
        return
    found = json.loads(done.stdout.splitlines()[-1])
    if not found["torch"]:
        yield Check("torch", "-", "not installed; wanted for vLLM alone", 'pip install "jaxfp8rl[vllm]"')
        return
    yield Check("torch", "ok", found["torch"])
    trips = "; ".join(f"{dtype} {how}" for dtype, how in found["dlpack"].items())
    good = all(how in ("zero copy", "copied") for how in found["dlpack"].values())
    fix = "" if good else "torch 2.11 or newer, for the same device as JAX"
    yield Check("dlpack", "ok" if good else "FAIL", f"JAX to torch: {trips}", fix)
    yield _vllm(found)


def _vllm(found: dict) -> Check:
    if not found["vllm"]:
        return Check("vllm", "-", 'not installed; wanted for rollout.engine = "vllm"', 'pip install "jaxfp8rl[vllm]"')
    if found["vllm_fp8"]:
        return Check("vllm", "-", f"{found['vllm']}, BF16 only: {found['vllm_fp8']}", "a Hopper GPU, for FP8 rollouts")
    return Check("vllm", "ok", f"{found['vllm']}, BF16 and FP8")


def _memory() -> Iterator[Check]:
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    low = total < 4
    fix = "the demo needs 4 GiB" if low else ""
    yield Check("memory", "FAIL" if low else "ok", f"{total:.1f} GiB, {free:.1f} GiB free", fix)


def _disk() -> Iterator[Check]:
    free = shutil.disk_usage(".").free / GIB
    low = free < 2
    fix = "free 2 GiB for run directories" if low else ""
    yield Check("disk", "FAIL" if low else "ok", f"{free:.1f} GiB free here", fix)


def _configs() -> Iterator[Check]:
    shipped = presets()
    if not shipped:
        yield Check("configs", "FAIL", "no shipped configs found", "install again: the package is not whole")
        return
    for name in shipped:
        load_config(name)
    yield Check("configs", "ok", f"{len(shipped)} shipped, all valid: {', '.join(sorted(shipped))}")
