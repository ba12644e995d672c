"""Long completions by vLLM, FP8 weights and cache against BF16: Qwen3 shapes, random weights, CUDA graphs.

    jaxfp8rl bench rollout [--size 8b] [--prompts 64] [--new-tokens 8192] [--gpus 0 1]
    jaxfp8rl bench rollout --prompts 32 64 --memory 80          # with a learner: weights and cache in 80 GB
    jaxfp8rl bench rollout --size 30b-a3b --new-tokens 4096     # a mixture of experts

Each engine has its own process and gets its weights by a publish that makes them part by part, so no weights
exist twice. With --gpus both run at the same time, each on its own GPU; otherwise one after the other. No
completion ends early, so every step decodes a token of each. A step's lower bound is the time of reading its
weights, and the cache of the middle step, at RATE. With --memory the cache may be too small for all
sequences; vLLM then queues or preempts some. For a mixture, the experts that count are those a step would use
if tokens chose uniformly. They run on Triton in both engines; --fp8-kernel concerns the other products. Each
prompt has a seed, as in a run.

Needs a GPU and vLLM.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import MIXTURES, SHAPES, arguments, config, require_gpu, row, size_of, write
from benchmarks.processes import answered

if TYPE_CHECKING:
    from bridges.api import GenRequest

ENGINES = {"fp8": ("fp8_e4m3_128x128", "fp8_e4m3"), "bf16": ("bfloat16", "auto")}  # weights, cache
PROMPT = 128  # tokens
PAGE = 128  # the largest page of the cache in tokens, vLLM's on a CPU
RATE = 4.1e12  # bytes per second of a copy on an H200


def main() -> None:
    parser = arguments(__doc__, "rollout")
    parser.add_argument("--new-tokens", type=int, default=8192)
    parser.add_argument("--prompts", type=int, nargs="+", default=[64],
                        help="numbers of prompts; each is one rollout with one completion per prompt")
    parser.add_argument("--memory", type=float,
                        help="GB of weights and cache together; default: enough for all completions")
    args, found = measured(parser, measure, __file__)
    memory = f" in {args.memory:g} GB" if args.memory else ""
    rows = [r for i, prompts in enumerate(args.prompts) for r in rows_of(
        f"Qwen3-{size_of(args)}{memory}, {prompts} completions of {args.new_tokens} tokens",
        {name: engine["rollouts"][i] for name, engine in found.items()},
    )]
    write(args.out, "rollout", rows, args.plot, each=found)


def measured(parser: argparse.ArgumentParser, measure: Callable,
             script: str) -> tuple[argparse.Namespace, dict[str, dict]]:
    """The command line, and the result of measure(engine, args) for each of ENGINES, each in its own process:
    `script` run again with --child ENGINE OUT, in which case this function does not return."""
    parser.add_argument("--size", choices=[*SHAPES, *MIXTURES], default="8b")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--fp8-kernel", choices=["deep_gemm", "native"], default="deep_gemm",
                        help="rollout.fp8_kernel")
    parser.add_argument("--attention", choices=["auto", "triton"], default="auto",
                        help="rollout.attention of the FP8 engine")
    parser.add_argument("--gpus", nargs=2, help="the GPUs of the two engines, as in CUDA_VISIBLE_DEVICES")
    parser.add_argument("--child", nargs=2, metavar=("ENGINE", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if answered(args.child, lambda engine: measure(engine, args)):
        sys.exit()
    require_gpu(script)
    with tempfile.TemporaryDirectory() as folder:
        outs, children = {name: Path(folder, name) for name in ENGINES}, []
        for place, (name, out) in enumerate(outs.items()):
            environment = os.environ | ({"CUDA_VISIBLE_DEVICES": args.gpus[place]} if args.gpus else {})
            command = [sys.executable, script, *sys.argv[1:], "--child", name, str(out)]
            children.append(subprocess.Popen(command, env=environment))
            if not args.gpus:
                children[-1].wait()
        if any([child.wait() for child in children]):
            sys.exit("an engine failed: see above")
        return args, {name: json.loads(out.read_text()) for name, out in outs.items()}


class Running(NamedTuple):
    """An engine with weights, and its chosen settings."""

    engine: Any
    token_bytes: int  # bytes of the cache per token
    chosen: dict[str, str]
    weights: Any
    fit: int  # sequences whose cache fits at once


@contextlib.contextmanager
def running(
    name: str, args: argparse.Namespace, prompts: int, length: int, memory: float | None = None
) -> Iterator[Running]:
    """The engine `name` of ENGINES, with room for `prompts` sequences of `length` tokens, or for fewer if
    they and the weights would take more than `memory` GB."""
    from benchmarks.publish import RandomWeights, fp8_runs_of
    from bridges.engines.vllm_engine import VllmEngine
    from bridges.proof import manifest
    from jaxfp8rl.models.config import ModelConfig
    from jaxfp8rl.precision.layer_runs import plain_runs
    from jaxfp8rl.publish.wire import high_precision_modules

    (weights, cache), hf, fp8 = ENGINES[name], config(args.size, args.layers), name == "fp8"
    token_bytes = 2 * hf["num_hidden_layers"] * hf["num_key_value_heads"] * hf["head_dim"] * (1 if fp8 else 2)
    model = ModelConfig.from_hf(hf)
    runs = fp8_runs_of(model) if fp8 else plain_runs(model.sparse_layers)
    chosen = dict(fp8_kernel=args.fp8_kernel, attention=args.attention) if fp8 else {}
    # bytes of whole pages
    source, sequence = RandomWeights(model, runs), 1.02 * token_bytes * (-(-length // PAGE) * PAGE)
    room = (memory * 1e9 - manifest.nbytes(source.manifest())) // sequence if memory else prompts
    fit = max(1, min(prompts, int(room)))
    engine = VllmEngine(
        hf, weights=weights, kv_cache=cache, max_model_len=length, max_num_seqs=prompts,
        kv_cache_bytes=int(fit * sequence),
        high_precision_modules=high_precision_modules(model, runs) if fp8 else (), **chosen,
    )
    with contextlib.closing(engine):
        way = publish(engine, source)
        yield Running(engine, token_bytes, chosen | {"publish": way}, source, fit)


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the engine's start, its chosen settings, and for each rollout its seconds, ms per step, and
    the bytes that bound a step."""
    began, rollouts = time.perf_counter(), []
    with running(name, args, max(args.prompts), PROMPT + args.new_tokens, args.memory) as r:
        generate(r.engine, max(args.prompts), 8)  # the remaining compilation
        start = time.perf_counter() - began
        for prompts in args.prompts:
            seconds = generate(r.engine, prompts, args.new_tokens)
            weights, middle = read_by_a_step(r.weights, prompts), prompts * (
                PROMPT + args.new_tokens / 2) * r.token_bytes
            print(
                f"{name}: there after {start:.1f} s, {args.new_tokens} tokens of {prompts} in "
                f"{seconds:.1f} s", flush=True)
            rollouts.append({
                "completions": prompts, "at once": min(prompts, r.fit), "rollout, s": seconds,
                "tokens/s": prompts * args.new_tokens / seconds, "step, ms": 1e3 * seconds / args.new_tokens,
                "weights, GB": weights / 1e9, "cache of the middle step, GB": middle / 1e9,
                "floor, ms": 1e3 * (weights + middle) / RATE,
            })
    return {"start, s": start, **r.chosen, "rollouts": rollouts}


