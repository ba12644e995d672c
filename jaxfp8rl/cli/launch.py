"""`jaxfp8rl launch`: start the learner's processes and the engines of a run on one host or many."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from jaxfp8rl.config.toml import load_config
from jaxfp8rl.errors import ConfigError

TEXT = "start the processes of a run, on this host, by Ray or by Slurm: learners, and engines (vllm serve)"
LAST_PORT = 65000


def add_options(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the command to the command line; `command` makes its parser."""
    parser = command("launch", _run, TEXT)
    parser.add_argument("--on", choices=("local", "ray", "slurm"), default="local",
                        help="local: children of this command; ray: actors of a Ray cluster; slurm: write a "
                        "script for sbatch, and print it; default: %(default)s")
    parser.add_argument("--dry-run", action="store_true", help="print what runs where, then stop")
    parser.add_argument("--resume", action="store_true",
                        help="continue from the newest checkpoint in run.dir")
    parser.add_argument("--port", type=int, default=0, metavar="P",
                        help="local, slurm: the first of the ports, one a process; default: free ones, under "
                        "Slurm 18800")
    parser.add_argument("--gpus-per-host", type=int, default=8, metavar="N",
                        help="slurm: GPUs of a host; 0: on CPUs; default: %(default)s")
    parser.add_argument("--address", default="", metavar="HOST:PORT",
                        help="ray: the cluster; default: RAY_ADDRESS, or else one on this host for this run")


def _run(args: argparse.Namespace, overrides: list[str]) -> None:
    for option, most in (("port", LAST_PORT), ("gpus_per_host", 64)):
        if not 0 <= (value := getattr(args, option)) <= most:
            raise ConfigError(f"--{option.replace('_', '-')} {value}: not in 0 to {most}",
                              "give another number")
    from jaxfp8rl.launch.run import Launch, check_launchable

    cfg = load_config(args.config, overrides)
    check_launchable(args.config, cfg)
    train = ["jaxfp8rl", "train", args.config, *(["--resume"] if args.resume else [])]
    code = Launch(cfg, train, overrides, dry_run=args.dry_run).on(
        args.on, port=args.port, gpus_per_host=args.gpus_per_host, address=args.address)
    if code:
        sys.exit(code)
