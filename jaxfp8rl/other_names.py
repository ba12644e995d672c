"""Names in verl, NeMo RL, TRL and transformers, SkyRL, slime, OpenRLHF, prime-rl and AReaL, with their
equivalents here. They are used for hints, `jaxfp8rl config --find` and the index of docs/coming_from.md. They
come from the sources of these frameworks and include older names. This module imports only the standard
library, so that a misspelt key is answered at once."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Our setting: the keys of other frameworks for it. A key is given by its last part, or by its last two parts
# if the last alone is ambiguous.
KEYS = {
    "run.dir": "output_dir default_local_dir checkpoint_dir ckpt_path save_path",
    "run.steps": "max_steps total_training_steps num_rollout max_num_steps num_train_epochs total_epochs "
                 "num_epochs num_episodes max_training_steps",
    "run.seed": "data_seed",
    "run.eval_every": "eval_steps test_freq val_period eval_interval eval.interval eval.steps",
    "run.eval_problems": "max_val_samples",
    "run.save_every": "save_steps save_freq save_period save_interval ckpt_interval ckpt.interval",
    "run.keep_checkpoints": "save_total_limit keep_top_k max_ckpt_num max_actor_ckpt_to_keep "
                            "max_ckpts_to_keep keep_last ckpt.max_num",
    "run.trackers": "report_to logger use_wandb wandb_enabled use_tensorboard tensorboard_enabled",
    "model.path": "model_name model_name_or_path model.name pretrain hf_checkpoint model_path",
    "lora.rank": "lora_rank lora_r lora_cfg.dim",
    "lora.alpha": "lora_alpha lora_cfg.alpha",
    "lora.targets": "lora_target_modules target_modules",
    "lora.rslora": "use_rslora",
    "lora.path": "lora_adapter_path",
    "lora.base": "load_in_4bit bnb_4bit_quant_type",
    "model.tokenizer": "tokenizer_name tokenizer_path tokenizer_name_or_path",
    "task.path": "train_files prompt_data dataset_name train_data data_path prompt_dataset",
    "task.held_out_path": "val_files eval_prompt_data eval_dataset val_data eval.dataset",
    "task.options.prompt_field": "prompt_key input_key",
    "task.options.answer_field": "answer_key label_key",
    "task.chat": "apply_chat_template",
    "task.chat_template_kwargs": "enable_thinking apply_chat_template_kwargs",
    "task.scorer": "reward_fn custom_reward_function rm_type remote_rm_url custom_rm_path "
                   "reward_manager remote_url",
    "[[task.rewards]]": "reward_funcs reward_weights",
    "task.max_prompt_tokens": "max_prompt_length max_input_seq_length prompt_max_len rollout_max_prompt_len",
    "rollout.engine": "rollout_backend use_vllm vllm_mode",
    "rollout.prompts_per_step": "train_batch_size num_prompts_per_step rollout_batch_size rollout.batch_size",
    "rollout.samples_per_prompt":
        "n num_generations num_generations_per_prompt n_samples_per_prompt rollouts_per_example rollout_n "
        "group_size n_samples",
    "rollout.prompts_per_step times rollout.samples_per_prompt":
        "generation_batch_size orchestrator.batch_size",
    "rollout.max_new_tokens":
        "max_response_length max_completion_length rollout_max_response_len generate_max_len max_tokens "
        "max_generate_length max_completion_tokens",
    "task.max_prompt_tokens and rollout.max_new_tokens":
        "max_model_len max_total_sequence_length max_seq_length max_length data.max_len",
    "rollout.temperature": "rollout_temperature",
    "rollout.top_p": "rollout_top_p",
    "rollout.top_k": "rollout_top_k",
    "rollout.stop": "stop_strings rollout_stop",
    "rollout.stop_token_ids": "rollout_stop_token_ids",
    "rollout.gpu_memory_utilization": "vllm_gpu_memory_utilization sglang_mem_fraction_static",
    "rollout.sleep": "vllm_enable_sleep_mode free_cache_engine colocate colocate_all offload_rollout "
                     "vllm.enable_sleep",
    "rollout.kv_cache": "kv_cache_dtype",
    "rollout.engines": "vllm_num_engines num_inference_engines num_engines",
    "rollout.max_staleness": "lag max_async_level max_trajectory_age_steps async_train async_rollout "
                             "max_staleness_steps max_off_policy_steps staleness_threshold async_enable "
                             "max_head_offpolicyness",
    "rollout.in_flight": "in_flight_weight_updates partial_rollout",
    "rollout.recompute_kv": "recompute_kv_cache_after_weight_updates",
    "rollout.oversample": "over_sampling_batch_size",
    "rollout.engine_urls": "vllm_server_base_url vllm_server_host external_proxy_url external_server_urls",
    "rollout.tensor_parallel_size": "rollout_num_gpus_per_engine vllm_tensor_parallel_size",
    "rollout.request_timeout_s": "request_timeout rollout_request_timeout",
    "precision.recipe": "quantization fp8_recipe fp8_cfg fp8 bf16 fp16",
    "precision.compute_dtype": "torch_dtype model_dtype",
    "precision.attention": "attn_implementation attention_backend flash_attn",
    "precision.first_layers_bf16": "num_first_layers_in_bf16",
    "precision.last_layers_bf16": "num_last_layers_in_bf16",
    "loss.advantage": "adv_estimator advantage_estimator scale_rewards norm_adv_by_std_in_grpo "
                      "grpo_norm_by_std normalize_rewards use_leave_one_out_baseline normalize_advantages "
                      "disable_grpo_std_normalization advantage.estimator no_std_norm",
    "loss.objective": "loss_mode policy_loss_type importance_sampling_level use_cispo "
                      "sequence_level_importance_ratios disable_ppo_ratio use_sapo_loss dppo_type",
    "loss.objective or loss.aggregation": "loss_type",
    "loss.aggregation": "loss_agg_mode loss_reduction token_level_loss calculate_per_token_loss",
    "loss.horizon": "loss_scale_factor algorithm.max_seq_len",
    "loss.clip_low": "clip_ratio_low ratio_clip_min eps_clip_low",
    "loss.clip_low and loss.clip_high": "clip_ratio epsilon eps_clip clip_eps cliprange clip_range "
                                        "eps_clip_low_high",
    "loss.clip_high": "clip_ratio_high ratio_clip_max epsilon_high eps_clip_high "
                      "eps_clip_higher clip_eps_high",
    "loss.dual_clip": "clip_ratio_c ratio_clip_c eps_clip_c c_clip delta",
    "loss.kl_coef": "beta kl_loss_coef reference_policy_kl_penalty init_kl_coef use_kl_loss "
                    "kl.init_coef kl.use_loss",
    "reference.path": "teacher_model_name_or_path teacher_model teacher_path ref_model_path",
    "loss.kl": "kl_loss_type reference_policy_kl_type kl_estimator kl_estimator_type kl_penalty kl.estimator",
    "loss.unbiased_kl": "use_on_policy_kl_approximation",
    'loss.unbiased_kl with loss.sampled_by = "old"': "use_unbiased_kl use_bias_correction_kl",
    "loss.opsm_delta": "off_policy_mask_threshold",
    'loss.opsm_delta with loss.sampled_by = "old"': "use_opsm",
    "loss.entropy_coef": "entropy_coeff entropy_loss_coef use_entropy_loss",
    "loss.mask_cut": "overlong_filtering apply_overlong_filtering mask_truncated_completions",
    "loss.overlong_buffer": "overlong_buffer_length overlong_buffer_len overlong_buffer_cfg overlong_tokens"
        " overlong_buffer_cfg.len",
    "loss.overlong_penalty": "overlong_penalty_factor overlong_buffer_penalty overlong_buffer_penalty_factor"
        " overlong_buffer_cfg.penalty_factor",
    "loss.dynamic_sampling_rounds": "use_dynamic_sampling dynamic_sampling dynamic_sampling_max_gen_batches "
                                    "max_num_gen_batches filter_groups dynamic_sampling_filter_path "
                                    "max_sample_batches dynamic_filtering_enable",
    "loss.old_policy": "prox_logp_method use_decoupled_loss",
    'loss.old_policy = "rollout"': "bypass_mode use_rollout_logprobs",
    'loss.old_policy = "current"': "force_on_policy_ratio",
    "correction.preset": "rollout_is rollout_rs rollout_correction truncated_importance_sampling_type "
                         "use_tis vllm_importance_sampling_mode vllm_importance_sampling_correction "
                         "use_importance_sampling_correction tis_mode off_policy_correction tis_ratio_type "
                         "is_correction_enable is_correction_type",
    "correction.upper": "rollout_is_threshold vllm_importance_sampling_cap "
                        "truncated_importance_sampling_ratio tis_clip tis_imp_ratio_cap "
                        "vllm_importance_sampling_clip_max token_tis_ratio_clip_high "
                        "sequence_tis_ratio_clip_high",
    "correction.lower": "vllm_importance_sampling_clip_min truncated_importance_sampling_ratio_min "
                        "tis_clip_low",
    "correction.lower and correction.upper": "is_correction_threshold",
    "correction.rejections": "rollout_rs_threshold sequence_mask_metric geo_mask_low geo_mask_high "
                             "product_mask_low product_mask_high outlier_token_is_threshold_low "
                             "outlier_token_is_threshold_high token_mask_is_threshold_low "
                             "token_mask_is_threshold_high",
    "correction.batch_normalize": "rollout_is_batch_normalize",
    "correction.m2_limit": "m2_threshold",
    "optim.lr": "learning_rate actor_learning_rate optimizer.lr optimizer_config.lr kwargs.lr",
    "optim.warmup_steps": "lr_warmup_steps num_warmup_steps warmup_ratio lr_warmup_ratio "
                          "lr_warmup_steps_ratio lr_warmup_iters",
    "optim.schedule": "lr_scheduler_type lr_scheduler lr_decay_style optimizer_config.scheduler",
    "optim.clip_norm": "max_grad_norm grad_clip clip_grad max_norm",
    "optim.b1": "adam_beta1 optim.beta1 betas1",
    "optim.b2": "adam_beta2 optim.beta2 betas2",
    "optim.b1 and optim.b2": "adam_betas betas optim.beta",
    "optim.eps": "adam_epsilon adam_eps optim.epsilon",
    "optim.offload": "optimizer_offload optimizer_cpu_offload cpu_offload adam_offload optim_cpu_offload"
        " offload_after_step",
    "train.updates_per_step": "ppo_mini_batch_size steps_per_generation train_global_batch_size "
                              "global_batch_size policy_mini_batch_size gradient_accumulation_steps "
                              "ppo_epochs num_iterations update_epochs_per_batch num_steps_per_rollout "
                              "ppo_n_minibatches train.batch_size",
    "train.rows_per_microbatch": "per_device_train_batch_size train_micro_batch_size micro_train_batch_size "
                                 "micro_batch_size ppo_micro_batch_size_per_gpu "
                                 "micro_train_batch_size_per_gpu",
    "train.row_tokens times train.rows_per_microbatch": "ppo_max_token_len_per_gpu max_tokens_per_gpu "
                                                        "train_mb_tokens seq_len max_tokens_per_microbatch",
    "train.remat": "gradient_checkpointing activation_checkpointing enable_gradient_checkpointing "
                   "recompute_granularity ac",
    "train.data": "data_parallel_size dp_replicate replicas",
    "train.fsdp": "fsdp_size dp_shard zero_stage",
    "train.tensor": "tensor_model_parallel_size tensor_parallel_size tensor_parallel tp_size",
    "moe.replay": "router_replay use_rollout_routing_replay enable_rollout_routing_replay use_routing_replay"
        " enable_router_replay moe_enable_routing_replay enable_return_routed_experts",
    "moe.balance_coef": "aux_loss_coef router_aux_loss_coef moe_aux_loss_coeff",
    "moe.freeze_router": "freeze_moe_router",
}
_HERE = {theirs: ours for ours, names in KEYS.items() for theirs in names.split()}

_FP8 = 'precision.recipe = "fp8_unified" (engine and learner) or "fp8_rollout" (the engine alone)'
_NO_CRITIC = "nothing: there are no critics"
_NOT_HERE = "nothing: not implemented here"
_DR_GRPO = ('loss.objective = "ppo_clip" with loss.advantage = "dr_grpo" and loss.aggregation = '
            '"seq_mean_token_sum_norm"')
# Settings that were ours: what they are now.
FORMER = {"rollout.server_url": "rollout.engine_urls",
          "rollout.server_token_file": "rollout.engine_token_file"}
VALUES = {  # our key -> their value -> the equivalent here
    "loss.objective": {
        "grpo": 'loss.objective = "ppo_clip" with loss.advantage = "grpo"',
        "vanilla": 'loss.objective = "ppo_clip"', "ppo": 'loss.objective = "ppo_clip"',
        "regular": 'loss.objective = "ppo_clip"',
        "dual_clip": 'loss.objective = "ppo_clip" with loss.dual_clip = 3.0',
        "dapo": 'loss.objective = "ppo_clip" with loss.clip_high = 0.28, loss.aggregation = "token_mean" and '
                "loss.dynamic_sampling_rounds",
        "dr_grpo": _DR_GRPO, "drgrpo": _DR_GRPO,
        "geo_mean": 'loss.objective = "gmpo"', "dppo": 'loss.objective = "dppo_tv" or "dppo_kl"',
        "pg": 'loss.objective = "reinforce"', "gpg": 'loss.objective = "reinforce"',
        "policy_gradient": 'loss.objective = "reinforce"',
        "rloo": 'loss.advantage = "rloo" with an objective',
        "reinforce_plus_plus": 'loss.advantage = "reinforce_pp"',
        "bnpo": 'loss.objective = "ppo_clip" with loss.aggregation = "token_mean"',
        "luspo": 'loss.objective = "gspo" with loss.aggregation = "seq_mean_token_sum"',
        "sequence": 'loss.objective = "gspo"', "policy_loss": 'loss.objective = "ppo_clip"',
        "binary_tv": 'loss.objective = "dppo_tv"', "binary_kl": 'loss.objective = "dppo_kl"',
        "vespo": _NOT_HERE, "dro": _NOT_HERE, "ipo": _NOT_HERE,
    },
    "loss.advantage": {
        "rloo_baseline": 'loss.advantage = "rloo"', "rloo_vectorized": 'loss.advantage = "rloo"',
        "loo": 'loss.advantage = "leave_one_out"', "group_norm": 'loss.advantage = "grpo_sample_std"',
        "group": 'loss.advantage = "grpo_sample_std"',
        "grpo_vectorized": 'loss.advantage = "grpo_sample_std"',
        "reinforce": 'loss.advantage = "reinforce_pp"',
        "reinforce_plus_plus": 'loss.advantage = "reinforce_pp"',
        "reinforce++": 'loss.advantage = "reinforce_pp"',
        "reinforce_baseline": 'loss.advantage = "reinforce_pp_baseline"',
        "reinforce_plus_plus_baseline": 'loss.advantage = "reinforce_pp_baseline"',
        "reinforce++_baseline": 'loss.advantage = "reinforce_pp_baseline"',
        "grpo_passk": 'loss.advantage = "pass_at_k", from another paper',
        "gae": _NO_CRITIC, "ppo": _NO_CRITIC, "none": 'loss.advantage = "dr_grpo"',
        "drgrpo": 'loss.advantage = "dr_grpo"',
        "true": 'loss.advantage = "grpo_sample_std"', "false": 'loss.advantage = "dr_grpo"',
        "bnpo": 'loss.advantage = "grpo_sample_std"', "remax": _NOT_HERE, "opo": _NOT_HERE, "gpg": _NOT_HERE,
        "gdpo": _NOT_HERE,
        "maxrl": _NOT_HERE, "max_rl": _NOT_HERE, "opd": _NOT_HERE, "optimal_token_baseline": _NOT_HERE,
        "tir_optimal_token_baseline": _NOT_HERE,
        "dapo": 'loss.advantage = "grpo_sample_std"', "gspo": 'loss.objective = "gspo"',
        "cispo": 'loss.objective = "cispo"',
    },
    "loss.aggregation": {
        "dapo": 'loss.aggregation = "token_mean"', "bnpo": 'loss.aggregation = "token_mean"',
        "grpo": 'loss.aggregation = "seq_mean_token_mean"',
        "sequence_mean": 'loss.aggregation = "seq_mean_token_mean"',
        "dr_grpo": 'loss.aggregation = "seq_mean_token_sum_norm" with loss.horizon',
        "mean": 'loss.aggregation = "token_mean"', "sum": 'loss.aggregation = "token_sum"',
        "true": 'loss.aggregation = "token_mean"', "false": 'loss.aggregation = "seq_mean_token_mean"',
        "token_level": 'loss.aggregation = "token_mean"',
        "sequence_level": 'loss.aggregation = "seq_mean_token_mean"',
        "token_mean_legacy": 'loss.aggregation = "token_mean"', "prompt_mean": _NOT_HERE, "vespo": _NOT_HERE,
        "cispo": 'loss.aggregation = "token_mean" with loss.objective = "cispo"',
        "sapo": 'loss.aggregation = "seq_mean_token_mean" with loss.objective = "sapo"',
        "luspo": 'loss.aggregation = "seq_mean_token_sum" with loss.objective = "gspo"',
    },
    "loss.kl": {
        "kl": 'loss.kl = "k1"', "mse": 'loss.kl = "k2"', "low_var_kl": 'loss.kl = "k3"',
        "full": "nothing: the KL is estimated",
    },
    "loss.old_policy": {
        "bypass": 'loss.old_policy = "rollout"', "decoupled": 'loss.old_policy = "recomputed"',
        "actor": 'loss.old_policy = "current"', "recompute": 'loss.old_policy = "recomputed"',
    },
    "correction.preset": {
        "off": 'correction.preset = "none"', "disabled": 'correction.preset = "none"',
        "null": 'correction.preset = "none"',
        "false": 'correction.preset = "none"', "true": 'correction.preset = "token_tis"',
        "token": 'correction.preset = "token_tis"', "token_truncate": 'correction.preset = "token_tis"',
        "sequence": 'correction.preset = "sequence_tis"',
        "sequence_truncate": 'correction.preset = "sequence_tis"',
        "token_mask": 'correction.preset = "icepop" with correction.lower = 0',
        "sequence_mask": 'correction.preset = "sequence_mis"',
        "tis": 'correction.preset = "token_tis"', "mis": 'correction.preset = "slime/mis"',
        "geometric": 'correction.preset = "geometric_mask"',
        "seq_sum_k1": 'correction.preset = "verl/decoupled_seq_is_rs"',
        "seq_mean_k1": 'correction.preset = "verl/decoupled_geo_rs"',
        "seq_mean_k3": 'correction.preset = "verl/decoupled_k3_rs"',
        **dict.fromkeys(("bypass", "bypass_mode"),
                        'correction.preset = "verl/bypass_ppo_clip" with loss.old_policy = "rollout"'),
    },
    "precision.recipe": {
        "fp8": _FP8, "float8": _FP8, "e4m3": _FP8, "hybrid": _FP8, "blockwise": _FP8, "fp8_blockwise": _FP8,
        "w8a8": _FP8,
        "fp8_e2e": 'precision.recipe = "fp8_unified"', "bfloat16": 'precision.recipe = "bf16"',
        "float16": 'precision.recipe = "fp16"', "half": 'precision.recipe = "fp16"',
        "none": 'precision.recipe = "bf16"',
    },
    "rollout.engine": {
        "sglang": 'rollout.engine = "vllm"', "hf": 'rollout.engine = "jax"',
        "colocate": 'rollout.engine = "vllm"',
        **dict.fromkeys(("server", "async", "remote"), 'rollout.engine = "served"'),
    },
    "rollout.kv_cache": {"fp8_e4m3": 'rollout.kv_cache = "fp8"', "bfloat16": 'rollout.kv_cache = "auto"'},
    "rollout.sleep": {"true": 'rollout.sleep = "keep_weights" or "drop_weights"',
                      "false": 'rollout.sleep = "off"'},
    "train.remat": {
        "true": 'train.remat = "layer"', "false": 'train.remat = "none"', "full": 'train.remat = "layer"',
        "selective": 'train.remat = "products"',
    },
    "optim.schedule": {"constant_with_warmup": 'optim.schedule = "constant" with optim.warmup_steps'},
    "moe.replay": {"rollout": 'moe.replay = "R3"', "true": 'moe.replay = "R3"',
                   "false": 'moe.replay = "none"'},
}
SPELLINGS = (  # spellings of the same format
    {"bfloat16", "bf16"}, {"float16", "fp16", "half"}, {"float32", "fp32", "single"},
    {"float8", "fp8", "fp8_e4m3", "e4m3"},
    {"none", "off", "false", "null"},
)


def plain(name: str) -> str:
    """The name in the spelling used here: learningRate, learning-rate and --learning_rate become
    learning_rate."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.lstrip("-")).lower().replace("-", "_")


