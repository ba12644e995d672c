"""A WeightSource over any tree of arrays: a mapping says which leaf is which Hugging Face tensor.

    mapping = {
        "embed.embedding": ["model.embed_tokens.weight", "lm_head.weight"],               # tied: given twice
        "layers.{i}.norm.scale": "model.layers.{i}.input_layernorm.weight",
        "layers.{i}.q.kernel": To("model.layers.{i}.self_attn.q_proj.weight", axes="d h k -> (h k) d"),
        "blocks.up.kernel": To("model.layers.{i}.mlp.up_proj.weight", axes="i o -> o i"),  # stacked layers
        "dropout.*": None,                                                                # is not sent
    }
    transport.publish(TreeSource(params, mapping, weights="fp8_e4m3_128x128", dtype="bfloat16"), version=1)
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bridges.api import BridgeError, ManifestMismatch, ParamMeta, StackRow
from bridges.proof import manifest

FP8, BLOCK, E4M3_MAX, AMAX_FLOOR = "fp8_e4m3_128x128", 128, np.float32(448), np.float32(1e-10)
Made = tuple[tuple[ParamMeta, ...], Callable[[], Any]]  # a tensor, in FP8 with its scales; what makes it


@dataclasses.dataclass(frozen=True)
class To:
    """The place of a leaf: the name or names of the HF tensors that it becomes.

    A placeholder of the name, `{i}` or `*`, that the path lacks unstacks the leaf: one tensor for each entry
    along an axis, the axes in `stacked`, one for each such placeholder. `axes` transposes and joins the axes
    that are left, as einops writes it: "i o -> o i", "d h k -> (h k) d". `split` cuts a fused projection
    along the rows [out, ...] of the result into so many rows for each name. Several names without `split`
    each get the whole tensor. `dtype` replaces that of the source.
    """

    names: str | Sequence[str]
    axes: str = ""
    stacked: tuple[int, ...] = ()
    split: tuple[int, ...] = ()
    dtype: str | None = None


class TreeSource:
    """WeightSource over `params`: nested mappings, sequences, objects with attributes (a torch or an NNX
    module, an NNX State) of numpy's, JAX's or torch's arrays. A path joins keys with dots.

    mapping: path -> HF name, `To`, list of names, None for a leaf that is not sent, or (HF name, sharding) as
    Tunix has it: of the sharding only the place of an axis "layer" counts, which is the stacked one. `{i}` or
    `*` in a path stands for one key. No mapping: each path is its tensor's HF name. weights: a float type for
    all tensors, None to leave each its own, or "fp8_e4m3_128x128": tensors of two axes whose HF name matches
    `quantize`, a regular expression or a predicate, are rounded to `dtype`, as the rest is, and become E4M3
    codes and `weight_scale_inv`. Tensors are made while they are asked for.

    Raises BridgeError that lists every leaf without a place, path without a leaf and transform that does not
    fit; with `expected`, an engine's `expected_manifest()`, ManifestMismatch that lists every difference. In
    that manifest's order the tensors come, else in the mapping's.
    """

    def __init__(self, params: Any, mapping: Mapping[str, Any] | None = None, *, weights: str | None = None,
                 dtype: str | None = None, expected: Sequence[ParamMeta] | None = None,
                 quantize: str | Callable[[str], bool] = r"layers\.\d+\..*_proj\.weight"):
        self._dtype = dtype or (None if weights == FP8 else weights)
        if weights not in (None, FP8, self._dtype):
            raise ValueError(f"weights={weights!r} with dtype={dtype!r}: use one type for both, or {FP8!r}")
        matches = quantize if callable(quantize) else functools.partial(re.search, quantize)
        self._is_fp8 = lambda name: weights == FP8 and bool(matches(name))
        tree = dict(leaves(params))
        mapping = {path: path for path in tree} if mapping is None else mapping
        self._tensors = self._plan(tree, {path: _place(to) for path, to in mapping.items()})
        if expected is not None:
            self._fit(expected)

    def manifest(self) -> tuple[ParamMeta, ...]:
        return tuple(meta for metas, _ in self._tensors for meta in metas)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for metas, make in self._tensors:
            made = quantize_blocks(make()) if len(metas) == 2 else (make(),)
            yield from zip((meta.name for meta in metas), map(_lent, made))

    def _plan(self, tree: dict[str, Any], places: dict[str, To | None]) -> list[Made]:
        tensors, problems, left = [], [], dict(tree)
        for path, to in places.items():
            pattern = re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^.]+)", re.escape(_numbered(path))))
            found = {key: match for key in left if (match := pattern.fullmatch(key))}
            for key, match in found.items():  # the first pattern that matches a leaf has it
                leaf = left.pop(key)
                try:
                    tensors += self._tensors_of(leaf, to, match.groupdict()) if to else []
                except ValueError as e:
                    problems.append(f"{key} {tuple(leaf.shape)}: {e}")
            if to and not found:
                problems.append(f"{path}: no leaf has this path")
        problems += [f"{key} {tuple(x.shape)}: the mapping has no place for it" for key, x in left.items()]
        if problems:
            raise BridgeError(f"mapping and tree do not fit ({len(problems)} problems):\n  "
                              + "\n  ".join(problems), "give a leaf that is not to be sent the place None")
        return tensors

    def _tensors_of(self, leaf: Any, to: To, keys: dict[str, str]) -> Iterator[Made]:
        names = [_numbered(name) for name in ([to.names] if isinstance(to.names, str) else to.names)]
        missing = [key for key in dict.fromkeys(re.findall(r"{(\w+)}", names[0])) if key not in keys]
        stacked = to.stacked or tuple(range(len(missing)))
        if len(stacked) != len(missing) or len(leaf.shape) <= max(stacked, default=-1):
            raise ValueError(f"cannot unstack axes {stacked} into the placeholders {missing} of {names[0]}")
        order, joined = _arrangement(to.axes, [n for i, n in enumerate(leaf.shape) if i not in stacked])
        cuts = _cuts(to.split, joined, len(names))
        for at in np.ndindex(*(leaf.shape[axis] for axis in stacked)):
            place = dict(zip(stacked, at))
            index = tuple(place.get(axis, slice(None)) for axis in range(max(stacked, default=-1) + 1))
            for name, rows in zip(names, cuts):
                shape = joined if rows == slice(None) else (rows.stop - rows.start, *joined[1:])
                dtype = to.dtype or self._dtype or _dtype_name(leaf)
                metas = self._metas(name.format(**keys, **dict(zip(missing, at))), dtype, shape)
                yield metas, functools.partial(_made, leaf, index, order, joined, rows, metas[0].dtype, dtype)

    def _metas(self, name: str, dtype: str, shape: tuple[int, ...]) -> tuple[ParamMeta, ...]:
        if len(shape) != 2 or not self._is_fp8(name):
            return (ParamMeta(name, dtype, shape),)
        block, scales = (BLOCK, BLOCK), tuple(-(-n // BLOCK) for n in shape)
        return (ParamMeta(name, "float8_e4m3fn", shape, "weight", block),
                ParamMeta(name + "_scale_inv", "float32", scales, "block_scale", block))

    def _fit(self, expected: Sequence[ParamMeta]) -> None:
        if lines := manifest.differences(self.manifest(), expected):
            raise ManifestMismatch(f"the tree is not what the engine expects ({len(lines)} differences):\n  "
                                   + "\n  ".join(lines), "correct the mapping")
        place = {meta.name: i for i, meta in enumerate(expected)}
        self._tensors.sort(key=lambda tensor: place[tensor[0][0].name])


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, array) of each array of a tree, in its order."""
    tree = tree.get_value() if hasattr(tree, "get_value") else tree  # an NNX Variable
    if hasattr(tree, "shape") and hasattr(tree, "dtype"):
        yield path, tree
        return
    if isinstance(tree, Mapping) or hasattr(tree, "named_parameters"):  # of a torch module
        children = tree.items() if isinstance(tree, Mapping) else tree.named_parameters()
    elif isinstance(tree, Sequence) and not isinstance(tree, str | bytes):
        children = zip(getattr(tree, "_fields", range(len(tree))), tree)
    else:
        plain = isinstance(tree, type) or hasattr(tree, "__code__") or not hasattr(tree, "__dict__")
        children = () if plain else ((k, v) for k, v in vars(tree).items() if not k.startswith("_"))
    for key, value in children:
        yield from leaves(value, f"{path}.{key}" if path else str(key))


