"""A server of low-rank adapters, by the unmodified `tinker` client."""

from __future__ import annotations

import numpy as np
import pytest
from test_tinker_client import PROMPT, WANTED, datum, of_completions, sampled, step, tinker, types
from tinker_server import NAME, client, config, serving

from jaxfp8rl.errors import ConfigError
from jaxfp8rl.serving.service import BASE, Limits

RANK = 4
ADAM = types.AdamParams(learning_rate=5e-2)
pytestmark = pytest.mark.usefixtures("quick_compile")


def adapters(folder, **changes):
    return config(folder, **{"lora__rank": RANK, "lora__alpha": 16.0, "lora__dtype": "float32", **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory, quick_compile):
    return tmp_path_factory.mktemp("lora")


@pytest.fixture(scope="module")
def server(folder):
    with serving(adapters(folder), folder / "weights", limits=Limits(2, 2)) as url:
        yield url


@pytest.fixture
def service(server):
    with client(server) as found:
        yield found


@pytest.fixture
def trainer(service):
    return service.create_lora_training_client(NAME, rank=RANK, seed=1).result(60)


def test_adapters_begin_as_the_base_and_learn(service, trainer):
    info = trainer.get_info()
    assert (info.is_lora, info.lora_rank) == (True, RANK)
    base = service.create_sampling_client(base_model=NAME).result(60)
    newer = trainer.save_weights_and_get_sampling_client().result(60)
    before, after = (sampled(c, PROMPT, 8, 1) for c in (base, newer))
    assert [(s.tokens, s.logprobs) for s in before] == [(s.tokens, s.logprobs) for s in after]
    wanted = lambda: of_completions(
        trainer.forward([datum(PROMPT, [WANTED], weights=1.0)], "cross_entropy").result(60), PROMPT)[0][0]
    first = wanted()
    _, differences = zip(*(step(trainer, seed, ADAM) for seed in range(8)))
    assert wanted() > first + 0.5  # random embeddings are short: a frozen head lets no token be likely
    every = np.concatenate(differences)
    assert abs(np.mean(every)) < 1e-6 and np.mean(every**2) / 2 < 1e-6
    again = service.create_sampling_client(base_model=NAME).result(60)
    # the base has not learned
    assert [s.tokens for s in sampled(again, PROMPT, 8, 1)] == [s.tokens for s in before]


def test_a_state_and_weights_are_saved_and_gone_on_from(folder, service, trainer):
    data = [datum(PROMPT, [7, 8, 9], weights=1.0)]
    both = lambda c: (c.forward_backward(data, "cross_entropy").result(60).metrics["loss:sum"],
                      c.optim_step(ADAM).result(60))[0]
    both(trainer)
    path = trainer.save_state("one").result(60).path
    kept = trainer.save_weights_for_sampler("kept").result(60).path
    (drawn,) = sampled(service.create_sampling_client(model_path=kept).result(60), PROMPT, 1, 3)
    logp = of_completions(trainer.forward([datum(PROMPT, drawn.tokens, weights=1.0)],
                                          "cross_entropy").result(60), PROMPT)
    np.testing.assert_allclose(drawn.logprobs, logp[0], atol=1e-5)
    straight = [both(trainer), both(trainer)]
    again = service.create_training_client_from_state_with_optimizer(path).result(60)
    assert [both(again), both(again)] == straight
    with (serving(adapters(folder, lora__alpha=8.0), folder / "weights") as other, client(other) as service,
          pytest.raises(tinker.RequestFailedError,
                        match="of other adapters or another base: scale: 4.0, here 2.0")):
        service.create_training_client_from_state(path).result(60)


def test_other_adapters_are_refused_by_name(folder, service):
    for asked, what in (({"rank": 8}, "rank=8: this server's adapters have rank 4"),
                        ({"rank": RANK, "train_mlp": False},
                         "train_mlp=False: this server's adapters are those of")):
        with pytest.raises(tinker.APIError, match=what):
            service.create_lora_training_client(NAME, **asked).result(60)
    with pytest.raises(tinker.APIError, match="this server trains adapters of rank 4, not all parameters"):
        service.create_training_client_from_state(BASE).result(60)
    with pytest.raises(ConfigError, match="--lora-as-all-parameters with lora.rank = 4"), \
            serving(adapters(folder), folder, limits=Limits(lora_as_all_parameters=True)):
        pass
