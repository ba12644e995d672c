"""What a training server refuses: each by name, with its next step, as the client's own errors."""

from __future__ import annotations

import httpx
import jax
import numpy as np
import pytest
from tinker_server import KEY, NAME, client, config, datum, serving, tinker

from jaxfp8rl.checkpoint.export import quantize_folder
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.models.loading import save_params
from jaxfp8rl.models.module import init_params
from jaxfp8rl.policy.shapes import model_config
from jaxfp8rl.serving.guard import Guard, api_key, check_host
from jaxfp8rl.serving.refusal import Refused
from jaxfp8rl.serving.server import make_server
from jaxfp8rl.serving.service import BASE, Limits

types = tinker.types
PROMPT = [3, 4, 5]
GOOD = {"logprobs": -1.0, "advantages": 1.0}
pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(scope="module")
def server(tmp_path_factory, quick_compile):
    folder = tmp_path_factory.mktemp("server")
    limits = Limits(snapshots=1, patience=0.5)
    with serving(config(folder), folder / "weights", limits=limits, largest_body=100_000) as url:
        yield url


@pytest.fixture(scope="module")
def service(server):
    with client(server) as found:
        yield found


@pytest.fixture(scope="module")
def trainer(service):
    return service.create_training_client_from_state(BASE).result(60)


def refused(call, *words, error=tinker.RequestFailedError):
    """The message of the error that `call` raises; it has all of the words and a next step."""
    with pytest.raises(error) as e:
        call()
    for word in (*words, "next"):
        assert word in str(e.value), str(e.value)


ONE = datum(PROMPT, [7, 8], **GOOD)
WIDE = types.Datum(model_input=types.ModelInput.from_ints(PROMPT), loss_fn_inputs={
    "target_tokens": types.TensorData(data=[1] * 6, dtype="int64", shape=[3, 2])})
PASSES = {
    "unknown loss": ([ONE], "gspo", None, "loss_fn 'gspo'", "take cross_entropy, importance_sampling, ppo",
                     "forward_backward_custom"),
    "misspelt loss": ([ONE], "importance_samplin", None, 'did you mean "importance_sampling"'),
    "unknown setting": ([ONE], "ppo", {"clip_hi_threshold": 1.2}, "clip_hi_threshold", "clip_high_threshold"),
    "setting that is text": ([ONE], "ppo", {"clip_high_threshold": "x"}, "clip_high_threshold",
                             "finite number"),
    "setting without default": ([ONE], "dro", None, "dro needs loss_fn_config.beta"),
    "missing input": ([datum(PROMPT, [7], advantages=1.0)], "ppo", None, "datum 0", "'logprobs'"),
    "unknown input": ([ONE], "cross_entropy", None, "datum 0", "cross_entropy has no loss_fn_input"),
    "several targets": ([WIDE], "cross_entropy", None, "datum 0: target_tokens has shape [3, 2]"),
    "not finite": ([datum(PROMPT, [7], logprobs=np.nan, advantages=1.0)], "ppo", None, "logprobs",
                   "[2] = nan is not finite"),
    "too long": ([ONE, datum(PROMPT, [7] * 50, **GOOD)], "ppo", None, "datum 1: 52 tokens", "1 to 48",
                 "cut it to 48, or start the server with a larger train.row_tokens"),
    "outside the vocabulary": ([datum(PROMPT, [99], **GOOD)], "ppo", None, "target_tokens[2] = 99",
                               "vocabulary of 32, 0 to 31", "get_tokenizer()"),
    "not a token": ([datum(PROMPT, [7], **GOOD | {"target_tokens": 6.5})], "ppo", None,
                    "target_tokens[2] = 6.5"),
    "masked as elsewhere": ([datum(PROMPT, [-100], **GOOD)], "ppo", None, "target_tokens[2] = -100",
                            "give 0 where nothing is learned"),
}


