"""Several adapters at once in the embedded engine: completions of each have its own log-probabilities."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from bridges.api import (
    AdapterTransport,
    BridgeError,
    Completion,
    GenRequest,
    ManifestMismatch,
    SamplingParams,
)
from bridges.sources.array_source import ArraySource
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.policy.adapters import init_adapters
from jaxfp8rl.policy.initial import starting_params
from jaxfp8rl.policy.policy import over_base
from jaxfp8rl.policy.shapes import engine_runs, model_config
from jaxfp8rl.rollout.adapters import weights_of
from jaxfp8rl.rollout.engines import build_engine, expected_formats
from jaxfp8rl.training.programs import learner_precision
from jaxfp8rl.training.step import make_policy

pytestmark = pytest.mark.usefixtures("quick_compile")
SETTINGS = {
    "model.config.vocab_size": 32, "model.config.hidden_size": 64, "model.config.intermediate_size": 64,
    "model.config.num_hidden_layers": 2, "model.config.num_attention_heads": 1,
    "model.config.num_key_value_heads": 1,
    "rollout.min_num_seqs": 16,
    "task.max_prompt_tokens": 12, "rollout.max_new_tokens": 12, "precision.recipe": "bf16", "lora.rank": 3,
    "precision.compute_dtype": "float32", "precision.weight_dtype": "float32", "lora.dtype": "float32",
    "sft.steps": 0,
    "run.dir": "unused",
}


@pytest.fixture(scope="module")
def world(quick_compile):
    """(engine, transport, seed -> the source of weights with an adapter of that seed)."""
    cfg = load_config("demo", [w for k, v in SETTINGS.items() for w in (f"--{k}", str(v))])
    model = model_config(cfg)
    runs, formats = engine_runs(cfg, model), expected_formats(cfg, model)
    quantized = make_policy(learner_precision(cfg, model, runs, formats))
    base = quantized(starting_params(cfg, model))

    def source(seed: int):
        normal = lambda shape: np.random.default_rng(seed).standard_normal(shape).astype("float32")
        drawn = jax.tree.map(lambda x: normal(x.shape) * 0.3, init_adapters(cfg, model))
        return weights_of(cfg, model, over_base(quantized(drawn), base), runs)

    engine, transport = build_engine(cfg, model, runs, named=2)
    assert isinstance(transport, AdapterTransport) and engine.capabilities().adapters == 2
    yield engine, transport, source
    engine.close()


def request(name: str, adapter: str = "", prompt: int = 3) -> GenRequest:
    return GenRequest(name, (prompt, 4, 5), SamplingParams(8), 2, 1, adapter=adapter)


def said(completions: list[Completion]) -> tuple:
    return [c.token_ids.tolist() for c in completions], np.concatenate([c.logprobs for c in completions])


def test_adapters_share_a_batch(world):
    engine, transport, source = world
    want = []
    for seed in (1, 2, 3):  # each as the adapter of the weights
        transport.publish(source(seed), seed)
        want.append(said(engine.generate([request("a")])[0]))
    transport.publish(source(1), 7)
    transport.publish_adapter("x", source(2).adapters, 8)
    transport.verify(transport.publish(source(1), 9))  # drops x
    with pytest.raises(ValueError, match="adapter 'x' is not in the engine, which holds none by name"):
        engine.generate([request("a", "x")])
    for name, seed in (("x", 2), ("y", 3)):
        transport.publish_adapter(name, source(seed).adapters, 10 + seed)
    with pytest.raises(BridgeError, match="adapter 'z': all 2 slots are taken, by 'x', 'y'"):
        transport.publish_adapter("z", source(4).adapters, 20)
    names = {"": 0, "x": 1, "y": 2}
    mixed = [request(f"{i}", name) for i, name in enumerate([*names] * 2)]
    for r, found in zip(mixed, engine.generate(mixed)):
        tokens, logp = want[names[r.adapter]]
        assert said(found)[0] == tokens
        np.testing.assert_allclose(said(found)[1], logp, atol=1e-5)
        assert found[0].version_spans[0].version == {"": 9, "x": 12, "y": 13}[r.adapter]
    assert len({str(tokens) for tokens, _ in want}) == 3


def test_an_adapter_in_flight_stays_and_one_that_is_dropped_leaves_room(world):
    engine, transport, source = world
    transport.publish(source(1), 1)
    transport.publish_adapter("x", source(2).adapters, 2)
    engine.submit([request("a", "x")])
    for change in (lambda: transport.publish_adapter("x", source(3).adapters, 3),
                   lambda: transport.drop_adapter("x"),
                   lambda: transport.publish(source(1), 4)):
        with pytest.raises(BridgeError, match="adapter 'x' is in flight"):
            change()
    engine.cancel(["a"])
    transport.publish(source(1), 5)
    transport.publish_adapter("x", source(2).adapters, 6)
    transport.drop_adapter("x")
    transport.publish_adapter("y", source(3).adapters, 7)
    one = source(3).adapters
    with pytest.raises(ManifestMismatch, match="lora_A.weight: in the engine, missing"):
        transport.publish_adapter("y", ArraySource(one.manifest()[1:], dict(one)), 8)
    with pytest.raises(ValueError, match="adapter 'x' is not in the engine, which holds 'y'"):
        transport.drop_adapter("x")
