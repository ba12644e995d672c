"""`jaxfp8rl export`: a checkpoint of a run as a Hugging Face folder that transformers and vLLM load.

    config.json                     has a `quantization_config` in FP8
    model-*.safetensors, its index  HF names; in FP8 E4M3 `weight` and float32 `weight_scale_inv`, in blocks of
                                    128x128
    tokenizer and generation files  the run's own; generation_config.json names all tokens at which
                                    completions stop
    trained_on.npy                  the problems trained on, so that no run holds them out (jaxfp8rl.data.seen)
    publish.json                    step, manifest and the SHA-256 of each tensor

In FP8 the bytes are those that the run's engine holds after a publish of this step, quantised from the same
rounded weights. A run whose engine is not in FP8 is quantised by the same rule. The scales of a calibrated
FP8 cache (rollout.kv_scales) are not written: an engine that serves the folder uses 1, or calibrates its own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from jaxfp8rl.checkpoint.read_only import load_trained
from jaxfp8rl.config.schema import Config
from jaxfp8rl.data.seen import read_seen, write_seen
from jaxfp8rl.data.tokenizer import CHARS_PREFIX, load_tokenizer
from jaxfp8rl.errors import ConfigError, ModelError, check_writable
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.loading import TOKENIZER_FILES, check_empty
from jaxfp8rl.policy.adapters import base_weights, check_digest, digest_of, merged, write_adapters
from jaxfp8rl.policy.shapes import weights_in_fp8
from jaxfp8rl.precision.layer_runs import LayerRun, plain_runs
from jaxfp8rl.publish.wire import LearnerWeights, high_precision_modules
from jaxfp8rl.rollout.engines import write_weights
from pallas_kernels.quantize import BLOCK


def export(
    run: str, out: str | Path, form: Literal["bf16", "fp8", "adapter"] = "bf16", step: int | None = None,
    overrides: Sequence[str] = ()
) -> Path:
    """Write the newest checkpoint of the run directory `run`, or that of `step`, to the folder `out`, and
    return it. `overrides` may say where model.path and model.tokenizer are now.

    Adapters (lora.rank) are merged into their base, or, as the form "adapter", written alone, as a folder of
    PEFT (jaxfp8rl.models.peft).

    The folder appears at once: it is written under another name and renamed. Raises ModelError if `out` is
    not empty, ConfigError for shapes that FP8 cannot take and if `run` is a config, CheckpointError as
    `load_trained` does, and BridgeError if the disk is too small.
    """
    out = Path(out)
    # `load_trained` accepts a config, but the weights that a run starts from are not worth exporting
    if not Path(run).is_dir():
        raise ConfigError(f"{run} is no run directory", "give what run.dir was, for example runs/demo")
    check_empty(out)
    if taken := next((p for p in out.parents if p.is_file()), None):
        raise ModelError(f"{out}: {taken} is a file", "choose another folder")
    check_writable(out)
    found = load_trained(run, step, overrides)
    cfg, model, params = found.cfg, found.model, found.params
    if form == "adapter" and not cfg.lora.rank:
        raise ConfigError(f"{run} trains all parameters: it has no adapters", "leave --format out, or choose fp8")
    if cfg.lora.rank:
        base = base_weights(cfg, model)
        check_digest(digest := digest_of(base), found.loop["base"]["digest"], run)
        if form == "adapter":
            write_adapters(out, cfg, model, params, digest)
            return out
        params = merged(cfg, model, base, params)
    fp8 = form == "fp8"
    dtype = cfg.precision.weight_dtype if fp8 else "bfloat16"
    runs = weights_in_fp8(cfg, model) if fp8 else plain_runs(model.sparse_layers)
    source = LearnerWeights(model, {**params, "layers": (params["layers"],)}, runs, dtype)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as partial:
        folder = Path(partial) / "model"
        write_weights(source, folder, found.step)
        (folder / "config.json").write_text(json.dumps(hf_config(model, runs, dtype), indent=2,
                                                       sort_keys=True) + "\n")
        _write_tokenizer(cfg, folder, found.loop.get("eos_token_ids"))
        if (seen := read_seen(run)) is not None:
            write_seen(folder, seen)
        folder.chmod(0o755)  # temporary folders are private, and safetensors makes its files so
        for path in folder.iterdir():
            path.chmod(0o644)
        os.rename(folder, out)
    return out


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
