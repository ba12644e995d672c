"""How many completions served engines are handed, by what their caches are expected to hold."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stand_in import StandIn, published
from test_vllm_client import request, served, tokens, until

from bridges.admission import Growing
from bridges.api import BridgeError
from bridges.served.rooms import Cache, Rooms, cache_of, preemptions
from bridges.served.vllm_client import Replica

TOLD = """# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
vllm:cache_config_info{block_size="16",enable_prefix_caching="True",engine="0",num_gpu_blocks="%d"} 1.0
vllm:num_preemptions_total{engine="0",model_name="tiny"} %g
vllm:num_preemptions_created{engine="0",model_name="tiny"} 1.79e+09
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
"""


def server(blocks: int, **more) -> StandIn:
    made = StandIn(published(), token_seconds=0.001, **more)
    made.metrics = TOLD % (blocks, 0)
    return made


def test_the_size_of_a_cache_is_what_vllm_tells_prometheus():
    said = TOLD % (24, 7)
    assert cache_of("u", said) == Cache(384, 16) and preemptions(said) == 7
    assert cache_of("u", said.replace("num_gpu", 'kv_cache_size_tokens="320",num_gpu')) == Cache(320, 16)
    assert preemptions(TOLD % (1, 2.5e7)) == 25_000_000 and preemptions("") == 0
    for spoilt in ("", said.replace("16", "x"), said.replace("24", "0"), said.replace("16", "0")):
        with pytest.raises(BridgeError, match="no vllm:cache_config_info with the size of its cache") as e:
            cache_of("http://x", spoilt)
        assert 'rollout.admit = "all"' in e.value.next_step


def test_a_server_that_tells_nothing_and_one_with_routed_experts_are_refused():
    with (StandIn(published()) as silent,
          pytest.raises(BridgeError, match='rollout.admit = "cache": .*404')):
        served(silent, admit="cache").__enter__()
    with (server(10, routed_experts=True) as routed,
          pytest.raises(BridgeError, match="a stream of vLLM tells no routed experts")):
        served(routed, admit="cache").__enter__()


def part(name: str, length: int = 0) -> SimpleNamespace:
    return SimpleNamespace(growing=lambda: Growing(name, 0, length, 100))


def rooms(*tokens: int) -> tuple[Rooms, list[Replica]]:
    replicas = [Replica(f"r{i}") for i in range(len(tokens))]
    return Rooms({r.url: Cache(n, 1) for r, n in zip(replicas, tokens)}), replicas


def test_a_full_replica_holds_up_its_own_and_no_others():
    made, (a, b) = rooms(100, 100)
    for _ in range(9):
        made.finished(10)
    full, roomy = [(part(f"g{i}"), [a]) for i in range(10)], [(part("h"), [b])]
    waiting = [(part("x"), [a]), (part("y"), [a]), (part("z"), [b]), (part("n"), []), (part("n"), [])]
    waiting[4] = part("n"), waiting[3][1]  # a group has one home
    assert made.fitting([*full, *roomy], waiting, [a, b]) == [(2, b), (3, b), (4, b)]
    assert made.fitting([], waiting, [a, b])[:2] == [(0, a), (1, a)], "an empty one takes what comes"
    assert made.fitting([*full, *roomy], waiting, [b]) == [(i, b) for i in range(5)], "a has died"
    told = made.seen.metrics()
    assert told["engine/concurrency"] == pytest.approx(22 / 3) and told["engine/cache_use"] == 0


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60)), max_size=12),
       st.lists(st.integers(0, 5), min_size=1, max_size=12), st.lists(st.integers(1, 80), max_size=20),
       st.integers(1, 3))
def test_each_replica_takes_the_first_of_its_line_and_an_empty_one_takes_one(inside, waiting, known, count):
    made, replicas = rooms(*[64] * count)
    for length in known:
        made.finished(length)
    homes = {g: [replicas[g % count]] if g % 2 else [] for g in range(6)}
    here = [(part(str(g), n), [replicas[g % count]]) for g, n in inside]
    line = [(part(str(g)), homes[g]) for g in waiting]
    found = made.fitting(here, line, replicas)
    assert [i for i, _ in found] == sorted({i for i, _ in found})
    assert known or len(found) == len(line)
    for i, replica in found:
        home = line[i][1]
        assert not home or home[0] is replica
        passed = [j for j in range(i) if line[j][1] and line[j][1][0] is replica]
        assert set(passed) <= {j for j, _ in found}
    if not here:
        assert found, "somebody has a turn"


def test_completions_are_those_without_and_each_has_its_turn():
    """Caches of one page, which one completion overfills, and of many; two replicas; groups and sessions."""
    asked = [request(i, 3, seed=i, max_tokens=3 + 5 * (i % 3)) for i in range(8)]
    with served(server(1), server(40)) as client:
        want = tokens(client.generate(asked))
        assert client.metrics() == {}
    for blocks in ((1, 1), (3, 40)):
        pair = [server(n) for n in blocks]
        with served(*pair, admit="cache", connections=5) as client:
            for step in range(3):
                assert tokens(client.generate(asked)) == want
                assert max(s.peak for s in pair) <= 5 + 1, "and one for its control"
                for s, n in zip(pair, blocks):
                    s.metrics = TOLD % (n, 10 * (step + 1))
                told = client.metrics()
                assert told["engine/preemptions"] == 20 and 0 < told["engine/concurrency"] <= 5
            assert told["engine/cache_use"] > 0 and not client._gate._inside
            pair[0].metrics = TOLD % (1, 4)
            assert client.metrics()["engine/preemptions"] == 4, "it was started anew"


def test_what_one_cache_cannot_hold_waits():
    """After a step is known, a replica whose cache holds two of its completions is handed two."""
    one = server(3)
    with served(one, admit="cache") as client:
        client.generate([request(0, 2, max_tokens=16)])
        one.asked.clear()
        most, stream = [0], one.stream

        async def counted(*args):
            most.append(sum(not d.done for d in one.streams) + 1)
            await stream(*args)

        one.stream = counted
        client.generate([request(i, 1, max_tokens=16) for i in range(6)])
        assert len(one.asked) == 6 and max(most) == 1
        one.metrics = TOLD % (3, 0)


def test_a_replica_that_dies_gives_its_completions_to_the_other():
    pair = [server(40), server(40)]
    with served(*pair, admit="cache") as client:
        client.generate([request(9, 2, max_tokens=8)])
        asked = [request(i, 2, seed=i, max_tokens=40) for i in range(4)]
        futures = [client.start(r, client._whole(r)) for r in asked]
        until(lambda: sum(len(s.streams) for s in pair) > 8)
        pair[0].close()
        done = [f.result(10) for f in futures]
        assert [len(c.token_ids) for group in done for c in group] == [40] * 8
        assert client.metrics()["engine/preemptions"] == 0, "the other one tells"
