"""Parts of the plugin of vLLM by themselves: a rank and its ways, slots, folders, versions."""

from __future__ import annotations

import json
import math
import sys
import types
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("uvicorn")

import plugin_server  # noqa: E402
from plugin_server import Model, without_vllm  # noqa: E402

from benchmarks.processes import printed  # noqa: E402
from bridges.api import BridgeError, PublishFailed  # noqa: E402
from bridges.inside_vllm.writing import Copies  # noqa: E402
from bridges.vllm_plugin import pieces, slots, versions  # noqa: E402
from bridges.vllm_plugin.model_folder import make_folder  # noqa: E402
from bridges.vllm_plugin.rank import Rank  # noqa: E402
from bridges.vllm_plugin.receiver import Receiver  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    without_vllm(monkeypatch)


def whole_by_one(metas) -> list:
    return [[(0, pieces.whole(m))] for m in metas]


@pytest.mark.parametrize("buckets, says", [
    ((1, 4), "buckets 1 to 4 came, 0 of 4 was due"), ((0, 5), "buckets 0 to 5 came"), ((0, -1), "0 to -1")])
def test_buckets_come_in_order(buckets, says, tmp_path):
    receiver = Receiver(Model(0, 1), 0, 1, False)
    names = [m.name for m in plugin_server.metas()]
    slots.made(tmp_path / "slots", 300_000, 2)
    with pytest.raises(PublishFailed, match="no way was opened"):
        receiver.receive((0, 1))
    sent = pieces.packed(whole_by_one(plugin_server.metas()))
    receiver.connect("shared_memory", names, 300_000, sent, [{"path": str(tmp_path / "slots")}])
    receiver.start()
    with pytest.raises(PublishFailed, match=says):
        receiver.receive(buckets)
    with pytest.raises(PublishFailed, match="0 of 4 buckets have arrived"):
        receiver.prove()


@pytest.mark.parametrize("where, says", [
    ({"kind": "pigeon", "senders": []}, "no way 'pigeon'"),
    ({"kind": "shared_memory", "senders": [{"path": "/nowhere"}]}, "cannot be read here"),
    ({"kind": "nccl", "senders": [{"unique_id": ""}], "ranks": 1, "first_rank": 0}, "NCCL needs GPUs")])
def test_a_way_that_cannot_be_opened_is_refused_by_name(where, says):
    receiver = Receiver(Model(0, 1), 0, 1, False)
    with pytest.raises(BridgeError, match=says):
        receiver.connect(names=[m.name for m in plugin_server.metas()], slot_bytes=300_000,
                         sent=pieces.packed(whole_by_one(plugin_server.metas())), **where)


def test_copies_of_any_width_and_stride_write_every_byte_and_no_other():
    """Whole tensors at odd places of a slot, a single number, and columns. Run again they write anew."""
    draw, copies, made = torch.Generator().manual_seed(0), Copies(), []
    for dtype, shape, at, columns in [
            (torch.float8_e4m3fn, (4, 32), 0, 32), (torch.float8_e4m3fn, (3, 5), 3, 5), (torch.float32, (), 8, 0),
            (torch.bfloat16, (6, 16), 6, 16), (torch.float8_e4m3fn, (8, 64), 0, 32), (torch.int8, (8, 6), 0, 3)]:
        slot = torch.randint(0, 256, (4096,), dtype=torch.uint8, generator=draw)
        of = lambda raw, dtype=dtype, shape=shape: raw.view(dtype).view(shape)
        part = (slice(None), slice(columns)) if columns else ()
        sent, live = (raw[at:][: math.prod(shape) * dtype.itemsize] for raw in (slot, torch.zeros_like(slot)))
        copies.add(of(live)[part], of(sent)[part])
        made.append((of, part, sent, live))
    for _ in range(2):
        copies.run()
        for of, part, sent, live in made:
            want = torch.zeros_like(live)
            of(want)[part] = of(sent)[part]
            assert torch.equal(live, want) and live.any()
            sent ^= 255


