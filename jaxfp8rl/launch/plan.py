"""From a config to the jobs of a run, and the table that shows them."""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

from jaxfp8rl.config.overrides import parse_overrides
from jaxfp8rl.config.rule import changed
from jaxfp8rl.config.sampling_rules import SERVER_SETTINGS
from jaxfp8rl.config.schema import Config
from jaxfp8rl.config.toml import to_toml
from jaxfp8rl.errors import UserError
from jaxfp8rl.launch.jobs import ENGINE, LEARNER, Job, Need, Place, Plan
from jaxfp8rl.policy.shapes import engine_runs, model_config
from jaxfp8rl.rollout.served import serve_parts

TOKEN_FILE = "JAXFP8RL_TOKEN_FILE"  # bridges.vllm_plugin.access: the guard reads the token there
LOOPBACK, UNKNOWN = "127.0.0.1", "@ray@"  # in place of a host
HOST_DEVICES = "--xla_force_host_platform_device_count"


def starts_engines(cfg: Config) -> bool:
    return cfg.rollout.engine == "served" and not cfg.rollout.engine_urls


def needs(cfg: Config, on_gpus: bool) -> list[Need]:
    """The processes of a run: its learners, then the engines that it does not find running."""
    t, r = cfg.train, cfg.rollout
    engines = r.engines if starts_engines(cfg) else 0
    return [Need(LEARNER, i, on_gpus * t.devices // t.processes) for i in range(t.processes)] + [
        Need(ENGINE, i, on_gpus * r.tensor_parallel_size) for i in range(engines)]


def launch_folder(cfg: Config) -> Path:
    """Beside the run directory, which `train` wants for itself."""
    return Path(os.path.abspath(f"{cfg.run.dir.rstrip('/')}.launch"))


def make_plan(cfg: Config, train: Sequence[str], overrides: Sequence[str],
              placed: Sequence[tuple[Need, Place]]) -> Plan:
    """The jobs of a run. `train`: the words of each learner but its overrides, `jaxfp8rl train CONFIG`.
    Engines get theirs by `with_commands`. Nothing is written."""
    folder = launch_folder(cfg)
    learners = [(need, place) for need, place in placed if need.role == LEARNER]
    meet = f"{learners[0][1].host}:{learners[0][1].port}"
    # by CUDA IPC an engine opens memory on the first GPU of each learner; its own GPUs come first, for vLLM
    lent = [place.gpus[0] for _, place in learners if place.gpus] if cfg.rollout.link == "cuda_ipc" else []
    engines = [Job(n, p, ("vllm", "serve"), _visible(p, lent), f"http://{p.host}:{p.port}")
               for n, p in placed if n.role == ENGINE]
    token = str(folder / "token") if engines else cfg.rollout.engine_token_file
    words = (*train, *_overrides(cfg, overrides, [job.address for job in engines], token))
    served = cfg.rollout.engine == "served"
    return Plan(
        tuple(Job(n, p, words, _learner_variables(cfg, n, p, meet), meet) for n, p in learners),
        tuple(engines),
        cfg.rollout.engine_urls, "" if served else cfg.rollout.engine, token, folder, cfg.rollout.restarts,
        cfg.rollout.tensor_parallel_size)


def _overrides(cfg: Config, given: Sequence[str], urls: Sequence[str], token: str) -> list[str]:
    """The overrides of the learners: those that were given, but for what concerns the engines that are
    started; these have it already."""
    if not urls:
        return list(given)
    ours = {name: "" if value is None else to_toml(value)
            for name, value in changed(cfg, SERVER_SETTINGS).items()}
    ours |= {"rollout.engine_urls": to_toml(list(urls)), "rollout.engine_token_file": token}
    kept, rest = [], list(given)
    while rest:
        count = 1 if "=" in rest[0] else 2
        [override] = parse_overrides(word := rest[:count])
        kept += [] if ".".join(override.path) in ours else word
        rest = rest[count:]
    return kept + [f"--{name}={text}" for name, text in ours.items()]


def _learner_variables(cfg: Config, need: Need, place: Place, meet: str) -> dict[str, str]:
    t, found = cfg.train, {}
    if t.processes > 1:
        found = {"JAX_COORDINATOR_ADDRESS": meet, "JAX_PROCESS_ID": str(need.number)}
    if need.gpus:  # under Slurm JAX would take one of them
        found["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, range(need.gpus)))
    elif (devices := t.devices // t.processes) > 1:  # the last of such flags counts
        found["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {HOST_DEVICES}={devices}".strip()
    return found | _visible(place)


def _visible(place: Place, lent: Sequence[str] = ()) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys((*place.gpus, *lent)))} if place.gpus else {}


def with_commands(cfg: Config, plan: Plan, on_each_host: bool = True) -> Plan:
    """The plan with the words of its engines. It writes what they read: the token, a folder with the model's
    config.json, metadata for vLLM. on_each_host: these lie in the plan's folder, which all hosts see."""
    if not plan.engines:
        return plan
    model = model_config(cfg)
    served, words, variables = serve_parts(cfg, model, engine_runs(cfg, model), plan.folder / "metadata")
    if on_each_host:
        served = shutil.copytree(served, plan.folder / "model", dirs_exist_ok=True)
    write_token(Path(plan.token_file))

    def filled(job: Job) -> Job:
        # each engine has its own seed, so that engines differ on requests without one
        seed = str(cfg.run.seed + job.need.number)
        own = ("--host", job.place.host, "--port", str(job.place.port), "--seed", seed)
        return dataclasses.replace(job, words=("vllm", "serve", str(served), *words, *own),
                                   environment=variables | job.environment | {TOKEN_FILE: plan.token_file})

    return dataclasses.replace(plan, engines=tuple(map(filled, plan.engines)))


def write_token(path: Path) -> str:
    """A new token in a file of this user alone -> the token."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    token = secrets.token_urlsafe(32)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token)
    return token


def check_link(cfg: Config, plan: Plan) -> None:
    """Raise UserError if the link cannot reach an engine on another host than the first learner's, or one
    that Ray gives GPUs: by CUDA IPC it would have to see the learner's."""
    first, link = plan.learners[0].place.host, cfg.rollout.link
    if plan.engines and cfg.rollout.server_gpus and first != LOOPBACK:
        print("rollout.server_gpus is of one host, for --on local: here GPUs are those of the table")
    if link == "nccl":
        return
    if far := [job for job in plan.engines if job.place.host != first]:
        raise UserError(f'rollout.link = "{link}" is within one host; {far[0].name} is on '
                        f"{_shown(far[0].place.host)}, the first learner on {_shown(first)}",
                        'set rollout.link = "nccl"')
    if link == "cuda_ipc" and any(job.need.gpus and job.place.gpus is None for job in plan.engines):
        raise UserError('rollout.link = "cuda_ipc": an engine opens memory on the learner\'s GPU, and Ray hides '
                        "that from it", 'set rollout.link = "nccl", or use --on local')


def table(plan: Plan) -> str:
    """The plan as text."""
    rows = [("process", "host", "devices", "address")]
    rows += [(job.name, _shown(job.place.host), _devices(job, plan), _shown(job.address))
             for job in plan.jobs]
    rows += [("engine", "runs already", "", url) for url in plan.running]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    if plan.inside:
        lines.append(f'rollout.engine = "{plan.inside}": the engine is in the process of learner 0')
    if plan.token_file:
        lines.append(f"token: {plan.token_file}")
    return "\n".join(lines)


def _shown(address: str) -> str:
    """A host of a script is "host 0"; one that is not known yet is Ray's choice."""
    return "Ray's choice" if UNKNOWN in address else re.sub(r"@(host)(\d+)@", r"\1 \2", address)


def _devices(job: Job, plan: Plan) -> str:
    parallel = f", tensor parallel {plan.tensor_parallel_size}" if job.need.role == ENGINE else ""
    if not job.need.gpus:
        return f"CPU{parallel}"
    named = f" {','.join(job.place.gpus)}" if job.place.gpus else f"s: {job.need.gpus}"
    return f"GPU{named}{parallel}"
