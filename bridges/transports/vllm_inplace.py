"""Publish weights from JAX into a vLLM engine of the same process, in place: into the tensors that its CUDA
graphs read.

    JAX's stream    make a part, then compute its digest
    torch's stream  copy the part to its rows of the engine's tensors, while its digest is computed
    at the end      JAX reads the engine's tensors without a copy; their digests must equal the source's

There are no staging buffers. A source that makes its tensors during the publish has one part in memory at a
time; tensors that it holds are read in place. The engine is dirty from the first byte until the digests have
been compared.

If both sides hold a tensor of many layers as rows of one array (`StackSource`, and
`bridges.inside_vllm.stacks` in the engine), a part is such an array; otherwise it is a layer. Each part costs
the host up to a millisecond, in which the device moves hundreds of megabytes. A part is therefore as large as
memory allows, and the next part is not made at the same time.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from bridges.api import (
    BridgeError,
    LentWeights,
    ParamMeta,
    PublishFailed,
    PublishReceipt,
    RolloutEngine,
    Rows,
    WeightSource,
)
from bridges.engines.vllm_engine import VllmEngine, synchronise
from bridges.inside_vllm.kv_scales import check_host, copy_to_host
from bridges.inside_vllm.layout import LiveRows, live_rows, packed_copies, scalars
from bridges.inside_vllm.stacks import layer_of, runs_of, stack_of, stacks_of
from bridges.inside_vllm.writing import check_addresses, copy_rows, renew_packed, span
from bridges.proof import manifest
from bridges.proof.byte_digest import Content
from bridges.proof.digest import checked_row_digests, jax_view, joined, torch_words
from bridges.proof.publishing import check_held, failing, opened
from bridges.sources.sent import Sent, parts

if TYPE_CHECKING:
    import torch

# layers read back by one program if tensors are not stacked: a call costs host time, a layer compile time
LAYERS_A_PROGRAM = 4


class VllmInplace:
    """WeightTransport into a `VllmEngine` whose kernels keep the checkpoint's layout. It only reads the
    source's buffers.

    When the next publish begins, it deletes the arrays that it has lent, and JAX raises an error if one is
    used afterwards. JAX does not own their memory and treats them as constants, so donating one cannot write
    to the engine.

    `targets`: HF name -> the engine's rows for it, a torch tensor. beside_packed: whether it leaves weights
    in four bits to another transport.
    """

    def __init__(self, beside_packed: bool = False):
        self._beside_packed = beside_packed
        self._engine: VllmEngine | None = None
        self._lent: list[jax.Array] = []
        self._places: dict[tuple[str, ...], np.ndarray] = {}
        self._spans: dict[tuple[str, ...], list[torch.Tensor]] = {}
        self.targets: dict[str, torch.Tensor] = {}

    def open(self, engine: RolloutEngine) -> None:
        """Find every tensor of the engine. Raises BridgeError, which names the first tensor with an unknown
        layout."""
        if not isinstance(engine, VllmEngine):
            raise BridgeError(f"VllmInplace writes to a VllmEngine, not a {type(engine).__name__}",
                              "choose its own transport")
        if engine.linears and not self._beside_packed:
            raise BridgeError(f"{engine.linears[0].parts[0][0]} is in four bits, which nothing "
                              f"writes in place",
                              "prove that the engine has the source's: transport VllmPacked")
        rows = engine.on_model(live_rows) + scalars(engine.kv_scale_places)
        by_layer = sorted(stacks_of(rows), key=lambda stack: layer_of(stack[0].meta.name))
        programs = itertools.groupby(by_layer, lambda stack: layer_of(stack[0].meta.name) // LAYERS_A_PROGRAM)
        self._readers = [_Reader(list(stacks)) for _, stacks in programs]
        self._rows = [r for reader in self._readers for r in reader.rows]  # digests are read in this order
        self._packed = engine.on_model(packed_copies)
        self._whole = list({r.address: r for r in self._rows}.values())  # one of each parameter
        self.targets = {r.meta.name: r.tensor for r in self._rows}
        self._place = {name: i for i, name in enumerate(self.targets)}
        self._places.clear(), self._spans.clear()
        self._content = Content(list(self.targets))
        self._accepted: tuple[ParamMeta, ...] = ()
        self._engine, self._published = engine, None

    def publish(self, source: WeightSource, version: int) -> PublishReceipt:
        """Write every tensor of `source`, verify it, drop the prefix cache, and declare `version` current.

        Raises ManifestMismatch before a byte moves, which leaves the engine unchanged, and PublishFailed
        later, which leaves it dirty until the next full publish.
        """
        engine, metas, start = opened(self._engine), source.manifest(), time.perf_counter()
        self._check_manifest(metas)
        check_addresses(self._whole)
        self._take_back()
        engine.begin(version)
        with failing(f"version {version} broke off"):
            digests = self._write(source, metas)
            renew_packed(self._packed)
            reading = self._read()
            sent = digests()  # while the device reads, the host orders and hashes the source's digests
            content = self._content.of(sent)
            copy_to_host(engine.kv_scale_places)
            self._compare(self._digests_of(reading), sent, f"version {version} did not arrive")
            self._published = sent
            caches, seconds = engine.commit(version, self._digest), time.perf_counter() - start
        return PublishReceipt(version, len(metas), self._nbytes, self._digest, seconds, caches, content)

    def verify(self, receipt: PublishReceipt) -> None:
        """Read the engine's tensors again.

        Raises PublishFailed if they belong to another publish than the receipt, or have changed since, which
        leaves the engine dirty. Raises BridgeError if the engine is asleep.
        """
        engine = opened(self._engine)
        published = self._published
        content = "" if published is None else self._content.of(published)
        check_held((engine.weight_version(), engine.weight_digest(), content), receipt, bool(content))
        assert published is not None
        engine.require_awake()
        try:
            check_host(engine.kv_scale_places)
            self._compare(self.read_digests(), published,
                          f"the weights of version {receipt.version} have changed")
        except PublishFailed:
            engine.drop("its weights are no longer those that were published")
            raise

    def lend(self, names: Sequence[str]) -> LentWeights:
        """The FP8 weights `names`, one linear in consecutive layers, in the engine's memory. They are lent
        until the next publish.

        Raises BridgeError before the first publish, and if the engine does not hold them in one piece.
        """
        engine = opened(self._engine)
        engine.require_awake()
        if engine.weight_version() is None:
            raise BridgeError("the engine holds no weights to lend", "publish first")
        rows = [self._rows[self._place[name]] for name in names]
        if len(stacks_of(rows)) > 1:
            raise BridgeError(
                f"{names[0]} and its counterparts in later layers are not contiguous in memory",
                "lend tensors of consecutive layers")
        import torch

        codes = _zero_copy(stack_of(rows).view(torch.uint8), names[0], jax_view)
        self._lent.append(codes)
        scales = _copied([self.targets[f"{name}_scale_inv"] for name in names])
        return LentWeights(codes, scales, rows[0].start, rows[0].stop)

    def _take_back(self) -> None:
        for array in self._lent:
            array.delete()
        self._lent.clear()

    def close(self) -> None:
        """Let go of the engine's tensors."""
        self._take_back()
        self._spans.clear()
        self._engine, self.targets = None, {}
        self._rows, self._whole, self._packed, self._readers = [], [], (), []

    def read_digests(self) -> np.ndarray:
        """Digests of the engine's tensors on the device, in the order of `targets`: [n, 2] uint32.

        Raises PublishFailed for a scale that is not positive and finite.
        """
        return self._digests_of(self._read())

    def _read(self) -> jax.Array:
        """Start reading the engine's tensors, after torch's pending work."""
        return joined([read() for read in self._readers])

    def _digests_of(self, reading: jax.Array) -> np.ndarray:
        found = np.asarray(reading)
        if (unsound := np.flatnonzero(found[:, 2])).size:
            name = list(self.targets)[unsound[0]]
            raise PublishFailed(f"{name} holds a scale that is not positive and finite",
                                "check the learner's weights")
        return found[:, :2]

    def _write(self, source: WeightSource, metas: Sequence[ParamMeta]) -> Callable[[], np.ndarray]:
        """Copy the source part by part -> a function that returns the source's digests, [n, 2] uint32 in the
        order of `targets`."""
        sent, stream = Sent(self._place, self._places), _CopyStream(next(iter(self.targets.values())))
        with stream:
            for part in parts(source, metas):
                self._check_part(part)
                sent.digest(part)
                self._copy_part(part, sent.views(part))
                if not all(rows.held for rows in part):
                    stream.wait()  # the part has been read: JAX may take its memory for the next
                part.clear()  # before the loop asks for the next
        sent.join()
        return sent.digests

    # Loops over a part are in separate functions: otherwise their variables would keep the part in memory
    # until the next one is there.
    def _check_part(self, part: list[Rows]) -> None:
        for rows in part:
            if unknown := [name for name in rows.names if name not in self._place]:
                raise ValueError(f"the source gives {unknown[0]}, which its manifest does not list")
            meta, shape = self._rows[self._place[rows.names[0]]].meta, tuple(rows.stack.shape)
            of_one = shape if rows.first is None else shape[len(shape) - len(meta.shape) :]
            manifest.check_tensor(meta, rows.names[0], str(rows.stack.dtype).removeprefix("torch."), of_one)

    def _copy_part(self, part: list[Rows], views: list[torch.Tensor]) -> None:
        for rows, view in zip(part, views):
            self.copy(rows.names, view)

    def copy(self, names: tuple[str, ...], view: torch.Tensor) -> None:
        """Write view [len(names), ...] to the engine's tensors of these names, without proof."""
        if names not in self._spans:
            self._spans[names] = [span(rows)
                                  for rows in runs_of([self._rows[self._place[name]] for name in names])]
        if len(view) != len(names):  # torch would broadcast a single row
            raise ValueError(f"{len(view)} rows for {len(names)} tensors, first {names[0]}")
        at = 0
        for target in self._spans[names]:
            rows, at = view[at : at + len(target)], at + len(target)
            if (rows.dtype, rows.shape) != (target.dtype, target.shape):
                meta = self._rows[self._place[names[0]]].meta
                # raises a clearer error than torch does
                manifest.check_tensor(meta, names[0], str(view.dtype).removeprefix("torch."), view.shape[1:])
            copy_rows(target, rows)

    def _compare(self, have: np.ndarray, want: np.ndarray, problem: str) -> None:
        if (words := np.flatnonzero(have != want)).size:
            wrong = np.unique(words // 2)
            first = list(self.targets)[wrong[0]]
            raise PublishFailed(
                f"{problem}: {len(wrong)} of {len(have)} tensors of the engine "
                f"differ from those that were sent, first {first}",
                "publish again in full; if it happens again, something else writes to the engine's memory",
            )

    def _check_manifest(self, metas: tuple[ParamMeta, ...]) -> None:
        if metas is not self._accepted and metas != self._accepted:  # experts have tens of thousands
            manifest.check(metas, [r.meta for r in self._rows])
            self._accepted, self._digest, self._nbytes = metas, manifest.digest(metas), manifest.nbytes(metas)


class _Reader:
    """Reads the digests of the engine's tensors of some stacks."""

    def __init__(self, stacks: list[list[LiveRows]]):
        self.rows = [r for rows in stacks for r in rows]
        self._words, self._cuts = [], []
        for rows in stacks:
            first, held, cut = rows[0], span(rows), (0, 1)
            if held.dim() == 3:  # rows of a matrix: read all of it, since only the whole has no gaps
                held, cut = stack_of(rows), (first.start, first.stop)
            words = held if held.dim() == 3 else held.reshape(len(held), 1, -1)
            self._words.append(_zero_copy(words, first.meta.name, torch_words))
            self._cuts.append(((*cut, first.meta.role != "weight"),))

    def __call__(self) -> jax.Array:
        """The result of `checked_row_digests` for all rows: [len(rows), 3] uint32."""
        return checked_row_digests(self._words, tuple(self._cuts))


def _zero_copy(tensor: torch.Tensor, name: str, view: Callable[[torch.Tensor], jax.Array]) -> jax.Array:
    seen = view(tensor)
    if seen.unsafe_buffer_pointer() != tensor.data_ptr():
        raise BridgeError(f"JAX can only copy {name}, so it could not verify the engine's own memory",
                          "publish by vLLM's own reload: transport VllmReload")
    return seen


def _copied(tensors: Sequence[torch.Tensor]) -> jax.Array:
    """The tensors stacked to [L, ...], as a new JAX array."""
    import torch

    stack = torch.stack(list(tensors))
    synchronise()
    return jax_view(stack)


class _CopyStream:
    """A separate torch stream with a higher priority than JAX's. Copies do not queue behind the part that is
    being made, and can be waited for separately. It is entered when the device is idle. On a CPU it does
    nothing."""

    def __init__(self, target: torch.Tensor):
        import torch

        self._stream = torch.cuda.Stream(target.device, priority=-1) if target.is_cuda else None
        self._context = torch.cuda.stream(self._stream)

    def __enter__(self) -> None:
        if self._stream is not None:
            synchronise()  # the engine may still be reading
        self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.wait()
        self._context.__exit__(*error)

    def wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
