"""Names of verl, NeMo RL, TRL and transformers, slime, SkyRL, OpenRLHF and prime-rl, and where each stands here: for hints,
`jaxfp8rl config --find` and the index of docs/coming_from.md. The standard library alone: a misspelt key is answered at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# What is set here: their keys, each by its last part, or by its last two where the last alone would be another's.
KEYS = {
    "run.dir": "output_dir default_local_dir checkpoint_dir ckpt_path save_path",
    "run.steps": "max_steps total_training_steps num_rollout max_num_steps num_train_epochs total_epochs num_epochs num_episodes",
    "run.seed": "data_seed",
    "run.eval_every": "eval_steps test_freq val_period eval_interval",
    "run.eval_problems": "max_val_samples",
    "run.save_every": "save_steps save_freq save_period save_interval ckpt_interval",
    "run.keep_checkpoints": "save_total_limit keep_top_k max_ckpt_num max_actor_ckpt_to_keep max_ckpts_to_keep",
    "run.trackers": "report_to logger use_wandb wandb_enabled use_tensorboard",
    "model.path": "model_name model_name_or_path model.name pretrain hf_checkpoint model_path",
    "model.tokenizer": "tokenizer_name tokenizer_path tokenizer_name_or_path",
    "task.path": "train_files prompt_data dataset_name train_data data_path",
    "task.held_out_path": "val_files eval_prompt_data eval_dataset val_data validation_dataset_name",
    "task.options.prompt_field": "prompt_key input_key",
    "task.options.answer_field": "answer_key label_key",
    "task.chat": "apply_chat_template",
    "task.chat_template_kwargs": "enable_thinking apply_chat_template_kwargs",
    "task.scorer": "reward_fn custom_reward_function rm_type remote_rm_url custom_rm_path reward_manager",
    "[[task.rewards]]": "reward_funcs reward_weights",
    "task.max_prompt_tokens": "max_prompt_length max_input_seq_length prompt_max_len rollout_max_prompt_len",
    "rollout.engine": "rollout_backend use_vllm vllm_mode",
    "rollout.prompts_per_step": "train_batch_size num_prompts_per_step rollout_batch_size",
    "rollout.samples_per_prompt":
        "n num_generations num_generations_per_prompt n_samples_per_prompt rollouts_per_example rollout_n group_size",
    "rollout.prompts_per_step times rollout.samples_per_prompt": "generation_batch_size orchestrator.batch_size",
    "rollout.max_new_tokens":
        "max_response_length max_completion_length rollout_max_response_len generate_max_len max_tokens max_generate_length",
    "task.max_prompt_tokens and rollout.max_new_tokens": "max_model_len max_total_sequence_length max_seq_length max_length",
    "rollout.temperature": "rollout_temperature",
    "rollout.top_p": "rollout_top_p",
    "rollout.top_k": "rollout_top_k",
    "rollout.stop": "stop_strings rollout_stop",
    "rollout.stop_token_ids": "rollout_stop_token_ids",
    "rollout.gpu_memory_utilization": "vllm_gpu_memory_utilization sglang_mem_fraction_static",
    "rollout.sleep": "vllm_enable_sleep_mode free_cache_engine colocate offload_rollout",
    "rollout.kv_cache": "kv_cache_dtype",
    "rollout.engines": "vllm_num_engines num_inference_engines",
    "rollout.server_url": "vllm_server_base_url vllm_server_host",
    "rollout.lag": "max_async_level max_trajectory_age_steps async_train async_rollout",
    "precision.recipe": "quantization fp8_recipe fp8_cfg fp8 bf16 fp16",
    "precision.compute_dtype": "torch_dtype model_dtype",
    "precision.attention": "attn_implementation attention_backend flash_attn",
    "precision.first_layers_bf16": "num_first_layers_in_bf16",
    "precision.last_layers_bf16": "num_last_layers_in_bf16",
    "loss.advantage": "adv_estimator advantage_estimator scale_rewards norm_adv_by_std_in_grpo grpo_norm_by_std normalize_rewards"
        " use_leave_one_out_baseline normalize_advantages",
    "loss.objective": "loss_mode policy_loss_type importance_sampling_level use_cispo sequence_level_importance_ratios",
    "loss.objective or loss.aggregation": "loss_type",
    "loss.aggregation": "loss_agg_mode loss_reduction token_level_loss calculate_per_token_loss",
    "loss.clip_low": "clip_ratio_low ratio_clip_min eps_clip_low",
    "loss.clip_low and loss.clip_high": "clip_ratio epsilon eps_clip clip_eps cliprange clip_range",
    "loss.clip_high": "clip_ratio_high ratio_clip_max epsilon_high eps_clip_high clip_eps_high",
    "loss.dual_clip": "clip_ratio_c ratio_clip_c eps_clip_c",
    "loss.kl_coef": "beta kl_loss_coef reference_policy_kl_penalty init_kl_coef kl_beta use_kl_loss",
    "loss.kl": "kl_loss_type reference_policy_kl_type kl_estimator kl_estimator_type kl_penalty",
    "loss.unbiased_kl": "use_bias_correction_kl use_on_policy_kl_approximation",
    'loss.unbiased_kl with loss.sampled_by = "old"': "use_unbiased_kl",
    "loss.opsm_delta": "off_policy_mask_threshold",
    'loss.opsm_delta with loss.sampled_by = "old"': "use_opsm",
    "loss.entropy_coef": "entropy_coeff entropy_loss_coef ent_coef",
    "loss.mask_cut": "overlong_filtering mask_truncated_completions",
    "loss.overlong_buffer": "overlong_buffer_length overlong_buffer_len overlong_buffer_cfg",
    "loss.overlong_penalty": "overlong_penalty_factor overlong_buffer_penalty",
    "loss.dynamic_sampling_rounds": "use_dynamic_sampling dynamic_sampling dynamic_sampling_max_gen_batches max_num_gen_batches"
        " filter_groups dynamic_sampling_filter_path",
    'loss.old_policy = "rollout"': "bypass_mode",
    "correction.preset": "rollout_is rollout_rs rollout_correction truncated_importance_sampling_type use_tis"
        " vllm_importance_sampling_mode vllm_importance_sampling_correction use_importance_sampling_correction tis_mode"
        " off_policy_correction",
    "correction.upper": "rollout_is_threshold vllm_importance_sampling_cap truncated_importance_sampling_ratio tis_clip"
        " tis_imp_ratio_cap",
    "optim.lr": "learning_rate actor_learning_rate",
    "optim.warmup_steps": "lr_warmup_steps num_warmup_steps warmup_ratio lr_warmup_ratio",
    "optim.schedule": "lr_scheduler_type lr_scheduler lr_decay_style",
    "optim.clip_norm": "max_grad_norm grad_clip clip_grad max_norm",
    "optim.b1": "adam_beta1 optim.beta1",
    "optim.b2": "adam_beta2 optim.beta2",
    "optim.b1 and optim.b2": "adam_betas betas optim.beta",
    "optim.eps": "adam_epsilon adam_eps optim.epsilon",
    "optim.offload": "optimizer_offload optimizer_cpu_offload cpu_offload adam_offload",
    "train.updates_per_step": "ppo_mini_batch_size steps_per_generation train_global_batch_size global_batch_size"
        " policy_mini_batch_size gradient_accumulation_steps ppo_epochs num_iterations",
    "train.rows_per_microbatch": "per_device_train_batch_size train_micro_batch_size micro_train_batch_size micro_batch_size"
        " ppo_micro_batch_size_per_gpu micro_train_batch_size_per_gpu",
    "train.row_tokens times train.rows_per_microbatch": "ppo_max_token_len_per_gpu max_tokens_per_gpu train_mb_tokens seq_len",
    "train.remat": "gradient_checkpointing activation_checkpointing enable_gradient_checkpointing recompute_granularity ac",
    "train.data": "data_parallel_size dp_replicate replicas",
    "train.fsdp": "fsdp_size dp_shard zero_stage",
    "train.tensor": "tensor_model_parallel_size tensor_parallel_size tensor_parallel tp_size",
    "moe.replay": "router_replay use_rollout_routing_replay enable_rollout_routing_replay use_routing_replay",
    "moe.balance_coef": "aux_loss_coef router_aux_loss_coef moe_aux_loss_coeff",
    "moe.freeze_router": "freeze_moe_router",
}  # fmt: skip
_HERE = {theirs: ours for ours, names in KEYS.items() for theirs in names.split()}

_FP8 = 'precision.recipe = "fp8_unified" (engine and learner) or "fp8_rollout" (the engine alone)'
_DR_GRPO = 'loss.objective = "ppo_clip" with loss.advantage = "dr_grpo" and loss.aggregation = "seq_mean_token_sum_norm"'
VALUES = {  # our key -> their value -> what says it here
    "loss.objective": {
        "grpo": 'loss.objective = "ppo_clip" with loss.advantage = "grpo"',
        "vanilla": 'loss.objective = "ppo_clip"', "ppo": 'loss.objective = "ppo_clip"', "regular": 'loss.objective = "ppo_clip"',
        "dual_clip": 'loss.objective = "ppo_clip" with loss.dual_clip = 3.0',
        "dapo": 'loss.objective = "ppo_clip" with loss.clip_high = 0.28, loss.aggregation = "token_mean" and '
                "loss.dynamic_sampling_rounds",
        "dr_grpo": _DR_GRPO, "drgrpo": _DR_GRPO,
        "geo_mean": 'loss.objective = "gmpo"', "dppo": 'loss.objective = "dppo_tv" or "dppo_kl"',
        "pg": 'loss.objective = "reinforce"', "gpg": 'loss.objective = "reinforce"',
        "policy_gradient": 'loss.objective = "reinforce"',
        "rloo": 'loss.advantage = "rloo" with an objective', "reinforce_plus_plus": 'loss.advantage = "reinforce_pp"',
    },
    "loss.advantage": {
        "rloo_baseline": 'loss.advantage = "rloo"', "rloo_vectorized": 'loss.advantage = "rloo"',
        "loo": 'loss.advantage = "leave_one_out"', "group_norm": 'loss.advantage = "grpo_sample_std"',
        "group": 'loss.advantage = "grpo_sample_std"', "grpo_vectorized": 'loss.advantage = "grpo_sample_std"',
        "reinforce": 'loss.advantage = "reinforce_pp"', "reinforce_plus_plus": 'loss.advantage = "reinforce_pp"',
        "reinforce++": 'loss.advantage = "reinforce_pp"', "reinforce_baseline": 'loss.advantage = "reinforce_pp_baseline"',
        "reinforce_plus_plus_baseline": 'loss.advantage = "reinforce_pp_baseline"',
        "reinforce++_baseline": 'loss.advantage = "reinforce_pp_baseline"', "grpo_passk": 'loss.advantage = "pass_at_k"',
        "gae": "nothing: there are no critics", "none": 'loss.advantage = "dr_grpo"', "drgrpo": 'loss.advantage = "dr_grpo"',
        "dapo": 'loss.advantage = "grpo_sample_std"', "gspo": 'loss.objective = "gspo"', "cispo": 'loss.objective = "cispo"',
    },
    "loss.aggregation": {
        "dapo": 'loss.aggregation = "token_mean"', "bnpo": 'loss.aggregation = "token_mean"',
        "grpo": 'loss.aggregation = "seq_mean_token_mean"', "sequence_mean": 'loss.aggregation = "seq_mean_token_mean"',
        "dr_grpo": 'loss.aggregation = "seq_mean_token_sum_norm" with loss.horizon',
        "mean": 'loss.aggregation = "token_mean"', "sum": 'loss.aggregation = "token_sum"',
    },
    "loss.kl": {
        "kl": 'loss.kl = "k1"', "mse": 'loss.kl = "k2"', "low_var_kl": 'loss.kl = "k3"', "full": "nothing: it is estimated",
    },
    "loss.old_policy": {
        "bypass": 'loss.old_policy = "rollout"', "decoupled": 'loss.old_policy = "recomputed"',
        "actor": 'loss.old_policy = "current"',
    },
    "correction.preset": {
        "off": 'correction.preset = "none"', "disabled": 'correction.preset = "none"', "null": 'correction.preset = "none"',
        "false": 'correction.preset = "none"', "true": 'correction.preset = "token_tis"',
        "token": 'correction.preset = "token_tis"', "token_truncate": 'correction.preset = "token_tis"',
        "sequence": 'correction.preset = "sequence_tis"', "sequence_truncate": 'correction.preset = "sequence_tis"',
        "token_mask": 'correction.preset = "icepop"', "sequence_mask": 'correction.preset = "sequence_mis"',
    },
    "precision.recipe": {
        "fp8": _FP8, "float8": _FP8, "e4m3": _FP8, "hybrid": _FP8, "blockwise": _FP8, "fp8_blockwise": _FP8, "w8a8": _FP8,
        "fp8_e2e": 'precision.recipe = "fp8_unified"', "bfloat16": 'precision.recipe = "bf16"',
        "float16": 'precision.recipe = "fp16"', "half": 'precision.recipe = "fp16"', "none": 'precision.recipe = "bf16"',
    },
    "rollout.engine": {
        "sglang": 'rollout.engine = "vllm"', "hf": 'rollout.engine = "jax"', "colocate": 'rollout.engine = "vllm"',
        "server": 'rollout.engine = "remote"', "async": 'rollout.engine = "remote"',
    },
    "rollout.kv_cache": {"fp8_e4m3": 'rollout.kv_cache = "fp8"', "bfloat16": 'rollout.kv_cache = "auto"'},
    "rollout.sleep": {"true": 'rollout.sleep = "keep_weights" or "drop_weights"', "false": 'rollout.sleep = "off"'},
    "train.remat": {
        "true": 'train.remat = "layer"', "false": 'train.remat = "none"', "full": 'train.remat = "layer"',
        "selective": 'train.remat = "products"',
    },
    "optim.schedule": {"constant_with_warmup": 'optim.schedule = "constant" with optim.warmup_steps'},
    "moe.replay": {"rollout": 'moe.replay = "R3"', "true": 'moe.replay = "R3"', "false": 'moe.replay = "none"'},
}  # fmt: skip
SPELLINGS = (  # of one format
    {"bfloat16", "bf16"}, {"float16", "fp16", "half"}, {"float32", "fp32", "single"}, {"float8", "fp8", "fp8_e4m3", "e4m3"},
    {"none", "off", "false", "null"},
)  # fmt: skip


def plain(name: str) -> str:
    """As names are written here: learningRate, learning-rate and --learning_rate are learning_rate."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.lstrip("-")).lower().replace("-", "_")


