"""The precision recipes: the single source of which tensor is in which format.

The config names a `Recipe`. `resolve` makes a `Precision` of the recipe, of the formats that the engine
reports, and of the model's runs of layers. The model's forward pass reads that record.

| recipe      | engine            | learner forward          | learner backward | reproduces              |
|-------------|-------------------|--------------------------|------------------|-------------------------|
| bf16        | BF16              | BF16                     | BF16             | the baseline            |
| fp8_rollout | FP8 W8A8 (or A16) | BF16                     | BF16             | FP8-RL (verl)           |
| fp8_unified | FP8 W8A8 (or A16) | FP8, the published bytes | FP8 dgrad, wgrad | Jet-RL, NeMo RL, InfiR2 |
| fp8_forward | FP8               | FP8, the published bytes | BF16             | ablation                |
| fp16        | FP16              | FP16, loss scaling       | FP16             | arXiv 2510.26788        |
"""

from __future__ import annotations

import dataclasses
import difflib

from bridges.api import EngineFormats
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.other_names import value_here
from jaxfp8rl.precision.layer_runs import LayerRun, without_fp8
from jaxfp8rl.precision.records import (
    AttentionBackend,
    EngineRounding,
    Gradients,
    KvFormat,
    Precision,
    Products,
    SavedActivations,
    WgradBlocks,
)

FP8_WEIGHT = "fp8_e4m3_128x128"
FP8_ACTIVATION = "fp8_e4m3_1x128"
FP8_KV = "fp8_e4m3"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Which sides compute in FP8.

    engine_fp8: the engine's linears do.
    forward_fp8, backward_fp8: the learner's linears do, in the formats that the engine reports.
    dtype: the one float type of engine and learner. None: the recipe leaves the float types to the config.
    """

    name: str
    engine_fp8: bool
    forward_fp8: bool
    backward_fp8: bool
    dtype: str | None = None


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


def get_recipe(name: str) -> Recipe:
    """The recipe of that name. An unknown name raises ConfigError, which names the nearest recipe, or all."""
    if name not in RECIPES:
        raise ConfigError(f'precision.recipe: "{name}" is no recipe ({_hint(name)})',
                          "fp8_unified is the usual one (docs/precision.md)")
    return RECIPES[name]


def _hint(name: str) -> str:
    if ours := value_here("precision.recipe", name, RECIPES):
        return f"here it is {ours}"
    # 0.8: at the default of 0.6, "fp8" is near to several
    close = difflib.get_close_matches(name, RECIPES, 1, 0.8)
    return f'did you mean "{close[0]}"?' if close else f"known: {', '.join(RECIPES)}"


def resolve(
    recipe: Recipe, runs: tuple[LayerRun, ...], formats: EngineFormats, compute_dtype: str, weight_dtype: str,
    gradients: str = "e4m3", saved_activations: str = "high", products: str = "float32",
    attention: str = "xla", wgrad_inputs: str = "1x128", exact: int = 0,
) -> Precision:
    """The learner's Precision: it follows the recipe and mirrors the formats that the engine reports.

    `runs` are the runs of the engine's FP8 linears (`fp8_runs`). Raises ConfigError if the recipe asks for
    other weights than the engine has: nothing falls back silently.
    """
    _check_weights(recipe, formats)
    forward, backward, rounding = recipe.forward_fp8, recipe.backward_fp8, rounding_of(formats)
    return Precision(
        runs=runs if forward else without_fp8(runs),
        activations_fp8=formats.activations == FP8_ACTIVATION,
        products=Products(products),
        attention=AttentionBackend(attention),
        gradients=Gradients(gradients) if backward else Gradients.HIGH,
        saved_activations=SavedActivations(saved_activations) if forward else SavedActivations.HIGH,
        wgrad_inputs=WgradBlocks(wgrad_inputs) if backward else WgradBlocks.ROWS,
        kv=kv_of(formats) if forward else KvFormat(probabilities=formats.probabilities),
        rounding=rounding if forward else dataclasses.replace(rounding, fused_quantizer=False),
        compute_dtype=compute_dtype,
        weight_dtype=weight_dtype,
        exact=exact,
    )


def _check_weights(recipe: Recipe, formats: EngineFormats) -> None:
    if (formats.weights == FP8_WEIGHT) != recipe.engine_fp8:
        needed = "FP8" if recipe.engine_fp8 else "unquantised"
        raise ConfigError(f'precision.recipe "{recipe.name}" needs {needed} engine weights, '
                          f'the engine reports "{formats.weights}"',
                          "start the engine with such weights, or choose another precision.recipe")


def kv_of(formats: EngineFormats) -> KvFormat:
    """The roundings of the engine's attention."""
    return KvFormat(
        fp8=formats.kv_cache == FP8_KV,
        truncated=formats.kv_truncated,
        attention_fp8=formats.attention == FP8_KV,
        probabilities=formats.probabilities,
    )


def rounding_of(formats: EngineFormats) -> EngineRounding:
    """The engine's roundings outside attention."""
    return EngineRounding(
        rope_dtype=formats.compute,
        router_dtype=formats.compute,
        logits_dtype=formats.logits,
        fused=formats.fused,
        fused_quantizer=formats.fused_quantizer,
        unrounded_sums=formats.unrounded_sums,
        residual_once=formats.fused and not formats.fused_quantizer,
        amax_floor=formats.amax_floor,
    )
