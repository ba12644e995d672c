"""Combinations of settings that cannot work, or that would be ignored: refused before anything loads.

The rules stand beside the sections that they are about (`jaxfp8rl.config.rule` says what one is). This is the
order in which they are checked: the first that a config breaks is the one that is named.
"""

from __future__ import annotations

from jaxfp8rl.config import (
    correction,
    curriculum,
    environment,
    learning,
    lora,
    noise,
    reference,
    sampling_rules,
    schema,
    selection,
)
from jaxfp8rl.config.rule import Check
from jaxfp8rl.config.schema import Config

RULES: tuple[Check, ...] = (
    *sampling_rules.RUN,
    *schema.PRECISION,
    *correction.CORRECTION,
    *learning.OBJECTIVE,
    *learning.GROUPS,
    *selection.SELECTION,
    *reference.REFERENCE,
    *selection.EXPLORE,
    *correction.POLICIES,
    *correction.UNSCORED,
    *learning.CALIBRATION,
    *learning.OVERLONG,
    *sampling_rules.MODEL,
    *environment.ENVIRONMENT,
    *schema.EXACT,
    *schema.BATCH,
    *schema.SHARED,
    *learning.SCHEDULES,
    *learning.MASTER,
    *sampling_rules.KV_SCALES,
    *lora.LORA,
    *noise.NOISE,
    *sampling_rules.ONE_COPY,
    *schema.PROCESSES,
    *schema.MESH,
    *sampling_rules.STALENESS,
    *sampling_rules.IN_FLIGHT,
    *sampling_rules.SERVER,
    *sampling_rules.TEMPERATURE,
    # A setting that nothing would read must not seem to have been tried.
    *sampling_rules.IDLE_VLLM,
    *schema.IDLE_EMBEDDED,
    *sampling_rules.DRAFT_HEAD,
    *sampling_rules.IDLE_SPECULATION,
    *sampling_rules.IDLE_KV_SCALES,
    *sampling_rules.IDLE_IN_FLIGHT,
    *learning.IDLE_LOSS,
    *selection.IDLE_SELECTION,
    *reference.IDLE_REFERENCE,
    *lora.IDLE_LORA,
    *noise.IDLE_NOISE,
    *schema.IDLE_REPLAY,
    *schema.IDLE_PROBES,
    *sampling_rules.IDLE_TASK,
    *environment.IDLE_ENVIRONMENT,
    *curriculum.CURRICULUM,
    *sampling_rules.IDLE_RUN,
    *schema.IDLE_SCORING,
    *sampling_rules.TASK,
)


def check(cfg: Config) -> Config:
    """Refuse settings that cannot go together. Raises ConfigError; returns `cfg`."""
    for rule in RULES:
        rule(cfg)
    return cfg
