"""The packed batch of a learner of several processes: each packs and uploads its own rows.

The first process alone has the samples. It assigns them to rows and sends each process those of the rows that
its devices hold. The devices then gather the rows of all, so that every program sees the batch that it would
see in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxfp8rl.data.packing import Extras, Sample, lay_out, pack, rows_of
from jaxfp8rl.distributed.mesh import MeshLayout
from jaxfp8rl.distributed.process_group import ProcessGroup
from jaxfp8rl.types import TrainBatch


def pack_own(
    group: ProcessGroup, layout: MeshLayout, samples: Sequence[Sample], row_tokens: int,
    rows_per_microbatch: int, microbatches: int, like: np.ndarray | None = None, support: int = 0,
    ages: bool = False, least_shared: int = 0, weighted: bool = False,
) -> TrainBatch:
    """`jaxfp8rl.data.packing.pack` of the first process's samples, in all processes of the group. Those of
    the others are ignored."""
    if group.count == 1:
        return pack(samples, row_tokens, rows_per_microbatch, microbatches, like, support, ages, least_shared,
                    weighted)
    own = layout.own_rows(rows_per_microbatch)

    def shares() -> list[dict[str, Any]]:
        rows = rows_of(samples, row_tokens, microbatches * rows_per_microbatch, least_shared)
        extras = Extras.of(samples, like, support, ages, least_shared, weighted)
        return [share(rows, own[i], rows_per_microbatch, extras) for i in range(group.count)]

    sent = group.scatter(shares)
    rows = [[_sample(fields) for fields in row] for row in sent["rows"]]
    batch = lay_out(rows, row_tokens, Extras(*sent["extras"]))
    return layout.upload_rows(batch, own[group.number], rows_per_microbatch)


def share(rows: Sequence[Sequence[Sample]], own: Sequence[int], of: int, extras: Extras) -> dict[str, Any]:
    """What a process is sent: the samples of its `own` rows of every micro-batch of `of` rows."""
    starts = range(0, len(rows), of)
    return {"rows": [[_fields(s) for s in rows[start + r]] for start in starts for r in own],
            "extras": list(extras)}


def _fields(sample: Sample) -> list[Any]:
    return list(sample._replace(prompt=np.asarray(sample.prompt, np.int32),
                                completion=np.asarray(sample.completion, np.int32)))


def _sample(fields: Sequence[Any]) -> Sample:
    return Sample(*fields)
