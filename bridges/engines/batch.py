"""Continuous batching on the device: rows that stop are refilled from a queue without a word from the host.

    enter    prompts are computed once, packed into one row, and wait with their keys and values
    advance  a `while_loop`: draw a token of each row, let rows that stop go, decode, start sequences that
             wait

Keys and values lie in pages. The sequences of a prompt share its whole pages; each copies the last, partial
one. Free pages form a stack. When there are too few, the youngest rows are put out: their pages are free
again, and the host lets them go on later, from the tokens that they have.

Letters: R rows decoded at once, N sequences known at once, P pages, M pages of a row, B packed rows of T
tokens, G prompts that enter together, V vocabulary, D width. Index N, or P, stands for none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bridges.engines.draw import Filters, draw, draw_by_parts, draw_in_two, logprob_of
from bridges.engines.speculate import Lanes, accepted, drafts, share_out

WAITING, RUNNING, DONE, PUT_OUT = range(4)


Numbers = Any  # numpy's on the host, JAX's on the device


class Orders(NamedTuple):
    """How each of N sequences is sampled; the host's. prompt: the number of its prompt. age: the younger has
    the larger. first: the number of tokens that it had when it entered, which its random numbers go on after.
    limit: of tokens to come. stops [N, S]: -1 for none. among [N, G]: each sequence, then its siblings, N for
    none. adapter: the slot of its adapter, in an engine that holds several; else None."""

    prompt: Numbers
    age: Numbers
    first: Numbers
    limit: Numbers
    seed: Numbers  # [N, 2] uint32
    temperature: Numbers
    greedy: Numbers
    top_k: Numbers
    top_p: Numbers
    stops: Numbers
    among: Numbers
    adapter: Numbers | None = None


class Pages(NamedTuple):
    """cache: leaves [L, P, page, ...]. free [P]: a stack of which the first `left` are free."""

    cache: Any
    free: Numbers
    left: Numbers


class Prompts(NamedTuple):
    """hidden [N, D] of the last token, length [N], table [N, M], users [N]: sequences that are not done."""

    hidden: Numbers
    length: Numbers
    table: Numbers
    users: Numbers


class Rows(NamedTuple):
    """sequence [R]: the one that each row decodes. position [R] of the token to be fed next. hidden [R, D]:
    the next token is drawn from it. table [R, M], of which the pages from `own` [R] on are the row's own."""

    sequence: Numbers
    position: Numbers
    own: Numbers
    hidden: Numbers
    table: Numbers


class Drawn(NamedTuple):
    """Of each sequence: status [N], counts [N] of tokens, tokens [N, max_new], logp [N, max_new]; left [N,
    max_new, support + 1], the tokens that filters left for each draw, or None; routes [N, max_new, L, k], the
    experts of each token as an input, or None."""

    status: Numbers
    counts: Numbers
    tokens: Numbers
    logp: Numbers
    left: Numbers | None
    routes: Numbers | None


class Batch(NamedTuple):
    pages: Pages
    prompts: Prompts
    rows: Rows
    drawn: Drawn
    started: Numbers  # the number of sequences of the queue that have started
    lanes: Lanes | None = None  # where tokens are drafted (bridges.engines.speculate)


class Entering(NamedTuple):
    """G packed prompts. tokens, positions, segments [B, T]; page [B, T]: which of the new pages a token lies
    in, P for padding. Of each prompt: its number, the place of its last token among the B T, its length, its
    users, and its new pages [G, M], P for none. new: the number of new pages. fresh [n]: the numbers of its
    sequences. adapter [B, T]: the slot of a token's adapter, or None."""

    tokens: Numbers
    positions: Numbers
    segments: Numbers
    page: Numbers
    number: Numbers
    last: Numbers
    length: Numbers
    users: Numbers
    pages: Numbers
    new: Numbers
    fresh: Numbers
    adapter: Numbers | None = None


