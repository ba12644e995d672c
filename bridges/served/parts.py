"""A completion in a served engine while it is sampled: vLLM streams its tokens, so that a checkpoint, or
another replica when one has died, goes on after them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from bridges.admission import Growing
from bridges.api import Capabilities, Completion, EngineDirty, EngineUnhealthy, GenRequest, joined, supports
from bridges.inside_vllm.sampling import seed_of
from bridges.served import token_api
from bridges.served.http_calls import BadAnswer

LARGEST_EVENT = 2**24  # bytes
END = b"[DONE]"


class Stream:
    """The events of one streamed answer -> `choice`, as vLLM answers without a stream. With the plugin, each
    event says which version sampled each token so far."""

    def __init__(self) -> None:
        self._rest = b""
        self.choice: dict[str, Any] = {"token_ids": [], "logprobs": {"content": []}, "finish_reason": None,
                                       "weight_versions": None, "routed_experts": None}

    def take(self, piece: bytes) -> None:
        """Raises BadAnswer for what is no event of vLLM's, EngineUnhealthy for an error."""
        *events, self._rest = (self._rest + piece).split(b"\n\n")
        if len(self._rest) > LARGEST_EVENT:
            raise BadAnswer(f"an event of more than {LARGEST_EVENT >> 20} MiB")
        for event in events:
            if (data := event.removeprefix(b"data: ")) != END:
                self._add(data)

    def _add(self, data: bytes) -> None:
        try:
            said = json.loads(data)
            if "error" in said:
                raise EngineUnhealthy(f"the engine failed in a stream: {str(said['error'])[:300]}")
            [choice] = said["choices"]
            self.choice["token_ids"] += choice["token_ids"]
            self.choice["logprobs"]["content"] += choice["logprobs"]["content"]
            self.choice |= {k: choice[k] for k in ("finish_reason", "weight_versions", "routed_experts")
                            if choice.get(k) is not None}
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as e:
            raise BadAnswer(f"an event of a stream is not one of vLLM's ({type(e).__name__})") from e

    def known(self) -> dict[str, Any]:
        """The choice as far as its versions are told."""
        versions = self.choice["weight_versions"] or []
        n = versions[-1]["end"] if versions else 0
        rows = self.choice["logprobs"]["content"][:n]
        return self.choice | {"token_ids": self.choice["token_ids"][:n], "logprobs": {"content": rows}}


class Part:
    """Completion `index` of `r` from its request until it is done. begun: what was sampled of it before.
    streams: its tokens are asked for as they come."""

    def __init__(self, r: GenRequest, index: int, can: Capabilities, begun: Completion | None = None,
                 streams: bool = True):
        self._asked, self._index, self._can, self._streams = r, index, can, streams
        self._had = begun if begun is not None and len(begun.token_ids) else _nothing(r, index)
        self._left, self._stream = r, Stream()

    @property
    def name(self) -> str:
        return self._asked.request_id

    @property
    def done(self) -> Completion | None:
        return None if self._had.finish_reason == "abort" else self._had

    @property
    def take(self) -> Any:
        """What is told each piece of an answer, or None for an answer in one piece."""
        return self._stream.take if self._streams else None

    def growing(self) -> Growing:
        """As far as its tokens have come."""
        r, here = self._asked, 0 if self.done else len(self._stream.choice["token_ids"])
        return Growing(r.request_id, len(r.prompt_token_ids), len(self._had.token_ids) + here,
                       r.sampling.max_tokens)

    def body(self) -> dict[str, Any]:
        """The JSON that asks for what is left of it, which is not done."""
        had = len(self._had.token_ids)
        seed = seed_of(self._asked, self._index, had)
        self._left = token_api.rest(self._asked, self._had) if had else self._asked
        return token_api.body(self._left, seed, self._can.vocab_size, self._streams)

    def keep(self) -> None:
        """The answer broke off: what it brought is kept, and the next begins behind it."""
        self._had, self._stream = self.so_far(), Stream()

    def so_far(self) -> Completion:
        """What is known of it, with finish_reason "abort" unless it is done."""
        if self.done:
            return self._had
        try:
            known, most = self._with(self._stream.known()), self._asked.sampling.max_tokens
        except (BadAnswer, EngineDirty, TypeError, KeyError, IndexError):  # the end of the stream will say so
            return self._had
        if known.finish_reason == "abort" and len(known.token_ids) == most:  # and the end was not told
            return known.first(most - 1, len(self._asked.prompt_token_ids))
        return known

    def completed(self, answer: Any) -> Completion:
        """The whole of it, once the answer has ended. Raises EngineUnhealthy if that was cut off."""
        if not self._streams:
            return token_api.completion(self._left, self._index, answer, self._can.vocab_size,
                                        self._can.routed_experts)
        said = self._stream.choice["finish_reason"]
        if said not in ("stop", "length"):
            raise EngineUnhealthy(f"request {self.name!r}: its stream ended before it was done ({said})")
        return self._with(self._stream.choice)

    def _with(self, choice: dict[str, Any]) -> Completion:
        now = token_api.completion(self._left, self._index, {"choices": [choice]}, self._can.vocab_size,
                                   routed=False)
        return joined(self._had, now)


def _nothing(r: GenRequest, index: int) -> Completion:
    among = supports(np.zeros((0, 1), np.int32), 0) if r.sampling.reported else (None, None)
    nothing = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return Completion(r.request_id, index, *nothing, "abort", (), None, *among)
