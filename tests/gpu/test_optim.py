"""The update of low-bit states on a GPU: in place, near the time that its bytes take, exact; moments in
pinned host memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.common import clocked
from jaxfp8rl.config.learning import Optim
from jaxfp8rl.optim.adamw import Formats, adamw
from jaxfp8rl.optim.guard import guarded_update, init_state
from jaxfp8rl.optim.low_bit import DTYPES, decode, encode, is_scaled, round_stochastically
from jaxfp8rl.optim.schedule import make_schedule
from jaxfp8rl.precision.jit import rounding_exact_jit

LEAST = Formats("bfloat16", "float8", "bfloat16")
D, F, LAYERS = 4096, 12288, 4  # of Qwen3-8B
SHAPES = {"q": (D, D), "k": (D // 4, D), "v": (D // 4, D), "o": (D, D), "gate": (F, D), "up": (F, D),
          "down": (D, F)}


def make(formats: Formats):
    cfg = Optim(lr=1e-6, weight_decay=0.01)
    return adamw(cfg, make_schedule(cfg, 10), formats)


def normal(shapes: dict, scale: float, seed: int) -> dict:
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {"layers": {n: scale * jax.random.normal(k, s) for k, (n, s) in zip(keys, shapes.items())}}


def compiled(optimizer, state, grads):
    update = rounding_exact_jit(
        lambda state, grads: guarded_update(optimizer, state, jnp.float32(0), grads)[0],
                       donate_argnums=0)
    return update.lower(state, grads).compile()


def seconds(f) -> float:
    return min(clocked(f) for _ in range(10))


def size(tree) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("formats", [Formats(), LEAST, LEAST._replace(offload=True)],
                         ids=["float32", "least", "offloaded"])
def test_an_update_of_8b_layers(formats, capsys):
    """In place: less than a float32 copy of the largest layer of a parameter besides, with offload a few. In
    at most half again of what the bytes that must move take at the rate of a copy, though gradients are read
    twice: their norm comes first."""
    optimizer, shapes = make(formats), {n: (LAYERS, *s) for n, s in SHAPES.items()}
    state, grads = init_state(normal(shapes, 0.02, 0), optimizer), normal(shapes, 1e-4, 1)
    update = compiled(optimizer, state, grads)
    memory, moved, count = update.memory_analysis(), size(grads) + 2 * size(
        (state.params, state.opt_state)), size(grads) // 4
    kept = [state]

    def once():
        kept[0] = update(kept[0], grads)
        return kept[0]

    once()
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves((kept[0].opt_state.mu, kept[0].opt_state.nu))}
    assert kinds == {"pinned_host" if formats.offload else "device"}
    took = seconds(once)
    x, double = jnp.ones(2**28), jax.jit(lambda x: 2 * x)
    jax.block_until_ready(double(x))
    rate = 2 * x.nbytes / seconds(lambda: double(x))
    with capsys.disabled():
        print(
            f"\n{formats}: {count / 1e6:.0f} M parameters, update {1e3 * took:.2f} ms, floor "
            f"{1e3 * moved / rate:.2f} ms ({moved / 1e9:.2f} GB at {rate / 1e9:,.0f} GB/s), temporaries "
            f"{memory.temp_size_in_bytes / 2**20:,.0f} MiB, of the largest layer's float32 "
            f"{memory.temp_size_in_bytes / (4 * D * F):.2f}"
        )
    assert memory.temp_size_in_bytes < (8 if formats.offload else 1) * 4 * D * F
    assert formats.offload or took < 1.5 * moved / rate


def test_offloaded_moments_are_the_bytes_of_those_on_the_device_and_not_in_its_memory():
    """Gradients whose norm is below clip_norm: it is summed in another order there, and its last bit would
    clip otherwise."""
    shapes, device = {n: (2, *s) for n, s in SHAPES.items()}, jax.local_devices()[0]
    grads = normal(shapes, 1e-5, 1)
    results, in_use = [], []
    for formats in (LEAST, LEAST._replace(offload=True)):
        optimizer, before = make(formats), device.memory_stats()["bytes_in_use"]
        state = init_state(normal(shapes, 0.02, 0), optimizer)
        update = compiled(optimizer, state, grads)
        for _ in range(2):
            state = update(state, grads)
        jax.block_until_ready(state)
        in_use.append(device.memory_stats()["bytes_in_use"] - before)
        moments = size((state.opt_state.mu, state.opt_state.nu))
        results.append([np.asarray(x).tobytes() for x in jax.tree.leaves(state)])
        del state, update
    assert results[0] == results[1]
    assert in_use[0] - in_use[1] > 0.9 * moments


@pytest.mark.parametrize("kept_as", ["bfloat16", "float16", "float8"])
def test_rounding_is_exact_here_too(kept_as):
    """numpy's rounding to nearest under the least power of two that holds a block; what was read is written
    as it is; the mean over all bits is the number."""
    dtype = DTYPES[kept_as]
    x = np.random.default_rng(0).normal(size=(64, 384)).astype(np.float32) * np.float32(2) ** np.arange(
        -32, 32)[:, None]
    kept = rounding_exact_jit(encode, static_argnums=1)(x, kept_as)
    back = np.asarray(rounding_exact_jit(decode)(kept))
    scale = np.repeat(np.asarray(kept.scale), 128, -1) if is_scaled(kept) else np.float32(1)
    np.testing.assert_array_equal(back, (x / scale).astype(dtype).astype(np.float32) * scale)
    again = rounding_exact_jit(encode, static_argnums=1)(back, kept_as,
                                                jax.random.bits(jax.random.key(0), x.shape, jnp.uint32))
    np.testing.assert_array_equal(rounding_exact_jit(decode)(again), back)
    spare = 23 - jnp.finfo(dtype).nmant
    every = jnp.arange(2**spare, dtype=jnp.uint32) << (32 - spare)
    for value in np.float32([1 / 3, -2.9999998, 0.1]):
        got = rounding_exact_jit(round_stochastically,
                                 static_argnums=1)(jnp.full(every.shape, value), dtype, every)
        assert np.asarray(got, np.float64).mean() == value
