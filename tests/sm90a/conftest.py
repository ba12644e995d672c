"""Whole programs compiled for an H200 by JAX's CUDA plug-in, where there is no GPU: with SM90A, where requirements/sm90a.txt is
installed (`make sm90a`); skipped without."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import jax
import pytest
from jax.experimental.topologies import get_topology_desc
from jax.sharding import SingleDeviceSharding

SITE = os.environ.get("SM90A")
if SITE:
    sys.path.append(str(Path(SITE).resolve()))  # before JAX looks for plug-ins, at the first array
OPTIONS = {"xla_gpu_autotune_level": 0}  # there is nothing to measure on
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
def compile_for_h200():
    """compile(jitted, *arguments) -> jax.stages.Compiled; of arguments their shapes and types alone count."""
    jax.devices()  # finds the plug-in
    (device,) = get_topology_desc("h200", "cuda", target_config=H200, topology="1x1x1").devices
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(device))
    options = OPTIONS | {"xla_gpu_cuda_data_dir": str(Path(SITE, "nvidia/cu13").resolve())}

    def compile(jitted, *arguments):
        traced = jitted.trace(*jax.tree.map(place, arguments))
        return traced.lower(lowering_platforms=("cuda",)).compile(compiler_options=options)

    return compile
