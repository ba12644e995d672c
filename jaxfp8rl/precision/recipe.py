"""The precision recipes: the single source of which tensor is in which format.

A `Recipe` is what a user names in the config. Together with what the engine reports it computes in and the
model's shapes it resolves to a `Precision`, the hashable record that the model's forward pass reads.

| recipe        | engine            | learner forward          | learner backward   | reproduces                |
|---------------|-------------------|--------------------------|--------------------|---------------------------|
| bf16          | BF16              | BF16                     | BF16               | the baseline              |
| fp8_rollout   | FP8 W8A8 (or A16) | BF16                     | BF16               | FP8-RL (verl)             |
| fp8_unified   | FP8 W8A8 (or A16) | FP8, the published bytes | FP8 dgrad, wgrad   | Jet-RL, NeMo RL, InfiR2   |
| fp8_forward   | FP8               | FP8, the published bytes | BF16               | ablation                  |
| fp16          | FP16              | FP16, loss scaling       | FP16               | arXiv 2510.26788          |
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import re
from collections.abc import Sequence

from bridges.api import EngineFormats
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.other_names import value_here
from pallas_kernels.quantize import BLOCK
from pallas_kernels.quantize.reference import AMAX_FLOOR

FP8_WEIGHT = "fp8_e4m3_128x128"
FP8_ACTIVATION = "fp8_e4m3_1x128"
FP8_KV = "fp8_e4m3"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """`engine_fp8`: the engine's linears. `forward_fp8`, `backward_fp8`: the learner's, mirroring the
    engine's report."""

    name: str
    engine_fp8: bool
    forward_fp8: bool
    backward_fp8: bool
    dtype: str | None = None  # the one float type of engine and learner, where the recipe is about that


RECIPES = {
    r.name: r
    for r in (
        Recipe("bf16", False, False, False),
        Recipe("fp8_rollout", True, False, False),
        Recipe("fp8_unified", True, True, True),
        Recipe("fp8_forward", True, True, False),
        Recipe("fp16", False, False, False, "float16"),
    )
}


@dataclasses.dataclass(frozen=True)
class LayerRun:
    """Layers [start, stop) share the set `fp8` of modules ("q_proj", ...) that compute in FP8, and all or
    none of their MLPs are mixtures of experts (`sparse`)."""

    start: int
    stop: int
    fp8: frozenset[str]
    sparse: bool = False


def plain_runs(sparse_layers: tuple[bool, ...]) -> tuple[LayerRun, ...]:
    """The runs of layers (ModelConfig.sparse_layers) of which nothing is quantised."""
    return _runs([frozenset()] * len(sparse_layers), sparse_layers)


def without_fp8(runs: tuple[LayerRun, ...]) -> tuple[LayerRun, ...]:
    """The same layers, nothing quantised."""
    return plain_runs(tuple(run.sparse for run in runs for _ in range(run.start, run.stop)))


def _runs(fp8: Sequence[frozenset[str]], sparse_layers: Sequence[bool]) -> tuple[LayerRun, ...]:
    alike = list(zip(fp8, sparse_layers, strict=True))
    starts = [i for i in range(len(alike)) if i == 0 or alike[i] != alike[i - 1]]
    return tuple(LayerRun(a, b, *alike[a]) for a, b in zip(starts, starts[1:] + [len(alike)]))


def first_row(run: LayerRun, runs: tuple[LayerRun, ...], name: str) -> int:
    """The first of `rows_of` a run that has some."""
    rows = rows_of(run, runs, name)
    assert rows is not None, f"{run} has no {name}"
    return rows.start


def rows_of(run: LayerRun, runs: tuple[LayerRun, ...], name: str) -> slice | None:
    """Where in a stack of all layers that have a "self_attn", "mlp", "moe" (`name`) or so on those of `run`
    are; None where they have none."""
    if name not in ("mlp", "moe"):
        return slice(run.start, run.stop)
    if run.sparse != (name == "moe"):
        return None
    first = sum(r.stop - r.start for r in runs if r.sparse == run.sparse and r.start < run.start)
    return slice(first, first + run.stop - run.start)


class Products(enum.StrEnum):
    """By what FP8 products are computed."""

    FLOAT32 = "float32"
    """Dequantised operands, multiplied in float32."""
    TENSOR_CORE = "tensor_core"
    """XLA, summed as the engine's kernels on a GPU sum."""
    PALLAS = "pallas"
    """The Hopper kernels, summed likewise."""


class AttentionBackend(enum.StrEnum):
    """By what the learner's attention is computed."""

    XLA = "xla"
    """With scores of [T, T]."""
    PALLAS = "pallas"
    """The Hopper kernels, which skip what is of other segments."""


class Gradients(enum.StrEnum):
    """The format of the gradients that enter dgrad and wgrad of an FP8 product."""

    E4M3 = "e4m3"
    E5M2 = "e5m2"
    """With either, all operands of both products are FP8."""
    HIGH = "high"
    """With this, none is."""


