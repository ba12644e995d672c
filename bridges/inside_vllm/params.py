"""The tensors that vLLM expects in a checkpoint, read off its model: names, shapes and dtypes in HF layout.

Kernels may repack or consume parameters once they are loaded (oneDNN on a CPU leaves shape [0], AMX tiles are
packed), so the live parameters do not show that layout. It is read from the record that vLLM keeps of each
layer's checkpoint layout for its layerwise reload.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from bridges.api import BridgeError, ParamMeta

BLOCK = (128, 128)  # rows and columns of an FP8 weight that one scale covers
PACKED = "weight_packed"  # the codes of a linear in four bits (bridges.inside_vllm.packed)
# vLLM stacks the experts of a layer in two tensors
EXPERTS = {"w13": ("gate_proj", "up_proj"), "w2": ("down_proj",)}


class Place(NamedTuple):
    """The location of a checkpoint tensor in vLLM: rows [start, start + meta.shape[0]) of `module.leaf`, a
    parameter that had `shape` when it was loaded. `path` is the module's name. For stacked experts the rows
    belong to one `expert`."""

    meta: ParamMeta
    path: str
    module: Any
    leaf: str
    start: int
    shape: tuple[int, ...]
    expert: int | None = None


def places(model: Any) -> tuple[Place, ...]:
    """One Place for each checkpoint tensor, but those of linears in four bits. Fused projections and stacked
    experts are split, a tied lm_head is left out, and so is the padding of the vocabulary.

    Raises BridgeError if the parts of a fused FP8 projection do not end at the edge of a block.
    """
    repeats = {name for names in tied_names(model).values() for name in names}
    found = (place for path, module in model.named_modules() for place in _of_module(model, path, module))
    return tuple(p for p in found if p.meta.name not in repeats)


def expected_manifest(model: Any) -> tuple[ParamMeta, ...]:
    """The tensors that a publish must bring: the metas of `places`."""
    return tuple(place.meta for place in places(model))


def tied_names(model: Any) -> dict[str, list[str]]:
    """The first name of each parameter with several names -> its other names; embed_tokens -> [lm_head] if
    they are tied."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: rest for first, *rest in names.values() if rest}


def _of_module(model: Any, path: str, module: Any) -> Iterator[Place]:
    fused = getattr(model, "packed_modules_mapping", {})
    path = path.removesuffix(".base_layer")  # in a linear that has slots for adapters
    parent, _, last = path.rpartition(".")
    # a linear with slots shows the bias of the one inside
    if hasattr(module, "base_layer") or is_packed(module):
        return
    for leaf, tensor in _checkpoint_tensors(module):
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        # the scales of attention: optional in a checkpoint, 1 unless given; compressed-tensors adds zero
        # points to them
        if not shape or hasattr(module, "_k_scale"):
            continue
        if leaf.partition("_")[0] in EXPERTS:
            for name, part, start, expert in _experts(path.removesuffix(".routed_experts"), leaf, shape):
                yield Place(_meta(name, dtype, part), path, module, leaf, start, shape, expert)
            continue
        if last in fused:
            names = [f"{parent}.{part}" for part in fused[last]]
            parts = _fused(path, names, module.output_partition_sizes, leaf, shape)
        else:
            parts = [(f"{path}.{leaf}", (vocabulary_rows(module, shape[0]), *shape[1:]))]
        start = 0
        for name, part in parts:
            yield Place(_meta(name, dtype, part), path, module, leaf, start, shape)
            start += part[0]


def vocabulary_rows(module: Any, rows: int) -> int:
    """How many of a parameter's rows are in a checkpoint: all but the padding of the vocabulary. With tensor
    parallelism: how many of this rank's."""
    if (indices := getattr(module, "shard_indices", None)) is not None:
        return indices.num_org_elements
    return getattr(module, "org_vocab_size", rows)


def is_packed(module: Any) -> bool:
    """Whether a module is a linear in four bits."""
    return any(leaf == PACKED for leaf, _ in _checkpoint_tensors(module))


def recorded_tensors(module: Any) -> dict[str, Any]:
    """vLLM's record of a module's parameters as a checkpoint has them: {leaf: a tensor without data}."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    return get_layerwise_info(module).restore_metadata[0]


def _checkpoint_tensors(module: Any) -> Iterator[tuple[str, Any]]:
    """(leaf name, tensor of checkpoint shape and dtype). Biases are not in vLLM's record, so the live
    parameter is used for them. Its dtype in a checkpoint is the weight's, unless that is FP8: some kernels
    for CPUs make a bias float32."""
    recorded = recorded_tensors(module)
    yield from recorded.items()
    bias: Any = getattr(module, "bias", None)
    if bias is not None and "bias" not in recorded:
        weight: Any = recorded.get("weight", bias)
        yield "bias", bias if weight.dtype.itemsize == 1 else bias.to(weight.dtype)


Parts = list[tuple[str, tuple[int, ...]]]


def _experts(path: str, leaf: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
    """Split w13 [E, 2F, D] or w2 [E, D, F], or its block scales, into one tensor for each expert and
    projection: (its name, its shape, its first row in the expert, the expert)."""
    kind, _, leaf = leaf.partition("_")
    experts, rows, *columns = shape
    names = EXPERTS[kind]
    part = rows // len(names), *columns
    for e in range(experts):
        yield from ((f"{path}.{e}.{name}.{leaf}", part, i * part[0], e) for i, name in enumerate(names))


def _fused(path: str, names: list[str], sizes: list[int], leaf: str, shape: tuple[int, ...]) -> Parts:
    """The parts of a fused projection, `sizes` rows each, or their block scales."""
    if leaf == "weight_scale_inv":
        if any(size % BLOCK[0] for size in sizes[:-1]):
            raise BridgeError(
                f"{path}: its parts have {sizes} rows, not multiples of {BLOCK[0]}, "
                "so their FP8 blocks do not line up",
                f"name {', '.join(names)} in high_precision_modules",
            )
        sizes = [-(-size // BLOCK[0]) for size in sizes]
    return [(f"{name}.{leaf}", (size, *shape[1:])) for name, size in zip(names, sizes, strict=True)]


def _meta(name: str, dtype: str, shape: tuple[int, ...]) -> ParamMeta:
    if name.endswith("weight_scale_inv"):
        return ParamMeta(name, dtype, shape, "block_scale", BLOCK)
    return ParamMeta(name, dtype, shape, "weight", BLOCK if dtype == "float8_e4m3fn" else None)
