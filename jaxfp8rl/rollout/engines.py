"""The registry of engines: the one module of the learner that chooses among concrete engines and transports,
and builds those of this process. Each is imported only when the config names it."""

from __future__ import annotations

import functools
import importlib.util
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from bridges.api import BridgeError, EngineFormats, RolloutEngine, WeightSource, WeightTransport
from jaxfp8rl.config.schema import Config
from jaxfp8rl.errors import ConfigError, UserError
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.policy.shapes import engine_runs
from jaxfp8rl.precision.layer_runs import LayerRun
from jaxfp8rl.precision.recipe import FP8_KV
from jaxfp8rl.rollout.base_folder import four_bits_folder
from jaxfp8rl.rollout.embedded import embedded_formats, embedded_model, embedded_precision
from jaxfp8rl.rollout.gpu_memory import device_memory
from jaxfp8rl.rollout.served import guarded_token, open_served
from jaxfp8rl.rollout.vllm_options import cache_bytes, drafts_of, vllm_options, weights_format

if TYPE_CHECKING:
    from bridges.engines.embedded_engine import EngineModel
    from bridges.inside_vllm.adapters import AdapterSlots


def cuda_compiler() -> str | None:
    """The path of nvcc, which rollout.fp8_kernel = "deep_gemm" needs; None if it is not found."""
    from bridges.inside_vllm import environment as vllm_environment

    return vllm_environment.cuda_compiler()


def write_weights(source: WeightSource, folder: Path, version: int) -> str:
    """Write the tensors of `source` as a folder of safetensors (bridges.transports.safetensors_file) and
    return the manifest's digest. Raises BridgeError."""
    from bridges.transports.safetensors_file import write_folder

    return write_folder(source, folder, version)


def temperatures(cfg: Config) -> tuple[float, float]:
    """The lowest and the highest temperature above 0 that the config's engine samples at."""
    if cfg.rollout.engine == "jax":
        return 0.0, float("inf")
    from bridges.inside_vllm.sampling import COOLEST, HOTTEST

    return COOLEST, HOTTEST


def check_engine_settings(cfg: Config) -> None:
    """Raise ConfigError for settings that an engine would refuse on any machine. No device is queried, and no
    engine's package is imported."""
    r = cfg.rollout
    if r.engine == "jax" and r.publish != "auto":
        raise ConfigError(
            f'rollout.publish = "{r.publish}" is for vLLM; rollout.engine is "jax", which has only one way',
            "leave rollout.publish out")
    if r.engine_token_file:
        guarded_token(r.engine_token_file)


def engine_lacks(cfg: Config) -> UserError | None:
    """The error that the config's engine is not installed here; None if it is, or if a server runs it."""
    r = cfg.rollout
    if r.engine == "jax" or r.engine_urls or importlib.util.find_spec("vllm"):
        return None
    return UserError(f'rollout.engine = "{cfg.rollout.engine}": vLLM is not installed here',
                     'pip install "jaxfp8rl[vllm]"; `jaxfp8rl doctor` lists anything else that is missing')


def import_engine(cfg: Config) -> None:
    """Begin to import vLLM in a thread where an engine of it starts in this process: it takes ten seconds and
    more, in which other processes make the problems and load the scorer."""
    if cfg.rollout.engine == "vllm" and not engine_lacks(cfg):
        _importing(cfg.rollout.fp8_kernel)


@functools.cache
def _importing(fp8_kernel: str) -> threading.Thread:
    from bridges.inside_vllm.environment import import_all

    thread = threading.Thread(target=import_all, args=(fp8_kernel,), name="importing vLLM", daemon=True)
    thread.start()
    return thread


def build_engine(cfg: Config, model: ModelConfig, runs: tuple[LayerRun, ...],
                 phase: Callable[[str], None] = lambda name: None,
                 senders: dict[str, Any] | None = None,
                 named: int = 0) -> tuple[RolloutEngine, WeightTransport]:
    """Build the engine that the config names and open a transport on it. `runs`: its FP8 linears by layer.
    `phase` is called with the progress of a start. senders: of `publish_senders`. named: how many adapters
    the engine of a config that publishes adapters holds by name; the transport is then an AdapterTransport.

    Raises BridgeError from the engine's own checks, or UserError with the extra to install. Settings that can
    be checked without an engine are refused earlier, by `check_engine_settings`.
    """
    if lack := engine_lacks(cfg):
        raise lack
    served = functools.partial(open_served, phase=phase, senders=senders or {})
    builders = {"jax": functools.partial(_jax, named=named), "vllm": functools.partial(_vllm, named=named),
                "served": served}
    return builders[cfg.rollout.engine](cfg, model, runs)


