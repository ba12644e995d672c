"""The charts of the page, in order, with a note on each metric and its healthy range."""

from __future__ import annotations

from typing import NamedTuple

from jaxfp8rl.health.table import ranges


class Metric(NamedTuple):
    """A key of metrics.jsonl with its own chart. `band`: the meaning of the band around a single run's line,
    "" for no band. `unit`: the label of the y axis. `bounds`: the limits of its values."""

    key: str
    title: str
    note: str
    log: bool = False
    band: str = ""
    unit: str = ""
    bounds: tuple[float | None, float | None] = (None, None)

    @property
    def words(self) -> str:
        """The note, and the healthy range if the metric has one."""
        return " ".join([self.note, *([f"Healthy: {found}."] if (found := ranges(self.key)) else [])])


def _share(key: str, title: str, note: str, of: str) -> Metric:
    return Metric(key, title, note, unit=f"share of {of}", bounds=(0, 1))


class Section(NamedTuple):
    """A section of the page; `anchor`: its id."""

    anchor: str
    title: str
    metrics: tuple[Metric, ...]


HELD_OUT = Metric(
    "eval/reward_mean", "Held-out reward", "One greedy completion a problem.",
    band="95% (Wilson), for rewards within [0, 1]",
    unit="reward",
)
REWARD = Metric(
    "reward/mean", "Training reward", "Mean over a step's completions.", unit="reward",
    band="95% of that mean, assuming independent completions",
)
SECTIONS = (
    Section("reward", "Reward", (
        HELD_OUT,
        REWARD,
        _share("reward/groups_solved_in_part", "Informative groups",
               "Prompts whose completions differ in reward.", "groups"),
    )),
    Section("mismatch", "Mismatch of learner and engine", (
        Metric("mismatch/k1", "KL, k1", "Estimate of KL(engine, learner), nats a token.", unit="nats"),
        Metric("mismatch/k3", "KL, k3", "Non-negative estimate of the same KL, nats a token.", log=True,
               unit="nats"),
        Metric("mismatch/max_logp_diff", "Worst token", "Largest difference of log-probabilities.", log=True,
               unit="nats"),
        Metric("mismatch/token_mult_prob_error", "Mismatch",
               "Mean of exp |difference of log-probabilities|; 1 is none.", unit="factor", bounds=(1, None)),
    )),
    Section("correction", "Correction", (
        _share("correction/ess", "Effective sample size", "As a share of the tokens.", "tokens"),
        _share("correction/truncated_fraction", "Truncated weights",
               "Share of the tokens whose weight reached the cap.", "tokens"),
        _share("correction/rejected_fraction", "Rejected tokens", "Share left out of the loss.", "tokens"),
    )),
    Section("policy", "Policy and update", (
        Metric("entropy", "Entropy", "Nats a token.", unit="nats"),
        Metric("response/length_mean", "Length", "Tokens a completion, mean.", unit="tokens"),
        _share("response/cut_fraction", "Cut", "Share of completions that reached the length limit.",
               "completions"),
        Metric("grad_norm", "Gradient norm", "Before clipping.", log=True, unit="norm"),
        _share("clip/fraction", "Clipped tokens",
               "Share whose ratio to the old policy was clipped.", "tokens"),
        Metric("loss", "Loss", "Its level means little under policy gradients; jumps matter.", unit="loss"),
    )),
    Section("time", "Time and memory", (
        Metric("tokens/rollout_per_s", "Rollout speed", "Sampled tokens a second of rollout.",
               unit="tokens a second"),
        Metric("tokens/update_per_s", "Update speed", "Learned tokens a second of update.",
               unit="tokens a second"),
        Metric("memory/peak_gib", "Peak memory", "Of the GPU's allocator; without a GPU, of the process.",
               unit="GiB"),
    )),
)
# (metric, name) of the measures by which variants are compared.
MEASURES = (
    (HELD_OUT.key, "held-out reward, last"),
    (REWARD.key, "training reward, last quarter"),
    ("mismatch/k3", "mismatch k3, last quarter"),
)
