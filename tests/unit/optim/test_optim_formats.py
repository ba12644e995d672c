"""AdamW whose states are kept in few bits: beside optax, under the guard, in memory, on several devices, in
checkpoints."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.processes import on_devices
from jaxfp8rl.checkpoint.store import Checkpoints
from jaxfp8rl.config.learning import Optim
from jaxfp8rl.config.rules import check
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.memory.plan import memory_plan
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.hf_names import empty_params
from jaxfp8rl.optim import adamw as adamw_
from jaxfp8rl.optim import low_bit
from jaxfp8rl.optim.adamw import Formats, adamw, make_optimizer
from jaxfp8rl.optim.guard import guarded_update, init_state
from jaxfp8rl.optim.low_bit import decode, encode, is_scaled
from jaxfp8rl.optim.schedule import make_schedule
from jaxfp8rl.policy.policy import policy_of
from jaxfp8rl.precision.jit import rounding_exact_jit
from jaxfp8rl.precision.records import Precision
from jaxfp8rl.probes.finite import bad_tensors

pytestmark = pytest.mark.usefixtures("quick_compile")
LEAST = Formats("bfloat16", "float8", "bfloat16")  # 5.03 bytes a parameter
FP8_LM = Formats("float16", "float8", "float16")
FORMATS = (Formats(), LEAST, FP8_LM, LEAST._replace(offload=True))
SHAPES = {
    "embed_tokens": {"weight": (7, 130)},
    "layers": {"input_layernorm": {"weight": (3, 130)}, "q_proj": {"weight": (3, 8, 130)}},
}


def normal(seed: int, scale: float = 1.0) -> dict:
    rng = np.random.default_rng(seed)
    shape = lambda x: isinstance(x, tuple)
    return jax.tree.map(lambda s: jnp.asarray(scale * rng.normal(size=s), jnp.float32), SHAPES, is_leaf=shape)


def make(formats: Formats, updates: int = 10, **settings):
    cfg = Optim(**{"lr": 1e-2, "warmup_steps": 2, "schedule": "cosine", "weight_decay": 0.1, **settings})
    return adamw(cfg, make_schedule(cfg, updates), formats)


def stepper(optimizer):
    return rounding_exact_jit(lambda state, loss, grads: guarded_update(optimizer, state, loss, grads)[0],
                     donate_argnums=0)


@pytest.fixture(scope="module", ids=["float32", "least", "FP8-LM", "offloaded"],
                params=[f if f.offload or f == LEAST else pytest.param(f, marks=pytest.mark.slow)
                        for f in FORMATS])
def run(request):
    """(formats, the compiled update, its state after three updates)"""
    optimizer = make(request.param)
    step, state = stepper(optimizer), init_state(normal(0), optimizer)
    for seed in range(1, 4):
        state = step(state, 1.0, normal(seed))
    return request.param, step, state


def as_bytes(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def copy(state):
    return jax.tree.map(lambda x: jax.device_put(np.asarray(x), x.sharding), state)


def decoded(tree):
    return jax.tree.map(decode, tree, is_leaf=is_scaled)


# --- the arithmetic


@pytest.mark.parametrize("clip_norm", [1e-2, pytest.param(1e9, marks=pytest.mark.slow)],
                         ids=["clipped", "not clipped"])
def test_in_float32_it_is_optax(clip_norm):
    """The same chain, over updates of the warm-up and after, to a rounding or two of the parameters."""
    cfg = Optim(lr=1e-2, warmup_steps=2, schedule="cosine", weight_decay=0.1, clip_norm=clip_norm)
    decayed = lambda params: jax.tree_util.tree_map_with_path(
        lambda path, _: "norm" not in jax.tree_util.keystr(path), params)
    theirs = optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.adamw(make_schedule(cfg, 10), cfg.b1, cfg.b2, cfg.eps, weight_decay=cfg.weight_decay,
                    mask=decayed),
    )
    states = [(stepper(o), init_state(normal(0), o)) for o in (make_optimizer(cfg, 10), theirs)]
    for seed in range(1, 5):
        states = [(step, step(state, 1.0, normal(seed))) for step, state in states]
    ours, theirs = (state for _, state in states)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-7, atol=5e-7), ours.params,
                 theirs.params)
    adam = optax.tree.get(theirs.opt_state, "ScaleByAdamState")
    for a, b in ((ours.opt_state.mu, adam.mu), (ours.opt_state.nu, adam.nu)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=2e-11), a, b)


@pytest.mark.parametrize("formats", [LEAST, pytest.param(FP8_LM, marks=pytest.mark.slow)])
def test_in_few_bits_it_stays_by_float32_and_is_off_by_the_roundings_alone(formats, count=20):
    """Twenty updates by noisy gradients: the way gone differs by some percent, and by as much to either
    side."""
    moved = []
    for f in (Formats(), formats):
        optimizer = make(f, warmup_steps=0, schedule="constant", weight_decay=0.0)
        step, state = stepper(optimizer), init_state(normal(0, 0.1), optimizer)
        start = jax.tree.map(np.array, decoded(state.params))
        for seed in range(count):
            state = step(state, 1.0, jax.tree.map(lambda a, b: 0.1 * a + 0.05 * b, normal(seed), normal(99)))
        moved.append(np.concatenate([np.ravel(a - b)
                                     for a, b in zip(*map(jax.tree.leaves, (decoded(state.params), start)))]))
    error = moved[1] - moved[0]
    assert np.linalg.norm(error) < 0.06 * np.linalg.norm(moved[0])
    assert abs(error.mean()) < 5 * error.std() / np.sqrt(error.size)


def test_masters_follow_a_learning_rate_far_below_their_digits():
    """What rounds to nearest in bfloat16 or float16 stands still at the learning rates of reinforcement
    learning."""
    for formats in (LEAST, FP8_LM):
        optimizer = make(formats, lr=1e-6, warmup_steps=0, schedule="constant", weight_decay=0.0,
                         clip_norm=1e9)
        step, state = stepper(optimizer), init_state({"w": jnp.full((64, 256), 0.75)}, optimizer)
        for _ in range(100):
            # each update is the learning rate, downwards
            state = step(state, 1.0, {"w": jnp.full((64, 256), 0.1)})
        nearest = decode(encode(jnp.float32(0.75 - 1e-6)[None], formats.master))
        change = np.asarray(decode(state.params["w"]), np.float64) - 0.75
        assert nearest[0] == 0.75 and change.mean() == pytest.approx(-1e-4, rel=5 * change.std() / 128 / 1e-4)


def test_moments_follow_averages_longer_than_their_digits():
    """With b2 = 0.999 an average to nearest would never move by a thousandth of itself in bfloat16, nor FP8's
    with b1 = 0.97."""
    optimizer = make(LEAST._replace(master="float32"), lr=1e-9, b1=0.97, b2=0.999, clip_norm=1e9)
    step, state = stepper(optimizer), init_state({"w": jnp.zeros((64, 256))}, optimizer)
    for n in range(60):
        state = step(state, 1.0, {"w": jnp.full((64, 256), 1.0 if n < 20 else 0.0)})
    mu, nu = (np.asarray(decode(m["w"]), np.float64).mean() for m in (state.opt_state.mu, state.opt_state.nu))
    assert mu == pytest.approx((1 - 0.97**20) * 0.97**40, rel=0.02)
    assert nu == pytest.approx((1 - 0.999**20) * 0.999**40, rel=1e-3)


def regression_loss(formats: Formats):
    """Jitted f(seed): the loss, over the last 50 of 250 updates, of a network that learns another from noisy
    samples."""
    optimizer = make(formats, 250, lr=1e-2, schedule="linear", weight_decay=0.01)

    @rounding_exact_jit
    def f(seed):
        keys = jax.random.split(jax.random.key(seed), 5)
        shapes = {"a": (64, 16), "b": (8, 64)}
        draw = lambda key: {n: jax.random.normal(k, s) / s[1] ** 0.5
                            for k, (n, s) in zip(jax.random.split(key), shapes.items())}
        net = lambda params, x: jax.nn.relu(x @ decode(params["a"]).T) @ decode(params["b"]).T
        teacher = draw(keys[0])

        def update(state, key):
            x = jax.random.normal(key, (64, 16))
            y = net(teacher, x) + 0.1 * jax.random.normal(jax.random.fold_in(key, 1), (64, 8))
            loss, grads = jax.value_and_grad(lambda params: jnp.mean((net(params, x) - y) ** 2))(
                decoded(state.params))
            return guarded_update(optimizer, state, loss, grads)[0], loss

        return jnp.mean(jax.lax.scan(update, init_state(draw(keys[1]), optimizer),
                                     jax.random.split(keys[2], 250))[1][-50:])

    return f


@pytest.mark.slow
def test_it_learns_as_float32_does():
    """To 2% of the loss that is left, some three times the noise's, over three seeds; and no seed differs by
    more than 5%."""
    learners = {f: regression_loss(f) for f in (Formats(), LEAST, FP8_LM)}
    losses = {f: np.array([learned(seed) for seed in range(3)]) for f, learned in learners.items()}
    for f in (LEAST, FP8_LM):
        ratio = losses[f] / losses[Formats()]
        assert abs(ratio.mean() - 1) < 0.02 and np.all(abs(ratio - 1) < 0.05), ratio


@pytest.mark.parametrize("formats", [LEAST, FP8_LM])
def test_no_step_is_longer_than_adams_own(formats):
    """Gradients of unlike sizes in a block: rounded to nearest, or stochastically throughout, a first moment
    rounded up over a second one that is nearly 0 makes steps of hundreds of learning rates."""
    rng = np.random.default_rng(0)
    size = 1e-3 * np.exp(3 * rng.normal(size=(64, 256)))
    optimizer = make(formats._replace(master="float32"), warmup_steps=0, schedule="constant",
                     weight_decay=0.0, clip_norm=1e9)
    step, state, before = stepper(optimizer), init_state({"w": jnp.zeros((64, 256))}, optimizer), 0
    for _ in range(15):
        state = step(state, 1.0, {"w": jnp.asarray(size * rng.normal(size=size.shape), jnp.float32)})
        after = np.asarray(state.params["w"])
        assert np.abs(after - before).max() < 1.15 * 1e-2
        before = after.copy()


def test_the_bits_that_round_depend_on_the_update_the_leaf_and_the_layer():
    """Equal numbers everywhere are rounded unequally; the same update of the same state always gives the same
    bytes."""
    optimizer = make(LEAST, lr=1e-4, weight_decay=0.0, warmup_steps=0)
    step = stepper(optimizer)
    ones = {"layers": {"a": jnp.ones((2, 8, 128)), "b": jnp.ones((2, 8, 128))}}
    runs = []
    for _ in range(2):
        state = step(init_state(ones, optimizer), 1.0, ones)
        first = jax.tree.map(np.array, state.params["layers"])
        runs.append((first, step(state, 1.0, ones).params["layers"]))
    assert as_bytes(runs[0]) == as_bytes(runs[1])
    draws = [np.asarray(x[layer] != 1).tobytes() for tree in runs[0] for x in tree.values()
             for layer in range(2)]
    assert all(a != b for a, b in itertools.combinations(draws, 2))


# --- the guard, memory, devices, checkpoints


def test_a_bad_update_changes_no_byte(run):
    _, step, state = run
    before = as_bytes((state.params, state.opt_state))
    bad = normal(9)
    bad["layers"]["q_proj"]["weight"] = bad["layers"]["q_proj"]["weight"].at[1, 2, 3].set(np.nan)
    for loss, grads in ((np.nan, normal(9)), (1.0, bad)):
        after = step(copy(state), loss, grads)
        assert as_bytes((after.params, after.opt_state)) == before and int(after.bad_steps) == 1
    healed = step(after, 1.0, normal(9))
    assert as_bytes(healed) == as_bytes(step(copy(state), 1.0, normal(9)))


def test_moments_stay_in_pinned_host_memory_and_are_what_they_would_be_on_the_device(run):
    """To the last place of float32, which tips a rounding here and there; tests/gpu/test_optim.py: to the
    byte."""
    formats, _, state = run
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves((state.opt_state.mu, state.opt_state.nu))}
    assert kinds == {"pinned_host" if formats.offload else "device"}
    assert {x.sharding.memory_kind for x in jax.tree.leaves(state.params)} == {"device"}
    if formats.offload:
        optimizer = make(formats._replace(offload=False))
        step, here = stepper(optimizer), init_state(normal(0), optimizer)
        for seed in range(1, 4):
            here = step(here, 1.0, normal(seed))
        for a, b in zip(*(jax.tree.leaves(decoded(jax.device_get(x))) for x in (here, state)), strict=True):
            np.testing.assert_allclose(a, b, rtol=2**-3, atol=1e-12)  # a step of E4M3's three digits
            assert np.mean(a != b) < 0.02  # a CPU contracts products and sums as it fuses


def test_a_checkpoint_brings_back_every_byte_in_its_format_and_memory(run, tmp_path):
    _, step, state = run
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1)
    checkpoints.save(3, state, {"seed": 0})
    back, _ = checkpoints.restore(state)
    assert as_bytes(back) == as_bytes(state) and jax.tree.structure(back) == jax.tree.structure(state)
    describe = lambda tree: [(x.aval, x.aval.memory_space, x.sharding.memory_kind)
                             for x in jax.tree.leaves(tree)]
    assert describe(back) == describe(state)
    assert as_bytes(step(back, 1.0, normal(4))) == as_bytes(step(copy(state), 1.0, normal(4)))


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxfp8rl.config.schema import Optim
from jaxfp8rl.precision.jit import rounding_exact_jit
from jaxfp8rl.optim.adamw import Formats, adamw
from jaxfp8rl.optim.guard import guarded_update, init_state
from jaxfp8rl.optim.schedule import make_schedule

mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), (AxisType.Auto,) * 2)
SPECS = {"embed": P("fsdp"), "layers": {"q": P(None, "tensor", "fsdp")}}
SHAPES = {"embed": (8, 192), "layers": {"q": (3, 16, 1024)}}
jax.config.update("jax_disable_most_optimizations", True)  # quicker to compile

def draw(seed):  # integers, whose norm is exact in any order
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda s: rng.integers(-7, 8, s).astype(np.float32), SHAPES,
                        is_leaf=lambda x: isinstance(x, tuple))

def shardings(tree, specs, kind="device"):  # codes and scales are divided as their parameter is
    of = lambda spec, part: jax.tree.map(lambda _: NamedSharding(mesh, spec, memory_kind=kind), part)
    return jax.tree.map(of, specs, tree, is_leaf=lambda x: isinstance(x, P))

for formats in (Formats(), Formats("float16", "float8", "bfloat16", True)):
    cfg = Optim(lr=1e-2, weight_decay=0.1, clip_norm=0.1)
    optimizer = adamw(cfg, make_schedule(cfg, 10), formats)
    step = rounding_exact_jit(lambda s, g: guarded_update(optimizer, s, jnp.float32(1), g)[0],
                              donate_argnums=0)
    one, eight = (init_state(jax.tree.map(jnp.asarray, draw(0)), optimizer) for _ in range(2))
    divided = lambda tree, kind: jax.device_put(tree, shardings(tree, SPECS, kind))
    kind = "pinned_host" if formats.offload else "device"
    adam = eight.opt_state
    adam = adam._replace(mu=divided(adam.mu, kind), nu=divided(adam.nu, kind))
    eight = eight._replace(params=divided(eight.params, "device"), opt_state=adam)
    before = [x.sharding for x in jax.tree.leaves((eight.params, adam.mu, adam.nu))]
    for seed in (1, 2):
        one = step(one, draw(seed))
        eight = step(eight, jax.device_put(draw(seed), shardings(draw(seed), SPECS)))
    for was, x in zip(before, jax.tree.leaves((eight.params, eight.opt_state.mu, eight.opt_state.nu))):
        now = x.sharding
        assert was.is_equivalent_to(now, x.ndim) and was.memory_kind == now.memory_kind, (was, now)
    for a, b in zip(*map(jax.tree.leaves, (one, eight))):
        a, b = np.asarray(a), np.asarray(b)
        if a.dtype == np.float32:
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
        else:  # where a last bit of float32 differs, one of the 2^16 chances to round up does
            assert np.mean(a != b) < 1e-3
    print("equal", formats)
"""


