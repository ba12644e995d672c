"""`jaxfp8rl launch`: what runs where, what is refused, the ends of its children, and the script for Slurm,
run on this host by stand-ins of sbatch's commands."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import micro_run
import pytest

from benchmarks.processes import free_port, runs
from jaxfp8rl.cli.main import main
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.errors import UserError
from jaxfp8rl.launch import children, on_ray, places, plan, run, slurm, supervise
from jaxfp8rl.launch.jobs import ENGINE, LEARNER, Job, Need, Place, Plan

# Serves /health to those who have the token, and ends when it is told to.
ENGINE_STUB = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        token = open(os.environ["JAXFP8RL_TOKEN_FILE"]).read()
        good = self.headers.get("authorization") == "Bearer " + token
        self.send_response(200 if good else 401); self.end_headers()
        if self.path == "/die": os._exit(9)
    def log_message(self, *_): pass
print("engine of process", os.getpid(), flush=True)
http.server.ThreadingHTTPServer.allow_reuse_address = True
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
LEARNER_STUB = """
import os, sys
place = os.environ.get("JAX_PROCESS_ID"), os.environ.get("JAX_COORDINATOR_ADDRESS")
print("learner", *place, sys.argv[1:], flush=True)
"""


def words(folder: Path, **changes) -> list[str]:
    return micro_run.words(folder / "run", {
        "rollout.engine": "served", "rollout.engines": 2, "rollout.fp8_kernel": "emulated",
        "rollout.link": "shared_memory", "precision.compute_dtype": "bfloat16", "train.processes": 2,
        "train.data": 2,
    }, **changes)


def planned(folder: Path, placed=None, **changes) -> Plan:
    cfg = load_config("demo", given := words(folder, **changes))
    placed = placed or places.on_this_host(plan.needs(cfg, False), [])
    return plan.make_plan(cfg, ["jaxfp8rl", "train", "demo"], given, placed)


# What runs where


def test_learners_get_the_first_gpus_and_engines_the_next(tmp_path):
    cfg = load_config("demo", words(tmp_path, train__data=4, rollout__tensor_parallel_size=2,
                                    train__rows_per_microbatch=4))
    wanted = plan.needs(cfg, True)
    assert wanted == [Need(LEARNER, 0, 2), Need(LEARNER, 1, 2), Need(ENGINE, 0, 2), Need(ENGINE, 1, 2)]
    gpus = [place.gpus for _, place in places.on_this_host(wanted, list("01234567"))]
    assert gpus == [("0", "1"), ("2", "3"), ("4", "5"), ("6", "7")]
    named = [place.gpus for _, place in places.on_this_host(wanted, list("01234567"), [0, 1, 2, 3])]
    assert named == [("4", "5"), ("6", "7"), ("0", "1"), ("2", "3")]
    hosts = [place for _, place in places.on_hosts(wanted, 4, slurm.HOSTS, 100)]
    assert hosts == [Place("@host0@", 100, ("0", "1")), Place("@host0@", 101, ("2", "3")),
                     Place("@host1@", 102, ("0", "1")), Place("@host1@", 103, ("2", "3"))]


def test_a_process_never_lies_on_two_hosts():
    wanted = [Need(LEARNER, 0, 2), Need(ENGINE, 0, 4), Need(ENGINE, 1, 2)]
    assert [p.host for _, p in places.on_hosts(wanted, 4, slurm.HOSTS,
                                               1)] == ["@host0@", "@host1@", "@host2@"]


def test_the_words_and_variables_of_learners(tmp_path):
    p = planned(tmp_path)
    first, second = p.learners
    urls = [job.address for job in p.engines]
    assert first.words == second.words  # the first compares them
    meet = first.environment["JAX_COORDINATOR_ADDRESS"]
    assert meet.startswith("127.0.0.1:") and meet == second.environment["JAX_COORDINATOR_ADDRESS"]
    assert [job.environment["JAX_PROCESS_ID"] for job in p.learners] == ["0", "1"]
    cfg = load_config("demo", first.words[3:])  # their config is one for servers that run already
    assert list(cfg.rollout.engine_urls) == urls and cfg.rollout.engines == 1
    assert cfg.rollout.engine_token_file == p.token_file == f"{tmp_path}/run.launch/token"
    assert cfg.train.processes == 2 and cfg.rollout.link == "shared_memory"


def test_a_learner_of_gpus_sees_its_own(tmp_path):
    placed = [(Need(LEARNER, 0, 2), Place("a", 1, ("0", "1"))),
              (Need(LEARNER, 1, 2), Place("b", 1, ("2", "3")))]
    second = planned(tmp_path, placed, rollout__engine="vllm", rollout__engines=1, rollout__link="file",
                     train__data=4, train__rows_per_microbatch=4).learners[1]
    assert second.environment == {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_PROCESS_ID": "1",
                                  "JAX_LOCAL_DEVICE_IDS": "0,1", "CUDA_VISIBLE_DEVICES": "2,3"}


def test_by_cuda_ipc_an_engine_sees_the_first_gpu_of_each_learner_after_its_own(tmp_path):
    """It opens the memory there; vLLM takes the first that it sees."""
    placed = [(Need(LEARNER, 0, 2), Place("a", 1, ("0", "1"))),
              (Need(LEARNER, 1, 2), Place("a", 1, ("2", "3"))),
              (Need(ENGINE, 0, 1), Place("a", 2, ("4",))), (Need(ENGINE, 1, 1), Place("a", 3, ("5",)))]
    seen = {link: [job.environment["CUDA_VISIBLE_DEVICES"] for job in planned(
        tmp_path, placed, rollout__link=link, rollout__server_gpus="[4, 5]").engines]
        for link in ("nccl", "cuda_ipc")}
    assert seen == {"nccl": ["4", "5"], "cuda_ipc": ["4,0,2", "5,0,2"]}
    by_ray = [(need, place._replace(gpus=None)) for need, place in placed]
    cfg = load_config("demo", words(tmp_path, rollout__link="cuda_ipc"))
    with pytest.raises(UserError, match="Ray hides"):
        plan.check_link(cfg, planned(tmp_path, by_ray, rollout__link="cuda_ipc"))


def test_the_dry_run_prints_the_table_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "gpus", lambda: [])
    assert main(["launch", "demo", "--dry-run", *words(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:5]] == [
        ["learner", "0"], ["learner", "1"], ["engine", "0"], ["engine", "1"]]
    assert "CPU, tensor parallel 1  http://127.0.0.1:" in lines[3]
    assert lines[5] == f"token: {tmp_path}/run.launch/token" and list(tmp_path.iterdir()) == []
    monkeypatch.setattr(run, "engine_lacks", lambda cfg: UserError("no vLLM", "install it"))
    assert main(["launch", "demo", "--dry-run", *words(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("a run would fail here: no vLLM\n  next step: install it\n")
    assert main(["launch", "demo", *words(tmp_path)]) == 2 and "no vLLM" in capsys.readouterr().err
    assert main(["launch", "demo", "--on", "ray", "--dry-run", *words(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split(maxsplit=2)[2].startswith("Ray's choice")
    assert main(["launch", "demo", "--dry-run", "--run.dir", str(tmp_path / "run")]) == 0
    assert "the engine is in the process of learner 0" in capsys.readouterr().out


# What is refused


def refused(capsys, *argv: str) -> str:
    assert main(["launch", "demo", *argv]) == 2
    return capsys.readouterr().err


def test_more_gpus_than_there_are(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "gpus", lambda: [type("Gpu", (), {"name": str(i)}) for i in range(3)])
    said = refused(capsys, *words(tmp_path))
    assert "the run wants 4 GPUs (learners 2; engines 2), and this host has 3" in said and "next step" in said
    said = refused(capsys, *words(tmp_path, rollout__tensor_parallel_size=4), "--on", "slurm",
                   "--gpus-per-host", "2")
    assert "the run wants 4 GPUs (engines 4), and a host has 2" in said


def test_a_port_that_is_taken(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "gpus", lambda: [])
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        said = refused(capsys, *words(tmp_path), "--port", str(port := s.getsockname()[1]))
    assert f"port {port} of this host is taken" in said and "--port" in said
    assert "not in 0 to 65000" in refused(capsys, "--port", "70000", *words(tmp_path))


def test_servers_that_run_already_have_a_host_and_a_private_token(tmp_path, capsys):
    token = tmp_path / "token"
    running = words(tmp_path, rollout__engines=1, rollout__fp8_kernel="native",
                    rollout__engine_urls='["http://127.0.0.1:1"]', rollout__engine_token_file=token)
    assert "No such file" in refused(capsys, "--dry-run", *running)
    token.write_text("a-token-of-the-tests")
    token.chmod(0o644)
    said = refused(capsys, "--dry-run", *running)
    assert "other users may use the token (mode -rw-r--r--)" in said and f"chmod 600 {token}" in said
    token.chmod(0o600)
    assert main(["launch", "demo", "--dry-run", *running]) == 0
    assert "engine runs already http://127.0.0.1:1 " in " ".join(capsys.readouterr().out.split()) + " "
    said = refused(capsys, "--dry-run", *running, "--rollout.engine_urls",
                   '["http://no-such-host.invalid:1"]')
    assert "no such host: 'no-such-host.invalid'" in said


def test_a_link_within_one_host_and_a_run_in_place_of_its_config(tmp_path, capsys):
    said = refused(capsys, "--on", "slurm", "--gpus-per-host", "3", *words(tmp_path))
    assert 'rollout.link = "shared_memory" is within one host; engine 1 is on' in said and '"nccl"' in said
    with pytest.raises(UserError, match="is a run: its config names the engines that it had"):
        run.check_launchable(str(tmp_path), load_config("demo"))


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_command_of_pip_is_said(tmp_path, capsys):
    assert 'pip install "jaxfp8rl[ray]"' in refused(capsys, "--on", "ray", *words(tmp_path))


# Children


@pytest.fixture
def stubs(tmp_path, monkeypatch):
    """A plan of stand-ins; `ends` is what the learners do at last, of Python."""
    def made(ends: str = "", restarts: int = 1, engines: int = 2) -> Plan:
        p = planned(tmp_path, rollout__restarts=restarts, rollout__engines=engines)
        plan.write_token(Path(p.token_file))
        filled = tuple(Job(job.need, job.place, ("vllm", "--port", str(job.place.port)),
                           {plan.TOKEN_FILE: p.token_file}, job.address) for job in p.engines)
        code = {"vllm": ENGINE_STUB, "jaxfp8rl": LEARNER_STUB + ends}
        monkeypatch.setattr(children, "program",
                            lambda words: [sys.executable, "-c", code[words[0]], *words[1:]])
        return Plan(p.learners, filled, (), "", p.token_file, p.folder, p.restarts)

    monkeypatch.setattr(supervise, "POLL_SECONDS", 0.02)
    return made


def gone(text: str) -> bool:
    """Whether the engines that a log names have ended, or do within a moment."""
    pids, until = re.findall(r"^engine of process (\d+)$", text, re.M), time.monotonic() + 5
    while any(map(runs, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    return bool(pids) and not any(map(runs, pids))


def test_the_command_ends_with_the_learner_and_gives_its_code(stubs, capfd):
    p = stubs("sys.exit(int(os.environ['JAX_PROCESS_ID']) and 7)")
    assert supervise.run_here(p) == 7
    out = capfd.readouterr().out
    assert "learner 0 127.0.0.1:" in out and "learner 1 127.0.0.1:" not in out
    assert "learner 1 127.0.0.1:" in (p.folder / "learner-1.log").read_text()
    assert all(gone((p.folder / f"engine-{i}.log").read_text()) for i in range(2))
    assert not Path(p.token_file).exists()


def test_an_engine_that_ends_is_started_again_at_its_address(stubs, capfd):
    p = stubs("""
