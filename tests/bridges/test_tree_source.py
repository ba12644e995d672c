"""TreeSource: trees of numpy, JAX, PyTorch and NNX become the same Hugging Face tensors; FP8 blocks are those
of the kernels, bit for bit."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from faulty_engine import Faults, FaultyEngine
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.processes import printed
from bridges.api import BridgeError, ManifestMismatch, ParamMeta, StackRow, WeightSource
from bridges.conformance import CHECKS, ConformanceFailed, check_engine
from bridges.engines.fake_engine import EMBED, HEAD, FakeEngine, FakeTransport
from bridges.sources.array_source import random_source
from bridges.sources.tree_source import To, TreeSource, leaves, quantize_blocks
from bridges.transports.safetensors_file import host_array
from pallas_kernels.quantize import reference

pytestmark = pytest.mark.usefixtures("quick_compile")
ROOT = Path(__file__).parents[2]
D, H, K, F, L = 8, 2, 3, 5, 3


def array(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def sent(source: TreeSource) -> dict[str, np.ndarray]:
    """What crosses, by name; the manifest says of each what it is."""
    pairs = list(source)
    assert [name for name, _ in pairs] == [m.name for m in source.manifest()]
    for m, (_, x) in zip(source.manifest(), pairs):
        assert (m.shape, m.dtype) == (tuple(x.shape), str(x.dtype).removeprefix("torch.")), m
        assert hasattr(x, "__dlpack__")
    return {name: host_array(x) for name, x in pairs}


TREE = {
    "embed": {"embedding": array(7, D)},
    "layers": [{"q": {"kernel": array(D, H, K, seed=i)}, "norm": {"scale": array(D, seed=i)}}
               for i in range(L)],
    "blocks": {"down": array(L, F, D), "qkv": array(D, L, 3 * F)},
    "count": array(),
}
MAPPING = {
    "embed.embedding": ["model.embed_tokens.weight", "lm_head.weight"],
    "layers.{i}.q.kernel": To("model.layers.{i}.self_attn.q_proj.weight", axes="d h k -> (h k) d"),
    "layers.*.norm.scale": ("model.layers.*.input_layernorm.weight", (None,)),
    "blocks.down": To("model.layers.{i}.mlp.down_proj.weight", axes="i o -> o i"),
    "blocks.qkv": To([f"model.layers.*.{x}.weight" for x in "abc"], axes="i o -> o i", stacked=(1,),
                     split=(F,) * 3),
    "count": None,
}


def torch_tree():
    torch = pytest.importorskip("torch")
    return jax.tree.map(lambda x: torch.from_numpy(np.array(x)), TREE)


def nnx_tree():
    from flax import nnx

    tree = TREE | {"layers": dict(enumerate(TREE["layers"]))}
    return nnx.State(jax.tree.map(lambda x: nnx.Param(jnp.asarray(x)), tree))


def jax_tree():
    return jax.tree.map(jnp.asarray, TREE)


@pytest.mark.parametrize("make", [lambda: TREE, jax_tree, torch_tree, nnx_tree],
                         ids=["numpy", "jax", "torch", "nnx"])
def test_any_tree_becomes_the_same_tensors(make):
    source = TreeSource(make(), MAPPING)
    assert isinstance(source, WeightSource)
    got = sent(source)
    embedding, q = TREE["embed"]["embedding"], TREE["layers"][1]["q"]["kernel"]
    want = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding,
            "model.layers.1.self_attn.q_proj.weight": q.reshape(D, H * K).T,
            "model.layers.2.input_layernorm.weight": TREE["layers"][2]["norm"]["scale"],
            "model.layers.0.mlp.down_proj.weight": TREE["blocks"]["down"][0].T,
            "model.layers.2.b.weight": TREE["blocks"]["qkv"][:, 2, F : 2 * F].T}
    for name, x in want.items():
        np.testing.assert_array_equal(got[name], x)
    assert len(got) == 2 + L * 6


def test_tunix_form_with_its_stacked_axis_and_experts():
    tree = {"layers": {"up": array(D, L, F), "experts": array(L, 4, D, F)}}
    mapping = {"layers.up": ("model.layers.*.up.weight", (None, "layer", "model")),
               "layers.experts": "model.layers.*.mlp.experts.*.up_proj.weight"}
    got = sent(TreeSource(tree, mapping))
    np.testing.assert_array_equal(got["model.layers.2.up.weight"], tree["layers"]["up"][:, 2])
    np.testing.assert_array_equal(got["model.layers.1.mlp.experts.3.up_proj.weight"],
                                  tree["layers"]["experts"][1, 3])


def test_tunix_tables_as_they_are():
    """Its entries may lack a leaf; its transposes are permutations by a leaf's last key, path or pattern."""
    tree = {"layers": {"0": {"q": {"w": array(D, H, K)}, "up": {"kernel": array(D, F)}}},
            "head": {"w": array(D, 7)}}
    mapping = {"layers.*.q.w": ("model.layers.*.q.weight", (None, "model", None)),
               "layers.*.q_bias": ("model.layers.*.q.bias", (None,)),
               "layers.*.up.kernel": ("model.layers.*.up.weight", (None, "model")),
               "head.w": ("lm_head.weight", (None, "model"))}
    axes = {"kernel": (1, 0), "head.w": (1, 0), "layers.*.w": "d h k -> (h k) d", "embedding": (1, 0)}
    got = sent(TreeSource(tree, mapping, axes=axes))
    layer = tree["layers"]["0"]
    np.testing.assert_array_equal(got["lm_head.weight"], tree["head"]["w"].T)
    np.testing.assert_array_equal(got["model.layers.0.up.weight"], layer["up"]["kernel"].T)
    np.testing.assert_array_equal(got["model.layers.0.q.weight"], layer["q"]["w"].reshape(D, H * K).T)
    assert len(got) == 3
    with pytest.raises(BridgeError, match=r"axes 'kernal': no leaf .* has this key"):
        TreeSource(tree, mapping, axes=axes | {"kernal": "i o -> o i"})
    with pytest.raises(BridgeError,
                       match=r"the permutation \(0, 2\) is not one of the axes of shape \(8, 7\)"):
        TreeSource(tree, mapping, axes=axes | {"head.w": (0, 2)})


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray, "torch"], ids=["numpy", "jax", "torch"])
def test_leaves_are_joined_to_a_fused_projection(convert):
    convert = pytest.importorskip("torch").from_numpy if convert == "torch" else convert
    parts = {"q": array(L, D, H, K), "k": array(L, D, 1, K, seed=1), "v": array(L, D, 1, K, seed=2)}
    fused = To("model.layers.*.qkv_proj.weight", axes="d h k -> (h k) d")
    got = sent(TreeSource({"layers": {name: convert(x) for name, x in parts.items()}},
                          {("layers.q", "layers.k", "layers.v"): fused}))
    for i in range(L):
        want = np.concatenate([x[i].reshape(D, -1).T for x in parts.values()])
        np.testing.assert_array_equal(got[f"model.layers.{i}.qkv_proj.weight"], want)
    listed = {"layers": [{"gate": array(D, F), "up": array(D, F, seed=1)}, {"gate": array(D, F)}],
              "a": array(2), "b": array(3)}
    with pytest.raises(BridgeError) as e:
        TreeSource(listed, {("layers.*.gate", "layers.*.up"): To("layers.*.gate_up.weight",
                                                                 axes="i o -> o i"),
                            ("a", "b"): To("a", axes="i -> i"), "c": None})
    assert "layers.1.gate (8, 5): the tree lacks the other leaves" in str(e.value)
    assert "(1 problems)" in str(e.value)


