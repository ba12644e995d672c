"""The unmodified `tinker` client against a real server on the loopback interface, with a tiny model on the
CPU."""

from __future__ import annotations

import contextlib
import re
import types as types_
from pathlib import Path

import jax
import numpy as np
import pytest
from tinker_server import KEY, NAME, WORDS, client, config, datum, of_completions, sampled, serving, tinker

from jaxfp8rl.memory import cache
from jaxfp8rl.serving import server as server_
from jaxfp8rl.serving.learner import Learner
from jaxfp8rl.serving.losses import LOSSES
from jaxfp8rl.serving.saved import STATE, Place
from jaxfp8rl.serving.service import BASE, Limits

types = tinker.types
PROMPT, WANTED = [3, 4, 5], 7
ADAM = types.AdamParams(learning_rate=2e-2)
pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(scope="module")
def server(tmp_path_factory, quick_compile):
    folder = tmp_path_factory.mktemp("server")
    with serving(config(folder), folder / "weights", limits=Limits(2, 2, lora_as_all_parameters=True)) as url:
        yield url


@pytest.fixture
def service(server):
    with client(server) as found:
        yield found


@pytest.fixture
def trainer(service):
    return service.create_training_client_from_state(BASE).result(60)


def step(trainer, seed, adam=ADAM):
    """One step of REINFORCE -> (mean reward, the differences of sampler and trainer at each token)."""
    sequences = sampled(trainer.save_weights_and_get_sampling_client().result(60), PROMPT, 32, seed)
    rewards = [np.mean([t == WANTED for t in s.tokens]) for s in sequences]
    data = [datum(PROMPT, s.tokens, logprobs=s.logprobs, advantages=r - np.mean(rewards))
            for s, r in zip(sequences, rewards)]
    passed, applied = trainer.forward_backward(data, "importance_sampling"), trainer.optim_step(adam)
    logp = of_completions(passed.result(60), PROMPT)
    assert applied.result(60).metrics["grad_norm:mean"] > 0
    return np.mean(rewards), np.concatenate([s.logprobs - x for s, x in zip(sequences, logp)])


def test_a_loop_learns_and_sampler_and_trainer_agree(trainer):
    rewards, differences = zip(*(step(trainer, seed) for seed in range(8)))
    assert rewards[0] < 0.15 and rewards[-1] > 0.6
    every = np.concatenate(differences)
    # the cookbook's two estimates of the KL
    assert abs(np.mean(every)) < 1e-6 and np.mean(every**2) / 2 < 1e-6
    assert np.max(np.abs(every)) < 5e-5


def test_a_state_is_loaded_without_its_moments_where_these_are_in_host_memory(tmp_path):
    learner = Learner(config(tmp_path, optim__offload="true"), NAME, tmp_path / "weights")
    with contextlib.closing(learner):
        state, place = learner.programs.new_state(), Place("model", STATE, "one")
        ones = jax.tree.map(lambda x: jax.device_put(np.ones(x.shape, x.dtype), x.sharding), state)
        learner.save(place, ones, False, None)
        found = learner.load_state(place, optimizer=False)
        moments = jax.tree.leaves((found.opt_state.mu, found.opt_state.nu))
        assert {x.sharding.memory_kind for x in moments} == {"pinned_host"}
        assert not any(np.any(x) for x in jax.tree.leaves((found.opt_state, found.step)))
        assert all(np.all(np.asarray(x) == 1) for x in jax.tree.leaves(found.params))


