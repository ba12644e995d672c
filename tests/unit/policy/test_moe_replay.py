"""Routing replay: identical routes change nothing, other routes are obeyed, bad routes are refused, and the
loop carries them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import moe_learning, moe_tables
from bridges.api import (
    Capabilities,
    Completion,
    EngineFormats,
    EngineUnhealthy,
    GenRequest,
    SamplingParams,
    VersionSpan,
)
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.data.packing import Sample, assign_rows, pack
from jaxfp8rl.distributed.mesh import ONE
from jaxfp8rl.errors import ConfigError, GateFailed
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.module import init_params
from jaxfp8rl.models.moe import no_route, route_dtype
from jaxfp8rl.policy import routing_replay
from jaxfp8rl.policy.policy import policy_of
from jaxfp8rl.precision.jit import rounding_exact_jit
from jaxfp8rl.precision.layer_runs import plain_runs
from jaxfp8rl.precision.records import Precision
from jaxfp8rl.rollout.scored_groups import generate
from jaxfp8rl.training import gate, publishing
from jaxfp8rl.training.context import build_run
from jaxfp8rl.training.step import make_logprobs

pytestmark = pytest.mark.usefixtures("quick_compile")

MODEL = ModelConfig.from_hf({
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 48, "moe_intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True, "mlp_only_layers": [0],
})
ALL_SPARSE = dataclasses.replace(MODEL, num_hidden_layers=2,
                                 experts=dataclasses.replace(MODEL.experts, mlp_only_layers=()))
PRECISION = Precision(plain_runs(ALL_SPARSE.sparse_layers))
MOE = [word for key, value in {
    "architectures": '["Qwen3MoeForCausalLM"]', "model_type": "qwen3_moe", "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128, "norm_topk_prob": "true",
}.items() for word in (f"--model.config.{key}", str(value))]
BF16 = ("--precision.recipe", "bf16", "--rollout.kv_cache", "auto")


def params(seed: int = 0):
    return jax.tree.map(lambda a: 4 * a if a.ndim > 2 else a, init_params(ALL_SPARSE, jax.random.key(seed)))


@pytest.fixture(scope="module")
def logprobs():
    return make_logprobs(ALL_SPARSE, PRECISION, 1.0, "none")


@pytest.fixture(scope="module")
def record(logprobs):
    return routing_replay.make_record(logprobs, ONE)


def batch(routes=None):
    rng = np.random.default_rng(0)
    lengths = [(9, 7), (5, 11), (8, 3), (4, 4)]
    draw = lambda n: rng.integers(0, 64, n)
    samples = [Sample(draw(p), draw(c), np.full(c, -3, np.float32), 1.0) for p, c in lengths]
    return pack(samples if routes is None else [s._replace(routes=r) for s, r in zip(samples, routes)], 32, 2,
                1), samples


def by_sample(own, samples):
    """The routes of each sample's tokens but the last, out of [M, R, T, L, k]."""
    rows, found = np.asarray(own).reshape(-1, *own.shape[2:]), [None] * len(samples)
    for r, members in enumerate(assign_rows([len(s.prompt) + len(s.completion) for s in samples], 32)):
        at = 0
        for i in members:
            n = len(samples[i].prompt) + len(samples[i].completion)
            found[i], at = rows[r, at : at + n - 1], at + n
    return found


