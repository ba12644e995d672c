"""Whole programs compiled for an H200 by JAX's CUDA plug-in, without a GPU. They need SM90A, the folder where
requirements/sm90a.txt is installed (`make sm90a`), and are skipped without it."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

SITE = os.environ.get("SM90A")
if SITE:
    sys.path.append(str(Path(SITE).resolve()))  # before JAX looks for plug-ins, and Mosaic for CUDA

import jax
import pytest
from jax.experimental.topologies import get_topology_desc
from jax.sharding import SingleDeviceSharding

from benchmarks.common import config
from benchmarks.step import OPTIMIZERS, batch_of, precision_of, rows_of
from jaxfp8rl.config.correction import Correction
from jaxfp8rl.config.learning import Loss, Optim
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.module import init_params
from jaxfp8rl.optim.adamw import make_optimizer
from jaxfp8rl.optim.guard import init_state
from jaxfp8rl.policy.policy import partition
from jaxfp8rl.training.step import make_logprobs, make_policy, make_score, make_train_step
from pallas_kernels.logprob import api as logprob

OPTIONS = {"xla_gpu_autotune_level": 0}  # there is no device to tune on
H200 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
runtime_version { major: 13 }
dnn_version_info { major: 9 minor: 14 }
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  memory_bandwidth: 4814000000000
  device_memory_size: 150110011392
  l2_cache_size: 62914560
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}
"""


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/sm90a" in str(item.path) and not SITE:
            item.add_marker(pytest.mark.skip(reason="needs requirements/sm90a.txt: make sm90a"))


@pytest.fixture(scope="session")
def compiled_step():
    """step(size, recipe, tokens, layers, remat) -> {"score", "update": jax.stages.Compiled} of
    benchmarks/step.py's learner: two micro-batches of one row of this many tokens, low-bit moments."""
    jax.devices()  # loads the plug-in
    (device,) = get_topology_desc("h200", "cuda", target_config=H200, topology="1x1x1").devices
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(device))
    options = OPTIONS | {"xla_gpu_cuda_data_dir": str(Path(SITE, "nvidia/cu13").resolve())}

    def compiled(jitted, *arguments) -> jax.stages.Compiled:
        traced = jitted.trace(*jax.tree.map(place, arguments))
        return traced.lower(lowering_platforms=("cuda",)).compile(compiler_options=options)

    def step(size: str, recipe: str, tokens: int, layers: int = 0,
             remat: str = "mlp") -> dict[str, jax.stages.Compiled]:
        model = ModelConfig.from_hf(config(size, layers))
        precision, optimizer = precision_of(model, recipe), make_optimizer(Optim(**OPTIMIZERS["low"]), 10)
        logprobs = make_logprobs(model, precision, 1.0, remat)
        score = make_score(logprobs)
        update = make_train_step(logprobs, precision, Loss(), Correction().resolve(), optimizer).__wrapped__
        args = argparse.Namespace(row_tokens=tokens, segments=8, microbatches=2, data=1, fsdp=1, tensor=1)
        state = jax.eval_shape(lambda key: init_state(init_params(model, key), optimizer, "bfloat16"),
                               jax.random.key(0))
        policy, batch = jax.eval_shape(make_policy(precision),
                                       state.params), batch_of(rows_of(args, model), args)
        with pytest.MonkeyPatch.context() as patch:
            # there is no Hopper GPU for "auto" to find
            patch.setattr(logprob, "use_kernel", lambda backend: True)
            old = jax.eval_shape(score, policy, batch)
            return {"score": compiled(score, policy, batch),
                    "update": compiled(update, state, *partition(policy), batch, old)}

    return step
