"""The model's shape, read from a Hugging Face config.json and written back without loss."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxfp8rl.errors import ModelError

MOE = "Qwen3MoeForCausalLM"
# architecture -> model_type
ARCHITECTURES = {"Qwen3ForCausalLM": "qwen3", "LlamaForCausalLM": "llama", MOE: "qwen3_moe"}
DTYPES = ("bfloat16", "float16", "float32")
HUB = {"Qwen": "Qwen", "Llama": "meta-llama"}  # how a model's name begins -> who publishes it

# Keys that change the arithmetic, with the values under which it is the arithmetic of
# `models/transformer.py`.
_ONLY = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "use_sliding_window": (False, None),
    "partial_rotary_factor": (1, None),
    "rope_interleaved": (False, None),
    "quantization_config": (None,),
}
_INTEGERS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads",
    "head_dim", "max_position_embeddings",
)
_EXPERT_INTEGERS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_EXPERT_KEYS = (*_EXPERT_INTEGERS, "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers",
                "num_local_experts")
_READ = {*_INTEGERS, "architectures", "model_type", "rms_norm_eps", "tie_word_embeddings", "rope_theta",
         "rope_scaling",
         "rope_parameters", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype"}


@dataclasses.dataclass(frozen=True)
class Llama3Rope:
    """Frequency scaling of Llama 3.1 (Grattafiori et al. 2024, section 3.4.2): slow frequencies are divided
    by `factor`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


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


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder, dense or with mixtures of experts. Names are those of config.json; hashable, so it can be a
    static argument of jit.

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
    rope_scaling: Llama3Rope | None = None
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    dtype: str = "bfloat16"
    experts: Experts | None = None
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    @property
    def qk_norm(self) -> bool:
        """Qwen3 normalises each query and key head before RoPE."""
        return self.architecture in ("Qwen3ForCausalLM", MOE)

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
        architecture = _architecture(raw, where)
        _refuse_unsupported(raw, where)
        theta, scaling = _rope(raw, where)
        eos = raw.get("eos_token_id")
        return cls(
            architecture=architecture,
            **_integers(raw, where, architecture),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            bos_token_id=raw.get("bos_token_id"),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
            pad_token_id=raw.get("pad_token_id"),
            dtype=_dtype(raw, where),
            experts=_experts(raw, where) if architecture == MOE else None,
            extra={k: v for k, v in raw.items()
                   if k not in (_READ if architecture != MOE else _READ.union(_EXPERT_KEYS))},
        )

    def to_hf(self) -> dict[str, Any]:
        """The config.json. RoPE is written in both spellings: `rope_parameters` (transformers 5) and the
        older pair."""
        scaling = {"rope_type": "llama3",
                   **dataclasses.asdict(self.rope_scaling)} if self.rope_scaling else None
        eos = self.eos_token_ids
        return {
            **self.extra,
            "architectures": [self.architecture],
            "model_type": ARCHITECTURES[self.architecture],
            **{key: getattr(self, key) for key in _INTEGERS},
            **(self.experts.to_hf() if self.experts else {}),
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling,
            "rope_parameters": {"rope_type": "default", **(scaling or {}), "rope_theta": self.rope_theta},
            "tie_word_embeddings": self.tie_word_embeddings,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
            "pad_token_id": self.pad_token_id,
            "dtype": self.dtype,
        }


def how_to_get(path: Path) -> str:
    """The command that makes a model folder, as far as its name tells."""
    folder = path.parent if path.name == "config.json" else path
    if folder.name.lower().startswith("smollm2-135m"):
        return f"`jaxfp8rl import-gguf {folder}` makes it, or name another folder with --model.path"
    owner = next((owner for start, owner in HUB.items() if folder.name.startswith(start)), "OWNER")
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


def _architecture(raw: Mapping[str, Any], where: str) -> str:
    by_type = {v: k for k, v in ARCHITECTURES.items()}
    names = raw.get("architectures") or [by_type.get(str(raw.get("model_type")),
                                                     f"model_type {raw.get('model_type')!r}")]
    if len(names) == 1 and names[0] in ARCHITECTURES:
        return names[0]
    raise ModelError(f"{where}: architectures = {names} is not implemented",
                     f"use one of: {', '.join(ARCHITECTURES)}")


