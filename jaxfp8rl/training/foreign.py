"""A learner that nobody here wrote: any JAX model, trained by the step that a run of ours uses.

    class Mine:
        params = my_float32_weights                    # any pytree
        def logprobs(self, params, batch): ...         # -> logp, entropy [R, T]
        def source(self, params): ...                  # -> bridges.TreeSource(params, mapping)

    trainer = Trainer(learner := Mine(), optimizer=optax.adam(1e-6))
    transport.publish(trainer.source(), version=0)     # into the engine, which samples
    metrics = trainer.update(pack(samples, ...))       # correction, objective, guard, optimiser

The step reads no name in the tree. It differentiates the whole tree at once: unlike for the models here, a
micro-batch's gradient exists beside the sum of gradients.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Float

from bridges.api import WeightSource
from jaxfp8rl.config.learning import Loss
from jaxfp8rl.errors import ModelError
from jaxfp8rl.losses.correction import CorrectionConfig
from jaxfp8rl.losses.presets import get_preset
from jaxfp8rl.optim.adamw import Optimizer
from jaxfp8rl.optim.guard import init_state
from jaxfp8rl.policy.policy import partition
from jaxfp8rl.precision.jit import gradient_jit
from jaxfp8rl.training.step import TrainStep, make_score
from jaxfp8rl.types import Params, StepMetrics, TrainBatch, TrainState


@runtime_checkable
class Learner(Protocol):
    """A model and its weights: three members.

    params: the weights to train, a pytree of float32 arrays. Of an NNX module: `nnx.split(model, nnx.Param)`.

    logprobs(params, batch): jittable and differentiable. For a micro-batch, fields [R, T], it gives the
    log-probability of each token given those before it in its segment, and the entropy of the distribution
    that it was drawn from: (logp, entropy), each [R, T] float32, in nats, at the temperature of the rollout.
    Positions where `batch.response_mask` is False count nothing. `jaxfp8rl.losses.logits_logprobs` makes
    both from logits. It casts the weights to the type that it computes in.

    source(params): the WeightSource of such weights, as `bridges.TreeSource` makes it.
    """

    @property
    def params(self) -> Any: ...

    def logprobs(self, params: Any, batch: TrainBatch) -> tuple[Array, Array]: ...

    def source(self, params: Any) -> WeightSource: ...


class Trainer:
    """Updates of a learner's weights: rollout correction, objective, finite guard and optimiser in one jitted
    function, the one that `jaxfp8rl.train` runs (jaxfp8rl.training.step).

    The trainer takes the arrays of `learner.params` over. The first update donates them, so read
    `trainer.params` from then on. Arrays on several devices stay where they are.

    loss: `loss.advantage` is not read: the batch carries advantages. correction: a CorrectionConfig or the
    name of a preset. optimizer: optax's, or one of `jaxfp8rl.optim.adamw`, which looks up the names of our
    own models for weight decay. Raises ModelError for parameters that are not float32, or one array in two
    places.
    """

    def __init__(self, learner: Learner, *, optimizer: Optimizer | optax.GradientTransformation,
                 loss: Loss | None = None, correction: CorrectionConfig | str = "token_tis"):
        self.learner, self._loss = learner, loss or Loss()
        correction = get_preset(correction) if isinstance(correction, str) else correction
        logprobs = _logprobs(learner)
        step = TrainStep(logprobs, _same, _zeros, self._loss, correction, optimizer)
        self.state = _on_one_mesh(init_state({"params": _checked(learner.params), "layers": {}}, optimizer))
        self._score, self._update = make_score(logprobs), gradient_jit(_of_state(step), donate_argnums=0)

    @property
    def params(self) -> Any:
        """The weights as they are now, a tree like `learner.params`. The next update donates them."""
        return self.state.params["params"]

    def source(self) -> WeightSource:
        """The weights as they are now, for a transport's `publish`."""
        return self.learner.source(self.params)

    def score(self, batch: TrainBatch, params: Any = None) -> Float[Array, "M R T"]:
        """The log-probabilities [M, R, T] float32 of a batch's sampled tokens under the weights as they are
        now, or under `params`, such as those of a reference."""
        return self._score(self.state.params if params is None else {"params": params, "layers": {}}, batch)

    def update(self, batch: TrainBatch, old_logp: Array | None = None,
               ref_logp: Array | None = None) -> StepMetrics:
        """One update from a batch [M, R, T] (`jaxfp8rl.pack`) -> its metrics, scalars on the device.

        old_logp: [M, R, T], the learner's log-probabilities at the weights that sampled. Without it the batch
        is scored first, which is right for the first update after a publish; score the batches of later ones
        before it. ref_logp: those of the reference under loss.kl_coef. An update that is not finite, or has
        no token with a gradient, changes nothing: `metrics["update/applied"]` is 0. Raises ValueError for a
        batch of another shape and for a missing ref_logp.
        """
        if batch.tokens.ndim != 3:
            raise ValueError(f"tokens {batch.tokens.shape}: an update takes micro-batches [M, R, T], as "
                             "jaxfp8rl.pack makes them")
        if self._loss.kl_coef and ref_logp is None:
            raise ValueError(f"loss.kl_coef = {self._loss.kl_coef} needs ref_logp: score(batch, "
                             f"reference_params)")
        if old_logp is None:
            old_logp = self.score(batch) if self._loss.old_policy == "recomputed" else batch.rollout_logp
        self.state, metrics = self._update(self.state, batch, old_logp, ref_logp)
        return metrics


