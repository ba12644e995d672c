"""Weights in files: what is written is what other tools read, and what cannot be written is said before a
byte is."""

from __future__ import annotations

import dataclasses
import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from written_folder import read_folder

from bridges.api import BridgeError, ParamMeta, StackRow
from bridges.sources.array_source import ArraySource, random_source
from bridges.transports.safetensors_file import (
    INDEX,
    SAFETENSORS_DTYPES,
    host_array,
    write_folder,
)

METAS = (
    ParamMeta("model.embed_tokens.weight", "bfloat16", (50, 24)),
    ParamMeta("model.layers.0.q_proj.weight", "float8_e4m3fn", (200, 130), "weight", (128, 128)),
    ParamMeta("model.layers.0.q_proj.weight_scale_inv", "float32", (2, 2), "block_scale", (128, 128)),
    ParamMeta("model.layers.0.attn.k_scale", "float32", (), "kv_scale"),
    ParamMeta("model.norm.weight", "float32", (24,)),
)


def source(seed: int = 0, **arrays) -> ArraySource:
    made = random_source(METAS[:3] + METAS[4:], seed)
    return ArraySource(METAS, {**made.arrays, METAS[3].name: np.float32(0.5).reshape(()), **arrays})


@pytest.fixture
def folder(tmp_path):
    write_folder(source(), tmp_path / "v7", 7, shard_bytes=27_000)
    return tmp_path / "v7"


def test_the_same_bytes_come_back_in_order(folder):
    version, read = read_folder(folder)
    assert read.manifest() == METAS and version == 7
    for (name, have), (wanted, want) in zip(read, source(), strict=True):
        assert (name, have.dtype, have.shape) == (wanted, want.dtype, want.shape)
        assert have.tobytes() == want.tobytes()
    assert len(list(folder.glob("*.safetensors"))) == 2, "27,000 bytes a shard make two"


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
     st.tuples(st.sampled_from(sorted(SAFETENSORS_DTYPES)),
       st.lists(st.integers(0, 5), max_size=3).map(tuple)),
     min_size=1, max_size=6,
    ),
    st.integers(1, 200),
)
def test_any_dtype_shape_and_shard_size(tmp_path_factory, tensors, shard_bytes):
    rng, arrays = np.random.default_rng(0), {}
    metas = tuple(ParamMeta(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(tensors))
    for m in metas:
        dtype = np.dtype(getattr(ml_dtypes, m.dtype, m.dtype))
        codes = rng.integers(0, 256, int(np.prod(m.shape)) * dtype.itemsize, np.uint8)
        arrays[m.name] = codes.view(dtype).reshape(m.shape)
    out = tmp_path_factory.mktemp("any") / "w"
    write_folder(ArraySource(metas, arrays), out, 1, shard_bytes=shard_bytes)
    assert [(name, x.dtype, x.shape, x.tobytes()) for name, x in read_folder(out)[1]] == [
        (m.name, arrays[m.name].dtype, m.shape, arrays[m.name].tobytes()) for m in metas
    ]


def test_other_tools_read_it(folder):
    torch = pytest.importorskip("torch")
    files, want = json.loads((folder / INDEX).read_text())["weight_map"], source().arrays
    for name, file in files.items():
        with safe_open(folder / file, "pt") as f:
            have = f.get_tensor(name)
        assert str(have.dtype) == f"torch.{want[name].dtype.name}"
        assert have.reshape(-1).view(torch.uint8).numpy().tobytes() == want[name].tobytes()


def test_buffers_of_jax_and_torch_and_rows_of_a_stack(tmp_path):
    torch = pytest.importorskip("torch")
    plain = source()
    embed, codes = (plain.arrays[m.name] for m in METAS[:2])
    row = StackRow(jnp.stack([jnp.zeros_like(embed), jnp.asarray(embed)]), 1)
    fp8 = torch.from_numpy(codes.view(np.uint8)).view(torch.float8_e4m3fn)
    write_folder(source(**{METAS[0].name: row, METAS[1].name: fp8}), tmp_path / "w", 1)
    for name, x in read_folder(tmp_path / "w")[1]:
        assert x.tobytes() == plain.arrays[name].tobytes(), name
    transposed = host_array(fp8.t())
    assert transposed.flags.c_contiguous and np.array_equal(transposed.view(np.uint8), codes.view(np.uint8).T)


def raises_midway():
    yield from list(source())[:2]
    raise ConnectionError("the learner went away")


class Broken:
    def __init__(self, pairs, metas=METAS):
        self._pairs, self._metas = pairs, metas

    def manifest(self):
        return self._metas

    def __iter__(self):
        return self._pairs()


@pytest.mark.parametrize(
    "pairs, error",
    [
        (raises_midway, ConnectionError),
        (lambda: iter(list(source())[:-1]), ValueError),
        (lambda: iter([*source(), ("one.more", np.zeros(1, np.float32))]), ValueError),
        (lambda: ((name, x[..., :0] if x.shape else x) for name, x in source()), ValueError),
        (lambda: ((name + "x", x) for name, x in source()), ValueError),
    ],
    ids=["raises", "ends early", "goes on", "another shape", "another name"],
)
@pytest.mark.parametrize("shard_bytes", [1, 10**9])
def test_a_broken_source_leaves_no_folder(tmp_path, pairs, error, shard_bytes):
    with pytest.raises(error):
        write_folder(Broken(pairs), tmp_path / "w", 1, shard_bytes=shard_bytes)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_is_said_before_a_byte_is(tmp_path):
    (tmp_path / "here").mkdir()
    odd, huge = dataclasses.replace(METAS[0], dtype="complex64"), ParamMeta("w", "float32", (2**25, 2**25))
    for name, meta, message in (
        ("here", METAS[0], "here exists"),
        ("w", odd, "cannot hold the dtype complex64"),
        ("w", huge, "GiB left, but the weights take 4194304.00 GiB"),
    ):
        with pytest.raises(BridgeError, match=message):
            write_folder(Broken(raises_midway, (meta,)), tmp_path / name, 1)
    assert [p.name for p in tmp_path.iterdir()] == ["here"]
