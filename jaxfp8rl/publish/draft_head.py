"""A draft head on the wire, after the tensors of the policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array

from bridges.api import ParamMeta, WeightSource
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.draft_head import head_shapes
from jaxfp8rl.types import Params


def _name(part: str) -> str:
    return f"draft_head.{part}.weight"


def draft_manifest(model: ModelConfig, dtype: str) -> tuple[ParamMeta, ...]:
    """The tensors of a draft head, in `dtype`."""
    return tuple(ParamMeta(_name(part), dtype, shape) for part, shape in head_shapes(model).items())


def draft_head_of(model: ModelConfig, tensors: Mapping[str, Array]) -> Params:
    """Wire tensors -> the head's weights (jaxfp8rl.models.draft_head)."""
    return {part: {"weight": tensors[_name(part)]} for part in head_shapes(model)}


class WithDraftHead:
    """The WeightSource of a policy and then of its draft head, rounded to `dtype`."""

    def __init__(self, policy: WeightSource, head: Params, model: ModelConfig, dtype: str):
        self._policy, self._head, self._of = policy, head, (model, dtype)

    def manifest(self) -> tuple[ParamMeta, ...]:
        return (*self._policy.manifest(), *draft_manifest(*self._of))

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        yield from self._policy
        model, dtype = self._of
        for part in head_shapes(model):
            yield _name(part), jnp.asarray(self._head[part]["weight"], dtype)
