"""What XLA makes of a step's two programs, scoring and update, for an H200.

They compute one forward. Where XLA may fuse a sum with what the program makes of it, or let cuBLAS add a
residual to a product before it is rounded, they do it in two ways, and the ratio of an update at equal
weights is not 1 (in FP8 20% of an 8B model's tokens were clipped for it).
"""

from __future__ import annotations

import re

import pytest
from hopper import compiled, lowered

from benchmarks.four_bits import programs_of
from jaxfp8rl.models.packed_config import FORMS

# of these sizes each had a difference of its own
CASES = [("8b", "fp8_unified", 2048), ("8b", "bf16", 16384), ("30b-a3b", "fp8_unified", 2048)]
Computations = dict[str, list[str]]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def programs(request, compiled_step) -> dict[str, Computations]:
    size, recipe, tokens = request.param
    return {name: computations(program.as_text())
            for name, program in compiled_step(size, recipe, tokens, layers=2).items()}


def computations(text: str) -> Computations:
    """name -> its instructions."""
    found: Computations = {}
    for line in text.splitlines():
        if begins := re.match(r"(?:ENTRY )?%([\w.-]+) \(.*\{$", line):
            found[begins[1]] = lines = []
        elif line.startswith("  "):
            lines.append(line.strip())
    return found


def sums(program: Computations, scope: str) -> list[tuple[str, list[str]]]:
    """Computations in which what the forward has under that name is added up."""
    added = lambda line: " reduce(" in line and scope in line and "/transpose(" not in line
    return [(name, lines) for name, lines in program.items() if any(map(added, lines))]


def arithmetic(lines: list[str]) -> list[str]:
    """The instructions but for names and notes."""
    names: dict[str, str] = {}
    bare = [re.sub(r", (metadata|backend_config)=\{.*", "", line) for line in lines]
    bare = [re.sub(r"to_apply=%[\w.-]+", "", line) for line in bare]
    return [re.sub(r"%[\w.-]+", lambda m: names.setdefault(m[0], f"%{len(names)}"), line) for line in bare]


def test_a_sum_of_squares_is_a_kernel_of_its_own_and_the_same_in_both(programs):
    kinds = {}
    for name, program in programs.items():
        found = sums(program, "sum_of_squares")
        assert len(found) >= 4  # two norms of the stream, of queries and of keys
        for _, lines in found:
            assert re.search(r"ROOT %\S+ = f32\[[\d,]*\]\S* reduce\(", lines[-1]), "\n".join(lines)
            assert sum(" parameter(" in line for line in lines) <= 2, "\n".join(lines)
        called = re.compile(rf"calls=%({'|'.join(re.escape(computation) for computation, _ in found)})[,\s]")
        calls = [line for lines in program.values() for line in lines if called.search(line)]
        assert len(calls) >= len(found) and all("kind=kInput" in call for call in calls), calls
        kinds[name] = {"\n".join(arithmetic(lines)) for _, lines in found}
    assert kinds["score"] == kinds["update"]


def test_logits_are_added_up_alike_with_and_without_their_entropy(programs):
    """The scoring pass does not ask for it."""
    found = [{"\n".join(arithmetic(lines)) for _, lines in sums(p, "merged_statistics")}
             for p in programs.values()]
    assert found[0] and found[0] == found[1]


def test_a_product_is_rounded_before_anything_is_added_to_it(programs):
    """In the scoring pass, which is all forward. (FP8's are kernels.)"""
    lines = [line for lines in programs["score"].values() for line in lines]
    products = [line for line in lines if "__cublas$lt$matmul" in line]
    assert products or any("f8e4m3fn" in line for line in lines)
    assert all('"beta":0' in line and '"epilogue":"DEFAULT"' in line for line in products)


def test_the_update_runs_no_kernel_of_the_forward_twice(programs):
    """XLA can fuse a kernel with the writing of its result to what is kept for the backward pass, and run it
    again for the rest of the layer (jaxfp8rl/precision/jit.py)."""
    runs = lambda line: re.search(r'custom_call_target="(mosaic_gpu_v2|__cublas)',
                                  line) and "/transpose(" not in line
    counts = {name: sum(bool(runs(line)) for lines in p.values() for line in lines)
              for name, p in programs.items()}
    assert counts["update"] == counts["score"] > 5, counts


@pytest.mark.parametrize("form", FORMS)
def test_products_of_four_bits_keep_one_decoded_weight(form):
    """At Qwen3-32B's largest: forward and dgrad by cuBLAS, of one BF16 copy of the weight."""
    n, k, tokens = 25600, 5120, 4608
    for name, (program, given) in programs_of(form, n, k, tokens).items():
        made = compiled(lowered("h100", program, *given))
        text, memory = made.as_text(), made.memory_analysis()
        assert ("cublas" in text) == (name != "decode")
        if name in ("product", "dgrad"):
            assert 2 * n * k <= memory.temp_size_in_bytes < 2 * n * k + 4 * tokens * max(n, k) + 2**26, name
