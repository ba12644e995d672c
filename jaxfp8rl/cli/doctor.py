"""`jaxfp8rl doctor`: check whether this machine can run jaxfp8rl. One line a check; a failed check gives its
fix.

"ok": works. "-": missing or untested, and only some uses need it, as the line says. "FAIL": must be fixed.
torch and vLLM are checked in a child process, so that a broken installation of them does not end the doctor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from jaxfp8rl import tested
from jaxfp8rl.config.toml import load_config, presets
from jaxfp8rl.errors import UserError
from jaxfp8rl.gpus import Gpu, gpus

# packages whose versions are shown
PACKAGES = ("jaxlib", "flax", "optax", "orbax-checkpoint", "chex", "numpy", "safetensors", "tokenizers",
            "pydantic")
LEAST_DRIVER = {12: 525, 13: 580}  # oldest driver for each CUDA version, from its release notes
TAKE = f'pip install "jaxfp8rl[cuda{tested.CUDA[0]}]"'
PROBE_SECONDS = 180
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Check:
    """The result of one check. `fix`: the remedy for the status "FAIL", or for "-" if the feature is
    needed."""

    name: str
    status: Literal["ok", "-", "FAIL"]
    detail: str
    fix: str = ""

    def __str__(self) -> str:
        fix = f"\n{'':16}fix: {self.fix}" if self.fix else ""
        return f"{self.status:4} {self.name:10} {self.detail}{fix}"


class DoctorFailed(UserError):
    """At least one check failed; each of them has printed its fix."""

    exit_code = 1


def run_doctor(as_json: bool = False) -> None:
    """Print each check once it is done, or all of them as one JSON list. Raises DoctorFailed if a check
    failed."""
    checks = []
    for group in (_python, _gpu, _extra, _jax, _cuda, _nvcc, _packages, _versions, _bridge, _memory, _disk,
                  _configs):
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
    """The checks of a group. An exception in a check becomes a failed check."""
    try:
        yield from group()
    except Exception as e:
        yield Check(group.__name__.strip("_"), "FAIL", f"{type(e).__name__}: {e}",
                    "install again: see README, Install")


def _python() -> Iterator[Check]:
    if sys.version_info[:2] >= (3, 12):  # noqa: UP036 - a checkout can be run by any Python
        yield Check("python", "ok",
                    f"{platform.python_version()} on {platform.machine()} {platform.system()}")
    else:
        yield Check("python", "FAIL", platform.python_version(),
                    "install Python 3.12 and create the environment again")


def _gpu() -> Iterator[Check]:
    """The GPUs as the driver reports them, independent of any library."""
    if not _has_gpu():
        yield Check("gpu", "-", "no NVIDIA driver here: runs use the CPU (make demo works)")
        return
    if not shutil.which("nvidia-smi"):
        sizes = ", ".join(f"{gpu.total / GIB:.0f} GiB" for gpu in _by_driver())
        yield Check("gpu", "-", f"GPUs of {sizes}; nvidia-smi is not here, so kind and driver were not checked",
                    "give the container NVIDIA_DRIVER_CAPABILITIES=compute,utility")
        return
    done = _nvidia_smi("name,compute_cap,driver_version,memory.total")
    if done.returncode:
        yield Check("gpu", "FAIL", f"nvidia-smi: {(done.stderr or done.stdout).strip()}",
                    "repair the NVIDIA driver")
        return
    for line in done.stdout.strip().splitlines():
        name, capability, driver, memory = line.split(", ")
        detail = f"{name}, compute capability {capability}, driver {driver}, {memory}"
        hopper = capability == "9.0"
        yield Check("gpu", "ok" if hopper else "-", detail, "" if hopper else "only tested on Hopper (9.0)")


def _extra() -> Iterator[Check]:
    """The extra to install here, by the driver. Only the one for CUDA 13 was run on GPUs."""
    if not _has_gpu():
        yield Check("extra", "ok", "no GPU: take neither cuda12 nor cuda13")
        return
    driver, (run, other) = _driver(), tested.CUDA
    if not driver:  # nvidia-smi failed, as `_gpu` reports
        return
    if driver >= LEAST_DRIVER[run]:
        detail = f"take cuda{run}, with vllm or without; cuda{other} has never been run on a GPU"
        yield Check("extra", "ok", detail)
    elif driver >= LEAST_DRIVER[other]:
        detail = (f"the driver {driver} allows cuda{other} without vllm, which has never been run on a GPU; "
                  f"with vllm, which is built for CUDA {run}, one process would load two CUDA stacks")
        yield Check("extra", "-", detail, f"a driver of {LEAST_DRIVER[run]} or newer, then {TAKE}")
    else:
        yield Check("extra", "FAIL", f"the driver {driver} is too old for cuda{other} and cuda{run}",
                    f"a driver of {LEAST_DRIVER[run]} or newer, then {TAKE}")


def _has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None or bool(_by_driver())


def _by_driver() -> Sequence[Gpu]:
    """The GPUs that the driver gives this process, without nvidia-smi."""
    with contextlib.suppress(UserError):  # a driver that fails
        return gpus()
    return ()


def _nvidia_smi(fields: str) -> subprocess.CompletedProcess[str]:
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=30)
    except FileNotFoundError as e:
        return subprocess.CompletedProcess(query, 127, "", str(e))


def _jax() -> Iterator[Check]:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave the GPU's memory free
    import jax

    devices = jax.devices()
    detail = f"{jax.__version__}, {len(devices)} x {devices[0].device_kind} ({devices[0].platform})"
    unused = _has_gpu() and devices[0].platform == "cpu" and os.environ.get("JAX_PLATFORMS") != "cpu"
    yield Check("jax", "FAIL" if unused else "ok", detail, _why_unused() if unused else "")


def _why_unused() -> str:
    """What makes JAX see the GPU."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1"):
        return f'unset CUDA_VISIBLE_DEVICES: "{hidden}" hides every GPU'
    if any(_version(f"jax-cuda{major}-plugin") for major in LEAST_DRIVER):
        return ("""python -c "import jax; jax.devices('cuda')" says why JAX's CUDA plug-in does not start""")
    return 'pip install "jaxfp8rl[cuda13]": JAX has no CUDA plug-in and does not see the GPU'


