"""vLLM's slots for low-rank adapters: what is in each, and its live tensors.

A linear that can have adapters keeps `lora_a_stacked` [slots, 1, R, K] and `lora_b_stacked` [slots, 1, N, R],
one pair for each part of a fused linear, with s B in place of B. vLLM fills a slot from a folder. Here vLLM
is given adapters of zeros once, one for each slot, and never looks for a folder: the slots are written in
place, which takes effect at the next step. A slot of zeros computes what the base computes, to the bit.

Every request names a slot. Of a request without one vLLM's build for CPUs takes the last slot for the base
where it is batched with others.

Written for vLLM 0.32; 0.25.1 has the same manager and slots, but its own reload does not know linears with
slots.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from bridges.api import BridgeError, ParamMeta
from bridges.proof import manifest

if TYPE_CHECKING:
    import torch

RANKS = 1, 8, 16, 32, 64, 128, 256, 320, 512  # those that vLLM makes slots for
A, B = "lora_A", "lora_B"


@dataclasses.dataclass(frozen=True)
class AdapterSlots:
    """Room for adapters in an engine. count: how many it holds at once. rank: of each, at most. linears:
    which can have one, such as "q_proj".

    Of a dense model name all linears of its layers: an engine that fuses FP8 quantisers then fuses none,
    which is what its formats say.
    """

    count: int
    rank: int
    linears: tuple[str, ...]

    def arguments(self) -> dict[str, Any]:
        """For `vllm.LLM`. Raises BridgeError for a rank that vLLM has no slots for."""
        return {"enable_lora": True, "max_loras": self.count, "max_cpu_loras": self.count,
                "max_lora_rank": slot_rank(self.rank), "lora_target_modules": list(self.linears)}


def slot_rank(rank: int) -> int:
    """The rank of the smallest slot for adapters of `rank`; the rest of it stays zero. Raises BridgeError if
    vLLM has none."""
    if found := [r for r in RANKS if r >= rank]:
        return found[0]
    raise BridgeError(f"rank {rank}: vLLM takes adapters of rank {RANKS[-1]} at most",
                      f"choose rank {RANKS[-1]}")


def reload_knows_slots() -> bool:
    """Whether vLLM's own reload of weights finds linears that have slots: that of 0.32 does, that of 0.25
    does not."""
    return importlib.util.find_spec("vllm.model_executor.model_loader.reload.inplace") is not None


@dataclasses.dataclass
class Held:
    """An adapter in a slot. layout: the digest of its manifest; what another layout leaves over must be
    zeroed."""

    number: int
    version: int | None = None
    layout: str = ""


class Slots:
    """The slots of one engine. "" is the adapter of requests that name none: zeros until one is published.

    on_model: `VllmEngine.on_model`.
    """

    def __init__(self, on_model: Callable[[Callable[[Any], Any]], Any], count: int):
        self._on_model, self.count = on_model, count
        self.clear()

    def clear(self) -> None:
        """Forget all adapters and fill every slot with zeros."""
        self._held = {"": Held(1)}
        self._index = self._on_model(lambda model: _fill(model.lora_manager, self.count))
        self._live: dict[str, list[torch.Tensor]] = self._on_model(lambda model: _live(model.lora_manager))

    def version(self, name: str) -> int | None:
        return self.of(name).version

    def of(self, name: str) -> Held:
        """Raises ValueError for an adapter that is not held."""
        if name not in self._held:
            raise ValueError(f"adapter {name!r} is not in the engine, which holds "
                             f"{', '.join(map(repr, self._held))}")
        return self._held[name]

    def place(self, name: str) -> Held:
        """The slot of `name`, a free one if it has none. Raises BridgeError if all are taken."""
        if name not in self._held:
            free = set(range(1, self.count + 1)) - {h.number for h in self._held.values()}
            if not free:
                raise BridgeError(f"adapter {name!r}: all {self.count} slots are taken, by "
                                  f"{', '.join(map(repr, self._held))}",
                                  "drop one of these first, or build the engine with more slots")
            self._held[name] = Held(min(free))
        return self._held[name]

    def drop(self, name: str) -> None:
        """Free the slot of `name`; that of "" is filled with zeros instead. Raises ValueError if it is not
        held."""
        held = self.of(name)
        self._zero(held)
        if name:
            del self._held[name]

    def request(self, name: str) -> Any:
        """vLLM's LoRARequest. Its name is a part of the key under which prompts are cached: another version
        never meets the older one's keys and values. vLLM 0.32 adds the path to that key, 0.25 does not."""
        from vllm.lora.request import LoRARequest

        held = self.of(name)
        return LoRARequest(f"adapter {name}, version {held.version}", held.number, "in its slot")

    def check(self, metas: Sequence[ParamMeta]) -> None:
        """Raise ManifestMismatch, which lists the differences, for tensors that no slot takes: `metas` are A
        [r, K] and s B [N, r] of linears, "model.layers.0.self_attn.q_proj.lora_A.weight"."""
        rank = next((m.shape[0] for m in metas if m.name.endswith(f".{A}.weight")), 0)
        linears = {_linear(m.name) for m in metas}
        want = []
        for name, live in self._live.items():
            if _linear(name) in linears:
                rows, columns = live[0].shape
                r = min(rank, rows if name.endswith(f".{A}.weight") else columns)
                shape = (r, columns) if name.endswith(f".{A}.weight") else (rows, r)
                want.append(ParamMeta(name, str(live[0].dtype).removeprefix("torch."), shape))
        manifest.check(metas, want)

    def begin(self, name: str, metas: Sequence[ParamMeta]) -> dict[str, torch.Tensor]:
        """The live tensors of `metas` in the slot of `name`. What is left there of another layout is zero."""
        held, layout = self.place(name), manifest.digest(metas)
        if held.layout != layout:
            self._zero(held)
        held.layout, held.version = layout, None
        return self.tensors(name, metas)

    def tensors(self, name: str, metas: Sequence[ParamMeta]) -> dict[str, torch.Tensor]:
        """The live tensors [*meta.shape] of `metas` in the slot of `name`, which rows and columns of zeros
        surround."""
        row = self._index[self.of(name).number]
        return {m.name: self._live[m.name][row][: m.shape[0], : m.shape[1]] for m in metas}

    def _zero(self, held: Held) -> None:
        for live in self._live.values():
            live[self._index[held.number]].zero_()
        held.layout, held.version = "", None


def _linear(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[0]


def _fill(manager: Any, count: int) -> dict[int, int]:
    """Fill the slots of vLLM's manager with adapters 1 to `count` -> {adapter: its slot}."""
    manager.remove_all_adapters()
    for number in range(1, count + 1):
        manager.add_adapter(manager.create_dummy_lora(number, 1, {}))
        manager.activate_adapter(number)
    return {number: manager.lora_index_to_id.index(number) for number in range(1, count + 1)}


def _live(manager: Any) -> dict[str, list[torch.Tensor]]:
    """{wire name: its tensor [R, K] or [N, R] in each slot}."""
    found: dict[str, list[torch.Tensor]] = {}
    for path, module in manager.modules.items():
        parent, _, last = path.rpartition(".")
        parts = manager.packed_modules_mapping.get(last, [last])
        for part, a, b in zip(parts, module.lora_a_stacked, module.lora_b_stacked, strict=True):
            for which, stacked in ((A, a), (B, b)):
                found[f"{parent}.{part}.{which}.weight"] = list(stacked[:, 0])
    return found