def test_one_name_for_two_tensors_and_shapes_that_cannot_be_joined():
    tree = {"a": array(2, 3), "b": array(2, 4), "c": array(5)}
    with pytest.raises(BridgeError,
                       match=r"a \(2, 3\), b \(2, 4\): shapes \(2, 3\), \(2, 4\) cannot be joined"):
        TreeSource(tree, {("a", "b"): "ab", "c": "c"})
    with pytest.raises(BridgeError, match="x: two leaves become this tensor"):
        TreeSource(tree, {"a": "x", "b": "b", "c": "x"})


def test_gemmas_fused_keys_and_values_are_read_apart():
    """Tunix's kv_einsum [2, K, D, H]: each half is cut from the leaf before its axes are moved."""
    kv = array(2, H, D, K)
    split = To(["k.weight", "v.weight"], axes="c h d k -> (c h k) d", split=(H * K, H * K))
    source = TreeSource({"kv": kv}, {"kv": split})
    got = sent(source)
    for name, x in zip(("k.weight", "v.weight"), kv):
        np.testing.assert_array_equal(got[name], x.transpose(0, 2, 1).reshape(H * K, D))
    uneven = sent(TreeSource({"kv": kv},
                             {"kv": dataclasses.replace(split, split=(K + 1, 2 * 2 * K - K - 1))}))
    np.testing.assert_array_equal(np.concatenate(list(uneven.values())), np.concatenate(list(got.values())))


