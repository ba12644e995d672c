"""The two ends of a publish over a link (`bridges.served.links`): what the learner sends, and what the
engine's process gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bridges.api import BridgeError, ParamMeta, WeightSource
from bridges.proof import manifest
from bridges.proof.byte_digest import host_digest
from bridges.served.links import Buffer, Link, buckets
from bridges.transports.safetensors_file import host_array, numpy_dtype

if TYPE_CHECKING:
    import torch


def send(link: Link, source: WeightSource, metas: Sequence[ParamMeta], until: float,
         alive: Callable[[], Any]) -> None:
    """Every tensor of `source`, bucket by bucket, and the digests of what was read. `alive` raises when
    nobody receives.

    Raises ValueError where the source contradicts its manifest, EngineUnhealthy at `until`; whatever the
    source raises.
    """
    sent = (_SentFromGpu if link.on_gpu else _SentFromHost)(metas)
    stream, held = sent.read(source), []
    for k, bucket in enumerate(buckets(metas, link.slot_bytes)):
        slot = link.slot(k, until, alive)
        for piece in bucket:
            if piece.start == 0:
                held.append(next(stream))
            slot[piece.at : piece.at + piece.size] = held[-1][piece.start : piece.start + piece.size]
        link.send(k)
        del held[:-1]  # they have been copied; the last may go on in the next bucket
    for _ in stream:  # there is no more, and the source is asked whether it thinks so, too
        pass
    link.finish(sent.digests())


class _SentFromHost:
    """Bytes and digests of what numpy sees without a GPU."""

    def __init__(self, metas: Sequence[ParamMeta]):
        self._metas, self._digests = metas, []

    def read(self, source: WeightSource) -> Iterator[np.ndarray]:
        """uint8 [bytes] of each tensor."""
        for meta, (name, buffer) in zip(self._metas, source, strict=True):
            array = host_array(buffer)
            manifest.check_tensor(meta, name, array.dtype.name, array.shape)
            self._digests.append(host_digest(array))
            yield array.reshape(-1).view(np.uint8)

    def digests(self) -> np.ndarray:
        """[n, 2] uint32."""
        return np.array(self._digests, np.uint32).reshape(-1, 2)


class _SentFromGpu:
    """The same where the source's buffers are on a GPU, and its digests made there."""

    def __init__(self, metas: Sequence[ParamMeta]):
        from bridges.sources.sent import Sent

        self._metas, self._sent = metas, Sent({m.name: i for i, m in enumerate(metas)})

    def read(self, source: WeightSource) -> Iterator[torch.Tensor]:
        import torch

        from bridges.sources.sent import layers

        metas = iter(self._metas)
        for part in layers(source, self._metas):
            views = self._sent.views(part)
            for rows, view in zip(part, views):
                manifest.check_tensor(next(metas), rows.names[0], str(view.dtype).removeprefix("torch."),
                                      view.shape[1:])
            self._sent.digest(part)
            yield from (view.reshape(-1).view(torch.uint8) for view in views)
            part.clear(), views.clear()  # before the next is asked for

    def digests(self) -> np.ndarray:
        self._sent.join()
        return self._sent.digests()


class LinkedWeights:
    """WeightSource in the engine's process: what comes over `link`. For transports that write in place,
    `write_to`; iterated over, it gives copies of whole tensors, made by `convert` of numpy arrays, for any
    other transport to an engine on a CPU."""

    def __init__(self, link: Link, metas: Sequence[ParamMeta], until: float,
                 convert: Callable[[np.ndarray], Any] = np.asarray):
        self._link, self._metas, self._until, self._convert = link, tuple(metas), until, convert

    def manifest(self) -> tuple[ParamMeta, ...]:
        return self._metas

    def write_to(self, targets: Mapping[str, Buffer]) -> np.ndarray:
        """Fill `targets`, uint8 [bytes] by HF name, and return the digests of what was sent: [n, 2] uint32 in
        manifest order."""
        for piece, data in self._link.pieces(self._metas, self._until):
            targets[piece.name][piece.start : piece.start + piece.size] = data
        return self._link.digests(self._until)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Raises BridgeError at the end where what came is not what was sent."""
        arrived, pieces = [], self._link.pieces(self._metas, self._until)
        for meta in self._metas:
            array = np.empty(meta.shape, numpy_dtype(meta.dtype))
            flat, filled = array.reshape(-1).view(np.uint8), 0
            while filled < flat.size:
                piece, data = next(pieces)
                flat[piece.start : piece.start + piece.size] = data
                filled += piece.size
            arrived.append(host_digest(array))
            yield meta.name, self._convert(array)
        for _ in pieces:  # nothing: the last bucket is given back
            pass
        if wrong := [m.name for m, a, b in zip(self._metas, arrived, self._link.digests(self._until))
                     if (a != b).any()]:
            raise BridgeError(f"{wrong[0]} did not arrive as it was sent", "publish again in full")