@pytest.mark.parametrize("case", PASSES)
def test_a_pass_is_refused_by_name_and_the_next_request_goes_on(trainer, case):
    data, loss, knobs, *words = PASSES[case]
    refused(lambda: trainer.forward_backward(data, loss, knobs).result(60), *words)
    assert trainer.forward([ONE], "ppo").result(60).metrics


@pytest.mark.parametrize("changes,word", [
    ({"beta1": 1.0}, "beta1"), ({"eps": 0.0}, "eps"), ({"learning_rate": -1.0}, "learning_rate")])
def test_an_update_is_refused_by_name(trainer, changes, word):
    refused(lambda: trainer.optim_step(types.AdamParams(**changes)).result(60), word, "out of its range")


def test_the_request_after_one_with_nan_does_not_wait_for_its_number(trainer):
    """The client sends NaN as null, which its own type refuses."""
    refused(lambda: trainer.optim_step(types.AdamParams(learning_rate=float("nan"))).result(60),
            "learning_rate", "should be a valid number", "NaN")
    assert trainer.forward([ONE], "ppo").result(60).metrics


def test_the_request_after_one_that_is_too_large_does_not_wait_for_its_number(trainer):
    large = datum([3] * 30_000, [7], **GOOD)
    refused(lambda: trainer.forward_backward([large], "ppo").result(60), "more than 100000 bytes",
            "send fewer data at once")
    assert trainer.forward([ONE], "ppo").result(60).metrics


def test_an_update_without_gradients_and_one_that_is_not_finite_change_nothing(trainer):
    refused(lambda: trainer.optim_step(types.AdamParams()).result(60), "no forward_backward since")
    before = trainer.forward([ONE], "ppo").result(60).loss_fn_outputs[0]["logprobs"].to_numpy()
    trainer.forward_backward([datum(PROMPT, [7], logprobs=-500.0, advantages=1.0)],
                             "importance_sampling").result(60)
    refused(lambda: trainer.optim_step(types.AdamParams()).result(60), "not finite", "no byte")
    after = trainer.forward([ONE], "ppo").result(60).loss_fn_outputs[0]["logprobs"].to_numpy()
    np.testing.assert_array_equal(before, after)


def test_names_and_paths_of_saved_weights(service, trainer):
    refused(lambda: trainer.save_state("../../x").result(60), "'../../x'")
    path = trainer.save_state("once").result(60).path
    refused(lambda: trainer.save_state("once").result(60), "exists already")
    assert trainer.save_state("once", overwrite=True).result(60).path == path
    sampler = lambda p: lambda: service.create_sampling_client(model_path=p).result(60)
    refused(sampler(path), "a state to train from", error=tinker.BadRequestError)
    refused(sampler("tinker://a/../../etc"), "not a path", BASE, error=tinker.BadRequestError)
    refused(sampler(f"{path}x".replace("/weights/", "/sampler_weights/")), "no such weights",
            error=tinker.NotFoundError)


def test_models_that_are_not_served(service, trainer):
    make = lambda *args, **more: lambda: service.create_lora_training_client(*args, **more).result(60)
    refused(make("other"), "'other'", f"'{NAME}'", error=tinker.BadRequestError)
    refused(make(NAME), "not LoRA adapters", BASE, error=tinker.BadRequestError)
    from_base = lambda **more: service.create_training_client_from_state(BASE, **more).result(60)
    refused(lambda: from_base(optimizer=types.DimuonOptimizerConfig()), "'dimuon'",
            error=tinker.BadRequestError)
    refused(from_base, "trains 1 models at once", error=tinker.BadRequestError)


