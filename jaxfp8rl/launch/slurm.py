"""A plan as a script for `sbatch`: a step (`srun`) for each process, engines first."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from jaxfp8rl.launch.jobs import Job, Plan
from jaxfp8rl.launch.supervise import READY_SECONDS

HOSTS = [f"@host{i}@" for i in range(4096)]  # of the script, which gives them their names

SCRIPT = """\
#!/bin/bash
#SBATCH --job-name=jaxfp8rl
#SBATCH --nodes={nodes}
#SBATCH --exclusive
{gpus}# Written by `jaxfp8rl launch --on slurm`. Submit it from the environment that has jaxfp8rl and vLLM:
# account, partition and time are options of sbatch. All hosts see this folder:
folder={folder}
token={token}
set -um  # each background job is a process group
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

step() {{  # HOST LOG COMMAND...
  exec srun --overlap --nodes=1 --ntasks=1 --nodelist="$1"{srun_gpus} "${{@:3}}" >>"$2" 2>&1
}}
engine() {{  # HOST LOG COMMAND...: started again, and the learner gives it the last publish
  for _ in $(seq 0 {restarts}); do (step "$@"); done
}}
answers() {{
  python3 - "$1" "$token" <<'PYTHON'
import sys, urllib.request
token = {{"Authorization": "Bearer " + open(sys.argv[2]).read()}}
request = urllib.request.Request(sys.argv[1] + "/health", headers=token)
urllib.request.build_opener(urllib.request.ProxyHandler({{}})).open(request, timeout=5)
PYTHON
}}
end() {{
  trap - EXIT TERM INT
  for job in $(jobs -p); do kill -TERM -- "-$job"; done 2>/dev/null
  wait
}}
trap end EXIT
trap 'kill -TERM "${{learners[@]}}" 2>/dev/null' TERM INT  # they save, and end

{engines}
learners=()
{learners}
code=0
for process in "${{learners[@]}}"; do
  while kill -0 "$process" 2>/dev/null; do wait "$process"; status=$?; done  # a signal ends a wait
  if [ "$code" = 0 ]; then code=$status; fi
done
exit "$code"
"""

WAIT = """\
for url in {urls}; do
  until answers "$url" 2>/dev/null; do
    if [ "$SECONDS" -gt {seconds:.0f} ]; then echo "$url is not ready: see $folder"; exit 5; fi
    sleep 2
  done
done
"""


def script(plan: Plan, gpus_per_host: int) -> str:
    """The script of a plan whose hosts are `HOSTS`."""
    nodes = len({job.place.host for job in plan.jobs})
    begun = "\n".join(f"{_step('engine', job)} &" for job in plan.engines)
    if urls := " ".join(f'"{_named(job.address)}"' for job in plan.engines):
        begun += "\n" + WAIT.format(urls=urls, seconds=READY_SECONDS)
    return SCRIPT.format(
        nodes=nodes, gpus=f"#SBATCH --gpus-per-node={gpus_per_host}\n" if gpus_per_host else "",
        srun_gpus=f" --gpus-per-node={gpus_per_host}" if gpus_per_host else "",
        folder=shlex.quote(str(plan.folder)), token=shlex.quote(plan.token_file), restarts=plan.restarts,
        engines=begun, learners="\n".join(f"{_step('step', job)} &\nlearners+=($!)" for job in plan.learners))


def _step(function: str, job: Job) -> str:
    variables = [f"{name}={_word(value)}" for name, value in sorted(job.environment.items())]
    words = " ".join([*variables, *map(_word, job.words)])
    log = f'"$folder/{job.name.replace(" ", "-")}.log"'
    return f'{function} "{_named(job.place.host)}" {log} env {words}'


def _word(text: str) -> str:
    """A word of bash, in which the names of hosts are expanded."""
    return f'"{_named(_escaped(text))}"' if "@host" in text else shlex.quote(text)


def _escaped(text: str) -> str:
    return "".join(f"\\{c}" if c in '\\"$`' else c for c in text)


def _named(text: str) -> str:
    for i in _numbers(text):
        text = text.replace(HOSTS[i], f"${{hosts[{i}]}}")
    return text


def _numbers(text: str) -> Sequence[int]:
    return [int(part.split("@")[0]) for part in text.split("@host")[1:]]


def write_script(plan: Plan, gpus_per_host: int) -> Path:
    plan.folder.mkdir(parents=True, exist_ok=True)
    path = plan.folder / "launch.sbatch"
    path.write_text(script(plan, gpus_per_host))
    path.chmod(0o700)
    return path
