"""The learner's step: no result depends on padding, packing, order or the split into micro-batches, nor on what is masked."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxfp8rl.config import Loss
from jaxfp8rl.data.packing import Sample, microbatches_needed, pack
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.transformer import init_params
from jaxfp8rl.optim import init_state
from jaxfp8rl.precision.recipe import LayerRun, Precision
from jaxfp8rl.sft import make_sft_step
from jaxfp8rl.train_step import make_logprobs, make_score, make_train_step
from jaxfp8rl.types import TrainBatch

LONGEST = 12
MODEL = ModelConfig.from_hf(
    {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 32, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu",
        "tie_word_embeddings": True,
    }
)  # fmt: skip
FLOAT32 = Precision.uniform(2)  # compute in float32, weights rounded to bfloat16: the bf16 recipe in float32 mode
LOGPROBS = make_logprobs(MODEL, FLOAT32, 0.7, remat=False)
SGD = optax.sgd(1.0)  # the parameters move by exactly minus the gradient


@pytest.fixture(scope="module")
def params():
    drawn = init_params(MODEL, jax.random.key(0))
    drawn = jax.tree.map(lambda p: 8 * p if p.ndim > 1 and p.std() > 0 else p, drawn)  # far from uniform
    return jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(jnp.float32), drawn)


@functools.cache
def programs(remat: bool = False):
    logprobs = make_logprobs(MODEL, FLOAT32, 0.7, remat)
    return make_score(logprobs, FLOAT32), make_train_step(logprobs, FLOAT32, Loss(), SGD)


def samples_of(lengths: list[tuple[int, int]], seed: int = 0) -> list[Sample]:
    """Completions whose engine log-probabilities are some way off the learner's, so that the correction has work."""
    rng = np.random.default_rng(seed)
    return [
        Sample(rng.integers(1, 32, p), rng.integers(1, 32, c), -3 * rng.random(c).astype(np.float32), float(rng.normal()))
        for p, c in lengths
    ]


def learn(params, batch: TrainBatch, drift: float = 0.05, remat: bool = False):
    """(metrics, gradients [numpy tree]) of one update whose old log-probabilities differ a little from the present ones."""
    score, train_step = programs(remat)
    old = np.asarray(score(params, batch))
    old = old + drift * np.sin(batch.tokens + 3.0 * batch.positions).astype(np.float32)  # a function of the token alone
    state = init_state(jax.tree.map(jnp.copy, params), SGD)
    after, metrics = train_step(state, batch, old)
    grads = jax.tree.map(lambda a, b: np.asarray(a, np.float64) - np.asarray(b, np.float64), params, after.params)
    return {k: float(v) for k, v in metrics.items()}, grads


def gradients(params, batch: TrainBatch, drift: float = 0.05):
    """As `learn`, but gradients straight from `accumulate`, without the rounding of params - grads."""
    from jaxfp8rl.losses.objectives import clipped_objective
    from jaxfp8rl.train_step import accumulate

    def loss_fn(weights, micro, tokens):
        rows, old, mask = micro
        logp = jnp.where(mask, LOGPROBS(weights, rows)[0], 0.0)
        surrogate, _ = clipped_objective(logp, jnp.where(mask, old, 0.0), rows.advantages, 0.2, 0.2)
        return jnp.sum(jnp.where(mask, surrogate, 0.0)) / tokens, {}

    @jax.jit
    def run(weights, batch, old):
        tokens = jnp.sum(batch.response_mask).astype(jnp.float32)
        return accumulate(functools.partial(loss_fn, tokens=tokens), weights, (batch, old, batch.response_mask),
                          batch.response_mask)  # fmt: skip

    old = np.asarray(programs()[0](params, batch))
    old = old + drift * np.sin(batch.tokens + 3.0 * batch.positions).astype(np.float32)
    value, _, grads = run(params, batch, old)
    return float(value), jax.tree.map(np.asarray, grads)


def relative(a, b) -> float:
    """Distance of two gradient trees over the length of the first."""
    flat = [np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(t)]) for t in (a, b)]
    return float(np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[0]))


lengths = st.lists(st.tuples(st.integers(1, 5), st.integers(1, LONGEST - 5)), min_size=2, max_size=10)
