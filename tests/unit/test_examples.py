"""Every example runs as it stands, in a process of its own (but those with vLLM, which takes long to import:
they share one), and shows what it promises."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# tests/bridges/test_swap_the_learner.py and test_tunix_vllm.py are the fast forms
ON_VLLM_MARKS = (pytest.mark.slow, pytest.mark.skipif(not importlib.util.find_spec("vllm"),
                                                      reason="vLLM is not installed"))
# each with what it prints before a number that must grow, or None where only its end is tested
RUNS = [
    pytest.param("losses_in_your_loop.py", "reward", id="losses_in_your_loop"),
    pytest.param("own_reward.py", None, id="own_reward", marks=pytest.mark.slow),
    pytest.param("gsm8k_end_to_end.py", None, id="gsm8k_end_to_end", marks=pytest.mark.slow),
    pytest.param("torch_learner_on_vllm.py", "reward", id="torch_learner_on_vllm", marks=ON_VLLM_MARKS),
    pytest.param("jax_learner_on_vllm.py", "reward", id="jax_learner_on_vllm", marks=ON_VLLM_MARKS),
    pytest.param("tunix_learner_on_vllm.py", "reward", id="tunix_learner_on_vllm", marks=ON_VLLM_MARKS),
]
ON_VLLM = ("torch_learner_on_vllm.py", "jax_learner_on_vllm.py", "tunix_learner_on_vllm.py")
ONE_AFTER_THE_OTHER = """
import runpy, sys
sys.path.insert(0, "examples")
for name in sys.argv[1:]:
    print("example", name, flush=True)
    runpy.run_path(f"examples/{name}", run_name="__main__")
"""


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=EXAMPLES.parent,
                          env=os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def said_on_vllm() -> dict[str, str]:
    """What each example with vLLM has said."""
    parts = re.split(r"^example (\S+)\n", run("-c", ONE_AFTER_THE_OTHER, *ON_VLLM), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("name, grows", RUNS)
def test_an_example_runs(name, grows, request):
    out = request.getfixturevalue("said_on_vllm")[name] if name in ON_VLLM else run(f"examples/{name}")
    if grows:
        numbers = [float(x) for x in re.findall(rf"{grows} ([\d.]+)", out)]
        assert len(numbers) > 3 and numbers[-1] > numbers[0] + 0.1, out
        if name.startswith("tunix"):  # ten steps; in float32 both sides give the same log-probabilities
            gaps = [float(x) for x in re.findall(r"largest mismatch (\S+) nats", out)]
            assert len(gaps) == 10 and max(gaps) < 1e-5, out
    elif name == "own_reward.py":
        assert re.search(r"mean reward of each step: 0\.\d+ 0\.\d+", out), out
    else:
        shares = re.findall(r"step \d: (\d\.\d+) of the held-out problems", out)
        assert len(shares) == 2 and float(shares[0]) > 0, out


@pytest.mark.parametrize("name", ON_VLLM)
def test_without_vllm_an_example_says_so(name):
    code = "import importlib.util as u, runpy; u.find_spec = lambda *_: None"
    words = [sys.executable, "-c", f"{code}; runpy.run_path('examples/{name}')"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=EXAMPLES.parent)
    assert "skipped: vLLM is not installed" in done.stderr


def test_the_glue_of_a_foreign_learner_is_at_most_25_lines():
    text = (EXAMPLES / "tunix_learner_on_vllm.py").read_text(encoding="utf-8")
    [glue] = re.findall(r"^# ---- the glue\n(.*?)^# ---- the end", text, re.S | re.M)
    assert 5 < len([line for line in glue.splitlines() if line.strip()]) <= 25


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short_and_says_what_it_is(path):
    text = path.read_text(encoding="utf-8")
    assert text.startswith('"""') and len(text.splitlines()) <= 60
