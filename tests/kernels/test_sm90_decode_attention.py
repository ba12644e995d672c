"""Paged decode attention on a CPU: simulated threads, barriers and copies give the numbers; lowering for CUDA
gives the rest."""

from __future__ import annotations

import functools
from pathlib import Path

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies

from jaxfp8rl.models import kv_cache
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.module import init_params
from jaxfp8rl.models.transformer import forward_cached, init_cache
from jaxfp8rl.precision.records import KvFormat, Precision
from pallas_kernels.decode_attention import api, packed
from pallas_kernels.decode_attention.deal import CHUNK, KEYS, begin_of, deal, places
from pallas_kernels.plgpu_compat import INTERPRET, plgpu
from pallas_kernels.quantize.reference import quantize_rows

pytestmark = pytest.mark.usefixtures("quick_compile")

E4M3, BF16 = jnp.float8_e4m3fn, jnp.bfloat16
# A worker fills no slot twice: the simulator takes its products' reads for reads that no barrier orders
# before a copy.
SIMULATED = {  # name: (lengths, query heads, KV heads, d, page, type of the cache, of the queries, window)
    "no token, one, a page, one more": ([0, 1, 16, 17, 0], 4, 2, 64, 16, E4M3),
    "a long one in pieces, a group of one": ([300, 5], 1, 1, 128, 64, E4M3),
    "eight queries a head, pages of two tiles": ([129, 64], 8, 1, 64, 128, BF16),
    "two passes over the heads": ([70, 0, 33], 66, 2, 64, 8, jnp.float16),
    "a window": ([300, 0, 5], 4, 2, 64, 16, E4M3, None, 70),
    "a window within a page of two tiles": ([300, 129, 3], 2, 1, 64, 128, BF16, None, 33),
    "heads of 256": ([100], 4, 2, 256, 16, BF16),
    "heads of 256, fp8, a window": ([200, 0, 5], 4, 1, 256, 32, E4M3, None, 100),
}
SOME = ("no token, one, a page, one more", "a long one in pieces, a group of one", "a window", "heads of 256",
        "heads of 256, fp8, a window")


