"""Combinations of settings that cannot work, or that would be ignored: refused before anything loads."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from jaxfp8rl.config.learning import Loss
from jaxfp8rl.config.sampling import Rollout
from jaxfp8rl.config.schema import Config
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.precision.recipe import Recipe, get_recipe
from jaxfp8rl.verifiers.scorers import check_scorer_name

if TYPE_CHECKING:  # it loads jax, which a misspelt key need not wait for
    from jaxfp8rl.losses.correction import CorrectionConfig

REMOTE_SETTINGS = ("link", "engines", "server_gpus", "server_url", "server_token_file", "restarts")
SERVER_SETTINGS = (
    "engines", "server_gpus", "max_num_seqs", "gpu_memory_utilization", "kv_cache_gib", "fp8_kernel",
    "attention", "publish",
    "enforce_eager", "sleep", "restarts",
)
VLLM_SETTINGS = ("gpu_memory_utilization", "kv_cache_gib", "fp8_kernel", "attention", "enforce_eager")
VLLM_TEMPERATURES = 0.01, 2.0  # a lower one vLLM raises without saying so, a higher one it refuses
DIGITS = {"float32": 24, "float16": 11, "bfloat16": 8}  # the leading one counted


def check(cfg: Config) -> Config:
    """Refuse combinations that cannot work, before anything loads. Raises ConfigError; returns `cfg`."""
    if file := next((p for p in (Path(cfg.run.dir), *Path(cfg.run.dir).parents) if os.path.isfile(p)), None):
        raise ConfigError(f"run.dir: {file} is a file", "choose another --run.dir")
    recipe = get_recipe(cfg.precision.recipe)
    _check_float_types(cfg, recipe)
    _check_fp8_formats(cfg, recipe)
    _check_loss(cfg, recipe)
    if bool(cfg.model.path) == bool(cfg.model.config):
        raise ConfigError(
            "model: give either `path` (an HF folder) or `config` (a table), not both or neither",
            "--model.path FOLDER, and where the file has a [model.config] also --model.config '{}'")
    if not (cfg.model.tokenizer or cfg.model.path):
        raise ConfigError("model.tokenizer: a model from scratch needs one",
                          'an HF folder, or "chars:0123456789+="')
    if cfg.max_model_len > cfg.train.row_tokens:
        raise ConfigError(
            f"train.row_tokens = {cfg.train.row_tokens} cannot hold task.max_prompt_tokens + rollout.max_new_tokens"
            f" = {cfg.max_model_len}",
            f"set train.row_tokens to at least {cfg.max_model_len}",
        )
    if cfg.rollout.prompts_per_step % cfg.train.updates_per_step:
        raise ConfigError(
            f"train.updates_per_step = {cfg.train.updates_per_step} does not divide rollout.prompts_per_step = "
            f"{cfg.rollout.prompts_per_step}: a group stays whole"
        )
    _check_schedules(cfg)
    _check_master(cfg)
    _check_kv_scales(cfg)
    _check_one_copy(cfg, recipe)
    _check_processes(cfg)
    _check_mesh(cfg)
    _check_lag(cfg)
    _check_server(cfg)
    _check_temperature(cfg)
    _check_idle(cfg, recipe)
    _check_task(cfg)
    return cfg


def _check_task(cfg: Config) -> None:
    task = cfg.task
    if task.kind == "reasoning_gym" and not task.name:
        raise ConfigError("task.name: reasoning_gym needs the name of a generator", 'for example "chain_sum"')
    if task.kind == "file" and not task.path:
        raise ConfigError("task.path: a file task needs a JSONL or Parquet file")
    if task.scorer and task.kind != "file":
        raise ConfigError(f'task.scorer: a task of kind "{task.kind}" scores by itself',
                          'leave it out, or give [[task.rewards]], of which one may be "generator"')
    if task.rewards and task.scorer:
        raise ConfigError("task.rewards with task.scorer: one of the two",
                          "name the scorer in one of [[task.rewards]]")
    if task.scorer:
        check_scorer_name(task.scorer)
    if task.scorer_folder and not task.has_own_scorer:
        raise ConfigError("task.scorer_folder: no scorer of your own is to be looked for",
                          "leave it out, or set task.scorer")
    if task.think_tags and (len(task.think_tags) != 2 or not all(task.think_tags)
                            or len(set(task.think_tags)) != 2):
        raise ConfigError(
            f"task.think_tags = {list(task.think_tags)}: what opens a block of thoughts, and what closes it",
            'for example ["<think>", "</think>"]; [] where there are none')


def _check_float_types(cfg: Config, recipe: Recipe) -> None:
    """float16 is a recipe of its own: its small gradients need the loss scaling, and both sides the same
    type."""
    used = (cfg.precision.compute_dtype, cfg.precision.weight_dtype)
    if recipe.dtype and used != (recipe.dtype,) * 2:
        raise ConfigError(
            f'precision.recipe "{recipe.name}" computes in {recipe.dtype}, but precision.compute_dtype and weight_dtype are '
            f"{used[0]} and {used[1]}",
            f'set both to "{recipe.dtype}"',
        )
    if "float16" in used and not recipe.dtype:
        raise ConfigError(f'precision.compute_dtype, weight_dtype: float16 is not for recipe "{recipe.name}"',
                          'set precision.recipe = "fp16"')


def _check_schedules(cfg: Config) -> None:
    """A warm-up ends before the run does, and a decay leaves something to learn with."""
    optim, updates = cfg.optim, cfg.updates
    ends = {f"the run has {updates} updates (run.steps * train.updates_per_step)": updates}
    if optim.total_steps:
        ends[f"optim.total_steps = {optim.total_steps}"] = optim.total_steps
    for what, end in ends.items():
        if optim.warmup_steps >= end:
            raise ConfigError(
                f"optim.warmup_steps = {optim.warmup_steps}: {what}, none of them after the warm-up",
                f"set optim.warmup_steps to {end - 1} at most")
    if optim.schedule == "constant":
        _refuse_given(cfg, "optim", ("total_steps", "min_lr_ratio"), 'optim.schedule = "constant"',
                      'optim.schedule = "cosine"')
    elif not optim.min_lr_ratio and (optim.total_steps or updates) < updates:
        raise ConfigError(
            f"optim.total_steps = {optim.total_steps} with optim.min_lr_ratio = 0: the learning rate is 0 from then to the last "
            f"update, {updates}",
            f"set optim.total_steps = {updates}, which changes the rate at once, or optim.min_lr_ratio above 0",
        )
    if cfg.sft.steps and cfg.sft.warmup_steps >= cfg.sft.steps:
        raise ConfigError(
            f"sft.warmup_steps = {cfg.sft.warmup_steps}: sft.steps = {cfg.sft.steps}, none of them after the warm-up",
            f"set sft.warmup_steps to {cfg.sft.steps - 1} at most",
        )


def _check_master(cfg: Config) -> None:
    """A policy has no more digits than the masters that it is the rounding of."""
    master, weights = cfg.optim.master, cfg.precision.weight_dtype
    if DIGITS[master] < DIGITS[weights]:
        raise ConfigError(
            f'optim.master = "{master}" keeps {DIGITS[master]} binary digits of a weight, precision.weight_dtype = "{weights}" '
            f"publishes {DIGITS[weights]}",
            f'set optim.master = "{weights}", or precision.weight_dtype = "{master}"',
        )


def _check_kv_scales(cfg: Config) -> None:
    if cfg.rollout.kv_scales == "one":
        return
    problem = None
    if cfg.rollout.kv_cache != "fp8":
        problem = f'rollout.kv_cache = "{cfg.rollout.kv_cache}" has none', 'set rollout.kv_cache = "fp8"'
    elif cfg.rollout.engine == "remote":
        problem = 'rollout.engine "remote" is not given any yet', 'set rollout.kv_scales = "one"'
    elif cfg.loss.old_policy != "recomputed":
        old = cfg.loss.old_policy
        problem = f'with loss.old_policy = "{old}" no scoring pass sees keys', 'set loss.old_policy = "recomputed"'
    if problem:
        raise ConfigError(f'rollout.kv_scales = "calibrated": {problem[0]}', problem[1])


def _check_processes(cfg: Config) -> None:
    """What is only there for a learner in one process, and as many devices in each."""
    t = cfg.train
    if t.processes == 1:
        return
    problems = {
        f"rollout.lag = {cfg.rollout.lag}": cfg.rollout.lag, 'moe.replay = "R3"': cfg.moe.replay == "R3",
        "loss.calibrate_clip_every": cfg.loss.calibrate_clip_every,
    }
    for name in (name for name, given in problems.items() if given):
        raise ConfigError(f"train.processes = {t.processes}: {name} is for a learner in one process",
                          f"leave out {name}")
    if t.devices % t.processes:
        raise ConfigError(
            f"train.processes = {t.processes} does not divide train.data * train.fsdp * train.tensor = {t.devices}: each has as "
            "many devices",
            "lay the learner over all devices of all processes: one a GPU, say",
        )


def _check_mesh(cfg: Config) -> None:
    """What is only there for a learner on one device, and whole rows on each."""
    t = cfg.train
    if t.devices == 1:
        return
    mesh = " * ".join(f"train.{axis} = {size}" for axis in ("data", "fsdp", "tensor")
                      if (size := getattr(t, axis)) > 1)
    problems = {
        "rollout.one_copy": cfg.rollout.one_copy, "monitor.precision_every": cfg.monitor.precision_every,
        'rollout.kv_scales = "calibrated"': cfg.rollout.kv_scales == "calibrated",
        "optim.offload": cfg.optim.offload,
    }
    for name in (name for name, given in problems.items() if given):
        raise ConfigError(f"{mesh}: {name} is for a learner on one device", f"leave out {name}")
    if (rows := t.rows_per_microbatch) % t.over_rows:
        raise ConfigError(
            f"{mesh.partition(' * train.tensor')[0]} does not divide train.rows_per_microbatch = {rows}: a device has whole rows",
            f"train.rows_per_microbatch = {-(-rows // t.over_rows) * t.over_rows}",
        )


def _check_lag(cfg: Config) -> None:
    """The engine samples while the learner learns: neither may need what the other has then."""
    r, problem = cfg.rollout, None
    if not r.lag:
        return
    if r.engine == "vllm":
        problem = 'engine "vllm" is in the learner\'s process, on its GPU', 'set rollout.engine = "remote", on GPUs of its own'
    elif r.sleep != "off":
        problem = f'rollout.sleep = "{r.sleep}" stops the engine while the learner learns', 'set rollout.sleep = "off"'
    elif r.engine == "remote" and r.restarts and not r.server_url:
        problem = f"rollout.restarts = {r.restarts} gives a new engine the last weights, which an update may have overwritten", (
            "set rollout.restarts = 0; a run goes on with --resume"
        )
    if problem:
        raise ConfigError(f"rollout.lag = 1: {problem[0]}", problem[1])


def _check_one_copy(cfg: Config, recipe: Recipe) -> None:
    if not cfg.rollout.one_copy:
        return
    r, problem = cfg.rollout, None
    if r.engine != "vllm" or r.publish != "in_place":
        problem = "it is for weights that are written into vLLM's tensors in this process", (
            'set rollout.engine = "vllm" and rollout.publish = "in_place"'
        )
    elif not recipe.forward_fp8:
        problem = f'the learner of recipe "{recipe.name}" has no FP8 forward', 'set precision.recipe = "fp8_unified"'
    elif cfg.optim.master == "float16":
        problem = 'what crosses is quantised from the masters, which optim.master = "float16" keeps with scales', (
            'set optim.master = "bfloat16" or "float32"'
        )
    elif cfg.train.updates_per_step > 1:
        problem = "nothing is published between the updates of a step, which would read it", "set train.updates_per_step = 1"
    elif r.sleep != "off":
        problem = f'rollout.sleep = "{r.sleep}" takes away what the learner reads', 'set rollout.sleep = "off"'
    elif r.kv_scales != "one":
        problem = "the first scales are calibrated before there are weights in the engine", 'set rollout.kv_scales = "one"'
    if problem:
        raise ConfigError(f"rollout.one_copy: {problem[0]}", problem[1])


def _check_server(cfg: Config) -> None:
    """Settings of another engine would be ignored, and a server that runs already has its own."""
    r, default = cfg.rollout, {name: field.default for name, field in Rollout.model_fields.items()}
    if r.engine == "jax" and r.sleep != "off":
        raise ConfigError(f'rollout.sleep = "{r.sleep}": the embedded engine has none',
                          'set rollout.engine = "vllm"')
    if r.engine != "remote":
        if given := [n for n in REMOTE_SETTINGS if getattr(r, n) != default[n]]:
            raise ConfigError(f'rollout.{given[0]} has no effect with rollout.engine = "{r.engine}"',
                              'leave it out, or set rollout.engine = "remote"')
    elif bool(r.server_url) != bool(r.server_token_file):
        raise ConfigError("rollout.server_url and rollout.server_token_file go together: both or neither",
                          "give both for a server that runs already, neither to have one started")
    elif r.server_url and (given := [n for n in SERVER_SETTINGS if getattr(r, n) != default[n]]):
        raise ConfigError(
            f"rollout.{given[0]}: the server at {r.server_url} runs already, with settings of its own",
            "leave it out, and give it to the server when that is started")
    elif r.link == "nccl" and not (r.server_gpus or r.server_url):
        raise ConfigError('rollout.link = "nccl" is between two GPUs', "set rollout.server_gpus = [1], say")
    elif len(r.server_gpus) % r.engines:
        raise ConfigError(
            f"rollout.engines = {r.engines} does not divide the {len(r.server_gpus)} rollout.server_gpus",
            "give each the same number of GPUs")
    elif r.link in ("cuda_ipc", "nccl") and r.publish == "reload":
        raise ConfigError(f'rollout.link = "{r.link}" is written in place, rollout.publish = "reload" is not',
                          'leave rollout.publish out, or set rollout.link = "file"')


def _check_temperature(cfg: Config) -> None:
    low, high = VLLM_TEMPERATURES
    if cfg.rollout.engine != "jax" and not low <= cfg.rollout.temperature <= high:
        raise ConfigError(
            f"rollout.temperature = {cfg.rollout.temperature:g}: vLLM samples at {low:g} to {high:g}",
            'set one of these, or rollout.engine = "jax"')


def _check_idle(cfg: Config, recipe: Recipe) -> None:
    """What nothing would read must not seem to have been tried."""
    r, loss, moe = cfg.rollout, cfg.loss, cfg.moe
    engine = f'rollout.engine = "{r.engine}"'
    if r.engine == "jax":
        _refuse_given(cfg, "rollout", VLLM_SETTINGS, engine, 'rollout.engine = "vllm"')
    else:
        _refuse_given(cfg, "precision", ("embedded_activations",), engine, 'rollout.engine = "jax"')
    if not recipe.engine_fp8:
        _refuse_given(cfg, "precision", ("embedded_activations",), f'precision.recipe = "{recipe.name}"',
                      "an FP8 recipe")
    if r.kv_scales == "one":
        _refuse_given(cfg, "rollout", ("kv_scale_decay",), 'rollout.kv_scales = "one"',
                      'rollout.kv_scales = "calibrated"')
    if not loss.overlong_buffer:
        _refuse_given(cfg, "loss", ("overlong_penalty",), "loss.overlong_buffer = 0", "loss.overlong_buffer")
    if not loss.kl_coef:
        _refuse_given(cfg, "loss", ("kl", "unbiased_kl"), "loss.kl_coef = 0", "loss.kl_coef")
    if not loss.unbiased_kl:
        _refuse_given(cfg, "loss", ("kl_weight_cap",), "loss.unbiased_kl = false", "loss.unbiased_kl")
        if loss.opsm_delta is None:
            nothing = "neither loss.unbiased_kl nor loss.opsm_delta"
            _refuse_given(cfg, "loss", ("sampled_by",), nothing, "one of them")
    if moe.replay != "R3":
        _refuse_given(cfg, "moe", ("measure_every",), f'moe.replay = "{moe.replay}"', 'moe.replay = "R3"')
    if not (recipe.engine_fp8 or r.kv_cache == "fp8"):
        _refuse_given(cfg, "monitor", ("precision_every",), f'precision.recipe = "{recipe.name}"',
                      "an FP8 recipe or cache")
    if set(cfg.task.scorers) == {"exact"} and cfg.task.kind != "reasoning_gym":
        scorer = "a scorer that runs in the learner's process"
        _refuse_given(cfg, "task", ("reward_workers", "reward_timeout_s"), scorer, "task.scorer")
    if cfg.task.kind == "arithmetic":
        _refuse_given(cfg, "task", ("think_tags",), 'task.kind = "arithmetic"',
                      'task.kind = "reasoning_gym" or "file"')
    if not cfg.task.chat and cfg.task.kind != "file":  # rows may be messages, which are rendered without it
        _refuse_given(cfg, "task", ("date", "chat_template_kwargs"), "task.chat = false", "task.chat")
    if not cfg.run.samples_per_step:
        _refuse_given(cfg, "run", ("samples_top_k",), "run.samples_per_step = 0", "run.samples_per_step")
    if loss.old_policy != "recomputed":
        _refuse_given(cfg, "moe", ("measure_every",), f'loss.old_policy = "{loss.old_policy}"',
                      'loss.old_policy = "recomputed"')


def _refuse_given(cfg: Config, section: str, keys: tuple[str, ...], where: str, instead: str) -> None:
    """Refuse those of `keys` that are not their defaults, and say how to give these."""
    values, fields = dict(getattr(cfg, section)), type(getattr(cfg, section)).model_fields
    if given := [key for key in keys if values[key] != fields[key].default]:
        defaults = " ".join(f"--{section}.{key}={_word(fields[key].default)}" for key in given)
        raise ConfigError(f"{', '.join(f'{section}.{key}' for key in given)}: no effect with {where}",
                          f"leave it out ({defaults}), or set {instead}")


def _word(value: object) -> str:
    """As an override has it; an empty one is an absent value."""
    value = list(value) if isinstance(value, tuple) else value
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _check_fp8_formats(cfg: Config, recipe: Recipe) -> None:
    """A format for a pass that the recipe does not run in FP8 would be ignored."""
    ignored = {
        f'precision.gradients = "{cfg.precision.gradients}"': cfg.precision.gradients != "e4m3"
        and not recipe.backward_fp8,
        f'precision.products = "{cfg.precision.products}"': cfg.precision.products != "auto" and not (
            recipe.forward_fp8 or (recipe.engine_fp8 and cfg.rollout.engine == "jax")
        ),
        'precision.saved_activations = "fp8"': cfg.precision.saved_activations == "fp8"
        and not recipe.forward_fp8,
        'precision.wgrad_inputs = "128x128"': cfg.precision.wgrad_inputs == "128x128"
        and not recipe.backward_fp8,
    }
    for what in (what for what, is_ignored in ignored.items() if is_ignored):
        raise ConfigError(f'{what} has no effect under precision.recipe "{recipe.name}"',
                          'leave it out, or set precision.recipe = "fp8_unified"')


def _check_loss(cfg: Config, recipe: Recipe) -> None:
    """Objective, advantage, correction and recipe must go together."""
    loss, correction = cfg.loss, cfg.correction.resolve()
    _check_objective(cfg)
    _check_groups(cfg)
    _check_policies(cfg, recipe)
    if loss.old_policy != "recomputed":
        _check_unscored(loss, correction, cfg.correction.preset)
    if loss.calibrate_clip_every:
        _check_calibration(cfg, recipe)
    if loss.overlong_buffer > cfg.rollout.max_new_tokens:
        raise ConfigError(
            f"loss.overlong_buffer = {loss.overlong_buffer} exceeds rollout.max_new_tokens = {cfg.rollout.max_new_tokens}"
        )


def _check_objective(cfg: Config) -> None:
    """Advantage, aggregation, objective and KL, each by itself and with pi_old."""
    from jaxfp8rl.losses.advantages import check_advantage
    from jaxfp8rl.losses.aggregation import check_aggregation
    from jaxfp8rl.losses.objectives import SELECTING, objective_parameters

    loss = cfg.loss
    with _about("loss.advantage"):
        check_advantage(loss.advantage, loss.pass_at_k, cfg.rollout.samples_per_prompt)
    with _about("loss.aggregation"):
        check_aggregation(loss.aggregation, loss.horizon)
    with _about("loss.objective"):
        objective_parameters(loss.objective_config)
    if loss.kl_coef and loss.unbiased_kl and not loss.kl.endswith(("+", "_score")):
        raise ConfigError(
            f'loss.unbiased_kl with loss.kl = "{loss.kl}": its gradient is not the KL\'s, whatever it is weighed by',
            f'set loss.kl = "{loss.kl}+", the same value with the gradient of k2',
        )
    if loss.old_policy == "current" and (loss.objective in SELECTING or loss.sampled_by == "old"):
        which = f'objective "{loss.objective}"' if loss.objective in SELECTING else 'sampled_by = "old"'
        raise ConfigError(
            f'loss.{which} needs pi_old before the update, which loss.old_policy = "current" does not have',
            'set loss.old_policy = "recomputed"',
        )


def _check_groups(cfg: Config) -> None:
    """The completions of a prompt are each other's baseline."""
    loss = cfg.loss
    if cfg.rollout.samples_per_prompt == 1 and loss.advantage != "reinforce_pp":
        raise ConfigError(
            f'rollout.samples_per_prompt = 1: a group of one has loss.advantage "{loss.advantage}" 0 and nothing is learned',
            'sample more, or set loss.advantage = "reinforce_pp"',
        )
    if cfg.rollout.samples_per_prompt == 1 and loss.dynamic_sampling_rounds > 1:
        raise ConfigError(
            f"loss.dynamic_sampling_rounds = {loss.dynamic_sampling_rounds}: of a group of one no rewards differ, so that every "
            "round is sampled and nothing is learned",
            "set it to 1, or rollout.samples_per_prompt higher",
        )
    if loss.advantage == "pass_at_k" and loss.overlong_buffer:
        raise ConfigError(
            'loss.overlong_buffer: rewards of loss.advantage = "pass_at_k" are 0 or 1, not shaped for length',
            "set it to 0, or choose another advantage")


