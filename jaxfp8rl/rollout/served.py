"""The served engines of a run: stock `vllm serve` processes, its children or those that run already."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from bridges.api import BridgeError, RolloutEngine, WeightTransport
from jaxfp8rl.config.sampling import Rollout
from jaxfp8rl.config.schema import Config
from jaxfp8rl.distributed.process_group import ProcessGroup
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.precision.layer_runs import LayerRun
from jaxfp8rl.precision.recipe import FP8_KV
from jaxfp8rl.rollout.vllm_options import vllm_options

SPARE = 8  # connections beside those of sequences that are decoded

if TYPE_CHECKING:
    from bridges.served.serve_process import ServeProcesses


def open_served(cfg: Config, model: ModelConfig, runs: tuple[LayerRun, ...],
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


def _first_gpu() -> int | None:
    """The number of the learner's first GPU among those that this process sees."""
    first = jax.local_devices()[0]
    return first.local_hardware_id if first.platform == "gpu" else None


def publish_senders(cfg: Config, group: ProcessGroup) -> dict[str, Any]:
    """By which each process of the group sends its own shards to served engines: the keywords `outlet` and,
    for several processes, `learners` of a ServedTransport. Empty for other engines."""
    if cfg.rollout.engine != "served":
        return {}
    from bridges.served.outlet import Outlet

    outlet = Outlet(group.number, gpu=_first_gpu())
    return {"outlet": outlet} | ({"learners": group.serve(outlet)} if group.count > 1 else {})


def _serve_parts(cfg: Config, model: ModelConfig,
                 runs: tuple[LayerRun, ...]) -> tuple[str, list[str], dict[str, str]]:
    """(a folder with the model's config.json, the words after it, variables): `vllm serve FOLDER WORDS`."""
    from bridges.served.serve_options import model_folder, serve_variables, serve_words

    options = vllm_options(cfg, model, runs)
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
