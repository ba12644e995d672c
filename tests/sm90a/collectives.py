"""What the GPUs of a learner send each other in an update, read off the program that XLA compiles for them,
and how long a step of more GPUs than were measured would take:

    SM90A=.venv-sm90a JAX_PLATFORMS=cpu python tests/sm90a/collectives.py [--preset NAME] [--mesh 1x2 1x4 ...]

writes benchmarks/results/scaling_plan.json. A mesh is DATAxFSDP H100s, of which a host has FSDP. Completions
grow with the GPUs, so that each GPU has the rows that one has alone. For each mesh: the bytes that one GPU
sends in an update, by collective and axes, and the memory of its program. An all-gather or a reduce-scatter
of B bytes over n GPUs sends B (n - 1) / n from each, and an all-reduce twice that (rings; Thakur et al. 2005,
"Optimization of collective communication operations in MPICH"). Loops count as often as they run.

The simulated efficiency is compute / (compute + bytes / rate): nothing is hidden behind compute. Compute is
the update of the same model on one GPU, tokens a second as benchmarks/results/scaling.json has them; NVLINK
and NETWORK are the rates, and are assumed. Its check is the efficiency that scaling.json has of two GPUs.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import re
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "unit/config")]

import preset_memory
from hopper import compiled, lowered
from test_configs import loaded, parts

from benchmarks.common import RESULTS, row, write
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.memory.plan import memory_plan

FILE = RESULTS / "scaling_plan.json"
WIDTH = {"pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2,
         "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8}
# bytes a second of a GPU: NCCL within a host, and 400 Gb/s for each GPU between hosts
NVLINK, NETWORK = 340e9, 40e9
KINDS = "all-gather", "all-reduce", "reduce-scatter"
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
OP = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z][a-z0-9\-]*)\((.*)$")
BRANCHES = re.compile(r"branch_computations=\{(.*?)\}|"
                      r"true_computation=%?([\w.\-]+), false_computation=%?([\w.\-]+)")
Sent = dict[tuple[str, str], int]  # (collective, axes of the mesh) -> bytes


def sent(program: str) -> Sent:
    """The bytes that one GPU sends in one execution of a compiled program (the text of its HLO). Raises
    ValueError for a collective in a loop of which XLA does not know how often it runs."""
    found, entry = _computations(program)
    return _sent(entry, found, {})


def _computations(program: str) -> tuple[dict[str, list[str]], str]:
    found, name, entry = {}, "", ""
    for line in program.splitlines():
        if begun := COMPUTATION.match(line):
            name = begun[1]
            found[name] = []
            entry = name if line.startswith("ENTRY") else entry
        elif name:
            found[name].append(line)
    return found, entry


def _sent(name: str, computations: dict[str, list[str]], known: dict[str, Sent]) -> Sent:
    if name in known:
        return known[name]
    total: Sent = collections.Counter()
    of = lambda other: _sent(other, computations, known)
    for line in computations[name]:
        if not (op := OP.match(line)):
            continue
        result, kind, rest = op.groups()
        starts, kind = kind.endswith("-start"), kind.removesuffix("-start")
        if kind in KINDS:
            axes, n = _group(rest)
            total[kind, axes] += round(_bytes(kind, result, starts, n))
        elif kind == "while":
            inside, times = of(re.search(r"body=%?([\w.\-]+)",
                                         rest)[1]), re.search(r'"known_trip_count":\{"n":"(\d+)"', rest)
            if inside and not times:
                raise ValueError(f"collectives {dict(inside)} in a loop of unknown length: {line[:300]}")
            for key, size in inside.items():
                total[key] += int(times[1]) * size
        elif kind == "conditional":
            names = BRANCHES.search(rest)
            branches = names[1].replace("%", "").split(", ") if names[1] else names.groups()[1:]
            for key, size in max(map(of, branches), key=lambda s: sum(s.values())).items():
                total[key] += size
        else:
            for called in re.findall(r"(?:calls|to_apply|called_computation)=%?([\w.\-]+)", rest):
                if kind not in ("reduce", "reduce-window", "scatter", "sort", "map"):
                    for key, size in of(called).items():
                        total[key] += size
    known[name] = total
    return total


def _group(rest: str) -> tuple[str, int]:
    """(the axes, the number of GPUs) of a collective's groups."""
    sizes, axes = re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", rest).groups()
    size, axes = dict(re.findall(r"'(\w+)'=(\d+)", sizes)), re.findall(r"'(\w+)'", axes)
    axes = [axis for axis in axes if size[axis] != "1"]
    return " and ".join(axes), math.prod(int(size[axis]) for axis in axes)


