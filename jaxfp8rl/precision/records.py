"""The records that tell a forward pass how to compute and round."""

from __future__ import annotations

import dataclasses
import enum

from jaxfp8rl.precision.layer_runs import LayerRun
from pallas_kernels.quantize.reference import AMAX_FLOOR


class Products(enum.StrEnum):
    """The ways to compute FP8 products."""

    FLOAT32 = "float32"
    """XLA dequantises the operands and multiplies them in float32."""
    TENSOR_CORE = "tensor_core"
    """XLA sums as the engine's kernels on a GPU sum."""
    PALLAS = "pallas"
    """The Hopper kernels sum in that way, too."""


class AttentionBackend(enum.StrEnum):
    """The ways to compute the learner's attention."""

    XLA = "xla"
    """XLA computes all scores, [T, T]."""
    PALLAS = "pallas"
    """The Hopper kernels skip the scores between different segments."""


class Gradients(enum.StrEnum):
    """The format of the gradients that enter dgrad and wgrad of an FP8 product."""

    E4M3 = "e4m3"
    E5M2 = "e5m2"
    """With E4M3 or E5M2, all operands of both products are FP8."""
    HIGH = "high"
    """With HIGH, no operand is FP8."""


class SavedActivations(enum.StrEnum):
    """The form in which the forward pass keeps the input of an FP8 product for wgrad."""

    HIGH = "high"
    """The input itself."""
    FP8 = "fp8"
    """The codes and scales that the forward product used."""


class WgradBlocks(enum.StrEnum):
    """The blocks in which wgrad quantises the input of an FP8 product. Experts always use rows."""

    ROWS = "1x128"
    """The rows lie along the tokens."""
    SQUARES = "128x128"


@dataclasses.dataclass(frozen=True)
class KvFormat:
    """How attention rounds keys, values, queries and probabilities.

    fp8: keys and values are rounded through E4M3, as the engine's cache holds them.
    truncated: the learner rounds keys and values towards zero (see EngineFormats). The embedded engine's
        cache always rounds to the nearest code.
    attention_fp8: queries and probabilities are rounded through E4M3, each before its product.
    probabilities: the float type in which exp(score - max) enters its product with the values. None: the type
        of the values.
    """

    fp8: bool = False
    truncated: bool = False
    attention_fp8: bool = False
    probabilities: str | None = None


@dataclasses.dataclass(frozen=True)
class EngineRounding:
    """The engine's other roundings, which the learner mirrors (see EngineFormats).

    rope_dtype: the float type of the tables of cosines and sines.
    router_dtype, logits_dtype: the float types to which the logits of routers and of tokens are rounded.
    fused: the engine is compiled and does not round between the operations that it fuses.
    fused_quantizer: the engine quantises activations inside its fused kernels.
    unrounded_sums: norms see the last sum of the residual stream before it is rounded. With `fused` they
        always do.
    residual_once: a layer rounds the residual stream once, where it enters attention: neither the sum with
        attention nor the sum with the MLP is. A compiled engine does so that fuses no quantiser.
    amax_floor: the smallest amax by which a quantiser that is not fused divides activations.
    """

    rope_dtype: str = "float32"
    router_dtype: str = "float32"
    logits_dtype: str = "float32"
    fused: bool = False
    fused_quantizer: bool = False
    unrounded_sums: bool = False
    residual_once: bool = False
    amax_floor: float = AMAX_FLOOR


@dataclasses.dataclass(frozen=True)
class AdapterProduct:
    """How low-rank adapters compute (jaxfp8rl.precision.adapters).

    scale: the factor of B A. dtype: the float type of A, of scale * B, and of what both multiply. slots: how
    many adapters of equal rank lie one behind the other in A and B, of which each token chooses one.
    """

    scale: float
    dtype: str
    slots: int = 1


@dataclasses.dataclass(frozen=True)
class Precision:
    """How one forward pass and its backward pass compute. It is hashable: a static argument of a jitted step.

    runs: consecutive layers with equal FP8 linears. They cover all layers.
    activations_fp8: activations enter FP8 products as E4M3 in 1x128 blocks (W8A8). If False, they enter in
        `compute_dtype` (W8A16).
    products, attention, gradients, saved_activations, wgrad_inputs: see their types. A string is as good as
        the member that it names. Any other string raises ValueError.
    kv: the roundings inside attention.
    rounding: the engine's other roundings.
    compute_dtype: the float type of all computation outside FP8.
    exact: above 0, each token's result is a function of its own sequence alone, bit for bit, in the embedded
        engine's order of sums (jaxfp8rl.models.one_policy), for sequences of up to so many tokens.
    weight_dtype: the float type to which the published policy is rounded. Only the optimiser reads the
        float32 master weights.
    adapters: the product of low-rank adapters; None: the policy has none.
    """

    runs: tuple[LayerRun, ...]
    activations_fp8: bool = True
    products: Products = Products.FLOAT32
    attention: AttentionBackend = AttentionBackend.XLA
    gradients: Gradients = Gradients.HIGH
    saved_activations: SavedActivations = SavedActivations.HIGH
    wgrad_inputs: WgradBlocks = WgradBlocks.ROWS
    kv: KvFormat = KvFormat()
    rounding: EngineRounding = EngineRounding()
    compute_dtype: str = "bfloat16"
    weight_dtype: str = "bfloat16"
    exact: int = 0
    adapters: AdapterProduct | None = None

    def __post_init__(self):
        for name, kind in _CHOICES.items():
            object.__setattr__(self, name, kind(getattr(self, name)))

    @classmethod
    def uniform(cls, num_layers: int, compute_dtype: str = "float32", **kw) -> Precision:
        """A precision that computes every layer in `compute_dtype`, without FP8. Keywords set other
        fields."""
        return cls((LayerRun(0, num_layers, frozenset()),), compute_dtype=compute_dtype, **kw)

    @property
    def any_fp8(self) -> bool:
        """Whether any linear computes in FP8."""
        return any(run.fp8 for run in self.runs)


_CHOICES = {"products": Products, "attention": AttentionBackend, "gradients": Gradients,
            "saved_activations": SavedActivations, "wgrad_inputs": WgradBlocks}
