"""The checks, each a function of an `EngineUnderTest` that raises AssertionError.

A check leaves the engine usable for the next, so that one engine serves all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from bridges.api import (
    Completion,
    EngineDirty,
    GenRequest,
    InFlight,
    ManifestMismatch,
    PublishFailed,
    PublishReceipt,
    RolloutEngine,
    SamplingParams,
    WeightSource,
    WeightTransport,
)
from bridges.conformance import broken_sources
from bridges.proof import manifest

HOT = 2.0  # vLLM's highest temperature, at which short samples differ


@dataclasses.dataclass
class EngineUnderTest:
    """An engine with the transport opened on it.

    `source(seed)` makes a full set of weights, another for another seed, under which the two likeliest tokens
    are within a factor of ten of each other. prompt_tokens should exceed a block of the engine's prefix
    cache. batches_alike: whether the engine computes the same requests in the same batches each time. A
    server computes what has arrived, and a product of one row may round otherwise than one of several: its
    completions of a seed are compared one at a time.
    """

    engine: RolloutEngine
    transport: WeightTransport
    source: Callable[[int], WeightSource]
    prompt_tokens: int = 40
    batches_alike: bool = True
    versions: Iterator[int] = dataclasses.field(default_factory=lambda: itertools.count(1))

    def publish(self, seed: int) -> PublishReceipt:
        return self.transport.publish(self.source(seed), next(self.versions))

    def prompt(self, seed: int = 0) -> tuple[int, ...]:
        vocabulary = self.engine.capabilities().vocab_size
        return tuple(int(t) for t in np.random.default_rng(seed).integers(0, vocabulary, self.prompt_tokens))

    def sample(self, n: int = 1, prompt: int = 0, seed: int | None = None,
               **sampling: Any) -> list[Completion]:
        how = SamplingParams(**{"max_tokens": 8, **sampling})
        [completions] = self.engine.generate(
            [GenRequest(f"prompt-{prompt}", self.prompt(prompt), how, n, seed)])
        return completions


Check = Callable[[EngineUnderTest], None]


def starts_dirty(e: EngineUnderTest) -> None:
    """A fresh engine has no weight version and refuses to generate."""
    assert e.engine.weight_version() is None, "this check needs an engine to which nothing has been published"
    _refuses_to_generate(e)


def receipt_tells_what_crossed(e: EngineUnderTest) -> None:
    """version, tensors, bytes, digest and seconds of a receipt; the engine names the version; verify accepts
    it."""
    metas, receipt = e.source(0).manifest(), e.publish(0)
    assert (receipt.tensors, receipt.bytes) == (len(metas), manifest.nbytes(metas)), receipt
    assert receipt.digest == manifest.digest(metas) and receipt.seconds > 0, receipt
    assert e.engine.weight_version() == receipt.version, (e.engine.weight_version(), receipt)
    e.transport.verify(receipt)


def verify_refuses_an_old_receipt(e: EngineUnderTest) -> None:
    """After a later publish the earlier receipt no longer describes the engine."""
    old, new = e.publish(0), e.publish(1)
    with _raises(PublishFailed):
        e.transport.verify(old)
    e.transport.verify(new)


def content_follows_the_bytes(e: EngineUnderTest) -> None:
    """If a transport reads the engine back, equal weights have equal `content` in the receipt, and different
    weights different `content`."""
    first, other, again = (e.publish(seed) for seed in (0, 1, 0))
    if first.content:
        assert first.content == again.content != other.content, (first, other, again)
        with _raises(PublishFailed, "a receipt of another content"):
            e.transport.verify(dataclasses.replace(again, content=other.content))


def completions_come_in_order(e: EngineUnderTest) -> None:
    """len(requests) lists, the i-th of n completions numbered from 0, whatever the lengths and counts."""
    receipt = e.publish(0)
    requests = [GenRequest(f"r{i}", e.prompt(i), SamplingParams(max_tokens=2 + i), n)
                for i, n in enumerate((2, 1, 3))]
    groups = e.engine.generate(requests)
    want = [[(r.request_id, i) for i in range(r.n)] for r in requests]
    assert [[(c.request_id, c.index) for c in group] for group in groups] == want
    for r, group in zip(requests, groups):
        for c in group:
            _well_formed(c, r.sampling.max_tokens, receipt.version)
    assert e.engine.generate([]) == []


def lengths_and_reasons(e: EngineUnderTest) -> None:
    """Without stop tokens a completion has max_tokens tokens and ends by length."""
    e.publish(0)
    for tokens in (1, 5):
        for c in e.sample(n=2, max_tokens=tokens):
            assert (len(c.token_ids), c.finish_reason) == (tokens, "length"), c


def stop_tokens_are_included(e: EngineUnderTest) -> None:
    """Generation ends at the first stop token, which is the completion's last; an unused stop token changes
    nothing."""
    e.publish(0)
    free = e.sample(temperature=0.0)[0].token_ids.tolist()
    stop = free[3]
    want = free[: free.index(stop) + 1]
    c = e.sample(temperature=0.0, stop_token_ids=(stop,))[0]
    assert (c.token_ids.tolist(), c.finish_reason) == (want, "stop"), (c, want)
    unused = next(t for t in itertools.count() if t not in free)
    c = e.sample(temperature=0.0, stop_token_ids=(unused,))[0]
    assert (c.token_ids.tolist(), c.finish_reason) == (free, "length"), (c, free)


def samples_differ(e: EngineUnderTest) -> None:
    """The n completions of a request are independent draws, seeded or not; so are two unseeded requests."""
    e.publish(0)
    for seed in (None, 7):
        drawn = {tuple(c.token_ids.tolist())
                 for c in e.sample(n=4, max_tokens=16, temperature=HOT, seed=seed)}
        assert len(drawn) == 4, f"seed {seed}: {4 - len(drawn)} of 4 completions repeat another"
    assert not _same(e.sample(temperature=HOT),
                     e.sample(temperature=HOT)), "two unseeded requests drew the same"


def seeds_reproduce(e: EngineUnderTest) -> None:
    """If the engine supports seeds, a seed reproduces tokens and log-probabilities, and another seed changes
    them."""
    if not e.engine.capabilities().seeds:
        return
    e.publish(0)
    n = 3 if e.batches_alike else 1
    e.sample(n=n, temperature=HOT, seed=7)  # from here on both runs see the same prefix cache
    a, b, other = (e.sample(n=n, temperature=HOT, seed=s) for s in (7, 7, 8))
    assert _same(a, b), "one seed, two results"
    assert not any(_same([x], [y]) for x in a for y in other), "two seeds share a completion"


def greedy_is_the_mode(e: EngineUnderTest) -> None:
    """Temperature 0 repeats itself and samples the same tokens as top_k 1 at temperature 1, up to a tie of
    the largest logits."""
    e.publish(0)
    e.sample(temperature=0.0)
    a, b, one = e.sample(temperature=0.0), e.sample(temperature=0.0), e.sample(top_k=1)
    assert _same(a, b), "greedy, twice, differs"
    clear = int(np.argmax(np.append(one[0].logprobs < -1e-3, True)))
    assert a[0].token_ids[:clear].tolist() == one[0].token_ids[:clear].tolist(), (a, one)


def logprobs_are_of_the_distribution_sampled(e: EngineUnderTest) -> None:
    """Log-probabilities include temperature and filters: 0 at top_k 1, probabilities with the sum 1 at top_k
    2, half the gap at temperature 2. A reported support contains the tokens that are drawn.

    A filter may keep more than k tokens if their logits tie, as bfloat16 logits often do. top_k 1 then gives
    -log of their number.
    """
    e.publish(0)
    kept = np.exp(-e.sample(top_k=1)[0].logprobs)
    assert np.abs(kept - kept.round()).max() < 1e-3 and kept.max(
        ) < 4, f"top_k 1 leaves one token or a tie, not {kept}"
    gaps = []
    for temperature in (1.0, 2.0):
        drawn = e.sample(64, max_tokens=1, top_k=2, temperature=temperature, support=8)
        first = {int(c.token_ids[0]): float(c.logprobs[0]) for c in drawn}
        if e.engine.capabilities().support:
            reported = {frozenset(np.asarray(c.support_ids).tolist()) for c in drawn}
            problem = f"64 draws from the support {reported} gave {sorted(first)}"
            assert reported == {frozenset(first)}, problem
        assert 2 <= len(first) < 5, f"64 draws among the two likeliest tokens gave {first}"
        assert abs(sum(np.exp(p) for p in first.values())
                   - 1) < 1e-3, f"top_k 2: the probabilities do not sum to 1: {first}"
        gaps.append(np.ptp(list(first.values())))
    assert abs(gaps[0] - 2
               * gaps[1]) < 1e-3, f"temperature 2 halves the gap of two log-probabilities, not {gaps}"
    nucleus = e.sample(n=8, max_tokens=1, top_p=1e-6)
    assert len({int(c.token_ids[0]) for c in nucleus}) == 1, "a tiny nucleus holds one token"
    assert all(abs(c.logprobs[0]) < 1e-5
               for c in nucleus), "a tiny nucleus holds one token, of log-probability 0"


def supports_are_told_up_to_a_size(e: EngineUnderTest) -> None:
    """If the engine reports supports, a support larger than requested is not reported, a token alone in its
    support has log-probability 0, and draws without filters have no support."""
    if not e.engine.capabilities().support:
        return
    e.publish(0)
    for c in e.sample(n=4, top_p=0.5, temperature=HOT, support=1):
        assert c.problem() is None and c.support_sizes is not None, c
        np.testing.assert_array_equal(c.support_sizes, np.abs(c.logprobs) < 1e-5)
    for free in (e.sample(support=8), e.sample(temperature=0.0, support=8)):
        assert free[0].support_ids is None and free[0].support_sizes is None, free


def weights_decide(e: EngineUnderTest) -> None:
    """Other weights change log-probabilities; the first ones again restore them, prompt caches included:
    those of a single request exactly, those of two to 1e-3, because they may be decoded together or not."""
    runs = []
    for seed in (0, 1, 0):
        e.publish(seed)
        runs.append(e.sample(temperature=0.0, max_tokens=4) + e.sample(n=2, seed=3, max_tokens=4))
    assert not _same(runs[0][:1],
                     runs[1][:1]), "other weights, same log-probabilities: lost, or a stale cache"
    if e.engine.capabilities().seeds:
        assert _same(runs[0], runs[2], 1e-3), \
            "the first weights again do not restore the first log-probabilities"
    assert _same(runs[0][:1],
                 runs[2][:1]), "the first weights again do not restore the first greedy log-probabilities"


def manifest_is_checked_first(e: EngineUnderTest) -> None:
    """Missing, extra, renamed, reshaped or recast tensors are refused before a byte moves, and the engine is
    unchanged."""
    receipt = e.publish(0)
    before = _settled(e)
    for name, edit in broken_sources.MISMATCHES.items():
        source = broken_sources.EditedSource(e.source(1), edit)
        with _raises(ManifestMismatch, name):
            e.transport.publish(source, next(e.versions))
        assert not source.read, f"{name}: the source was read although its manifest does not fit"
    e.transport.verify(receipt)
    assert _same(before, e.sample(temperature=0.0)), "a refused publish changed the engine"


def a_broken_publish_leaves_it_dirty(e: EngineUnderTest) -> None:
    """A source that raises, ends early or contradicts its manifest gives PublishFailed and a dirty engine,
    which a full publish repairs."""
    e.publish(0)
    before = _settled(e)
    for spoil in broken_sources.SPOILED:
        broken = broken_sources.EditedSource(e.source(1), spoil=spoil)
        with _raises(PublishFailed, spoil.__name__):
            e.transport.publish(broken, next(e.versions))
        assert broken.read, f"{spoil.__name__}: refused before it was tried"
        _refuses_to_generate(e)
    e.publish(0)
    assert _same(before, _settled(e)), "a publish after broken ones does not restore the engine"


def pause_and_sleep_can_be_undone(e: EngineUnderTest) -> None:
    """After resume, and after wake and a publish, the engine generates as before."""
    e.publish(0)
    before = _settled(e)
    e.engine.pause()
    e.engine.resume()
    assert _same(before, e.sample(temperature=0.0)), "pause and resume changed the result"
    e.engine.sleep()
    e.engine.wake()
    e.publish(0)
    assert _same(before, _settled(e)), "sleep, wake and a publish changed the result"


def interrupted_completions_go_on(e: EngineUnderTest) -> None:
    """An engine that is InFlight: a publish interrupts completions, and each token has its version and its
    log-probability; they go on after a new `submit`, too, and `generate` may be called beside them.

    An engine that samples by itself may be done before it is paused, so the requests become longer, then
    more, until a publish has interrupted some.
    """
    engine = e.engine
    if not isinstance(engine, InFlight):
        return
    most = engine.capabilities().max_model_len - e.prompt_tokens
    for keep_cache in (True, False):
        sizes = ((min(64 << i, most), 2 << max(0, i - 2)) for i in range(7))
        if not any(_interrupted(e, engine, keep_cache, tokens, count) for tokens, count in sizes):
            raise AssertionError(f"all completions of {most} tokens, more and more of them, were done when "
                                 "`pause` returned: no publish has interrupted one")


def impossible_requests_are_refused(e: EngineUnderTest) -> None:
    """ValueError for more tokens than max_model_len and for a token outside the vocabulary; the engine stays
    healthy."""
    e.publish(0)
    c = e.engine.capabilities()
    for prompt, tokens in (((0,) * 4, c.max_model_len), ((0,) * c.max_model_len, 1), ((c.vocab_size,), 1),
                           ((-1,), 1)):
        with _raises(ValueError, f"prompt {prompt[:4]}, max_tokens {tokens}"):
            e.engine.generate([GenRequest("impossible", prompt, SamplingParams(max_tokens=tokens))])
    assert e.engine.health().ok, e.engine.health()


CHECKS: tuple[Check, ...] = (
    starts_dirty, receipt_tells_what_crossed, verify_refuses_an_old_receipt, content_follows_the_bytes,
    completions_come_in_order, lengths_and_reasons, stop_tokens_are_included, samples_differ, seeds_reproduce,
    greedy_is_the_mode, logprobs_are_of_the_distribution_sampled, supports_are_told_up_to_a_size,
    weights_decide,
    manifest_is_checked_first,
    a_broken_publish_leaves_it_dirty, pause_and_sleep_can_be_undone, interrupted_completions_go_on,
    impossible_requests_are_refused,
)


def _well_formed(c: Completion, max_tokens: int, version: int) -> None:
    assert c.problem() is None, c.problem()
    assert 1 <= len(c.token_ids) <= max_tokens and c.finish_reason in ("stop", "length"), c
    assert np.asarray(c.logprobs).dtype == np.float32 and np.asarray(c.token_ids).dtype == np.int32, c
    spans = [(s.start, s.stop, s.version) for s in c.version_spans]
    assert spans == [(0, len(c.token_ids), version)], spans


def _interrupted(e: EngineUnderTest, engine: InFlight, keep_cache: bool, tokens: int, count: int) -> bool:
    """Publish while `count` requests of two completions each are in flight -> whether one was interrupted."""
    done: dict[str, list[Completion]] = {}
    first = e.publish(0).version
    requests = {f"flight {keep_cache} {tokens} {i}": GenRequest(
        f"flight {keep_cache} {tokens} {i}", e.prompt(), SamplingParams(tokens), 2) for i in range(count)}
    take = lambda: done.update({group[0].request_id: group for group in engine.poll()})
    engine.submit(list(requests.values()))
    while not done and min(len(c.token_ids) for group in engine.partial().values() for c in group) < 4:
        take()
    engine.pause(keep_cache)
    _stands_still(engine, take)
    held, second = engine.partial(), e.publish(1).version
    engine.resume()
    take()
    begun = engine.partial()
    for name in list(begun)[-1:]:
        engine.cancel([name])
        engine.submit([requests[name]], [begun[name]])
    alone = e.sample(temperature=0.0, max_tokens=2)
    _well_formed(alone[0], len(alone[0].token_ids), second)
    while len(done) < count:
        take()
    assert not engine.partial(), "something is left in flight"
    both = []
    for c in (c for group in done.values() for c in group):
        assert c.problem() is None and len(c.token_ids) == tokens and c.finish_reason == "length", c
        versions = [s.version for s in c.version_spans]
        assert versions in ([first], [second], [first, second]) and c.version_spans[-1].stop == tokens, c
        both.append(versions == [first, second])
        for before in (seen[c.request_id][c.index] for seen in (held, begun) if c.request_id in seen):
            n = len(before.token_ids)
            kept = c.first(n, e.prompt_tokens)
            assert np.array_equal(kept.token_ids, before.token_ids), "tokens begun with have changed"
            assert np.array_equal(kept.logprobs, before.logprobs), "their log-probabilities have changed"
            assert kept.version_spans == before.version_spans, "their versions have changed"
    return any(both)


def _stands_still(engine: InFlight, take: Callable[[], None]) -> None:
    """Until nothing comes from a paused engine any more: its last tokens may be on their way."""
    told = lambda: {name: [len(c.token_ids) for c in group] for name, group in engine.partial().items()}
    for _ in range(1000):
        before = told()
        take()
        if told() == before:
            return
    raise AssertionError("a paused engine samples")


def _settled(e: EngineUnderTest) -> list[Completion]:
    """A greedy completion whose prompt had been cached: a warm and a cold cache may round differently."""
    e.sample(temperature=0.0)
    return e.sample(temperature=0.0)


def _same(a: Sequence[Completion], b: Sequence[Completion], within: float = 0.0) -> bool:
    pairs = zip(a, b)
    same = all(np.array_equal(x.token_ids, y.token_ids)
               and np.allclose(x.logprobs, y.logprobs, rtol=0.0, atol=within) for x, y in pairs)
    return same and len(a) == len(b)


def _refuses_to_generate(e: EngineUnderTest) -> None:
    with _raises(EngineDirty):
        e.sample()


@contextlib.contextmanager
def _raises(error: type[Exception], what: str = "") -> Iterator[None]:
    try:
        yield
    except error:
        return
    raise AssertionError(f"{what}: {error.__name__} was not raised".lstrip(": "))
