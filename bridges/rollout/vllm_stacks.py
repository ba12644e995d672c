"""vLLM's FP8 weights held as a learner that scans over layers wants them: one tensor [L, N, K] for a linear of all layers.

vLLM allocates each layer's weight by itself. A model loader of its own, chosen by load format, has the parameters of consecutive
layers be rows of one tensor, before anything is compiled or a CUDA graph captured; nothing else about them changes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from bridges.api import BridgeError

if TYPE_CHECKING:
    import torch

    from bridges.rollout.vllm_layout import LiveRows


@functools.cache
def load_format() -> str:
    """Name of a load format like "dummy" whose FP8 weights are stacked, registered with vLLM when first asked for."""
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
    """FP8 weights of the same linear in consecutive layers."""
    import torch

    found = [(path, m.weight) for path, m in model.named_modules() if getattr(m, "weight", None) is not None]
    codes = [(path, w) for path, w in found if w.dtype == torch.float8_e4m3fn and w.dim() == 2]
    by_linear = sorted(codes, key=lambda x: (_linear(x[0]), _number(x[0])))
    # layers that follow one another are as far from their place in the list
    for _, run in itertools.groupby(enumerate(by_linear), lambda x: (_linear(x[1][0]), x[1][1].shape, _number(x[1][0]) - x[0])):
        yield [weight for _, (_, weight) in run]


def _linear(path: str) -> str:
    """ "model.layers.3.mlp.down_proj" -> "mlp.down_proj"."""
    return ".".join(path.split(".")[-2:])


def _number(path: str) -> int:
    """ "model.layers.3.mlp.down_proj" -> 3; -1 outside the layers."""
    return next((int(part) for part in path.split(".") if part.isdigit()), -1)


def _stack(weights: Sequence[torch.nn.Parameter]) -> None:
    import torch

    stack = torch.stack([w.data.view(torch.uint8) for w in weights]).view(weights[0].dtype)
    for row, weight in zip(stack, weights):
        weight.data = row


def stack_of(rows: Sequence[LiveRows]) -> torch.Tensor:
    """The tensor [L, N, K] of which the parameters of `rows`, the same linear in L consecutive layers, are the rows.

    Raises BridgeError where they are not.
    """
    first, size = rows[0].parameter, rows[0].parameter.nbytes
    expected = range(first.data_ptr(), first.data_ptr() + len(rows) * size, size)
    if [r.parameter.data_ptr() for r in rows] != list(expected):
        raise BridgeError(f"{rows[0].meta.name} and those of the layers after it do not lie one after the other",
                          "build the engine with stacked=True")  # fmt: skip
    return first.as_strided((len(rows), *first.shape), (first.numel(), *first.stride()))
