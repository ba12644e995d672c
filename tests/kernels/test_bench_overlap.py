"""benchmarks/overlap.py needs a GPU; its programs are made here."""

from __future__ import annotations

import pytest

from benchmarks.overlap import CASES, lowered


@pytest.mark.parametrize("case", [CASES[0], CASES[-1], *(c for c in CASES if c.warpgroups == 3 and c.apart)],
                         ids=str)
def test_what_is_timed_lowers_for_cuda(case):
    assert "mosaic_gpu" in lowered(case).as_text()
