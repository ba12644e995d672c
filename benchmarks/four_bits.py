"""Weights in four bits beside FP8 and BF16: vLLM's decoding, the learner's products, and steps of a preset
over a random base.

    jaxfp8rl bench four_bits [--parts product decode steps] [--shape Qwen3-8B] [--forms nvfp4] [--rows 64]
    jaxfp8rl bench four_bits --parts steps [--preset qwen3-32b-h100-nvfp4]

No weights are needed: `jaxfp8rl random-model` writes random codes, E4M3 scales and one divisor. Each part
runs in processes of its own and is killed after its --seconds; what other parts found is written all the
same.

"product": the linears of a layer with --tokens rows. Four bits are decoded to BF16 and multiplied by cuBLAS,
as in a run; the yardstick is the product of BF16 weights. "decode" is the decoding alone, and "numbers that
differ" compares it with NumPy's for random bytes and every scale.

"decode": vLLM, each format in a process of its own; FP8 and BF16 have vLLM's dummy weights. --rows sequences
of --new-tokens tokens, none of which ends early. `each` names vLLM's kernel of the linears, and "numbers that
differ" compares what it multiplies by with the folder, for the linears of a layer.

"steps": three steps of a preset, as `jaxfp8rl bench presets` runs them.

Needs no GPU; a GPU for steps and for figures, vLLM for decode.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from ml_dtypes import bfloat16, float8_e4m3fn

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import processes
from benchmarks.common import arguments, require_gpu, row
from jaxfp8rl.models.packed_config import FORMS, Packed
from pallas_kernels.four_bits import GROUPS

if TYPE_CHECKING:
    from jaxfp8rl.models.config import ModelConfig

SECONDS = {"product": 180, "decode": 400, "steps": 540}  # of a process
ENGINES = (*FORMS, "fp8", "bf16")
PROMPT = 64  # tokens
HALVES = np.array([0, 1, 2, 3, 4, 6, 8, 12, -0.0, -1, -2, -3, -4, -6, -8, -12], np.float32) / 2  # E2M1
Programs = dict[str, tuple[Any, tuple]]


def main() -> None:
    parser = arguments(__doc__, "four_bits")
    parser.add_argument("--parts", nargs="+", choices=list(SECONDS), default=["product", "decode"])
    parser.add_argument("--seconds", type=int, nargs="+", metavar="N",
                        help=f"of a process of each part; default: {SECONDS}")
    parser.add_argument("--shape", default="Qwen3-8B", help="a published shape; default: %(default)s")
    parser.add_argument("--layers", type=int, default=0, help="fewer than the shape has")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=["nvfp4"], help="default: nvfp4")
    parser.add_argument("--yardsticks", nargs="*", choices=["fp8", "bf16"], default=["fp8", "bf16"],
                        help="of decode; default: both")
    parser.add_argument("--tokens", type=int, default=4608, help="of a product; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=64, help="decoded at once; default: %(default)s")
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--preset", default="qwen3-32b-h100-nvfp4")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--models", type=Path, metavar="FOLDER", help="where model folders are kept")
    parser.add_argument("--child", nargs=3, metavar=("PART", "WHAT", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    find = lambda part, what: products(args) if part == "product" else decoding(what, Path(args.models), args)
    if processes.answered(args.child, find):
        return
    if args.seconds and len(args.seconds) != len(args.parts):
        parser.error(f"--seconds has {len(args.seconds)} numbers for {len(args.parts)} --parts")
    bounds = SECONDS | dict(zip(args.parts, args.seconds or ()))
    rows, each, failed = [], {}, []
    with tempfile.TemporaryDirectory() as scratch:
        for part in args.parts:
            models = args.models or Path(scratch)
            run = {"product": product_part, "decode": decode_part, "steps": steps_part}[part]
            more, found, lost = run(args, models, bounds[part])
            rows, each, failed = rows + more, each | found, failed + lost
            write_apart(args, rows, each, failed)
    if failed:
        sys.exit(f"failed, or took longer than its --seconds: {', '.join(failed)}")


def write_apart(args: argparse.Namespace, rows: list[dict], each: dict, failed: list[str]) -> None:
    """Write the result by a process of its own, since JAX would take the GPU from the parts to come."""
    code = ("import sys, json; from benchmarks.common import write; out, plot, more = json.load(sys.stdin); "
            "write(out, 'four_bits', more.pop('rows'), plot, **more)")
    more = {"rows": rows, "each": each, "failed": failed}
    plot = str(args.plot) if args.plot else None
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    subprocess.run([sys.executable, "-c", code], input=json.dumps([str(args.out), plot, more]), text=True,
                   check=True, env=environment)


def child(part: str, what: str, models: Path, seconds: float) -> dict | None:
    """What a process of the part finds; None if it fails, or takes longer than `seconds`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        command = [sys.executable, __file__, *sys.argv[1:], "--models", str(models), "--child", part, what,
                   str(out)]
        code = None
        with processes.child(command) as process, contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(seconds)
        if code != 0:
            print(f"{part} {what}: {'killed after its seconds' if code is None else f'exit code {code}'}",
                  flush=True)
        return json.loads(out.read_text()) if code == 0 else None