class SavedActivations(enum.StrEnum):
    """What the forward pass keeps of an FP8 product's input for wgrad."""

    HIGH = "high"
    """The input as it was."""
    FP8 = "fp8"
    """The codes and scales of the forward product."""


class WgradBlocks(enum.StrEnum):
    """The blocks in which wgrad quantises an FP8 product's input. Of experts they are always rows."""

    ROWS = "1x128"
    """Along the tokens."""
    SQUARES = "128x128"


@dataclasses.dataclass(frozen=True)
class Precision:
    """How one forward pass computes. Hashable: a static argument of the jitted step.

    runs: consecutive layers with equal FP8 modules, covering all layers.
    activations_fp8: activations enter FP8 products as E4M3 1x128 (W8A8), else in `compute_dtype` (W8A16).
    products, attention, gradients, saved_activations, wgrad_inputs: see their types. A name that they do not
    have is a ValueError.
    compute_dtype: the float type of everything that is not FP8.
    weight_dtype: the float type that the published policy is rounded to. The float32 master weights only feed
    the optimiser.

    The engine's cache of keys and values:
    kv_fp8: keys and values are rounded through E4M3 with scale 1, as the engine's cache holds them.
    kv_truncated: they are rounded towards zero in the learner's forward (see EngineFormats). The embedded
    engine's cache never truncates.
    attention_fp8: queries and probabilities are rounded to E4M3 likewise, each before its product.
    probabilities: the float type in which exp(score - max) enters its product with the values. None: the
    values' own.

    The engine's roundings (see EngineFormats):
    rope_dtype: the float type of the table of cosines and sines.
    router_dtype, logits_dtype: the float types to which logits of routers, and of tokens, are rounded.
    fused, fused_quantizer: a compiled engine does not round, or quantises, in a fused kernel.
    unrounded_sums: norms see the residual stream's last sum unrounded. With `fused` they do, too.
    amax_floor: of activations whose quantiser is not fused.
    """

    runs: tuple[LayerRun, ...]
    activations_fp8: bool = True
    products: Products = Products.FLOAT32
    attention: AttentionBackend = AttentionBackend.XLA
    gradients: Gradients = Gradients.HIGH
    saved_activations: SavedActivations = SavedActivations.HIGH
    wgrad_inputs: WgradBlocks = WgradBlocks.ROWS
    kv_fp8: bool = False
    kv_truncated: bool = False
    attention_fp8: bool = False
    rope_dtype: str = "float32"
    router_dtype: str = "float32"
    logits_dtype: str = "float32"
    fused: bool = False
    fused_quantizer: bool = False
    unrounded_sums: bool = False
    probabilities: str | None = None
    amax_floor: float = AMAX_FLOOR
    compute_dtype: str = "bfloat16"
    weight_dtype: str = "bfloat16"

    def __post_init__(self):
        for name, kind in _CHOICES.items():  # a string is as good
            object.__setattr__(self, name, kind(getattr(self, name)))

    @classmethod
    def uniform(cls, num_layers: int, compute_dtype: str = "float32", **kw) -> Precision:
        """All layers in `compute_dtype`, nothing quantised; keywords override the other fields."""
        return cls((LayerRun(0, num_layers, frozenset()),), compute_dtype=compute_dtype, **kw)

    @property
    def any_fp8(self) -> bool:
        return any(run.fp8 for run in self.runs)


_CHOICES = {"products": Products, "attention": AttentionBackend, "gradients": Gradients,
            "saved_activations": SavedActivations, "wgrad_inputs": WgradBlocks}


def get_recipe(name: str) -> Recipe:
    """The recipe of that name; ConfigError otherwise, with the name that it is a slip of, or all: "fp8" is a
    part of several."""
    if name not in RECIPES:
        close, ours = difflib.get_close_matches(name, RECIPES, 1,
                                                0.8), value_here("precision.recipe", name, RECIPES)
        hint = f"here it is {ours}" if ours else f'did you mean "{close[0]}"?' if close else f"known: {', '.join(RECIPES)}"
        raise ConfigError(f'precision.recipe: "{name}" is no recipe ({hint})',
                          "fp8_unified is the usual one (docs/precision.md)")
    return RECIPES[name]