def _cuda() -> Iterator[Check]:
    """The versions of JAX's CUDA plug-in, jaxlib and the driver. If they do not match, JAX ignores the
    plug-in or fails at the first kernel."""
    majors = [major for major in LEAST_DRIVER if _version(f"jax-cuda{major}-plugin")]
    if not majors:
        return
    if len(majors) > 1:
        yield Check("cuda", "FAIL", "JAX has plug-ins for CUDA 12 and 13",
                    "pip uninstall jax-cuda12-plugin jax-cuda12-pjrt")
        return
    major, version, jaxlib = majors[0], _version(f"jax-cuda{majors[0]}-plugin"), _version("jaxlib")
    detail = f"JAX's plug-in for CUDA {major} is {version}"
    fix = f'pip install "jax[cuda{major}]=={_version("jax")}"'
    if version != jaxlib:
        yield Check("cuda", "FAIL", f"{detail}, jaxlib is {jaxlib}: the versions must be equal", fix)
    elif _has_gpu() and 0 < (driver := _driver()) < LEAST_DRIVER[major]:
        older = [f'pip install "jaxfp8rl[cuda{m}]"' for m, least in LEAST_DRIVER.items() if least <= driver]
        fixes = [f"a driver of {LEAST_DRIVER[major]} or newer", *older]
        yield Check("cuda", "FAIL", f"{detail}, and the driver {driver} is too old for CUDA {major}",
                    ", or ".join(fixes))
    elif major != tested.CUDA[0]:
        newer = _has_gpu() and _driver() >= LEAST_DRIVER[tested.CUDA[0]]
        yield Check("cuda", "-", f"{detail}: CUDA {major} has never been run on a GPU",
                    TAKE if newer else f"{TAKE}, after an update of the driver: see extra")
    else:
        yield Check("cuda", "ok", detail)


def _nvcc() -> Iterator[Check]:
    from jaxfp8rl.rollout.engines import cuda_compiler

    if _has_gpu():
        found = cuda_compiler()
        detail = 'not found; needed for rollout.fp8_kernel = "deep_gemm", which some presets use'
        yield Check("nvcc", "ok",
                    found) if found else Check("nvcc", "-", detail, 'set CUDA_HOME, or fp8_kernel = "native"')


def _driver() -> int:
    """The driver's major version, 580 of 580.159; 0 if nvidia-smi fails, which `_gpu` reports."""
    found = re.match(r"\d+", _nvidia_smi("driver_version").stdout)
    return int(found[0]) if found else 0


def _packages() -> Iterator[Check]:
    """The requirements of jaxfp8rl, and the packages of its extras that are installed."""
    required = [Requirement(text) for text in _requires("jaxfp8rl")]
    always = {r.name for r in required if not r.marker} or set(PACKAGES)
    missing = sorted(p for p in always if not _version(p))
    old = [r for r in required if (v := _version(r.name)) and not _floor(r).contains(v, prereleases=True)]
    if missing:
        yield Check("packages", "FAIL", f"missing: {', '.join(missing)}",
                    "pip install jaxfp8rl, or make demo in a checkout")
    if old:
        wrong = {r.name: f"{r.name} {_version(r.name)} is not {_floor(r)}" for r in old}
        newer = {r.name: f'"{r.name}{r.specifier}"' for r in old}
        yield Check("packages", "FAIL", ", ".join(wrong.values()), "pip install " + " ".join(newer.values()))
    if not missing and not old:
        yield Check("packages", "ok", ", ".join(f"{p} {_version(p)}" for p in PACKAGES))
    tasks = [p for p in ("reasoning-gym", "math-verify", "transformers") if not _version(p)]
    detail = f"missing: {', '.join(tasks)}; needed for their tasks and scorers"
    fix = 'pip install "jaxfp8rl[tasks]"'
    yield Check("tasks", "-", detail,
                fix) if tasks else Check("tasks", "ok", "reasoning-gym, math-verify, transformers")


