"""vLLM's requests in flight, in this process: handed in, advanced a step at a time, interrupted by a publish.

Between two calls of vLLM's `step` nothing runs, so weights may be written there. What is private to vLLM
stands in this file: its core's pause and resume, and the tokens of a request that is not done. Written for
vLLM 0.32; the core of 0.25 has the same pause and resume.

In an order other than "fifo" (bridges.order), and with `admission` (bridges.admission), completions wait
here, and vLLM gets the next one when one has ended. vLLM's own priorities are given when a request is handed
in, before its siblings' lengths are known.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from bridges.admission import Admission, Growing, Seen
from bridges.api import BridgeError, Completion, EngineUnhealthy, GenRequest, VersionSpan, joined, spans
from bridges.order import Order, Waiting

Finish = Callable[[GenRequest, int, Any, tuple[VersionSpan, ...], int | None], Completion]


@dataclasses.dataclass
class Flight:
    """One completion. key: what vLLM calls it in its answers. name: what it calls it inside, "" until it has
    it. begun: what was sampled of it before it was submitted here. switches: (tokens sampled, the version
    from then on), one for each version. turn: how it waits for its turn."""

    request: GenRequest
    index: int
    begun: Completion | None
    turn: Waiting
    key: str
    name: str = ""
    switches: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    done: Completion | None = None

    def versions(self, tokens: int) -> tuple[VersionSpan, ...]:
        """The spans of the first `tokens` tokens that were sampled here."""
        ends = [start for start, _ in self.switches[1:]] + [tokens]
        counts = [end - start for (start, _), end in zip(self.switches, ends)]
        return spans(np.repeat([version for _, version in self.switches], counts).tolist())


class Flights:
    """The requests in flight in a `vllm.LLM`, which `llm` returns. complete: makes a Completion of what vLLM
    returns. adapter: vLLM's for a request. order: whose turn it is, where vLLM has `places` for so many at
    once; by "fifo" it gets all. admission: how many of these its cache is expected to hold; None for all."""

    def __init__(self, llm: Callable[[], Any], parameters: Callable[[GenRequest, int, int], Any],
                 complete: Finish, adapter: Callable[[GenRequest], Any] = lambda r: None,
                 order: Order | None = None, places: int = 1, admission: Admission | None = None):
        self._llm, self._parameters, self._complete, self._adapter = llm, parameters, complete, adapter
        self._order, self._places = order or Order(), places
        self._admission, self.seen, self._preempted = admission, Seen(), dict[str, int]()
        self._groups: dict[str, list[Flight]] = {}  # those submitted
        self._going: dict[str, Flight] = {}  # all that are not done, by key
        self._age = self._version = 0
        self._paused = self.cache_kept = False

    def __len__(self) -> int:
        return len(self._groups)

    def submit(self, requests: Sequence[GenRequest], begun: Sequence[Sequence[Completion]],
               version: int) -> None:
        for number, r in enumerate(requests):
            self._groups[r.request_id] = self._begin(r, version, begun[number] if number < len(begun) else ())
        self._start()

    def generate(self, requests: Sequence[GenRequest], version: int) -> list[list[Completion]]:
        """All completions of `requests`, beside those in flight, which go on. Also after an interruption of
        its thread none of them is left in vLLM. Raises BridgeError while paused."""
        if self._paused:
            raise BridgeError("the engine is paused", "call resume() first")
        groups = [self._begin(r, version) for r in requests]
        try:
            self._start()
            for flight in itertools.chain(*groups):
                while flight.done is None:
                    self.advance()
        except BaseException:
            self._drop([f for flights in groups for f in flights])
            raise
        return [[f.done for f in flights if f.done] for flights in groups]

    def _begin(self, r: GenRequest, version: int, begun: Sequence[Completion] = ()) -> list[Flight]:
        """The completions of `r`, which wait for their turn unless they are done already."""
        if not self._going:
            self._order.forget()
        self._version, flights = version, []
        for i in range(r.n):
            self._age += 1
            turn = Waiting(r.request_id, self._age, self._order.starts)
            flight = Flight(r, i, None, turn, f"{r.request_id}#{i}.{self._age}")
            if begun and begun[i].finish_reason != "abort":
                flight.done = begun[i]
            else:
                flight.begun = begun[i] if begun and len(begun[i].token_ids) else None
                self._going[flight.key] = flight
            flights.append(flight)
        return flights

    def _start(self) -> None:
        """Hand vLLM the completions whose turn it is."""
        waiting = [f for f in self._going.values() if not f.name]
        if not waiting or self._paused:
            return
        line = [waiting[i] for i in self._order.sorted([f.turn for f in waiting])]
        if self._order.how != "fifo" or self._admission:
            started = [f for f in self._going.values() if f.name]
            line = line[: max(self._places - len(started), 0)]
            if self._admission:
                fits = self._admission.count(list(map(self._growing, started)),
                                             list(map(self._growing, line)), cache_tokens(self._llm()))
                line = line[:fits]
        for flight in line:
            self._order.started(flight.turn.group)
            self._submit(flight)

    def _growing(self, f: Flight) -> Growing:
        length = (len(f.begun.token_ids) if f.begun else 0) + (len(self._tokens(f)) if f.name else 0)
        return Growing(f.turn.group, len(f.request.prompt_token_ids), length, f.request.sampling.max_tokens)

    def _submit(self, f: Flight) -> None:
        """A later completion never meets the keys of this one's prompt, because its version salts the prefix
        cache."""
        r, begun = f.request, f.begun
        tokens = [*r.prompt_token_ids, *(begun.token_ids.tolist() if begun else ())]
        start = len(tokens) - len(r.prompt_token_ids)
        prompt = {"prompt_token_ids": tokens, "cache_salt": f"version {self._version}"}
        given = self._llm().llm_engine.add_request(f.key, prompt, self._parameters(r, f.index, start),
                                                   lora_request=self._adapter(r))
        f.name, f.switches = given or f.key, [(0, self._version)]

    def advance(self) -> None:
        """One step of vLLM, if there is anything to sample. Raises EngineUnhealthy if vLLM has lost it."""
        if not self._paused and self._going:
            if not self._llm().llm_engine.has_unfinished_requests():
                raise EngineUnhealthy(f"vLLM has lost {len(self._going)} completions", "build a new engine")
            self._collect()

    def _collect(self) -> None:
        ended = False
        for out in self._llm().llm_engine.step():
            if out.finished and (flight := self._going.pop(out.request_id, None)):
                flight.done, ended = self._finished(flight, out.outputs[0], out.num_cached_tokens), True
                self._order.finished(flight.turn.group, len(flight.done.token_ids))
                if self._admission:
                    self._admission.finished(len(flight.done.token_ids))
        if self._admission:
            self._look()
        if ended:
            self._start()

    def _look(self) -> None:
        """What vLLM's scheduler did in this step."""
        scheduler = self._core.scheduler
        self.seen.look(len(scheduler.running), scheduler.kv_cache_manager.usage)
        before, self._preempted = self._preempted, self._preemptions()
        self.seen.preemptions += sum(n - before.get(name, 0) for name, n in self._preempted.items())

    def _preemptions(self) -> dict[str, int]:
        """Of each request that vLLM has."""
        return {name: r.num_preemptions for name, r in self._core.scheduler.requests.items()}

    def take(self) -> list[list[Completion]]:
        """Remove and return the groups that are done."""
        ready = [name for name, flights in self._groups.items() if all(f.done for f in flights)]
        return [[f.done for f in self._groups.pop(name) if f.done] for name in ready]

    def partial(self) -> dict[str, list[Completion]]:
        return {name: [f.done or self._so_far(f) for f in flights] for name, flights in self._groups.items()}

    def cancel(self, names: Sequence[str]) -> None:
        self._drop([f for name in names for f in self._groups.pop(name, ())])

    def _drop(self, flights: Sequence[Flight]) -> None:
        gone = [f for f in flights if self._going.pop(f.key, None)]
        self._llm().llm_engine.abort_request([f.key for f in gone if f.name])
        self._start()

    def pause(self, keep_cache: bool) -> None:
        """Stop scheduling. Frames that are on the device already are of the old weights, so they are
        collected first. Without `keep_cache` the running requests are put back, to be computed anew."""
        core = self._core
        core.pause_scheduler("keep", False)
        while getattr(core, "batch_queue", None):
            self._collect()
        if not keep_cache:
            core.pause_scheduler("keep", True)
            self._preempted = self._preemptions()  # by the publish, and not for want of room
        self._paused, self.cache_kept = True, keep_cache and len(self) > 0

    def resume(self, version: int) -> None:
        for flight in self._going.values():
            if flight.name and flight.switches[-1][1] != version:
                flight.switches.append((len(self._tokens(flight)), version))
        self._core.resume_scheduler()
        self._version, self._paused, self.cache_kept = version, False, False
        self._start()

    @property
    def _core(self) -> Any:
        return self._llm().llm_engine.engine_core.engine_core

    def _state(self, flight: Flight) -> Any:
        return self._llm().llm_engine.output_processor.request_states[flight.name]

    def _tokens(self, flight: Flight) -> list[int]:
        return self._state(flight).detokenizer.output_token_ids

    def _so_far(self, f: Flight) -> Completion:
        """What has been sampled of a completion that is not done."""
        if not f.name:
            return f.begun or Completion(f.request.request_id, f.index, np.zeros(0, np.int32),
                                         np.zeros(0, np.float32), "abort", ())
        logprobs = self._state(f).logprobs_processor.logprobs
        return self._finished(f, SimpleNamespace(token_ids=list(self._tokens(f)), logprobs=logprobs,
                                                 finish_reason="abort", routed_experts=None))

    def _finished(self, f: Flight, out: Any, cached: int | None = None) -> Completion:
        rest = self._complete(f.request, f.index, out, f.versions(len(out.token_ids)), cached)
        return joined(f.begun, rest) if f.begun else rest


def cache_tokens(llm: Any) -> int:
    """The tokens that vLLM's cache holds."""
    cache = llm.llm_engine.vllm_config.cache_config
    # vLLM 0.25 tells none; for a model with windows it may be less than this
    return getattr(cache, "kv_cache_size_tokens", None) or cache.num_gpu_blocks * cache.block_size
