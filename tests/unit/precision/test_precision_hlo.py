"""What a learner with the Hopper kernels is lowered to: nothing between the kernels makes numbers of codes,
or turns activations.

On a GPU tests/gpu/test_hlo.py asks the same of what is compiled.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter

import jax
import pytest
from jaxlib.cpu import _lapack  # noqa: E402
from layer_program import KERNELS, PRECISION, TURNED, WEIGHTS, gradients, kernels, shapes  # noqa: E402

KERNEL_CALLS = "forward", "blockwise_matmul", "quantize_rows"  # what is called once a kernel


@pytest.fixture(scope="module")
def lowered():
    return jax.jit(gradients).trace(*shapes()).lower(lowering_platforms=("cuda",))


@pytest.fixture(scope="module")
def text(lowered) -> str:
    return lowered.as_text()


@pytest.mark.parametrize(
    "remat, again", [("layer", {"forward": 1, "blockwise_matmul": 5}), ("products", {"blockwise_matmul": 5}),
                     ("mlp", {"blockwise_matmul": 1})]
)
def test_what_is_kept_is_not_computed_again(remat, again):
    """Attention's forward and the products, by what autodiff makes: the MLP's second product is never needed
    again, and gate and up are one."""
    precision = dataclasses.replace(PRECISION, attention="pallas")
    count = lambda remat: calls(
        jax.make_jaxpr(functools.partial(gradients, precision=precision, remat=remat))(*shapes()).jaxpr)
    assert count(remat) - count("none") == again | {
        "quantize_rows": {"layer": 5, "products": 5, "mlp": 1}[remat]}


def calls(jaxpr) -> Counter:
    """Of functions by name, in all that a jaxpr holds."""
    found, is_program = Counter(), lambda x: hasattr(x, "jaxpr") or hasattr(x, "eqns")
    for eqn in jaxpr.eqns:
        found.update([eqn.params["name"]] if eqn.primitive.name == "jit" else [])
        for inner in filter(is_program, jax.tree.leaves(list(eqn.params.values()), is_leaf=is_program)):
            found += calls(getattr(inner, "jaxpr", inner))
    return Counter({name: n for name, n in found.items() if name in KERNEL_CALLS})


def test_codes_never_become_numbers(text):
    assert "f8E4M3FN" in text
    assert not re.findall(r"stablehlo\.convert .*tensor<[\dx]*xf8\w+>\) ->", text)
    assert not re.findall(rf"-> tensor<(?:{'|'.join(f'{n}x{k}' for n, k in set(WEIGHTS))})xf32>",
                          text), "a weight in float32"


def test_codes_are_turned_for_dgrad_alone(text):
    """Both operands of a product lie along its contraction: dgrad's weight is turned. Activations and
    gradients are quantised both ways."""
    turned = re.findall(r"stablehlo\.transpose .*\(tensor<(\d+)x(\d+)xf8", text)
    assert Counter((int(n), int(k)) for n, k in turned) == Counter(TURNED)


def test_an_input_is_quantised_once_for_all_who_read_it(lowered):
    """By XLA itself, for a CPU, where anything may stand for the kernels' custom call: it is compiled and
    never run."""
    jax.ffi.register_ffi_target("mosaic_gpu_v2", _lapack.registrations()["lapack_sgeqrf_ffi"], platform="cpu")
    assert len(kernels(lowered.compile().as_text())) == KERNELS


def test_scales_of_activations_go_from_quantiser_to_product_as_they_are(lowered):
    """The transposes that the quantiser's and the product's interfaces show meet and vanish; those of
    weights' scales stay."""
    text = lowered.compile().as_text()
    turned = re.findall(r" = f32\[(\d+),(\d+)\]\S* (?:transpose|copy)\(", text)
    assert {(int(a), int(b)) for a, b in turned} <= {(k // 128, n // 128) for n, k in TURNED}
