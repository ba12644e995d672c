"""Runs of consecutive layers in which the same linears compute in FP8.

A scan over layers needs weights of one type. The model therefore scans each run on its own.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from jaxfp8rl.errors import ConfigError
from pallas_kernels.quantize import BLOCK

Shapes = dict[str, tuple[int, int]]  # of linears: "self_attn.q_proj" -> (N, K)

# An engine computes the members of a group as one product, so they have one format.
_FUSED = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})
# All linears of a sparse layer's experts have one format.
_FUSED_SPARSE = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj", "down_proj"})


@dataclasses.dataclass(frozen=True)
class LayerRun:
    """The layers [start, stop). Each of them computes the linears `fp8` ("q_proj", ...) in FP8.

    sparse: every MLP of the run is a mixture of experts. If False, none is.
    """

    start: int
    stop: int
    fp8: frozenset[str]
    sparse: bool = False


def plain_runs(sparse_layers: tuple[bool, ...]) -> tuple[LayerRun, ...]:
    """The runs of a model without FP8. `sparse_layers`: see ModelConfig.sparse_layers."""
    return _runs([frozenset()] * len(sparse_layers), sparse_layers)


def without_fp8(runs: tuple[LayerRun, ...]) -> tuple[LayerRun, ...]:
    """The runs of the same layers without FP8."""
    return plain_runs(tuple(run.sparse for run in runs for _ in range(run.start, run.stop)))


def _runs(fp8: Sequence[frozenset[str]], sparse_layers: Sequence[bool]) -> tuple[LayerRun, ...]:
    alike = list(zip(fp8, sparse_layers, strict=True))
    starts = [i for i in range(len(alike)) if i == 0 or alike[i] != alike[i - 1]]
    return tuple(LayerRun(a, b, *alike[a]) for a, b in zip(starts, starts[1:] + [len(alike)]))


def first_row(run: LayerRun, runs: tuple[LayerRun, ...], name: str) -> int:
    """The first row of `rows_of`, for a run whose layers have a `name`."""
    rows = rows_of(run, runs, name)
    assert rows is not None, f"{run} has no {name}"
    return rows.start


def rows_of(run: LayerRun, runs: tuple[LayerRun, ...], name: str) -> slice | None:
    """The rows of the layers of `run` in the model's stack of `name` ("self_attn", "mlp", "moe", ...).

    A stack has a row for each layer that has such a module. The result is None if no layer of `run` has one.
    """
    if name not in ("mlp", "moe"):
        return slice(run.start, run.stop)
    if run.sparse != (name == "moe"):
        return None
    first = sum(r.stop - r.start for r in runs if r.sparse == run.sparse and r.start < run.start)
    return slice(first, first + run.stop - run.start)


def fp8_runs(
    shapes: Shapes, num_layers: int, first_bf16: int = 0, last_bf16: int = 0, exclude: str = "",
    sparse_layers: tuple[bool, ...] = (),
) -> tuple[LayerRun, ...]:
    """The runs of a model whose engine computes the linears `shapes` in FP8, except the excluded ones.

    Two settings exclude a layer's linear: the layer is among the `first_bf16` first or the `last_bf16` last
    ones, or the regular expression `exclude` matches a part of the linear's name in Hugging Face's layout,
    "model.layers.3.mlp.down_proj". One name stands for all experts of a sparse layer:
    "model.layers.3.mlp.experts.down_proj".

    Raises ConfigError if `exclude` is no regular expression, if it separates linears that the engine computes
    as one product (q, k and v; gate and up, and an expert's down), or if FP8 blocks do not divide a linear
    that is left. Blocks must divide K of every linear, and N of q, k, v, gate and up. The error names the
    pattern that excludes these linears.
    """
    sparse, pattern = sparse_layers or (False,) * num_layers, _compiled(exclude)

    def fp8_modules(i: int) -> frozenset[str]:
        if i < first_bf16 or i >= num_layers - last_bf16:
            return frozenset()
        named = {m.split(".")[-1]: f"model.layers.{i}.{m}" for m in _in_layer(shapes, sparse[i])}
        return frozenset(short for short, full in named.items() if not (pattern and pattern.search(full)))

    sets = [fp8_modules(i) for i in range(num_layers)]
    for kind in set(sparse):
        used = frozenset().union(*(names for names, is_sparse in zip(sets, sparse) if is_sparse == kind))
        _check_shapes(_in_layer(shapes, kind), used, _FUSED_SPARSE if kind else _FUSED)
    _check_fused(sets, sparse)
    return _runs(sets, sparse)


def _compiled(exclude: str) -> re.Pattern[str] | None:
    try:
        return re.compile(exclude) if exclude else None
    except re.error as e:
        raise ConfigError(f"precision.exclude: {exclude!r} is not a regular expression: {e}",
                          'for example "self_attn|gate_proj"') from e


def _in_layer(shapes: Shapes, sparse: bool) -> Shapes:
    """The linears of a layer with experts, or of one without."""
    return {m: s for m, s in shapes.items() if not m.startswith("mlp.")
            or m.startswith("mlp.experts.") == sparse}


def _check_shapes(shapes: Shapes, used: frozenset[str], together: tuple[set[str], ...]) -> None:
    odd = []
    for module, (n, k) in shapes.items():
        short = module.split(".")[-1]
        fused = any(short in group for group in _FUSED)
        if short in used and (k % BLOCK or (fused and n % BLOCK)):
            odd.append((short, n, k))
    if odd:
        listing = ", ".join(f"{s} [{n}, {k}]" for s, n, k in odd)
        names = {s for s, _, _ in odd}
        whole = sorted(names.union(*(group for group in together if group & names)))
        raise ConfigError(
            f"precision: FP8 blocks of {BLOCK}x{BLOCK} do not divide these linears of every layer: {listing}",
            f'leave them in high precision: precision.exclude = "{"|".join(whole)}" '
            f'(docs/precision.md says why '
            "they are not padded)",
        )


def _check_fused(sets: list[frozenset[str]], sparse: tuple[bool, ...]) -> None:
    for layer, used in enumerate(sets):
        for group in _FUSED_SPARSE if sparse[layer] else _FUSED:
            if used & group and not group <= used:
                raise ConfigError(
                    f"precision.exclude leaves {', '.join(sorted(used & group))} of layer {layer} without "
                    f"{', '.join(sorted(group - used))}: the engine computes them as one product",
                    f"exclude all of {', '.join(sorted(group))} or none",
                )
