"""Small GGUF files of every architecture that is imported, with weights of any type."""

from __future__ import annotations

from pathlib import Path

import numpy as np

LAYERS, HIDDEN, HEADS, KV_HEADS, VOCAB = 2, 256, 4, 2, 264
HEAD_DIM = {"llama": 64, "qwen2": 64, "qwen3": 128, "gemma3": 128}
SCALES_AT = {"Q4_K": (0, 4), "Q6_K": (208, 210)}  # the half-precision scales in a block
BOS, EOS = 257, 258


def blocks(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Bytes of a tensor of this type. gguf-py has no quantiser for the K types: theirs are random valid
    blocks."""
    import gguf

    if kind not in SCALES_AT:
        x = rng.normal(size=shape).astype(np.float32)
        return gguf.quantize(x, gguf.GGMLQuantizationType[kind]).view(np.uint8)
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    data = rng.integers(0, 256, (*shape[:-1], shape[-1] // elements, size), np.uint8)
    start, end = SCALES_AT[kind]
    scales = rng.uniform(1e-3, 1e-2, (*data.shape[:-1], (end - start) // 2)).astype(np.float16)
    data[..., start:end] = scales.view(np.uint8)
    return data.reshape(*shape[:-1], -1)


def shapes(arch: str) -> dict[str, tuple[int, ...]]:
    """GGUF's name of every tensor -> [out, in]. The head is tied in Gemma and Qwen3."""
    d, wide, narrow = HEAD_DIM[arch], HEADS * HEAD_DIM[arch], KV_HEADS * HEAD_DIM[arch]
    layer = {"attn_norm": (HIDDEN,), "attn_q": (wide, HIDDEN), "attn_k": (narrow, HIDDEN),
             "attn_v": (narrow, HIDDEN), "attn_output": (HIDDEN, wide), "ffn_norm": (HIDDEN,),
             "ffn_gate": (512, HIDDEN), "ffn_up": (512, HIDDEN), "ffn_down": (HIDDEN, 512)}
    if arch in ("qwen3", "gemma3"):
        layer |= {"attn_q_norm": (d,), "attn_k_norm": (d,)}
    if arch == "gemma3":
        layer |= {"post_attention_norm": (HIDDEN,), "post_ffw_norm": (HIDDEN,)}
    all_layers = {f"blk.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in layer.items()}
    if arch == "qwen2":
        all_layers |= {f"blk.{i}.attn_{x}.bias": layer[f"attn_{x}"][:1] for i in range(LAYERS) for x in "qkv"}
    head = {} if arch in ("qwen3", "gemma3") else {"output.weight": (VOCAB, HIDDEN)}
    return {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,), **head, **all_layers}


def write(path: Path, arch: str = "llama", kind: str = "F16", *, bos: bool | None = True, settings=None,
          extra=None, leave_out=(), pre: str = "default") -> dict[str, np.ndarray]:
    """Write a file whose matrices have the type `kind`, and norms and biases F32. Returns the values by name,
    as gguf-py dequantises them.

    settings: more metadata. extra: more tensors in F32. leave_out: names of tensors and settings."""
    import gguf

    rng, writer, values = np.random.default_rng(0), gguf.GGUFWriter(path, arch), {}
    for key, value in (_settings(arch) | (settings or {})).items():
        if key not in leave_out:
            _add(writer, key if key.startswith("split.") else f"{arch}.{key}", value)
    _tokenizer(writer, bos, pre)
    for name, shape in shapes(arch).items():
        if name in leave_out:
            continue
        type_ = gguf.GGMLQuantizationType["F32" if len(shape) == 1 else kind]
        data = blocks(type_.name, shape, rng)
        values[name] = gguf.dequantize(data, type_).reshape(shape)
        writer.add_tensor(name, data, raw_dtype=type_)
    for name, x in (extra or {}).items():
        writer.add_tensor(name, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def _settings(arch: str) -> dict:
    d = HEAD_DIM[arch]
    made = {"context_length": 512, "embedding_length": HIDDEN, "block_count": LAYERS,
            "feed_forward_length": 512, "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS,
            "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e5}
    if arch == "llama":
        made["rope.dimension_count"] = d
    if arch in ("qwen3", "gemma3"):
        made |= {"attention.key_length": d, "attention.value_length": d}
    return made | ({"attention.sliding_window": 16} if arch == "gemma3" else {})


def _add(writer, key: str, value) -> None:
    kind = {int: "uint32", float: "float32", str: "string", bool: "bool"}[type(value)]
    getattr(writer, f"add_{kind}")(key, value)


def _tokenizer(writer, bos: bool | None, pre: str) -> None:
    """Bytes, the merge "ab", and two special tokens; the rest pads the vocabulary."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = [*bytes_to_unicode().values(), "ab", "<bos>", "<eos>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [3] * 2)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    if bos is not None:
        writer.add_add_bos_token(bos)
