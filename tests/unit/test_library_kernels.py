"""pallas_kernels as a library: what it needs, what it offers, and its examples."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import pallas_kernels
from benchmarks.processes import printed

ROOT = Path(__file__).resolve().parents[2]
FOREIGN = (
    "flax",
    "chex",
    "hypothesis",
    "torch",
    "jaxfp8rl",
    "bridges",
    "orbax",
    "optax",
    "vllm",
    "transformers",
)


def python(code: str, *args: str) -> str:
    """What a process of its own prints; it imports from this checkout alone what it imports of ours."""
    return printed(code, *args, PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu", JAX_DISABLE_MOST_OPTIMIZATIONS="1")


EVERY_NAME = """
import sys
sys.modules |= dict.fromkeys(sys.argv[1:])  # None: importing it is an ImportError
import pallas_kernels
assert "jax" not in sys.modules, "the package alone loads no JAX: reading a config imports it"
import jax, jax.numpy as jnp
from pallas_kernels import *

one = lambda *shape: jnp.ones(shape, jnp.bfloat16)
x, w, ids = one(128, 256), one(384, 256), jnp.ones(128, jnp.int32)
how = {"backend": "reference"}
rows, blocks, tokens = quantize_rows(x, **how), quantize_blocks(w, **how), quantize_tokens(x, **how)
plan = plan_groups(jnp.array([100, 28]), 128)
experts = [a[None].repeat(2, 0) for a in blocks]
results = {
    "quantize_rows": rows, "quantize_blocks": blocks, "quantize_tokens": tokens,
    "dequantize_rows": dequantize_rows(*rows), "dequantize_blocks": dequantize_blocks(*blocks),
    "blockwise_matmul": blockwise_matmul(*rows, *blocks, **how), "wgrad": wgrad(*tokens, *tokens, **how),
    "fp8_dot_general": jax.grad(lambda w: fp8_dot_general(x, w, (((1,), (1,)), ((), ())), **how).sum())(w),
    "fp8_linear": fp8_linear(x, w, **how),
    "plan_groups": plan.starts, "pad_rows": pad_rows(x, plan),
    "unpad_rows": unpad_rows(pad_rows(x, plan), plan),
    "grouped_matmul": grouped_matmul(*quantize_rows(pad_rows(x, plan), **how), *experts, plan, **how),
    "packed_attention": packed_attention(*[one(128, 2, 64)] * 3, ids, **how),
    "paged_decode_attention": paged_decode_attention(
        one(1, 2, 64), *[one(2, 8, 1, 64)] * 2, jnp.array([[0, 1]], jnp.int32), jnp.array([9], jnp.int32),
        **how),
    "linear_logprobs": linear_logprobs(x, w, ids, **how),
}
assert set(results) == set(pallas_kernels.__all__), set(results) ^ set(pallas_kernels.__all__)
jax.block_until_ready(results)
loaded = {name.split(".")[0] for name, module in sys.modules.items() if module}
print(len(results), *sorted(loaded & set(sys.argv[1:])))
"""


def test_every_name_works_where_only_jax_is_installed():
    assert python(EVERY_NAME, *FOREIGN).split() == [str(len(pallas_kernels.__all__))]


def test_the_testing_helpers_say_what_they_need():
    code = "import sys; sys.modules['chex'] = None\ntry: import pallas_kernels.testing\n"
    assert "chex" in python(code + "except ImportError as e: print(e)")


@pytest.mark.parametrize(
    "first", ["pallas_kernels", "pallas_kernels.grouped_matmul", "pallas_kernels.grouped_matmul.api"]
)
def test_a_name_is_a_function_whoever_loads_its_folder_first(first):
    """Two functions are named as their folders."""
    lines = (
        f"import {first}",
        "from pallas_kernels import blockwise_matmul, grouped_matmul",
        "from pallas_kernels.grouped_matmul import api, groups",
        "from pallas_kernels.blockwise_matmul import api as products",
        "import pallas_kernels.blockwise_matmul.tiles",
        "assert grouped_matmul is api.grouped_matmul is pallas_kernels.grouped_matmul",
        "assert blockwise_matmul is products.blockwise_matmul is pallas_kernels.blockwise_matmul",
    )
    python("\n".join(lines))


def test_what_there_is_to_be_known_of_every_function():
    """Its docstring tells shapes and dtypes, what it raises and where its formula is from; what has a kernel
    has `backend`."""
    assert pallas_kernels.__all__ == sorted(pallas_kernels.__all__) and set(pallas_kernels.__all__) <= set(
        dir(pallas_kernels)
    )
    for name in pallas_kernels.__all__:
        f = getattr(pallas_kernels, name)
        for told in (
            r"\[[^\]]*[A-Z][^\]]*\]",
            "dtype|float32|int32",
            "Raises|raises|what it raises",
            "Source|source",
        ):
            assert re.search(told, f.__doc__), (name, told)
        by_choice = name not in (
            "plan_groups",
            "pad_rows",
            "unpad_rows",
            "dequantize_rows",
            "dequantize_blocks",
        )
        assert ("backend" in inspect.signature(f).parameters) == by_choice, name
        assert name in pallas_kernels.__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'fp4'"):
        pallas_kernels.fp4  # noqa: B018


def test_the_example_of_the_docstring_runs():
    code = "\n".join(line[4:] for line in pallas_kernels.__doc__.splitlines() if line.startswith("    "))
    code = code[: code.index("fp8_dot_general,")]
    python(f"{code}\nassert y.shape == (256, 1024) and dw.shape == w.shape and (dw != 0).all()")


@pytest.mark.parametrize("name", ["fp8_linear_in_nnx.py", "kernels_alone.py"])
def test_examples_run_and_are_short(name):
    source = (ROOT / "examples" / name).read_text()
    assert len(source.splitlines()) <= {"kernels_alone.py": 25}.get(name, 60)
    out = python(
        "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')", str(ROOT / "examples" / name)
    )
    assert "off by" in out or "same" in out