def empty(model: Any, *, rows: int, sequences: int, pages: int, row_pages: int, max_new: int, support: int,
          width: Any, drafts: int = 0) -> Batch:
    """Nothing has entered. `width`: the shape and dtype of a hidden state, [D]. drafts: of a row, at most."""
    R, N, P, M = rows, sequences, pages, row_pages
    none = lambda n: np.full((n, M), P, np.int32)
    ints = lambda *shape: np.zeros(shape, np.int32)
    hidden = lambda n: np.zeros((n, *width.shape), width.dtype)
    cache, routes = model.init_cache(P), None
    if model.routes:
        one = jax.eval_shape(model.routes, cache, ints(1), ints(1))
        routes = jnp.zeros((N, max_new, *one.shape[1:]), one.dtype)
    return jax.device_put(Batch(
        Pages(cache, np.arange(P, dtype=np.int32), np.int32(P)),
        Prompts(hidden(N), ints(N), none(N), ints(N)),
        Rows(np.full(R, N, np.int32), ints(R), ints(R), hidden(R), none(R)),
        Drawn(ints(N), ints(N), ints(N, max_new), np.zeros((N, max_new), np.float32),
              ints(N, max_new, support + 1) if support else None, routes),
        np.int32(0), Lanes.none(R) if drafts else None))


def enter(model: Any, params: Any, batch: Batch, e: Entering) -> tuple[Batch, Array | None]:
    """Compute prompts -> (batch, the experts of their tokens [B, T, L, k], or None)."""
    pages, prompts = batch.pages, batch.prompts
    none = pages.free.shape[0]
    taken = lambda nth: jnp.where(nth < none, pages.free[pages.left - 1 - jnp.where(nth < none, nth, 0)],
                                  none)
    of_token = taken(e.page)
    hidden, cache = model.prefill(_choosing(model, params, e.adapter), e.tokens, e.positions, e.segments,
                                  of_token, pages.cache)
    put = lambda old, new: old.at[e.number].set(new, mode="drop")
    prompts = Prompts(put(prompts.hidden, hidden.reshape(-1, hidden.shape[-1])[e.last]),
                      put(prompts.length, e.length),
                      put(prompts.table, taken(e.pages)), put(prompts.users, e.users))
    forget = lambda x: x.at[e.fresh].set(0, mode="drop")
    drawn = batch.drawn._replace(status=forget(batch.drawn.status), counts=forget(batch.drawn.counts))
    batch = batch._replace(pages=Pages(cache, pages.free, pages.left - e.new), prompts=prompts, drawn=drawn)
    return batch, model.routes(cache, of_token, e.positions) if model.routes else None


def _choosing(model: Any, params: Any, slots: Array | None) -> Any:
    """The parameters for tokens that have the adapters in `slots`, in an engine that holds several."""
    return params if slots is None else model.adapters.choose(params, slots)


def advance(model: Any, params: Any, batch: Batch, orders: Orders, queue: Array, queued: Array, more: Array,
            *, steps: int, filters: Filters, most: int = 0) -> Batch:
    """Decode `steps` times at most: a token of each row, and of its drafts, `most` at most, those that are
    right. queue [N]: the sequences that wait, of which the first `queued` are. more: the host has others, so
    that it is told when rows are idle."""
    none = orders.prompt.shape[0]

    def going(carry: tuple[Array, Batch]) -> Array:
        t, b = carry
        live = b.rows.sequence < none
        starved = more & ~live.all() & (b.started >= queued)
        return (t < steps) & live.any() & ~starved

    def step(carry: tuple[Array, Batch]) -> tuple[Array, Batch]:
        t, b = carry
        b, token, done = _draw(model, params, b, orders, filters, most)
        b = jax.lax.cond(done.any(), lambda b: _let_go(b, orders, done), lambda b: b, b)
        b = _with_drafts(model, params, _with_pages(b, orders), orders, token, filters, most)
        b = _decode(model, params, b, token, orders.adapter)
        return t + 1, _start_some(b, orders, queue, queued)

    first = _start_some(batch._replace(started=jnp.int32(0)), orders, queue, queued)
    return jax.lax.while_loop(going, step, (jnp.int32(0), first))[1]


