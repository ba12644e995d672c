"""The one module of the learner that builds concrete engines and transports. Each is imported only when the
config names it."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from bridges.api import BridgeError, EngineFormats, RolloutEngine, WeightSource, WeightTransport
from jaxfp8rl.config.sampling import Rollout
from jaxfp8rl.config.schema import Config
from jaxfp8rl.distributed.process_group import ProcessGroup
from jaxfp8rl.errors import ConfigError, UserError
from jaxfp8rl.gpus import share_of_jax, take_gpu, take_host_memory
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.policy.shapes import engine_runs
from jaxfp8rl.precision.layer_runs import LayerRun
from jaxfp8rl.precision.recipe import FP8_KV, FP8_WEIGHT, get_recipe
from jaxfp8rl.publish.wire import high_precision_modules
from jaxfp8rl.rollout.base_folder import four_bits_folder
from jaxfp8rl.rollout.embedded import embedded_formats, embedded_model, embedded_precision

SPARE = 8  # connections beside those of sequences that are decoded

if TYPE_CHECKING:
    from bridges.engines.embedded_engine import EngineModel
    from bridges.inside_vllm.adapters import AdapterSlots
    from bridges.served.serve_process import ServeProcesses


def share_gpu(cfg: Config) -> None:
    """Configure JAX's allocator, before JAX asks for a device: so that vLLM, in this or another process, can
    share the GPU; without vLLM so that JAX can have nearly all of it. Under optim.offload it may have the
    host's memory, too."""
    if cfg.optim.offload:
        take_host_memory()
    if cfg.rollout.engine == "jax":
        return take_gpu()
    from bridges.inside_vllm.device_pool import share

    share()


def device_memory() -> int | None:
    """The memory of the first GPU, in bytes; None on a CPU."""
    from bridges.inside_vllm.device_pool import total

    return total()


def memory_of_jax() -> int | None:
    """The bytes of the first GPU that JAX may take after `take_gpu`; None on a CPU."""
    return None if (total := device_memory()) is None else int(share_of_jax() * total)


def device_in_use() -> int | None:
    """The memory in use on the first GPU, whoever holds it, in bytes; None on a CPU."""
    from bridges.inside_vllm.device_pool import in_use

    return in_use()


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
    served = functools.partial(_served, phase=phase, senders=senders or {})
    builders = {"jax": functools.partial(_jax, named=named), "vllm": functools.partial(_vllm, named=named),
                "served": served}
    return builders[cfg.rollout.engine](cfg, model, runs)


def publish_senders(cfg: Config, group: ProcessGroup) -> dict[str, Any]:
    """By which each process of the group sends its own shards to served engines: the keywords `outlet` and,
    for several processes, `learners` of a ServedTransport. Empty for other engines."""
    if cfg.rollout.engine != "served":
        return {}
    from bridges.served.outlet import Outlet

    outlet = Outlet(group.number, gpu=_first_gpu())
    return {"outlet": outlet} | ({"learners": group.serve(outlet)} if group.count > 1 else {})


def _first_gpu() -> int | None:
    """The number of the learner's first GPU among those that this process sees."""
    first = jax.local_devices()[0]
    return first.local_hardware_id if first.platform == "gpu" else None


