"""A learner in plain JAX drives vLLM, which it needs: `TreeSource` renames and reshapes a tree of arrays.

In the mapping `{i}` unstacks the layers, and `axes` turns a kernel into [out, in]. On a GPU:
weights="fp8_e4m3_128x128" for both sides, and VllmInplace for VllmReload.
"""

import importlib.util
import sys

if not importlib.util.find_spec("vllm"):
    sys.exit("skipped: vLLM is not installed (pip install vllm)")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tiny_llama as model

from bridges import GenRequest, SamplingParams, To, TreeSource, VllmEngine, VllmReload
from jaxfp8rl import losses

PROMPT, OPTIMIZER, TOKEN_TIS = (1, 2, 3), optax.adam(3e-3), losses.get_preset("token_tis")
LAYER = "model.layers.{i}"
MAPPING = {
    "embed": "model.embed_tokens.weight", "norm": "model.norm.weight",
    "layers.norm_1": f"{LAYER}.input_layernorm.weight",
    "layers.norm_2": f"{LAYER}.post_attention_layernorm.weight",
    **{f"layers.{x}": To(f"{LAYER}.self_attn.{x}_proj.weight", axes="d h k -> (h k) d") for x in "qkv"},
    "layers.o": To(f"{LAYER}.self_attn.o_proj.weight", axes="h k d -> d (h k)"),
    **{f"layers.{x}": To(f"{LAYER}.mlp.{x}_proj.weight", axes="i o -> o i") for x in ("gate", "up", "down")},
}


@jax.jit
def step(params, state, tokens, rollout_logp, advantages):
    def loss(params):
        logp, _ = losses.token_logprobs(model.hidden(params, tokens), params["embed"], tokens)
        mask = jnp.broadcast_to(jnp.arange(tokens.shape[1]) >= len(PROMPT), tokens.shape)
        fix = losses.rollout_correction(jax.lax.stop_gradient(logp), rollout_logp, mask, TOKEN_TIS)
        return -jnp.mean(fix.weights * advantages[:, None] * logp), fix.metrics["mismatch/max_logp_diff"]

    grads, gap = jax.grad(loss, has_aux=True)(params)
    updates, state = OPTIMIZER.update(grads, state)
    return optax.apply_updates(params, updates), state, gap


params = model.init(jax.random.key(0))
state, transport = OPTIMIZER.init(params), VllmReload()
engine = VllmEngine(model.HF_CONFIG, weights="float32", max_model_len=64, enforce_eager=True)
transport.open(engine)
for version in range(6):
    transport.publish(TreeSource(params, MAPPING, expected=engine.expected_manifest()), version)
    [group] = engine.generate([GenRequest("a", PROMPT, SamplingParams(max_tokens=8), n=64, seed=version)])
    tokens = np.stack([[*PROMPT, *c.token_ids] for c in group])
    logp = np.stack([np.pad(c.logprobs, (len(PROMPT), 0)) for c in group])
    rewards = (tokens[:, len(PROMPT) :] % 2 == 0).mean(-1)  # the share of even tokens
    params, state, gap = step(params, state, tokens, logp, rewards - rewards.mean())
    print(f"version {version}: reward {rewards.mean():.3f}, largest mismatch {gap:.1e} nats", flush=True)
engine.close()
