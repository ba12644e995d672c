"""The saved weights that are in memory: the newest few."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from jaxfp8rl.serving.refusal import Refused
from jaxfp8rl.serving.sampler import Snapshot
from jaxfp8rl.serving.saved import Place, place_of


class Snapshots:
    """By their path, or by the sampling session that alone holds them; "" is the base model. `most` are kept,
    those used last. load(place): reads those of a path again; None: the base model's."""

    def __init__(self, most: int, load: Callable[[Place | None], Snapshot]):
        self._most, self._load, self._lock = most, load, threading.Lock()
        self._kept: OrderedDict[str, Snapshot] = OrderedDict()

    def keep(self, key: str, snapshot: Snapshot) -> None:
        with self._lock:
            self._kept[key] = snapshot
            self._kept.move_to_end(key)
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)

    def drop(self, key: str) -> None:
        with self._lock:
            self._kept.pop(key, None)

    def get(self, key: str) -> Snapshot:
        """Raises Refused for weights that were never written to the disk and are gone."""
        with self._lock:
            found = self._kept.get(key)
        if found is None:
            if ":sample:" in key:
                raise Refused(f"the weights of sampling session {key} are gone: this server keeps the newest "
                              f"{self._most} in memory",
                              "save them by name (save_weights_for_sampler), or start the server with more "
                              "--snapshots")
            found = self._load(place_of(key) if key else None)
        self.keep(key, found)
        return found
