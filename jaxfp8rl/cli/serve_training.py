"""`jaxfp8rl serve-training`: a training server for the `tinker` client."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from jaxfp8rl.config.toml import load_config
from jaxfp8rl.errors import ConfigError

TOKEN_FILE = "JAXFP8RL_TOKEN_FILE"  # as the guard of vLLM reads it
LARGEST_PORT = 65535


def add_options(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command to the command line; `command` makes its parser."""
    text = "serve a model to the `tinker` client, which trains it and samples from it"
    parser = command("serve-training", _run, text)
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS",
                        help="where to listen; default: %(default)s. Others than this machine "
                             "need --token-file")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="default: %(default)s")
    parser.add_argument("--token-file", default=os.environ.get(TOKEN_FILE, ""), metavar="FILE",
                        help="a file with the token that clients must give, as API key tml-TOKEN; default: "
                             f"that of {TOKEN_FILE}. Without one every user of this machine can use the "
                             "server")
    parser.add_argument("--name", default="", help="the base_model that clients ask for; default: model.path")
    parser.add_argument("--weights", default="", metavar="FOLDER",
                        help="where saved weights are written; default: tinker/ of run.dir")
    parser.add_argument("--models", type=int, default=1, metavar="N",
                        help="how many models are trained at once, each with masters, moments and gradients "
                             "of its own; default: %(default)s")
    parser.add_argument("--snapshots", type=int, default=3, metavar="N",
                        help="how many weights saved for sampling stay in memory; default: %(default)s")
    parser.add_argument("--lora-as-all-parameters", action="store_true",
                        help="take create_lora_training_client, and train all parameters instead of adapters")


def _run(args: argparse.Namespace, overrides: list[str]) -> None:
    for name in ("models", "snapshots"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name} {getattr(args, name)}", "give 1 or more")
    if not 0 < args.port <= LARGEST_PORT:
        raise ConfigError(f"--port {args.port}", f"give a port from 1 to {LARGEST_PORT}")
    cfg = load_config(args.config, overrides)
    from jaxfp8rl.serving.server import serve
    from jaxfp8rl.serving.service import Limits

    limits = Limits(args.models, args.snapshots, lora_as_all_parameters=args.lora_as_all_parameters)
    serve(cfg, args.name, args.weights or str(Path(cfg.run.dir, "tinker")), args.token_file, args.host,
          args.port,
          limits)
