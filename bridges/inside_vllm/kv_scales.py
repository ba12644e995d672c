"""The scales of FP8 attention in a vLLM model: one number a layer for queries, keys and values.

GPU kernels read them from tensors on the device such as `_k_scale`, so that a CUDA graph sees new values; CPU
kernels read copies on the host such as `_k_scale_float`. Both copies are kept equal. Attention backends that
may compile the scales into a graph are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from bridges.api import BridgeError, ParamMeta, PublishFailed
from bridges.inside_vllm.params import Place

NAMES = ("q", "k", "v")
# attention implementations that are known to read new scales
READERS = {"FlashAttentionImpl", "CPUAttentionBackendImpl"}


def scale_places(model: Any) -> tuple[Place, ...]:
    """The Place of each scale. On the wire it has the name that vLLM's own loader uses.

    Raises BridgeError for an attention implementation that is not known to read new scales.
    """
    found = tuple(_places(model))
    for p in found:
        if (kind := type(p.module.impl).__name__) not in READERS:
            raise BridgeError(
                f"{p.path} is computed by {kind}, and it is not known here where that reads its scales",
                f"make vLLM choose another attention backend (known: {', '.join(sorted(READERS))})",
            )
    return found


def _places(model: Any) -> Iterator[Place]:
    from vllm.model_executor.layers.attention import Attention

    for path, module in model.named_modules():
        if isinstance(module, Attention):
            for name in NAMES:
                yield Place(ParamMeta(f"{path}.{name}_scale", "float32", (), "kv_scale"), path, module,
                            f"_{name}_scale", 0, ())


def loader_takes(places: Sequence[Place]) -> bool:
    """Whether vLLM's own loader accepts scales, as it does if weights are FP8."""
    return all(getattr(p.module, "quant_method", None) is not None for p in places)


def on_device(places: Sequence[Place]) -> dict[str, float]:
    """Name on the wire -> the scale on the device, read in one transfer."""
    import torch

    if not places:
        return {}
    return dict(zip((p.meta.name for p in places),
                    torch.stack([getattr(p.module, p.leaf) for p in places]).tolist()))


def reset(model: Any) -> None:
    """Set all scales to 1. vLLM's random initial weights may have set other values."""
    places = tuple(_places(model))
    for p in places:
        getattr(p.module, p.leaf).fill_(1.0)
    copy_to_host(places)


def copy_to_host(places: Sequence[Place]) -> None:
    """Set the host's copies to the scales on the device."""
    for p, value in zip(places, on_device(places).values()):
        setattr(p.module, f"{p.leaf}_float", value)
        if (copy := getattr(p.module, f"{p.leaf}_cpu", None)) is not None:
            copy.fill_(value)


def check_host(places: Sequence[Place]) -> None:
    """Raise PublishFailed if a host copy differs from the scale on the device."""
    for p, value in zip(places, on_device(places).values()):
        if (copy := getattr(p.module, f"{p.leaf}_float")) != value:
            raise PublishFailed(f"{p.meta.name} is {value} on the device, but its copy on the host is {copy}",
                                "publish again")
