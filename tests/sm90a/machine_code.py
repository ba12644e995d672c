"""The output of ptxas for the kernels of a program lowered for CUDA, without a GPU: registers, spills,
machine code.

JAX's CUDA plug-in can compile a Mosaic GPU kernel by itself if a driver tells it the GPU's type. driver.c is
a driver that reports Hopper and does nothing else. compile.py does the rest in its own process.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from jaxlib.mlir import ir

HERE = Path(__file__).parent
TARGET = "mosaic_gpu_v2"


class Kernel(NamedTuple):
    """Registers per thread, and bytes of spills per thread. `warnings`: those of ptxas, for example that it
    serialises tensor-core products. `sass`: the machine code."""

    registers: int
    spilled: int
    warnings: tuple[str, ...]
    sass: str

    def __str__(self) -> str:
        return f"{self.registers} registers, {self.spilled} bytes spilled" + "".join(
            f"; {w}" for w in self.warnings)


def overtaken_reads(sass: str) -> list[str]:
    """Reads of shared memory that are followed by a release of their stage to a pair of blocks without a
    barrier in between.

    One warp releases for all four of its warpgroup (`SYNCS.ARRIVE...RED`). Only a barrier of the warps
    (`BAR.SYNC`) orders the other warps' reads (`LDS`) before that. Neither the simulator nor racecheck
    detects a copy that overtakes them.
    """
    waiting, overtaken = [], []
    for line in sass.splitlines():
        if "BAR.SYNC" in line:
            waiting = []
        elif re.search(r"SYNCS\.ARRIVE\S*\.RED", line):
            overtaken += waiting
        elif re.search(r"\sLDS\S* ", line):
            waiting.append(line.strip())
    return overtaken


def kernels_of(lowered, site: Path) -> list[Kernel]:
    """The kernels of a `jax.stages.Lowered`. Raises RuntimeError, with the output, if one does not
    compile."""
    modules = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        attributes = op.attributes
        if op.name == "stablehlo.custom_call" and ir.StringAttr(
                attributes["call_target_name"]).value == TARGET:
            modules.append(attributes["mhlo.backend_config"]["module"].value_bytes)
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir().operation.walk(visit)
    return [_compiled(module, site) for module in dict.fromkeys(modules)]


@functools.cache
def _compiled(module: bytes, site: Path) -> Kernel:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel")
        file.write_bytes(module)
        command = [sys.executable, HERE / "compile.py", site, _driver(site), file]
        done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    used, spilled = (re.search(words, done.stdout)
                     for words in (r"Used (\d+) registers", r"(\d+) bytes spill stores"))
    if not (used and spilled and "EXIT" in done.stdout):
        raise RuntimeError(f"a kernel does not compile for sm_90a:\n{done.stdout[-4000:]}")
    said, sass = done.stdout.split("Compile time", 1)
    warnings = dict.fromkeys(line.strip() for line in said.splitlines()
                             if "Potential Performance Loss" in line)
    return Kernel(int(used[1]), int(spilled[1]), tuple(warnings), sass)


@functools.cache
def _driver(site: Path) -> Path:
    library = site / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, HERE / "driver.c"],
                   check=True)
    return library
