"""The numbers of docs/measurements.md are those of benchmarks/results, to the last digit it prints."""

from __future__ import annotations

import functools
import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = " ".join((ROOT / "docs/measurements.md").read_text(encoding="utf-8").split())
START, END = "held-out reward, start", "held-out reward, end"
MISMATCH = "mismatch/token_mult_prob_error, median"
LARGEST = "mismatch/token_mult_prob_error, max"


@functools.cache
def result(name: str) -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def value(name: str, case: str, metric: str, field: str = "ours", beside: str = "", unit: str = "") -> float:
    """Of the one row whose case ends with `case`, whose metric is `metric` and whose yardstick `beside` is
    part of."""
    rows = [r for r in result(name)["rows"] if r["case"].endswith(case) and r["metric"] == metric]
    found = {r[field] for r in rows if beside in r["yardstick_name"] and unit in ("", r["unit"])}
    assert len(found) == 1, (name, case, metric, [r["case"] for r in rows])
    return found.pop()


def demo(kind: str, metric: str) -> list[float]:
    """Over the three seeds on an H200: "bf16" stands in the rows of FP8 as their yardstick."""
    return [value("demo_h200", f"demo/fp8/seed{s}", metric, "yardstick" if kind == "bf16" else "ours")
            for s in range(3)]


def cpu_demo(field: str) -> list[float]:
    """Over three seeds on a CPU: held-out reward at the start and at the end, each from and to; mismatch:
    median, largest."""
    start, end, median, largest = (
        [value("demo_cpu", f"demo/seed{s}", m, field) for s in range(3)]
        for m in (START, END, MISMATCH, LARGEST)
    )
    return [*span(start), *span(end), statistics.median(median), max(largest)]


