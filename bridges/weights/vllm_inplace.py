"""Weights from JAX into a vLLM engine of the same process, written into the tensors that its CUDA graphs read.

    JAX's stream    make layer i+1, then the digest of layer i as it was sent
    torch's stream  copy layer i to its rows of the engine's tensors
    last            digests of the engine's own tensors, seen by JAX without a copy, must equal those of what was sent

Nothing is staged: of what the source makes on the way two layers are alive at once, and what it only holds is read in place. The
engine is dirty from the first byte until the digests have been compared.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from bridges import manifest
from bridges.api import BridgeError, ParamMeta, PublishFailed, PublishReceipt, StackRow, WeightSource
from bridges.rollout.vllm_engine import BLOCK, VllmEngine, synchronise
from bridges.rollout.vllm_kv_scales import check_host, copy_to_host
from bridges.rollout.vllm_layout import LiveRows, live_rows, packed_copies, scalars
from bridges.rollout.vllm_stacks import stack_of
from bridges.weights.digest import checked_row_digests, joined, stack_digests, tensor_digests, torch_words
from bridges.weights.dlpack import torch_view

if TYPE_CHECKING:
    import torch

LAYERS_A_PROGRAM = 4  # of those that read the engine back: each call costs host time, each layer in it compile time


class Lent(NamedTuple):
    """FP8 weights in the engine's memory: rows [start, stop) of `codes` [L, R, K], E4M3 as uint8, which any torch gives out; and
    a copy of their scales [L, (stop - start)/128, K/128] float32."""

    codes: jax.Array
    scale: jax.Array
    start: int
    stop: int


class VllmInplace:
    """WeightTransport into a `VllmEngine` whose kernels keep the checkpoint's layout. The source's buffers are only read.

    What it lends of the engine's memory is taken back when the next publish begins: the arrays are deleted, and JAX raises at
    whoever uses one afterwards. To JAX they are constants that it does not own, so that donating one cannot write to the engine.

    `targets`: HF name -> the engine's rows for it, a torch tensor.
    """

    def __init__(self):
        self._engine: VllmEngine | None = None
        self._lent: list[jax.Array] = []
        self.targets: dict[str, torch.Tensor] = {}

    def open(self, engine: VllmEngine) -> None:
        """Find every tensor. Raises BridgeError, naming the first, where the engine holds one in a layout not known here."""
        if not isinstance(engine, VllmEngine):
            raise BridgeError(f"VllmInplace writes to a VllmEngine, not a {type(engine).__name__}", "choose its own transport")
        self._rows = engine.on_model(lambda model: live_rows(model, BLOCK)) + scalars(engine.kv_scale_places)
        self._packed = engine.on_model(packed_copies)
        self.targets = {r.meta.name: r.tensor for r in self._rows}
        self._place = {name: i for i, name in enumerate(self.targets)}
        by_layer = sorted(self._rows, key=lambda r: _layer(r.meta.name))
        programs = itertools.groupby(by_layer, lambda r: _layer(r.meta.name) // LAYERS_A_PROGRAM)
        self._readers = [_Reader(list(rows)) for _, rows in programs]
        self._order = np.argsort([self._place[name] for reader in self._readers for name in reader.names])
        self._accepted: tuple[ParamMeta, ...] = ()
        self._engine, self._published = engine, None

    def publish(self, source: WeightSource, version: int) -> PublishReceipt:
        """Write every tensor of `source`, prove it, drop the prefix cache, declare `version` current.

        Raises ManifestMismatch before a byte moves, the engine being as it was; PublishFailed later, the engine being dirty:
        the next publish in full heals it.
        """
        engine, metas, start = self._opened(), source.manifest(), time.perf_counter()
        self._check_manifest(metas)
        self._check_addresses()
        self._take_back()
        engine.begin(version)
        try:
            sent = self._write(source, metas)
        except Exception as e:  # whatever the source raised
            raise PublishFailed(f"version {version} broke off: {e}", "repair the source and publish again in full") from e
        for module in self._packed:
            module.quant_method.process_weights_after_loading(module)
        copy_to_host(engine.kv_scale_places)
        self._compare(self.read_digests(), sent, f"version {version} did not arrive")
        self._published = sent
        caches, seconds = engine.commit(version, self._digest), time.perf_counter() - start
        return PublishReceipt(version, len(metas), self._nbytes, self._digest, seconds, caches, self._content(sent))

    def verify(self, receipt: PublishReceipt) -> None:
        """Read the engine's tensors again. Raises PublishFailed when they are not the receipt's: of another publish, or changed
        since, which leaves the engine dirty."""
        engine = self._opened()
        engine.require_awake()
        have = engine.weight_version(), engine.weight_digest(), self._content(self._published)
        want = receipt.version, receipt.digest, receipt.content
        if have != want:
            raise PublishFailed(f"the engine holds (version, digest, content) {have}, the receipt says {want}", "publish again")
        try:
            check_host(engine.kv_scale_places)
            self._compare(self.read_digests(), self._published, f"the weights of version {receipt.version} have changed")
        except PublishFailed:
            engine.drop("its weights are no longer those that were published")
            raise

    def lend(self, names: Sequence[str]) -> Lent:
        """The FP8 weights `names`, the same linear in consecutive layers, where the engine holds them, until the next publish.

        Raises BridgeError where nothing is published, or where the engine does not hold them in one piece.
        """
        engine = self._opened()
        engine.require_awake()
        if engine.weight_version() is None:
            raise BridgeError("the engine holds no weights that could be lent", "publish first")
        rows = [self._rows[self._place[name]] for name in names]
        codes = _zero_copy(_as_bytes(stack_of(rows)), names[0], jax.dlpack.from_dlpack)
        self._lent.append(codes)
        return Lent(codes, _copied([self.targets[f"{name}_scale_inv"] for name in names]), rows[0].start, rows[0].stop)

    def _take_back(self) -> None:
        for array in self._lent:
            array.delete()
        self._lent.clear()

    def close(self) -> None:
        """Let go of the engine's tensors."""
        self._take_back()
        self._engine, self._rows, self.targets, self._packed, self._readers = None, (), {}, (), []

    def read_digests(self) -> np.ndarray:
        """Digests of the engine's tensors as they are on the device, in the order of `targets`: [n, 2] uint32.

        Raises PublishFailed for a scale that is not positive and finite.
        """
        found = np.asarray(joined([read() for read in self._readers]))[self._order]
        if unsound := [name for name, count in zip(self.targets, found[:, 2]) if count]:
            raise PublishFailed(f"{unsound[0]} holds a scale that is not positive and finite", "look at the learner's weights")
        return found[:, :2]

    def _write(self, source: WeightSource, metas: Sequence[ParamMeta]) -> np.ndarray:
        """Copy a layer at a time while JAX makes the next; digests of what was sent, in the order of `targets`."""
        sent, stream = Sent(self._place), _CopyStream(next(iter(self.targets.values())))
        with stream:
            for layer in layers(source, metas):
                views = sent.views(layer)
                for (meta, name, _), view in zip(layer, views):
                    self._copy(meta, name, view)
                sent.digest(layer, views)
                if not all(_stacked(buffer) for _, _, buffer in layer):
                    stream.wait()  # the layer has been read: JAX may take its memory for the one after the next
                layer.clear(), views.clear()  # before the loop asks for more
        return sent.digests()

    def _copy(self, meta: ParamMeta, name: str, view: torch.Tensor) -> None:
        target = self.targets[meta.name]
        if (name, view.dtype, view.shape) != (meta.name, target.dtype, target.shape):
            manifest.check_tensor(meta, name, str(view.dtype).removeprefix("torch."), view.shape)  # says it at length
        target.copy_(view)

    def _compare(self, have: np.ndarray, want: np.ndarray, problem: str) -> None:
        if wrong := [name for name, same in zip(self.targets, (have == want).all(1)) if not same]:
            raise PublishFailed(
                f"{problem}: {len(wrong)} of {len(have)} tensors of the engine differ from what was sent, first {wrong[0]}",
                "publish again in full; if it happens again, something else writes to the engine's memory",
            )

    def _content(self, digests: np.ndarray | None) -> str:
        return "" if digests is None else hashlib.sha256("\n".join(self.targets).encode() + digests.tobytes()).hexdigest()

    def _check_manifest(self, metas: tuple[ParamMeta, ...]) -> None:
        if metas != self._accepted:
            manifest.check(metas, self._engine.expected_manifest())
            self._accepted, self._digest, self._nbytes = metas, manifest.digest(metas), manifest.nbytes(metas)

    def _check_addresses(self) -> None:
        if moved := [r.meta.name for r in self._rows if r.moved()]:
            raise BridgeError(f"{moved[0]} has moved since the transport was opened: CUDA graphs read where it was",
                              "open the transport on a new engine")  # fmt: skip

    def _opened(self) -> VllmEngine:
        if self._engine is None:
            raise BridgeError("the transport is not open", "call open(engine) first")
        return self._engine


