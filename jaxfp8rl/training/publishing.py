"""Publish the policy to the engine, with what belongs to it: scales of FP8 attention, noise, a draft head."""

from __future__ import annotations

from typing import cast

import numpy as np

from bridges.api import LendingTransport, PublishReceipt, WeightSource
from jaxfp8rl.checkpoint.read_only import Trained
from jaxfp8rl.data.packing import Sample
from jaxfp8rl.policy.policy import with_engine_weights
from jaxfp8rl.publish.draft_head import WithDraftHead
from jaxfp8rl.rollout.adapters import weights_of
from jaxfp8rl.training.context import RunContext
from jaxfp8rl.training.update_batches import pack_samples
from jaxfp8rl.types import Params, TrainState


def with_scales(ctx: RunContext, policy: Params) -> Params:
    """The policy with its calibrated scales of FP8 attention, if the run calibrates them. Before the first
    step they are calibrated on prompts, since there are no completions yet."""
    if ctx.kv_scales is None:
        return policy
    if ctx.kv_scales.amax is None:
        prompts = [p.token_ids for p in ctx.train[: ctx.cfg.rollout.prompts_per_step]]
        policy = policy | ctx.layout.place({"kv_scales": ctx.kv_scales.unit_scales()})
        ctx.kv_scales.score(policy, pack_samples(ctx, [Sample(p[:-1], p[-1:], np.zeros(1), 0.0)
                                                           for p in prompts]))
    return ctx.kv_scales.apply(policy)


def sync_weights(ctx: RunContext, state: TrainState | Trained, policy: Params,
                 version: int, noisy: bool = False) -> tuple[PublishReceipt, Params]:
    """Publish `policy` as `version`, or `noisy` with the noise of that version -> (receipt, the policy for
    the next step).

    With rollout.one_copy the masters are quantised a layer at a time on their way into the engine, and the
    returned policy reads the codes in the engine's memory. Its arrays of the previous version are deleted
    before the first byte is written.
    """
    if not ctx.cfg.rollout.one_copy:
        return publish(ctx, policy, version, noisy=noisy, draft=getattr(state, "draft", None)), policy
    receipt = publish(ctx, {**state.params, "layers": (state.params["layers"],)}, version, noisy=noisy)
    return receipt, with_engine_weights(policy, ctx.precision, cast(LendingTransport, ctx.transport).lend)


def with_noise(ctx: RunContext, state: TrainState, policy: Params, version: int) -> Params:
    """Publish the noise of `version` too, if it has any, after what is not to see it -> the policy."""
    return sync_weights(ctx, state, policy, version, noisy=True)[1] if ctx.noise.sigma(version) else policy


def publish(ctx: RunContext, policy: Params, version: int, *, noisy: bool = False,
            draft: TrainState | None = None) -> PublishReceipt:
    """Hand the policy to the engine as `version`, or `noisy` with the noise of that version, with the draft
    head where there is one, and verify the tensors that the transport has not read back already."""
    if ctx.cfg.rollout.sleep != "off":
        ctx.engine.wake()
    policy = ctx.noise.added(policy, version) if noisy else policy
    source: WeightSource = weights_of(ctx.cfg, ctx.model, policy, ctx.runs, ctx.group.lend,
                                      ctx.cfg.lends_policy)
    if draft:
        source = WithDraftHead(source, draft.params, ctx.model, ctx.cfg.precision.weight_dtype)
    receipt = ctx.transport.publish(source, version)
    # a receipt with digests of content was made after every byte in the engine was found equal
    if not receipt.content:
        ctx.transport.verify(receipt)
    if ctx.drafting:
        ctx.drafting.publish(policy, version)
    return receipt
