"""How many completions start: as many as the cache is expected to hold, and each in its turn."""

from __future__ import annotations

import collections
from typing import NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from test_order import drawn

from bridges.admission import Admission, Growing, Seen

PAGE, MOST = 4, 1024
UNIT = 16  # tokens, of all lengths here
# seconds: of a step, of a completion in it, of a token computed again
STEP, EACH, COMPUTE = 8e-3 * UNIT, 6e-5 * UNIT, 2e-5 * UNIT


class Told(NamedTuple):
    seconds: float
    preemptions: int
    peak: int
    started: list[int]


def simulated(lengths: np.ndarray, places: int, pages: int, admission: Admission | None) -> Told:
    """vLLM's scheduler over completions of these lengths: whoever comes to a new page and finds none has the
    youngest dropped, and what was dropped goes on first, as soon as there are pages for all it has. With
    `admission` a completion is handed in when it may start, without it at once."""
    outside, waiting = collections.deque(range(len(lengths))), collections.deque[int]()
    running, so_far = list[int](), np.zeros(len(lengths), int)
    free, seconds, preemptions, peak, started = pages, 0.0, 0, 0, list[int]()
    pages_of = lambda tokens: -(-int(tokens) // PAGE)
    while outside or waiting or running:
        inside = [*running, *waiting]
        most = max(places - len(inside), 0) if admission else len(outside)
        if admission and outside and most:
            growing = [Growing(i, 0, int(so_far[i]), MOST) for i in inside]
            most = admission.count(growing, [Growing(i, 0, 0, MOST) for i in outside][:most], pages * PAGE)
        for _ in range(min(most, len(outside))):
            waiting.append(outside.popleft())
        dropped = False
        for i in [i for i in running if so_far[i] % PAGE == 0]:
            while i in running and not free:
                youngest = running.pop()
                free += pages_of(so_far[youngest])
                waiting.appendleft(youngest)
                preemptions, dropped = preemptions + 1, True
            free -= i in running
        again = 0
        while waiting and not dropped and len(running) < places and pages_of(so_far[waiting[0]] + 1) <= free:
            i = waiting.popleft()
            free -= pages_of(so_far[i] + 1)
            again += so_far[i]
            running.append(i)
            started.append(i)
        assert running and free >= 0
        seconds += STEP + EACH * len(running) + COMPUTE * again
        peak = max(peak, len(running))
        so_far[running] += 1
        for i in [i for i in running if so_far[i] >= lengths[i]]:
            running.remove(i)
            free += pages_of(so_far[i])
            if admission:
                admission.finished(int(so_far[i]))
    assert free == pages
    return Told(seconds, preemptions, peak, started)


def steps(admission: Admission | None, pages: int, places: int = 192) -> list[Told]:
    """Three steps of 384 completions each."""
    return [simulated(np.ceil(drawn(seed, 48, 8) / UNIT).ravel(), places, pages, admission)
            for seed in range(3)]


def test_under_a_full_cache_preemptions_fall_and_throughput_does_not():
    """The first step knows no lengths, and begins as without. A fixed number with few preemptions takes
    longer."""
    plain, fitting, fixed = steps(None, 2000), steps(Admission(PAGE), 2000), steps(None, 2000, places=64)
    assert fitting[0].started[:192] == plain[0].started[:192]
    total = lambda told, what: sum(getattr(t, what) for t in told[1:])
    assert total(plain, "preemptions") > 500
    assert total(fitting, "preemptions") < total(plain, "preemptions") / 3
    assert total(fitting, "seconds") < total(plain, "seconds") < total(fixed, "seconds") / 1.03


def test_a_cache_with_room_for_all_restrains_nothing():
    plain, fitting = steps(None, 16000), steps(Admission(PAGE), 16000)
    assert fitting == plain and not any(t.preemptions for t in plain)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(1, 9), st.integers(0, 40),
       st.lists(st.integers(1, 60), max_size=20))
def test_every_completion_has_its_turn(lengths, places, spare, known):
    """Also where one alone fills the cache, and whatever is expected."""
    admission = Admission(PAGE)
    for length in known:
        admission.finished(length)
    told = simulated(np.array(lengths), places, 15 + spare, admission)
    assert set(told.started) == set(range(len(lengths))) and told.peak <= places
    assert list(dict.fromkeys(told.started)) == sorted(set(told.started)), "in the order of their turns"


groups, prompts, lengths = st.integers(0, 5), st.integers(0, 20), st.integers(0, 100)


@given(st.lists(st.integers(1, 128), max_size=50),
       st.lists(st.builds(Growing, groups, st.just(9), lengths, st.just(128)), max_size=10),
       st.lists(st.builds(Growing, groups, st.just(9), lengths, st.just(128)), max_size=10),
       st.integers(0, 2000), st.integers(0, 500))
def test_more_room_and_less_that_runs_never_let_fewer_start(known, running, waiting, tokens, more):
    admission = Admission(PAGE)
    for length in known:
        admission.finished(length)
    count = admission.count(running, waiting, tokens)
    assert min(len(waiting), not running) <= count <= len(waiting)
    assert known or count == len(waiting), "nothing is known, so that nothing is held back"
    assert count <= admission.count(running, waiting, tokens + more)
    assert count <= admission.count([], [*running, *waiting], tokens)


def test_what_is_longer_than_all_before_is_expected_to_double_within_its_limit():
    admission = Admission(page=1)
    for _ in range(10):
        admission.finished(10)
    short, long, new = Growing("s", 0, 5, 100), Growing("l", 0, 50, 1000), Growing("n", 0, 0, 100)
    # in ten steps new ones take ten tokens each, and the short one has ended; after one they take 7
    assert [admission.count([short], [new] * 9, tokens) for tokens in (39, 40)] == [3, 4]
    assert [admission.count([long], [new], tokens) for tokens in (99, 100)] == [0, 1]
    assert [admission.count([long._replace(most=65)], [new], tokens) for tokens in (69, 70)] == [0, 1]


def test_a_group_has_the_whole_pages_of_its_prompt_once():
    admission = Admission(page=16)
    for _ in range(10):
        admission.finished(10)
    new = [Growing(i // 2, 40, 0, 100) for i in range(4)]  # of a group 32 tokens; each 8 and 10, in two pages
    assert [admission.count([], new, tokens) for tokens in (95, 96, 127, 128, 160, 192)] == [1, 2, 2, 2, 3, 4]
    assert admission.count(new[:1], new[1:2], 96) == 1 and admission.count(new[:1], new[2:3], 127) == 0


def test_what_was_seen_is_told_once():
    seen = Seen()
    for running, use in ((4, 0.5), (2, 0.9)):
        seen.look(running, use)
    seen.preemptions += 3
    assert seen.metrics() == {"engine/concurrency": 3, "engine/cache_use": 0.9, "engine/preemptions": 3}
    assert set(seen.metrics().values()) == {0}
