"""Routing replay for mixtures of experts: the learner computes with routes recorded earlier (docs/moe.md).

    none  no replay: the learner routes anew in every pass
    R2    the updates replay the learner's routes of the scoring pass, so that pi / pi_old compares equal
          routes
    R3    the scoring pass and the updates replay the engine's routes, so that pi_old / mu compares equal
          routes, too (arXiv 2510.11370)

Gates are always computed by the learner, over the replayed experts, so that its router learns.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int, Integer, UInt

from bridges.api import Capabilities, Completion, GenRequest
from jaxfp8rl.config.schema import Config, Moe
from jaxfp8rl.data.packing import Sample
from jaxfp8rl.distributed.mesh import ALL, ROWS, MeshLayout
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.losses.mismatch import LOG_RATIO_BOUND, mean_over
from jaxfp8rl.microbatch import map_live
from jaxfp8rl.models.config import Experts, ModelConfig
from jaxfp8rl.models.moe import no_route, route_dtype
from jaxfp8rl.precision.jit import rounding_exact_jit
from jaxfp8rl.types import Params, TrainBatch


def check_moe(cfg: Config, model: ModelConfig) -> None:
    """Raise ConfigError if `moe` is set for a dense model, or if a setting does not support mixtures of
    experts."""
    if model.experts is None:
        # a resolved config lists every setting, so only values other than the defaults count as set
        if changed := [name for name, value in cfg.moe if value != getattr(Moe(), name)]:
            raise ConfigError(f"moe.{changed[0]} is set, but {model.architecture} has no experts",
                              "leave the section [moe] out")
        return
    if cfg.rollout.one_copy:
        raise ConfigError("rollout.one_copy does not support mixtures of experts",
                          "set rollout.one_copy = false")
    if cfg.monitor.precision_every:
        raise ConfigError("monitor.precision_every: the precision probes do not support experts",
                          "set monitor.precision_every = 0")
    if cfg.moe.replay == "R2" and cfg.loss.old_policy != "recomputed":
        old = f'loss.old_policy = "{cfg.loss.old_policy}"'
        raise ConfigError(f'moe.replay = "R2" records routes in the scoring pass, but {old} has none',
                          'set moe.replay = "R3"')
    if cfg.moe.replay != "none" and cfg.rollout.kv_scales == "calibrated":
        raise ConfigError(
            f'moe.replay = "{cfg.moe.replay}" and rollout.kv_scales = "calibrated" '
            "cannot share the scoring pass",
            'set rollout.kv_scales = "one"')
    if cfg.moe.freeze_router and cfg.optim.weight_decay:
        raise ConfigError("under moe.freeze_router, optim.weight_decay would still change the routers",
                          "set optim.weight_decay = 0")


def check_engine(cfg: Config, capabilities: Capabilities) -> None:
    """Raise ConfigError if the engine's routes are to be replayed but it returns none."""
    if cfg.moe.replay == "R3" and not capabilities.routed_experts:
        raise ConfigError(
            f'moe.replay = "R3" needs routes, which {capabilities.engine} {capabilities.engine_version} '
            "does not return",
            'set moe.replay = "R2", or use an engine that returns routed experts')


def route_problem(model: ModelConfig, request: GenRequest, completion: Completion) -> str | None:
    """Why the routes of a completion cannot be replayed, or None."""
    routes = completion.routed_experts
    if routes is None:
        return "no routed experts"
    experts = model.mixture
    tokens = len(request.prompt_token_ids) + len(completion.token_ids) - 1
    want = (tokens, model.num_hidden_layers, experts.num_experts_per_tok)
    if np.shape(routes) != want:
        return (f"routed experts of shape {list(np.shape(routes))}, "
                f"expected [tokens - 1, layers, experts a token] = {list(want)}")
    routes = np.asarray(routes)[:, list(model.sparse_layers)]
    if routes.dtype.kind not in "iu":
        return f"routed experts of dtype {routes.dtype}"
    if routes.size and not 0 <= routes.min() <= routes.max() < experts.num_experts:
        worst = routes.max() if routes.max() >= experts.num_experts else routes.min()
        return f"routed expert {worst} of {experts.num_experts}"
    if (np.diff(np.sort(routes, -1)) == 0).any():
        return "a token routed to the same expert twice"
    return None


def compact(samples: Sequence[Sample], model: ModelConfig) -> list[Sample]:
    """Keep only the routes of sparse layers [tokens, sparse layers, k], in the narrowest dtype that holds
    them."""
    sparse, dtype = list(model.sparse_layers), route_dtype(model.mixture)
    return [s._replace(routes=np.asarray(s.routes)[:, sparse].astype(dtype)) for s in samples]


def of_no_tokens(model: ModelConfig) -> np.ndarray:
    """Routes of zero tokens, [0, sparse layers, k], in the format of `compact`."""
    return np.zeros((0, sum(model.sparse_layers), model.mixture.num_experts_per_tok),
                    route_dtype(model.mixture))


