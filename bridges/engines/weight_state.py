"""The state of an engine's weights: a version, or dirty. The engines of this package share it."""

from __future__ import annotations

import dataclasses

from bridges.api import EngineDirty


@dataclasses.dataclass
class WeightState:
    """The state starts dirty. `begin` and `drop` make it dirty; `commit`, after a whole publish, makes it
    clean.

    version and digest are those of the last commit, or None and "" while dirty.
    """

    version: int | None = None
    digest: str = ""
    dirty: str | None = "nothing has been published to it yet"

    def begin(self, version: int) -> None:
        self.drop(f"the publish of version {version} has not finished")

    def drop(self, why: str) -> None:
        self.version, self.digest, self.dirty = None, "", why

    def commit(self, version: int, digest: str) -> None:
        self.version, self.digest, self.dirty = version, digest, None

    def require_clean(self) -> None:
        """Raise EngineDirty unless the weights come from one whole publish."""
        if self.dirty:
            raise EngineDirty(f"the engine has no usable weights: {self.dirty}",
                              "publish a full set of weights first")

    def current(self) -> int:
        """The version. Raises EngineDirty if there is none."""
        self.require_clean()
        assert self.version is not None
        return self.version
