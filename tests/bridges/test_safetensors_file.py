"""Weights through files: the same bytes come back, and whatever is wrong with a folder is said before a
tensor is used."""

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

from bridges.api import BridgeError, ParamMeta, StackRow, WeightSource
from bridges.sources.array_source import ArraySource, random_source
from bridges.transports.safetensors_file import (
    INDEX,
    MANIFEST,
    SAFETENSORS_DTYPES,
    FileSource,
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
    read = FileSource(folder)
    assert isinstance(read, WeightSource) and read.manifest() == METAS and read.version == 7
    for (name, have), (wanted, want) in zip(read, source(), strict=True):
        assert (name, have.dtype, have.shape) == (wanted, want.dtype, want.shape)
        assert have.tobytes() == want.tobytes() and have.flags.writeable
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
    assert [(name, x.dtype, x.shape, x.tobytes()) for name, x in FileSource(out)] == [
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
    for name, x in FileSource(tmp_path / "w"):
        assert x.tobytes() == plain.arrays[name].tobytes(), name
    transposed = host_array(fp8.t())
    assert transposed.flags.c_contiguous and np.array_equal(transposed.view(np.uint8), codes.view(np.uint8).T)


def test_convert_makes_the_buffers(folder):
    assert all(type(x) is type(jnp.zeros(1)) for _, x in FileSource(folder, jnp.asarray))


def change(path, edit) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def shard(folder):
    return sorted(folder.glob("*.safetensors"))[-1]


def cut(folder):
    data = shard(folder).read_bytes()
    shard(folder).write_bytes(data[:-5])


DAMAGE = {
    "a shard cut short": (cut,
                    r"00002-of-00002.safetensors cannot be read; it is missing, damaged or cut short"),
    "a shard missing": (lambda f: shard(f).unlink(), "00002-of-00002.safetensors cannot be read"),
    "a shard of noise": (lambda f: shard(f).write_bytes(b"\xff" * 999), "cannot be read"),
    "no manifest": (lambda f: (f / MANIFEST).unlink(), f"{MANIFEST} cannot be read"),
    "no index": (lambda f: (f / INDEX).unlink(), f"{INDEX} cannot be read"),
    "a manifest cut short": (lambda f: (f / MANIFEST).write_text('{"version": 7'),
                             f"{MANIFEST} cannot be read"),
    "another digest": (lambda f: change(f / MANIFEST, lambda c: c.update(digest="0" * 64)),
                       "its digest does not match"),
    "an edited manifest": (
        lambda f: change(f / MANIFEST, lambda c: c["tensors"][0].update(shape=[24, 50])),
        "its digest does not match",
    ),
    "an index that leads outside": (
        lambda f: change(f / INDEX, lambda c: c["weight_map"].update({METAS[0].name: "../v7/x"})),
        "is not a file name",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_said_on_opening(what, folder):
    damage, message = DAMAGE[what]
    damage(folder)
    with pytest.raises(BridgeError, match=message):
        FileSource(folder)


def test_every_difference_is_listed_on_opening(folder, tmp_path):
    """A folder whose shards were exchanged for those of another model."""
    other = (ParamMeta("model.norm.weight", "float32", (25,)), ParamMeta("unheard_of", "bfloat16", (2,)),
             *METAS[:3])
    write_folder(random_source(other, 0), tmp_path / "other", 7)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    for file in [*(tmp_path / "other").glob("*.safetensors"), tmp_path / "other" / INDEX]:
        file.rename(folder / file.name)
    with pytest.raises(BridgeError) as e:
        FileSource(folder)
    lines = [line.strip() for line in str(e.value).splitlines()[1:-1]]
    assert lines == [
        "model.layers.0.attn.k_scale: missing in the files, ('F32', ()) in the manifest",
        "model.norm.weight: ('F32', (25,)) in the files, ('F32', (24,)) in the manifest",
        "unheard_of: ('BF16', (2,)) in the files, missing in the manifest",
    ]


@pytest.mark.parametrize("at", [-1, -1000, -20_000])
def test_a_flipped_bit_is_found_when_the_tensor_is_read(folder, at):
    data = bytearray(shard(folder).read_bytes())
    data[at] ^= 1
    shard(folder).write_bytes(data)
    with pytest.raises(BridgeError, match="have changed since they were written"):
        list(FileSource(folder))


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