def test_samples_are_refused_by_name(service, trainer):
    sampler = service.create_sampling_client(base_model=NAME).result(60)
    ask = lambda prompt=PROMPT, n=1, more=None, **params: lambda: sampler.sample(
        types.ModelInput.from_ints(prompt), n, types.SamplingParams(**{"max_tokens": 4} | params),
        **more or {}
    ).result(60)
    for call, *words in (
            (ask(max_tokens=22), "max_tokens = 22", "up to 24", "max_tokens from 1 to 21"),
            (ask([3] * 24), "cut the prompt to 23 tokens"), (ask([]), "no tokens"),
            (ask([3, 99]), "prompt[1] = 99", "vocabulary of 32"), (ask(stop=[32]), "stop[0] = 32"),
            (ask(temperature=-1.0), "temperature = -1.0"),
            (ask(top_p=0.0), "top_p = 0.0"), (ask(n=0), "num_samples = 0"),
            (ask(n=4097), "num_samples = 4097", "several requests"), (ask(stop=[""]), "stop"),
            (ask(more={"topk_sample_logprobs": 3}), "topk_sample_logprobs"),
            (ask(more={"include_prompt_logprobs": True, "prompt_logprobs_last_n": 3}),
             "prompt_logprobs_last_n = 3")):
        refused(call, *words, error=tinker.BadRequestError)


def test_tinker_cookbooks_own_choice_of_a_loss_is_refused_with_one_that_is_computed(service):
    sampler = service.create_sampling_client(base_model=NAME, record_stability_info=True).result(60)
    refused(lambda: sampler.sample(types.ModelInput.from_ints(PROMPT), 1, types.SamplingParams(max_tokens=2)
                                   ).result(60),
            "record_stability_info", "loss_fn=importance_sampling", error=tinker.BadRequestError)


def test_weights_that_were_only_in_memory_and_are_gone(trainer):
    old, new = (trainer.save_weights_and_get_sampling_client().result(60) for _ in range(2))
    ask = lambda sampler: sampler.sample(types.ModelInput.from_ints(PROMPT), 1,
                                         types.SamplingParams(max_tokens=2)).result(60)
    assert ask(new).sequences
    refused(lambda: ask(old), "are gone", "--snapshots")


# By hand: what the client itself would never send


@pytest.fixture
def post(server):
    with httpx.Client(base_url=f"{server}/api/v1", headers={"x-api-key": KEY}) as http:
        yield lambda route, body=None, **more: http.post(route, **({"json": body} if body is not None
                                                                   else {}), **more)


def test_requests_out_of_order(service, trainer, post):
    refused_by = lambda answer: (answer.status_code, answer.json()["error"])
    step = lambda number: {"model_id": trainer.model_id, "seq_id": number, "adam_params": {}}
    number = trainer._request_id_counter + 1
    status, error = refused_by(post("optim_step", step(1)))
    assert status == 400 and "seq_id 1 is out of order" in error and f"the next is {number}" in error
    early = post("optim_step", step(number + 1)).json()["request_id"]
    answer = post("retrieve_future", {"request_id": early}).json()
    assert answer["category"] == "user" and f"waited 0.5 s for seq_id {number}" in answer["error"]
    assert refused_by(post("optim_step", step(0)))[0] == 400
    once, again = (post("optim_step", step(number + 2)).json()["request_id"] for _ in range(2))
    assert once == again  # the client sends a request again when the connection broke
    trainer._request_id_counter = trainer._turn_counter = number + 2
    assert trainer.forward([ONE], "ppo").result(60).metrics


@pytest.mark.parametrize("more,status,word", [
    ({"content": b"{"}, 422, "Invalid JSON"), ({"json": {"model_id": "x", "adam": 1}}, 422, "optim_params"),
    ({"json": {"model_id": "x", "adam_params": {"learning_rate": None}}}, 422, "learning_rate"),
    ({"content": b"x" * 100_001}, 413, "more than 100000 bytes"),
    ({"content": iter([b"x" * 60_000] * 2)}, 413, "more than 100000 bytes"),
    ({"content": b"", "headers": {"content-encoding": "zstd"}}, 415, "'zstd'"),
    ({"json": {"model_id": "x", "seq_id": 1, "adam_params": {}}}, 404, "no model 'x'"),
    ({"content": b"", "headers": {"x-api-key": "tml-wrong"}}, 401, "is wrong"),
    ({"content": b"", "headers": {"x-api-key": ""}}, 401, "is wrong"),
])
def test_bodies_and_keys(post, more, status, word):
    answer = post("optim_step", **more)
    assert answer.status_code == status and word in answer.json()["error"] and answer.json()["next_step"]


