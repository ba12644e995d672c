"""Random weights of the benchmarks, made while they are published: names, shapes, and the way of a mixture
into a real vLLM."""

from __future__ import annotations

import argparse
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("vllm")

from benchmarks import publish, rollout  # noqa: E402
from benchmarks.common import MIXTURES, SHAPES, config  # noqa: E402
from benchmarks.publish import RandomWeights, fp8_runs_of, random_policy  # noqa: E402
from bridges.engines.vllm_engine import VllmEngine  # noqa: E402
from bridges.proof import manifest  # noqa: E402
from jaxfp8rl.models.config import ModelConfig  # noqa: E402
from jaxfp8rl.precision.layer_runs import plain_runs  # noqa: E402
from jaxfp8rl.precision.weights import QuantizedWeight  # noqa: E402
from jaxfp8rl.publish.wire import LearnerWeights  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_compile")

TINY = config("30b-a3b", 2) | {
    "vocab_size": 384, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 128,
}


def runs_of(model: ModelConfig, fp8: bool):
    return fp8_runs_of(model) if fp8 else plain_runs(model.sparse_layers)


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("size", ["0.6b", "30b-a3b"])
def test_every_tensor_of_the_manifest_is_made_once_in_its_shape(size, fp8, monkeypatch):
    monkeypatch.setattr(publish, "drawn", lambda seed, shape, role: jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    monkeypatch.setattr(publish, "quantised", lambda w: jax.eval_shape(QuantizedWeight.of, w))
    model = ModelConfig.from_hf(config(size))
    source, found, largest = RandomWeights(model, runs_of(model, fp8)), {}, 0
    for part in source.stacks(publish.PART):
        largest = max(largest, sum(math.prod(rows.stack.shape) * rows.stack.dtype.itemsize for rows in part))
        for rows in part:
            assert not found.keys() & set(rows.names)
            shape = rows.stack.shape if rows.first is None else rows.stack.shape[1:]
            assert rows.first is None or len(rows.names) == len(rows.stack)
            found |= {name: (rows.stack.dtype.name, shape) for name in rows.names}
    assert found == {m.name: (m.dtype, m.shape) for m in source.manifest()}
    assert largest < 2**30


def test_the_mixture_has_the_bytes_that_its_name_says():
    model = ModelConfig.from_hf(config("30b-a3b"))
    assert manifest.nbytes(RandomWeights(model, runs_of(model, False)).manifest()) / 2 == pytest.approx(
        30.5e9, rel=0.01)
    read = rollout.read_by_a_step(RandomWeights(model, runs_of(model, True)), 64)
    assert 0.95 < read / manifest.nbytes(RandomWeights(model, runs_of(model, True)).manifest()) < 0.98
    assert rollout.read_by_a_step(RandomWeights(model, runs_of(model, False)), 1) / 2 < 3.5e9  # "A3B"
    assert not MIXTURES.keys() & SHAPES.keys()


@pytest.mark.parametrize("fp8", [True, False])
def test_rows_and_stacks_are_the_same_and_no_two_tensors_are(fp8):
    model = ModelConfig.from_hf(TINY)
    source = RandomWeights(model, runs_of(model, fp8))
    given = dict(source)
    assert list(given) == [m.name for m in source.manifest()]
    small = {name: rows.stack if rows.first is None else rows.stack[i]
             for part in source.stacks(1) for rows in part for i, name in enumerate(rows.names)}
    assert small.keys() == given.keys()
    matrices = [np.asarray(x).tobytes() for n, x in given.items() if "norm" not in n and "scale" not in n]
    assert len(set(matrices)) == len(matrices)
    assert 0.015 < np.asarray(given["lm_head.weight"]).astype(np.float32).std() < 0.025


def test_a_policy_made_in_codes_is_the_one_that_is_quantised_on_the_way():
    model = ModelConfig.from_hf(TINY)
    plain, coded = (dict(LearnerWeights(model, random_policy(model, c), fp8_runs_of(model), "bfloat16"))
                    for c in (False, True))
    assert list(plain) == list(coded)
    for name, x in plain.items():
        np.testing.assert_array_equal(np.asarray(x).view(np.uint8), np.asarray(coded[name]).view(np.uint8),
                                      err_msg=name)
    shapes = jax.eval_shape(lambda: random_policy(ModelConfig.from_hf(config("30b-a3b"))))
    assert sum(2 * math.prod(x.shape) for x in jax.tree.leaves(shapes)) == pytest.approx(61e9, rel=0.01)


@pytest.mark.slow
def test_a_rollout_of_a_mixture_is_measured(monkeypatch):
    monkeypatch.setattr(rollout, "config", lambda size, layers: TINY)
    monkeypatch.setattr(rollout, "PROMPT", 16)
    monkeypatch.setitem(VllmEngine.__init__.__kwdefaults__, "enforce_eager", True)  # it starts sooner
    args = argparse.Namespace(size="30b-a3b", layers=0, prompts=[4], new_tokens=16, memory=None)
    found = rollout.measure("bf16", args)
    assert found["publish"] in ("in_place", "reload")
    (one,) = found["rollouts"]
    assert one["floor, ms"] < one["step, ms"] and one["at once"] == 4
