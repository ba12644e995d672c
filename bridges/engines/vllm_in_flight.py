"""vLLM's requests in flight, in this process: handed in, advanced a step at a time, interrupted by a publish.

Between two calls of vLLM's `step` nothing runs, so weights may be written there. What is private to vLLM
stands in this file: its core's pause and resume, and the tokens of a request that is not done. Written for
vLLM 0.32; the core of 0.25 has the same pause and resume.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from bridges.api import Completion, GenRequest, VersionSpan, joined, spans

Finish = Callable[[GenRequest, int, Any, tuple[VersionSpan, ...]], Completion]


@dataclasses.dataclass
class Flight:
    """One completion. name: vLLM's for it. begun: what was sampled of it before it was submitted here.
    switches: (tokens sampled, the version from then on), one for each version."""

    request: GenRequest
    index: int
    name: str
    begun: Completion | None
    switches: list[tuple[int, int]]
    done: Completion | None = None

    def versions(self, tokens: int) -> tuple[VersionSpan, ...]:
        """The spans of the first `tokens` tokens that were sampled here."""
        ends = [start for start, _ in self.switches[1:]] + [tokens]
        counts = [end - start for (start, _), end in zip(self.switches, ends)]
        return spans(np.repeat([version for _, version in self.switches], counts).tolist())


class Flights:
    """The requests in flight in a `vllm.LLM`. complete: makes a Completion of what vLLM returns. adapter: vLLM's
    for a request."""

    def __init__(self, llm: Any, parameters: Callable[[GenRequest, int, int], Any], complete: Finish,
                 adapter: Callable[[GenRequest], Any] = lambda r: None):
        self._llm, self._parameters, self._complete, self._adapter = llm, parameters, complete, adapter
        self._groups: dict[str, list[Flight]] = {}
        self._paused = self.cache_kept = False

    def __len__(self) -> int:
        return len(self._groups)

    def submit(self, requests: Sequence[GenRequest], begun: Sequence[Sequence[Completion]], version: int) -> None:
        for number, r in enumerate(requests):
            before = begun[number] if number < len(begun) else ()
            self._groups[r.request_id] = [
                self._submit(r, i, before[i] if before and len(before[i].token_ids) else None, version)
                for i in range(r.n)]

    def _submit(self, r: GenRequest, index: int, begun: Completion | None, version: int) -> Flight:
        """A completion that is done already is not submitted. A later one never meets the keys of this one's
        prompt, because its version salts the prefix cache."""
        if begun is not None and begun.finish_reason != "abort":
            return Flight(r, index, "", None, [], begun)
        tokens = [*r.prompt_token_ids, *(begun.token_ids.tolist() if begun else ())]
        start = len(tokens) - len(r.prompt_token_ids)
        prompt = {"prompt_token_ids": tokens, "cache_salt": f"version {version}"}
        name = f"{r.request_id}#{index}"
        given = self._llm.llm_engine.add_request(name, prompt, self._parameters(r, index, start),
                                                  lora_request=self._adapter(r))
        return Flight(r, index, given or name, begun, [(0, version)])

    def advance(self) -> None:
        """One step of vLLM, if there is anything to sample."""
        if not self._paused and any(True for _ in self._going()):
            self._collect()

    def _collect(self) -> None:
        going = {f"{f.request.request_id}#{f.index}": f for f in self._going()}
        for out in self._llm.llm_engine.step():
            if out.finished and (flight := going.get(out.request_id)):
                flight.done = self._finished(flight, out.outputs[0])

    def take(self, names: Sequence[str] | None = None) -> list[list[Completion]]:
        """Remove and return the groups that are done, of `names` if they are given."""
        ready = [name for name, flights in self._groups.items()
                 if all(f.done for f in flights) and (names is None or name in names)]
        return [[f.done for f in self._groups.pop(name) if f.done] for name in ready]

    def partial(self) -> dict[str, list[Completion]]:
        return {name: [f.done or self._so_far(f) for f in flights] for name, flights in self._groups.items()}

    def cancel(self, names: Sequence[str]) -> None:
        gone = [f for name in names for f in self._groups.pop(name, ())]
        self._llm.llm_engine.abort_request([f"{f.request.request_id}#{f.index}" for f in gone if not f.done])

    def pause(self, keep_cache: bool) -> None:
        """Stop scheduling. Frames that are on the device already are of the old weights, so they are
        collected first. Without `keep_cache` the running requests are put back, to be computed anew."""
        core = self._core
        core.pause_scheduler("keep", False)
        while getattr(core, "batch_queue", None):
            self._collect()
        if not keep_cache:
            core.pause_scheduler("keep", True)
        self._paused, self.cache_kept = True, keep_cache and len(self) > 0

    def resume(self, version: int) -> None:
        for flight in self._going():
            if flight.switches[-1][1] != version:
                flight.switches.append((len(self._tokens(flight)), version))
        self._core.resume_scheduler()
        self._paused = self.cache_kept = False

    @property
    def _core(self) -> Any:
        return self._llm.llm_engine.engine_core.engine_core

    def _going(self) -> Iterator[Flight]:
        return (f for flights in self._groups.values() for f in flights if f.done is None)

    def _state(self, flight: Flight) -> Any:
        return self._llm.llm_engine.output_processor.request_states[flight.name]

    def _tokens(self, flight: Flight) -> list[int]:
        return self._state(flight).detokenizer.output_token_ids

    def _so_far(self, f: Flight) -> Completion:
        """What has been sampled of a completion that is not done."""
        logprobs = self._state(f).logprobs_processor.logprobs
        return self._finished(f, SimpleNamespace(token_ids=list(self._tokens(f)), logprobs=logprobs,
                                                 finish_reason="abort", routed_experts=None))

    def _finished(self, f: Flight, out: Any) -> Completion:
        rest = self._complete(f.request, f.index, out, f.versions(len(out.token_ids)))
        return joined(f.begun, rest) if f.begun else rest
