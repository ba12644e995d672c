"""Combinations of settings that cannot work, or that would be ignored: refused before anything loads.

The rules stand beside the sections that they are about (`jaxfp8rl.config.rule` says what one is). This is the
order in which they are checked: the first that a config breaks is the one that is named.
"""

from __future__ import annotations

from jaxfp8rl.config import correction, learning, sampling, schema
from jaxfp8rl.config.rule import Check
from jaxfp8rl.config.schema import Config

RULES: tuple[Check, ...] = (
    *sampling.RUN,
    *schema.PRECISION,
    *correction.CORRECTION,
    *learning.OBJECTIVE,
    *learning.GROUPS,
    *correction.POLICIES,
    *correction.UNSCORED,
    *learning.CALIBRATION,
    *learning.OVERLONG,
    *sampling.MODEL,
    *schema.BATCH,
    *learning.SCHEDULES,
    *learning.MASTER,
    *sampling.KV_SCALES,
    *sampling.ONE_COPY,
    *schema.PROCESSES,
    *schema.MESH,
    *sampling.STALENESS,
    *sampling.IN_FLIGHT,
    *sampling.SERVER,
    *sampling.TEMPERATURE,
    # A setting that nothing would read must not seem to have been tried.
    *sampling.IDLE_VLLM,
    *schema.IDLE_EMBEDDED,
    *sampling.IDLE_KV_SCALES,
    *sampling.IDLE_IN_FLIGHT,
    *learning.IDLE_LOSS,
    *schema.IDLE_REPLAY,
    *schema.IDLE_PROBES,
    *sampling.IDLE_TASK,
    *sampling.IDLE_RUN,
    *schema.IDLE_SCORING,
    *sampling.TASK,
)


def check(cfg: Config) -> Config:
    """Refuse settings that cannot go together. Raises ConfigError; returns `cfg`."""
    for rule in RULES:
        rule(cfg)
    return cfg
