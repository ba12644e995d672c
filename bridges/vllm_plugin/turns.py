"""Whose turn it is with the slots: counters in a file of this host's memory, which the learner's first
process and all ranks map."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bridges.api import BridgeError, PublishFailed

MOST_RANKS = 1022
MAGIC = 0x4A41584650385431  # in the last counter: the file is one of these
POLL_SECONDS = 5e-5
SPIN_SECONDS = 2e-3  # a sleep takes longer than a bucket that is on its way
CHECK_SECONDS = 0.05  # from one look at whether the learner lives to the next
BUCKET_SECONDS = 120.0  # in which a learner makes a bucket; the first publish compiles


def rest(waited: float) -> None:
    """Between two looks at the counters, after `waited` seconds."""
    time.sleep(0 if waited < SPIN_SECONDS else POLL_SECONDS)


class Turns:
    """int64 counters: buckets that are filled (-1: the learner has broken off), and those that each rank of
    all engines has emptied. The learner holds a lock on the file for as long as it lives.
    """

    def __init__(self, file: int, counters: np.ndarray):
        self._file, self._counters = file, counters

    @classmethod
    def made(cls, path: Path) -> Turns:
        """The learner's end: a new file that this user alone can read."""
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.posix_fallocate(file, 0, 8 * (2 + MOST_RANKS))
        fcntl.flock(file, fcntl.LOCK_EX)
        counters = np.memmap(path, np.int64, "r+")
        counters[-1] = MAGIC
        return cls(file, counters)

    @classmethod
    def opened(cls, path: Path) -> Turns:
        """A rank's end. Raises BridgeError if there is no such file of `made`."""
        try:
            if path.stat().st_size != 8 * (2 + MOST_RANKS) or np.fromfile(path, np.int64)[-1] != MAGIC:
                raise ValueError("it is another kind of file")
            return cls(os.open(path, os.O_RDWR), np.memmap(path, np.int64, "r+"))
        except (OSError, ValueError) as e:
            raise BridgeError(f"{path}, by which the learner takes turns, cannot be read here: {e}",
                              "share its folder with the engine, or use kind \"nccl\"") from e

    def begin(self) -> None:
        """A publish begins: nothing is filled."""
        self._counters[:-1] = 0

    def filled(self, count: int) -> None:
        self._counters[0] = count

    def break_off(self) -> None:
        """Free the ranks that wait for a bucket."""
        self._counters[0] = -1

    def emptied(self, ranks: Sequence[int]) -> int:
        """The buckets that all of `ranks` have emptied."""
        return int(self._counters[1 + np.asarray(ranks)].min())

    def empty(self, rank: int, count: int) -> None:
        self._counters[1 + rank] = count

    def await_filled(self, count: int) -> None:
        """Wait until so many buckets are filled. Raises PublishFailed once the learner has broken off, or has
        ended, and after two minutes."""
        began = looked = time.monotonic()
        while (filled := int(self._counters[0])) < count:
            now = time.monotonic()
            if filled < 0:
                raise PublishFailed("the learner broke off", "publish again in full")
            if now > looked + CHECK_SECONDS:
                looked = now
                if self._learner_has_ended():
                    raise PublishFailed("the learner ended in the middle of a publish",
                                        "publish again in full")
            if now > began + BUCKET_SECONDS:
                raise PublishFailed(f"the learner made no bucket in {BUCKET_SECONDS:g} s",
                                    "publish again in full")
            rest(now - began)

    def _learner_has_ended(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(self._file, fcntl.LOCK_UN)
        return True

    def close(self) -> None:
        """Idempotent."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1
