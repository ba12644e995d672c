"""Requests in flight in the embedded engine: the host's half of `bridges.engines.batch`.

A prompt waits until there are numbers and pages for it and its sequences. It enters the batch with others,
packed into rows. The device then starts, decodes and ends sequences by itself, and the host looks after every
few tokens: it takes what is done, and lets sequences that were put out enter again after the tokens that they
have.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bridges.admission import Admission, Growing, Seen
from bridges.api import Completion, GenRequest
from bridges.engines import batch as device
from bridges.engines.draw import Filters
from bridges.engines.flight import Flight, Prompt, prompts_of
from bridges.order import Order, Waiting

PREFILL_TOKENS = 4096  # that enter at once, unless one prompt is longer
BETWEEN = 16  # tokens of a row, at most, until the next sequences may start by `admission`
# round and multiply (with cuBLAS) as the learner does
COMPILED = {"xla_allow_excess_precision": False, "xla_gpu_enable_triton_gemm": False}


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a batch is compiled for: rows decoded at once, sequences, pages, pages of a row, new tokens of a
    sequence, stop tokens, filters, completions of a request."""

    rows: int
    sequences: int
    pages: int
    row_pages: int
    max_new: int
    stops: int
    filters: Filters
    siblings: int


class Flights:
    """All that is in flight. model: an EngineModel. rows: decoded at once, at most. pages: of the cache; None
    for as many as these rows can fill. least: sequences that the smallest batch has room for. drafts: of a
    row, at most; `counted`: as those of `speculate.Lanes`. order: in which completions start. admission: how
    many; None for one in each row."""

    def __init__(self, model: Any, max_len: int, rows: int, pages: int | None = None, least: int = 1,
                 drafts: int = 0,
                 order: Order | None = None, admission: Admission | None = None):
        if drafts and model.routes:
            raise ValueError("drafts would choose experts of their own: a model with expert "
                             "layers takes none")
        self._drafts, self.counted, self._order = drafts, np.zeros(3, int), order or Order()
        self._admission, self.seen = admission, Seen()
        self._model, self._max_rows, self._max_len, self._least = model, rows, max_len, least
        self._row_pages = -(-max_len // model.page)
        if pages is not None and pages <= self._row_pages:
            raise ValueError(f"{pages} pages: a sequence of {max_len} tokens takes {self._row_pages + 1}")
        self._pages = pages
        jit = functools.partial(jax.jit, compiler_options=COMPILED)
        self._enter = jit(functools.partial(device.enter, model), donate_argnums=1)
        self._advance = jit(functools.partial(device.advance, model), donate_argnums=1,
                            static_argnames=("filters", "most"))
        self._leave = jit(device.leave, donate_argnums=0)
        self._pending: collections.deque[Prompt] = collections.deque()
        self._batch: device.Batch | None = None
        self._age = 0

    def __bool__(self) -> bool:
        return bool(self._pending) or self._batch is not None

    def uses(self, slot: int) -> bool:
        """Whether something in flight has the adapter in `slot`."""
        flights = [f for p in self._pending for f in p.flights]
        return any(f.slot == slot for f in [*flights, *(self._numbered.values() if self._batch else ())])

    def programs(self) -> int:
        """How many have been compiled."""
        jitted: list[Any] = [self._enter, self._advance]
        return sum(f._cache_size() for f in jitted)

    def submit(self, r: GenRequest, seeds: Sequence[tuple[int, int]], begun: Sequence[Completion] = (),
               adapter: tuple[int, int] | None = None) -> list[Flight]:
        """The flights of a request's completions, those that have `begun` after their tokens. adapter: the
        slot and the version of the request's, if it names one."""
        flights = [Flight(r, i, seed, self._age + i, adapter=adapter) for i, seed in enumerate(seeds)]
        self._age += len(flights)
        for flight, before in zip(flights, begun):
            flight.resume(before)
        self._pending.extend(prompts_of([f for f in flights if f.done is None]))
        return flights

    def advance(self, params: Any, version: int, steps: int) -> None:
        """Sample up to `steps` tokens of each row."""
        if self._batch is None:
            self._open(params)
        if self._batch is not None:
            self._admit()
        self._let_enter(params, version)
        if self._batch is None:
            return
        self._line_up()
        waiting = [f.number for f in self._waiting[: self._ready]]
        more = bool(self._pending) and len(waiting) >= self._shape.rows
        queue = np.zeros(self._shape.sequences, np.int32)
        queue[: len(waiting)] = waiting
        batch = self._batch = self._advance(
            params, self._batch, self._orders, queue, np.int32(len(waiting)), np.bool_(more),
            steps=np.int32(min(steps, BETWEEN) if self._admission else steps), filters=self._shape.filters,
            most=self._drafts)
        status, counts, started, left, counted = jax.device_get(
            (batch.drawn.status, batch.drawn.counts, batch.started, batch.pages.left,
             np.zeros(3, int) if batch.lanes is None else batch.lanes.counted))
        self.counted += counted - self._seen
        self._seen = counted
        self._counts, self._left = np.array(counts), int(left)
        for flight in self._waiting[: int(started)]:
            self._order.started(id(flight.request))
        del self._waiting[: int(started)]
        self.seen.look(sum(int(status[n]) == device.RUNNING for n in self._numbered),
                       1 - self._left / self._shape.pages)
        self._collect(status)

    def _line_up(self) -> None:
        """Whose turn it is comes first. By default they stand as they entered."""
        if self._order.how != "fifo":
            places = self._order.sorted([Waiting(id(f.request), f.age, f.since) for f in self._waiting])
            self._waiting = [self._waiting[i] for i in places]

    def _admit(self) -> None:
        """How many sequences may start now: of those that wait, and then of those pending, the first whose
        keys and values are expected to fit."""
        if self._admission is None:
            return
        growing = lambda f, count=0: Growing(id(f.request), len(f.request.prompt_token_ids),
                                             len(f.tokens) + count, f.request.sampling.max_tokens)
        waits = {f.number for f in self._waiting}
        running = [growing(f, int(self._counts[n])) for n, f in self._numbered.items() if n not in waits]
        line = [growing(f) for f in itertools.chain(self._waiting, *(p.flights for p in self._pending))]
        self._ready = self._admission.count(running, line[: self._shape.rows - len(running)],
                                            self._shape.pages * self._model.page)

    def _may_enter(self) -> bool:
        """Whether prompts should enter: there is not something for each row that may start, or, if the order
        asks which groups are long, one of each group."""
        groups = self._order.how != "fifo" and len({id(f.request) for f in self._waiting})
        return (groups or len(self._waiting)) < min(self._ready, self._shape.rows)

    def so_far(self, flight: Flight) -> Completion:
        """What has been sampled of a flight that is not done."""
        copy = dataclasses.replace(flight)
        if flight.number >= 0:
            [drawn] = self._drawn([flight])
            copy.add(*drawn)
        return copy.completion("abort")

    def change(self, version: int) -> None:
        """What is sampled from now on is of another version. Prompts that wait are computed again; what has
        begun keeps its keys and values, and so the hidden states of its next token and of its drafts: the new
        version's head draws from these, which is the distribution whose log-probability is recorded."""
        if self._batch is None:
            return
        waiting = list(self._waiting)
        self._remove(waiting)
        self._pending.extendleft(reversed(prompts_of(waiting)))
        for flight in self._numbered.values():
            flight.changes.append((int(self._counts[flight.number]), version))

    def recompute(self) -> None:
        """Drop all keys and values. Sequences go on after the tokens that they have, computed anew."""
        if self._batch is None:
            return
        flights = sorted(self._numbered.values(), key=lambda f: f.age)
        self._keep_drawn(flights)
        self._pending.extendleft(reversed(prompts_of(flights)))
        self._batch = None

    def cancel(self, flights: Sequence[Flight]) -> None:
        """Forget flights."""
        self._remove([f for f in flights if f.number >= 0])
        for prompt in self._pending:
            prompt.flights = [f for f in prompt.flights if f not in flights]
        self._pending = collections.deque(p for p in self._pending if p.flights)

    def _remove(self, flights: Sequence[Flight]) -> None:
        """Take flights out of the batch."""
        if not flights or self._batch is None:
            return
        gone = np.zeros(self._shape.sequences, bool)
        gone[[f.number for f in flights]] = True
        self._batch = batch = self._leave(self._batch, self._orders, gone)
        self._left = int(batch.pages.left)
        self._waiting = [f for f in self._waiting if f not in flights]
        for flight in flights:
            self._forget(flight)
        if not self._numbered:
            self._batch = None

    # The batch

    def _open(self, params: Any) -> None:
        """An empty batch for what is pending."""
        if not self._pending:
            return
        self._order.forget()
        self._shape = shape = self.shape_of([f for p in self._pending for f in p.flights])
        sequences = shape.sequences
        self._batch = device.empty(
            self._model, rows=shape.rows, sequences=sequences, pages=shape.pages, row_pages=shape.row_pages,
            max_new=shape.max_new, support=shape.filters.support, width=self._width(params),
            drafts=self._drafts)
        self._seen = np.zeros(3, int)
        self._left, self._ready = shape.pages, sequences
        self._counts = np.zeros(sequences, np.int32)
        self._free, self._free_prompts = list(range(sequences))[::-1], list(range(sequences))[::-1]
        self._numbered: dict[int, Flight] = {}
        self._prompt_of: dict[int, Prompt] = {}
        self._waiting: list[Flight] = []
        ints = lambda *more: np.zeros((sequences, *more), np.int32)
        self._orders = device.Orders(
            ints(), ints(), ints(), ints(), np.zeros((sequences, 2), np.uint32),
            np.ones(sequences, np.float32),
            np.zeros(sequences, bool), ints(), np.ones(sequences, np.float32),
            np.full((sequences, shape.stops), -1, np.int32),
            np.full((sequences, shape.siblings), sequences, np.int32),
            ints() if self._model.adapters else None)

    def shape_of(self, flights: Sequence[Flight]) -> Shape:
        """Of a batch for these flights. So many pages let every row grow to its full length beside the end of
        its prompt, and one more row's prompts wait."""
        how = [f.request.sampling for f in flights]
        sequences = bucket(max(len(flights), self._least), 8)
        rows = min(sequences, self._max_rows)
        pages = rows * (self._row_pages + 1) + self._row_pages
        return Shape(
            rows, sequences, min(self._pages or pages, pages), self._row_pages,
            bucket(max(s.max_tokens for s in how), 16), bucket(max(len(s.stop_token_ids) for s in how), 4),
            Filters(max(_likeliest(s, self._model.vocab_size) for s in how), max(s.reported for s in how)),
            bucket(max(f.request.n for f in flights), 1) if self._drafts and not self._model.draft else 1)

    def _width(self, params: Any) -> jax.ShapeDtypeStruct:
        """Of a hidden state."""
        m, rows = self._model, 8  # as many as every kernel takes
        ints = lambda *s: jax.ShapeDtypeStruct(s, jnp.int32)
        cache = jax.eval_shape(lambda: m.init_cache(1))
        if m.adapters:
            params = jax.eval_shape(m.adapters.choose, params, ints(rows, 1))
        hidden, _ = jax.eval_shape(m.decode, params, ints(rows), ints(rows), ints(rows, 1), cache)
        return jax.ShapeDtypeStruct(hidden.shape[1:], hidden.dtype)

    def _fits(self, p: Prompt) -> bool:
        """Whether the batch was compiled for such flights."""
        s, shape = p.flights[0].request.sampling, self._shape
        filters = Filters(_likeliest(s, self._model.vocab_size), s.reported)
        return (s.max_tokens <= shape.max_new and len(s.stop_token_ids) <= shape.stops
                and all(a <= b for a, b in zip(filters, shape.filters)))

    def _let_enter(self, params: Any, version: int) -> None:
        """Compute prompts until there is something for each row to start with."""
        while self._batch is not None and self._may_enter() and (chosen := self._choose()):
            for prompt in chosen:
                self._number(prompt, version)
            entering, where = self._packed(chosen)
            self._batch, routes = self._enter(params, self._batch, entering)
            self._left -= int(entering.new)
            if routes is not None:
                routes = np.asarray(routes)
                for prompt, at in zip(chosen, where):
                    prompt.keep_routes(routes[at])

    def _choose(self) -> list[Prompt]:
        """Prompts at the head of the line for which there are numbers and pages. Once something is in the
        batch, a row's pages stay free, so that the oldest sequence can always go on."""
        chosen, tokens, sequences = [], 0, len(self._free)
        left = self._left - (self._row_pages if self._numbered else 0)
        while self._pending:
            p = self._pending[0]
            tokens, sequences = tokens + len(p.tokens), sequences - len(p.flights)
            left -= self._pages_of(p)
            if not self._fits(p) or sequences < 0 or left < 1 or (chosen and tokens > PREFILL_TOKENS):
                break
            if not self._numbered and not chosen:
                left -= self._row_pages
            chosen.append(self._pending.popleft())
        return chosen

    def _pages_of(self, p: Prompt) -> int:
        return -(-len(p.tokens) // self._model.page)

    def _number(self, p: Prompt, version: int) -> None:
        p.number = self._free_prompts.pop()
        for f in p.flights:
            f.number, s, o = self._free.pop(), f.request.sampling, self._orders
            f.changes, n = [(0, f.adapter[1] if f.adapter else version)], f.number
            self._counts[n] = 0
            self._numbered[n], self._prompt_of[n] = f, p
            o.prompt[n], o.age[n], o.first[n] = p.number, f.age, len(f.tokens)
            o.limit[n] = s.max_tokens - len(f.tokens)
            o.seed[n], o.temperature[n], o.greedy[n] = f.seed, s.temperature or 1.0, s.temperature == 0
            o.top_k[n], o.top_p[n], o.stops[n] = s.top_k, s.top_p, -1
            o.stops[n, : len(s.stop_token_ids)] = s.stop_token_ids
            if o.adapter is not None:
                o.adapter[n] = f.slot
            f.since = self._order.starts
        self._know_siblings([f.number for f in p.flights])
        self._waiting += p.flights

    def _know_siblings(self, numbers: Sequence[int]) -> None:
        """Where the drafts of these sequences are looked for: in their own tokens, then in each other's."""
        among, none = self._orders.among, self._shape.sequences
        for at, n in enumerate(numbers):
            found = [*numbers[at:], *numbers[:at]][: among.shape[1]]
            among[n] = found + [none] * (among.shape[1] - len(found))

    def _packed(self, prompts: Sequence[Prompt]) -> tuple[device.Entering, list[tuple[int, slice]]]:
        """Prompts packed into rows, first fit -> (what enters, where each lies). What enters has one of few
        shapes, whatever the prompts' lengths and their number: each shape is a program, which takes XLA
        some ten seconds on a GPU."""
        width = row_width(max(len(p.tokens) for p in prompts))
        room, where = list[int](), list[tuple[int, slice]]()
        for p in prompts:
            row = next((i for i, free in enumerate(room) if free >= len(p.tokens)), len(room))
            room += [width] * (row == len(room))
            start = width - room[row]
            room[row] -= len(p.tokens)
            where.append((row, slice(start, start + len(p.tokens))))
        rows, count = 1 << (len(room) - 1).bit_length(), self._shape.sequences
        page, none = self._model.page, self._shape.pages
        ints = lambda fill, *shape: np.full(shape, fill, np.int32)
        tokens, positions, segments = (ints(0, rows, width) for _ in range(3))
        last, length, users = (ints(0, count) for _ in range(3))
        e = device.Entering(
            tokens, positions, segments, ints(none, rows, width), ints(self._shape.sequences, count), last,
            length,
            users, ints(none, count, self._row_pages), np.int32(0),
            ints(self._shape.sequences, self._shape.sequences),
            ints(0, rows, width) if self._model.adapters else None)
        new, fresh = 0, [f.number for p in prompts for f in p.flights]
        e.fresh[: len(fresh)] = fresh
        for i, (p, (row, at)) in enumerate(zip(prompts, where)):
            n, pages = len(p.tokens), self._pages_of(p)
            e.tokens[row, at], e.positions[row, at], e.segments[row, at] = p.tokens, np.arange(n), i + 1
            e.page[row, at] = new + np.arange(n) // page
            if e.adapter is not None:
                e.adapter[row, at] = p.flights[0].slot
            e.number[i], e.last[i] = p.number, row * width + at.stop - 1
            e.length[i], e.users[i] = n, len(p.flights)
            e.pages[i, :pages] = new + np.arange(pages)
            new += pages
        return e._replace(new=np.int32(new)), where

    def _collect(self, status: np.ndarray) -> None:
        """Take what is done, and let what was put out enter again. Once nothing is left, the memory is
        free."""
        over = [f for n, f in self._numbered.items() if status[n] in (device.DONE, device.PUT_OUT)]
        if not over:
            return
        reasons = [status[f.number] for f in over]
        self._keep_drawn(over)
        for flight, reason in zip(over, reasons):
            self._forget(flight)
            if reason == device.DONE:
                stopped = flight.tokens[-1] in flight.request.sampling.stop_token_ids
                flight.done = flight.completion("stop" if stopped else "length")
                self._order.finished(id(flight.request), len(flight.tokens))
                if self._admission:
                    self._admission.finished(len(flight.tokens))
        again = [f for f, reason in zip(over, reasons) if reason == device.PUT_OUT]
        self.seen.preemptions += len(again)
        self._pending.extendleft(reversed(prompts_of(sorted(again, key=lambda f: f.age))))
        if not self._numbered:
            self._batch = None

    def _forget(self, flight: Flight) -> None:
        """Its numbers are free. Those of a prompt are once its last flight is over."""
        n, prompt = flight.number, self._prompt_of.pop(flight.number)
        del self._numbered[n]
        self._free.append(n)
        flight.number = -1
        if not any(f.number >= 0 for f in prompt.flights):
            self._free_prompts.append(prompt.number)

    def _keep_drawn(self, flights: Sequence[Flight]) -> None:
        for flight, drawn in zip(flights, self._drawn(flights)):
            flight.add(*drawn)

    def _drawn(self, flights: Sequence[Flight]) -> Iterator[tuple]:
        """(tokens, logp, left, routes) that the batch has drawn of each."""
        assert self._batch is not None
        at = np.asarray([f.number for f in flights], np.int32)
        d = self._batch.drawn
        parts: list[Any] = [None if x is None else np.asarray(x)[at]
                            for x in (d.tokens, d.logp, d.left, d.routes)]
        for i, f in enumerate(flights):
            count = int(self._counts[f.number])
            yield tuple(None if x is None else x[i, :count] for x in parts)


def row_width(longest: int) -> int:
    """Of rows that prompts are packed into: 16, 64, 256 or 1,024 tokens, which shorter prompts share; for a
    longer prompt, a bucket of its length."""
    return next((w for w in (16, 64, 256, 1024) if longest <= w), bucket(longest, 512))


def bucket(n: int, smallest: int) -> int:
    """`n` rounded up to one of smallest * 1, 2, 3, 4, 6, 8, 12, 16, ...: at most a third is padding, and few
    shapes are compiled."""
    size = smallest
    while size < n:
        if size * 3 // 2 >= n and size > smallest:
            return size * 3 // 2
        size *= 2
    return size


def _likeliest(s: Any, vocab_size: int) -> int:
    """How many tokens the filters look at."""
    return min(s.top_k or (vocab_size if s.top_p < 1 else 0), vocab_size)
