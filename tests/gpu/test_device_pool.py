"""JAX's memory comes back to the driver, and not before it is asked for."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
from bridges.inside_vllm import device_pool
device_pool.share()
import jax, jax.numpy as jnp, torch
free = lambda: torch.cuda.mem_get_info()[0]
small = jax.block_until_ready(jnp.ones(2**20))
device_pool.hold()
before = free()
x = jax.block_until_ready(jax.jit(lambda: jnp.ones(2**31, jnp.float32))())
assert before - free() >= 2**33, "JAX holds 8 GiB"
assert device_pool.in_use() == torch.cuda.mem_get_info()[1] - free() <= device_pool.total()
x.delete()
jax.block_until_ready(small + 1)
assert before - free() >= 2**33, "and keeps them"
device_pool.give_back()
assert free() >= before - 2**26, (before, free())
assert float(small.sum()) == 2**20
"""


def test_freed_memory_is_kept_until_it_is_given_back():
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=120)
