"""The engine's end of a link to a learner's process: `VllmInplace`, which also takes what comes over a link."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from bridges.api import ParamMeta, WeightSource
from bridges.weights.linked import LinkedWeights
from bridges.weights.links import GPU_LINKS, HOST_LINKS, Buffer
from bridges.weights.vllm_inplace import VllmInplace

if TYPE_CHECKING:
    import torch


class VllmReceive(VllmInplace):
    """Writes the pieces of a LinkedWeights where they belong in the engine's tensors. Proved like any publish in place, by
    digests that the learner made of its own tensors: an error anywhere on the way is found."""

    @property
    def links(self) -> tuple[str, ...]:
        """Those that reach where the engine's tensors are."""
        return GPU_LINKS if next(iter(self.targets.values())).is_cuda else HOST_LINKS

    def _write(self, source: WeightSource, metas: Sequence[ParamMeta]) -> Callable[[], np.ndarray]:
        if not isinstance(source, LinkedWeights):
            return super()._write(source, metas)
        sent = np.zeros((len(self._place), 2), np.uint32)
        sent[[self._place[m.name] for m in metas]] = source.write_to({name: _bytes(t) for name, t in self.targets.items()})
        return lambda: sent


def _bytes(tensor: torch.Tensor) -> Buffer:
    """uint8 [bytes] of a row-major tensor, over the same memory; numpy on the host."""
    import torch

    flat = tensor.reshape(-1).view(torch.uint8)
    return flat if flat.is_cuda else flat.numpy()
