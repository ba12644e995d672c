"""The contracts between a learner and a rollout engine. numpy and the standard library only.

Tokens in, tokens out: no text and no model object crosses the seam. Weights cross it in checkpoint (Hugging
Face) layout: `[out, in]`, an FP8 weight as E4M3 `NAME.weight` with float32 `NAME.weight_scale_inv`, one scale
a 128x128 block.

A learner implements `WeightSource`; an engine implements `RolloutEngine`; `WeightTransport` joins the two.
Either side can be swapped without the other noticing: `bridges.conformance` is the test suite that holds them
to this page.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

FinishReason = Literal["stop", "length", "abort"]
Role = Literal["weight", "block_scale", "kv_scale"]


class BridgeError(RuntimeError):
    """Base of every error raised at the seam. `next_step` says what to do about it."""

    def __init__(self, message: str, next_step: str = ""):
        super().__init__(f"{message}\n  next step: {next_step}" if next_step else message)
        self.next_step = next_step


class EngineDirty(BridgeError):
    """The engine may hold a mixture of two weight versions: it refuses to generate until a full publish
    succeeds."""


class EngineUnhealthy(BridgeError):
    """The engine returned something impossible (a NaN log-probability, say): its weights or kernels are not
    to be trusted."""


class PublishFailed(BridgeError):
    """A publish stopped half-way or did not verify. The engine is dirty."""


class ManifestMismatch(PublishFailed):
    """The source's tensors are not those the engine expects. Raised before any byte moves."""


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How a token is drawn from logits [V]: divide by `temperature`, keep the `top_k` largest, then the
    `top_p` nucleus.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 switch the filters off. Generation stops after
    `max_tokens` tokens or after a token of `stop_token_ids`, which is part of the completion. `support`: of
    each draw that is filtered report the tokens that the filters left, if they are at most so many; 0: report
    none.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    support: int = 0

    @property
    def reported(self) -> int:
        """`support` of draws that have one: neither greedy nor from the whole vocabulary."""
        return self.support if self.temperature > 0 and (self.top_k > 0 or self.top_p < 1) else 0

    def __post_init__(self):
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be finite and not negative, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or positive, got {self.top_k}")
        if self.support < 0:
            raise ValueError(f"support must be 0 (none) or positive, got {self.support}")


@dataclasses.dataclass(frozen=True)
class GenRequest:
    """Ask for `n` completions of one prompt. Written by the learner, read by the engine.

    `seed`, of 32 bits, makes the n completions reproducible on one engine and stack; None leaves the engine's
    own stream.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    n: int = 1
    seed: int | None = None

    def __post_init__(self):
        if not self.prompt_token_ids:
            raise ValueError(f"request {self.request_id!r}: the prompt has no tokens")
        if self.n < 1:
            raise ValueError(f"request {self.request_id!r}: n must be at least 1, got {self.n}")
        if self.seed is not None and not 0 <= self.seed < 2**32:
            raise ValueError(f"request {self.request_id!r}: a seed lies in [0, 2^32), got {self.seed}")


@dataclasses.dataclass(frozen=True)
class VersionSpan:
    """Tokens [start, stop) of a completion were sampled at weight `version`."""

    start: int
    stop: int
    version: int


@dataclasses.dataclass(frozen=True)
class Completion:
    """One sampled continuation. Written by the engine, read by the learner.

    token_ids [T] int32, the stop token included. logprobs [T] float32: log-probability of each token under
    the distribution it was really drawn from (after temperature and filters). routed_experts [P + T - 1, L,
    k] unsigned, of MoE models alone: the experts of every token that was computed with, those of the prompt
    [P] first and the last sampled one left out; of all layers, whatever stands there for dense ones.

    The support of a token are the tokens that it was drawn among, itself one of them, over which its
    log-probability is normalised. support_sizes [T] int32: how many, 0 where they are more than was asked
    for; support_ids [sum of these] int32: which, one token's after the other's, in any order. Both None where
    none was asked for (SamplingParams.reported).
    """

    request_id: str
    index: int
    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...]
    routed_experts: np.ndarray | None = None
    support_ids: np.ndarray | None = None
    support_sizes: np.ndarray | None = None

    def problem(self) -> str | None:
        """What makes this completion unfit to learn from, or None. The learner rejects the whole group on a
        problem."""
        if self.logprobs is None or len(self.logprobs) != len(self.token_ids):
            have = "none" if self.logprobs is None else str(len(self.logprobs))
            return f"{len(self.token_ids)} tokens but {have} log-probabilities"
        if len(self.token_ids) == 0:
            return "no tokens"
        if not np.isfinite(self.logprobs).all():
            at = int(np.flatnonzero(~np.isfinite(self.logprobs))[0])
            return f"log-probability {self.logprobs[at]} at token {at}"
        if (np.asarray(self.logprobs) > 1e-3).any():
            at = int(np.argmax(self.logprobs))
            return f"log-probability {self.logprobs[at]:.4g} above 0 at token {at}"
        return self._problem_of_support()

    def _problem_of_support(self) -> str | None:
        ids, sizes = self.support_ids, self.support_sizes
        if ids is None or sizes is None:
            return None if ids is sizes else "half of a support"
        if len(sizes) != len(self.token_ids) or (sizes < 0).any() or sizes.sum() != len(ids):
            return f"{len(self.token_ids)} tokens with {len(sizes)} supports of {sizes.sum()} tokens in all, {len(ids)} ids"
        owner = np.repeat(np.arange(len(sizes)), sizes)
        found = np.bincount(owner, self.token_ids[owner] == ids, len(sizes))
        if (wrong := (sizes > 0) & (found != 1)).any():
            at = int(np.argmax(wrong))
            return f"token {at} is {int(found[at])} times in its own support"
        return None

    def first(self, n: int, prompt_tokens: int) -> Completion:
        """Its first `n` tokens, after a prompt of so many: all that is by token is cut."""
        spans = (dataclasses.replace(s, stop=min(s.stop, n)) for s in self.version_spans if s.start < n)
        routes, ids, sizes = self.routed_experts, self.support_ids, self.support_sizes
        return dataclasses.replace(
            self, token_ids=self.token_ids[:n], logprobs=self.logprobs[:n], version_spans=tuple(spans),
            routed_experts=None if routes is None else routes[: prompt_tokens + n - 1],
            support_ids=None if ids is None else ids[: sizes[:n].sum()],
            support_sizes=None if sizes is None else sizes[:n],
        )


def supports(left: np.ndarray, support: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens left for each draw [T, up to support + 1], -1 for none, as Completion.support_ids and
    support_sizes."""
    sizes = (left >= 0).sum(-1)
    sizes = np.where(sizes > support, 0, sizes).astype(np.int32)
    return left[(left >= 0) & (sizes[:, None] > 0)], sizes


