"""The memory of the GPU: JAX's part of it beside vLLM, how much there is, and how much is in use."""

from __future__ import annotations

from jaxfp8rl.config.schema import Config
from jaxfp8rl.gpus import share_of_jax, take_gpu, take_host_memory


def share_gpu(cfg: Config) -> None:
    """Configure JAX's allocator, before JAX asks for a device: so that vLLM, in this or another process, can
    share the GPU; without vLLM so that JAX can have nearly all of it. Under optim.offload it may have the
    host's memory, too."""
    if cfg.optim.offload:
        take_host_memory()
    if cfg.rollout.engine == "jax":
        return take_gpu()
    from bridges.inside_vllm.device_pool import share

    share()


def device_memory() -> int | None:
    """The memory of the first GPU, in bytes; None on a CPU."""
    from bridges.inside_vllm.device_pool import total

    return total()


def memory_of_jax() -> int | None:
    """The bytes of the first GPU that JAX may take after `take_gpu`; None on a CPU."""
    return None if (total := device_memory()) is None else int(share_of_jax() * total)


def device_in_use() -> int | None:
    """The memory in use on the first GPU, whoever holds it, in bytes; None on a CPU."""
    from bridges.inside_vllm.device_pool import in_use

    return in_use()