class RouteReplay:
    """Runs the scoring pass with the routes that moe.replay asks for, and records the learner's own routes.

    record(policy, batch) -> (log-probabilities [M, R, T], the learner's routes [M, R, T, sparse layers, k]).
    """

    def __init__(self, cfg: Config, record: Callable):
        self.mode, self._every, self._record = cfg.moe.replay, cfg.moe.measure_every, record
        self._recorded: list[Array] = []
        # (metrics, the number of tokens behind the metrics with each prefix)
        self._seen: list[tuple[dict[str, Array], dict[str, Array]]] = []
        self.steps = 0  # scored so far; every `moe.measure_every`-th is measured

    def score(self, policy: Params, batch: TrainBatch) -> Array:
        """old_logp [M, R, T]. The learner's own routes are kept for `replayed`."""
        old, own = self._record(policy, batch)
        self._recorded.append(own)
        if self.mode == "R3" and batch.routes is not None:
            seen = disagreement(own, batch.routes, batch.segment_ids)
            if self._every and self.steps % self._every == 0:
                unreplayed = self._record(policy, batch._replace(routes=None))[0]
                seen |= _mismatch(unreplayed, batch.rollout_logp, batch.response_mask)
            tokens = {"routing": jnp.sum(_routed(batch.routes, batch.segment_ids)),
                      "mismatch": jnp.sum(batch.response_mask)}
            self._seen.append((seen, tokens))
        return old

    def replayed(self, batches: Sequence[TrainBatch]) -> list[TrainBatch]:
        """The scored batches, with the routes that the updates replay."""
        recorded, self._recorded, self.steps = self._recorded, [], self.steps + 1
        if self.mode == "R3":
            return list(batches)
        return [batch._replace(routes=own) for batch, own in zip(batches, recorded, strict=True)]

    def metrics(self) -> dict[str, float]:
        """The metrics of the step: means over the tokens of its batches."""
        seen, self._seen = jax.device_get(self._seen), []
        # a small positive weight, so that a mean over no tokens is defined
        tokens = lambda name: [max(float(count[name.partition("/")[0]]), 1e-9) for _, count in seen]
        names = seen[0][0] if seen else ()
        return {name: float(np.average([s[name] for s, _ in seen], weights=tokens(name))) for name in names}


def make_record(logprobs: Callable, layout: MeshLayout) -> Callable:
    """Jitted record(policy, batch), as RouteReplay takes it."""

    def of_micro(policy: Params, micro: TrainBatch) -> tuple[Array, Array]:
        logp, _, routing = logprobs(policy, micro)
        return logp, jnp.moveaxis(routing.ids, 0, 2)

    def of_rows(policy: Params, batch: TrainBatch, live: Array) -> tuple[Array, Array]:
        return map_live(functools.partial(of_micro, policy), batch, live)

    @rounding_exact_jit
    def record(policy: Params, batch: TrainBatch) -> tuple[Array, Array]:
        run = layout.run(of_rows, (layout.specs(policy), ROWS, ALL), (ROWS, ROWS))
        return run(policy, batch, batch.response_mask.any((1, 2)))

    return record


@jax.jit
def disagreement(own: Integer[Array, "M R T S k"], routes: UInt[Array, "M R T S k"],
                 segment_ids: Int[Array, "M R T"]) -> dict[str, Float[Array, ""]]:
    """How far the learner's routes (`own`) differ from the replayed `routes`, over the tokens that have
    routes.

    `routing/disagreement/L` is the share of replayed experts that the learner's router did not choose in the
    L-th sparse layer; `routing/disagreement` is its mean over layers; `routing/tokens_differing` is the share
    of tokens with at least one such expert.
    """
    live = _routed(routes, segment_ids)
    missed = ~(routes[..., :, None] == own[..., None, :]).any(-1)  # [M, R, T, L, k]
    by_layer = [mean_over(live, missed[..., layer, :].mean(-1)) for layer in range(routes.shape[-2])]
    found = {f"routing/disagreement/{layer}": share for layer, share in enumerate(by_layer)}
    differing = mean_over(live, missed.any((-1, -2)))
    return found | {"routing/disagreement": jnp.mean(jnp.stack(by_layer)),
                    "routing/tokens_differing": differing}


def _routed(routes: Array, segment_ids: Array) -> Array:
    """Mask [M, R, T] of the tokens that have routes."""
    return (segment_ids > 0) & (routes[..., 0, 0] != no_route(routes.dtype))


@jax.jit
def _mismatch(logp: Array, rollout_logp: Array, mask: Array) -> dict[str, Array]:
    """k1 and k3 (jaxfp8rl.losses.mismatch) of a scoring pass without replay."""
    d = jnp.clip(jnp.where(mask, logp - rollout_logp, 0), -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return {"mismatch/k1_unreplayed": mean_over(mask, -d),
            "mismatch/k3_unreplayed": mean_over(mask, jnp.expm1(d) - d)}


def with_options(model: ModelConfig, cfg: Config) -> ModelConfig:
    """The model with the config's options for routers (moe.freeze_router)."""
    if not (model.experts and cfg.moe.freeze_router):
        return model
    experts: Experts = dataclasses.replace(model.experts, frozen_router=True)
    return dataclasses.replace(model, experts=experts)
