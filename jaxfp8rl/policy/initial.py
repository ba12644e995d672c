"""Initial weights, from a Hugging Face folder or from a seed, placed on the learner's devices."""

from __future__ import annotations

import jax

from jaxfp8rl.config.schema import Config
from jaxfp8rl.distributed.mesh import ONE, MeshLayout
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.loading import load_params
from jaxfp8rl.models.module import init_params
from jaxfp8rl.optim.adamw import Optimizer
from jaxfp8rl.optim.guard import init_state
from jaxfp8rl.types import Params, TrainState


def fresh_state(params: Params, optimizer: Optimizer, compute_dtype: str, layout: MeshLayout) -> TrainState:
    """The initial training state of `params`, float32 or of a smaller float type, which already lie where
    the masters will.

    Each array is created with its final sharding, so that no device ever holds the whole state.
    """
    if layout.mesh is None:
        # committed to the device as a restored state is, so that both use the same compiled programs
        return layout.place(init_state(params, optimizer, compute_dtype))
    return jax.jit(lambda params: layout.keep(init_state(params, optimizer, compute_dtype)))(params)


def starting_params(cfg: Config, model: ModelConfig, layout: MeshLayout = ONE,
                    dtype: str = "float32") -> Params:
    """The HF folder's weights in `dtype` (jaxfp8rl.models.loading.load_params), or random ones in float32
    from the run's seed.

    Weights of a folder that are for one device stay on the host, as numpy arrays. `fresh_state` moves and
    rounds one at a time, so that the device never holds all of them twice.
    """
    if not cfg.model.path:
        return init_params(model, jax.random.key(cfg.run.seed))
    return on_devices(load_params(cfg.model.path, model, dtype)[1], layout)


def on_devices(params: Params, layout: MeshLayout) -> Params:
    """Move parameters from the host to the devices of the masters, if these are several."""
    return layout.place(params) if layout.mesh else params