def key_here(name: str) -> str:
    """The setting here for another framework's key, given alone or with its sections; "" if the table has
    none."""
    parts = plain(name).split(".")
    return _HERE.get(".".join(parts[-2:])) or _HERE.get(parts[-1], "")


def value_here(key: str, value: object, choices: Iterable[str] = ()) -> str:
    """The equivalent here of another framework's value for our `key`. It may also be a different spelling of
    one of our `choices`, or a choice without the framework's name before the slash; "" if there is none."""
    word = plain(str(value))
    same = [c for c in choices if word in (plain(c), c.rpartition("/")[2])]
    same += [c for c in choices for spelt in SPELLINGS if word in spelt and c in spelt]
    return VALUES.get(key, {}).get(word) or (f'{key} = "{same[0]}"' if same else "")


def here(word: str) -> list[str]:
    """Every entry for a word that is a key or a value of another framework."""
    found = [key_here(word), *(value_here(key, word) for key in VALUES)]
    return [text for text in found if text]


def names() -> list[str]:
    """The keys of other frameworks, without sections."""
    return [name.rpartition(".")[2] for name in _HERE]


def index() -> list[str]:
    """The rows of docs/coming_from.md's index."""
    named = lambda names: ", ".join(f"`{name}`" for name in sorted(names.split()))
    return [f"| `{ours}` | {named(names)} |"
            for ours, names in sorted(KEYS.items(), key=lambda row: row[0].strip("["))]


if __name__ == "__main__":
    print("\n".join(index()))
