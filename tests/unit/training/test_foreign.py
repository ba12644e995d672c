"""A learner that the step knows nothing of is trained by the step of our own: the same updates, for any
tree."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from learner_step import (
    KEEP,
    LOGPROBS,
    distance,
    laid_out,
    learn,
    lengths,
    near_policy,
    old_logps,
    params,
    samples_of,
    step_of,
)

from bridges.api import WeightSource
from bridges.sources.tree_source import TreeSource
from jaxfp8rl import Learner, Loss, Sample, Trainer, attention_mask, losses, pack
from jaxfp8rl.errors import ModelError
from jaxfp8rl.losses.correction import CorrectionConfig
from jaxfp8rl.policy.policy import policy_of
from jaxfp8rl.precision.recipe import Precision

LAYOUT, PLAIN = (3, 4, 12), Precision.uniform(2, weight_dtype="float32")
pytestmark = pytest.mark.usefixtures("quick_compile")


def rounded():
    """Weights that our own step's rounding leaves as they are."""
    return jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(jnp.float32), params())


class OurModelInAList:
    """Our own tiny model as a learner: its weights in a list."""

    def __init__(self):
        self.params = [rounded()]

    def logprobs(self, params, batch):
        return LOGPROBS(policy_of(params[0], PLAIN), batch)[:2]

    def source(self, params):
        return TreeSource(params)


@pytest.mark.parametrize("loss", [
    Loss(kl_coef=0.1, entropy_coef=0.01, aggregation="seq_mean_token_mean"),
    pytest.param(Loss(old_policy="current", objective="reinforce"), marks=pytest.mark.slow),
    pytest.param(Loss(old_policy="rollout", objective="cispo"), marks=pytest.mark.slow),
], ids=["kl_and_entropy", "current", "rollout"])
def test_its_updates_are_those_of_our_own_learner(loss):
    trainer = Trainer(OurModelInAList(), optimizer=KEEP, loss=loss, correction=CorrectionConfig())

    @given(lengths)
    @settings(max_examples=2)
    def same(lengths):
        batch = laid_out(near_policy(samples_of(lengths), LAYOUT), LAYOUT)
        old, ref = old_logps(params(), batch), old_logps(params(), batch) - 0.1
        want, gradients = learn(rounded(), batch, old, ref, step_of(loss, CorrectionConfig()))
        got = trainer.update(batch, old, ref)
        chex.assert_trees_all_close(jax.tree.map(float, got), want, rtol=1e-5, atol=1e-6)
        assert distance(gradients, trainer.state.opt_state["params"][0]) < 1e-6

    same()


class Bigrams:
    """A table of logits, in an NNX module."""

    def __init__(self, vocabulary: int = 8):
        table = nnx.Embed(vocabulary, vocabulary, rngs=nnx.Rngs(0))
        self.graph, self.params = nnx.split(table, nnx.Param)

    def logprobs(self, params, batch):
        logits = nnx.merge(self.graph, params)(batch.tokens)
        return losses.logits_logprobs(logits, batch.tokens)

    def source(self, params):
        return TreeSource(params, {"embedding": "model.embed_tokens.weight"})


def drawn(trainer: Trainer, seed: int):
    """32 second tokens drawn from the trainer's own table, rewarded where even."""
    logp = np.asarray(jax.nn.log_softmax(trainer.params["embedding"].get_value()))[1]
    noise = np.random.default_rng(seed).gumbel(size=(32, 8))
    tokens = np.argmax(logp + noise, -1)
    rewards = (tokens % 2 == 0).astype(np.float32)
    samples = [Sample([1], [token], logp[[token]], float(reward))
               for token, reward in zip(tokens, rewards - rewards.mean())]
    return pack(samples, 8, 4, 3), rewards.mean()


def test_an_nnx_module_learns_without_compiling_again():
    chex.clear_trace_counter()
    bigrams = Bigrams()
    # a scan, its shapes, its gradient, the score
    bigrams.logprobs = chex.assert_max_traces(bigrams.logprobs, n=8)
    trainer, rewards = Trainer(bigrams, optimizer=optax.adam(0.3)), []
    first = jax.tree.leaves(bigrams.params)[0]
    assert isinstance(bigrams, Learner) and isinstance(trainer.source(), WeightSource)
    for step in range(6):
        batch, reward = drawn(trainer, step)
        metrics = trainer.update(batch)
        rewards.append(reward)
        assert metrics["update/applied"] == 1 and metrics["mismatch/max_logp_diff"] < 1e-5
    assert first.is_deleted() and rewards[-1] > rewards[0] + 0.2
    assert trainer._update._cache_size() == trainer._score._cache_size() == 1
    [(name, weight)] = trainer.source()
    assert name == "model.embed_tokens.weight" and weight.shape == (8, 8)


def test_an_update_that_is_not_finite_changes_nothing():
    trainer = Trainer(Bigrams(), optimizer=optax.adam(0.3))
    before = np.asarray(jax.tree.leaves(trainer.params)[0])
    batch, _ = drawn(trainer, 0)
    metrics = trainer.update(batch._replace(advantages=batch.advantages * np.nan))
    assert metrics["update/applied"] == 0 and metrics["update/bad_in_a_row"] == 1
    np.testing.assert_array_equal(jax.tree.leaves(trainer.params)[0], before)
    # what the learner gives off the response counts nothing
    spoilt = Bigrams()
    inner = spoilt.logprobs
    spoilt.logprobs = lambda params, batch: tuple(
        jnp.where(batch.response_mask, x, jnp.nan) for x in inner(params, batch))
    assert Trainer(spoilt, optimizer=optax.adam(0.3)).update(batch)["update/applied"] == 1


def test_errors_say_what_to_do():
    class Wrong(Bigrams):
        def logprobs(self, params, batch):
            return super().logprobs(params, batch)[0]

    trainer, adam = Trainer(Bigrams(), optimizer=optax.adam(1.0), loss=Loss(kl_coef=0.1)), optax.adam(1.0)
    batch, _ = drawn(trainer, 0)
    with pytest.raises(ValueError, match="loss.kl_coef = 0.1 needs ref_logp"):
        trainer.update(batch)
    with pytest.raises(ValueError, match=r"tokens \(4, 8\): an update takes micro-batches \[M, R, T\]"):
        trainer.update(jax.tree.map(lambda x: x[0], batch))
    with pytest.raises(ValueError, match=r"Wrong.logprobs gave arrays of shapes \[\(4, 8\)\]: it must give"):
        Trainer(Wrong(), optimizer=adam).update(batch)
    for tree, message in (({"a": jnp.ones(2, jnp.bfloat16)}, r"\['a'\] is bfloat16.*astype\(float32\)"),
                           ({"a": (shared := jnp.ones(2)), "b": shared}, r"two places: \['a'\] and \['b'\]")):
        wrong = Bigrams()
        wrong.params = tree
        with pytest.raises(ModelError, match="(?s)" + message):
            Trainer(wrong, optimizer=adam)


def test_the_attention_mask_keeps_the_sequences_of_a_row_apart():
    mask = attention_mask(jnp.array([[1, 1, 2, 0]]))
    want = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    np.testing.assert_array_equal(mask[0], np.array(want, bool))
