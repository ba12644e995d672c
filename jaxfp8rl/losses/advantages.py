"""Advantages from rewards, on the host. The baseline of a completion comes from the other completions of its
prompt, or of the whole batch.

A reward of NaN is undefined: its completion gets advantage 0 and is excluded from every statistic. The only
completion of a group has no baseline and gets advantage 0 (verl keeps its raw reward).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool, Float32, Float64, Real

from jaxfp8rl.errors import ConfigError, DataError, nearest

STD_FLOOR = 1e-6  # rewards spread no wider than this are equal; also the epsilon where a formula has one


def advantages(
    groups: Sequence[Real[np.ndarray, " _"]], kind: str = "grpo", k: int | None = None
) -> list[Float32[np.ndarray, " _"]]:
    """Rewards [n_g] of each group (one group per prompt, of any sizes) -> advantages float32 of the same
    shapes.

    Pass the whole batch at once: the reinforce_pp kinds are normalised over it. With a group's mean, standard
    deviation and size n over its defined rewards r:

    - grpo: (r - mean) / std, population std (DeepSeekMath, arXiv 2402.03300, section 4.1)
    - grpo_sample_std: (r - mean) / (std + 1e-6), sample std (verl's GRPO)
    - dr_grpo: r - mean (Dr. GRPO, arXiv 2503.20783, section 3)
    - rloo: r - mean of the others, which is (r - mean) n / (n - 1) (arXiv 2402.14740)
    - leave_one_out: rloo / (sample std of the others + 1e-6), not divided where the others are equal (NeMo
      RL's GRPO)
    - reinforce_pp: (r - m) / sqrt(v + 1e-8), m and v the batch's mean and sample variance (REINFORCE++, arXiv
      2501.03262; here over completions, in verl over tokens, where a long completion counts more)
    - reinforce_pp_baseline: (r - mean) / sqrt(v + 1e-8), v the batch's sample variance of r - mean (same
      paper; verl also subtracts the tokens' mean here, which is not 0 if completions differ in length)
    - none: 0; rewards are measured, and another term of the loss teaches
    - pass_at_k: for the chance that one of k completions is right; rewards 0 or 1 (Pass@k Training, arXiv
      2508.10751)

    A group whose rewards are all equal gets exactly 0 from all kinds but reinforce_pp. Raises ConfigError for
    an unknown kind and for a k that is missing, too large or not needed; DataError for an infinite reward,
    and with pass_at_k for a reward that is neither 0 nor 1.
    """
    check_advantage(kind, k)
    if k is not None and groups and k > (largest := max(map(len, groups))):
        raise ConfigError(f"k = {k} is impossible for groups of at most {largest}",
                          f"choose k from 1 to {largest}")
    rewards = [np.asarray(g, np.float64) for g in groups]
    defined = [r[~np.isnan(r)] for r in rewards]
    for i, r in enumerate(defined):
        if np.isinf(r).any():
            raise DataError(f"group {i} has an infinite reward: {r.tolist()}",
                            "score with a finite number, or with none")
    if kind in _OVER_BATCH:
        values = _OVER_BATCH[kind](defined)
    elif k is not None:  # pass_at_k, which alone has one
        values = [_pass_at_k(r, k) for r in defined]
    else:
        values = [_OVER_GROUP[kind](r) if _informative(r) else np.zeros_like(r) for r in defined]
    return [_put_back(r, v) for r, v in zip(rewards, values)]


def check_advantage(kind: str, k: int | None = None, n: int | None = None) -> None:
    """Raise ConfigError unless `advantages` accepts this kind and k. With n completions per prompt (None if
    unknown), k must be below n: all n form a single set, which cannot be compared with another."""
    if kind not in ADVANTAGES:
        raise ConfigError(f'advantage "{kind}" is unknown{nearest(kind, ADVANTAGES)}',
                          "docs/objectives.md lists them")
    if kind != "pass_at_k":
        if k is not None:
            raise ConfigError(f'k = {k} has no effect on the advantage "{kind}"',
                              'leave it out, or choose "pass_at_k"')
    elif k is None or k < 1 or (n is not None and k >= max(n, 2)):
        of = ("one less than the completions a prompt" if n is None
              else f"{max(n - 1, 1)}, below the {n} completions a prompt")
        raise ConfigError(f'k = {k} is impossible for the advantage "pass_at_k"', f"choose k from 1 to {of}")


def informative_groups(groups: Sequence[Real[np.ndarray, " _"]]) -> Bool[np.ndarray, " G"]:
    """bool [G]: the groups whose defined rewards differ. The others give no gradient, and DAPO's dynamic
    sampling (arXiv 2503.14476, section 3.2) replaces them."""
    rewards = [np.asarray(g, np.float64) for g in groups]
    return np.array([_informative(r[~np.isnan(r)]) for r in rewards], bool)


def overlong_penalty(
    lengths: Real[np.ndarray, "*B"], max_length: int, buffer: int, factor: float = 1.0
) -> Float64[np.ndarray, "*B"]:
    """Completion lengths [...] in tokens -> the penalties to add to their rewards, float64 in [-factor, 0].

    DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13): 0 up to max_length - buffer, then linear to
    -factor at max_length, and -factor beyond. Raises ConfigError unless 0 < buffer <= max_length and factor
    >= 0.
    """
    if not 0 < buffer <= max_length or not (math.isfinite(factor) and factor >= 0):
        raise ConfigError(
            f"overlong penalty with max_length = {max_length}, buffer = {buffer}, factor = {factor}",
            "choose 0 < buffer <= max_length and factor >= 0; DAPO: 20480, 4096, 1",
        )
    over = np.asarray(lengths, np.float64) - (max_length - buffer)
    return -factor * np.clip(over / buffer, 0.0, 1.0)


def _informative(r: np.ndarray) -> bool:
    return len(r) > 1 and bool(r.std() > STD_FLOOR)


def _put_back(rewards: np.ndarray, values: np.ndarray) -> np.ndarray:
    out = np.zeros(rewards.shape, np.float32)
    out[~np.isnan(rewards)] = values
    return out


def _centred(r: np.ndarray) -> np.ndarray:
    return r - r.mean()


def _rloo(r: np.ndarray) -> np.ndarray:
    return _centred(r) * len(r) / (len(r) - 1)


def _leave_one_out(r: np.ndarray) -> np.ndarray:
    spread = np.array([np.delete(r, i).std(ddof=1) if len(r) > 2 else 0.0 for i in range(len(r))])
    return _rloo(r) / np.where(spread > STD_FLOOR, spread + STD_FLOOR, 1.0)


def _pass_at_k(r: np.ndarray, k: int) -> np.ndarray:
    """The mean GRPO advantage over all sets of k completions that contain a completion, where a set's reward
    is its best one.

    Of n completions w are wrong. A set succeeds with p = 1 - C(w, k)/C(n, k); its reward has mean p and std
    sqrt(p (1 - p)). A right completion is only in sets that succeed: (1 - p)/std. A wrong one is in a failing
    set with q = C(w-1, k-1)/C(n-1, k-1): (1 - p - q)/std. The sum over the group is 0, and k = 1 gives grpo.
    With fewer than k defined rewards there is no set, and with exactly k there is only one, which cannot be
    compared: 0.
    """
    if not np.isin(r, (0, 1)).all():
        raise DataError(
            f"pass_at_k needs rewards of 0 and 1, got {r.tolist()}",
            'score with 0 and 1 (no penalties or partial credit), or choose another '
            'advantage, such as "grpo"',
        )
    n, wrong = len(r), int((r == 0).sum())
    if n < k:
        return np.zeros_like(r)
    p = 1 - math.comb(wrong, k) / math.comb(n, k)
    std = math.sqrt(p * (1 - p))
    if std <= STD_FLOOR:
        return np.zeros_like(r)
    q = math.comb(wrong - 1, k - 1) / math.comb(n - 1, k - 1)
    return np.where(r == 1, 1 - p, 1 - p - q) / std


def _over_batch_std(x: list[np.ndarray]) -> list[np.ndarray]:
    flat = np.concatenate([np.zeros(0), *x])
    std = math.sqrt((flat.var(ddof=1) if len(flat) > 1 else 0.0) + 1e-8)
    return [v / std for v in x]


def _reinforce_pp(groups: list[np.ndarray]) -> list[np.ndarray]:
    flat = np.concatenate([np.zeros(0), *groups])
    mean = flat.mean() if len(flat) else 0.0
    return _over_batch_std([r - mean for r in groups])


def _reinforce_pp_baseline(groups: list[np.ndarray]) -> list[np.ndarray]:
    """The batch's mean of r - mean is 0, so nothing more is subtracted, and equal rewards stay exactly 0."""
    return _over_batch_std([_centred(r) if _informative(r) else np.zeros_like(r) for r in groups])


# Functions of a group's defined rewards, which differ.
_OVER_GROUP: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "grpo": lambda r: _centred(r) / r.std(),
    "grpo_sample_std": lambda r: _centred(r) / (r.std(ddof=1) + STD_FLOOR),
    "dr_grpo": _centred,
    "rloo": _rloo,
    "leave_one_out": _leave_one_out,
    "none": np.zeros_like,
}
_OVER_BATCH: dict[str, Callable[[list[np.ndarray]], list[np.ndarray]]] = {
    "reinforce_pp": _reinforce_pp,
    "reinforce_pp_baseline": _reinforce_pp_baseline,
}
ADVANTAGES = (*_OVER_GROUP, *_OVER_BATCH, "pass_at_k")
