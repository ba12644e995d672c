"""The rollout correction and the GRPO loss inside somebody else's optax loop.

The policy is a table of logits [T, V]: one distribution for each of the T places of a completion. The sampler
rounds the table to FP8 before it draws, as an inference engine would, so its log-probabilities differ from
those of the learner, and the correction weighs each token by their ratio.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxfp8rl import losses

GROUPS, N, T, V = 4, 16, 5, 10  # prompts, completions of each, tokens of each, vocabulary
PRESET, PPO = losses.get_preset("token_tis"), losses.ObjectiveConfig("ppo_clip")
OPTIMIZER = optax.adam(0.1)


def logprobs(table, tokens):
    """[B, T]: the log-probability of each token."""
    return jnp.take_along_axis(jax.nn.log_softmax(table)[None], tokens[..., None], -1)[..., 0]


def rollout(table, key):
    """Tokens [B, T], and their log-probabilities under the rounded table that drew them."""
    rounded = table.astype(jnp.float8_e4m3fn).astype(jnp.float32)
    tokens = jax.random.categorical(key, rounded, shape=(GROUPS * N, T))
    return tokens, logprobs(rounded, tokens)


def loss(table, tokens, old_logp, rollout_logp, advantages):
    mask, ids = jnp.ones(tokens.shape, bool), jnp.ones(tokens.shape, int)  # a row is one sequence
    correction = losses.rollout_correction(old_logp, rollout_logp, mask, PRESET, ids)
    each, _ = losses.policy_loss(logprobs(table, tokens), old_logp, advantages, correction.mask, ids, PPO)
    scale = losses.token_scale(correction.mask, ids, "token_mean")
    return jnp.sum(scale * correction.weights * each), correction.metrics


@jax.jit
def update(table, state, tokens, rollout_logp, advantages):
    old_logp = logprobs(table, tokens)  # the learner's own, at the weights that the sampler rounded
    grads, metrics = jax.grad(loss, has_aux=True)(table, tokens, old_logp, rollout_logp, advantages)
    updates, state = OPTIMIZER.update(grads, state)
    return optax.apply_updates(table, updates), state, metrics


table, keys = 0.5 * jax.random.normal(jax.random.key(0), (T, V)), jax.random.split(jax.random.key(1), 40)
state = OPTIMIZER.init(table)
for step, key in enumerate(keys):
    tokens, rollout_logp = rollout(table, key)
    rewards = np.mean(np.asarray(tokens) == 7, -1)  # the share of sevens
    advantages = np.concatenate(losses.group_advantages(rewards.reshape(GROUPS, N), "grpo"))
    table, state, metrics = update(table, state, tokens, rollout_logp, jnp.tile(advantages[:, None], (1, T)))
    if step % 10 == 0 or step == len(keys) - 1:
        print(f"step {step:2d}: reward {rewards.mean():.3f}, KL {float(metrics['mismatch/k3']):.5f} nats, "
              f"effective sample {float(metrics['correction/ess']):.3f}")
