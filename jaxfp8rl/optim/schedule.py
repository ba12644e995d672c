"""The learning rate of each update."""

from __future__ import annotations

import optax

from jaxfp8rl.config.learning import Optim


def make_schedule(cfg: Optim, updates: int) -> optax.Schedule:
    """The learning rate of each update: a linear warm-up to `lr`, then constant, or a cosine or linear decay.
    A decay ends with lr * min_lr_ratio at update `total_steps`, by default `updates`, and stays there."""
    after = max((cfg.total_steps or updates) - cfg.warmup_steps, 1)
    tail = {
        "constant": lambda: optax.constant_schedule(cfg.lr),
        "cosine": lambda: optax.cosine_decay_schedule(cfg.lr, after, cfg.min_lr_ratio),
        "linear": lambda: optax.linear_schedule(cfg.lr, cfg.lr * cfg.min_lr_ratio, after),
    }[cfg.schedule]()
    warmup = optax.linear_schedule(cfg.lr / max(cfg.warmup_steps, 1), cfg.lr, max(cfg.warmup_steps - 1, 1))
    return optax.join_schedules([warmup, tail], [cfg.warmup_steps]) if cfg.warmup_steps else tail
