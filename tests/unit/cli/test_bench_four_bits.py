"""`jaxfp8rl bench four_bits`: its programs at small sizes, what it says of a part that fails and, slowly, the
command from its arguments to its JSON on a CPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import four_bits as bench
from jaxfp8rl.models.packed_config import FORMS

TINY = ["--shape", "SmolLM2-135M", "--layers", "1", "--forms", "int4", "--tokens", "32", "--rounds", "1",
        "--rows", "2", "--new-tokens", "4"]


@pytest.mark.parametrize("form", FORMS)
def test_the_products_are_those_of_the_numbers_that_numpy_decodes(form):
    made = bench.programs_of(form, 64, 128, 16)
    run = lambda name: np.asarray(made[name][0](*made[name][1]), np.float32)
    packed, scale, *divisor = bench.random_codes(form, 64, 128)
    weight = bench.decoded(form, packed, scale).astype(np.float32) / (divisor[0] if divisor else 1)
    x, dy = (np.asarray(made["dgrad"][1][i], np.float32) for i in (0, 2))
    for found, want in ((run("product"), x @ weight.T), (run("dgrad"), dy @ weight)):
        assert np.linalg.norm(found - want) < 0.004 * np.linalg.norm(want)
    assert bench.differing(form, made["decode"][0], 128) == 0
    off = lambda fields: made["decode"][0](fields._replace(packed=fields.packed ^ 1))
    assert bench.differing(form, off, 128) > 8000


def command(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, bench.__file__, *words], capture_output=True, text=True)


def test_a_part_that_takes_too_long_is_named_and_the_file_is_written(tmp_path):
    done = command("--parts", "product", "--seconds", "0", *TINY, "--out", str(tmp_path / "x.json"))
    assert "product all: killed after its seconds" in done.stdout, done.stderr
    assert done.returncode == 1 and done.stderr.endswith("failed, or took longer than its "
                                                         "--seconds: product\n")
    assert json.loads((tmp_path / "x.json").read_text())["failed"] == ["product"]


@pytest.mark.slow
def test_the_command_on_a_cpu(tmp_path):
    parts = ["product"] + (["decode"] if importlib.util.find_spec("vllm") else [])
    done = command("--parts", *parts, *TINY, "--yardsticks", "bf16", "--out", str(tmp_path / "x.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["name"] == "four_bits" and not found["failed"]
    differing = [r for r in found["rows"] if r["metric"] == "numbers that differ"]
    assert len(differing) == 3 + len(parts) and not any(r["ours"] for r in differing)
    if "decode" in parts:
        assert found["each"]["decode, int4"]["kernels"] == ["CPUWNA16LinearKernel"]
        assert any(r["unit"] == "tokens/s" and r["ratio"] > 0 for r in found["rows"])