import json, time, urllib.request
given = dict(word.split("=", 1) for word in sys.argv if "=" in word)
[url], token = json.loads(given["--rollout.engine_urls"]), given["--rollout.engine_token_file"]
def ask(path):
    request = urllib.request.Request(url + path, headers={'Authorization': 'Bearer ' + open(token).read()})
    return urllib.request.urlopen(request, timeout=5).status
if os.environ['JAX_PROCESS_ID'] == '0':
    try: ask('/die')
    except OSError: pass
    for _ in range(500):
        try: sys.exit(ask('/health') != 200)
        except OSError: time.sleep(0.02)
    sys.exit(1)
""", engines=1)
    assert supervise.run_here(p) == 0
    assert "engine 0 ended with exit status 9; it is started again, 1 of 1 times" in capfd.readouterr().err
    log = (p.folder / "engine-0.log").read_text()
    assert log.count("engine of process") == 2 and gone(log)


def test_an_engine_that_does_not_start_ends_all(stubs, monkeypatch):
    p = stubs(restarts=0)
    monkeypatch.setattr(children, "program", lambda words: ["/bin/sh", "-c", "echo no weights here; exit 3"])
    said = r"engine \d ended with exit status 3 before it was ready\n    no weights"
    with pytest.raises(UserError, match=said) as e:
        supervise.run_here(p)
    assert e.value.exit_code == 5


def test_a_signal_goes_to_the_learners(stubs, capfd):
    p = stubs("import signal, time; signal.signal(15, lambda *_: sys.exit(143)); print('armed', flush=True); "
              "time.sleep(60)", engines=1)

    def ask():
        log = p.folder / "learner-1.log"
        while not (log.exists() and "armed" in log.read_text()):
            time.sleep(0.02)
        time.sleep(0.3)  # the other one, too
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask).start()
    assert supervise.run_here(p) == 143
    assert gone((p.folder / "engine-0.log").read_text())


def test_children_end_with_a_command_that_is_killed(tmp_path):
    code = """
