"""A checkpoint in four bits as a WeightSource, quantised a tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from bridges.api import ParamMeta
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.hf_names import Entry, is_packed, param_table
from jaxfp8rl.models.packed import packed_tensors, parts_of, stored_parts
from pallas_kernels.four_bits import FourBits


class PackedCheckpoint:
    """The tensors of a model that `model.packed` describes, in HF order. read(entry): the float weight.

    Weights that are not packed are bfloat16. Reading raises ModelError as `packed_tensors` does.
    """

    def __init__(self, model: ModelConfig, read: Callable[[Entry], Any]):
        assert model.packed
        self._model, self._read, self._form = model, read, model.packed.form

    def manifest(self) -> tuple[ParamMeta, ...]:
        metas: list[ParamMeta] = []
        for e in param_table(self._model):
            if is_packed(e, self._model):
                metas += [ParamMeta(part.name, part.dtype, part.shape) for part in parts_of(e, self._form)]
            else:
                metas.append(ParamMeta(e.hf_name, "bfloat16", e.shape))
        return tuple(metas)

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        for e, weight in packed_tensors(self._model, self._read):
            if isinstance(weight, FourBits):
                yield from stored_parts(e, weight)
            else:
                yield e.hf_name, np.asarray(jnp.asarray(weight).astype(jnp.bfloat16))
