"""The bytes that GPUs send, read off a compiled program, of programs whose bytes are known."""

from __future__ import annotations

import collectives
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper import compiled, devices, lowered
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

ROWS, COLUMNS, TIMES = 512, 256, 5


def program(n: int) -> str:
    """TIMES gathers and scatters of [ROWS, COLUMNS] float32 over n GPUs, and one sum of it."""
    mesh = Mesh(np.array(devices("h100", n)).reshape(1, n), ("data", "fsdp"))

    def each(x: jax.Array) -> jax.Array:
        def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            whole = jnp.sin(jax.lax.all_gather(x, "fsdp", tiled=True))
            return jax.lax.psum_scatter(whole * whole, "fsdp", tiled=True), None

        x, _ = jax.lax.scan(step, x, length=TIMES)
        return jax.lax.psum(jnp.concatenate([x] * n), "fsdp")

    f = jax.jit(jax.shard_map(each, mesh=mesh, in_specs=P("fsdp"), out_specs=P(), check_vma=False))
    x = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))
    return compiled(lowered("h100", f, x)).as_text()


@pytest.mark.parametrize("n", [2, 4])
def test_bytes_are_those_of_rings_as_often_as_a_loop_runs(n):
    one = ROWS * COLUMNS * 4 * (n - 1) // n
    assert collectives.sent(program(n)) == {
        ("all-gather", "fsdp"): TIMES * one, ("reduce-scatter", "fsdp"): TIMES * one,
        ("all-reduce", "fsdp"): 2 * one}


def test_a_wider_mesh_sends_more_between_hosts_alone():
    found = {"sent": {"all-reduce over data": 7.0, "all-gather over fsdp": 3.0}}
    assert collectives.wider(found, 64, 8)["sent"] == pytest.approx(
        {"all-reduce over data": 8.0 * 63 / 64, "all-gather over fsdp": 3.0})
