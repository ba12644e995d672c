"""compute-sanitizer's racecheck over the kernels of `one_kernel.py`, all at once, one of which has a race for
it to find.

It does, with `--racecheck-report all` alone. In another the copy engine writes where is still read: that it
does not see, and so its word is of what threads write (the simulator sees both: tests/kernels).
"""

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
    pytest.mark.skipif(not shutil.which("compute-sanitizer"),
                       reason="needs compute-sanitizer, of the CUDA toolkit"),
]


def test_racecheck_finds_the_race_of_threads_that_is_there_and_no_other():
    names, said = run(sys.executable, "-P", SCRIPT)
    names = names.splitlines()
    assert names, said
    with ThreadPoolExecutor(8) as pool:
        hazards = dict(zip(names, pool.map(racecheck, names)))
    print(hazards)
    assert {name for name, count in hazards.items() if count} == {"a race"}


def racecheck(name: str) -> int:
    """Hazards found in a kernel; a RuntimeError where it did not run to its end."""
    tool = ("compute-sanitizer", "--tool", "racecheck", "--racecheck-report", "all",
            "--kernel-name", "kns=mosaic")
    said = "".join(run(*tool, sys.executable, "-P", SCRIPT, name))
    if f"{name} ran" not in said:
        raise RuntimeError(said[-4000:])
    return int(re.search(r"RACECHECK SUMMARY: (\d+) hazard", said)[1])


def run(*command: object) -> tuple[str, str]:
    path = os.pathsep.join(filter(None, (str(SCRIPT.parents[2]), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONPATH": path}
    done = subprocess.run(list(map(str, command)), env=environment, stdin=subprocess.DEVNULL, text=True,
                          capture_output=True, timeout=300)
    return done.stdout, done.stderr
