"""The scales of FP8 attention in a vLLM model: one number a layer for queries, keys and values.

Kernels read them from tensors on the device, `_k_scale` and so on, where a CUDA graph sees what is written
later; on a CPU from copies on the host, `_k_scale_float`. Both are held to the same number. What bakes them
into a graph is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from bridges.api import BridgeError, ParamMeta, PublishFailed
from bridges.inside_vllm.params import Place

NAMES = ("q", "k", "v")
# of which it is known where they read scales, and when
READERS = {"FlashAttentionImpl", "CPUAttentionBackendImpl"}


def scale_places(model: Any) -> tuple[Place, ...]:
    """Where each scale is; on the wire it has the name under which vLLM's own loader takes it.

    Raises BridgeError for an attention that is not known to read new scales.
    """
    found = tuple(_places(model))
    for p in found:
        if (kind := type(p.module.impl).__name__) not in READERS:
            raise BridgeError(
                f"{p.path} is computed by {kind}, of which it is not known where it reads its scales",
                f"have vLLM choose another backend of attention (known: {', '.join(sorted(READERS))})",
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
    """Whether vLLM's own loader has a place for scales: it has where weights are FP8."""
    return all(getattr(p.module, "quant_method", None) is not None for p in places)


def on_device(places: Sequence[Place]) -> dict[str, float]:
    """Name on the wire -> the number that the device holds, in one transfer."""
    import torch

    if not places:
        return {}
    return dict(zip((p.meta.name for p in places),
                    torch.stack([getattr(p.module, p.leaf) for p in places]).tolist()))


def reset(model: Any) -> None:
    """Scale 1 everywhere: vLLM's random weights, which an engine starts with, may have left others."""
    places = tuple(_places(model))
    for p in places:
        getattr(p.module, p.leaf).fill_(1.0)
    copy_to_host(places)


def copy_to_host(places: Sequence[Place]) -> None:
    """Have the host's copies follow what the device holds."""
    for p, value in zip(places, on_device(places).values()):
        setattr(p.module, f"{p.leaf}_float", value)
        if (copy := getattr(p.module, f"{p.leaf}_cpu", None)) is not None:
            copy.fill_(value)


def check_host(places: Sequence[Place]) -> None:
    """Raise PublishFailed where a copy on the host is not what the device holds."""
    for p, value in zip(places, on_device(places).values()):
        if (copy := getattr(p.module, f"{p.leaf}_float")) != value:
            raise PublishFailed(f"{p.meta.name} is {value} on the device, its copy on the host {copy}",
                                "publish again")
