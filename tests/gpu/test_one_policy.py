"""precision.exact = "engine" on a Hopper GPU: the learner's score is the engine's log-probability in every
bit, over numbers of rows, arrivals, refills and shared prompts."""

from __future__ import annotations

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import one_policy
from bridges.api import GenRequest, SamplingParams
from jaxfp8rl.data.packing import Sample
from pallas_kernels.decode_attention import api, packed

pytestmark = pytest.mark.usefixtures("hopper")
ARGS = argparse.Namespace(size="1.7b", layers=3, rows=64, queue=2, new_tokens=300, row_tokens=2048,
                          recipe="fp8")


@functools.cache
def sides(recipe: str, rows: int, exact: str = "engine") -> one_policy.Sides:
    return one_policy.sides(argparse.Namespace(**{**vars(ARGS), "recipe": recipe, "rows": rows}), exact)


def equal(s: one_policy.Sides, samples: list) -> float:
    engine, learner, _ = one_policy.scored(s, ARGS, samples)
    assert len(engine) > 500 and np.std(engine) > 0.3
    same = engine.view(np.int32) == learner.view(np.int32)
    print("equal", same.mean(), "apart", np.abs(engine - learner).max(), "others", np.flatnonzero(~same)[:20])
    return float(same.mean())


@pytest.mark.parametrize(("recipe", "rows"), [("fp8", 8), ("fp8", 64), ("fp8", 200), ("fp8_bf16_cache", 64)])
def test_every_token_has_the_same_bits(recipe, rows):
    s = sides(recipe, rows)
    counts = one_policy.lengths(2 * rows, ARGS.new_tokens)
    assert equal(s, one_policy.sampled(s, ARGS, counts)[0]) == 1.0


def test_without_the_setting_they_differ():
    s = sides("fp8", 64, "off")
    assert equal(s, one_policy.sampled(s, ARGS, one_policy.lengths(64, ARGS.new_tokens))[0]) < 1.0


def test_with_staggered_arrivals():
    s, rng = sides("fp8", 64), np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, s.vocab_size, int(n)).tolist()) for n in rng.integers(1, 128, 24)]
    requests = [GenRequest(str(i), p, SamplingParams(100, temperature=one_policy.TEMPERATURE), 2, seed=i)
                for i, p in enumerate(prompts)]
    done = []
    for i in range(0, len(requests), 3):
        s.engine.submit(requests[i : i + 3])
        done += s.engine.poll()
    while len(done) < len(requests):
        done += s.engine.poll()
    samples = [Sample(prompts[int(c.request_id)], c.token_ids, c.logprobs, 0.0) for g in done for c in g]
    assert equal(s, samples) == 1.0


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.bfloat16])
@pytest.mark.parametrize(("H", "K"), [(16, 8), (32, 8), (32, 4)])
def test_a_packed_token_has_the_bits_of_a_decoded_one(H, K, dtype):
    lengths, d, pages = (1500, 1, 257, 64), 128, 96
    ends = np.concatenate([np.arange(1, n + 1) for n in lengths]).astype(np.int32)
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (len(ends), H, d), jnp.bfloat16)
    k, v = (jax.random.normal(key, (len(ends), K, d)).astype(dtype) for key in keys[1:])
    ones = jnp.ones(K)
    o = jax.jit(functools.partial(packed.attention, longest=1536,
                                  backend="pallas"))(q, k, v, ends, ones, ones)
    in_pages = lambda x: jnp.pad(x[:1500], ((0, 36), (0, 0), (0, 0))).reshape(pages, 16, K, d)
    decode = jax.jit(functools.partial(api.decode_attention, backend="pallas"))
    for some in np.array_split(np.arange(1500), 4):
        table = jnp.broadcast_to(jnp.arange(pages, dtype=jnp.int32), (len(some), pages))
        want = decode(q[some], in_pages(k), in_pages(v), table, jnp.asarray(ends[some]), ones, ones)
        np.testing.assert_array_equal(np.asarray(o[some], np.float32), np.asarray(want, np.float32))