def operands(lengths, H, K, d, page, dtype, query=None, window=None):
    """Tables are shuffled; NaN is in all pages that no table names, behind every length and before every
    window."""
    rng, B = np.random.default_rng(0), len(lengths)
    counts = [-(-n // page) for n in lengths]
    width, total = max(*counts, 1) + 1, sum(counts) + 3
    order, pages = rng.permutation(total).astype(np.int32), []
    table, at = np.full((B, width), total - 1, np.int32), 0
    live = np.zeros((total, page), bool)
    for b, (n, count) in enumerate(zip(lengths, counts)):
        table[b, :count] = order[at : at + count]
        table[b, count:] = order[-1]  # a page full of NaN
        at_key = np.arange(count * page)
        live[table[b, :count]] = ((at_key < n) & (at_key >= n - (window or n))).reshape(count, page)
        at += count
    for _ in range(2):
        x = rng.standard_normal((total, page, K, d)).astype(np.float32)
        pages.append(jnp.asarray(np.where(live[..., None, None], x, np.nan).astype(dtype)))
    q = jnp.asarray(rng.standard_normal((B, H, d)), query or (BF16 if dtype == E4M3 else dtype))
    scales = [jnp.asarray(rng.uniform(0.5, 2, K), jnp.float32) if dtype == E4M3 else None for _ in range(2)]
    return q, *pages, jnp.asarray(table), jnp.asarray(lengths, jnp.int32), *scales


def float64(q, k_pages, v_pages, table, lengths, k_scale, v_scale, scale, window=None):
    """o and lse by the book, one sequence and head after the other."""
    q, k_pages, v_pages = (np.asarray(x).astype(np.float64) for x in (q, k_pages, v_pages))
    (B, H, d), K = q.shape, k_pages.shape[2]
    o, lse = np.zeros((B, H, d)), np.full((B, H), -np.inf)
    ones = np.ones(K)
    k_scale, v_scale = (ones if s is None else np.asarray(s, np.float64) for s in (k_scale, v_scale))
    for b, n in enumerate(np.asarray(lengths)):
        seen = slice(max(n - (window or n), 0), n)
        k, v = (x[np.asarray(table[b])].reshape(-1, K, d)[seen] for x in (k_pages, v_pages))
        for h in range(H) if n else ():
            j = h // (H // K)
            s = k[:, j] @ q[b, h] * k_scale[j] * scale
            lse[b, h] = np.log(np.exp(s - s.max()).sum()) + s.max()
            o[b, h] = np.exp(s - lse[b, h]) @ v[:, j] * v_scale[j]
    return o, lse


def window_of(case: tuple) -> int | None:
    return case[7] if len(case) > 7 else None


@pytest.mark.parametrize("name",
                         [n if n in SOME else pytest.param(n, marks=pytest.mark.slow) for n in SIMULATED])
def test_simulated_it_equals_float64(name):
    args, window = operands(*SIMULATED[name]), window_of(SIMULATED[name])
    attend = jax.jit(functools.partial(api.attention_and_lse, scale=0.2, backend="pallas", window=window,
                                       interpret=INTERPRET))
    (o, lse), (want, want_lse) = attend(*args), float64(*args, 0.2, window)
    np.testing.assert_allclose(lse, want_lse, atol=2e-5)
    np.testing.assert_allclose(np.asarray(o, np.float64), want, atol=8e-3, rtol=8e-3)
    np.testing.assert_array_equal(np.asarray(o, np.float64)[np.asarray(args[4]) == 0], 0)


def shapes(B=128, H=32, K=8, d=128, page=16, pages=512, dtype=E4M3) -> tuple:
    S = jax.ShapeDtypeStruct
    cache, scale = S((B * pages, page, K, d), dtype), S((K,), jnp.float32) if dtype == E4M3 else None
    return S((B, H, d), BF16), cache, cache, S((B, pages), jnp.int32), S((B,), jnp.int32), scale, scale


def lower(args, **options):
    f = jax.jit(functools.partial(api.decode_attention, backend="pallas", **options))
    return f.trace(*args).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(H=14, K=2, d=64),
        pytest.param(dict(H=14, K=2, d=64, dtype=BF16), marks=pytest.mark.slow),
        pytest.param(dict(page=128), marks=pytest.mark.slow),
        pytest.param(dict(H=80, K=2, dtype=BF16), marks=pytest.mark.slow),
        pytest.param(dict(B=1, H=4, K=1, d=64, dtype=BF16), marks=pytest.mark.slow),
        dict(H=4, K=1, d=256),
        pytest.param(dict(H=4, K=1, d=256, dtype=BF16), marks=pytest.mark.slow),
        pytest.param(dict(H=8, K=4, d=256, dtype=BF16, page=64), marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("window", [None, pytest.param(512, marks=pytest.mark.slow)])
def test_it_lowers_for_cuda(options, window):
    lower(shapes(**options), window=window)


@hypothesis.given(
    lengths=strategies.lists(strategies.integers(0, 90), min_size=1, max_size=3),
    window=strategies.integers(1, 100), traced=strategies.booleans())
@hypothesis.settings(max_examples=12)
def test_a_window_sees_what_a_sequence_of_its_last_keys_is(lengths, window, traced):
    """The law of windows, in the reference: the keys before the window have no effect, whatever they hold."""
    args = operands(lengths, 4, 2, 16, 8, jnp.float32, window=window)
    reach = jnp.int32(window) if traced else window
    o, lse = jax.jit(functools.partial(api.attention_and_lse, backend="reference"))(*args, window=reach)
    want, want_lse = float64(*args, 16**-0.5, window)
    chex.assert_trees_all_close((o, lse), (want.astype(np.float32), want_lse.astype(np.float32)), atol=2e-5)


@pytest.mark.parametrize("window", [None, 100])
def test_the_deal_holds_every_chunk_once_and_evenly(window):
    rng = np.random.default_rng(0)
    lengths = (rng.integers(0, 1400, 40) * rng.integers(0, 2, 40)).astype(np.int32)
    starts = np.maximum(lengths - (window or 1400), 0)
    for passes, workers in ((1, 8), (2, 5), (1, 400)):
        made = deal(jnp.asarray(lengths, jnp.int32), passes, workers, None if window is None else starts)
        ends, size = -(-lengths // KEYS), CHUNK * KEYS
        chunks = np.repeat(-(-lengths // size) - starts // size, passes)
        np.testing.assert_array_equal(np.diff(made.begins), chunks)
        np.testing.assert_array_equal(np.diff(made.tiles), np.repeat(ends - starts // KEYS, passes))
        stretch = np.asarray(begin_of(jnp.arange(workers + 1), made.begins[-1], workers))
        assert stretch[0] == 0 and stretch[-1] == chunks.sum() and np.ptp(np.diff(stretch)) <= 1
        row_of = np.append(np.repeat(np.arange(len(chunks)), chunks), len(chunks))
        np.testing.assert_array_equal(made.first, row_of[stretch])
        assert chunks.sum() <= places(len(lengths), 1400, passes)


def test_a_sequences_bits_do_not_depend_on_the_others():
    """Alone, and behind others that move its chunks to other workers."""
    q, k, v, table, lengths, *scales = operands([70, 600], 4, 2, 64, 16, E4M3)
    attend = jax.jit(functools.partial(api.attention_and_lse, scale=0.2, backend="pallas",
                                       interpret=INTERPRET))
    (o, lse), (alone, its_lse) = attend(q, k, v, table, lengths, *scales), attend(
        q[1:], k, v, table[1:], lengths[1:], *scales)
    np.testing.assert_array_equal(o[1].view(jnp.uint16), alone[0].view(jnp.uint16))
    np.testing.assert_array_equal(lse[1], its_lse[0])


def test_what_joins_the_chunks_quantises():
    q, k, v, table, lengths, *scales = operands([60, 0, 300], 4, 1, 128, 64, E4M3)
    how = dict(scale=0.2, backend="pallas", interpret=INTERPRET)
    o = jax.jit(functools.partial(api.decode_attention, **how))(q, k, v, table, lengths, *scales)
    codes, scale = jax.jit(functools.partial(api.attention_quantize, amax_floor=1e-10, **how))(
        q, k, v, table, lengths, *scales)
    want, want_scale = quantize_rows(o.reshape(3, -1))
    np.testing.assert_array_equal(codes.view(jnp.uint8), want.view(jnp.uint8))
    np.testing.assert_array_equal(scale, want_scale.T)


def like(x, shape=None, dtype=None):
    return jax.ShapeDtypeStruct(shape or x.shape, dtype or x.dtype)


def bad(name: str):
    q, k, v, table, lengths, ks, vs = shapes()
    return {
        "heads": ((like(q, (128, 30, 128)), k, v, table, lengths, ks, vs), "K divides H"),
        "sizes": ((like(q, (128, 32, 64)), k, v, table, lengths, ks, vs),
                  r"q bfloat16\[128, 32, 64\].*q \[B, H, d\]"),
        "types": ((q, k, like(v, dtype=BF16), table, lengths, ks, vs), "of one type"),
        "integers": ((q, like(k, dtype=jnp.int8), like(v, dtype=jnp.int8), table, lengths, ks, vs),
                     "floating-point types"),
        "table": ((q, k, v, like(table, (64, 512)), lengths, ks, vs),
                  r"block_table int32\[64, 512\].*\[B, max_pages\]"),
        "table's type": ((q, k, v, like(table, dtype=jnp.float32), lengths, ks, vs), "lengths are int32"),
        "lengths": ((q, k, v, table, like(lengths, (127,)), ks, vs), r"lengths \[B\]"),
        "scales": (
            (q, k, v, table, lengths, like(ks, (32,)), vs),
            r"k_scale is float32\[32\]: float32, one for each of the 8",
        ),
        "scales' type": ((q, k, v, table, lengths, ks, like(vs, dtype=BF16)), "v_scale is bfloat16"),
    }[name]


@pytest.mark.parametrize("backend", ["pallas", "reference"])
@pytest.mark.parametrize(
    "name", ["heads", "sizes", "types", "integers", "table", "table's type", "lengths", "scales",
             "scales' type"]
)
def test_bad_operands_are_errors_at_trace_time(name, backend):
    args, message = bad(name)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(functools.partial(api.decode_attention, backend=backend), *args)


def test_what_the_kernel_does_not_take_is_an_error():
    for options, message in (
        (dict(dtype=jnp.float16),
         "q bfloat16, pages float16: the kernel takes .* pages of their type or E4M3"),
        (dict(d=96), "heads of 96: the kernel has 64, 128 and 256"),
        (dict(page=48), "pages of 48 tokens: the kernel has 8, 16, 32 and multiples of 64"),
        (dict(H=72, K=1), "72 queries a KV head: the kernel has up to 64"),
    ):
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(functools.partial(api.decode_attention, backend="pallas"), *shapes(**options))
        jax.eval_shape(functools.partial(api.decode_attention, backend="reference"), *shapes(**options))
    for scale in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="a finite number above 0"):
            jax.eval_shape(functools.partial(api.decode_attention, scale=scale), *shapes())
    for window in (0, 1.5, True):
        with pytest.raises(ValueError, match="a query sees at least one key, its own"):
            jax.eval_shape(functools.partial(api.decode_attention, window=window), *shapes())
    for slots, message in ((12, "shared memory"),
                           (1, "a ring has 2 slots or more, those of a turn, and 16 at most")):
        with pytest.raises(ValueError, match=message):
            lower(shapes(), tiles=api.Tiles(slots=slots))


def test_the_reference_equals_float64():
    args = operands([0, 33, 16], 6, 2, 64, 16, E4M3)
    attend = jax.jit(functools.partial(api.attention_and_lse, backend="reference"))
    (o, lse), (want, want_lse) = attend(*args), float64(*args, 64**-0.5)
    np.testing.assert_allclose(lse, want_lse, atol=2e-6)
    np.testing.assert_allclose(np.asarray(o, np.float64), want, atol=1e-3, rtol=4e-3)


def test_a_step_of_the_embedded_engine_takes_it():
    cfg = ModelConfig("Qwen3ForCausalLM", 97, 256, 512, 2, 8, 2, 64, 256)
    params = jax.eval_shape(lambda: init_params(cfg, jax.random.key(0), BF16))
    for attention, tokens, kernels in (("pallas", 1, 2), ("pallas", 16, 0), ("xla", 1, 0)):
        precision = Precision.uniform(2, "bfloat16", kv=KvFormat(fp8=True), attention=attention)
        cache = jax.eval_shape(lambda precision=precision: init_cache(cfg, 3, 96, precision))
        new = jax.ShapeDtypeStruct((3, tokens), jnp.int32)
        step = jax.jit(forward_cached, static_argnums=(1, 5)).trace(params, cfg, new, new, cache, precision)
        assert step.lower(lowering_platforms=("cuda",)).as_text().count("mosaic_gpu_v2") == kernels


GEMMA = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 97, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 64, "max_position_embeddings": 64, "sliding_window": 7, "_sliding_window_pattern": 3,
    "query_pre_attn_scalar": 20, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
}


@pytest.mark.parametrize("change", [{}, {"sliding_window": 64}], ids=["windows", "a window that holds all"])
def test_a_step_over_pages_equals_one_over_the_whole_cache_in_layers_with_and_without_windows(change,
                                                                                              monkeypatch):
    """By the kernel's reference, as there is no GPU here: the windows that the step gives it are right."""
    windows = []
    monkeypatch.setattr(kv_cache.paged, "decode_attention", functools.partial(_by_reference, windows))
    cfg = ModelConfig.from_hf(GEMMA | change)
    assert len(cfg.kinds) == 2
    params = init_params(cfg, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 24), 0, 97)
    places, found = jnp.broadcast_to(jnp.arange(24), (2, 24)), []
    for attention in ("xla", "pallas"):
        step = jax.jit(functools.partial(forward_cached, cfg=cfg,
                                         precision=Precision.uniform(3, attention=attention)))
        cache = init_cache(cfg, 2, 24, Precision.uniform(3))
        for t in range(24):
            now = slice(t, t + 1)
            hidden, cache = step(params, tokens_BT=tokens[:, now], positions_BT=places[:, now], cache=cache)
        found.append(hidden)
    assert {window is None for window in windows} == {change != {}}
    chex.assert_trees_all_close(*found, rtol=1e-5, atol=1e-5)


def _by_reference(windows: list, *args, window, scale, dealt, first_page, backend):
    assert backend == "pallas"
    windows.append(window)
    return api.attention_and_lse(*args, window=window, scale=scale, first_page=first_page,
                                 backend="reference")[0]


def test_an_operand_that_a_loop_writes_over_is_seen_in_machine_code(monkeypatch):
    """Of the loop over tiles as ptxas 13.0 made it: queries that are the same for all tiles, in the registers
    that then get exponentials. Written again before the product, they are right."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "sm90a")
    from machine_code import overwritten_operands

    query, product, p = ("IMAD.MOV.U32 R93, RZ, RZ, R21 ;",
                         "HGMMA.64x64x16.F32.BF16 R24, R92, gdesc[UR8], R24 ;",
                         "F2FP.BF16.F32.PACK_AB R93, R98, R93 ;")
    of_p = product.replace("R24", "R56")
    loop = lambda *lines: "\n".join((query, ".L_x_37:", *lines, "@!P2 BRA `(.L_x_37) ;", "EXIT ;"))
    assert overwritten_operands(loop(product, p, of_p)) == [product]
    assert not overwritten_operands(loop(query, product, p, of_p))
    assert not overwritten_operands(loop(product, p))  # p is for the next turn


PACKED = {  # name: (lengths, query heads, KV heads, d, type of the cache, window)
    "fp8, two heads of a group of two": ([70, 0, 19], 4, 2, 64, E4M3, None),
    "bfloat16, one head": ([300, 3], 4, 1, 64, BF16, None),
    "a window": ([70, 19], 4, 2, 64, E4M3, 30),
}


@pytest.mark.parametrize("name", [n if n.startswith("fp8") else pytest.param(n, marks=pytest.mark.slow)
                                  for n in PACKED])
def test_a_packed_token_has_the_bits_of_a_decoded_one(name):
    lengths, H, K, d, dtype, window = PACKED[name]
    rng, N = np.random.default_rng(1), sum(lengths) + 3
    # padding around them
    ends = np.concatenate([[0], *(np.arange(1, n + 1) for n in lengths), [0, 0]]).astype(np.int32)
    q = jnp.asarray(rng.standard_normal((N, H, d)), BF16)
    k, v = (jnp.asarray(rng.standard_normal((N, K, d)), jnp.float32).astype(dtype) for _ in range(2))
    scales = [jnp.asarray(rng.uniform(0.5, 2, K), jnp.float32) for _ in range(2)]
    # a worker fills its slots more than once, which the simulator takes for a race, as above
    how = dict(scale=0.2, window=window, interpret=plgpu.InterpretGPUParams(), backend="pallas")
    o = jax.jit(functools.partial(packed.attention, longest=max(lengths), **how))(q, k, v, ends, *scales)
    assert not np.asarray(o, np.float32)[ends == 0].any()

    some = [i for i in range(N) if ends[i] in (1, 2, 17, 64, 65, max(lengths))]
    pages = -(-max(lengths) // 16)
    padded = [jnp.pad(x, ((0, 16 * pages), (0, 0), (0, 0))) for x in (k, v)]
    k_pages, v_pages = (jnp.concatenate([x[i - ends[i] + 1 :][: 16 * pages].reshape(pages, 16, K, d)
                                         for i in some])
                        for x in padded)
    table = jnp.arange(len(some) * pages, dtype=jnp.int32).reshape(len(some), -1)
    want = jax.jit(functools.partial(api.decode_attention, **how))(
        q[np.array(some)], k_pages, v_pages, table, jnp.asarray(ends[some]), *scales)
    np.testing.assert_array_equal(np.asarray(o, np.float32)[some], np.asarray(want, np.float32))
    by_reference = jax.jit(functools.partial(packed.attention, longest=max(lengths),
                                             **how | {"backend": "reference"}))(
        q, k, v, ends, *scales)
    np.testing.assert_allclose(np.asarray(o, np.float32), np.asarray(by_reference, np.float32), atol=8e-3,
                               rtol=8e-3)


@pytest.mark.slow
def test_sequences_that_do_not_fit_show():
    q, k = jnp.ones((32, 2, 64), BF16), jnp.ones((32, 1, 64), BF16)
    attend = lambda ends, longest: packed.attention(q, k, k, jnp.asarray(ends, jnp.int32), jnp.ones(1),
                                                    jnp.ones(1),
                                                    longest=longest, backend="pallas",
                                                    interpret=plgpu.InterpretGPUParams())
    # one is longer than `longest`
    assert np.isnan(np.asarray(attend(np.arange(1, 33), 16), np.float32)).all()
    assert np.isnan(np.asarray(attend(np.ones(32), 16), np.float32)).all()  # 32 pages, and 64 places
