"""What a run warns of when it starts: an engine that was not tested, FP8 without a correction, an FP8 cache."""

from __future__ import annotations

from bridges.api import Capabilities, EngineFormats
from jaxfp8rl.config.learning import is_uncorrected
from jaxfp8rl.config.schema import Config
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.precision.recipe import FP8_KV

TESTED_VLLM = "0.25.", "0.32."


def untested_warning(engine: Capabilities) -> str | None:
    """What to say at the start of a run on a vLLM that may round elsewhere than those that the learner
    mirrors."""
    if engine.engine != "vllm" or engine.engine_version.startswith(TESTED_VLLM):
        return None
    return (
        f"vLLM {engine.engine_version} has not been tested: 0.25 has on GPUs, 0.32 on CPUs. Where it rounds otherwise "
        "mismatch is larger: compare gate/mean_gap and mismatch/k3 with theirs (docs/precision.md)"
    )


def uncorrected_warning(cfg: Config) -> str | None:
    """What to say at the start of a run whose engine samples in FP8 and that corrects nothing, as it was told
    it may."""
    if not is_uncorrected(cfg):
        return None
    return (
        f'precision.recipe "{cfg.precision.recipe}" samples in FP8 and correction.preset "{cfg.correction.preset}" corrects '
        "nothing (correction.allow_uncorrected_fp8): a baseline, of which papers report that it collapses\n"
        '  next step: watch mismatch/k3 and reward/mean; correction.preset = "token_tis" is what usually holds'
    )


def kv_fp8_warning(model: ModelConfig, formats: EngineFormats, calibrated: bool = False) -> str | None:
    """What to say at the start of a run whose engine caches keys and values in E4M3 for a model without
    query/key norm. Nothing where their scales are `calibrated`: these follow the largest key."""
    if formats.kv_cache != FP8_KV or model.qk_norm or calibrated:
        return None
    return (
        f"{model.architecture} has no query/key norm and the engine caches keys and values in E4M3 with scale 1: nothing "
        "bounds a key, one above 448 is cut, and other models of that kind were seen to write gibberish.\n"
        "  next step: watch precision/key_clipped and precision/key_amax (monitor.precision_every), or set "
        'rollout.kv_cache = "auto"'
    )
