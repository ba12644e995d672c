"""Tunix's own Qwen3, which nobody here wrote, learns by GRPO from what vLLM samples:
docs/your_jax_model.md."""

import importlib.util
import sys

if not importlib.util.find_spec("vllm"):
    sys.exit("skipped: vLLM is not installed (pip install vllm)")

import jax
import optax
import tunix_models  # noqa: F401
from flax import nnx
from tunix.models.qwen3.model import ModelConfig, Qwen3

from bridges import GenRequest, SamplingParams, TreeSource, VllmEngine, VllmReload
from jaxfp8rl import Sample, Trainer, attention_mask, losses, pack

PROMPTS, SAMPLING = [(1, 2, 3), (4, 5), (6,), (8, 9, 10)], SamplingParams(max_tokens=8)
CONFIG = ModelConfig(num_layers=2, vocab_size=40, embed_dim=64, hidden_dim=96, num_heads=2, head_dim=32,
                     num_kv_heads=1, rope_theta=1_000_000, norm_eps=1e-6, use_tied_embedding=True)
HF_CONFIG = dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", num_hidden_layers=2, vocab_size=40,
                 hidden_size=64, intermediate_size=96, num_attention_heads=2, head_dim=32,
                 num_key_value_heads=1, rope_theta=1e6, rms_norm_eps=1e-6, tie_word_embeddings=True,
                 max_position_embeddings=64)


# ---- the glue
class TunixLearner:
    axes = {"kernel": "i o -> o i", "*.o_proj.w": "n h d -> d (n h)", "*_proj.w": "d n h -> (n h) d"}

    def __init__(self, model):
        self.mapping = model.to_hf_mappings()
        self.graph, self.params = nnx.split(model, nnx.Param)

    def logprobs(self, params, batch):
        model, mask = nnx.merge(self.graph, params), attention_mask(batch.segment_ids)
        return losses.logits_logprobs(model(batch.tokens, batch.positions, None, mask)[0], batch.tokens)

    def source(self, params):
        return TreeSource(params, self.mapping, axes=self.axes)
# ---- the end of the glue


learner, keys = TunixLearner(Qwen3(CONFIG, rngs=nnx.Rngs(0))), nnx.Rngs(1)
noisy = lambda w: w if w.any() else 0.1 * jax.random.normal(keys(), w.shape)  # Tunix's MLPs begin as zeros
learner.params = jax.tree.map(noisy, learner.params)
trainer, transport = Trainer(learner, optimizer=optax.adam(5e-3)), VllmReload()
engine = VllmEngine(HF_CONFIG, weights="float32", max_model_len=64, max_num_seqs=64, enforce_eager=True)
transport.open(engine)
for version in range(10):
    transport.publish(trainer.source(), version)
    groups = engine.generate([GenRequest(str(p), p, SAMPLING, n=16, seed=version) for p in PROMPTS])
    rewards = [[float((c.token_ids % 2 == 0).mean()) for c in group] for group in groups]
    scored = zip(PROMPTS, groups, losses.group_advantages(rewards, "grpo"))
    samples = [Sample(p, c.token_ids, c.logprobs, a) for p, cs, row in scored for c, a in zip(cs, row)]
    metrics = trainer.update(pack(samples, row_tokens=64, rows_per_microbatch=8, microbatches=3))
    print(f"version {version}: reward {sum(map(sum, rewards)) / 64:.3f}, largest mismatch "
          f"{metrics['mismatch/max_logp_diff']:.1e} nats", flush=True)
engine.close()
