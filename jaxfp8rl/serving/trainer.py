"""A model that a client trains: its state, its summed gradients, and the jitted functions of all such models.

`forward_backward` adds to the gradients; `optim_step` applies their sum and begins anew. The policy that
computes is the rounding of the masters, as in a run (jaxfp8rl.policy.policy), and an update makes it anew.
Nobody's buffers but the state's and the gradients' are donated: weights that were saved for sampling are the
policy of that moment itself, not a copy. With adapters (lora.rank), these alone are a model's state and
gradients; all models share the base.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bridges.api import EngineFormats
from jaxfp8rl.config.schema import Config
from jaxfp8rl.distributed.mesh import ONE
from jaxfp8rl.losses.logprobs import target_logprobs
from jaxfp8rl.microbatch import accumulate, map_live
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.transformer import forward_with_aux, head_weight
from jaxfp8rl.optim.adamw import Formats, Optimizer, adamw
from jaxfp8rl.optim.guard import guarded_update, init_state
from jaxfp8rl.policy.adapters import OverBase, base_weights, masters_like, starting_masters
from jaxfp8rl.policy.initial import fresh_state, starting_params
from jaxfp8rl.policy.policy import adapters_in, gradients_like, outer, over_base, policy_of
from jaxfp8rl.precision.jit import gradient_jit, rounding_exact_jit
from jaxfp8rl.precision.layer_runs import LayerRun
from jaxfp8rl.probes.finite import check_finite
from jaxfp8rl.serving.losses import INPUTS, KINDS, KNOBS, of_tokens
from jaxfp8rl.serving.refusal import Refused
from jaxfp8rl.serving.rows import Datum, Rows, pack, unpack
from jaxfp8rl.training.programs import learner_precision
from jaxfp8rl.training.step import make_policy
from jaxfp8rl.types import Params, TrainState


class Adam(NamedTuple):
    """The client's AdamParams. grad_clip_norm: 0 does not clip."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float

    def check(self) -> None:
        """Raise Refused, which names the value, for one with which no update can be made."""
        for name, good in {"learning_rate": self.learning_rate >= 0, "beta1": 0 <= self.beta1 < 1,
                           "beta2": 0 <= self.beta2 < 1, "eps": self.eps > 0,
                           "weight_decay": self.weight_decay >= 0,
                           "grad_clip_norm": self.grad_clip_norm >= 0}.items():
            value = getattr(self, name)
            if not good or value == float("inf"):
                raise Refused(f"AdamParams.{name} = {value}: out of its range",
                              "betas lie in [0, 1), eps is positive, the others are 0 or more")


class Outcome(NamedTuple):
    """Of a forward pass. logprobs: [len(tokens)] of each datum; loss: the sum over all tokens."""

    logprobs: list[np.ndarray]
    loss: float


