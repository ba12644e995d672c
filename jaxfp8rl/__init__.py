"""FP8 reinforcement learning for language models in JAX, on Hopper GPUs. It imports neither torch nor vllm.

A program needs only `train` and `load_config`. A learner of your own needs `Learner`, `Trainer` and `Loss`;
`pack` makes a `TrainBatch` of `Sample`s, and `attention_mask` keeps its sequences apart. All are imported on
first use.
"""

from typing import TYPE_CHECKING

from jaxfp8rl.version import __version__

if TYPE_CHECKING:
    from jaxfp8rl.config.learning import Loss
    from jaxfp8rl.config.schema import Config
    from jaxfp8rl.config.toml import load_config
    from jaxfp8rl.data.packing import Sample, pack
    from jaxfp8rl.models.layers import attention_mask
    from jaxfp8rl.training.entry import train
    from jaxfp8rl.training.foreign import Learner, Trainer
    from jaxfp8rl.types import TrainBatch

__all__ = [
    "Config", "Learner", "Loss", "Sample", "TrainBatch", "Trainer", "__version__", "attention_mask",
    "load_config", "pack", "train",
]
_HOMES = {
    "Config": "config.schema", "Learner": "training.foreign", "Loss": "config.learning",
    "Sample": "data.packing", "TrainBatch": "types", "Trainer": "training.foreign",
    "attention_mask": "models.layers", "load_config": "config.toml", "pack": "data.packing",
    "train": "training.entry",
}


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxfp8rl' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"jaxfp8rl.{_HOMES[name]}"), name)
