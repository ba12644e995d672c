"""A WeightSource over any tree of arrays: a mapping says which leaf is which Hugging Face tensor.

    mapping = {
        "embed.embedding": ["model.embed_tokens.weight", "lm_head.weight"],               # tied: given twice
        "layers.{i}.norm.scale": "model.layers.{i}.input_layernorm.weight",
        "layers.{i}.q.kernel": To("model.layers.{i}.self_attn.q_proj.weight", axes="d h k -> (h k) d"),
        "blocks.up.kernel": To("model.layers.{i}.mlp.up_proj.weight", axes="i o -> o i"),  # stacked layers
        ("a.{i}.gate", "a.{i}.up"):                                                       # are joined
            To("model.layers.{i}.mlp.gate_up_proj.weight", axes="i o -> o i"),
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

from bridges.api import BridgeError, ManifestMismatch, ParamMeta
from bridges.proof import manifest
from bridges.sources.leaf import WHOLE, Part, cast, concatenated, dtype_name, leaves, lent, local

FP8, BLOCK, E4M3_MAX, AMAX_FLOOR = "fp8_e4m3_128x128", 128, np.float32(448), np.float32(1e-10)
Made = tuple[tuple[ParamMeta, ...], Callable[[], Any]]  # a tensor, in FP8 with its scales; what makes it
Axes = str | Sequence[int]


@dataclasses.dataclass(frozen=True)
class To:
    """The place of a leaf: the name or names of the HF tensors that it becomes.

    A placeholder of the name, `{i}` or `*`, that the path lacks unstacks the leaf: one tensor for each entry
    along an axis, the axes in `stacked`, one for each such placeholder. `axes` transposes and joins the axes
    that are left, as einops writes it: "i o -> o i", "d h k -> (h k) d"; or it is a permutation: (1, 0).
    `split` cuts a fused projection along the rows [out, ...] of the result into so many rows for each name.
    Several names without `split` each get the whole tensor. `dtype` replaces that of the source. `optional`:
    the tree may lack the leaf.
    """

    names: str | Sequence[str]
    axes: Axes = ""
    stacked: tuple[int, ...] = ()
    split: tuple[int, ...] = ()
    dtype: str | None = None
    optional: bool = False


class TreeSource:
    """WeightSource over `params`: nested mappings, sequences, objects with attributes (a torch or an NNX
    module, an NNX State) of numpy's, JAX's or torch's arrays. A path joins keys with dots.

    mapping: path -> HF name, `To`, list of names, None for a leaf that is not sent, or (HF name, sharding) as
    in Tunix's TO_HF_MAPPINGS: of the sharding only the place of an axis "layer" counts, which is the stacked
    one. The tree may lack such a leaf, because Tunix's tables serve models with biases and without. `{i}` or
    `*` in a path stands for one key. A tuple of paths: their leaves are joined along the rows of the result,
    as in a fused projection. No mapping: each path is its tensor's HF name.

    axes: the axes of leaves whose place names none, by the leaf's last key, its path, or a pattern in which
    `*` stands for anything, in this order: {"kernel": "i o -> o i"}. Tunix's to_hf_transpose_keys have this
    form, with permutations; of those alone the tree may lack the leaf.

    weights: a float type for all tensors, None to leave each its own, or "fp8_e4m3_128x128": tensors of two
    axes whose HF name matches `quantize`, a regular expression or a predicate, are rounded to `dtype`, as the
    rest is, and become E4M3 codes and `weight_scale_inv`. Tensors are made while they are asked for. A JAX
    array that is split over devices is read shard by shard; each tensor is made on the first of them.

    Raises BridgeError that lists every leaf without a place, path without a leaf, name that is given twice
    and transform that does not fit; with `expected`, an engine's `expected_manifest()`, ManifestMismatch that
    lists every difference. In that manifest's order the tensors come, else in the mapping's.
    """

    def __init__(self, params: Any, mapping: Mapping[Any, Any] | None = None, *, weights: str | None = None,
                 dtype: str | None = None, expected: Sequence[ParamMeta] | None = None,
                 quantize: str | Callable[[str], bool] = r"layers\.\d+\..*_proj\.weight",
                 axes: Mapping[str, Axes] | None = None):
        self._dtype = dtype or (None if weights == FP8 else weights)
        if weights not in (None, FP8, self._dtype):
            raise ValueError(f"weights={weights!r} with dtype={dtype!r}: use one type for both, or {FP8!r}")
        matches = quantize if callable(quantize) else functools.partial(re.search, quantize)
        self._is_fp8 = lambda name: weights == FP8 and bool(matches(name))
        self._axes, self._used = dict(axes or {}), set()
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
            yield from zip((meta.name for meta in metas), map(lent, made))

    def _plan(self, tree: dict[str, Any], places: dict[Any, To | None]) -> list[Made]:
        tensors, problems, left = [], [], dict(tree)
        for paths, to in places.items():
            found = _taken(left, [paths] if isinstance(paths, str) else list(paths))
            for keys, members in found.items():
                said = ", ".join(f"{key} {tuple(x.shape)}" for key, x in members)
                try:
                    tensors += self._tensors_of(members, to, dict(keys), paths) if to else []
                except ValueError as e:
                    problems.append(f"{said}: {e}")
            if to and not found and not to.optional:
                problems.append(f"{paths}: no leaf has this path")
        problems += [f"{key} {tuple(x.shape)}: the mapping has no place for it" for key, x in left.items()]
        problems += [f"axes {key!r}: no leaf without axes of its own has this key or path"
                     for key, axes in self._axes.items() if key not in self._used and isinstance(axes, str)]
        names = [metas[0].name for metas, _ in tensors]
        problems += [f"{name}: two leaves become this tensor" for name in _repeated(names)]
        if problems:
            raise BridgeError(f"mapping and tree do not fit ({len(problems)} problems):\n  "
                              + "\n  ".join(problems), "give a leaf that is not to be sent the place None")
        return tensors

    def _tensors_of(self, members: list[tuple[str, Any]], to: To, keys: dict[str, str],
                    paths: Any) -> Iterator[Made]:
        if not isinstance(paths, str) and len(members) < len(paths):
            raise ValueError(f"the tree lacks the other leaves of {paths}, which it is to be joined with")
        names = [_numbered(name) for name in ([to.names] if isinstance(to.names, str) else to.names)]
        missing = [key for key in dict.fromkeys(re.findall(r"{(\w+)}", names[0])) if key not in keys]
        axes = [to.axes or self._axes_of(path) for path, _ in members]
        stacks = [_unstacked(local(x), to, missing, names[0], by) for (_, x), by in zip(members, axes)]
        if len({tuple(stack) for stack in stacks}) > 1:
            raise ValueError("leaves with different numbers of layers cannot be joined")
        for at in stacks[0]:
            parts = [stack[at] for stack in stacks]
            shape = _joined_shape([part.shape for part in parts])
            for name, rows in zip(names, _cuts(to.split, shape, len(names))):
                sent = shape if rows == WHOLE else (rows.stop - rows.start, *shape[1:])
                dtype = to.dtype or self._dtype or dtype_name(parts[0].leaf)
                metas = self._metas(name.format(**keys, **dict(zip(missing, at))), dtype, sent)
                yield metas, functools.partial(_made, parts, rows, metas[0].dtype, dtype)

    def _axes_of(self, path: str) -> Axes:
        patterns = (key for key in self._axes
                    if "*" in key and re.fullmatch(re.escape(key).replace(r"\*", ".*"), path))
        key = next((key for key in (path.rpartition(".")[2], path, *patterns) if key in self._axes), None)
        if key is None:
            return ""
        self._used.add(key)
        return self._axes[key]

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


def _taken(left: dict[str, Any],
           paths: list[str]) -> dict[tuple[tuple[str, str], ...], list[tuple[str, Any]]]:
    """What the placeholders of `paths` stand for -> (key, leaf) of each of the paths. Takes them out of
    `left`: the first pattern that matches a leaf has it."""
    found: dict[tuple, list] = {}
    for path in map(_numbered, paths):
        pattern = re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^.]+)", re.escape(path)))
        for key in [key for key in left if pattern.fullmatch(key)]:
            match = pattern.fullmatch(key)
            assert match
            found.setdefault(tuple(sorted(match.groupdict().items())), []).append((key, left.pop(key)))
    return found


def _repeated(names: Sequence[str]) -> list[str]:
    seen: set[str] = set()
    return sorted({name for name in names if name in seen or seen.add(name)})


def _place(to: Any) -> To | None:
    """Every short form of a place as `To`."""
    if isinstance(to, tuple) and len(to) == 2 and not isinstance(to[1], str):  # Tunix: (name, sharding)
        return To(to[0], stacked=(to[1].index("layer"),) if "layer" in (to[1] or ()) else (), optional=True)
    return to if to is None or isinstance(to, To) else To(to)


def _numbered(name: str) -> str:
    """`*` is a placeholder that is named by its place among them: both sides of a mapping count alike."""
    count = iter(range(name.count("*")))
    return re.sub(r"\*", lambda _: f"{{_{next(count)}}}", name)


def _unstacked(leaf: Any, to: To, missing: list[str], name: str, axes: Axes) -> dict[tuple[int, ...], Part]:
    """The part of a leaf for each entry along its stacked axes, by the indices of that entry."""
    stacked = to.stacked or tuple(range(len(missing)))
    if len(stacked) != len(missing) or len(leaf.shape) <= max(stacked, default=-1):
        raise ValueError(f"cannot unstack axes {stacked} into the placeholders {missing} of {name}")
    order, shape = _arrangement(axes, [n for i, n in enumerate(leaf.shape) if i not in stacked])
    parts = {}
    for at in np.ndindex(*(leaf.shape[axis] for axis in stacked)):
        place = dict(zip(stacked, at))
        parts[at] = Part(leaf, tuple(place.get(axis, WHOLE) for axis in range(len(leaf.shape))), order, shape)
    return parts


def _arrangement(axes: Axes, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of "d h k -> (h k) d", or a permutation, and the shape before it: the axes' order, and the shape that
    they join to."""
    if not axes:
        return tuple(range(len(shape))), tuple(shape)
    if not isinstance(axes, str):
        if sorted(axes) != list(range(len(shape))):
            raise ValueError(f"the permutation {tuple(axes)} is not one of the axes of shape {tuple(shape)}")
        return tuple(axes), tuple(shape[axis] for axis in axes)
    names, groups = axes.partition("->")[0].split(), re.findall(r"\([^)]*\)|\w+", axes.partition("->")[2])
    members = [group.strip("()").split() for group in groups]
    flat = [name for group in members for name in group]
    if sorted(flat) != sorted(set(names)) or not len(flat) == len(names) == len(shape):
        raise ValueError(f'axes "{axes}" do not describe a tensor of shape {tuple(shape)}')
    joined = (math.prod(shape[names.index(name)] for name in group) for group in members)
    return tuple(map(names.index, flat)), tuple(joined)