def key_here(name: str) -> str:
    """What is set here for a key of theirs, given as it is typed or with its sections; "" where the table has none."""
    parts = plain(name).split(".")
    return _HERE.get(".".join(parts[-2:])) or _HERE.get(parts[-1], "")


def value_here(key: str, value: object, choices: Iterable[str] = ()) -> str:
    """What says here a value of theirs for our `key`, or one of its `choices` spelt otherwise; "" where nothing does."""
    word = plain(str(value))
    same = [c for c in choices for spelt in SPELLINGS if word in spelt and c in spelt]
    return VALUES.get(key, {}).get(word) or (f'{key} = "{same[0]}"' if same else "")


def here(word: str) -> list[str]:
    """All that the table has for a word: a key or a value of theirs."""
    found = [key_here(word), *(value_here(key, word) for key in VALUES)]
    return [text for text in found if text]


def names() -> list[str]:
    """Their keys, without sections."""
    return [name.rpartition(".")[2] for name in _HERE]


def index() -> list[str]:
    """The rows of docs/coming_from.md's index."""
    named = lambda names: ", ".join(f"`{name}`" for name in sorted(names.split()))
    return [f"| `{ours}` | {named(names)} |" for ours, names in sorted(KEYS.items(), key=lambda row: row[0].strip("["))]


if __name__ == "__main__":
    print("\n".join(index()))