def _refuse_unsupported(raw: Mapping[str, Any], where: str) -> None:
    for key, allowed in _ONLY.items():
        if key in raw and raw[key] not in allowed:
            raise ModelError(f"{where}: {key} = {raw[key]!r} is not implemented, only {allowed[0]!r} is",
                             _next_step(key))
    odd = sorted(set(raw.get("layer_types") or ()) - {"full_attention"})
    if odd:
        raise ModelError(f'{where}: layer_types has {", ".join(odd)}, only "full_attention" is implemented')


def _next_step(key: str) -> str:
    if key == "quantization_config":
        return "start from the unquantised (BF16) checkpoint: the learner quantises it itself"
    return "choose a model without it"


def _integers(raw: Mapping[str, Any], where: str, architecture: str) -> dict[str, int]:
    """The sizes. Llama may leave out head_dim and num_key_value_heads, Qwen3-MoE the first; Qwen3's own
    defaults fit no real model."""
    values = {key: raw.get(key) for key in _INTEGERS}
    if architecture != "Qwen3ForCausalLM" and values["num_attention_heads"] and values["hidden_size"]:
        if architecture == "LlamaForCausalLM":
            values["num_key_value_heads"] = values["num_key_value_heads"] or values["num_attention_heads"]
        values["head_dim"] = values["head_dim"] or values["hidden_size"] // values["num_attention_heads"]
    values = _positive(values, where)
    if values["num_attention_heads"] % values["num_key_value_heads"]:
        raise ModelError(
            f"{where}: num_attention_heads = {values['num_attention_heads']} is not a multiple of "
            f"num_key_value_heads = {values['num_key_value_heads']}"
        )
    if values["head_dim"] % 2:
        raise ModelError(f"{where}: head_dim = {values['head_dim']} is odd, RoPE rotates pairs")
    return values


def _positive(values: dict[str, Any], where: str) -> dict[str, int]:
    for key, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{where}: {key} must be a positive integer, got {value!r}")
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
            f"{where}: num_experts_per_tok = {sizes['num_experts_per_tok']} of num_experts = {sizes['num_experts']}")
    step = _positive({"decoder_sparse_step": raw.get("decoder_sparse_step", 1)}, where)["decoder_sparse_step"]
    dense = tuple(raw.get("mlp_only_layers") or ())
    if odd := [i for i in dense if not (isinstance(i, int) and 0 <= i < layers)]:
        raise ModelError(f"{where}: mlp_only_layers names layer {odd[0]!r}, num_hidden_layers is {layers}")
    count, active, width = (sizes[name] for name in _EXPERT_INTEGERS)
    experts = Experts(count, active, width, bool(raw.get("norm_topk_prob")), step, dense)
    if not any(map(experts.in_layer, range(layers))):
        raise ModelError(f"{where}: decoder_sparse_step and mlp_only_layers leave no layer with experts",
                         'use the architecture "Qwen3ForCausalLM"')
    return experts


def _rope(raw: Mapping[str, Any], where: str) -> tuple[float, Llama3Rope | None]:
    """From `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling`; both may be there when
    they agree."""
    new, old = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    thetas = {float(x) for x in (new.get("rope_theta"), old.get("rope_theta"), raw.get("rope_theta"))
              if x is not None}
    if len(thetas) > 1:
        raise ModelError(f"{where}: rope_theta has two values, {sorted(thetas)}", "keep one of them")
    found = {_scaling(d, f"{where}: {key}") for key, d in (("rope_parameters", new), ("rope_scaling", old))
             if d}
    if len(found) > 1:
        raise ModelError(f"{where}: rope_parameters and rope_scaling disagree", "keep one of them")
    return (thetas or {10000.0}).pop(), (found or {None}).pop()


def _scaling(d: Mapping[str, Any], where: str) -> Llama3Rope | None:
    kind = d.get("rope_type", d.get("type", "default"))
    if d.get("partial_rotary_factor", 1) != 1:
        raise ModelError(
            f"{where}.partial_rotary_factor = {d['partial_rotary_factor']!r} is not implemented, only 1 is")
    if kind == "default":
        return None
    if kind != "llama3":
        raise ModelError(f'{where}.rope_type = {kind!r} is not implemented, only "default" and "llama3" are')
    names = [f.name for f in dataclasses.fields(Llama3Rope)]
    missing = [name for name in names if not isinstance(d.get(name), int | float)]
    if missing:
        raise ModelError(f"{where}: rope_type llama3 needs numbers for {', '.join(missing)}")
    return Llama3Rope(**{name: d[name] for name in names})


def _dtype(raw: Mapping[str, Any], where: str) -> str:
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in DTYPES:
        raise ModelError(f"{where}: dtype = {dtype!r} is not one of {', '.join(DTYPES)}")
    return dtype
