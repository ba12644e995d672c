"""A learner on eight virtual devices against the same on one. It runs as a program, because JAX creates the
devices when it starts."""

import dataclasses
import itertools
import re
import sys

import jax
import numpy as np

from jaxfp8rl.config.correction import Correction
from jaxfp8rl.config.learning import Loss, Optim
from jaxfp8rl.data.packing import Sample, pack
from jaxfp8rl.distributed.mesh import ONE, make_mesh_layout
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.hf_names import linear_shapes
from jaxfp8rl.models.module import init_params
from jaxfp8rl.optim.adamw import make_optimizer
from jaxfp8rl.policy.initial import fresh_state
from jaxfp8rl.precision.layer_runs import fp8_runs, plain_runs
from jaxfp8rl.precision.records import Precision
from jaxfp8rl.publish.wire import LearnerWeights
from jaxfp8rl.training.step import make_logprobs, make_policy, make_score, make_train_step

CASE = sys.argv[1]
EXPERTS = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8,
           "num_experts_per_tok": 2,
           "moe_intermediate_size": 128, "norm_topk_prob": True}
MODEL = ModelConfig.from_hf(
    {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 64, "hidden_size": 256,
     "intermediate_size": 512,
     "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 4,
     "head_dim": 128 if CASE == "fp8" else 64,
     "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu",
     "tie_word_embeddings": CASE == "high"} | (EXPERTS if CASE == "experts" else {})
)
T, R, M = 128, 8, 3
PLAIN = Precision.uniform(1, "float32", weight_dtype="float32")
# makes an update nearly proportional to the gradient, even to a small one
SMOOTH = Optim(lr=0.1, eps=1.0, clip_norm=100.0)
CASES = {  # devices along each axis, precision, tolerances of scores and weights
    "high": ({"data": 2, "fsdp": 2, "tensor": 2}, PLAIN, 1e-5, 1e-5),
    "experts": ({"fsdp": 2, "tensor": 4}, dataclasses.replace(PLAIN, runs=plain_runs(MODEL.sparse_layers)),
                1e-5, 1e-5),
    "fp8": ({"fsdp": 2, "tensor": 2},
            dataclasses.replace(PLAIN, runs=fp8_runs(linear_shapes(MODEL), 1), gradients="e4m3"),
            5e-2, 1e-3),
}


def batch():
    """Rows of different lengths. In the second micro-batch only the first row has tokens, in the third
    none."""
    rng, rows = np.random.default_rng(0), []
    for lengths in [[T // 2, 40], [T - 1], [1 + 9, 30, 50]] * 3:
        draw = lambda n: Sample(rng.integers(0, 64, 4), rng.integers(0, 64, n), rng.normal(-4, 0.3, n),
                                rng.normal())
        rows.append(pack([draw(n - 4) for n in lengths], T, 1, 1))
    whole = jax.tree.map(lambda *xs: np.concatenate(xs)[: R + 1, 0], *rows)
    place = lambda x: np.concatenate([x[:R], x[R:], np.zeros((M * R - R - 1, T), x.dtype)]).reshape(M, R, T)
    return jax.tree.map(place, whole)


def steps(layout, precision):
    """Scores, parameters and metrics of two updates."""
    optimizer = make_optimizer(SMOOTH, 10)
    # which compiles faster
    logprobs = make_logprobs(MODEL, precision, 1.0, "none" if precision.any_fp8 else "layer", layout)
    policy_of, score = make_policy(precision, layout=layout), make_score(logprobs, layout)
    train = make_train_step(logprobs, precision, Loss(kl_coef=0.1), Correction().resolve(), optimizer, layout)
    state = fresh_state(layout.place(init_params(MODEL, jax.random.key(0))), optimizer, "float32", layout)
    # before any update
    at_first = {len(x.sharding.device_set) for x in jax.tree.leaves(state.opt_state) if x.ndim > 2}
    assert at_first == {layout.mesh.size if layout.mesh else 1}
    policy, found = policy_of(state.params), []
    reference = score(policy, batch())
    for _ in range(2):
        old = score(policy, batch())
        state, policy, metrics = train(state, policy, batch(), old, reference)
        found += [old, *jax.tree.leaves(jax.tree.map(np.asarray, state.params)), metrics]
    for path, x in jax.tree_util.tree_leaves_with_path((state, policy)):
        if x.ndim > 1 and "norm" not in str(path):
            parts = 1 if layout.mesh is None else layout.mesh.shape["fsdp"] * (
                1 if "'gate'" in str(path) else layout.tensor)
            assert x.addressable_shards[0].data.size * parts == x.size, path
    assert train.__wrapped__._cache_size() == score._cache_size() == 1
    return found


def lowered(layout, precision) -> str:
    """The scoring program with the kernels, lowered for GPUs."""
    precision = dataclasses.replace(precision, products="pallas", attention="pallas",
                                    compute_dtype="bfloat16")
    score = make_score(make_logprobs(MODEL, precision, 1.0, "layer", layout), layout)
    params = jax.eval_shape(lambda: init_params(MODEL, jax.random.key(0)))
    policy = jax.eval_shape(make_policy(precision, layout=layout), params)
    return score.trace(policy, batch()).lower(lowering_platforms=("cuda",)).as_text()


def published(layout, precision) -> dict[str, np.ndarray]:
    policy = make_policy(precision, layout=layout)(layout.place(init_params(MODEL, jax.random.key(0))))
    source = LearnerWeights(MODEL, policy, precision.runs, "bfloat16")
    tensors = {name: np.asarray(x) for name, x in source}
    for rows in itertools.chain.from_iterable(source.stacks(2**20)):
        for i, name in enumerate(rows.names, rows.first or 0):
            row = np.asarray(rows.stack).reshape(-1, *tensors[name].shape)[i]
            np.testing.assert_array_equal(tensors[name].view(np.uint8), row.view(np.uint8), err_msg=name)
    return tensors


axes, precision, of_scores, of_weights = CASES[CASE]
layout = make_mesh_layout(**axes)
for a, b in zip(steps(ONE, precision), steps(layout, precision), strict=True):
    for name in a if isinstance(a, dict) else ():
        np.testing.assert_allclose(float(b[name]), float(a[name]), rtol=10 * of_scores, atol=of_scores,
                                   err_msg=name)
    if not isinstance(a, dict):
        tolerance = of_scores if a.shape == (M, R, T) else of_weights
        np.testing.assert_allclose(np.asarray(b, np.float64), np.asarray(a, np.float64), rtol=0,
                                   atol=tolerance)
one, several = published(ONE, precision), published(layout, precision)
assert one.keys() == several.keys()
for name in one:
    np.testing.assert_array_equal(one[name].view(np.uint8), several[name].view(np.uint8), err_msg=name)
if CASE == "fp8":
    text = lowered(layout, precision)
    gathers = re.findall(r"all_gather.*?-> tensor<([0-9x]+)x(\w+)>", text)
    assert {dtype for shape, dtype in gathers if "256x256" in shape} == {"ui8"}, gathers
    assert "mosaic_gpu" in text
print("equal")
