"""Whole programs compiled for a Hopper GPU by JAX's CUDA plug-in, without a GPU. This needs SM90A, the folder
where requirements/sm90a.txt is installed (`make sm90a`)."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

SITE = os.environ.get("SM90A")
if SITE:
    sys.path.append(str(Path(SITE).resolve()))  # before JAX looks for plug-ins, and Mosaic for CUDA

import jax
from jax.experimental.topologies import get_topology_desc
from jax.sharding import NamedSharding, SingleDeviceSharding
from jaxlib.mlir import ir

# name, bytes a second and bytes of memory of a GPU
GPUS = {"h100": ("NVIDIA H100 80GB HBM3", 3352 * 10**9, 85_052_424_192),
        "h200": ("NVIDIA H200", 4814 * 10**9, 150_110_011_392)}
TARGET = """
platform_name: "CUDA"
device_description_str: "{0}"
runtime_version {{ major: 13 }}
dnn_version_info {{ major: 9 minor: 14 }}
gpu_device_info {{
  cuda_compute_capability {{ major: 9 }}
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  memory_bandwidth: {1}
  device_memory_size: {2}
  l2_cache_size: 62914560
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
"""


@functools.cache
def devices(gpu: str, count: int = 1) -> list[jax.Device]:
    """The devices of a machine with `count` GPUs of GPUS."""
    jax.devices()  # loads the plug-in
    target = TARGET.format(*GPUS[gpu])
    return list(get_topology_desc(gpu, "cuda", target_config=target, topology=f"1x1x{count}").devices)


def lowered(gpu: str, jitted, *arguments) -> jax.stages.Lowered:
    """`jitted` lowered for arguments of these shapes: for one GPU, or for those of a mesh over which the
    arguments are spread. Arguments and results in host memory are placed there."""
    there = SingleDeviceSharding(devices(gpu)[0])

    def place(x: Any) -> jax.ShapeDtypeStruct:
        spread = isinstance(getattr(x, "sharding", None), NamedSharding)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if spread else there,
                                    _memory_space=jax.typeof(x).memory_space)

    found = jitted.trace(*jax.tree.map(place, arguments)).lower(lowering_platforms=("cuda",))
    _place_on_host(found)
    return found


def compiled(program: jax.stages.Lowered) -> jax.stages.Compiled:
    """What `lowered` gives, compiled."""
    assert SITE
    # there is no device to tune on
    options = {"xla_gpu_autotune_level": 0, "xla_gpu_cuda_data_dir": str(Path(SITE, "nvidia/cu13").resolve())}
    return program.compile(compiler_options=options)


def _place_on_host(program: jax.stages.Lowered) -> None:
    """Mark the arguments and results of a program that are in host memory. JAX takes the mark from a
    sharding, and a sharding over a device that is not there has none."""
    avals, module = program._lowering.compile_args, program.compiler_ir()
    main = next(op for op in module.body.operations if op.attributes["sym_name"].value == "main")
    with module.context:
        for name, of in (("arg_attrs", avals["global_in_avals"]), ("res_attrs", avals["global_out_avals"])):
            none = [ir.DictAttr.get({})] * len(of)
            marks = list(main.attributes[name]) if name in main.attributes else none
            main.attributes[name] = ir.ArrayAttr.get(
                [_marked(mark, aval) for mark, aval in zip(marks, of, strict=True)])


def _marked(mark: ir.Attribute, aval) -> ir.Attribute:
    if aval.memory_space != jax.memory.Space.Host:
        return mark
    given = {a.name: a.attr for a in ir.DictAttr(mark)}
    return ir.DictAttr.get(given | {"mhlo.memory_kind": ir.StringAttr.get("pinned_host")})