def publish(engine: Any, source: Any) -> str:
    """Publish by the method that the engine supports, which is printed: "in_place", or "reload", for which
    all weights are made at once."""
    from bridges.transports.vllm_choice import open_vllm_transport

    with contextlib.closing(open_vllm_transport("auto", engine)) as transport:
        return "in_place" if transport.publish(source, 0).content else "reload"


def read_by_a_step(source: Any, prompts: int) -> float:
    """Bytes of weights that a decoding step multiplies by; for experts, as many as a uniform choice uses on
    average."""
    from bridges.proof import manifest

    model, metas = source.model, source.manifest()
    of_experts = manifest.nbytes(m for m in metas if ".experts." in m.name)
    read = manifest.nbytes(m for m in metas if model.tie_word_embeddings or "embed_tokens" not in m.name)
    chosen = model.experts and model.experts.num_experts_per_tok / model.experts.num_experts
    return read - of_experts * (1 - chosen) ** prompts if chosen else read


def requests(prompts: int, length: int, tokens: int) -> list[GenRequest]:
    """A request for a completion of `tokens` for each of `prompts` prompts of `length`, all with different
    beginnings."""
    from bridges.api import GenRequest, SamplingParams

    prompt = lambda i: tuple((PROMPT * i + j) % 100_000 for j in range(length))
    return [GenRequest(str(i), prompt(i), SamplingParams(tokens), seed=i) for i in range(prompts)]


def generate(engine: Any, prompts: int, tokens: int, length: int | None = None) -> float:
    """Seconds for a completion of `tokens` of each prompt, of PROMPT tokens or of `length`."""
    batch, began = requests(prompts, length or PROMPT, tokens), time.perf_counter()
    groups = engine.generate(batch)
    seconds = time.perf_counter() - began
    if {len(c.token_ids) for group in groups for c in group} != {tokens}:
        sys.exit("a completion ended early")
    return seconds


def rows_of(case: str, found: dict[str, dict]) -> list[dict]:
    """Rows of FP8 against BF16, and of each engine's step against its lower bound if every step decodes all
    completions."""
    fp8, bf16 = found["fp8"], found["bf16"]
    rows = [row(case, "rollout", "tokens/s", fp8["tokens/s"], bf16["tokens/s"], "BF16 vLLM, same run")]
    return rows + [row(f"{case}, {name}", "decode step", "ms", f["step, ms"], f["floor, ms"],
                       "bytes at 4.1 TB/s", True)
                   for name, f in found.items() if f["at once"] == f["completions"]]


if __name__ == "__main__":
    main()
