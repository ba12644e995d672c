"""The simulator of GPU kernels prints races: a test that shows one fails.

With SM90A, if requirements/sm90a.txt is installed (`make sm90a`), kernels that a test lowers for CUDA are
also compiled.
"""

from __future__ import annotations

import os
from pathlib import Path

import jax
import pytest

SM90A = os.environ.get("SM90A")
# Bytes, at the most: dk and dv (24 to 28 with the head counts of today's models), decode attention with pages
# of two tiles (else 4, and 56 with heads of 256), the logits' products.
SPILLED = {"test_sm90_attention": 28, "test_sm90_decode_attention": 92, "test_sm90_logprob": 144}
SPILLED_OF_256 = 460  # of heads of 256: dq holds a sum of 128 registers a thread
MORE_OF_TREES = 16  # where the gap of a walk is in registers, too
found: dict[str, list] = {}  # test -> its kernels


@pytest.fixture(autouse=True)
def no_races(capfd):
    """Assert that the simulated kernels of a test have no races."""
    yield
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.fixture(autouse=bool(SM90A))
def machine_code(request, monkeypatch):
    """Assert that no kernel but those of SPILLED spills, that ptxas serialises no tensor-core products, that
    no copy may overtake a read, and that no operand of a product is written over."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "sm90a")
    from machine_code import kernels_of, overtaken_reads, overwritten_operands

    lower, kernels = jax.stages.Traced.lower, found.setdefault(request.node.nodeid, [])

    def lower_and_compile(self, *, lowering_platforms=None, **options):
        lowered = lower(self, lowering_platforms=lowering_platforms, **options)
        if lowering_platforms == ("cuda",):
            kernels.extend(kernels_of(lowered, Path(SM90A).resolve()))
        return lowered

    monkeypatch.setattr(jax.stages.Traced, "lower", lower_and_compile)
    yield
    allowed = SPILLED_OF_256 if "[256-" in request.node.name else SPILLED.get(request.path.stem, 0)
    allowed += MORE_OF_TREES * ("trees" in request.node.name)
    assert not [str(k) for k in kernels if k.spilled > allowed or k.warnings]
    assert not [read for k in kernels for read in overtaken_reads(k.sass)]
    assert not [product for k in kernels for product in overwritten_operands(k.sass)]


def pytest_terminal_summary(terminalreporter):
    for test, kernels in found.items():
        for kernel in kernels:
            terminalreporter.write_line(f"{kernel}  {test}")
