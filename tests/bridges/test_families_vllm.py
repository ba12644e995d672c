"""Every family from the learner into a real vLLM: after each publish both sides give the same
log-probabilities, in float32, where they differ in the order of sums alone. A compiled Gemma has its own
roundings."""

import dataclasses
import zlib
from collections.abc import Callable

import jax
import numpy as np
import pytest

pytest.importorskip("vllm")

from bridges.api import GenRequest, SamplingParams
from bridges.engines.vllm_engine import VllmEngine
from bridges.transports.vllm_reload import VllmReload
from jaxfp8rl.data.packing import Sample, pack
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.hf_names import linear_shapes
from jaxfp8rl.models.module import init_params
from jaxfp8rl.policy.policy import policy_of
from jaxfp8rl.precision.layer_runs import fp8_runs
from jaxfp8rl.precision.recipe import get_recipe, resolve
from jaxfp8rl.precision.records import Precision
from jaxfp8rl.publish.wire import LearnerWeights
from jaxfp8rl.training.step import make_logprobs, make_score

pytestmark = pytest.mark.usefixtures("quick_compile")
SIZES = {
    "vocab_size": 300, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
    "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
WINDOW = 24  # shorter than the longest prompt below
MODELS = {
    "gemma3": {"architectures": ["Gemma3ForCausalLM"], "head_dim": 64, "sliding_window": WINDOW,
               "_sliding_window_pattern": 3, "query_pre_attn_scalar": 40, "rope_theta": 1e5,
               "rope_local_base_freq": 1e3, "final_logit_softcapping": 2.0},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen2-yarn": {"architectures": ["Qwen2ForCausalLM"], "rope_scaling": YARN},
    "mistral": {"architectures": ["MistralForCausalLM"], "head_dim": 64, "sliding_window": WINDOW},
    "llama-linear": {"architectures": ["LlamaForCausalLM"],
                     "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
}
TWO_LAYERS = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}  # of whole FP8 blocks
SLOW = ("qwen2", "qwen2-yarn", "mistral", "llama-linear")


def policy(model: ModelConfig, learner: Precision, seed: int) -> dict:
    """A random one, whose biases and norms are not as at first, and whose matrices are larger."""

    def leaf(path, x):
        name = jax.tree_util.keystr(path).encode()  # every norm has noise of its own
        noise = jax.random.normal(jax.random.key(zlib.crc32(name) + seed), x.shape)
        vector = "norm" in path[-2].key or path[-1].key == "bias"
        return x + 0.3 * noise if vector else 3 * x

    params = init_params(model, jax.random.key(seed))
    return policy_of(jax.tree_util.tree_map_with_path(leaf, params), learner)


def gaps(model: ModelConfig, recipe: str, other: Callable[[Precision], Precision],
         **options) -> list[np.ndarray]:
    """log p - log mu of tokens that vLLM sampled in bfloat16, for the learner that mirrors it and for
    another."""
    engine, transport = VllmEngine(model.to_hf(), max_model_len=128, max_num_seqs=32, **options), VllmReload()
    try:
        transport.open(engine)
        runs = fp8_runs(linear_shapes(model), model.num_hidden_layers)
        mirror = resolve(get_recipe(recipe), runs, engine.capabilities().formats, "bfloat16", "bfloat16")
        weights = policy(model, mirror, 1)
        transport.verify(transport.publish(LearnerWeights(model, weights, mirror.runs, "bfloat16"), 1))
        rng = np.random.default_rng(0)
        requests = [GenRequest(str(i), tuple(map(int, rng.integers(3, 300, 20))), SamplingParams(16), 2, i)
                    for i in range(8)]
        samples = [Sample(r.prompt_token_ids, c.token_ids, c.logprobs, 0.0)
                   for r, cs in zip(requests, engine.generate(requests)) for c in cs]
    finally:
        transport.close()
        engine.close()
    batch = pack(samples, 128, 8, 1)

    def gap(precision: Precision) -> np.ndarray:
        score = make_score(make_logprobs(model, precision, 1.0, "none"))
        return (np.asarray(score(weights, batch)) - batch.rollout_logp)[batch.response_mask]

    return [gap(mirror), gap(other(mirror))]


@pytest.mark.slow
def test_a_compiled_gemma_is_mirrored_up_to_the_order_of_sums():
    """In bfloat16, two layers: its embedding, the norms after attention and MLP, and the sum with attention
    are not rounded."""
    model = ModelConfig.from_hf(SIZES | MODELS["gemma3"] | TWO_LAYERS)
    rounds = lambda p: dataclasses.replace(
        p, rounding=dataclasses.replace(p.rounding, fused=False, residual_once=False, unrounded_sums=True))
    mirrored, rounded = gaps(model, "bf16", rounds)
    assert np.square(mirrored).mean() < 0.4 * np.square(rounded).mean()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["bf16", "fp8_unified"])
def test_biases_are_added_where_an_engine_that_is_not_compiled_adds_them(recipe):
    """To the sum of a product in bfloat16, and to the rounded product in FP8: most tokens have the same
    log-probability. With norms that see rounded sums few have."""
    model = ModelConfig.from_hf(SIZES | MODELS["qwen2"] | TWO_LAYERS)
    rounds = lambda p: dataclasses.replace(p, rounding=dataclasses.replace(p.rounding, unrounded_sums=False))
    fp8 = {"weights": "fp8_e4m3_128x128", "fp8_kernel": "emulated"} if recipe == "fp8_unified" else {}
    mirrored, rounded = gaps(model, recipe, rounds, enforce_eager=True, **fp8)
    assert (np.abs(mirrored) < 1e-5).mean() > 0.6 and (np.abs(rounded) < 1e-5).mean() < 0.1


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name
                                  for name in MODELS])
def test_two_publishes_give_the_learners_log_probabilities(name):
    model = ModelConfig.from_hf(SIZES | MODELS[name])
    learner = Precision.uniform(model.num_hidden_layers, weight_dtype="float32")
    score = make_score(make_logprobs(model, learner, 1.0, "none"))
    engine = VllmEngine(model.to_hf(), weights="float32", max_model_len=128, max_num_seqs=16,
                        enforce_eager=True)
    transport = VllmReload()
    try:
        transport.open(engine)
        requests = [GenRequest(str(i), prompt, SamplingParams(12), 2, i)
                    for i, prompt in enumerate([tuple(range(5, 65)), tuple(range(100, 107))])]
        for version in (1, 2):
            weights = policy(model, learner, version)
            source = LearnerWeights(model, weights, learner.runs, "float32")
            transport.verify(transport.publish(source, version))
            answers = zip(requests, engine.generate(requests))
            samples = [Sample(r.prompt_token_ids, c.token_ids, c.logprobs, 0.0)
                       for r, cs in answers for c in cs]
            batch = pack(samples, 128, 2, 1)
            gap = np.abs(np.asarray(score(weights, batch)) - batch.rollout_logp)[batch.response_mask]
            assert gap.max() < 1e-4, f"publish {version}: {gap.max()}"
    finally:
        transport.close()
        engine.close()