def test_identical_routes_change_nothing_bit_for_bit(logprobs, record):
    policy = policy_of(params(), PRECISION)
    plain, samples = batch()
    old, own = record(policy, plain)
    assert own.dtype == np.uint8 and own.shape == (1, 2, 32, 2, 2)
    packed, _ = batch(by_sample(own, samples))
    assert packed.routes.dtype == np.uint8 and (packed.routes == no_route(np.uint8)).any()
    shuffled = packed._replace(routes=packed.routes[..., ::-1])  # an engine names them in another order

    @rounding_exact_jit
    def value_and_grad(policy, batch):
        micro = jax.tree.map(lambda x: x[0], batch)
        live = micro.response_mask
        return jax.value_and_grad(lambda p: jnp.sum(jnp.where(live, logprobs(p, micro)[0], 0)))(policy)

    # as the routers say
    want = value_and_grad(policy, plain._replace(routes=np.full_like(own, no_route(np.uint8))))
    for replayed in (packed, shuffled, plain._replace(routes=own)):
        again, _ = record(policy, replayed)
        np.testing.assert_array_equal(again, old)  # of a program that knows of no routes
        got = value_and_grad(policy, replayed)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_replay_removes_the_routing_part_of_the_mismatch(record):
    """The engine's routers are perturbed, nothing else is: with its routes only the gates differ."""
    policy = policy_of(params(), PRECISION)
    stacks = [s if "moe" not in s else s
              | {"moe": s["moe"] | {"gate": jax.tree.map(perturbed, s["moe"]["gate"])}}
              for s in policy["layers"]]
    engine = {**policy, "layers": tuple(stacks)}
    plain, _ = batch()
    mu, routes = record(engine, plain)
    live = plain.response_mask
    gap = {}
    for name, with_routes in {"none": plain, "R3": plain._replace(routes=routes)}.items():
        old, own = record(policy, with_routes)
        gap[name] = float(np.abs(np.asarray(old - mu))[live].mean())
    found = routing_replay.disagreement(own, routes, plain.segment_ids)
    assert 0.05 < found["routing/disagreement"] < 0.6 and found["routing/tokens_differing"] > found[
        "routing/disagreement"]
    assert set(found) == {"routing/disagreement", "routing/disagreement/0", "routing/disagreement/1",
                          "routing/tokens_differing"}
    assert gap["R3"] < 0.5 * gap["none"]


def test_the_gate_scores_with_the_routes_that_the_steps_will_replay(monkeypatch):
    """An engine whose routers are off: what is left of the gap with its own routes is that of the gates."""
    shape = ("--model.config.num_hidden_layers", "1", "--model.config.num_experts", "8")
    ctx = build_run(config(*BF16, "--moe.replay", "R3", *shape))
    with contextlib.closing(ctx):
        policy = ctx.policy(ctx.initial_params())
        publishing.publish(ctx, moe_learning.perturbed(policy, 1.0, seed=1), 0)
        unreplayed = dataclasses.replace(ctx, cfg=ctx.cfg.having("moe", replay="none"))
        gap, alone = (gate.gate(run, policy, 0)["gate/mean_gap"] for run in (ctx, unreplayed))
        assert 0 < gap < 0.3 * alone
        strict = dataclasses.replace(ctx, cfg=ctx.cfg.having("gate", max_mean_gap=alone / 2))
        gate.gate(strict, policy, 0)
        with pytest.raises(GateFailed, match="disagree at equal weights"):
            gate.gate(dataclasses.replace(strict, cfg=strict.cfg.having("moe", replay="none")), policy, 0)
        generate, bare = ctx.engine.generate, lambda c: dataclasses.replace(c, routed_experts=None)

        def without_routes(some: slice):
            def answer(requests):
                groups = [list(group) for group in generate(requests)]
                groups[some] = [[*map(bare, group)] for group in groups[some]]
                return groups
            monkeypatch.setattr(ctx.engine, "generate", answer)

        without_routes(slice(2))
        assert gate.gate(ctx, policy, 0)["gate/rejected"] == 2
        without_routes(slice(None))
        with pytest.raises(EngineUnhealthy, match="no routed experts"):
            gate.gate(ctx, policy, 0)


def perturbed(weight):
    return weight + 0.3 * jnp.std(weight) * jax.random.normal(jax.random.key(9), weight.shape)


# --- bad routes
# -------------------------------------------------------------------------------------------------------


def completion(routes) -> Completion:
    return Completion("r", 0, np.arange(4), np.full(4, -1.0, np.float32), "length", (VersionSpan(0, 4, 1),),
                      routes)