class Programs:
    """The jitted functions, for all models of a server. Raises ConfigError for a recipe that does not suit
    the engine's formats."""

    def __init__(self, cfg: Config, model: ModelConfig, runs: tuple[LayerRun, ...], formats: EngineFormats):
        self.cfg, self.model, self.runs = cfg, model, runs
        self.precision = learner_precision(cfg, model, runs, formats)
        self._rounded: Callable[[Params], Params] = make_policy(self.precision)
        self._base = OverBase(self._rounded, make_policy(self.precision), lambda: base_weights(cfg, model),
                              cfg) if cfg.lora.rank else None
        self._updates: dict[tuple, Callable] = {}
        self._backward = gradient_jit(self._backward_of, donate_argnums=(1,))
        self._forward = rounding_exact_jit(self._forward_of)
        self._total = jax.jit(_total)

    def policy(self, params: Params) -> Params:
        """The policy of masters: their rounding, over the base if they are adapters."""
        return self._base(params) if self._base else self._rounded(params)

    def own(self, policy: Params) -> Params:
        """The part of a policy that a model has for itself: all, or its adapters."""
        return adapters_in(policy) or policy

    def whole(self, own: Params) -> Params:
        """The inverse of `own`."""
        return over_base(own, self._base.base) if self._base else own

    @property
    def base_digest(self) -> str:
        """The SHA-256 of the weights under the adapters; "" without adapters."""
        return self._base.digest if self._base else ""

    def new_state(self, seed: int | None = None) -> TrainState:
        """The base model's weights, or adapters that change nothing, with fresh moments. `seed`: of the
        adapters, else the config's. Raises ModelError if the weights are not finite."""
        cfg = self.cfg if seed is None else self.cfg.having("run", seed=seed)
        masters = starting_masters(cfg, self.model, lambda: starting_params(cfg, self.model, ONE, "stored"))
        state = fresh_state(masters, self._optimizer, cfg.precision.compute_dtype, ONE)
        check_finite(state.params, self.model)
        return state

    def state_shapes(self) -> TrainState:
        """The shapes and places of a state."""
        initial = lambda params: init_state(params, self._optimizer, self.cfg.precision.compute_dtype)
        return ONE.placed_shapes(jax.eval_shape(initial, masters_like(self.cfg, self.model)))

    def own_shapes(self) -> Params:
        """The shapes and places of `own` of a policy."""
        return ONE.placed_shapes(jax.eval_shape(self._rounded, self.state_shapes().params))

    def packed(self, data: Sequence[Datum]) -> Rows:
        return pack(data, self.cfg.train.row_tokens, self.cfg.train.rows_per_microbatch, INPUTS)

    def logprobs(self, policy: Params, data: Sequence[Datum]) -> list[np.ndarray]:
        """The log-probability [len(tokens)] of each target of each datum, at temperature 1."""
        return unpack(np.asarray(self._forward(policy, self.packed(data))), data)

    def forward_backward(self, loss: str, policy: Params, grads: Params | None, data: Sequence[Datum],
                         knobs: Mapping[str, float], loss_scale: Array) -> tuple[Params, Outcome]:
        """`grads`, which are donated, with those of `data` added, and what the pass gave."""
        sums = self._zeros(policy) if grads is None else grads
        sums, value, logp = self._backward(policy, sums, self.packed(data), *_chosen(loss, knobs), loss_scale)
        return sums, Outcome(unpack(np.asarray(logp), data), float(value))

    def forward(self, loss: str, policy: Params, data: Sequence[Datum],
                knobs: Mapping[str, float]) -> Outcome:
        """What `forward_backward` gives, without gradients."""
        rows = self.packed(data)
        logp = self._forward(policy, rows)
        return Outcome(unpack(np.asarray(logp), data), float(self._total(logp, rows, *_chosen(loss, knobs))))

    def update(self, state: TrainState, grads: Params, adam: Adam) -> tuple[TrainState, Params, dict]:
        """(state, its policy, metrics). State and gradients are donated. Learning rate and clipping are
        arguments of the program; another value of the rest compiles another."""
        fixed = adam.beta1, adam.beta2, adam.eps, adam.weight_decay
        if fixed not in self._updates:
            self._updates[fixed] = gradient_jit(functools.partial(self._update_of, fixed),
                                                donate_argnums=(0, 1))
        clip = adam.grad_clip_norm or float("inf")
        state, own, facts = self._updates[fixed](state, grads, jnp.float32(adam.learning_rate),
                                                 jnp.float32(clip))
        return state, self.whole(own), facts

    @property
    def _optimizer(self) -> Optimizer:
        return adamw(self.cfg.optim, lambda count: jnp.float32(0), self._formats)

    @property
    def _formats(self) -> Formats:
        optim = self.cfg.optim
        return Formats(optim.master, optim.first_moment, optim.second_moment, optim.offload)

    @functools.cached_property
    def _zeros(self) -> Callable[[Params], Params]:
        return jax.jit(functools.partial(gradients_like, dtype=self.cfg.optim.gradient_sums))

    def _logp(self, policy: Params, rows: Rows) -> Array:
        hidden, _, _ = forward_with_aux(policy, self.model, rows.tokens, rows.positions, rows.segment_ids,
                                        self.precision, self.cfg.train.remat)
        return target_logprobs(
            hidden, head_weight(policy, self.model), rows.targets,
            logits_dtype=self.precision.rounding.logits_dtype, mask=rows.live,
            softcap=self.model.final_logit_softcapping, exact=bool(self.precision.exact))[0]

    def _forward_of(self, policy: Params, rows: Rows) -> Array:
        return map_live(functools.partial(self._logp, policy), rows, rows.live.any((1, 2)))

    def _backward_of(self, policy: Params, grads: Params, rows: Rows, kind: Array, knobs: dict[str, Array],
                     loss_scale: Array) -> tuple[Params, Array, Any]:
        def of_micro(weights: Params, sums: Params, micro: Any) -> tuple[Array, Array]:
            logp = self._logp(policy | weights | {"sums": sums}, micro)
            return _total(logp, micro, kind, knobs), logp

        value, logp, grads = accumulate(of_micro, outer(policy), grads, rows, rows.live.any((1, 2)),
                                        loss_scale)
        return grads, value, logp

    def _update_of(self, fixed: tuple, state: TrainState, grads: Params, rate: Array,
                   clip: Array) -> tuple[TrainState, Params, dict]:
        chosen = dict(zip(("b1", "b2", "eps", "weight_decay"), fixed)) | {"clip_norm": clip}
        optimizer = adamw(self.cfg.optim.model_copy(update=chosen), lambda count: rate, self._formats)
        state, facts = guarded_update(optimizer, state, jnp.float32(0), grads)
        return state, policy_of(state.params, self.precision), facts


