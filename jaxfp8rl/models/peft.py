"""Adapter folders as PEFT writes and reads them: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxfp8rl.errors import ModelError
from jaxfp8rl.models.loading import appearing, write_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
BASE_DIGEST = "base_sha256"  # in the metadata of the weights: jaxfp8rl.policy.adapters.digest_of
# What an adapter may not have: the key of its config -> (the values that say it has not, what it would be)
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_dora": ((False, None), "DoRA, whose magnitudes learn too"),
    "modules_to_save": ((None, []), "whole modules that learn beside the adapters"),
    "bias": (("none", None), "biases that learn"),
    "lora_bias": ((False, None), "biases of the adapters"),
    "rank_pattern": ((None, {}), "ranks that differ"),
    "alpha_pattern": ((None, {}), "factors that differ"),
    "layers_to_transform": ((None,), "some layers only"),
    "fan_in_fan_out": ((False, None), "transposed weights"),
    "use_qalora": ((False, None), "QA-LoRA"),
    "trainable_token_indices": ((None,), "embeddings that learn"),
    "layer_replication": ((None,), "layers that are repeated"),
    "alora_invocation_tokens": ((None,), "aLoRA, which acts after certain tokens alone"),
    "target_parameters": ((None, []), "adapters of parameters that are no linear's weight"),
    "use_bdlora": ((None, False), "block-diagonal adapters"),
    "kasa_config": ((None,), "KaSA, whose singular values learn too"),
    "monteclora_config": ((None,), "MonteCLoRA, whose weights are drawn at random"),
    "arrow_config": ((None,), "Arrow, which routes among several adapters"),
}
# The other keys of PEFT 0.21's LoraConfig: looked at elsewhere here, or without effect on a trained adapter.
KNOWN = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "use_rslora",
    "init_lora_weights", "layers_pattern", "megatron_config", "megatron_core", "loftq_config", "eva_config",
    "corda_config", "lora_ga_config", "velora_config", "qalora_group_size", "runtime_config",
    "ensure_weight_tying",
}
# These change the base before the adapter begins, so that it belongs to another base.
OTHER_BASES = "pissa", "olora", "loftq", "corda", "lora_ga"
FLOATS = "F32", "F16", "BF16"  # of safetensors


def write_adapter(folder: str | Path, tensors: Mapping[str, np.ndarray], *, rank: int, alpha: float,
                  rslora: bool, targets: tuple[str, ...], base: str, digest: str) -> None:
    """Write an adapter folder. tensors: "model.layers.0.self_attn.q_proj.lora_A.weight" [r, K] and lora_B
    [N, r], float32. base: the folder or name of the base model. digest: of its weights. Raises ModelError as
    `loading.appearing` does."""
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": rank,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha, "use_rslora": rslora,
        "target_modules": sorted(targets), "lora_dropout": 0.0, "bias": "none", "use_dora": False,
        "modules_to_save": None, "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True,
    }
    with appearing(Path(folder)) as partial:
        save_file({PREFIX + name: np.ascontiguousarray(x) for name, x in tensors.items()}, partial / WEIGHTS,
                  {"format": "pt", BASE_DIGEST: digest})
        write_json(partial / CONFIG, config)


def read_adapter(folder: str | Path, shapes: Mapping[str, tuple[int, int]], *, rank: int, alpha: float,
                 rslora: bool) -> tuple[dict[str, np.ndarray], str]:
    """({name: float32 array} of an adapter folder, the digest of its base or "" if it does not say).

    shapes: the tensors that are wanted. Raises ModelError as `check_adapter` does, and for numbers that are
    not finite.
    """
    check_adapter(folder, shapes, rank=rank, alpha=alpha, rslora=rslora)
    with _opened(Path(folder)) as file:
        tensors = {name: file.get_tensor(PREFIX + name).astype(np.float32) for name in shapes}
    if bad := [name for name, x in tensors.items() if not np.isfinite(x).all()]:
        raise ModelError(f"lora.path: {folder}: {bad[0]} has numbers that are not finite, as have "
                         f"{len(bad)} of {len(tensors)} tensors", "train it again, or copy it again")
    return tensors, adapter_base(folder)[1]


def adapter_base(folder: str | Path) -> tuple[str, str]:
    """(the base's name, its digest) as an adapter folder tells them, "" for what it does not tell. Raises
    ModelError for a folder that is none."""
    with _opened(Path(folder)) as file:
        said = str(_config(Path(folder)).get("base_model_name_or_path") or "")
        return said, (file.metadata() or {}).get(BASE_DIGEST, "")


def check_adapter(folder: str | Path, shapes: Mapping[str, tuple[int, int]], *, rank: int, alpha: float,
                  rslora: bool) -> None:
    """Raise ModelError for a folder that is none, for what no adapter here has (`REFUSED`), by name, and for
    a rank, a factor, types or tensors that differ, all of them listed. Only headers are read."""
    folder = Path(folder)
    config = _config(folder)
    with _opened(folder) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}
        have = {name.removeprefix(PREFIX): tuple(x.get_shape()) for name, x in slices.items()
                if name.startswith(PREFIX)}
        strange = [f"{name} does not begin with {PREFIX}" for name in slices if not name.startswith(PREFIX)]
        strange += [f"{name.removeprefix(PREFIX)} is {x.get_dtype()}, expected one of {', '.join(FLOATS)}"
                    for name, x in slices.items() if x.get_dtype() not in FLOATS]
    _check(folder, config, have, shapes, rank, alpha, rslora, strange)


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise _none(folder, e) from e
    if not isinstance(config, dict):
        raise _none(folder, f"{CONFIG} holds no JSON object")
    return config


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[Any]:
    try:
        with safe_open(folder / WEIGHTS, "numpy") as file:
            yield file
    except (OSError, SafetensorError) as e:
        raise _none(folder, e) from e


def _none(folder: Path, why: object) -> ModelError:
    return ModelError(f"lora.path: {folder} is no adapter folder of PEFT: {str(why)[:200]}",
                      f"it has {CONFIG} and {WEIGHTS}: name what `save_pretrained` wrote")


def _check(folder: Path, config: dict[str, Any], have: dict[str, tuple[int, ...]],
           shapes: Mapping[str, tuple[int, int]], rank: int, alpha: float, rslora: bool,
           strange: list[str]) -> None:
    for key, (allowed, what) in REFUSED.items():
        if config.get(key) not in allowed:
            raise ModelError(f"lora.path: {folder}: {key} = {json.dumps(config[key])}: {what}",
                             "train or convert it to plain LoRA, or merge it into its base")
    if news := {key: value for key, value in config.items() if key not in KNOWN | REFUSED.keys() and value}:
        key, value = next(iter(news.items()))
        raise ModelError(f"lora.path: {folder}: {key} = {json.dumps(value)}: a setting that is not known here",
                         f"if it does not change what the adapter computes, take it out of {CONFIG}; "
                         "otherwise merge the adapter into its base with PEFT")
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower().startswith(OTHER_BASES):
        raise ModelError(f'lora.path: {folder}: init_lora_weights = "{init}": it belongs to a base that this '
                         "changed", "convert it with PEFT's path_initial_model_for_weight_conversion")
    wanted = {"peft_type": "LORA", "r": rank, "use_rslora": rslora}
    found = [f"{key} is {config.get(key, False)!r}, expected {value!r}" for key, value in wanted.items()
              if config.get(key, False) != value]
    said = config.get("lora_alpha")
    if not isinstance(said, int | float) or not math.isclose(said, alpha):
        found.append(f"lora_alpha is {said!r}, expected {alpha!r}")
    found += strange
    found += [f"{name} is {list(have[name])}, expected {list(shape)}" for name, shape in shapes.items()
              if name in have and have[name] != shape]
    found += [f"{name} is missing" for name in shapes if name not in have]
    found += [f"{name} has no place here" for name in have if name not in shapes]
    if found:
        raise ModelError(f"lora.path: {folder} is an adapter of another base or shape: {'; '.join(found)}",
                         "set lora.rank, lora.alpha, lora.rslora and lora.targets as in its "
                         f"{CONFIG}, and model.path to its base")