def fp8_runs(
    shapes: dict[str, tuple[int, int]], num_layers: int, first_bf16: int = 0, last_bf16: int = 0,
    exclude: str = "",
    sparse_layers: tuple[bool, ...] = (),
) -> tuple[LayerRun, ...]:
    """Group layers by which of their linears (`shapes`: "self_attn.q_proj" -> (N, K)) the engine runs in FP8.

    A layer's linear is excluded when it is among the first or last layers named or when the pattern `exclude`
    is found in its HF module name, "model.layers.3.mlp.down_proj" (of a sparse layer's experts, all or none:
    "model.layers.3.mlp.experts.down_proj"). A linear that is left must have a contraction of whole blocks,
    and a member of a fused product (q, k, v; gate, up) whole blocks of outputs: ConfigError names the pattern
    that excludes it.
    """
    try:
        pattern = re.compile(exclude) if exclude else None
    except re.error as e:
        raise ConfigError(f"precision.exclude: {exclude!r} is not a regular expression: {e}") from e

    def fp8_modules(i: int) -> frozenset[str]:
        if i < first_bf16 or i >= num_layers - last_bf16:
            return frozenset()
        named = {m.split(".")[-1]: f"model.layers.{i}.{m}" for m in _in_layer(shapes, sparse[i])}
        return frozenset(short for short, full in named.items() if not (pattern and pattern.search(full)))

    sparse = sparse_layers or (False,) * num_layers
    sets = [fp8_modules(i) for i in range(num_layers)]
    for kind in set(sparse):
        used = frozenset().union(*(names for names, is_sparse in zip(sets, sparse) if is_sparse == kind))
        _check_shapes(_in_layer(shapes, kind), used, _FUSED_SPARSE if kind else _FUSED)
    _check_fused(sets, sparse)
    return _runs(sets, sparse)


def _in_layer(shapes: dict[str, tuple[int, int]], sparse: bool) -> dict[str, tuple[int, int]]:
    """Those of `shapes` that a layer with or without experts has."""
    return {m: s for m, s in shapes.items() if not m.startswith("mlp.")
            or m.startswith("mlp.experts.") == sparse}


_FUSED = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})
# a layer's experts are of one format
_FUSED_SPARSE = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj", "down_proj"})


def _check_shapes(shapes: dict[str, tuple[int, int]], used: frozenset[str],
                  together: tuple[set[str], ...]) -> None:
    odd = []
    for module, (n, k) in shapes.items():
        short = module.split(".")[-1]
        fused = any(short in group for group in _FUSED)
        if short in used and (k % BLOCK or (fused and n % BLOCK)):
            odd.append((short, n, k))
    if odd:
        listing = ", ".join(f"{s} [{n}, {k}]" for s, n, k in odd)
        names = {s for s, _, _ in odd}
        # the engine fuses them: all or none
        whole = sorted(names.union(*(group for group in together if group & names)))
        raise ConfigError(
            f"precision: FP8 blocks are {BLOCK}x{BLOCK} and these linears of every layer do not divide: {listing}",
            f'leave them in high precision: precision.exclude = "{"|".join(whole)}"',
        )


def _check_fused(sets: list[frozenset[str]], sparse: tuple[bool, ...]) -> None:
    for layer, used in enumerate(sets):
        for group in _FUSED_SPARSE if sparse[layer] else _FUSED:
            if used & group and not group <= used:
                raise ConfigError(
                    f"precision.exclude leaves {', '.join(sorted(used & group))} of layer {layer} without "
                    f"{', '.join(sorted(group - used))}: they are one product in the engine",
                    f"exclude all of {', '.join(sorted(group))} or none",
                )


def resolve(
    recipe: Recipe, runs: tuple[LayerRun, ...], formats: EngineFormats, compute_dtype: str, weight_dtype: str,
    gradients: str = "e4m3", saved_activations: str = "high", products: str = "float32",
    attention: str = "xla", wgrad_inputs: str = "1x128",
) -> Precision:
    """The learner's Precision: the recipe, mirroring what the engine reports (W8A8 or W8A16, FP8 KV or not).

    Raises ConfigError when the engine does not compute in what the recipe asks of it: nothing falls back
    silently.
    """
    engine_fp8 = formats.weights == FP8_WEIGHT
    if engine_fp8 != recipe.engine_fp8:
        raise ConfigError(
            f'precision.recipe "{recipe.name}" needs {"FP8" if recipe.engine_fp8 else "unquantised"} engine weights, '
            f'the engine reports "{formats.weights}"'
        )
    return Precision(
        runs=runs if recipe.forward_fp8 else without_fp8(runs),
        activations_fp8=formats.activations == FP8_ACTIVATION,
        products=Products(products),
        attention=AttentionBackend(attention),
        gradients=Gradients(gradients) if recipe.backward_fp8 else Gradients.HIGH,
        saved_activations=SavedActivations(saved_activations if recipe.forward_fp8 else "high"),
        wgrad_inputs=WgradBlocks(wgrad_inputs if recipe.backward_fp8 else "1x128"),
        kv_fp8=recipe.forward_fp8 and formats.kv_cache == FP8_KV,
        kv_truncated=recipe.forward_fp8 and formats.kv_truncated,
        attention_fp8=recipe.forward_fp8 and formats.attention == FP8_KV,
        rope_dtype=formats.compute,
        router_dtype=formats.compute,
        logits_dtype=formats.logits,
        fused=formats.fused,
        fused_quantizer=recipe.forward_fp8 and formats.fused_quantizer,
        unrounded_sums=formats.unrounded_sums,
        probabilities=formats.probabilities,
        amax_floor=formats.amax_floor,
        compute_dtype=compute_dtype,
        weight_dtype=weight_dtype,
    )