@pytest.mark.slow
def test_arrays_on_several_devices():
    """tests/bridges/sharded_tree.py, which needs eight."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    quick = {"XLA_FLAGS": flags, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run([sys.executable, "-m", "tests.bridges.sharded_tree"], capture_output=True,
                          text=True, cwd=ROOT,
                          env=os.environ | quick)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "all equal"


class SplitOverProcesses:
    """What TreeSource asks of a JAX array that other processes hold parts of."""

    shape, dtype, is_fully_addressable, is_fully_replicated = (4, 2), np.dtype("float32"), False, False
    sharding = type("", (), {"device_set": (0, 1)})

    def block_until_ready(self): ...


def test_an_array_that_is_split_over_processes_is_refused():
    with pytest.raises(BridgeError, match=r"a \(4, 2\): it is split over processes.*replicate it first"):
        TreeSource({"a": SplitOverProcesses()}, {"a": "a"})


def test_a_row_of_a_jax_stack_is_not_copied():
    stack = jnp.asarray(array(L, D))
    rows = [x for _, x in TreeSource({"norm": stack}, {"norm": "model.layers.*.norm.weight"})]
    assert all(isinstance(x, StackRow) and x.stack is stack for x in rows)


def test_modules_are_walked():
    torch, nnx = pytest.importorskip("torch"), pytest.importorskip("flax.nnx")
    module = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 3)})
    assert [path for path, _ in leaves(module)] == ["a.weight", "a.bias"]
    linear = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    assert {path for path, _ in leaves({"a": linear})} == {"a.kernel", "a.bias"}
    tied = TreeSource(module, {"a.weight": "a.weight", "a.bias": None}, weights="bfloat16")
    assert next(iter(tied))[1].dtype == torch.bfloat16


def test_dtypes_of_all_of_one_and_of_none():
    tree = {"a": array(2), "b": array(2)}
    source = TreeSource(tree, {"a": "a", "b": To("b", dtype="float16")}, weights="bfloat16")
    assert [m.dtype for m in source.manifest()] == ["bfloat16", "float16"]
    np.testing.assert_array_equal(sent(source)["a"], tree["a"].astype(ml_dtypes.bfloat16))
    with pytest.raises(ValueError, match="use one type for both"):
        TreeSource(tree, {"*": "*"}, weights="float16", dtype="bfloat16")


def test_all_that_does_not_fit_is_told_at_once():
    tree = {"a": array(2, 3), "b": array(4), "c": array(4, 2), "d": array(2)}
    mapping = {"a": To("a", axes="i -> i"), "b": To("layers.*.b", stacked=(1,)),
               "c": To(["x", "y"], split=(1, 2)), "e.*": "e.*"}
    with pytest.raises(BridgeError) as e:
        TreeSource(tree, mapping)
    for line in ('a (2, 3): axes "i -> i" do not describe', "b (4,): cannot unstack axes (1,)",
                 "c (4, 2): split (1, 2) does not cut", "e.*: no leaf has this path",
                 "d (2,): the mapping has no place for it", "(5 problems)"):
        assert line in str(e.value)


def test_every_difference_from_the_expected_manifest_is_told_and_its_order_kept():
    tree = {f"w{i}": array(2, 3) for i in range(15)}
    metas = [ParamMeta(f"w{i}", "float32", (2, 3)) for i in reversed(range(15))]
    assert TreeSource(tree, {"w{i}": "w{i}"}, expected=metas).manifest() == tuple(metas)
    with pytest.raises(ManifestMismatch) as e:
        TreeSource(tree, {"w{i}": "w{i}"}, expected=[ParamMeta(m.name, "float32", (3, 2)) for m in metas])
    assert str(e.value).count("shape (2, 3) in the source, (3, 2) in the engine") == 15


def bits(x) -> np.ndarray:
    return host_array(x).view(np.uint8 if x.dtype.itemsize == 1 else np.uint32)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 2**32 - 1),
       st.sampled_from(["float32", "bfloat16", "float16"]), st.sampled_from([1e-30, 1e-9, 0.02, 1.0, 300.0]))
def test_quantised_bits_are_those_of_the_kernels(n, k, seed, dtype, scale):
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((n, k)) * scale * 2.0 ** rng.integers(-12, 5, (n, k)) * (rng.random((n, k)) > 0.1)
    w = w.astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    want = [bits(x) for x in reference.quantize_blocks(jnp.asarray(w))]
    for have in (quantize_blocks(w), quantize_blocks(jnp.asarray(w))):
        for x, y in zip(have, want):
            np.testing.assert_array_equal(bits(x), y)


def test_quantised_torch_and_broken_blocks():
    torch = pytest.importorskip("torch")
    w = array(130, 260)
    codes, scale = quantize_blocks(torch.from_numpy(w))
    assert (codes.dtype, scale.dtype, scale.shape) == (torch.float8_e4m3fn, torch.float32, (2, 3))
    np.testing.assert_array_equal(bits(codes), bits(quantize_blocks(w)[0]))
    w[0, 0], w[129, 259] = np.nan, np.inf
    for x in (w, jnp.asarray(w)):
        with np.errstate(invalid="ignore"):
            scale = np.asarray(quantize_blocks(x)[1])
        assert np.isnan(scale[0, 0]) and np.isposinf(scale[1, 2]) and np.isfinite(scale[0, 1:]).all()


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray])
def test_fp8_of_the_linears_alone(convert):
    tree = {"embed": convert(array(7, 130)), "q": convert(array(L, 130, 256)),
            "gate": convert(array(L, 130, 4))}
    mapping = {"embed": "model.embed_tokens.weight",
               "q": To("model.layers.*.q_proj.weight", axes="i o -> o i"),
               "gate": To("model.layers.*.mlp.gate.weight", axes="i o -> o i")}
    source = TreeSource(tree, mapping, weights="fp8_e4m3_128x128", dtype="bfloat16")
    metas = {m.name: m for m in source.manifest()}
    assert metas["model.layers.1.q_proj.weight"] == ParamMeta(
        "model.layers.1.q_proj.weight", "float8_e4m3fn", (256, 130), "weight", (128, 128))
    assert metas["model.layers.1.q_proj.weight_scale_inv"] == ParamMeta(
        "model.layers.1.q_proj.weight_scale_inv", "float32", (2, 2), "block_scale", (128, 128))
    assert {m.dtype for n, m in metas.items() if "q_proj" not in n} == {"bfloat16"}
    rounded = jnp.asarray(tree["q"][1], jnp.bfloat16).T
    np.testing.assert_array_equal(bits(sent(source)["model.layers.1.q_proj.weight"]),
                                  bits(reference.quantize_blocks(rounded)[0]))
    chosen = TreeSource(tree, mapping, weights="fp8_e4m3_128x128", quantize=lambda name: "gate" in name)
    assert [m.name for m in chosen.manifest() if m.role == "block_scale"] == [
        f"model.layers.{i}.mlp.gate.weight_scale_inv" for i in range(L)]


@pytest.mark.parametrize("make", [lambda: TREE, jax_tree, torch_tree], ids=["numpy", "jax", "torch"])
def test_transports_read_what_it_gives(make):
    """As vLLM's do, through a torch view, and as the embedded engine's does."""
    from bridges.sources.dlpack import torch_view
    from bridges.transports.embedded import _checked

    pytest.importorskip("torch")
    source = TreeSource(make(), MAPPING, weights="fp8_e4m3_128x128", dtype="bfloat16")
    assert {m.dtype for m in source.manifest()} == {"float8_e4m3fn", "float32", "bfloat16"}
    for m, (_, x) in zip(source.manifest(), source):
        view, taken = torch_view(x), _checked(m, m.name, x)
        assert str(view.dtype).removeprefix("torch.") == m.dtype == str(taken.dtype)
        np.testing.assert_array_equal(np.asarray(taken), host_array(view))


def test_without_jax_and_torch():
    code = """