def test_a_cache_that_is_auto_is_chosen_for_an_engine_that_stays_awake(tmp_path, monkeypatch, capsys):
    served = []
    monkeypatch.setattr(server_, "share_gpu", lambda cfg: None)
    monkeypatch.setattr(server_, "make_server",
                        lambda cfg, *_: served.append(cfg) or types_.SimpleNamespace(run=lambda: None))
    monkeypatch.setattr(cache, "device_memory", lambda: 8 * 2**30)
    cfg = config(tmp_path).having("rollout", engine="vllm", kv_cache_gib="auto", sleep="drop_weights")
    server_.serve(cfg, NAME, str(tmp_path), "", "127.0.0.1", 8000, Limits())
    assert served[0].rollout.sleep == "off" and served[0].rollout.kv_cache_gib == 0.1
    assert capsys.readouterr().out.startswith('rollout.kv_cache_gib = "auto": 0.1 GiB, which holds')


def test_a_state_is_saved_and_gone_on_from(server, service, trainer):
    """Two steps in a row are the same as one, a save, and one by another model, with the moments."""
    data = [datum(PROMPT, [7, 8, 9], weights=1.0)]
    both = lambda c: (c.forward_backward(data, "cross_entropy").result(60).metrics["loss:sum"],
                      c.optim_step(ADAM).result(60))[0]
    first = both(trainer)
    path = trainer.save_state("one").result(60).path
    straight = [both(trainer), both(trainer)]
    assert straight[0] < first
    assert tinker.RestClient(base_url=server,
                             api_key=KEY).get_weights_info_by_tinker_path(path).result(60).base_model == NAME
    again = service.create_training_client_from_state_with_optimizer(path).result(60)
    assert [both(again), both(again)] == straight
    with pytest.warns(FutureWarning, match="load_state"):
        loaded = trainer.load_state(path)
    loaded.result(60)  # without the moments
    assert both(trainer) == straight[0] and both(trainer) != straight[1]


def test_forward_has_the_losses_and_no_gradient(trainer):
    logp = lambda: of_completions(trainer.forward([datum(PROMPT, [7, 8], weights=1.0)],
                                                  "cross_entropy").result(60),
                                  PROMPT)[0]
    before = logp()
    inputs = {"logprobs": before - 0.3, "advantages": [2.0, -1.0]}
    knobs = {"ppo": {"clip_high_threshold": 1.1}, "dro": {"beta": 0.5}}
    for loss in LOSSES:
        given = {"weights": [1.0, 0.5]} if loss == "cross_entropy" else inputs
        asked = [datum(PROMPT, [7, 8], **given)], loss, knobs.get(loss)
        only = trainer.forward(*asked).result(60).metrics["loss:sum"]
        assert trainer.forward_backward(*asked).result(60).metrics["loss:sum"] == pytest.approx(only,
                                                                                                rel=1e-5)
    np.testing.assert_array_equal(logp(), before)


def test_gradients_add_up_until_the_step(service, trainer):
    other = service.create_training_client_from_state(BASE).result(60)
    a, b = ([datum(PROMPT, tokens, weights=1.0)] for tokens in ([7, 8, 9], [10, 11]))
    for c, requests in ((trainer, [a, b]), (other, [a + b])):
        for data in requests:
            c.forward_backward(data, "cross_entropy").result(60)
        c.optim_step(ADAM).result(60)
    after = [of_completions(c.forward(a + b, "cross_entropy").result(60), PROMPT) for c in (trainer, other)]
    for x, y in zip(*after):
        np.testing.assert_allclose(x, y, rtol=1e-4)


def test_a_loss_of_the_clients_own(trainer):
    """forward_backward_custom differentiates here, and sends weights."""
    torch = pytest.importorskip("torch")
    found = trainer.forward_backward_custom(
        [datum(PROMPT, [7, 8], weights=1.0)], lambda data, logp: (sum(torch.sum(x**2) for x in logp), {}))
    assert found.result(60).metrics["loss:sum"] > 0
    trainer.optim_step(ADAM).result(60)