def _draw(model: Any, params: Any, b: Batch, orders: Orders, filters: Filters,
          most: int) -> tuple[Batch, Array, Array]:
    """Draw the next token of each row, and those behind right drafts -> (batch, the last tokens [R], which
    rows are done [R])."""
    none, drawn, lanes = b.drawn.counts.shape[0], b.drawn, b.lanes
    at = b.rows.sequence if lanes is None else b.rows.sequence[lanes.helps]
    order = jax.tree.map(lambda x: x.at[at].get(mode="clip"), orders)
    count = drawn.counts.at[at].get(mode="clip") + (0 if lanes is None else lanes.ahead)
    token, logp, left = _chosen(model, params, b.rows.hidden, order, order.first + count, filters)
    # of rows without filters as where no row has any
    if model.parts and model.parts.logprob and filters != Filters():
        whole = (order.top_k == 0) & (order.top_p >= 1)
        logp = jnp.where(whole, logprob_of(model.parts, params, b.rows.hidden, order, token), logp)
    ends = (token[:, None] == order.stops).any(-1) | (count + 1 >= order.limit)
    last, done = token, ends & (b.rows.sequence < none)
    if lanes is not None:
        found, takes, lane = accepted(token, ends, lanes, b.rows.sequence < none, most)
        at = jnp.where(jnp.zeros_like(done).at[found].set(True, mode="drop"), at, none)
        last, done, extra = token[lane], ends[lane] & (b.rows.sequence < none), jnp.maximum(takes - 1, 0)
        b = b._replace(rows=b.rows._replace(position=b.rows.position + extra, hidden=b.rows.hidden[lane]),
                       lanes=lanes._replace(counted=lanes.counted.at[2].add(extra.sum())))
    put = lambda old, new: None if old is None else old.at[at, count].set(new, mode="drop")
    drawn = drawn._replace(
        tokens=put(drawn.tokens, token), logp=put(drawn.logp, logp), left=put(drawn.left, left),
        counts=drawn.counts.at[at].add(1, mode="drop"),
        status=drawn.status.at[jnp.where(done, b.rows.sequence, none)].set(DONE, mode="drop"))
    return b._replace(drawn=drawn), last, done


def _chosen(model: Any, params: Any, hidden: Array, order: Orders, drawn: Array,
            filters: Filters) -> tuple[Array, Array, Array | None]:
    """Tokens drawn from hidden [R, D] by the random numbers of token `drawn` [R] -> as `draw`."""
    if model.parts and filters == Filters():
        return *draw_by_parts(model.parts, params, hidden, order, drawn), None
    return (draw_in_two if model.parts else draw)(model.logits(params, hidden), order, drawn, filters)


def _guesses(model: Any, params: Any, b: Batch, orders: Orders, token: Array, filters: Filters,
             most: int) -> tuple[Array, Array]:
    """Drafts of each row behind its `token` [R] -> ([R, most], how many there are [R]). A draft head's guess
    is drawn with the random numbers that the token in its place will be drawn with."""
    rows, none = b.rows, len(orders.prompt)
    if model.draft is None:
        among = orders.among.at[rows.sequence].get(mode="fill", fill_value=none)
        return drafts(b.drawn.tokens, b.drawn.counts, among, most)
    order = jax.tree.map(lambda x: x.at[rows.sequence].get(mode="clip"), orders)
    count = order.first + b.drawn.counts.at[rows.sequence].get(mode="clip")

    def further(carry: tuple[Array, Array], ahead: Array) -> tuple[tuple[Array, Array], Array]:
        hidden = model.draft(params, *carry)
        token = _chosen(model, params, hidden, order, count + ahead, filters)[0]
        return (hidden, token), token

    _, found = jax.lax.scan(further, (rows.hidden, token), jnp.arange(most))
    return found.T, jnp.full(len(token), most)


def _with_drafts(model: Any, params: Any, b: Batch, orders: Orders, token: Array, filters: Filters,
                 most: int) -> Batch:
    """Give the lanes of idle rows drafts to feed, once these are half of all. A row writes no further than
    its page."""
    if b.lanes is None:
        return b
    rows, page = b.rows, jax.tree.leaves(b.pages.cache)[0].shape[2]
    live = rows.sequence < b.drawn.counts.shape[0]

    def drafted(lanes: Lanes) -> Lanes:
        found, known = _guesses(model, params, b, orders, token, filters, most)
        helps, ahead = share_out(live, page - 1 - rows.position % page, known, most)
        now = jnp.stack([(ahead == 1).sum(), (ahead > 0).sum(), 0])
        return Lanes(helps, ahead, found[helps, jnp.maximum(ahead - 1, 0)], lanes.counted + now)

    alone = lambda lanes: Lanes.none(len(live))._replace(counted=lanes.counted)
    return b._replace(lanes=jax.lax.cond(2 * live.sum() <= len(live), drafted, alone, b.lanes))


