"""The `quantization_config` of a checkpoint in four bits: of compressed-tensors, weights alone (W4A16)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxfp8rl.errors import ModelError

METHOD = "compressed-tensors"
LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
           "mlp.up_proj", "mlp.down_proj")
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {  # form -> (format, weights)
    "nvfp4": ("nvfp4-pack-quantized",
              {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
    "mxfp4": ("mxfp4-pack-quantized",
              {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
    "int4": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}),
}
FORMS = tuple(SCHEMES)
_NEXT = "take a checkpoint of one of these, or make one: jaxfp8rl quantize FOLDER OUT --format nvfp4"


class Packed(NamedTuple):
    """form: "nvfp4", "mxfp4" or "int4" (pallas_kernels.four_bits). linears: those of every layer that have
    it, "self_attn.q_proj", ... stored: whether the folder has them so, or has floats, of which they are made
    when it is loaded (lora.base)."""

    form: str
    linears: tuple[str, ...] = LINEARS
    stored: bool = True


def form_named(name: str) -> tuple[str, str]:
    """("Qwen3-8B", "nvfp4") of "Qwen3-8B-NVFP4"; (name, "") of a name that ends in no format."""
    stem, _, end = name.rpartition("-")
    return (stem, end.lower()) if stem and end.lower() in FORMS else (name, "")


def quantization_config(packed: Packed, layers: int) -> dict[str, Any]:
    """What config.json says of a checkpoint, as compressed-tensors 0.17 and vLLM read it."""
    format_, weights = SCHEMES[packed.form]
    whole = {**weights, "symmetric": True, "dynamic": False, "actorder": None, "observer": "minmax"}
    if packed.form == "mxfp4":
        whole["scale_dtype"] = "torch.uint8"
    high = [f"model.layers.{i}.{name}" for i in range(layers) for name in LINEARS
            if name not in packed.linears]
    return {
        "quant_method": METHOD, "format": format_, "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": whole, "input_activations": None,
                                      "output_activations": None, "format": format_}},
        "ignore": [*high, "lm_head"], "kv_cache_scheme": None,
    }


def read_packed(raw: Mapping[str, Any], layers: int, where: str) -> Packed:
    """The inverse, also of what other tools write. Raises ModelError for another scheme, which it names, and
    for linears that some layers have packed and others not."""
    groups = raw.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise _refused(where, f"{len(groups) if isinstance(groups, Mapping) else 0} config_groups, "
                              f"only one is read")
    (group,) = groups.values()
    weights = group.get("weights") or {} if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise _refused(where, f"the config group {group!r:.80}")
    said = {key: weights.get(key) for key in ("num_bits", "type", "strategy", "group_size")}
    form = next((form for form, (_, scheme) in SCHEMES.items() if scheme == said), None)
    if form is None:
        raise _refused(where, "weights of " + ", ".join(f"{key} {value}" for key, value in said.items()))
    others = {"input_activations": group, "output_activations": group, "kv_cache_scheme": raw,
              "sparsity_config": raw,
              "transform_config": raw, "actorder": weights, "dynamic": weights}
    for only, where_found in others.items():
        if found := where_found.get(only):
            raise _refused(where, f"{only} = {found!r}")
    if weights.get("symmetric") is False:
        raise _refused(where, "zero points (symmetric = false)")
    format_ = group.get("format") or raw.get("format")
    if format_ != SCHEMES[form][0]:
        raise _refused(where, f'format "{format_}" of {form} weights')
    if raw.get("quantization_status", "compressed") != "compressed":
        raise _refused(where, f'quantization_status "{raw["quantization_status"]}"')
    if group.get("targets") != ["Linear"]:
        raise _refused(where, f"targets {group.get('targets')}, only [\"Linear\"] are read")
    return Packed(form, _packed_linears(raw.get("ignore") or [], layers, where))


def _packed_linears(ignore: Any, layers: int, where: str) -> tuple[str, ...]:
    def ignored(name: str) -> bool:
        return any(re.match(entry[3:], name) if entry.startswith("re:") else entry in (name, "Linear")
                   for entry in ignore)

    if not isinstance(ignore, list) or not all(isinstance(entry, str) for entry in ignore):
        raise _refused(where, f"ignore = {ignore!r:.80}, which is no list of names")
    try:
        ignored("")
    except re.error as e:
        raise _refused(where, f"a pattern in `ignore` that cannot be read: {e}") from e
    if not ignored("lm_head"):
        raise _refused(where, "an lm_head in four bits (it is not in `ignore`)")
    packed = []
    for linear in LINEARS:
        high = [i for i in range(layers) if ignored(f"model.layers.{i}.{linear}")]
        if 0 < len(high) < layers:
            raise _refused(where, f"{linear} of {len(high)} of {layers} layers in high precision, first in "
                                  f"layer {high[0]}")
        if not high:
            packed.append(linear)
    if not packed:
        raise _refused(where, "no linear of the layers in four bits")
    return tuple(packed)


def _refused(where: str, what: str) -> ModelError:
    known = ", ".join(f'{form} ("{format_}")' for form, (format_, _) in SCHEMES.items())
    return ModelError(f"{where}: quantization_config has {what}: of compressed-tensors, weights in "
                      f"{known} are read",
                      _NEXT)
