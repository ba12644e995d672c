"""The parts of a training server by themselves: losses, rows, and the order of requests."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8rl.errors import UserError
from jaxfp8rl.serving.guard import check_port
from jaxfp8rl.serving.losses import INPUTS, KINDS, KNOBS, of_tokens
from jaxfp8rl.serving.order import Job, Order, Worker
from jaxfp8rl.serving.refusal import Refused
from jaxfp8rl.serving.rows import Datum, pack, unpack

LOGP = np.array([-1.0, -2.0, -0.5, -3.0], np.float32)
GIVEN = {"weights": [1.0, 0.5, 0.0, -2.0], "logprobs": [-1.5, -1.0, -0.5, -3.05],
         "advantages": [1.0, 2.0, -1.0, -0.5]}
AT = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, "beta": 0.3}


def test_losses_and_their_gradients_are_those_of_the_documentation():
    w, mu, a = map(np.array, GIVEN.values())
    r = np.exp(LOGP - mu)  # 1.65, 0.37, 1, 1.05: above, below and inside the clip range
    clipped = np.clip(r, 0.8, 1.2)
    want = {  # loss, gradient by logp
        "cross_entropy": (-w * LOGP, -w),
        "importance_sampling": (-r * a, -r * a),
        "ppo": (-np.minimum(r * a, clipped * a), -np.where(r * a <= clipped * a, r * a, 0)),
        "cispo": (-clipped * a * LOGP, -clipped * a),
        "dro": (-(a * LOGP - 0.15 * (LOGP - mu) ** 2), -(a - 0.3 * (LOGP - mu))),
    }
    assert set(want) == set(KINDS)
    inputs, knobs = ({n: jnp.float32(v) for n, v in given.items()} for given in (GIVEN, AT))
    assert (set(inputs), set(knobs)) == (set(INPUTS), set(KNOBS))
    for kind, name in enumerate(KINDS):
        f = lambda logp, kind=kind: of_tokens(kind, logp, inputs, knobs)
        np.testing.assert_allclose(f(LOGP), want[name][0], rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(jax.grad(lambda x, f=f: f(x).sum())(LOGP), want[name][1], rtol=1e-5,
                                   err_msg=name)


def test_data_of_many_lengths_come_back_from_few_shapes():
    rng, shapes = np.random.default_rng(0), set()
    for n in range(1, 30):
        data = [Datum(*rng.integers(1, 99, (2, size)), {"weights": rng.random(size)})
                for size in rng.integers(1, 17, n)]
        rows = pack(data, 16, 2, ("weights", "advantages"))
        shapes.add(rows.tokens.shape)
        for field, name in ((rows.tokens, "tokens"), (rows.targets, "targets")):
            for got, d in zip(unpack(field, data), data):
                np.testing.assert_array_equal(got, getattr(d, name))
        for got, d in zip(unpack(rows.inputs["weights"], data), data):
            np.testing.assert_allclose(got, d.inputs["weights"], rtol=1e-6)
        assert not rows.inputs["advantages"].any() and rows.live.sum() == sum(len(d.tokens) for d in data)
        assert not rows.tokens[~rows.live].any()
    assert {s[0] for s in shapes} <= {1, 2, 4, 8, 16} and {s[1:] for s in shapes} == {(2, 16)}
    one = lambda size: Datum(*np.ones((2, size), np.int32), {})
    widths = lambda *sizes: pack([one(s) for s in sizes], 1000, 2, ()).tokens.shape
    assert [widths(5), widths(100, 100, 100), widths(300), widths(600)] == [(1, 2, 128), (1, 2, 256),
                                                                            (1, 2, 512),
                                                                           (1, 2, 1000)]
    assert widths(600, 600, 600) == (2, 2, 1000)


@pytest.fixture
def worker():
    found = Worker(3)
    yield found
    found.close()


def job(log, name, together=None):
    return Job(lambda names: (log.append(names), names)[1], name, Future(), together)


def test_requests_run_by_their_numbers_whatever_order_they_come_in(worker):
    log, order = [], Order(worker, patience=60)
    jobs = {n: job(log, n) for n in range(1, 6)}
    for n in (2, 5, 1, 4, 3):
        assert order.submit(n, b"%d" % n, jobs[n])
    assert [jobs[n].future.result(5) for n in jobs] == list(jobs)
    assert log == [[1], [2], [3], [4], [5]]
    assert not order.submit(3, b"3", job(log, 3))
    with pytest.raises(Refused, match="seq_id 3 is out of order.*the next is 6"):
        order.submit(3, b"other", job(log, 3))


def test_what_waits_in_vain_fails_and_what_came_later_goes_on(worker):
    log, order = [], Order(worker, patience=0)
    late, lost = job(log, 4), job(log, 5)
    order.submit(4, b"4", late)
    order.give_up(time.monotonic() + 1)
    with pytest.raises(Refused, match="seq_id 4 waited .* for seq_id 1, which never came"):
        late.future.result(5)
    order.submit(5, b"5", lost)
    assert lost.future.result(5) == 5


def test_the_same_weights_are_sampled_together_and_an_error_is_an_answer(worker):
    log, hold = [], threading.Event()
    worker.submit(Job(lambda names: (hold.wait(5), names)[1], "first", Future()))
    jobs = [job(log, i, key) for i, key in enumerate("abaaa")]
    wrong = Job(lambda names: 1 / 0, None, Future())
    for j in (*jobs, wrong):
        worker.submit(j)
    hold.set()
    assert [j.future.result(5) for j in jobs] == [0, 1, 2, 3, 4]
    assert log == [[0, 2, 3], [1], [4]]  # three at most
    with pytest.raises(ZeroDivisionError):
        wrong.future.result(5)


def test_a_port_in_use_is_refused_before_anything_loads():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"--port {port}: cannot listen on 127.0.0.1: Address already in "
                           "use\n  next step: end the process that listens there, or give another --port"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)