# 3 + 4 - 1 tokens
GOOD = np.sort(np.argsort(np.random.default_rng(0).random((6, 3, 6)), -1)[..., :2], -1).astype(np.uint8)
REQUEST = GenRequest("r", (1, 2, 3), SamplingParams(4))
BAD = {
    "no routed experts": None,
    r"shape \[5, 3, 2\]": GOOD[:5],
    r"\[6, 3, 2\]": GOOD[:, 1:],
    "routed expert 6 of 6": np.where(GOOD == 5, 6, GOOD),
    "routed expert -1": np.where(GOOD == 5, -1, GOOD.astype(int)),
    "same expert twice": np.where(np.arange(6)[:, None, None] == 3, 2, GOOD),
    "of dtype float32": GOOD.astype(np.float32),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_routes_reject_the_group_and_say_why(message):
    unfit = lambda request, c: routing_replay.route_problem(MODEL, request, c)
    good, bad = [completion(GOOD)], [completion(BAD[message])]

    class Engine:
        def generate(self, requests):
            return [good, bad]

    kept, rejected = generate(Engine(), ["a", "b"], [REQUEST] * 2, 1, unfit)
    assert [prompt for prompt, _ in kept] == ["a"] and len(rejected) == 1
    assert re.search(message, rejected[0]) and "request r" in rejected[0]


def test_what_dense_layers_say_is_of_no_account():
    routes = GOOD.copy()
    routes[:, 0] = 255
    assert routing_replay.route_problem(MODEL, REQUEST, completion(routes)) is None
    (kept,) = routing_replay.compact([Sample((1, 2, 3), np.arange(4), np.zeros(4), 0.0,
                                             routes.astype(np.int64))], MODEL)
    assert kept.routes.dtype == np.uint8
    np.testing.assert_array_equal(kept.routes, GOOD[:, 1:])


def test_routes_are_as_narrow_as_they_can_be():
    experts = dataclasses.replace(MODEL.experts, num_experts=255)
    assert route_dtype(experts) == np.uint8 and no_route(np.uint8) == 255
    assert route_dtype(dataclasses.replace(experts, num_experts=256)) == np.uint16  # 255 is an expert now


# --- the benchmark (benchmarks/moe_learning.py)
# ------------------------------------------------------------------------


def test_perturbed_routers_are_off_by_what_is_said_and_nothing_else_is():
    policy = policy_of(params(), PRECISION)
    same, off = (moe_learning.perturbed(policy, size, seed=1) for size in (0.0, 0.5))
    jax.tree.map(np.testing.assert_array_equal, same, policy)
    gates = [tree["layers"][0]["moe"].pop("gate")["weight"] for tree in (policy, off)]
    assert float(jnp.std(gates[1] - gates[0]) / jnp.std(gates[0])) == pytest.approx(0.5, rel=0.1)
    jax.tree.map(np.testing.assert_array_equal, off, policy)


def test_the_tables_of_the_page_are_the_benchmarks():
    root = Path(__file__).parents[3]
    result = json.loads((root / "benchmarks" / "results" / "moe_learning.json").read_text(encoding="utf-8"))
    page = (root / "docs" / "notebook_moe.md").read_text(encoding="utf-8")
    assert [table for table in moe_tables.tables(result["records"]).split("\n\n")
            if table not in page] == []


# --- the config
# -------------------------------------------------------------------------------------------------------


def config(*words: str):
    return load_config("demo", ["--run.dir", "unused", *MOE, *words])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--moe.replay", "R2", "--loss.old_policy", "rollout", "--correction.preset", "none"),
         "records routes in the scoring pass"),
        (("--monitor.precision_every", "5"), "precision_every"),
        (("--moe.freeze_router", "true", "--optim.weight_decay", "0.1"), "freeze_router"),
        (("--moe.replay", "R3", "--rollout.kv_scales", "calibrated"), "cannot share the scoring pass"),
    ],
)
def test_what_cannot_work_is_refused(words, message):
    cfg = config(*words)
    with pytest.raises(ConfigError, match=message):
        routing_replay.check_moe(cfg, ModelConfig.from_hf(cfg.model.config))


def test_a_dense_model_has_nothing_to_set():
    cfg = load_config("demo", ["--run.dir", "unused", "--moe.replay", "R3"])
    with pytest.raises(ConfigError, match="moe.replay is set, but Qwen3ForCausalLM has no experts"):
        routing_replay.check_moe(cfg, ModelConfig.from_hf(cfg.model.config))


def test_an_engine_that_returns_no_routes_is_refused_at_start():
    formats = EngineFormats("bfloat16", "bfloat16", "bfloat16", "bfloat16")
    engine = Capabilities("vllm", "0.32.0", formats, 64, 64, True, routed_experts=False)
    routing_replay.check_engine(config("--moe.replay", "R2"), engine)
    with pytest.raises(ConfigError, match="vllm 0.32.0 does not return"):
        routing_replay.check_engine(config("--moe.replay", "R3"), engine)
