"""The turns that a learner and the ranks of an engine take with their slots."""

from __future__ import annotations

import threading
import time

import pytest

from bridges.api import BridgeError, PublishFailed
from bridges.vllm_plugin.turns import Turns


@pytest.mark.parametrize("end, says", [("break_off", "the learner broke off"),
                                       ("close", "the learner ended in the middle of a publish")])
def test_a_rank_does_not_wait_for_a_learner_that_is_gone(end, says, tmp_path):
    """The lock on the file goes with the learner's process, however that ends."""
    learner = Turns.made(tmp_path / "turns")
    rank = Turns.opened(tmp_path / "turns")
    learner.begin()
    learner.filled(2)
    rank.await_filled(2)
    rank.empty(5, 1)
    assert learner.emptied([5]) == 1 and learner.emptied([4, 5]) == 0
    threading.Timer(0.1, getattr(learner, end)).start()
    begun = time.monotonic()
    with pytest.raises(PublishFailed, match=says):
        rank.await_filled(3)
    assert 0.05 < time.monotonic() - begun < 1.0
    rank.close()
    rank.close()


def test_a_rank_writes_to_no_other_file(tmp_path):
    """The path comes from whoever has the lease."""
    Turns.made(tmp_path / "turns").close()
    size = (tmp_path / "turns").stat().st_size
    for name, raw in (("short", b"x" * 100), ("alike", b"x" * size)):
        (tmp_path / name).write_bytes(raw)
        with pytest.raises(BridgeError, match="another kind of file"):
            Turns.opened(tmp_path / name)
    with pytest.raises(BridgeError, match="cannot be read here"):
        Turns.opened(tmp_path / "none")
