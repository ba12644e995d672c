"""The contracts between a learner and a rollout engine. numpy and the standard library only.

Engines take tokens and return tokens: no text and no model object crosses the seam. Weights cross it in
checkpoint (Hugging Face) layout: `[out, in]`, an FP8 weight as E4M3 `NAME.weight` with float32
`NAME.weight_scale_inv`, one scale a 128x128 block.

A learner implements `WeightSource`; an engine implements `RolloutEngine`; `WeightTransport` joins the two.
Either side can be replaced without changing the other. `bridges.conformance` is the test suite for these
contracts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from bridges.tokens import (
    Completion,
    FinishReason,
    GenRequest,
    SamplingParams,
    VersionSpan,
    joined,
    spans,
    supports,
)

__all__ = [
    "AdaptedSource", "AdapterTransport", "BridgeError",
    "Capabilities", "Completion", "Cut", "EngineDirty", "EngineFormats", "EngineUnhealthy",
    "FinishReason", "GenRequest", "Health", "InFlight", "LendingTransport", "LentWeights", "ManifestMismatch",
    "ParamMeta", "PublishFailed", "PublishReceipt", "Role", "RolloutEngine", "Rows", "SamplingParams",
    "ShardSource", "StackRow", "StackSource", "VersionSpan", "WeightSource", "WeightTransport", "joined",
    "spans", "supports",
]

Role = Literal["weight", "block_scale", "kv_scale"]
Cut = tuple[tuple[int, int], ...]  # (start, stop) along each axis of a tensor; of a single number ()


class BridgeError(RuntimeError):
    """Base of every error raised at the seam. `next_step` says what to do about it."""

    def __init__(self, message: str, next_step: str = ""):
        super().__init__(f"{message}\n  next step: {next_step}" if next_step else message)
        self.next_step = next_step


def first_line(error: BaseException | None) -> str:
    return str(error).partition("\n")[0]


class EngineDirty(BridgeError):
    """The engine may hold a mixture of two weight versions: it refuses to generate until a full publish
    succeeds."""


class EngineUnhealthy(BridgeError):
    """The engine returned an impossible result, such as a NaN log-probability: its weights or kernels cannot
    be trusted."""


class PublishFailed(BridgeError):
    """A publish stopped half-way or did not verify. The engine is dirty."""


class ManifestMismatch(PublishFailed):
    """The source's tensors are not those the engine expects. Raised before any byte moves."""


@dataclasses.dataclass(frozen=True)
class EngineFormats:
    """The number formats of an engine. `fp8_unified` mirrors them, so that learner and engine agree by
    construction.

    weights: "bfloat16" | "float16" | "float32" | "fp8_e4m3_128x128" | "nvfp4" | "mxfp4" | "int4".
    activations: the format in which activations enter a quantised product: a float type or "fp8_e4m3_1x128".
    kv_cache: a float type or "fp8_e4m3".
    compute: the float type of everything else.
    attention: "fp8_e4m3" where attention over an FP8 cache rounds queries and probabilities, too, as
        FlashAttention 3 does: both with scale 1 unless calibrated, probabilities times 2^8. Otherwise None:
        they stay in `compute`.
    logits: the float type to which logits are rounded before the softmax.
    fused: the engine is compiled and keeps float32 between the operations that it fuses. A norm sees the sum
        with the residual before that is rounded, and rounds once, after its weight. silu(gate) * up is
        rounded once, if at all. An engine that fuses no quantiser rounds the residual once a layer.
    fused_quantizer: a fused engine quantises activations to FP8 inside RMSNorm and SiLU (all but those of
        o_proj). The norm then rounds before and after its weight, silu(gate) * up is not rounded, and amax
        has a floor of 2^-9.
    kv_truncated: the FP8 cache is rounded towards zero, not to the nearest code. vLLM's CPU kernels do so.
    unrounded_sums: an engine that is not compiled adds the residual inside its norms and sees the sum before
        it is rounded. vLLM's torch form does so, its CUDA kernel rounds first. A compiled engine always does.
    probabilities: the float type in which exp(score - max) enters attention's product with the values. None:
        the type of the values.
    amax_floor: the smallest amax that activations are quantised by where their quantiser is not fused.
    """

    weights: str
    activations: str
    kv_cache: str
    compute: str
    attention: str | None = None
    logits: str = "float32"
    fused: bool = False
    fused_quantizer: bool = False
    kv_truncated: bool = False
    unrounded_sums: bool = False
    probabilities: str | None = None
    amax_floor: float = 1e-10


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """An engine's properties and abilities. The learner reads them once, at start-up.

    adapters: how many low-rank adapters it holds by name, beside that of requests that name none.
    """

    engine: str
    engine_version: str
    formats: EngineFormats
    max_model_len: int
    vocab_size: int
    seeds: bool
    routed_experts: bool = False
    support: bool = False
    adapters: int = 0

    def check(self, r: GenRequest) -> None:
        """Raise ValueError for a request with more tokens than max_model_len, with a token outside the
        vocabulary, or with an adapter where the engine holds none by name."""
        if r.adapter and not self.adapters:
            raise ValueError(f"request {r.request_id!r} names the adapter {r.adapter!r}, and this engine "
                             f"holds none by name")
        tokens, most = len(r.prompt_token_ids), r.sampling.max_tokens
        if tokens + most > self.max_model_len:
            raise ValueError(f"request {r.request_id!r}: {tokens} prompt tokens and max_tokens {most} exceed "
                             f"max_model_len {self.max_model_len}")
        if not 0 <= min(r.prompt_token_ids) <= max(r.prompt_token_ids) < self.vocab_size:
            raise ValueError(f"request {r.request_id!r}: a prompt token lies outside the vocabulary of "
                             f"{self.vocab_size}")


