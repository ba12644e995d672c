"""What vLLM expects to be loaded, read off its own model: names, shapes and dtypes in checkpoint (HF) layout.

Kernels may repack or consume parameters once they are loaded (oneDNN on a CPU leaves shape [0], AMX tiles are packed), so
the live parameters do not tell. vLLM records each layer's checkpoint layout for its layerwise reload, and that is read here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bridges.api import BridgeError, ParamMeta

Rows = list[tuple[str, int]]


def expected_manifest(model: Any, block: tuple[int, int]) -> tuple[ParamMeta, ...]:
    """One ParamMeta a checkpoint tensor: fused projections are split, a tied lm_head is absent, vocabulary padding is off."""
    fused = getattr(model, "packed_modules_mapping", {})
    metas = [m for path, module in model.named_modules() for m in _of_module(path, module, fused, block)]
    return tuple(metas)


def _of_module(path: str, module: Any, fused: dict[str, list[str]], block: tuple[int, int]) -> Iterator[ParamMeta]:
    for leaf, tensor in _checkpoint_tensors(module):
        if tensor.dim() == 0:  # the scales of attention: optional in a checkpoint, 1 unless given
            continue
        for name, rows in _parts(path, module, leaf, tensor, fused, block):
            yield _meta(f"{name}.{leaf}", tensor, rows, block)


def _checkpoint_tensors(module: Any) -> Iterator[tuple[str, Any]]:
    """(leaf name, tensor of checkpoint shape and dtype). Biases are not in vLLM's record: theirs is the live parameter."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    recorded, _ = get_layerwise_info(module).restore_metadata
    yield from recorded.items()
    if getattr(module, "bias", None) is not None and "bias" not in recorded:
        yield "bias", module.bias


def _parts(path: str, module: Any, leaf: str, tensor: Any, fused: dict[str, list[str]], block: tuple[int, int]) -> Rows:
    """(HF module name, rows) of each checkpoint tensor that vLLM keeps in this one."""
    parent, _, last = path.rpartition(".")
    if last not in fused:
        return [(path, getattr(module, "org_vocab_size", tensor.shape[0]))]
    sizes = list(module.output_partition_sizes)
    if leaf == "weight_scale_inv":
        if any(size % block[0] for size in sizes[:-1]):
            raise BridgeError(
                f"{path}: its parts have {sizes} rows, not multiples of {block[0]}, so their FP8 blocks do not line up",
                f"name {', '.join(f'{parent}.{part}' for part in fused[last])} in high_precision_modules",
            )
        sizes = [-(-size // block[0]) for size in sizes]
    return [(f"{parent}.{part}", size) for part, size in zip(fused[last], sizes, strict=True)]


def _meta(name: str, tensor: Any, rows: int, block: tuple[int, int]) -> ParamMeta:
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = (rows, *tensor.shape[1:])
    if name.endswith("weight_scale_inv"):
        return ParamMeta(name, dtype, shape, "block_scale", block)
    return ParamMeta(name, dtype, shape, "weight", block if dtype == "float8_e4m3fn" else None)
