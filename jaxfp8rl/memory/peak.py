"""The peak memory of the process."""

from __future__ import annotations

import resource

import jax


def peak_memory_gib() -> float:
    """The GPU allocator's peak on the first device, in GiB; without a GPU the process's peak resident
    size."""
    stats = jax.local_devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use", 0) or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return peak / 2**30
