"""Stack vLLM's parameters over layers, as a learner that scans over its layers has them: one tensor [L, ...]
for each linear or norm.

vLLM allocates each layer's parameters separately. A model loader registered here, chosen by its load format,
turns those of consecutive layers into rows of one tensor, before the model is compiled or captured in a CUDA
graph; nothing else changes. A publish is then a few large copies, and the learner can use the engine's
weights as its own.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from bridges.inside_vllm.layout import LiveRows


@functools.cache
def load_format() -> str:
    """The name of a load format like "dummy" with stacked layers. The first call registers it with vLLM."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    @register_model_loader("dummy_stacked")
    class StackedDummyLoader(DummyModelLoader):
        def load_model(self, *args: Any, **kwargs: Any) -> torch.nn.Module:
            model = super().load_model(*args, **kwargs)
            for weights in _alike(model):
                _stack(weights)
            return model

    return "dummy_stacked"


def _alike(model: torch.nn.Module) -> Iterator[list[torch.nn.Parameter]]:
    """Lists of experts, matrices and vectors with the same name, dtype and shape in consecutive layers.
    Parameters that a kernel has consumed or transposed are left out."""
    named = [(name, p) for name, p in model.named_parameters() if layer_of(name) >= 0]
    found = [(name, p) for name, p in named if p.numel() and 1 <= p.dim() <= 3 and p.is_contiguous()]
    found.sort(key=lambda x: (linear_of(x[0]), layer_of(x[0])))
    # consecutive layers have the same difference between layer and list index
    for _, run in itertools.groupby(
        enumerate(found),
        lambda x: (linear_of(x[1][0]), x[1][1].dtype, x[1][1].shape, layer_of(x[1][0]) - x[0])
    ):
        yield [parameter for _, (_, parameter) in run]


@functools.cache
def layer_of(name: str) -> int:
    """ "model.layers.3.mlp.up_proj.weight" -> 3; -1 outside the layers."""
    found = re.search(r"\.(\d+)\.", name)
    return int(found[1]) if found else -1


@functools.cache
def expert_of(name: str) -> int:
    """ "model.layers.3.mlp.experts.5.up_proj.weight" -> 5; -1 without an expert."""
    found = re.search(r"\.experts\.(\d+)\.", name)
    return int(found[1]) if found else -1


@functools.cache
def linear_of(name: str) -> str:
    """ "model.layers.3.mlp.experts.5.up_proj.weight" -> "model.layers.*.mlp.experts.*.up_proj.weight"."""
    return re.sub(r"\.\d+\.", ".*.", name)


def _stack(parameters: Sequence[torch.nn.Parameter]) -> None:
    import torch

    stack = torch.stack([p.data.view(torch.uint8) for p in parameters]).view(parameters[0].dtype)
    for row, parameter in zip(stack, parameters):
        parameter.data = row


def stacks_of(rows: Sequence[LiveRows]) -> list[list[LiveRows]]:
    """Group `rows` into the longest runs of one tensor in consecutive layers, or of all experts of
    consecutive layers, whose parameters are contiguous in memory."""
    return runs_of(sorted(rows, key=lambda r: (linear_of(r.meta.name), layer_of(r.meta.name),
                                               expert_of(r.meta.name))))


def runs_of(rows: Sequence[LiveRows]) -> list[list[LiveRows]]:
    """Group rows into such runs without sorting them."""
    found: list[list[LiveRows]] = []
    for r in rows:
        if found and _follows(r, found[-1][-1]):
            found[-1].append(r)
        else:
            found.append([r])
    return found


def _follows(r: LiveRows, before: LiveRows) -> bool:
    p, q = r.parameter, before.parameter
    # a part of a vector is a run of its own
    whole = r.stop - r.start == len(p) if p.dim() == 1 else p.dim() > 1
    same = (linear_of(r.meta.name), r.start, p.shape) == (linear_of(before.meta.name), before.start, q.shape)
    together = p.untyped_storage().data_ptr() == q.untyped_storage().data_ptr() and p.data_ptr(
        ) == q.data_ptr() + q.nbytes
    here, there = ((layer_of(x.meta.name), expert_of(x.meta.name)) for x in (r, before))
    next_one = here in ((there[0] + 1, min(there[1], 0)), (there[0], there[1] + 1))
    return whole and same and together and next_one


def stack_of(rows: Sequence[LiveRows]) -> torch.Tensor:
    """The tensor [n, ...] whose rows are the parameters of `rows`, one of the runs of `stacks_of`."""
    first = rows[0].parameter
    return first.as_strided((len(rows), *first.shape), (first.numel(), *first.stride()))
