"""A mixture of experts from the learner into a real vLLM: after every publish both sides give the same
log-probabilities.

In float32 they differ in the order of sums alone, so one expert, router or layer that did not arrive shows as
a gap thousands of times as wide. (vLLM's CPU build leaves reloaded experts in the wrong layout and says
nothing: bridges.inside_vllm.writing.)
"""

import jax
import numpy as np
import pytest

pytest.importorskip("vllm")

from bridges.api import BridgeError, GenRequest, PublishFailed, SamplingParams  # noqa: E402
from bridges.engines.vllm_engine import VllmEngine  # noqa: E402
from bridges.transports.vllm_reload import VllmReload  # noqa: E402
from jaxfp8rl.data.packing import Sample, pack  # noqa: E402
from jaxfp8rl.models.config import ModelConfig  # noqa: E402
from jaxfp8rl.models.module import init_params  # noqa: E402
from jaxfp8rl.policy.policy import policy_of  # noqa: E402
from jaxfp8rl.precision.layer_runs import plain_runs  # noqa: E402
from jaxfp8rl.precision.records import Precision  # noqa: E402
from jaxfp8rl.publish.wire import LearnerWeights  # noqa: E402
from jaxfp8rl.training.step import make_logprobs, make_score  # noqa: E402

MODEL = ModelConfig.from_hf({
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 300,
    "hidden_size": 128,
    "intermediate_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256, "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True, "mlp_only_layers": [1], "hidden_act": "silu", "rms_norm_eps": 1e-6,
})
RUNS = plain_runs(MODEL.sparse_layers)
LEARNER = Precision(RUNS, compute_dtype="float32", weight_dtype="float32")
pytestmark = pytest.mark.usefixtures("quick_compile")
SHORT = {"max_model_len": 128, "max_num_seqs": 16, "enforce_eager": True}


def test_routes_are_refused_where_vllm_has_none():
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("this vLLM returns them")
    with pytest.raises(BridgeError, match="does not return routed experts"):
        VllmEngine(MODEL.to_hf(), **SHORT, routed_experts=True)


@pytest.fixture(scope="module")
def engine():
    engine = VllmEngine(MODEL.to_hf(), weights="float32", **SHORT)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def transport(engine):
    transport = VllmReload()
    transport.open(engine)
    return transport


def policy(seed: int):
    return policy_of(jax.tree.map(lambda a: 3 * a if a.ndim > 2 else a,
                                  init_params(MODEL, jax.random.key(seed))), LEARNER)


def test_three_publishes_give_the_learners_log_probabilities(engine, transport):
    score = make_score(make_logprobs(MODEL, LEARNER, 1.0, "none"))
    prompts = [tuple(range(5, 45)), tuple(range(100, 107))]
    requests = [GenRequest(str(i), p, SamplingParams(12), 2, i) for i, p in enumerate(prompts)]
    seen = []
    for version in (1, 2, 3):
        learner = policy(version)
        receipt = transport.publish(LearnerWeights(MODEL, learner, RUNS, "float32"), version)
        transport.verify(receipt)
        assert receipt.tensors == len(LearnerWeights(MODEL, learner, RUNS, "float32").manifest())
        answers = zip(requests, engine.generate(requests))
        samples = [Sample(r.prompt_token_ids, c.token_ids, c.logprobs, 0.0) for r, cs in answers for c in cs]
        batch = pack(samples, 128, 2, 1)
        live = batch.response_mask
        gap = np.abs(np.asarray(score(learner, batch)) - batch.rollout_logp)[live]
        assert gap.max() < 1e-4
        seen.append(samples[0].completion.tolist())
    assert len({tuple(tokens) for tokens in seen}) == 3


@pytest.mark.slow
def test_a_publish_that_breaks_off_among_the_experts_is_healed_by_the_next(engine, transport):
    class Torn(LearnerWeights):
        def __iter__(self):
            for name, buffer in super().__iter__():
                if ".experts.2." in name:
                    raise ValueError("the source broke off")
                yield name, buffer

    with pytest.raises(PublishFailed):
        transport.publish(Torn(MODEL, policy(4), RUNS, "float32"), 4)
    test_three_publishes_give_the_learners_log_probabilities(engine, transport)

