"""Reading a config: what loads, what every kind of mistake says, and that a dump loads back."""

from __future__ import annotations

import errno
import re
import string
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxfp8rl.config import learning, toml
from jaxfp8rl.config.rules import VLLM_TEMPERATURES
from jaxfp8rl.config.schema import Config
from jaxfp8rl.config.toml import dump_config, key_lines, load_config
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.losses.advantages import ADVANTAGES
from jaxfp8rl.losses.aggregation import AGGREGATIONS
from jaxfp8rl.losses.correction import AdaptiveMix, CorrectionConfig, Rejection
from jaxfp8rl.losses.objectives import OBJECTIVES, ObjectiveConfig
from jaxfp8rl.losses.presets import get_preset

GOOD = """\
[run]
dir = "runs/x"
steps = 3

[model]
tokenizer = "chars:0123456789+="
[model.config]
hidden_size = 128
eos_token_id = [1, 2]

[task]
kind = "arithmetic"
max_prompt_tokens = 16

[rollout]
prompts_per_step = 4
samples_per_prompt = 2
max_new_tokens = 8

[train]
row_tokens = 32

[optim]
lr = 1e-6
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "run.toml"
        path.write_text(text)
        return str(path)

    return write


def refusal(path: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as e:
        load_config(path, overrides)
    return str(e.value)


def test_loads(write):
    cfg = load_config(write(GOOD))
    assert (cfg.run.steps, cfg.optim.lr, cfg.model.config["eos_token_id"]) == (3, 1e-6, [1, 2])


# (text taken out of GOOD, text put in, what the refusal says)
MISTAKES = {
    "unknown key": ("lr = 1e-6", "lrr = 1e-6", 'run.toml:24: optim.lrr: unknown key (did you mean "lr"?)'),
    "misplaced key": ("lr = 1e-6", "top_k = 1",
                      ':24: optim.top_k: unknown key: "top_k" belongs to rollout.top_k'),
    "unknown section": ("[optim]", "[optimizer]",
                        ':23: optimizer: unknown section or key (did you mean "optim"?)'),
    "key outside a section": ("[run]", "steps = 3\n[run]",
                              ':1: steps: unknown key: "steps" belongs to run.steps or sft.steps'),
    "typo outside a section": ("[run]", "temprature = 3\n[run]", '(did you mean "rollout.temperature"?)'),
    "wrong type": ("steps = 3", 'steps = "3"', ':3: run.steps: expected an integer, got "3" (a string)'),
    "fraction": ("steps = 3", "steps = 3.5", ":3: run.steps: expected an integer, got 3.5 (a number)"),
    "boolean for a number": ("lr = 1e-6", "lr = true",
                             ":24: optim.lr: expected a number, got true (a boolean)"),
    "number for a word": ('dir = "runs/x"', "dir = 7",
                          ":2: run.dir: expected a string, got 7 (an integer); quote it"),
    "date for a word": ('dir = "runs/x"', "dir = 2026-01-01", ":2: run.dir: expected a string"),
    "word for a list": ("steps = 3", 'steps = 3\ntrackers = "tensorboard"',
                        ":4: run.trackers: expected a list"),
    "unknown item": ("steps = 3", 'steps = 3\ntrackers = ["tensorbord"]', '(did you mean "tensorboard"?)'),
    "too small": ("steps = 3", "steps = 0", ":3: run.steps: must be at least 1, got 0"),
    "not positive": ("lr = 1e-6", "lr = 0", ":24: optim.lr: must be greater than 0, got 0"),
    "too large": ("lr = 1e-6", "b1 = 1.0", ":24: optim.b1: must be less than 1, got 1.0"),
    "infinite": ("lr = 1e-6", "lr = inf", ":24: optim.lr: must be finite, got inf"),
    "choice": ('"arithmetic"', '"arithmetik"',
               ':12: task.kind: "arithmetik" is not a choice (did you mean "arithmetic"?)'),
    "missing key": ("steps = 3\n", "", "run.toml:1: run.steps: missing; it has no default (GRPO steps"),
    "missing section": ("[train]\nrow_tokens = 32", "", "run.toml: train: missing"),
    "syntax": ("lr = 1e-6", "lr = ", "run.toml:24:6: not valid TOML: Invalid value\n    lr ="),
    "unclosed": ("lr = 1e-6", "lr = [1,", "not valid TOML"),
    "twice": ("lr = 1e-6", "lr = 1e-6\nlr = 2e-6",
              "run.toml:25:10: not valid TOML: Cannot overwrite a value"),
    "recipe": ("[optim]", '[precision]\nrecipe = "fp8_unifed"\n[optim]',
               ':24: precision.recipe: "fp8_unifed" is no recipe (did'),
    "fp8 without correction": (
        "[optim]", '[precision]\nrecipe = "fp8_unified"\n[correction]\npreset = "none"\n[optim]',
        ':24: precision.recipe "fp8_'
    ),
    "row too short": ("row_tokens = 32", "row_tokens = 20", ":21: train.row_tokens = 20 cannot hold"),
    "scorer": (
        'kind = "arithmetic"', 'kind = "file"\npath = "x.jsonl"\nscorer = "exakt"',
        ':14: task.scorer: unknown scorer "exakt"'
    ),
    "scorer of none": ('kind = "arithmetic"', 'kind = "arithmetic"\nscorer = "exact"',
                       ":13: task.scorer: a task of kind"),
    "no model": ('[model.config]\nhidden_size = 128\neos_token_id = [1, 2]', "", ":5: model: give either"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_named(write, mistake):
    old, new, says = MISTAKES[mistake]
    assert old in GOOD
    assert says in refusal(write(GOOD.replace(old, new, 1)))


def test_all_problems_of_a_file_at_once(write):
    bad = GOOD.replace("steps = 3", "stepz = 3").replace("lr = 1e-6", "lr = -1")
    message = refusal(write(bad))
    assert "3 problems" in message  # unknown stepz, missing steps, lr out of range
    assert ":3: run.stepz" in message and ":24: optim.lr" in message and "run.steps: missing" in message
    many = GOOD + "".join(f"k{i} = 1\n" for i in range(30))
    assert refusal(write(many)).count("unknown key") == 10 and "and 20 more" in refusal(write(many))


def test_every_field_refuses_a_wrong_type(write):
    """No field is lax: a table is accepted nowhere but where the schema says dict."""
    cfg = load_config(write(GOOD))
    data = cfg.model_dump()
    for section, model in toml.SECTIONS.items():
        for key in model.model_fields:
            wrong = 5 if isinstance(data[section][key], dict) else {"a": 1}
            with pytest.raises(ValueError, match=key):
                Config.model_validate(data | {section: data[section] | {key: wrong}})


def test_lines_of_keys():
    text = 'a = [\n  1,\n  2,\n]\nb.c = """\nx = 1\n"""\n# note\n\n[t]\n  d = {e = 1}\n[t.u]\n'
    assert key_lines(text) == {
        ("a",): 1, ("b",): 5, ("b", "c"): 5, ("t",): 10, ("t", "d"): 11, ("t", "d", "e"): 11, ("t", "u"): 12,
    }


def test_missing_file_names_the_presets(tmp_path, monkeypatch):
    (tmp_path / "demo.toml").write_text(GOOD)
    monkeypatch.setattr(toml, "presets", lambda: {"demo": tmp_path / "demo.toml"})
    assert load_config("demo").run.steps == 3
    assert '"demo"' in refusal("dmo") and "no such file" in refusal("dmo")


def test_not_text(tmp_path):
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe")
    assert "cannot be read as UTF-8" in refusal(str(tmp_path / "x.toml"))


def test_not_readable(tmp_path, monkeypatch):
    (tmp_path / "x.toml").write_text(GOOD)

    def read_text(self, encoding):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_text", read_text)
    said = refusal(str(tmp_path / "x.toml"))
    assert "x.toml: cannot be read: Permission denied" in said and "UTF-8" not in said


# --- overrides


@pytest.mark.parametrize(
    "words, section, key, value",
    [
        (["--optim.lr", "1e-3"], "optim", "lr", 1e-3),
        (["--optim.lr=2e-3"], "optim", "lr", 2e-3),
        (["--run.dir", "runs/a b"], "run", "dir", "runs/a b"),
        (["--run.dir", "2026-01-01"], "run", "dir", "2026-01-01"),
        (["--model.path="], "model", "path", ""),
        (["--model.config.hidden_size", "-1"], "model", "config",
         {"hidden_size": -1, "eos_token_id": [1, 2]}),
        (["--rollout.kv_cache_gib", "3", "--rollout.kv_cache_gib="], "rollout", "kv_cache_gib", None),
        (["--optim.lr", "1e-9"], "optim", "lr", 1e-9),
        (["--run.keep-checkpoints", "5"], "run", "keep_checkpoints", 5),
        (["--run.trackers", '["tensorboard"]'], "run", "trackers", ("tensorboard",)),
        (["--model.config.hidden_size", "256"], "model", "config",
         {"hidden_size": 256, "eos_token_id": [1, 2]}),
        (["--train.remat", "mlp"], "train", "remat", "mlp"),
        (["--run.steps", "4", "--run.steps", "5"], "run", "steps", 5),
    ],
)
def test_override(write, words, section, key, value):
    assert getattr(getattr(load_config(write(GOOD), words), section), key) == value


@pytest.mark.parametrize(
    "words, says",
    [
        (["--optim.lrr", "1"], '--optim.lrr: unknown key (did you mean "lr"?)'),
        (["--lr", "1"], '--lr: unknown key: "lr" belongs to optim.lr or sft.lr'),
        (["--run.steps", "many"], '--run.steps: expected an integer, got "many" (a string)'),
        (["--task.name", "7"], "--task.name: expected a string, got 7 (an integer); quote it: '\"7\"'"),
        (["--run.steps"], "--run.steps: a value is missing"),
        (["--run.steps", "--optim.lr", "1"], "--run.steps: a value is missing"),
        (["run.steps", "1"], "'run.steps': expected --section.key value"),
        (["--run.steps.x", "1"], "--run.steps.x: steps is a value, not a table of keys"),
        (["--run", "1"], "--run: expected a section of keys"),
        (["--run.trackers", "[tensorboard]"], "--run.trackers: [tensorboard] is not valid TOML"),
        (["--precision.recipe", "fp8_unified", "--correction.preset", "none"],
         "--precision.recipe: precision.recipe"),
        (["--rollout.max_new_tokens", "30"], "--rollout.max_new_tokens: train.row_tokens = 32 cannot hold"),
        (["--train.row_tokens", "20"], "--train.row_tokens: train.row_tokens = 20 cannot hold"),
    ],
)
def test_bad_override(write, words, says):
    assert says in refusal(write(GOOD), *words)


# --- dump


def test_dump_holds_every_field_and_loads_back(write):
    cfg = load_config(write(GOOD))
    text = dump_config(cfg)
    for section, model in toml.SECTIONS.items():
        assert f"[{section}]" in text
        for key in model.model_fields:
            assert f"\n{key} = " in text or f"\n# {key} = " in text or f"\n[{section}.{key}]\n" in text
    assert load_config(write(text)) == cfg


words = st.text(max_size=12)
values = st.recursive(
    st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | words | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)


@given(
    tables=st.dictionaries(words, values, max_size=4),
    text=words,
    lr=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    trackers=st.sampled_from([(), ("tensorboard",)]),
)
def test_dump_round_trip(tmp_path_factory, tables, text, lr, trackers):
    base = tmp_path_factory.mktemp("dump") / "a.toml"
    base.write_text(GOOD)
    data = load_config(str(base)).model_dump()
    data["task"] |= {"options": tables, "system_prompt": text}
    data["optim"]["lr"] = lr
    data["run"]["trackers"] = trackers
    cfg = Config.model_validate(data)
    base.write_text(dump_config(cfg), encoding="utf-8", newline="")
    assert load_config(str(base)) == cfg


def test_null_has_no_toml(write):
    data = load_config(write(GOOD)).model_dump()
    data["model"]["config"]["rope_scaling"] = None
    with pytest.raises(ConfigError, match="no form in TOML"):
        dump_config(Config.model_validate(data))


@given(st.text(string.printable, max_size=60))
def test_no_text_crashes(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("noise") / "a.toml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        load_config(str(path))


def test_the_choices_of_the_loss_are_those_that_exist():
    fields = {name: set(typing.get_args(learning.Loss.model_fields[name].annotation))
              for name in learning.Loss.model_fields}
    assert fields["objective"] == set(OBJECTIVES) and fields["advantage"] == set(ADVANTAGES)
    assert fields["aggregation"] == set(AGGREGATIONS)
    assert set(learning.Correction.model_fields) - {"preset",
                                                  "allow_uncorrected_fp8"} == set(CorrectionConfig._fields)
    assert learning.AdaptiveSection().model_dump() == AdaptiveMix()._asdict()
    assert set(learning.RejectionSection.model_fields) == set(Rejection._fields)
    assert set(ObjectiveConfig._fields) - {"kind"} <= set(fields)


CORRECTIONS = {
    "unknown preset": ('preset = "token_tsi"',
            'correction.preset "token_tsi" does not exist (did you mean "token_tis"?)'),
    "reversed": ('action = "mask"\nlower = 3.0', "bounds [3.0, 2.0] are reversed"),
    "negative": ("upper = -1.0", "bounds [0.0, -1.0] are reversed"),
    "rejection reversed": (
        'rejections = [{level = "sequence", statistic = "k2", lower = 2.0, upper = 1.0}]',
        "rejection sequence_mean_k2: bounds",
    ),
    "rejection misspelt": ('rejections = [{level = "sequence", statistic = "k4"}]', '"k4" is not a choice'),
    "twice the same rule": (
        'rejections = [{level = "token", statistic = "k1", upper = 1.0}, {level = "token", statistic = "k1", lower = 0.0}]',
        "two rejections by token_k1: join their bounds",
    ),
    "nothing to mix": ('preset = "none"\nadaptive = {onset = 0.1}',
                       'adaptive has no effect with weight "none"'),
    "no FP8 backward": (
        '[precision]\ngradients = "e5m2"',
        'precision.gradients = "e5m2" has no effect under precision.recipe "bf16"',
    ),
    "no FP8 forward": ('[precision]\nsaved_activations = "fp8"',
                       'precision.saved_activations = "fp8" has no effect'),
    "no FP8 wgrad": ('[precision]\nwgrad_inputs = "128x128"',
                     'precision.wgrad_inputs = "128x128" has no effect'),
    "no FP8 product": ('[precision]\nproducts = "float32"', 'precision.products = "float32" has no effect'),
    "nothing to bound": ('preset = "none"\nupper = 3.0', 'upper: no effect with weight "none"'),
    "nothing to normalise": ('preset = "none"\nbatch_normalize = true', 'no effect with weight "none"'),
    "no effect": ("lower = 0.5", 'has no effect under action "truncate"'),
    "two policies only": ('preset = "verl/bypass_pg_is"', 'set loss.old_policy = "rollout"'),
    "batch": ('batch_normalize = true\n[loss]\nold_policy = "rollout"\nobjective = "reinforce"',
              "looks at the whole batch"),
    "twice": ('[loss]\nold_policy = "rollout"', "would weigh by it again"),
    "whole batch, unscored": ('batch_normalize = true\n[loss]\nold_policy = "current"',
                              "looks at the whole batch"),
    "two policies, not one": ('preset = "verl/bypass_pg_is"\n[loss]\nold_policy = "current"',
                              'set loss.old_policy = "rollout"'),
    "denominator": (
        'preset = "geometric_mask"\n[loss]\nold_policy = "rollout"', 'set correction.denominator = "all"',
    ),
    "rejection without bounds": ('rejections = [{level = "sequence", statistic = "k1"}]',
                                 "sequence_mean_k1 has no bounds"),
    "rejects all": ('rejections = [{level = "token", statistic = "mult_error", upper = 0.5}]',
                    "upper = 0.5 rejects all"),
    "idle aggregation": (
        'rejections = [{level = "token", statistic = "k2", aggregation = "max", upper = 1.0}]',
        'no effect at level "token"',
    ),
    "foreign parameter": ("[loss]\ntau_positive = 1.0",
                          'loss.objective: tau_positive = 1.0 means nothing to the objective "ppo'),
    "nothing to calibrate": ("[loss]\ncalibrate_clip_every = 5", "has no FP8 forward to compare with"),
}


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_a_correction_or_objective_that_cannot_be_is_refused(kind, write):
    text, says = CORRECTIONS[kind]
    assert says in (said := refusal(write(GOOD + "\n[correction]\n" + text))), said


@pytest.mark.parametrize("filtered", ["--rollout.top_p 0.95", "--rollout.top_k 20"])
def test_a_filtered_engine_goes_with_every_correction(filtered, write):
    """Both sides normalise over the tokens that the filter left (tests/unit/rollout/test_jax_engine.py)."""
    for preset in ("token_tis", "sequence_tis", "areal/sequence_clamp", "geometric_mask", "vexact"):
        load_config(write(GOOD),
                    [*filtered.split(), "--correction.preset", preset, "--loss.opsm_delta", "1e-4"])


def test_pass_at_k_of_all_samples_teaches_nothing(write):
    words = ["--rollout.samples_per_prompt", "4", "--loss.advantage", "pass_at_k", "--loss.pass_at_k"]
    assert load_config(write(GOOD), [*words, "3"]).loss.pass_at_k == 3
    assert "choose k from 1 to 3" in refusal(write(GOOD), *words, "4")


def test_an_update_is_its_own_old_policy_where_a_step_has_one(write):
    options = ["--loss.old_policy", "current", "--train.updates_per_step"]
    assert load_config(write(GOOD), [*options, "1"]).loss.old_policy == "current"
    with pytest.raises(ConfigError, match="measured by itself.*\n.*train.updates_per_step = 1"):
        load_config(write(GOOD), [*options, "2"])


def test_a_preset_can_be_changed_field_by_field(write):
    text = GOOD + '\n[correction]\npreset = "skyrl/geo_mask"\nweight = "token"\nupper = inf\n'
    cfg = load_config(write(text), ["--correction.denominator", "kept"])
    preset = get_preset("skyrl/geo_mask")
    assert cfg.correction.resolve() == preset._replace(weight="token", upper=float("inf"), denominator="kept")
    assert load_config(write(dump_config(cfg))) == cfg
    own = GOOD + '\n[correction]\nrejections = [{level = "token", statistic = "k3", upper = 0.5}]\nadaptive = {onset = 0.1}\n'
    cfg = load_config(write(own))
    assert cfg.correction.resolve().rejections == (Rejection("token", "k3", upper=0.5),)
    assert cfg.correction.resolve().adaptive == AdaptiveMix(onset=0.1)
    assert load_config(write(dump_config(cfg))) == cfg


IDLE = {  # words of the command line -> (what is refused, what is proposed)
    "--rollout.gpu_memory_utilization 0.3 --rollout.kv_cache_gib 4": (
        'rollout.gpu_memory_utilization, rollout.kv_cache_gib: no effect with rollout.engine = "jax"',
        "leave it out (--rollout.gpu_memory_utilization=0.4 --rollout.kv_cache_gib=)"),
    "--rollout.enforce_eager true --rollout.fp8_kernel emulated": (
        "rollout.fp8_kernel, rollout.enforce_eager: no effect", "--rollout.enforce_eager=false"),
    "--rollout.attention triton": ("rollout.attention: no effect", "--rollout.attention=auto"),
    "--run.samples_per_step 0 --run.samples_top_k 4": (
        "run.samples_top_k: no effect with run.samples_per_step = 0", "--run.samples_top_k=0"),
    "--rollout.kv_scale_decay 0.5": ('rollout.kv_scale_decay: no effect with rollout.kv_scales = "one"',
                                     "calibrated"),
    "--loss.overlong_penalty 0.5": ("loss.overlong_penalty: no effect with loss.overlong_buffer = 0",
                                    "set loss.overlong_buffer"),
    "--loss.kl k1": ("loss.kl: no effect with loss.kl_coef = 0", "set loss.kl_coef"),
    "--loss.unbiased_kl true": ("loss.unbiased_kl: no effect with loss.kl_coef = 0", "set loss.kl_coef"),
    "--loss.unbiased_kl true --loss.kl_coef 0.1 --loss.kl k3": (
        "its gradient is not the KL's", 'set loss.kl = "k3+"'),
    "--monitor.precision_every 5": ('monitor.precision_every: no effect with precision.recipe = "bf16"',
                                    "FP8 recipe or cache"),
    "--task.reward_workers 2": ("task.reward_workers: no effect with a scorer that runs in the learner",
                                "set task.scorer"),
    "--task.chat true --task.date 2026-13-01": ("task.date: ", "month must be in 1..12"),
    "--task.date 2026-01-31": ("task.date: no effect with task.chat = false", "set task.chat"),
    "--rollout.samples_per_prompt 1 --loss.advantage reinforce_pp --loss.dynamic_sampling_rounds 2": (
        "of a group of one no rewards differ", "set it to 1"),
    "--loss.advantage pass_at_k --loss.pass_at_k 1 --loss.overlong_buffer 1": (
        "are 0 or 1, not shaped for length", "set it to 0"),
    "--precision.embedded_activations high": ("no effect with precision.recipe", "an FP8 recipe"),
    "--rollout.engine vllm --precision.recipe fp8_unified --precision.embedded_activations high": (
        'precision.embedded_activations: no effect with rollout.engine = "vllm"',
        'set rollout.engine = "jax"'),
    "--moe.measure_every 3 --moe.replay R2": ('moe.measure_every: no effect with moe.replay = "R2"',
                                              'set moe.replay = "R3"'),
    "--moe.measure_every 3 --moe.replay R3 --loss.old_policy rollout --correction.preset none": (
        'moe.measure_every: no effect with loss.old_policy = "rollout"', "recomputed"),
    "--rollout.engine vllm --rollout.temperature 5": ("rollout.temperature = 5: vLLM samples at 0.01 to 2",
                                                      "set one of these"),
}


@pytest.mark.parametrize("words", IDLE)
def test_what_would_have_no_effect_is_refused_with_the_way_out(words, write):
    said = refusal(write(GOOD), *words.split())
    assert all(text in said for text in IDLE[words]), said
    defaults = re.findall(r"(--[\w.]+=\S*?)[ )]", said)  # what is proposed is accepted
    load_config(write(GOOD), [*words.split(), *defaults] if defaults else [])


def test_the_temperatures_are_those_of_vllm():
    from bridges.engines import vllm_engine

    assert VLLM_TEMPERATURES == (vllm_engine.COOLEST, vllm_engine.HOTTEST)


def test_config_errors_load_neither_jax_nor_torch(write):
    code = (
        "import sys; from jaxfp8rl.config.toml import load_config\n"
        "try: load_config(sys.argv[1], ['--optim.lrr', '1'])\n"
        "except ValueError: pass\n"
        "sys.exit(bool({'jax', 'torch', 'transformers'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code, write(GOOD)], check=True)