def _check_policies(cfg: Config, recipe: Recipe) -> None:
    """The correction against the recipe, and both against the policies that loss.old_policy keeps apart."""
    from jaxfp8rl.losses.presets import two_policy_only

    loss, name = cfg.loss, cfg.correction.preset
    if is_uncorrected(cfg) and not cfg.correction.allow_uncorrected_fp8:
        raise ConfigError(
            f'precision.recipe "{recipe.name}" samples in FP8 with correction.preset = "{name}", which does nothing: runs '
            "collapse that way",
            'set correction.preset = "token_tis"; or, for a baseline that may, correction.allow_uncorrected_fp8 = true',
        )
    if loss.old_policy != "rollout" and (two_policy_only(name) or loss.objective == "prime_rl"):
        which = f'correction.preset "{name}"' if two_policy_only(name) else 'loss.objective "prime_rl"'
        raise ConfigError(f"{which} is made for two policies", 'set loss.old_policy = "rollout"')
    if loss.old_policy == "current" and cfg.train.updates_per_step > 1:
        raise ConfigError(
            f'loss.old_policy = "current" with train.updates_per_step = {cfg.train.updates_per_step}: an update would be '
            "measured by itself, not by the policy before the step, and nothing clipped",
            'set loss.old_policy = "recomputed", or train.updates_per_step = 1',
        )