def _bytes(kind: str, result: str, starts: bool, n: int) -> float:
    """The bytes that one GPU sends. The result of a collective that starts is ((operands), results)."""
    size = _size(result)
    if starts:
        size *= 1 / 2 if kind == "all-reduce" else n / (n + 1)
    elif kind == "reduce-scatter":  # the result is a part
        size *= n
    return size * (n - 1) / n * (2 if kind == "all-reduce" else 1)


def _size(shape: str) -> int:
    """Bytes of all arrays of a shape."""
    return sum(WIDTH[dtype] * math.prod(map(int, filter(None, dims.split(","))))
               for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shape))


def measure(preset: str, data: int, fsdp: int) -> dict:
    _, model = loaded(preset)
    count = data * fsdp
    alone = loaded(preset)[0]
    cfg = load_config(preset, [
        "--train.data", str(data), "--train.fsdp", str(fsdp), "--train.rows_per_microbatch", str(count),
        "--rollout.prompts_per_step", str(alone.rollout.prompts_per_step * count)])
    jitted, arguments = preset_memory.update_on(parts(preset)[0], count, cfg, model)
    program = compiled(lowered(parts(preset)[0], jitted, *arguments))
    m, plan = program.memory_analysis(), sum(size for _, size in memory_plan(cfg, model))
    return {"sent": {f"{kind} over {axes}": size
                     for (kind, axes), size in sorted(sent(program.as_text()).items())},
            "device": (m.argument_size_in_bytes + m.temp_size_in_bytes + m.output_size_in_bytes
                       - m.alias_size_in_bytes),
            "plan": plan, "microbatches": arguments[3].tokens.shape[0], "row_tokens": cfg.train.row_tokens}


def compute_seconds(model: str, tokens: int) -> float:
    """Of an update of so many tokens on one GPU, as it was measured."""
    measured = json.loads((RESULTS / "scaling.json").read_text())
    (rate,) = (r["ours"] for r in measured["rows"]
               if r["case"].startswith(model) and "1 GPUs" in r["case"] and r["metric"] == "update")
    return tokens / rate


def efficiency(found: dict, model: str) -> float:
    """Of one GPU's speed, if nothing that is sent is hidden behind compute."""
    rates = lambda name: NETWORK if "data" in name else NVLINK
    wait = sum(size / rates(name) for name, size in found["sent"].items())
    compute = compute_seconds(model, found["microbatches"] * found["row_tokens"])
    return compute / (compute + wait)


def wider(found: dict, hosts: int, of: int) -> dict:
    """What a mesh of `of` hosts sends, with as many hosts as `hosts`."""
    share = (hosts - 1) / hosts / ((of - 1) / of)
    return found | {"sent": {name: size * (share if "data" in name else 1)
                             for name, size in found["sent"].items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--preset", default="qwen3-8b-h100x2")
    parser.add_argument("--mesh", nargs="+", default=["1x2", "1x4", "1x8", "8x8"])
    args = parser.parse_args()
    each = json.loads(FILE.read_text())["each"] if FILE.exists() else {}
    model = Path(loaded(args.preset)[0].model.path).name
    for mesh in args.mesh:
        began, (data, fsdp) = time.monotonic(), map(int, mesh.split("x"))
        with preset_memory.without_a_gpu():
            found = measure(args.preset, data, fsdp)
        each[f"{args.preset}, {data} x {fsdp}"] = found | {"model": model,
                                                           "seconds": time.monotonic() - began}
        print(mesh, found, flush=True)
        write(FILE, "scaling_plan", rows_of(each), each=each)


def rows_of(each: dict) -> list[dict]:
    rows = []
    for case, found in each.items():
        data, fsdp = map(int, case.rpartition(", ")[2].split(" x "))
        rows += [row(f"{case} GPUs", "plan over XLA's memory", "GiB", found["plan"] / 2**30,
                     found["device"] / 2**30, "XLA's buffers"),
                 row(f"{case} GPUs", "an update sends", "GB a GPU", sum(found["sent"].values()) / 1e9,
                     found["device"] / 1e9, "its memory", True),
                 simulated(f"{case} GPUs", found, data * fsdp)]
        if data > 1:
            rows.append(simulated(f"{case.rpartition(', ')[0]}, 64 x {fsdp} GPUs", wider(found, 64, data),
                                  64 * fsdp))
    return rows


def simulated(case: str, found: dict, gpus: int) -> dict:
    measured = json.loads((RESULTS / "scaling.json").read_text())["rows"]
    seen = [r["ratio"] for r in measured if r["metric"] == "update" and f"{gpus} GPUs" in r["case"]
            and r["case"].startswith(found["model"])]
    return row(case, "efficiency, simulated", "of one GPU", efficiency(found, found["model"]),
               seen[0] if seen else 1.0, "measured" if seen else "one GPU alone")


if __name__ == "__main__":
    main()