@dataclasses.dataclass(frozen=True)
class EngineFormats:
    """What an engine computes in. `fp8_unified` mirrors it, so that learner and engine agree by construction.

    weights: "bfloat16" | "float16" | "float32" | "fp8_e4m3_128x128" activations: the format in which
    activations enter a quantised product: a float type, or "fp8_e4m3_1x128" kv_cache: a float type, or
    "fp8_e4m3" kv_truncated: that cache is written towards zero, not to the nearest code (vLLM's CPU kernels
    cut the bits off) compute: the float type of everything else attention: "fp8_e4m3" where attention over an
    FP8 cache rounds queries and probabilities too (FlashAttention 3 does,
        both with scale 1 unless calibrated, probabilities times 2^8), else None: they stay in `compute`
    logits: the float type that logits are rounded to before the softmax fused: a compiled engine, which keeps
    float32 between the operations that it fuses. A norm sees the sum with the residual
        before that is rounded and rounds once, after its weight; silu(gate) * up is rounded once, if at all
    fused_quantizer: of such an engine, activations are quantised to FP8 inside RMSNorm and SiLU (all but
    o_proj's), where the
        norm is rounded before and after its weight, silu(gate) * up not at all, and amax has a floor of 2^-9
    unrounded_sums: an engine that is not compiled whose norms add the residual themselves, and see the sum
    before it is rounded
        (vLLM's torch form; its CUDA kernel rounds first). Those of a compiled one always do
    probabilities: the float type in which exp(score - max) enters attention's product with the values; None:
    the values' own amax_floor: the least amax that activations are quantised by, where their quantiser is not
    fused
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
    """What an engine is and can do. Read once by the learner at start-up."""

    engine: str
    engine_version: str
    formats: EngineFormats
    max_model_len: int
    vocab_size: int
    seeds: bool
    routed_experts: bool = False
    support: bool = False


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
    """Proof of a publish: what crossed and which caches were dropped.

    digest: of the manifest that crossed. content: of every tensor's bytes, read back from the engine and
    found equal to the source's; "" from a transport that cannot read the engine.
    """

    version: int
    tensors: int
    bytes: int
    digest: str
    seconds: float
    caches_reset: tuple[str, ...]
    content: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class StackRow:
    """A buffer: row `index` of `stack`, an array with one axis more, as a learner holds the layers that it
    scans over; or with more axes, if `index` is a tuple, as it holds the experts of those layers.

    Who knows this class reads the row where it lies; for anyone else `__dlpack__` and `__array__` copy it
    out.
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
    """Named buffers, in the manifest's order. A buffer is anything with `__dlpack__` on the engine's device,
    a StackRow too.

    Buffers may be made while they are asked for. Those made by JAX may be dropped once the next layer has
    been asked for; others must stay as they are until the publish is over.
    """

    def manifest(self) -> tuple[ParamMeta, ...]: ...

    def __iter__(self) -> Iterator[tuple[str, Any]]: ...


class Rows(NamedTuple):
    """Tensors in one piece: `names[i]` is row `first + i` of `stack`; if `first` is None, the one name is the
    whole of `stack`. Rows are counted over all the axes that `stack` has more than a tensor: layers, or
    layers and experts.

    `held`: it stays as it is until the publish is over.
    """

    names: tuple[str, ...]
    stack: Any
    first: int | None
    held: bool


@runtime_checkable
class StackSource(WeightSource, Protocol):
    """A WeightSource of a learner that scans over its layers: a tensor of many layers is one array to it.

    `stacks` gives every tensor of the manifest once, in any order. What is not held is made while it is asked
    for, in parts of up to `nbytes` (of one layer at least), and is let go by both before the next is asked
    for.
    """

    def stacks(self, nbytes: int) -> Iterator[list[Rows]]: ...


@runtime_checkable
class RolloutEngine(Protocol):
    """A sampler of tokens. `generate` returns len(requests) lists of n completions each, in the order asked.

    Raises EngineDirty when generate is called before the first publish has succeeded or after one has failed.
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
class WeightTransport(Protocol):
    """Carries a WeightSource into an engine. Resetting the prefix cache is part of `publish`.

    `publish` checks the manifest first (ManifestMismatch before a byte moves); a failure later leaves the
    engine dirty (PublishFailed). `verify` raises PublishFailed when the engine no longer holds what the
    receipt says; BridgeError when it is asleep and would have to be read.
    """

    def open(self, engine: RolloutEngine) -> None: ...

    def publish(self, source: WeightSource, version: int) -> PublishReceipt: ...

    def verify(self, receipt: PublishReceipt) -> None: ...

    def close(self) -> None: ...
