"""Settings for every test: CPU by default, no network, few hypothesis examples without deadlines."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
import tempfile

# set before anything imports jax; tests/gpu runs with JAX_PLATFORMS=cuda
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"
# The simulator of GPU kernels keeps a thread of JAX's CPU client busy for each simulated thread that waits at
# a barrier. If the client has fewer threads (two on a machine with two cores), a simulated kernel can wait
# forever. The client reads this when it is created: at the first array that a module of tests makes.
os.environ.setdefault("PJRT_NPROC", "16")
if os.environ["JAX_PLATFORMS"] == "cpu" and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # What a module or a process has compiled no other compiles again: pytest's workers and the tests'
    # children inherit this.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jaxfp8rl-compiled-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

if sys.dont_write_bytecode:
    # Where Python writes no bytecode beside the packages, each of the tests' children would take seconds to
    # compile what it imports.
    sys.dont_write_bytecode, sys.pycache_prefix = False, tempfile.mkdtemp(prefix="jaxfp8rl-bytecode-")
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    atexit.register(shutil.rmtree, sys.pycache_prefix, ignore_errors=True)

# Most of the time to compile a small program goes to a pipeline of MLIR passes, set up anew for each of its
# fusions. XLA's older emitters take half as long for all of it, a quarter under `quick_compile`.
OLDER_EMITTERS = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
# XLA cuts a program in 32 parts and compiles them side by side. Each part costs time of its own: the whole
# takes twice as long under `quick_compile`, a tenth longer otherwise, and two workers on two cores gain
# nothing by it.
IN_ONE_PART = "--xla_cpu_parallel_codegen_split_count=1"
if os.environ["JAX_PLATFORMS"] == "cpu" and OLDER_EMITTERS not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {OLDER_EMITTERS} {IN_ONE_PART}".strip()

import pytest
from hypothesis import HealthCheck, settings

for name, examples in {"default": 8, "thorough": 60}.items():
    settings.register_profile(name, max_examples=examples, deadline=None,
                              suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


LONG_FILES = (  # a worker takes whole files; the longest come first, so that both workers finish together
    "e2e/test_train.py", "unit/test_examples.py", "training/test_old_policies.py",
    "distributed/test_sharding.py", "bridges/test_vllm.py", "e2e/test_processes.py",
    "e2e/test_train_stops.py",
    "faults/test_run_faults.py", "bridges/test_one_copy.py", "bridges/test_moe_vllm.py",
    "models/test_gguf_import.py", "kernels/test_sm90_attention.py",
)


def pytest_collection_modifyitems(items):
    order = {name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: order.get("/".join(item.path.parts[-2:]), len(order)))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Imports leave a million objects that stay: no garbage collection goes through them, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="module")
def quick_compile():
    """For a module whose tests compile many large programs and run each only a few times: skip the compiler's
    expensive passes. Such programs round differently, so none is shared with modules before or after this
    one."""
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
    jax.clear_caches()


@pytest.fixture(scope="module")
def quick_children(quick_compile):
    """The processes that a module starts compile as quickly as the module, and round the same way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        yield
