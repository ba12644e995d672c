"""The embedded engine samples from the learner's own arrays, and gives them back before an update."""

from typing import Any

import jax
import numpy as np
import pytest

from bridges.api import BridgeError, EngineDirty, GenRequest, SamplingParams
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.distributed.mesh import ONE
from jaxfp8rl.memory.plan import memory_plan
from jaxfp8rl.models.module import init_params
from jaxfp8rl.policy.shapes import engine_runs, model_config
from jaxfp8rl.rollout.adapters import weights_of
from jaxfp8rl.rollout.engines import build_engine
from jaxfp8rl.training.programs import make_programs

pytestmark = pytest.mark.usefixtures("quick_compile")

BF16 = ["--precision.compute_dtype", "bfloat16"]
RECIPES = {
    "fp8_unified": [], "bf16": ["--precision.recipe", "bf16", "--correction.preset", "none"],
    "fp8_rollout": ["--precision.recipe", "fp8_rollout"], "float32": ["--precision.compute_dtype", "float32"],
}


def published(words: list[str], lent: bool | None = None) -> tuple[Any, Any, Any, Any]:
    """(config, policy, engine with it, receipt)."""
    cfg = load_config("demo", [*BF16, "--rollout.kv_cache", "auto", *words])
    model, runs = model_config(cfg), engine_runs(cfg, model_config(cfg))
    engine, transport = build_engine(cfg, model, runs)
    programs = make_programs(cfg, model, runs, engine.capabilities().formats, ONE)
    policy = programs.policy(init_params(model, jax.random.key(0)))
    source = weights_of(cfg, model, policy, runs, lent=cfg.lends_policy if lent is None else lent)
    receipt = transport.publish(source, 1)
    transport.verify(receipt)
    return cfg, policy, engine, receipt


def own(policy: Any, engine: Any) -> list[bool]:
    """Of each of the engine's arrays: whether it is one of the policy's."""
    ours = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(policy)}
    return [x.unsafe_buffer_pointer() in ours for x in jax.tree.leaves(engine._params)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_engine_holds_the_policys_own_arrays_where_these_are_in_the_published_format(recipe):
    cfg, policy, engine, receipt = published(RECIPES[recipe])
    found = own(policy, engine)
    fp8 = [x.dtype.itemsize == 1 for x in jax.tree.leaves(engine._params)]
    match recipe:
        case "fp8_unified" | "bf16":
            assert all(found) and receipt.bytes == receipt.tensors == 0
        case "fp8_rollout":  # codes and scales are made; what the learner has in 16 bits is not
            assert any(found) and not any(mine and code for mine, code in zip(found, fp8)) and receipt.bytes
        case "float32":  # codes are the policy's, and floats are rounded
            assert [mine for mine, code in zip(found, fp8) if code] == [True] * 7
            assert not all(found) and receipt.bytes
    name = "engine: weights" if receipt.bytes else "engine: weights, which are the policy's own"
    assert dict(memory_plan(cfg, model_config(cfg)))[name] == receipt.bytes


@pytest.mark.parametrize("words", [["--rollout.max_staleness", "1"], ["--train.data", "2"],
                                   "--lora.rank 8 --lora.publish merged --sft.steps 0".split()])
def test_a_learner_that_cannot_take_them_back_gives_copies(words):
    assert load_config("demo").lends_policy and not load_config("demo", words).lends_policy


def test_samples_from_lent_arrays_are_those_from_copies():
    requests = [GenRequest(f"r{i}", (1 + i, 11, 3), SamplingParams(4), 8, seed=i) for i in range(6)]
    lent, copied = ([(tuple(map(int, c.token_ids)), np.asarray(c.logprobs).tobytes())
                     for of in published([], lent)[2].generate(requests) for c in of]
                    for lent in (True, False))
    assert lent == copied and len({tokens for tokens, _ in lent}) > 6
    assert not any(own(*published([], False)[1:3]))


def test_an_engine_that_gave_its_weights_back_samples_nothing():
    _, policy, engine, _ = published([])
    engine.sleep()
    assert all(not x.is_deleted() for x in jax.tree.leaves(policy))
    with pytest.raises(EngineDirty, match="dropped its weights"):
        engine.generate([GenRequest("r", (1,), SamplingParams(2), 1)])


@pytest.mark.parametrize("value", [0.0, -1.0, np.inf, np.nan])
def test_one_unsound_scale_among_all_is_found_and_named(value):
    cfg, policy, engine, _ = published([])
    bad = policy["layers"][0]["mlp"]["up_proj"]["weight"]
    policy["layers"][0]["mlp"]["up_proj"]["weight"] = bad._replace(scale=bad.scale.at[1, 1, 0].set(value))
    model = model_config(cfg)
    runs = engine_runs(cfg, model)
    _, transport = build_engine(cfg, model, runs)
    for lent in (True, False):
        with pytest.raises(BridgeError, match=r"layers\.1\.mlp\.up_proj\.weight_scale_inv holds a scale"):
            transport.publish(weights_of(cfg, model, policy, runs, lent=lent), 2)
