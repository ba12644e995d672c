"""`jaxfp8rl export`: a checkpoint of a run as a Hugging Face folder that transformers and vLLM load.

    config.json                     has a `quantization_config` in FP8 and in four bits
    model-*.safetensors, its index  HF names; in FP8 E4M3 `weight` and float32 `weight_scale_inv`, in blocks
                                    of 128x128; in four bits those of jaxfp8rl.models.packed
    tokenizer and generation files  the run's own; generation_config.json names all tokens at which
                                    completions stop
    trained_on.npy                  the problems trained on, so that no run holds them out
                                    (jaxfp8rl.data.seen)
    publish.json                    step, manifest and the SHA-256 of each tensor

In FP8 the bytes are those that the run's engine holds after a publish of this step, quantised from the same
rounded weights. A run whose engine is not in FP8 is quantised by the same rule. The scales of a calibrated
FP8 cache (rollout.kv_scales) are not written: an engine that serves the folder uses 1, or calibrates its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxfp8rl.checkpoint.read_only import load_trained
from jaxfp8rl.config.schema import Config
from jaxfp8rl.data.seen import read_seen, write_seen
from jaxfp8rl.data.tokenizer import CHARS_PREFIX, load_tokenizer
from jaxfp8rl.errors import ConfigError, ModelError, check_writable, near_path
from jaxfp8rl.models.config import ModelConfig, named
from jaxfp8rl.models.hf_names import Entry, get_param
from jaxfp8rl.models.loading import TOKENIZER_FILES, check_empty, check_weights, reading, write_json
from jaxfp8rl.models.packed import check_packable, unpack_params
from jaxfp8rl.models.packed_config import FORMS, Packed
from jaxfp8rl.policy.adapters import base_weights, check_digest, digest_of, merged, write_adapters
from jaxfp8rl.policy.shapes import weights_in_fp8
from jaxfp8rl.precision.layer_runs import LayerRun, plain_runs
from jaxfp8rl.publish.packed import PackedCheckpoint
from jaxfp8rl.publish.wire import LearnerWeights, high_precision_modules
from jaxfp8rl.rollout.engines import write_weights
from pallas_kernels.quantize import BLOCK


def export(
    run: str, out: str | Path, form: Literal["bf16", "fp8", "nvfp4", "mxfp4", "int4", "adapter"] = "bf16",
    step: int | None = None, overrides: Sequence[str] = ()
) -> Path:
    """Write the newest checkpoint of the run directory `run`, or that of `step`, to the folder `out`, and
    return it. `overrides` may say where model.path and model.tokenizer are now.

    Adapters (lora.rank) are merged into their base, or, as the form "adapter", written alone, as a folder of
    PEFT (jaxfp8rl.models.peft).

    The folder appears at once: it is written under another name and renamed. Raises ModelError if `out` is
    not empty or four bits do not take its shapes, ConfigError for shapes that FP8 cannot take and if `run` is
    a config, CheckpointError as `load_trained` does, and BridgeError if the disk is too small.
    """
    out = Path(out)
    # `load_trained` accepts a config, but the weights that a run starts from are not worth exporting
    if not Path(run).is_dir():
        raise ConfigError(f"{run} is no run directory{near_path(run)}",
                          "give what run.dir was, for example runs/demo")
    check_empty(out)
    if taken := next((p for p in out.parents if p.is_file()), None):
        raise ModelError(f"{out}: {taken} is a file", "choose another folder")
    check_writable(out)
    found = load_trained(run, step, overrides)
    cfg, model, params = found.cfg, found.model, found.params
    if form == "adapter" and not cfg.lora.rank:
        raise ConfigError(f"{run} trains all parameters: it has no adapters",
                          "leave --format out, or choose fp8")
    if cfg.lora.rank:
        base = base_weights(cfg, model)
        check_digest(digest := digest_of(base), found.loop["base"]["digest"], run)
        if form == "adapter":
            write_adapters(out, cfg, model, params, digest)
            return out
        # of a folder: numpy
        params = jax.tree.map(jnp.asarray, merged(cfg, model, unpack_params(base), params))
        model = dataclasses.replace(model, packed=None)
    read = functools.partial(get_param, {**params, "layers": (params["layers"],)})
    if form in FORMS:
        source, config = _in_four_bits(model, form, read)
    else:
        dtype = cfg.precision.weight_dtype if form == "fp8" else "bfloat16"
        runs = weights_in_fp8(cfg, model) if form == "fp8" else plain_runs(model.sparse_layers)
        source = LearnerWeights(model, {**params, "layers": (params["layers"],)}, runs, dtype)
        config = hf_config(model, runs, dtype)
    with _appearing(out, source, config, found.step) as folder:
        _write_tokenizer(cfg, folder, found.loop.get("eos_token_ids"))
        if (seen := read_seen(run)) is not None:
            write_seen(folder, seen)
    return out


def quantize_folder(source: str | Path, out: str | Path, form: str) -> Path:
    """Write the Hugging Face folder `source`, which has float weights, to the folder `out` in four bits, and
    return it. form: "nvfp4", "mxfp4" or "int4". A tensor is in memory at a time, and a shard of the result.

    Raises ModelError as `check_weights` does, for a folder that is quantised already, for shapes that the
    format does not take, numbers that are not finite, and if `out` is not empty; BridgeError if the disk is
    too small.
    """
    source, out = Path(source), Path(out)
    check_empty(out)
    check_writable(out)
    with named(""):
        model = ModelConfig.from_hf(source)
        if model.packed:
            raise ModelError(f"{source} is in {model.packed.form} already", "start from the BF16 checkpoint")
        check_weights(source, model)
    weights, config = _in_four_bits(model, form, reading(source))
    with _appearing(out, weights, config, 0) as folder:
        for file in (source / name for name in TOKENIZER_FILES):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
        if (seen := read_seen(source)) is not None:
            write_seen(folder, seen)
    return out


def _in_four_bits(model: ModelConfig, form: str, read: Callable[[Entry], Any]
                  ) -> tuple[PackedCheckpoint, dict[str, Any]]:
    """(the tensors, the contents of config.json) of a model in four bits. read(entry): a float weight."""
    packed = dataclasses.replace(model, packed=Packed(form), dtype="bfloat16")
    check_packable(packed)
    return PackedCheckpoint(packed, read), packed.to_hf()


@contextlib.contextmanager
def _appearing(out: Path, source: LearnerWeights | PackedCheckpoint, config: dict[str, Any],
               step: int) -> Iterator[Path]:
    """A folder with the weights and config.json, to be filled further, which then takes the name `out`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as partial:
        folder = Path(partial) / "model"
        write_weights(source, folder, step)
        write_json(folder / "config.json", config)
        yield folder
        folder.chmod(0o755)  # temporary folders are private, and safetensors makes its files so
        for path in folder.iterdir():
            path.chmod(0o644)
        os.rename(folder, out)


def hf_config(model: ModelConfig, runs: tuple[LayerRun, ...], dtype: str) -> dict[str, Any]:
    """The contents of config.json. If any of `runs` is in FP8, they say so as transformers and vLLM read
    it."""
    raw = dataclasses.replace(model, dtype=dtype).to_hf()
    if not any(run.fp8 for run in runs):
        return raw
    quantization = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": [*high_precision_modules(model, runs), "lm_head"],
    }
    return {**raw, "quantization_config": quantization}


def _write_tokenizer(cfg: Config, folder: Path, eos_token_ids: list[int] | None) -> None:
    """Write the tokenizer, with the files of the folder that it came from and the stop tokens of the run."""
    spec = cfg.model.tokenizer or cfg.model.path
    load_tokenizer(spec).save(str(folder))
    for name in () if spec.startswith(CHARS_PREFIX) else TOKENIZER_FILES:
        if (Path(spec) / name).is_file():
            shutil.copyfile(Path(spec) / name, folder / name)
    if eos_token_ids:
        generation = folder / "generation_config.json"
        generation.write_text(json.dumps(json.loads(generation.read_text()) | {"eos_token_id": eos_token_ids},
                                         indent=2) + "\n")