def _floor(required: Requirement) -> SpecifierSet:
    """The bounds without an upper one, which is for pip: `_versions` warns of a release above it."""
    return SpecifierSet(",".join(str(bound) for bound in required.specifier if bound.operator != "<"))


def _versions() -> Iterator[Check]:
    """Whether the learner's packages are of tested releases. `_bridge` checks torch and vLLM."""
    found = [(name, version) for name in tested.BY_NAME
             if name not in tested.OF_VLLM and (version := _version(name))]
    untested = [check for name, version in found if (check := _untested("versions", name, version))]
    yield from untested or [Check("versions", "ok", "as tested: " + ", ".join(map(" ".join, found)))]


def _untested(check: str, package: str, version: str) -> Check | None:
    difference = tested.difference(package, version)
    fix = f"if anything fails: {tested.remedy(package)}"
    return Check(check, "-", difference, fix) if difference else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _requires(package: str) -> list[str]:
    """The declared requirements of a package; none if it is not installed, such as a checkout on
    PYTHONPATH."""
    try:
        return importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _bridge() -> Iterator[Check]:
    """torch, DLPack and vLLM, from `bridges.probe` in a child process."""
    probe = [sys.executable, "-m", "bridges.probe"]
    done = subprocess.run(probe, capture_output=True, text=True, timeout=PROBE_SECONDS)
    if done.returncode:
        why = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        yield Check("torch", "FAIL", f"fails when used: {why}",
                    'pip install --force-reinstall "jaxfp8rl[vllm]"')
        return
    found = json.loads(done.stdout.splitlines()[-1])
    if not found["torch"]:
        yield Check("torch", "-", "not installed; only vLLM needs it", 'pip install "jaxfp8rl[vllm]"')
        return
    yield _torch(found)
    trips = "; ".join(f"{dtype} {how}" for dtype, how in found["dlpack"].items())
    good = all(how in ("zero copy", "copied") for how in found["dlpack"].values())
    fix = "" if good else "install torch 2.11 or newer, for the same device as JAX"
    yield Check("dlpack", "ok" if good else "FAIL", f"JAX to torch: {trips}", fix)
    yield _vllm(found)


def _torch(found: dict) -> Check:
    """The build of torch. With a CPU build, vLLM samples on the CPU; with another CUDA version than JAX's,
    one process loads two of them."""
    version, cuda = found["torch"], found.get("torch_cuda")
    if not _has_gpu():
        return _untested("torch", "torch", version) or Check("torch", "ok", version)
    if not cuda:
        return Check("torch", "FAIL", f"{version} is a build for CPUs, but there is a GPU",
                     'pip install "jaxfp8rl[vllm]"')
    other = [m for m in LEAST_DRIVER if _version(f"jax-cuda{m}-plugin") and m != int(cuda.partition(".")[0])]
    if other:
        detail = (f"{version} is for CUDA {cuda}, JAX's plug-in for CUDA {other[0]}: one process loads two "
                  "CUDA stacks, which has never been run on a GPU")
        return Check("torch", "-", detail, f'pip install "jaxfp8rl[cuda{cuda.partition(".")[0]}]"')
    return _untested("torch", "torch", version) or Check("torch", "ok", f"{version}, CUDA {cuda}")


def _vllm(found: dict) -> Check:
    if not found["vllm"]:
        return Check("vllm", "-", 'not installed; needed for rollout.engine = "vllm"',
                     'pip install "jaxfp8rl[vllm]"')
    wants = [r for r in map(Requirement, _requires("vllm")) if r.name == "torch"
             and (not r.marker or r.marker.evaluate())]
    if any(not r.specifier.contains(found["torch"], prereleases=True) for r in wants):
        detail = f"{found['vllm']} was built for torch{wants[0].specifier}, but {found['torch']} is installed"
        return Check("vllm", "FAIL", detail, f'pip install "torch{wants[0].specifier}"')
    if untested := _untested("vllm", "vllm", found["vllm"]):
        return untested
    if found["vllm_fp8"]:
        fix = 'use a Hopper GPU, or rollout.fp8_kernel = "emulated", which is slow (make demo-vllm)'
        return Check("vllm", "-", f"{found['vllm']}, BF16 only: {found['vllm_fp8']}", fix)
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
        yield Check("configs", "FAIL", "no shipped configs found", "install again: the package is incomplete")
        return
    for name in shipped:
        load_config(name)
    yield Check("configs", "ok", f"{len(shipped)} shipped, all valid: {', '.join(sorted(shipped))}")
