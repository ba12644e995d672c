"""A tiny learner whose updates keep their exact gradients, for the tests of a step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import strategies as st

from jaxfp8rl.config.learning import Loss
from jaxfp8rl.data.packing import Sample, pack
from jaxfp8rl.losses.correction import CorrectionConfig
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.module import init_params
from jaxfp8rl.optim.guard import init_state
from jaxfp8rl.precision.records import Precision
from jaxfp8rl.training.step import make_logprobs, make_policy, make_score, make_train_step
from jaxfp8rl.types import TrainBatch

LONGEST = 12
MODEL = ModelConfig.from_hf(
    {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 32, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu",
        "tie_word_embeddings": True,
    }
)
# compute in float32, weights rounded to bfloat16: the bf16 recipe in float32 mode
FLOAT32 = Precision.uniform(2)
LOGPROBS = make_logprobs(MODEL, FLOAT32, 0.7, remat="none")
KEEP = optax.GradientTransformation(  # changes nothing and leaves the exact gradients in opt_state
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda grads, _, __: (jax.tree.map(jnp.zeros_like, grads), grads)
)
policy, score_policy = make_policy(FLOAT32), make_score(LOGPROBS)
train_step = make_train_step(LOGPROBS, FLOAT32, Loss(), CorrectionConfig(), KEEP)


@functools.cache
def params():
    """Weights with four times the usual size, so that the distributions are far from uniform and attention is
    not an average."""
    drawn = init_params(MODEL, jax.random.key(0))
    return jax.tree.map(lambda p: 4 * p if jnp.std(p) > 0 else p, drawn)


def samples_of(lengths: list[tuple[int, int]], seed: int = 0) -> list[Sample]:
    """Completions whose engine log-probabilities differ from the learner's, so that the correction has an
    effect."""
    rng = np.random.default_rng(seed)
    return [
        Sample(rng.integers(1, 32, p), rng.integers(1, 32, c), -rng.uniform(1, 6, c).astype(np.float32),
           float(rng.normal()))
        for p, c in lengths
    ]


def laid_out(samples: list[Sample], layout: tuple[int, int, int]) -> TrainBatch:
    m, rows, row_tokens = layout
    if row_tokens > LONGEST:
        return pack(samples, row_tokens, rows, m)
    single = [pack([s], row_tokens, 1, 1)
              for s in samples] + [pack([], row_tokens, 1, 1)] * (m * rows - len(samples))
    return jax.tree.map(lambda *fields: np.concatenate(fields).reshape(layout), *single)


def score(params, batch: TrainBatch) -> np.ndarray:
    return np.asarray(score_policy(policy(params), batch))


def old_logps(params, batch: TrainBatch) -> np.ndarray:
    """The learner's own log-probabilities plus some tenths that depend only on the token, so that some ratios
    are clipped and some are not."""
    return np.asarray(score(params, batch)) + 0.3 * np.sin(batch.tokens + 3.0
                                                           * batch.positions).astype(np.float32)


@functools.cache
def step_of(loss: Loss, correction: CorrectionConfig):
    return make_train_step(LOGPROBS, FLOAT32, loss, correction, KEEP)


def learn(params, batch: TrainBatch, old_logp: np.ndarray, ref_logp=None, step=train_step):
    """(metrics, gradients) of one update."""
    after, _, metrics = step(init_state(jax.tree.map(jnp.copy, params), KEEP), policy(params), batch,
                             old_logp, ref_logp)
    return {k: float(v) for k, v in metrics.items()}, jax.tree.map(np.asarray, after.opt_state)


def distance(a, b) -> float:
    """The norm of the difference of two gradient trees over that of the first; 0 if all of a batch is clipped
    and both are zero."""
    flat = [np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(t)]) for t in (a, b)]
    return float(np.linalg.norm(flat[0] - flat[1]) / max(np.linalg.norm(flat[0]), 1e-12))


lengths = st.lists(st.tuples(st.integers(1, 5), st.integers(1, LONGEST - 5)), min_size=2, max_size=12)


MIXED = samples_of([(2, 1), (3, 7), (1, 2), (5, 5), (2, 6), (4, 4)], seed=1)


def near_policy(samples: list[Sample], layout: tuple[int, int, int]) -> list[Sample]:
    """The same completions from an engine close to the learner: sequences differ by tenths of nats, not by
    tens."""
    batch = laid_out(samples, layout)
    scores, out = np.asarray(score(params(), batch)), []
    for s in samples:
        m, r, t = (x[0] for x in np.nonzero(batch.rollout_logp == s.logprobs[0]))
        span = slice(t, t + len(s.completion))
        noise = 0.2 * np.sin(np.arange(len(s.completion)) + 2.5 * s.advantage).astype(np.float32)
        out.append(s._replace(logprobs=scores[m, r, span] + noise))
    return out


REINFORCE_PAIR = Loss(objective="reinforce", old_policy="rollout")
