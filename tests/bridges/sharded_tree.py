"""Trees on eight devices become the bytes that they become on one, no device ever holds a whole big leaf, and
a Trainer updates them where they are. Run by test_tree_source.py in a process of its own."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bridges.sources.tree_source import To, TreeSource
from bridges.transports.safetensors_file import host_array
from jaxfp8rl import Sample, Trainer, losses, pack

D, H, K, F, L, V = 8, 4, 2, 16, 4, 24
EXAMPLES = 40 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 4  # each compiles for eight devices
MESH = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("a", "b"))
SPECS = [P(), P("a"), P("b"), P(("a", "b")), P(None, "a"), P(None, "b"), P("b", "a"), P(None, None, "b"),
         P("a", None, "b")]
SHAPES = {"embed": (V, D), "q": (L, D, H, K), "kv": (2, H, D, K), "gate": (L, D, F), "up": (L, D, F),
          "norm": (L, D)}
MAPPING = {
    "embed": ["model.embed_tokens.weight", "lm_head.weight"],
    "q": To("model.layers.*.q_proj.weight", axes="d h k -> (h k) d"),
    "kv": To(["model.k.weight", "model.v.weight"], axes="c h d k -> (c h k) d", split=(H * K, H * K)),
    ("gate", "up"): To("model.layers.*.gate_up_proj.weight", axes="i o -> o i"),
    "norm": "model.layers.*.norm.weight",
}
TREE = {name: jax.random.normal(jax.random.key(i), shape) for i, (name, shape) in enumerate(SHAPES.items())}
LEAF = L * D * F * 4  # bytes of the biggest leaves


def fits(spec: P, shape: tuple[int, ...]) -> bool:
    sizes = [np.prod([MESH.shape[x] for x in ((axis,) if isinstance(axis, str) else axis or ())])
             for axis in spec]
    return len(spec) <= len(shape) and all(n % size == 0 for n, size in zip(shape, sizes))


placed = st.fixed_dictionaries({name: st.sampled_from([s for s in SPECS if fits(s, shape)])
                                for name, shape in SHAPES.items()})


@given(placed, st.sampled_from([{}, {"weights": "bfloat16"},
                                {"weights": "fp8_e4m3_128x128", "dtype": "bfloat16"}]))
@settings(max_examples=EXAMPLES, deadline=None, derandomize=True)
def same_bytes(specs: dict[str, P], how: dict) -> None:
    split = {name: jax.device_put(x, NamedSharding(MESH, specs[name])) for name, x in TREE.items()}
    one, many = TreeSource(TREE, MAPPING, **how), TreeSource(split, MAPPING, **how)
    assert one.manifest() == many.manifest()
    for (name, want), (same_name, got) in zip(one, many, strict=True):
        assert name == same_name
        np.testing.assert_array_equal(host_array(want).view(np.uint8), host_array(got).view(np.uint8))


def no_device_holds_a_whole_leaf() -> None:
    """Of the stacked leaves one layer, and of the keys and values one half, is all that is on one device."""
    for name, spec in {"gate": P(None, "a", "b"), "kv": P(None, "b")}.items():
        leaf = jax.device_put(np.asarray(TREE[name]), NamedSharding(MESH, spec))
        to = {"gate": To("layers.*.gate.weight", axes="i o -> o i"), "kv": MAPPING["kv"]}[name]
        before = {id(x) for x in jax.live_arrays()}
        for _, tensor in TreeSource({name: leaf}, {name: to}):
            on_one = [x for x in jax.live_arrays() if id(x) not in before and len(x.sharding.device_set) == 1]
            assert tensor.nbytes < leaf.nbytes and max(x.nbytes for x in on_one) <= tensor.nbytes


class Split:
    """A model of two matrices, over the devices of a mesh or on one."""

    def __init__(self, specs: dict[str, P | None]):
        drawn = {name: jax.random.normal(jax.random.key(i), (16, 16)) for i, name in enumerate(specs)}
        self.params = {name: x if specs[name] is None else jax.device_put(x, NamedSharding(MESH, specs[name]))
                       for name, x in drawn.items()}

    def logprobs(self, params, batch):
        return losses.logits_logprobs(jnp.tanh(params["a"][batch.tokens] @ params["b"]), batch.tokens)

    def source(self, params):
        return TreeSource(params)


def updates_in_place() -> None:
    rng, specs = np.random.default_rng(0), {"a": P("b"), "b": P(None, "a")}
    batch = pack([Sample([1], rng.integers(1, 16, 3), -rng.uniform(1, 4, 3).astype(np.float32), rng.normal())
                  for _ in range(8)], 16, 2, 2)
    one, many = (Trainer(Split(s), optimizer=optax.adam(0.1)) for s in (dict.fromkeys(specs), specs))
    for _ in range(2):
        np.testing.assert_allclose(one.update(batch)["loss"], many.update(batch)["loss"], rtol=1e-5)
    assert {name: x.sharding.spec for name, x in many.params.items()} == specs
    assert one._update._cache_size() == many._update._cache_size() == 1
    for name, x in many.params.items():
        np.testing.assert_allclose(np.asarray(x), one.params[name], atol=1e-4)


if __name__ == "__main__":
    assert jax.device_count() == 8
    same_bytes()
    no_device_holds_a_whole_leaf()
    updates_in_place()
    replicated = jax.device_put(jnp.ones((3, 2)), NamedSharding(MESH, P()))
    rows = [x for _, x in TreeSource({"a": replicated}, {"a": "layers.*.a"})]
    assert len({id(row.stack) for row in rows}) == 1
    assert rows[0].stack.sharding.device_set == {jax.devices()[0]}
    print("all equal")
