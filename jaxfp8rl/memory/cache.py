"""The size of the engine's cache: how much has room beside the learner, how many sequences it holds, and what
`rollout.kv_cache_gib = "auto"` chooses."""

from __future__ import annotations

from collections.abc import Callable

from jaxfp8rl.config.schema import Config
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.gpus import share_of_jax
from jaxfp8rl.memory.cache_bytes import cache_of, least_gib, tenths_up, wanted_at_once
from jaxfp8rl.memory.fit import needs
from jaxfp8rl.memory.plan import left_free
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.policy.shapes import model_config
from jaxfp8rl.rollout.gpu_memory import device_memory, memory_of_jax

GIB = 2**30
Choice = Callable[[], float]


def held_at_once(cfg: Config, model: ModelConfig, cache: int) -> int:
    """The number of sequences of full length that decode at once with a cache of that many bytes. A higher
    rollout.max_num_seqs only has the engine drop some and compute them again."""
    own = cache_of(cfg, model, 0)
    return max(0, min(wanted_at_once(cfg), (cache - own) // (cache_of(cfg, model, 1) - own)))


def room_for_cache(cfg: Config, model: ModelConfig, total: int, fresh: bool = True) -> int:
    """The bytes that the plan and the rest of an engine in this process leave of `total` for its cache. Of
    the stages in which the engine has it the one that leaves least; negative if a stage does not fit without
    a cache."""
    without, with_one = (needs(cfg.having("rollout", kv_cache_gib=gib), model, total, fresh)
                         for gib in (0.0, 1.0))
    left = {stage: total - size for stage, size in without.items()}
    return min(size for stage, size in left.items() if with_one[stage] > without[stage] or size < 0)


def chosen_gib(cfg: Config, model: ModelConfig, total: int, fresh: bool = True) -> float | None:
    """The size of a cache that is "auto" on a device of `total` bytes, in tenths of a GiB: what has room,
    less what is computed beside it, and no more than a step can use. None if not one sequence has room."""
    # while the embedded engine has its cache, nothing takes as much as an update, which the room allows for
    beside = 0 if cfg.rollout.engine == "jax" else left_free(cfg, model)
    room = (room_for_cache(cfg, model, total, fresh) - beside) * 10 // GIB / 10
    most = tenths_up(cache_of(cfg, model, wanted_at_once(cfg)))
    return min(room, most) if room >= least_gib(cfg, model) else None


def with_cache(cfg: Config, fresh: bool = True,
               for_all: Callable[[Choice], float] = lambda choose: choose()) -> tuple[Config, str]:
    """(the config with the size of a cache that is "auto", a line for the console). The line is empty where
    nothing was chosen and all sequences fit.

    for_all: makes the choice of the first process that of all (ProcessGroup.broadcast). Call
    this after `jaxfp8rl.memory.fit.check_memory`. Raises ConfigError for "auto" without a GPU, or if not one
    sequence has room.
    """
    asked, embedded = cfg.rollout.kv_cache_gib, cfg.rollout.engine == "jax"
    if asked is None or cfg.rollout.engine == "served" or embedded and asked != "auto":
        return cfg, ""
    model = model_config(cfg)
    if asked == "auto":
        cfg = cfg.having("rollout", kv_cache_gib=for_all(lambda: _choice(cfg, model, fresh)))
    gib = float(cfg.rollout.kv_cache_gib or 0.0)
    if asked == "auto":
        return cfg, f'rollout.kv_cache_gib = "auto": {gib:g} GiB, which {format_held(cfg, model, gib)}'
    fewer = held_at_once(cfg, model, int(gib * GIB)) < wanted_at_once(cfg)
    return cfg, f"rollout.kv_cache_gib = {gib:g} {format_held(cfg, model, gib)}" if fewer else ""


def _choice(cfg: Config, model: ModelConfig, fresh: bool) -> float:
    least = f"{least_gib(cfg, model):g} GiB"
    if not (total := memory_of_jax() if cfg.rollout.engine == "jax" else device_memory()):
        raise ConfigError('rollout.kv_cache_gib = "auto" is chosen by the memory of a GPU, and there is none',
                          f"give the size, {least} or more, or leave it out")
    if (gib := chosen_gib(cfg, model, total, fresh)) is None:
        raise ConfigError(f'rollout.kv_cache_gib = "auto": a sequence of full length takes {least}, which a '
                          f"training run does not leave of the GPU's {total / GIB:.1f}", "give the size")
    return gib


def format_held(cfg: Config, model: ModelConfig, gib: float) -> str:
    """How many of the sequences that decode at once a cache holds, and what follows if these are fewer."""
    held, wanted = held_at_once(cfg, model, int(gib * GIB)), wanted_at_once(cfg)
    engine = "vLLM" if cfg.rollout.engine == "vllm" else "the engine"
    return f"holds {held:,} of the {wanted:,} sequences of full length that decode at once" + (
        f": set rollout.max_num_seqs = {max(held, 1)}, or {engine} computes some again" if held < wanted else "")


def format_cache(cfg: Config, model: ModelConfig, cards: dict[str, int], fresh: bool = True) -> str:
    """Lines for a dry run: how many sequences the cache holds, and the size of one that is "auto" on each
    card, of a name and so many bytes. Empty for an engine that is not in this process, and for an embedded
    one whose cache has room for all."""
    gib, one = cfg.rollout.kv_cache_gib, cache_of(cfg, model, 1) - cache_of(cfg, model, 0)
    if cfg.rollout.engine == "served" or cfg.rollout.engine == "jax" and gib is None:
        return ""
    whose, share = ("vLLM's", 1.0) if cfg.rollout.engine == "vllm" else ("the engine's", share_of_jax())
    lines = [f"{whose} cache: {one / 2**20:,.1f} MiB for a sequence of full length"]
    if gib is not None and gib != "auto":
        lines.append(f"  rollout.kv_cache_gib = {gib:g} {format_held(cfg, model, gib)}")
    for name, total in cards.items():
        size = chosen_gib(cfg, model, int(share * total), fresh)
        lines.append(f'  {name}: kv_cache_gib = "auto" ' + (
            "has no room for one" if size is None else f"is {size:g}, which {format_held(cfg, model, size)}"))
    return "\n".join(lines)
