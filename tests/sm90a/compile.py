"""Compile a lowered Mosaic GPU kernel to machine code for sm_90a, without a GPU and without JAX:

    python compile.py SITE DRIVER MODULE

SITE is the folder where requirements/sm90a.txt is installed, DRIVER the library built from driver.c, MODULE a
file of MLIR bytecode. The output of ptxas and the machine code go to standard output. SM90A_CUDA names the
folder of another CUDA toolkit, whose ptxas compiles instead.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path


def main(site: str, driver: str, module: str) -> None:
    code, cuda = Path(module).read_bytes(), Path(os.environ.get("SM90A_CUDA") or Path(site, "nvidia/cu13"))
    os.environ |= {"MOSAIC_GPU_CUDA_ROOT": str(cuda), "PATH": f"{cuda / 'bin'}:{os.environ['PATH']}",
                   "MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_SASS": "1"}
    ctypes.CDLL(driver, ctypes.RTLD_GLOBAL)
    build = ctypes.CDLL(str(Path(site, "jax_plugins/xla_cuda13/xla_cuda_plugin.so"))).MosaicGpuCompile
    build.argtypes, build.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
    build(code, len(code))  # ends in an error, because the compiled kernel cannot be loaded


if __name__ == "__main__":
    main(*sys.argv[1:])
