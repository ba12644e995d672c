"""The guard, the schedules and what weight decay reaches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxfp8rl.config import Optim
from jaxfp8rl.optim import LOSS_SCALE_PATIENCE, guarded_update, init_state, make_optimizer, make_schedule, rescaled

pytestmark = pytest.mark.usefixtures("quick_compile")
PARAMS = {
    "embed_tokens": {"weight": jnp.ones((4, 2))},
    "layers": {"input_layernorm": {"weight": jnp.ones((3, 2))}, "self_attn": {"q_norm": {"weight": jnp.ones((3, 2))},
               "q_proj": {"weight": jnp.ones((3, 2, 2))}}},
    "norm": {"weight": jnp.ones(2)},
}  # fmt: skip
GRADS = jax.tree.map(lambda p: 0.1 * jnp.arange(1.0, p.size + 1).reshape(p.shape), PARAMS)
OPTIMIZER = make_optimizer(Optim(lr=0.1, weight_decay=0.01), 10)
update = jax.jit(lambda state, loss, grads: guarded_update(OPTIMIZER, state, loss, grads))


def as_bytes(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def with_one(value: float):
    """GRADS with a single element of the deepest tensor replaced."""
    bad = jax.tree.map(lambda g: g, GRADS)
    bad["layers"]["self_attn"]["q_proj"]["weight"] = GRADS["layers"]["self_attn"]["q_proj"]["weight"].at[1, 1, 0].set(value)
    return bad


@pytest.mark.parametrize(
    "loss, grads",
    [(np.nan, GRADS), (np.inf, GRADS), (1.0, with_one(np.nan)), (1.0, with_one(-np.inf)), (1.0, with_one(1e30))],
    ids=["loss nan", "loss inf", "gradient nan", "gradient inf", "norm overflows"],
)
def test_the_guard_keeps_every_byte_counts_and_recovers(loss, grads):
    state, _ = update(init_state(PARAMS, OPTIMIZER), jnp.float32(1.0), GRADS)  # moments are not zero
    before = as_bytes((state.params, state.opt_state))
    for n in range(1, 12):  # optax.apply_if_finite would give in after a few
        state, metrics = update(state, jnp.float32(loss), grads)
        assert as_bytes((state.params, state.opt_state)) == before
        assert (int(state.step), int(state.bad_steps), int(metrics["update/bad_in_a_row"])) == (1, n, n)
        assert metrics["update/applied"] == 0
    healed, metrics = update(state, jnp.float32(1.0), GRADS)
    straight, _ = update(update(init_state(PARAMS, OPTIMIZER), jnp.float32(1.0), GRADS)[0], jnp.float32(1.0), GRADS)
    assert as_bytes(healed) == as_bytes(straight) and metrics["update/applied"] == 1


def test_where_nothing_is_live_no_byte_changes_and_nothing_is_bad():
    """Adam would move by its momentum alone."""
    state, _ = update(init_state(PARAMS, OPTIMIZER), jnp.float32(1.0), GRADS)
    nothing = jax.tree.map(jnp.zeros_like, GRADS)
    after, metrics = guarded_update(OPTIMIZER, state, jnp.float32(0.0), nothing, live=jnp.bool_(False))
    assert as_bytes(after) == as_bytes(state) and metrics["update/applied"] == 0 and metrics["update/overflow"] == 0
    moved, _ = guarded_update(OPTIMIZER, state, jnp.float32(0.0), nothing)
    assert as_bytes(moved.params) != as_bytes(state.params)


def test_grad_norm_is_that_before_clipping_and_the_update_that_after():
    sgd = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    state, metrics = guarded_update(sgd, init_state(PARAMS, sgd), jnp.float32(0.0), GRADS)
    norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(GRADS)))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-6)
    moved = optax.tree.norm(jax.tree.map(jnp.subtract, PARAMS, state.params))
    assert norm > 1 and abs(float(moved) - 1) < 1e-5


def test_adamw_equals_the_formula():
    """Decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2), gradients below the clip."""
    cfg = Optim(lr=0.1, b1=0.8, b2=0.9, eps=1e-3, weight_decay=0.01, clip_norm=1e9)
    optimizer = make_optimizer(cfg, 10)
    state = init_state({"w": jnp.ones(3)}, optimizer)
    w, m, v = np.ones(3), np.zeros(3), np.zeros(3)
    for t, g in enumerate(np.random.default_rng(0).normal(size=(4, 3)), 1):
        state, _ = guarded_update(optimizer, state, jnp.float32(0), {"w": jnp.asarray(g, jnp.float32)})
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
        w = w - 0.1 * (m / (1 - 0.8**t) / (np.sqrt(v / (1 - 0.9**t)) + 1e-3) + 0.01 * w)
    np.testing.assert_allclose(state.params["w"], w, rtol=1e-5)


def test_weight_decay_spares_the_norms_stacked_ones_included():
    optimizer = make_optimizer(Optim(lr=0.1, weight_decay=0.5), 10)
    still = jax.tree.map(jnp.zeros_like, PARAMS)
    state, _ = guarded_update(optimizer, init_state(PARAMS, optimizer), jnp.float32(0), still)
    after = {jax.tree_util.keystr(k): np.asarray(v) for k, v in jax.tree_util.tree_leaves_with_path(state.params)}
    for path, value in after.items():
        np.testing.assert_allclose(value, 1.0 if "norm" in path else 0.95, rtol=1e-6, err_msg=path)


@pytest.mark.parametrize("schedule, last", [("constant", 1.0), ("cosine", 0.0), ("linear", 0.0)])
@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_schedules_warm_up_linearly_and_end_where_they_should(schedule, last, warmup):
    rate = make_schedule(Optim(lr=2.0, warmup_steps=warmup, schedule=schedule), 20)
    rates = [float(rate(i)) / 2.0 for i in range(21)]
    np.testing.assert_allclose(rates[:warmup], [(i + 1) / warmup for i in range(warmup)], rtol=1e-6)
    assert max(rates) == rates[warmup] == 1.0 and min(rates[:20]) > 0
    np.testing.assert_allclose(rates[20], last, atol=1e-7)
    halfway = {"constant": 1.0, "cosine": 0.5, "linear": 0.5}[schedule]
    if warmup != 1:  # an odd number of updates has no middle one
        np.testing.assert_allclose(rates[(20 + warmup) // 2], halfway, atol=1e-6)
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)


def test_a_warmup_longer_than_the_run_stays_finite():
    rate = make_schedule(Optim(lr=1.0, warmup_steps=30, schedule="cosine"), 20)
    assert all(np.isfinite(float(rate(i))) and 0 < float(rate(i)) <= 1 for i in range(20))


def test_gradients_that_overflow_float16_halve_the_loss_scale_and_are_no_bad_step():
    state = init_state(PARAMS, OPTIMIZER, "float16")
    before, params = float(state.loss_scale), as_bytes(state.params)
    infinite = jax.tree.map(lambda g: g * jnp.inf, GRADS)
    state, metrics = update(state, jnp.float32(1.0), infinite)
    assert float(state.loss_scale) == before / 2 and int(state.bad_steps) == 0 and metrics["update/overflow"] == 1
    assert as_bytes(state.params) == params and metrics["update/applied"] == 0
    state, metrics = update(state, jnp.float32(jnp.nan), GRADS)  # a bad loss is bad at any scale
    assert int(state.bad_steps) == 1 and float(state.loss_scale) == before / 2 and metrics["update/overflow"] == 0
    patient = state._replace(good_steps=jnp.int32(LOSS_SCALE_PATIENCE - 1))
    state, metrics = update(patient, jnp.float32(1.0), GRADS)
    assert float(state.loss_scale) == before and int(state.good_steps) == 0 and metrics["update/applied"] == 1
    state, metrics = update(state._replace(loss_scale=jnp.float32(2)), jnp.float32(1.0), infinite)  # at 1 it could not grow again
    assert float(state.loss_scale) == 2 and int(state.bad_steps) == 1 and metrics["update/overflow"] == 0


def test_a_state_of_another_run_has_a_loss_scale_where_its_format_wants_one():
    plain, scaled = (init_state(PARAMS, OPTIMIZER, dtype) for dtype in ("bfloat16", "float16"))
    halved = scaled._replace(loss_scale=scaled.loss_scale / 4, good_steps=jnp.int32(7))
    assert rescaled(halved, "float16") is halved and rescaled(plain, "bfloat16") is plain
    for state, dtype, like in ((plain, "float16", scaled), (halved, "bfloat16", plain)):
        assert as_bytes(rescaled(state, dtype)) == as_bytes(like)