class _Reader:
    """Digests of the engine's tensors of some layers."""

    def __init__(self, rows: list[LiveRows]):
        self._words, self._cuts, self.names = [], [], []
        by_parameter = itertools.groupby(rows, lambda r: (r.parameter.data_ptr(), r.start if r.parameter.dim() < 2 else 0))
        for members in (list(group) for _, group in by_parameter):
            first, vector = members[0], members[0].parameter.dim() < 2  # which has no rows to cut: each part stands alone
            self._words.append(_zero_copy(first.tensor if vector else first.parameter, first.meta.name, torch_words))
            cuts = [(0, 1) if vector else (r.start, r.stop) for r in members]
            self._cuts.append(tuple((*cut, r.meta.role != "weight") for cut, r in zip(cuts, members)))
            self.names += [r.meta.name for r in members]

    def __call__(self) -> jax.Array:
        """[len(names), 3] as `checked_row_digests`."""
        return checked_row_digests(self._words, tuple(self._cuts))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return tensor.view(torch.uint8)


def _zero_copy(tensor: torch.Tensor, name: str, view: Callable[[torch.Tensor], jax.Array]) -> jax.Array:
    seen = view(tensor)
    if seen.unsafe_buffer_pointer() != tensor.data_ptr():
        raise BridgeError(f"JAX takes {name} by copy alone, so that it could not see what the engine holds",
                          "publish by vLLM's own reload: transport VllmReload")  # fmt: skip
    return seen


