"""Build `vllm.LLM`: the config that it reads, its arguments, and its kernels."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bridges.api import BridgeError
from bridges.inside_vllm import fp8_emulation, packed
from bridges.inside_vllm.environment import FP8
from bridges.inside_vllm.params import BLOCK

# The tokens in a page of an FP8 cache. FlashAttention 3 reads one at 2.94 TB/s from pages of 64 tokens, at
# 2.74 from vLLM's default of 16, and no faster from pages of 256. In BF16, pages of 16 already reach the
# memory's bandwidth (benchmarks/results/decode_pages.json). Completions share their prompt in whole pages.
FP8_PAGE = 64
# vLLM's modes: no torch.compile. Without it a graph holds a whole step, and steps with prompts run without
# one.
UNCOMPILED = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
NO_SHARE = 0.01  # of a GPU's memory: vLLM refuses 0, and to start if the share is not free


def check_formats(weights: str, dtype: str, kv_cache: str, kv_scales: bool, folder: str | None,
                  sleep: str) -> None:
    """Raise BridgeError for options of `VllmEngine` that contradict each other."""
    four = weights in packed.FORMS
    if not four and weights not in (FP8, dtype):
        raise BridgeError(f"weights={weights!r} with dtype={dtype!r}",
                          f"use one type for both, or weights={FP8!r}")
    if four != bool(folder):
        raise BridgeError(f"weights={weights!r} with folder={folder!r}: vLLM reads weights in four bits, and "
                          "no others, from a folder",
                          f"name the folder with weights={packed.ON_CPU!r} or another of "
                          f"{', '.join(packed.FORMS)}")
    if four and dtype != "bfloat16":
        raise BridgeError(f"weights={weights!r} with dtype={dtype!r}: their kernels multiply by bfloat16 "
                          "numbers",
                          'use dtype="bfloat16"')
    if four and sleep == "drop_weights":
        raise BridgeError(f'sleep="drop_weights" with weights={weights!r}: vLLM has read them once, and '
                          "nobody sends them again", 'use sleep="keep_weights"')
    if kv_scales and kv_cache == "auto":
        raise BridgeError("kv_scales is for an FP8 cache, and kv_cache is \"auto\"",
                          'use kv_cache="fp8_e4m3"')


def config_folder(hf_config: dict[str, Any]) -> str:
    """A folder whose config.json is `hf_config`, for vLLM to read.

    The same config always has the same folder, which is in vLLM's own cache: the path is a part of the key
    under which vLLM keeps compiled code, so a new folder each time would compile everything again. Raises
    BridgeError if the folder cannot be written.
    """
    text = json.dumps(hf_config, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    # vLLM's own rule: the learner of served engines does not import it
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(os.environ.get("VLLM_CACHE_ROOT") or Path(cache, "vllm"), "jaxfp8rl", digest).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
            file.write(text)
        os.replace(file.name, folder / "config.json")  # another process may be reading it
    except OSError as e:
        raise BridgeError(f"{folder}: cannot be written: {e.strerror}",
                          "set VLLM_CACHE_ROOT to a folder that this process can write to") from e
    return str(folder)


def quantized_config(hf_config: dict[str, Any], high_precision_modules: Sequence[str]) -> dict[str, Any]:
    """The config of a checkpoint in blockwise FP8. It leaves lm_head and the named linears unquantised."""
    quantization = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
        "weight_block_size": list(BLOCK),
        "ignored_layers": list(high_precision_modules),
    }
    return {**hf_config, "quantization_config": quantization}


def engine_arguments(
    cpu: bool, *, vocab_size: int, dtype: str, kv_cache: str, kv_cache_bytes: int | None, max_model_len: int,
    max_num_seqs: int, gpu_memory_utilization: float, enforce_eager: bool, routed_experts: bool,
    attention: str,
    sleep: str = "off", torch_compile: bool = True, drafts: int = 0,
) -> dict[str, Any]:
    """The options of `VllmEngine` under vLLM's names, and the bridge's requirements, for an engine on a CPU
    or a GPU: what `vllm.LLM` takes and, with dashes in the names, `vllm serve`. An option is left out to keep
    vLLM's default. drafts: tokens of a completion that suffix decoding verifies at once, 0 for none; above
    temperature 0 vLLM's build for CPUs would draw from another distribution, and BridgeError is raised, as
    it is without the package arctic-inference."""
    if drafts and cpu:
        raise BridgeError("vLLM's build for CPUs samples from a wrong distribution where it speculates "
                          "above temperature 0 (vllm#55005)",
                          'set rollout.speculation = "off", or rollout.engine = "jax", which is exact')
    if drafts and not importlib.util.find_spec("arctic_inference"):
        raise BridgeError("vLLM's suffix decoding needs the package arctic-inference, which is not installed",
                          'pip install arctic-inference, or set rollout.speculation = "off"')
    arguments: dict[str, Any] = dict(
        generation_config="vllm", dtype=dtype, kv_cache_dtype=kv_cache, max_model_len=max_model_len,
        max_num_seqs=max_num_seqs, enforce_eager=enforce_eager, gpu_memory_utilization=gpu_memory_utilization,
        logprobs_mode="processed_logprobs", max_logprobs=vocab_size, enable_prefix_caching=True,
        enable_sleep_mode=sleep != "off",
    )
    if routed_experts:
        arguments["enable_return_routed_experts"] = True
    if drafts:
        arguments["speculative_config"] = {"method": "suffix", "num_speculative_tokens": drafts}
    if attention == "triton":
        arguments["attention_backend"] = "TRITON_ATTN"
    if not torch_compile and not enforce_eager:
        arguments["compilation_config"] = UNCOMPILED if not cpu else {"mode": UNCOMPILED["mode"]}
    if kv_cache != "auto" and not cpu:
        arguments["block_size"] = FP8_PAGE
    # A fixed size does not depend on the memory that others use: a share of the GPU need not be free.
    if (size := cache_bytes(kv_cache_bytes, cpu)) is not None:
        arguments |= {"kv_cache_memory_bytes": size, "gpu_memory_utilization": NO_SHARE}
    return arguments


def cache_bytes(wanted: int | None, cpu: bool) -> int | None:
    """The size of the KV cache in bytes. None makes vLLM measure the free memory of the GPU. On a CPU vLLM
    would take half of the memory, so the default there is 1 GiB, unless the environment sets a size."""
    return 2**30 if wanted is None and cpu and "VLLM_CPU_KVCACHE_SPACE" not in os.environ else wanted


def build_llm(arguments: dict[str, Any], emulate: bool) -> Any:
    """Build a `vllm.LLM`; with `emulate`, its FP8 linears use the emulated kernel."""
    from vllm import LLM

    emulation = fp8_emulation.registered() if emulate else contextlib.nullcontext()
    with captured_by_thread(), warmed_up_as_used(), emulation:
        return LLM(**arguments)


@contextlib.contextmanager
def warmed_up_as_used() -> Iterator[None]:
    """vLLM warms up its sampler for what a rollout asks of it: a temperature, and log-probabilities.

    Its own warm-up has filters, penalties and words that are banned, whose Triton kernels take some 15 s to
    compile. A rollout with filters compiles its own at its first step.
    """
    from vllm import SamplingParams

    if (every := getattr(SamplingParams, "for_sampler_warmup", None)) is None:  # another vLLM
        yield
        return
    SamplingParams.for_sampler_warmup = staticmethod(lambda: SamplingParams(temperature=0.9, logprobs=0))
    try:
        yield
    finally:
        SamplingParams.for_sampler_warmup = staticmethod(every)


@contextlib.contextmanager
def captured_by_thread() -> Iterator[None]:
    """CUDA graphs that torch captures in this context are captured in CUDA's mode "thread_local".

    In torch's default mode, "global", a capture fails if another thread of the process makes a call that CUDA
    forbids during a capture, such as an allocation or the loading of a kernel. JAX's threads make such calls.
    vLLM reports the failure from the kernel that it captures ("cutlass_gemm_caller, Error Internal").
    """
    import torch

    capture = torch.cuda.graph.__init__

    @functools.wraps(capture)
    def of_this_thread(self: Any, *args: Any, **kwargs: Any) -> None:
        capture(self, *args, **{"capture_error_mode": "thread_local"} | kwargs)

    torch.cuda.graph.__init__ = of_this_thread
    try:
        yield
    finally:
        torch.cuda.graph.__init__ = capture
