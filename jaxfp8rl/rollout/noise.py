"""Adaptive quantisation noise: the policy that samples has gains w + Z, Z ~ N(0, sigma^2) (QeRL, arXiv
2510.11696, section 3.3; docs/noise.md).

Z is a function of run.seed, the version, the norm's name and the layer's number, and of nothing else. So each
publish adds it to the policy's own gains, never to those that the engine holds, and a resumed run draws it
again. The learner's arrays are not written.
"""

from __future__ import annotations

import functools
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxfp8rl.config.noise import BITS, gain_type
from jaxfp8rl.config.schema import Config
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.precision.jit import rounding_exact_jit
from jaxfp8rl.precision.linear import round_to
from jaxfp8rl.roles import role_of
from jaxfp8rl.types import Params

# share of gains for which the least noise is below half a unit of the last place: refused from here
COARSE = 0.5


class Gain(NamedTuple):
    """A leaf of gains: [L, D] of the layers first, first + 1, ..., or [D]."""

    name: str
    first: int


class GainNoise:
    """The noise of a run: what is published of a policy, and what it did to its gains."""

    def __init__(self, cfg: Config, model: ModelConfig):
        self._cfg, self._model = cfg, model
        self._type, self._drawn = gain_type(cfg), None

    def sigma(self, version: int) -> float:
        """0 for a run without noise, and for its last version, which nothing samples from."""
        cfg = self._cfg
        return 0.0 if version >= cfg.run.steps else cfg.noise.sigma(version, cfg.run.steps)

    def added(self, policy: Params, version: int) -> Params:
        """`policy` with the noise of `version` on its gains, as they are rounded when they are published. The
        other leaves are the same arrays."""
        sigma, cfg, self._drawn = self.sigma(version), self._cfg, None
        if not sigma:
            return policy
        leaves, tree = jax.tree_util.tree_flatten_with_path(policy)
        at = _gains(leaves, policy, self._model, cfg.noise.where)
        gains = {i: leaves[i][1] for i in at}
        made = _added(tuple((i, *g) for i, g in at.items()), self._type, cfg.noise.unit == "ulp",
                      tuple(x.sharding for x in gains.values()))
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(cfg.run.seed), zlib.crc32(b"noise")),
                                 version)
        noisy, sums = made(gains, key, jnp.float32(sigma))
        self._drawn = sigma, sums
        return jax.tree.unflatten(tree, [noisy.get(i, leaf) for i, (_, leaf) in enumerate(leaves)])

    def metrics(self) -> dict[str, float]:
        """Of the noise that was added last; {} for a run without noise."""
        if not self._drawn:
            return {"noise/sigma": 0.0} if self._cfg.noise.start else {}
        sigma, sums = self._drawn
        along, wanted, moved, count = np.asarray(sums, np.float64)
        return {"noise/sigma": sigma, "noise/arrived": along / wanted if wanted else 0.0,
                "noise/moved": moved / count}

    def check(self, policy: Params) -> str | None:
        """A warning if rounding takes the least noise of the run from some gains. Raises ConfigError if it
        takes it from most, and for a largest sigma that exceeds most gains, of which it would leave
        nothing."""
        cfg = self._cfg
        if not cfg.noise.start:
            return None
        least, most = cfg.noise.least, cfg.noise.start
        leaves, _ = jax.tree_util.tree_flatten_with_path(policy)
        gains = np.concatenate([np.asarray(leaves[i][1].addressable_data(0), np.float32).ravel()
                                for i in _gains(leaves, policy, self._model, cfg.noise.where)])
        half = _ulp(np, np.abs(gains), BITS[self._type]) / 2
        size = np.abs(gains + self._model.family.unit_offset)
        if cfg.noise.unit == "ulp":
            size = size / np.maximum(2 * half, 1e-30)
        if (size < most).mean() > COARSE:
            raise ConfigError(f"noise: its largest sigma, {most:g}, exceeds most gains (median "
                              f"{np.median(size):.2g}, in the unit noise.unit)",
                              "lower noise.start and noise.end: QeRL begins at 0.01")
        if cfg.noise.unit == "ulp":
            return None
        share = (half > least).mean()
        if not share:
            return None
        said = (f"noise: its least sigma, {least:g}, is below half a unit in the last place of {share:.0%} "
                f"of the gains in {self._type} (median {np.median(half):.2g}), whose rounding takes most of "
                "it")
        step = 'set noise.unit = "ulp" with a sigma of 0.5 or more, or raise noise.end'
        if share > COARSE:
            raise ConfigError(said, step)
        return f"{said}\n  next step: {step}"