from pathlib import Path
from jaxfp8rl.launch import children
from jaxfp8rl.launch.jobs import Job, Need, Place
children.program = lambda words: ["/bin/sh", "-c", "sleep 60 & echo engine of process $!; wait"]
child = children.Child(Job(Need("engine", 0, 0), Place("here", 1), ("vllm",), {}, ""))
child.wait()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        said = parent.stdout.readline()
        assert runs(said.split()[-1])
        parent.kill()
    assert gone(said)


# Slurm

STAND_INS = {
    "scontrol": 'for _ in 1 2; do echo 127.0.0.1; done',
    # options up to the command
    "srun": 'while [ "${1#--}" != "$1" ]; do echo "$1" >>"$RECORD"; shift; done; exec "$@"',
    "vllm": 'exec "$PYTHON" -c "$ENGINE_STUB" "$@"',
    "jaxfp8rl": 'exec "$PYTHON" -c "$LEARNER_STUB" "$@"',
}


@pytest.fixture
def slurm_host(tmp_path, monkeypatch):
    """The environment in which this host is a cluster of two."""
    for name, text in STAND_INS.items():
        (program := tmp_path / "bin" / name).parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/bash\n{text}\n")
        program.chmod(0o755)
    return os.environ | {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "x", "PYTHON": sys.executable,
        "ENGINE_STUB": ENGINE_STUB, "RECORD": str(tmp_path / "record"),
    }