@pytest.mark.slow
def test_eight_devices_give_the_numbers_of_one_and_keep_their_shards():
    assert on_devices(8, SHARDED).count("equal") == 2


# --- what else reads masters, the plan, the configuration


def test_the_policy_and_the_search_for_bad_tensors_read_masters_in_any_format():
    model = ModelConfig.from_hf(load_config("demo").model.config)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) / 16, jnp.float32),
                          empty_params(model, "float32"))
    precision = Precision.uniform(model.num_hidden_layers, "float32", weight_dtype="bfloat16")
    for formats in (LEAST, FP8_LM):
        masters = init_state(params, make(formats)).params
        assert as_bytes(policy_of(masters, precision)) == as_bytes(policy_of(decoded(masters), precision))
        assert bad_tensors(masters, model) == []
    q_proj = masters["layers"]["self_attn"]["q_proj"]
    q_proj["weight"] = q_proj["weight"]._replace(codes=q_proj["weight"].codes.at[1, 2, 3].set(np.nan))
    assert [(t.hf_name, t.bad) for t in bad_tensors(masters,
                                                    model)] == [("model.layers.1.self_attn.q_proj.weight", 1)]


@pytest.mark.parametrize("master", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("moments", [("float32", "float32"), ("float8", "bfloat16"), ("bfloat16", "float16")])
def test_the_memory_plan_has_the_bytes_of_the_arrays(master, moments):
    words = ["--optim.master", master, "--optim.first_moment", moments[0], "--optim.second_moment",
             moments[1]]
    words += ["--precision.recipe", "bf16", "--model.config.head_dim", "36"]  # 72 wide: blocks that end early
    cfg = load_config("demo", words)
    model = ModelConfig.from_hf(cfg.model.config)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32),
                          empty_params(model, "float32"))
    state = jax.eval_shape(lambda params: init_state(params, make_optimizer(cfg.optim, 1)), shapes)
    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
    plan = {what.split(",")[0]: bytes for what, bytes in memory_plan(cfg, model)}
    assert plan["master weights"] == size(state.params)
    assert plan["Adam's two moments"] == size((state.opt_state.mu, state.opt_state.nu))
    offloaded = dict(memory_plan(load_config("demo", [*words, "--optim.offload", "true"]), model))
    what, here = next((what, size) for what, size in offloaded.items() if what.startswith("Adam"))
    assert "in pinned host memory" in what and here == 0


