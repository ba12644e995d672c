"""Orbax checkpoints of a whole run: parameters, optimiser, counters (arrays) and the loop's own state (JSON).

A checkpoint is complete or absent: Orbax writes into a temporary folder and renames it last. The newest
`keep` are kept. Everything random in a run is drawn from (seed, step), so the step and the seed are the RNG's state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from jaxfp8rl.errors import CheckpointError
from jaxfp8rl.types import TrainState


class Checkpoints:
    """The folder `checkpoints/` of a run directory."""

    def __init__(self, folder: str | Path, keep: int):
        policy = ocp.training.preservation_policies.LatestN(keep)
        self._folder = Path(folder).absolute()
        self._orbax = ocp.training.Checkpointer(self._folder, preservation_policy=policy, cleanup_tmp_directories=True)

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint, or None."""
        return None if self._orbax.latest is None else self._orbax.latest.step

    def save(self, step: int, state: TrainState, loop: dict[str, Any]) -> None:
        """Write both parts of `step`; returns when they are durable."""
        self._orbax.save_checkpointables(step, {"state": state, "loop": loop}, force=True, overwrite=True)

    def restore(self, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """The newest checkpoint, its arrays placed and typed as in `like`. Raises CheckpointError when there is none or when
        it does not fit the model or the optimiser at hand."""
        step = self.latest()
        if step is None:
            raise CheckpointError(f"{self._folder}: no complete checkpoint to resume from", "train without --resume")
        abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), like)
        try:
            saved = self._orbax.load_checkpointables(step, {"state": abstract, "loop": None})
        except Exception as e:
            raise CheckpointError(
                f"{self._folder}: checkpoint {step} cannot be restored into this configuration: {e}",
                "resume with the configuration that wrote it (config.toml of the run directory)",
            ) from e
        typed = lambda x, a: jax.device_put(x, a.aval.memory_space)  # Orbax forgets it in the type of what is in host memory
        return jax.tree.map(typed, saved["state"], like), saved["loop"]

    def close(self) -> None:
        self._orbax.close()
