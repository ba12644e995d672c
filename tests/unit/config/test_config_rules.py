"""Settings that do not go together are refused, with the way out."""

from __future__ import annotations

import re
import tomllib
import typing

import pytest
from config_files import GOOD, refusal

from jaxfp8rl.config import correction, learning
from jaxfp8rl.config.overrides import apply, parse_overrides
from jaxfp8rl.config.rules import RULES
from jaxfp8rl.config.sampling_rules import COOLEST, HOTTEST
from jaxfp8rl.config.schema import SECTIONS, Config
from jaxfp8rl.config.toml import dump_config, load_config
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.losses.advantages import ADVANTAGES
from jaxfp8rl.losses.aggregation import AGGREGATIONS
from jaxfp8rl.losses.correction import AdaptiveMix, CorrectionConfig, Rejection
from jaxfp8rl.losses.objectives import OBJECTIVES, ObjectiveConfig
from jaxfp8rl.losses.presets import get_preset


def test_the_choices_of_the_loss_are_those_that_exist():
    fields = {name: set(typing.get_args(learning.Loss.model_fields[name].annotation))
              for name in learning.Loss.model_fields}
    assert fields["objective"] == set(OBJECTIVES) and fields["advantage"] == set(ADVANTAGES)
    assert fields["aggregation"] == set(AGGREGATIONS)
    assert set(correction.Correction.model_fields) - {"preset",
                                                  "allow_uncorrected_fp8"} == set(CorrectionConfig._fields)
    assert correction.AdaptiveSection().model_dump() == AdaptiveMix()._asdict()
    assert set(correction.RejectionSection.model_fields) == set(Rejection._fields)
    assert set(ObjectiveConfig._fields) - {"kind"} <= set(fields)


CORRECTIONS = {
    "unknown preset": ('preset = "token_tsi"',
            'correction.preset "token_tsi" does not exist (did you mean "token_tis"?)'),
    "reversed": ('action = "mask"\nlower = 3.0',
                 "correction.lower, correction.upper = [3.0, 2.0] are reversed"),
    "negative": ("upper = -1.0", "[0.0, -1.0] must be positive"),
    "rejection reversed": (
        'rejections = [{level = "sequence", statistic = "k2", lower = 2.0, upper = 1.0}]',
        "rejection sequence_mean_k2: bounds",
    ),
    "rejection misspelt": ('rejections = [{level = "sequence", statistic = "k4"}]', '"k4" is not a choice'),
    "twice the same rule": (
        'rejections = [{level = "token", statistic = "k1", upper = 1.0}, {level = "token", statistic = '
        '"k1", lower = 0.0}]',
        "two rejections by token_k1: join their bounds",
    ),
    "nothing to mix": ('preset = "none"\nadaptive = {onset = 0.1}',
                       'adaptive has no effect with weight "none"'),
    "no FP8 backward": (
        '[precision]\ngradients = "e5m2"',
        'precision.gradients has no effect with precision.recipe = "bf16"',
    ),
    "no FP8 forward": ('[precision]\nsaved_activations = "fp8"',
                       'precision.saved_activations has no effect'),
    "no FP8 wgrad": ('[precision]\nwgrad_inputs = "128x128"',
                     'precision.wgrad_inputs has no effect'),
    "no FP8 product": ('[precision]\nproducts = "float32"', 'precision.products has no effect'),
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
                          'loss.objective: tau_positive = 1.0 has no effect on the objective "ppo'),
    "nothing to calibrate": ("[loss]\ncalibrate_clip_every = 5", "has no FP8 forward to compare with"),
}


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_a_correction_or_objective_that_cannot_be_is_refused(kind, write):
    text, says = CORRECTIONS[kind]
    assert says in (said := refusal(write(GOOD + "\n[correction]\n" + text))), said


@pytest.mark.parametrize("filtered", ["--rollout.top_p 0.95", "--rollout.top_k 20"])
def test_a_filtered_engine_goes_with_every_correction(filtered, write):
    """Both sides normalise over the tokens that the filter left
    (tests/unit/rollout/test_embedded_rollout.py).
    """
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
    own = GOOD + ('\n[correction]\nrejections = [{level = "token", statistic = "k3", upper = 0.5}]\n'
                  'adaptive = {onset = 0.1}\n')
    cfg = load_config(write(own))
    assert cfg.correction.resolve().rejections == (Rejection("token", "k3", upper=0.5),)
    assert cfg.correction.resolve().adaptive == AdaptiveMix(onset=0.1)
    assert load_config(write(dump_config(cfg))) == cfg


