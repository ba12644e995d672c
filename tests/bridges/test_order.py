"""The order in which completions start: whatever it is, the same completions are sampled, each once."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridges.order import Order, Waiting
from bridges.served.gate import Gate


def simulated(lengths: np.ndarray, slots: int, how: str, patience: int = 10**9) -> tuple[list[int], float]:
    """Completions of groups, lengths [G, n], in so many slots -> (the order in which they start, when the
    last ends). A slot that is free takes whose turn it is."""
    groups, n = lengths.shape
    order, waiting = Order(how, patience), [Waiting(g, g * n + i) for g in range(groups) for i in range(n)]
    running, now, started = list[tuple[float, int]](), 0.0, list[int]()
    while waiting or running:
        while waiting and len(running) < slots:
            w = waiting.pop(order.sorted(waiting)[0])
            order.started(w.group)
            started.append(w.age)
            running.append((now + float(lengths.flat[w.age]), w.age))
        now, age = min(running)
        running.remove((now, age))
        order.finished(age // n, int(lengths.flat[age]))
    return started, now


def drawn(seed: int, groups: int = 64, n: int = 8, correlation: float = 0.7) -> np.ndarray:
    """Log-normal lengths, median 1,500, alike within a group, at most 16,384."""
    rng = np.random.default_rng(seed)
    z = np.sqrt(correlation) * rng.normal(size=(groups,
                                                1)) + np.sqrt(1 - correlation) * rng.normal(size=(groups, n))
    return np.ceil(np.clip(1500 * np.exp(0.9 * z), 1, 16384))


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 6), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_each_completion_starts_once_and_none_waits_beyond_the_patience(groups, n, slots, patience, seed):
    lengths = np.random.default_rng(seed).integers(1, 50, (groups, n))
    started, _ = simulated(lengths, slots, "longest", patience)
    assert sorted(started) == list(range(groups * n))
    assert all(place <= patience + age for place, age in enumerate(started))
    assert simulated(lengths, slots, "fifo")[0] == list(range(groups * n))


def test_one_of_each_group_comes_first_and_then_the_groups_that_are_long():
    order = Order("longest", 100)
    waiting = [Waiting(g, 10 * i + g) for i in range(2) for g in range(3)]
    assert [waiting[i].group for i in order.sorted(waiting)][:3] == [0, 1, 2]
    for g in range(3):
        order.started(g)
    order.finished(0, 5)
    order.finished(2, 9)
    rest = waiting[3:]
    assert [rest[i].group for i in order.sorted(rest)] == [1, 2, 0], "none of group 1 has finished"
    order.finished(0, 20)
    order.finished(1, 1)
    assert [rest[i].group for i in order.sorted(rest)] == [0, 2, 1]
    impatient = Order("longest", 3)
    for g in range(3):
        impatient.started(g)
    impatient.finished(2, 9)
    assert [rest[i].group for i in impatient.sorted(rest)] == [0, 1,
                                                               2], "they have been passed over long enough"


def test_the_last_completion_ends_sooner():
    """Where slots are few: 512 completions in 64. With as many slots as completions there is nothing to
    order."""
    gain = [simulated(x, 64, "fifo")[1] / simulated(x, 64, "longest")[1] for x in map(drawn, range(5))]
    assert np.mean(gain) > 1.05
    x = drawn(0)
    assert simulated(x, 512, "longest")[1] == simulated(x, 512, "fifo")[1]


def test_a_waiter_that_is_cancelled_as_a_place_gets_free_does_not_fail_who_had_it():
    async def main() -> None:
        gate, ends = Gate(1, Order()), asyncio.Event()

        async def holds() -> str:
            async with gate.place("first"):
                await ends.wait()
            return "its result"

        async def waits() -> str:
            async with gate.place("later"):
                return "in"

        holder = asyncio.create_task(holds())
        await asyncio.sleep(0)
        cancelled, later = asyncio.create_task(waits()), asyncio.create_task(waits())
        await asyncio.sleep(0)
        ends.set()  # the holder leaves before the cancelled waiter learns of it
        cancelled.cancel()
        assert await holder == "its result" and await later == "in" and cancelled.cancelled()

    asyncio.run(main())


def test_a_gate_that_nobody_uses_forgets_its_groups():
    """Their names may come again, and a run has more of them than memory should hold."""
    async def main() -> None:
        gate, began = Gate(1, Order("longest", 100)), list[str]()

        async def one(group: str, length: int) -> None:
            async with gate.place(group):
                began.append(group)
                await asyncio.sleep(0)
                gate.order.finished(group, length)

        await one("a", 100)
        await asyncio.gather(one("holder", 1), one("a", 1), one("b", 1))
        assert began == ["a", "holder", "a", "b"], "of the second a none has begun: the older goes first"

    asyncio.run(main())


def test_places_are_given_in_order_and_a_waiter_that_is_cancelled_gives_up_its_turn():
    said = []

    async def run():
        gate = Gate(2, Order("longest", 100))

        async def sample(group, length):
            async with gate.place(group):
                said.append(group)
                await asyncio.sleep(0)
                gate.order.finished(group, length)

        work = [asyncio.create_task(sample(g, length))
                for g, length in (("a", 1), ("b", 9), ("a", 1), ("b", 9), ("c", 1))]
        await asyncio.sleep(0)
        work[2].cancel()
        await asyncio.gather(*work, return_exceptions=True)
        assert gate._free == 2 and not gate._waiting

    asyncio.run(run())
    assert said == ["a", "b", "c", "b"]


@pytest.mark.parametrize("slots", [1, 7])
def test_what_is_drawn_does_not_depend_on_the_order(slots):
    assert sorted(simulated(drawn(3, 6, 4), slots, "longest")[0]) == list(range(24))
