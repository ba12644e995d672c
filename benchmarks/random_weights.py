"""The growth of a rounding error through a network of random weights: log-probabilities after a tiny change
of the embedding, with and without FP8.

    jaxfp8rl bench random_weights [--layers 36]

Width 512 represents Qwen3-8B's 4,096: weights of products are drawn larger, so that a layer amplifies as much
as there. This matters to runs that start from random weights, such as `jaxfp8rl bench grpo`: their learner
and engine differ by more than a trained model's, although the roundings are the same. The yardstick is the
same network in float32.

Needs no GPU.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp

from benchmarks.common import arguments, config, row, write
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.hf_names import linear_shapes
from jaxfp8rl.models.module import init_params
from jaxfp8rl.models.transformer import forward, head_weight
from jaxfp8rl.policy.policy import policy_of
from jaxfp8rl.precision.layer_runs import fp8_runs
from jaxfp8rl.precision.records import Precision

SMALLER = 8  # Qwen3-8B's width over this one's
TOKENS, VOCABULARY = 128, 2048
CHANGES = (1e-6, 1e-4, 1e-2)  # relative changes of the embedding


def main() -> None:
    parser = arguments(__doc__, "random_weights")
    parser.add_argument("--layers", type=int, default=36)
    args = parser.parse_args()
    big = config("8b", args.layers)
    model = ModelConfig.from_hf(big | {
        "hidden_size": big["hidden_size"] // SMALLER,
        "intermediate_size": big["intermediate_size"] // SMALLER,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": VOCABULARY,
    })
    params = jax.tree_util.tree_map_with_path(louder, init_params(model, jax.random.key(0)))
    plain = Precision.uniform(args.layers, "float32")
    fp8 = dataclasses.replace(plain, runs=fp8_runs(linear_shapes(model), args.layers), activations_fp8=True)
    moved, wide = shifts(model, params, fp8), shifts(model, params, plain)
    case = f"{args.layers} random layers, embedding off by"
    rows = [row(f"{case} {eps:g}", "mean change of a log-probability", "nats", moved[eps], wide[eps],
                "in float32", True)
            for eps in CHANGES]
    write(args.out, "random_weights", rows, args.plot)


def louder(path: tuple, x: jax.Array) -> jax.Array:
    """Scale up the weights of products, which have SMALLER times fewer inputs than Qwen3-8B's."""
    return x * SMALLER**0.5 if "_proj" in str(path) or "lm_head" in str(path) else x


def shifts(model: ModelConfig, params: dict, precision: Precision) -> dict[float, float]:
    """The mean change of a log-probability in nats, by the relative change of the embedding."""
    tokens = jax.random.randint(jax.random.key(1), (1, TOKENS), 0, VOCABULARY)

    @jax.jit
    def logp(params: dict, eps: float) -> jax.Array:
        embedding = params["embed_tokens"]["weight"]
        noise = jax.random.normal(jax.random.key(2), embedding.shape)
        policy = policy_of(params | {"embed_tokens": {"weight": embedding * (1 + eps * noise)}}, precision)
        hidden = forward(policy, model, tokens, jnp.arange(TOKENS)[None], jnp.ones_like(tokens), precision)
        return jax.nn.log_softmax(hidden @ head_weight(policy, model).T)

    base = logp(params, 0.0)
    return {eps: float(jnp.abs(logp(params, eps) - base).mean()) for eps in CHANGES}


if __name__ == "__main__":
    main()
