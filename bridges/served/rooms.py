"""How many completions served engines are handed: as many as each one's cache is expected to hold."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bridges.admission import Admission, Seen
from bridges.api import BridgeError
from bridges.served.parts import Part

METRICS = "/metrics"  # vLLM's, in Prometheus' format
CACHE, PREEMPTIONS = "vllm:cache_config_info", "vllm:num_preemptions_total"
NEXT = 'start it without --disable-log-stats, or set rollout.admit = "all"'


class Cache(NamedTuple):
    """Of one engine: the tokens that it holds, and those of a page."""

    tokens: int
    page: int


def cache_of(url: str, metrics: str) -> Cache:
    """Raises BridgeError if vLLM's metrics do not tell."""
    line = next((x for x in metrics.splitlines() if x.startswith(CACHE + "{")), "")
    told = {name: int(value) for name, value in re.findall(r'(\w+)="(\d{1,15})"', line)}
    page = told.get("block_size", 0)
    tokens = told.get("kv_cache_size_tokens") or told.get("num_gpu_blocks", 0) * page
    if not page or tokens < page:
        raise BridgeError(f"{url}{METRICS}: no {CACHE} with the size of its cache, which "
                          'rollout.admit = "cache" goes by', NEXT)
    return Cache(tokens, page)


def preemptions(metrics: str) -> int:
    """Since the engine started."""
    return sum(int(float(n)) for n in re.findall(rf"^{PREEMPTIONS}\{{.*\}} (\d[\d.e+]*)$", metrics, re.M))


class Rooms:
    """The caches of replicas, by address. A completion is a part and its home, the list of the replica that
    has its prompt, or of none yet."""

    def __init__(self, caches: Mapping[str, Cache]):
        self._caches, self.seen = caches, Seen()
        self._admission = Admission(max(c.page for c in caches.values()))
        self._told: dict[str, int] = {}

    def finished(self, length: int) -> None:
        self._admission.finished(length)

    def fitting(self, inside: Sequence[tuple[Part, list[Any]]], waiting: Sequence[tuple[Part, list[Any]]],
                replicas: Sequence[Any]) -> list[tuple[int, Any]]:
        """Which of `waiting` may start, the first first, and at which of the replicas that are up: at its
        home, or where the fewest are. Nobody passes over another who waits for the same replica."""
        running = {r: [part.growing() for part, home in inside if home and home[0] is r] for r in replicas}
        lines, homes = {r: list[int]() for r in replicas}, dict[int, Any]()
        for i, (_, home) in enumerate(waiting):
            at = home[0] if home and home[0] in running else homes.get(id(home))
            at = at or min(replicas, key=lambda r: len(running[r]) + len(lines[r]))
            homes[id(home)] = at
            lines[at].append(i)
        found = []
        for r, line in lines.items():
            fits = self._admission.count(running[r], [waiting[i][0].growing() for i in line],
                                         self._caches[r.url].tokens)
            found += [(i, r) for i in line[:fits]]
        use = [self._admission.held(g) / self._caches[r.url].tokens for r, g in running.items()]
        self.seen.look(len(inside), max(use))
        return sorted(found)

    def preempted(self, url: str, metrics: str) -> None:
        """What the engine at `url` tells. One that was started anew counts from 0."""
        before, now = self._told.get(url, 0), preemptions(metrics)
        self.seen.preemptions += now - before if now >= before else now
        self._told[url] = now