import sys
for name in ("jax", "jaxlib", "torch", "flax", "vllm"): sys.modules[name] = None
import bridges, numpy as np
source = bridges.TreeSource({"a": [np.ones((130, 200), np.float32)]}, {"a.{i}": "layers.{i}.q_proj.weight"},
                            weights="fp8_e4m3_128x128", dtype="bfloat16")
print([(m.dtype, x.shape, str(x.dtype)) for m, (n, x) in zip(source.manifest(), source)])
"""
    codes, scales = "('float8_e4m3fn', (130, 200), 'float8_e4m3fn')", "('float32', (2, 2), 'float32')"
    assert printed(code).strip() == f"[{codes}, {scales}]"


def fake(seed: int) -> TreeSource:
    tree = dict(random_source(FakeEngine().expected_manifest(), seed, scale=1.0).arrays)
    mapping = {"table": EMBED, "head": To(HEAD, axes="d v -> v d")}
    return TreeSource({"table": tree[EMBED], "head": tree[HEAD].T}, mapping)


def test_check_engine_runs_the_whole_suite_over_a_tree():
    assert check_engine(FakeEngine(), FakeTransport(), fake) == tuple(check.__name__ for check in CHECKS)


def test_check_engine_lists_every_failure():
    with pytest.raises(ConformanceFailed) as e:
        check_engine(FaultyEngine(faults=Faults(stale_version=True, logprobs="nan")), FakeTransport(), fake)
    assert {"receipt_tells_what_crossed", "completions_come_in_order"} <= e.value.failures.keys()
    assert all(f"\n  {name}: " in str(e.value) for name in e.value.failures)
    assert set(e.value.passed) == {c.__name__ for c in CHECKS} - set(e.value.failures) and e.value.passed