def check_family(cfg: Config, model: ModelConfig) -> None:
    """Raise ConfigError for noise that the model's gains cannot carry."""
    if cfg.noise.start and cfg.noise.unit == "ulp" and model.family.unit_offset:
        raise ConfigError(f'noise.unit = "ulp": {model.architecture} stores its gains as their distance '
                          f'from 1, whose '
                          "last place is not the gain's", 'set noise.unit = "absolute"')


def _gains(leaves: list[tuple[Any, Array]], policy: Params, model: ModelConfig,
           where: str) -> dict[int, Gain]:
    """By their number among the leaves: those of the norms that get noise."""
    norms, starts = model.family.norms, [0]
    for stack in policy["layers"]:
        starts.append(starts[-1] + len(stack[norms.before_attention]["weight"]))
    found = {}
    for i, (path, _) in enumerate(leaves):
        keys = [str(k.key) for k in path if isinstance(k, jax.tree_util.DictKey)]
        if role_of(path).kind != "norm":
            continue
        if where == "all" or keys[-2] in (norms.before_attention, norms.before_mlp):
            stack = next((k.idx for k in path if isinstance(k, jax.tree_util.SequenceKey)), 0)
            found[i] = Gain("/".join(keys), starts[stack])
    return found


def _ulp(xp: Any, x: Any, bits: int) -> Any:
    """The unit in the last place of a float with `bits` bits after its leading one; 0 for 0."""
    exponent = xp.frexp(x)[1]
    return xp.where(x == 0, 0, xp.ldexp(xp.ones_like(x), exponent - 1 - bits))


@functools.cache
def _added(gains: tuple[tuple[int, str, int], ...], dtype: str, in_ulps: bool,
           shardings: tuple[Any, ...]) -> Any:
    """added(gains by number, key, sigma) -> (gains with noise, in their own type and rounded to `dtype`, sums
    for the metrics). Rows of one width are drawn together, because a program with a draw for each norm takes
    seconds to compile."""

    def added(leaves: dict[int, Array], key: Array, sigma: Array) -> Any:
        out, sums = {}, jnp.zeros(4, jnp.float32)
        for width in sorted({x.shape[-1] for x in leaves.values()}):
            group = [(i, zlib.crc32(name.encode()), first) for i, name, first in gains
                     if leaves[i].shape[-1] == width]
            rows = [leaves[i].reshape(-1, width) for i, *_ in group]
            stamps = np.array([(name, first + j) for (_, name, first), x in zip(group, rows)
                               for j in range(len(x))],
                              np.uint32)
            draw = lambda name, layer, width=width: jax.random.normal(
                jax.random.fold_in(jax.random.fold_in(key, name), layer), (width,), jnp.float32)
            w = round_to(jnp.concatenate([x.astype(jnp.float32) for x in rows]), dtype)
            unit = _ulp(jnp, jnp.abs(w), BITS[dtype]) if in_ulps else jnp.float32(1)
            z = sigma * unit * jax.vmap(draw)(*stamps.T)
            noisy = round_to(w + z, dtype)
            moved = noisy - w
            sums += jnp.stack([jnp.sum(moved * z), jnp.sum(z * z), jnp.sum(moved != 0), jnp.float32(w.size)])
            ends = [int(n) for n in np.cumsum([len(x) for x in rows])[:-1]]
            for (i, *_), part in zip(group, jnp.split(noisy, ends)):
                out[i] = part.reshape(leaves[i].shape).astype(leaves[i].dtype)
        return out, sums

    return rounding_exact_jit(added, out_shardings=({i: s for (i, *_), s in zip(gains, shardings)}, None))