def scripted(folder: Path) -> tuple[Plan, Path]:
    cfg = load_config("demo", given := words(folder))
    placed = [(need, place._replace(port=free_port())) for need, place in places.on_hosts(
        plan.needs(cfg, False), 0, slurm.HOSTS, 1)]
    p = plan.make_plan(cfg, ["jaxfp8rl", "train", "demo"], given, placed)
    p = plan.with_commands(cfg, p)
    return p, slurm.write_script(p, 0)


@pytest.mark.parametrize(("ends", "code"), [("", 0), ("sys.exit(3)", 3)])
def test_the_script_runs_its_steps_and_ends_with_the_learner(tmp_path, slurm_host, ends, code):
    p, script = scripted(tmp_path)
    subprocess.run(["bash", "-n", script], check=True)
    assert Path(p.token_file).stat().st_mode & 0o777 == 0o600
    done = subprocess.run(["bash", script], env=slurm_host | {"LEARNER_STUB": LEARNER_STUB + ends},
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    said = [(p.folder / f"learner-{i}.log").read_text() for i in range(2)]
    meet = f"127.0.0.1:{p.learners[0].place.port}"
    assert [s.split()[:3] for s in said] == [["learner", "0", meet], ["learner", "1", meet]]
    urls = [f"http://127.0.0.1:{job.place.port}" for job in p.engines]
    assert f"--rollout.engine_urls={json.dumps(urls)}" in said[0]
    assert all(gone((p.folder / f"engine-{i}.log").read_text()) for i in range(2))
    assert "--nodelist=127.0.0.1" in (tmp_path / "record").read_text()


def test_words_of_the_script_reach_the_command_as_they_are(tmp_path):
    odd = ("jaxfp8rl", "train", "a b.toml", '--task.x="$HOME `date` \\', "--url=http://@host1@:5/'\"")
    job = Job(Need(LEARNER, 0, 0), Place("@host0@", 1), odd, {"A": "b c"}, "")
    line = slurm._step("step", job)
    done = subprocess.run(["bash", "-c",
                           f'hosts=(here there); folder=x; step() {{ printf "%s\\n" "${{@:4}}"; }}; {line}'],
                          capture_output=True, text=True)
    assert done.stdout.splitlines() == ["A=b c", *odd[:4], "--url=http://there:5/'\""]


def test_a_script_for_gpus_asks_for_them(tmp_path, capsys):
    given = words(tmp_path, rollout__link="nccl", rollout__server_gpus="[2, 3]")
    assert main(["launch", "demo", "--on", "slurm", "--gpus-per-host", "3", *given]) == 0
    out = capsys.readouterr().out
    assert "#SBATCH --nodes=2\n" in out and "#SBATCH --gpus-per-node=3\n" in out
    assert "rollout.server_gpus is of one host" in out and "sbatch " in out.splitlines()[-1]
    assert 'step "${hosts[0]}" "$folder/learner-1.log" env CUDA_VISIBLE_DEVICES=1' in out
    assert 'engine "${hosts[1]}" "$folder/engine-1.log" env CUDA_VISIBLE_DEVICES=0' in out
    assert shlex.quote("--weight-transfer-config") in out and "bridges.vllm_plugin.guard.Guard" in out


# Ray, without it


def test_an_actor_tells_what_its_job_has_written_and_how_it_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(children, "program", lambda words: ["/bin/sh", "-c", "echo one; sleep 0.1; exit 4"])
    job = Job(Need(LEARNER, 0, 0), Place("here", 1), ("jaxfp8rl",), {}, "")
    actor, written, code = on_ray.JobActor(job, tmp_path / "log", {}, os.getcwd(), False), b"", None
    while code is None:
        code, new = actor.poll()
        written += new
    assert (code, written) == (4, b"one\n")
    actor.end()