IDLE = {  # words of the command line -> (what is refused, what is proposed)
    "--rollout.gpu_memory_utilization 0.3": (
        'rollout.gpu_memory_utilization has no effect with rollout.engine = "jax"',
        "leave it out (--rollout.gpu_memory_utilization=0.4)"),
    "--rollout.enforce_eager true --rollout.fp8_kernel emulated": (
        "rollout.fp8_kernel, rollout.enforce_eager have no effect", "--rollout.enforce_eager=false"),
    "--rollout.attention triton": ("rollout.attention has no effect", "--rollout.attention=auto"),
    "--run.samples_per_step 0 --run.samples_top_k 4": (
        "run.samples_top_k has no effect with run.samples_per_step = 0", "--run.samples_top_k=0"),
    "--rollout.kv_scale_decay 0.5": ('rollout.kv_scale_decay has no effect with rollout.kv_scales = "one"',
                                     "calibrated"),
    "--loss.overlong_penalty 0.5": ("loss.overlong_penalty has no effect with loss.overlong_buffer = 0",
                                    "set loss.overlong_buffer"),
    "--loss.kl k1": ("loss.kl has no effect with loss.kl_coef = 0", "set loss.kl_coef"),
    "--loss.unbiased_kl true": ("loss.unbiased_kl has no effect with loss.kl_coef = 0", "set loss.kl_coef"),
    "--loss.unbiased_kl true --loss.kl_coef 0.1 --loss.kl k3": (
        "its gradient is not the KL's", 'set loss.kl = "k3+"'),
    "--monitor.precision_every 5": ('monitor.precision_every has no effect with precision.recipe = "bf16"',
                                    "FP8 recipe or cache"),
    "--task.reward_workers 2": ("task.reward_workers has no effect with a scorer that runs in the learner",
                                "set task.scorer"),
    "--task.chat true --task.date 2026-13-01": ("task.date: ", "month must be in 1..12"),
    "--task.date 2026-01-31": ("task.date has no effect with task.chat = false", "set task.chat"),
    "--rollout.samples_per_prompt 1 --loss.advantage reinforce_pp --loss.dynamic_sampling_rounds 2": (
        "of a group of one no rewards differ", "set it to 1"),
    "--loss.advantage pass_at_k --loss.pass_at_k 1 --loss.overlong_buffer 1": (
        "are 0 or 1, not shaped for length", "set it to 0"),
    "--precision.embedded_activations high": ("no effect with precision.recipe", "an FP8 recipe"),
    "--rollout.engine vllm --precision.recipe fp8_unified --precision.embedded_activations high": (
        'precision.embedded_activations has no effect with rollout.engine = "vllm"',
        'set rollout.engine = "jax"'),
    "--moe.measure_every 3 --moe.replay R2": ('moe.measure_every has no effect with moe.replay = "R2"',
                                              'set moe.replay = "R3"'),
    "--moe.measure_every 3 --moe.replay R3 --loss.old_policy rollout --correction.preset none": (
        'moe.measure_every has no effect with loss.old_policy = "rollout"', "recomputed"),
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
    from bridges.inside_vllm import sampling

    assert (COOLEST, HOTTEST) == (sampling.COOLEST, sampling.HOTTEST)


SERVED = "--rollout.engine served "
FP8, ROWS = "--precision.recipe fp8_unified ", "--task.kind file --task.path x "
ONE_COPY = "--rollout.one_copy true --rollout.engine vllm --rollout.publish in_place "
CALIBRATED, CLIPS = "--rollout.kv_cache fp8 --rollout.kv_scales calibrated ", "--loss.calibrate_clip_every 5 "
UNSCORED = "--loss.old_policy rollout --correction.preset none "
EXACT = "--precision.exact engine "
AHEAD = "--rollout.in_flight true "
GUESS, TOOLS = "--task.kind environment --task.name guess ", "--environment.tools calculator "
TAUGHT = "--loss.advantage none --loss.kl_coef 1 "
NOISE = "--run.steps 20 --noise.start 0.02 --noise.end 0.01 "
LORA, DRAFTS = "--lora.rank 4 ", "--selection.explore_samples 8 "
BROKEN = [  # for every rule, in their order, a config that it is the first to refuse
    f"--run.dir {__file__}/run", "--precision.recipe fp9", "--precision.recipe fp16",
    "--precision.gradients e5m2",
    "--precision.products float32", "--precision.saved_activations fp8", "--precision.wgrad_inputs 128x128",
    # the loss
    "--correction.preset token_tsi", "--loss.pass_at_k 2", "--loss.horizon 8", "--loss.tau_positive 1.0",
    "--loss.unbiased_kl true --loss.kl_coef 0.1 --loss.kl k3",
    "--loss.kl_baseline true --loss.kl_coef 0.1 --loss.kl k3_score",
    "--loss.old_policy current --loss.objective clip_cov", "--loss.old_policy current --loss.sampled_by old",
    "--rollout.samples_per_prompt 1",
    "--rollout.samples_per_prompt 1 --loss.advantage reinforce_pp --loss.dynamic_sampling_rounds 2",
    "--loss.advantage pass_at_k --loss.pass_at_k 1 --loss.overlong_buffer 1",
    "--loss.advantage pass_at_k --loss.pass_at_k 1 --loss.turn_advantages returns",
    "--selection.replay pairs --selection.keep 1",
    "--selection.replay pairs --rollout.samples_per_prompt 3", "--selection.keep 3",
    "--selection.keep 1 --selection.baseline kept",
    "--selection.keep 2 --selection.baseline kept --loss.advantage pass_at_k --loss.pass_at_k 2 "
    "--rollout.samples_per_prompt 4",
    "--selection.replay pairs --selection.weights inverse --loss.entropy_coef 0.1",
    "--loss.kl_coef 1 --reference.path x --reference.recipe fp8 --precision.recipe fp16 "
    "--precision.compute_dtype float16 --precision.weight_dtype float16",
    "--loss.advantage none", TAUGHT + "--loss.dynamic_sampling_rounds 2", TAUGHT + "--selection.keep 2",
    TAUGHT + "--loss.turn_advantages returns", TAUGHT,
    DRAFTS + "--rollout.samples_per_prompt 9", DRAFTS + "--rollout.engine vllm", DRAFTS + FP8, DRAFTS + EXACT,
    DRAFTS + "--task.kind environment", DRAFTS + "--rollout.max_staleness 1",
    DRAFTS + "--rollout.speculation head",
    DRAFTS + LORA, DRAFTS + "--selection.keep 2",
    FP8 + "--correction.preset none", "--correction.preset verl/bypass_pg_is", "--loss.objective prime_rl",
    "--loss.old_policy current --train.updates_per_step 2", "--loss.old_policy rollout",
    "--loss.old_policy current --correction.batch_normalize true",
    "--loss.old_policy current --correction.preset geometric_mask",
    CLIPS + "--loss.objective gspo", CLIPS, CLIPS + FP8,
    CLIPS + FP8 + "--train.updates_per_step 2 --loss.calibrate_clip_start [0.2]",
    CLIPS + FP8 + UNSCORED + "--train.updates_per_step 2", "--loss.overlong_buffer 9",
    # model, environment, batch, optimizer
    "--model.path x", "--model.tokenizer=",
    "--task.kind environment",
    "--task.kind environment --task.name verifiers",
    "--task.kind environment --task.name verifiers --task.chat true --task.system_prompt x",
    GUESS + TOOLS, TOOLS, TOOLS + "--task.chat true --task.chat_template_kwargs.tools []",
    '--environment.tools ["calculator","calculator"] --task.chat true', GUESS + AHEAD,
    GUESS + "--environment.lanes 2 --rollout.engine vllm", GUESS + "--train.processes 2",
    GUESS + "--moe.replay R3", GUESS + "--sft.steps 2", EXACT + "--rollout.engine vllm",
    EXACT + "--precision.recipe fp8_rollout", EXACT + "--rollout.kv_cache fp8", EXACT + "--rollout.top_k 5",
    EXACT + "--train.tensor 2", "--train.row_tokens 20", "--train.updates_per_step 3",
    "--train.shared_prefix 8 " + EXACT, "--train.shared_prefix 8 --moe.balance_coef 0.1",
    "--optim.warmup_steps 3", "--optim.warmup_steps 1 --optim.total_steps 1 --optim.schedule cosine",
    "--optim.total_steps 2", "--optim.schedule linear --optim.total_steps 2 --optim.min_lr_ratio 0.0",
    "--sft.steps 2 --sft.warmup_steps 2", "--optim.master bfloat16 --precision.weight_dtype float32",
    # engines, processes, devices
    "--rollout.kv_scales calibrated", CALIBRATED + UNSCORED,
    LORA + SERVED, "--lora.rank 513 --rollout.engine vllm",
    LORA + "--rollout.engine vllm --lora.dtype float32",
    LORA + "--sft.steps 2", LORA + EXACT + FP8,
    LORA + CLIPS + FP8 + "--train.updates_per_step 2",
    LORA + FP8 + "--monitor.precision_every 3", LORA + "--moe.freeze_router true",
    LORA + "--moe.balance_coef 0.1",
    LORA + "--train.tensor 2", LORA + "--train.processes 2", LORA + ONE_COPY + FP8,
    LORA + "--lora.dtype float32 --optim.master bfloat16", LORA + '--lora.targets ["q_proj","q_proj"]',
    "--noise.start 0.02", NOISE + "--noise.end 0.03", NOISE + "--noise.stages 30",
    NOISE + "--noise.unit ulp --precision.compute_dtype float32 --precision.weight_dtype float32",
    NOISE + "--noise.unit ulp", NOISE + "--precision.exact engine", NOISE + AHEAD,
    NOISE + "--correction.preset none",
    "--rollout.one_copy true", ONE_COPY,
    ONE_COPY + FP8 + "--optim.master float16", ONE_COPY + FP8 + "--train.updates_per_step 2",
    ONE_COPY + FP8 + "--rollout.sleep keep_weights", ONE_COPY + FP8 + CALIBRATED,
    "--train.processes 2 --rollout.max_staleness 1", "--train.processes 2 " + AHEAD,
    "--train.processes 2 --moe.replay R3",
    "--train.processes 2 --train.updates_per_step 2 " + CLIPS + FP8, "--train.processes 2 --train.data 3",
    "--train.data 2 " + ONE_COPY + FP8, "--train.fsdp 2 --monitor.precision_every 3",
    "--train.tensor 2 " + CALIBRATED,
    "--train.data 2 --optim.offload true", "--train.data 2 --optim.gradient_sums bfloat16",
    "--train.data 2 --train.rows_per_microbatch 7",
    "--rollout.max_staleness 1 --rollout.sleep keep_weights " + SERVED,
    "--rollout.max_staleness 1 " + SERVED, AHEAD + "--rollout.engine vllm",
    AHEAD + "--rollout.engine vllm --rollout.oversample 2.0 --rollout.sleep keep_weights",
    AHEAD + "--rollout.engine vllm --rollout.max_staleness 1 --rollout.speculation suffix",
    AHEAD + "--rollout.engine vllm --rollout.max_staleness 1 --moe.replay R3",
    AHEAD + "--rollout.engine vllm --rollout.max_staleness 1 " + CALIBRATED, "--rollout.sleep keep_weights",
    "--rollout.engine vllm --rollout.min_num_seqs 8",
    "--rollout.engines 2",
    SERVED + "--rollout.publish reload", SERVED + "--rollout.engine_urls http://x:1",
    SERVED + "--rollout.engine_urls http://x:1 --rollout.engine_token_file t --rollout.engines 2",
    SERVED + "--rollout.link nccl", SERVED + "--rollout.engines 2 --rollout.server_gpus [0,1,2]",
    SERVED + "--rollout.kv_cache_gib auto",
    "--rollout.engine vllm --rollout.temperature 5.0",
    # settings that nothing would read
    "--rollout.enforce_eager true", "--rollout.admit cache", SERVED + "--rollout.admit cache --moe.replay R3",
    "--rollout.engine vllm --rollout.enforce_eager true --rollout.torch_compile false",
    "--rollout.engine vllm --precision.embedded_activations high " + FP8,
    "--precision.embedded_activations high", "--rollout.speculation head --rollout.engine vllm",
    "--rollout.speculation head --precision.recipe fp16 --precision.compute_dtype float16 "
    "--precision.weight_dtype float16",
    "--rollout.speculation head --train.data 2", "--rollout.draft_tokens 2", "--rollout.draft_lr 0.1",
    "--rollout.kv_scale_decay 0.5", "--rollout.recompute_kv true",
    "--loss.calibrate_clip_newest 0.5", "--loss.turn_discount 0.5", "--loss.overlong_penalty 0.5",
    "--loss.kl k1", "--loss.kl_weight_cap 3.0", "--loss.sampled_by old",
    "--selection.by random", "--selection.baseline kept", "--selection.explore_tokens 9",
    "--selection.keep 2 --selection.by random --selection.explore 0.1", "--selection.copies 3",
    "--selection.weights inverse",
    "--reference.path x", "--loss.kl_coef 1 --reference.recipe fp8",
    TAUGHT + "--reference.path x --loss.overlong_buffer 1",
    "--lora.alpha 8.0", "--noise.unit ulp", "--moe.measure_every 3",
    "--monitor.precision_every 5", "--task.reward_workers 2", "--task.think_tags []",
    "--task.date 2026-01-31",
    "--environment.max_turns 3", "--correction.by_turn true --correction.preset nemo/gspo",
    "--loss.turn_advantages returns", "--environment.tool_calls llama",
    GUESS + "--curriculum.by environment", "--curriculum.pace 0.2",
    "--run.samples_per_step 0 --run.samples_top_k 4", "--moe.measure_every 3 --moe.replay R3 " + UNSCORED,
    # the task
    "--task.kind reasoning_gym", "--task.kind file", "--task.scorer exact",
    ROWS + '--task.scorer exact --task.rewards [{name="a",scorer="exact"}]', ROWS + "--task.scorer exakt",
    ROWS + "--task.scorer_folder x", ROWS + '--task.think_tags ["<a>"]',
]


@pytest.mark.parametrize("settings, message, next_step", [
    ({"link": "nccl"}, 'rollout.link has no effect with rollout.engine = "jax"',
     'set rollout.engine = "served"'),
    ({"engine": "vllm", "server_gpus": "[1]"}, "rollout.server_gpus has no effect",
     'set rollout.engine = "served"'),
    ({"sleep": "drop_weights"}, "the embedded engine has none", 'set rollout.engine = "vllm"'),
    ({"engine": "served", "max_staleness": "1", "sleep": "keep_weights"}, "stops the engine while",
     'set rollout.sleep = "off"'),
    ({"engine": "served", "max_staleness": "1"}, "rollout.restarts = 3 gives a new engine the last weights",
     "rollout.restarts = 0"),
    ({"engine": "served", "engine_urls": "http://127.0.0.1:1"}, "rollout.engine_token_file go together",
     "give both"),
    ({"engine": "served", "engine_urls": "http://127.0.0.1:1", "engine_token_file": "t",
      "enforce_eager": "true"},
     "rollout.enforce_eager: the server at http://127.0.0.1:1 runs already",
     "give it to the server when that is started"),
], ids=["a link alone", "another engine's", "no sleep", "asleep while it samples", "overwritten weights",
        "half an address", "the server's own"])
def test_settings_of_served_engines_that_would_be_ignored_are_refused(settings, message, next_step):
    with pytest.raises(ConfigError) as e:
        load_config("demo", [w for k, v in settings.items() for w in (f"--rollout.{k}", v)])
    assert message in str(e.value) and next_step in e.value.next_step


@pytest.mark.parametrize("key, now",
                         [("server_url", "engine_urls"), ("server_token_file", "engine_token_file")])
def test_a_setting_that_was_ours_is_told_with_its_name_now(key, now):
    with pytest.raises(ConfigError, match=f'"{key}" is rollout.{now} now'):
        load_config("demo", [f"--rollout.{key}", "x"])
    with pytest.raises(ConfigError, match='"remote" is not a choice: here it is rollout.engine = "served"'):
        load_config("demo", ["--rollout.engine", "remote"])


def first_broken(words: str) -> tuple[int, ConfigError]:
    """The place of the rule that refuses GOOD with these overrides, and what it says."""
    data = tomllib.loads(GOOD)
    for override in parse_overrides(words.split()):
        apply(override, data)
    cfg = Config.model_validate(data)
    for place, rule in enumerate(RULES):
        try:
            rule(cfg)
        except ConfigError as e:
            return place, e
    raise AssertionError(f"{words}: no rule refuses it")


def test_every_rule_refuses_a_config_and_speaks_of_settings_that_there_are():
    found = [first_broken(words) for words in BROKEN]
    assert [place for place, _ in found] == list(range(len(RULES)))
    known = {f"{section}.{key}" for section, model in SECTIONS.items() for key in model.model_fields}
    for _, error in found:
        text = str(error).replace(__file__, "")
        assert set(re.findall(rf"(?<!/)\b(?:{'|'.join(SECTIONS)})\.[a-z][a-z_0-9]*", text)) <= known, text