Found = tuple[list[dict], dict[str, Any], list[str]]  # rows, `each`, what failed


def model_of(args: argparse.Namespace, form: str = "") -> ModelConfig:
    from jaxfp8rl.models.known import shape_named

    shape = shape_named(args.shape)
    shape = dataclasses.replace(shape, num_hidden_layers=args.layers) if args.layers else shape
    return dataclasses.replace(shape, packed=Packed(form)) if form in FORMS else shape


def case_of(args: argparse.Namespace) -> str:
    return args.shape + (f", {args.layers} layers" if args.layers else "")


def product_part(args: argparse.Namespace, models: Path, seconds: float) -> Found:
    found = child("product", "all", models, seconds)
    return ([], {}, ["product"]) if found is None else (found["rows"], {}, [])


def products(args: argparse.Namespace) -> dict[str, list[dict]]:
    """The rows of the learner's products."""
    from benchmarks.gemm import medians
    from jaxfp8rl.models.hf_names import linear_shapes

    rows = []
    for n, k in dict.fromkeys(linear_shapes(model_of(args)).values()):
        for form in args.forms:
            case = f"{args.shape}'s [{n}, {k}], {args.tokens:,} tokens, {form}"
            made = programs_of(form, n, k, args.tokens)
            runs = {name: bound(program, arguments) for name, (program, arguments) in made.items()}
            ms = {name: 1e3 * time for name, time in medians(runs, args.rounds, 10).items()}
            rows += [row(case, what, "ms", ms[what], ms[f"{beside}, BF16"], f"the {beside} of BF16 weights",
                         True)
                     for what, beside in (("product", "product"), ("dgrad", "dgrad"), ("decode", "product"))]
            rows.append(row(case, "numbers that differ", "", differing(form, made["decode"][0], k), 0,
                            "NumPy's", True))
    return {"rows": rows}


def programs_of(form: str, n: int, k: int, tokens: int) -> Programs:
    """name -> (a jitted program, its arguments) of a product of x [tokens, k] and a random weight [n, k], of
    its dgrad, and of decoding the weight."""
    import jax
    import jax.numpy as jnp

    from jaxfp8rl.precision.four_bits import four_bit_linear
    from jaxfp8rl.precision.jit import rounding_exact_jit
    from pallas_kernels import four_bits

    weight = four_bits.FourBits(*map(jnp.asarray, random_codes(form, n, k)))
    x, dy = (jax.random.normal(jax.random.key(i), (tokens, width), jnp.bfloat16)
             for i, width in enumerate((k, n)))
    bf16 = jax.random.normal(jax.random.key(2), (n, k), jnp.bfloat16)
    four = lambda x, w: four_bit_linear("bfloat16", x, w)
    plain = lambda x, w: jnp.einsum("tk,nk->tn", x, w)
    pull = lambda product: rounding_exact_jit(lambda x, w, dy: jax.vjp(lambda x: product(x, w), x)[1](dy)[0])
    return {"product": (rounding_exact_jit(four), (x, weight)), "dgrad": (pull(four), (x, weight, dy)),
            "product, BF16": (rounding_exact_jit(plain), (x, bf16)),
            "dgrad, BF16": (pull(plain), (x, bf16, dy)),
            "decode": (rounding_exact_jit(four_bits.decode), (weight,))}


