"""What the page plots, in order, and what it says of each: what it is, and what is healthy."""

from __future__ import annotations

from typing import NamedTuple

from jaxfp8rl.monitors.health import ranges


class Metric(NamedTuple):
    """A key of metrics.jsonl with a chart of its own. `band`: what the band around a single run's line is, if there is one."""

    key: str
    title: str
    note: str
    log: bool = False
    band: str = ""


    @property
    def words(self) -> str:
        """The note, and the healthy range where there is one."""
        return " ".join([self.note, *([f"Healthy: {found}."] if (found := ranges(self.key)) else [])])


class Section(NamedTuple):
    """`anchor`: its id in the page."""

    anchor: str
    title: str
    metrics: tuple[Metric, ...]


HELD_OUT = Metric(
    "eval/reward_mean", "Held-out reward", "One greedy completion a problem.", band="95% (Wilson), for rewards within [0, 1]"
)
REWARD = Metric(
    "reward/mean", "Training reward", "Mean over a step's completions.", band="95% of that mean, completions taken as independent"
)
SECTIONS = (
    Section("reward", "Reward", (
        HELD_OUT,
        REWARD,
        Metric("reward/groups_solved_in_part", "Groups that teach", "Prompts whose completions differ in reward."),
    )),
    Section("mismatch", "Mismatch of learner and engine", (
        Metric("mismatch/k1", "KL, k1", "Estimates KL(engine, learner), nats a token."),
        Metric("mismatch/k3", "KL, k3", "The estimate that cannot be negative, nats a token.", log=True),
        Metric("mismatch/max_logp_diff", "Worst token", "Largest difference of log-probabilities in a batch, nats.", log=True),
        Metric("mismatch/token_mult_prob_error", "Mean factor", "Mean of exp |difference|. 1 is none."),
    )),
    Section("correction", "Correction", (
        Metric("correction/ess", "Effective sample size", "As a share of the tokens."),
        Metric("correction/truncated_fraction", "Truncated tokens", "Share whose weight met the cap."),
        Metric("correction/rejected_fraction", "Rejected tokens", "Share left out of the loss."),
    )),
    Section("policy", "Policy and update", (
        Metric("entropy", "Entropy", "Nats a token."),
        Metric("response/length_mean", "Length", "Tokens a completion, mean."),
        Metric("response/cut_fraction", "Cut", "Share of completions that met the length limit."),
        Metric("grad_norm", "Gradient norm", "Before clipping.", log=True),
        Metric("clip/fraction", "Clipped tokens", "Share whose ratio to the old policy met the objective's clip."),
        Metric("loss", "Loss", "Its level says little in policy gradients; jumps do."),
    )),
    Section("time", "Time and memory", (
        Metric("tokens/rollout_per_s", "Rollout, tokens a second", "Sampled tokens over the seconds of the rollout."),
        Metric("tokens/update_per_s", "Update, tokens a second", "Learned tokens over the seconds of the update."),
        Metric("memory/peak_gib", "Peak memory, GiB", "The GPU allocator's peak; the process's where there is no GPU."),
    )),
)  # fmt: skip
# What variants are tested by: (metric, in which words).
MEASURES = (
    (HELD_OUT.key, "held-out reward, last"),
    (REWARD.key, "training reward, last quarter"),
    ("mismatch/k3", "mismatch k3, last quarter"),
)
