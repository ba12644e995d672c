"""The GPUs that this process may use, and how much of their memory, and of the host's, JAX may take."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path
from typing import NamedTuple

from jaxfp8rl.errors import UserError

NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
# JAX's variable for the share that its own allocator may take, and the old name of it; JAX refuses both
FRACTION, OLD_FRACTION = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
HOST_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"  # of pinned host memory, in GiB; XLA's default is 64
LIMITS = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")
MOST = 0.95  # of a GPU without vLLM: CUDA's context and the kernels take the rest


class Gpu(NamedTuple):
    """A GPU that this process may use. name: as CUDA_VISIBLE_DEVICES has it."""

    name: str
    total: int  # bytes


def gpus() -> list[Gpu]:
    """The GPUs that this process may use, which the driver reads from CUDA_VISIBLE_DEVICES: indices, UUIDs or
    their beginnings, names of MIG instances. None on a machine without, or with JAX_PLATFORMS=cpu. Raises
    UserError if the driver fails. It takes no memory of a GPU."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return []
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # no driver here
        return []
    count = ctypes.c_int()
    if error := driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        if error == NO_DEVICE:
            return []
        raise UserError(f"the NVIDIA driver fails: CUDA error {error}",
                        "`nvidia-smi` says more; repair the driver, or set JAX_PLATFORMS=cpu")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = map(str, range(count.value)) if visible is None else map(str.strip, visible.split(","))
    return [Gpu(name, _total(driver, i)) for i, name in zip(range(count.value), names)]


def _total(driver: ctypes.CDLL, number: int) -> int:
    device, size = ctypes.c_int(), ctypes.c_size_t()
    driver.cuDeviceGet(ctypes.byref(device), number)
    driver.cuDeviceTotalMem_v2(ctypes.byref(size), device)
    return size.value


def take_gpu() -> None:
    """Let JAX's own allocator take MOST of a GPU, unless the environment says how much. Its default is three
    quarters (docs.jax.dev, "GPU memory allocation"). Call it before JAX asks for a device."""
    if OLD_FRACTION not in os.environ:
        os.environ.setdefault(FRACTION, str(MOST))


def share_of_jax() -> float:
    """The share of a GPU that JAX's own allocator may take after `take_gpu`, 0 to 1."""
    return float(os.environ.get(FRACTION) or os.environ.get(OLD_FRACTION) or MOST)


def take_host_memory() -> None:
    """Let JAX keep as much in pinned host memory as there is (optim.offload), unless the environment says how
    much. Call it before JAX asks for a device."""
    os.environ.setdefault(HOST_LIMIT, str(host_memory() >> 30))


def host_memory() -> int:
    """The bytes of this machine's memory, or of the container's, if it has a limit."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in LIMITS:
        with contextlib.suppress(OSError, ValueError):  # there is none, or it is "max"
            found.append(int(path.read_text()))
    return min(found)
