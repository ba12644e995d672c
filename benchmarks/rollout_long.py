"""Long answers by vLLM, FP8 weights and cache against BF16, in the memory that a learner leaves: Qwen3
shapes, random weights, CUDA graphs.

    jaxfp8rl bench rollout_long [--size 8b] [--memory 56] [--new-tokens 16384 20480] [--prompts 64]

Both engines get the same memory for weights and cache, so FP8 holds about twice as many sequences at once, or
all of --prompts. A whole rollout of 20,480 tokens takes minutes, so a step is measured at --depths places on
the way: sequences that are so long already decode WINDOW tokens more. Their prompts are in the prefix cache
by then, and the time of a shorter window is taken off, so that a prompt and a start cost nothing. Between the
places a step's time is interpolated. A rate is that of a full batch from the first token to the last: no
sequence waits, none ends early, and the first prompts are not counted.

Each engine has its own process and gets its weights by a publish. --fp8-kernel native needs no nvcc. Other
cases of the file stay in it.

Needs a GPU and vLLM.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import arguments, row, size_of, write
from benchmarks.rollout import PROMPT, generate, measured, running

WINDOW, SHORT = 128, 16  # tokens


def main() -> None:
    parser = arguments(__doc__, "rollout_long")
    parser.add_argument("--new-tokens", type=int, nargs="+", default=[16384, 20480],
                        help="lengths of completions: %(default)s")
    parser.add_argument("--prompts", type=int, default=64, help="sequences at once at the most: %(default)s")
    parser.add_argument("--memory", type=float, default=56,
                        help="GB of weights and cache together: %(default)s")
    parser.add_argument("--depths", type=int, default=6, help="places that are measured: %(default)s")
    args, found = measured(parser, measure, __file__)
    case = f"Qwen3-{size_of(args)} in {args.memory:g} GB"
    rows, each = others(args.out, case)
    write(args.out, "rollout_long", [*rows, *rows_of(case, args.new_tokens, found)], args.plot,
          each=each | {case: found})


def others(out: Path, case: str) -> tuple[list[dict], dict[str, Any]]:
    """(rows, what each engine said) of the file's other cases."""
    earlier = json.loads(out.read_text()) if out.exists() else {"rows": [], "each": {}}
    each = {name: found for name, found in earlier["each"].items() if name != case}
    return [r for r in earlier["rows"] if r["case"].partition(",")[0] in each], each


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the engine's start, its chosen settings, the sequences at once, and ms of a decode step at
    each depth: tokens after the prompt."""
    began, longest = time.perf_counter(), max(args.new_tokens)
    with running(name, args, args.prompts, PROMPT + longest, args.memory) as r:
        generate(r.engine, r.fit, SHORT)  # the remaining compilation
        start, steps = time.perf_counter() - began, {}
        for depth in np.linspace(0, longest - SHORT - WINDOW, args.depths).astype(int).tolist():
            steps[depth + SHORT + WINDOW // 2] = ms = step_ms(r.engine, r.fit, PROMPT + depth)
            print(f"{name}: {r.fit} sequences of {depth:,} tokens: {ms:.2f} ms a step", flush=True)
    return {"start, s": start, **r.chosen, "at once": r.fit, "step, ms": steps}


def step_ms(engine: Any, count: int, length: int) -> float:
    """Ms of a decode step of `count` sequences that begin with prompts of `length` tokens."""
    generate(engine, count, 1, length)  # puts the prompts into the prefix cache
    short, long = (generate(engine, count, tokens, length) for tokens in (SHORT, SHORT + WINDOW))
    return 1e3 * (long - short) / WINDOW


def mean_step(steps: Mapping[Any, float], length: int) -> float:
    """The mean ms of the steps from the first token to `length`, from those at some depths."""
    depths = sorted(map(int, steps))
    ms = [steps[d] if d in steps else steps[str(d)] for d in depths]  # JSON's keys are text
    return float(np.interp(np.arange(length), depths, ms).mean())


def rows_of(case: str, lengths: Sequence[int], found: Mapping[str, dict]) -> list[dict]:
    """For each length of completions, tokens a second of FP8 against BF16; and the sequences at once."""
    fp8, bf16 = found["fp8"], found["bf16"]
    rows = [row(f"{case}, sequences of {max(lengths):,} tokens", "at once", "", fp8["at once"],
                bf16["at once"], "BF16 vLLM, same run")]
    for length in lengths:
        means = {name: mean_step(f["step, ms"], length) for name, f in found.items()}
        rate = {name: 1e3 * f["at once"] / means[name] for name, f in found.items()}
        rows.append(row(f"{case}, completions of {length:,} tokens", "rollout", "tokens/s", rate["fp8"],
                        rate["bf16"], "BF16 vLLM, same run"))
    return rows


if __name__ == "__main__":
    main()