def span(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def smollm(field: str, run: str = "fp8") -> list[float]:
    """Held-out reward after the warm start and at the end, and the mismatch; BF16 is the yardstick of both
    runs."""
    return [value("demo_h200", f"smollm2/{run}", metric, field) for metric in (START, END, MISMATCH)]


def grpo_k3(run: str) -> float:
    return statistics.mean(s["mismatch/k3"] for s in result("grpo")["runs"][run]["steps"][1:])


def wgrad() -> list[float]:
    return [r["ratio"] for r in result("gemm")["rows"] if r["yardstick_name"] == CUBLAS
            and "wgrad" in r["case"]]


def quantiser(variant: str, shape: str = "") -> float:
    """As a share of a copy's bandwidth."""
    return value("quantize", f"{shape} bfloat16", variant, "ratio", beside="copy")


def gemm(beside: str, run: str = "gemm") -> list[float]:
    """The ratios of all shapes, wgrad apart."""
    return [r["ratio"] for r in result(run)["rows"] if r["yardstick_name"] == beside
            and "wgrad" not in r["case"]]


def again(run: str) -> float:
    return value("linear_again", f"layer's linears, 16384 tokens, fp8_unified, {run}", "forward and backward",
                 "ratio")


CUBLAS = "cuBLASLt FP8 blockwise"
LINEAR = functools.partial(value, "linear", "layer's linears, 16384 tokens, fp8_unified",
                           "forward and backward")
K3 = functools.partial(value, "mismatch", metric="mismatch/k3")
LOGPROB = functools.partial(value, "logprob", "4096, kernel, forward and backward")
GRPO = functools.partial(value, "grpo", "64 completions of up to 4096 tokens, fp8")
UPDATE = functools.partial(value, "step_8b", "fp8_unified", "update")
LONG = functools.partial(value, "rollout", "64 completions of 8192 tokens", "rollout")
BESIDE = functools.partial(value, "rollout_beside", "in 80 GB, 64 completions of 8192 tokens", "rollout")
UNIFIED = functools.partial(value, "publish", "Qwen3-8B fp8_unified", "publish + proof")
ROLLOUT = functools.partial(value, "publish", "Qwen3-8B fp8_rollout", "quantise + publish + proof")
EXPERTS = functools.partial(value, "publish_moe", "30B-A3B fp8_unified", "publish + proof")
SCALED = lambda field, by=1.0: [value("scaling", f"{size}, 4 x 16384 tokens, 4 GPUs", "update", field) / by
                                for size in ("1.7B", "8B")]
N = r"([\d.]+(?:e-\d+)?)"
# (what the page says, N where a number stands; what gives the numbers)
CLAIMS = [
    (rf"FP8 KV, 3 seeds \| 2 CPU cores \| {N} to {N} -> {N} to {N} \| {N}, {N} at most",
     lambda: cpu_demo("yardstick")),
    (rf"no AMX\), 3 seeds \| 2 CPU cores \| {N} to {N} -> {N} to {N} \| {N}, {N} at most",
     lambda: cpu_demo("ours")),
    (rf"BF16, CUDA graphs, 3 seeds \| H200 \| {N} to {N} -> {N} \| {N} to {N}",
     lambda: [*span(demo("bf16", START)), min(demo("bf16", END)), *span(demo("bf16", MISMATCH))]),
    (rf"FP8 weights and KV, CUDA graphs, 3 seeds \| H200 \| {N} to {N} -> {N} to {N} \| {N}",
     lambda: [*span(demo("fp8", START)), *span(demo("fp8", END)), statistics.median(demo("fp8", MISMATCH))]),
    (rf"one seed, BF16 \| H200 \| {N} -> {N} \| {N} ", lambda: smollm("yardstick")),
    (rf"the same, FP8 where its shapes allow \| H200 \| {N} -> {N} \| {N} ", lambda: smollm("ours")),
    (rf"the same, and FP8 KV \| H200 \| {N} -> {N} \| {N} ", lambda: smollm("ours", "fp8-kv8")),
    (rf"and a BF16 cache {N}% of the tokens have the same log-probability",
     lambda: [100 * (1 - value("mirror", "fp8_unified, BF16 KV: mirrored", "off by more than 1e-5"))]),
    (rf"\| BF16 cache \| {N} \| {N} \| {N} \|",
     lambda: [K3("fp8_unified, BF16 KV"), K3("fp8_rollout, BF16 KV"), K3("bf16, BF16 KV")]),
    (rf"\| FP8 cache \| {N} \| {N} \| {N} \|",
     lambda: [K3("fp8_unified, FP8 KV"), K3("fp8_rollout, FP8 KV"), K3("bf16, FP8 KV")]),
    (rf"over four GPUs.* \| {N} and {N} thousand tokens/s \| four times one GPU: {N} and {N} \| {N} and {N} ",
     lambda: [*SCALED("ours", 1e3), *SCALED("yardstick", 1e3), *SCALED("ratio")]),
    (rf"with an FP8 cache has {N}, and BF16 with a BF16 cache has {N} ",
     lambda: [grpo_k3("fp8"), grpo_k3("bf16")]),
    (rf"\| cuBLASLt blockwise; DeepGEMM \| {N}; {N} \(geometric means; {N} to {N}\) \| \[gemm\]",
     lambda: [*(statistics.geometric_mean(gemm(y)) for y in (CUBLAS, "DeepGEMM")),
              *span(gemm(CUBLAS) + gemm("DeepGEMM"))]),
    (rf"another run {N}; {N}: \[gemm_unrolled\]",
     lambda: [statistics.geometric_mean(gemm(y, "gemm_unrolled")) for y in (CUBLAS, "DeepGEMM")]),
    (rf"products of wgrad, the same \| Pallas \| cuBLASLt blockwise \| {N} to {N} \|", lambda: span(wgrad())),
    (rf"\| quantisers, 16,384 x 12,288 \| Pallas \| a copy's bandwidth \| {N} to {N} \|",
     lambda: span([quantiser(m, "16384 x 12288") for m in ("rows", "tokens", "rows and tokens", "blocks",
                                                           "blocks and transposed")])),
    (rf"with its backward inside \| Pallas \| a copy's bandwidth \| {N} to {N}; {N} \|",
     lambda: [*span([quantiser(f"SwiGLU, {m}") for m in ("rows", "rows and tokens")]),
              quantiser("SwiGLU backward, rows and tokens")]),
    (rf"1 to 64 rows, Qwen3-8B's linears \| Pallas \| XLA's bfloat16; DeepGEMM \| {N} to {N}; {N} to {N} \|",
     lambda: [*span(gemm("XLA bf16", "gemm_small")), *span(gemm("DeepGEMM", "gemm_small"))]),
    (rf"every quantisation included \| {N} ms \| XLA's bfloat16, {N} ms \| {N} \|",
     lambda: [LINEAR(), LINEAR("yardstick"), LINEAR("ratio")]),
    (rf"two runs before {N}, {N}: \[linear_again\]", lambda: [again("run 1"), again("run 2")]),
    (rf"16,384 tokens, forward and backward \| {N} ms, {N} GB \| the four bare products \| {N} of",
     lambda: [LOGPROB("time", beside="four products"), LOGPROB("extra memory") * 1.073741824,
              1 / LOGPROB("time", "ratio", beside="four products")]),
    (rf"update alone, 8B, [^|]* \| {N} s \| BF16, {N} s \({N}% of its peak\) \| {N} \|",
     lambda: [UPDATE() / 1e3, UPDATE(field="yardstick") / 1e3, 100 * value("step_8b", ", bf16", "MFU"),
              UPDATE(field="ratio")]),
    (rf"two steps \| {N} s: rollout {N}, scoring {N}, update {N}, publish {N} \| BF16, {N} s, [^|]* \| {N}; "
     rf"by tokens {N} \|",
     lambda: [*(GRPO(metric=m, unit="s") for m in ("step", "rollout", "score", "update", "publish")),
              GRPO(metric="step", field="yardstick", unit="s"),
              *(GRPO(metric="step", field="ratio", unit=unit) for unit in ("s", "tokens/s"))]),
    (rf"memory in that run \| {N} GB [^|]* \| [^|]* \| within {N}% \|",
     lambda: [GRPO(metric="device, learner and engine"),
              round(100 * (GRPO(metric="peak of the learner", field="ratio") - 1))]),
    (rf"completions of 8,192 tokens \| {N} thousand tokens/s \| BF16, {N} \| {N} \|",
     lambda: [LONG("ours") / 1e3, LONG("yardstick") / 1e3, LONG("ratio")]),
    (rf"room for 50 at once \| {N} thousand tokens/s \| BF16, {N} \| {N} \|",
     lambda: [BESIDE("ours") / 1e3, BESIDE("yardstick") / 1e3, BESIDE("ratio")]),
    (rf"eight times as many are shared \| {N} ms \| the same sequences in plain rows, {N} ms \| {N} \|",
     lambda: [value("tree", "ratio 8, fp8_unified", "forward and backward", field)
              for field in ("ours", "yardstick", "ratio")]),
    (rf"Qwen3-30B-A3B, the learner's codes \| {N} ms \| vLLM's reload, no proof, {N} s \| {N} \|",
     lambda: [EXPERTS(), EXPERTS("yardstick") / 1e3, EXPERTS("ratio")]),
    (rf"Qwen3-8B, the learner's codes \| {N} ms \| vLLM's reload, no proof, {N} ms \| {N} \|",
     lambda: [UNIFIED(), UNIFIED("yardstick"), UNIFIED("ratio")]),
    (rf"quantised for the engine alone \| {N} ms \| vLLM's reload, no proof, {N} ms \| {N} \|",
     lambda: [ROLLOUT(), ROLLOUT("yardstick"), ROLLOUT("ratio")]),
]


def agrees(text: str, number: float) -> bool:
    """Whether `number`, rounded as `text` is, is `text`."""
    if "e" in text:
        return float(f"{number:.0e}") == float(text)
    return abs(float(text) - number) <= 0.5 * 10.0 ** -len(text.partition(".")[2]) + 1e-9


@pytest.mark.parametrize("pattern,numbers", CLAIMS, ids=[c[0][:40] for c in CLAIMS])
def test_a_number_of_the_page_is_the_benchmarks(pattern, numbers):
    found = re.search(pattern, PAGE)
    assert found, f"the page no longer says: {pattern}"
    wrong = [(text, number) for text, number in zip(found.groups(), numbers(), strict=True)
             if not agrees(text, number)]
    assert wrong == []


FRONT = [
    (rf"\*\*{N} ms\*\* \| a weight sync of Qwen3-8B .* vLLM's own reload takes {N} ms \|",
     lambda: [UNIFIED(), UNIFIED("yardstick")]),
    (rf"\*\*{N}x\*\* \| the linears of a Qwen3-8B layer", lambda: [LINEAR("ratio")]),
    (rf"\*\*{N}\*\* \| `mismatch/k3` .* {N} with FP8 rollout alone",
     lambda: [K3("fp8_unified, BF16 KV"), K3("fp8_rollout, BF16 KV")]),
    (rf"\*\*{N}x\*\* \| a whole step of Qwen3-1.7B's shape",
     lambda: [value("beside_trl", "Qwen3-1.7B, 64 x 2,048 tokens", "step", "ratio")]),
    (rf"it ends {N} below our BF16 \(95%: {N} below to {N} above\)",
     lambda: [-result("trl_learns")["difference"][0], -result("trl_learns")["difference"][1],
              result("trl_learns")["difference"][2]]),
]


@pytest.mark.parametrize("pattern,numbers", FRONT, ids=[c[0][:40] for c in FRONT])
def test_a_number_on_the_front_page_is_the_benchmarks(pattern, numbers):
    page = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    found = re.search(pattern, page)
    assert found, f"the README no longer says: {pattern}"
    assert all(agrees(text, number) for text, number in zip(found.groups(), numbers(), strict=True))


TRL = "beside_trl", "64 x 2,048 tokens"
SPEED = {  # a row of docs/performance.md, ours | beside | ratio -> (benchmark, case, metric)
    "rollout": ("grpo", ", fp8", "rollout"), "score": ("grpo", ", fp8", "score"),
    "update": ("grpo", ", fp8", "update"), "wake, publish, proof": ("grpo", ", fp8", "publish"),
    "step": ("grpo", ", fp8", "step"), "a step": (*TRL, "step"), "its rollout": (*TRL, "rollout"),
    "the rest of it": (*TRL, "step but its rollout"),
    "command to first update, less a rollout": (*TRL, "first update"),
}


@pytest.mark.parametrize("row", SPEED)
def test_a_row_of_the_page_on_speed_is_the_benchmarks(row):
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    found = re.search(rf"\| {row} \| {N} s[^|]*\| {N} s[^|]*\| \**{N}", page)
    assert found, f"docs/performance.md no longer has the row {row!r}"
    numbers = [value(*SPEED[row], field, unit="s") for field in ("ours", "yardstick", "ratio")]
    assert all(agrees(text, number) for text, number in zip(found.groups(), numbers, strict=True)), numbers


TREES = {"layer in FP8, forward": ("fp8_unified", "forward"),
         "layer in FP8, forward and backward": ("fp8_unified", "forward and backward"),
         "layer in BF16, forward and backward": ("bf16", "forward and backward"),
         "attention alone, forward and backward": ("attention", "forward and backward")}


@pytest.mark.parametrize("row", TREES)
def test_a_row_of_the_table_of_shared_prefixes_is_the_benchmarks(row):
    page, (part, metric) = (ROOT / "docs/turns.md").read_text(encoding="utf-8"), TREES[row]
    found = re.search(rf"\| {row} \| {N} \| {N} \| {N} \| {N} \| {N} \|", page)
    assert found, f"docs/turns.md no longer has the row {row!r}"
    numbers = [value("tree", f"ratio {ratio}, {part}", metric, "ratio")
               for ratio in ("1", "1.5", "2", "4", "8")]
    assert all(agrees(text, number) for text, number in zip(found.groups(), numbers, strict=True)), numbers