def _place(to: Any) -> To | None:
    """Every short form of a place as `To`."""
    if isinstance(to, tuple) and len(to) == 2 and not isinstance(to[1], str):  # Tunix: (name, sharding)
        return To(to[0], stacked=(to[1].index("layer"),) if "layer" in (to[1] or ()) else ())
    return to if to is None or isinstance(to, To) else To(to)


def _numbered(name: str) -> str:
    """`*` is a placeholder that is named by its place among them: both sides of a mapping count alike."""
    count = iter(range(name.count("*")))
    return re.sub(r"\*", lambda _: f"{{_{next(count)}}}", name)


def _arrangement(axes: str, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of "d h k -> (h k) d" and the shape before it: the axes' order, and the shape that they join to."""
    if not axes:
        return tuple(range(len(shape))), tuple(shape)
    names, groups = axes.partition("->")[0].split(), re.findall(r"\([^)]*\)|\w+", axes.partition("->")[2])
    members = [group.strip("()").split() for group in groups]
    flat = [name for group in members for name in group]
    if sorted(flat) != sorted(set(names)) or not len(flat) == len(names) == len(shape):
        raise ValueError(f'axes "{axes}" do not describe a tensor of shape {tuple(shape)}')
    joined = (math.prod(shape[names.index(name)] for name in group) for group in members)
    return tuple(map(names.index, flat)), tuple(joined)


def _cuts(split: tuple[int, ...], shape: tuple[int, ...], names: int) -> list[slice]:
    if split and (len(split) != names or not shape or sum(split) != shape[0]):
        raise ValueError(f"split {split} does not cut the rows of {shape} for {names} names")
    ends = np.cumsum(split).tolist()
    return [slice(end - size, end) for end, size in zip(ends, split)] or [slice(None)] * names


def _made(x: Any, index: tuple, order: tuple, joined: tuple, rows: slice, sent: str, dtype: str) -> Any:
    """`x[index]`, its axes in `order`, then of shape `joined`, `rows` of that, as `dtype`: in x's library. A
    row of a JAX stack that is sent as it is stays where it lies."""
    x, whole = x.detach() if hasattr(x, "detach") else x, slice(None)
    is_row = index and whole not in index and order == tuple(range(x.ndim - len(index)))
    as_it_is = rows == whole and sent == _dtype_name(x) and x.shape[len(index):] == joined
    if is_row and as_it_is and hasattr(x, "block_until_ready"):  # JAX
        return StackRow(x, index[0] if len(index) == 1 else index)
    x = x[index] if index else x
    x = (x.permute(order) if hasattr(x, "permute") else x.transpose(order)).reshape(joined)
    return _cast(x if rows == whole else x[rows], dtype)


def _dtype_name(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")


def _cast(x: Any, dtype: str) -> Any:
    import ml_dtypes

    if _dtype_name(x) == dtype:
        return x
    if hasattr(x, "detach"):
        return x.to(getattr(sys.modules["torch"], dtype))
    return x.astype(getattr(ml_dtypes, dtype, dtype))


def _lent(x: Any) -> Any:
    """A form that a transport can read through DLPack: row-major, and numpy's FP8 and bfloat16, which numpy
    does not export, as torch's or JAX's, whichever is loaded."""
    if not isinstance(x, np.ndarray):
        return x.contiguous() if hasattr(x, "contiguous") else x
    x, torch, jax = np.require(x, requirements=["C", "W"]), sys.modules.get("torch"), sys.modules.get("jax")
    if torch and x.dtype.isbuiltin != 1:
        return torch.from_numpy(x.view(f"i{x.itemsize}")).view(getattr(torch, x.dtype.name))
    return jax.numpy.asarray(x) if jax and x.dtype.isbuiltin != 1 else x


def quantize_blocks(w: Any) -> tuple[Any, Any]:
    """w [N, K] of numpy, JAX or torch -> E4M3 codes [N, K], float32 scales [N/128, K/128] rounded up, of the
    same library; bit for bit `pallas_kernels.quantize.reference.quantize_blocks`. Torch's on the host."""
    if hasattr(w, "detach"):
        both = quantize_blocks(w.float().cpu().numpy())
        return tuple(sys.modules["torch"].as_tensor(_lent(x)).to(w.device) for x in both)
    if not hasattr(w, "block_until_ready"):
        return _quantized(w, np, np.divide)
    jax = sys.modules["jax"]
    # JAX's float32 division is not correctly rounded; within one program XLA may drop the cast back
    with jax.enable_x64(True):
        return _quantized(w, jax.numpy, lambda x, y: (x.astype("float64") / y).astype("float32"))


def _quantized(w: Any, xp: Any, divide: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
    n, k = w.shape
    padded = xp.pad(w.astype("float32"), ((0, -n % BLOCK), (0, -k % BLOCK)))
    blocks = padded.reshape(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK)
    # XLA's maximum drops a NaN
    amax = xp.where(xp.isnan(blocks).any((1, 3)), np.float32("nan"), xp.abs(blocks).max((1, 3)))
    scale = divide(xp.maximum(amax, AMAX_FLOOR), E4M3_MAX)
    codes = xp.clip(divide(blocks, scale[:, None, :, None]), -E4M3_MAX, E4M3_MAX)
    return _cast(codes.reshape(padded.shape)[:n, :k], "float8_e4m3fn"), scale
