"""What the processes of a run are sent of a batch: its facts, and the samples of their own rows."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from linked_groups import of_each
from numpy.testing import assert_equal

from bridges.api import Completion, VersionSpan
from jaxfp8rl.config.learning import Loss
from jaxfp8rl.data.packing import Sample, pack
from jaxfp8rl.data.problem import Problem
from jaxfp8rl.distributed import links
from jaxfp8rl.rollout.own_rows import pack_own
from jaxfp8rl.rollout.scored_groups import Group, Prompt, Rollouts, to_samples
from jaxfp8rl.rollout.shared_batches import facts_of, hollow

TOKENS, ROWS, MICROBATCHES = 4096, 4, 2
OWN = {0: [0, 1], 1: [2, 3]}
A_SAMPLE, A_MESSAGE = 700, 2000  # bytes of JSON


class Halves:
    """The layout of two processes with half of the rows each, which stay where they are."""

    def own_rows(self, rows):
        assert rows == ROWS
        return OWN

    def upload_rows(self, batch, own, rows):
        return jax.tree.map(lambda x: x.reshape(-1, len(own), *x.shape[1:]), batch)


def samples_of(rng, lengths, **more) -> list[Sample]:
    found = []
    for n in lengths:
        support = rng.integers(0, 9, 2 * n).astype(np.int32), np.full(n, 2, np.int32)
        found.append(Sample(
            tuple(rng.integers(0, 99, 7).tolist()), rng.integers(0, 99, n).astype(np.int32),
            -rng.random(n).astype(np.float32), float(rng.normal()), support=support,
            weights=rng.random(n).astype(np.float32), ages=rng.integers(0, 3, n).astype(np.float32),
            routes=rng.integers(0, 8, (n + 6, 2, 2)).astype(np.uint8))._replace(**more))
    return found


@pytest.mark.parametrize("more, options", [
    ({}, {"support": 2, "ages": True}),
    ({"support": None, "weights": None, "routes": None, "ages": None}, {"support": 2}),
])
@pytest.mark.parametrize("count", [0, 1, 30])
def test_the_rows_of_all_are_those_of_one_to_the_bit(count, more, options):
    samples = samples_of(np.random.default_rng(0), np.random.default_rng(1).integers(1, 900, count), **more)
    options |= {"like": np.zeros((0, 2, 2), np.uint8)} if not count else {}
    of = lambda group: pack_own(group, Halves(), samples if group.first else [], TOKENS, ROWS, MICROBATCHES,
                                **options)
    halves = of_each(of, 2)
    want = pack(samples, TOKENS, ROWS, MICROBATCHES, **options)
    assert_equal(jax.tree.map(lambda *x: np.concatenate(x, 1), *halves)._asdict(), want._asdict())
    assert jax.tree.map(lambda x: x.dtype, halves[1]) == jax.tree.map(lambda x: x.dtype, want)


@pytest.mark.parametrize("scale", [1, 4])
def test_a_process_is_sent_its_own_share_and_no_more(scale):
    """Whatever the other one gets: the longest samples go to the first rows, which are the first one's."""
    rng = np.random.default_rng(0)
    long, short = (samples_of(rng, [n] * 2, support=None, routes=None, weights=None, ages=None)
                   for n in (1000 * scale, 900))
    samples, tokens = [*long, *short], 1000 * scale + 7  # a long one fills a row

    def f(group):
        pack_own(group, Halves(), samples if group.first else [], tokens, ROWS, 1)
        return [link.sent for link in group.links]

    (sent,), (answered,) = of_each(f, 2)
    own = sum(4 * len(s.prompt) + 8 * len(s.completion) for s in short)
    assert own < sent < own + A_SAMPLE * len(short) + A_MESSAGE and answered == 0


def groups_of(rng, prompts, n: int, tokens: int) -> tuple[Group, ...]:
    def one(i):
        spans = VersionSpan(0, 2, 3), VersionSpan(2, tokens + i, 4)
        return Completion(f"r{i}", i, rng.integers(1, 9, tokens + i).astype(np.int32),
                          -rng.random(tokens + i).astype(np.float32), "length" if i else "stop", spans)

    return tuple(Group(p, tuple(one(i) for i in range(n)), ("text",) * n,
                       np.array([0.5, np.nan, *range(2, n)]),
                       {"right": rng.random(n)}, 1) for p in prompts)


def test_the_others_have_every_metric_and_no_token():
    """However long the completions are, as many bytes tell of them."""
    rng = np.random.default_rng(0)
    prompts = [Prompt(Problem(f"{i}", "1 + 1", "2"), (1, 2, i)) for i in range(6)]
    sizes = []
    for tokens in (10, 5000):
        groups = groups_of(rng, prompts[1:5], 4, tokens)
        batch = Rollouts(groups, ("request 0: why",), groups[1:3], {"queue/length": 3})
        message = links.packed(facts_of(batch, prompts))
        sizes.append(sum(map(len, message)))
        lengths = links.LENGTHS.size
        found = hollow(links.unpacked(message[0][lengths:], message[1]), prompts)
        assert_equal(found.metrics(), batch.metrics())
        assert found.age(5) == batch.age(5) and found.rejected == batch.rejected
        shape = lambda b: [[(s.prompt, len(s.completion), s.advantage) for s in g]
                           for g in to_samples(b.chosen, Loss(), 6000, 5)]
        assert shape(found) == shape(batch) and found.hollow and not batch.hollow
        assert not any(c.token_ids.any() for g in found.groups for c in g.completions)
    assert sizes[1] - sizes[0] < 16 * 8 and sizes[1] < 16 * 200 + A_MESSAGE
