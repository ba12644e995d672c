"""Low-rank adapters: y = W x + s B A x with W frozen (LoRA, Hu et al. 2021, arXiv 2106.09685, section 4.1).

In a tree of layers they stand apart from the weights: `{"lora": {"self_attn": {"q_proj": {"lora_A" [L, r, K],
"lora_B" [L, N, r]}}}}`. A layer joins the two (`with_adapters`).

An adapter takes the linear's input before the input is quantised, rounded to the adapter's type. It rounds
where vLLM's adapters do: A x to that type, s B to that type, and the sum with W x to the type of W x.

An engine may hold several adapters: A [L, slots * r, K] and B [L, N, slots * r] one behind the other, and
"chosen" [L, B, T], the slot of each token (`choosing`). What the other slots give of A x is zeroed before B.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxfp8rl.precision.linear import linear_in, round_to
from jaxfp8rl.precision.records import AdapterProduct, Precision
from jaxfp8rl.precision.weights import QuantizedWeight
from pallas_kernels.quantize import reference as q

LORA, A, B, CHOSEN = "lora", "lora_A", "lora_B", "chosen"


def has_adapter(module: dict[str, Any]) -> bool:
    """Whether the weights of a linear have an adapter beside them."""
    return LORA in module


def is_adapter(path: tuple[Any, ...]) -> bool:
    """Whether the key path of a leaf leads through the adapters."""
    return any(getattr(key, "key", None) == LORA for key in path)


def with_adapters(weights: dict[str, Any]) -> dict[str, Any]:
    """A layer's weights with each adapter beside the weight that it belongs to, under "lora"."""
    adapters, joined = weights.get(LORA, {}), dict(weights)
    chosen = {CHOSEN: adapters[CHOSEN]} if CHOSEN in adapters else {}
    for part in adapters.keys() - {CHOSEN}:
        joined[part] = weights[part] | {name: weights[part][name] | {LORA: pair | chosen}
                                        for name, pair in adapters[part].items()}
    return joined


def choosing(policy: dict[str, Any], slots_BT: Array) -> dict[str, Any]:
    """The policy of an engine that holds several adapters, for tokens that have those in `slots_BT`."""
    def of(stack: dict[str, Any]) -> dict[str, Any]:
        layers = len(stack["input_layernorm"]["weight"])
        chosen = jnp.broadcast_to(slots_BT, (layers, *slots_BT.shape))
        return {**stack, LORA: {**stack[LORA], CHOSEN: chosen}}

    return {**policy, "layers": tuple(map(of, policy["layers"]))}


def adapted(y: Array, x: Array, pair: dict[str, Array], precision: Precision) -> Array:
    """y [..., N] + s B A x, for x [..., K] and a pair of lora_A [r, K] and lora_B [N, r], in the type of
    y."""
    product = precision.adapters
    assert product is not None  # a policy with adapters comes with the precision of adapters
    down = linear_in(product.dtype, x, pair[A])
    if product.slots > 1:
        slot = jnp.arange(down.shape[-1]) // (down.shape[-1] // product.slots)
        down = jnp.where(slot == pair[CHOSEN][..., None], down, 0)
    up = linear_in(product.dtype, down, product.scale * pair[B].astype(jnp.float32))
    return (y.astype(jnp.float32) + up.astype(jnp.float32)).astype(y.dtype)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["base", "a", "b"], meta_fields=["product"])
@dataclasses.dataclass(frozen=True)
class MergedWeight:
    """W + s B A of a stack of layers, computed when rows of it are asked for.

    base: W [L, N, K] as the policy has it. a, b: [L, r, K] and [L, N, r] in the adapters' type.
    """

    base: Array | QuantizedWeight
    a: Array
    b: Array
    product: AdapterProduct

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.codes.shape if isinstance(self.base, QuantizedWeight) else self.base.shape

    @property
    def dtype(self) -> None:
        """None: it is not there in any type."""

    @property
    def delta(self) -> Array:
        """s B A, float32 [L, N, K], of A and s B as a product of adapters rounds them."""
        b = round_to(self.product.scale * self.b.astype(jnp.float32), self.product.dtype)
        return jnp.einsum("lnr,lrk->lnk", b, self.a.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)

    def rows(self, first: Array, count: int) -> MergedWeight:
        """The layers [first, first + count)."""
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, count), self)

    def made(self, dtype: str, fp8: bool) -> Array | QuantizedWeight:
        """The sum, taken in float32, as it is published: in `dtype`, or from `dtype` in FP8. A base that has
        only codes is not rounded to `dtype` between."""
        if isinstance(self.base, QuantizedWeight):
            return QuantizedWeight.of(q.dequantize_blocks(*self.base) + self.delta)
        summed = round_to(self.base.astype(jnp.float32) + self.delta, dtype).astype(dtype)
        return QuantizedWeight.of(summed) if fp8 else summed

    def lost(self, dtype: str, fp8: bool) -> tuple[Array, Array]:
        """(squares of what the published sum lacks of W + s B A, squares of s B A), each summed over all
        numbers, float32. W is the base as it would be published without adapters."""
        made = self.made(dtype, fp8)
        base = QuantizedWeight.of(self.base) if fp8 and not isinstance(self.base,
                                                                       QuantizedWeight) else self.base
        whole = lambda w: q.dequantize_blocks(*w) if isinstance(w, QuantizedWeight) else w.astype(jnp.float32)
        delta = self.delta
        return jnp.sum((whole(made) - whole(base) - delta) ** 2), jnp.sum(delta**2)


def merged_policy(policy: dict[str, Any], product: AdapterProduct) -> dict[str, Any]:
    """A policy with a MergedWeight in place of each weight that has an adapter."""

    def merged(stack: dict[str, Any]) -> dict[str, Any]:
        joined = with_adapters(stack)
        for part, modules in joined.pop(LORA).items():
            for name in modules:
                pair = joined[part][name].pop(LORA)
                joined[part][name]["weight"] = MergedWeight(joined[part][name]["weight"], pair[A], pair[B],
                                                            product)
        return joined

    return {**policy, "layers": tuple(map(merged, policy["layers"]))}
