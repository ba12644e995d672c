"""The draft head's training, beside the policy's (`rollout.speculation = "head"`).

The head learns from the hidden states that an update computes anyway, and from the tokens that were sampled:
it raises the log-probability of each sampled token, guessed one and two tokens ahead. Neither hidden states
nor the weights that it shares get a gradient from that, so the policy learns what it learns without it. It
has an AdamW and a guard of its own, and a `TrainState` within the policy's.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from jaxfp8rl.config.learning import Optim
from jaxfp8rl.config.schema import Config
from jaxfp8rl.losses.logprobs import token_logprobs
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.draft_head import guessed, init_draft_head
from jaxfp8rl.models.transformer import head_weight
from jaxfp8rl.optim.adamw import Optimizer, make_optimizer
from jaxfp8rl.optim.guard import guarded_update, init_state
from jaxfp8rl.precision.records import Precision
from jaxfp8rl.types import Params, StepMetrics, TrainBatch, TrainState

AHEAD = 2  # tokens that the head learns to guess: the second from what it guessed of the first
SALT = 0x6472  # of the first weights' seed, which is the run's


class DraftTraining(NamedTuple):
    """How a draft head learns."""

    model: ModelConfig
    precision: Precision
    temperature: float
    optimizer: Optimizer

    def targets(self, batch: TrainBatch, ahead: int) -> Bool[Array, "*M R T"]:
        """The sampled tokens that are guessed from hidden states `ahead` + 1 tokens before: all of these lie
        in the token's sequence, one behind the other in the row."""
        before = lambda x, n, fill: jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(n, 0)],
                                            constant_values=fill)[..., : x.shape[-1]]
        follows = (batch.segment_ids > 0) & (batch.segment_ids == before(batch.segment_ids, 1, 0)) & (
            batch.positions == before(batch.positions, 1, -2) + 1)
        found = batch.response_mask & follows
        for n in range(1, ahead + 1):
            found &= before(follows, n, False)
        return found

    def beside(self, head: Params, count: Float[Array, ""], policy: Params, micro: tuple,
               seen: dict) -> tuple[dict, dict]:
        """`gradients` as jaxfp8rl.microbatch.accumulate takes it: those of `seen["hidden"]`."""
        grads, logp = self.gradients(head, policy, micro[0], seen["hidden"], count)
        return {"draft": grads}, {name: x for name, x in seen.items() if name != "hidden"} | {"guess": logp}

    def gradients(self, head: Params, policy: Params, batch: TrainBatch, hidden: Float[Array, "R T D"],
                  count: Float[Array, ""]) -> tuple[Params, Float[Array, "R T"]]:
        """(gradients of a micro-batch's share of the loss, the log-probabilities [R, T] of tokens guessed
        from one hidden state before their own, 0 elsewhere). count: of all such tokens in the update."""
        head_of_words = head_weight(policy, self.model)

        def loss(head: Params) -> tuple[Array, Array]:
            x, total, found = hidden, jnp.float32(0), []
            for ahead in range(1, AHEAD + 1):
                x = guessed(head, policy, self.model, self.precision,
                            jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1], batch.tokens)
                mask = self.targets(batch, ahead)
                logp, _ = token_logprobs(x, head_of_words, batch.tokens, self.temperature, mask=mask,
                                         softcap=self.model.final_logit_softcapping)
                found.append(jnp.where(mask, logp, 0.0))
                total -= jnp.sum(found[-1])
            return total / jnp.maximum(count, 1), found[0]

        return jax.grad(loss, has_aux=True)(head)

    def update(self, state: TrainState, grads: Params, logp: Float[Array, "M R T"],
               count: Float[Array, ""]) -> tuple[TrainState, StepMetrics]:
        """(the head's new state, its metrics). An update without a token, or one that is not finite, changes
        nothing."""
        mean = jnp.sum(logp) / jnp.maximum(count, 1)
        state, applied = guarded_update(self.optimizer, state, mean, grads, count > 0)
        return state, {"draft/logp": mean, "draft/grad_norm": applied["grad_norm"]}


def draft_training(cfg: Config, model: ModelConfig, precision: Precision) -> DraftTraining | None:
    """How the config's draft head learns; None if it has none."""
    if cfg.rollout.speculation != "head":
        return None
    return DraftTraining(model, precision, cfg.rollout.temperature, _optimizer(cfg))


def fresh_draft(cfg: Config, model: ModelConfig) -> TrainState | None:
    """The state of the config's draft head before its first update; None if it has none."""
    if cfg.rollout.speculation != "head":
        return None
    key = jax.random.fold_in(jax.random.key(cfg.run.seed), SALT)
    return init_state(init_draft_head(model, key), _optimizer(cfg))


def _optimizer(cfg: Config) -> Optimizer:
    return make_optimizer(Optim(lr=cfg.rollout.draft_lr), cfg.updates)
