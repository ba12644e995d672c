"""FP8 reinforcement learning for language models in JAX, on Hopper GPUs. It imports neither torch nor vllm.

A program needs only `train` and `load_config`; both are imported on first use.
"""

from typing import TYPE_CHECKING

from jaxfp8rl.version import __version__

if TYPE_CHECKING:
    from jaxfp8rl.config.schema import Config
    from jaxfp8rl.config.toml import load_config
    from jaxfp8rl.training.entry import train

__all__ = ["Config", "__version__", "load_config", "train"]
_HOMES = {"Config": "jaxfp8rl.config.schema", "load_config": "jaxfp8rl.config.toml",
          "train": "jaxfp8rl.training.entry"}


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxfp8rl' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
