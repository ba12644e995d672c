"""An update of rows that hold shared prefixes once: the loss and the gradients of the plain rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner_step import FLOAT32, MODEL, distance, learn, old_logps, params, policy, score

from jaxfp8rl.data.packing import Sample, microbatches_needed, pack, unpack
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.models import layers as nn
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.transformer import forward
from jaxfp8rl.training.preflight import check_shape
from pallas_kernels.attention import api

pytestmark = pytest.mark.usefixtures("quick_compile")
T = 48


def samples(groups: int = 2, n: int = 4, seed: int = 0) -> list[Sample]:
    """Groups of completions of one prompt, of which one goes on in a second branch after its history."""
    rng, found = np.random.default_rng(seed), []
    one = lambda prompt, c: Sample(prompt, rng.integers(1, 32, c), -rng.uniform(1, 6, c).astype(np.float32),
                                   float(rng.normal()))
    for _ in range(groups):
        prompt = tuple(rng.integers(1, 32, rng.integers(3, 9)).tolist())
        found += [one(prompt, int(rng.integers(2, 6))) for _ in range(n)]
        found.append(one((*prompt, *found[-1].completion.tolist(), 9, 8), 3))
    return found


def both(members, rows=2):
    m = microbatches_needed(len(members), 24, T, rows)
    return pack(members, T, rows, m, share=2), pack(members, T, rows, m)


def test_loss_and_gradients_are_those_of_the_plain_rows():
    members = samples()
    tree, plain = both(members)
    assert (tree.segment_ids > 0).sum() < 0.75 * (plain.segment_ids > 0).sum()
    logps = [unpack(score(params(), b), members, share) for b, share in ((tree, 2), (plain, 0))]
    for a, b in zip(*logps):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)
    by_token = {s.logprobs.tobytes(): x for s, x in zip(members, unpack(old_logps(params(), plain), members))}
    old = np.zeros(tree.tokens.shape, np.float32)
    for s, place in zip(members, unpack(np.arange(old.size).reshape(old.shape), members, 2)):
        old.flat[place] = by_token[s.logprobs.tobytes()]
    metrics, grads = learn(params(), tree, old)
    want, expected = learn(params(), plain, old_logps(params(), plain))
    assert distance(grads, expected) < 1e-5
    for key, value in want.items():
        np.testing.assert_allclose(metrics[key], value, rtol=1e-4, atol=1e-5, err_msg=key)


def test_a_mask_of_the_plain_rows_is_seen_to_be_wrong():
    """The tolerance above sees a token that sees its siblings."""
    tree, _ = both(samples())
    right, wrong = (learn(params(), b, score(params(), tree))[1] for b in (tree, tree._replace(
        ends=np.where(tree.segment_ids > 0, T, 0).astype(np.int32))))
    assert distance(right, wrong) > 1e-2


def test_shared_tokens_have_the_bits_of_the_plain_row():
    """The first sequence of a row and what follows it in the other."""
    members = samples(1)
    tree, plain = both(members)
    longest = max(len(s.prompt) + len(s.completion) for s in members)
    hidden = [np.asarray(forward(policy(params()), MODEL, *(b[i][0] for i in range(3)), FLOAT32,
                                 ends_BT=None if b.ends is None else b.ends[0])) for b in (tree, plain)]
    np.testing.assert_array_equal(tree.tokens[0, 0, :longest], plain.tokens[0, 0, :longest])
    np.testing.assert_array_equal(hidden[0][0, :longest], hidden[1][0, :longest])


def test_attention_is_that_of_each_sequence_alone_in_float64():
    """Values and gradients, of the reference of the kernels and of the model's own attention."""
    [tree, _] = both(samples(1))
    ends, ids = tree.ends[0], tree.segment_ids[0]
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        q, k, v, do = (jnp.asarray(rng.normal(size=(*ids.shape, h, 8))) for h in (4, 2, 2, 4))
        mask = np.asarray(nn.attention_mask(jnp.asarray(ids), None, jnp.asarray(ends)))

        def alone(q, k, v):
            """Each sequence gathered with its prefix, and its own tokens' results."""
            total = 0.0
            for b, s in [(b, s) for b, row in enumerate(ids) for s in range(1, row.max() + 1)]:
                own = np.flatnonzero(ids[b] == s)
                path = np.flatnonzero(mask[b, own[-1]])
                scores = jnp.einsum("tkgd,skd->kgts", q[b, own].reshape(-1, 2, 2, 8), k[b, path]) * 8**-0.5
                p = jax.nn.softmax(jnp.where(path <= own[:, None], scores, -jnp.inf))
                total += (jnp.einsum("kgts,skd->tkgd", p, v[b, path]).reshape(-1, 4, 8) * do[b, own]).sum()
            return total

        live = jnp.asarray(ids > 0)[..., None, None]
        tables = api.tables_of(jnp.asarray(ids), ends=jnp.asarray(ends))
        ours = [lambda *x: (api.attention(*x, tables, backend="reference") * do * live).sum()]
        found = [jax.jit(jax.value_and_grad(f, (0, 1, 2)))(q, k, v) for f in (alone, *ours)]
        for a, b in zip(jax.tree.leaves(found[0]), jax.tree.leaves(found[1])):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-13)


def test_a_model_with_windows_is_refused(tmp_path):
    from jaxfp8rl.config.toml import load_config

    cfg = load_config("demo", ["--run.dir", str(tmp_path), "--train.shared_prefix", "4"])
    windowed = ModelConfig.from_hf({
        **MODEL.to_hf(), "architectures": ["MistralForCausalLM"], "model_type": "mistral",
        "sliding_window": 8})
    with pytest.raises(ConfigError, match="a window of keys"):
        check_shape(cfg, windowed)