def _decode(model: Any, params: Any, b: Batch, token: Array, adapter: Array | None) -> Batch:
    """Feed each row its token, and lanes their drafts. A row that decodes nothing has no pages, so that it
    writes nothing. adapter [N]: as of Orders."""
    rows, live, lanes = b.rows, b.rows.sequence < b.drawn.counts.shape[0], b.lanes
    fed = token, rows.position, rows.table
    if lanes is not None:
        fed = (jnp.where(lanes.ahead > 0, lanes.fed, token), rows.position[lanes.helps] + lanes.ahead,
               rows.table[lanes.helps])
    if adapter is not None:
        of = rows.sequence if lanes is None else rows.sequence[lanes.helps]
        params = _choosing(model, params, adapter.at[of].get(mode="clip")[:, None])
    hidden, cache = model.decode(params, *fed, b.pages.cache)
    drawn = b.drawn
    if drawn.routes is not None:
        page = _page_at(rows, cache)
        found = model.routes(cache, page, rows.position)
        inputs = drawn.counts.at[rows.sequence].get(mode="clip") - 1
        drawn = drawn._replace(routes=drawn.routes.at[rows.sequence, inputs].set(found, mode="drop"))
    rows = rows._replace(position=rows.position + live, hidden=hidden)
    return b._replace(rows=rows, pages=b.pages._replace(cache=cache), drawn=drawn)


