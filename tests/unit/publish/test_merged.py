"""Adapters that are merged on their way into an engine: what is sent, and what rounding loses of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.module import init_params
from jaxfp8rl.policy.policy import over_base
from jaxfp8rl.precision.adapters import LORA, A, B, merged_policy
from jaxfp8rl.precision.layer_runs import LayerRun
from jaxfp8rl.precision.records import AdapterProduct, Precision
from jaxfp8rl.publish.adapters import merge_error
from jaxfp8rl.publish.wire import LearnerWeights
from jaxfp8rl.training.step import make_policy
from pallas_kernels.quantize import reference as q

pytestmark = pytest.mark.usefixtures("quick_compile")
MODEL = ModelConfig("Qwen3ForCausalLM", 64, 128, 128, 3, 2, 1, 64, 64)
FP8 = frozenset(["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
RUNS = LayerRun(0, 1, frozenset()), LayerRun(1, 3, FP8)
PRODUCT = AdapterProduct(2.0, "float32")
NAME = "model.layers.2.mlp.down_proj.weight"


@functools.cache
def policy(size: float, learner_fp8: bool = True):
    """Adapters of down_proj alone, whose products B A have numbers of about `size`."""
    runs = RUNS if learner_fp8 else (LayerRun(0, 3, frozenset()),)
    make = make_policy(Precision(runs, adapters=PRODUCT))
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((3, 4, 128), (3, 128, 4)))
    base = make(init_params(MODEL, jax.random.key(0)))
    return over_base(make({"layers": {LORA: {"mlp": {"down_proj": {A: a, B: size / 4 * b}}}}}), base), base


def sent(tree, tensors=None) -> dict:
    found = LearnerWeights(MODEL, tree, RUNS, "bfloat16")
    return {name: np.asarray(t.stack[t.index] if hasattr(t, "stack") else t) for name, t in found}


@pytest.mark.parametrize("learner_fp8", [True, False])
def test_what_is_sent_is_the_sum(learner_fp8):
    """By tensors and by stacks, of a base in codes and of one in BF16."""
    adapted, base = policy(0.02, learner_fp8)
    merged = merged_policy(adapted, PRODUCT)
    new, old = sent(merged), sent(base)
    whole = lambda t: np.asarray(q.dequantize_blocks(t[NAME], t[NAME + "_scale_inv"]))
    stack = adapted["layers"][-1][LORA]["mlp"]["down_proj"]
    delta = 2.0 * np.asarray(stack[B][-1]) @ np.asarray(stack[A][-1])
    assert 0.02 < np.std(delta) < 0.08
    np.testing.assert_allclose(whole(new), whole(old) + delta, atol=0.08 * np.abs(whole(new)).max())
    untouched = [name for name in old if "down_proj" not in name]
    assert len(untouched) > 20 and all(np.array_equal(new[n], old[n]) for n in untouched)
    stacks = {name: np.asarray(rows.stack[(rows.first or 0) + i]).reshape(new[name].shape)
              for part in LearnerWeights(MODEL, merged, RUNS, "bfloat16").stacks(2**20) for rows in part
              for i, name in enumerate(rows.names) if "down_proj" in name}
    assert len(stacks) == 5 and all(np.array_equal(x, new[name]) for name, x in stacks.items())


def test_adapters_that_are_zero_leave_the_codes():
    adapted, base = policy(0.0)
    new, old = sent(merged_policy(adapted, PRODUCT)), sent(base)
    for name in (name for name in old if not name.endswith("_scale_inv")):
        np.testing.assert_array_equal(new[name], old[name])
    np.testing.assert_allclose(new[NAME + "_scale_inv"], old[NAME + "_scale_inv"], rtol=2**-22)
    assert merge_error(adapted, PRODUCT, RUNS, "bfloat16") == 0.0


def test_an_update_far_below_a_step_of_the_format_is_lost():
    errors = [merge_error(policy(size)[0], PRODUCT, RUNS, "bfloat16") for size in (1e-6, 0.05)]
    assert errors[0] > 0.9 and errors[1] < 0.1
