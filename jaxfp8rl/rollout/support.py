"""Filtered sampling (rollout.top_k, rollout.top_p): engine and learner normalise over the same tokens.

Engine and learner differ by rounding and by weight version, so each would filter differently. The engine
therefore reports the support of every token: the tokens it was drawn from. The learner's softmax runs over
that support in every log-probability that a run compares with another (pi, pi_old, the reference) and in the
entropy (DeepSeek-V3.2's "keep sampling mask", arXiv 2512.02556).

Shapes are static, so a support has a maximal size, which the engine observes: top_k, or with top_p alone the
whole vocabulary if it is small, else LIKELIEST. Tokens that tie with the last one can be drawn too, and a
support has room for a few of them. A token with more ties has an unknown support; it is not learned from and
is counted in `support/unknown`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bridges.api import Capabilities, Completion
from jaxfp8rl.config.sampling import Rollout
from jaxfp8rl.config.schema import Config
from jaxfp8rl.environments.trajectory import sampled_of
from jaxfp8rl.errors import ConfigError

WHOLE = 1024  # largest vocabulary of which a nucleus (top_p) may hold all tokens
LIKELIEST = 128  # maximal size of a nucleus, in tokens, of a larger vocabulary


def is_filtered(r: Rollout) -> bool:
    return r.top_k > 0 or r.top_p < 1


def bound(r: Rollout, vocab_size: int) -> int:
    """The maximal number of tokens in a support, without ties; 0 if sampling is not filtered."""
    if not is_filtered(r):
        return 0
    return min(r.top_k or (vocab_size if vocab_size <= WHOLE else LIKELIEST), vocab_size)


def width(r: Rollout, vocab_size: int) -> int:
    """The width of a batch's supports, in tokens: `bound` with room for ties."""
    most = bound(r, vocab_size)
    return min(most + max(8, most // 4), vocab_size) if most else 0


def note(r: Rollout, vocab_size: int) -> str | None:
    """The start-up message about filtered sampling; None if sampling is not filtered."""
    if not is_filtered(r):
        return None
    filters = [f"rollout.top_p = {r.top_p:g}"] * (r.top_p < 1)
    filters += [f"rollout.top_k = {r.top_k}"] * (r.top_k > 0)
    limit = f" (at most the {LIKELIEST} likeliest tokens; rollout.top_k changes this limit)"
    return (
        f"{' and '.join(filters)}: engine and learner normalise over the support of each token"
        f"{'' if r.top_k or vocab_size <= WHOLE else limit}; "
        "log-probabilities are computed by XLA, not by the kernel")


def check_engine(cfg: Config, capabilities: Capabilities) -> None:
    """Raise ConfigError if the run filters and the engine does not report supports."""
    if is_filtered(cfg.rollout) and not capabilities.support:
        raise ConfigError(
            f"rollout.top_p, rollout.top_k: {capabilities.engine} {capabilities.engine_version} "
            "does not report the support of each token, over which the learner has to normalise",
            "set rollout.top_p = 1 and rollout.top_k = 0",
        )


def problem(completion: Completion, most: int) -> str | None:
    """Why the learner cannot normalise over the supports of a completion, or None."""
    if completion.support_sizes is None:
        return "no support of its tokens"
    largest = int(completion.support_sizes.max())
    return f"a support of {largest} tokens, but at most {most} were requested" if largest > most else None


def metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """support/tokens_mean, the mean size of the known supports, and support/unknown, the share of tokens
    whose support is unknown; {} without filters."""
    known = [c.support_sizes[sampled_of(c)] for c in completions if c.support_sizes is not None]
    if len(known) < len(completions):
        return {}
    sizes = np.concatenate(known)
    return {"support/tokens_mean": float(sizes.sum() / max((sizes > 0).sum(), 1)),
            "support/unknown": float((sizes == 0).mean())}
