"""The names of all metrics that a run may write. docs/metrics.md says what each means."""

from __future__ import annotations

from fnmatch import fnmatchcase

# the part before the slash -> the names behind it; "*" stands for the name of a reward, say, or of a layer
GROUPS = {
    "clip": "bound_* covariance fraction high low",
    "correction": "batch_norm_factor below_fraction ess lost_sequences mix raw_ess raw_weight_* rejected/* "
                  "rejected_fraction rejected_sequences rejected_sequences/* sequence_weight_max "
                  "sequence_weight_max_deviation sequence_weight_mean sequence_weight_min "
                  "sequence_weight_std truncated_fraction weight_max weight_mean weight_min weight_std",
    "curriculum": "*/solved known solved_mean weight_mean",
    "draft": "grad_norm logp",
    "engine": "cache_use concurrency healthy preemptions restarts",
    "eval": "commonest_share problems reward/*/mean reward_mean undefined",
    "explore": "kept_fraction precise_tokens reward_mean tokens undefined unreachable",
    "gate": "max_gap mean_gap rejected",
    "kv": "amax_k amax_q amax_v",
    "lora": "merge_error",
    "memory": "peak_gib",
    "mfu": "update",
    "mismatch": "abs_logp_diff chi2_seq chi2_token equal_fraction js k1 k1_unreplayed k3 k3_reverse "
                "k3_unreplayed learner_ppl log_ppl_diff_abs_mean log_ppl_diff_max log_ppl_diff_mean "
                "log_ppl_diff_min max_logp_diff ppl_ratio prob_correlation prob_diff_max prob_diff_mean "
                "prob_diff_std rollout_ppl seq_mult_prob_error_max skew_negative skew_positive "
                "token_mult_prob_error",
    "noise": "arrived moved sigma",
    "opsm": "fraction",
    "precision": "activation_* gap_all gap_kv gap_weights key_amax key_clipped key_error leave_one_out_layer "
                 "leave_one_out_max left_without_layer left_without_min loss_spikes one_in_layer one_in_max "
                 "sharpness value_* weight_clipped_worst weight_error_layer weight_error_linear "
                 "weight_error_mean weight_error_worst weight_scale_max weight_scale_min "
                 "weight_underflow_layer weight_underflow_linear weight_underflow_worst weight_zero_worst",
    "publish": "bytes",
    "queue": "dropped left_tokens length partial",
    "response": "cut_fraction length_max length_mean length_p10 length_p50 length_p90",
    "reward": "*/mean groups_solved_in_part malformed mean std undefined",
    "rollout": "groups_chosen groups_rejected",
    "routing": "disagreement disagreement/* tokens_differing",
    "speculation": "accepted drafted tokens",
    "staleness": "k1 versions_max versions_mean",
    "support": "tokens_mean unknown",
    "time": "publish_s reward_s rollout_s save_s save_write_s score_s step_s update_s wait_s",
    "tokens": "rollout rollout_per_s update update_per_s",
    "trained": "completions distinct length_mean length_p10 length_p50 length_p90 reward_mean unreachable "
               "weights_ess",
    "turns": "branches_mean cached_fraction crashes done_fraction errors malformed_calls max mean "
             "outside_tokens_mean overflowed_fraction timeouts tool_calls",
    "update": "applied bad_in_a_row loss_scale overflow shared_fraction",
    "weights": "version",
}
METRICS = ("step", "loss", "entropy", "kl", "grad_norm", "lr",
           *(f"{group}/{name}" for group, names in GROUPS.items() for name in names.split()))


def is_metric(name: str) -> bool:
    return any(fnmatchcase(name, metric) for metric in METRICS)
