"""Shared by every test: CPU unless told otherwise, no network, few and undeadlined hypothesis examples."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
import threading

# before anything imports jax; tests/gpu is run with JAX_PLATFORMS=cuda
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"
if os.environ["JAX_PLATFORMS"] == "cpu" and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # What a module or a process has compiled no other compiles again: pytest's workers and the tests'
    # children inherit this.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jaxfp8rl-compiled-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

import pytest
from hypothesis import HealthCheck, settings

for name, examples in {"default": 10, "thorough": 60}.items():
    settings.register_profile(name, max_examples=examples, deadline=None,
                              suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_collection_modifyitems(items):
    """A long file that would come last is first, so that two workers end together."""
    items.sort(key=lambda item: item.path.name != "test_train_step.py")


@pytest.fixture(scope="module")
def quick_compile():
    """For a module whose tests compile many large programs and run each a few times: without the compiler's
    expensive passes. Its programs round in their own way, so none is shared with modules before or after it.
    """
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
    jax.clear_caches()


TOKEN = "a token of the tests, 32 letters"


@pytest.fixture
def serving():
    """serving(engine, transport, folder): a context, whose value is the address of a server in a thread of
    this process."""
    from bridges.served.engine_server import EngineServer, HttpServer

    @contextlib.contextmanager
    def serve(engine, transport, folder):
        http = HttpServer(TOKEN)
        server = EngineServer(engine, transport, http, folder)
        thread = threading.Thread(target=server.serve)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        server.stop()
        thread.join(10)
        assert not thread.is_alive()

    return serve