def bound(program: Any, given: tuple) -> Callable[[int], Any]:
    """The program compiled and bound to its arguments."""
    compiled = program.lower(*given).compile()
    return lambda i: compiled(*given)


def random_codes(form: str, n: int, k: int, every: bool = False) -> tuple[np.ndarray, ...]:
    """The fields of a FourBits [n, k] of random bytes, whose weights are near 0.02; with `every` scale that
    the format has."""
    draw, groups = np.random.default_rng(0), (n, k // GROUPS[form])
    packed = draw.integers(0, 256, (n, k // 2), np.uint8)
    if form == "int4":
        return packed, (draw.standard_normal(groups) * (0.1 if every else 0.004)).astype(bfloat16)
    if form == "mxfp4":
        return packed, np.resize(np.arange(2, 253) if every else np.arange(119, 121), groups).astype(np.uint8)
    scale = np.resize(np.arange(127) if every else np.arange(100, 112), groups).astype(np.uint8)  # NaN is 127
    return packed, scale.view(float8_e4m3fn), np.float32(2.0**14)


def decoded(form: str, packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The numbers [N, K] bfloat16 of `pallas_kernels.four_bits.decode`, by NumPy."""
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(*scale.shape, GROUPS[form])
    numbers = codes.astype(np.float32) - 8 if form == "int4" else HALVES[codes]
    power = np.exp2(scale.astype(np.float32) - 127) if form == "mxfp4" else scale.astype(np.float32)
    return (numbers * power[..., None]).astype(bfloat16).reshape(len(packed), -1)


def differing(form: str, decode: Any, k: int) -> int:
    """How many of 128 rows of random bytes the device decodes to other numbers than NumPy."""
    import jax.numpy as jnp

    from pallas_kernels import four_bits

    fields = random_codes(form, 128, k, every=True)
    have = np.asarray(decode(four_bits.FourBits(*map(jnp.asarray, fields))))
    return int((have.view(np.uint16) != decoded(form, *fields[:2]).view(np.uint16)).sum())


def decode_part(args: argparse.Namespace, models: Path, seconds: float) -> Found:
    each, failed = {}, []
    for name in (*args.forms, *args.yardsticks):
        if name in FORMS:
            folder_of(args, name, models)
        found = child("decode", name, models, seconds)
        each |= {f"decode, {name}": found} if found else {}
        failed += [] if found else [f"decode {name}"]
        if name in FORMS and not args.models:
            shutil.rmtree(folder_of(args, name, models))
    rate = {name: each[f"decode, {name}"]["tokens/s"] for name in ENGINES if f"decode, {name}" in each}
    case = f"{case_of(args)}, {args.rows} sequences of {args.new_tokens} tokens"
    rows = [row(f"{case}, {form}", "decode", "tokens/s", rate[form], rate[name], f"{name} weights, same run")
            for form in args.forms for name in args.yardsticks if form in rate and name in rate]
    rows += [row(f"{case}, {form}", "numbers that differ", "", each[f"decode, {form}"]["differing"], 0,
                 "the folder's", True) for form in args.forms if form in rate]
    return rows, each, failed


def folder_of(args: argparse.Namespace, form: str, models: Path) -> Path:
    """The folder of random codes, written unless it is there."""
    from jaxfp8rl.cli.random_model import ENDS, write_folder

    folder = models / (f"{args.shape}-{form.upper()}" + (f"-{args.layers}" if args.layers else ""))
    if not folder.exists():
        began = time.perf_counter()
        write_folder(folder, dataclasses.replace(model_of(args, form), dtype="bfloat16"), 0, ENDS)
        print(f"wrote {folder.name} in {time.perf_counter() - began:.1f} s", flush=True)
    return folder


def decoding(name: str, models: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second of vLLM with weights in one format, its kernels, and how many numbers of a layer's
    linears in four bits differ from the folder's."""
    from bridges.inside_vllm import environment, packed

    environment.prepare()
    llm = engine_of(name, models, args)
    from vllm import SamplingParams

    draw = np.random.default_rng(0)
    prompts = [{"prompt_token_ids": draw.integers(8, 1000, PROMPT).tolist()} for _ in range(args.rows)]
    ask = lambda tokens: llm.generate(prompts,
                                      SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=1.0,
                                                              logprobs=0), use_tqdm=False)
    ask(8)
    found = []
    for _ in range(3):
        start = time.perf_counter()
        made = sum(len(said.outputs[0].token_ids) for said in ask(args.new_tokens))
        found.append(made / (time.perf_counter() - start))
    linears = llm.apply_model(packed.linears)[0]
    of_layer = [linear for linear in linears if ".layers.0." in linear.parts[0][0]]
    folder = folder_of(args, name, models) if linears else None
    return {"tokens/s": statistics.median(found), "all": found,
            "kernels": sorted({packed.kernel(linear) for linear in linears}),
            "differing": sum(wrong_numbers(linear, name, folder) for linear in of_layer) if folder else 0}


def engine_of(name: str, models: Path, args: argparse.Namespace) -> Any:
    """A `vllm.LLM` as `VllmEngine` builds it, with the weights of a folder or vLLM's dummies."""
    from bridges.inside_vllm import build, environment

    hf, cpu = model_of(args).to_hf(), environment.on_cpu()
    model = folder_of(args, name, models) if name in FORMS else build.config_folder(
        build.quantized_config(hf, ()) if name == "fp8" else hf)
    length = PROMPT + args.new_tokens
    heads = 2 * hf["num_hidden_layers"] * hf["num_key_value_heads"] * hf["head_dim"] * 2
    room = int(1.05 * heads * args.rows * (length + 128)) + 2**20
    options = build.engine_arguments(
        cpu, vocab_size=hf["vocab_size"], dtype="bfloat16", kv_cache="auto", kv_cache_bytes=room,
        max_model_len=length, max_num_seqs=args.rows, gpu_memory_utilization=0.9, enforce_eager=cpu,
        routed_experts=False, attention="auto")
    options |= {"model": str(model), "load_format": "auto" if name in FORMS else "dummy",
                "skip_tokenizer_init": True, "seed": 0}
    return build.build_llm(options, emulate=cpu and name == "fp8")


def wrong_numbers(linear: Any, form: str, folder: Path) -> int:
    """How many numbers of a linear are others than the folder's, rounded to bfloat16."""
    import torch

    from bridges.inside_vllm.packed import COLUMNS

    with torch.inference_mode():
        cuts = [linear.numbers(start, min(start + COLUMNS, linear.columns), "bfloat16").float().cpu()
                for start in range(0, linear.columns, COLUMNS)]
    have, wrong = torch.cat(cuts).T.numpy(), 0
    for name, start, stop in linear.parts:
        tensors = stored_of(folder, f"{name}.weight")
        divisor = tensors.get("global_scale", np.ones(1, np.float32))
        want = decoded(form, tensors["packed"].view(np.uint8), tensors["scale"]).astype(np.float32) / divisor
        wrong += int((have[start:stop] != want.astype(bfloat16).astype(np.float32)).sum())
    return wrong


def stored_of(folder: Path, weight: str) -> dict[str, np.ndarray]:
    """{"packed", "scale", ...} of a weight in four bits."""
    from jaxfp8rl.models.loading import stored

    found: Iterator = (t for t in stored(folder) if t.name.startswith(f"{weight}_"))
    return {tensor.name.removeprefix(f"{weight}_"): tensor.read() for tensor in found}


def steps_part(args: argparse.Namespace, models: Path, seconds: float) -> Found:
    from benchmarks import presets
    from jaxfp8rl.config.toml import load_config

    require_gpu(__file__, "an NVIDIA GPU for the part steps")
    settings = [*presets.CHANGED, *presets.ends_early(load_config(args.preset))]
    cfg = load_config(args.preset, settings)
    made = presets.model_folder(cfg, models)
    log = args.out.with_name(f"{args.out.stem}_{args.preset}.log")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "run")
        command = presets.train(args.preset, folder, [*settings, "--run.steps", str(args.steps),
                                                      "--model.path", str(made)])
        seen = presets.run(command, folder, seconds, presets.in_use, log)
        presets.keep(log, folder)
    rows = presets.rows_of(args.preset, cfg, seen, args.steps, presets.card())
    return rows, {}, [] if seen.code == 0 else ["steps"]


if __name__ == "__main__":
    main()
