"""What is asked of hardware is refused where it is not there, and where the kernels are not for the model."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from bridges.api import EngineFormats
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.models import few_rows
from jaxfp8rl.models.config import Experts, ModelConfig
from jaxfp8rl.policy import hardware
from jaxfp8rl.policy.hardware import attention_of, computed_by, decode_note, products_of
from jaxfp8rl.precision.layer_runs import LayerRun
from jaxfp8rl.precision.recipe import get_recipe, resolve
from jaxfp8rl.precision.records import EngineRounding, KvFormat, Precision
from pallas_kernels.plgpu_compat import device, multiprocessors, use_kernel

MODEL = ModelConfig.from_hf({
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 64, "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64, "tie_word_embeddings": True, "rope_theta": 1e4, "hidden_act": "silu",
    "attention_bias": False,
})
FP8 = {"weights": "fp8_e4m3_128x128", "activations": "fp8_e4m3_1x128"}


class Gpu:
    platform, device_kind, core_count = "gpu", "a GPU", 114

    def __init__(self, capability):
        self.compute_capability = capability


@pytest.mark.parametrize(
    ("capability", "dtype", "taken"),
    [("9.0", "bfloat16", "pallas"), ("9.0", "float32", "pallas"), ("9.0", "float16", "tensor_core"),
     ("10.0", "bfloat16", "tensor_core"), ("8.9", "bfloat16", "tensor_core"), ("8.0", "bfloat16", "float32")],
)
def test_auto_takes_the_best_products_there_are(monkeypatch, capability, dtype, taken):
    monkeypatch.setattr("jaxfp8rl.policy.hardware.device", lambda: Gpu(capability))
    assert products_of("auto", dtype) == products_of(taken, dtype) == taken
    if taken != "pallas":
        no_hopper = "needs a Hopper GPU .*this is a GPU"
        why = "no results in precision.compute_dtype" if dtype == "float16" else no_hopper
        with pytest.raises(ConfigError, match=why):
            products_of("pallas", dtype)


def test_on_a_cpu_products_are_in_float32():
    assert products_of("auto", "bfloat16") == "float32"
    with pytest.raises(ConfigError, match="needs a GPU with FP8 tensor cores; this is cpu"):
        products_of("tensor_core", "bfloat16")


@pytest.mark.parametrize(
    ("dtype", "head_dim", "message"),
    [("float32", 64, "needs bfloat16 or float16, but precision.compute_dtype is .float32"),
     ("bfloat16", 96, "heads of size 64, 128 and 256.*size 96"),
     ("float16", 128, "needs a Hopper GPU .capability 9.0.; this is cpu")],
)
def test_attention_by_kernels_says_what_it_needs_and_auto_leaves_it(dtype, head_dim, message):
    model = dataclasses.replace(MODEL, head_dim=head_dim)
    with pytest.raises(ConfigError, match=message):
        attention_of("pallas", dtype, model)
    assert attention_of("auto", dtype, model) == attention_of("xla", dtype, model) == "xla"


@pytest.mark.parametrize(("capability", "taken"), [("9.0", "pallas"), ("10.0", "xla"), ("8.0", "xla")])
def test_auto_takes_the_kernels_attention_on_hopper(monkeypatch, capability, taken):
    monkeypatch.setattr("jaxfp8rl.policy.hardware.device", lambda: Gpu(capability))
    assert attention_of("auto", "bfloat16",
                        MODEL) == taken and attention_of("xla", "bfloat16", MODEL) == "xla"


def test_attention_of_either_kind_rounds_as_the_engines_does():
    formats = EngineFormats(**FP8, kv_cache="fp8_e4m3", compute="bfloat16", attention="fp8_e4m3")
    runs = (LayerRun(0, 1, frozenset()),)
    resolved = lambda recipe, attention: resolve(get_recipe(recipe), runs, formats, "bfloat16", "bfloat16",
                                                 attention=attention)
    for attention in ("xla", "pallas"):
        unified = resolved("fp8_unified", attention)
        assert unified.kv.attention_fp8 and unified.attention == attention
        assert not resolved("fp8_rollout", attention).kv.attention_fp8  # its learner does not round at all


FP8_RUNS = (LayerRun(0, 1, frozenset({"o_proj"})),)
MOE = dataclasses.replace(MODEL, experts=Experts(4, 2, 96, True))
SAID = {  # name: (capability, precision, model, what a run says)
    "all by kernels": (
        "9.0", Precision(FP8_RUNS, products="pallas", attention="pallas"), MODEL,
        'learner: FP8 products by "pallas", attention by "pallas", log-probabilities by "pallas"'),
    "no Hopper GPU": (
        "8.9", Precision(FP8_RUNS, products="tensor_core"), MODEL,
        'learner: FP8 products by "tensor_core", attention by "xla", log-probabilities by "xla" '
        '("pallas" needs a Hopper GPU (capability 9.0); this is a GPU)'),
    "no Hopper GPU, which is the one reason": (
        "8.9", Precision.uniform(1, "float32"), MODEL,
        'learner: attention by "xla", log-probabilities by "xla" '
        '("pallas" needs a Hopper GPU (capability 9.0); this is a GPU)'),
    "heads of 96, a width of 100": (
        "9.0", Precision.uniform(1, "bfloat16"), dataclasses.replace(MODEL, head_dim=96, hidden_size=100),
        'learner: attention by "xla" ("pallas" supports heads of size 64, 128 and 256, but the model\'s '
        'heads have size 96), log-probabilities by "xla" ("pallas" takes widths in multiples of '
        '64, not 100)'),
    "what was asked for": (
        "9.0", Precision.uniform(1, "bfloat16", attention="xla"), MODEL,
        'learner: attention by "xla", log-probabilities by "pallas"'),
    "float32": (
        "9.0", Precision.uniform(1, "float32"), MODEL,
        'learner: attention by "xla" ("pallas" needs bfloat16 or float16, but precision.compute_dtype is '
        '"float32"), log-probabilities by "xla" ("pallas" takes bfloat16 or float16, not float32)'),
    "experts of odd width": (
        "9.0", Precision.uniform(1, "bfloat16", attention="pallas", products="pallas"), MOE,
        'learner: attention by "pallas", log-probabilities by "pallas", '
        'experts by "xla, 128 rows at a time" ("pallas" takes '
        "widths in multiples of 128, not 96)"),
    "experts in float16": (
        "9.0", Precision.uniform(1, "float16", attention="pallas", products="tensor_core"), MOE,
        'learner: attention by "pallas", log-probabilities by "pallas", '
        'experts by "xla, 128 rows at a time" ("pallas" takes '
        "bfloat16, not float16)"),
    "experts in FP8": (
        "9.0", Precision(FP8_RUNS, products="pallas", attention="pallas", gradients="e4m3"), MOE,
        'learner: FP8 products by "pallas", attention by "pallas", log-probabilities by "pallas", '
        'experts by "pallas"'),
    "experts in FP8 whose gradients are not": (
        "9.0", Precision(FP8_RUNS, products="pallas", attention="pallas"), MOE,
        'learner: FP8 products by "pallas", attention by "pallas", log-probabilities by "pallas", experts '
        'in high precision by "xla, 128 rows at a time" ("pallas" takes widths in multiples of '
        '128, not 96)'),
}


@pytest.mark.parametrize("name", SAID)
def test_a_run_says_what_computes_and_why_not_by_kernels(monkeypatch, name):
    capability, precision, model, said = SAID[name]
    monkeypatch.setattr("jaxfp8rl.policy.hardware.device", lambda: Gpu(capability))
    precision = dataclasses.replace(precision, rounding=EngineRounding(precision.compute_dtype))
    assert computed_by(precision, model) == said


def test_a_run_says_what_a_filter_costs(monkeypatch):
    monkeypatch.setattr("jaxfp8rl.policy.hardware.device", lambda: Gpu("9.0"))
    precision = Precision.uniform(1, "bfloat16", attention="pallas", rounding=EngineRounding("bfloat16"))
    assert computed_by(precision, MODEL, support=True) == (
        'learner: attention by "pallas", log-probabilities by "xla" ("pallas" does not implement a support)')


def test_a_run_says_where_the_engines_roundings_are_not_mirrored():
    said = computed_by(Precision.uniform(1, "float32", rounding=EngineRounding("bfloat16")), MODEL)
    assert "the learner computes in float32 and does not mirror" in said
    assert 'precision.compute_dtype = "bfloat16"' in said


def test_of_several_platforms_the_first_is_named(monkeypatch):
    """With JAX_PLATFORMS=cpu,cuda arrays lie on the CPU, and so do the references that "auto" means there."""
    monkeypatch.setattr(hardware, "_platforms", lambda: "cpu,cuda")
    with pytest.raises(ConfigError, match="this is cpu, the first of JAX_PLATFORMS = cpu,cuda"):
        products_of("pallas", "bfloat16")


def test_where_a_computation_runs_is_asked_of_its_mesh_and_of_the_default_device(monkeypatch):
    """Not of the first of all devices, which another process may have."""
    here, asked = jax.local_devices()[0], []
    monkeypatch.setattr("jax.devices", lambda *_: pytest.fail("devices of all processes"))
    assert device() == here
    with jax.default_device("cpu"):
        assert device() == here
    with jax.default_device(here):
        assert device() == here
    gpu, local = Gpu("9.0"), jax.local_devices
    monkeypatch.setattr("jax.local_devices", lambda backend=None: [gpu] if backend == "gpu" else local())
    mesh = AbstractMesh((2,), ("data",), (AxisType.Auto,),
                        abstract_device=AbstractDevice("a GPU", 114, "gpu"))

    def f(x):
        asked.append((device(), multiprocessors(), use_kernel("auto")))
        return x

    run = jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    jax.jit(run).trace(jax.ShapeDtypeStruct((4,), "float32"))
    assert asked == [(gpu, 114, True)] and not use_kernel("auto")


@pytest.mark.parametrize("engine, attention, fp8, noted", [
    ("jax", "pallas", False, False), ("jax", "pallas", True, True), ("jax", "xla", True, False),
    ("vllm", "pallas", True, False),
])
def test_a_run_says_where_its_embedded_engine_decodes_by_xla(engine, attention, fp8, noted):
    cfg = load_config("demo", ["--run.dir", "unused", "--rollout.engine", engine])
    precision = Precision.uniform(1, "bfloat16", attention=attention, kv=KvFormat(attention_fp8=fp8))
    note = decode_note(cfg, precision, MODEL)
    assert ("decode attention by" in (note or "")) == noted
    if (engine, attention, fp8) == ("jax", "pallas", False):
        assert note and "0 to 0 (not in FP8: down_proj" in note


def test_a_run_says_that_its_engine_decodes_by_the_kernels_for_few_rows_or_why_not():
    cfg = load_config("demo", ["--run.dir", "unused"])
    precision = Precision((LayerRun(0, 2, frozenset(few_rows.LINEARS)),), products="pallas",
                          attention="pallas")
    model = ModelConfig("Qwen3ForCausalLM", 1024, 2048, 6144, 2, 16, 8, 128, 2048)
    assert "all layers decode by the kernels" in (decode_note(cfg, precision, model) or "")
    odd = load_config("demo", ["--run.dir", "unused", "--rollout.max_num_seqs", "12"])
    assert "0 to 1 (12 rows, which 8 does not divide)" in (decode_note(odd, precision, model) or "")