def _of_state(step: TrainStep) -> Any:
    def update(state: TrainState, batch: TrainBatch, old_logp: Array,
               ref_logp: Array | None) -> tuple[TrainState, StepMetrics]:
        # the masters are the policy, so both are one argument and are donated once
        new, _, metrics = step.update(state, *partition(state.params), batch, old_logp, ref_logp)
        return new, metrics

    return update


def _logprobs(learner: Learner) -> Any:
    """The learner's function in the form of `make_logprobs`, its results checked."""

    def logprobs(policy: Params, batch: TrainBatch) -> tuple[Array, Array, None]:
        both = learner.logprobs(policy["params"], batch)
        shapes = [jnp.shape(x) for x in jax.tree.leaves(both)]
        if shapes != [batch.tokens.shape] * 2:
            raise ValueError(f"{type(learner).__name__}.logprobs gave arrays of shapes {shapes}: it must "
                             f"give (logp, entropy), each {batch.tokens.shape}")
        logp, entropy = (jnp.where(batch.response_mask, x.astype(jnp.float32), 0.0) for x in both)
        return logp, entropy, None

    return logprobs


def _same(params: Params, codes: bool) -> Params:
    """The policy of a learner that quantises for itself: its masters."""
    return params


def _zeros(policy: Params) -> Params:
    return jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), policy)


def _on_one_mesh(state: TrainState) -> TrainState:
    """Counts and other scalars on all devices of weights that are split, where the update returns them: else
    the second update would be compiled again."""
    meshes = [x.sharding.mesh for x in jax.tree.leaves(state) if isinstance(x.sharding, NamedSharding)]
    if not meshes:
        return state
    whole = NamedSharding(meshes[0], PartitionSpec())
    return jax.tree.map(lambda x: x if isinstance(x.sharding, NamedSharding) else jax.device_put(x, whole),
                        state)


def _checked(params: Any) -> Any:
    named = [(jax.tree_util.keystr(path), x) for path, x in jax.tree_util.tree_leaves_with_path(params)]
    wrong = [f"{name} is {jnp.result_type(x)}" for name, x in named if jnp.result_type(x) != jnp.float32]
    if wrong:
        raise ModelError(f"params must be float32, the type that updates are summed in: {', '.join(wrong)}",
                         "cast weights with astype(float32) here, and back in logprobs; leave counters and "
                         "random keys out: nnx.split(model, nnx.Param, ...)")
    places: dict[int, list[str]] = {}
    for name, x in named:
        places.setdefault(id(x), []).append(name)
    if tied := [" and ".join(names) for names in places.values() if len(names) > 1]:
        raise ModelError(f"params has one array in two places: {', '.join(tied)}",
                         "keep a tied weight once, and give it two names in the mapping of TreeSource")
    return jax.tree.map(jnp.asarray, params)
