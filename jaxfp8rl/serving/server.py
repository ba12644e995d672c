"""Start a training server and serve until a signal."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

from jaxfp8rl.config.schema import Config
from jaxfp8rl.errors import ConfigError, UserError, check_writable
from jaxfp8rl.memory.cache import with_cache
from jaxfp8rl.rollout.gpu_memory import share_gpu
from jaxfp8rl.rollout.served import guarded_token
from jaxfp8rl.serving.guard import PREFIX, check_host, check_port
from jaxfp8rl.serving.learner import Learner, check_config
from jaxfp8rl.serving.service import Limits, Service


def awake(cfg: Config) -> Config:
    """The config of a server: its engine never sleeps, because a client may sample at any time."""
    return cfg.having("rollout", sleep="off")


def default_name(cfg: Config) -> str:
    """The name by which clients ask for the model: model.path as it stands, which is also where a client on
    this machine finds the tokenizer."""
    return cfg.model.path or "model"


def make_server(cfg: Config, name: str, folder: Path, token: str = "", host: str = "127.0.0.1",
                port: int = 8000,
                limits: Limits | None = None, **bounds: Any) -> Any:
    """A uvicorn.Server of the model of `cfg`; its `run()` serves. `folder`: of saved weights. bounds:
    keywords of make_app. Raises UserErrors: as check_config, of the host, of missing packages, and as Learner
    does."""
    check_config(cfg)
    check_host(host, token)
    if cfg.lora.rank and limits and limits.lora_as_all_parameters:
        raise ConfigError(f"--lora-as-all-parameters with lora.rank = {cfg.lora.rank}: one trains all "
                          "parameters, the other adapters", "leave one out")
    try:
        import tinker  # noqa: F401
        import uvicorn

        from jaxfp8rl.serving.app import make_app
    except ModuleNotFoundError as e:
        raise UserError(f"serve-training: {e.name} is not installed here",
                        'pip install "jaxfp8rl[tinker]"') from e
    check_writable(folder, "--weights")
    check_port(host, port)
    limits = limits or Limits()
    service = Service(Learner(cfg, name, folder, limits.snapshots), limits, say)
    config = uvicorn.Config(make_app(service, token, **bounds), host=host, port=port, log_level="warning",
                            timeout_graceful_shutdown=5)
    return uvicorn.Server(config)


def say(error: BaseException) -> None:
    """Print an error that is not a client's, with its stack."""
    print("".join(traceback.format_exception(error)), file=sys.stderr)


def serve(cfg: Config, name: str, folder: str, token_file: str, host: str, port: int, limits: Limits) -> None:
    """Serve until SIGINT or SIGTERM. Raises UserErrors, all before the first request."""
    token = guarded_token(token_file, "--token-file") if token_file else ""
    share_gpu(cfg)
    cfg, of_cache = with_cache(awake(cfg))
    if of_cache:
        print(of_cache)
    name = name or default_name(cfg)
    server = make_server(cfg, name, Path(folder).expanduser(), token, host, port, limits)
    key = f"{PREFIX}<the token of {token_file}>" if token else f"{PREFIX}any"
    print(f"serving {name} at http://{host}:{port}: TINKER_BASE_URL=http://{host}:{port} "
          f"TINKER_API_KEY={key}",
          flush=True)
    server.run()