class Trainee:
    """One model of a client. Its methods run one after the other, in one thread."""

    def __init__(self, programs: Programs, state: TrainState):
        self._programs, self.state = programs, state
        self.policy: Params = programs.policy(state.params)
        self._grads: Params | None = None

    def forward(self, loss: str, data: Sequence[Datum], knobs: Mapping[str, float]) -> Outcome:
        """What `forward_backward` gives, without gradients."""
        return self._programs.forward(loss, self.policy, data, knobs)

    def forward_backward(self, loss: str, data: Sequence[Datum], knobs: Mapping[str, float]) -> Outcome:
        """Add the gradients of `data` to those that the next `optim_step` applies."""
        self._grads, outcome = self._programs.forward_backward(
            loss, self.policy, self._grads, data, knobs, self.state.loss_scale)
        return outcome

    def optim_step(self, adam: Adam) -> dict[str, float]:
        """Apply the gradients since the last step -> metrics. Raises Refused if there are none, and if they
        are not finite: then no byte of weights or moments has changed."""
        adam.check()
        if self._grads is None:
            raise Refused("optim_step: there was no forward_backward since the last optim_step",
                          "call forward_backward first; `forward` gives no gradients")
        grads, self._grads = self._grads, None
        self.state, self.policy, facts = self._programs.update(self.state, grads, adam)
        found = {name: float(value) for name, value in facts.items()}
        if not found["update/applied"]:
            raise Refused(f"optim_step: the gradients are not finite (norm {found['grad_norm']}); "
                          "no byte of the weights has changed",
                          "look for infinite advantages or log-probabilities; lower the learning rate")
        return {"grad_norm": found["grad_norm"], "step": float(self.state.step)}

    def restore(self, state: TrainState) -> None:
        """Go on from `state`, without gradients."""
        self.state, self.policy, self._grads = state, self._programs.policy(state.params), None


def _chosen(loss: str, knobs: Mapping[str, float]) -> tuple[np.int32, dict[str, np.float32]]:
    return np.int32(KINDS.index(loss)), {name: np.float32(knobs.get(name, 0)) for name in KNOBS}


def _total(logp: Array, rows: Rows, kind: Array, knobs: dict[str, Array]) -> Array:
    return jnp.sum(jnp.where(rows.live, of_tokens(kind, logp, rows.inputs, knobs), 0.0))
