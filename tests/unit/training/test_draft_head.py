"""The draft head learns from what an update computes, and changes nothing of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner_step import FLOAT32, KEEP, LOGPROBS, MIXED, MODEL, laid_out, old_logps, params, policy

from jaxfp8rl.checkpoint.store import Checkpoints
from jaxfp8rl.config.learning import Loss, Optim
from jaxfp8rl.data.packing import Sample, pack
from jaxfp8rl.losses.correction import CorrectionConfig
from jaxfp8rl.models.draft_head import guessed, init_draft_head
from jaxfp8rl.models.transformer import forward, head_weight
from jaxfp8rl.optim.adamw import make_optimizer
from jaxfp8rl.optim.guard import init_state
from jaxfp8rl.training.draft import DraftTraining
from jaxfp8rl.training.step import make_logprobs, make_train_step

TRAINING = DraftTraining(MODEL, FLOAT32, 0.7, make_optimizer(Optim(lr=3e-3), 10))
WITH_HIDDEN = make_logprobs(MODEL, FLOAT32, 0.7, remat="none", with_hidden=True)
step = make_train_step(WITH_HIDDEN, FLOAT32, Loss(), CorrectionConfig(), KEEP, draft=TRAINING)
SHAPE = 2, 2, 24
pytestmark = pytest.mark.usefixtures("quick_compile")


def head_state(seed: int = 0):
    """A head whose MLP adds something, so that each weight has a gradient."""
    head = init_draft_head(MODEL, jax.random.key(seed))
    head["down_proj"]["weight"] = 0.02 * jax.random.normal(jax.random.key(9),
                                                           head["down_proj"]["weight"].shape)
    return init_state(head, TRAINING.optimizer)


def state(draft=None):
    return init_state(jax.tree.map(jnp.copy, params()), KEEP)._replace(draft=draft)


def test_the_policy_learns_what_it_learns_without_a_head_in_bits():
    batch = laid_out(MIXED, SHAPE)
    old = old_logps(params(), batch)
    plain, of_plain, said = make_train_step(LOGPROBS, FLOAT32, Loss(), CorrectionConfig(), KEEP)(
        state(), policy(params()), batch, old)
    beside, of_beside, told = step(state(head_state()), policy(params()), batch, old)
    assert plain.draft is None and int(beside.draft.step) == 1
    for a, b in zip(jax.tree.leaves((plain, of_plain)),
                    jax.tree.leaves((beside._replace(draft=None), of_beside)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert {k: float(v) for k, v in said.items()} == {k: float(told[k]) for k in said}
    assert set(told) - set(said) == {"draft/logp", "draft/grad_norm"} and float(told["draft/grad_norm"]) > 0


def by_hand(head, weights, batch):
    """-(the mean log-probability of what is guessed), of each sequence apart, over the number of tokens that
    are guessed one ahead."""
    total, count, first = 0.0, 0, []
    words = head_weight(weights, MODEL)
    for s in batch:
        tokens = jnp.asarray(np.concatenate([s.prompt, s.completion]))[None]
        p, places = len(s.prompt), jnp.arange(tokens.shape[1])[None]
        x = jax.lax.stop_gradient(forward(weights, MODEL, tokens, places, jnp.ones_like(tokens), FLOAT32))
        for ahead in (1, 2):
            # the state at ahead, ahead + 1, ...
            x = guessed(head, weights, MODEL, FLOAT32, x[:, :-1], tokens[:, ahead:])
            logp = jax.nn.log_softmax(x[0, :-1] @ words.T / 0.7)
            logp = jnp.take_along_axis(logp, tokens[0, ahead + 1 :, None], 1)[:, 0]
            sampled = np.arange(ahead + 1, tokens.shape[1]) >= p
            total -= jnp.sum(jnp.where(sampled, logp, 0))
            if ahead == 1:
                count += int(sampled.sum())
                first.append(jnp.where(sampled, logp, 0).sum())
    return total / count, (jnp.stack(first).sum() / count, count)


def test_its_gradients_are_those_of_each_sequence_by_itself():
    """The second of them has a prompt of one token, so that its first completion token is not guessed."""
    draft, batch, of = head_state(), laid_out(MIXED[1:3], (1, 1, 24)), policy(params())
    wanted, (mean, count) = jax.jit(jax.grad(lambda head, of: by_hand(head, of, MIXED[1:3]), has_aux=True))(
        draft.params, of)
    assert count == 7 + 1
    micro = jax.tree.map(lambda x: jnp.asarray(x[0]), batch)
    hidden = forward(of, MODEL, micro.tokens, micro.positions, micro.segment_ids, FLOAT32)
    found, logp = jax.jit(TRAINING.gradients)(draft.params, of, micro, hidden, jnp.float32(count))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(logp.sum() / count, mean, rtol=1e-5)
    assert min(float(jnp.abs(g).max()) for g in jax.tree.leaves(found)) > 1e-4


def test_it_learns_what_follows_and_bad_updates_change_nothing():
    """Completions that count upwards: the head knows the next word from the last one alone."""
    rng = np.random.default_rng(0)
    count = lambda n: (rng.integers(1, 32) + np.arange(n)) % 31 + 1
    now, first, batch = state(head_state()), None, None
    for _ in range(60):
        rows = [count(12) for _ in range(8)]
        batch = laid_out([Sample(c[:3], c[3:], -np.ones(9, np.float32), 1.0) for c in rows], (2, 2, 24))
        now, _, told = step(now, policy(params()), batch, batch.rollout_logp)
        first = float(told["draft/logp"]) if first is None else first
    assert first < -3 and float(told["draft/logp"]) > -1
    kept = jax.tree.map(np.asarray, now.draft.params)
    hot = jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), now.draft.params)
    after, _, told = step(now._replace(draft=now.draft._replace(params=hot)), policy(params()), batch,
                          batch.rollout_logp)
    assert int(after.draft.bad_steps) == 1 and int(after.bad_steps) == 0 and np.isfinite(told["loss"])
    nothing = pack([], 24, 2, 2)
    after, _, told = step(after._replace(draft=init_state(kept, TRAINING.optimizer)), policy(params()),
                          nothing,
                          nothing.rollout_logp)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, after.draft.params), kept)
    assert float(told["draft/logp"]) == 0 and int(after.draft.step) == 0


def test_a_checkpoint_keeps_the_head_beside_the_state(tmp_path):
    store, whole = Checkpoints(tmp_path, 2), state(head_state())
    store.save(1, whole, {})
    store.save(2, whole._replace(draft=None), {})
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), whole)
    again, _ = store.restore(like, 1)
    assert jax.tree.structure(again) == jax.tree.structure(whole)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), again, whole)
    assert store.restore(like, 2)[0].draft is None and store.restore(like._replace(draft=None),
                                                                     1)[0].draft is None