@dataclasses.dataclass(frozen=True)
class Health:
    """Whether an engine can generate, and if not, why."""

    ok: bool
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class ParamMeta:
    """One tensor on the wire: its HF name, numpy-style dtype name ("bfloat16", "float8_e4m3fn", ...), shape
    and role.

    `block` is the (rows, columns) one scale covers: set on an FP8 weight and on its `block_scale`, None
    otherwise.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: Role = "weight"
    block: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class PublishReceipt:
    """Proof of a publish: the number of tensors and bytes that moved, digests, and the caches that were
    dropped.

    digest: of the manifest. content: a digest of every tensor's bytes, read back from the engine and found
    equal to the source's; "" from a transport that cannot read the engine.
    """

    version: int
    tensors: int
    bytes: int
    digest: str
    seconds: float
    caches_reset: tuple[str, ...]
    content: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """A buffer, or a StackRow, that is neither written to nor donated as long as anything refers to it: a
    reader in the same process may keep it in place of a copy."""

    buffer: Any


@dataclasses.dataclass(frozen=True, eq=False)
class StackRow:
    """A buffer that is row `index` of `stack`, an array with one more axis.

    A learner that scans over its layers holds them so. With a tuple as `index`, `stack` has as many more
    axes: layers and experts. A reader that knows this class reads the row where it lies; for any other
    `__dlpack__` and `__array__` copy it out.
    """

    stack: Any
    index: int | tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.stack.shape[len(self.index) if isinstance(self.index, tuple) else 1 :])

    @property
    def dtype(self) -> Any:
        return self.stack.dtype

    @property
    def nbytes(self) -> int:
        return self.stack.dtype.itemsize * math.prod(self.shape)

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.stack[self.index].__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[Any, int]:
        return self.stack.__dlpack_device__()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.stack[self.index], dtype=dtype)


@runtime_checkable
class WeightSource(Protocol):
    """Named buffers, in the manifest's order. A buffer is a StackRow, or anything else with `__dlpack__` on
    the engine's device.

    A source may make its buffers when they are requested. It may drop buffers made by JAX once the next layer
    is requested; all others must stay unchanged until the publish is over.
    """

    def manifest(self) -> tuple[ParamMeta, ...]: ...

    def __iter__(self) -> Iterator[tuple[str, Any]]: ...


class Rows(NamedTuple):
    """Tensors in one piece: `names[i]` is row `first + i` of `stack`.

    If `first` is None, there is one name, and it is the whole of `stack`. Rows are counted over all the axes
    that `stack` has more than a tensor: layers, or layers and experts. `held`: `stack` stays unchanged until
    the publish is over.
    """

    names: tuple[str, ...]
    stack: Any
    first: int | None
    held: bool


@runtime_checkable
class StackSource(WeightSource, Protocol):
    """A WeightSource of a learner that scans over its layers: a tensor of many layers is one array to it.

    `stacks` yields every tensor of the manifest once, in any order. A part that is not held is made when it
    is requested. It has up to `nbytes` bytes, and at least one layer; source and reader drop it before the
    next part is requested.
    """

    def stacks(self, nbytes: int) -> Iterator[list[Rows]]: ...


@runtime_checkable
class PackedSource(WeightSource, Protocol):
    """A WeightSource with weights in four bits, whose tensors are those of a FourBits (docs/lora.md).

    `decoded`: the columns [N, stop - start] of the weight `name`, "model.layers.0.mlp.up_proj.weight": the
    numbers that the learner computes with, float32.
    """

    def decoded(self, name: str, start: int, stop: int) -> Any: ...


@runtime_checkable
class ShardSource(WeightSource, Protocol):
    """A WeightSource of a learner whose devices, perhaps in several processes, hold boxes of the tensors.

    `held`: by tensor of the manifest, (process, its box) for each box; all processes say the same. `boxes`
    yields, for each tensor, the buffers of those `wanted` of it, which this process holds. No box is moved
    to another device. `lasting`, which a source may lack: whether all boxes lie in memory already, so that a
    transport may hold them all before it stops an engine; False: they are made when they are requested.
    """

    def held(self) -> Sequence[Sequence[tuple[int, Cut]]]: ...

    def boxes(self, wanted: Sequence[Sequence[Cut]]) -> Iterator[Sequence[Any]]: ...


@runtime_checkable
class RolloutEngine(Protocol):
    """A sampler of tokens. `generate` returns len(requests) lists of n completions each, in the order of the
    requests.

    `generate` raises EngineDirty before the first publish has succeeded, and after a publish has failed.
    """

    def capabilities(self) -> Capabilities: ...

    def generate(self, requests: Sequence[GenRequest]) -> list[list[Completion]]: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def health(self) -> Health: ...

    def weight_version(self) -> int | None: ...

    def close(self) -> None: ...


@runtime_checkable
class InFlight(RolloutEngine, Protocol):
    """A RolloutEngine that can be interrupted: its completions go on after a publish.

    `submit` hands in requests. `begun`: for each request its completions so far, or none; those with
    finish_reason "abort" go on after their tokens, which keep their log-probabilities and versions. `poll`
    samples for a moment and returns the n completions of each request that has finished since the last call.
    `partial` returns, by request_id, the n completions of each request in flight, those that are not done
    with finish_reason "abort" and perhaps no tokens. `cancel` forgets requests.

    A publish with requests in flight stands between `pause` and `resume`. If the engine has `publish_pauses`,
    true, it need not: a publish then freezes them by itself, as late as it can. With `keep_cache` their keys
    and values stay those of the older weights; without it they are computed again. In both cases the reported
    log-probabilities are those that tokens were sampled with, and `version_spans` says by which version.
    `generate` may be called while requests are in flight. `submit` raises EngineDirty as `generate` does.
    """

    def submit(self, requests: Sequence[GenRequest], begun: Sequence[Sequence[Completion]] = ()) -> None: ...

    def poll(self) -> list[list[Completion]]: ...

    def partial(self) -> dict[str, list[Completion]]: ...

    def cancel(self, request_ids: Sequence[str]) -> None: ...

    def pause(self, keep_cache: bool = True) -> None: ...


@runtime_checkable
class WeightTransport(Protocol):
    """Carries a WeightSource into an engine. Resetting the prefix cache is part of `publish`.

    `publish` checks the manifest first and raises ManifestMismatch before a byte moves. A later failure
    raises PublishFailed and leaves the engine dirty, unless the source failed before the engine was stopped.
    `verify` raises PublishFailed if the engine no longer holds the weights of the receipt, and BridgeError if
    the engine is asleep and would have to be read.
    """

    def open(self, engine: RolloutEngine) -> None: ...

    def publish(self, source: WeightSource, version: int) -> PublishReceipt: ...

    def verify(self, receipt: PublishReceipt) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class AdaptedSource(WeightSource, Protocol):
    """A WeightSource of weights that have low-rank adapters beside them.

    It gives what `base` gives, then what `adapters` gives: A [r, K] and s B [N, r] of a linear, under the
    names of its weight with "lora_A.weight" and "lora_B.weight". `base_parts`: the arrays that the base is
    made of. A later source with the very same arrays has the same base, which a transport need not send
    again.
    """

    base: WeightSource
    adapters: WeightSource

    def base_parts(self) -> tuple[Any, ...]: ...


@runtime_checkable
class AdapterTransport(WeightTransport, Protocol):
    """A WeightTransport into an engine that holds several adapters over one base. Requests choose one by name
    (GenRequest.adapter); the others get that of `publish`.

    `publish_adapter` takes a source of adapters alone and leaves all else as it is. Its receipt is not for
    `verify`, which reads all adapters of the engine beside the weights.
    """

    def publish_adapter(self, name: str, source: WeightSource, version: int) -> PublishReceipt: ...

    def drop_adapter(self, name: str) -> None: ...


class LentWeights(NamedTuple):
    """FP8 weights of L layers in the engine's memory, as JAX arrays.

    The weights are rows [start, stop) of `codes` [L, R, K]. The codes are E4M3 but have dtype uint8, which
    every version of torch can export. `scale` [L, (stop - start)/128, K/128] float32 is a copy.
    """

    codes: Any
    scale: Any
    start: int
    stop: int


@runtime_checkable
class LendingTransport(WeightTransport, Protocol):
    """A WeightTransport that lends the FP8 weights in the engine's memory until the next publish."""

    def lend(self, names: Sequence[str]) -> LentWeights: ...