def _jax(cfg: Config, model: ModelConfig, runs: tuple[LayerRun, ...],
         named: int = 0) -> tuple[RolloutEngine, WeightTransport]:
    from bridges.engines.embedded_engine import EmbeddedEngine
    from bridges.transports.embedded import EmbeddedTransport

    functions = embedded_model(cfg, model, embedded_precision(cfg, model, runs, named), named)
    engine, transport = EmbeddedEngine(
        functions, max_model_len=cfg.max_model_len, max_num_seqs=cfg.rollout.max_num_seqs, seed=cfg.run.seed,
        pages=_pages(cfg, functions), min_num_seqs=cfg.rollout.min_num_seqs, drafts=_drafts(cfg, model),
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


def _drafts(cfg: Config, model: ModelConfig) -> int:
    """How many tokens of a completion an engine may draft."""
    if cfg.rollout.speculation == "off":
        return 0
    if cfg.rollout.engine == "jax" and model.experts:
        raise ConfigError(f'rollout.speculation = "{cfg.rollout.speculation}": the embedded engine '
                          f'records the experts '
                          "of each token that it feeds, and drafts would be among them",
                          'set rollout.speculation = "off" for a model with experts')
    return cfg.rollout.draft_tokens


def _pages(cfg: Config, functions: EngineModel) -> int | None:
    """The pages of an embedded engine's cache of rollout.kv_cache_gib; None if it is not given."""
    if (size := _cache_bytes(cfg.rollout.kv_cache_gib)) is None:
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
    return on_hopper(_weights(cfg, model), dtype, cache, cfg.rollout.is_compiled, fusable)


def _vllm(cfg: Config, model: ModelConfig, runs: tuple[LayerRun, ...],
          named: int) -> tuple[RolloutEngine, WeightTransport]:
    _importing(cfg.rollout.fp8_kernel).join()  # two threads that import one package can see it half imported
    from bridges.engines.vllm_engine import VllmEngine
    from bridges.transports.vllm_choice import open_vllm_transport

    with four_bits_folder(cfg, model, write_weights) as folder:
        engine = VllmEngine(model.to_hf(), adapters=_slots(cfg, model, named), folder=folder,
                            **_vllm_options(cfg, model, runs))
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


def _weights(cfg: Config, model: ModelConfig) -> str:
    """The format of the linears in vLLM."""
    if model.packed:
        return model.packed.form
    return FP8_WEIGHT if get_recipe(cfg.precision.recipe).engine_fp8 else cfg.precision.weight_dtype


def _vllm_options(cfg: Config, model: ModelConfig, runs: tuple[LayerRun, ...]) -> dict[str, Any]:
    """The keyword arguments of VllmEngine."""
    return dict(
        weights=_weights(cfg, model),
        kv_cache=FP8_KV if cfg.rollout.kv_cache == "fp8" else "auto",
        kv_scales=cfg.rollout.kv_scales == "calibrated",
        dtype=cfg.precision.weight_dtype,
        high_precision_modules=high_precision_modules(model, runs),
        max_model_len=cfg.max_model_len,
        max_num_seqs=cfg.rollout.max_num_seqs,
        gpu_memory_utilization=cfg.rollout.gpu_memory_utilization,
        kv_cache_bytes=_cache_bytes(cfg.rollout.kv_cache_gib),
        enforce_eager=cfg.rollout.enforce_eager,
        torch_compile=cfg.rollout.torch_compile,
        fp8_kernel=cfg.rollout.fp8_kernel,
        attention=cfg.rollout.attention,
        routed_experts=cfg.moe.replay == "R3",
        sleep=cfg.rollout.sleep,
        drafts=_drafts(cfg, model),
        order=cfg.rollout.order,
        admit=cfg.rollout.admit,
        seed=cfg.run.seed,
    )


def _cache_bytes(gib: float | str | None) -> int | None:
    """The size of the cache that the config gives, in bytes; None if it gives none."""
    if gib == "auto":
        raise ConfigError('rollout.kv_cache_gib = "auto" has not been chosen yet',
                          "jaxfp8rl.memory.cache.with_cache(cfg) chooses it")
    return None if gib is None else int(float(gib) * 2**30)


def _served(cfg: Config, model: ModelConfig, runs: tuple[LayerRun, ...],
            phase: Callable[[str], None], senders: dict[str, Any]) -> tuple[RolloutEngine, WeightTransport]:
    """Stock `vllm serve` processes: those at rollout.engine_urls, or children of this run."""
    from bridges.served.served_engines import ServedEngines
    from bridges.served.served_transport import ServedTransport
    from bridges.served.vllm_client import Deadlines

    r = cfg.rollout
    processes = None if r.engine_urls else _serve(cfg, model, runs, phase)
    token = processes.token if processes else guarded_token(r.engine_token_file)
    cache = "keep" if r.in_flight and not r.recompute_kv else "recompute"
    with contextlib.ExitStack() as stack:
        if processes:
            stack.callback(processes.close)
        engine = ServedEngines(
            token, lambda urls: ServedTransport(token, r.link, urls=urls, cache=cache, **senders),
            urls=r.engine_urls, processes=processes, token_file=r.engine_token_file, restarts=r.restarts,
            replay=not r.max_staleness, sleep=r.sleep, deadlines=Deadlines(generate=r.request_timeout_s),
            connections=r.max_num_seqs * (len(r.engine_urls) or r.engines) + SPARE, order=r.order,
            admit=r.admit)
        stack.callback(engine.close)
        _check_server(cfg, model, engine)
        stack.pop_all()  # all is well: the run closes the engine
    return engine, engine  # it is its own transport


def _serve(cfg: Config, model: ModelConfig, runs: tuple[LayerRun, ...],
           phase: Callable[[str], None]) -> ServeProcesses:
    """Start the engines of this run, and wait until they are ready."""
    from bridges.served.serve_process import ServeProcesses

    r, (folder, words, variables) = cfg.rollout, _serve_parts(cfg, model, runs)

    def of_child(i: int) -> tuple[list[str], dict[str, str]]:
        gpus = gpus_of_child(r, i)
        # each engine has its own seed, so that engines differ on requests without one
        return ["--seed", str(cfg.run.seed + i)], {"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}

    processes = ServeProcesses(
        folder, words, r.engines, of_child=of_child, environment=variables, logs=Path(cfg.run.dir, "engines"),
        say=lambda line: phase(f"starting the engines: {line}"))
    try:
        processes.wait_until_ready()
    except BaseException:
        processes.close()
        raise
    return processes


def gpus_of_child(r: Rollout, i: int) -> str:
    """CUDA_VISIBLE_DEVICES of engine i: its own GPUs, and for cuda_ipc the learner's first GPU, which holds
    the slots. "": the engine sees what this process sees."""
    share = len(r.server_gpus) // r.engines
    own = [str(gpu) for gpu in r.server_gpus[i * share :][:share]]
    at, seen = _first_gpu() or 0, os.environ.get("CUDA_VISIBLE_DEVICES")
    first = seen.split(",")[at] if seen else str(at)
    return ",".join(own + [first] * (bool(own) and r.link == "cuda_ipc" and first not in own))


def _serve_parts(cfg: Config, model: ModelConfig,
                 runs: tuple[LayerRun, ...]) -> tuple[str, list[str], dict[str, str]]:
    """(a folder with the model's config.json, the words after it, variables): `vllm serve FOLDER WORDS`."""
    from bridges.served.serve_options import model_folder, serve_variables, serve_words

    options = _vllm_options(cfg, model, runs)
    folder = model_folder(model.to_hf(), options.pop("weights"), options.pop("high_precision_modules"))
    variables = serve_variables(options.pop("fp8_kernel"))
    for name in ("kv_scales", "seed", "order", "admit"):
        options.pop(name)
    words = serve_words(vocab_size=model.vocab_size, tensor_parallel_size=cfg.rollout.tensor_parallel_size,
                        **options)
    return folder, words, variables


def serve_parts(cfg: Config, model: ModelConfig, runs: tuple[LayerRun, ...],
                folder: Path) -> tuple[str, list[str], dict[str, str]]:
    """`vllm serve MODEL WORDS` of the config's engines, and all its variables -> (MODEL, WORDS, variables),
    for those who start it themselves. `folder` is given the metadata that vLLM finds the plugin by."""
    from bridges.served import serve_process

    model_folder, words, variables = _serve_parts(cfg, model, runs)
    paths = serve_process.python_path(folder, os.environ.get("PYTHONPATH"))
    own = {name: os.environ.get(name, value) for name, value in serve_process.ENVIRONMENT.items()}
    own["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    return model_folder, words, own | variables | {"PYTHONPATH": paths}


def serve_script() -> str:
    """The path of `vllm`, the console script. Raises BridgeError if it is not installed."""
    from bridges.served.serve_process import console_script

    return console_script()


def guarded_token(path: str, key: str = "rollout.engine_token_file") -> str:
    """The token in a file that others cannot read. Raises ConfigError, which names `key`."""
    from bridges.served.http_calls import read_token

    try:
        return read_token(Path(path))
    except BridgeError as e:
        raise ConfigError(f"{key}: {str(e).partition(chr(10))[0]}", e.next_step) from e


def _check_server(cfg: Config, model: ModelConfig, engine: RolloutEngine) -> None:
    """Raise ConfigError if servers do not suit the config. Their weights are compared by publishing."""
    c = engine.capabilities()
    problem = None
    if c.vocab_size != model.vocab_size:
        problem = f"a vocabulary of {c.vocab_size}, but the model's is {model.vocab_size}"
    elif c.max_model_len < cfg.max_model_len:
        problem = f"max_model_len {c.max_model_len}, but a prompt and its completion take {cfg.max_model_len}"
    elif (c.formats.kv_cache == FP8_KV) != (cfg.rollout.kv_cache == "fp8"):
        problem = f'a cache in {c.formats.kv_cache}, but rollout.kv_cache is "{cfg.rollout.kv_cache}"'
    if problem:
        where = ", ".join(cfg.rollout.engine_urls) or "this run's"
        raise ConfigError(f"rollout.engine_urls: the server at {where} has {problem}",
                          "start it for this model")
