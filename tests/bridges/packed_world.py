"""A Qwen2 in four bits that the real vLLM reads itself, under adapters in its slots."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bridges.api import GenRequest, SamplingParams
from bridges.engines.vllm_engine import VllmEngine
from bridges.inside_vllm.adapters import AdapterSlots
from bridges.transports.vllm_choice import open_vllm_transport
from bridges.transports.vllm_slots import VllmSlots
from jaxfp8rl.checkpoint.export import quantize_folder
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.loading import load_params, save_params
from jaxfp8rl.models.module import init_params
from jaxfp8rl.models.transformer import forward, head_weight
from jaxfp8rl.policy.adapters import base_of
from jaxfp8rl.policy.policy import over_base
from jaxfp8rl.precision.adapters import LORA
from jaxfp8rl.precision.layer_runs import LayerRun
from jaxfp8rl.precision.records import AdapterProduct, Precision
from jaxfp8rl.publish.adapters import AdaptedWeights, Adapters, AdapterWeights
from jaxfp8rl.publish.wire import LearnerWeights
from jaxfp8rl.training.step import make_policy

QWEN2 = ModelConfig.from_hf({  # its q, k and v have biases
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 512, "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "eos_token_id": 7, "pad_token_id": 0,
    "tie_word_embeddings": False})
SHAPES = (("self_attn.v_proj", (128, 256)), ("mlp.down_proj", (256, 512)))
PRODUCT = AdapterProduct(1.5, "bfloat16")
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RUNS = (LayerRun(0, QWEN2.num_hidden_layers, frozenset()),)
TOKENS = tuple(int(t) for t in np.random.default_rng(0).integers(8, 500, 24))


def packed_folder(folder: Path, form: str, seed: int) -> Path:
    """Its biases are not 0, and its gains not 1."""
    draw = np.random.default_rng(seed)
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: np.asarray(x) * 4 if x.ndim > 2 and "embed" not in str(path) else
        (np.asarray(x) + 0.3 * draw.standard_normal(x.shape)).astype(np.float32),
        init_params(QWEN2, jax.random.key(seed)))
    save_params(folder / "bf16", QWEN2, params)
    return quantize_folder(folder / "bf16", folder / form, form)


def policy_of(folder: Path) -> tuple[ModelConfig, dict]:
    model, params = load_params(folder, dtype="stored")
    return model, base_of(params, make_policy(Precision(RUNS, compute_dtype="bfloat16")))


class World(NamedTuple):
    engine: VllmEngine
    transport: VllmSlots
    model: ModelConfig
    base: dict

    def source(self, seed: int, base: dict | None = None) -> AdaptedWeights:
        """The base, and adapters of `seed` beside it."""
        base, lora = base or self.base, {}
        for i, (linear, (n, k)) in enumerate(SHAPES):
            keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), i))
            pair = {"lora_A": jax.random.normal(keys[0], (2, 4, k)) * 0.1,
                    "lora_B": jax.random.normal(keys[1], (2, n, 4)) * 0.3}
            part, module = linear.split(".")
            lora.setdefault(part, {})[module] = jax.tree.map(lambda x: x.astype(jnp.bfloat16), pair)
        whole = over_base({"layers": ({LORA: lora},)}, base)
        adapters = Adapters(SHAPES, 2, 4, PRODUCT)
        return AdaptedWeights(LearnerWeights(self.model, base, RUNS, "bfloat16"),
                              AdapterWeights(whole, adapters), base)

    def gap(self, source: AdaptedWeights) -> float:
        """The mean difference of the engine's log-probabilities and the learner's, over `source`."""
        [[said]] = self.engine.generate([GenRequest("a", TOKENS, SamplingParams(16), seed=3)])
        tokens = [*TOKENS, *said.token_ids.tolist()]
        row, lora = jnp.asarray(tokens)[None], source.adapters._stacks[0]
        whole = over_base({"layers": ({LORA: lora},)}, source.bare)
        precision = Precision(RUNS, compute_dtype="bfloat16", adapters=AdapterProduct(1.0, "bfloat16"))
        hidden = forward(whole, self.model, row, jnp.arange(len(tokens))[None], jnp.ones_like(row), precision)
        logits = (hidden[0] @ head_weight(whole, self.model).T).astype(jnp.float32)
        ours = jnp.take_along_axis(jax.nn.log_softmax(logits)[:-1], row[0, 1:, None], 1)[len(TOKENS) - 1 :, 0]
        return float(np.abs(np.asarray(ours) - said.logprobs).mean())


@contextlib.contextmanager
def opened(folder: Path, form: str, **options: Any) -> Iterator[World]:
    model, base = policy_of(folder)
    engine = VllmEngine(model.to_hf(), weights=form, folder=str(folder), max_model_len=64, max_num_seqs=4,
                        kv_cache_bytes=2**26, adapters=AdapterSlots(1, 4, LINEARS), **options)
    with contextlib.closing(engine):
        transport = open_vllm_transport("auto", engine)
        assert isinstance(transport, VllmSlots)
        yield World(engine, transport, model, base)
        transport.close()
