"""No kernel races on shared memory: compute-sanitizer's racecheck over those of `one_kernel.py`, all at once."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("one_kernel.py")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not shutil.which("compute-sanitizer"), reason="needs compute-sanitizer, of the CUDA toolkit"),
]


def test_racecheck_finds_none_but_the_one_that_is_there():
    names = run(sys.executable, "-P", SCRIPT)[0].splitlines()
    with ThreadPoolExecutor(8) as pool:
        hazards = dict(zip(names, pool.map(racecheck, names)))
    assert hazards.pop("a race") > 0
    assert hazards == dict.fromkeys(hazards, 0)


def racecheck(name: str) -> int:
    """Hazards found in a kernel that ran to its end."""
    tool = "compute-sanitizer", "--tool", "racecheck", "--kernel-name", "kns=mosaic"
    said = "".join(run(*tool, sys.executable, "-P", SCRIPT, name))
    assert f"{name} ran" in said, said[-4000:]
    return int(re.search(r"RACECHECK SUMMARY: (\d+) hazard", said)[1])


def run(*command: object) -> tuple[str, str]:
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(list(map(str, command)), env=environment, stdin=subprocess.DEVNULL, text=True,
                          capture_output=True, timeout=300)  # fmt: skip
    return done.stdout, done.stderr
