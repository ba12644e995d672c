"""What of `precision` this machine has hardware for."""

from __future__ import annotations

import jax

from jaxfp8rl.errors import ConfigError
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.precision.recipe import Precision
from pallas_kernels.attention.api import DTYPES, HEAD_SIZES
from pallas_kernels.plgpu_compat import HOPPER

FP8_TENSOR_CORES = 8.9  # the first compute capability that has them


def products_of(choice: str, compute_dtype: str) -> str:
    """`precision.products` on this machine: "auto" is "pallas" on a Hopper GPU, else "tensor_core" where there are FP8 tensor
    cores, which has the same bits, else "float32".

    Raises ConfigError for a choice that this machine has no hardware for, or the kernels no result in `compute_dtype`.
    """
    capability = _capability()
    runs = {
        "pallas": capability == HOPPER and compute_dtype != "float16",
        "tensor_core": float(capability) >= FP8_TENSOR_CORES,
        "float32": True,
    }
    if choice == "auto":
        return next(name for name, here in runs.items() if here)
    if not runs[choice]:
        needed = {"pallas": f"a Hopper GPU (capability {HOPPER}), and results in bfloat16 or float32",
                  "tensor_core": "a GPU with FP8 tensor cores"}[choice]  # fmt: skip
        raise ConfigError(
            f'precision.products = "{choice}" needs {needed}; this is {_name()}, precision.compute_dtype "{compute_dtype}"',
            'set precision.products = "auto": the same products by what is here',
        )
    return choice


def attention_of(choice: str, compute_dtype: str, model: ModelConfig) -> str:
    """`precision.attention` on this machine: "auto" is "pallas" where the kernels are for the model and run, else "xla".

    Raises ConfigError for "pallas" where they are not or do not.
    """
    if compute_dtype not in DTYPES:
        problem = f'takes {" or ".join(map(str, DTYPES))}, precision.compute_dtype is "{compute_dtype}"'
    elif model.head_dim not in HEAD_SIZES:
        problem = f"has heads of {' and '.join(map(str, HEAD_SIZES))}, the model's are of {model.head_dim}"
    elif _capability() != HOPPER:
        problem = f"needs a Hopper GPU (capability {HOPPER}), this is {_name()}"
    else:
        problem = ""
    if choice == "pallas" and problem:
        raise ConfigError(f'precision.attention = "pallas" {problem}', 'set precision.attention = "auto"')
    return choice if choice != "auto" else "xla" if problem else "pallas"


def computed_by(precision: Precision) -> str:
    """What a run says when it starts."""
    products = f'FP8 products by "{precision.products}", ' if precision.any_fp8 else ""
    said, engine = f'learner: {products}attention by "{precision.attention}"', precision.rope_dtype
    if precision.compute_dtype == engine:
        return said
    return f'{said}, in {precision.compute_dtype} where the engine computes in {engine}, whose roundings are then not mirrored ' \
           f'(precision.compute_dtype = "{engine}")'  # fmt: skip


def _capability() -> str:
    """Of the GPU here; "0" where there is none."""
    device = jax.devices()[0]
    return str(getattr(device, "compute_capability", 0)) if device.platform == "gpu" else "0"


def _name() -> str:
    return jax.devices()[0].device_kind