def test_what_is_saved_for_sampling_stays_as_it_was(service, trainer):
    path = trainer.save_weights_for_sampler("kept").result(60).path
    drawn = lambda c: [(s.tokens, s.logprobs) for s in sampled(c, PROMPT, 4, 1)]
    before = drawn(service.create_sampling_client(model_path=path).result(60))
    assert drawn(service.create_sampling_client(base_model=NAME).result(60)) == before
    trainer.forward_backward([datum(PROMPT, [7, 8, 9], weights=1.0)], "cross_entropy").result(60)
    trainer.optim_step(ADAM).result(60)
    for _ in range(2):  # push it out of memory
        newer = trainer.save_weights_and_get_sampling_client().result(60)
    assert drawn(newer) != before
    assert drawn(service.create_sampling_client(model_path=path).result(60)) == before


def test_log_probabilities_are_the_trainers_under_every_way_to_sample(service, trainer):
    sampler = service.create_sampling_client(base_model=NAME).result(60)
    for way in ({}, {"temperature": 0.5}, {"top_k": 3}):
        (s,) = sampled(sampler, PROMPT, 1, 5, **way)
        passed = trainer.forward([datum(PROMPT, s.tokens, weights=1.0)], "cross_entropy").result(60)
        np.testing.assert_allclose(s.logprobs, of_completions(passed, PROMPT)[0], atol=1e-5)


def test_prompts_have_log_probabilities(service, trainer):
    sampler, prompt = service.create_sampling_client(base_model=NAME).result(60), [3, 4, 5, 6]
    ask = lambda **more: sampler.sample(types.ModelInput.from_ints(prompt), 1,
                                        types.SamplingParams(max_tokens=1),
                                        include_prompt_logprobs=True, **more).result(60).prompt_logprobs
    whole, last = ask(), ask(prompt_logprobs_last_n=2)
    passed = trainer.forward([datum(prompt[:1], prompt[1:], weights=1.0)], "cross_entropy").result(60)
    assert whole[0] is None and last[:2] == [None, None] and last[2:] == whole[2:]
    np.testing.assert_allclose(whole[1:], of_completions(passed, prompt[:1])[0], atol=1e-5)
    assert sampler.compute_logprobs(types.ModelInput.from_ints(prompt)).result(60) == whole


def test_stops(service):
    sampler = service.create_sampling_client(base_model=NAME).result(60)
    (free,) = sampled(sampler, PROMPT, 1, 3, stop=[])
    assert len(free.tokens) == 6 and free.stop_reason == "length"
    (cut,) = sampled(sampler, PROMPT, 1, 3, stop=[free.tokens[2]])
    at = free.tokens.index(free.tokens[2]) + 1
    assert (cut.tokens, cut.stop_reason) == (free.tokens[:at], "stop")
    digit = next(t for t in free.tokens if 2 <= t < 12)  # tokens 2 to 11 are the characters 0 to 9
    (cut,) = sampled(sampler, PROMPT, 1, 3, stop=str(digit - 2))
    assert cut.tokens == free.tokens[: free.tokens.index(digit) + 1] and cut.stop_reason == "stop"
    assert max(free.tokens) < WORDS


def test_a_lora_client_is_told_that_all_parameters_are_trained(server, caplog):
    with client(server) as service:
        info = service.create_lora_training_client(NAME, rank=4).result(60).get_info()
    assert (info.is_lora, info.lora_rank) == (False, None)
    assert "rank and targets have no effect" in caplog.text


def test_the_page_shows_how_to_train_all_parameters(server, monkeypatch):
    page = (Path(__file__).parents[3] / "docs" / "tinker.md").read_text()
    monkeypatch.setenv("TINKER_BASE_URL", server)
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.S | re.M)
    exec(block, names := {})
    assert names["trainer"].get_info().is_lora is False
    names["service"].close("success").result(30)


def test_the_server_says_what_it_is(server, trainer):
    rest = tinker.RestClient(base_url=server, api_key=KEY)
    (model,) = rest.get_server_capabilities().result(60).supported_models
    assert (model.model_name, model.max_context_length) == (NAME, 24)
    info = trainer.get_info()
    assert (info.model_data.model_name, info.is_lora) == (NAME, False)
