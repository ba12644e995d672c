"""The batches of a step's updates: which samples each update has, and how they are packed."""

from __future__ import annotations

from jaxfp8rl.data.packing import Sample, microbatches_needed
from jaxfp8rl.rollout import scored_groups
from jaxfp8rl.rollout.own_rows import pack_own
from jaxfp8rl.rollout.selected import Selected
from jaxfp8rl.training.context import RunContext
from jaxfp8rl.types import TrainBatch


def split(batch: scored_groups.Rollouts, taken: Selected, ctx: RunContext,
          version: int) -> list[list[Sample]]:
    """The samples of each update of the step that begins at `version`: whole units in order, groups where
    nothing is replayed, with at most one unit more in one update than in another.

    Units without samples are left out. With fewer units than train.updates_per_step there is one update a
    unit; with none there is one empty update. No update has more groups than the configured share, so the
    packed shape never grows.
    """
    loss, longest = ctx.cfg.loss, ctx.cfg.rollout.max_new_tokens
    units = list(filter(None, scored_groups.to_samples(batch.chosen, loss, longest, version, *taken[:2])))
    updates = max(min(ctx.cfg.train.updates_per_step, len(units)), 1)
    size, more = divmod(len(units), updates)
    ends = [i * size + min(i, more) for i in range(updates + 1)]
    return [sum(units[start:end], []) for start, end in zip(ends, ends[1:])]


def pack_samples(ctx: RunContext, samples: list[Sample]) -> TrainBatch:
    """Pack samples to the shape of an update, or to a larger shape if they do not fit (those of the gate may
    not)."""
    t, samples = ctx.cfg.train, ctx.with_routes(samples)
    needed = microbatches_needed(len(samples), ctx.cfg.max_model_len, t.row_tokens, t.rows_per_microbatch)
    times = max(1, -(-needed // ctx.microbatches))  # whole multiples, so that few shapes are compiled
    shape = t.row_tokens, t.rows_per_microbatch, times * ctx.microbatches
    ages, weighs = ctx.cfg.loss.needs_ages, ctx.cfg.selection.weighs
    extras = ctx.no_routes, ctx.support_width, ages, t.shared_prefix, weighs
    return pack_own(ctx.group, ctx.layout, samples, *shape, *extras)
