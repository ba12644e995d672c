"""What the page plots, in order, and what it says of each: what it is, and what is healthy."""

from __future__ import annotations

from typing import NamedTuple

from jaxfp8rl.health.table import ranges


class Metric(NamedTuple):
    """A key of metrics.jsonl with a chart of its own. `band`: what the band around a single run's line is, if
    there is one. `unit`: what stands beside its axis; `bounds`: what no value passes."""

    key: str
    title: str
    note: str
    log: bool = False
    band: str = ""
    unit: str = ""
    bounds: tuple[float | None, float | None] = (None, None)

    @property
    def words(self) -> str:
        """The note, and the healthy range where there is one."""
        return " ".join([self.note, *([f"Healthy: {found}."] if (found := ranges(self.key)) else [])])


def _share(key: str, title: str, note: str, of: str) -> Metric:
    return Metric(key, title, note, unit=f"share of {of}", bounds=(0, 1))


class Section(NamedTuple):
    """`anchor`: its id in the page."""

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
    band="95% of that mean, completions taken as independent",
)
SECTIONS = (
    Section("reward", "Reward", (
        HELD_OUT,
        REWARD,
        _share("reward/groups_solved_in_part", "Groups that teach",
               "Prompts whose completions differ in reward.", "groups"),
    )),
    Section("mismatch", "Mismatch of learner and engine", (
        Metric("mismatch/k1", "KL, k1", "Estimates KL(engine, learner), nats a token.", unit="nats"),
        Metric("mismatch/k3", "KL, k3", "The estimate that cannot be negative, nats a token.", log=True,
               unit="nats"),
        Metric("mismatch/max_logp_diff", "Worst token", "Largest difference of log-probabilities.", log=True,
               unit="nats"),
        Metric("mismatch/token_mult_prob_error", "Mean factor", "Mean of exp |difference|. 1 is none.",
               unit="factor",
               bounds=(1, None)),
    )),
    Section("correction", "Correction", (
        _share("correction/ess", "Effective sample size", "As a share of the tokens.", "tokens"),
        _share("correction/truncated_fraction", "Truncated tokens", "Share whose weight met the cap.",
               "tokens"),
        _share("correction/rejected_fraction", "Rejected tokens", "Share left out of the loss.", "tokens"),
    )),
    Section("policy", "Policy and update", (
        Metric("entropy", "Entropy", "Nats a token.", unit="nats"),
        Metric("response/length_mean", "Length", "Tokens a completion, mean.", unit="tokens"),
        _share("response/cut_fraction", "Cut", "Share of completions that met the length limit.",
               "completions"),
        Metric("grad_norm", "Gradient norm", "Before clipping.", log=True, unit="norm"),
        _share("clip/fraction", "Clipped tokens",
               "Share whose ratio to the old policy met the objective's clip.", "tokens"),
        Metric("loss", "Loss", "Its level says little in policy gradients; jumps do.", unit="loss"),
    )),
    Section("time", "Time and memory", (
        Metric("tokens/rollout_per_s", "Speed of the rollout", "Sampled tokens over its seconds.",
               unit="tokens a second"),
        Metric("tokens/update_per_s", "Speed of the update", "Learned tokens over its seconds.",
               unit="tokens a second"),
        Metric("memory/peak_gib", "Peak memory", "The GPU allocator's; the process's where there is no GPU.",
               unit="GiB"),
    )),
)
# What variants are tested by: (metric, in which words).
MEASURES = (
    (HELD_OUT.key, "held-out reward, last"),
    (REWARD.key, "training reward, last quarter"),
    ("mismatch/k3", "mismatch k3, last quarter"),
)