def _jax(cfg: Config, model: ModelConfig, runs: tuple[LayerRun, ...],
         named: int = 0) -> tuple[RolloutEngine, WeightTransport]:
    from bridges.engines.embedded_engine import EmbeddedEngine
    from bridges.transports.embedded import EmbeddedTransport

    functions = embedded_model(cfg, model, embedded_precision(cfg, model, runs, named), named)
    engine, transport = EmbeddedEngine(
        functions, max_model_len=cfg.max_model_len, max_num_seqs=cfg.rollout.rows, seed=cfg.run.seed,
        pages=_pages(cfg, functions), min_num_seqs=cfg.rollout.smallest_batch, drafts=drafts_of(cfg, model),
        order=cfg.rollout.order, admit=cfg.rollout.admit), EmbeddedTransport()
    transport.open(engine)
    return engine, transport


def drafting_engine(cfg: Config, model: ModelConfig) -> tuple[Config, tuple[LayerRun, ...],
                                                              RolloutEngine, WeightTransport]:
    """An embedded engine in FP8 beside the config's (selection.explore_samples): (the config that describes
    it, its FP8 linears by layer, the engine, a transport to it)."""
    if model.experts:
        raise ConfigError(f"selection.explore_samples = {cfg.selection.explore_samples}: drafts of a model "
                          "with experts would have routes of FP8 weights",
                          "leave selection.explore_samples out")
    cfg = cfg.having("precision", recipe="fp8_rollout")
    runs = engine_runs(cfg, model)
    return cfg, runs, *_jax(cfg, model, runs, 0)


def _pages(cfg: Config, functions: EngineModel) -> int | None:
    """The pages of an embedded engine's cache of rollout.kv_cache_gib; None if it is not given."""
    if (size := cache_bytes(cfg.rollout.kv_cache_gib)) is None:
        return None
    each = sum(math.prod(a.shape) * a.dtype.itemsize
               for a in jax.tree.leaves(jax.eval_shape(lambda: functions.init_cache(1))))
    least = -(-cfg.max_model_len // functions.page) + 1
    if size // each < least:
        raise ConfigError(
            f"rollout.kv_cache_gib = {cfg.rollout.kv_cache_gib:g}: a sequence of {cfg.max_model_len} tokens "
            f"takes {least * each / 2**30:.3g} GiB", "give at least so much, or leave it out")
    return size // each


def expected_formats(cfg: Config, model: ModelConfig) -> EngineFormats | None:
    """The number formats that the engine will report, known before it starts; None if they depend on the
    machine, as those of vLLM on a CPU do."""
    if cfg.rollout.engine == "jax":
        return embedded_formats(cfg)
    if device_memory() is None:
        return None
    from bridges.inside_vllm.formats import on_hopper

    dtype = cfg.precision.weight_dtype
    cache = FP8_KV if cfg.rollout.kv_cache == "fp8" else dtype
    fusable = not model.family.unit_offset  # vLLM has no such norm for Gemma
    fusable &= not cfg.lora.rank or cfg.lora.publish == "merged"  # linears with slots take unquantised inputs
    return on_hopper(weights_format(cfg, model), dtype, cache, cfg.rollout.is_compiled, fusable)


def _vllm(cfg: Config, model: ModelConfig, runs: tuple[LayerRun, ...],
          named: int) -> tuple[RolloutEngine, WeightTransport]:
    _importing(cfg.rollout.fp8_kernel).join()  # two threads that import one package can see it half imported
    from bridges.engines.vllm_engine import VllmEngine
    from bridges.transports.vllm_choice import open_vllm_transport

    with four_bits_folder(cfg, model, write_weights) as folder:
        engine = VllmEngine(model.to_hf(), adapters=_slots(cfg, model, named), folder=folder,
                            **vllm_options(cfg, model, runs))
    try:
        return engine, open_vllm_transport(cfg.rollout.publish, engine)
    except BridgeError:
        engine.close()
        raise


def _slots(cfg: Config, model: ModelConfig, named: int) -> AdapterSlots | None:
    """vLLM's slots for the run's adapters; None if it holds none. Every linear of a dense layer has one, or
    else its formats would not be those of all layers."""
    from bridges.inside_vllm.adapters import AdapterSlots
    from jaxfp8rl.config.lora import ATTENTION, MLP

    if not cfg.lora.rank or cfg.lora.publish == "merged":
        return None
    return AdapterSlots(1 + named, cfg.lora.rank, ATTENTION if model.experts else ATTENTION + MLP)
