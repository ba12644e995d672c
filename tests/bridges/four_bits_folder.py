"""A tiny model in BF16 and in four bits, for tests of the folders."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import written_folder

from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.loading import save_params
from jaxfp8rl.models.module import init_params
from pallas_kernels import four_bits
from pallas_kernels.four_bits import FourBits

MODEL = ModelConfig.from_hf({
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 512, "hidden_size": 128, "intermediate_size": 192,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "eos_token_id": 7, "pad_token_id": 0})


def write_base(folder: Path) -> Path:
    """A BF16 folder whose q, k and v differ in magnitude."""
    params = init_params(MODEL, jax.random.key(0))
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: x if "norm" in str(path) else x * (12 if "k_proj" in str(path) else 4), params)
    save_params(folder, MODEL, params)
    return folder


def decoded(folder: Path) -> dict[str, np.ndarray]:
    """Weight -> its values, float32, by our own decoding of the tensors that are written."""
    written, made = written_folder.tensors(folder), {}
    for name in [n.removesuffix("_packed") for n in written if n.endswith("_packed")]:
        whole = written.get(f"{name}_global_scale")
        made[name] = np.asarray(four_bits.values(FourBits(
            written[f"{name}_packed"].view(np.uint8), written[f"{name}_scale"],
            None if whole is None else whole[0])))
    return made