def _joined_shape(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    if len(shapes) == 1:
        return shapes[0]
    if () in shapes or len({shape[1:] for shape in shapes}) > 1:
        raise ValueError(f"shapes {', '.join(map(str, shapes))} cannot be joined along their rows")
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


def _cuts(split: tuple[int, ...], shape: tuple[int, ...], names: int) -> list[slice]:
    if split and (len(split) != names or not shape or sum(split) != shape[0]):
        raise ValueError(f"split {split} does not cut the rows of {shape} for {names} names")
    ends = np.cumsum(split).tolist()
    return [slice(end - size, end) for end, size in zip(ends, split)] or [slice(None)] * names


def _made(parts: list[Part], rows: slice, sent: str, dtype: str) -> Any:
    """`rows` of the joined parts as `dtype`, in their library. A row of a JAX stack that is sent as it is
    stays where it lies."""
    part, rest = parts[0].rows(rows) if len(parts) == 1 else (parts[0], rows)
    if len(parts) == 1 and rest == WHOLE and sent == dtype_name(part.leaf) and (row := part.row()):
        return row
    x = part.read(dtype) if len(parts) == 1 else concatenated([part.read(dtype) for part in parts])
    return x if rest == WHOLE else x[rest]


def quantize_blocks(w: Any) -> tuple[Any, Any]:
    """w [N, K] of numpy, JAX or torch -> E4M3 codes [N, K], float32 scales [N/128, K/128] rounded up, of the
    same library; bit for bit `pallas_kernels.quantize.reference.quantize_blocks`. Torch's on the host."""
    if hasattr(w, "detach"):
        both = quantize_blocks(w.float().cpu().numpy())
        return tuple(sys.modules["torch"].as_tensor(lent(x)).to(w.device) for x in both)
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
    return cast(codes.reshape(padded.shape)[:n, :k], "float8_e4m3fn"), scale
