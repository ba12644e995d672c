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


def overwritten_operands(sass: str) -> list[str]:
    """Tensor-core products whose left operand is in registers that still hold the operand of a product behind
    it in a loop. ptxas 13.0 made such code of operands that are the same in all turns: from the second turn
    on the product read something else."""
    lines = [re.sub(r"/\*[0-9a-f]+\*/", "", raw).strip() for raw in sass.splitlines()]
    lines = [line for line in lines if line]
    before: dict[int, list[int]] = {i + 1: [i] for i, line in enumerate(lines)
                                    if not re.match(r"(BRA|EXIT|RET)\b", line)}
    labels = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
    for i, line in enumerate(lines):
        if (m := re.search(r"\bBRA\b.*?(\.L_x_\d+)", line)) and m[1] in labels:
            before.setdefault(labels[m[1]], []).append(i)
    written = [_written(line) for line in lines]
    read = {i: range(int(m[1]), int(m[1]) + 4) for i, line in enumerate(lines)
            if (m := re.search(r"GMMA\.\S+ R\d+, R(\d+), gdesc", line))}

    def holds_anothers(product: int, register: int) -> bool:
        """Whether `register` can come to `product` from a later instruction and by way of another product
        that reads it."""
        waiting, seen = [(i, False) for i in before.get(product, ())], set()
        while waiting:
            if (state := waiting.pop()) in seen:
                continue
            seen.add(state)
            i, by_another = state
            if register in written[i]:
                if i > product and by_another:
                    return True
                continue
            by_another |= i != product and register in read.get(i, ())
            waiting += [(j, by_another) for j in before.get(i, ())]
        return False

    return [lines[i] for i, registers in read.items() if any(holds_anothers(i, r) for r in registers)]


def _written(line: str) -> set[int]:
    """The registers that an instruction writes."""
    m = re.match(r"(?:@!?U?P\d+ )?([A-Z]\S*) (?:U?P\d+, )*R(\d+)", line)
    if not m or m[1].startswith(("ST", "SYNCS", "RED", "BAR", "R2UR")):
        return set()
    wide = {".128": 4, ".M88.4": 4, ".M88.2": 2, ".64": 2, "CS2R": 2, "WIDE": 2}
    count = int(m[1].split("x")[1]) // 2 if "GMMA" in m[1] else max(
        (n for word, n in wide.items() if word in m[1]), default=1)
    return set(range(int(m[2]), int(m[2]) + count))


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