def _check_calibration(cfg: Config, recipe: Recipe) -> None:
    problem = None
    if cfg.loss.objective not in ("ppo_clip", "cispo"):
        problem = f'loss.objective "{cfg.loss.objective}" does not clip the ratio of a token'
    elif not recipe.forward_fp8:
        problem = f'precision.recipe "{recipe.name}" has no FP8 forward to compare with'
    elif cfg.train.updates_per_step == 1:
        problem = "with train.updates_per_step = 1 every ratio is 1"
    elif cfg.loss.old_policy != "recomputed":
        problem = f'it compares ratios to the recomputed pi_old, not loss.old_policy = "{cfg.loss.old_policy}"'
    if problem:
        raise ConfigError(f"loss.calibrate_clip_every: nothing to calibrate, {problem}", "set it to 0")


@contextlib.contextmanager
def _about(key: str):
    """Name the key whose check failed."""
    try:
        yield
    except ConfigError as e:
        raise ConfigError(f"{key}: {e.message}", e.next_step) from e


def is_uncorrected(cfg: Config) -> bool:
    """Whether the engine samples in FP8 and nothing weighs what it sampled by its own probability."""
    return get_recipe(cfg.precision.recipe).engine_fp8 and not cfg.correction.resolve(
        ).corrects and not _carries_ratio(cfg.loss)


def _carries_ratio(loss: Loss) -> bool:
    """Whether the objective's own ratio is that to the engine."""
    return loss.old_policy == "rollout" and (loss.objective != "reinforce" or loss.ratio_cap is not None)


def _check_unscored(loss: Loss, correction: CorrectionConfig, name: str) -> None:
    """Without a scoring pass the correction is worked out a micro-batch at a time, from the policy as it is
    now."""
    if _carries_ratio(loss) and correction.weight != "none":
        raise ConfigError(
            f'loss.old_policy = "rollout" with loss.objective "{loss.objective}": its ratio is already that to the engine, and '
            f'correction.preset "{name}" would weigh by it again',
            'set correction.weight = "none", or loss.objective = "reinforce"',
        )
    if correction.needs_batch:
        raise ConfigError(
            f'correction.preset "{name}" looks at the whole batch (normalisation, M2PO or adaptive mixing), which '
            f'loss.old_policy = "{loss.old_policy}" never sees at once',
            'set loss.old_policy = "recomputed"',
        )
    if correction.rejections and correction.denominator == "kept":
        raise ConfigError(
            f'loss.old_policy = "{loss.old_policy}": what is rejected is known only after the denominators are',
            'set correction.denominator = "all"',
        )
