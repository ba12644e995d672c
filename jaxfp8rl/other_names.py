"""Names of verl, NeMo RL, TRL, slime and SkyRL, and where each stands here: for hints, `jaxfp8rl config --find` and
docs/coming_from.md."""

from __future__ import annotations

KEYS = {  # the last part of their key -> ours
    "learning_rate": "optim.lr",
    "max_grad_norm": "optim.clip_norm",
    "train_batch_size": "rollout.prompts_per_step",
    "num_prompts_per_step": "rollout.prompts_per_step",
    "n": "rollout.samples_per_prompt",
    "num_generations": "rollout.samples_per_prompt",
    "num_generations_per_prompt": "rollout.samples_per_prompt",
    "max_response_length": "rollout.max_new_tokens",
    "max_completion_length": "rollout.max_new_tokens",
    "max_prompt_length": "task.max_prompt_tokens",
    "max_input_seq_length": "task.max_prompt_tokens",
    "vllm_gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "vllm_enable_sleep_mode": "rollout.sleep",
    "free_cache_engine": "rollout.sleep",
    "reward_funcs": "[[task.rewards]]",
    "reward_weights": "[[task.rewards]]",
    "adv_estimator": "loss.advantage",
    "scale_rewards": "loss.advantage",
    "loss_type": "loss.objective or loss.aggregation",
    "loss_mode": "loss.objective",
    "loss_agg_mode": "loss.aggregation",
    "importance_sampling_level": "loss.objective",
    "clip_ratio_low": "loss.clip_low",
    "ratio_clip_min": "loss.clip_low",
    "epsilon": "loss.clip_low",
    "clip_ratio_high": "loss.clip_high",
    "ratio_clip_max": "loss.clip_high",
    "epsilon_high": "loss.clip_high",
    "clip_ratio_c": "loss.dual_clip",
    "ratio_clip_c": "loss.dual_clip",
    "beta": "loss.kl_coef",
    "kl_loss_coef": "loss.kl_coef",
    "reference_policy_kl_penalty": "loss.kl_coef",
    "kl_loss_type": "loss.kl",
    "reference_policy_kl_type": "loss.kl",
    "use_unbiased_kl": 'loss.unbiased_kl with loss.sampled_by = "old"',
    "use_bias_correction_kl": "loss.unbiased_kl",
    "use_opsm": 'loss.opsm_delta with loss.sampled_by = "old"',
    "off_policy_mask_threshold": "loss.opsm_delta",
    "entropy_coeff": "loss.entropy_coef",
    "overlong_filtering": "loss.mask_cut",
    "mask_truncated_completions": "loss.mask_cut",
    "overlong_buffer_length": "loss.overlong_buffer",
    "use_dynamic_sampling": "loss.dynamic_sampling_rounds",
    "bypass_mode": 'loss.old_policy = "rollout"',
    "rollout_is": "correction.preset",
    "truncated_importance_sampling_type": "correction.preset",
    "vllm_importance_sampling_mode": "correction.preset",
    "kv_cache_dtype": "rollout.kv_cache",
}
VALUES = {  # our key -> their value -> what says it here
    "loss.objective": {
        "grpo": 'loss.objective = "ppo_clip" with loss.advantage = "grpo"',
        "vanilla": 'loss.objective = "ppo_clip"',
        "ppo": 'loss.objective = "ppo_clip"',
        "dapo": 'loss.objective = "ppo_clip" with loss.clip_high = 0.28 and loss.aggregation = "token_mean"',
        "dr_grpo": 'loss.objective = "ppo_clip" with loss.advantage = "dr_grpo" and loss.aggregation = "seq_mean_token_sum_norm"',
    },
    "loss.kl": {"kl": 'loss.kl = "k1"', "mse": 'loss.kl = "k2"', "low_var_kl": 'loss.kl = "k3"'},
}


def key_here(name: str) -> str:
    """What is set here for a key of theirs, given as it is typed or with its sections; "" where the table has none."""
    return KEYS.get(name.lower().replace("-", "_").rpartition(".")[2], "")


def value_here(key: str, value: str) -> str:
    """What says here a value of theirs for our `key`; "" where the table has none."""
    return VALUES.get(key, {}).get(value.lower().replace("-", "_"), "")


def here(word: str) -> list[str]:
    """All that the table has for a word: a key or a value of theirs."""
    found = [key_here(word), *(value_here(key, word) for key in VALUES)]
    return [text for text in found if text]
