"""The guard, the schedules and what weight decay reaches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxfp8rl.config.learning import Optim
from jaxfp8rl.config.resume_rules import check_resumable, settled
from jaxfp8rl.config.toml import dump_config, load_config
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.optim.adamw import make_optimizer
from jaxfp8rl.optim.guard import guarded_update, init_state
from jaxfp8rl.optim.loss_scale import LOSS_SCALE_PATIENCE, rescaled
from jaxfp8rl.optim.schedule import make_schedule
from jaxfp8rl.training.resume import rate_notes

pytestmark = pytest.mark.usefixtures("quick_compile")
PARAMS = {
    "embed_tokens": {"weight": jnp.ones((4, 2))},
    "layers": {"input_layernorm": {"weight": jnp.ones((3, 2))},
               "self_attn": {"q_norm": {"weight": jnp.ones((3, 2))},
               "q_proj": {"weight": jnp.ones((3, 2, 2))}}},
    "norm": {"weight": jnp.ones(2)},
}
GRADS = jax.tree.map(lambda p: 0.1 * jnp.arange(1.0, p.size + 1).reshape(p.shape), PARAMS)
OPTIMIZER = make_optimizer(Optim(lr=0.1, weight_decay=0.01), 10)
update = jax.jit(lambda state, loss, grads: guarded_update(OPTIMIZER, state, loss, grads))


def as_bytes(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def with_one(value: float):
    """GRADS with a single element of the deepest tensor replaced."""
    bad = jax.tree.map(lambda g: g, GRADS)
    bad["layers"]["self_attn"]["q_proj"]["weight"] = GRADS["layers"]["self_attn"]["q_proj"]["weight"].at[
        1, 1, 0].set(value)
    return bad


@pytest.mark.parametrize(
    "loss, grads",
    [(np.nan, GRADS), (np.inf, GRADS), (1.0, with_one(np.nan)), (1.0, with_one(-np.inf)),
     (1.0, with_one(1e30))],
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
    straight, _ = update(update(init_state(PARAMS, OPTIMIZER), jnp.float32(1.0), GRADS)[0], jnp.float32(1.0),
                         GRADS)
    assert as_bytes(healed) == as_bytes(straight) and metrics["update/applied"] == 1


def test_where_nothing_is_live_no_byte_changes_and_nothing_is_bad():
    """Adam would move by its momentum alone."""
    state, _ = update(init_state(PARAMS, OPTIMIZER), jnp.float32(1.0), GRADS)
    nothing = jax.tree.map(jnp.zeros_like, GRADS)
    after, metrics = guarded_update(OPTIMIZER, state, jnp.float32(0.0), nothing, live=jnp.bool_(False))
    assert as_bytes(after) == as_bytes(state) and metrics["update/applied"] == 0 and metrics[
        "update/overflow"] == 0
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
    after = {jax.tree_util.keystr(k): np.asarray(v)
             for k, v in jax.tree_util.tree_leaves_with_path(state.params)}
    for path, value in after.items():
        np.testing.assert_allclose(value, 1.0 if "norm" in path else 0.95, rtol=1e-6, err_msg=path)


@pytest.mark.parametrize("schedule, ratio",
                         [("constant", 0.1), ("cosine", 0.0), ("cosine", 0.1), ("linear", 0.0)])
@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_schedules_warm_up_linearly_and_end_where_they_should(schedule, ratio, warmup):
    rate = make_schedule(Optim(lr=2.0, warmup_steps=warmup, schedule=schedule, min_lr_ratio=ratio), 20)
    rates, last = [float(rate(i)) / 2.0 for i in range(24)], 1.0 if schedule == "constant" else ratio
    np.testing.assert_allclose(rates[:warmup], [(i + 1) / warmup for i in range(warmup)], rtol=1e-6)
    assert max(rates) == rates[warmup] == 1.0 and min(rates[:20]) > 0
    np.testing.assert_allclose(rates[20:], last, atol=1e-7)
    if warmup != 1:  # an odd number of updates has no middle one
        np.testing.assert_allclose(rates[(20 + warmup) // 2], (1 + last) / 2, atol=1e-6)
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_decay_has_an_end_of_its_own(schedule):
    """However long the run is."""
    short, long = (make_schedule(Optim(lr=1.0, schedule=schedule, total_steps=20), updates)
                   for updates in (10, 40))
    assert [float(short(i)) for i in range(40)] == [float(long(i)) for i in range(40)] and float(
        long(20)) == pytest.approx(0.1)


@pytest.mark.parametrize(
    "words, says",
    [
        (["--optim.warmup_steps", "10"], "optim.warmup_steps = 10: the run has 10 updates"),
        (["--optim.warmup_steps", "30", "--optim.schedule", "cosine"],
         "optim.warmup_steps = 30: the run has 10 updates"),
        (["--optim.warmup_steps", "4", "--optim.schedule", "cosine", "--optim.total_steps", "4"],
         "optim.total_steps = 4"),
        (["--sft.warmup_steps", "3", "--sft.steps", "3"], "sft.warmup_steps = 3: sft.steps = 3"),
        (["--optim.total_steps", "10"], 'no effect with optim.schedule = "constant"'),
        (["--optim.schedule", "linear", "--optim.total_steps", "9", "--optim.min_lr_ratio", "0"],
         "the learning rate is 0 from"),
    ],
)
def test_a_learning_rate_that_never_comes_is_refused(words, says):
    five_steps = ["--run.steps", "5", "--train.updates_per_step", "2", "--optim.warmup_steps", "0"]
    five_steps += ["--optim.schedule", "constant"]
    load_config("demo", five_steps)
    with pytest.raises(ConfigError) as e:
        load_config("demo", [*five_steps, *words])
    assert says in str(e.value) and e.value.next_step


def test_the_warm_up_of_a_preset_gives_way_to_a_shorter_run(capsys):
    """One that was asked for does not."""
    cfg = load_config("demo", ["--run.steps", "3", "--sft.steps", "5"])
    assert (cfg.optim.warmup_steps,
            cfg.sft.warmup_steps) == (2, 4) and load_config("demo").optim.warmup_steps == 5
    assert "optim.warmup_steps: the preset's 5 are cut to 2, of 3 updates in all" in capsys.readouterr().err


def begun(folder, **changes):
    """The config of a run of two steps, four updates, whose learning rate falls; its directory has what a
    start writes."""
    settings = {"run.dir": folder, "run.steps": 2, "train.updates_per_step": 2, "optim.schedule": "cosine",
                "optim.lr": 1.0,
                "optim.warmup_steps": 0}
    words = [word for key, value in (settings | changes).items() for word in (f"--{key}", str(value))]
    cfg = settled(load_config("demo", words))
    (folder / "config.toml").write_text(dump_config(cfg))
    return cfg


def longer(folder, *words):
    """As `train RUN --resume --run.steps 4` takes it up."""
    return settled(load_config(str(folder / "config.toml"), ["--run.steps", "4", *words]), resume=True)


def test_a_run_that_goes_on_longer_keeps_the_end_of_its_decay(tmp_path):
    cfg = begun(tmp_path)
    goes_on = longer(tmp_path)
    was, rate = (make_schedule(c.optim, c.updates) for c in (cfg, goes_on))
    assert [float(rate(i)) for i in range(8)] == [float(was(i))
                                                  for i in range(8)] and float(rate(7)) == pytest.approx(0.1)
    check_resumable(goes_on)
    (note,) = rate_notes(cfg, goes_on, 4)  # by hand: half of the way from 1 to 0.1
    assert "stays at 0.1. With --optim.total_steps 8 it would now be 0.55" in note
    (note,) = rate_notes(cfg, longer(tmp_path, "--optim.total_steps", "8"), 4)
    assert note == ("the learning rate of the next update is 0.55; with the earlier settings it would have "
                    "been 0.1")
    assert [*rate_notes(cfg, goes_on, 2)] == []
    assert load_config(str(tmp_path / "config.toml")).optim.total_steps == 4


def test_a_run_of_an_earlier_version_keeps_what_its_config_meant(tmp_path):
    """Its learning rate fell to 0 at the end of run.steps, its problems were drawn by run.seed; no key says
    so."""
    begun(tmp_path, **{"run.seed": 3})
    lines = (tmp_path / "config.toml").read_text().splitlines(keepends=True)
    section, kept = "", []
    for line in lines:
        section = line.strip("[]\n") if line.startswith("[") else section
        if not (line.startswith(("total_steps", "min_lr_ratio"))
                or (section == "task" and line.startswith("seed"))):
            kept.append(line)
    (tmp_path / "config.toml").write_text("".join(kept))
    cfg = load_config(str(tmp_path / "config.toml"), ["--run.seed", "4"])
    assert (cfg.task.seed, cfg.run.seed, cfg.optim.min_lr_ratio) == (3, 4, 0.0)
    with pytest.raises(ConfigError,
                       match="optim.total_steps = 4 with optim.min_lr_ratio = 0: the learning "
                             "rate is 0 from then"):
        longer(tmp_path)
    old = "".join(kept).replace("[task.options]\n", "[task.options]\nseed = 9\n")
    (tmp_path / "config.toml").write_text(old)
    assert load_config(str(tmp_path / "config.toml")).task.seed == 9


def test_an_update_with_nothing_to_learn_is_neither_good_nor_bad():
    """It does not touch the counts that the loss scale and the guard go by, unless it is not finite."""
    patient = init_state(PARAMS, OPTIMIZER,
                         "float16")._replace(good_steps=jnp.int32(7), bad_steps=jnp.int32(2))
    dead = jax.jit(
        lambda state, loss, grads: guarded_update(OPTIMIZER, state, loss, grads, live=jnp.bool_(False)))
    nothing = jax.tree.map(jnp.zeros_like, GRADS)
    state, metrics = dead(patient, jnp.float32(0.0), nothing)
    assert (int(state.good_steps), int(state.bad_steps), float(metrics["update/applied"])) == (7, 2, 0.0)
    state, _ = dead(patient, jnp.float32(jnp.nan), nothing)
    assert (int(state.good_steps), int(state.bad_steps)) == (0, 3)


def test_gradients_that_overflow_float16_halve_the_loss_scale_and_are_no_bad_step():
    state = init_state(PARAMS, OPTIMIZER, "float16")
    before, params = float(state.loss_scale), as_bytes(state.params)
    infinite = jax.tree.map(lambda g: g * jnp.inf, GRADS)
    state, metrics = update(state, jnp.float32(1.0), infinite)
    assert float(state.loss_scale) == before / 2 and int(state.bad_steps) == 0 and metrics[
        "update/overflow"] == 1
    assert as_bytes(state.params) == params and metrics["update/applied"] == 0
    state, metrics = update(state, jnp.float32(jnp.nan), GRADS)  # a bad loss is bad at any scale
    assert int(state.bad_steps) == 1 and float(state.loss_scale) == before / 2 and metrics[
        "update/overflow"] == 0
    patient = state._replace(good_steps=jnp.int32(LOSS_SCALE_PATIENCE - 1))
    state, metrics = update(patient, jnp.float32(1.0), GRADS)
    assert float(state.loss_scale) == before and int(state.good_steps) == 0 and metrics["update/applied"] == 1
    # at 1 it could not grow again
    state, metrics = update(state._replace(loss_scale=jnp.float32(2)), jnp.float32(1.0), infinite)
    assert float(state.loss_scale) == 2 and int(state.bad_steps) == 1 and metrics["update/overflow"] == 0


def test_a_state_of_another_run_has_a_loss_scale_where_its_format_wants_one():
    plain, scaled = (init_state(PARAMS, OPTIMIZER, dtype) for dtype in ("bfloat16", "float16"))
    halved = scaled._replace(loss_scale=scaled.loss_scale / 4, good_steps=jnp.int32(7))
    assert rescaled(halved, "float16") is halved and rescaled(plain, "bfloat16") is plain
    for state, dtype, like in ((plain, "float16", scaled), (halved, "bfloat16", plain)):
        assert as_bytes(rescaled(state, dtype)) == as_bytes(like)