def test_slots_that_find_no_room_are_refused_and_leave_no_file(tmp_path):
    with pytest.raises(BridgeError, match=f"{tmp_path} has no room for the 2147483648 MiB"):
        slots.made(tmp_path / "slots", 2**50, 2)
    assert not (tmp_path / "slots").exists()


def test_a_rank_tells_the_next_step_of_the_first_error():
    def fails():
        raise BridgeError("the buffers are on another GPU", 'use kind "nccl"')

    rank = Rank(0, fails, dict)
    rank.asked("renew"), rank.start()
    rank.receive({})
    assert rank.asked("state") == {"rank": 0, "problem": "the buffers are on another GPU",
                                   "next_step": 'use kind "nccl"'}
    assert rank.asked("state") == {"rank": 0, "problem": "", "next_step": ""}


def test_all_transports_of_a_process_share_their_gpu_slots(monkeypatch):
    """Torch keeps what another process had open when it died: every engine that dies would cost the learner a
    pair."""
    made, shared = [], []

    class Slots(types.SimpleNamespace):
        def untyped_storage(self):
            return types.SimpleNamespace(_share_cuda_=lambda: (0, shared.append(self) or b"handle"))

    monkeypatch.setattr(slots, "gpu_slots", lambda n, count, gpu: made.append(Slots(n=n)) or made[-1])
    monkeypatch.setattr(slots, "gpu_of", lambda tensor: "GPU-0")
    slots.lasting_slots.cache_clear()
    try:
        (a, said), (b, _), (c, _) = (slots.shared_cuda(n, 2) for n in (512, 512, 1024))
    finally:
        slots.lasting_slots.cache_clear()
    assert a is b and a is not c and len(made) == 2 and len(shared) == 3 and said["handle"] == ["aGFuZGxl"]


def test_a_folder_for_a_server_has_no_weights(tmp_path):
    source = tmp_path / "bf16"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "qwen3"}')
    for name in ("tokenizer.json", "model.safetensors", "model.safetensors.index.json"):
        (source / name).write_text("{}")
    made = make_folder(source, tmp_path / "fp8", high_precision_modules=["lm_head"])
    assert sorted(p.name for p in made.iterdir()) == ["config.json", "tokenizer.json"]
    found = json.loads((made / "config.json").read_text())["quantization_config"]
    assert found["weight_block_size"] == [128, 128] and found["ignored_layers"] == ["lm_head"]
    with pytest.raises(BridgeError, match="fp8 exists"):
        make_folder(source, made)
    with pytest.raises(BridgeError, match="is quantised already: fp8"):
        make_folder(made, tmp_path / "again")
    assert make_folder(made, tmp_path / "same", weights="as_is").exists()
    with pytest.raises(BridgeError, match="config.json cannot be read"):
        make_folder(tmp_path, tmp_path / "none")


def test_a_vllm_that_is_not_known_is_refused_by_name_if_it_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(__version__="0.33.1"))
    monkeypatch.setattr(sys, "argv", ["vllm", "serve", "m"])
    versions.install()  # for those who do not ask, nothing changes
    monkeypatch.setattr(sys, "argv",
                        ["vllm", "serve", "m", "--weight-transfer-config", '{"backend": "jaxfp8rl"}'])
    with pytest.raises(BridgeError, match=r"run with vLLM 0.32.\*, and this is 0.33.1"):
        versions.install()


def test_the_plugin_needs_neither_jax_nor_the_learner():
    """Whatever of it an engine's environment imports."""
    modules = [f"bridges.vllm_plugin.{p.stem}" for p in (ROOT / "bridges/vllm_plugin").glob("[a-z]*.py")]
    absent = "jax", "jaxlib", "jaxfp8rl", "pallas_kernels", "ml_dtypes", "httpx", "safetensors"
    code = (f"import sys\nfor name in {absent}:\n    sys.modules[name] = None\n"
            f"import {', '.join(modules)}\nprint(*sorted({{'torch', 'vllm'}} & set(sys.modules)))")
    assert printed(code).split() == []
