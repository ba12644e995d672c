"""vLLM's tensors held as a learner that scans over layers wants them: one tensor [L, ...] for a linear or a
norm of all layers.

vLLM allocates each layer's parameters by themselves. A model loader of its own, chosen by load format, has
those of consecutive layers be rows of one tensor, before anything is compiled or a CUDA graph captured;
nothing else about them changes. A publish is then a few large copies, and the learner can read an engine's
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
    """Name of a load format like "dummy" whose layers are stacked, registered with vLLM when first asked
    for."""
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
    """Experts, matrices and vectors of the same name, type and shape in consecutive layers; not what a kernel
    has consumed or turned."""
    named = [(name, p) for name, p in model.named_parameters() if layer_of(name) >= 0]
    found = [(name, p) for name, p in named if p.numel() and 1 <= p.dim() <= 3 and p.is_contiguous()]
    found.sort(key=lambda x: (linear_of(x[0]), layer_of(x[0])))
    # layers that follow one another are as far from their place in the list
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
    """ "model.layers.3.mlp.experts.5.up_proj.weight" -> 5; -1 where there is none."""
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
    """`rows` by runs, as long as can be, of a tensor in consecutive layers, or of all experts of consecutive
    layers, whose parameters follow one another in memory."""
    return runs_of(sorted(rows, key=lambda r: (linear_of(r.meta.name), layer_of(r.meta.name),
                                               expert_of(r.meta.name))))


def runs_of(rows: Sequence[LiveRows]) -> list[list[LiveRows]]:
    """The same of rows in the order that they have."""
    found: list[list[LiveRows]] = []
    for r in rows:
        if found and _follows(r, found[-1][-1]):
            found[-1].append(r)
        else:
            found.append([r])
    return found


def _follows(r: LiveRows, before: LiveRows) -> bool:
    p, q = r.parameter, before.parameter
    whole = r.stop - r.start == len(p) if p.dim() == 1 else p.dim() > 1  # a part of a vector stands alone
    same = (linear_of(r.meta.name), r.start, p.shape) == (linear_of(before.meta.name), before.start, q.shape)
    together = p.untyped_storage().data_ptr() == q.untyped_storage().data_ptr() and p.data_ptr(
        ) == q.data_ptr() + q.nbytes
    here, there = ((layer_of(x.meta.name), expert_of(x.meta.name)) for x in (r, before))
    next_one = here in ((there[0] + 1, min(there[1], 0)), (there[0], there[1] + 1))
    return whole and same and together and next_one


def stack_of(rows: Sequence[LiveRows]) -> torch.Tensor:
    """The tensor [n, ...] of which the parameters of `rows`, one of `stacks_of`, are the rows."""
    first = rows[0].parameter
    return first.as_strided((len(rows), *first.shape), (first.numel(), *first.stride()))