def _copied(tensors: Sequence[torch.Tensor]) -> jax.Array:
    """[L, ...]: a tensor of its own, which lives as long as JAX's array."""
    import torch

    stack = torch.stack(list(tensors))
    synchronise()
    return jax.dlpack.from_dlpack(stack)


class Sent:
    """What the source gave in one publish: torch views of it, and digests, which nothing waits for until they are asked for.

    A stack is exported once, its rows are digested in one program. place: HF name -> row of the table of digests.
    """

    def __init__(self, place: dict[str, int]):
        self._place = place
        self._stacks: dict[int, tuple[jax.Array, torch.Tensor, jax.Array]] = {}  # by id: stack, its view, its digests
        self._rows: list[tuple[int, int, int]] = []  # place, id of the stack, row
        self._made: list[int] = []  # places of what was not a row of a stack
        self._tables: list[jax.Array] = []  # digests of those

    def views(self, layer: Layer) -> list[torch.Tensor]:
        return [self._row(buffer) if _stacked(buffer) else torch_view(buffer) for _, _, buffer in layer]

    def _row(self, row: StackRow) -> torch.Tensor:
        if (key := id(row.stack)) not in self._stacks:
            self._stacks[key] = row.stack, torch_view(row.stack), stack_digests(row.stack)
        return self._stacks[key][1][row.index]

    def digest(self, layer: Layer, views: list[torch.Tensor]) -> None:
        made = []
        for (_, name, buffer), view in zip(layer, views):
            if _stacked(buffer):
                self._rows.append((self._place[name], id(buffer.stack), buffer.index))
            else:
                self._made.append(self._place[name])
                made.append(buffer if isinstance(buffer, jax.Array) else torch_words(view.contiguous()))
        if made:
            self._tables.append(tensor_digests(made))

    def digests(self) -> np.ndarray:
        """[n, 2] uint32, in the order of places."""
        stacks = [digests for _, _, digests in self._stacks.values()]
        table = np.asarray(joined([*self._tables, *stacks]))
        starts = itertools.accumulate(map(len, stacks), initial=len(self._made))
        first = dict(zip(self._stacks, starts))
        found = np.zeros((len(self._place), 2), np.uint32)
        found[self._made] = table[: len(self._made)]
        for place, key, row in self._rows:
            found[place] = table[first[key] + row]
        return found


Layer = list[tuple[ParamMeta, str, Any]]  # a manifest entry, and the name and buffer that the source gives for it


def layers(source: WeightSource, metas: Sequence[ParamMeta]) -> Iterator[Layer]:
    """The source in lists of a layer. A list ends when the first tensor of the next one shows: asking for that has set the next
    layer going."""
    triples = ((meta, name, buffer) for meta, (name, buffer) in zip(metas, source, strict=True))
    return (list(group) for _, group in itertools.groupby(triples, key=lambda triple: _layer(triple[0].name)))


@functools.cache
def _layer(name: str) -> int:
    """ "model.layers.3.mlp.up_proj.weight" -> 3; -1 outside the layers."""
    found = re.search(r"\.(\d+)\.", name)
    return int(found[1]) if found else -1


def _stacked(buffer: Any) -> bool:
    return isinstance(buffer, StackRow) and isinstance(buffer.stack, jax.Array)


class _CopyStream:
    """A stream of torch's own, of higher priority than JAX's: copies do not queue behind the layer that is being made, and are
    waited for alone. Entered when nothing is at work on the device; on a CPU it is nothing."""

    def __init__(self, target: torch.Tensor):
        import torch

        self._stream = torch.cuda.Stream(target.device, priority=-1) if target.is_cuda else None
        self._context = torch.cuda.stream(self._stream)

    def __enter__(self) -> None:
        if self._stream is not None:
            import torch

            torch.cuda.synchronize()  # the engine may be reading still
        self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.wait()
        self._context.__exit__(*error)

    def wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