@pytest.mark.parametrize(
    "words, message",
    [
        (["--optim.second_moment", "float8"], "optim.second_moment"),
        (["--optim.master", "float8"], "optim.master"),
        (["--optim.master", "bfloat16", "--precision.weight_dtype", "float32"],
         '"bfloat16" keeps 8 binary digits'),
        (["--optim.master", "float16", "--rollout.engine", "vllm", "--rollout.publish", "in_place",
          "--rollout.one_copy", "true"],
         'optim.master = "float16" keeps these with scales'),
    ],
)
def test_what_cannot_work_is_refused(words, message):
    with pytest.raises(ConfigError) as e:
        check(load_config("demo", words))
    assert message in str(e.value) and e.value.next_step


def test_moments_of_the_host_are_never_all_on_the_device(monkeypatch):
    """Those of 8 B parameters take 24 GB, at a time when the engine has its own."""
    shape, held = (3, 131), []  # of no other array

    def zeros(shape, kept_as):
        held.append(sum(x.shape == shape and x.sharding.memory_kind != "pinned_host"
                        for x in jax.live_arrays()))
        return low_bit.zeros(shape, kept_as)

    monkeypatch.setattr(adamw_, "zeros", zeros)
    params = {"embed_tokens": {str(i): np.zeros(shape, np.float32) for i in range(6)}}
    _, state = make(Formats("bfloat16", "bfloat16", "bfloat16", True)).init(params)
    assert len(held) == 12 and max(held) == 0
    assert {x.sharding.memory_kind for x in jax.tree.leaves((state.mu, state.nu))} == {"pinned_host"}