def _page_at(rows: Rows, cache: Any) -> Array:
    """The page that each row writes next, [R]."""
    page = jax.tree.leaves(cache)[0].shape[2]
    return jnp.take_along_axis(rows.table, (rows.position // page)[:, None], 1, mode="clip")[:, 0]


def _with_pages(b: Batch, orders: Orders) -> Batch:
    """Give each row that comes to a new page a free one. Where there are too few, the youngest rows go."""
    wanting = lambda b: (b.rows.sequence < b.drawn.counts.shape[0]) & (
        _page_at(b.rows, b.pages.cache) == b.pages.free.shape[0])
    b = jax.lax.cond(wanting(b).sum() > b.pages.left, lambda b: _put_out(b, orders, wanting(b)), lambda b: b,
                     b)
    want, pages, rows = wanting(b), b.pages, b.rows
    new = pages.free[pages.left - jnp.cumsum(want)]
    page = jax.tree.leaves(pages.cache)[0].shape[2]
    table = rows.table.at[jnp.arange(len(want)),
                          jnp.where(want, rows.position // page, rows.table.shape[1])].set(
        new, mode="drop")
    return b._replace(rows=rows._replace(table=table), pages=pages._replace(left=pages.left - want.sum()))


def _put_out(b: Batch, orders: Orders, want: Array) -> Batch:
    """Let as many of the youngest rows go as it takes for the others to have the pages that they want."""
    rows, none = b.rows, b.drawn.counts.shape[0]
    live = rows.sequence < none
    age = orders.age.at[rows.sequence].get(mode="clip")
    order = jnp.argsort(jnp.where(live, -age, jnp.iinfo(jnp.int32).max))
    freed = jnp.cumsum(_own(b).sum(-1)[order])
    wanted = want.sum() - jnp.cumsum(want[order])
    last = jnp.argmax(b.pages.left + freed >= wanted)
    gone = jnp.zeros_like(live).at[order].set(jnp.arange(len(live)) <= last) & live
    status = b.drawn.status.at[jnp.where(gone, rows.sequence, none)].set(PUT_OUT, mode="drop")
    return _let_go(b._replace(drawn=b.drawn._replace(status=status)), orders, gone)


def _own(b: Batch) -> Array:
    """Which pages of each row's table are its own, [R, M]."""
    table = b.rows.table
    return (jnp.arange(table.shape[1]) >= b.rows.own[:, None]) & (table < b.pages.free.shape[0])


def _let_go(b: Batch, orders: Orders, gone: Array) -> Batch:
    """Free the rows `gone` [R] and their pages, and the pages of prompts that no sequence needs any more."""
    rows, none, no_page = b.rows, len(orders.prompt), len(b.pages.free)
    pages = _given_back(b.pages, rows.table, _own(b) & gone[:, None])
    prompt = jnp.where(gone, orders.prompt.at[rows.sequence].get(mode="clip"), none)
    rows = rows._replace(
        sequence=jnp.where(gone, none, rows.sequence), position=jnp.where(gone, 0, rows.position),
        table=jnp.where(gone[:, None], no_page, rows.table))
    return _unused(b._replace(pages=pages, rows=rows), b.prompts.users.at[prompt].add(-1, mode="drop"))


def leave(batch: Batch, orders: Orders, gone: Array) -> Batch:
    """Without the sequences `gone` [N], whether they wait or decode."""
    none = len(gone)
    decoding = gone.at[batch.rows.sequence].get(mode="fill", fill_value=False)
    waiting = gone & (batch.drawn.status == WAITING)
    b = _let_go(batch, orders, decoding)
    return _unused(b, b.prompts.users.at[jnp.where(waiting, orders.prompt, none)].add(-1, mode="drop"))


def _unused(b: Batch, users: Array) -> Batch:
    """Prompts have `users` [N] now; the pages of those without any are free."""
    prompts, no_page = b.prompts, len(b.pages.free)
    unused = ((users == 0) & (prompts.users > 0))[:, None]
    pages = _given_back(b.pages, prompts.table, unused & (prompts.table < no_page))
    table = jnp.where(unused, no_page, prompts.table)
    return b._replace(pages=pages, prompts=prompts._replace(users=users, table=table))


def _given_back(pages: Pages, ids: Array, which: Array) -> Pages:
    """The pages `ids` where `which` is true are free again."""
    ids, which = ids.reshape(-1), which.reshape(-1)
    at = jnp.where(which, pages.left + jnp.cumsum(which) - 1, len(pages.free))
    return pages._replace(free=pages.free.at[at].set(ids, mode="drop"), left=pages.left + which.sum())


def _start_some(b: Batch, orders: Orders, queue: Array, queued: Array) -> Batch:
    """Start sequences that wait in rows that are free. Each takes a page, and one is left for each row that
    decodes already."""
    idle = b.rows.sequence >= len(orders.prompt)
    live = (~idle).sum()
    room = jnp.where(live > 0, b.pages.left - live, b.pages.left)
    starting = jnp.clip(jnp.minimum(jnp.minimum(idle.sum(), queued - b.started), room), 0)
    return jax.lax.cond(starting > 0, lambda b: _start(b, orders, queue, idle, starting), lambda b: b, b)


def _start(b: Batch, orders: Orders, queue: Array, idle: Array, starting: Array) -> Batch:
    rows, pages, prompts = b.rows, b.pages, b.prompts
    no_page, page = len(pages.free), jax.tree.leaves(pages.cache)[0].shape[2]
    nth = jnp.cumsum(idle) - 1
    mine = idle & (nth < starting)
    sequence = jnp.where(mine, queue.at[b.started + nth].get(mode="clip"), rows.sequence)
    prompt = orders.prompt.at[sequence].get(mode="clip")
    length, shared = prompts.length[prompt], prompts.length[prompt] // page
    new = jnp.where(mine, pages.free[pages.left - 1 - nth], no_page)
    each = jnp.arange(rows.table.shape[1])
    table = jnp.where(each < shared[:, None], prompts.table[prompt], no_page)
    table = jnp.where(each == shared[:, None], new[:, None], table)
    partial = jnp.take_along_axis(prompts.table[prompt], shared[:, None], 1, mode="clip")[:, 0]
    copied = lambda x: x.at[:, new].set(x.at[:, partial].get(mode="clip"), mode="drop")
    chosen = lambda new, old: jnp.where(mine.reshape(-1, *(1,) * (old.ndim - 1)), new, old)
    drawn = b.drawn._replace(
        status=b.drawn.status.at[jnp.where(mine, sequence, len(orders.prompt))].set(RUNNING, mode="drop"))
    lanes = b.lanes
    if lanes is not None:  # a row's lane is its own again, and no draft is of what was in the row before
        own = mine | mine[lanes.helps]
        lanes = lanes._replace(helps=jnp.where(own, jnp.arange(len(own)), lanes.helps),
                               ahead=jnp.where(own, 0, lanes.ahead))
    return Batch(
        Pages(jax.tree.map(copied, pages.cache), pages.free, pages.left - starting), prompts,
        Rows(sequence, chosen(length, rows.position), chosen(shared, rows.own),
             chosen(prompts.hidden[prompt], rows.hidden), chosen(table, rows.table)),
        drawn, b.started + starting, lanes)
