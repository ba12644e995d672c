"""What compiles the rollout correction anew, and what it refuses."""

from __future__ import annotations

import math

import chex
import jax
import pytest
from correction_batches import data

from jaxfp8rl.errors import ConfigError
from jaxfp8rl.losses.correction import (
    AdaptiveMix,
    CorrectionConfig,
    Rejection,
    rollout_correction,
)
from jaxfp8rl.losses.presets import PRESETS, get_preset

pytestmark = pytest.mark.usefixtures("quick_compile")


# --- compilation
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["slime/mis", "areal/m2po"])
def test_only_the_config_compiles_anew(name: str):
    chex.clear_trace_counter()  # which knows a function by its place alone
    run = jax.jit(chex.assert_max_traces(lambda batch: batch.correct(PRESETS[name]), n=1))
    for seed, scale in enumerate((0.0, 1.0, 30.0, 1e-3)):
        batch = data(seed, scale)
        run(batch)
        run(batch._replace(mask=batch.mask & False, ids=batch.ids * 7))


def test_a_config_is_a_static_argument():
    assert len({hash(c) for c in PRESETS.values()}) > 30
    assert len({hash(CorrectionConfig(rejections=(Rejection("token", "k2"),))) for _ in range(2)}) == 1


# --- bad input
# ------------------------------------------------------------------------------------------------------

SEQUENCE_K3 = Rejection("sequence", "k3", upper=0.01)


@pytest.mark.parametrize(
    "config",
    [CorrectionConfig("sequence"), CorrectionConfig("geometric"),
     CorrectionConfig("none", rejections=(SEQUENCE_K3,))],
)
def test_sequence_level_without_segments_says_what_is_missing(config: CorrectionConfig):
    batch = data(0, 1.0)
    with pytest.raises(ValueError, match=r"segment_ids \[\.\.\., T\]"):
        rollout_correction(batch.old, batch.rollout, batch.mask, config)


def rejects(**fields) -> CorrectionConfig:
    return CorrectionConfig(rejections=(Rejection(**{"level": "token", "statistic": "ratio"} | fields),))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (CorrectionConfig(action="mask", lower=3.0, upper=2.0), "reversed.*write"),
        (CorrectionConfig(action="clip", lower=-1.0), "positive"),
        (CorrectionConfig(upper=-2.0), "reversed|positive"),
        (CorrectionConfig(upper=0.0), "positive"),
        (CorrectionConfig(upper=math.nan), "must be numbers"),
        (CorrectionConfig(action="clip", lower=math.nan), "must be numbers"),
        (CorrectionConfig(lower=0.5), "no effect"),
        (rejects(lower=2.0, upper=0.5), "reversed.*write"),
        (rejects(lower=-0.5, upper=0.5), "positive"),
        (rejects(upper=math.nan), "must be numbers"),
        (rejects(), "token_ratio has no bounds"),
        (rejects(lower=0.0), "token_ratio has no bounds"),
        (rejects(level="sequence", statistic="k1"), "sequence_mean_k1 has no bounds"),
        (rejects(statistic="mult_error", lower=1.0), "token_mult_error has no bounds"),
        (rejects(statistic="mult_error", upper=0.5), "upper = 0.5 rejects all"),
        (rejects(aggregation="max", upper=2.0), 'aggregation "max" has no effect at level "token"'),
        (rejects(statistic="k3", upper=-0.01), "positive|reversed"),
        (rejects(level="sequence", statistic="k1", lower=0.5, upper=-0.5), "sequence_mean_k1.*reversed"),
        (CorrectionConfig(m2_limit=0.0), "m2_limit"),
        (CorrectionConfig(m2_limit=-1.0), "m2_limit"),
        (CorrectionConfig(m2_limit=math.inf), "m2_limit"),
        (CorrectionConfig(m2_limit=math.nan), "m2_limit"),
        (CorrectionConfig(adaptive=AdaptiveMix(slope=0.0)), "adaptive"),
        (CorrectionConfig(adaptive=AdaptiveMix(power=math.inf)), "adaptive"),
    ],
)
def test_bad_bounds_are_refused_in_words(config: CorrectionConfig, words: str):
    with pytest.raises(ValueError, match=words):
        data(0, 1.0).correct(config)


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (CorrectionConfig(weight="tokens"), "tokens"), (CorrectionConfig(action="trunc"), "trunc"),
        (CorrectionConfig(overflow="clamp"), "clamp"), (CorrectionConfig(denominator="live"), "live"),
        (rejects(level="seq"), "seq"), (rejects(statistic="k4"), "k4"),
        (rejects(level="sequence", aggregation="median"), "median"),
    ],
)
def test_a_misspelt_choice_is_refused_by_name(config: CorrectionConfig, word: str):
    """A NamedTuple takes any string; none of them may be taken for something it is not."""
    with pytest.raises(ValueError, match=f'"{word}"'):
        data(0, 1.0).correct(config)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("nemo/icepob", "nemo/icepop"), ("verl/decoupled_token_tis", "verl/decoupled_token_is")]
)
def test_an_unknown_preset_names_the_nearest(name: str, nearest: str):
    with pytest.raises(ConfigError, match=nearest):
        get_preset(name)


def test_a_known_preset_is_found_and_checks():
    for name, config in PRESETS.items():
        assert get_preset(name) is config and config.check() is config
