"""Sampling among the likeliest tokens alone (rollout.top_k, rollout.top_p): both sides normalise over the
same ones.

Engine and learner differ by rounding, and by age, so that each would filter in its own way. The engine
therefore reports of every token the support that it was drawn among, and the learner's softmax is over these
tokens, in every log-probability that a run compares with another: pi, pi_old, the reference's, and the
entropy (DeepSeek-V3.2's "keep sampling mask", arXiv 2512.02556).

Shapes are static, so a support has a bound, to which the engine keeps: top_k; of a nucleus alone the whole
vocabulary, if that is small, else the LIKELIEST. Tokens that tie with the last one are drawn, too, and there
is room for some. A token with more of them is not learned from, and is counted (`support/unknown`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bridges.api import Capabilities, Completion
from jaxfp8rl.config.sampling import Rollout
from jaxfp8rl.config.schema import Config
from jaxfp8rl.errors import ConfigError

WHOLE = 1024  # words that a nucleus may be of
LIKELIEST = 128  # words of more that it may be of


def is_filtered(r: Rollout) -> bool:
    return r.top_k > 0 or r.top_p < 1


def bound(r: Rollout, vocab_size: int) -> int:
    """Tokens that a draw may be among, but for ties; 0 where nothing is filtered."""
    if not is_filtered(r):
        return 0
    return min(r.top_k or (vocab_size if vocab_size <= WHOLE else LIKELIEST), vocab_size)


def width(r: Rollout, vocab_size: int) -> int:
    """Tokens of a support that there is room for."""
    most = bound(r, vocab_size)
    return min(most + max(8, most // 4), vocab_size) if most else 0


def note(r: Rollout, vocab_size: int) -> str | None:
    """What a run says of it when it starts."""
    if not is_filtered(r):
        return None
    given = [f"rollout.top_p = {r.top_p:g}"] * (r.top_p < 1) + [f"rollout.top_k = {r.top_k}"] * (r.top_k > 0)
    cut = "" if r.top_k or vocab_size <= WHOLE else f" (the {LIKELIEST} likeliest at most: rollout.top_k sets another bound)"
    return (
        f"{' and '.join(given)}: engine and learner normalise over the tokens that each was drawn among{cut}; "
        "log-probabilities are computed by XLA, not by the kernel")


def check_engine(cfg: Config, capabilities: Capabilities) -> None:
    """Raises ConfigError where an engine that filters does not say what it left."""
    if is_filtered(cfg.rollout) and not capabilities.support:
        raise ConfigError(
            f"rollout.top_p, rollout.top_k: engine {capabilities.engine} {capabilities.engine_version} does not report the "
            "tokens that each was drawn among, over which the learner has to normalise",
            "set rollout.top_p = 1 and rollout.top_k = 0",
        )


def problem(completion: Completion, most: int) -> str | None:
    """What makes the supports of a completion unfit to be normalised over, or None."""
    if completion.support_sizes is None:
        return "no support of its tokens"
    largest = int(completion.support_sizes.max())
    return f"a support of {largest} tokens where {most} were asked for" if largest > most else None


def metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """support/tokens_mean, of those that are known, and support/unknown, the share that is not; none without
    filters."""
    known = [c.support_sizes for c in completions if c.support_sizes is not None]
    if len(known) < len(completions):
        return {}
    sizes = np.concatenate(known)
    return {"support/tokens_mean": float(sizes.sum() / max((sizes > 0).sum(), 1)),
            "support/unknown": float((sizes == 0).mean())}
