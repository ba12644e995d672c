"""Compiled programs kept in a folder."""

from __future__ import annotations

import pwd

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxfp8rl.errors import UserError
from jaxfp8rl.precision import jit
from jaxfp8rl.precision.jit import KeptPrograms, keep_compiled, rounding_exact_jit


@pytest.fixture
def settings():
    """JAX's, put back afterwards; every program counts as worth keeping."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs",
             "jax_compilation_cache_max_size")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update(names[1], 0.0)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_programs_are_kept_where_asked_and_for_nobody_else(settings, tmp_path):
    before = jax.config.jax_compilation_cache_dir
    keep_compiled("")
    assert jax.config.jax_compilation_cache_dir == before
    folder = tmp_path / "deep" / "cache"
    keep_compiled(str(folder))
    rounding_exact_jit(lambda x: x @ x - 7)(jnp.ones((3, 3)))
    assert any(folder.iterdir()) and folder.stat().st_mode & 0o077 == 0


def test_a_folder_that_cannot_be_made_is_refused_by_name(settings, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError,
                       match=r"train.compilation_cache: .*file/cache: cannot write .*Not a directory"):
        keep_compiled(str(tmp_path / "file" / "cache"))


def test_on_a_gpu_programs_are_kept_in_the_users_cache_folder(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(jit.jax, "default_backend", lambda: "gpu")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    assert keep_compiled("") == str(tmp_path / "own")  # JAX was given one
    jax.config.update("jax_compilation_cache_dir", None)
    kept = KeptPrograms(keep_compiled(""))
    assert kept.folder == str(tmp_path / "jaxfp8rl" / "compiled")
    for _ in range(2):
        jax.jit(lambda x: x @ x - 8)(jnp.ones((3, 3)))
    assert kept.read > 0 and kept.compiled > 0
    assert str(kept) == f"compiled programs: {kept.read} read from {kept.folder}, {kept.compiled} added to it"
    assert jax.config.jax_compilation_cache_max_size == jit.KEPT_BYTES


def test_a_default_folder_that_cannot_be_written_stops_nobody(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(jit.jax, "default_backend", lambda: "gpu")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    jax.config.update("jax_compilation_cache_dir", None)
    assert keep_compiled("") == ""
    assert str(KeptPrograms("")) == f"compiled programs are not kept: cannot write to {jit.default_folder()}"


def test_a_user_without_a_home_has_no_default_folder(settings, monkeypatch):
    """As in a container that runs as a number: no HOME, and nobody in /etc/passwd."""
    monkeypatch.setattr(jit.jax, "default_backend", lambda: "gpu")
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    jax.config.update("jax_compilation_cache_dir", None)
    assert keep_compiled("") == ""
