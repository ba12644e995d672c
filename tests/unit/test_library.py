"""The packages as libraries: what each loads, with everything else blocked, and that every public name is
there and says what it does."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bridges
from benchmarks.processes import printed
from jaxfp8rl import losses

ROOT = Path(__file__).parents[2]


def run(code: str, *blocked: str) -> str:
    """The output of `code` in a fresh process in which the packages `blocked` cannot be imported."""
    block = f"import sys\nfor name in {blocked!r}: sys.modules[name] = None\n"
    return printed(block + code).strip()


def test_bridges_needs_numpy_alone():
    code = """
import bridges
from bridges import Completion, GenRequest, ParamMeta, PublishReceipt, RolloutEngine, SamplingParams
from bridges import ArraySource, TreeSource, VllmEngine, VllmReload, WeightSource, WeightTransport
from bridges import check_engine
import numpy as np
source = TreeSource({"w": np.ones((2, 3), np.float32)}, {"w": "w"})
print(isinstance(source, WeightSource), GenRequest("a", (1,), SamplingParams(max_tokens=1)).n)
"""
    blocked = ("jax", "jaxlib", "torch", "vllm", "orbax", "flax", "optax", "transformers", "safetensors")
    assert run(code, *blocked) == "True 1"


def test_an_engine_has_no_memory_of_jax_where_there_is_no_jax():
    code = """
import os
os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "cuda_async"
from bridges.inside_vllm import device_pool
print(device_pool.hold(), device_pool.give_back())
"""
    assert run(code, "jax", "jaxlib") == "None None"


def test_importing_the_packages_loads_nothing_heavy():
    heavy = "print(*({'jax', 'torch', 'vllm', 'flax', 'orbax'} & set(sys.modules)))"
    assert run("import bridges, bridges.api, jaxfp8rl.losses\n" + heavy) == ""
    assert run("from jaxfp8rl.losses import group_advantages\n" + heavy) == ""


def test_losses_work_beside_any_framework():
    code = """
import jax, jax.numpy as jnp, numpy as np
from jaxfp8rl import losses
logp = jnp.log(jnp.array([[0.5, 0.4], [0.3, 0.2]]))
mask, ids = jnp.ones((2, 2), bool), jnp.ones((2, 2), int)
[advantages] = losses.group_advantages([np.array([1.0, 0.0])], "grpo")
advantages = jnp.asarray(advantages)[:, None] * jnp.ones((2, 2))
fix = losses.rollout_correction(logp, logp - 2.0, mask, losses.PRESETS["token_tis"], ids)
loss, cut = losses.policy_loss(logp, logp, advantages, fix.mask, ids, losses.ObjectiveConfig())
total = (losses.token_scale(fix.mask, ids, "token_mean") * fix.weights * loss).sum()
print(*np.asarray(fix.weights).ravel().tolist(), abs(float(total)) < 1e-6)
"""
    blocked = ("torch", "vllm", "orbax", "flax", "optax", "chex", "pydantic", "rich", "transformers",
               "tokenizers")
    assert run(code, *blocked) == "2.0 2.0 2.0 2.0 True"


@pytest.mark.parametrize("module", [bridges, losses], ids=lambda m: m.__name__)
def test_every_public_name_is_there_and_says_what_it_does(module):
    assert module.__doc__ and list(module.__all__) == sorted(module.__all__, key=_isort)
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            doc = inspect.getdoc(value) or ""
            assert len(doc.split()) > 3 and not doc.startswith(f"{value.__name__}("), name
    with pytest.raises(AttributeError, match="no attribute 'unheard_of'"):
        module.unheard_of  # noqa: B018


def _isort(name: str) -> tuple:
    """Constants, classes, functions, as ruff sorts an `__all__`."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def test_type_checkers_see_the_same_names():
    for module in (bridges, losses):
        source = Path(module.__file__).read_text(encoding="utf-8")
        block = re.search(r"^if TYPE_CHECKING:\n((?: +.*\n|\n)+)", source, re.M)[1]
        scope: dict = {}
        exec(inspect.cleandoc("\n" + block), scope)
        names = {name for name in scope if not name.startswith("__")}
        assert names == set(module.__all__)
        assert all(scope[name] is getattr(module, name) for name in names)


B, T, D, V = 2, 6, 4, 9
LOGP = -jnp.abs(jax.random.normal(jax.random.key(0), (B, T)))
OLD = LOGP + 0.1 * jax.random.normal(jax.random.key(1), (B, T))
ADVANTAGES = jnp.array([[1.0], [-1.0]]) * jnp.ones((B, T))
MASK = jnp.arange(T) > jnp.array([[1], [2]])
IDS = jnp.ones((B, T), int)
HIDDEN, HEAD = jax.random.normal(jax.random.key(2), (B, T, D)), jax.random.normal(jax.random.key(3), (V, D))
TOKENS = jax.random.randint(jax.random.key(4), (B, T), 0, V)
PPO, COVARIANCE = losses.ObjectiveConfig(), losses.ObjectiveConfig("kl_cov")
JITTABLE = {  # each with its arrays
    "advantage_skew": (losses.advantage_skew, OLD, LOGP, ADVANTAGES, MASK),
    "calibrated_bounds": (lambda *x: losses.calibrated_bounds(*x, 0.2, 0.2),
                          jnp.exp(LOGP - OLD), jnp.ones((B, T)), ADVANTAGES, MASK),
    "kl_penalty": (lambda *x: losses.kl_penalty(*x, "k3"), LOGP, OLD, MASK),
    "logits_logprobs": (losses.logits_logprobs, HIDDEN @ HEAD.T, TOKENS),
    "mismatch_metrics": (losses.mismatch_metrics, jnp.where(MASK, OLD - LOGP, 0), OLD, LOGP, MASK, IDS),
    "off_policy": (lambda *x: losses.off_policy(*x, 1e-4), LOGP, OLD, ADVANTAGES, MASK, IDS),
    "policy_loss": (lambda *x: losses.policy_loss(*x, PPO), LOGP, OLD, ADVANTAGES, MASK, IDS),
    "proximal_logp": (losses.proximal_logp, LOGP, OLD, jnp.ones((B, T)), MASK),
    "rollout_correction": (lambda *x: losses.rollout_correction(
        *x[:3], losses.get_preset("sequence_mis"), x[3]), OLD, LOGP, MASK, IDS),
    "select_tokens": (lambda *x: losses.select_tokens(*x, COVARIANCE), OLD, ADVANTAGES, MASK,
                      jnp.arange(B * T).reshape(B, T)),
    "token_logprobs": (losses.token_logprobs, HIDDEN, HEAD, TOKENS),
    "token_scale": (lambda *x: losses.token_scale(*x, "seq_mean_token_mean"), MASK, IDS),
}
ON_THE_HOST = {"get_preset", "group_advantages", "informative_groups", "overlong_penalty"}


@pytest.mark.parametrize("name", JITTABLE)
def test_functions_give_the_same_under_jit(name):
    function, *arrays = JITTABLE[name]
    same = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    jax.tree.map(same, jax.jit(function)(*arrays), function(*arrays))


def test_each_function_is_either_jittable_or_of_the_host():
    functions = {name for name in losses.__all__ if inspect.isfunction(getattr(losses, name))}
    assert functions == JITTABLE.keys() | ON_THE_HOST


def test_natural_names_are_those_of_the_modules():
    assert losses.group_advantages is importlib.import_module("jaxfp8rl.losses.advantages").advantages
    assert bridges.EmbeddedEngine.__module__ == "bridges.engines.embedded_engine"