def test_routes_and_bytes_that_are_not_known(server, service, post):
    assert "no such route" in post("copy_weights", {}).json()["error"]
    doubled = post(f"{server}/v1/api/v1/client/config", {}).json()
    assert "no such route" in doubled["error"] and doubled["next_step"].endswith("base_url, without /v1")
    assert "protocol buffer" in post("forward_backward", content=b"\xff" * 9).json()["error"]
    answer = post("retrieve_future", {"request_id": "x"})
    assert answer.status_code == 404 and "no request 'x'" in answer.json()["error"]
    assert post("session_heartbeat", {"session_id": "x"}).status_code == 410


def test_a_wrong_key_is_the_clients_authentication_error(server):
    with pytest.raises(tinker.AuthenticationError, match="API key is wrong"):
        tinker.ServiceClient(base_url=server, api_key="tml-wrong").create_sampling_client(base_model=NAME)


def test_without_a_token_only_this_machine_is_answered():
    """A page in a browser may lead a name of its own to this machine."""
    guard = Guard(None, "")
    host = lambda name: {b"host": name}
    for name in (b"127.0.0.1:8000", b"localhost", b"[::1]:8000", b"[::1]"):
        guard._admit(host(name), [b"tml-any"])
    for name in (b"evil.example:8000", b"", b"10.0.0.1"):
        with pytest.raises(Refused, match="loopback"):
            guard._admit(host(name), [b"tml-any"])
    with pytest.raises(Refused, match="is missing"):
        guard._admit(host(b"localhost"), [])


def test_a_session_that_is_over_leaves_nothing(server, post):
    with client(server) as service:
        sampler = service.create_sampling_client(base_model=NAME).result(60)
        assert sampler.sample(types.ModelInput.from_ints(PROMPT), 1,
                              types.SamplingParams(max_tokens=2)).result(60)
        name = sampler._sampling_session_id
    assert post("join_sampling_session", {"sampling_session_id": name}).status_code == 404
    assert post("retrieve_future", {"request_id": f"{name}:0"}).status_code == 404


def test_other_hosts_want_a_token(tmp_path):
    for host in ("127.0.0.1", "localhost", "::1", "127.3.2.1"):
        check_host(host, "")
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        check_host(host, "0123456789abcdef")
        with pytest.raises(ConfigError, match="--token-file"):
            make_server(config(tmp_path), NAME, tmp_path, host=host)
    assert api_key("tml-a") == "tml-a" and api_key("a") == "tml-a"


@pytest.mark.parametrize("changes,word", [
    ({"rollout__engine": "vllm"}, "rollout.engine"), ({"train__fsdp": 2}, "one device"),
    ({"rollout__temperature": 0.5}, "temperature"),
    ({"rollout__top_p": 0.9}, "rollout.top_p = 1"), ({"rollout__top_k": 5}, "rollout.top_k = 0"),
    ({"rollout__stop": ("x",)}, "clients give their own"),
    ({"rollout__stop_token_ids": (3,)}, "clients give their own"), ({"sft__steps": 3}, "sft.steps"),
    ({"lora__rank": 4, "lora__path": "adapter"}, "lora.path")])
def test_configs_that_cannot_be_served(tmp_path, changes, word):
    with pytest.raises(ConfigError, match=word):
        make_server(config(tmp_path, **changes), NAME, tmp_path)


def test_a_model_in_four_bits_is_served_with_adapters_alone(tmp_path):
    model = model_config(config(tmp_path))
    save_params(tmp_path / "bf16", model, jax.device_get(init_params(model, jax.random.key(0))))
    folder = quantize_folder(tmp_path / "bf16", tmp_path / "int4", "int4")
    cfg = config(tmp_path, model__tokenizer="chars:0123456789+-*=")
    cfg = cfg.having("model", path=str(folder), config={})
    with pytest.raises(ConfigError, match="lora.rank = 0 trains all parameters"):
        make_server(cfg, NAME, tmp_path)

