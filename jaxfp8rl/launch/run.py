"""`jaxfp8rl launch` as a function."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

from jaxfp8rl.config.schema import Config
from jaxfp8rl.errors import UserError
from jaxfp8rl.gpus import gpus
from jaxfp8rl.launch.jobs import Need, Place
from jaxfp8rl.launch.on_ray import RayRun
from jaxfp8rl.launch.places import check_running, on_hosts, on_this_host
from jaxfp8rl.launch.plan import UNKNOWN, check_link, make_plan, needs, table, with_commands
from jaxfp8rl.launch.slurm import HOSTS, write_script
from jaxfp8rl.launch.supervise import run_here
from jaxfp8rl.rollout.engines import engine_lacks
from jaxfp8rl.run.run_directory import check_claimable

Placed = Sequence[tuple[Need, Place]]
SLURM_PORT = 18800


class Launch:
    """What to run. train: the words `jaxfp8rl train CONFIG` with its options, of each learner. overrides:
    their settings, which `cfg` has."""

    def __init__(self, cfg: Config, train: Sequence[str], overrides: Sequence[str] = (), *,
                 dry_run: bool = False):
        self._cfg, self._train, self._overrides, self._dry_run = cfg, train, overrides, dry_run

    def on(self, where: Literal["local", "ray", "slurm"], *, port: int = 0, gpus_per_host: int = 8,
           address: str = "") -> int:
        """Print the table, and run it -> the learner's exit code. Raises UserErrors: more GPUs than there
        are, a port that is taken, servers that run already on no known host or with a token that others may
        read."""
        check_claimable(self._cfg, "--resume" in self._train)
        if where == "slurm":
            return self._slurm(port or SLURM_PORT, gpus_per_host)
        check_running(self._cfg)
        return self._local(port) if where == "local" else self._ray(address)

    def _local(self, port: int) -> int:
        found = [gpu.name for gpu in gpus()]
        wanted = needs(self._cfg, bool(found) or _wants_gpus())
        if (lack := engine_lacks(self._cfg)) and not self._dry_run:
            raise lack
        plan = self._planned(on_this_host(wanted, found, self._cfg.rollout.server_gpus, port))
        if lack:
            print(f"a run would fail here: {lack}")
        return 0 if self._dry_run else run_here(with_commands(self._cfg, plan, on_each_host=False))

    def _slurm(self, port: int, gpus_per_host: int) -> int:
        plan = self._planned(on_hosts(needs(self._cfg, gpus_per_host > 0), gpus_per_host, HOSTS, port))
        if not self._dry_run:
            path = write_script(with_commands(self._cfg, plan), gpus_per_host)
            print(f"\n{path.read_text()}\nto start it: sbatch {path}")
        return 0

    def _ray(self, address: str) -> int:
        if self._dry_run:
            nowhere = [(n, Place(UNKNOWN, 0, None)) for n in needs(self._cfg, _wants_gpus())]
            self._planned(nowhere)
            return 0
        count = len(needs(self._cfg, False))
        with RayRun(count, address) as ray:
            plan = self._planned(ray.place(needs(self._cfg, ray.on_gpus())))
            return ray.run(with_commands(self._cfg, plan))

    def _planned(self, placed: Placed):
        plan = make_plan(self._cfg, self._train, self._overrides, placed)
        print(table(plan), flush=True)
        check_link(self._cfg, plan)
        return plan


def _wants_gpus() -> bool:
    return os.environ.get("JAX_PLATFORMS", "") not in ("", "cpu")


def check_launchable(path: str, cfg: Config) -> None:
    """Raise UserError for the config.toml of a run, which names engines that have ended."""
    if os.path.isdir(path):
        raise UserError(f"{path} is a run: its config names the engines that it had",
                        "give the CONFIG that it was launched with, and --resume")
