"""vLLM as the rollout engine, in this process: token ids in and out, weights by
`bridges.transports.vllm_inplace` or `bridges.transports.vllm_reload`.

Written for vLLM 0.25 (CUDA) and 0.32 (its CPU build). One open engine a process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from bridges.admission import ADMIT, Admission
from bridges.api import (
    BridgeError,
    Capabilities,
    Completion,
    EngineUnhealthy,
    GenRequest,
    Health,
    ParamMeta,
    VersionSpan,
    supports,
)
from bridges.engines.vllm_in_flight import Flights
from bridges.engines.weight_state import WeightState
from bridges.inside_vllm import build, device_pool, environment, packed
from bridges.inside_vllm import formats as vllm_formats
from bridges.inside_vllm import kv_scales as vllm_kv_scales
from bridges.inside_vllm.adapters import AdapterSlots, Slots
from bridges.inside_vllm.environment import FP8
from bridges.inside_vllm.params import expected_manifest, tied_names
from bridges.inside_vllm.sampling import check, likeliest, sampling_params, seed_of
from bridges.inside_vllm.stacks import load_format
from bridges.inside_vllm.writing import repack_experts
from bridges.order import HOW, PATIENCE, Order

SLEEP_LEVEL = {"off": None, "keep_weights": 1, "drop_weights": 2}


class VllmEngine:
    """RolloutEngine over `vllm.LLM`. Starts with random weights, dirty: publish before the first `generate`.

    hf_config: the contents of config.json. The architecture must be one that vLLM knows.
    weights: "bfloat16", "float16", "float32", or "fp8_e4m3_128x128" with `dtype` (default bfloat16) for all
        the rest.
    high_precision_modules: HF names of linears that stay unquantised, such as
        "model.layers.0.self_attn.q_proj". vLLM fuses q, k, v and gate, up: name all or none of a group.
    sleep: "off" (sleep() does nothing), "keep_weights" (weights go to host memory, the KV cache is dropped)
        or "drop_weights" (both are dropped: publish after wake()). The latter two need CUDA.
    kv_scales: whether a publish brings the scales of FP8 attention. Otherwise they are 1.
    routed_experts: completions say which experts each token was routed to. Needs CUDA.
    fp8_kernel: "native" takes vLLM's own choice of the kernels that need no compiler, CUTLASS on a GPU.
        "deep_gemm" computes the same numbers by DeepGEMM, on Hopper; nvcc compiles its kernels when they are
        first needed. "emulated" lets FP8 weights run on a CPU without AMX, slowly
        (`bridges.inside_vllm.fp8_emulation`).
    attention: "auto" takes vLLM's choice. On Hopper that is FlashAttention 3, which over an FP8 cache rounds
        queries and probabilities to FP8, too. "triton" takes vLLM's Triton kernels, which read an FP8 cache
        beside queries in `dtype`. Needs CUDA.
    drafts: tokens of a completion that suffix decoding verifies at once, at most; 0 for none. Needs CUDA, and
        the package arctic-inference.
    folder: a checkpoint in four bits, of compressed-tensors, which vLLM reads itself; `weights` is then
        "nvfp4", "mxfp4" or "int4", and a publish (bridges.transports.vllm_packed) proves that the source has
        the same. On a CPU vLLM has a kernel of INT4 alone. `linears` are those in four bits.
    adapters: room for low-rank adapters (bridges.transports.vllm_slots); `slots` is then what the engine
    holds. order: in which completions start where they are more than max_num_seqs (bridges.order).
    admit: "cache" starts those whose keys and values are expected to fit (bridges.admission).

    At temperature 0 the log-probabilities are those at temperature 1, since those of the greedy distribution
    are all 0. Raises BridgeError for options that this machine or this vLLM does not support, if possible
    before any memory is taken.
    """

    slots: Slots | None = None
    linears: tuple[packed.Linear, ...] = ()
    _admission: Admission | None = None
    _open = False  # closing any engine takes down process-wide state of vLLM, so one at a time

    def __init__(
        self,
        hf_config: dict[str, Any],
        *,
        weights: str = "bfloat16",
        kv_cache: Literal["auto", "fp8_e4m3"] = "auto",
        kv_scales: bool = False,
        max_model_len: int,
        max_num_seqs: int = 256,
        gpu_memory_utilization: float = 0.5,
        kv_cache_bytes: int | None = None,
        enforce_eager: bool = False,
        torch_compile: bool = True,
        high_precision_modules: Sequence[str] = (),
        dtype: str | None = None,
        seed: int = 0,
        sleep: Literal["off", "keep_weights", "drop_weights"] = "off",
        fp8_kernel: Literal["native", "deep_gemm", "emulated"] = "native",
        routed_experts: bool = False,
        attention: Literal["auto", "triton"] = "auto",
        drafts: int = 0,
        adapters: AdapterSlots | None = None,
        folder: str | None = None,
        order: HOW = "fifo",
        admit: ADMIT = "all",
    ):
        dtype = dtype or ("bfloat16" if weights in (FP8, *packed.FORMS) else weights)
        build.check_formats(weights, dtype, kv_cache, kv_scales, folder, sleep)
        if VllmEngine._open:
            raise BridgeError("this process already has an open VllmEngine, and vLLM takes one at a time",
                              "close() the open engine first")
        environment.prepare(fp8_kernel)
        environment.check_hardware(weights, kv_cache, fp8_kernel, attention, routed_experts)
        self._state, self._sick, self._broken = WeightState(), "", False
        self._asleep, self._cache_asleep = False, False
        self._sleep_level, self._routed_experts = SLEEP_LEVEL[sleep], routed_experts
        model = folder or build.config_folder(
            build.quantized_config(hf_config, high_precision_modules) if weights == FP8 else hf_config)
        arguments = build.engine_arguments(
            environment.on_cpu(), dtype=dtype, kv_cache=kv_cache, kv_cache_bytes=kv_cache_bytes,
            max_model_len=max_model_len, max_num_seqs=max_num_seqs,
            gpu_memory_utilization=gpu_memory_utilization, enforce_eager=enforce_eager,
            torch_compile=torch_compile, vocab_size=hf_config["vocab_size"], routed_experts=routed_experts,
            attention=attention, sleep=sleep, drafts=drafts,
        ) | {"model": model, "load_format": "auto" if folder else load_format(), "skip_tokenizer_init": True,
             "seed": seed}
        arguments |= adapters.arguments() if adapters else {}
        self._llm = build.build_llm(arguments, emulate=weights == FP8 and fp8_kernel == "emulated")
        self._order = Order(order, PATIENCE * max_num_seqs)
        if admit == "cache":
            self._admission = Admission(self._llm.llm_engine.vllm_config.cache_config.block_size)
        self._flights = Flights(lambda: self.llm, self._parameters, self._completion, self._adapter,
                                self._order, max_num_seqs, self._admission)
        VllmEngine._open = True
        try:
            device_pool.hold()
            self.slots = Slots(self.on_model, adapters.count) if adapters else None
            self._read_model(kv_cache, kv_scales, dtype)
            self._capabilities = self._describe(weights, dtype, kv_cache, hf_config["vocab_size"],
                                                max_model_len)
        except BaseException:
            self.close()
            raise

    def _read_model(self, kv_cache: str, kv_scales: bool, dtype: str) -> None:
        """Record the tensors that a publish must bring."""
        self.kv_scale_places = self.on_model(vllm_kv_scales.scale_places) if kv_scales else ()
        if kv_cache != "auto":
            self.on_model(vllm_kv_scales.reset)
        scales = tuple(p.meta for p in self.kv_scale_places)
        self.linears = self.on_model(packed.linears)
        of_linears = tuple(meta for linear in self.linears for meta in packed.manifest_of(linear, dtype))
        self._manifest = self.on_model(expected_manifest) + scales + of_linears
        self._tied = self.on_model(tied_names)

    def _describe(self, weights: str, dtype: str, kv_cache: str, vocab_size: int,
                  max_model_len: int) -> Capabilities:
        import vllm

        formats = vllm_formats.engine_formats(
            self.on_model, self.llm.llm_engine.vllm_config.compilation_config, weights, dtype,
            dtype if kv_cache == "auto" else kv_cache)
        if self.slots:  # linears with slots take their input before it is quantised
            formats = dataclasses.replace(formats, fused_quantizer=False)
        return Capabilities("vllm", vllm.__version__, formats, max_model_len, vocab_size, seeds=True,
                            routed_experts=self._routed_experts, support=True,
                            adapters=self.slots.count - 1 if self.slots else 0)

    @property
    def llm(self) -> Any:
        """The `vllm.LLM` inside, whose GPU becomes this thread's current one. Raises BridgeError once the
        engine is closed."""
        if self._llm is None:
            raise BridgeError("the engine is closed", "build a new one")
        environment.use_gpu()
        return self._llm

    def on_model(self, function: Callable[[Any], Any]) -> Any:
        """`function(model)` run inside the engine, on the torch module of its one worker."""
        return self.llm.apply_model(function)[0]

    def capabilities(self) -> Capabilities:
        return self._capabilities

    def generate(self, requests: Sequence[GenRequest]) -> list[list[Completion]]:
        """See RolloutEngine; ValueError for a request that does not fit.

        Each completion is its own vLLM request: the prefix cache shares the prompt among the n.
        """
        self._require_fit(requests)
        return self._flights.generate(requests, self._state.current())

    def _adapter(self, r: GenRequest) -> Any:
        """vLLM's LoRARequest, None for an engine without adapters. Raises ValueError for one that is not
        held."""
        return self.slots.request(r.adapter) if self.slots else None

    def submit(self, requests: Sequence[GenRequest], begun: Sequence[Sequence[Completion]] = ()) -> None:
        """See InFlight; ValueError for a request that does not fit, or that names an adapter."""
        self._require_fit(requests)
        if named := [r for r in requests if r.adapter]:
            raise ValueError(f"request {named[0].request_id!r} names the adapter {named[0].adapter!r}: "
                             "requests in flight get the adapter of `publish`")
        self._flights.submit(requests, begun, self._state.current())

    def poll(self) -> list[list[Completion]]:
        """One step of vLLM: a token of each running completion, or a prefill."""
        self._state.require_clean()
        self._flights.advance()
        return self._flights.take()

    def partial(self) -> dict[str, list[Completion]]:
        return self._flights.partial()

    def cancel(self, request_ids: Sequence[str]) -> None:
        self._flights.cancel(request_ids)

    def _require_fit(self, requests: Sequence[GenRequest]) -> None:
        self._state.require_clean()
        self.require_awake()
        for r in requests:
            check(r, self._capabilities)

    def _parameters(self, r: GenRequest, index: int, start: int = 0) -> Any:
        """vLLM's parameters of completion `index`, from its token `start` on."""
        s = dataclasses.replace(r.sampling, max_tokens=r.sampling.max_tokens - start)
        return sampling_params(s, seed_of(r, index, start), likeliest(s, self._capabilities.vocab_size))

    def _completion(self, r: GenRequest, index: int, out: Any, span: tuple[VersionSpan, ...],
                    cached: int | None = None) -> Completion:
        tokens = np.asarray(out.token_ids, np.int32)
        if r.adapter and self.slots and (version := self.slots.version(r.adapter)) is not None:
            span = (VersionSpan(0, len(tokens), version),)
        # at each position the sampled token, then the likeliest ones
        width = 1 + likeliest(r.sampling, self._capabilities.vocab_size)
        logprobs, among = np.asarray(out.logprobs.logprobs, np.float32).reshape(-1, width), (None, None)
        if r.sampling.reported:
            ids = np.asarray(out.logprobs.token_ids, np.int32).reshape(logprobs.shape)
            among = supports(np.where(logprobs > -np.inf, ids, -1)[:, 1:], r.sampling.reported)
        reason = out.finish_reason if out.finish_reason in ("stop", "length") else "abort"
        routes = out.routed_experts if self._routed_experts else None
        done = Completion(r.request_id, index, tokens, logprobs[:, 0], reason, span, routes, *among, cached)
        if reason != "abort" and (problem := done.problem()):
            self._sick = f"request {r.request_id!r}, completion {index}: {problem}"
        return done

    def pause(self, keep_cache: bool = True) -> None:
        """Interrupt what was submitted. `generate` runs to its end in the caller's thread."""
        if len(self._flights):
            self._flights.pause(keep_cache)

    def resume(self) -> None:
        """Go on at the weights of the last publish. Raises EngineDirty if it failed."""
        if len(self._flights):
            self._flights.resume(self._state.current())

    def sleep(self) -> None:
        """Free memory according to the `sleep` option. Unless it is "off", refuse to generate until
        `wake`."""
        if self._sleep_level is None:
            return
        if self._cache_asleep:  # vLLM does not go to sleep from half awake
            self._wake("kv_cache")
        self.llm.sleep(level=self._sleep_level)
        self._asleep, self._cache_asleep = True, False
        if self._sleep_level == SLEEP_LEVEL["drop_weights"]:  # and adapters: they come after a base
            self._state.drop("sleep() dropped its weights")

    def wake(self) -> None:
        """Allocate memory again, in the order in which it is needed.

        If the weights were dropped, only their memory is allocated; that of the KV cache follows when a
        publish commits.
        """
        if self._asleep:
            dropped = self._sleep_level == SLEEP_LEVEL["drop_weights"]
            self._wake(*(["weights"] if dropped else ["weights", "kv_cache"]))
            self._asleep, self._cache_asleep = False, dropped

    def _wake(self, *tags: str) -> None:
        device_pool.give_back()
        try:
            self.llm.wake_up(list(tags))
        except RuntimeError as e:  # CUDA's, out of memory
            raise EngineUnhealthy(f"vLLM could not take back the memory of its {' and '.join(tags)}: {e}",
                                  device_pool.LEAVE_MORE) from e

    def health(self) -> Health:
        """Not ok once a completion was unfit to learn from, until the next publish succeeds."""
        return Health(not self._sick, self._sick)

    def metrics(self) -> dict[str, float]:
        """Of the cache since it was last asked, where `admit` is "cache"; else {}."""
        return self._flights.seen.metrics() if self._admission else {}

    def weight_version(self) -> int | None:
        return self._state.version

    def weight_digest(self) -> str:
        """Digest of the manifest that was published, "" while dirty."""
        return self._state.digest

    def expected_manifest(self) -> tuple[ParamMeta, ...]:
        """Every tensor a publish must bring, in checkpoint layout."""
        return self._manifest

    def begin(self, version: int) -> None:
        """The weights of `version` are about to be written: dirty until `commit`.

        Raises EngineUnhealthy after a reload that broke off inside vLLM, BridgeError when asleep or closed.
        """
        if self._broken:
            raise EngineUnhealthy("an earlier reload broke off inside vLLM",
                                  "close this engine and build a new one")
        self.require_awake()
        self._state.begin(version)

    def require_awake(self) -> None:
        """Raise BridgeError if the engine is closed or asleep, so that its tensors cannot be read or
        written."""
        _ = self.llm  # raises once the engine is closed
        if self._asleep:
            raise BridgeError("the engine is asleep", "call wake() first")

    def drop(self, why: str) -> None:
        """Declare the weights unusable until the next publish."""
        self._state.drop(why)

    def load(self, tensors: Iterable[tuple[str, Any]], version: int) -> None:
        """Load torch tensors under HF names in place. The engine stays dirty until the caller commits.

        An exception inside vLLM leaves its layerwise reload half open. The next load would continue it, so
        the engine then refuses every load.
        """
        self.begin(version)
        self._broken = True
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": _untied(tensors, self._tied)})
        self.on_model(repack_experts)
        synchronise()
        self._broken = False

    def commit(self, version: int, digest: str) -> tuple[str, ...]:
        """Drop the caches of older weights and declare `version` current. Returns the names of the dropped
        caches. While completions keep theirs, later requests cannot meet them: their salt is the version."""
        if self._cache_asleep:
            self._wake("kv_cache")
            self._cache_asleep = False
        if not self._flights.cache_kept and not self.llm.reset_prefix_cache():
            raise EngineUnhealthy("vLLM refused to reset its prefix cache: requests are in flight",
                                  "build a new engine")
        self._state.commit(version, digest)
        self._sick = ""
        return ("prefix",)

    def close(self) -> None:
        """Free the engine's memory. Idempotent."""
        if self._llm is None:
            return
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self._state.drop("the engine is closed")
        self._llm.llm_engine.engine_core.shutdown()
        self._llm, self.linears = None, ()
        cleanup_dist_env_and_memory()
        VllmEngine._open = False


def _untied(tensors: Iterable[tuple[str, Any]], tied: dict[str, list[str]]) -> Iterator[tuple[str, Any]]:
    """Yield a tied tensor once under each of its names.

    A kernel may hold a packed copy of lm_head, which must be renewed, too.
    """
    for name, tensor in tensors:
        yield name, tensor
        for other in tied.get(name, ()):
            yield other, tensor


def synchronise() -> None:
    """Wait until the device has read every source buffer: the learner may overwrite them afterwards."""
    import torch

    environment.use_gpu()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
